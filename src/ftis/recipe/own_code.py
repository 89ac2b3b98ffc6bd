"""Errors in the parts of a recipe that are a user's own: where they happened, and what to do."""

from __future__ import annotations

import os
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import ftis
from ftis.config import FtisError, RecipeError

PACKAGE = Path(ftis.__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def error_of_own_code(error: BaseException) -> str | None:
    """An error in a user's own function, in words with its place and remedy; None for any other.

    An FtisError names its place and remedy itself, so it gives None too.
    """
    called = False
    place = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            called = True
        elif called and path.is_file() and not any(path.is_relative_to(library) for library in LIBRARIES):
            place = frame
    if place is None or isinstance(error, FtisError):
        return None
    return (
        f"{place.filename}, line {place.lineno}, in {place.name}: {type(error).__name__}: {error}; mend it there, then "
        f"start the same command again, ftis train and join with --resume"
    )


@contextmanager
def staying() -> Iterator[None]:
    """A context in which a user's own code cannot end this process by ``sys.exit`` or ``os._exit``.

    Raises:
        RecipeError: the code called one of the two.
    """
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def refuse(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != (process, thread):  # in a child process, or another thread
            leave(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    except (SystemExit, FtisError) as error:
        ended = error.__cause__ if isinstance(error, FtisError) else error
        if not isinstance(ended, SystemExit):
            raise
        frames = traceback.extract_tb(ended.__traceback__)
        place = next(frame for frame in reversed(frames) if frame.filename != __file__)
        raise RecipeError(
            f"{place.filename}, line {place.lineno}, in {place.name}: ends the program, with status {ended.code!r}: "
            f"let it return or raise an error there"
        ) from ended
    finally:
        os._exit = leave

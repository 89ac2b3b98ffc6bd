"""Errors in the parts of a recipe that are a user's own: where they happened, and what to do."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import ftis
from ftis.config import FtisError

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

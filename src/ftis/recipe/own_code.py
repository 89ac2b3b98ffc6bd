"""The parts of a recipe that are a user's own: their names in it, and where their errors happened."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import ftis
from ftis.config import FtisError, RecipeError
from ftis.seams import GIVEN

PACKAGE = Path(ftis.__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

WRAPPERS = (property, staticmethod, classmethod, partial, cached_property, type(cache(len)))
WRAPPED = ("__wrapped__", "fget", "fset", "fdel", "func", "args", "keywords")
"""The attributes with the contents of wrappers. A wrapper's text holds an address, which differs between processes."""


def give(thing: Any) -> str:
    """The name of an object in a recipe: its dotted path, or a name that holds in this process.

    The latter ends in a digest of a function's or a class's code. So changed code has another name, and cannot resume
    a run. Any other object goes by its identity.
    """
    if path := _path(thing):
        return path
    name = getattr(thing, "__qualname__", type(thing).__name__)
    word = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "it"
    made = f"given.{word}_{hashlib.sha256(_spelled(thing, []).encode()).hexdigest()[:8]}"
    GIVEN[made] = thing
    return made


def _path(thing: Any) -> str | None:
    """The dotted path of an object that a module holds under its own name; None of any other."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", type(thing).__name__)
    known = module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is thing
    return f"{module}.{name}" if known else None


def _spelled(thing: Any, seen: list[Any]) -> str:
    """All that a function depends on except globals.

    Args:
        seen: objects that were begun before, since a method with ``super()`` holds its class.
    """

    def each(parts: Iterable[Any]) -> list[str]:
        return [_spelled(part, seen) for part in parts]

    if isinstance(thing, frozenset):  # its order differs between processes
        return str(sorted(each(thing)))
    if isinstance(thing, tuple):
        return str(each(thing))
    if isinstance(thing, CodeType):
        return f"{thing.co_code.hex()} {thing.co_names} {each(thing.co_consts)}"
    if isinstance(thing, WRAPPERS):
        return f"{type(thing)} {each(getattr(thing, name, None) for name in WRAPPED)}"
    if isinstance(thing, (FunctionType, type, list, dict)):
        if number := next((n for n, one in enumerate(seen, 1) if one is thing), 0):
            return f"number {number}"
        seen.append(thing)
    if isinstance(thing, list):
        return str(each(thing))
    if isinstance(thing, dict):
        return str(each(thing.items()))
    if isinstance(thing, FunctionType):
        held = [cell.cell_contents for cell in thing.__closure__ or ()]
        return str(each((thing.__code__, *held, thing.__defaults__, thing.__kwdefaults__)))
    if isinstance(thing, type):
        own = {name: part for name, part in vars(thing).items() if name == "__init__" or not name.startswith("__")}
        return f"{thing.__mro__[1:]} {_spelled(own, seen)}"
    return _path(thing) or f"{thing!r} {id(thing)}" if callable(thing) else repr(thing)


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
        f"start the same command again, ftis train and join with a bare --resume"
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

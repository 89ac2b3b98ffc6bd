"""Processes that work for a program, and do not run it again if it would train there too."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def start(process: BaseProcess) -> None:
    """Start a process whose function and arguments are of importable modules.

    Python runs the caller's script in it first, under another name. A script that trains and has no ``if __name__ ==
    "__main__":`` would train there too, so the new process never learns its path. A script with that check
    runs there as usual, since it may register models.
    """
    with _ONE_AT_A_TIME, without_ctrl_c(), _without_script_path() if _has_no_guard() else nullcontext():
        process.start()


_GUARD = re.compile(r"__name__\s*[!=]=|[!=]=\s*__name__|__mp_main__")
"""A script's check whether it was started itself; ``logging.getLogger(__name__)`` is no such check."""


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """A context in which this thread starts processes that Ctrl-C does not end: this program hears of it afterwards.

    So does the server that processes are forked from, which imports torch for seconds when it starts.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its own start would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_no_guard() -> bool:
    script = sys.modules["__main__"]
    if getattr(script, "__spec__", None) is not None:  # run as a module
        return False
    try:
        return _GUARD.search(Path(script.__file__ or "").read_text(encoding="utf-8")) is None
    except OSError:  # from standard input: it cannot be run again
        return True
    except (AttributeError, ValueError):  # a notebook, or no text
        return False


@contextmanager
def _without_script_path() -> Iterator[None]:
    """A context in which processes are started without the place of the caller's script."""
    usual = spawn.get_preparation_data

    def without_script(name: str) -> dict[str, Any]:
        data = usual(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = without_script
    try:
        yield
    finally:
        spawn.get_preparation_data = usual

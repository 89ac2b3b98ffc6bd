"""Processes that work for a program and do not run it again."""

from __future__ import annotations

import sys
import threading
from multiprocessing.process import BaseProcess
from types import ModuleType

_ONE_AT_A_TIME = threading.Lock()


def start(process: BaseProcess) -> None:
    """Start a process whose function and arguments are of importable modules.

    Python would run the caller's script in it first, under another name. A script that trains and has no ``if __name__
    == "__main__":`` would train there too. So the new process is not told of the script.
    """
    with _ONE_AT_A_TIME:
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = script

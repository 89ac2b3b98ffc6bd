"""Jobs for other processes. This module loads in a moment, and each process that runs one of them loads it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from memory import goes_back_to_the_system

from ftis.experiment.workers import Stop
from ftis.records.events import PeerFinished, PeerStarted, PeerStopped, Say

MARK = 0
"""Set by a script that is run again in each process."""


def count(number: int, say: Say, stop: Stop) -> None:
    for step in range(number):
        say(PeerStarted(step))


def wait_for_stop(touched: Path, say: Say, stop: Stop) -> None:
    """Says that it runs, and that it was asked to stop."""
    touched.touch()
    say(PeerStarted(os.getpid()))
    while not stop.is_set():
        threading.Event().wait(0.01)
    say(PeerStopped(os.getpid()))


def fail(error: BaseException, wait_for: Path, say: Say, stop: Stop) -> None:
    while not wait_for.exists():
        threading.Event().wait(0.01)
    raise error


def free_a_block(say: Say, stop: Stop) -> None:
    say(PeerFinished(goes_back_to_the_system()))


def never_stop(touched: Path, say: Say, stop: Stop) -> None:
    say(PeerStarted(os.getpid()))
    stop_seen = False
    while True:
        threading.Event().wait(0.01)
        if stop.is_set() and not stop_seen:
            stop_seen = True
            say(PeerStopped(os.getpid()))


def wait_for_file(touched: Path, say: Say, stop: Stop) -> None:
    say(PeerStarted(os.getpid()))
    while not touched.exists():
        threading.Event().wait(0.01)


def tell_mark(say: Say, stop: Stop) -> None:
    say(PeerStarted(MARK))

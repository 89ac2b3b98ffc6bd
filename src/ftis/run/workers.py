"""Jobs in processes of their own, a few at a time: what they say is passed on, and none outlives its parent.

A job is a function of a module with arguments that can be pickled, called as ``function(*arguments, say, stop)``. It
looks at ``stop`` now and then and returns when that is set; it tells what happens as :mod:`ftis.records.events`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from ftis.config import FtisError
from ftis.engines.launch import start
from ftis.recipe.arms import RunError
from ftis.recipe.own_code import told_as_own
from ftis.records.events import AskedToStop, Event, Failed, Say

POLL_SECONDS = 0.2
PRELOADED = "ftis.run.experiments"
"""Imported once in the server that the processes are forked from, and torch with it, instead of once per process."""


class Stop(Protocol):
    """An event of threading or multiprocessing: asks the peers to stop after the rounds they are in."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One call in a process of its own.

    Attributes:
        label: what messages call it.
    """

    label: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Worker:
    """A process that runs a job, and this end of the pipe to it: events come in, the request to stop goes out."""

    job: Job
    process: BaseProcess
    pipe: Connection


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has been pressed meanwhile; the second Ctrl-C raises KeyboardInterrupt.

    Only on the main thread and where Ctrl-C would have raised it anyway: a command in the background ignores it.
    """
    pressed = False

    def press(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stopping_on_signals(stop: Stop, say: Say) -> Iterator[None]:
    """SIGTERM, and Ctrl-C unless it is ignored, set ``stop``; the second signal raises KeyboardInterrupt."""

    def ask(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        say(AskedToStop())

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_if(interrupted: Callable[[], bool], say: Say, stop: Stop) -> None:
    """Set ``stop``, and say so, once :func:`interrupts` tells of a Ctrl-C."""
    if interrupted() and not stop.is_set():
        say(AskedToStop())
        stop.set()


def run_jobs(jobs: Sequence[Job], at_a_time: int, say: Say, stop: Stop, remedy: str) -> None:
    """Run all jobs, ``at_a_time`` at a time, and return when none runs any more.

    Ctrl-C, or ``stop`` set by somebody else, asks the running jobs to stop and starts no more; a second Ctrl-C kills
    them. A job that fails stops the others in the same way.

    Args:
        stop: set by the first Ctrl-C.
        remedy: what to do about a process that died; the end of the message.

    Raises:
        RunError: a job failed or its process died.
    """
    if not jobs:
        return
    context = _context()
    waiting, running = deque(jobs), list[Worker]()
    failure: str | None = None
    asked = False
    with interrupts() as interrupted:
        try:
            while running or (waiting and not asked):
                stop_if(interrupted, say, stop)
                if not asked and (failure or stop.is_set()):
                    asked = True
                    for worker in running:
                        _ask_to_stop(worker)
                while waiting and len(running) < at_a_time and not asked:
                    running.append(_start(context, waiting.popleft()))
                wait([handle for w in running for handle in (w.pipe, w.process.sentinel)], POLL_SECONDS)
                for worker in list(running):
                    ended = not worker.process.is_alive()  # asked first: the pipe then holds all that will ever come
                    for event in _heard(worker.pipe):
                        if isinstance(event, Failed):
                            failure = failure or event.message
                        else:
                            say(event)
                    if ended:
                        running.remove(worker)
                        worker.pipe.close()
                        code = worker.process.exitcode
                        if code:
                            died = f"the process of {worker.job.label} died (exit code {code})"
                            failure = failure or f"{died}: see whether memory ran out, then {remedy}"
        finally:
            for worker in running:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()
        stop_if(interrupted, say, stop)  # pressed while the last job ended: the caller has more to do
    if failure:
        raise RunError(failure)


def _context() -> Any:
    """Processes forked from a server that has loaded the package; new ones where the system cannot fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def _start(context: Any, job: Job) -> Worker:
    pipe, far_end = context.Pipe()
    process = context.Process(target=_work, args=(job, far_end), name=job.label)
    start(process)
    far_end.close()  # the process has its own
    return Worker(job, process, pipe)


def _ask_to_stop(worker: Worker) -> None:
    with suppress(OSError):  # it has ended
        worker.pipe.send("stop")


def _heard(pipe: Connection) -> Iterator[Event]:
    """What has come through the pipe. A message that a kill cut short is dropped."""
    try:
        while pipe.poll():
            yield pipe.recv()
    except (EOFError, OSError):
        return


def _work(job: Job, parent: Connection) -> None:
    """The body of a job's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    stop, one_at_a_time = threading.Event(), threading.Lock()
    threading.Thread(target=_listen, args=(parent, stop), daemon=True).start()

    def say(event: Event) -> None:
        with one_at_a_time:
            parent.send(event)

    failure = None
    try:
        job.function(*job.arguments, say, stop)
    except FtisError as error:
        failure = str(error)
    except Exception as error:
        if own := told_as_own(error):
            failure = f"{job.label}: {own}"
        elif isinstance(error, OSError):
            failure = f"{job.label}: {error}; mend it, then start the same command again"
        else:
            failure = f"{job.label} met a bug:\n{traceback.format_exc()}"
    if failure is not None:
        with suppress(OSError):  # the parent is gone
            say(Failed(failure))


def _listen(parent: Connection, stop: threading.Event) -> None:
    """Set ``stop`` when the parent asks for it; end this process with the parent."""
    try:
        while True:
            parent.recv()
            stop.set()
    except (EOFError, OSError):
        os._exit(1)

"""Jobs in processes of their own, a few at a time: their events come here, and none outlives its parent.

A job is a function of a module with arguments that can be pickled, called as ``function(*arguments, say, stop)``. It
looks at ``stop`` now and then, returns once ``stop`` is set, and reports events of :mod:`ftis.records.events`. A job
that asks is called with ``ask`` as well: a function that puts a question to the parent and waits for the answer.
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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from ftis.config import FtisError, RunError
from ftis.machine.resources import keep_freed_memory, memory_ran_out, name_places_of_crashes
from ftis.recipe.own_code import error_of_own_code
from ftis.records.events import AskedToStop, Failed, Say

if TYPE_CHECKING:
    from ftis.run.together import Turns

POLL_SECONDS = 0.2
PRELOADED = "ftis.experiment.seeds"
"""Imported once in the server that the processes are forked from, and torch with it, instead of once per process."""


class Stop(Protocol):
    """An event of threading or multiprocessing: asks the peers to stop after the rounds they are in."""

    def is_set(self) -> bool: ...

    def set(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One call in a process of its own."""

    label: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    asks: bool = False


@dataclass(frozen=True)
class Worker:
    """A process that runs a job, and this end of the pipe to it: events come in, the request to stop goes out."""

    job: Job
    process: BaseProcess
    pipe: Connection


@dataclass(frozen=True)
class Asked:
    """A question of a job to its parent."""

    question: Any


@dataclass(frozen=True)
class Answered:
    """The parent's answer to the question that a job asked last."""

    answer: Any


@dataclass(frozen=True)
class Returned:
    """The last word of a job that did not fail."""


STOP = "stop"


@contextmanager
def interrupts(say: Say, stop: Stop) -> Iterator[None]:
    """Let Ctrl-C or SIGTERM set ``stop`` and report it; the second one raises KeyboardInterrupt.

    Other threads get no such handling. A signal that is ignored stays ignored, as Ctrl-C is by a command in the
    background. The surrounding program keeps the signals that it handles.
    """

    def ask(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # output without a reader raises it: no second signal
        try:
            say(AskedToStop())
        finally:
            signal.signal(signal.SIGTERM, handler)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {
        number: signal.signal(number, ask) for number, is_usual in usual.items() if signal.getsignal(number) is is_usual
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_jobs(
    jobs: Sequence[Job], at_a_time: int, say: Say, stop: Stop, remedy: str, turns: Turns | None = None
) -> None:
    """Run all jobs, ``at_a_time`` at a time, and return when none runs any more.

    Ctrl-C, or ``stop`` set by somebody else, asks the running jobs to stop and starts no more; a second Ctrl-C kills
    them. A job that fails stops the others in the same way.

    Args:
        stop: set by the first Ctrl-C.
        remedy: of a process that died; the end of the message.
        turns: answers the questions of jobs that ask.

    Raises:
        RunError: a job failed or its process died.
    """
    if not jobs:
        return
    context, waiting, running, done = _context(), deque(jobs), dict[str, Worker](), set[str]()
    failure: str | None = None
    asked = False
    with interrupts(say, stop):
        try:
            while running or (waiting and not asked):
                if not asked and (failure or stop.is_set()):
                    asked = True
                    for worker in running.values():
                        _send(worker, STOP)
                while waiting and len(running) < at_a_time and not asked:
                    worker = _start(context, waiting.popleft())
                    running[worker.job.label] = worker
                wait([handle for w in running.values() for handle in (w.pipe, w.process.sentinel)], POLL_SECONDS)
                for label, worker in list(running.items()):
                    ended = not worker.process.is_alive()  # before reading: then the pipe holds all that will ever come
                    for message in _heard(worker.pipe):
                        if isinstance(message, Asked) and turns:
                            turns.asks(label, message.question)
                        elif isinstance(message, Failed):
                            failure = failure or message.message
                        elif isinstance(message, Returned):
                            done.add(label)
                        else:
                            say(message)
                    if ended:
                        del running[label]
                        worker.pipe.close()
                        if turns:
                            turns.left(label)
                        if label not in done:
                            failure = failure or (
                                f"the process of {label} died (exit code {worker.process.exitcode}): see whether "
                                f"memory ran out, whether a function of yours ends its process, and whether a script "
                                f'of yours trains outside if __name__ == "__main__":, then {remedy}'
                            )
                while turns and (replies := turns.next()):
                    for label, reply in replies:
                        if label in running:
                            _send(running[label], Answered(reply))
                        else:
                            turns.left(label)
        finally:
            for worker in running.values():
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()
    if failure:
        raise RunError(failure)


def _context() -> Any:
    """Processes forked from a server that has loaded the package; new ones where the system cannot fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


@contextmanager
def without_signals() -> Iterator[None]:
    """A context that holds Ctrl-C and SIGTERM back from this thread, and from processes that it starts.

    This program receives both at its end. The server that processes are forked from starts in the context too: it
    imports torch for seconds, in which a signal would end it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # its own start would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(context: Any, job: Job) -> Worker:
    pipe, far_end = context.Pipe()
    process = context.Process(target=_work, args=(job, far_end), name=job.label)
    with without_signals():
        process.start()
    far_end.close()  # the process has its own
    return Worker(job, process, pipe)


def _send(worker: Worker, message: object) -> None:
    with suppress(OSError):  # the worker has ended
        worker.pipe.send(message)


def _heard(pipe: Connection) -> Iterator[Any]:
    """Read the messages in the pipe. A message that a kill cut short is dropped."""
    try:
        while pipe.poll():
            yield pipe.recv()
    except (EOFError, OSError):
        return


class Parent:
    """A job's view of the process that started it, which may ask the job to ``stop``."""

    def __init__(self, pipe: Connection) -> None:
        self.stop = threading.Event()
        self._pipe, self._one_at_a_time = pipe, threading.Lock()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, question: Any) -> Any:
        """Ask, and wait for the answer."""
        self.say(Asked(question))
        return self._answers.get()

    def say(self, message: object) -> None:
        """Report an event, or another message."""
        with self._one_at_a_time:
            self._pipe.send(message)

    def _listen(self) -> None:
        """Receive the parent's messages; end this process with the parent."""
        try:
            while True:
                message = self._pipe.recv()
                if isinstance(message, Answered):
                    self._answers.put(message.answer)
                else:
                    self.stop.set()
        except (EOFError, OSError):
            os._exit(1)


def _work(job: Job, pipe: Connection) -> None:
    """The body of a job's process."""
    # Both may reach the whole group; the parent decides. A process started from here does end at SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    keep_freed_memory()
    name_places_of_crashes()
    parent, failure = Parent(pipe), None
    try:
        job.function(*job.arguments, parent.say, parent.stop, *[parent.ask] * job.asks)
    except FtisError as error:
        failure = str(error)
    except Exception as error:
        if own := error_of_own_code(error):
            failure = f"{job.label}: {own}"
        elif memory := memory_ran_out(error):
            failure = f"{job.label}: {memory}"
        elif isinstance(error, OSError):
            failure = f"{job.label}: {error}; mend it, then start the same command again"
        else:
            failure = f"{job.label} met a bug:\n{traceback.format_exc()}"
    with suppress(OSError):  # the parent is gone
        parent.say(Returned() if failure is None else Failed(failure))

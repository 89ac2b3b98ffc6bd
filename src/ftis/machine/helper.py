"""A process with limits for libraries that judge the texts of others and were not made for hostile input.

A short text can make computer algebra run for years (``10^{10^{10}}``). The helper has a limit on memory and one on
processor time. A request that exceeds a limit ends the helper, and the next request starts another. An alarm signal in
this process would not do: it needs the main thread, and worker threads compute rewards too. Nor would a pool of
:mod:`multiprocessing`: its workers run the user's script again.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import IO, Any

from ftis.machine.resources import peak_bytes

CPU_SECONDS = 3.0
"""Limit on one request. It is processor time, so that a busy machine changes no reward."""
CPU_SIGNAL = getattr(signal, "SIGPROF", 0)
"""The signal that ends the helper at that limit; 0 on systems without it."""
WALL_SECONDS = 30.0
"""Limit on one request by the clock, for code that waits instead of computing."""
START_SECONDS = 120.0
"""Limit on the helper's start."""
MEMORY_BYTES = 2 << 30
SENT_AHEAD = 2**12
"""The most bytes of several requests that are sent before the first is answered: as many as any system's pipe holds."""

Judge = Callable[[dict[str, Any]], Any]
"""A request → a verdict; both survive JSON."""


class RetireError(Exception):
    """A judge raises it with its verdict if its process shall judge no more."""


class Helper:
    """The process that judges: ``module``, which calls :func:`serve`, with ``arguments`` of its own.

    The first request starts it; a failure kills and replaces it. ``does`` and ``needs`` are the process's work and
    the package that it needs, for errors.
    """

    def __init__(self, module: str, does: str, needs: str, arguments: Sequence[str] = ()) -> None:
        self.module, self.does, self.needs, self.arguments = module, does, needs, arguments
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.leave_to_parent)

    def ask(self, request: dict[str, Any]) -> Any:
        """The verdict on one request; None if a limit stopped it."""
        return self.ask_all([request])[0]

    def ask_all(self, requests: Sequence[dict[str, Any]]) -> list[Any]:
        """The verdicts on requests, up to the first None. Threads wait for each other.

        Some are sent ahead: waking a process for each takes longer than a short answer. A RunError if the process
        cannot be started.
        """
        lines, verdicts, ended = [json.dumps(request).encode() + b"\n" for request in requests], list[Any](), 0
        with self._lock, contextlib.ExitStack() as interrupted:
            interrupted.callback(self._stop)  # later requests would read the verdicts of unanswered ones
            while len(verdicts) < len(lines):
                process = self._running()
                waiting = lines[len(verdicts) :]
                fitting = bisect_right(list(accumulate(map(len, waiting))), SENT_AHEAD)
                together = waiting[: max(1, fitting)]  # no write of several may wait for a helper that hangs
                with contextlib.suppress(OSError):  # it has ended, and may have answered some before
                    write_all(process.stdin, b"".join(together))
                for _ in together:
                    reply, overdue = self._read_line(process, WALL_SECONDS)
                    if not reply.endswith(b"\n"):
                        ended += 1  # another cause may have ended an idle helper: try once more
                        if self._stop() == -CPU_SIGNAL or overdue or ended == 2:
                            return [*verdicts, None]
                        break
                    answered, ended = json.loads(reply), 0
                    verdicts.append(answered["verdict"])
                    if answered["retire"]:
                        self._stop()
                        break
            interrupted.pop_all()
        return verdicts

    def command(self) -> list[str]:
        # -P: a file in the working directory that is named like a library must not be imported instead of it.
        return [sys.executable, "-P", "-W", "ignore", "-m", self.module, str(CPU_SECONDS), *self.arguments]

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the pipes, and leave the process to the parent.

        The parent may have held the lock, and two processes on one pipe would read each other's replies.
        """
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.returncode = 0  # a child cannot wait for it

    def _running(self) -> subprocess.Popen[bytes]:
        from ftis.config import RunError  # whose imports the helper's process does without

        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self._stop()
        try:
            self._process = subprocess.Popen(
                self.command(),
                bufsize=0,  # a buffer that a fork copies would be written twice
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            raise RunError(f"the helper that {self.does} cannot be started: {error}") from error
        self._lines = SimpleQueue()
        threading.Thread(target=_hear, args=(self._process.stdout, self._lines), daemon=True).start()
        greeting, _ = self._read_line(self._process, START_SECONDS)
        if greeting != b"ready\n":
            self._stop()
            why = greeting.decode(errors="replace").strip() or "without a message"
            raise RunError(
                f"the helper that {self.does} did not start ({why}): install {self.needs}, and run "
                f"{' '.join(self.command())} to see why"
            )
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
        """A line, cut short if the process ended; and whether the time limit ended it."""
        try:
            return self._lines.get(timeout=seconds), False
        except Empty:
            process.kill()
            return b"", True

    def _stop(self) -> int | None:
        """End the process. Its exit status, negative for a signal."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)  # time for a limit's signal to become the exit status
        process.kill()
        return process.wait()


def write_all(pipe: IO[bytes] | None, data: bytes) -> None:
    """Write all of ``data``. One write to an unbuffered pipe may take a part only, as when a signal interrupts it."""
    assert pipe is not None
    left = memoryview(data)
    while left:
        left = left[pipe.write(left) :]


def _hear(pipe: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    """Read lines until the process ends, then put an empty one. A queue's time limit works on Windows too."""
    with io.BufferedReader(pipe) as buffered:  # type: ignore[type-var]  # the pipe itself is read byte by byte
        while line := buffered.readline():
            lines.put(line)
    lines.put(b"")


def serve(load: Callable[[], Judge]) -> None:
    """Answer requests: one JSON object a line on stdin, one on stdout. A request that raises has the verdict None.

    ``load`` imports the libraries before the limits apply; the parent hears of its ImportError. The end of stdin ends
    the process, so it does not outlive its parent.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    requests = os.fdopen(os.dup(0), "rb")  # Python's exit() closes sys.stdin
    os.dup2(2, 1)  # a library may print, and must not spoil a reply
    try:
        judge = load()
    except ImportError as error:
        replies.write(f"{error}\n")
        return
    try:
        import resource
    except ImportError:  # on Windows the parent's clock is the only limit
        resource = None  # type: ignore[assignment]
    if resource is not None:
        for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(limit, (most, most))
    set_timer, seconds = getattr(signal, "setitimer", lambda *_: None), float(sys.argv[1])
    replies.write("ready\n")
    for line in requests:
        request = json.loads(line)
        # SIGPROF keeps its default, which ends the process, even inside big-number arithmetic.
        set_timer(getattr(signal, "ITIMER_PROF", 0), seconds)
        worn = False
        try:
            verdict = judge(request)
        except RetireError as last:
            (verdict,), worn = last.args, True
        except Exception:  # a library on a stranger's text may raise anything
            verdict = None
        set_timer(getattr(signal, "ITIMER_PROF", 0), 0)
        # Near the limit on memory harmless requests may begin to fail.
        worn = worn or (resource is not None and peak_bytes(resource) > MEMORY_BYTES // 2)
        replies.write(json.dumps({"verdict": verdict, "retire": worn}) + "\n")

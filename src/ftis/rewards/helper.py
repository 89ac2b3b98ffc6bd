"""A process with limits for what judges the texts of others with libraries that were not made for hostile input.

A short text can make computer algebra run for years (``10^{10^{10}}``). The helper has a limit on memory and on
processor time. A request that exceeds a limit ends it, and the helper is started again for the next request. Signals
such as SIGALRM need the main thread, and rewards are computed in worker threads too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftis.rewards.scoring import RewardError

CPU_SECONDS = 3.0
"""Limit on one request. Processor time, so that a busy machine changes no reward."""
CPU_SIGNAL = getattr(signal, "SIGPROF", 0)
"""Ends the helper at that limit; 0 where there is no such signal."""
WALL_SECONDS = 30.0
"""Limit on one request by the clock, for what waits instead of computing."""
START_SECONDS = 120.0
"""Limit on the helper's start."""
MEMORY_BYTES = 2 << 30

Judge = Callable[[dict[str, Any]], Any]
"""A request → a verdict; both survive JSON."""


class Helper:
    """The process that judges: started when first needed, killed and replaced when it fails.

    Args:
        module: is run as a program, and calls :func:`serve`.
        does: what it does, for errors.
        needs: the package to install where it cannot start.
    """

    def __init__(self, module: str, does: str, needs: str) -> None:
        self.module, self.does, self.needs = module, does, needs
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []
        _HELPERS.add(self)

    def ask(self, request: dict[str, Any]) -> Any:
        """The verdict; None where a limit stopped it. One request at a time.

        Raises:
            RewardError: the process cannot be started.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            for _ in range(2):  # a helper that was ended by something else says nothing about this request: retry
                process = self._running()
                try:
                    assert process.stdin is not None
                    process.stdin.write(line)
                except OSError:
                    self._stop()
                    continue
                reply, overdue = self._read_line(process, WALL_SECONDS)
                if reply.endswith(b"\n"):
                    answered = json.loads(reply)
                    if answered["retire"]:
                        self._stop()
                    return answered["verdict"]
                if self._stop() == -CPU_SIGNAL or overdue:
                    return None
        return None  # the helper ended twice, so this request ends it

    def command(self) -> list[str]:
        # -P: a file in the working directory that is named like a library must not be imported instead of it.
        return [sys.executable, "-P", "-W", "ignore", "-m", self.module, str(CPU_SECONDS)]

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def leave_to_parent(self) -> None:
        """In a forked child: close the pipes to the parent's process and leave it alone.

        The parent may have held the lock, and two processes on one pipe would read each other's replies.
        """
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.returncode = 0  # not ours to wait for
            self._abandoned.append(process)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self._stop()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                self.command(),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # the parent handles an interrupt from the keyboard
            )
        except OSError as error:
            raise RewardError(f"the helper that {self.does} cannot be started: {error}") from error
        greeting, _ = self._read_line(self._process, START_SECONDS)
        if greeting != b"ready\n":
            self._stop()
            said = greeting.decode(errors="replace").strip() or "it said nothing"
            raise RewardError(
                f"the helper that {self.does} did not start ({said}): install {self.needs}, and run "
                f"{' '.join(self.command())} to see why"
            )
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
        """A line, cut short where the process ended; and whether the time limit ended it."""
        assert process.stdout is not None
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # or it might kill the process during the next request
        return line, overdue.is_set()

    def _stop(self) -> int | None:
        """End the process. Its exit status, negative for a signal; the earlier one if it had ended already."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.stdin is not None:
                process.stdin.close()
            process.wait(timeout=0.05)  # time for a limit's signal to become the exit status
        process.kill()
        status = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return status


_HELPERS: weakref.WeakSet[Helper] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for helper in list(_HELPERS):
        helper.leave_to_parent()


def _at_exit() -> None:
    for helper in list(_HELPERS):
        helper.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)


# --- the helper process ---------------------------------------------------------------------------------------------


def serve(load: Callable[[], Judge]) -> None:
    """Answer requests: one JSON object a line on stdin, one on stdout. A request that raises has the verdict None.

    Args:
        load: imports what judging takes, before the limits apply. An ImportError is told to the parent.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints is no part of a reply
    try:
        judge = load()
    except ImportError as error:
        replies.write(f"{error}\n")
        return
    try:
        import resource
    except ImportError:  # on Windows, where the parent's clock is the only limit
        resource = None  # type: ignore[assignment]
    if resource is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else CPU_SECONDS
    replies.write("ready\n")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # SIGPROF keeps its default, which ends the process, even inside big-number arithmetic.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            verdict = judge(request)
        except Exception:  # the text of others: whatever it makes a library raise
            verdict = None
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({"verdict": verdict, "retire": resource is not None and _is_large(resource)}) + "\n")


def peak_bytes(resource: Any) -> int:
    """The most memory that this program has used.

    Linux counts in ``ru_maxrss`` what its parent took when it started this program, which is gigabytes beside a model.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _is_large(resource: Any) -> bool:
    """Whether peak memory is so near its limit that harmless requests may begin to fail."""
    return peak_bytes(resource) > MEMORY_BYTES // 2

"""A process whose output wakes those who wait for it, so that tests wait for events and not for a while."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HUNG = 500.0
"""Seconds after which a process that is waited for has failed, on however slow a machine. Less than any deadline."""


class Watched:
    """``command`` as a process. What it prints goes to ``log`` as well.

    Args:
        heard: notified after each line and at the end; several processes may share it.
        environment: in addition to this process's own.
        own_group: it and what it starts are a group, as a terminal makes one of each command: :meth:`signal_all`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        heard: threading.Condition | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        own_group: bool = False,
    ) -> None:
        self.heard = heard or threading.Condition()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=own_group,
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def _read(self, log: Path) -> None:
        assert self.process.stdout is not None
        with self.process.stdout, log.open("a") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                with self.heard:
                    self.lines.append(line)
                    self.heard.notify_all()
        with self.heard:
            self.heard.notify_all()

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether ``condition`` became true; looked at after each line."""
        with self.heard:
            return self.heard.wait_for(condition, seconds)

    def wait(self, seconds: float) -> int:
        """Exit status, once it and all processes that it started have ended. Raises subprocess.TimeoutExpired."""
        status = self.process.wait(timeout=max(0.1, seconds))
        self._reader.join(60)  # each process holds the pipe
        assert not self._reader.is_alive(), "it left a process behind"
        return status

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of its group, as a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

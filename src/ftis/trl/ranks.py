"""The processes of one peer: one talks to the others of the swarm, all of them learn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from accelerate.utils import broadcast_object_list, gather_object

from ftis.config import FtisError
from ftis.machine.resources import in_background
from ftis.records.events import Stopped
from ftis.rollouts import Rows
from ftis.trl.batches import EMPTY

Value = TypeVar("Value")

KEEP_ALIVE_SECONDS = 30.0
STILL_AT_WORK = "ftis: the main process is still at work"


def end_processes(trainer: Any) -> None:
    """Leave the group of a trainer's processes: the last call of a script that runs in several.

    It frees torch's wrapper for several processes first, since the wrapper holds the group, too. A wrapper that is
    freed at Python's end waits for gloo's threads while it holds Python's lock, which they may wait for: a deadlock.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    gc.collect()
    trainer.accelerator.end_training()


@dataclass(frozen=True)
class Ranks:
    """The peer's processes as accelerate counts them.

    Attributes:
        rank: of this process; 0 is the main one, which talks to the network.
        size: how many there are.
    """

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def from_main(self, work: Callable[[], Value], waits: bool = False) -> Value:
        """Call ``work`` in the main process, and return its result in every process.

        Args:
            waits: whether it may take long, because it waits for other peers. It then runs in a thread, and the main
                process keeps the others waiting: by themselves they would give up after a while.

        Raises:
            Exception: the error of ``work``, in every process, so that none waits for the main one. An error of another
                package becomes an FtisError in the other processes.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = self._at_length(work) if waits else work()
            except (FtisError, Stopped) as reason:
                outcome[1] = reason
            except Exception as error:  # whatever it is, the others must hear of it
                outcome[1] = FtisError(f"the main process failed: {type(error).__name__}: {error}")
                broadcast_object_list(outcome)
                raise
        broadcast_object_list(outcome)
        while outcome[0] == STILL_AT_WORK:
            outcome = [None, None]
            broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise cast(BaseException, outcome[1])
        return cast(Value, outcome[0])

    @staticmethod
    def _at_length(work: Callable[[], Value]) -> Value:
        """Run ``work`` in a thread, and keep the other processes waiting meanwhile."""
        done = in_background(work, "main process")
        while wait([done], KEEP_ALIVE_SECONDS).not_done:
            broadcast_object_list([STILL_AT_WORK, None])
        return done.result()

    def together(self, mine: Sequence[Value]) -> list[Value]:
        """The values of all processes, in the order of their ranks."""
        return list(mine) if self.size == 1 else list(gather_object(list(mine)))

    def mine(self, values: Sequence[Value]) -> Sequence[Value]:
        """This process's part of ``values``: consecutive, and equally long on all processes, except the last ones."""
        each = -(-len(values) // self.size)
        return values[self.rank * each : (self.rank + 1) * each]

    def evenly(self, values: Sequence[Value]) -> list[Value]:
        """This process's part of ``values``, equally long on all processes: the first value fills parts up."""
        return [values[max(0, row)] for row in self.part(np.arange(len(values)), 1).tolist()]

    def part(self, rows: Rows, parts: int) -> Rows:
        """This process's part of ``rows``, equally long on all processes; ``parts`` divides the length.

        :data:`~ftis.trl.batches.EMPTY` rows fill parts up.
        """
        each = max(1, -(-len(rows) // self.size))
        each += -each % parts
        mine = rows[self.rank * each : (self.rank + 1) * each]
        return np.concatenate([mine, np.full(each - len(mine), EMPTY)])

"""What benchmarks/round.py needs of a swarm: another peer's messages, and who spends a round's seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.admission import Collected
from ftis.member import Outgoing

HOST = "TRL"
"""Who spends what no part of the adapter does: the trainer's own code, sampling, reward functions, the model's passes,
the backward pass and the optimiser."""

PARTS: Mapping[str, str] = {
    "_prepare_inputs": "rest",
    "_generate_and_score_completions": "rest",  # collating
    "_end_round": "records",
    "_sample": "own rollouts",  # checking prompts, text of completions
}
"""Methods of FTISTrainer -> the part of the adapter that they are."""
PARTS_OF_FOREIGN: Mapping[str, str] = {
    "scored": "admission",  # around the reward functions
    "judged": "weights",  # around the model's pass for log π_old
    "joined": "batch",
}
PARTS_OF_MEMBER: Mapping[str, str] = {"outgoing": "offer", "admit": "admission", "choose": "selections"}
HOSTS = (
    *("_prepare_inputs", "_generate_and_score_completions", "_calculate_rewards", "_get_per_token_logps_and_entropies"),
)
"""Methods of GRPOTrainer that the adapter calls, as TRL alone does."""


class Nobody:
    """The link of a peer that hears nobody."""

    def catch_up(self, round: int) -> int:
        return round

    def exchange(self, outgoing: Outgoing) -> Collected:
        return Collected({})


@dataclass(frozen=True)
class Recorded:
    """A link that hands over the messages of a peer that took part before, already in memory."""

    sender: str
    messages: Mapping[int, bytes]

    @classmethod
    def read(cls, sender: str, directory: Path) -> Recorded:
        return cls(sender, {int(path.name): path.read_bytes() for path in directory.iterdir()})

    def catch_up(self, round: int) -> int:
        return round

    def exchange(self, outgoing: Outgoing) -> Collected:
        return Collected({self.sender: self.messages[outgoing.round]})


class Spent:
    """Seconds by who spent them: each counts for the innermost of the methods that are watched, else for the host.

    Args:
        clocks: what is read where a method begins and ends.
    """

    def __init__(self, *clocks: Callable[[], float]) -> None:
        self._clocks = clocks or (time.process_time, time.perf_counter)
        self._within = [HOST]
        self._seconds: dict[str, list[float]] = {}
        self._last = [clock() for clock in self._clocks]

    def take(self) -> dict[str, list[float]]:
        """The seconds since the last call: one number a clock."""
        self._charge()
        taken, self._seconds = self._seconds, {}
        return taken

    def watch(self, owner: Any, method: str, who: str) -> None:
        inner = getattr(owner, method)

        def outer(*arguments: Any, **options: Any) -> Any:
            self._charge()
            self._within.append(who)
            try:
                return inner(*arguments, **options)
            finally:
                self._charge()
                self._within.pop()

        setattr(owner, method, outer)

    def watch_adapter(self, trainer: Any) -> None:
        """Watch an FTISTrainer that has others to learn with."""
        for method, part in PARTS.items():
            self.watch(trainer, method, part)
        for method, part in PARTS_OF_FOREIGN.items():
            self.watch(trainer.foreign, method, part)
        for method, part in PARTS_OF_MEMBER.items():
            self.watch(trainer.member, method, part)

    def watch_host(self, kind: Any) -> None:
        """Watch all trainers of a class: GRPOTrainer."""
        for method in HOSTS:
            self.watch(kind, method, HOST)

    def _charge(self) -> None:
        now = [clock() for clock in self._clocks]
        before = self._seconds.get(self._within[-1], [0.0] * len(now))
        self._seconds[self._within[-1]] = [s + n - o for s, n, o in zip(before, now, self._last, strict=True)]
        self._last = now


def adapters(spent: Mapping[str, list[float]], clock: int) -> float:
    """The adapter's seconds of what :meth:`Spent.take` gave."""
    return sum(seconds[clock] for who, seconds in spent.items() if who != HOST)

"""The duration of training: a guess beforehand, and the time left by the rounds that its jobs have finished.

The unit is one round of one peer. Jobs differ tenfold in its length, so each has a guess, and an arm's own rounds show
how far off its guesses are. An arm without finished rounds is taken to be as far off as the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from ftis.config import Recipe
from ftis.recipe.arms import rollouts_per_round, tries
from ftis.records.events import ArmBegun, Event, JobEnded, RoundEnded

SAMPLING_RATE, TRAINING_RATE = 1.5e10, 3e10
"""Floating-point operations a second on one core: measured on the starters, which sample at 1.2 to 2.2 · 10¹⁰ and
train at 2.3 to 4 · 10¹⁰. Counted are 2 a parameter and token to sample; 8 to train, for a forward pass that gives old
log-probabilities, and another with its backward pass."""

LIKELY_SIGNAL, LIKELY_LENGTH = 0.5, 0.5
"""Assumed: the probability that a group has signal, and the mean completion's fraction of the maximum."""

UNKNOWN_PROBLEMS = 300
"""The assumed number of validation problems of a task whose section gives none."""

FEWEST_ROUNDS = 3
"""Rounds of a job before they are believed. The first follows on the loading of models and is not counted."""


@dataclass(frozen=True)
class Work:
    """The work that a job has left.

    Attributes:
        rounds: rounds of its peers, all peers together.
        guess: seconds of one of them, as guessed beforehand.
    """

    arm: str
    rounds: int
    guess: float


@dataclass
class _Watch:
    """The course of one job: when it began, when rounds ended, and whether it is finished."""

    began: float
    first: float = 0.0
    last: float = 0.0
    rounds: int = 0
    finished: bool = False

    def seconds_per_round(self) -> float | None:
        if self.finished:
            return (self.last - self.began) / max(1, self.rounds)
        if self.rounds < FEWEST_ROUNDS:
            return None
        return (self.last - self.first) / (self.rounds - 1)


def guess_seconds(swarm: Recipe, parameters: Mapping[str, int]) -> float:
    """A guess of the seconds of one round of one peer on one core: sampling, training, and its part of evaluations.

    Args:
        swarm: with exactly the peers of the swarm.
        parameters: of each model.
    """
    training = swarm.training
    evaluations = 2 + (training.rounds // training.eval_every if training.eval_every else 0)
    problems = sum(task.validation_size or UNKNOWN_PROBLEMS for task in (swarm.task, *swarm.ood))
    sampled, trained = rollouts_per_round(swarm)
    sampled_and_evaluated = sampled * tries(swarm, LIKELY_SIGNAL) + problems * evaluations / training.rounds
    tokens = LIKELY_LENGTH * swarm.sampling.max_completion_length
    operations_each = 2 * sampled_and_evaluated / SAMPLING_RATE + 8 * trained / TRAINING_RATE
    return fmean(parameters[peer.model] for peer in swarm.peers) * tokens * operations_each


class Outlook:
    """Listens to the jobs' events and tells how many seconds are left.

    Args:
        jobs: those that are not finished, by label.
        at_a_time: how many run side by side.
        now: a clock in seconds.
    """

    def __init__(self, jobs: Mapping[str, Work], at_a_time: int, now: Callable[[], float] = time.monotonic) -> None:
        self._jobs, self._at_a_time, self._now = jobs, at_a_time, now
        self._seen: dict[str, _Watch] = {}

    def hear(self, event: Event) -> None:
        """Take note of a job's beginning, a round or its end; other events are let pass."""
        label, now = event.place.job, self._now()
        match event:
            case ArmBegun():
                self._seen[label] = _Watch(now)
            case RoundEnded() if label in self._seen:
                watch = self._seen[label]
                watch.rounds, watch.last, watch.first = watch.rounds + 1, now, watch.first or now
            case JobEnded() if label in self._seen:
                self._seen[label].finished, self._seen[label].last = True, now

    def seconds_left(self) -> float | None:
        """Seconds until the last job ends, if ``at_a_time`` of them always run; None before any arm is measured."""
        measured = self._off_by()
        if not measured:
            return None
        elsewhere = fmean(measured.values())
        left = []
        for label, work in self._jobs.items():
            watch = self._seen.get(label)
            if watch and watch.finished:
                continue
            rounds = max(0, work.rounds - (watch.rounds if watch else 0))
            left.append(rounds * work.guess * measured.get(work.arm, elsewhere))
        return max(max(left), sum(left) / self._at_a_time) if left else 0.0

    def _off_by(self) -> dict[str, float]:
        """Measured seconds over guessed ones, by arm: the mean of its finished jobs, or else of those that run."""
        found: dict[str, dict[bool, list[float]]] = {}
        for label, watch in self._seen.items():
            seconds = watch.seconds_per_round()
            if label in self._jobs and seconds is not None:
                work = self._jobs[label]
                found.setdefault(work.arm, {}).setdefault(watch.finished, []).append(seconds / work.guess)
        return {arm: fmean(by_state.get(True) or by_state[False]) for arm, by_state in found.items()}


def in_time(seconds: float) -> str:
    """A duration for people, as ``40 s``, ``3.2 min`` or ``5.1 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"

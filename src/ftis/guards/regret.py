"""No regret: a learner that got worse goes back, learns alone, and takes senders back one at a time.

A fall of the learner's own reward (:mod:`ftis.guards.falls`) is an alarm. :class:`ftis.run.training.Trainer` then goes
back to the best checkpoint::

    together ──alarm──▶ alone ──its rounds pass──▶ probation of the first ──▶ … of the last ──▶ together
       ▲                  └─────── an alarm in any phase leads back to alone ──────┘                │
       └────────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.config import Recipe
from ftis.guards.falls import LONGEST, FallTest, shortest_window
from ftis.guards.plants import Found, PlantTest
from ftis.metric_keys import HARMFUL_SINCE, SET_ASIDE
from ftis.rollouts import Decode
from ftis.selection import Judged, Selection

ALPHA = 0.01
"""The most probability of a false alarm in a run, and of a text that is found by mistake."""
ALONE, PROBATION = 2, 3
"""Rounds alone and of a first probation, in shortest windows of the test."""

UNTESTED = (
    "planted texts are not looked for: the test needs two or more completions of a prompt by each peer "
    "(sampling.num_generations)"
)


@dataclass
class NoRegret(Selection):
    """A guard that watches the learner's reward on own groups, and decides whom the learner hears.

    The first alarm may have other causes than the senders, so the learner then shows that it does not fall alone. From
    then on a sender is harmful under three conditions: the fall most likely began after a round in which the learner
    learned from this sender alone; the learner has learned from no other since; the evidence for such falls suffices by
    itself. An alarm while the learner hears all doubles the rounds of a probation.

    Attributes:
        recipe: with exactly the peers of this swarm.
        own: the learner's name.
        phase: "together", "alone" or "probation".
        left: rounds of the phase that are left; without meaning in "together".
        queue: senders that wait for their probation, the one on probation first.
        harmful: by sender that made the learner worse, the step at which that was found.
        patience: of a probation, in shortest windows.
        groups: the number of own groups in the last round; 0 before the first.
        alarms: the number of alarms.
        learned_from: the senders of each round since the last alarm.
        rewards: the mean own reward of each round since the last alarm.
        best, best_reward: the step of the checkpoint to go back to, and the mean reward of the rounds after it.
        pending: a step whose checkpoint is kept until the rounds after it show whether it is better; −1: none.
        since: rounds that followed it.
        back_to: after an alarm, the step to go back to; −1 if no checkpoint is better than the present.
        remarks: sentences on this round's decisions.
    """

    recipe: Recipe
    own: str
    name: str = "regret"
    phase: str = "together"
    left: int = 0
    queue: list[str] = field(default_factory=list)
    harmful: dict[str, int] = field(default_factory=dict)
    patience: int = PROBATION
    groups: int = 0
    alarms: int = 0
    learned_from: list[list[str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    best: int = 0
    best_reward: float | None = None
    pending: int = -1
    since: int = 0

    def __post_init__(self) -> None:
        self.test = FallTest(self.recipe.training.no_regret or 0.0)
        self.plants = PlantTest(self.recipe.training.rounds, ALPHA)
        self.back_to: int | None = None
        self.remarks: list[str] = []

    @property
    def window(self) -> int:
        """Rounds of the test's shortest window, if each has as many own groups as the last one."""
        return shortest_window(self.groups or self.recipe.prompts_per_peer)

    @property
    def threshold(self) -> float:
        """The evidence, in nats, that is an alarm: log(R/α) in a run of R rounds."""
        return math.log(self.recipe.training.rounds / ALPHA)

    @property
    def others(self) -> list[str]:
        """The senders that are not harmful."""
        return [peer.name for peer in self.recipe.peers if peer.name not in (self.own, *self.harmful)]

    @property
    def pinned(self) -> frozenset[int]:
        """Steps whose checkpoints are kept."""
        return frozenset({self.best, self.pending} - {0, -1})

    def skipped(self, round: int) -> Collection[str]:
        admitted = {"together": self.others, "alone": [], "probation": self.queue[:1]}[self.phase]
        return frozenset(peer.name for peer in self.recipe.peers if peer.name not in (self.own, *admitted))

    def examine(self, judged: Judged) -> None:
        batch = judged.batch
        groups = [batch.reward_N[rows].tolist() for rows in batch.own_groups()]
        self.back_to, self.remarks, is_first = None, [], self.best_reward is None
        if groups:
            step = int(batch.round_N[batch.own_N].max()) + 1
            self.take(step, groups, sorted({batch.sources[source] for source in batch.source_N[~batch.own_N]}))
        if self._tests_texts:
            self.plants.take(batch, judged.advantage_N.numpy())
        elif groups and is_first:
            self.remarks.append(UNTESTED)

    @property
    def _tests_texts(self) -> bool:
        """Whether a group can show that a text helps or not. One completion cannot."""
        return self.recipe.rollouts_per_group > 1

    def shares(self, judged: Judged) -> Tensor:
        if not self._tests_texts:
            return torch.ones(len(judged.rows))
        return torch.from_numpy(judged.batch.own_N | ~self.plants.holds_N)[judged.rows].float()

    def take(self, step: int, groups: Sequence[Sequence[float]], senders: Sequence[str]) -> None:
        """Take in a round.

        Args:
            step: finished rounds, this one included.
            groups: the rewards of each own group.
            senders: whom the learner learns from in this round.
        """
        self.back_to, self.remarks, self.groups = None, [], len(groups)
        self.test.add(groups)
        self.rewards.append(fmean(fmean(group) for group in groups))
        if self.best_reward is None:
            self.best_reward = self.rewards[0]
        if self.test.nats >= self.threshold:
            self._alarm(step)
            return
        self.learned_from.append(list(senders))
        del self.learned_from[:-LONGEST], self.rewards[:-LONGEST]
        self._compare(step)
        if self.phase != "together":
            self.left -= 1
            if not self.left:
                self._next_phase(step)

    def _alarm(self, step: int) -> None:
        assert self.best_reward is not None
        behind, phase = self.test.behind, self.phase
        now = float(np.mean(self.rewards[-behind:]))
        suspect = self._suspect()
        self.back_to = self.best if self.best_reward > now else -1
        fell = f"round {step}: the reward fell to {now:.2f} since round {step - behind + 1}"
        if phase == "alone":
            fell += " while learning alone, so the learning rate is the first thing to lower"
        elif self.alarms and suspect is not None:
            self.harmful[suspect] = step
            fell += f" while learning from {suspect} alone, so nothing more is learned from {suspect}"
        elif self.alarms and phase == "together":
            self.patience *= 2
        if phase == "probation" and self.queue[0] in self.harmful:
            self.queue = self.queue[1:]
        elif phase != "alone":  # a peer that was not heard, as one in quarantine or away, has nothing to prove
            heard = {*self.queue, *(name for names in self.learned_from for name in names)}
            self.queue = [name for name in self.others if name in heard]
        self.phase, self.left = "alone", ALONE * self.window
        self.pending, self.since = step if self.back_to < 0 else -1, 0
        self.alarms += 1
        self.test.restart()
        self.learned_from, self.rewards = [], []
        place = f"{self.own} goes back to step {self.back_to}" if self.back_to >= 0 else f"{self.own} stays"
        self.remarks.append(f"{fell}. {place} and learns alone for {self.left} rounds")

    def went_back(self, step: int, ahead: bool) -> None:
        """Note that the learner went back after ``step`` rounds, and will save the weights that it went back to.

        Args:
            ahead: whether it had sampled the next round before, which it samples again.
        """
        self.best = step
        if ahead:
            self.remarks.append(f"round {step + 1} is sampled again, by the weights of step {self.back_to}")

    def could_not_go_back(self) -> None:
        """Note that the checkpoint is gone."""
        self.remarks.append(f"there is no checkpoint-{self.back_to} any more, so the weights stay")

    def _suspect(self) -> str | None:
        """The sender that alone was learned from when the fall began, and since then; None if that is not certain."""
        names: set[str] = set()
        since = 0  # rounds since the first in which nobody but one sender was learned from
        for back, heard in enumerate(reversed(self.learned_from), 1):
            if len(names | set(heard)) > 1:
                break
            if heard:
                names, since = set(heard), back
        # A round's rewards are older than its learning, and with overlap older than the learning of the one before.
        since -= self.recipe.training.overlap
        certain = self.test.behind <= since and self.test.of_last(since) >= self.threshold
        return min(names) if names and certain else None

    def _next_phase(self, step: int) -> None:
        if self.phase == "probation":
            self.queue = self.queue[1:]
        if self.queue:
            self.phase, self.left = "probation", self.patience * self.window
            self.remarks.append(f"round {step}: {self.queue[0]} is on probation for {self.left} rounds")
        else:
            self.phase = "together"
            if self.others:
                self.remarks.append(f"round {step}: {self.own} learns from {', '.join(self.others)} again")

    def _compare(self, step: int) -> None:
        """Choose the checkpoint to go back to by the rounds after it, since those before it may hide a fall."""
        assert self.best_reward is not None
        mean = float(np.mean(self.rewards[-self.window :]))
        if self.pending >= 0:
            self.since += 1  # ``step`` may have skipped rounds
            if self.since >= self.window:
                if mean > self.best_reward:
                    self.best, self.best_reward = self.pending, mean
                self.pending = -1
        elif len(self.rewards) >= self.window:
            rise = self.test.margin / 2 * max(self.test.high - self.test.low, 0.0)
            if rise and mean >= self.best_reward + rise:
                self.pending, self.since = step, 0

    def about(self, peer: str, decode: Decode) -> Mapping[str, Any]:
        if peer == self.own:
            nats = self.test.nats if math.isfinite(self.test.nats) else 0.0
            return {
                "regret/evidence": max(nats, 0.0),
                "regret/threshold": self.threshold,
                "regret/alarms": self.alarms,
                "regret/best_step": self.best,
                "regret/texts": len(self.plants.found),
            }
        if peer in self.harmful:
            return {HARMFUL_SINCE: self.harmful[peer]}
        return {SET_ASIDE: peer in self.skipped(0)}

    def sentences(self, decode: Decode) -> list[str]:
        """This round's decisions."""
        return [*self.remarks, *(_in_words(found, decode) for found in self.plants.news)]

    def state(self) -> Mapping[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in UNKEPT}
        return {**kept, "test": self.test.state(), "plants": self.plants.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        saved = dict(state)
        self.test.restore(saved.pop("test"))
        self.plants.restore(saved.pop("plants"))
        vars(self).update(saved)


def _in_words(found: Found, decode: Decode) -> str:
    more = f" (and {found.more} more texts)" if found.more else ""
    shares = ", ".join(f"{name} in {part:.0%}" for name, part in found.share.items())
    by_whom = f" ({shares} of their rewarded ones)" if shares else ""
    return (
        f"own answers took up {decode(found.ids)!r}{more} and are not shown to be better with it; others brought "
        f"it{by_whom}, so nobody's completion with it is learned from"
    )


UNKEPT = ("recipe", "own", "name", "test", "plants", "back_to", "remarks")


def no_regret(recipe: Recipe, own: str) -> NoRegret | None:
    """The guard that ``training.no_regret`` sets; None if it is off, or there is nobody to learn from."""
    return NoRegret(recipe, own) if recipe.training.no_regret and len(recipe.peers) > 1 else None

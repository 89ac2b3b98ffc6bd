"""One peer and its round, which reads like the paper's algorithm: :meth:`Peer.begin` and :meth:`Peer.finish`.

A round does no I/O. Between its halves somebody else carries the messages: a loop over the peers of one process, a pipe
to each process, or a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftis.admission import Collected
from ftis.config import Recipe
from ftis.learning import judge, learn
from ftis.measures import RoundExchange, RoundRecord, round_record
from ftis.member import Member, Outgoing
from ftis.policy import ModelError, Policy, positions_of
from ftis.rollouts import Batch, Floats, Group, ScoredGroup, collate
from ftis.sampling import Decoding, Sampler
from ftis.schedule import minibatches, seed_of
from ftis.seams import ENGINES, look_up
from ftis.selection import select

Attack = Callable[[Sequence[ScoredGroup], "Peer"], Sequence[Group]]
"""(own scored groups, this peer) → the groups to offer instead; for testing defences."""


class OwnGroups(NamedTuple):
    """A peer's own groups of a round, and those without signal that others replaced."""

    kept: Sequence[ScoredGroup]
    replaced: Sequence[ScoredGroup]


class Begun(NamedTuple):
    """A round between its halves."""

    own: OwnGroups
    sent_bytes: int
    clock: Stopwatch


@dataclass
class Peer:
    """One participant with its model.

    Attributes:
        attack: changes what is offered; None for an honest peer.
        reference: log-probabilities of the model at the start, where β > 0.
        learning: whether optimiser steps were taken since the last round that was recorded.
        agreed: whether sampler, learner and a plain pass gave the first rollouts the same log-probabilities.
    """

    member: Member
    policy: Policy
    sampler: Sampler
    attack: Attack | None = None
    reference: Callable[..., list[Floats]] | None = None
    learning: bool = False
    agreed: bool = False
    _begun: dict[int, Begun] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def recipe(self) -> Recipe:
        return self.member.recipe

    @property
    def decoding(self) -> Decoding:
        return self.member.decoding

    def begin(self, round: int) -> Outgoing:
        """Sample and score this peer's groups. Returns its message.

        The peer learns from its rollouts as sampled; wire precision and attack change only what the others get.
        """
        clock = Stopwatch()
        own = self.sample(round)
        clock.lap("sample")
        offered: Sequence[Group] = [scored.group for scored in own.kept]
        if self.attack is not None:
            offered = self.attack(own.kept, self)
        outgoing = self.member.outgoing(round, offered)
        clock.lap("exchange")
        self._begun[round] = Begun(own, len(outgoing.message), clock)
        return outgoing

    def finish(self, round: int, collected: Collected) -> RoundRecord:
        """Admit, judge, select and learn: the second half of a round that has begun."""
        own, sent_bytes, clock = self._begun.pop(round)
        clock.lap("wait")
        admissions = self.member.admit(collected, round)
        admitted = [group for admission in admissions for group in admission.admitted]
        batch = collate([*own.kept, *admitted], self.member.prompt_ids, self.name)
        clock.lap("admit")
        return self.learn_from(round, batch, RoundExchange(collected, sent_bytes, admissions), clock, own.replaced)

    def learn_from(
        self,
        round: int,
        batch: Batch,
        heard: RoundExchange,
        clock: Stopwatch,
        replaced: Sequence[ScoredGroup] = (),
    ) -> RoundRecord:
        """Learn from a round's batch. A replayed round begins here.

        Args:
            replaced: own groups without signal that others replaced.
        """
        member, policy = self.member, self.policy
        steps = minibatches(self.recipe, self.name, round, len(batch))
        judged = judge(batch, member.advantages(batch), policy, self.decoding, member.objective, len(steps))
        clock.lap("logp")

        for selection in member.selections:
            selection.examine(judged)
        chosen = select(judged, member.selections)
        rate = look_up("learning_rate", "engine", ENGINES)(member.config, self.recipe.training, round)
        policy.set_learning_rate(rate)
        self.learning = True
        update, judged = learn(policy, judged, chosen, member.objective, self.decoding, steps, self.reference)
        self.sampler.weights_moved(policy)
        clock.lap("update")

        member.advance(batch, replaced, clock.total)
        return round_record(
            judged,
            chosen,
            update,
            heard,
            recipe=self.recipe,
            own=self.name,
            end_ids=policy.end_ids,
            prompts=member.task.train,
            replaced=replaced,
            about_peers=member.about_peers(),
            about={
                "step": member.cursor.step,
                "learning_rate": rate,
                "tokens_sampled": member.cursor.tokens_sampled,
                **clock.metrics(),
            },
        )

    def sample(self, round: int) -> OwnGroups:
        """This peer's own groups for the round, scored.

        While some are without signal and prompts are in reserve, as many of those are sampled. Groups with signal come
        first then.
        """
        items, n = self.member.assigned(self.name, round), self.recipe.prompts_per_peer
        fresh, reserve, purpose = sorted(items[:n]), items[n:], "sample"
        found: list[ScoredGroup] = []
        while fresh:
            groups = self.sample_items(fresh, self.recipe.rollouts_per_group, round, purpose)
            found += [self.member.admitter.score_group(group) for group in groups]
            missing = n - sum(scored.has_signal for scored in found)
            fresh, reserve, purpose = reserve[:missing], reserve[missing:], f"resample-{len(found)}"
        if len(found) > n:
            found.sort(key=lambda scored: not scored.has_signal)
        return OwnGroups(found[:n], found[n:])

    def sample_items(self, items: Sequence[int], repeats: int, round: int, purpose: str) -> list[Group]:
        """Sample a group of ``repeats`` rollouts for each of ``items``; ``purpose`` seeds the draw.

        Raises:
            ModelError: a prompt with its completion may take more positions than the model has, or sampler and learner
                do not see one policy.
        """
        ids = [self.member.prompt_ids[item] for item in items]
        positions = positions_of(self.policy.model.config)
        most = self.decoding.max_completion_length
        longest = max(len(i) for i in ids) + most
        if positions is not None and longest > positions:
            raise ModelError(
                f"peer {self.name!r}: a prompt with its completion may take {longest} tokens, the model has "
                f"{positions} positions: lower sampling.max_completion_length (now {most})"
            )
        seed = seed_of(self.recipe, self.name, round, purpose)
        groups = self.sampler(self.policy, ids, repeats, self.decoding, seed, self.recipe.sampling.batch_size)
        if not self.agreed:
            in_place = getattr(self.sampler, "in_place", False)
            look_up("agreement", "engine", ENGINES)(self.policy, ids, groups, self.decoding, in_place)
            self.agreed = True
        if (episodes := self.member.admitter.episodes) is not None:
            prompts = [self.member.task.train[item] for item in items]
            drawing = (self.sampler, self.policy, self.decoding, seed, self.recipe.sampling.batch_size)
            groups = episodes.go_on(groups, prompts, ids, *drawing)
        return [Group(self.name, round, item, group) for item, group in zip(items, groups, strict=True)]


class Stopwatch:
    """Seconds per stage of a round."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the stage ``name``."""
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._began

    def metrics(self) -> dict[str, float]:
        """``step_time``, and ``time/<stage>`` of each stage."""
        return {"step_time": self.total, **{f"time/{name}": seconds for name, seconds in self.laps.items()}}

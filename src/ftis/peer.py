"""One peer and its round, which reads like the paper's algorithm: start with :func:`train_round`.

:mod:`ftis.run.training` has the loop around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftis.admission import Admission, Admitter, Reason, rejected
from ftis.advantages import Rewards
from ftis.codec import Header, Message, encode
from ftis.config import PeerConfig, Recipe
from ftis.exchange import Collected, Exchange, Stopped
from ftis.learning import judge, learn
from ftis.measures import RoundExchange, RoundRecord, round_record
from ftis.objectives import Objective, advantages
from ftis.policy import ModelError, Policy
from ftis.prompts import Task
from ftis.rollouts import Batch, Group, Ints, Prompt, ScoredGroup, collate
from ftis.sampling import Decoding, Sampler
from ftis.schedule import assigned, learning_rate, minibatches, seed_of
from ftis.selection import Selection, select

Attack = Callable[[Sequence[ScoredGroup], "Peer"], Sequence[Group]]
"""(own scored groups, this peer) → the groups to offer in their place; for testing defences."""


def train_round(peer: Peer, round: int) -> RoundRecord:
    """Train one round of one peer. Raises Stopped if asked to stop before anything has changed."""
    clock = Stopwatch()
    sampled = peer.sample(round)
    clock.lap("sample")

    sent_bytes = peer.offer(round, sampled.kept)
    clock.lap("exchange")
    collected = peer.collect(round)
    clock.lap("wait")

    admissions = peer.admit(collected, round)
    admitted = [group for admission in admissions for group in admission.admitted]
    batch = collate([*sampled.kept, *admitted], peer.prompt_ids, peer.name)
    clock.lap("admit")

    return learn_from(peer, round, batch, RoundExchange(collected, sent_bytes, admissions), clock, sampled.replaced)


def learn_from(
    peer: Peer, round: int, batch: Batch, heard: RoundExchange, clock: Stopwatch, replaced: Sequence[ScoredGroup] = ()
) -> RoundRecord:
    """The second half of a round, from its batch on. A replayed round begins here.

    ``replaced`` are own groups without signal whose place others took.
    """
    steps = minibatches(peer.recipe, peer.name, round, len(batch))
    judged = judge(batch, peer.advantages(batch), peer.policy, peer.decoding, peer.objective, len(steps))
    clock.lap("logp")

    for selection in peer.selections:
        selection.examine(judged)
    chosen = select(judged, peer.selections)
    peer.policy.set_learning_rate(peer.learning_rate(round))
    peer.learning = True
    update, judged = learn(peer.policy, judged, chosen, peer.objective, peer.decoding, steps)
    peer.sampler.weights_moved(peer.policy)
    clock.lap("update")

    peer.advance(batch, replaced, clock.total)
    return round_record(
        judged,
        chosen,
        update,
        heard,
        recipe=peer.recipe,
        own=peer.name,
        end_ids=peer.policy.end_ids,
        prompts=peer.task.train,
        replaced=replaced,
        about_peers={other.name: peer.about_peer(other.name) for other in peer.recipe.peers},
        about=peer.about_round(round, clock),
    )


class OwnGroups(NamedTuple):
    """A peer's own groups of a round, and those without signal whose place others took."""

    kept: Sequence[ScoredGroup]
    replaced: Sequence[ScoredGroup]


@dataclass(frozen=True)
class Cursor:
    """How far a peer is. Other totals are sums over metrics.jsonl."""

    step: int = 0
    """Finished rounds."""
    seconds: float = 0.0
    tokens_sampled: int = 0


@dataclass
class Peer:
    """One participant: its model, its view of the task, and its end of the exchange.

    ``recipe`` lists exactly the peers of this swarm: only this one when it trains alone.
    """

    config: PeerConfig
    recipe: Recipe
    policy: Policy
    sampler: Sampler
    task: Task
    render: Callable[[Prompt], Ints]
    admitter: Admitter
    header: Header
    objective: Objective
    selections: tuple[Selection, ...]
    exchange: Exchange
    attack: Attack | None = None
    write: Callable[[Sequence[Group]], Sequence[Group]] = tuple
    """Puts what it offers into the form that is exchanged: groups as they are, or as text."""
    should_stop: Callable[[], bool] = lambda: False
    cursor: Cursor = field(default_factory=Cursor)
    learning: bool = False
    """Whether optimiser steps were taken since the last round that was recorded."""

    def __post_init__(self) -> None:
        self.decoding = Decoding.of(self.recipe.sampling)
        self.prompt_ids = _PromptIds(self.task.train, self.render)

    @property
    def name(self) -> str:
        return self.config.name

    def learning_rate(self, round: int) -> float:
        return learning_rate(self.config, round, self.recipe.training.rounds)

    def sample(self, round: int) -> OwnGroups:
        """This peer's own groups for the round, scored.

        While some are without signal and prompts are in reserve, as many of those are sampled. Groups with signal come
        first then.
        """
        items, n = assigned(self.recipe, len(self.task.train), self.name, round), self.recipe.prompts_per_peer
        fresh, reserve, purpose = sorted(items[:n]), items[n:], "sample"
        found: list[ScoredGroup] = []
        while fresh:
            groups = self.sample_items(fresh, self.recipe.rollouts_per_group, round, purpose)
            found += [self.admitter.score_group(group) for group in groups]
            missing = n - sum(scored.has_signal for scored in found)
            fresh, reserve, purpose = reserve[:missing], reserve[missing:], f"resample-{len(found)}"
        if len(found) > n:
            found.sort(key=lambda scored: not scored.has_signal)
        return OwnGroups(found[:n], found[n:])

    def sample_items(self, items: Sequence[int], repeats: int, round: int, purpose: str) -> list[Group]:
        """A group of ``repeats`` rollouts for each of ``items``; ``purpose`` seeds the draw."""
        ids = [self.prompt_ids[item] for item in items]
        positions = getattr(self.policy.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        most = self.decoding.max_completion_length
        longest = max(len(i) for i in ids) + most
        if positions is not None and longest > positions:
            raise ModelError(
                f"peer {self.name!r}: a prompt with its completion may take {longest} tokens, the model has "
                f"{positions} positions: lower sampling.max_completion_length (now {most})"
            )
        seed = seed_of(self.recipe, self.name, round, purpose)
        groups = self.sampler(self.policy, ids, repeats, self.decoding, seed, self.recipe.sampling.batch_size)
        return [Group(self.name, round, item, group) for item, group in zip(items, groups, strict=True)]

    def offer(self, round: int, own: Sequence[ScoredGroup]) -> int:
        """Offer own groups to the others. Returns the size of the message, in bytes.

        This peer learns from its rollouts as sampled; wire precision and attack change only what the others get.

        Raises:
            Stopped: asked to stop. The round has changed nothing yet.
        """
        if self.should_stop():
            raise Stopped
        offered: Sequence[Group] = [scored.group for scored in own]
        if self.attack is not None:
            offered = self.attack(own, self)
        wire = self.recipe.wire
        written = Message(replace(self.header, round=round), tuple(self.write(offered)))
        message = encode(written, wire.format, wire.logp)
        self.exchange.publish(round, message, [group.item for group in offered])
        return len(message)

    def collect(self, round: int) -> Collected:
        """The others' messages, of those that every selection hears."""
        others = [p.name for p in self.recipe.peers if p.name != self.name]
        offers_only = frozenset(name for name in others if not self.wanted(name, round))
        return self.exchange.collect(round, self.skipped(round), offers_only)

    def skipped(self, round: int) -> frozenset[str]:
        """Peers that a selection skips in the round: they are neither waited for nor heard."""
        return frozenset(name for selection in self.selections for name in selection.skipped(round))

    def wanted(self, peer: str, round: int) -> Sequence[int]:
        """The prompts assigned to another peer that every selection wants."""
        items: Sequence[int] = assigned(self.recipe, len(self.task.train), peer, round)
        for selection in self.selections:
            items = selection.wanted(peer, round, items)
        return items

    def admit(self, collected: Collected, round: int) -> Sequence[Admission]:
        """Admit each message, tell the selections the outcome, and pass over groups beyond their limits."""
        admissions: Sequence[Admission] = []
        in_time = [(name, round, data) for name, data in sorted(collected.messages.items())]
        for name, offered_for, data in [*in_time, *collected.late]:
            if name in self.skipped(round):
                detail = "a selection skips this peer in this round"
                admissions = [*admissions, rejected(name, Reason.SET_ASIDE, detail)]
                continue
            admission = self.admitter.admit(name, data, round, offered_for)
            for selection in self.selections:
                selection.heard(admission, round)
            admissions = [*admissions, admission]
        for selection in self.selections:
            admissions = selection.within_room(admissions)
        return admissions

    def advantages(self, batch: Batch) -> Tensor:
        """Â of the round's rollouts: float32 [N]."""
        reward_N, group_N = torch.from_numpy(batch.reward_N), torch.from_numpy(batch.group_N)
        source_N, own_N = torch.from_numpy(batch.source_N), torch.from_numpy(batch.own_N)
        rewards = Rewards(reward_N, group_N, source_N, own_N, self.recipe.training.scale_rewards)
        return advantages(self.objective, rewards).float()

    def advance(self, batch: Batch, replaced: Sequence[ScoredGroup], seconds: float) -> None:
        """Move the cursor past a finished round."""
        sampled = sum(len(r) for r, own in zip(batch.rollouts, batch.own_N, strict=True) if own)
        sampled += sum(len(rollout) for scored in replaced for rollout in scored.group.rollouts)
        old = self.cursor
        self.cursor = Cursor(old.step + 1, old.seconds + seconds, old.tokens_sampled + sampled)

    def about_peer(self, name: str) -> dict[str, Any]:
        """What the selections say of another peer, as measures."""
        about = (selection.about(name, self.policy.detokenize) for selection in self.selections)
        return {measure: value for measures in about for measure, value in measures.items()}

    def about_round(self, round: int, clock: Stopwatch) -> dict[str, Any]:
        """Metrics of a finished round that do not come from rollouts."""
        return {
            "step": self.cursor.step,
            "learning_rate": self.learning_rate(round),
            "tokens_sampled": self.cursor.tokens_sampled,
            "step_time": clock.total,
            **{f"time/{name}": seconds for name, seconds in clock.laps.items()},
        }


class _PromptIds(dict[int, Ints]):
    """Token ids of training prompts, each rendered at its first use."""

    def __init__(self, prompts: Sequence[Prompt], render: Callable[[Prompt], Ints]) -> None:
        super().__init__()
        self._prompts, self._render = prompts, render

    def __missing__(self, item: int) -> Ints:
        self[item] = self._render(self._prompts[item])
        return self[item]


class Stopwatch:
    """Seconds per stage of a round."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._began

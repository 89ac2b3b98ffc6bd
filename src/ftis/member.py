"""A peer as its swarm knows it: it writes its own groups as a message, and judges the others' messages.

A member owns no model. :class:`ftis.peer.Peer` adds one that samples and learns; a trainer of TRL brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ftis.admission import Admission, Admitter, Collected, Reason, rejected
from ftis.advantages import Rewards
from ftis.codec import Header, Message, encode
from ftis.config import FtisError, PeerConfig, Recipe
from ftis.learning import Update
from ftis.measures import RoundExchange, RoundRecord, Stopwatch, round_record
from ftis.metric_keys import NO_NUMBERS, TOKENS_SAMPLED
from ftis.objectives import Objective, advantages
from ftis.prompts import Task
from ftis.rollouts import Batch, Decode, Group, Ints, Prompt
from ftis.sampling import Decoding
from ftis.schedule import assigned
from ftis.selection import Chosen, Judged, Selection, select


@dataclass(frozen=True)
class Outgoing:
    """A peer's offer in a round, and the peers that it leaves unheard.

    Attributes:
        message: the encoded groups.
        items: the prompts of the groups.
        skip: peers that are neither waited for nor heard.
        offers_only: peers that are waited for, but whose messages are not fetched.
    """

    round: int
    message: bytes
    items: tuple[int, ...]
    skip: frozenset[str] = frozenset()
    offers_only: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cursor:
    """A peer's progress. Other totals are sums over metrics.jsonl."""

    step: int = 0
    """Finished rounds."""
    seconds: float = 0.0
    tokens_sampled: int = 0


class PromptIds:
    """Token ids of training prompts. Each is rendered at its first use: once a run, or once a round if prompts vary.

    Attributes:
        by_round: whether a problem has another prompt in each round. Only the newest prompt is kept.
    """

    def __init__(self, prompts: Sequence[Prompt], render: Callable[[Prompt], Ints], by_round: bool = False) -> None:
        self._prompts, self._render, self.by_round = prompts, render, by_round
        self._newest: dict[int, tuple[int | None, Ints]] = {}

    def __call__(self, item: int, round: int | None) -> Ints:
        round = round if self.by_round else None
        known_for, ids = self._newest.get(item, (None, None))
        if ids is None or known_for != round:
            ids = self._render(replace(self._prompts[item], round=round))
            self._newest[item] = round, ids
        return ids


@dataclass
class Member:
    """One participant of a swarm: its view of the task, its checks of others, and its progress.

    Attributes:
        recipe: lists exactly the peers of this swarm: only this one if it trains alone.
        render: a problem → the token ids of its prompt.
        prompt_ids: (item, round) → the token ids of the training prompt.
        detokenize: token ids of a completion → its text.
        write: puts own groups into the form of the exchange: as they are, or as text.
        share: round → how many of its prompts this peer samples.
    """

    config: PeerConfig
    recipe: Recipe
    task: Task
    render: Callable[[Prompt], Ints]
    prompt_ids: PromptIds
    admitter: Admitter
    header: Header
    objective: Objective
    selections: tuple[Selection, ...]
    detokenize: Decode
    write: Callable[[Sequence[Group]], Sequence[Group]] = tuple
    cursor: Cursor = field(default_factory=Cursor)

    def __post_init__(self) -> None:
        self.decoding = Decoding.of(self.recipe.sampling)
        self.share: Callable[[int], int] = lambda round: self.recipe.prompts_per_peer

    @property
    def name(self) -> str:
        return self.config.name

    def assigned(self, peer: str, round: int) -> list[int]:
        """The training prompts that ``peer`` may sample in a round."""
        return assigned(self.recipe, len(self.task.train), peer, round)

    def problem(self, item: int, round: int) -> Prompt:
        """A training problem as the peers draw it in a round."""
        return replace(self.task.train[item], round=round)

    def own_prompts(self, round: int) -> list[int]:
        """The training prompts that this peer samples in a round, ascending."""
        return sorted(self.assigned(self.name, round)[: self.share(round)])

    def outgoing(self, round: int, groups: Sequence[Group]) -> Outgoing:
        """Encode groups as this peer's message of a round.

        A group is not sent if its environment took too long for a turn. A receiver's environment may answer in time,
        and the episode would lack its next turn.
        """
        groups = [group for group in groups if not any(rollout.overdue for rollout in group.rollouts)]
        message = encode(Message(replace(self.header, round=round), tuple(self.write(groups))))
        others = [peer.name for peer in self.recipe.peers if peer.name != self.name]
        unwanted = [n for n in others if not wanted(self.selections, n, round, self.assigned(n, round))]
        items = tuple(group.item for group in groups)
        return Outgoing(round, message, items, self.skipped(round), frozenset(unwanted))

    def skipped(self, round: int) -> frozenset[str]:
        """Peers that a selection skips in the round: they are neither waited for nor heard."""
        return frozenset(name for selection in self.selections for name in selection.skipped(round))

    def admit(self, collected: Collected, round: int) -> Sequence[Admission]:
        """Admit each message, tell the selections the outcome, and pass over groups beyond their limits."""
        admissions: list[Admission] = []
        in_time = [(name, round, data) for name, data in sorted(collected.messages.items())]
        for name, offered_for, data in [*in_time, *collected.late]:
            if name in self.skipped(round):
                admissions.append(rejected(name, Reason.SET_ASIDE, "a selection skips this peer in this round"))
                continue
            admission = self.admitter.admit(name, data, round, offered_for)
            for selection in self.selections:
                selection.heard(admission, round)
            admissions.append(admission)
        within: Sequence[Admission] = admissions
        for selection in self.selections:
            within = selection.within_room(within)
        return within

    def advantages(self, batch: Batch) -> Tensor:
        """Â of a round's rollouts: float32 [N]."""
        columns = (batch.reward_N, batch.group_N, batch.source_N, batch.own_N)
        reward_N, group_N, source_N, own_N = map(torch.from_numpy, columns)
        rewards = Rewards(reward_N, group_N, source_N, own_N, self.recipe.training.scale_rewards)
        return advantages(self.objective, rewards).float()

    def choose(self, judged: Judged) -> Chosen:
        """The share of each rollout, after every selection has examined the batch."""
        for selection in self.selections:
            selection.examine(judged)
        return select(judged, self.selections)

    def record(
        self,
        judged: Judged,
        chosen: Chosen,
        update: Update,
        heard: RoundExchange,
        clock: Stopwatch,
        learning_rate: float,
        end_ids: Collection[int],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> RoundRecord:
        """End a round: move the cursor past it, and compile its record. ``more`` metrics stand first."""
        batch, old = judged.batch, self.cursor
        sampled = sum(len(rollout) for rollout, own in zip(batch.rollouts, batch.own_N, strict=True) if own)
        self.cursor = new = Cursor(old.step + 1, old.seconds + clock.total, old.tokens_sampled + sampled)
        own = {"step": new.step, "learning_rate": learning_rate, TOKENS_SAMPLED: new.tokens_sampled}
        return round_record(
            judged,
            chosen,
            update,
            heard,
            recipe=self.recipe,
            own=self.name,
            end_ids=end_ids,
            prompts=self.task.train,
            about_peers={peer.name: self._about(peer.name) for peer in self.recipe.peers},
            about={**more, **own, **clock.metrics()},
        )

    def _about(self, name: str) -> dict[str, Any]:
        """Measures that the selections have of a peer."""
        about = (selection.about(name, self.detokenize) for selection in self.selections)
        found = {measure: value for measures in about for measure, value in measures.items()}
        for measure, value in found.items():  # records with anything else could not be read again
            if not isinstance(value, int | float | None) and not measure.endswith(NO_NUMBERS):
                raise FtisError(f"a selection's about({name!r}) gives {measure} = {value!r}: give numbers")
        return found


def wanted(selections: Sequence[Selection], peer: str, round: int, items: Sequence[int]) -> Sequence[int]:
    """The prompts in ``items``, assigned to another peer, that every selection wants."""
    for selection in selections:
        items = selection.wanted(peer, round, items)
    return items

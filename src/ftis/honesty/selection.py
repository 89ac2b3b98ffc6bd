"""The honesty test in a run: the evidence on every sender, and quarantine for one whose reports cannot be true."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftis.config import Recipe
from ftis.honesty.contexts import Past
from ftis.honesty.evidence import Detector, Floats64, ratios_of, share_of
from ftis.honesty.frequent import Frequent, blocks_of
from ftis.honesty.spellings import Spellings
from ftis.metric_keys import EVIDENCE, FOUND_AFTER, FOUND_IN, QUARANTINED, TELLING, TESTED, THRESHOLD
from ftis.rollouts import Decode, Floats, Ints, Rollout
from ftis.selection import Judged, Selection

PASSAGES = 3
"""The most passages that are shown, of those that gave the evidence."""
PASSAGE_TOKENS = 40
"""The most tokens of a passage that are shown. The text is the sender's, and every later round's record has it."""
LEAST_GAIN = 3.0
"""Nats that a passage must have given to be shown."""


@dataclass(frozen=True, eq=False)
class SentRound:
    """One sender's rollouts of one round.

    Attributes:
        round: in which they were sampled.
        rollouts: group after group, as the sender sampled them.
        group_N: the group of each, ascending, from 0.
        old_logp: log π_old of each rollout's tokens; None if it is not known.
        raised_N: whether Â > 0.
    """

    round: int
    rollouts: Sequence[Rollout]
    group_N: npt.NDArray[np.int64]
    old_logp: Sequence[Floats | None]
    raised_N: npt.NDArray[np.bool_]


def joined(messages: Sequence[SentRound]) -> SentRound:
    """Messages of one round as if one sender had sent them."""
    groups = [int(message.group_N[-1]) + 1 for message in messages]
    firsts = np.cumsum(groups) - groups
    return SentRound(
        round=messages[0].round,
        rollouts=[rollout for message in messages for rollout in message.rollouts],
        group_N=np.concatenate([message.group_N + first for message, first in zip(messages, firsts, strict=True)]),
        old_logp=[logp for message in messages for logp in message.old_logp],
        raised_N=np.concatenate([message.raised_N for message in messages]),
    )


class Accusation(NamedTuple):
    """A finding about one sender. Its fields are attributes of :class:`Sender`."""

    found: int
    found_after: int
    passages: Sequence[Sequence[int]]


@dataclass
class Sender:
    """Knowledge of one sender, or of all as if they were one.

    Attributes:
        newest: the round of its last message that was tested; −1 before the first.
        tokens: its tokens that were tested.
        found: the round whose message took the evidence past the threshold.
        found_after: tokens tested until then, to the end of the rollout that took the evidence past.
        passages: the learner's token ids that gave most of that message's evidence.
        raised: completions of the newest round with Â > 0, by the sender's own token numbers.
    """

    detector: Detector
    frequent: Frequent
    past: Past = field(default_factory=Past)
    spellings: Spellings = field(default_factory=Spellings)
    newest: int = -1
    tokens: int = 0
    found: int | None = None
    found_after: int | None = None
    passages: list[list[int]] = field(default_factory=list)
    raised: list[Ints] = field(default_factory=list)

    @property
    def nats(self) -> float:
        """The evidence since the best start, in nats: half of the bet is on completions, and half on single tokens."""
        return float(np.logaddexp(self.detector.nats, self.frequent.nats)) - math.log(2)

    def add(self, message: SentRound, threshold: float) -> bool:
        """Take in a message. Returns whether the evidence after one of its groups is at least ``threshold``."""
        if message.round > self.newest:
            self._begin(message.round)
        sent, group_N = self.spellings.as_sent(message.rollouts), message.group_N
        # The learner's tokens of a text depend on all of it, so π_old of them is no function of the sender's past.
        known = [None if one.sent else old for one, old in zip(message.rollouts, message.old_logp, strict=True)]
        ratios = ratios_of(sent, group_N, self.past, known)
        # An advantage may depend on the round's other messages, so it counts for later rounds alone.
        self.raised += [one.completion_ids for one, up in zip(sent, message.raised_N, strict=True) if up]
        nats_N, gains_NU = self.detector.add(ratios)
        ends_P, block_N = np.flatnonzero(np.diff(group_N, append=-1)), blocks_of(group_N)
        of_tokens_N = np.full(len(sent), -np.inf)
        of_tokens_N[np.flatnonzero(np.diff(block_N, append=-1))] = self.frequent.add(sent, block_N)
        lengths = [len(rollout) for rollout in sent]
        over_N = np.logaddexp(nats_N, of_tokens_N) - math.log(2) >= threshold
        over_P = over_N[ends_P]
        if over_P.any() and self.found is None:
            group = over_P.argmax()
            first = int((over_N & (group_N == group)).argmax())
            self.found, self.found_after = message.round, self.tokens + sum(lengths[: first + 1])
            end = ends_P[group]
            gains = self.frequent.gains(sent) if of_tokens_N[end] > nats_N[end] else gains_NU
            self.passages = telling_passages(message.rollouts, gains)
        self.tokens += sum(lengths)
        return bool(over_P.any())

    def _begin(self, round: int) -> None:
        self.newest = round
        self.past.add_raised(self.raised)
        self.raised = []
        if self.spellings.is_full:
            new_number = self.spellings.shrink(self.frequent.tokens)
            self.past.renumber(new_number)
            self.frequent.renumber(new_number)

    def state(self) -> Mapping[str, Any]:
        """A JSON object from which :meth:`of` goes on."""
        parts = {name: getattr(self, name).state() for name in ("frequent", "past", "spellings")}
        raised = [ids.tolist() for ids in self.raised]
        return {**vars(self), **parts, "detector": asdict(self.detector), "raised": raised}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Sender:
        """Go on from :meth:`state`."""
        detector, past = Detector(**state["detector"]), Past()
        frequent, spellings = Frequent(detector.groups_of_run), Spellings(**state["spellings"])
        frequent.restore(state["frequent"])
        past.restore(state["past"])
        raised = [np.array(ids, np.int32) for ids in state["raised"]]
        parts = {"detector": detector, "frequent": frequent, "past": past, "spellings": spellings, "raised": raised}
        return cls(**{**state, **parts})


@dataclass
class HonestyTest(Selection):
    """Quarantine of a sender, for good, once its tokens cannot have been drawn from the probabilities that it reports.

    One liar may hold several keys, so a second test treats all senders as one. This test drops and forgets a message
    that would make the evidence suffice, and accuses nobody.

    In a whole run, the probability is at most ``honesty.alpha`` that some peer accuses an honest sender, or refuses a
    message while all are honest. All peers must test with that α; docs/method.md has the other conditions.

    A sender's messages are tested in the order of their rounds. A message that comes after one of a later round cannot
    be tested, and nothing is learned from it.

    Attributes:
        recipe: with exactly the peers of this swarm.
        senders: by name.
        together: all senders as one.
        refused: sender and round of the messages from which nothing is learned now, for other reasons than quarantine.
    """

    recipe: Recipe
    name: str = "honesty"
    senders: dict[str, Sender] = field(default_factory=dict)
    together: Sender = field(init=False)
    refused: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.together = self._new(len(self.recipe.peers) - 1)

    @property
    def threshold(self) -> float:
        """The nats that either test needs: log(n m (m − 1) t / α) in a run of m peers with n groups of each sender.

        The number t of tests is 1 in a pair, else 2.
        """
        m = len(self.recipe.peers)
        return math.log(self._groups_of_run * m * (m - 1) * min(m - 1, 2) / self.recipe.honesty.alpha)

    @property
    def quarantined(self) -> frozenset[str]:
        """Peers that this one no longer learns from."""
        found = frozenset(name for name, sender in self.senders.items() if sender.found is not None)
        return found if self._acts else frozenset()

    @property
    def _acts(self) -> bool:
        return self.recipe.honesty.action == "quarantine"

    @property
    def _groups_of_run(self) -> int:
        return self.recipe.training.rounds * self.recipe.most_prompts_per_peer

    def _new(self, senders: int = 1) -> Sender:
        groups = senders * self._groups_of_run
        return Sender(Detector(groups, share_of(self.recipe.sampling.max_completion_length)), Frequent(groups))

    def _sender(self, name: str) -> Sender:
        """The entry of a peer, new if it was not heard before."""
        if name not in self.senders:
            self.senders[name] = self._new()
        return self.senders[name]

    def accuse(self, name: str, accusation: Accusation) -> None:
        """Take over an accusation of rounds that were undone."""
        sender = self._sender(name)
        if sender.found is None:
            sender.found, sender.found_after, passages = accusation
            sender.passages = [list(ids) for ids in passages]

    def skipped(self, round: int) -> Collection[str]:
        return self.quarantined

    def examine(self, judged: Judged) -> None:
        self.refused.clear()
        foreign = _foreign(judged)
        # Senders under least suspicion come first. The order must not depend on these messages themselves.
        before = {name: self._sender(name).nats for name, _ in foreign}
        old_logp_N, passed = judged.spread(judged.old_logp, None), list[tuple[str, SentRound]]()
        for name, round in sorted(foreign, key=lambda sent: (sent[1], before[sent[0]], sent[0])):
            sender = self._sender(name)
            if round <= sender.newest:
                self.refused.add((name, round))
                continue
            message = _message(judged, old_logp_N, name, round)
            if not sender.add(message, self.threshold) and sender.found is None:
                passed.append((name, message))
        if len(self.recipe.peers) > 2:
            for _, of_round in groupby(passed, lambda one: one[1].round):
                self._test_together(list(of_round))

    def _test_together(self, sent: Sequence[tuple[str, SentRound]]) -> None:
        """Refuse those messages of one round that take the evidence against all senders, as one, past the threshold.

        All messages are tried as one and, if that fails, one by one. So nothing is refused unless the trial of all
        fails, and the bound on this failure holds for a run's first refusal. Messages of a round before the newest
        tested one are left out: the senders of the newer messages may have been trained on them.
        """
        messages = [message for _, message in sent]
        if messages[0].round < self.together.newest:
            return
        tried, message = copy.deepcopy(self.together), joined(messages)
        if self.recipe.training.mode == "horizontal":
            # Whether Â ≠ 0, and so whether log π_old is known, depends on messages of this round that come later.
            message = replace(message, old_logp=[None] * len(message.rollouts))
        if not tried.add(message, self.threshold):
            self.together = tried
        elif len(sent) == 1:
            self.refused.add((sent[0][0], message.round))
        else:
            for one in sent:
                self._test_together([one])

    def shares(self, judged: Judged) -> Tensor:
        if not self._acts:
            return torch.ones(len(judged.rows))
        quarantined, rounds = self.quarantined, judged.batch.round_N[judged.rows].tolist()
        sent = zip(judged.source_names(), rounds, strict=True)
        return torch.tensor([float(one[0] not in quarantined and one not in self.refused) for one in sent])

    def about(self, peer: str, decode: Decode) -> Mapping[str, Any]:
        if peer not in self.senders:
            return {}
        sender = self.senders[peer]
        measures: dict[str, Any] = {
            QUARANTINED: peer in self.quarantined,
            EVIDENCE: max(sender.nats, 0.0),
            THRESHOLD: self.threshold,
            TESTED: sender.tokens,
            "honesty/refused": self._acts and any(name == peer for name, _ in self.refused),
            "honesty/evidence_together": max(self.together.nats, 0.0),
        }
        if sender.found is not None:
            measures[FOUND_IN] = sender.found + 1
            measures[FOUND_AFTER] = sender.found_after
            measures[TELLING] = [decode(ids) for ids in sender.passages]
        return measures

    def state(self) -> Mapping[str, Any]:
        return {
            "together": self.together.state(),
            "senders": {name: sender.state() for name, sender in self.senders.items()},
        }

    @staticmethod
    def found_in(state: Mapping[str, Any]) -> dict[str, Accusation]:
        """The accusation of each sender that a saved state accuses."""
        accused = [(name, one) for name, one in state.get("senders", {}).items() if one["found"] is not None]
        return {name: Accusation(*(one[key] for key in Accusation._fields)) for name, one in accused}

    @staticmethod
    def found_by(measures: Mapping[str, Mapping[str, Any]]) -> dict[str, Accusation]:
        """As :meth:`found_in`, from a round's measures :meth:`about` peers. Passages, which are text, are left out."""
        accused = [(name, row) for name, row in measures.items() if FOUND_IN in row]
        return {name: Accusation(row[FOUND_IN] - 1, row[FOUND_AFTER], []) for name, row in accused}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.together = Sender.of(state["together"])
        self.senders = {name: Sender.of(saved) for name, saved in state["senders"].items()}


def _message(judged: Judged, old_logp_N: Sequence[Floats | None], name: str, round: int) -> SentRound:
    """One sender's rollouts of one round, and log π_old of those that came in time."""
    batch = judged.batch
    rows = np.flatnonzero((batch.source_N == batch.sources.index(name)) & (batch.round_N == round))
    # The learner's model may have been trained on copies of what comes late.
    in_time = round == batch.round_N[batch.own_N].max(initial=-1)
    _, group_N = np.unique(batch.item_N[rows], return_inverse=True)
    rollouts = [batch.rollouts[row] for row in rows]
    known = [old_logp_N[row] if in_time else None for row in rows.tolist()]
    return SentRound(round, rollouts, group_N, known, judged.advantage_N.numpy()[rows] > 0)


def _foreign(judged: Judged) -> set[tuple[str, int]]:
    """Senders and rounds of the messages in a batch."""
    batch, foreign_N = judged.batch, ~judged.batch.own_N
    sources, rounds = batch.source_N[foreign_N].tolist(), batch.round_N[foreign_N].tolist()
    return {(batch.sources[source], round) for source, round in zip(sources, rounds, strict=True)}


def honesty_test(recipe: Recipe, own: str) -> HonestyTest | None:
    """The test that ``[honesty]`` sets; None if it is off, or there is nobody to test."""
    return HonestyTest(recipe) if recipe.honesty.action != "off" and len(recipe.peers) > 1 else None


def telling_passages(rollouts: Sequence[Rollout], gains_NU: Floats64) -> list[list[int]]:
    """The passages that gave most evidence, summed over rollouts: token ids, the most first.

    Args:
        gains_NU: the nats that each of the sender's tokens added to the evidence, [N, U].
    """
    found: Counter[tuple[int, ...]] = Counter()
    for rollout, gains in zip(rollouts, gains_NU, strict=True):
        units = np.arange(len(rollout)) if rollout.unit is None else rollout.unit
        gains_U = gains[: len(rollout.gen_logp)]
        if rollout.sent is not None:
            tokens_U = rollout.sent.tokens_U
            gains_U = np.add.reduceat(gains[: tokens_U.sum()], np.cumsum(tokens_U) - tokens_U)
        first, last = densest(gains_U)
        gain = gains_U[first : last + 1].sum()
        if gain >= LEAST_GAIN:
            inside = (units >= first) & (units <= last)
            found[tuple(rollout.completion_ids[inside][:PASSAGE_TOKENS].tolist())] += gain
    return [list(ids) for ids, _ in found.most_common(PASSAGES)]


def densest(gains: Floats64) -> tuple[int, int]:
    """The first and last place of the run of neighbours with the largest sum; the earliest of several."""
    sums = np.concatenate([[0.0], np.cumsum(gains)])
    lowest = np.minimum.accumulate(sums)[:-1]
    last = int(np.argmax(sums[1:] - lowest))
    return int(np.argmin(sums[: last + 1])), last

"""The honesty test in a run: the evidence on every sender, and quarantine for one whose reports cannot be true."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.config import Recipe
from ftis.honesty.contexts import Past
from ftis.honesty.evidence import Detector, Floats64, ratios_of, share_of
from ftis.honesty.frequent import Frequent
from ftis.honesty.spellings import Spellings
from ftis.rollouts import Decode, Floats, Rollout, Rows
from ftis.selection import Judged, Selection

PASSAGES = 3
"""Passages that are shown of what gave the evidence."""
PASSAGE_TOKENS = 40
"""Tokens of a passage that are shown: it is the sender's text, and every later round's record has it."""
LEAST_GAIN = 3.0
"""Nats that a passage must have given to be shown."""


@dataclass
class Sender:
    """Knowledge of one sender.

    Attributes:
        newest: the round of its last message that was tested; −1 before the first.
        tokens: its tokens that were tested.
        found: the round whose message took the evidence past the threshold.
        found_after: tokens tested until then, to the end of the rollout that did it.
        passages: the learner's token ids that gave most of that message's evidence.
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

    @property
    def nats(self) -> float:
        """The evidence since the best start: half of the bet is on completions, and half on single tokens."""
        return float(np.logaddexp(self.detector.nats, self.frequent.nats)) - math.log(2)


@dataclass
class HonestyTest(Selection):
    """Quarantines a sender for good once its tokens cannot have been drawn from the probabilities that it reports.

    Anybody accuses an honest sender with a probability of at most ``honesty.alpha`` in a whole run, if all its peers
    test with that α: docs/method.md says under which conditions. A sender's messages are tested in the order of their
    rounds. A message that comes after a later one cannot be tested, and nothing is learned of it.

    Attributes:
        recipe: with exactly the peers of this swarm.
        senders: by name.
    """

    recipe: Recipe
    name: str = "honesty"
    senders: dict[str, Sender] = field(default_factory=dict)
    _untested: set[tuple[str, int]] = field(default_factory=set)

    @property
    def threshold(self) -> float:
        """The nats at which a sender is accused: log(n m (m − 1) / α), n groups of a sender in a run of m peers."""
        m = len(self.recipe.peers)
        return math.log(self._groups_of_run * m * (m - 1) / self.recipe.honesty.alpha)

    @property
    def quarantined(self) -> frozenset[str]:
        """Peers that this one no longer learns from."""
        found = frozenset(name for name, sender in self.senders.items() if sender.found is not None)
        return found if self.recipe.honesty.action == "quarantine" else frozenset()

    @property
    def _groups_of_run(self) -> int:
        return self.recipe.training.rounds * self.recipe.prompts_per_peer

    def _sender(self, name: str) -> Sender:
        """The entry of a peer, new if it was not heard before."""
        if name not in self.senders:
            share = share_of(self.recipe.sampling.max_completion_length)
            self.senders[name] = Sender(Detector(self._groups_of_run, share), Frequent(self._groups_of_run))
        return self.senders[name]

    def accuse(self, name: str, found: int, found_after: int, passages: Sequence[Sequence[int]]) -> None:
        """Take over an accusation of rounds that were undone; the arguments are :class:`Sender`'s."""
        sender = self._sender(name)
        if sender.found is None:
            sender.found, sender.found_after, sender.passages = found, found_after, [list(ids) for ids in passages]

    def skipped(self, round: int) -> Collection[str]:
        return self.quarantined

    def examine(self, judged: Judged) -> None:
        batch = judged.batch
        now = int(batch.round_N[batch.own_N].max(initial=-1))
        known_N = judged.spread(judged.old_logp, None)
        self._untested.clear()
        for source, name in enumerate(batch.sources):
            foreign_N = (batch.source_N == source) & ~batch.own_N
            for round in np.unique(batch.round_N[foreign_N]).tolist():
                rows = np.flatnonzero(foreign_N & (batch.round_N == round))
                # The learner's model may have been trained on copies of what comes late.
                known = [known_N[row] if round == now else None for row in rows.tolist()]
                self._test(name, round, judged, rows, known)

    def _test(self, name: str, round: int, judged: Judged, rows: Rows, old_logp: Sequence[Floats | None]) -> None:
        """Take in the message that ``rows`` of the batch make up, with log π_old as far as it is known."""
        batch = judged.batch
        sender = self._sender(name)
        if round <= sender.newest:
            self._untested.add((name, round))
            return
        sender.newest = round
        rollouts = [batch.rollouts[row] for row in rows.tolist()]
        _, group_N = np.unique(batch.item_N[rows], return_inverse=True)
        if sender.spellings.used_up:
            sender.spellings, sender.past = Spellings(), Past()
            sender.frequent = Frequent(self._groups_of_run)
        sent = sender.spellings.as_sent(rollouts)
        # The learner's tokens of a text depend on all of it, so π_old of them is no function of the sender's past.
        known = [None if rollout.sent else old for rollout, old in zip(rollouts, old_logp, strict=True)]
        ratios = ratios_of(sent, group_N, sender.past, known)
        # Rewards come with a whole message, so they tell about later messages only.
        raised = [one.completion_ids for one, up in zip(sent, judged.advantage_N[rows] > 0, strict=True) if up]
        sender.past.add_raised(raised)
        log_choices = self._log_choices(len(ratios.known_P))
        nats_N, gains_NU = sender.detector.add(ratios, log_choices)
        ends_P = np.flatnonzero(np.diff(group_N, append=-1))
        of_tokens_P = sender.frequent.add(sent, group_N, log_choices)
        by_tokens_P = of_tokens_P > nats_N[ends_P]
        nats_N[ends_P] = np.logaddexp(nats_N[ends_P], of_tokens_P)
        lengths, over_N = [len(rollout) for rollout in sent], nats_N - math.log(2) >= self.threshold
        accused_P = over_N[ends_P]
        if accused_P.any() and sender.found is None:
            group = accused_P.argmax()
            first = int((over_N & (group_N == group)).argmax())
            sender.found, sender.found_after = round, sender.tokens + sum(lengths[: first + 1])
            gains = sender.frequent.gains(sent) if by_tokens_P[group] else gains_NU
            sender.passages = telling_passages(rollouts, gains)
        sender.tokens += sum(lengths)

    def _log_choices(self, groups: int) -> float:
        """log of the number of ways to choose the delivered ``groups`` among all that the sender may have sampled."""
        sampled = max(self.recipe.prompts_per_peer + self.recipe.reserve_per_peer, groups)
        return math.log(math.comb(sampled, groups)) if self.recipe.reserve_per_peer else 0.0

    def shares(self, judged: Judged) -> Tensor:
        if self.recipe.honesty.action != "quarantine":
            return torch.ones(len(judged.rows))
        quarantined, rounds = self.quarantined, judged.batch.round_N[judged.rows].tolist()
        sent = zip(judged.source_names(), rounds, strict=True)
        return torch.tensor([float(one[0] not in quarantined and one not in self._untested) for one in sent])

    def about(self, peer: str, decode: Decode) -> Mapping[str, Any]:
        if peer not in self.senders:
            return {}
        sender = self.senders[peer]
        measures: dict[str, Any] = {
            "honesty/quarantined": peer in self.quarantined,
            "honesty/evidence": max(sender.nats, 0.0),
            "honesty/threshold": self.threshold,
            "honesty/tokens": sender.tokens,
        }
        if sender.found is not None:
            measures["honesty/found_in_round"] = sender.found + 1
            measures["honesty/found_after_tokens"] = sender.found_after
            measures["honesty/passages"] = [decode(ids) for ids in sender.passages]
        return measures

    def state(self) -> Mapping[str, Any]:
        return {
            name: {
                **vars(sender),
                "detector": asdict(sender.detector),
                "frequent": sender.frequent.state(),
                "past": sender.past.state(),
                "spellings": sender.spellings.state(),
            }
            for name, sender in self.senders.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.senders = {}
        for name, saved in state.items():
            detector, frequent, past = Detector(**saved["detector"]), Frequent(self._groups_of_run), Past()
            frequent.restore(saved["frequent"])
            past.restore(saved["past"])
            read = {"detector": detector, "frequent": frequent, "past": past}
            self.senders[name] = Sender(**{**saved, **read, "spellings": Spellings(**saved["spellings"])})


def honesty_test(recipe: Recipe, own: str) -> HonestyTest | None:
    """The test that ``[honesty]`` sets; None if it is off, or there is nobody to test."""
    return HonestyTest(recipe) if recipe.honesty.action != "off" and len(recipe.peers) > 1 else None


def telling_passages(rollouts: Sequence[Rollout], gains_NU: Floats64) -> list[list[int]]:
    """The passages that gave most evidence, summed over rollouts: token ids, the most first.

    Args:
        gains_NU: what each of the sender's tokens added to the evidence, in nats.
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

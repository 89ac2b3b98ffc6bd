"""Texts that others brought, and that the learner's own answers take up: docs/method.md has the proof. No torch.

Axes: ``_T`` tested n-grams, ``_P`` bets on taking up, ``_W`` odds, ``_V`` n-grams of the round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln

from ftis.guards import falls
from ftis.guards.grams import Floats64, Grams, NGram, parts_of
from ftis.rollouts import Batch, Bools, Floats, Rows

LEAST_MASS, LEAST_GROUPS = 0.01, 2
"""An n-gram is watched if completions with it have this part of others' positive Â, and belong to so many groups. The
text of one problem is in one group alone."""
WIDE = 1 / 2
"""An n-gram is tested from the first round on in which this part of the own groups holds it."""
USUAL = 1 / 5
"""ρ₀, the part of the own groups that may hold an n-gram. Steps of a calculation are in fewer."""
TAKEN_UP = np.array([2 / 5, 4 / 5])
"""The bets ρ on that part, if own answers took the n-gram up."""
ODDS = np.array([2, 5, 20])
"""The bets ω on an n-gram that helps: it multiplies the odds of a reward by so much."""
MUCH = 5
"""One of ``ODDS``. An n-gram is found only if evidence refutes that it multiplies the odds of a reward by this."""
MOST = 2**12
"""The most n-grams that are watched; that are tested and not found; that are found. Each of the first rounds adds at
most so many native ones."""
UNHELD = 16
"""A found n-gram is forgotten after so many own rounds without a completion that holds it."""


class Found(NamedTuple):
    """The longest of a round's newly found n-grams that one set of senders brought.

    Attributes:
        ids: its tokens.
        share: by sender, the part of its rewarded completions that hold the n-gram.
        more: the number of the other n-grams, without those inside another one.
    """

    ids: NGram
    share: Mapping[str, float]
    more: int


class PlantTest:
    """Evidence, for each n-gram that others brought, that own answers took it up, and that they are better with it.

    A group holds the n-grams of its completions. An n-gram is *native* if own groups held it in the first rounds. The
    test *watches* another n-gram once several groups of others' rewarded completions hold it in a later round and no
    own group does. After the next round in which many own groups hold it, it is *tested*: the bets begin, with R = 0,
    s = 1/2 in the first round and s = 1/(2 rounds) later, ::

        R ← (R + s) · Π_groups E,   E = ρ/ρ₀ if the group holds it, else (1 − ρ)/(1 − ρ₀)

    E is at most 1 in expectation as long as a group holds the n-gram with probability ρ₀ or less. For the j-th n-gram
    tested there are three such R, with H the E of log_help::

        it is taken up      if the mean over ρ of R with this E reaches j (j + 1)/α
        it helps            if the mean over ω of R with E = H reaches j (j + 1)/α
        it is no better     if R with E = 1/H at ω = MUCH reaches 1/α

    An n-gram is found if it is taken up, does not help, and is no better. Groups whose completions all hold it show
    nothing about the last. An n-gram is also spared if a shorter one inside it helps, or is taken up and not found: the
    longer one may only continue the shorter.

    Args:
        rounds: of the whole run.
        alpha: the most probability that an n-gram is found by mistake.

    Attributes:
        native: n-grams of own completions: from each of the first rounds, those in most groups.
        watched: n-gram → whether an own group has held it since; the newest, or last held, stand last.
        tested: n-grams by their number j.
        log_r: log R at each ρ, at each ω, and against ``MUCH``, by the same number.
        found: by number of a found n-gram, the last own round in which a completion held it.
        count: n-grams that were ever tested.
        own_rounds, own_groups: how many were taken in; these tell which rounds are the first.
        news: what was found in this round.
        holds_N: whether each rollout of this round holds an n-gram that was found and does not help.
    """

    def __init__(self, rounds: int, alpha: float) -> None:
        self.rounds, self.alpha = rounds, alpha
        self.count = self.own_rounds = self.own_groups = 0
        self.native: set[NGram] = set()
        self.watched: dict[NGram, bool] = {}
        self.tested: dict[int, NGram] = {}
        self.log_r: dict[int, Floats64] = {}
        self.found: dict[int, int] = {}
        self.news: list[Found] = []
        self.holds_N: Bools = np.zeros(0, np.bool_)

    def take(self, batch: Batch, advantage_N: Floats) -> None:
        """Take in a round.

        Args:
            batch: own groups and others'.
            advantage_N: Â of each rollout; others' rewarded completions are those with Â > 0.
        """
        n, own_N = len(batch), batch.own_N
        others_N = ~own_N & (advantage_N > 0)
        known = [*self.tested.values(), *self.watched]
        grams = Grams.of([*(r.completion_ids for r in batch.rollouts), *(np.array(ids, np.int32) for ids in known)])
        number_of = dict(zip(known, grams.whole_rows(n), strict=True))
        own_groups = batch.own_groups()
        own_groups_V = grams.groups(own_N, batch.item_N)
        first = self.own_rounds < falls.LEAST_ROUNDS or self.own_groups < falls.LEAST_GROUPS
        self.own_rounds += bool(own_groups)
        self.own_groups += len(own_groups)

        holds_TN = grams.holds([number_of[ids] for ids in self.tested.values()], n)
        self._test(batch, own_groups, others_N, holds_TN)

        wide = [ids for ids in self.watched if own_groups_V[number_of[ids]] >= max(2, WIDE * len(own_groups))]
        for ids in sorted(wide, key=lambda ids: -own_groups_V[number_of[ids]]):
            self.count += 1
            self.tested[self.count] = ids
            self.log_r[self.count] = np.full(len(TAKEN_UP) + len(ODDS) + 1, math.log(1 / 2))
            del self.watched[ids]
        for ids in [ids for ids in self.watched if own_groups_V[number_of[ids]]]:
            del self.watched[ids]
            self.watched[ids] = True
        if first:
            often = np.argsort(-own_groups_V, kind="stable")[:MOST]
            self.native.update(grams.ids_of(often[own_groups_V[often] > 0]))
        else:
            self._watch(grams, own_groups_V, others_N, batch.item_N, advantage_N)
        self._leave()

    def _test(self, batch: Batch, own_groups: Sequence[Rows], others_N: Bools, holds_TN: Bools) -> None:
        """Add the evidence of a round to what is tested, and find."""
        hits_T, helps_TW = np.zeros(len(holds_TN)), np.zeros((len(holds_TN), len(ODDS)))
        for rows in own_groups if len(holds_TN) else ():
            held_T = holds_TN[:, rows].sum(1)
            if len(held := np.flatnonzero(held_T)):
                rewarded = batch.reward_N[rows] > batch.reward_N[rows].mean()
                both_T = holds_TN[:, rows[rewarded]].sum(1)
                for t in held:
                    helps_TW[t] += log_help(len(rows), int(held_T[t]), int(rewarded.sum()), int(both_T[t]))
            hits_T += held_T > 0
        hits_T1, groups = hits_T[:, None], len(own_groups)
        taken_up_TP = hits_T1 * np.log(TAKEN_UP / USUAL) + (groups - hits_T1) * np.log((1 - TAKEN_UP) / (1 - USUAL))
        evidence = np.concatenate([taken_up_TP, helps_TW, -helps_TW[:, ODDS == MUCH]], axis=1)

        for j, nats in zip(self.tested, evidence, strict=True):
            self.log_r[j] += nats
        self.holds_N = np.zeros(len(batch), np.bool_)
        new, spared = dict[NGram, Mapping[str, float]](), set[NGram]()
        holds_by_j = dict(zip(self.tested, holds_TN, strict=True))
        for j, ids in sorted(self.tested.items(), key=lambda item: len(item[1])):
            holds_N, (taken_up, helps, no_better) = holds_by_j[j], self._shown(j)
            free = not helps and spared.isdisjoint(parts_of(ids))
            if j not in self.found and free and taken_up and no_better:
                self.found[j] = self.own_rounds
                new[ids] = self._shares(batch, others_N, holds_N)
            if j in self.found and holds_N.any():
                self.found[j] = self.own_rounds
                if free:
                    self.holds_N |= holds_N
            if helps or (taken_up and j not in self.found):
                spared.add(ids)
        for j in self.tested:
            self.log_r[j] = np.logaddexp(self.log_r[j], -math.log(2 * self.rounds))
        self.news = news_of(new, [self.tested[j] for j in self.found]) if new else []

    def _shown(self, number: int) -> tuple[bool, bool, bool]:
        """Whether an n-gram is taken up; whether it helps; whether it is no better by ``MUCH``."""
        log_r, helps, times = self.log_r[number], len(TAKEN_UP), number * (number + 1)

        def reaches(some: Floats64, times: int) -> bool:
            return float(np.logaddexp.reduce(some)) - math.log(len(some)) >= math.log(times / self.alpha)

        return reaches(log_r[:helps], times), reaches(log_r[helps:-1], times), reaches(log_r[-1:], 1)

    def _watch(self, grams: Grams, own_groups_V: Rows, others_N: Bools, item_N: Rows, advantage_N: Floats) -> None:
        groups_V, mass_V = grams.groups(others_N, item_N), grams.sums(np.where(others_N, advantage_N, 0))
        enough = (groups_V >= LEAST_GROUPS) & (mass_V >= LEAST_MASS * float(advantage_N[others_N].sum()))
        wanted = np.flatnonzero(enough & (own_groups_V == 0))
        known = {*self.native, *self.tested.values(), *self.watched}
        new = grams.ids_of(wanted[np.argsort(mass_V[wanted], kind="stable")])
        self.watched.update((ids, False) for ids in new if ids not in known)

    def _leave(self) -> None:
        """Bound each list. N-grams that own answers held since have a bound of their own: no flood evicts them."""
        for held in (False, True):
            bounded = [ids for ids, since in self.watched.items() if since == held]
            for ids in bounded[: -MOST // 2]:
                del self.watched[ids]
        unheld = [j for j, last in self.found.items() if self.own_rounds - last >= UNHELD]
        open_ones = sorted((j for j in self.tested if j not in self.found), key=lambda j: self.log_r[j].max())
        oldest = sorted(self.found, key=lambda j: self.found[j])
        for number in {*unheld, *oldest[:-MOST], *open_ones[:-MOST]}:
            del self.tested[number], self.log_r[number]
            self.found.pop(number, None)

    def _shares(self, batch: Batch, others_N: Bools, holds_N: Bools) -> Mapping[str, float]:
        """Of each sender's rewarded completions, the share that holds an n-gram."""
        rows = {name: others_N & (batch.source_N == source) for source, name in enumerate(batch.sources)}
        return {name: float(holds_N[sent_N].mean()) for name, sent_N in rows.items() if (holds_N & sent_N).any()}

    def state(self) -> Mapping[str, Any]:
        """A JSON object, with which another test goes on."""
        return {
            "counts": [self.count, self.own_rounds, self.own_groups],
            "native": sorted(self.native),
            "watched": list(self.watched.items()),
            "tested": [[j, ids, self.log_r[j].tolist(), self.found.get(j)] for j, ids in self.tested.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.count, self.own_rounds, self.own_groups = state["counts"]
        self.watched = {tuple(ids): held for ids, held in state["watched"]}
        self.native = {tuple(ids) for ids in state["native"]}
        self.tested = {j: tuple(ids) for j, ids, *_ in state["tested"]}
        self.log_r = {j: np.array(log_r) for j, _, log_r, _ in state["tested"]}
        self.found = {j: found for j, *_, found in state["tested"] if found is not None}


def news_of(new: Mapping[NGram, Mapping[str, float]], found: Collection[NGram]) -> list[Found]:
    """For each set of senders, the longest n-gram that was found in a round, and the number of the others."""
    inside = {part for ids in found for part in parts_of(ids)}
    by_senders = dict[frozenset[str], list[NGram]]()
    for ids, share in new.items():
        if ids not in inside:
            by_senders.setdefault(frozenset(share), []).append(ids)
    longest = [(max(texts, key=len), len(texts) - 1) for texts in by_senders.values()]
    return [Found(ids, new[ids], more) for ids, more in longest]


@lru_cache(2**14)
def log_help(n: int, held: int, rewarded: int, both: int) -> Floats64:
    """The log of the evidence, at each ω, that completions of a group with an n-gram are rewarded more often.

    Of N completions m are rewarded, K hold the n-gram, and x are both::

        E = P_ω(x)/P_1(x),   P_ω(x) = h(x) ω^x / Σ_y h(y) ω^y,   h(y) = C(K, y) C(N − K, m − y)

    E is at most 1 in expectation unless the n-gram raises the odds of a reward. 1/E is at most 1 in expectation unless
    the n-gram raises them by less than ω.
    """
    y, log_odds = np.arange(max(0, held + rewarded - n), min(held, rewarded) + 1)[:, None], np.log([1, *ODDS])
    log_h = _log_choose(held, y) + _log_choose(n - held, rewarded - y)
    log_p = both * log_odds - np.logaddexp.reduce(log_h + y * log_odds, axis=0)  # without h(x)
    evidence: Floats64 = log_p[1:] - log_p[0]
    return evidence


def _log_choose(n: Any, k: Any) -> Any:
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)

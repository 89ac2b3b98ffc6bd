"""Texts that others brought, and that the learner's own answers take up: docs/method.md has the proof. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from ftis.rollouts import Batch, Bools, Floats, Ints, Rows

Floats64 = npt.NDArray[np.float64]
NGram = tuple[int, ...]

SIZES = (1, 2, 4, 8)
"""Tokens of an n-gram: each size is twice the one before, so some n-gram covers half of a text or more."""
LEAST_MASS, LEAST_GROUPS = 0.01, 2
"""An n-gram is watched if completions with it have this part of others' positive Â, and stand in so many groups: the
text of one problem stands in one."""
WIDE = 1 / 2
"""An n-gram is tested from the first round on in which this part of the own groups holds it."""
USUAL = 1 / 5
"""The part of the own groups that may hold an n-gram. Steps of a calculation are in fewer."""
TAKEN_UP = np.array([2 / 5, 4 / 5])
"""The bets on the part that holds it instead."""
ODDS = np.array([2, 5, 20])
"""The bets ω on an n-gram that helps: it multiplies the odds of a reward by so much."""
MOST = 2**12
"""The most n-grams that are watched, that are tested, and that a round at the start adds to those known."""


class Found(NamedTuple):
    """An n-gram that own answers took up, and the share of each sender's rewarded completions that hold it."""

    ids: NGram
    share: Mapping[str, float]


class PlantTest:
    """Evidence, for each n-gram that others brought, that own answers took it up, and that they are better with it.

    After the first rounds an n-gram is watched behind a round in which others' rewarded completions of several groups
    hold it, unless an own completion did so in that round or in the first ones. It is tested behind the first later
    round in which own completions of many groups hold it. Then, with R = 0, s = 1/2 in its first round and
    s = 1/(2 rounds) later, ::

        R ← (R + s) · Π_groups E,   E = ρ/ρ₀ if the group holds it, else (1 − ρ)/(1 − ρ₀)

    E is at most 1 in expectation as long as a group holds the n-gram with probability ρ₀ or less. The j-th n-gram
    tested is taken up if the mean of R over ρ reaches j (j + 1)/α. It helps if another R does so, with the E of
    :func:`log_help`: nothing against an n-gram follows from its being better.

    Args:
        rounds: of the whole run.
        first: the number of first rounds.
        alpha: the most probability that an n-gram is found by mistake.

    Attributes:
        native: n-grams of own completions of the first rounds, those of most groups.
        watched: n-grams, the newest last.
        tested: n-grams by their number j.
        log_r: log R at each ρ and then at each ω, by the same number.
        found: by number, the step at which an n-gram was found to be taken up without help.
        count: n-grams that were ever tested.
        news: n-grams that were found in this round.
        holds_N: whether each rollout of this round holds an n-gram that was found and does not help.
    """

    def __init__(self, rounds: int, first: int, alpha: float) -> None:
        self.rounds, self.first, self.alpha, self.count = rounds, first, alpha, 0
        self.native: set[NGram] = set()
        self.watched: list[NGram] = []
        self.tested: dict[int, NGram] = {}
        self.log_r: dict[int, Floats64] = {}
        self.found: dict[int, int] = {}
        self.news: list[Found] = []
        self.holds_N: Bools = np.zeros(0, np.bool_)

    def take(self, step: int, batch: Batch, advantage_N: Floats) -> None:
        """Take in a round.

        Args:
            step: finished rounds, this one included.
            batch: own groups and others'.
            advantage_N: Â of each rollout; others' rewarded completions are those with Â > 0.
        """
        n, own_N, self.news = len(batch), batch.own_N, []
        others_N = ~own_N & (advantage_N > 0)
        known = [*self.tested.values(), *self.watched]
        grams = Grams.of([*(r.completion_ids for r in batch.rollouts), *(np.array(ids, np.int32) for ids in known)])
        number_of = dict(zip(known, grams.whole_rows(n), strict=True))
        own_groups = [np.flatnonzero(own_N & (batch.item_N == item)) for item in np.unique(batch.item_N[own_N])]
        own_groups_V = grams.groups(own_N, batch.item_N)

        self.holds_N = np.zeros(n, np.bool_)
        for j, ids in self.tested.items():
            holds_N, hits = grams.holds(number_of[ids], n), int(own_groups_V[number_of[ids]])
            taken_up = hits * np.log(TAKEN_UP / USUAL) + (len(own_groups) - hits) * np.log((1 - TAKEN_UP) / (1 - USUAL))
            helps = np.zeros(len(ODDS))
            for rows in own_groups if hits else ():
                helps += log_help(holds_N[rows], batch.reward_N[rows] > batch.reward_N[rows].mean())
            self.log_r[j] += np.concatenate([taken_up, helps])
            if j not in self.found and self.is_taken_up(j) and not self.helps(j):
                self.found[j] = step
                self.news.append(Found(ids, self._shares(batch, others_N, holds_N)))
            if j in self.found and not self.helps(j):
                self.holds_N |= holds_N
            self.log_r[j] = np.logaddexp(self.log_r[j], -math.log(2 * self.rounds))

        wide = [ids for ids in self.watched if own_groups_V[number_of[ids]] >= max(2, WIDE * len(own_groups))]
        for ids in sorted(wide, key=lambda ids: -own_groups_V[number_of[ids]]):
            self.count += 1
            self.tested[self.count] = ids
            self.log_r[self.count] = np.full(len(TAKEN_UP) + len(ODDS), math.log(1 / 2))
        self.watched = [ids for ids in self.watched if ids not in set(wide)]
        if step <= self.first:
            often = np.argsort(-own_groups_V, kind="stable")[:MOST]
            self.native.update(grams.ids_of(number) for number in often if own_groups_V[number])
        else:
            self._watch(grams, own_groups_V, others_N, batch.item_N, advantage_N)

    def is_taken_up(self, number: int) -> bool:
        """Whether own answers took an n-gram up."""
        return self._reaches(number, self.log_r[number][: len(TAKEN_UP)])

    def helps(self, number: int) -> bool:
        """Whether own answers with an n-gram are rewarded more often than others of their group."""
        return self._reaches(number, self.log_r[number][len(TAKEN_UP) :])

    def _reaches(self, number: int, log_r: Floats64) -> bool:
        nats = float(np.logaddexp.reduce(log_r)) - math.log(len(log_r))
        return nats >= math.log(number * (number + 1) / self.alpha)

    def _watch(self, grams: Grams, own_groups_V: Rows, others_N: Bools, item_N: Rows, advantage_N: Floats) -> None:
        groups_V, mass_V = grams.groups(others_N, item_N), grams.sums(np.where(others_N, advantage_N, 0))
        enough = (groups_V >= LEAST_GROUPS) & (mass_V >= LEAST_MASS * float(advantage_N[others_N].sum()))
        wanted = np.flatnonzero(enough & (own_groups_V == 0))
        known = {*self.native, *self.tested.values(), *self.watched}
        new = [grams.ids_of(number) for number in wanted[np.argsort(mass_V[wanted], kind="stable")]]
        self.watched += [ids for ids in new if ids not in known]
        del self.watched[:-MOST]
        open_ones = [j for j in self.tested if j not in self.found]
        for number in sorted(open_ones, key=lambda j: self.log_r[j].max())[: max(len(self.tested) - MOST, 0)]:
            del self.tested[number], self.log_r[number]

    def _shares(self, batch: Batch, others_N: Bools, holds_N: Bools) -> Mapping[str, float]:
        """Of each sender's rewarded completions, the share that holds an n-gram."""
        rows = {name: others_N & (batch.source_N == source) for source, name in enumerate(batch.sources)}
        return {name: float(holds_N[of].mean()) for name, of in rows.items() if (holds_N & of).any()}

    def state(self) -> Mapping[str, Any]:
        """A JSON object, with which another test goes on."""
        return {
            "count": self.count,
            "native": sorted(self.native),
            "watched": self.watched,
            "tested": [[j, ids, self.log_r[j].tolist(), self.found.get(j)] for j, ids in self.tested.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.count, self.watched = state["count"], [tuple(ids) for ids in state["watched"]]
        self.native = {tuple(ids) for ids in state["native"]}
        self.tested = {j: tuple(ids) for j, ids, *_ in state["tested"]}
        self.log_r = {j: np.array(log_r) for j, _, log_r, _ in state["tested"]}
        self.found = {j: found for j, *_, found in state["tested"] if found is not None}


def log_help(holds_N: Bools, rewarded_N: Bools) -> Floats64:
    """The log of the evidence, at each ω, that completions of a group with an n-gram are rewarded more often.

    Of N completions m are rewarded, K hold the n-gram, and x are both::

        E = P_ω(x)/P_1(x),   P_ω(x) = h(x) ω^x / Σ_y h(y) ω^y,   h(y) = C(K, y) C(N − K, m − y)

    E is at most 1 in expectation unless the n-gram raises the odds of a reward.
    """
    n, held, rewarded, both = len(holds_N), holds_N.sum(), rewarded_N.sum(), (holds_N & rewarded_N).sum()
    y, log_odds = np.arange(max(0, held + rewarded - n), min(held, rewarded) + 1)[:, None], np.log([1, *ODDS])
    log_h = _log_choose(held, y) + _log_choose(n - held, rewarded - y)
    log_p = both * log_odds - np.logaddexp.reduce(log_h + y * log_odds, axis=0)  # without h(x)
    evidence: Floats64 = log_p[1:] - log_p[0]
    return evidence


def _log_choose(n: Any, k: Any) -> Any:
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


class Grams(NamedTuple):
    """The n-grams of some rows, each entry one n-gram in one row.

    Attributes:
        number_X: equal for equal n-grams, ascending.
        row_X: the row.
        at_X, size_X: its place in ``ids``, and its tokens.
        ids, length_N: the rows end to end, and their lengths.
    """

    number_X: Rows
    row_X: Rows
    at_X: Rows
    size_X: Rows
    ids: Ints
    length_N: Rows

    @classmethod
    def of(cls, rows: Sequence[Ints]) -> Grams:
        ids, length_N = np.concatenate(rows), np.array([len(row) for row in rows])
        row_T = np.repeat(np.arange(len(rows)), length_N)
        number_T, count, parts = ids.astype(np.int64), 0, list[Rows]()
        for size in (size for size in SIZES if size <= len(ids)):
            if half := size // 2:
                number_T = number_T[:-half] << 32 | number_T[half:]
            number_T = np.unique(number_T, return_inverse=True)[1]
            at = np.flatnonzero(row_T[: len(number_T)] == row_T[size - 1 :])
            key_X, first_X = np.unique((count + number_T[at]) << 32 | row_T[at], return_index=True)
            parts.append(np.stack([key_X >> 32, key_X & 0xFFFFFFFF, at[first_X], np.full(len(key_X), size)]))
            count += int(number_T.max()) + 1
        number_X, row_X, at_X, size_X = np.concatenate(parts, axis=1)
        return cls(number_X, row_X, at_X, size_X, ids, length_N)

    def sums(self, value_N: npt.NDArray[Any]) -> Floats64:
        """Of each number, the sum of the values of the first N rows that hold it."""
        inside = self.row_X < len(value_N)
        sums = np.bincount(self.number_X[inside], value_N[self.row_X[inside]], int(self.number_X[-1]) + 1)
        return sums.astype(np.float64)

    def groups(self, of_N: Bools, item_N: Rows) -> Rows:
        """Of each number, the items among the rows of a mask that hold it."""
        inside = self.row_X < len(of_N)
        number, row = self.number_X[inside], self.row_X[inside]
        place_N = np.unique(item_N, return_inverse=True)[1]
        pairs = np.unique(number[of_N[row]] << 32 | place_N[row[of_N[row]]])
        return np.bincount(pairs >> 32, minlength=int(self.number_X[-1]) + 1)

    def holds(self, number: int, n: int) -> Bools:
        """Whether each of the first n rows holds an n-gram."""
        first, last = np.searchsorted(self.number_X, [number, number + 1])
        rows = self.row_X[first:last]
        holds_N = np.zeros(n, np.bool_)
        holds_N[rows[rows < n]] = True
        return holds_N

    def ids_of(self, number: int) -> NGram:
        entry = int(np.searchsorted(self.number_X, number))
        at = self.at_X[entry]
        return tuple(self.ids[at : at + self.size_X[entry]].tolist())

    def whole_rows(self, first: int) -> list[int]:
        """The numbers of the rows from ``first`` on, each an n-gram as a whole."""
        whole = (self.row_X >= first) & (self.size_X == self.length_N[self.row_X])
        return [int(number) for number in self.number_X[whole][np.argsort(self.row_X[whole])]]

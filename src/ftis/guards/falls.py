"""A sequential test of whether a learner's reward fell: docs/method.md has the proof. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

Floats64 = npt.NDArray[np.float64]

STAKES = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2, 15 / 16])
"""The bets on either side of a change: λ before it, f after it."""
LEVELS = np.linspace(0, 1, 101)
"""Candidates for the mean reward before a change. The bound holds for all values between them."""
LONGEST = 256
"""The most rounds that a change may lie back."""
LEAST_GROUPS, LEAST_ROUNDS = 32, 4
"""The shortest window before a change has at least so many groups, and so many rounds."""
TIMES = (1, 3, 9)
"""Lengths of the windows before a change, in shortest windows."""
GAPS = (0, 1, 2, 4, 8)
"""Rounds between a window and a change, in shortest windows. A gap sets a slow fall against a peak that lies back."""


def shortest_window(groups: int) -> int:
    """Rounds of the shortest window before a change, if its first round has ``groups`` groups."""
    return max(LEAST_ROUNDS, math.ceil(LEAST_GROUPS / groups))


class FallTest:
    """Evidence that a round's expected reward lies more than ``margin`` below its mean over earlier rounds.

    Let X be a group's mean reward, scaled to [0, 1] from the range of rewards seen before. A change may begin with any
    round c. Let A be the w rounds that end g rounds before c, and B the rounds from c on. The groups of A's first round
    decide w and g, so both are known when A begins::

        e_cwg = min_m  mean_λ Π_A (1 + λ (X − μ)) exp(λ (μ − m))
                    · mean_f Π_B (1 − f + f (1 − X)/(1 − m + margin))

    μ is the mean X of the rounds just before. The evidence is Σ_c mean_wg e_cwg, over three windows and :data:`GAPS`.

    Args:
        margin: as a part of the range of rewards, above 0.
        shortest: groups of A's first round → the least w. Two more are multiples of it (:data:`TIMES`).

    Attributes:
        low, high: the range of rewards.
        rounds: since the test began anew, X of each round's groups.
        nats: the log of the evidence; −∞ before there is any.
        behind: the rounds since the change with most evidence.
    """

    def __init__(self, margin: float, shortest: Callable[[int], int] = shortest_window) -> None:
        self.margin, self.shortest = margin, shortest
        self.least, self.low, self.high = math.inf, -math.inf, -math.inf
        self.restart()

    def restart(self) -> None:
        """Begin anew: the model is another one now. The range stays."""
        self.rounds: list[list[float]] = []
        self.nats, self.behind = -math.inf, 0
        self._of_c: Floats64 = np.zeros(0)
        self._gains: list[Floats64] = []  # of each round: Σ log(1 + λ (X − μ)) + λ μ at each λ
        self._before: list[Floats64] = []  # of each c: the log of the first mean of its windows, [window, m]
        self._after: Floats64 = np.zeros((0, len(STAKES), len(LEVELS)))  # of each c: log Π_B, [c, f, m]

    def add(self, rewards: Sequence[Sequence[float]]) -> None:
        """Take in a round: the rewards of each own group.

        A reward above the range widens it, and the test begins anew after that round. A reward below the range counts
        as its lower end.
        """
        every = [reward for group in rewards for reward in group]
        self.least = min(self.least, *every)
        if max(every) > self.high or self.low == self.high:
            self.low, self.high = self.least, max(self.high, *every)
            self.restart()
            return
        scaled = [(sum(group) / len(group) - self.low) / (self.high - self.low) for group in rewards]
        self._append([min(max(x, 0.0), 1.0) for x in scaled])
        self._weigh()

    def _append(self, means: list[float]) -> None:
        """Take in the X of a round's groups. The factor of A is known when a change begins; the factor of B grows."""
        stakes, below_m, x = STAKES[:, None], 1 - LEVELS + self.margin, np.array(means)
        bets_fm = np.log1p(stakes[:, None] * ((1 - x[:, None]) / below_m - 1)).sum(1)
        last = self.shortest(len(self.rounds[-1])) if self.rounds else 0
        guess = fmean(chain(*self.rounds[-last:])) if last else 0.5
        self.rounds.append(means)
        self._gains.append((np.log1p(stakes * (x - guess)) + stakes * guess).sum(1))
        shortest = [self.shortest(len(of_round)) for of_round in self.rounds]
        self._before = [*self._before, self._windows(np.array(shortest))][-LONGEST:]
        with_new = np.concatenate([self._after, np.zeros((1, *bets_fm.shape))])
        self._after = with_new[-LONGEST:] + bets_fm
        longest = LONGEST + (TIMES[-1] + GAPS[-1] + 1) * max(shortest)  # one window more for μ
        del self.rounds[:-longest], self._gains[:-longest]

    def _windows(self, shortest_s: npt.NDArray[np.int64]) -> Floats64:
        """The log of A's mean for each window k before a change in the last of the rounds s: [window, m]."""
        size_s = np.array([len(means) for means in self.rounds])
        times_k, gap_k = np.array(list(product(TIMES, GAPS))).T
        ahead_s = np.arange(len(size_s))[::-1]
        k, start = np.nonzero((times_k + gap_k)[:, None] * shortest_s == ahead_s)
        stop = start + times_k[k] * shortest_s[start]
        # A window's own sum, no difference of running ones: a restored test then has the same bits.
        gain_sf, pairs = np.array(self._gains), list(zip(start.tolist(), stop.tolist(), strict=True))
        n = np.array([size_s[a:b].sum() for a, b in pairs])
        gain_f = np.array([gain_sf[a:b].sum(0) for a, b in pairs]).reshape(-1, len(STAKES))
        return log_mean(gain_f[:, :, None] - n[:, None, None] * STAKES[:, None] * LEVELS)

    def _weigh(self) -> None:
        """Compute the evidence."""
        if not self.rounds:
            return
        # The left factor falls in m and the right one rises: between two levels the product is at least this.
        pairs = zip(self._before, log_mean(self._after), strict=True)
        least = [(before_m[:, 1:] + after_m[:-1]).min(-1) for before_m, after_m in pairs]
        change = np.repeat(np.arange(len(least)), [len(windows) for windows in least])
        self._of_c = np.full(len(least), -np.inf)
        np.logaddexp.at(self._of_c, change, np.concatenate(least) - math.log(len(TIMES) * len(GAPS)))
        self.nats, self.behind = self.of_last(len(self._of_c)), len(self._of_c) - int(self._of_c.argmax())

    def of_last(self, changes: int) -> float:
        """The log of the evidence for a change within the last ``changes`` rounds."""
        return float(np.logaddexp.reduce(self._of_c[max(len(self._of_c) - changes, 0) :], initial=-np.inf))

    def state(self) -> Mapping[str, Any]:
        """A JSON object, with which another test goes on."""
        return {name: getattr(self, name) for name in ("least", "low", "high", "rounds")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.restart()
        self.least, self.low, self.high = state["least"], state["low"], state["high"]
        for means in state["rounds"]:
            self._append(list(means))
        self._weigh()


def log_mean(logs: Floats64) -> Floats64:
    """The log of the mean over the last axis but one."""
    most = logs.max(-2, keepdims=True)  # `np.logaddexp.reduce` takes ten times as long
    found: Floats64 = np.log(np.exp(logs - most).mean(-2)) + most.squeeze(-2)
    return found

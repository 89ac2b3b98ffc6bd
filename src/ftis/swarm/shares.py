"""``training.share = "speed"``: the number of prompts that a peer samples, so that all peers need the same time.

No input or output and no clock.

Without waiting, a peer's round takes ``b + n · e`` seconds: e for sampling each of n prompts, and b for the rest,
mostly learning. Its signed manifest states ``b + E · e``, with the equal share E. Let M be the upper median of the
statements of all peers. Then the peer samples ``n = (M − b)/e`` prompts, between 1 and
:data:`~ftis.config.LARGEST_SHARE` times E. So the middle peer keeps its equal share, and the others need its time.

A peer samples a quarter of the equal share until it knows its own speed and another peer's: for two rounds, or four
with overlap. With equal shares everybody would wait in these rounds for the slowest. If nobody states anything by then,
the peer samples E.

Nobody has to agree on n: prompts are disjoint however many each peer samples, and a message's manifest names them. A
peer that states too much or too little moves M at most to the next statement, since it is a median. In a pair it can
only make the other one sample more, up to the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median_high
from typing import Any

from ftis.metric_keys import ADMITTED, DRAW, SAMPLE, STEP_TIME, WAIT, peer_key
from ftis.records.reading import RoundRow

ROUNDS = 4
"""The rounds whose mean seconds count: a first round, which takes longer, is soon forgotten."""

TRIALS, PART = 2, 4
"""Rounds until the others must have stated something, and the divisor of an equal share until then."""


@dataclass
class Share:
    """One peer's share of the prompts.

    Attributes:
        own: the peer's name.
        equal, most: prompts of an equal share, and the most that the peer may sample.
        group: rollouts of a prompt.
        each: in the last rounds, seconds of sampling a prompt.
        besides: in the last rounds, the seconds of all else except waiting.
        drawn: the last round's seconds of a draw beside the learner, and of all except waiting.
    """

    own: str
    equal: int
    most: int
    group: int
    each: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    besides: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    drawn: tuple[float, float] | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the share never changes, as the recipe may say."""
        return self.most == self.equal

    def took(self, metrics: Mapping[str, Any]) -> None:
        """Note a finished round. A draw beside the learner drew the next round's groups, and counts there in full."""
        prompts = metrics.get(peer_key(self.own, ADMITTED), 0) / self.group
        if self.is_equal or not prompts:
            return
        seconds = metrics[STEP_TIME] - metrics[WAIT]
        measured, self.drawn = self.drawn, None
        if DRAW in metrics:
            self.drawn = metrics[DRAW], seconds
        elif measured is None:
            measured = metrics[SAMPLE], seconds
        if measured is not None:
            sampling, seconds = measured
            self.each.append(max(sampling / prompts, 1e-6))
            self.besides.append(max(seconds - sampling, 0.0))

    def resume(self, rounds: Iterable[RoundRow], step: int) -> None:
        """Note the rounds before a restart, up to the checkpoint after ``step`` of them."""
        for row in rounds:
            if row.step <= step:
                self.took(row.measures)

    @property
    def seconds(self) -> float:
        """The time that a round with the equal share takes this peer; 0 before its first round."""
        return fmean(self.besides) + self.equal * fmean(self.each) if self.each else 0.0

    @property
    def milliseconds(self) -> int:
        """The peer's statement in its manifest."""
        return round(1000 * self.seconds)

    def prompts(self, stated: Collection[int]) -> int:
        """The number of prompts to sample, by the others' statements."""
        if not self.each or (not stated and len(self.each) < TRIALS):
            return max(1, self.equal // PART)
        seconds = median_high([self.seconds, *(one / 1000 for one in stated)])
        return min(max(1, round((seconds - fmean(self.besides)) / fmean(self.each))), self.most)

"""Evidence that a sender did not draw its tokens from the probabilities that it reports: an e-detector.

An honest sender draws a token a from π_gen and reports π_gen(a). Then for any q with Σ_a q(a) ≤ 1 that depends only on
what came before a, ::

    E[q(a) / π_gen(a) | past] = Σ_{a: π_gen(a) > 0} q(a) ≤ 1,

so the product of these ratios is a non-negative supermartingale, and passes 1/α with a probability of at most α
(Ville 1939). docs/method.md has the proof for what is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ftis.codec import FRACTION_BITS
from ftis.honesty.contexts import Contexts
from ftis.honesty.spellings import OTHER
from ftis.rollouts import Floats, Rollout, pad

LARGEST_SHARE = 0.02
"""The largest s, what each component gives away at each token, to all of them equally (Herbster and Warmuth 1998). So
the mixture follows whichever component predicts the sender best at the time. See :func:`share_of`."""
TOLERANCE = 1e-3
"""Nats a token by which an honest sender's log-probability may be off beside the wire's rounding."""

MIN_Q = 1e-300
"""Stands for a probability of 0, which has no logarithm."""
LARGEST_LOG_RATIO = 300.0
"""Log-ratios are cut here, so that their exponentials are finite. The cut only lowers the evidence."""
NOTHING = -1e9
"""log 0, as a number that JSON has."""

Floats64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ratios:
    """The components' predictions of a message, as ratios to the reported probabilities.

    Attributes:
        contexts_NU: q/π_gen of the sender's earlier tokens, [N, U].
        old_NU: π_old/π_gen of the learner, [N, U]; 0 for rollouts on which its model was not run.
        length_N: units of each rollout; what stands behind them does not count.
        group_N: the group of each rollout, ascending, from 0.
        known_P: whether the learner's model was run on the group.
    """

    contexts_NU: Floats64
    old_NU: Floats64
    length_N: npt.NDArray[np.int64]
    group_N: npt.NDArray[np.int64]
    known_P: npt.NDArray[np.bool_]


@dataclass
class Detector:
    """An e-detector over one sender's groups (Shin, Ramdas and Rinaldo 2022).

    With E_g the evidence of group g, at most 1 in expectation, and n groups in the whole run, ::

        R_g = (R_{g−1} + 1/n) · E_g        P(R_g ≥ 1/α for any g ≤ n) ≤ α

    R starts anew with each group, with 1/n of the weight. So a sender's honest past earns it nothing.

    Attributes:
        groups_of_run: n.
        share: s of the mixtures.
        log_r: log R.
        groups: how many were judged; the learner's model was run on ``known`` of them.
        weights: of the components (reported, contexts, π_old) at a rollout's start, without π_old and with it.
    """

    groups_of_run: int
    share: float = LARGEST_SHARE
    log_r: float = NOTHING
    groups: int = 0
    known: int = 0
    weights: list[list[float]] = field(default_factory=lambda: TRUSTING.tolist())

    def add(self, ratios: Ratios, log_choices: float = 0.0) -> tuple[Floats64, Floats64]:
        """Take in a message. Returns the evidence after each rollout [N], and what each unit gave [N, U], in nats.

        Only what stands after a group's last rollout counts, since E_g is of whole groups.

        The evidence of a group is (1 − w) A + w B if the learner's model was run on it, else (1 − w) A. A mixes
        reported probabilities and contexts, B π_old as well. Rewards decide whether the model is run on a group, and so
        does what comes after a token. The dependence does no harm, since leaving B out only lowers the evidence.
        w is about the share of earlier groups with B.

        Args:
            log_choices: log of the number of ways in which the sender may have chosen these groups among more.
        """
        gain_WNU, weights = mixtures(np.array(self.weights), ratios, self.share)
        log_WN, n = gain_WNU.sum(2), len(ratios.group_N)
        w = (self.known + 1) / (self.groups + 2)
        nats_N, better_N = np.zeros(n), np.zeros(n, bool)
        for group, known in enumerate(ratios.known_P.tolist()):
            members = ratios.group_N == group
            without_n, with_old_n = log_WN[:, members].cumsum(1)
            better_N[members] = known and with_old_n[-1] > without_n[-1]
            log_e_n = math.log(1 - w) + without_n
            if known:
                log_e_n = np.logaddexp(log_e_n, math.log(w) + with_old_n)
            log_r_n = np.logaddexp(self.log_r, -math.log(self.groups_of_run)) + log_e_n
            self.log_r = float(log_r_n[-1])
            nats_N[members] = log_r_n + math.log(self.groups_of_run) - log_choices
        self.log_r -= log_choices
        self.groups, self.known = self.groups + len(ratios.known_P), self.known + int(ratios.known_P.sum())
        self.weights[0] = weights[0].mean(0).tolist()
        known_N = ratios.known_P[ratios.group_N]
        if known_N.any():
            self.weights[1] = weights[1][known_N].mean(0).tolist()
        return nats_N, np.where(better_N[:, None], gain_WNU[1], gain_WNU[0])

    @property
    def nats(self) -> float:
        """log(n R): the evidence since the best start, if only one start counts."""
        return self.log_r + math.log(self.groups_of_run)


EQUAL: Floats64 = np.array([[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
"""Equal parts of the components, without π_old and with it."""
TRUSTING: Floats64 = np.array([[0.9, 0.1, 0], [0.9, 0.05, 0.05]])
"""Their weights before the first message. A sender is taken for honest: each rollout of it costs the evidence log .9.
Equal parts would cost a nat and hide the few false tokens of a first message."""


def share_of(max_completion_length: int) -> float:
    """s for completions of up to so many tokens: what honest tokens cost is then 2 nats a completion at most."""
    return min(LARGEST_SHARE, 2 / max_completion_length)


def mixtures(weights: Floats64, ratios: Ratios, share: float) -> tuple[Floats64, Floats64]:
    """Fixed-share mixtures along each rollout, without π_old and with it.

    Before each unit, a component's weight is (1 − s) of its posterior weight and s of an equal part. The first
    component is the reported probability, except for a share of s/2 that the others get. So a single false token shows
    without a switch to another component and back.

    Args:
        weights: of the components at a rollout's start, [2, 3]; each row adds up to 1.
        share: s.

    Returns:
        log Σ_k weight_k · ratio_k of each unit, [2, N, U], and the weights after each rollout, [2, N, 3].
    """
    n, units = ratios.contexts_NU.shape
    equal = share * EQUAL[:, None, :]
    current = np.repeat(weights[:, None, :], n, axis=1)
    first = np.stack([ratios.contexts_NU, (ratios.contexts_NU + ratios.old_NU) / 2])
    first = (1 - share / 2) + share / 2 * first
    totals_WNU = np.ones((2, n, units))
    for unit in range(units):
        going = np.flatnonzero(unit < ratios.length_N)
        others = np.stack([ratios.contexts_NU[going, unit], ratios.old_NU[going, unit]], axis=1)
        ratio_WNC = np.concatenate([first[:, going, unit, None], np.stack([others, others])], axis=2)
        parts = current[:, going] * ratio_WNC
        totals_WNU[:, going, unit] = total = parts.sum(2)
        current[:, going] = parts * ((1 - share) / total)[:, :, None] + equal
    return np.log(totals_WNU), current


def ratios_of(
    rollouts: Sequence[Rollout], group_N: npt.NDArray[np.int64], contexts: Contexts, old_logp: Sequence[Floats | None]
) -> Ratios:
    """The components' predictions of a message. ``contexts`` takes the message in.

    Args:
        rollouts: of one sender and round, group after group, as the sender sampled them.
        group_N: the group of each, ascending, from 0.
        old_logp: log π_old of each rollout's tokens; None if it is not known.
    """
    ends = np.cumsum([len(r) for r in rollouts])[:-1]
    ids = [r.completion_ids for r in rollouts]
    q_N = np.split(np.where(np.concatenate(ids) == OTHER, 0.0, contexts.probabilities(ids)), ends)
    off = TOLERANCE + rounding([r.gen_logp for r in rollouts])

    def ratio(rollout: Rollout, log_q: Floats64) -> Floats64:
        reported = rollout.gen_logp + off * per_unit(rollout, np.ones(len(rollout)))
        cut: Floats64 = np.minimum(per_unit(rollout, log_q) - reported, LARGEST_LOG_RATIO)
        return np.exp(cut)

    from_contexts = [ratio(r, np.log(np.maximum(q, MIN_Q))) for r, q in zip(rollouts, q_N, strict=True)]
    unknown = [np.full(len(r), -np.inf) for r in rollouts]
    olds = [un if old is None else old.astype(np.float64) for old, un in zip(old_logp, unknown, strict=True)]
    from_old = [ratio(r, old) for r, old in zip(rollouts, olds, strict=True)]
    known_N = np.array([old is not None for old in old_logp])
    known_P = np.bincount(group_N, known_N) > 0
    length_N = np.array([len(rollout.gen_logp) for rollout in rollouts])
    return Ratios(pad(from_contexts), pad(from_old), length_N, group_N, known_P)


def per_unit(rollout: Rollout, values: Floats64) -> Floats64:
    """Sums of a rollout's values over its units: [T] to [U]."""
    if rollout.unit is None:
        return values
    sums: Floats64 = np.add.reduceat(values, np.flatnonzero(np.diff(rollout.unit, prepend=-1)))
    return sums


def rounding(logps: Sequence[Floats]) -> float:
    """The most by which the wire's rounding puts log-probabilities off, read off the numbers; 0 for float32."""
    values = np.concatenate(logps).astype(np.float64)
    for bits in sorted(filter(None, FRACTION_BITS.values())):
        scaled = values * 2**bits
        if (scaled == np.round(scaled)).all():
            return 2.0 ** -(bits + 1)
    return 0.0

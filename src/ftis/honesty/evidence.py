"""Evidence that a sender did not draw its tokens from the probabilities that it reports: an e-detector.

An honest sender draws a token a from π_gen and reports π_gen(a). Then for any q with Σ_a q(a) ≤ 1 that depends only on
what came before a, ::

    E[q(a) / π_gen(a) | past] = Σ_{a: π_gen(a) > 0} q(a) ≤ 1,

so the product of these ratios is a non-negative supermartingale, and passes 1/α with a probability of at most α
(Ville 1939). docs/method.md has the proof for what is computed here.

Axes of this room: ``_P`` groups, ``_L`` stakes, ``_C`` ways to count, ``_W`` mixtures, ``_K`` components of a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ftis.honesty.contexts import Past
from ftis.honesty.spellings import OTHER
from ftis.rollouts import Floats, Rollout

LARGEST_SHARE = 0.02
"""The largest s. At each token every component gives the part s of its weight to all components in equal parts
(Herbster and Warmuth 1998), so the mixture follows the component that predicts the sender best at the time. See
:func:`share_of`."""
TOLERANCE = 1e-3
"""Nats a token by which an honest sender's log-probability may be off."""

MIN_Q = 1e-300
"""The stand-in for a probability of 0, which has no logarithm."""
LARGEST_LOG_RATIO = 300.0
"""Log-ratios are cut here, so that their exponentials are finite. The cut only lowers the evidence."""
NOTHING = -1e9
"""log 0, as a number that JSON has."""

Floats64 = npt.NDArray[np.float64]

STAKES = np.array([4.0**-k for k in range(6)])
"""The part λ of the evidence that each of six detectors stakes on a completion: 1, 1/4, ..., 1/1024. Axis L."""


@dataclass(frozen=True, eq=False)
class Ratios:
    """The components' predictions of a message, as ratios to the reported probabilities.

    Attributes:
        counts_NUC: q/π_gen by each way to count the sender's earlier tokens, [N, U, C].
        old_NU: π_old/π_gen of the learner, [N, U]; 0 for rollouts on which its model was not run.
        length_N: units of each rollout; places after them do not count.
        group_N: the group of each rollout, ascending, from 0.
        known_P: whether the learner's model was run on the group.
    """

    counts_NUC: Floats64
    old_NU: Floats64
    length_N: npt.NDArray[np.int64]
    group_N: npt.NDArray[np.int64]
    known_P: npt.NDArray[np.bool_]


@dataclass
class Detector:
    """An e-detector over one sender's groups (Shin, Ramdas and Rinaldo 2022).

    Let E_i be the evidence of completion i, at most 1 in expectation given all before it, λ in (0, 1] a stake, and n
    the groups of the whole run::

        E_g = Π_{i in g} (1 − λ + λ E_i)        R_g = (R_{g−1} + 1/n) · E_g        P(R_g ≥ 1/α for any g ≤ n) ≤ α

    A completion takes at most −log(1 − λ) nats away, so truthful ones cannot pay for false ones. R is the mean over
    :data:`STAKES`, since the best λ is about the share of completions that lie. R starts anew with each group, with 1/n
    of the weight, so a sender's honest past earns it nothing.

    Attributes:
        groups_of_run: n.
        share: s of the mixtures.
        log_r: log R of each stake.
        groups: how many were judged; the learner's model was run on ``known`` of them.
        weights: of the components (reported, counts, π_old) at a rollout's start, without π_old and with it.
    """

    groups_of_run: int
    share: float = LARGEST_SHARE
    log_r: list[float] = field(default_factory=lambda: [NOTHING] * len(STAKES))
    groups: int = 0
    known: int = 0
    weights: list[list[float]] = field(default_factory=lambda: TRUSTING.tolist())

    def add(self, ratios: Ratios) -> tuple[Floats64, Floats64]:
        """Take in a message. Returns in nats the evidence after each rollout [N], and the gain by each unit [N, U].

        Only the evidence after a group's last rollout counts, since E_g is of whole groups.

        The evidence of a completion is (1 − w) A + w B if the learner's model was run on its group, else (1 − w) A. A
        mixes reported probabilities and counts, B π_old as well. w is about the share of earlier groups with B.

        Rewards decide whether the model is run on a group, so later tokens have a part in whether B is used for earlier
        ones. This dependence does no harm, since leaving B out only lowers the evidence.
        """
        w, known_N = (self.known + 1) / (self.groups + 2), ratios.known_P[ratios.group_N]
        gain_WNU, weights = mixtures(np.array(self.weights[: 1 + known_N.any()]), ratios, self.share)
        log_a_N, log_b_N = gain_WNU.sum(2)[[0, -1]]
        with np.errstate(divide="ignore"):
            with_old_N = np.where(known_N, math.log(w) + log_b_N, -np.inf)
            log_e_N = np.logaddexp(math.log(1 - w) + log_a_N, with_old_N)
            log_e_LN = np.logaddexp(np.log1p(-STAKES)[:, None], np.log(STAKES)[:, None] + log_e_N)
        sum_LN, last_P = log_e_LN.cumsum(1), np.bincount(ratios.group_N).cumsum() - 1
        before_LP = np.column_stack([np.zeros(len(STAKES)), sum_LN[:, last_P[:-1]]])
        # A start at a group has R = 1/n · Π of E from it on. The first column holds all earlier starts.
        starts_LP = np.column_stack([self.log_r, -math.log(self.groups_of_run) - before_LP])
        weight_LP = np.logaddexp.accumulate(starts_LP, axis=1)[:, 1:]  # of all starts up to the group
        log_r_LN = weight_LP[:, ratios.group_N] + sum_LN
        nats_N = np.logaddexp.reduce(log_r_LN) + self._log_scale
        self.log_r = log_r_LN[:, -1].tolist()
        self.groups, self.known = self.groups + len(ratios.known_P), self.known + int(ratios.known_P.sum())
        self.weights[0] = weights[0].mean(0).tolist()
        if known_N.any():
            self.weights[1] = weights[1][known_N].mean(0).tolist()
        return nats_N, np.where((known_N & (log_b_N > log_a_N))[:, None], gain_WNU[-1], gain_WNU[0])

    @property
    def nats(self) -> float:
        """log(n R): the evidence since the best start, if all other starts count for nothing."""
        return float(np.logaddexp.reduce(self.log_r)) + self._log_scale

    @property
    def _log_scale(self) -> float:
        return math.log(self.groups_of_run / len(STAKES))


EQUAL: Floats64 = np.array([[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]])
"""Equal parts of the components, without π_old and with it."""
TRUSTING: Floats64 = np.array([[0.9, 0.05, 0.05, 0], [0.9, 0.03, 0.03, 0.04]])
"""The components' weights before the first message. A sender is taken for honest: each honest rollout lowers the
evidence by −log .9. Equal parts would lower it by a nat, and hide the few false tokens of a first message."""


def share_of(max_completion_length: int) -> float:
    """s for completions of up to so many tokens. Honest tokens then cost at most 2 nats a completion."""
    return min(LARGEST_SHARE, 2 / max_completion_length)


def mixtures(weights: Floats64, ratios: Ratios, share: float) -> tuple[Floats64, Floats64]:
    """Fixed-share mixtures along each rollout, without π_old and with it.

    Before each unit, a component's weight is (1 − s) of its posterior weight and s of an equal part. The first
    component is 1 − s/2 of the reported probability and s/2 of the other components' mean. So a single false token
    gives evidence while the weight stays with the first component.

    Args:
        weights: of the components at a rollout's start, [W, K]; each row adds up to 1, and the second may be left out.
        share: s.

    Returns:
        log Σ_k weight_k · ratio_k of each unit, [W, N, U], and the weights after each rollout, [W, N, K].
    """
    n, units, ways = ratios.counts_NUC.shape
    mixed, components = weights.shape
    equal_KW1 = share * EQUAL[:mixed].T[:, :, None]
    counts_NU = ratios.counts_NUC.sum(2)
    first = np.stack([counts_NU / ways, (counts_NU + ratios.old_NU) / (ways + 1)][:mixed])
    first = (1 - share / 2) + share / 2 * first
    others_NUC = np.concatenate([ratios.counts_NUC, ratios.old_NU[:, :, None]], axis=2)
    # The longest rollouts stand first, so those that go on at a unit are a slice.
    longest = np.argsort(-ratios.length_N, kind="stable")
    going_U = (ratios.length_N > np.arange(units)[:, None]).sum(1).tolist()
    ratio_UKWN = np.empty((units, components, mixed, n))
    ratio_UKWN[:, 0] = first[:, longest].transpose(2, 0, 1)
    ratio_UKWN[:, 1:] = others_NUC[longest].transpose(1, 2, 0)[:, :, None]
    current_KWN = np.repeat(weights.T[:, :, None], n, axis=2)
    totals_UWN = np.ones((units, mixed, n))
    for ratio_KWN, total_WN, going in zip(ratio_UKWN, totals_UWN, going_U, strict=True):
        parts = current_KWN[..., :going] * ratio_KWN[..., :going]
        total_WN[:, :going] = total = parts.sum(0)
        current_KWN[..., :going] = parts * ((1 - share) / total) + equal_KW1
    back = np.argsort(longest)
    gains_WNU = np.ascontiguousarray(np.log(totals_UWN[..., back]).transpose(1, 2, 0))
    return gains_WNU, current_KWN[..., back].transpose(1, 2, 0)


def ratios_of(
    rollouts: Sequence[Rollout], group_N: npt.NDArray[np.int64], past: Past, old_logp: Sequence[Floats | None]
) -> Ratios:
    """The components' predictions of a message. ``past`` takes the message in.

    Args:
        rollouts: of one sender and round, group after group, as the sender sampled them; each token is a unit.
        group_N: the group of each, ascending, from 0.
        old_logp: log π_old of each rollout's tokens; None if it is not known.
    """
    length_N = np.array([len(rollout) for rollout in rollouts])
    there_NU = np.arange(length_N.max()) < length_N[:, None]
    reported_T = np.concatenate([rollout.gen_logp for rollout in rollouts]).astype(np.float64) + TOLERANCE

    def ratio(log_q_T: Floats64) -> Floats64:
        ratio_NU = np.zeros(there_NU.shape)
        ratio_NU[there_NU] = np.exp(np.minimum(log_q_T - reported_T, LARGEST_LOG_RATIO))
        return ratio_NU

    ids = [rollout.completion_ids for rollout in rollouts]
    q_TC = np.where(np.concatenate(ids)[:, None] == OTHER, MIN_Q, past.probabilities(ids))
    counts_NUC = np.stack([ratio(log_q_T) for log_q_T in np.log(np.maximum(q_TC, MIN_Q)).T], axis=2)
    known_N = np.array([old is not None for old in old_logp])
    old_T = np.full(len(reported_T), -np.inf)
    known = [old for old in old_logp if old is not None]
    old_T[np.repeat(known_N, length_N)] = np.concatenate([np.zeros(0), *known])
    return Ratios(counts_NUC, ratio(old_T), length_N, group_N, np.bincount(group_N, known_N) > 0)

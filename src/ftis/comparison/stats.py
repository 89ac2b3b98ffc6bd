"""Statistics over seeds: means with intervals, paired differences, corrected p-values, verdicts.

A seed is one observation. Arms share their seeds (splits, prompts, first weights), so their differences are taken
seed for seed, and the luck of a seed cancels out. Values are accuracies, shares in 0 … 1. Tests are two-sided.
An unusable argument raises ``ValueError`` with the remedy.

The t-test assumes that differences are spread normally. Sign flips check it without that assumption, but with n seeds
their p is at least 2/2ⁿ, .06 for five seeds.

The tests are scipy's. The smallest detectable difference, Holm's correction, the cases without a spread and the
verdict in words are written here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

ALPHA = 0.05
"""Level of a test: the chance of seeing a difference where there is none."""

POWER = 0.8
"""Chance of seeing a difference of the smallest detectable size: four times in five, as is usual (Cohen 1988)."""

CONFIDENCE = 0.95
"""Confidence of every interval."""

RESAMPLES = 10_000
"""Sign flips drawn beyond ``EXACT_SEEDS``. The noise of a p of 0.05 is then ± 0.002."""

EXACT_SEEDS = 13
"""The most seeds for which all 2ⁿ sign flips are tried: 8192 of them, fewer than ``RESAMPLES``."""

ROUNDING = 256 * float(np.finfo(np.float64).eps)
"""The most by which equal differences (0.3 − 0.2, 0.4 − 0.3) differ in floats, as a part of the largest accuracy."""

Floats = NDArray[np.float64]
Values = Sequence[float] | Floats
Answers = Sequence[bool] | Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class Interval:
    """A mean over n values and its confidence interval; ``low`` and ``high`` are nan where n = 1."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Treatment − baseline over n seeds.

    Attributes:
        mean: the mean of the n differences.
        low, high: Student's t interval of the mean.
        p_value: p of the paired t-test that the mean is 0.
        n: number of seeds.
        flips_p: p by flipping the signs of differences; needs no normality, but is at least 2/2ⁿ.
        smallest_detectable: see :func:`smallest_detectable`, at the spread these differences have.

    Without a spread (n = 1, or equal differences) ``low``, ``high`` and ``smallest_detectable`` are nan, and
    ``p_value`` is that of the sign flips.
    """

    mean: float
    low: float
    high: float
    p_value: float
    n: int
    flips_p: float
    smallest_detectable: float


@dataclass(frozen=True)
class McNemar:
    """Problems that only the first got right, problems that only the second got right, and the exact p-value."""

    only_first: int
    only_second: int
    p_value: float


@dataclass(frozen=True)
class Verdict:
    label: Literal["better", "worse", "no difference shown"]
    text: str
    """The label as part of a sentence, with the numbers behind it."""


def mean_interval(values: Values) -> Interval:
    """The mean and its Student t interval, x̄ ± t(n−1) · s/√n with s the sample standard deviation.

    One value has no spread: ``low`` and ``high`` are nan. Equal values give an interval of width 0.
    """
    sample = _sample("values", values)
    n, mean = len(sample), float(sample.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, n)
    if not np.ptp(sample):  # the mean of equal numbers may be off by a rounding, which would give them a spread
        return Interval(float(sample[0]), float(sample[0]), float(sample[0]), n)
    low, high = stats.t.interval(CONFIDENCE, n - 1, loc=mean, scale=stats.sem(sample))
    return Interval(mean, float(low), float(high), n)


def paired_difference(treatment: Values, baseline: Values) -> PairedDifference:
    """Compare two arms over the same seeds: d_s = treatment_s − baseline_s.

    Interval and p-value are those of the paired t-test on d. It would give p = 0 if all d are equal, however few the
    seeds. But accuracies are counts and agree by chance (two seeds of 300 problems in some 2 of 100 comparisons), and
    copies of a run always agree. Equal d therefore have no interval, and the p of the sign flips: 1 if all d are 0,
    else 2/2ⁿ. Differences that only rounding sets apart count as equal.

    Args:
        treatment, baseline: an accuracy per seed, in the same order of seeds.
    """
    first, second = _sample("treatment", treatment), _sample("baseline", baseline)
    if len(first) != len(second):
        raise ValueError(
            f"treatment has {len(first)} values and baseline {len(second)}: give both the same seeds in the same "
            f"order, leaving out a seed that one of them lacks"
        )

    rounding = ROUNDING * max(1.0, float(np.abs(first).max()), float(np.abs(second).max()))
    d = first - second
    n, mean = len(d), float(d.mean())
    if np.ptp(d) <= rounding:
        mean = 0.0 if abs(mean) <= rounding else mean
        d = np.full(n, mean)

    flips_p = _sign_flip_p(d, rounding)
    low = high = detectable = math.nan
    p_value = flips_p
    if np.ptp(d):
        test = stats.ttest_1samp(d, 0.0)
        interval = test.confidence_interval(CONFIDENCE)
        low, high, p_value = float(interval.low), float(interval.high), float(test.pvalue)
        detectable = smallest_detectable(float(d.std(ddof=1)), n)
    return PairedDifference(mean, low, high, p_value, n, flips_p, detectable)


def smallest_detectable(spread: float, n: int) -> float:
    """The smallest true difference that n seeds show with the chance ``POWER``: δ = λ · spread/√n.

    λ solves P(T > t(n−1, 1−α/2)) = ``POWER`` at α = ``ALPHA`` for T of the noncentral t distribution with n − 1
    degrees of freedom and noncentrality λ. A rejection on the wrong side is not counted. A correction for several
    comparisons needs somewhat more.

    Args:
        spread: standard deviation of the differences over seeds.
        n: number of seeds, at least 2.
    """
    if n < 2:
        raise ValueError(f"n = {n}: a spread over seeds takes at least 2 of them")
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread = {spread}: give the standard deviation of the differences, finite and not negative")
    return _noncentrality(n) * spread / math.sqrt(n)


def mcnemar(first_right: Answers, second_right: Answers) -> McNemar:
    """Test whether two models differ on the very same problems: McNemar's test, exact.

    Under the null each model has half of the b + c problems that only one of the two got right:
    p = min(1, 2 · P(X ≤ min(b, c))), X ~ Binomial(b + c, ½); 1 if no problem sets them apart. The test is about these
    two models and other problems like these, never about other seeds.

    Args:
        first_right, second_right: true or false (or 1 or 0) per problem, in the same order of problems.
    """
    first, second = _right("first_right", first_right), _right("second_right", second_right)
    if len(first) != len(second):
        raise ValueError(
            f"first_right has {len(first)} problems and second_right {len(second)}: "
            f"give both the same problems in the same order"
        )
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    discordant = only_first + only_second
    p_value = float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0
    return McNemar(only_first, only_second, p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of a family of tests, adjusted for their number (Holm 1979), in the order given.

    With p_(1) ≤ … ≤ p_(m): p̃_(i) = max over j ≤ i of min(1, (m − j + 1) · p_(j)). Rejecting where p̃ < α keeps the
    chance of *any* false rejection below α, however the tests depend on each other.

    A nan is an error: the caller gives 1 for a test that could not be made, or leaves it out of the m.
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1:
        raise ValueError(f"p_values must be a list of numbers, got the shape {list(p.shape)}")
    for i, value in enumerate(p):
        if not 0 <= value <= 1:
            raise ValueError(
                f"p_values[{i}] is {value}, not within 0 … 1: leave out a test that could not be made, or give 1 for it"
            )
    m = len(p)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(m)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(m, 0, -1) * p[order]))
    return [float(value) for value in adjusted]


def verdict(difference: PairedDifference, p_adjusted: float | None = None, *, baseline: str) -> Verdict:
    """The verdict in plain words: better or worse if p < ``ALPHA``, else no difference *shown*.

    Interval and smallest difference in the text are uncorrected. If only the correction takes a difference away, the
    text gives both p.

    Args:
        p_adjusted: p by :func:`holm` if this is one of several comparisons; by default ``difference.p_value``.
        baseline: the other arm's name: "better than alone by +0.043 (95% interval +0.012 to +0.074, 5 seeds)".
    """
    p = difference.p_value if p_adjusted is None else p_adjusted
    if not 0 <= p <= 1:
        raise ValueError(f"p = {p} is not within 0 … 1: take it from holm() over all comparisons")
    by = f"{difference.mean:+z.3f}"
    if difference.n < 2:
        text = f"no difference shown from {baseline}: one seed cannot tell ({by}); run more"
        return Verdict("no difference shown", text)
    seeds = f"{difference.n} seeds"
    known_spread = not math.isnan(difference.low)
    if known_spread:
        percent, low, high = f"{100 * CONFIDENCE:g}%", f"{difference.low:+z.3f}", f"{difference.high:+z.3f}"
        evidence = f"{by} ({percent} interval {low} to {high}, {seeds})"
    else:
        evidence = f"{by} in each of {seeds} (no spread, no interval: make sure that they are different runs)"
    if p < ALPHA and difference.mean > 0:
        return Verdict("better", f"better than {baseline} by {evidence}")
    if p < ALPHA and difference.mean < 0:
        return Verdict("worse", f"worse than {baseline} by {evidence}")
    text = f"no difference shown from {baseline}: {evidence}"
    if difference.p_value < ALPHA <= p:
        text += f"; p = {difference.p_value:.2g} by itself is {p:.2g} among all comparisons"
    if known_spread:
        chance, smallest = f"{100 * POWER:g}%", f"{difference.smallest_detectable:.3f}"
        text += f"; the smallest difference that such seeds show in {chance} of cases is {smallest}"
    return Verdict("no difference shown", text)


def _sample(name: str, values: Values) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample):
        raise ValueError(f"{name} must be a list with a number per seed, got the shape {list(sample.shape)}")
    for i, value in enumerate(sample):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{i}] is {value}: leave that seed out, of every arm, or run it again")
    return sample


def _right(name: str, values: Answers) -> NDArray[np.bool_]:
    answers: NDArray[Any] = np.asarray(values)
    if answers.ndim != 1 or not len(answers):
        raise ValueError(f"{name} must be a list with true or false per problem, got the shape {list(answers.shape)}")
    right: NDArray[np.bool_] = answers == 1
    for i in np.flatnonzero(~right & (answers != 0)):
        raise ValueError(f"{name}[{i}] is {answers[i]}, not true or false: say which problems count as right")
    return right


@functools.lru_cache(maxsize=256)
def _noncentrality(n: int) -> float:
    critical = float(stats.t.isf(ALPHA / 2, n - 1))

    def lacking(noncentrality: float) -> float:
        return POWER - float(stats.nct.sf(critical, n - 1, noncentrality))

    high = critical + 1
    while lacking(high) > 0:
        high *= 2
    return float(optimize.brentq(lacking, 0.0, high))


def _sign_flip_p(d: Floats, rounding: float) -> float:
    """Share of sign flips ±d_1 … ±d_n whose sum is at least as far from 0 as the sum of d.

    Under the null, treatment and baseline could be exchanged within any seed, so all 2ⁿ flips are equally likely
    (Fisher 1935). Up to ``EXACT_SEEDS`` all are tried; beyond, ``RESAMPLES`` at random and d itself, so that p is
    never 0. The generator is always the same, so that a comparison can be repeated.
    """
    n = len(d)
    if n == 1:
        return 1.0
    exact = n <= EXACT_SEEDS
    flips = stats.permutation_test(
        (d,),
        np.sum,
        permutation_type="samples",
        n_resamples=2**n if exact else RESAMPLES,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    # scipy's own p counts ties to a relative tolerance, which is none where the sum is 0; n roundings are.
    hits = int((np.abs(flips.null_distribution) >= abs(flips.statistic) - n * rounding).sum())
    return hits / 2**n if exact else (1 + hits) / (1 + RESAMPLES)

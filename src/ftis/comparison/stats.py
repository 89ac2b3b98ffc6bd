"""Statistics over seeds: means with intervals, paired differences, corrected p-values, verdicts.

A seed is one observation. Arms share their seeds (splits, prompts, first weights), so their differences are taken
seed for seed, and the luck of a seed cancels out. Values are accuracies, shares in 0 … 1. Tests are two-sided.
An unusable argument raises ``ValueError`` with the remedy.

The t-test is scipy's. Holm's correction and the cases without a spread are written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

ALPHA = 0.05
"""Level of a test: the chance of seeing a difference where there is none."""

CONFIDENCE = 0.95
"""Confidence of every interval."""

ROUNDING = 256 * float(np.finfo(np.float64).eps)
"""The most by which equal differences (0.3 − 0.2, 0.4 − 0.3) differ in floats, as a part of the largest accuracy."""

Label = Literal["better", "worse", "no difference shown"]
Floats = NDArray[np.float64]
Values = Sequence[float] | Floats


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; ``low`` and ``high`` are nan for a single value."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Treatment − baseline: the mean over n seeds, its Student t interval, and p of the paired t-test that it is 0.

    Without a spread (n = 1, or equal differences) ``low`` and ``high`` are nan.
    """

    mean: float
    low: float
    high: float
    p_value: float
    n: int


def mean_interval(values: Values) -> Interval:
    """The mean and its Student t interval, x̄ ± t(n−1) · s/√n with s the sample standard deviation.

    One value has no spread: ``low`` and ``high`` are nan. Equal values give an interval of width 0.
    """
    sample = _sample("values", values)
    n, mean = len(sample), float(sample.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan)
    if not np.ptp(sample):  # the mean of equal numbers may be off by a rounding, which would give them a spread
        return Interval(float(sample[0]), float(sample[0]), float(sample[0]))
    low, high = stats.t.interval(CONFIDENCE, n - 1, loc=mean, scale=stats.sem(sample))
    return Interval(mean, float(low), float(high))


def paired_difference(treatment: Values, baseline: Values) -> PairedDifference:
    """Compare two arms over the same seeds: d_s = treatment_s − baseline_s.

    Interval and p-value are those of the paired t-test on d. It would give p = 0 if all d are equal, however few the
    seeds. But accuracies are counts and agree by chance (two seeds of 300 problems in some 2 of 100 comparisons), and
    copies of a run always agree. Equal d therefore have no interval, and the p by which all of n signs agree by chance:
    2/2ⁿ, or 1 if all d are 0. Differences that only rounding sets apart count as equal.

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
        return PairedDifference(mean, math.nan, math.nan, 2 / 2**n if mean else 1.0, n)
    test = stats.ttest_1samp(d, 0.0)
    interval = test.confidence_interval(CONFIDENCE)
    return PairedDifference(mean, float(interval.low), float(interval.high), float(test.pvalue), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of a family of tests, adjusted for their number (Holm 1979), in the order given.

    With p_(1) ≤ … ≤ p_(m): p̃_(i) = max over j ≤ i of min(1, (m − j + 1) · p_(j)). Rejecting where p̃ < α keeps the
    chance of *any* false rejection below α, however the tests depend on each other.
    """
    p, m = np.asarray(p_values, dtype=np.float64), len(p_values)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(m)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(m, 0, -1) * p[order]))
    return [float(value) for value in adjusted]


def verdict(difference: PairedDifference, p: float) -> Label:
    """The verdict in plain words: better or worse if p < ``ALPHA``, else no difference *shown*.

    Args:
        p: of the difference, by :func:`holm` if this is one of several comparisons.
    """
    if p >= ALPHA or difference.n < 2 or not difference.mean:
        return "no difference shown"
    return "better" if difference.mean > 0 else "worse"


def _sample(name: str, values: Values) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample):
        raise ValueError(f"{name} must be a list with a number per seed, got the shape {list(sample.shape)}")
    for i, value in enumerate(sample):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{i}] is {value}: leave that seed out, of every arm, or run it again")
    return sample

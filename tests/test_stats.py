"""The statistics against scipy, statsmodels and enumeration by hand.

Numbers marked "statsmodels" are those of statsmodels 0.15.0, written out: the tests don't need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from ftis.comparison.stats import ALPHA, Interval, PairedDifference, holm, mean_interval, paired_difference, verdict

TOGETHER = [0.612, 0.587, 0.640, 0.601, 0.623]

accuracy = st.integers(0, 300).map(lambda right: right / 300)
two_arms = st.lists(st.tuples(accuracy, accuracy), min_size=1, max_size=14)
quickly = settings(max_examples=60, deadline=None)


def arms(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def test_intervals_by_hand() -> None:
    # statsmodels: DescrStatsW(TOGETHER).tconfint_mean()
    interval = mean_interval(TOGETHER)
    assert (interval.low, interval.high) == pytest.approx((0.5873877992544739, 0.6378122007455259), rel=1e-12)
    assert interval.mean == pytest.approx(0.6126)
    one = mean_interval([0.4])
    assert (one.mean, math.isnan(one.low), math.isnan(one.high)) == (0.4, True, True)
    assert mean_interval([0.1] * 3) == Interval(0.1, 0.1, 0.1)  # exactly, although 0.1 + 0.1 + 0.1 > 0.3


@given(two_arms)
@quickly
def test_the_t_test_is_scipys(pairs: list[tuple[float, float]]) -> None:
    treatment, baseline = arms(pairs)
    difference = paired_difference(treatment, baseline)
    assert 0 <= difference.p_value <= 1
    if not math.isnan(difference.low):
        expected = scipy_stats.ttest_rel(treatment, baseline)
        assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        interval = expected.confidence_interval(0.95)
        assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-12)
        assert difference.low < difference.mean < difference.high
        assert (difference.low <= 0 <= difference.high) == (difference.p_value >= ALPHA)


@given(two_arms, st.data(), accuracy)
@quickly
def test_differences_are_paired(pairs: list[tuple[float, float]], data: st.DataObject, shift: float) -> None:
    """Exchanged arms mirror everything, luck of a seed cancels out, a shift of one arm shifts mean and interval."""

    def same(one: PairedDifference, other: PairedDifference) -> bool:
        return bool(np.allclose(astuple(one), astuple(other), rtol=1e-6, atol=1e-9, equal_nan=True))

    treatment, baseline = arms(pairs)
    one, other = paired_difference(treatment, baseline), paired_difference(baseline, treatment)
    assert same(one, replace(other, mean=-other.mean, low=-other.high, high=-other.low))
    luck = np.array(data.draw(st.lists(accuracy, min_size=len(pairs), max_size=len(pairs))))
    assert same(one, paired_difference(np.add(treatment, luck), np.add(baseline, luck)))
    shifted = paired_difference(np.add(treatment, shift), baseline)
    for name in ("mean", "low", "high"):
        assert getattr(shifted, name) == pytest.approx(getattr(one, name) + shift, nan_ok=True, abs=1e-9), name


def test_differences_without_a_spread_are_judged_by_their_number() -> None:
    one = paired_difference([0.9], [0.1])
    assert (one.mean, one.p_value, math.isnan(one.low)) == (0.8, 1.0, True)
    for n in (2, 6, 20):
        values = np.arange(n) / 50
        equal, apart = paired_difference(values, values), paired_difference(values + 0.1, values)  # equal on paper
        assert all(math.isnan(x) for d in (equal, apart) for x in (d.low, d.high))
        assert (equal.mean, equal.p_value) == (0.0, 1.0)
        assert apart.mean == pytest.approx(0.1)
        assert apart.p_value == 2 / 2**n
    rounded = paired_difference([0.1 + 0.2, 0.3, 0.3], [0.3, 0.3, 0.3])
    assert (rounded.mean, rounded.p_value) == (0.0, 1.0)
    spread = paired_difference([0.5, 0.5, 0.5 + 1 / 10_000], [0.5, 0.5, 0.5])  # one problem more in one seed
    assert spread.p_value == pytest.approx(scipy_stats.ttest_1samp([0, 0, 1], 0).pvalue, rel=1e-9)


def test_holm_by_hand_and_by_statsmodels() -> None:
    assert holm([]) == []
    assert holm([0.03]) == [0.03]
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])  # 0.01 · 3, 0.02 · 2, and no less for 0.04
    # statsmodels: multipletests(p, method="holm")[1]
    p = [0.04, 0.001, 0.03, 0.01, 0.5, 0.03]
    assert holm(p) == pytest.approx([0.12, 0.006, 0.12, 0.05, 0.5, 0.12], rel=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_holm_rejects_what_stepping_down_rejects(p: list[float], random: Random) -> None:
    adjusted = holm(p)
    for alpha in (0.01, 0.05, 0.3):
        rejected = set()
        for step, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
            if (len(p) - step) * p[i] >= alpha:
                break
            rejected.add(i)
        assert rejected == {i for i, value in enumerate(adjusted) if value < alpha}
    assert all(raw <= value <= min(1.0, len(p) * raw) for raw, value in zip(p, adjusted, strict=True))
    order = list(range(len(p)))
    random.shuffle(order)
    assert holm([p[i] for i in order]) == [adjusted[i] for i in order]


CLEAR = PairedDifference(0.043, 0.012, 0.074, 0.018, 5)


def test_a_verdict_is_one_on_p_and_the_sign() -> None:
    less = "no difference shown"
    assert [verdict(CLEAR, p) for p in (0.018, 0.072, ALPHA, 0.049)] == ["better", less, less, "better"]
    assert verdict(replace(CLEAR, mean=-0.043, low=-0.074, high=-0.012), 0.018) == "worse"
    assert verdict(paired_difference([0.9], [0.1]), 0.0) == less
    alike = [paired_difference([0.51] * n, [0.5] * n) for n in (2, 5, 6)]
    assert [verdict(of, of.p_value) for of in alike] == [less, less, "better"]


def test_what_cannot_be_used_is_named_with_its_place() -> None:
    wrong: Any = {"nested": [[0.1], [0.2]], "none": [0.1, None]}  # a type checker would refuse them
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: mean_interval([]), r"values .* \[0\]"),
        (lambda: mean_interval(wrong["nested"]), r"values .* \[2, 1\]"),
        (lambda: mean_interval([0.1, math.nan]), r"values\[1\] is nan"),
        (lambda: mean_interval(wrong["none"]), r"values\[1\] is nan"),
        (lambda: paired_difference([math.inf, 0.1], [0.1, 0.1]), r"treatment\[0\] is inf"),
        (lambda: paired_difference([0.1], [math.nan]), r"baseline\[0\] is nan"),
        (lambda: paired_difference([0.1, 0.2], [0.1]), "2 values and baseline 1"),
    ]
    for call, place in refused:
        with pytest.raises(ValueError, match=place):
            call()

"""The statistics against scipy, statsmodels and enumeration by hand; test_stats_promises.py simulates.

Numbers marked "statsmodels" are those of statsmodels 0.15.0, written out: the tests don't need it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from ftis.comparison.stats import (
    ALPHA,
    RESAMPLES,
    Interval,
    PairedDifference,
    holm,
    mcnemar,
    mean_interval,
    paired_difference,
    smallest_detectable,
    verdict,
)

TOGETHER = [0.612, 0.587, 0.640, 0.601, 0.623]
ALONE = [0.571, 0.560, 0.583, 0.590, 0.566]

accuracy = st.integers(0, 300).map(lambda right: right / 300)
two_arms = st.lists(st.tuples(accuracy, accuracy), min_size=1, max_size=14)
quickly = settings(max_examples=60, deadline=None)


def arms(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


@given(st.lists(accuracy, min_size=2, max_size=14))
@quickly
def test_the_interval_of_a_mean_is_scipys(values: list[float]) -> None:
    interval = mean_interval(values)
    if np.ptp(values):
        expected = scipy_stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=scipy_stats.sem(values))
        assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-12)
        assert interval.n == len(values)
        assert interval.mean == pytest.approx(np.mean(values))
    else:
        assert interval == Interval(values[0], values[0], values[0], len(values))


def test_intervals_by_hand() -> None:
    # statsmodels: DescrStatsW(TOGETHER).tconfint_mean()
    interval = mean_interval(TOGETHER)
    assert (interval.low, interval.high) == pytest.approx((0.5873877992544739, 0.6378122007455259), rel=1e-12)
    one = mean_interval([0.4])
    assert (one.mean, one.n, math.isnan(one.low), math.isnan(one.high)) == (0.4, 1, True, True)
    assert mean_interval([0.1] * 3) == Interval(0.1, 0.1, 0.1, 3)  # exactly, although 0.1 + 0.1 + 0.1 > 0.3


def test_a_paired_difference_with_all_its_numbers() -> None:
    difference = paired_difference(TOGETHER, ALONE)
    # statsmodels: DescrStatsW(d).tconfint_mean(), .ttest_mean(0); TTestPower().solve_power(nobs=5, …) · s
    assert astuple(difference) == pytest.approx(
        (0.0386, 0.01392866439661037, 0.06327133560338966, 0.01221507263060298, 5, 2 / 2**5, 0.03342056674480542),
        rel=1e-5,
    )


@given(two_arms)
@quickly
def test_the_t_test_is_scipys(pairs: list[tuple[float, float]]) -> None:
    treatment, baseline = arms(pairs)
    difference = paired_difference(treatment, baseline)
    assert 0 <= difference.p_value <= 1
    assert 0 < difference.flips_p <= 1
    if not math.isnan(difference.low):
        expected = scipy_stats.ttest_rel(treatment, baseline)
        assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        interval = expected.confidence_interval(0.95)
        assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-12)
        assert difference.low < difference.mean < difference.high
        assert (difference.low <= 0 <= difference.high) == (difference.p_value >= ALPHA)


def test_sign_flips_are_tried_up_to_thirteen_seeds_and_drawn_beyond() -> None:
    for n in (2, 3, 5, 13):
        treatment, baseline = np.random.default_rng(n).integers(0, 9, (2, n)) / 9  # a coarse grid, so that flips tie
        sums = [abs(np.dot(signs, treatment - baseline)) for signs in itertools.product((1, -1), repeat=n)]
        expected = np.mean(np.array(sums) >= abs(sum(treatment - baseline)) - 1e-12)
        assert paired_difference(treatment, baseline).flips_p == expected
    rng = np.random.default_rng(6)
    baseline = rng.random(14)
    treatment = baseline + rng.normal(0.02, 0.05, 14)
    signs = 1 - 2 * ((np.arange(2**14)[:, None] >> np.arange(14)) & 1)
    d = treatment - baseline
    exact = np.mean(np.abs(signs @ d) >= abs(d.sum()) - 1e-12)
    drawn = paired_difference(treatment, baseline)
    assert drawn.flips_p == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / RESAMPLES))
    assert drawn == paired_difference(treatment, baseline)  # a comparison can be repeated
    # Of 2⁴⁰ flips none drawn goes as far as d itself, which counts as one more.
    assert paired_difference([0.1] * 40, [0.0] * 40).flips_p == 1 / (1 + RESAMPLES)


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


def test_differences_without_a_spread_are_judged_by_sign_flips() -> None:
    one = paired_difference([0.9], [0.1])
    assert (one.mean, one.p_value, one.flips_p, math.isnan(one.low)) == (0.8, 1.0, 1.0, True)
    for n in (2, 6, 20):
        values = np.arange(n) / 50
        equal, apart = paired_difference(values, values), paired_difference(values + 0.1, values)  # equal on paper
        assert all(math.isnan(x) for d in (equal, apart) for x in (d.low, d.high, d.smallest_detectable))
        assert (equal.mean, equal.p_value) == (0.0, 1.0)
        assert apart.mean == pytest.approx(0.1)
        assert apart.p_value == apart.flips_p == (2 / 2**n if n < 20 else 1 / (1 + RESAMPLES))
    rounded = paired_difference([0.1 + 0.2, 0.3, 0.3], [0.3, 0.3, 0.3])
    assert (rounded.mean, rounded.p_value) == (0.0, 1.0)
    spread = paired_difference([0.5, 0.5, 0.5 + 1 / 10_000], [0.5, 0.5, 0.5])  # one problem more in one seed
    assert spread.p_value == pytest.approx(scipy_stats.ttest_1samp([0, 0, 1], 0).pvalue, rel=1e-9)


def test_the_smallest_detectable_difference_has_its_power() -> None:
    # statsmodels: TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8, alternative="two-sided")
    for n, expected in {2: 11.549889754978167, 5: 1.6819970833232674, 20: 0.6604416544380312}.items():
        assert smallest_detectable(0.02, n) == pytest.approx(0.02 * expected, rel=1e-5)
    for n in (2, 3, 5, 30):
        critical, shift = scipy_stats.t.isf(0.05 / 2, n - 1), smallest_detectable(1.0, n) * math.sqrt(n)
        assert scipy_stats.nct.sf(critical, n - 1, shift) == pytest.approx(0.8, abs=1e-8)
    expected = scipy_stats.norm.isf(0.025) + scipy_stats.norm.isf(0.2)
    assert smallest_detectable(1.0, 100_000) * math.sqrt(100_000) == pytest.approx(expected, rel=1e-4)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
@quickly
def test_mcnemar_is_a_symmetric_binomial_test_of_the_discordant(pairs: list[tuple[bool, bool]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    result, swapped = mcnemar(first, second), mcnemar([float(b) for b in second], [int(a) for a in first])
    assert (result.only_first, result.only_second) == (swapped.only_second, swapped.only_first)
    assert result.p_value == swapped.p_value
    assert result.only_first - result.only_second == sum(first) - sum(second)
    discordant = result.only_first + result.only_second
    expected = scipy_stats.binomtest(result.only_first, discordant).pvalue if discordant else 1.0
    assert result.p_value == pytest.approx(expected, rel=1e-9)


CLEAR = PairedDifference(0.043, 0.012, 0.074, 0.018, 5, 0.0625, 0.0419)


def test_a_verdict_gives_its_numbers() -> None:
    better = verdict(CLEAR, baseline="alone")
    assert astuple(better) == ("better", "better than alone by +0.043 (95% interval +0.012 to +0.074, 5 seeds)")
    assert verdict(replace(CLEAR, mean=-0.043, low=-0.074, high=-0.012), baseline="alone").label == "worse"
    lost = verdict(CLEAR, 0.072, baseline="alone")
    assert lost.label == "no difference shown"
    assert all(number in lost.text for number in ("0.018", "0.072", "0.042"))  # p, p adjusted, the detectable
    assert [verdict(CLEAR, p, baseline="alone").label for p in (ALPHA, 0.049)] == ["no difference shown", "better"]
    assert "+0.000" in verdict(replace(CLEAR, mean=-0.0001, p_value=0.9), baseline="alone").text  # no minus
    assert verdict(paired_difference([0.9], [0.1]), 0.0, baseline="alone").label == "no difference shown"
    labels = [verdict(paired_difference([0.51] * n, [0.5] * n), baseline="alone").label for n in (2, 5, 6)]
    assert labels == ["no difference shown", "no difference shown", "better"]


@given(two_arms, st.none() | st.floats(0, 1))
@quickly
def test_a_verdict_follows_from_p_and_sign_and_mirrors(pairs: list[tuple[float, float]], p: float | None) -> None:
    treatment, baseline = arms(pairs)
    result = verdict(paired_difference(treatment, baseline), p, baseline="alone")
    mirrored = verdict(paired_difference(baseline, treatment), p, baseline="alone")
    opposite = {"better": "worse", "worse": "better"}
    assert mirrored.label == opposite.get(result.label, result.label)
    assert result.text.startswith(result.label)
    assert "nan" not in result.text


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
        (lambda: smallest_detectable(0.1, 1), "n = 1"),
        (lambda: smallest_detectable(math.nan, 5), "spread = nan"),
        (lambda: smallest_detectable(-0.1, 5), "spread = -0.1"),
        (lambda: mcnemar([True], [True, False]), "1 problems and second_right 2"),
        (lambda: mcnemar([True, False], [1.0, math.nan]), r"second_right\[1\] is nan"),
        (lambda: mcnemar([0.5], [1]), r"first_right\[0\] is 0.5"),
        (lambda: mcnemar([], []), "first_right"),
        (lambda: holm([0.1, math.nan]), r"p_values\[1\] is nan"),
        (lambda: holm([1.5]), r"p_values\[0\] is 1.5"),
        (lambda: holm(wrong["nested"]), r"p_values .* \[2, 1\]"),
        (lambda: verdict(CLEAR, math.nan, baseline="alone"), "p = nan"),
    ]
    for call, place in refused:
        with pytest.raises(ValueError, match=place):
            call()

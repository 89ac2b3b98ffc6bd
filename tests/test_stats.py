"""The statistics against scipy, statsmodels and enumeration by hand; test_stats_promises.py simulates.

Numbers marked "statsmodels" were made with statsmodels 0.15.0 and are written out here: the tests don't need it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, astuple, replace
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

PROBLEMS = 300
accuracy = st.integers(0, PROBLEMS).map(lambda right: right / PROBLEMS)
two_arms = st.lists(st.tuples(accuracy, accuracy), min_size=1, max_size=14)
p_value = st.floats(0, 1)


def arms(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


# --- the mean -----------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_students() -> None:
    interval = mean_interval(TOGETHER)
    # statsmodels: DescrStatsW(TOGETHER).tconfint_mean()
    assert (interval.low, interval.high) == pytest.approx((0.5873877992544739, 0.6378122007455259), rel=1e-12)
    assert interval.mean == pytest.approx(0.6126)
    assert interval.n == 5


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_of_a_mean_equals_scipys(n: int) -> None:
    values = TOGETHER[:n]
    interval = mean_interval(values)
    expected = scipy_stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=scipy_stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-12)


def test_two_values_by_hand() -> None:
    # s/√2 is half the range, 0.1, and t(1) is a Cauchy: its 97.5 % quantile is tan(0.475 π).
    interval = mean_interval([0.4, 0.6])
    assert interval.high - 0.5 == pytest.approx(0.1 * math.tan(0.475 * math.pi), rel=1e-12)


def test_one_value_has_a_mean_and_no_interval() -> None:
    interval = mean_interval([0.4])
    assert (interval.mean, interval.n) == (0.4, 1)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_values_give_no_width(n: int) -> None:
    assert mean_interval([0.1] * n) == Interval(0.1, 0.1, 0.1, n)  # exactly, although 0.1 + 0.1 + 0.1 > 0.3


# --- the paired difference ----------------------------------------------------------------------------


def test_a_paired_difference_with_all_its_numbers() -> None:
    difference = paired_difference(TOGETHER, ALONE)
    assert difference.mean == pytest.approx(0.0386)
    assert difference.n == 5
    # statsmodels: DescrStatsW(d).tconfint_mean(), .ttest_mean(0)
    assert (difference.low, difference.high) == pytest.approx((0.01392866439661037, 0.06327133560338966), rel=1e-10)
    assert difference.p_value == pytest.approx(0.01221507263060298, rel=1e-10)
    # statsmodels: TTestPower().solve_power(nobs=5, alpha=0.05, power=0.8) · s
    assert difference.smallest_detectable == pytest.approx(0.03342056674480542, rel=1e-5)
    assert difference.flips_p == 2 / 2**5  # all five differences are positive


@given(two_arms)
@settings(max_examples=60, deadline=None)
def test_the_t_test_is_scipys(pairs: list[tuple[float, float]]) -> None:
    treatment, baseline = arms(pairs)
    difference = paired_difference(treatment, baseline)
    if not math.isnan(difference.low):
        expected = scipy_stats.ttest_rel(treatment, baseline)
        assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        interval = expected.confidence_interval(0.95)
        assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-9, abs=1e-12)
        # An interval at 1 − α and a test at α say the same.
        assert (difference.low <= 0 <= difference.high) == (difference.p_value >= ALPHA)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_up_to_thirteen_seeds_every_sign_flip_is_tried(n: int) -> None:
    rng = np.random.default_rng(n)
    treatment, baseline = rng.integers(0, 9, (2, n)) / 9  # a coarse grid, so that flips tie
    by_hand = [
        abs(sum(sign * (t - b) for sign, t, b in zip(signs, treatment, baseline, strict=True)))
        for signs in itertools.product((1, -1), repeat=n)
    ]
    observed = abs(sum(treatment - baseline))
    expected = sum(total >= observed - 1e-12 for total in by_hand) / 2**n
    assert paired_difference(treatment, baseline).flips_p == expected
    if n <= 5:
        permuted = scipy_stats.permutation_test(
            (treatment, baseline), lambda t, b: np.mean(t - b), permutation_type="samples", n_resamples=2**n
        )
        assert expected == pytest.approx(permuted.pvalue)


def test_beyond_thirteen_seeds_sign_flips_are_drawn() -> None:
    rng = np.random.default_rng(6)
    baseline = rng.random(14)
    treatment = baseline + rng.normal(0.02, 0.05, 14)
    signs = 1 - 2 * ((np.arange(2**14)[:, None] >> np.arange(14)) & 1)
    d = treatment - baseline
    exact = np.mean(np.abs(signs @ d) >= abs(d.sum()) - 1e-12)
    drawn = paired_difference(treatment, baseline).flips_p
    assert 0.02 < exact < 0.6
    assert drawn == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / RESAMPLES))
    # Of 2⁴⁰ flips none drawn goes as far as d itself, which counts as one more.
    assert paired_difference([0.1] * 40, [0.0] * 40).flips_p == 1 / (1 + RESAMPLES)


@pytest.mark.parametrize("n", [5, 20])  # all sign flips are tried, and some are drawn
def test_a_comparison_can_be_told_again(n: int) -> None:
    treatment = np.random.default_rng(5).normal(0.02, 0.05, n)
    assert paired_difference(treatment, np.zeros(n)) == paired_difference(treatment, np.zeros(n))


def same(one: PairedDifference, other: PairedDifference) -> bool:
    """Equal but for rounding, nan where the other is nan."""
    return bool(np.allclose(astuple(one), astuple(other), rtol=1e-6, atol=1e-9, equal_nan=True))


@given(two_arms)
@settings(max_examples=60, deadline=None)
def test_exchanging_the_arms_mirrors_everything(pairs: list[tuple[float, float]]) -> None:
    treatment, baseline = arms(pairs)
    one, other = paired_difference(treatment, baseline), paired_difference(baseline, treatment)
    assert same(one, replace(other, mean=-other.mean, low=-other.high, high=-other.low))


@given(two_arms, st.data())
@settings(max_examples=60, deadline=None)
def test_what_a_seed_does_to_both_arms_is_taken_out(pairs: list[tuple[float, float]], data: st.DataObject) -> None:
    treatment, baseline = arms(pairs)
    luck = data.draw(st.lists(accuracy, min_size=len(pairs), max_size=len(pairs)))
    assert same(
        paired_difference(treatment, baseline), paired_difference(np.add(treatment, luck), baseline + np.array(luck))
    )


@given(two_arms, accuracy)
@settings(max_examples=60, deadline=None)
def test_a_shift_of_one_arm_shifts_mean_and_interval(pairs: list[tuple[float, float]], shift: float) -> None:
    treatment, baseline = arms(pairs)
    one, other = paired_difference(treatment, baseline), paired_difference(np.add(treatment, shift), baseline)
    for name in ("mean", "low", "high"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) + shift, nan_ok=True, abs=1e-9), name
    assert other.smallest_detectable == pytest.approx(one.smallest_detectable, nan_ok=True, rel=1e-6)


@given(two_arms)
@settings(max_examples=60, deadline=None)
def test_p_values_and_intervals_are_in_their_ranges(pairs: list[tuple[float, float]]) -> None:
    difference = paired_difference(*arms(pairs))
    assert 0 <= difference.p_value <= 1
    assert 0 < difference.flips_p <= 1
    if not math.isnan(difference.low):
        assert difference.low < difference.mean < difference.high


def no_spread(difference: PairedDifference) -> bool:
    return all(math.isnan(x) for x in (difference.low, difference.high, difference.smallest_detectable))


def test_one_seed_shows_nothing() -> None:
    difference = paired_difference([0.9], [0.1])
    assert no_spread(difference)
    assert (difference.mean, difference.n, difference.p_value, difference.flips_p) == (0.8, 1, 1.0, 1.0)


@pytest.mark.parametrize("n", [2, 5, 8, 20])
def test_identical_arms_have_p_1(n: int) -> None:
    values = list(np.random.default_rng(0).random(n))
    difference = paired_difference(values, values)
    assert no_spread(difference)
    assert (difference.mean, difference.p_value, difference.flips_p) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 12])
def test_equal_differences_are_judged_by_sign_flips(n: int) -> None:
    baseline = np.arange(n) / 10
    difference = paired_difference(baseline + 0.1, baseline)  # equal on paper, not in floats
    assert no_spread(difference)
    assert difference.mean == pytest.approx(0.1)
    assert difference.p_value == difference.flips_p == 2 / 2**n


def test_arms_that_only_rounding_sets_apart_are_identical() -> None:
    difference = paired_difference([0.1 + 0.2, 0.3, 0.3], [0.3, 0.3, 0.3])
    assert (difference.mean, difference.p_value) == (0.0, 1.0)


def test_one_problem_more_in_one_seed_is_a_spread() -> None:
    difference = paired_difference([0.5, 0.5, 0.5 + 1 / 10_000], [0.5, 0.5, 0.5])
    assert difference.low < 0 < difference.high
    assert difference.p_value == pytest.approx(scipy_stats.ttest_1samp([0, 0, 1], 0).pvalue, rel=1e-9)


# --- the smallest detectable difference ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "expected"),
    [  # statsmodels: TTestPower().solve_power(nobs=n, alpha=0.05, power=0.8, alternative="two-sided")
        (2, 11.549889754978167),
        (3, 3.264043552819638),
        (5, 1.6819970833232674),
        (8, 1.156035271959959),
        (10, 0.9960019107624178),
        (20, 0.6604416544380312),
    ],
)
def test_the_smallest_detectable_difference_is_that_of_statsmodels(n: int, expected: float) -> None:
    assert smallest_detectable(1.0, n) == pytest.approx(expected, rel=1e-5)
    assert smallest_detectable(0.02, n) == pytest.approx(0.02 * expected, rel=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_at_the_smallest_detectable_difference_the_power_is_as_promised(n: int) -> None:
    noncentrality = smallest_detectable(1.0, n) * math.sqrt(n)
    critical = scipy_stats.t.isf(0.05 / 2, n - 1)
    assert scipy_stats.nct.sf(critical, n - 1, noncentrality) == pytest.approx(0.8, abs=1e-8)


def test_many_seeds_need_what_the_normal_distribution_says() -> None:
    expected = scipy_stats.norm.isf(0.025) + scipy_stats.norm.isf(0.2)
    assert smallest_detectable(1.0, 100_000) * math.sqrt(100_000) == pytest.approx(expected, rel=1e-4)


# --- McNemar ------------------------------------------------------------------------------------------


def answers(both: int, only_first: int, only_second: int, neither: int) -> tuple[list[bool], list[bool]]:
    counts = {(True, True): both, (True, False): only_first, (False, True): only_second, (False, False): neither}
    pairs = [pair for pair, count in counts.items() for _ in range(count)]
    return [first for first, _ in pairs], [second for _, second in pairs]


@pytest.mark.parametrize(
    ("only_first", "only_second", "expected"),
    [  # statsmodels: mcnemar([[7, b], [c, 9]], exact=True).pvalue
        (12, 3, 0.03515625),
        (5, 5, 1.0),
        (0, 6, 0.03125),
        (1, 0, 1.0),
        (40, 22, 0.030015864349067285),
    ],
)
def test_mcnemar_is_that_of_statsmodels(only_first: int, only_second: int, expected: float) -> None:
    result = mcnemar(*answers(7, only_first, only_second, 9))
    assert (result.only_first, result.only_second) == (only_first, only_second)
    assert result.p_value == pytest.approx(expected, rel=1e-12)


def test_models_that_agree_on_every_problem_have_p_1() -> None:
    right = [True, False, True]
    assert astuple(mcnemar(right, right)) == (0, 0, 1.0)


def test_rewards_of_0_and_1_serve_as_booleans() -> None:
    first, second = answers(3, 8, 1, 2)
    assert mcnemar([float(x) for x in first], [int(x) for x in second]) == mcnemar(first, second)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_mcnemar_is_a_symmetric_binomial_test_of_the_discordant(pairs: list[tuple[bool, bool]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    result, swapped = mcnemar(first, second), mcnemar(second, first)
    assert (result.only_first, result.only_second) == (swapped.only_second, swapped.only_first)
    assert result.p_value == swapped.p_value
    assert result.only_first - result.only_second == sum(first) - sum(second)
    discordant = result.only_first + result.only_second
    if discordant:
        assert result.p_value == pytest.approx(scipy_stats.binomtest(result.only_first, discordant).pvalue, rel=1e-9)


# --- the verdict --------------------------------------------------------------------------------------

CLEAR = PairedDifference(0.043, 0.012, 0.074, 0.018, 5, 0.0625, 0.0419)


def test_better_in_words() -> None:
    assert astuple(verdict(CLEAR, baseline="alone")) == (
        "better",
        "better than alone by +0.043 (95% interval +0.012 to +0.074, 5 seeds)",
    )


def test_worse_in_words() -> None:
    difference = replace(CLEAR, mean=-0.043, low=-0.074, high=-0.012)
    assert astuple(verdict(difference, baseline="NoIS")) == (
        "worse",
        "worse than NoIS by -0.043 (95% interval -0.074 to -0.012, 5 seeds)",
    )


def test_no_difference_in_words_with_what_would_have_been_seen() -> None:
    difference = replace(CLEAR, mean=0.01, low=-0.021, high=0.041, p_value=0.42)
    assert astuple(verdict(difference, baseline="alone")) == (
        "no difference shown",
        "no difference shown from alone: +0.010 (95% interval -0.021 to +0.041, 5 seeds); "
        "the smallest difference that such seeds show in 80% of cases is 0.042",
    )


def test_a_difference_lost_to_the_correction_says_so() -> None:
    result = verdict(CLEAR, 0.072, baseline="alone")
    assert result.label == "no difference shown"
    assert "p = 0.018 by itself is 0.072 among all comparisons" in result.text
    assert verdict(CLEAR, 0.036, baseline="alone").label == "better"


def test_a_p_at_the_level_shows_nothing() -> None:
    assert verdict(CLEAR, ALPHA, baseline="alone").label == "no difference shown"
    assert verdict(CLEAR, 0.049, baseline="alone").label == "better"


def test_one_seed_cannot_tell() -> None:
    result = verdict(paired_difference([0.9], [0.1]), baseline="alone")
    assert result.label == "no difference shown"
    assert "one seed cannot tell (+0.800)" in result.text
    assert verdict(paired_difference([0.9], [0.1]), 0.0, baseline="alone").label == "no difference shown"


@pytest.mark.parametrize(("n", "label"), [(2, "no difference shown"), (5, "no difference shown"), (6, "better")])
def test_without_spread_the_text_gives_no_interval_and_doubts_the_runs(n: int, label: str) -> None:
    result = verdict(paired_difference([0.51] * n, [0.5] * n), baseline="alone")
    assert result.label == label
    assert (
        f"+0.010 in each of {n} seeds (no spread, no interval: make sure that they are different runs)" in result.text
    )
    assert "nan" not in result.text


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    assert "+0.000" in verdict(replace(CLEAR, mean=-0.0001, p_value=0.9), baseline="alone").text


@given(two_arms, st.none() | p_value)
@settings(max_examples=60, deadline=None)
def test_a_verdict_follows_from_p_and_sign_and_mirrors(pairs: list[tuple[float, float]], p: float | None) -> None:
    treatment, baseline = arms(pairs)
    result = verdict(paired_difference(treatment, baseline), p, baseline="alone")
    mirrored = verdict(paired_difference(baseline, treatment), p, baseline="alone")
    opposite = {"better": "worse", "worse": "better"}
    assert mirrored.label == opposite.get(result.label, result.label)
    assert result.text.startswith(result.label)
    assert "nan" not in result.text


# --- what cannot be used ------------------------------------------------------------------------------

WRONG: dict[str, Any] = {"nested": [[0.1], [0.2]], "none": [0.1, None], "nested once": [[0.1]]}
"""Arguments that a type checker would refuse."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_interval([]), r"values must be a list with a number per seed, got the shape \[0\]"),
        (lambda: mean_interval(WRONG["nested"]), r"got the shape \[2, 1\]"),
        (lambda: mean_interval([0.1, math.nan]), r"values\[1\] is nan: leave that seed out"),
        (lambda: mean_interval(WRONG["none"]), r"values\[1\] is nan: leave that seed out"),
        (lambda: paired_difference([math.inf, 0.1], [0.1, 0.1]), r"treatment\[0\] is inf: .* or run it again"),
        (lambda: paired_difference([0.1], [math.nan]), r"baseline\[0\] is nan: leave that seed out, of every arm"),
        (lambda: paired_difference([0.1, 0.2], [0.1]), r"2 values and baseline 1: give both the same seeds"),
        (lambda: paired_difference([], []), r"treatment must be a list with a number per seed"),
        (lambda: smallest_detectable(0.1, 1), r"n = 1: a spread over seeds takes at least 2"),
        (lambda: smallest_detectable(math.nan, 5), r"spread = nan: give the standard deviation"),
        (lambda: smallest_detectable(-0.1, 5), r"spread = -0.1: give the standard deviation"),
        (lambda: mcnemar([True], [True, False]), r"1 problems and second_right 2: give both the same problems"),
        (lambda: mcnemar([True, False], [1.0, math.nan]), r"second_right\[1\] is nan, not true or false: say which"),
        (lambda: mcnemar([0.5], [1]), r"first_right\[0\] is 0.5, not true or false"),
        (lambda: mcnemar([], []), r"first_right must be a list with true or false per problem"),
        (
            lambda: holm([0.1, math.nan]),
            r"p_values\[1\] is nan, .*: leave out a test that could not be made, or give 1",
        ),
        (lambda: holm([1.5]), r"p_values\[0\] is 1.5, not within"),
        (lambda: holm(WRONG["nested once"]), r"p_values must be a list of numbers, got the shape \[1, 1\]"),
        (lambda: verdict(CLEAR, math.nan, baseline="alone"), r"p = nan is not within 0 … 1: take it from holm"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_results_cannot_be_changed() -> None:
    results: list[Any] = [mean_interval(ALONE), CLEAR, mcnemar([True], [False]), verdict(CLEAR, baseline="alone")]
    for result in results:
        with pytest.raises(FrozenInstanceError):
            result.n = 3

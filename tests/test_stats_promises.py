"""The statistics against what they promise: Holm's correction by rule; coverage, level and power by simulation."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ftis.comparison.stats import holm, mean_interval, paired_difference, verdict


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


PROBLEMS = 300
SEEDS = 5
SEED_SD, RUN_SD = 0.03, 0.015
"""Of the accuracy a seed gives to all its runs, and of each run's own."""


def accuracies(rng: np.random.Generator, experiments: int, runs: int, seeds: int = SEEDS) -> NDArray[np.float64]:
    """Accuracies on 300 problems, [experiments, runs, seeds]; runs are of equal merit and share their seed's luck."""
    shared = rng.normal(0.5, SEED_SD, (experiments, 1, seeds))
    chance = shared + rng.normal(0, RUN_SD, (experiments, runs, seeds))
    return rng.binomial(PROBLEMS, chance) / PROBLEMS


def test_intervals_cover_what_they_promise() -> None:
    draws = np.random.default_rng(11).normal(0.5, 0.02, (2000, SEEDS))
    means = [mean_interval(values) for values in draws]
    assert np.mean([i.low <= 0.5 <= i.high for i in means]) == pytest.approx(0.95, abs=0.02)
    runs = accuracies(np.random.default_rng(12), 800, runs=2)
    differences = [paired_difference(treatment + 0.04, baseline) for treatment, baseline in runs]
    assert np.mean([d.low <= 0.04 <= d.high for d in differences]) == pytest.approx(0.95, abs=0.025)


def verdicts_of_two_peers(runs: NDArray[np.float64]) -> list[str]:
    """Labels for two peers, whose runs are [together 1, alone 1, together 2, alone 2], judged as one family."""
    differences = [paired_difference(runs[0], runs[1]), paired_difference(runs[2], runs[3])]
    adjusted = holm([d.p_value for d in differences])
    return [verdict(d, p) for d, p in zip(differences, adjusted, strict=True)]


def test_arms_that_are_the_same_are_seldom_told_apart() -> None:
    # The true rate is 4.9 %, and that of 2,000 experiments has a standard deviation of 0.5 %.
    experiments = accuracies(np.random.default_rng(13), 2000, runs=4)
    wrong = [set(verdicts_of_two_peers(runs)) != {"no difference shown"} for runs in experiments]
    assert 0.035 <= np.mean(wrong) <= 0.065


def test_two_seeds_that_agree_by_chance_are_no_finding() -> None:
    runs = accuracies(np.random.default_rng(14), 2000, runs=2, seeds=2)
    differences = [paired_difference(treatment, baseline) for treatment, baseline in runs]
    assert sum(math.isnan(d.low) and d.mean != 0 for d in differences) > 20  # they do agree, in some 2 %
    assert np.mean([d.p_value < 0.05 for d in differences]) < 0.05

"""The evidence for a fall of the reward: its formula, its bound, and its power."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.guards import falls
from ftis.guards.falls import GAPS, STAKES, TIMES, FallTest, shortest_window

UNIT = st.floats(0, 1)


def scaled(margin: float, shortest: Callable[[int], int] = shortest_window) -> FallTest:
    """A test that has seen rewards of 0 and 1."""
    test = FallTest(margin, shortest)
    test.add([[0.0, 1.0]])
    return test


def before(window: list[list[float]], guesses: list[float], m: float) -> float:
    values = [(x, guess) for means, guess in zip(window, guesses, strict=True) for x in means]
    return float(np.mean([math.prod((1 + s * (x - g)) * math.exp(s * (g - m)) for x, g in values) for s in STAKES]))


def behind(rounds: list[list[float]], m: float, margin: float) -> float:
    values = [x for means in rounds for x in means]
    return float(np.mean([math.prod(1 - s + s * (1 - x) / (1 - m + margin) for x in values) for s in STAKES]))


def test_one_round_before_and_one_behind_by_hand() -> None:
    test = scaled(0.5, lambda groups: 1)
    test.add([[1.0, 1.0]])
    test.add([[0.0, 0.0]])
    # One of 15 pairs of window and gap holds X = 1 with μ = 1/2. The product of both factors is least
    # between m = .85 and .86, and the grid takes the upper end before the fall and the lower one behind it.
    products = [before([[1.0]], [0.5], (i + 1) / 100) * behind([[0.0]], i / 100, 0.5) for i in range(100)]
    assert test.nats == pytest.approx(math.log(min(products) / 15))
    assert test.behind == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(UNIT, min_size=1, max_size=3), min_size=2, max_size=12), st.floats(0.05, 0.5), UNIT)
def test_the_evidence_is_at_most_the_formula_at_every_mean(rounds: list[list[float]], margin: float, m: float) -> None:
    """A window's length follows from the groups of its first round: it has three, if all its rounds are alike."""
    test = scaled(margin, lambda groups: math.ceil(3 / groups))
    for means in rounds:
        test.add([[x] for x in means])
    shortest = [math.ceil(3 / len(means)) for means in rounds]
    lately = [np.concatenate(rounds[max(0, i + 1 - w) : i + 1]) for i, w in enumerate(shortest)]
    guesses = [0.5, *(float(np.mean(means)) for means in lately)]
    terms = [
        before(rounds[s : s + times * w], guesses[s : s + times * w], m)
        * behind(rounds[s + (times + gap) * w :], m, margin)
        for s, w in enumerate(shortest)
        for times in TIMES
        for gap in GAPS
        if s + (times + gap) * w < len(rounds)
    ]
    if not terms:
        assert test.nats == -math.inf
        return
    assert test.nats <= math.log(sum(terms) / (3 * len(GAPS))) + 1e-9
    assert test.of_last(len(rounds)) == test.nats >= test.of_last(1)


@given(st.lists(st.tuples(UNIT, st.floats(0.01, 1)), min_size=1, max_size=5), UNIT, st.sampled_from(STAKES.tolist()))
def test_a_factor_before_the_fall_is_at_most_one_in_expectation(
    rewards: list[tuple[float, float]], guess: float, stake: float
) -> None:
    values, weights = np.array(rewards).T
    weights /= weights.sum()
    mean = float(weights @ values)
    assert weights @ (1 + stake * (values - guess)) * math.exp(stake * (guess - mean)) <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("fall", ["at once", "after luck", "after luck, and of fewer groups then"])
def test_a_fall_of_the_margin_is_reported_with_a_probability_of_at_most_alpha(fall: str) -> None:
    """At every level, though a round's expected reward and its size may depend on earlier rewards."""
    rounds, runs, highest = 14, 400, []
    for run in range(runs):
        test, rng, means, most = scaled(0.3, lambda groups: 8 // groups), np.random.default_rng(run), [1.0], -math.inf
        for round in range(rounds):
            fell = round >= 7 if fall == "at once" else max(means[1:], default=0.0) > 0.95
            size = 2 if "fewer" in fall and round and means[-1] > 0.8 else 4  # shares by speed depend on the learned
            groups = rng.random((size, 3)) < (0.6 if fell else 0.9)
            test.add(groups.astype(float).tolist())
            means.append(float(groups.mean()))
            most = max(most, test.nats)
        highest.append(most)
    for level in (0.02, 0.1, 0.3):
        alarms = sum(nats >= math.log(rounds / level) for nats in highest)
        assert alarms / runs <= level + 3 * math.sqrt(level * (1 - level) / runs)


def test_a_collapse_is_found_within_a_few_rounds_and_its_place_too() -> None:
    for seed in range(5):
        rng, test = np.random.default_rng(seed), scaled(0.1)
        for round in range(40):
            test.add((rng.random((12, 12)) < (0.9 if round < 30 else 0.3)).astype(float).tolist())
            if test.nats >= math.log(40 / 0.01):
                break
        assert 30 <= round <= 32
        assert abs(round + 1 - test.behind - 30) <= 1


def test_a_slow_fall_from_a_short_peak_is_found() -> None:
    """The reward rises to .9 within 20 rounds and falls to .4 in 40 more."""
    level = [*np.linspace(0.3, 0.9, 20), *np.linspace(0.9, 0.4, 40)]
    for seed in range(3):
        rng, test = np.random.default_rng(seed), scaled(0.1)
        highest = -math.inf
        for mean in level[:56]:
            chances = rng.beta(1.5 * mean, 1.5 * (1 - mean), (12, 1))
            test.add((rng.random((12, 12)) < chances).astype(float).tolist())
            highest = max(highest, test.nats)
        assert highest >= math.log(60 / 0.01)


def test_a_restored_test_goes_on_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after rounds that are too old for a change."""
    monkeypatch.setattr(falls, "LONGEST", 5)

    def shortest(groups: int) -> int:
        return math.ceil(3 / groups)

    rng, test, again = np.random.default_rng(0), scaled(0.1, shortest), FallTest(0.1, shortest)
    for _ in range(80):
        test.add(rng.random((rng.integers(1, 4), 2)).tolist())
        again.restore(json.loads(json.dumps(test.state())))
        assert (again.nats, again.behind) == (test.nats, test.behind)
    assert len(test.rounds) < 80


def test_rewards_of_any_scale_count_alike() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.integers(0, 2, (8, 4, 3))
    one, other = FallTest(0.1, lambda groups: 2), FallTest(0.1, lambda groups: 2)
    for groups in [[[0, 1]], *rounds.tolist()]:
        one.add(groups)
        other.add([[3.0 * reward - 7 for reward in group] for group in groups])
    assert other.nats == pytest.approx(one.nats)
    other.add([[5.0]])  # above all earlier ones: the range is another one now
    assert (other.high, other.rounds, other.nats) == (5.0, [], -math.inf)
    other.add([[-100.0]])
    assert other.rounds == [[0.0]]


def test_a_test_without_two_rewards_waits() -> None:
    test = FallTest(0.1)
    for rewards, rounds in (([0.0, 0.0], []), ([0.0, 0.0], []), ([0.0, 1.0], []), ([0.0, 1.0], [[0.5]])):
        test.add([rewards])
        assert test.rounds == rounds

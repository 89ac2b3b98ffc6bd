"""Who samples what, and in which steps peers learn: the same on every peer, without a word."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis.config import PeerConfig, RecipeError, TrainingConfig
from ftis.engines.optimizers import learning_rate
from ftis.recipe.parsing import parse
from ftis.schedule import assigned, draw_items, minibatches
from recipes import swarm

# --- draw_items ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_items", "count"), [(1, 1), (5, 5), (10, 3), (12, 4), (7, 1), (100, 24)])
@pytest.mark.parametrize("seed", [0, 1, -3, 2**40])
def test_every_round_draws_distinct_items_and_an_epoch_repeats_none(n_items: int, count: int, seed: int) -> None:
    rounds = [draw_items(n_items, count, round, seed) for round in range(3 * (n_items // count) + 2)]
    for drawn in rounds:
        assert len(set(drawn)) == len(drawn) == count
        assert all(type(item) is int and 0 <= item < n_items for item in drawn)
    per_epoch = n_items // count
    for start in range(0, 3 * per_epoch, per_epoch):
        epoch = list(itertools.chain(*rounds[start : start + per_epoch]))
        assert len(set(epoch)) == len(epoch) == per_epoch * count
        if n_items % count == 0:
            assert sorted(epoch) == list(range(n_items))


def test_any_round_can_be_drawn_without_the_ones_before() -> None:
    in_order = [draw_items(50, 8, round, seed=3) for round in range(40)]
    for round in random.Random(0).sample(range(40), 40):
        assert draw_items(50, 8, round, seed=3) == in_order[round]


def test_drawing_leaves_the_global_generator_alone() -> None:
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    draw_items(50, 8, 0, seed=3)
    assert np.random.random() == expected


def test_the_draw_is_the_same_on_every_machine() -> None:
    assert draw_items(20, 4, 0, seed=0) == [4, 19, 6, 2]
    assert draw_items(20, 4, 7, seed=5) == [7, 15, 10, 19]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [item for round in range(5 * number, 5 * number + 5) for item in draw_items(20, 4, round, seed)]

    orders = [tuple(epoch(number, seed)) for number in range(4) for seed in (0, 1, 2, -1, -2)]
    assert len(set(orders)) == len(orders)


def test_over_epochs_every_item_gets_its_turn() -> None:
    """The shuffled rest of an epoch sits out, but not always the same rest."""
    drawn = {item for round in range(60) for item in draw_items(11, 4, round, seed=0)}
    assert drawn == set(range(11))


@pytest.mark.parametrize(("n_items", "count"), [(3, 4), (0, 1), (5, 0), (5, -1)])
def test_impossible_draws_are_errors(n_items: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {count} distinct prompts out of {n_items}"):
        draw_items(n_items, count, 0, seed=0)


# --- assignments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", [1, 2, 3, 8])
def test_assignments_are_disjoint_equal_and_cover_the_round(peers: int) -> None:
    recipe = swarm(peers, 0)
    for round in range(5):
        parts = [assigned(recipe, 1000, p.name, round) for p in recipe.peers]
        assert list(itertools.chain(*parts)) == draw_items(1000, 3 * peers, round, recipe.seed)
        assert {len(part) for part in parts} == {3} == {recipe.prompts_per_peer}


def test_in_horizontal_mode_everybody_is_assigned_all() -> None:
    recipe = swarm(3, 0, "horizontal")
    assert {tuple(assigned(recipe, 50, p.name, 2)) for p in recipe.peers} == {tuple(draw_items(50, 9, 2, 0))}
    assert recipe.prompts_per_peer == 9


def test_a_task_with_too_few_problems_is_named() -> None:
    with pytest.raises(RecipeError, match=r"prompts_per_round = 9, but the task has only 8"):
        assigned(swarm(3, 0), 8, "p0", 0)


# --- optimiser steps and rates --------------------------------------------------------------------------


def test_minibatches_are_passes_over_all_rollouts_shuffled_anew() -> None:
    training = {"prompts_per_round": 1, "num_iterations": 2, "steps_per_generation": 3}
    recipe = parse(
        {"name": "a", "task": {"name": "clock"}, "training": training, "peers": [{"name": "a", "model": "m"}]}
    )
    steps = minibatches(recipe, "a", 5, 10)
    assert [len(step) for step in steps] == [4, 3, 3] * 2
    passes = [np.concatenate(steps[:3]).tolist(), np.concatenate(steps[3:]).tolist()]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert [step.tolist() for step in minibatches(recipe, "a", 5, 10)] == [step.tolist() for step in steps]
    assert [step.tolist() for step in minibatches(recipe, "a", 6, 10)] != [step.tolist() for step in steps]


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [0.8, 0.8, 0.8, 0.8]),
        ("linear", 0, [0.8, 0.6, 0.4, 0.2]),
        ("cosine", 0, [0.8, 0.4 * (1 + 0.5**0.5), 0.4, 0.4 * (1 - 0.5**0.5)]),
        ("constant_with_warmup", 4, [0, 0.4, 0.8, 0.8]),
        ("linear", 4, [0, 0.4, 0.8, 0.4]),
        ("cosine", 0.5, [0, 0.4, 0.8, 0.4]),
    ],
)
def test_learning_rates_by_hand(schedule: Any, warmup: float, rates: list[float]) -> None:
    """Four rounds of two steps; a longer run has the rates of its length."""
    training = TrainingConfig(rounds=4, steps_per_generation=2)
    peer = PeerConfig(name="a", model="m", learning_rate=0.8, lr_scheduler_type=schedule, warmup_steps=warmup)
    assert [learning_rate(peer, training, round) for round in range(4)] == pytest.approx(rates)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["constant", "constant_with_warmup", "linear", "cosine"]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.floats(0, 0.99) | st.integers(1, 9),
)
def test_learning_rates_are_those_of_transformers(schedule: Any, rounds: int, each: int, warmup: float) -> None:
    import torch
    from transformers import TrainingArguments, get_scheduler

    warmup = 0 if schedule == "constant" else min(warmup, rounds * each - 1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    of_all = TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=warmup), rounds * each)  # type: ignore[arg-type]
    theirs: Any = get_scheduler(schedule, optimizer, of_all, rounds * each)
    peer = PeerConfig(name="a", model="m", learning_rate=0.3, lr_scheduler_type=schedule, warmup_steps=warmup)
    training = TrainingConfig(rounds=rounds, num_iterations=each)
    for round in range(rounds):
        expected = 0.3 * theirs.lr_lambdas[0](round * each)
        assert learning_rate(peer, training, round) == pytest.approx(expected, abs=1e-12)


def test_no_torch_is_loaded() -> None:
    program = "import sys, ftis.schedule, ftis.metric_keys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"

"""Who samples what, and in which steps peers learn: the same on every peer, without a word."""

from __future__ import annotations

import itertools
import random
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


def test_a_draw_is_the_same_on_every_machine_without_the_ones_before_and_leaves_the_generator_alone() -> None:
    state = str(np.random.get_state())
    assert draw_items(20, 4, 7, seed=5) == [7, 15, 10, 19]
    assert draw_items(20, 4, 0, seed=0) == [4, 19, 6, 2]
    assert str(np.random.get_state()) == state
    in_order = [draw_items(50, 8, round, seed=3) for round in range(40)]
    for round in random.Random(0).sample(range(40), 40):
        assert draw_items(50, 8, round, seed=3) == in_order[round]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        return [item for round in range(5 * number, 5 * number + 5) for item in draw_items(20, 4, round, seed)]

    orders = [tuple(epoch(number, seed)) for number in range(4) for seed in (0, 1, 2, -1, -2)]
    assert len(set(orders)) == len(orders)
    drawn = {item for round in range(60) for item in draw_items(11, 4, round, seed=0)}
    assert drawn == set(range(11)), "not always the same rest of an epoch sits out"


def test_impossible_draws_are_errors() -> None:
    for n_items, count in ((3, 4), (0, 1), (5, 0), (5, -1)):
        with pytest.raises(ValueError, match=f"cannot draw {count} distinct prompts out of {n_items}"):
            draw_items(n_items, count, 0, seed=0)
    with pytest.raises(RecipeError, match=r"prompts_per_round = 9, but the task has only 8"):
        assigned(swarm(3, 0), 8, "p0", 0)


@pytest.mark.parametrize("peers", [1, 2, 3, 8])
def test_assignments_are_disjoint_equal_and_cover_the_round_or_all_of_it_in_horizontal_mode(peers: int) -> None:
    recipe, horizontal = swarm(peers, 0), swarm(peers, 0, "horizontal")
    assert (recipe.prompts_per_peer, horizontal.prompts_per_peer) == (3, 3 * peers)
    for round in range(5):
        drawn = draw_items(1000, 3 * peers, round, recipe.seed)
        parts = [assigned(recipe, 1000, p.name, round) for p in recipe.peers]
        assert list(itertools.chain(*parts)) == drawn
        assert {len(part) for part in parts} == {3}
        assert [list(assigned(horizontal, 1000, p.name, round)) for p in recipe.peers] == [drawn] * peers


def test_minibatches_are_passes_over_all_rollouts_shuffled_anew() -> None:
    training = {"prompts_per_round": 1, "num_iterations": 2, "steps_per_generation": 3}
    peers = [{"name": "a", "model": "m"}]
    recipe = parse({"name": "a", "task": {"name": "clock"}, "training": training, "peers": peers})
    steps, again, later = ([step.tolist() for step in minibatches(recipe, "a", n, 10)] for n in (5, 5, 6))
    assert [len(step) for step in steps] == [4, 3, 3] * 2
    passes = [[*itertools.chain(*steps[:3])], [*itertools.chain(*steps[3:])]]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert steps == again != later


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["constant", "constant_with_warmup", "linear", "cosine"]),
    st.integers(1, 9),
    st.tuples(st.integers(1, 3), st.integers(1, 2)),
    st.floats(0, 0.99) | st.integers(1, 9),
)
def test_learning_rates_are_those_of_transformers(
    schedule: Any, rounds: int, passes: tuple[int, int], warmup: float
) -> None:
    import torch
    from transformers import TrainingArguments, get_scheduler

    each = passes[0] * passes[1]
    warmup = 0 if schedule == "constant" else min(warmup, rounds * each - 1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    of_all = TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=warmup), rounds * each)  # type: ignore[arg-type]
    theirs: Any = get_scheduler(schedule, optimizer, of_all, rounds * each)
    peer = PeerConfig(name="a", model="m", learning_rate=0.3, lr_scheduler_type=schedule, warmup_steps=warmup)
    training = TrainingConfig(rounds=rounds, num_iterations=passes[0], steps_per_generation=passes[1])
    for round in range(rounds):
        expected = 0.3 * theirs.lr_lambdas[0](round * each)
        assert learning_rate(peer, training, round) == pytest.approx(expected, abs=1e-12)

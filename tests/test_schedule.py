"""Who samples what, whose groups are learned from, and in which steps: the same on every peer, without a word."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from ftis.config import PeerConfig, Recipe, RecipeError
from ftis.lab.recipes import parse
from ftis.schedule import assigned, draw_items, learning_rate, minibatches, take_turns, wanted

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


def test_learning_rates_by_hand() -> None:
    constant, linear = (
        PeerConfig(name="a", model="m", learning_rate=0.4, lr_scheduler_type=s) for s in ("constant", "linear")
    )
    assert [learning_rate(constant, round, 4) for round in range(4)] == [0.4] * 4
    assert [learning_rate(linear, round, 4) for round in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_no_torch_is_loaded() -> None:
    program = "import sys, ftis.schedule, ftis.metric_keys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# --- taking turns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("names", "count"), [(1, 1), (2, 1), (5, 3), (5, 5), (7, 12), (23, 6), (100, 7)])
def test_turns_are_even_within_a_round_and_over_any_number_of_rounds(names: int, count: int) -> None:
    everybody = [f"p{i}" for i in range(names)]
    so_far = dict.fromkeys(everybody, 0)
    for round in range(40):
        turns = take_turns(everybody, count, round, seed=3)
        assert sum(turns.values()) == count
        assert min(turns.values()) > 0
        assert len(turns) == min(names, count)
        assert max(turns.values()) - min(turns.get(name, 0) for name in everybody) <= 1
        for name, picks in turns.items():
            so_far[name] += picks
        assert max(so_far.values()) - min(so_far.values()) <= 1


def test_turns_depend_on_the_seed_and_need_no_memory() -> None:
    names = [f"p{i}" for i in range(20)]
    first = [take_turns(names, 4, round, seed=1) for round in range(5)]
    assert first == [take_turns(names, 4, round, seed=1) for round in range(5)]
    assert first[4] == take_turns(names, 4, 4, seed=1)
    assert first != [take_turns(names, 4, round, seed=2) for round in range(5)]


# --- max_foreign_rollouts ---------------------------------------------------------------------------------------------


def swarm(peers: int, limit: int, mode: str = "vertical", seed: int = 0) -> Recipe:
    """Every peer samples three groups of four rollouts a round, or in horizontal mode four of every group."""
    training = {"prompts_per_round": 3 * peers, "mode": mode, "max_foreign_rollouts": limit}
    document = {
        "name": "many",
        "seed": seed,
        "task": {"name": "clock"},
        "sampling": {"num_generations": 4 * (peers if mode == "horizontal" else 1)},
        "training": training,
        "peers": [{"name": f"p{i}", "model": "none"} for i in range(peers)],
    }
    return parse(document, where="test")


def picked(recipe: Recipe, own: str, round: int) -> dict[str, list[int]]:
    others = [p.name for p in recipe.peers if p.name != own]
    return {name: sorted(wanted(recipe, 1000, own, name, round)) for name in others}


@pytest.mark.parametrize("mode", ["vertical", "horizontal"])
def test_a_limit_that_all_fit_in_changes_nothing(mode: str) -> None:
    offered = 4 * 4 * (3 if mode == "vertical" else 15)
    for round in range(6):
        everything = picked(swarm(5, 0, mode), "p1", round)
        assert everything == {n: sorted(assigned(swarm(5, 0, mode), 1000, n, round)) for n in everything}
        for limit in (offered, offered + 1, 10 * offered):
            assert picked(swarm(5, limit, mode), "p1", round) == everything
        assert picked(swarm(5, offered - 1, mode), "p1", round) != everything


def test_whole_groups_are_chosen_from_as_many_peers_as_there_are_groups() -> None:
    for limit, groups in [(4, 1), (7, 1), (16, 4), (36, 9), (60, 15)]:
        recipe = swarm(10, limit)
        for round in range(20):
            of = picked(recipe, "p3", round)
            counts = [len(items) for items in of.values()]
            assert sum(counts) == groups
            assert max(counts) - min(counts) <= 1
            assert all(set(items) <= set(assigned(recipe, 1000, name, round)) for name, items in of.items())


def test_every_peer_and_every_place_in_an_assignment_is_chosen_equally_often() -> None:
    recipe = swarm(10, 16)
    rounds = 450
    peers, places = Counter[str](), Counter[int]()
    for round in range(rounds):
        for name, items in picked(recipe, "p0", round).items():
            peers[name] += len(items)
            places.update(assigned(recipe, 1000, name, round).index(item) for item in items)
    assert set(peers.values()) == {4 * rounds // 9}
    assert all(abs(count - 4 * rounds / 3) < 5 * (4 * rounds * 2 / 9) ** 0.5 for count in places.values())


def test_the_choice_depends_on_the_seed_the_round_and_the_learner_alone() -> None:
    def choices(seed: int, own: str) -> list[dict[str, list[int]]]:
        return [picked(swarm(10, 16, seed=seed), own, round) for round in range(9)]

    assert choices(0, "p0") == choices(0, "p0")
    assert len({str(c) for c in choices(0, "p0")}) == 9
    assert choices(0, "p0") != choices(1, "p0")
    without_own = [
        [{n: i for n, i in c.items() if n not in ("p0", "p1")} for c in choices(0, own)] for own in ("p0", "p1")
    ]
    assert without_own[0] != without_own[1]

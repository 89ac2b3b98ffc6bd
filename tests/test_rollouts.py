"""Collating, padding, drawing and sharing: the same on every peer, whatever arrived in which order."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ftis.rollouts import Group, Prompt, Rollout, ScoredGroup, collate, draw_items, pad, share_of, take_turns


def rollout(*ids: int) -> Rollout:
    return Rollout(np.array(ids, dtype=np.int32), np.array([-0.5] * len(ids), dtype=np.float32))


def scored(peer: str, round: int, item: int, rewards: tuple[float, ...]) -> ScoredGroup:
    """Rollout i of a group is recognisable: its ids are (round, item, i), its text names peer and i."""
    rollouts = tuple(rollout(round, item, i) for i in range(len(rewards)))
    texts = tuple(f"{peer} {round} {item} {i}" for i in range(len(rewards)))
    return ScoredGroup(Group(peer, round, item, rollouts), texts, rewards)


PROMPTS = {item: np.arange(item + 1, dtype=np.int32) for item in range(10)}


def test_a_rollout_needs_one_log_probability_per_token() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        Rollout(np.zeros(2, np.int32), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        Rollout(np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32))
    assert len(rollout(4, 5, 6)) == 3


def test_prompts_with_the_same_problem_are_equal_whatever_their_columns() -> None:
    assert Prompt(1, "q", "a", {"level": 3}) == Prompt(1, "q", "a")


# --- collate ------------------------------------------------------------------------------------------


def test_collate_lays_out_rollouts_by_round_item_and_peer() -> None:
    batch = collate(
        [scored("b", 1, 3, (1.0, 0.0)), scored("a", 1, 5, (0.5,)), scored("c", 0, 9, (0.25, 0.75))],
        PROMPTS,
    )
    assert len(batch) == 5
    assert batch.sources == ("a", "b", "c")
    assert batch.completions == ("c 0 9 0", "c 0 9 1", "b 1 3 0", "b 1 3 1", "a 1 5 0")
    assert batch.reward_N.tolist() == [0.25, 0.75, 1.0, 0.0, 0.5]
    assert batch.round_N.tolist() == [0, 0, 1, 1, 1]
    assert batch.item_N.tolist() == [9, 9, 3, 3, 5]
    assert [batch.sources[i] for i in batch.source_N] == ["c", "c", "b", "b", "a"]
    assert batch.group_N.tolist() == [0, 0, 1, 1, 2]
    assert [list(r.completion_ids) for r in batch.rollouts] == [[0, 9, 0], [0, 9, 1], [1, 3, 0], [1, 3, 1], [1, 5, 0]]
    assert [len(ids) for ids in batch.prompt_ids] == [10, 10, 4, 4, 6]
    assert batch.reward_N.dtype == np.float64
    assert {getattr(batch, f"{name}_N").dtype for name in ("group", "source", "item", "round")} == {np.dtype(np.int64)}


def test_collate_does_not_depend_on_the_order_of_arrival() -> None:
    groups = [scored(p, r, i, (float(i), float(r))) for p in ("small", "big") for r in (2, 3) for i in (0, 4, 7)]
    expected = collate(groups, PROMPTS)
    for seed in range(10):
        batch = collate(iter(random.Random(seed).sample(groups, len(groups))), PROMPTS)
        assert batch.completions == expected.completions
        assert batch.rollouts == expected.rollouts  # the same objects, in the same order
        assert batch.sources == expected.sources
        for axis in ("reward_N", "group_N", "source_N", "item_N", "round_N"):
            assert np.array_equal(getattr(batch, axis), getattr(expected, axis))


def test_collate_joins_what_several_peers_sampled_for_one_prompt_of_one_round() -> None:
    batch = collate(
        [
            scored("b", 4, 1, (1.0, 0.0)),
            scored("a", 4, 1, (0.0, 0.0)),
            scored("a", 3, 1, (1.0,)),  # the same prompt in an earlier round has a baseline of its own
            scored("b", 4, 2, (1.0,)),
        ],
        PROMPTS,
    )
    assert batch.group_N.tolist() == [0, 1, 1, 1, 1, 2]
    assert [batch.sources[i] for i in batch.source_N] == ["a", "a", "a", "b", "b", "b"]


def test_collate_of_nothing_is_an_empty_batch() -> None:
    batch = collate([], PROMPTS)
    assert len(batch) == 0
    assert batch.sources == ()
    assert batch.reward_N.shape == batch.group_N.shape == (0,)
    assert batch.group_N.dtype == np.int64


# --- pad ----------------------------------------------------------------------------------------------


def test_pad_fills_up_on_the_right() -> None:
    rows = [np.array([1, 2, 3], np.int32), np.array([4], np.int32), np.array([], np.int32)]
    assert pad(rows, -1).tolist() == [[1, 2, 3], [4, -1, -1], [-1, -1, -1]]
    assert pad(rows).tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert pad(rows).dtype == np.int32
    assert pad([np.array([-0.5], np.float32)]).dtype == np.float32
    assert pad([]).shape == (0, 0)
    filled = pad([np.array([True]), np.array([True, True])], False)
    assert filled.dtype == np.bool_
    assert filled.tolist() == [[True, False], [True, True]]


def test_pad_copies() -> None:
    row = np.array([1, 2], np.int32)
    pad([row])[0, 0] = 9
    assert row.tolist() == [1, 2]


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


# --- share_of -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("items", "peers"), [(24, 1), (24, 2), (24, 3), (6, 6), (0, 2)])
def test_shares_are_disjoint_equal_and_cover_the_round(items: int, peers: int) -> None:
    drawn = [7 * i for i in range(items)]
    shares = [share_of(drawn, position, peers) for position in range(peers)]
    assert list(itertools.chain(*shares)) == drawn
    assert {len(share) for share in shares} == {items // peers}


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

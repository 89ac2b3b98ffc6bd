"""Collating, padding, drawing and sharing: the same on every peer, whatever arrived in which order."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from ftis.rollouts import Group, Ints, Prompt, Rollout, ScoredGroup, collate, pad


def rollout(*ids: int) -> Rollout:
    return Rollout(np.array(ids, dtype=np.int32), np.array([-0.5] * len(ids), dtype=np.float32))


def scored(peer: str, round: int, item: int, rewards: tuple[float, ...]) -> ScoredGroup:
    """Rollout i of a group is recognisable: its ids are (round, item, i), its text names peer and i."""
    rollouts = tuple(rollout(round, item, i) for i in range(len(rewards)))
    texts = tuple(f"{peer} {round} {item} {i}" for i in range(len(rewards)))
    return ScoredGroup(Group(peer, round, item, rollouts), texts, rewards)


def prompt_ids(item: int, round: int) -> Ints:
    return np.arange(item + round + 1, dtype=np.int32)


def test_a_rollout_has_one_log_probability_per_token_or_per_unit_in_ascending_order() -> None:
    assert len(rollout(4, 5, 6)) == 3
    for tokens, logps in (((2,), (3,)), ((2, 2), (2, 2))):
        with pytest.raises(ValueError, match=re.escape(str(logps))):
            Rollout(np.zeros(tokens, np.int32), np.zeros(logps, np.float32))
    ids, logp = np.array([4, 5, 6], np.int32), np.array([-1.0, -2.0], np.float32)
    assert len(Rollout(ids, logp, np.array([0, 0, 1], np.int32))) == 3
    for wrong in ([0, 1], [0, 0, 0], [1, 1, 2], [0, 1, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="unit"):
            Rollout(ids, logp, np.array(wrong, np.int32))
    with pytest.raises(ValueError, match="unit"):  # a unit without a token
        Rollout(ids, np.zeros(3, np.float32), np.array([0, 2, 2], np.int32))


def test_prompts_with_the_same_problem_are_equal_whatever_their_columns() -> None:
    assert Prompt(1, "q", "a", {"level": 3}) == Prompt(1, "q", "a")


def test_collate_lays_out_rollouts_by_round_item_and_peer() -> None:
    batch = collate(
        [scored("b", 1, 3, (1.0, 0.0)), scored("a", 1, 5, (0.5,)), scored("c", 0, 9, (0.25, 0.75))], prompt_ids, "a"
    )
    assert len(batch) == 5
    assert len(collate([], prompt_ids, "a")) == 0
    assert batch.sources == ("a", "b", "c")
    assert batch.completions == ("c 0 9 0", "c 0 9 1", "b 1 3 0", "b 1 3 1", "a 1 5 0")
    assert batch.reward_N.tolist() == [0.25, 0.75, 1.0, 0.0, 0.5]
    assert batch.round_N.tolist() == [0, 0, 1, 1, 1]
    assert batch.item_N.tolist() == [9, 9, 3, 3, 5]
    assert [batch.sources[i] for i in batch.source_N] == ["c", "c", "b", "b", "a"]
    assert batch.group_N.tolist() == [0, 0, 1, 1, 2]
    assert batch.own_N.tolist() == [False] * 4 + [True]
    assert [list(r.completion_ids) for r in batch.rollouts] == [[0, 9, 0], [0, 9, 1], [1, 3, 0], [1, 3, 1], [1, 5, 0]]
    assert [len(ids) for ids in batch.prompt_ids] == [10, 10, 5, 5, 7]
    assert batch.reward_N.dtype == np.float64
    assert {getattr(batch, f"{name}_N").dtype for name in ("group", "source", "item", "round")} == {np.dtype(np.int64)}


def test_collate_joins_what_several_peers_sampled_for_one_prompt_of_one_round_in_any_order_of_arrival() -> None:
    """The same prompt in an earlier round has a baseline of its own."""
    groups = [scored("b", 4, 1, (1, 0)), scored("a", 4, 1, (0, 0)), scored("a", 3, 1, (1,)), scored("b", 4, 2, (1,))]
    for arrived in itertools.permutations(groups):
        batch = collate(iter(arrived), prompt_ids, "a")
        assert batch.group_N.tolist() == [0, 1, 1, 1, 1, 2]
        assert batch.completions == ("a 3 1 0", "a 4 1 0", "a 4 1 1", "b 4 1 0", "b 4 1 1", "b 4 2 0")
        assert [batch.sources[i] for i in batch.source_N] == ["a", "a", "a", "b", "b", "b"]
        assert batch.reward_N.tolist() == [1, 0, 0, 1, 0, 1]
        assert [rows.tolist() for rows in batch.own_groups()] == [[0, 1, 2]], "of the learner alone"


def test_pad_fills_up_on_the_right() -> None:
    rows = [np.array([1, 2, 3], np.int32), np.array([4], np.int32), np.array([], np.int32)]
    assert pad(rows, -1).tolist() == [[1, 2, 3], [4, -1, -1], [-1, -1, -1]]
    assert pad(rows).tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]
    assert pad([]).shape == (0, 0)
    for dtype in (np.int32, np.float32, np.bool_):
        assert pad([np.array([0], dtype)]).dtype == dtype
    pad(rows)[0, 0] = 9
    assert rows[0].tolist() == [1, 2, 3], "it copies"

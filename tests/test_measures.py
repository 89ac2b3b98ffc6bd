"""A round's metrics, counted by hand on a batch of two peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ftis.admission import Admission, Collected, Reason, Rejection
from ftis.learning import Update
from ftis.measures import RoundExchange, own_metrics, participation, round_record
from ftis.metric_keys import by_peer
from ftis.objectives import OBJECTIVES, policy_loss
from ftis.records.rollouts import ROLLOUTS
from ftis.rollouts import Group, Prompt, Rollout, ScoredGroup, collate
from ftis.selection import Chosen, Judged
from recipes import recipe_of

END = 2


def scored(peer: str, item: int, rewards: tuple[float, ...], lengths: tuple[int, ...]) -> ScoredGroup:
    rollouts = [
        Rollout(np.array([5] * (n - 1) + [END if n < 4 else 6], np.int32), np.full(n, -0.5, np.float32))
        for n in lengths
    ]
    return ScoredGroup(Group(peer, 7, item, tuple(rollouts)), ("x",) * len(rewards), rewards)


def judged_batch() -> Judged:
    """ada: items 0 (right, wrong) and 1 (both wrong); bob: item 2 (right, wrong), π_old = e^-1 π_gen on bob's."""
    groups = [
        scored("ada", 0, (1.0, 0.0), (2, 4)),
        scored("ada", 1, (0.0, 0.0), (1, 1)),
        scored("bob", 2, (1.0, 0.0), (2, 3)),
    ]
    batch = collate(groups, lambda *_: np.array([1], np.int32), "ada")
    advantage = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0, -1.0])
    rows = np.array([0, 1, 4, 5])
    old = [batch.rollouts[r].gen_logp - np.float32(r >= 4) for r in rows.tolist()]
    longest = max(len(row) for row in old)
    mask = torch.tensor([[t < len(row) for t in range(longest)] for row in old])

    def padded(of: list[Any]) -> torch.Tensor:
        return torch.tensor([[*row.tolist(), *[0.0] * (longest - len(row))] for row in of])

    gen = padded([batch.rollouts[r].gen_logp for r in rows.tolist()])
    _, diagnostics = policy_loss(OBJECTIVES["F-TIS"], padded(old), padded(old), gen, advantage[rows], mask)
    return Judged(batch, advantage, rows, old, diagnostics, np.array([0.0, 2e-4], np.float32))


CHOSEN = Chosen(torch.tensor([1.0, 1.0, 0.5, 0.0]), (None, None, "mine", "kl"))


def update_of(judged: Judged) -> Update:
    return Update((0.25, 0.75), (1.0, 3.0), judged.rows[:3], None)


def test_own_metrics_by_hand() -> None:
    judged = judged_batch()
    found = own_metrics(judged, update_of(judged), {END})
    assert found == {
        "reward": 0.25,
        "reward_std": 0.5,  # of 1, 0, 0, 0, with three in the divisor
        "frac_reward_zero_std": pytest.approx(1 / 3),
        "loss": 0.5,
        "grad_norm": 2.0,
        "optimizer_steps": 2,
        "sampled_entropy": 0.5,
        "completions/mean_length": 2.0,
        "completions/min_length": 1,
        "completions/max_length": 4,
        "completions/clipped_ratio": 0.25,  # the one of four tokens
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": 0.0,
        "sampling/logp_recomputed": False,
        "sampling/logp_in_step": False,
        "sampling/checked_logp_difference/mean": pytest.approx(1e-4),
        "sampling/checked_logp_difference/max": pytest.approx(2e-4),
    }


def test_a_group_of_equal_fractions_has_no_signal() -> None:
    """Their standard deviation is not 0 in floating point."""
    groups = [scored("ada", item, (0.01,) * 12, (1,) * 12) for item in range(2)]
    batch = collate(groups, lambda *_: np.array([1], np.int32), "ada")
    assert batch.reward_N[:12].std() > 0
    judged = Judged(batch, torch.zeros(24), np.zeros(0, np.int64), [], None, np.zeros(0, np.float32))
    assert own_metrics(judged, Update((), (), np.zeros(0, np.int64), None), {END})["frac_reward_zero_std"] == 1.0


def test_clip_ratios_are_of_all_tokens_of_all_steps() -> None:
    """As TRL's: rollouts with Â = 0 count, though the model never runs on them."""
    judged = judged_batch()
    assert judged.diagnostics is not None
    n = len(judged.diagnostics.clipped_low)  # 2 + 4 + 2 + 3 tokens
    low, high = torch.arange(n) < 3, torch.arange(n) >= n - 2
    seen = replace(judged.diagnostics, clipped_low=low, clipped_high=high)
    found = own_metrics(judged, Update((0.0,), (1.0,), judged.rows, seen), {END}, num_iterations=2)
    tokens = 2 * (2 + 4 + 1 + 1 + 2 + 3)
    assert found["clip_ratio/low_mean"] == pytest.approx(3 / tokens)
    assert found["clip_ratio/high_mean"] == pytest.approx(2 / tokens)
    assert found["clip_ratio/region_mean"] == pytest.approx(5 / tokens)


def test_participation_by_hand() -> None:
    judged = judged_batch()
    rejection = Rejection("bob", Reason.TOO_LONG, 3, "rollout 0 has 9 tokens")
    collected = Collected(
        {"bob": b"12345"},
        late=(("bob", 6, b"123"),),
        offered_only={"eve": 3, "fay": 0},
        rejections=(Rejection("eve", Reason.FORGED, None, "x"),),
    )
    admission = Admission("bob", (), (rejection,), (Group("bob", 7, 5, ()),))
    found = participation(
        judged,
        CHOSEN,
        update_of(judged),
        RoundExchange(collected, 77, [admission]),
        recipe_of("ada", "bob", "eve", "fay"),
        "ada",
    )
    assert (found["foreign_used"], found["without_foreign"]) == (1, False)
    peers = by_peer(found)
    counts = ("delivered", "late", "admitted", "passed_over", "rejected", "zero_advantage", "kept", "dropped", "bytes")
    assert {name: tuple(of[c] for c in counts) for name, of in peers.items()} == {
        "ada": (True, 0, 4, 0, 0, 2, 2.0, 0.0, 77),
        "bob": (True, 1, 2, 2, 1, 0, 1.0, 1.0, 8),
        "eve": (True, 0, 0, 6, 1, 0, 0.0, 0.0, 0),  # three groups offered, two rollouts each
        "fay": (True, 0, 0, 8, 0, 0, 0.0, 0.0, 0),  # an equal share
    }
    assert peers["bob"]["rejected/too_long"] == peers["eve"]["rejected/forged"] == peers["bob"]["dropped/kl"] == 1
    assert peers["bob"]["first_rejection"] == "rollout 0 has 9 tokens"
    assert "dropped/mine" not in peers["bob"], "a rollout that counts half is kept"
    assert peers["bob"]["reward"] == 0.5
    assert peers["bob"]["sampling/importance_sampling_ratio/mean"] == pytest.approx(np.exp(-1.0))
    assert peers["bob"]["kl/k1"] == pytest.approx(2.5)  # two and three tokens at one nat each
    assert "reward" not in peers["eve"]


def test_a_round_without_foreign_work_says_so_unless_nobody_had_anything_to_teach() -> None:
    judged = judged_batch()
    nothing = Judged(judged.batch, torch.zeros(6), np.zeros(0, np.int64), [], None, np.zeros(0, np.float32))
    cases: list[tuple[Judged, list[float], int, bool]] = [
        (judged, [1, 1, 0, 0], 0, True),
        (judged, [0, 0, 1, 1], 2, False),
        (nothing, [], 0, False),
    ]
    for of, shares, used, without in cases:
        chosen = Chosen(torch.tensor(shares), tuple(None if share else "kl" for share in shares))
        heard = RoundExchange(Collected({"bob": b""}), 0, ())
        found = participation(of, chosen, update_of(of), heard, recipe_of("ada", "bob"), "ada")
        assert (found["foreign_used"], found["without_foreign"]) == (used, without)


def test_a_record_has_every_column_and_nulls_where_nothing_was_judged() -> None:
    judged = judged_batch()
    prompts = [Prompt(item, f"question {item}", "") for item in range(3)]
    record = round_record(
        judged,
        CHOSEN,
        update_of(judged),
        RoundExchange(Collected({}), 0, ()),
        recipe=recipe_of("ada", "bob"),
        own="ada",
        end_ids={END},
        prompts=prompts,
        about={"step": 8},
    )
    assert record.metrics["step"] == 8
    assert set(record.rollouts) == set(ROLLOUTS.names)
    assert record.rollouts["kept"] == [True, True, None, None, True, False]
    assert record.rollouts["source"] == ["ada"] * 4 + ["bob"] * 2
    assert record.rollouts["question"] == ["question 0"] * 2 + ["question 1"] * 2 + ["question 2"] * 2
    assert [kl is None for kl in record.rollouts["kl_k1"]] == [False, False, True, True, False, False]
    assert [old is None for old in record.rollouts["old_logp"]] == [False, False, True, True, False, False]

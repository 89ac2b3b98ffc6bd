"""The objectives against a second implementation in plain Python, hand-computed numbers, and identities.

The reference below is written from the formulas alone, one token at a time in Python floats, and its
gradient is derived by hand; it shares nothing with ``ftis.objectives``.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ftis.advantages import group_advantages
from ftis.config import ObjectiveConfig, RecipeError
from ftis.measures import by_source
from ftis.objectives import (
    F_TIS_LIFTED,
    OBJECTIVES,
    Diagnostics,
    LogProbs,
    Objective,
    StepSize,
    exp_ratio,
    lifted,
    log_probs,
    over_generator,
    over_old,
    policy_loss,
    resolve,
    sequence_kl,
    truncated,
    unweighted,
)
from ftis.selection import kl_shares

ALL = ["NoIS", "VIS", "TIS", "F-NoIS", "F-VIS", "F-TIS"]
FILTERED = ["F-NoIS", "F-VIS", "F-TIS"]
Rows = list[list[float]]
Estimator = Literal["k1", "k3"]
Reduction = Literal["sum", "mean"]
LOG_PROBS = ("logp", "old", "gen")


# --- the reference ------------------------------------------------------------------------------------


def clamped_exp(log_ratio: float) -> float:
    return math.exp(max(-20.0, min(20.0, log_ratio)))


def reference_kl(old: list[float], gen: list[float], mask: list[bool], estimator: str, reduction: str) -> float:
    """An estimate of KL(π_gen ‖ π_old) from tokens that π_gen sampled."""
    total, tokens = 0.0, 0
    for o, g, inside in zip(old, gen, mask, strict=True):
        if inside:
            d = g - o
            total += d if estimator == "k1" else clamped_exp(-d) - 1.0 + d
            tokens += 1
    return total / tokens if reduction == "mean" else total


def reference_loss(
    objective: Objective,
    logp: Rows,
    old: Rows,
    gen: Rows,
    advantage: list[float],
    mask: list[list[bool]],
    divisor: float | None = None,
) -> tuple[float, Rows, Counter[str]]:
    """L, dL/dlogp and how often each branch was taken.

    For A > 0 the surrogate min(r·A, clip(r)·A) is r·A up to r = 1 + ε_high and constant above; for A < 0 it
    is constant below r = 1 − ε and r·A above. Where it is r·A its derivative by log π is r·A again, except
    beyond the clamp of the log-ratio, where r no longer moves.
    """
    divisor = len(logp) if divisor is None else divisor
    low = 1.0 - objective.epsilon
    high = 1.0 + (objective.epsilon if objective.epsilon_high is None else objective.epsilon_high)
    seen: Counter[str] = Counter()
    loss = 0.0
    gradient = [[0.0] * len(row) for row in logp]
    for i in range(len(logp)):
        a = advantage[i]
        if objective.filtered:
            near = (
                reference_kl(old[i], gen[i], mask[i], objective.kl_estimator, objective.kl_reduction)
                < objective.kl_threshold
            )
            if a > 0:
                seen["kept, near" if near else "kept, far but good"] += 1
            else:
                seen["kept, near" if near else "dropped"] += 1
                a = a if near else 0.0
        length = sum(mask[i])
        for t in range(len(logp[i])):
            if not mask[i][t]:
                continue
            log_ratio = logp[i][t] - (gen[i][t] if objective.ratio is over_generator else old[i][t])
            r = clamped_exp(log_ratio)
            weight = 1.0
            if objective.weight is truncated:
                weight = clamped_exp(old[i][t] - gen[i][t])
                seen["truncated" if weight > objective.importance_sampling_clip_max else "whole"] += 1
                weight = min(weight, objective.importance_sampling_clip_max)
            if a > 0:
                surrogate, moves = (r * a, True) if r <= high else (high * a, False)
                seen["inside" if moves else "clipped above"] += 1
                if objective.clip_joint and clamped_exp(logp[i][t] - gen[i][t]) > high:
                    seen["moved no further" if moves else "beyond both"] += 1
                    moves = False
            elif a < 0:
                surrogate, moves = (r * a, True) if r >= low else (low * a, False)
                seen["inside" if moves else "clipped below"] += 1
            else:
                surrogate, moves = 0.0, False
            loss -= weight * surrogate / length / divisor
            if moves and abs(log_ratio) < 20.0:
                gradient[i][t] = -weight * r * a / length / divisor
    return loss, gradient, seen


# --- samples ------------------------------------------------------------------------------------------


@dataclass
class Sample:
    logp: torch.Tensor
    old: torch.Tensor
    gen: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.logp, self.old, self.gen, self.advantage, self.mask

    def lists(self) -> tuple[Rows, Rows, Rows, list[float], list[list[bool]]]:
        return self.logp.tolist(), self.old.tolist(), self.gen.tolist(), self.advantage.tolist(), self.mask.tolist()

    def take(self, rows: Any) -> Sample:
        return Sample(*(tensor[rows] for tensor in self.tensors()))


def draw(rng: random.Random, n: int | None = None, t: int | None = None, holes: bool = False) -> Sample:
    """Random rollouts: ragged, clipped on both sides, truncated, some advantages exactly zero."""
    n, t = n or rng.randint(1, 9), t or rng.randint(1, 12)
    lengths = [rng.choice([1, t, rng.randint(1, t)]) for _ in range(n)]
    mask = [[j < length for j in range(t)] for length in lengths]
    if holes:
        mask = [[inside and (j == 0 or rng.random() < 0.7) for j, inside in enumerate(row)] for row in mask]
    old = [[-rng.expovariate(1.0) for _ in range(t)] for _ in range(n)]
    drift = [rng.gauss(0.2, 0.5) for _ in range(n)]
    return Sample(
        logp=torch.tensor([[o + rng.gauss(0.0, 0.5) for o in row] for row in old], dtype=torch.float64),
        old=torch.tensor(old, dtype=torch.float64),
        gen=torch.tensor(
            [[o + d + rng.gauss(0.0, 0.8) for o in row] for row, d in zip(old, drift, strict=True)], dtype=torch.float64
        ),
        advantage=torch.tensor([rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)]) for _ in range(n)], dtype=torch.float64),
        mask=torch.tensor(mask),
    )


def kl_of(old: torch.Tensor, gen: torch.Tensor, mask: torch.Tensor, *settings: Any) -> torch.Tensor:
    return sequence_kl(log_probs(old, old, gen, mask), *settings)


def value_and_gradient(
    objective: Objective, sample: Sample, divisor: int | None = None, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, Diagnostics]:
    """The loss under the objective's own filter, its gradient and its diagnostics."""
    logp = sample.logp.clone().requires_grad_(True)
    share, step = None, None if divisor is None else StepSize(divisor, 0, 0)
    if objective.filtered:
        kl = kl_of(sample.old, sample.gen, sample.mask, objective.kl_estimator, objective.kl_reduction)
        share = kl_shares(kl, sample.advantage, objective.kl_threshold)
    loss, diagnostics = policy_loss(
        objective, logp, sample.old, sample.gen, sample.advantage, sample.mask, share_N=share, step=step, **settings
    )
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, diagnostics


LossAndGradient = tuple[torch.Tensor, torch.Tensor, *tuple[object, ...]]


def assert_same(one: LossAndGradient, other: LossAndGradient, tolerance: float = 1e-12) -> None:
    for a, b in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- the loss is the formula --------------------------------------------------------------------------


@pytest.mark.parametrize("clip_joint", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon_high", [None, 0.28])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient_are_the_reference(
    name: str, estimator: Estimator, reduction: Reduction, epsilon_high: float | None, seed: int, clip_joint: bool
) -> None:
    rng = random.Random(f"{name} {estimator} {reduction} {epsilon_high} {seed}")
    objective = replace(
        OBJECTIVES[name],
        kl_estimator=estimator,
        kl_reduction=reduction,
        kl_threshold=0.4,
        epsilon_high=epsilon_high,
        importance_sampling_clip_max=rng.choice([1.5, 2.0]),
        clip_joint=clip_joint,
    )
    seen: Counter[str] = Counter()
    for k in range(15):
        sample = draw(rng, holes=k % 3 == 0)
        divisor = rng.choice([None, 7])
        loss, gradient, _ = value_and_gradient(objective, sample, divisor=divisor)
        expected_loss, expected_gradient, branches = reference_loss(objective, *sample.lists(), divisor=divisor)
        assert loss.item() == pytest.approx(expected_loss, rel=1e-10, abs=1e-10)
        torch.testing.assert_close(
            gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-10, atol=1e-10
        )
        seen += branches
    wanted = ["clipped above", "clipped below", "inside"]
    wanted += ["truncated", "whole"] if objective.weight is truncated else []
    wanted += ["dropped", "kept, near", "kept, far but good"] if objective.filtered else []
    wanted += ["moved no further"] if clip_joint and objective.ratio is over_old else []
    assert all(seen[branch] > 0 for branch in wanted), f"the sample never took every branch: {seen}"


def test_the_six_objectives_are_the_six_of_the_paper() -> None:
    assert {name: (o.ratio, o.weight, o.filtered) for name, o in list(OBJECTIVES.items())[:6]} == {
        "NoIS": (over_old, unweighted, False),
        "VIS": (over_generator, unweighted, False),
        "TIS": (over_old, truncated, False),
        "F-NoIS": (over_old, unweighted, True),
        "F-VIS": (over_generator, unweighted, True),
        "F-TIS": (over_old, truncated, True),
    }
    for objective in list(OBJECTIVES.values())[:6]:
        assert (objective.importance_sampling_clip_max, objective.kl_threshold) == (2.0, 50.0)
        assert (objective.kl_estimator, objective.kl_reduction) == ("k1", "sum")
        assert (objective.epsilon, objective.epsilon_high) == (0.2, None)
    with pytest.raises(AttributeError):
        OBJECTIVES["TIS"].epsilon = 0.5  # type: ignore[misc]


# Two completions, A = +1 with three tokens and A = −1 with two; every ratio is a plain number:
#   π/π_old       1.1  1.5  0.5   |  0.5  1.5
#   π_old/π_gen   1/2   4    1    |   3   1/12
#   π/π_gen      0.55   6   0.5   |  1.5  0.125
LN = math.log
HAND = Sample(
    logp=torch.tensor([[LN(1.1), LN(1.5), LN(0.5)], [LN(0.5), LN(1.5), 0.0]], dtype=torch.float64) - 3.0,
    old=torch.full((2, 3), -3.0, dtype=torch.float64),
    gen=torch.tensor([[LN(2.0), LN(1 / 4), 0.0], [LN(1 / 3), LN(12), 0.0]], dtype=torch.float64) - 3.0,
    advantage=torch.tensor([1.0, -1.0], dtype=torch.float64),
    mask=torch.tensor([[True, True, True], [True, True, False]]),
)


@pytest.mark.parametrize(
    ("name", "settings", "loss", "gradient"),
    [
        # first: (1.1 + 1.2 + 0.5)/3 = 2.8/3; second: (−0.8 − 1.5)/2 = −1.15
        ("NoIS", {}, -(2.8 / 3 - 1.15) / 2, [[-1.1 / 6, 0, -0.5 / 6], [0, 1.5 / 4, 0]]),
        # first: (0.55 + 1.2 + 0.5)/3 = 0.75; second: (−1.5 − 0.8)/2 = −1.15
        ("VIS", {}, 0.2, [[-0.55 / 6, 0, -0.5 / 6], [1.5 / 4, 0, 0]]),
        # first: (0.5·1.1 + 2·1.2 + 1·0.5)/3 = 1.15; second: (−2·0.8 − 1.5/12)/2 = −0.8625
        ("TIS", {}, -0.14375, [[-0.55 / 6, 0, -0.5 / 6], [0, 0.125 / 4, 0]]),
        # without truncation: (0.55 + 4·1.2 + 0.5)/3 = 1.95; (−3·0.8 − 0.125)/2 = −1.2625
        (
            "TIS",
            {"importance_sampling_clip_max": math.inf},
            -0.34375,
            [[-0.55 / 6, 0, -0.5 / 6], [0, 0.125 / 4, 0]],
        ),
        # ε_high = 0.6 lets 1.5 through: (0.55 + 2·1.5 + 0.5)/3 = 1.35
        ("TIS", {"epsilon_high": 0.6}, -0.24375, [[-0.55 / 6, -0.5, -0.5 / 6], [0, 0.125 / 4, 0]]),
        # the second's KL is ln 12 − ln 3 = 1.386: kept at 1.4, dropped at 1.38 and still counted in the divisor
        ("F-TIS", {"kl_threshold": 1.4}, -0.14375, [[-0.55 / 6, 0, -0.5 / 6], [0, 0.125 / 4, 0]]),
        ("F-TIS", {"kl_threshold": 1.38}, -0.575, [[-0.55 / 6, 0, -0.5 / 6], [0, 0, 0]]),
        ("F-VIS", {"kl_threshold": 1.38}, -0.375, [[-0.55 / 6, 0, -0.5 / 6], [0, 0, 0]]),
        ("F-NoIS", {"kl_threshold": 1.38}, -1.4 / 3, [[-1.1 / 6, 0, -0.5 / 6], [0, 0, 0]]),
        # its mean is 0.693
        ("F-TIS", {"kl_threshold": 0.70, "kl_reduction": "mean"}, -0.14375, None),
        ("F-TIS", {"kl_threshold": 0.69, "kl_reduction": "mean"}, -0.575, None),
        # k3: (3 − 1 − ln 3) + (1/12 − 1 + ln 12) = 2.46963
        ("F-TIS", {"kl_threshold": 2.47, "kl_estimator": "k3"}, -0.14375, None),
        ("F-TIS", {"kl_threshold": 2.46, "kl_estimator": "k3"}, -0.575, None),
        ("F-TIS", {"kl_threshold": 1.24, "kl_estimator": "k3", "kl_reduction": "mean"}, -0.14375, None),
        ("F-TIS", {"kl_threshold": 1.23, "kl_estimator": "k3", "kl_reduction": "mean"}, -0.575, None),
    ],
)
def test_two_completions_by_hand(name: str, settings: dict[str, Any], loss: float, gradient: Rows | None) -> None:
    got_loss, got_gradient, _ = value_and_gradient(replace(OBJECTIVES[name], **settings), HAND)
    assert got_loss.item() == pytest.approx(loss, rel=1e-12)
    if gradient is not None:
        torch.testing.assert_close(got_gradient, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("estimator", "reduction", "expected"),
    [
        ("k1", "sum", [-LN(2.0), LN(4.0)]),
        ("k1", "mean", [-LN(2.0) / 3, LN(2.0)]),
        ("k3", "sum", [(0.5 - 1 + LN(2)) + (4 - 1 - LN(4)), (3 - 1 - LN(3)) + (1 / 12 - 1 + LN(12))]),
        ("k3", "mean", [(2.5 - LN(2)) / 3, (13 / 12 + LN(4)) / 2]),
    ],
)
def test_sequence_kl_by_hand(estimator: str, reduction: str, expected: list[float]) -> None:
    kl = kl_of(HAND.old, HAND.gen, HAND.mask, estimator, reduction)
    torch.testing.assert_close(kl, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_sequence_kl_is_the_reference(estimator: str, reduction: str) -> None:
    rng = random.Random(11)
    for _ in range(20):
        sample = draw(rng)
        kl = kl_of(sample.old, sample.gen, sample.mask, estimator, reduction)
        rows = zip(sample.old.tolist(), sample.gen.tolist(), sample.mask.tolist(), strict=True)
        expected = [reference_kl(old, gen, mask, estimator, reduction) for old, gen, mask in rows]
        torch.testing.assert_close(kl, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        assert estimator == "k1" or bool((kl >= 0).all())
        itself = kl_of(sample.old, sample.old, sample.mask, estimator, reduction)
        assert torch.equal(itself, torch.zeros_like(itself))


def test_the_threshold_itself_is_too_far() -> None:
    old = torch.tensor([[-10.0] * 10, [-5.0] * 10, [-4.75] * 10], dtype=torch.float64)
    gen, mask = torch.zeros_like(old), torch.ones(3, 10, dtype=torch.bool)
    sample = Sample(old, old, gen, -torch.ones(3, dtype=torch.float64), mask)
    assert kl_of(old, gen, mask, "k1", "sum").tolist() == [100.0, 50.0, 47.5]
    _, gradient, _ = value_and_gradient(OBJECTIVES["F-NoIS"], sample)
    assert gradient.sum(-1).tolist() == pytest.approx([0.0, 0.0, 1 / 3])  # 50 < 50 is false


@pytest.mark.parametrize("distance", [30.0, 100.0])
def test_one_token_can_be_too_far_by_itself(distance: float) -> None:
    """Only ``exp`` needs the clamp: k1 is d itself, and k3 is d − 1 for a large d."""
    old = torch.tensor([[-distance, -1.0]], dtype=torch.float64)
    gen, mask = torch.tensor([[0.0, -1.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    assert kl_of(old, gen, mask, "k1", "sum").item() == distance
    assert kl_of(gen, old, mask, "k1", "sum").item() == -distance
    assert kl_of(old, gen, mask, "k3", "sum").item() == pytest.approx(distance - 1, rel=1e-6)
    assert math.isfinite(kl_of(gen, old, mask, "k3", "sum").item())


# --- identities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("filtered", [False, True])
def test_tis_without_cap_on_own_rollouts_is_nois(filtered: bool, seed: int) -> None:
    sample = draw(random.Random(seed))
    sample.gen = sample.old
    tis = replace(OBJECTIVES["F-TIS" if filtered else "TIS"], importance_sampling_clip_max=math.inf)
    nois = OBJECTIVES["F-NoIS" if filtered else "NoIS"]
    assert_same(value_and_gradient(tis, sample), value_and_gradient(nois, sample))


@pytest.mark.parametrize("seed", range(5))
def test_vis_on_own_rollouts_is_nois(seed: int) -> None:
    sample = draw(random.Random(seed))
    sample.gen = sample.old
    assert_same(value_and_gradient(OBJECTIVES["VIS"], sample), value_and_gradient(OBJECTIVES["NoIS"], sample))


@pytest.mark.parametrize("seed", range(5))
def test_vis_inside_the_clip_at_the_rounds_start_is_uncapped_tis(seed: int) -> None:
    """At π = π_old, without clipping and truncation, both are the plain importance-weighted gradient."""
    sample = draw(random.Random(seed))
    sample.logp = sample.old
    wide: dict[str, Any] = {"epsilon": 1.0 - 1e-15, "epsilon_high": 1e9, "importance_sampling_clip_max": math.inf}
    tis, vis = replace(OBJECTIVES["TIS"], **wide), replace(OBJECTIVES["VIS"], **wide)
    assert_same(value_and_gradient(vis, sample), value_and_gradient(tis, sample))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("name", FILTERED)
def test_a_filter_that_keeps_all_is_none(name: str, estimator: Estimator, seed: int) -> None:
    sample = draw(random.Random(seed))
    keeps_all = replace(OBJECTIVES[name], kl_threshold=math.inf, kl_estimator=estimator)
    plain = OBJECTIVES[name.removeprefix("F-")]
    assert_same(value_and_gradient(keeps_all, sample), value_and_gradient(plain, sample), tolerance=0.0)


@pytest.mark.parametrize("name", ALL)
def test_epsilon_high_unset_is_epsilon(name: str) -> None:
    sample = draw(random.Random(3), n=9, t=12)
    unset, same = OBJECTIVES[name], replace(OBJECTIVES[name], epsilon_high=0.2)
    assert_same(value_and_gradient(unset, sample), value_and_gradient(same, sample), tolerance=0.0)
    wider = replace(OBJECTIVES[name], epsilon_high=0.5)
    assert value_and_gradient(wider, sample)[0] != value_and_gradient(unset, sample)[0]


@pytest.mark.parametrize("name", ["VIS", "F-VIS"])
def test_clipping_the_joint_ratio_changes_nothing_where_it_is_the_ratio(name: str) -> None:
    sample = draw(random.Random(5), n=9, t=12)
    clipped = replace(OBJECTIVES[name], clip_joint=True)
    assert_same(value_and_gradient(clipped, sample), value_and_gradient(OBJECTIVES[name], sample), tolerance=0.0)


def test_a_unit_beyond_the_joint_clip_moves_nothing_if_its_rollout_is_good() -> None:
    """Units of two tokens at π_θ = π_old = (-1, -2) and (-1, -1): joint log-ratios 1 and 0 where π_gen is -4 and -2."""
    logp = torch.tensor([[-1.0, -2.0, -1.0, -1.0]] * 2, dtype=torch.float64, requires_grad=True)
    gen = torch.tensor([[-4.0, -2.0]] * 2, dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    unit, mask = torch.tensor([[0, 0, 1, 1]] * 2), torch.ones(2, 4, dtype=torch.bool)
    objective = replace(OBJECTIVES["TIS"], clip_joint=True)
    loss, _ = policy_loss(objective, logp, logp.detach(), gen, advantage, mask, unit_NT=unit)
    loss.backward()
    weight = 2.0  # e, capped
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([0, 0, -1 / 8, -1 / 8])
    assert logp.grad[1].tolist() == pytest.approx([weight / 8, weight / 8, 1 / 8, 1 / 8])


# --- invariances --------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ALL)
def test_what_lies_under_the_padding_does_not_matter(name: str, garbage: float) -> None:
    objective = replace(OBJECTIVES[name], kl_threshold=0.4, kl_estimator="k3")
    sample = draw(random.Random(name), n=6, t=7)
    loss, gradient, _ = value_and_gradient(objective, sample)

    def widen(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        filled = torch.where(sample.mask, tensor, torch.full_like(tensor, fill))
        return torch.cat([filled, torch.full((6, 5), fill, dtype=torch.float64)], dim=1)

    mask = torch.cat([sample.mask, torch.zeros(6, 5, dtype=torch.bool)], dim=1)
    for dirty in ({"logp"}, {"old"}, {"gen"}, {"logp", "old", "gen"}):
        fields = {field: widen(getattr(sample, field), garbage if field in dirty else 0.0) for field in LOG_PROBS}
        got_loss, got_gradient, diagnostics = value_and_gradient(objective, replace(sample, **fields, mask=mask))
        assert_same((got_loss, got_gradient[:, :7]), (loss, torch.where(sample.mask, gradient, 0.0)))
        assert torch.equal(got_gradient[~mask], torch.zeros_like(got_gradient[~mask]))
        figures = by_source(diagnostics, torch.zeros(6, dtype=torch.int64), ("only",))["only"]
        assert all(math.isfinite(figure) for figure in figures.values()), figures


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALL)
def test_the_order_of_rollouts_does_not_matter(name: str, seed: int) -> None:
    objective = replace(OBJECTIVES[name], kl_threshold=0.4)
    sample = draw(random.Random(seed), n=9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    loss, gradient, _ = value_and_gradient(objective, sample)
    assert_same(value_and_gradient(objective, sample.take(order)), (loss, gradient[order]))


@pytest.mark.parametrize("parts", [[1] * 9, [4, 5], [2, 6, 1], [9]])
@pytest.mark.parametrize("name", ALL)
def test_microbatches_with_the_divisor_sum_to_the_whole(name: str, parts: list[int]) -> None:
    objective = replace(OBJECTIVES[name], kl_threshold=0.4)
    sample = draw(random.Random(4), n=9, t=10)
    whole = value_and_gradient(objective, sample)
    losses, gradients, start = [], [], 0
    for size in parts:
        loss, gradient, _ = value_and_gradient(objective, sample.take(slice(start, start + size)), divisor=9)
        losses.append(loss)
        gradients.append(gradient)
        start += size
    assert_same((torch.stack(losses).sum(), torch.cat(gradients)), whole)


def test_a_sequence_counts_once_whatever_its_length() -> None:
    """Per-sequence mean first: the same token repeated adds nothing."""
    logp, old, gen = (torch.tensor([[x]], dtype=torch.float64) for x in (-1.0, -1.1, -1.2))
    short = Sample(
        logp,
        old,
        gen,
        torch.tensor([0.7], dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
    )
    long = replace(short, **{f: getattr(short, f).repeat(1, 8) for f in ("logp", "old", "gen", "mask")})
    for name in ALL:
        one, eight = value_and_gradient(OBJECTIVES[name], short), value_and_gradient(OBJECTIVES[name], long)
        assert_same((one[0], one[1].sum()), (eight[0], eight[1].sum()))


# --- where the gradient flows -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TIS", "F-TIS"])
def test_no_gradient_through_the_weight(name: str) -> None:
    sample = draw(random.Random(8), n=9, t=12)
    logp, old, gen = (getattr(sample, field).clone().requires_grad_(True) for field in LOG_PROBS)
    loss, diagnostics = policy_loss(OBJECTIVES[name], logp, old, gen, sample.advantage, sample.mask)
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.abs().sum() > 0
    assert gen.grad is None or not gen.grad.any(), "π_gen occurs in the weight only"
    assert old.grad is None or torch.allclose(old.grad, -logp.grad), "π_old may be seen through the ratio only"
    tensors = [value for value in vars(diagnostics).values() if isinstance(value, torch.Tensor)]
    assert tensors
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("name", ALL)
def test_finite_for_log_ratios_of_a_hundred(name: str) -> None:
    cases = [(r, w, a) for r in (-100.0, 0.0, 100.0) for w in (-100.0, 0.0, 100.0) for a in (-1.5, 0.0, 1.5)]
    for estimator in ("k1", "k3"):
        for reduction in ("sum", "mean"):
            objective = replace(OBJECTIVES[name], kl_estimator=estimator, kl_reduction=reduction)
            old = torch.full((len(cases), 2), -150.0)
            offset = torch.tensor(cases)
            sample = Sample(
                logp=old + offset[:, :1],
                old=old,
                gen=old + offset[:, 1:2],
                advantage=offset[:, 2],
                mask=torch.ones(len(cases), 2, dtype=torch.bool),
            )
            assert sample.logp.dtype == torch.float32
            loss, gradient, diagnostics = value_and_gradient(objective, sample)
            assert math.isfinite(loss)
            assert bool(gradient.isfinite().all())
            figures = by_source(diagnostics, torch.zeros(len(cases), dtype=torch.int64), ("only",))["only"]
            assert all(math.isfinite(figure) for figure in figures.values()), figures
            # ... and row by row, so that no opposite pair hides another
            for i in range(len(cases)):
                loss, gradient, _ = value_and_gradient(objective, sample.take([i]))
                assert math.isfinite(loss), cases[i]
                assert bool(gradient.isfinite().all()), cases[i]


def test_log_ratios_are_clamped_where_the_reference_clamps_them() -> None:
    rng = random.Random(21)
    for name in ALL:
        sample = draw(rng, n=9, t=8)
        for field in ("logp", "gen"):
            far = torch.tensor([[rng.choice([0.0, 0.0, 25.0, -25.0]) for _ in range(8)] for _ in range(9)])
            setattr(sample, field, getattr(sample, field) + far.double())
        loss, gradient, _ = value_and_gradient(OBJECTIVES[name], sample)
        expected_loss, expected_gradient, _ = reference_loss(OBJECTIVES[name], *sample.lists())
        assert loss.item() == pytest.approx(expected_loss, rel=1e-10)
        torch.testing.assert_close(
            gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("name", FILTERED)
def test_all_dropped_is_exactly_nothing(name: str) -> None:
    sample = draw(random.Random(6), n=7, t=9)
    sample.advantage = -torch.rand(7, dtype=torch.float64) - 0.1
    loss, gradient, _ = value_and_gradient(replace(OBJECTIVES[name], kl_threshold=-math.inf), sample)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", ALL)
def test_zero_advantages_are_exactly_nothing(name: str) -> None:
    sample = draw(random.Random(6), n=7, t=9)
    sample.advantage = torch.zeros(7, dtype=torch.float64)
    loss, gradient, _ = value_and_gradient(OBJECTIVES[name], sample)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


# --- units --------------------------------------------------------------------------------------------

UNITS = torch.tensor([[0, 0, 1], [0, 1, 0]])  # a unit of two tokens and one of one; the last place is off the mask


@pytest.mark.parametrize("name", ALL)
def test_a_unit_for_each_token_is_no_units_bit_for_bit(name: str) -> None:
    objective = replace(OBJECTIVES[name], kl_threshold=0.4)
    for seed in range(5):
        sample = draw(random.Random(seed))
        unit = torch.arange(sample.mask.shape[1]).expand_as(sample.mask)
        one, other = value_and_gradient(objective, sample), value_and_gradient(objective, sample, unit_NT=unit)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        for field, value in vars(one[2]).items():
            assert torch.equal(getattr(other[2], field), value), field


def test_units_by_hand() -> None:
    """First row: units of two tokens and of one, log π_gen = −6 + ln 2 and −3; second: two units of one token.

    π_old/π_gen of the units: 1/2, 1 | 3, 1/12; the loss of TIS with ρ = 1.1, 1.5, 0.5 | 0.5, 1.5 as in HAND:
    (1.1/2 + 1.2/2 + 0.5)/3 = 0.55 and (−2·0.8 − 1.5/12)/2 = −0.8625.
    """
    gen = torch.tensor([[-6.0 + LN(2), -3.0], [-3.0 + LN(1 / 3), -3.0 + LN(12)]], dtype=torch.float64)
    logp = HAND.logp.clone().requires_grad_(True)
    settings: dict[str, Any] = {"mask_NT": HAND.mask, "unit_NT": UNITS}
    loss, diagnostics = policy_loss(OBJECTIVES["TIS"], logp, HAND.old, gen, HAND.advantage, **settings)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.55 - 0.8625) / 2, rel=1e-12)
    expected = [[-0.55 / 6, 0, -0.5 / 6], [0, 0.125 / 4, 0]]
    torch.testing.assert_close(logp.grad, torch.tensor(expected, dtype=torch.float64))
    assert diagnostics.raw_weight.tolist() == pytest.approx([0.5, 0.5, 1.0, 3.0, 1 / 12])
    assert diagnostics.k1_N.tolist() == pytest.approx([LN(2), LN(4)])
    # VIS: ρ = Π π_θ / π_gen of the unit, so 1.1 · 1.5 / 2 = 0.825 at both tokens of the first
    loss, _ = policy_loss(OBJECTIVES["VIS"], HAND.logp, HAND.old, gen, HAND.advantage, **settings)
    assert loss.item() == pytest.approx(-((0.825 + 0.825 + 0.5) / 3 + (-1.5 - 0.8) / 2) / 2, rel=1e-12)
    mean = sequence_kl(log_probs(HAND.old, HAND.old, gen, HAND.mask, unit_NT=UNITS), "k1", "mean")
    assert mean.tolist() == pytest.approx([LN(2) / 2, LN(2)])


@pytest.mark.parametrize("garbage", [1e30, math.inf, math.nan])
def test_what_lies_beyond_a_rows_units_does_not_matter(garbage: float) -> None:
    unit = torch.tensor([[0, 0, 0], [0, 1, 7]])
    gen = torch.tensor([[-6.0, garbage], [-3.0, -3.5]], dtype=torch.float64)
    clean = torch.where(torch.isfinite(gen) & (gen < 1), gen, 0.0)
    for name in ALL:
        losses = [
            policy_loss(OBJECTIVES[name], HAND.logp, HAND.old, g, HAND.advantage, HAND.mask, unit_NT=unit)[0]
            for g in (gen, clean)
        ]
        assert losses[0].item() == losses[1].item()
        assert math.isfinite(losses[0])


def test_shares_scale_a_rollouts_part_of_the_loss() -> None:
    parts = [value_and_gradient(OBJECTIVES["TIS"], HAND.take([i]))[0].item() for i in range(2)]
    loss, _ = policy_loss(OBJECTIVES["TIS"], *HAND.tensors(), share_N=torch.tensor([0.25, 1.0]))
    assert loss.item() == pytest.approx((0.25 * parts[0] + parts[1]) / 2, rel=1e-12)


# --- F-TIS-lifted ------------------------------------------------------------


def test_a_success_is_lifted_by_its_least_likely_unit() -> None:
    """π_old/π_gen of three completions: 1/2, 4, 1/10; 1/2, 4, 1/11; the first again with Â < 0."""
    raw_NT = torch.tensor([[0.5, 4, 0.1], [0.5, 4, 1 / 11], [0.5, 4, 0.1]], dtype=torch.float64)
    advantage_N1 = torch.tensor([[0.3], [0.3], [-0.3]], dtype=torch.float64)
    weight_NT = lifted(raw_NT, advantage_N1, F_TIS_LIFTED)
    assert weight_NT.tolist() == [[1, 1, 1], [0.5, 2, 1 / 11], [0.5, 2, 0.1]]
    narrower = replace(F_TIS_LIFTED, importance_sampling_clip_max=1.0)
    assert lifted(raw_NT, advantage_N1, narrower).tolist() == [[1, 1, 1], [0.5, 1, 1 / 11], [0.5, 1, 0.1]]


def test_a_lifted_success_is_one_by_its_spans_where_units_hold_several_tokens() -> None:
    """Two spans with π_old/π_gen of e^−0.3 and e^−2.4 < 1/10, of which the second's tokens are e^−1.2 each."""
    old = torch.tensor([[-1.0, -2.0, -1.7, -1.7]], dtype=torch.float64)
    logp = old.clone().requires_grad_(True)
    mask, unit = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]])
    for gen, weights in (([-2.7, -1.0], [math.exp(-0.3)] * 2 + [math.exp(-2.4)] * 2), ([-2.7, -1.2], [1.0] * 4)):
        gen_NU = torch.tensor([gen], dtype=torch.float64)
        loss, _ = policy_loss(F_TIS_LIFTED, logp, old, gen_NU, torch.tensor([1.0]).double(), mask, unit_NT=unit)
        (gradient,) = torch.autograd.grad(loss, logp)
        torch.testing.assert_close(gradient, -torch.tensor([weights], dtype=torch.float64) / 4)


# --- an objective of one's own --------------------------------------------------------------------------


def sequence_ratio(log: LogProbs) -> torch.Tensor:
    return exp_ratio(log.sequence_mean(log.logp_NT - log.old_logp_NT))


def test_a_ratio_of_sequences_by_hand() -> None:
    """GSPO (arXiv 2507.18071): ρ_i = exp(mean_t (log π_θ − log π_old)), the same at every token."""
    gspo = Objective(ratio=sequence_ratio, epsilon=3e-4, epsilon_high=4e-4)
    first, second = (1.1 * 1.5 * 0.5) ** (1 / 3), (0.5 * 1.5) ** 0.5
    loss, gradient, _ = value_and_gradient(gspo, HAND)
    assert loss.item() == pytest.approx(-(first - (1 - 3e-4)) / 2, rel=1e-12), "the second is clipped from below"
    expected = [[-first / 6] * 3, [0, 0, 0]]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    wide = replace(gspo, epsilon=0.5)
    assert value_and_gradient(wide, HAND)[0].item() == pytest.approx(-(first - second) / 2, rel=1e-12)


OWN = Objective(weight=truncated, importance_sampling_clip_max=5.0, kl_threshold=1.0, epsilon=0.1)
"""For a recipe: ``objective.name = "test_objectives.OWN"``."""
NOT_ONE = "text"


def test_options_override_only_what_a_recipe_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert resolve(ObjectiveConfig(name="test_objectives.OWN")).importance_sampling_clip_max == 5.0
    changed = resolve(ObjectiveConfig(name="test_objectives.OWN", epsilon=0.3))
    assert (changed.epsilon, changed.kl_threshold, changed.importance_sampling_clip_max) == (0.3, 1.0, 5.0)
    assert resolve(ObjectiveConfig()) == OBJECTIVES["F-TIS"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("F-TSI", "there is no such objective; take NoIS, VIS, TIS, F-NoIS, F-VIS, F-TIS, F-TIS-lifted, GSPO,"),
        ("GRPO", "a peer that trains alone has plain GRPO by any of the first six"),
        ("no_module.OWN", "there is no module 'no_module'"),
        ("test_objectives.ONW", "did you mean 'OWN'"),
        ("test_objectives.NOT_ONE", "is a str; name a value"),
    ],
)
def test_an_objective_that_is_not_there_is_named(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(RecipeError, match=re.escape(message)):
        resolve(ObjectiveConfig(name=name))


# --- shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("logp", (2, 4)),
        ("logp", (3,)),
        ("old", (2, 4)),
        ("old", (3, 3)),
        ("gen", (2, 4)),
        ("gen", (1, 3)),
        ("mask", (2, 4)),
        ("mask", (2,)),
        ("advantage", (3,)),
        ("advantage", (2, 1)),
        ("advantage", ()),
    ],
)
def test_a_wrong_shape_is_named(field: str, shape: tuple[int, ...]) -> None:
    wrong = replace(HAND, **{field: torch.ones(shape, dtype=getattr(HAND, field).dtype)})
    with pytest.raises(ValueError, match=re.escape(str(list(shape)))) as error:
        policy_loss(OBJECTIVES["F-TIS"], *wrong.tensors())
    assert "logp_NT" in str(error.value) or f"{field}_N" in str(error.value)


def test_a_wrong_shape_is_named_by_the_advantages_too() -> None:
    with pytest.raises(ValueError, match=r"\b3\b"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


# --- advantages ---------------------------------------------------------------------------------------


def advantages(rewards: Sequence[float], groups: list[int], *settings: Any, dtype: torch.dtype = torch.float64) -> Any:
    return group_advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(groups), *settings)


def test_group_advantages_by_hand() -> None:
    # group 7: 1 0 0 1, mean 1/2, σ 1/2; group 2: 1 0 0, mean 1/3, σ √2/3
    rewards, groups = [1, 1, 0, 0, 0, 0, 1], [7, 2, 7, 2, 7, 2, 7]
    population = [1, math.sqrt(2), -1, -1 / math.sqrt(2), -1, -1 / math.sqrt(2), 1]
    torch.testing.assert_close(advantages(rewards, groups), torch.tensor(population, dtype=torch.float64))
    centred = [0.5, 2 / 3, -0.5, -1 / 3, -0.5, -1 / 3, 0.5]
    got = advantages(rewards, groups, "none")
    torch.testing.assert_close(got, torch.tensor(centred, dtype=torch.float64))


def test_scaled_advantages_are_standardised_whatever_the_scale() -> None:
    """No epsilon in the denominator: rewards a million times smaller have the same advantages."""
    rewards, groups = [0.3, 0.1, 0.9, 0.2, 0.2, 0.7], [0, 0, 0, 1, 1, 1]
    at_scale = advantages(rewards, groups)
    for scale in (1e-6, 1e6):
        got = advantages([reward * scale for reward in rewards], groups)
        torch.testing.assert_close(got, at_scale, rtol=1e-9, atol=0)
    assert at_scale[:3].var(correction=0).item() == pytest.approx(1.0)
    assert at_scale.sum().item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 1 / 3, 1e-30, 12345.678])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 12])
def test_an_all_equal_group_is_exactly_zero(size: int, reward: float, scale: str, dtype: torch.dtype) -> None:
    rewards, groups = [reward] * size + [0.0, 1.0], [4] * size + [5, 5]
    got = advantages(rewards, groups, scale, dtype=dtype)
    assert got[:size].tolist() == [0.0] * size
    assert got[size] < 0 < got[size + 1]


def test_advantages_do_not_depend_on_order_or_numbering() -> None:
    rng = random.Random(2)
    rewards, groups = [float(rng.random() < 0.4) for _ in range(30)], [rng.randint(0, 5) for _ in range(30)]
    plain = advantages(rewards, groups)
    order = rng.sample(range(30), 30)
    shuffled = advantages([rewards[i] for i in order], [1000 - 3 * groups[i] for i in order])
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-12, atol=1e-12)


# --- diagnostics --------------------------------------------------------------------------------------


def test_diagnostics_by_hand() -> None:
    """The first completion's weights are 1/2, 4, 1, the second's 3 and 1/12; the second is dropped."""
    _, _, diagnostics = value_and_gradient(replace(OBJECTIVES["F-TIS"], kl_threshold=1.0), HAND)
    figures = by_source(diagnostics, torch.tensor([1, 0]), ("big", "small"))
    assert sorted(figures) == ["big", "small"]
    ratio, weight = "sampling/importance_sampling_ratio", "sampling/importance_sampling_weight"
    assert figures["small"] == pytest.approx(
        {
            "kl/k1": -LN(2),
            "kl/k3": 2.5 - LN(2),
            f"{ratio}/min": 0.5,
            f"{ratio}/p10": 0.5,
            f"{ratio}/p50": 1,
            f"{ratio}/p90": 4,
            f"{ratio}/max": 4,
            f"{ratio}/mean": 5.5 / 3,
            f"{weight}/min": 0.5,
            f"{weight}/p10": 0.5,
            f"{weight}/p50": 1,
            f"{weight}/p90": 2,
            f"{weight}/max": 2,
            f"{weight}/mean": 3.5 / 3,
            "sampling/truncated_fraction": 1 / 3,
            "sampling/effective_sample_size": 5.5**2 / (3 * 17.25),
            "clip_ratio/low_mean": 0,
            "clip_ratio/high_mean": 1 / 3,
        }
    )
    dropped = figures["big"]
    assert dropped["kl/k1"] == pytest.approx(LN(4))
    assert dropped["sampling/truncated_fraction"] == 0.5
    assert dropped["clip_ratio/low_mean"] == 0, "what is dropped is not clipped"
    _, _, diagnostics = value_and_gradient(OBJECTIVES["F-TIS"], HAND)
    assert by_source(diagnostics, torch.tensor([1, 0]), ("big", "small"))["big"]["clip_ratio/low_mean"] == 0.5


@pytest.mark.parametrize("name", ALL)
def test_diagnostics_are_counted_per_source(name: str) -> None:
    rng = random.Random(name)
    objective = replace(OBJECTIVES[name], kl_threshold=0.4, kl_reduction="mean")
    for _ in range(10):
        sample = draw(rng)
        n = len(sample.mask)
        _, _, diagnostics = value_and_gradient(objective, sample)
        source = torch.tensor([rng.choice([0, 2]) for _ in range(n)])
        figures = by_source(diagnostics, source, ("a", "silent", "c"))
        assert set(figures) == {"ac"[s // 2] for s in source.tolist()}, "a peer without rollouts is left out"
        for label, index in (("a", 0), ("c", 2)):
            if label in figures:
                assert_figures(objective, sample.take(source == index), figures[label])


def assert_figures(objective: Objective, part: Sample, got: dict[str, float]) -> None:
    """Every figure of one source, token by token."""
    logp, old, gen, advantage, mask = (tensor.tolist() for tensor in part.tensors())
    cells = [(i, t) for i, row in enumerate(mask) for t, inside in enumerate(row) if inside]
    raw = sorted(math.exp(old[i][t] - gen[i][t]) for i, t in cells)
    weight = [min(w, objective.importance_sampling_clip_max) for w in raw]
    _, _, branches = reference_loss(objective, logp, old, gen, advantage, mask)
    expected = {
        "sampling/truncated_fraction": sum(w > objective.importance_sampling_clip_max for w in raw) / len(raw),
        "sampling/effective_sample_size": sum(raw) ** 2 / (len(raw) * sum(w * w for w in raw)),
        "clip_ratio/low_mean": branches["clipped below"] / len(raw),
        "clip_ratio/high_mean": branches["clipped above"] / len(raw),
    }
    for estimator in ("k1", "k3"):
        kls = [reference_kl(*row, estimator, objective.kl_reduction) for row in zip(old, gen, mask, strict=True)]
        expected[f"kl/{estimator}"] = sum(kls) / len(kls)
    for label, values in (("ratio", raw), ("weight", weight)):
        key = f"sampling/importance_sampling_{label}"
        expected |= {f"{key}/min": values[0], f"{key}/max": values[-1], f"{key}/mean": sum(values) / len(values)}
        for percent in (10, 50, 90):  # nearest rank
            expected[f"{key}/p{percent}"] = values[-(-percent * len(values) // 100) - 1]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_microbatches_concatenate_to_the_wholes_diagnostics() -> None:
    objective = replace(OBJECTIVES["F-TIS"], kl_threshold=0.4)
    sample = draw(random.Random(5), n=9, t=10)
    _, _, whole = value_and_gradient(objective, sample)
    parts = []
    for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
        part = sample.take(rows)
        width = int(part.mask.sum(-1).max())  # padding is trimmed per micro-batch
        trimmed = {field: getattr(part, field)[:, :width] for field in (*LOG_PROBS, "mask")}
        parts.append(value_and_gradient(objective, replace(part, **trimmed), divisor=9)[2])
    joined = Diagnostics.concat(parts)
    for field, value in vars(whole).items():
        torch.testing.assert_close(getattr(joined, field), value, rtol=1e-12, atol=1e-12)
    source = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
    joined_figures, whole_figures = (by_source(d, source, ("a", "b")) for d in (joined, whole))
    for peer in ("a", "b"):
        assert joined_figures[peer] == pytest.approx(whole_figures[peer], rel=1e-12, abs=1e-12)


def test_diagnostics_are_frozen() -> None:
    _, _, diagnostics = value_and_gradient(OBJECTIVES["TIS"], HAND)
    with pytest.raises(AttributeError):
        diagnostics.k1_N = diagnostics.k1_N  # type: ignore[misc]


def test_a_rollout_without_tokens_is_refused() -> None:
    for mask in (torch.tensor([[True, True, True], [False, False, False]]), torch.zeros(2, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="at least one token"):
            policy_loss(OBJECTIVES["F-TIS"], *replace(HAND, mask=mask).tensors())


@pytest.mark.parametrize("name", ALL)
def test_float64_rewards_go_with_a_float32_model(name: str) -> None:
    logp, old, gen = (getattr(HAND, field).float() for field in LOG_PROBS)
    single = replace(HAND, logp=logp, old=old, gen=gen)
    loss, gradient, _ = value_and_gradient(OBJECTIVES[name], single)
    assert gradient.dtype == torch.float32
    expected = value_and_gradient(OBJECTIVES[name], HAND)
    assert_same((loss.double(), gradient.double()), expected, tolerance=1e-5)

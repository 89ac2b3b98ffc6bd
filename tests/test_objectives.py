"""The objectives against a second implementation in plain Python, hand-computed numbers, and identities.

The reference below is written from the formulas alone, one token at a time in Python floats, and its gradient is
derived by hand; it shares nothing with ``ftis.objectives``. test_losses_of_trl.py has the objectives that TRL has, too.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from earned import rewards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftis.advantages import centred, group_advantages, imitating, within_group
from ftis.config import ObjectiveConfig, RecipeError
from ftis.measures import by_source
from ftis.objectives import (
    F_TIS,
    F_TIS_LIFTED,
    OBJECTIVES,
    Diagnostics,
    Objective,
    StepSize,
    _k3,
    advantages,
    geometric_over_old,
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

SIX = ["NoIS", "VIS", "TIS", "F-NoIS", "F-VIS", "F-TIS"]
FILTERED = ["F-NoIS", "F-VIS", "F-TIS"]
LN = math.log
Rows = list[list[float]]
LOG_PROBS = ("logp", "old", "gen")


def clamped_exp(log_ratio: float) -> float:
    return math.exp(max(-20.0, min(20.0, log_ratio)))


def reference_kl(old: list[float], gen: list[float], mask: list[bool], estimator: str, reduction: str) -> float:
    """An estimate of KL(π_gen ‖ π_old) from tokens that π_gen sampled."""
    d = [g - o for o, g, inside in zip(old, gen, mask, strict=True) if inside]
    total = sum(x if estimator == "k1" else clamped_exp(-x) - 1.0 + x for x in d)
    return total / len(d) if reduction == "mean" else total


def reference_loss(
    objective: Objective, logp: Rows, old: Rows, gen: Rows, advantage: list[float], mask: list[list[bool]]
) -> tuple[float, Rows, Counter[str]]:
    """L, dL/dlogp and how often each branch was taken, of one of the six.

    For A > 0 the surrogate min(r·A, clip(r)·A) is r·A up to r = 1 + ε_high and constant above; for A < 0 it is constant
    below r = 1 − ε and r·A above. Where it is r·A its derivative by log π is r·A again, except beyond the clamp of the
    log-ratio, where r no longer moves.
    """
    low = 1.0 - objective.epsilon
    high = 1.0 + (objective.epsilon if objective.epsilon_high is None else objective.epsilon_high)
    seen: Counter[str] = Counter()
    loss, gradient = 0.0, [[0.0] * len(row) for row in logp]
    for i, a in enumerate(advantage):
        if objective.filtered:
            kl = reference_kl(old[i], gen[i], mask[i], objective.kl_estimator, objective.kl_reduction)
            near = kl < objective.kl_threshold
            seen["near" if near else "far but good" if a > 0 else "dropped"] += 1
            a = a if near or a > 0 else 0.0
        share = 1 / sum(mask[i]) / len(logp)
        for t in (t for t, inside in enumerate(mask[i]) if inside):
            log_ratio = logp[i][t] - (gen if objective.ratio is over_generator else old)[i][t]
            r, weight = clamped_exp(log_ratio), 1.0
            if objective.weight is truncated:
                weight = clamped_exp(old[i][t] - gen[i][t])
                seen["truncated" if weight > objective.importance_sampling_clip_max else "whole"] += 1
                weight = min(weight, objective.importance_sampling_clip_max)
            moves = r <= high if a > 0 else r >= low
            surrogate = (r if moves else high if a > 0 else low) * a
            seen["none" if a == 0 else "inside" if moves else "clipped above" if a > 0 else "clipped below"] += 1
            if objective.clip_joint and a > 0 and clamped_exp(logp[i][t] - gen[i][t]) > high:
                seen["moved no further" if moves else "beyond both"] += 1
                moves = False
            loss -= weight * surrogate * share
            if moves and abs(log_ratio) < 20.0:
                gradient[i][t] = -weight * r * a * share
    return loss, gradient, seen


@dataclass
class Sample:
    logp: Tensor
    old: Tensor
    gen: Tensor
    advantage: Tensor
    mask: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.logp, self.old, self.gen, self.advantage, self.mask

    def take(self, rows: Any) -> Sample:
        return Sample(*(tensor[rows] for tensor in self.tensors()))


def draw(seed: int, n: int | None = None, t: int | None = None, far: bool = False) -> Sample:
    """Random rollouts: ragged and with holes, clipped on both sides, truncated, some advantages exactly zero."""
    rng = random.Random(seed)
    n, t = n or rng.randint(1, 9), t or rng.randint(1, 12)
    lengths = [rng.choice([1, t, rng.randint(1, t)]) for _ in range(n)]
    mask = [[j < length and (j == 0 or rng.random() < 0.8) for j in range(t)] for length in lengths]
    beyond = [0.0, 0.0, 25.0, -25.0] if far else [0.0]
    old = [[-rng.expovariate(1.0) for _ in range(t)] for _ in range(n)]
    drift = [rng.gauss(0.2, 0.5) for _ in range(n)]
    logp = [[o + rng.gauss(0.0, 0.5) + rng.choice(beyond) for o in row] for row in old]
    gen = [[o + d + rng.gauss(0.0, 0.8) + rng.choice(beyond) for o in row] for row, d in zip(old, drift, strict=True)]
    advantage = [rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 1)]) for _ in range(n)]
    numbers = [torch.tensor(values, dtype=torch.float64) for values in (logp, old, gen, advantage)]
    return Sample(numbers[0], numbers[1], numbers[2], numbers[3], torch.tensor(mask))


def kl_of(old: Tensor, gen: Tensor, mask: Tensor, *settings: Any) -> Tensor:
    return sequence_kl(log_probs(old, old, gen, mask), *settings)


def value_and_gradient(objective: Objective, sample: Sample, **settings: Any) -> tuple[Tensor, Tensor, Diagnostics]:
    """The loss under the objective's own filter, its gradient and its diagnostics."""
    logp = sample.logp.clone().requires_grad_(True)
    if objective.filtered:
        kl = kl_of(sample.old, sample.gen, sample.mask, objective.kl_estimator, objective.kl_reduction)
        settings["share_N"] = ((sample.advantage > 0) | (kl < objective.kl_threshold)).double()
    loss, diagnostics = policy_loss(objective, logp, sample.old, sample.gen, sample.advantage, sample.mask, **settings)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), gradient, diagnostics


def assert_same(one: Sequence[Any], other: Sequence[Any], tolerance: float = 1e-12) -> None:
    """Losses and gradients are equal."""
    for a, b in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=tolerance, atol=tolerance)


# Two completions, A = +1 with three tokens and A = −1 with two; every ratio is a plain number:
#   π/π_old       1.1  1.5  0.5   |  0.5  1.5
#   π_old/π_gen   1/2   4    1    |   3   1/12
#   π/π_gen      0.55   6   0.5   |  1.5  0.125
HAND = Sample(
    logp=torch.tensor([[LN(1.1), LN(1.5), LN(0.5)], [LN(0.5), LN(1.5), 0.0]], dtype=torch.float64) - 3.0,
    old=torch.full((2, 3), -3.0, dtype=torch.float64),
    gen=torch.tensor([[LN(2.0), LN(1 / 4), 0.0], [LN(1 / 3), LN(12), 0.0]], dtype=torch.float64) - 3.0,
    advantage=torch.tensor([1.0, -1.0], dtype=torch.float64),
    mask=torch.tensor([[True, True, True], [True, True, False]]),
)
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize("name", SIX)
def test_loss_and_gradient_are_the_reference(name: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        objective = replace(
            OBJECTIVES[name],
            kl_estimator="k1" if seed % 2 else "k3",
            kl_reduction="sum" if seed % 3 else "mean",
            kl_threshold=0.4,
            epsilon_high=0.28 if seed % 5 else None,
            importance_sampling_clip_max=1.5 if seed % 4 else 2.0,
            clip_joint=seed % 7 < 3,
        )
        sample = draw(seed, far=seed > 100)
        lists = (tensor.tolist() for tensor in sample.tensors())
        loss, gradient, branches = reference_loss(objective, *lists)
        assert_same(value_and_gradient(objective, sample), (loss, gradient), 1e-10)
        seen += branches
    wanted = {"clipped above", "clipped below", "inside", "none"}
    wanted |= {"truncated", "whole"} if "TIS" in name else set()
    wanted |= {"dropped", "near", "far but good"} if name in FILTERED else set()
    wanted |= {"moved no further"} if "VIS" not in name else {"beyond both"}
    assert wanted <= seen.keys()


def test_the_table_of_objectives() -> None:
    plain = {"NoIS": Objective(), "VIS": Objective(ratio=over_generator), "TIS": Objective(weight=truncated)}
    filtered = {f"F-{name}": replace(objective, filtered=True) for name, objective in plain.items()}
    assert {name: OBJECTIVES[name] for name in SIX} == plain | filtered
    assert list(OBJECTIVES) == [*SIX, "F-TIS-lifted", "GSPO", "CISPO", "DAPO", "Dr-GRPO", "imitation"]
    assert (F_TIS.ratio, Objective().weight, OBJECTIVES["Dr-GRPO"].advantage) == (over_old, unweighted, centred)
    assert (F_TIS.importance_sampling_clip_max, F_TIS.kl_threshold, F_TIS.epsilon) == (2.0, 50.0, 0.2)
    assert (F_TIS.kl_estimator, F_TIS.kl_reduction, F_TIS.epsilon_high) == ("k1", "sum", None)


def test_two_completions_by_hand() -> None:
    first, second = [-0.55 / 6, 0, -0.5 / 6], [0, 0.125 / 4, 0]
    cases: list[tuple[str, dict[str, Any], float, Rows]] = [
        # first: (1.1 + 1.2 + 0.5)/3 = 2.8/3; second: (−0.8 − 1.5)/2 = −1.15
        ("NoIS", {}, -(2.8 / 3 - 1.15) / 2, [[-1.1 / 6, 0, -0.5 / 6], [0, 1.5 / 4, 0]]),
        # first: (0.55 + 1.2 + 0.5)/3 = 0.75; second: (−1.5 − 0.8)/2 = −1.15
        ("VIS", {}, 0.2, [first, [1.5 / 4, 0, 0]]),
        # first: (0.5·1.1 + 2·1.2 + 1·0.5)/3 = 1.15; second: (−2·0.8 − 1.5/12)/2 = −0.8625
        ("TIS", {}, -0.14375, [first, second]),
        # without truncation: (0.55 + 4·1.2 + 0.5)/3 = 1.95; (−3·0.8 − 0.125)/2 = −1.2625
        ("TIS", {"importance_sampling_clip_max": math.inf}, -0.34375, [first, second]),
        # ε_high = 0.6 lets 1.5 through: (0.55 + 2·1.5 + 0.5)/3 = 1.35
        ("TIS", {"epsilon_high": 0.6}, -0.24375, [[-0.55 / 6, -0.5, -0.5 / 6], second]),
        # the second's KL is ln 12 − ln 3 = 1.386, .693 a token; by k3 2.46963, 1.235 a token
        ("F-TIS", {"kl_threshold": 1.39}, -0.14375, [first, second]),
        ("F-TIS", {"kl_threshold": 1.38}, -0.575, [first, [0, 0, 0]]),
        ("F-VIS", {"kl_threshold": 1.38}, -0.375, [first, [0, 0, 0]]),
        ("F-NoIS", {"kl_threshold": 1.38}, -1.4 / 3, [[-1.1 / 6, 0, -0.5 / 6], [0, 0, 0]]),
        ("F-TIS", {"kl_threshold": 0.70, "kl_reduction": "mean"}, -0.14375, [first, second]),
        ("F-TIS", {"kl_threshold": 0.69, "kl_reduction": "mean"}, -0.575, [first, [0, 0, 0]]),
        ("F-TIS", {"kl_threshold": 2.47, "kl_estimator": "k3"}, -0.14375, [first, second]),
        ("F-TIS", {"kl_threshold": 2.46, "kl_estimator": "k3"}, -0.575, [first, [0, 0, 0]]),
    ]
    for name, changes, loss, gradient in cases:
        found = value_and_gradient(replace(OBJECTIVES[name], **changes), HAND)
        assert_same(found, (torch.tensor(loss), torch.tensor(gradient).double()), 1e-7)
        assert found[0].item() == pytest.approx(loss, rel=1e-12)


def test_imitation_by_hand() -> None:
    """Own rows are NoIS's. Each token of another's has the gradient −Â / (N |a|), whatever was sampled."""
    advantage, mask = torch.tensor([1.0, 1.0]).double(), HAND.mask
    for own in (torch.tensor([True, False]), torch.tensor([False, False]), torch.tensor([True, True])):
        logp = HAND.logp.clone().requires_grad_(True)
        loss, _ = policy_loss(OBJECTIVES["imitation"], logp, HAND.old, HAND.gen, advantage, mask, own_N=own)
        (gradient,) = torch.autograd.grad(loss, logp)
        nois, of_nois, _ = value_and_gradient(OBJECTIVES["NoIS"], replace(HAND, advantage=advantage))
        copied = -mask.double() / mask.sum(-1, keepdim=True) / 2
        assert_same((gradient,), (torch.where(own.unsqueeze(-1), of_nois, copied),))
        if own.all():
            assert_same((loss,), (nois,))


def test_others_successes_count_one_under_imitation() -> None:
    """The learner's groups are GRPO's without the others' rollouts. A reward for the form alone is no success."""
    given = rewards([1, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1])
    assert imitating(given).tolist() == [1.0, -1.0, 1.0, 1.0, 1.0, 0.0]
    with_form = rewards([1.1, 0.1, 1.1, 0.1, 0.1, 0.1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1])
    assert imitating(with_form).tolist() == pytest.approx([1.0, -1.0, 1.0, 0.0, 0.0, 0.0])
    for size in (24, 72, 96, 144, 192):  # the mean of equal rewards may be rounded below them
        assert not imitating(rewards([0.1] * size, [0] * size, [1] * size)).any()


def test_sequence_kl_by_hand() -> None:
    for estimator, reduction, expected in [
        ("k1", "sum", [-LN(2.0), LN(4.0)]),
        ("k1", "mean", [-LN(2.0) / 3, LN(2.0)]),
        ("k3", "sum", [(0.5 - 1 + LN(2)) + (4 - 1 - LN(4)), (3 - 1 - LN(3)) + (1 / 12 - 1 + LN(12))]),
        ("k3", "mean", [(2.5 - LN(2)) / 3, (13 / 12 + LN(4)) / 2]),
    ]:
        assert kl_of(HAND.old, HAND.gen, HAND.mask, estimator, reduction).tolist() == pytest.approx(expected)
        assert kl_of(HAND.old, HAND.old, HAND.mask, estimator, reduction).tolist() == [0, 0]
    # k1 needs no clamp: it is d itself. k3 is d − 1 for a large d.
    for d in (30.0, 100.0):
        old, gen = torch.tensor([[-d, -1.0]]).double(), torch.tensor([[0.0, -1.0]]).double()
        mask = torch.ones(1, 2, dtype=torch.bool)
        assert kl_of(old, gen, mask, "k1").item() == -kl_of(gen, old, mask, "k1").item() == d
        assert kl_of(old, gen, mask, "k3").item() == pytest.approx(d - 1, rel=1e-6)
        assert math.isfinite(kl_of(gen, old, mask, "k3").item())
    for nats in (5.0, 19.0, 21.0, 40.0):  # the pull to a reference never turns round
        logp = torch.tensor([-nats - 0.5], requires_grad=True)
        (pull,) = torch.autograd.grad(_k3(-0.5 - logp).sum(), logp)
        assert pull < 0 if nats < 20 else pull == 0


@settings(deadline=None, max_examples=30)
@given(seed=seeds)
def test_on_own_rollouts_all_are_nois(seed: int) -> None:
    """TIS with its cap, VIS and F-TIS-lifted, too; and GSPO of one token, DAPO and Dr-GRPO of equal lengths."""
    sample = draw(seed)
    sample.gen = sample.old
    nois = value_and_gradient(OBJECTIVES["NoIS"], sample)
    for name in ("TIS", "VIS", "F-TIS", "F-TIS-lifted"):
        assert_same(value_and_gradient(OBJECTIVES[name], sample), nois)
    one = replace(sample, **{field: getattr(sample, field)[:, :1] for field in (*LOG_PROBS, "mask")})
    for name in ("GSPO", "DAPO", "Dr-GRPO"):
        found = value_and_gradient(replace(OBJECTIVES[name], epsilon=0.2, epsilon_high=None), one)
        assert_same(found, value_and_gradient(OBJECTIVES["NoIS"], one))
    loose = value_and_gradient(replace(OBJECTIVES["NoIS"], epsilon=1 - 1e-15, epsilon_high=1e9), one)
    assert_same(value_and_gradient(replace(OBJECTIVES["CISPO"], epsilon_high=1e9), one), loose)


@settings(deadline=None, max_examples=30)
@given(seed=seeds)
def test_special_cases_are_the_simpler_objective(seed: int) -> None:
    sample = draw(seed)
    for name in FILTERED:
        keeps_all = replace(OBJECTIVES[name], kl_threshold=math.inf)
        plain = OBJECTIVES[name.removeprefix("F-")]
        assert_same(value_and_gradient(keeps_all, sample), value_and_gradient(plain, sample), 0.0)
    unset, equal = OBJECTIVES["TIS"], replace(OBJECTIVES["TIS"], epsilon_high=0.2)
    assert_same(value_and_gradient(unset, sample), value_and_gradient(equal, sample), 0.0)
    vis = OBJECTIVES["VIS"]
    assert_same(value_and_gradient(replace(vis, clip_joint=True), sample), value_and_gradient(vis, sample), 0.0)
    # At π = π_old, without clipping and truncation, VIS and TIS are the plain importance-weighted gradient.
    sample.logp = sample.old
    wide: dict[str, Any] = {"epsilon": 1.0 - 1e-15, "epsilon_high": 1e9, "importance_sampling_clip_max": math.inf}
    tis, vis = (replace(OBJECTIVES[name], **wide) for name in ("TIS", "VIS"))
    assert_same(value_and_gradient(vis, sample), value_and_gradient(tis, sample))


@settings(deadline=None, max_examples=30)
@given(seed=seeds, garbage=st.sampled_from([0.0, 1e30, math.inf, -math.inf, math.nan]))
def test_neither_padding_nor_order_nor_microbatches_matter(seed: int, garbage: float) -> None:
    sample = draw(seed, n=6, t=7)
    step = StepSize(6, int(sample.mask.sum()), 9)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    dirty = {field: torch.where(sample.mask, getattr(sample, field), garbage) for field in LOG_PROBS}
    wide = {field: torch.cat([value, torch.full((6, 5), garbage).double()], 1) for field, value in dirty.items()}
    mask = torch.cat([sample.mask, torch.zeros(6, 5, dtype=torch.bool)], 1)
    for name, objective in OBJECTIVES.items():
        loss, gradient, _ = whole = value_and_gradient(objective, sample, step=step)
        assert_same(value_and_gradient(objective, sample.take(order), step=step), (loss, gradient[order]))
        found, of_wide, diagnostics = value_and_gradient(objective, replace(sample, **wide, mask=mask), step=step)
        assert_same((found, of_wide[:, :7]), (loss, torch.where(sample.mask, gradient, 0.0)))
        assert not of_wide[~mask].any()
        figures = by_source(diagnostics, torch.zeros(6, dtype=torch.int64), ("only",))["only"]
        assert all(map(math.isfinite, figures.values())), name
        parts = [value_and_gradient(objective, sample.take(rows), step=step) for rows in ([0], [1, 2, 3], [4, 5])]
        assert_same((sum(part[0] for part in parts), torch.cat([part[1] for part in parts])), whole)
        joined = Diagnostics.concat([part[2] for part in parts])
        for field, values in vars(whole[2]).items():
            torch.testing.assert_close(getattr(joined, field), values, rtol=1e-12, atol=1e-12)


def test_what_a_token_counts() -> None:
    """The same token eight times: as much in all where sequences count once, eight times where tokens do."""
    one = {field: torch.tensor([[x]]).double() for field, x in zip(LOG_PROBS, (-1.0, -1.1, -1.2), strict=True)}
    short = Sample(**one, advantage=torch.tensor([0.7]).double(), mask=HAND.mask[:1, :1])
    long = replace(short, **{field: getattr(short, field).repeat(1, 8) for field in (*LOG_PROBS, "mask")})
    step = StepSize(rollouts=1, tokens=8, max_completion_length=16)
    for name, objective in OBJECTIVES.items():
        once, eight = (value_and_gradient(objective, sample, step=step) for sample in (short, long))
        times = 8 if name in ("CISPO", "DAPO", "Dr-GRPO") else 1
        assert_same((once[0] * times, once[1].sum() * times), (eight[0], eight[1].sum()))
        if name in ("CISPO", "DAPO"):
            assert_same(value_and_gradient(objective, long)[:1], value_and_gradient(objective, short)[:1])


def test_no_gradient_flows_through_weights() -> None:
    sample = draw(8, n=9, t=12)
    for objective in OBJECTIVES.values():
        logp, old, gen = (getattr(sample, field).clone().requires_grad_(True) for field in LOG_PROBS)
        loss, diagnostics = policy_loss(objective, logp, old, gen, sample.advantage, sample.mask)
        loss.backward()
        assert logp.grad is not None
        assert logp.grad.abs().sum() > 0
        if objective.ratio in (over_old, geometric_over_old):
            assert gen.grad is None or not gen.grad.any(), "π_gen occurs in the weight only"
            assert torch.allclose(old.grad, -logp.grad), "π_old may be seen through the ratio only"
        assert not any(value.requires_grad for value in vars(diagnostics).values())


def test_finite_for_log_ratios_of_a_hundred() -> None:
    """In float32, each row by itself, so that no opposite pair hides another."""
    cases = [(r, w, a) for r in (-100.0, 0.0, 100.0) for w in (-100.0, 0.0, 100.0) for a in (-1.5, 0.0, 1.5)]
    offset, old = torch.tensor(cases), torch.full((len(cases), 2), -150.0)
    mask = torch.ones(len(cases), 2, dtype=torch.bool)
    sample = Sample(old + offset[:, :1], old, old + offset[:, 1:2], offset[:, 2], mask)
    for name, objective in OBJECTIVES.items():
        for estimator in ("k1", "k3"):
            for i, case in enumerate(cases):
                loss, gradient, diagnostics = value_and_gradient(
                    replace(objective, kl_estimator=estimator), sample.take([i])
                )
                assert math.isfinite(loss), (name, case)
                assert bool(gradient.isfinite().all()), (name, case)
                assert bool(diagnostics.k1_N.isfinite().all() & diagnostics.k3_N.isfinite().all())


def test_what_is_dropped_or_has_no_advantage_is_exactly_nothing_and_a_share_is_that_part() -> None:
    sample = draw(6, n=7, t=9)
    bad = replace(sample, advantage=-torch.rand(7, dtype=torch.float64) - 0.1)
    none = replace(sample, advantage=torch.zeros(7, dtype=torch.float64))
    cases = [(replace(OBJECTIVES[name], kl_threshold=-math.inf), bad) for name in FILTERED]
    for objective, given_ in [*cases, *((objective, none) for objective in OBJECTIVES.values())]:
        loss, gradient, _ = value_and_gradient(objective, given_)
        assert loss.item() == 0.0
        assert not gradient.any()
    # Between nothing and all, a share scales a rollout's part of the loss.
    parts = [value_and_gradient(OBJECTIVES["TIS"], HAND.take([i]))[0].item() for i in range(2)]
    loss, _ = policy_loss(OBJECTIVES["TIS"], *HAND.tensors(), share_N=torch.tensor([0.25, 1.0]))
    assert loss.item() == pytest.approx((0.25 * parts[0] + parts[1]) / 2, rel=1e-12)


UNITS = torch.tensor([[0, 0, 1], [0, 1, 0]])  # a unit of two tokens and one of one; the last place is off the mask


@settings(deadline=None, max_examples=30)
@given(seed=seeds)
def test_a_unit_for_each_token_is_no_units_bit_for_bit(seed: int) -> None:
    sample = draw(seed)
    unit = torch.arange(sample.mask.shape[1]).expand_as(sample.mask)
    whole = replace(sample, mask=sample.mask.cumprod(1).bool())  # units have no holes
    for objective in OBJECTIVES.values():
        one, other = value_and_gradient(objective, whole), value_and_gradient(objective, whole, unit_NT=unit)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert all(torch.equal(value, getattr(other[2], field)) for field, value in vars(one[2]).items())


def test_units_by_hand() -> None:
    """First row: units of two tokens and of one, log π_gen = −6 + ln 2 and −3; second: two units of one token.

    π_old/π_gen of the units: 1/2, 1 | 3, 1/12; the loss of TIS with ρ = 1.1, 1.5, 0.5 | 0.5, 1.5 as in HAND:
    (1.1/2 + 1.2/2 + 0.5)/3 = 0.55 and (−2·0.8 − 1.5/12)/2 = −0.8625. What lies beyond a row's units does not matter.
    """
    for garbage in (0.0, 1e30, math.nan):
        gen = torch.tensor([[LN(2) - 6, -3.0, garbage], [LN(1 / 3) - 3, LN(12) - 3, garbage]], dtype=torch.float64)
        logp = HAND.logp.clone().requires_grad_(True)
        settings: dict[str, Any] = {"mask_NT": HAND.mask, "unit_NT": UNITS}
        loss, diagnostics = policy_loss(OBJECTIVES["TIS"], logp, HAND.old, gen, HAND.advantage, **settings)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert loss.item() == pytest.approx(-(0.55 - 0.8625) / 2, rel=1e-12)
        assert gradient.tolist() == [pytest.approx(row) for row in ([-0.55 / 6, 0, -0.5 / 6], [0, 0.125 / 4, 0])]
        assert diagnostics.raw_weight.tolist() == pytest.approx([0.5, 0.5, 1.0, 3.0, 1 / 12])
        assert diagnostics.k1_N.tolist() == pytest.approx([LN(2), LN(4)])
        # VIS: ρ = Π π_θ / π_gen of the unit, so 1.1 · 1.5 / 2 = 0.825 at both tokens of the first
        loss, _ = policy_loss(OBJECTIVES["VIS"], HAND.logp, HAND.old, gen, HAND.advantage, **settings)
        assert loss.item() == pytest.approx(-((0.825 + 0.825 + 0.5) / 3 + (-1.5 - 0.8) / 2) / 2, rel=1e-12)
        mean = sequence_kl(log_probs(HAND.old, HAND.old, gen, HAND.mask, unit_NT=UNITS), "k1", "mean")
        assert mean.tolist() == pytest.approx([LN(2) / 2, LN(2)])
        # at π_θ = π_old = π_gen its gradient is GRPO's, however many tokens a unit has
        gen = torch.tensor([[-6.0, -3.0, garbage], [-3.0, -3.0, garbage]], dtype=torch.float64)
        at = torch.tensor([[-3.0, -3.0, -3.0], [-3.0, -3.0, garbage]], dtype=torch.float64, requires_grad=True)
        loss, _ = policy_loss(OBJECTIVES["VIS"], at, at.detach(), gen, torch.tensor([1.0, -1.0]).double(), **settings)
        (gradient,) = torch.autograd.grad(loss, at)
        assert gradient.tolist() == [pytest.approx(row) for row in ([-1 / 6] * 3, [1 / 4, 1 / 4, 0])]


def test_a_unit_beyond_the_joint_clip_moves_nothing_if_its_rollout_is_good() -> None:
    """Units of two tokens at π_θ = π_old = (-1, -2) and (-1, -1): joint log-ratios 1 and 0 where π_gen is -4 and -2."""
    logp = torch.tensor([[-1.0, -2.0, -1.0, -1.0]] * 2, dtype=torch.float64, requires_grad=True)
    gen, advantage = torch.tensor([[-4.0, -2.0]] * 2).double(), torch.tensor([1.0, -1.0]).double()
    unit, mask = torch.tensor([[0, 0, 1, 1]] * 2), torch.ones(2, 4, dtype=torch.bool)
    objective = replace(OBJECTIVES["TIS"], clip_joint=True)
    loss, _ = policy_loss(objective, logp, logp.detach(), gen, advantage, mask, unit_NT=unit)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient.tolist() == [pytest.approx([0, 0, -1 / 8, -1 / 8]), pytest.approx([2 / 8, 2 / 8, 1 / 8, 1 / 8])]


def test_a_success_is_lifted_by_its_least_likely_unit() -> None:
    """π_old/π_gen of three completions: 1/2, 4, 1/10; 1/2, 4, 1/11; the first again with Â < 0."""
    raw_NT = torch.tensor([[0.5, 4, 0.1], [0.5, 4, 1 / 11], [0.5, 4, 0.1]], dtype=torch.float64)
    advantage_N1 = torch.tensor([[0.3], [0.3], [-0.3]], dtype=torch.float64)
    for cap in (2.0, 1.0):
        weight_NT = lifted(raw_NT, advantage_N1, replace(F_TIS_LIFTED, importance_sampling_clip_max=cap))
        assert weight_NT.tolist() == [[1, 1, 1], [0.5, cap, 1 / 11], [0.5, cap, 0.1]]
    # By spans: two with π_old/π_gen of e^−0.3 and e^−2.4 < 1/10, of which the second's tokens are e^−1.2 each.
    old = torch.tensor([[-1.0, -2.0, -1.7, -1.7]], dtype=torch.float64)
    mask, unit = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]])
    for gen, weights in (([-2.7, -1.0], [math.exp(-0.3)] * 2 + [math.exp(-2.4)] * 2), ([-2.7, -1.2], [1.0] * 4)):
        logp, gen_NU = old.clone().requires_grad_(True), torch.tensor([gen], dtype=torch.float64)
        loss, _ = policy_loss(F_TIS_LIFTED, logp, old, gen_NU, torch.tensor([1.0]).double(), mask, unit_NT=unit)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert (-4 * gradient[0]).tolist() == pytest.approx(weights)


OWN = Objective(weight=truncated, importance_sampling_clip_max=5.0, kl_threshold=1.0, epsilon=0.1)
"""For a recipe: ``objective.name = "test_objectives.OWN"``."""
NOT_ONE = "text"


def test_options_replace_only_what_a_recipe_names() -> None:
    assert resolve(ObjectiveConfig(name="test_objectives.OWN")).importance_sampling_clip_max == 5.0
    changed = resolve(ObjectiveConfig(name="test_objectives.OWN", epsilon=0.3))
    assert (changed.epsilon, changed.kl_threshold, changed.importance_sampling_clip_max) == (0.3, 1.0, 5.0)
    assert resolve(ObjectiveConfig()) == F_TIS
    for name, key_word in [
        ("F-TSI", "F-TIS, F-TIS-lifted, GSPO, CISPO, DAPO, Dr-GRPO, imitation"),
        ("no_module.OWN", "'no_module'"),
        ("test_objectives.ONW", "'OWN'"),
        ("test_objectives.NOT_ONE", "is a str"),
    ]:
        with pytest.raises(RecipeError, match=re.escape(key_word)):
            resolve(ObjectiveConfig(name=name))


def test_a_part_of_another_shape_or_a_wrong_shape_is_named() -> None:
    parts: dict[str, Any] = {
        "ratio": lambda log: log.logp_NT.sum(-1).exp(),
        "weight": lambda raw, advantage, objective: raw[:, :1],
        "surrogate": lambda ratio, advantage, objective: advantage,
        "reduction": lambda surrogate, length, step: surrogate.sum(-1),
    }
    for part, wrong in parts.items():
        with pytest.raises(RecipeError, match=f"objective.{part} returned the shape"):
            value_and_gradient(replace(Objective(), **{part: wrong}), HAND)
    for wrong_N in (torch.zeros(3), torch.tensor([1.0, math.nan])):
        with pytest.raises(RecipeError, match="one finite number per rollout"):
            advantages(Objective(advantage=lambda _, wrong_N=wrong_N: wrong_N), rewards([1, 0], [0, 0], [0, 0]))  # type: ignore[misc]
    with pytest.raises(RecipeError, match=r"objective.ratio carries no gradient"):
        value_and_gradient(Objective(ratio=lambda log: log.logp_NT.detach().exp()), HAND)
    for shape in ((2, 4), (3, 3), (2,), ()):
        for field in ("logp", "old", "gen", "mask", "advantage"):
            if field == "advantage" and shape == (2,):
                continue
            bad = replace(HAND, **{field: torch.ones(shape, dtype=getattr(HAND, field).dtype)})
            with pytest.raises(ValueError, match=re.escape(str(list(shape)))):
                policy_loss(OBJECTIVES["F-TIS"], *bad.tensors())
    for mask in (torch.tensor([[True, True, True], [False, False, False]]), torch.zeros(2, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="at least one token"):
            policy_loss(OBJECTIVES["F-TIS"], *replace(HAND, mask=mask).tensors())


def grouped(reward: Sequence[float], group: Sequence[int], *settings: Any) -> list[float]:
    reward_N = torch.tensor(reward, dtype=torch.float64)
    found: list[float] = group_advantages(reward_N, torch.tensor(group), *settings).tolist()
    return found


def test_group_advantages_by_hand() -> None:
    # group 7: 1 0 0 1, mean 1/2, σ 1/2; group 2: 1 0 0, mean 1/3, σ √2/3
    reward, group = [1, 1, 0, 0, 0, 0, 1], [7, 2, 7, 2, 7, 2, 7]
    assert grouped(reward, group) == pytest.approx([1, math.sqrt(2), -1, -(0.5**0.5), -1, -(0.5**0.5), 1])
    unscaled = [0.5, 2 / 3, -0.5, -1 / 3, -0.5, -1 / 3, 0.5]
    assert grouped(reward, group, "none") == pytest.approx(unscaled)
    given_ = rewards(reward, group, [0] * 7)
    assert within_group(given_).tolist() == grouped(reward, group)
    assert within_group(replace(given_, scale="none")).tolist() == centred(given_).tolist() == pytest.approx(unscaled)
    with pytest.raises(ValueError, match=r"\b3\b"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


@settings(deadline=None)
@given(
    reward=st.lists(st.floats(-10, 10).map(lambda r: round(r, 2)), min_size=1, max_size=12),
    scale=st.sampled_from([1e-200, 1e-158, 1e-6, 1.0, 1e6, 1e160]),
    equal=st.floats(-1e6, 1e6),
)
def test_group_advantages_are_standardised_and_equal_rewards_give_exactly_none(
    reward: list[float], scale: float, equal: float
) -> None:
    """No epsilon in the denominator: rewards of any size have the same advantages."""
    found = grouped([r * scale for r in reward] + [equal] * 3, [5] * len(reward) + [-1] * 3)
    assert found[-3:] == [0.0] * 3
    if len(set(reward)) == 1:
        assert found[:-3] == [0.0] * len(reward)
    else:
        assert sum(found) == pytest.approx(0.0, abs=1e-6)
        assert sum(x * x for x in found) == pytest.approx(len(reward), rel=1e-6)
        assert found[:-3] == pytest.approx(grouped(reward, [0] * len(reward)), rel=1e-6, abs=1e-6)
        assert sorted(found[:-3]) == pytest.approx(
            [found[i] for i in sorted(range(len(reward)), key=reward.__getitem__)]
        )


def test_diagnostics_by_hand() -> None:
    """The first completion's weights are 1/2, 4, 1, the second's 3 and 1/12; the second is dropped."""
    for threshold, clipped in ((1.0, 0.0), (50.0, 0.5)):  # what is dropped is not clipped
        _, _, found = value_and_gradient(replace(F_TIS, kl_threshold=threshold), HAND)
        figures = by_source(found, torch.tensor([1, 0]), ("big", "small", "silent"))
        assert sorted(figures) == ["big", "small"]
        ratio, weight = "sampling/importance_sampling_ratio", "sampling/importance_sampling_weight"
        quantiles = {"min": 0.5, "p10": 0.5, "p50": 1}
        assert figures["small"] == pytest.approx(
            {
                **{f"{key}/{name}": value for key in (ratio, weight) for name, value in quantiles.items()},
                **{"kl/k1": -LN(2), "kl/k3": 2.5 - LN(2)},
                **{f"{ratio}/p90": 4, f"{ratio}/max": 4, f"{ratio}/mean": 5.5 / 3},
                **{f"{weight}/p90": 2, f"{weight}/max": 2, f"{weight}/mean": 3.5 / 3},
                **{"sampling/truncated_fraction": 1 / 3, "sampling/effective_sample_size": 5.5**2 / (3 * 17.25)},
                **{"clip_ratio/low_mean": 0, "clip_ratio/high_mean": 1 / 3},
            }
        )
        assert figures["big"]["kl/k1"] == pytest.approx(LN(4))
        assert figures["big"]["sampling/truncated_fraction"] == 0.5
        assert figures["big"]["clip_ratio/low_mean"] == clipped


def test_float64_rewards_go_with_a_float32_model() -> None:
    single = replace(HAND, **{field: getattr(HAND, field).float() for field in LOG_PROBS})
    for objective in OBJECTIVES.values():
        loss, gradient, _ = value_and_gradient(objective, single)
        assert gradient.dtype == torch.float32
        assert_same((loss.double(), gradient.double()), value_and_gradient(objective, HAND), 1e-5)

"""GSPO, CISPO, DAPO and Dr-GRPO by hand, and against TRL's losses of these names.

The latter where TRL is installed (``make test-trl``); elsewhere those tests are skipped.
"""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ftis.config import ObjectiveConfig
from ftis.learning import step_size
from ftis.objectives import OBJECTIVES, StepSize, policy_loss, resolve
from ftis.rollouts import Batch
from ftis.sampling import Decoding

# Â, log π_θ, log π_old. Ratios of tokens are between .6 and 9, those of sequences within and beyond GSPO's widths.
ROWS: list[tuple[float, list[float], list[float]]] = [
    (1.0, [-0.51, -2.3, -1.07], [-0.52, -2.29, -1.0704]),
    (0.8, [-0.9, -1.4], [-0.9, -1.402]),
    (-0.5, [-3.1, -0.2, -0.75, -1.6], [-3.15, -0.17, -0.75, -1.61]),
    (-1.2, [-0.35], [-0.346]),
    (0.9, [-1.0, -0.6], [-1.0004, -0.6003]),
    (1.2, [-0.2, -1.0, -3.0], [-0.5, -1.25, -4.9]),
    (-0.9, [-2.0, -1.3, -0.4, -0.2], [-1.5, -1.2, -0.1, -2.4]),
    (0.7, [-1.1, -0.9, -2.6], [-1.3, -1.12, -2.1]),
]
SENDER_OFF_BY = [0.4, -0.3, 0.0, 0.2, -0.1, -1.1, 0.3, -0.25]
"""log π_gen − log π_old of each row's tokens: weights below 1, between 1 and C, and above C = 2."""
LONGEST = 6
"""The most tokens that a completion may have."""

TRLS: dict[str, dict[str, Any]] = {
    "GSPO": {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
    "CISPO": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 5.0, "importance_sampling_level": "token"},
    "DAPO": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28, "importance_sampling_level": "token"},
    "Dr-GRPO": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"},
}
"""How TRL names and sets them."""


def padded(rows: list[list[float]], fill: float = math.nan) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], dtype=torch.float64)


ADVANTAGE_N = torch.tensor([row[0] for row in ROWS], dtype=torch.float64)
LOGP_NT, OLD_NT = padded([row[1] for row in ROWS]), padded([row[2] for row in ROWS])
REF_NT = LOGP_NT + torch.linspace(-0.9, 0.7, len(ROWS), dtype=torch.float64).unsqueeze(-1)
GEN_NT = OLD_NT + torch.tensor(SENDER_OFF_BY, dtype=torch.float64).unsqueeze(-1)
MASK_NT = ~OLD_NT.isnan()
STEP = StepSize(len(ROWS), int(MASK_NT.sum()), LONGEST)


def ours(
    name: str, foreign: bool, parts: tuple[slice, ...] = (slice(None),), beta: float = 0.0
) -> tuple[float, list[list[float]]]:
    """The loss, and its gradient by log π_θ of each row's tokens, over micro-batches."""
    logp_NT = LOGP_NT.clone().requires_grad_()
    gen_NT = GEN_NT if foreign else OLD_NT
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        tensors = (tensor[part] for tensor in (logp_NT, OLD_NT, gen_NT, ADVANTAGE_N, MASK_NT))
        objective, ref = replace(OBJECTIVES[name], beta=beta), REF_NT[part] if beta else None
        loss = loss + policy_loss(objective, *tensors, ref_logp_NT=ref, step=STEP)[0]
    (gradient_NT,) = torch.autograd.grad(loss, logp_NT)
    assert not gradient_NT[~MASK_NT].any()
    return loss.item(), [gradient_NT[i, MASK_NT[i]].tolist() for i in range(len(ROWS))]


def trls(name: str, foreign: bool, beta: float = 0.0) -> tuple[float, list[list[float]]]:
    """The same of TRL's own loss, a method of a trainer that has nothing but what the method reads.

    ``foreign``: with TRL's correction for another sampler, "token_truncate" at a cap of 2.
    """
    from trl import GRPOTrainer

    logp_NT = torch.where(MASK_NT, LOGP_NT, 0.0).requires_grad_()
    old_NT, gen_NT = torch.where(MASK_NT, OLD_NT, 0.0), torch.where(MASK_NT, GEN_NT, 0.0)
    trainer = SimpleNamespace(
        **TRLS[name],
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp_NT, torch.zeros_like(logp_NT), None),
        args=SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        use_vllm=foreign,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=beta,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    inputs = {
        **dict.fromkeys(ids, MASK_NT.long()),
        "advantages": ADVANTAGE_N,
        "old_per_token_logps": old_NT,
        "ref_per_token_logps": torch.where(MASK_NT, REF_NT, 0.0),
        "importance_sampling_ratio": (old_NT - gen_NT).exp().clamp(max=2.0),
        "num_items_in_batch": MASK_NT.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient_NT,) = torch.autograd.grad(loss, logp_NT)
    return loss.item(), [gradient_NT[i, MASK_NT[i]].tolist() for i in range(len(ROWS))]


def comparable(name: str, loss: float, gradient: list[list[float]]) -> float:
    """Our loss as TRL has it. That of CISPO is sg(ρ) Â log π_θ there, so the gradient times log π_θ."""
    if name != "CISPO":
        return loss
    assert loss == pytest.approx(sum(map(sum, gradient)), rel=1e-12), "ρ Â itself"
    return sum(g * x for row, (_, logp, _) in zip(gradient, ROWS, strict=True) for g, x in zip(row, logp, strict=True))


def flat(gradient: list[list[float]]) -> list[float]:
    return [g for row in gradient for g in row]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: make test-trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRLS)
def test_trl_says_so(name: str) -> None:
    for foreign in (True, False):
        (loss, gradient), (with_beta, its_gradient) = ours(name, foreign), ours(name, foreign, beta=0.3)
        (of_trl, expected), (trls_with_beta, of_beta) = trls(name, foreign), trls(name, foreign, beta=0.3)
        assert flat(gradient) == pytest.approx(flat(expected), rel=1e-12, abs=0.0)
        assert flat(its_gradient) == pytest.approx(flat(of_beta), rel=1e-12, abs=0.0)
        assert comparable(name, loss, gradient) == pytest.approx(of_trl, rel=1e-12)
        assert with_beta - loss == pytest.approx(trls_with_beta - of_trl, rel=1e-12)


@pytest.mark.parametrize("name", ["NoIS", *TRLS])
def test_beta_by_hand(name: str) -> None:
    """Of two rollouts with d = log 2 and, at a share of a half, −log 2: e^d − 1 − d is 1 − log 2 and log 2 − 1/2."""
    logp = torch.tensor([[-2.0, -3.0], [-1.0, math.nan]], dtype=torch.float64, requires_grad=True)
    ref = logp.detach() + torch.tensor([[math.log(2)] * 2, [-math.log(2)] * 2])
    mask, nothing = torch.tensor([[True, True], [True, False]]), torch.zeros(2, dtype=torch.float64)
    tensors = (logp, logp.detach(), logp.detach(), nothing, mask)
    share, step = torch.tensor([1.0, 0.5], dtype=torch.float64), StepSize(4, 8, 5)
    objective = replace(OBJECTIVES[name], beta=0.3)
    loss, diagnostics = policy_loss(objective, *tensors, share_N=share, ref_logp_NT=ref, step=step)
    (gradient,) = torch.autograd.grad(loss, logp)
    each = {"CISPO": [1 / 8] * 3, "DAPO": [1 / 8] * 3, "Dr-GRPO": [1 / 20] * 3}.get(name, [1 / 8, 1 / 8, 1 / 4])
    kl = [1 - math.log(2), 1 - math.log(2), math.log(2) - 0.5]
    assert diagnostics.ref_kl.tolist() == pytest.approx(kl)
    weights = [0.3 * s * e for s, e in zip([1, 1, 0.5], each, strict=True)]
    assert loss.item() == pytest.approx(sum(w * k for w, k in zip(weights, kl, strict=True)))
    assert gradient[mask].tolist() == pytest.approx([w * g for w, g in zip(weights, [-1, -1, 0.5], strict=True)])


@pytest.mark.parametrize("name", TRLS)
def test_microbatches_add_up(name: str) -> None:
    whole_loss, whole = ours(name, foreign=True, beta=0.3)
    for parts in ((slice(0, 3), slice(3, 8)), tuple(slice(i, i + 1) for i in range(8))):
        loss, gradient = ours(name, foreign=True, parts=parts, beta=0.3)
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        assert flat(gradient) == pytest.approx(flat(whole), rel=1e-12)


# Two completions as in test_objectives: Â = 1, −1; π_θ/π_old = 1.1, 1.5, 0.5 | 0.5, 1.5; weights 1/2, 4, 1 | 3, 1/12
# before the cap of 2. The geometric means of the ratios are 0.825^(1/3) and 0.75^(1/2), of which the second is clipped.
MEAN = 0.825 ** (1 / 3)
BY_HAND = {
    "GSPO": (-(3.5 / 3 * MEAN - 25 / 24 * 0.9997) / 2, [-3.5 / 18 * MEAN] * 3 + [0, 0]),
    "CISPO": (-(0.55 + 3 + 0.5 - 1 - 0.125) / 5, [-0.55 / 5, -3 / 5, -0.5 / 5, 1 / 5, 0.125 / 5]),
    "DAPO": (-(0.55 + 2.56 + 0.5 - 1.6 - 0.125) / 5, [-0.55 / 5, 0, -0.5 / 5, 0, 0.125 / 5]),
    "Dr-GRPO": (-(0.55 + 2.4 + 0.5 - 1.6 - 0.125) / 8, [-0.55 / 8, 0, -0.5 / 8, 0, 0.125 / 8]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_two_completions_by_hand(name: str) -> None:
    ratio = padded([[1.1, 1.5, 0.5], [0.5, 1.5]], 1.0)
    weight = padded([[1 / 2, 4, 1], [3, 1 / 12]], 1.0)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old = torch.full((2, 3), -3.0, dtype=torch.float64)
    logp = (old + ratio.log()).requires_grad_()
    step = StepSize(rollouts=2, tokens=5, max_completion_length=4)
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, _ = policy_loss(OBJECTIVES[name], logp, old, old - weight.log(), advantage, mask, step=step)
    (gradient,) = torch.autograd.grad(loss, logp)
    expected_loss, expected = BY_HAND[name]
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    assert gradient[mask].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_recipe_names_them_and_keeps_their_clips_and_a_step_counts_all_of_its_rollouts() -> None:
    widened = resolve(ObjectiveConfig(name="GSPO", epsilon=0.1))
    assert (widened.ratio, widened.epsilon, widened.epsilon_high) == (OBJECTIVES["GSPO"].ratio, 0.1, 4e-4)
    batch = SimpleNamespace(rollouts=[[1, 2, 3], [4], [5, 6]], own_N=np.array([True, True, False]))
    assert step_size(cast(Batch, batch), np.array([0, 2]), Decoding(9)) == StepSize(2, 5, 9)

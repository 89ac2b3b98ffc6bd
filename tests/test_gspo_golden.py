"""GSPO (arXiv 2507.18071), defined outside the package, against numbers of TRL.

The ratio is of the whole sequence: s_i = exp((1/|y_i|) Σ_t (log π_θ − log π_old)), clipped to [1 − 3e-4, 1 + 4e-4].
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ftis.config import ObjectiveConfig
from ftis.objectives import LogProbs, Objective, exp_ratio, policy_loss, resolve


def over_old_sequence(log: LogProbs) -> Tensor:
    """s_i at each token of rollout i: [N, T]."""
    return exp_ratio(log.sequence_mean(log.logp_NT - log.old_logp_NT))


GSPO = Objective(ratio=over_old_sequence, epsilon=3e-4, epsilon_high=4e-4)

# Loss and gradient by logp of TRL 1.16.0: GRPOTrainer.compute_loss in float64, with its log-probabilities replaced by
# those below and GRPOConfig(importance_sampling_level="sequence", loss_type="grpo", beta=0.0, epsilon=3e-4,
# epsilon_high=4e-4). Each row: Â, log π_θ, log π_old, gradient (the same at each token of the rollout).
ROWS: dict[str, tuple[float, list[float], list[float], float]] = {
    "inside, its tokens are not": (1.0, [-0.51, -2.3, -1.07], [-0.52, -2.29, -1.0704], -0.04762539724869606),
    "above, to be raised": (0.8, [-0.9, -1.4], [-0.9, -1.402], 0.0),
    "above, to be lowered": (-0.5, [-3.1, -0.2, -0.75, -1.6], [-3.15, -0.17, -0.75, -1.61], 0.01799157491865239),
    "below, to be lowered": (-1.2, [-0.35], [-0.346], 0.0),
    "below, to be raised": (0.6, [-2.2, -0.05, -4.0], [-2.2, -0.04, -3.9], -0.027542783264886146),
    "inside, between both widths": (0.9, [-1.0, -0.6], [-1.0004, -0.6003], -0.06430821822367369),
    "below, between both widths": (-0.7, [-0.8, -0.1], [-0.8, -0.0993], 0.0),
}
LOSS = -0.1251389640277702


def padded(rows: list[list[float]], fill: float) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], dtype=torch.float64)


def loss_and_gradient(objective: Objective, generator_off_by: float = 0.0) -> tuple[float, list[list[float]]]:
    """The loss of all rows, and its gradient by logp off the padding, which is NaN."""
    advantage_N = torch.tensor([row[0] for row in ROWS.values()], dtype=torch.float64)
    logp_NT = padded([row[1] for row in ROWS.values()], math.nan).requires_grad_()
    old_logp_NT = padded([row[2] for row in ROWS.values()], math.nan)
    gen_logp_NT = old_logp_NT - generator_off_by
    mask_NT = ~old_logp_NT.isnan()
    loss, _ = policy_loss(objective, logp_NT, old_logp_NT, gen_logp_NT, advantage_N, mask_NT)
    (gradient_NT,) = torch.autograd.grad(loss, logp_NT)
    assert not gradient_NT[~mask_NT].any()
    return loss.item(), [gradient_NT[i, mask_NT[i]].tolist() for i in range(len(ROWS))]


def test_loss_and_gradient_are_trls() -> None:
    loss, gradients = loss_and_gradient(GSPO)
    assert loss == pytest.approx(LOSS, rel=1e-14)
    for (name, (_, logp, _, expected)), gradient in zip(ROWS.items(), gradients, strict=True):
        assert gradient == pytest.approx([expected] * len(logp), rel=1e-13, abs=0.0), name


def test_one_ratio_per_token_gives_another_loss() -> None:
    per_token, _ = loss_and_gradient(Objective(epsilon=3e-4, epsilon_high=4e-4))
    assert abs(per_token - LOSS) > 1e-4


def test_the_generator_does_not_matter() -> None:
    assert loss_and_gradient(GSPO, generator_off_by=0.3) == loss_and_gradient(GSPO)


def test_a_recipe_names_it_and_its_clip_stays() -> None:
    assert resolve(ObjectiveConfig(name=f"{__name__}.GSPO")) == GSPO
    widened = resolve(ObjectiveConfig(name=f"{__name__}.GSPO", epsilon=0.1))
    assert (widened.ratio, widened.epsilon, widened.epsilon_high) == (over_old_sequence, 0.1, 4e-4)

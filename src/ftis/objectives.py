"""The objectives: GRPO on everybody's completions, and six ways to correct for who sampled them. Pure torch.

For rollout i with tokens t, learner π_θ (``logp``), the learner at the round's start π_old (``old_logp``) and
the policy that sampled it π_gen (``gen_logp``)::

    L = −(1/N) Σ_i (1/|a_i|) Σ_t w_it · min(ρ_it Â_i, clip(ρ_it, 1−ε, 1+ε_high) Â_i)

    correction   ρ_it              w_it (no gradient)
    none         π_θ / π_old       1                        NoIS: foreign samples taken for on-policy ones
    vis          π_θ / π_gen       1                        VIS
    tis          π_θ / π_old       min(π_old / π_gen, C)    TIS

The F- variants set Â_i := 0 unless Â_i > 0 or KL_i < g, where KL_i is estimated from π_gen's own samples. A
dropped rollout still counts in N and in its group's mean and standard deviation.

Source: F-TIS, arXiv 2605.22537; docs/method.md gives each choice where the paper is silent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``: e^20 ≈ 5e8, far beyond any ratio that still carries meaning,
and small enough that products and sums of it stay finite in float32."""

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class Objective:
    """One way of learning from a batch; a value, not a class to extend.

    Attributes:
        correction: what is done about π_gen ≠ π_old, see the module's table.
        filtered: whether rollouts with Â ≤ 0 and KL ≥ ``kl_threshold`` are dropped.
        importance_sampling_clip_max: C, the cap of TIS's weight.
        kl_threshold: g, in nats (per sequence for "sum", per token for "mean").
        kl_estimator: "k1" is d, "k3" is exp(−d) − 1 + d, with d = log π_gen − log π_old.
        kl_reduction: over the tokens of a sequence.
        epsilon, epsilon_high: the clip's lower and upper width; ``None`` makes them equal.
    """

    correction: Literal["none", "vis", "tis"]
    filtered: bool
    importance_sampling_clip_max: float = 2.0
    kl_threshold: float = 50.0
    kl_estimator: Literal["k1", "k3"] = "k1"
    kl_reduction: Literal["sum", "mean"] = "sum"
    epsilon: float = 0.2
    epsilon_high: float | None = None


OBJECTIVES: dict[str, Objective] = {
    "NoIS": Objective(correction="none", filtered=False),
    "VIS": Objective(correction="vis", filtered=False),
    "TIS": Objective(correction="tis", filtered=False),
    "F-NoIS": Objective(correction="none", filtered=True),
    "F-VIS": Objective(correction="vis", filtered=True),
    "F-TIS": Objective(correction="tis", filtered=True),
}


def group_advantages(
    reward_N: Tensor,
    group_N: Tensor,
    scale_rewards: Literal["group", "none"] = "group",
    std: Literal["population", "sample"] = "population",
) -> Tensor:
    """Group-relative advantages Â_i = (r_i − μ) / σ over the rollouts of i's group.

    With ``scale_rewards="none"`` Â_i = r_i − μ. σ is the population standard deviation unless ``std="sample"``.
    A group whose rewards are all equal gives exactly 0 (there is nothing to prefer), as does a group of one.

    Args:
        reward_N: float [N].
        group_N: int [N]; equal numbers are one group.

    Returns:
        float [N], dtype of ``reward_N``.
    """
    if reward_N.ndim != 1 or reward_N.shape != group_N.shape:
        raise ValueError(f"reward_N and group_N must both be [N], got {_shape(reward_N)} and {_shape(group_N)}")
    if scale_rewards not in ("group", "none") or std not in ("population", "sample"):
        raise ValueError(f'scale_rewards={scale_rewards!r} ("group"|"none"), std={std!r} ("population"|"sample")')
    advantage_N = torch.zeros_like(reward_N)
    for group in torch.unique(group_N):
        members = group_N == group
        rewards = reward_N[members]
        if bool((rewards == rewards[0]).all()):
            continue
        centred = rewards - rewards.mean()
        if scale_rewards == "group":
            centred = centred / rewards.std(correction=0 if std == "population" else 1)
        advantage_N[members] = centred
    return advantage_N


def sequence_kl(
    old_logp_NT: Tensor,
    gen_logp_NT: Tensor,
    mask_NT: Tensor,
    estimator: Literal["k1", "k3"] = "k1",
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Estimate KL(π_gen ‖ π_old) per sequence from π_gen's own tokens, with d = log π_gen − log π_old.

    k1 is d: unbiased, may be negative. k3 is exp(−d) − 1 + d: unbiased too, never negative (Schulman 2020,
    "Approximating KL divergence").

    Returns:
        [N], nats per sequence ("sum") or per token ("mean").
    """
    for name, value in (("gen_logp_NT", gen_logp_NT), ("mask_NT", mask_NT)):
        if value.ndim != 2 or value.shape != old_logp_NT.shape:
            raise ValueError(f"{name} must have old_logp_NT's shape {_shape(old_logp_NT)}, got {_shape(value)}")
    d_NT = _difference(gen_logp_NT, old_logp_NT, mask_NT)
    per_token_NT = d_NT if estimator == "k1" else torch.expm1((-d_NT).clamp(max=MAX_LOG_RATIO)) + d_NT
    total_N = per_token_NT.sum(-1)
    return total_N if reduction == "sum" else total_N / mask_NT.sum(-1)


def kept(objective: Objective, kl_N: Tensor, advantage_N: Tensor) -> Tensor:
    """Which rollouts the filter keeps: bool [N], Â > 0 or KL < g; all of them where there is no filter."""
    if not objective.filtered:
        return torch.ones_like(advantage_N, dtype=torch.bool)
    return (advantage_N > 0) | (kl_N < objective.kl_threshold)


@dataclass(frozen=True)
class PreservedOrder:
    """Of ``pairs`` rollouts that the advantages told apart, how many keep their signs, and how many their order."""

    pairs: int
    sign: int
    rank: int


def order_preserved(advantage_N: Tensor, keep_N: Tensor, group_N: Tensor) -> PreservedOrder:
    """What the filter leaves of the order within groups, with Â' = Â where kept and 0 where dropped.

    Over the pairs i < j of one group with Â_i ≠ Â_j::

        sign: sgn Â'_i = sgn Â_i  and  sgn Â'_j = sgn Â_j
        rank: sgn(Â'_i − Â'_j) = sgn(Â_i − Â_j)

    With two levels of reward the filter can cost signs but no ranks, since it drops only Â ≤ 0.

    Args:
        advantage_N: Â before the filter, float [N].
        keep_N: the filter's verdict, bool [N].
        group_N: int [N].
    """
    for name, value in (("keep_N", keep_N), ("group_N", group_N)):
        if advantage_N.ndim != 1 or value.shape != advantage_N.shape:
            raise ValueError(f"{name} must be advantage_N's [N], got {_shape(value)} and {_shape(advantage_N)}")
    used_N = torch.where(keep_N, advantage_N, torch.zeros_like(advantage_N))
    same_sign_N = used_N.sign() == advantage_N.sign()
    pairs = sign = rank = 0
    for group in torch.unique(group_N):
        rows = torch.nonzero(group_N == group).squeeze(-1)
        i, j = torch.combinations(rows, 2).unbind(-1)
        before, after = (advantage_N[i] - advantage_N[j]).sign(), (used_N[i] - used_N[j]).sign()
        told_apart = before != 0
        pairs += int(told_apart.sum())
        sign += int((told_apart & same_sign_N[i] & same_sign_N[j]).sum())
        rank += int((told_apart & (before == after)).sum())
    return PreservedOrder(pairs, sign, rank)


def policy_loss(
    objective: Objective,
    logp_NT: Tensor,
    old_logp_NT: Tensor,
    gen_logp_NT: Tensor,
    advantage_N: Tensor,
    mask_NT: Tensor,
    group_N: Tensor,
    *,
    divisor: int | None = None,
) -> tuple[Tensor, Diagnostics]:
    """The loss of the module's docstring over N rollouts, with its diagnostics.

    The gradient flows through ``logp_NT`` only, inside ρ; weights, filter and advantages are constants.
    Masked positions may hold anything, NaN included.

    Args:
        logp_NT: log π_θ [N, T]; carries the gradient.
        old_logp_NT: log π_old [N, T], π_θ at the round's start.
        gen_logp_NT: log π_gen [N, T], as received.
        advantage_N: Â [N].
        mask_NT: bool [N, T], true on completion tokens; each row has at least one.
        group_N: int [N]; which prompt's group a rollout belongs to (diagnostics only: Â is given).
        divisor: number of sequences in the optimiser's step, where these N are only a micro-batch of it;
            default N. The sum of micro-batch gradients is then the unsplit batch's gradient.

    Returns:
        scalar loss, :class:`Diagnostics`.
    """
    n, t = _check_shapes(logp_NT, old_logp_NT, gen_logp_NT, advantage_N, mask_NT, group_N)
    mask_NT = mask_NT.bool()
    length_N = mask_NT.sum(-1)
    if n and (t == 0 or bool((length_N == 0).any())):
        raise ValueError("every rollout needs at least one token: a row of mask_NT is all false")

    kl_N = sequence_kl(old_logp_NT, gen_logp_NT, mask_NT, objective.kl_estimator, objective.kl_reduction)
    keep_N = kept(objective, kl_N, advantage_N)
    used_advantage_NT = torch.where(keep_N, advantage_N, torch.zeros_like(advantage_N)).unsqueeze(-1)

    behaviour_NT = gen_logp_NT if objective.correction == "vis" else old_logp_NT
    ratio_NT = _log_ratio(logp_NT, behaviour_NT, mask_NT).exp()
    raw_weight_NT = _log_ratio(old_logp_NT, gen_logp_NT, mask_NT).exp().detach()
    weight_NT = raw_weight_NT.clamp(max=objective.importance_sampling_clip_max)
    applied_NT = weight_NT if objective.correction == "tis" else torch.ones_like(weight_NT)

    epsilon_high = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    low, high = 1 - objective.epsilon, 1 + epsilon_high
    clipped_NT = ratio_NT.clamp(low, high)
    surrogate_NT = applied_NT * torch.minimum(ratio_NT * used_advantage_NT, clipped_NT * used_advantage_NT)
    surrogate_N = torch.where(mask_NT, surrogate_NT, torch.zeros_like(surrogate_NT)).sum(-1) / length_N
    loss = -surrogate_N.sum() / (n if divisor is None else divisor)

    with torch.no_grad():
        diagnostics = Diagnostics(
            advantage_N=advantage_N.detach(),
            keep_N=keep_N,
            group_N=group_N,
            length_N=length_N,
            k1_N=sequence_kl(old_logp_NT, gen_logp_NT, mask_NT, "k1", objective.kl_reduction).detach(),
            k3_N=sequence_kl(old_logp_NT, gen_logp_NT, mask_NT, "k3", objective.kl_reduction).detach(),
            raw_weight=raw_weight_NT[mask_NT],
            weight=weight_NT[mask_NT],
            clipped_low=((ratio_NT < low) & (used_advantage_NT < 0))[mask_NT],
            clipped_high=((ratio_NT > high) & (used_advantage_NT > 0))[mask_NT],
        )
    return loss, diagnostics


@dataclass(frozen=True)
class Diagnostics:
    """What a loss did, per rollout [N] and per completion token (flat, in row order), detached.

    Attributes:
        advantage_N: Â as given, before the filter.
        keep_N: the filter's verdict.
        group_N, length_N: group and number of tokens.
        k1_N, k3_N: both KL estimates, in the objective's reduction.
        raw_weight: π_old/π_gen per token, whether or not the objective applies it.
        weight: the same truncated at C.
        clipped_low, clipped_high: where the clip stops the gradient (ratio below with Â < 0, above with Â > 0).
    """

    advantage_N: Tensor
    keep_N: Tensor
    group_N: Tensor
    length_N: Tensor
    k1_N: Tensor
    k3_N: Tensor
    raw_weight: Tensor
    weight: Tensor
    clipped_low: Tensor
    clipped_high: Tensor

    @staticmethod
    def concat(parts: Sequence[Diagnostics]) -> Diagnostics:
        """The diagnostics of several micro-batches as those of one batch."""
        names = Diagnostics.__dataclass_fields__
        return Diagnostics(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def by_source(self, source_N: Tensor, sources: Sequence[str]) -> dict[str, dict[str, float]]:
        """Summaries per source peer; ``source_N`` [N] indexes ``sources``. A peer without rollouts is left out.

        Counts are over rollouts; quantiles, means and fractions are over tokens, except the KLs, which are over
        rollouts. The effective sample size is (Σw)² / (n Σw²) of the untruncated weights, in (0, 1].
        """
        source_N = source_N.to(self.length_N.device)
        token_source = source_N.repeat_interleave(self.length_N)
        summaries: dict[str, dict[str, float]] = {}
        for index, name in enumerate(sources):
            rows, tokens = source_N == index, token_source == index
            if not bool(rows.any()):
                continue
            advantage, keep = self.advantage_N[rows], self.keep_N[rows]
            raw, weight = self.raw_weight[tokens].double(), self.weight[tokens].double()
            zero = advantage == 0
            summaries[name] = {
                "rollouts": float(rows.sum()),
                "kept": float((keep & ~zero).sum()),
                "dropped": float((~keep & ~zero).sum()),
                "zero_advantage": float(zero.sum()),
                "kl/k1": float(self.k1_N[rows].double().mean()),
                "kl/k3": float(self.k3_N[rows].double().mean()),
                **_distribution("sampling/importance_sampling_ratio", raw),
                **_distribution("sampling/importance_sampling_weight", weight),
                "sampling/truncated_fraction": float((raw > weight).double().mean()),
                "sampling/effective_sample_size": float(raw.sum() ** 2 / (len(raw) * (raw**2).sum())),
                "clip_ratio/low_mean": float(self.clipped_low[tokens].double().mean()),
                "clip_ratio/high_mean": float(self.clipped_high[tokens].double().mean()),
            }
        return summaries


def _distribution(name: str, values: Tensor) -> dict[str, float]:
    ordered = values.sort().values
    summary = {
        f"{name}/min": float(ordered[0]),
        f"{name}/max": float(ordered[-1]),
        f"{name}/mean": float(values.mean()),
    }
    for label, quantile in QUANTILES.items():  # nearest rank: torch.quantile refuses more than 2^24 values
        summary[f"{name}/{label}"] = float(ordered[math.ceil(quantile * len(ordered)) - 1])
    return summary


def _log_ratio(numerator_NT: Tensor, denominator_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """log(numerator/denominator), clamped for ``exp``, and 0 off the mask."""
    return _difference(numerator_NT, denominator_NT, mask_NT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _difference(minuend_NT: Tensor, subtrahend_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """minuend − subtrahend on the mask, 0 off it.

    Both operands are replaced off the mask *before* the subtraction, so that a NaN or infinity there reaches
    neither the value nor the gradient.
    """
    zero = torch.zeros((), dtype=minuend_NT.dtype, device=minuend_NT.device)
    mask_NT = mask_NT.bool()
    return torch.where(mask_NT, minuend_NT, zero) - torch.where(mask_NT, subtrahend_NT, zero)


def _check_shapes(
    logp_NT: Tensor, old_logp_NT: Tensor, gen_logp_NT: Tensor, advantage_N: Tensor, mask_NT: Tensor, group_N: Tensor
) -> tuple[int, int]:
    if logp_NT.ndim != 2:
        raise ValueError(f"logp_NT must be [N, T], got {_shape(logp_NT)}")
    for name, value in (("old_logp_NT", old_logp_NT), ("gen_logp_NT", gen_logp_NT), ("mask_NT", mask_NT)):
        if value.shape != logp_NT.shape:
            raise ValueError(f"{name} must have logp_NT's shape {_shape(logp_NT)}, got {_shape(value)}")
    for name, value in (("advantage_N", advantage_N), ("group_N", group_N)):
        if value.shape != logp_NT.shape[:1]:
            raise ValueError(f"{name} must be [{logp_NT.shape[0]}], got {_shape(value)}")
    n, t = logp_NT.shape
    return n, t


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

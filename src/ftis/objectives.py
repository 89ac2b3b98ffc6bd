"""The objectives: GRPO on everybody's completions, and how each corrects for their samplers. Pure torch.

For rollout i with tokens t, learner π_θ (``logp``), the learner at the round's start π_old (``old_logp``) and the
policy that sampled it π_gen (``gen_logp``)::

    L = −(1/N) Σ_i (1/|a_i|) Σ_t w_it · surrogate(ρ_it, s_i Â_i)

with the clipped surrogate min(ρÂ, clip(ρ, 1−ε, 1+ε_high) Â) and s_i the share in [0, 1] that selections leave of i::

    objective      ρ_it          w_it (no gradient)       besides
    NoIS, F-NoIS   π_θ / π_old   1                        foreign samples are taken for on-policy ones
    VIS, F-VIS     π_θ / π_gen   1
    TIS, F-TIS     π_θ / π_old   min(π_old / π_gen, C)
    F-TIS-lifted   π_θ / π_old   1 for a likely success, else TIS's
    GSPO           of sequences  TIS's                    ρ_i = (Π_t π_θ/π_old)^(1/|a_i|)
    CISPO          π_θ / π_old   TIS's                    the mean is over tokens; ρ is capped and never clipped
    DAPO           π_θ / π_old   TIS's                    the mean is over tokens; ε_high > ε
    Dr-GRPO        π_θ / π_old   TIS's                    Σ_t over a constant instead of |a_i|; Â = r − μ
    imitation      π_θ / π_old   1                        supervised learning of others' successes: their gradient is
                                                          that of log π_θ

The filter of the F- objectives is a selection (:mod:`ftis.selection`): s_i = 1 if Â_i > 0 or KL_i < g, else 0. A
dropped rollout still counts in N and in its group's mean and standard deviation.

π_gen is known per unit (:mod:`ftis.rollouts`), and every token has the weight of its unit. Each part of an objective is
a function, so a new objective is a value in a file outside the package; see docs/extending.md.

Source: F-TIS, arXiv 2605.22537. docs/method.md gives the choices where the paper is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ftis.advantages import Rewards, centred, imitating, within_group
from ftis.config import ObjectiveConfig, RecipeError
from ftis.seams import look_up

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before ``exp``. Products and sums of e^20 ≈ 5e8 stay finite in float32."""

LEAST_LIFTED = 0.1
"""δ of F-TIS-lifted: the least π_old/π_gen of a unit in a rollout that has the weight 1."""


@dataclass(frozen=True)
class LogProbs:
    """The log-probabilities that an objective works with. All are 0 off the mask.

    Attributes:
        logp_NT: log π_θ; carries the gradient.
        old_logp_NT: log π_old.
        gen_logp_NU: log π_gen of each unit; [N, T] if each token is a unit of its own.
        mask_NT: bool, true on completion tokens.
        own_N: bool, the rollouts that the learner sampled itself.
        unit_NT: int64, the unit of each token; None if each token is a unit of its own.
    """

    logp_NT: Tensor
    old_logp_NT: Tensor
    gen_logp_NU: Tensor
    mask_NT: Tensor
    own_N: Tensor
    unit_NT: Tensor | None = None

    @property
    def length_N(self) -> Tensor:
        """Completion tokens of each rollout: int64 [N]."""
        return self.mask_NT.sum(-1)

    def units(self, x_NT: Tensor) -> Tensor:
        """Sums over the tokens of each unit: [N, T] → [N, U]."""
        if self.unit_NT is None:
            return x_NT
        zero = torch.zeros((), dtype=x_NT.dtype, device=x_NT.device)
        out_NU = torch.zeros(self.gen_logp_NU.shape, dtype=x_NT.dtype, device=x_NT.device)
        return out_NU.scatter_add(1, self.unit_NT, torch.where(self.mask_NT, x_NT, zero))

    def tokens(self, x_NU: Tensor) -> Tensor:
        """The value of each token's unit: [N, U] → [N, T]."""
        return x_NU if self.unit_NT is None else x_NU.gather(1, self.unit_NT)

    def sequence_mean(self, x_NT: Tensor) -> Tensor:
        """The mean over a rollout's tokens, at each of them: [N, T] → [N, T]."""
        return (x_NT.sum(-1) / self.length_N).unsqueeze(-1).expand_as(x_NT)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log-ratio clamped to ± :data:`MAX_LOG_RATIO`)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def over_old(log: LogProbs) -> Tensor:
    """ρ = π_θ / π_old per token: [N, T]."""
    return exp_ratio(log.logp_NT - log.old_logp_NT)


def geometric_over_old(log: LogProbs) -> Tensor:
    """ρ = (Π_t π_θ/π_old)^(1/|a|), the geometric mean over a rollout, at each of its tokens: [N, T]."""
    return exp_ratio(log.sequence_mean(log.logp_NT - log.old_logp_NT))


def over_generator(log: LogProbs) -> Tensor:
    """ρ = π_θ / π_gen per unit, at each of its tokens, which share the gradient ∇ρ: [N, T]."""
    logp_NT, fixed_NT = log.logp_NT, log.logp_NT.detach()
    if log.unit_NT is not None:
        logp_NT = fixed_NT + (logp_NT - fixed_NT) / log.tokens(log.units(torch.ones_like(fixed_NT))).clamp(min=1)
    return log.tokens(exp_ratio(log.units(logp_NT) - log.gen_logp_NU))


def score(log: LogProbs) -> Tensor:
    """1 at each token, with the gradient ∇ log π_θ: [N, T]."""
    return (log.logp_NT - log.logp_NT.detach()).exp()


def score_of_foreign(log: LogProbs) -> Tensor:
    """ρ = π_θ / π_old for own tokens, :func:`score` for others': [N, T]."""
    return torch.where(log.own_N.unsqueeze(-1), over_old(log), score(log))


def raw_weight(log: LogProbs) -> Tensor:
    """π_old / π_gen per unit, at each of its tokens, without gradient: [N, T]."""
    return log.tokens(exp_ratio(log.units(log.old_logp_NT) - log.gen_logp_NU)).detach()


def unweighted(raw_weight_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """w = 1."""
    return torch.ones_like(raw_weight_NT)


def truncated(raw_weight_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """w = min(π_old / π_gen, C): truncated importance sampling (Yao et al. 2025)."""
    return raw_weight_NT.clamp(max=objective.importance_sampling_clip_max)


def lifted(raw_weight_NT: Tensor, advantage_N1: Tensor, objective: Objective, least: float = LEAST_LIFTED) -> Tensor:
    """w = 1 for all of a rollout if Â > 0 and π_old/π_gen ≥ δ = ``least`` in each of its units, else TIS's."""
    likely_N1 = raw_weight_NT.amin(-1, keepdim=True) >= least
    truncated_NT = truncated(raw_weight_NT, advantage_N1, objective)
    return torch.where((advantage_N1 > 0) & likely_N1, torch.ones_like(truncated_NT), truncated_NT)


def clipped(ratio_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """min(ρÂ, clip(ρ, 1−ε, 1+ε_high) Â): PPO's surrogate (Schulman et al. 2017)."""
    clipped_NT = ratio_NT.clamp(*objective.clip_range)
    return torch.minimum(ratio_NT * advantage_N1, clipped_NT * advantage_N1)


def capped(ratio_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """min(ρ, 1+ε_high) Â with the gradient min(ρ, 1+ε_high) Â ∇log π_θ: a token beyond the cap still has one."""
    capped_NT = ratio_NT.detach().clamp(max=objective.clip_range[1])
    return capped_NT * advantage_N1 * (ratio_NT / ratio_NT.detach())


@dataclass(frozen=True)
class StepSize:
    """The divisors of a reduction. All micro-batches of an optimiser step share them.

    Attributes:
        rollouts: N, all rollouts of the step, even if they carry no gradient.
        tokens: Σ|a_i| over these.
        max_completion_length: the most tokens that a completion may have.
    """

    rollouts: int
    tokens: int
    max_completion_length: int


def sequence_mean(surrogate_NT: Tensor, length_N: Tensor, step: StepSize) -> Tensor:
    """(1/N) Σ_i (1/|a_i|) Σ_t: every rollout counts the same, as in GRPO."""
    return (surrogate_NT.sum(-1) / length_N).sum() / step.rollouts


def token_mean(surrogate_NT: Tensor, length_N: Tensor, step: StepSize) -> Tensor:
    """Σ_i Σ_t / Σ_i |a_i|: every token of the optimiser step counts the same."""
    return surrogate_NT.sum() / step.tokens


def over_longest(surrogate_NT: Tensor, length_N: Tensor, step: StepSize) -> Tensor:
    """Σ_i Σ_t / (N · the most tokens that a completion may have): every token counts the same in all steps."""
    return surrogate_NT.sum() / (step.rollouts * step.max_completion_length)


@dataclass(frozen=True)
class Objective:
    """One way of learning from a batch: a value whose parts are functions.

    Attributes:
        advantage: (rewards of the round) → Â [N].
        ratio: (log-probs) → ρ [N, T], which carries the gradient.
        weight: (π_old/π_gen [N, T], Â [N, 1], objective) → w [N, T], without gradient.
        surrogate: (ρ [N, T], Â [N, 1], objective) → [N, T].
        reduction: (w · surrogate [N, T], 0 off the mask; |a| [N]; the step's size) → −L, a scalar.
        filtered: whether the KL filter drops rollouts with Â ≤ 0 and KL ≥ ``kl_threshold``.
        selections: further selections that belong to it, as functions or classes; see docs/extending.md.
        importance_sampling_clip_max: C, the cap of a truncated weight.
        kl_threshold: g, in nats (per sequence for "sum", per unit for "mean").
        kl_estimator: "k1" is d, "k3" is exp(−d) − 1 + d, with d = log π_gen − log π_old of a unit.
        kl_reduction: over the units of a sequence.
        epsilon, epsilon_high: the clip's lower and upper width; ``None`` makes them equal.
        beta: β ≥ 0, of the KL to the reference model; see :func:`policy_loss`.
        clip_joint: whether a token with Â > 0 loses its gradient if its unit has π_θ / π_gen > 1 + ε_high, as in VIS.
            Then a sender cannot raise tokens by reporting too low a probability.
    """

    advantage: Callable[[Rewards], Tensor] = within_group
    ratio: Callable[[LogProbs], Tensor] = over_old
    weight: Callable[[Tensor, Tensor, Objective], Tensor] = unweighted
    surrogate: Callable[[Tensor, Tensor, Objective], Tensor] = clipped
    reduction: Callable[[Tensor, Tensor, StepSize], Tensor] = sequence_mean
    filtered: bool = False
    selections: tuple[Callable[..., Any], ...] = ()
    importance_sampling_clip_max: float = 2.0
    kl_threshold: float = 50.0
    kl_estimator: Literal["k1", "k3"] = "k1"
    kl_reduction: Literal["sum", "mean"] = "sum"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    clip_joint: bool = False
    beta: float = 0.0

    @property
    def clip_range(self) -> tuple[float, float]:
        """1 − ε and 1 + ε_high."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


F_TIS = Objective(weight=truncated, filtered=True)
"""F-TIS (arXiv 2605.22537): truncated weights, and the KL filter."""

F_TIS_LIFTED = replace(F_TIS, weight=lifted)
"""F-TIS with weight 1 for likely successes, in which each unit has π_old/π_gen ≥ δ. A text that a sender always writes,
and the learner hardly ever, thus keeps F-TIS's weight, almost 0. No unit has more than 1/δ times F-TIS's weight."""

GSPO = Objective(ratio=geometric_over_old, weight=truncated, epsilon=3e-4, epsilon_high=4e-4)
"""Group Sequence Policy Optimization (Zheng et al., arXiv 2507.18071), at the source's clip widths.

TRL: ``importance_sampling_level="sequence"``, ``loss_type="grpo"``."""

CISPO = Objective(weight=truncated, surrogate=capped, reduction=token_mean, epsilon=1.0, epsilon_high=4.0)
"""Clipped importance-sampling policy optimisation (MiniMax-M1, arXiv 2506.13585), without a lower bound; the upper one,
5, is ScaleRL's (arXiv 2510.13786).

TRL: ``loss_type="cispo"``, ``epsilon_high=5.0``, which is 1 + ε_high here. Its loss is that of sg(ρ) Â log π_θ: another
value with the same gradient."""

DAPO = Objective(weight=truncated, reduction=token_mean, epsilon_high=0.28)
"""Clip-higher and the token mean of DAPO (Yu et al., arXiv 2503.14476). Without its dynamic sampling.

TRL: ``loss_type="dapo"``, ``epsilon_high=0.28``."""

DR_GRPO = Objective(advantage=centred, weight=truncated, reduction=over_longest)
"""Dr. GRPO (Liu et al., arXiv 2503.20783): neither length nor standard deviation in the gradient.

TRL: ``loss_type="dr_grpo"``, ``scale_rewards="none"``."""

IMITATION = Objective(advantage=imitating, ratio=score_of_foreign)
"""GRPO on own rollouts, and supervised learning of others' successes. It reads no log-probability of others (unless
``clip_joint``), so it has no defence against a dishonest sender. A prompt's own rollouts are a group, so a peer samples
several."""

OBJECTIVES: dict[str, Objective] = {
    "NoIS": Objective(),
    "VIS": Objective(ratio=over_generator),
    "TIS": Objective(weight=truncated),
    "F-NoIS": Objective(filtered=True),
    "F-VIS": Objective(ratio=over_generator, filtered=True),
    "F-TIS": F_TIS,
    "F-TIS-lifted": F_TIS_LIFTED,
    "GSPO": GSPO,
    "CISPO": CISPO,
    "DAPO": DAPO,
    "Dr-GRPO": DR_GRPO,
    "imitation": IMITATION,
}
"""The paper's six and others, by their names in a recipe. GSPO, CISPO, DAPO and Dr-GRPO have the weights of TIS. Own
rollouts then have a weight of about 1, since their π_gen is the learner's π_old up to its sampler's rounding."""


def resolve(config: ObjectiveConfig) -> Objective:
    """The objective that a recipe names; the recipe's options replace the objective's own.

    Raises:
        RecipeError: the name is neither in :data:`OBJECTIVES` nor the dotted path of an :class:`Objective`.
    """
    name = config.name
    if name in OBJECTIVES:
        objective = OBJECTIVES[name]
    elif "." in name:
        objective = look_up(name, "objective.name")
        if not isinstance(objective, Objective):
            raise RecipeError(
                f"objective.name = {name!r}: is a {type(objective).__name__}; name a value of ftis.objectives.Objective"
            )
    else:
        raise RecipeError(
            f"objective.name = {name!r}: there is no such objective; take {', '.join(OBJECTIVES)}, or give "
            f"the dotted path of your own; a peer that trains alone has plain GRPO by any of the first six"
        )
    given = config.model_dump(exclude={"name"}, exclude_none=True)
    return replace(objective, **given)


def advantages(objective: Objective, rewards: Rewards) -> Tensor:
    """Â [N] by the objective, checked.

    Raises:
        RecipeError: the objective returned something else than one finite number per rollout.
    """
    advantage_N = objective.advantage(rewards)
    if advantage_N.shape != rewards.reward_N.shape or not bool(advantage_N.isfinite().all()):
        raise RecipeError(
            f"objective.advantage returned the shape {_shape(advantage_N)} for {len(rewards.reward_N)} rollouts, or a "
            f"value that is not finite: return one finite number per rollout"
        )
    return advantage_N


def sequence_kl(
    log: LogProbs, estimator: Literal["k1", "k3"] = "k1", reduction: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """Estimate KL(π_gen ‖ π_old) per sequence from π_gen's own tokens, with d = log π_gen − log π_old of each unit.

    k1 is d: unbiased, may be negative. k3 is exp(−d) − 1 + d: unbiased too, never negative (Schulman 2020,
    "Approximating KL divergence").

    Returns:
        [N], nats per sequence ("sum") or per unit ("mean").
    """
    d_NU = log.gen_logp_NU - log.units(log.old_logp_NT)
    per_unit_NU = d_NU if estimator == "k1" else _k3(-d_NU)
    total_N = per_unit_NU.sum(-1)
    if reduction == "sum":
        return total_N
    if log.unit_NT is None:
        return total_N / log.length_N
    tokens_NU = log.units(log.mask_NT.long())
    return total_N / (tokens_NU > 0).sum(-1)


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) − 1 − x, with x clamped from above."""
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def policy_loss(
    objective: Objective,
    logp_NT: Tensor,
    old_logp_NT: Tensor,
    gen_logp_NU: Tensor,
    advantage_N: Tensor,
    mask_NT: Tensor,
    *,
    share_N: Tensor | None = None,
    own_N: Tensor | None = None,
    unit_NT: Tensor | None = None,
    ref_logp_NT: Tensor | None = None,
    step: StepSize | None = None,
) -> tuple[Tensor, Diagnostics]:
    """The loss of the module's docstring over N rollouts, with its diagnostics.

    The gradient flows through ``logp_NT`` only, inside ρ. Weights, shares and advantages are constants.
    Masked positions may hold anything, NaN included.

    Args:
        logp_NT: log π_θ [N, T]; carries the gradient.
        old_logp_NT: log π_old [N, T], π_θ at the round's start.
        gen_logp_NU: log π_gen, as received: [N, U], or [N, T] if each token is a unit.
        advantage_N: Â [N].
        mask_NT: bool [N, T], true on completion tokens; each row has at least one.
        share_N: the part of each rollout that selections leave, in [0, 1]; default 1.
        own_N: bool [N], the rollouts that the learner sampled itself; default none. The paper's six do not use it.
        unit_NT: int64 [N, T], the unit of each token; off the mask any of 0 … U − 1. Default: each token is a unit.
        ref_logp_NT: log π_ref [N, T], of the reference model. It adds s_i β (exp(d) − 1 − d) to each token's loss, as
            in GRPO, with d = log π_ref − log π_θ.
        step: the size of the optimiser step, if these N rollouts are only a micro-batch; by default N, their tokens and
            the longest one's tokens. Micro-batch gradients then add up to the gradient of the whole.

    Returns:
        scalar loss, :class:`Diagnostics`.
    """
    if logp_NT.ndim != 2:
        raise ValueError(f"logp_NT must be [N, T], got {_shape(logp_NT)}")
    n, t = logp_NT.shape
    _check("old_logp_NT", old_logp_NT, (n, t))
    _check("mask_NT", mask_NT, (n, t))
    _check("advantage_N", advantage_N, (n,))
    _check("gen_logp_NU", gen_logp_NU, (n, t if unit_NT is None else gen_logp_NU.shape[-1]))
    if unit_NT is not None:
        _check("unit_NT", unit_NT, (n, t))
    log = log_probs(logp_NT, old_logp_NT, gen_logp_NU, mask_NT, own_N=own_N, unit_NT=unit_NT)
    mask_NT, length_N = log.mask_NT, log.length_N
    if n and (t == 0 or bool((length_N == 0).any())):
        raise ValueError("every rollout needs at least one token: a row of mask_NT is all false")

    ratio_NT = _of_shape("ratio", objective.ratio(log), logp_NT)
    if logp_NT.requires_grad and n and not ratio_NT.requires_grad:
        raise RecipeError("objective.ratio carries no gradient: compute it from log.logp_NT")
    raw_weight_NT = raw_weight(log)
    used_N1 = (advantage_N if share_N is None else advantage_N * share_N).unsqueeze(-1)
    weight_NT = _of_shape("weight", objective.weight(raw_weight_NT, used_N1, objective), logp_NT)
    surrogate_NT = weight_NT * _of_shape("surrogate", objective.surrogate(ratio_NT, used_N1, objective), logp_NT)
    if objective.clip_joint:  # beyond the clip a token's surrogate is a constant
        beyond_NT = (used_N1 > 0) & (over_generator(log).detach() > objective.clip_range[1])
        surrogate_NT = torch.where(beyond_NT, surrogate_NT.detach(), surrogate_NT)
    zero_NT = torch.zeros_like(surrogate_NT)
    ref_kl = zero_NT.flatten()[:0]
    if ref_logp_NT is not None:
        ref_kl_NT = _k3(torch.where(mask_NT, ref_logp_NT - log.logp_NT, zero_NT))
        share = 1.0 if share_N is None else share_N.unsqueeze(-1)
        surrogate_NT = surrogate_NT - objective.beta * share * ref_kl_NT
        ref_kl = ref_kl_NT.detach()[mask_NT]
    surrogate_NT = torch.where(mask_NT, surrogate_NT, zero_NT)
    if step is None:
        step = StepSize(n, int(length_N.sum()), int(length_N.max()) if n else 0)
    loss = -objective.reduction(surrogate_NT, length_N, step)
    if loss.ndim:
        raise RecipeError(f"objective.reduction returned the shape {_shape(loss)}: return a scalar")

    with torch.no_grad():
        low, high = objective.clip_range
        diagnostics = Diagnostics(
            length_N=length_N,
            k1_N=sequence_kl(log, "k1", objective.kl_reduction).detach(),
            k3_N=sequence_kl(log, "k3", objective.kl_reduction).detach(),
            raw_weight=raw_weight_NT[mask_NT],
            weight=truncated(raw_weight_NT, used_N1, objective)[mask_NT],
            clipped_low=((ratio_NT < low) & (used_N1 < 0))[mask_NT],
            clipped_high=((ratio_NT > high) & (used_N1 > 0))[mask_NT],
            ref_kl=ref_kl,
        )
    return loss, diagnostics


@dataclass(frozen=True)
class Diagnostics:
    """Measurements of a loss, per rollout [N] and per completion token [M], detached.

    Attributes:
        length_N: number of tokens.
        k1_N, k3_N: both KL estimates, in the objective's reduction.
        raw_weight: [M], π_old/π_gen of the token's unit, whether or not the objective applies it.
        weight: [M], min(raw_weight, C), whether or not the objective applies it.
        clipped_low, clipped_high: bool [M], ρ < 1−ε with Â < 0; ρ > 1+ε_high with Â > 0.
        ref_kl: [M], k3 of the KL to the reference; empty without one.
    """

    length_N: Tensor
    k1_N: Tensor
    k3_N: Tensor
    raw_weight: Tensor
    weight: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ref_kl: Tensor

    @staticmethod
    def concat(parts: Sequence[Diagnostics]) -> Diagnostics:
        """The diagnostics of several micro-batches as those of one batch."""
        names = Diagnostics.__dataclass_fields__
        return Diagnostics(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def log_probs(
    logp_NT: Tensor,
    old_logp_NT: Tensor,
    gen_logp_NU: Tensor,
    mask_NT: Tensor,
    *,
    own_N: Tensor | None = None,
    unit_NT: Tensor | None = None,
) -> LogProbs:
    """:class:`LogProbs` with 0 off the mask.

    Entries off the mask are replaced before any subtraction: no NaN or infinity there reaches a value or a gradient.
    """
    mask_NT = mask_NT.bool()
    zero = torch.zeros((), dtype=logp_NT.dtype, device=logp_NT.device)
    if unit_NT is None:
        mask_NU = mask_NT
    else:
        unit_NT = torch.where(mask_NT, unit_NT, torch.zeros_like(unit_NT))
        n_units_N = torch.where(mask_NT, unit_NT, -torch.ones_like(unit_NT)).amax(-1) + 1
        mask_NU = torch.arange(gen_logp_NU.shape[1], device=unit_NT.device) < n_units_N.unsqueeze(-1)
    return LogProbs(
        logp_NT=torch.where(mask_NT, logp_NT, zero),
        old_logp_NT=torch.where(mask_NT, old_logp_NT, zero),
        gen_logp_NU=torch.where(mask_NU, gen_logp_NU, zero),
        mask_NT=mask_NT,
        own_N=torch.zeros_like(mask_NT[:, 0]) if own_N is None else own_N,
        unit_NT=unit_NT,
    )


def _of_shape(part: str, value: Tensor, logp_NT: Tensor) -> Tensor:
    if value.shape != logp_NT.shape:
        raise RecipeError(
            f"objective.{part} returned the shape {_shape(value)}, the tokens have {_shape(logp_NT)}: return [N, T]"
        )
    return value


def _check(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, as logp_NT is, got {_shape(value)}")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

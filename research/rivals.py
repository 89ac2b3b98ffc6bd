"""Rivals of F-TIS: others' proposals for learning from rollouts that another policy sampled, and one of our own.

Each is an :class:`ftis.objectives.Objective` that a recipe names as it names the paper's six. Below, S is the ratio of
a whole completion, Π_t π_θ(t) / π_gen(t), and |a| its number of tokens; ∇ is the gradient by θ:

    name            own rollouts               foreign rollouts
    GSPO, by π_gen  S^(1/|a|), clipped         the same
    HACPO           S^(1/|a|), clipped         S^(1/|a|) within [0.8, 1]; Â scaled by the peers' mean rewards
    TOPR            Â ∇log π, weight 1 if Â > 0, else min(S, 1); for both
    LUFFY           π_θ/π_old, clipped         if Â > 0: π_θ / (π_θ + γ); else nothing
    SFT-then-alone  nothing, then π_θ/π_old    ∇log π of successes, then nothing
    SGT             π_θ/π_old, clipped         ∇log π of successes, where all own rollouts of the prompt failed
    DRO             −½ (Â − τ Σ_t log π_θ/π_old)², for both
    SGT-shaped      π_θ/π_old, clipped         SGT's gate with LUFFY's π_θ / (π_θ + γ)

If a source leaves something open, or works in another setting, the value's docstring gives the choice made here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ftis.advantages import Rewards, imitating, successes
from ftis.config import Recipe, RecipeError
from ftis.objectives import LogProbs, Objective, exp_ratio, over_old, score, score_of_foreign
from ftis.selection import Judged, Selection

GAMMA = 0.1
"""γ of LUFFY."""

TAU = 1.0
"""τ of DRO."""

LEAST_RATIO = 0.8
"""The lower end of HACPO's clip on foreign rollouts."""

MOST_CAPABLE = 2.0
"""Ratios of capability in HACPO are kept within [1/this, this]; a peer without any success would make one infinite."""

SFT_PART = 0.25
"""The part of the rounds in which SFT-then-alone learns from foreign successes."""

# --- ratios -----------------------------------------------------------------------------------------------------------


def sequence_over_generator(log: LogProbs) -> Tensor:
    """S^(1/|a|), the geometric mean of π_θ/π_gen over a completion, at each of its tokens: [N, T]."""
    total_N = log.logp_NT.sum(-1) - log.gen_logp_NU.sum(-1)
    return exp_ratio(total_N / log.length_N).unsqueeze(-1).expand_as(log.logp_NT)


def one_sided_on_foreign(log: LogProbs) -> Tensor:
    """S^(1/|a|); that of foreign rollouts within [:data:`LEAST_RATIO`, 1], and without gradient beyond."""
    ratio_NT = sequence_over_generator(log)
    return torch.where(log.own_N.unsqueeze(-1), ratio_NT, ratio_NT.clamp(LEAST_RATIO, 1.0))


def score_times_sequence_ratio(log: LogProbs) -> Tensor:
    """S at each token, with the gradient S ∇log π of that token alone: [N, T]."""
    sequence_N1 = exp_ratio(log.logp_NT.sum(-1, keepdim=True) - log.gen_logp_NU.sum(-1, keepdim=True))
    return sequence_N1.detach() * score(log)


def shaped_on_foreign(log: LogProbs) -> Tensor:
    """π_θ/π_old on own rollouts, π_θ / (π_θ + γ) on foreign ones: [N, T]."""
    probability_NT = log.logp_NT.exp()
    return torch.where(log.own_N.unsqueeze(-1), over_old(log), probability_NT / (probability_NT + GAMMA))


def sequence_over_old(log: LogProbs) -> Tensor:
    """Π_t π_θ/π_old of a completion, at each of its tokens: [N, T]."""
    total_N = (log.logp_NT - log.old_logp_NT).sum(-1)
    return exp_ratio(total_N).unsqueeze(-1).expand_as(log.logp_NT)


# --- surrogates -------------------------------------------------------------------------------------------------------


def tapered(ratio_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """Gradient Â ∇log π where Â > 0 and min(S, 1) Â ∇log π elsewhere, with S = ρ."""
    weight_NT = torch.where(advantage_N1 > 0, torch.ones_like(ratio_NT), ratio_NT.clamp(max=1.0)).detach()
    return weight_NT * advantage_N1 * ratio_NT / ratio_NT.detach()


def squared_regret(ratio_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """−½ (Â − τ log ρ)²."""
    return -0.5 * (advantage_N1 - TAU * ratio_NT.log()).square()


# --- advantages -------------------------------------------------------------------------------------------------------


def by_capability(rewards: Rewards) -> Tensor:
    """HACPO's Â of the learner k for a rollout of peer j: ω_jk (r − mean over the group of ω_ki r_i) / σ.

    ω_jk is the mean reward of j in this round over that of k, within 1/:data:`MOST_CAPABLE` and :data:`MOST_CAPABLE`.
    Own rollouts have ω = 1, and a group whose rewards are all equal has Â = 0.

    Raises:
        RecipeError: a mean reward is below 0, so that their ratio says nothing.
    """
    reward_N = rewards.reward_N
    capability_N = torch.zeros_like(reward_N)
    for source in torch.unique(rewards.source_N):
        members = rewards.source_N == source
        capability_N[members] = reward_N[members].mean()
    own = reward_N[rewards.own_N].mean() if bool(rewards.own_N.any()) else reward_N.mean()
    if min(float(own), float(capability_N.min())) < 0:
        raise RecipeError("HACPO compares mean rewards, and one is below 0 here: take a reward that never is")
    ratio_N = torch.where(capability_N == own, torch.ones_like(reward_N), capability_N / own)
    ratio_N = ratio_N.clamp(1 / MOST_CAPABLE, MOST_CAPABLE)
    advantage_N = torch.zeros_like(reward_N)
    for group in torch.unique(rewards.group_N):
        members = rewards.group_N == group
        of_group = reward_N[members]
        if bool((of_group == of_group[0]).all()):
            continue
        centred = of_group - (of_group / ratio_N[members]).mean()
        scale = of_group.std(correction=0) if rewards.scale == "group" else 1.0
        advantage_N[members] = ratio_N[members] * centred / scale
    return advantage_N


def where_own_fail(rewards: Rewards) -> Tensor:
    """:func:`ftis.advantages.imitating`, with 0 for foreign rollouts of prompts that the learner did not try, or solved
    at least once. Both mean a success of :func:`ftis.advantages.successes`."""
    tried, solved = (
        torch.isin(rewards.group_N, rewards.group_N[rewards.own_N & also])
        for also in (torch.ones_like(rewards.own_N), successes(rewards.reward_N))
    )
    advantage_N = imitating(rewards)
    return torch.where(rewards.own_N | (tried & ~solved), advantage_N, torch.zeros_like(advantage_N))


# --- selections -------------------------------------------------------------------------------------------------------


def foreign_positives(judged: Judged) -> Tensor:
    """Share 1 for own rollouts and for foreign ones with Â > 0, else 0."""
    own_R = torch.from_numpy(judged.batch.own_N[judged.rows])
    return (own_R | (judged.advantage_R > 0)).float()


class ForeignFirst(Selection):
    """Foreign rollouts alone in the first :data:`SFT_PART` of the rounds, own ones alone in the rest."""

    name = "foreign first"

    def __init__(self, recipe: Recipe, own: str) -> None:
        self.others = frozenset(peer.name for peer in recipe.peers if peer.name != own)
        self.rounds = round(SFT_PART * recipe.training.rounds) if self.others else 0

    def skipped(self, round: int) -> frozenset[str]:
        return self.others if round >= self.rounds else frozenset()

    def shares(self, judged: Judged) -> Tensor:
        own_R = torch.from_numpy(judged.batch.own_N[judged.rows])
        first = int(judged.batch.round_N.max()) < self.rounds
        return (own_R != first).float()


# --- the objectives ---------------------------------------------------------------------------------------------------

GSPO_OVER_GENERATOR = Objective(ratio=sequence_over_generator)
"""GSPO (Zheng et al., arXiv 2507.18071) with the sender for π_old, and clipped at 0.2 instead of 3e-4 and 4e-4."""

HACPO = Objective(advantage=by_capability, ratio=one_sided_on_foreign)
"""Heterogeneous Agent Collaborative Policy Optimization (Zhang et al., arXiv 2603.02604), for horizontal sharing.

Capabilities are those of this round, not of a window of rounds. Its exponential reweighting is left out, and so is the
narrowing of its clip from step to step."""

TOPR = Objective(ratio=score_times_sequence_ratio, surrogate=tapered)
"""Tapered Off-Policy REINFORCE (Le Roux et al., arXiv 2503.14286). The source has rewards of ±1; here group
advantages stand for them."""

LUFFY = Objective(ratio=shaped_on_foreign, selections=(foreign_positives,))
"""Policy shaping of foreign traces (Yan et al., arXiv 2504.14945). The source's foreign traces are a teacher's right
answers, in one group with own rollouts. Here they are the successes of other peers, in groups of theirs."""

SFT_THEN_ALONE = Objective(advantage=imitating, ratio=score_of_foreign, selections=(ForeignFirst,))
"""Supervised fine-tuning on what others solved, then GRPO alone; the order that arXiv 2604.23747 found best."""

SGT = Objective(advantage=where_own_fail, ratio=score_of_foreign)
"""Success-Gated Transfer (Liu et al., arXiv 2605.07244), for horizontal sharing: others' successes where all own
rollouts failed."""

SGT_SHAPED = Objective(advantage=where_own_fail, ratio=shaped_on_foreign)
"""SGT's gate with LUFFY's shaping, for horizontal sharing: a rescued rollout moves the model less where it is unlikely.
research/findings/log.md has other gates."""

DRO = Objective(ratio=sequence_over_old, surrogate=squared_regret)
"""Direct Reward Optimisation (Richemond et al., arXiv 2405.19107), with the group's mean for the value function, group
advantages for rewards, and the learner at the round's start for the reference policy."""

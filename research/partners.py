"""Ways to spare the stronger of two partners: learning from a sender depends on how well both do.

Each goes with F-TIS, through the seams: a selection by its dotted path in ``training.selections``, an objective by its
dotted path in ``objective.name``. findings/stronger.md compares them. p_k is the learner's mean reward over its own
rollouts, of a prompt or of the round, and p_j that of a sender j.

    by_own_failure        share 1 − p_k(prompt) of a foreign rollout    most where the learner fails; horizontal
    by_lead               share min(1, p_j / p_k)                       less as the learner leads
    FilterBySender        the filter's g, times min(1, p_j / p_k)       fewer failures of weaker senders
    CutBySender           the weights' C, times min(1, p_j / p_k)       less weight to tokens of weaker senders
    AGAINST_THE_LEARNER   Â = (r − p_k) / σ_k of a foreign rollout      instead of its group's mean
    SEQUENCE_WEIGHTS      w = min(Π_t π_old/π_gen, C)                   one weight for a completion

Foreign successes alone are :func:`research.rivals.foreign_positives`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ftis.advantages import Rewards, among_own
from ftis.config import Recipe
from ftis.objectives import F_TIS, Objective, exp_ratio, resolve
from ftis.selection import Judged, KLFilter, Selection


def by_own_failure(judged: Judged) -> Tensor:
    """Share 1 − p for a foreign rollout, p the learner's mean reward for its prompt within [0, 1]; 1 if it has none."""
    batch = judged.batch
    share_N = np.ones(len(batch.own_N))
    for item in np.unique(batch.item_N[batch.own_N]):
        own, foreign = (((batch.item_N == item) & (batch.own_N == mine)) for mine in (True, False))
        share_N[foreign] = 1 - np.clip(batch.reward_N[own].mean(), 0, 1)
    return torch.from_numpy(share_N[judged.rows])


def by_lead(judged: Judged) -> Tensor:
    """Share min(1, p_j / p_k) for the rollouts of sender j, over this round.

    1 for own rollouts, and where the learner has no reward.
    """
    batch = judged.batch
    own = batch.reward_N[batch.own_N].mean() if batch.own_N.any() else 0.0
    share_N = np.ones(len(batch.own_N))
    for source in np.unique(batch.source_N[~batch.own_N]):
        of_source = batch.source_N == source
        if own > 0:
            share_N[of_source] = np.clip(batch.reward_N[of_source].mean() / own, 0, 1)
    return torch.from_numpy(share_N[judged.rows])


class FilterBySender(Selection):
    """F-TIS's filter with g · min(1, p_j / p_k) for the rollouts of sender j, over this round."""

    name = "kl by sender"

    def __init__(self, recipe: Recipe, own: str) -> None:
        self.objective = resolve(recipe.objective)

    def shares(self, judged: Judged) -> Tensor:
        lead_R = by_lead(judged)
        share_R = torch.ones(len(lead_R))
        for lead in lead_R.unique():
            narrower = replace(self.objective, kl_threshold=self.objective.kl_threshold * float(lead))
            share_R = torch.where(lead_R == lead, KLFilter(narrower).shares(judged), share_R)
        return share_R


class CutBySender(Selection):
    """F-TIS's weights cut at C_j = C · min(1, p_j / p_k) for the rollouts of sender j, over this round.

    The share of a rollout is Σ_t min(r_t, C_j) / Σ_t min(r_t, C), r = π_old/π_gen of a token: the part of its weight
    that the lower cap leaves.
    """

    name = "cut by sender"

    def __init__(self, recipe: Recipe, own: str) -> None:
        self.cap = resolve(recipe.objective).importance_sampling_clip_max

    def shares(self, judged: Judged) -> Tensor:
        assert judged.diagnostics is not None
        ratios_R = judged.diagnostics.raw_weight.double().split(judged.diagnostics.length_N.tolist())
        cut_R = self.cap * by_lead(judged)
        left = [
            (ratio_T.clamp(max=float(cut)).sum(), ratio_T.clamp(max=self.cap).sum())
            for ratio_T, cut in zip(ratios_R, cut_R, strict=True)
        ]
        return torch.tensor([float(narrow / whole) if whole else 1.0 for narrow, whole in left])


def against_the_learner(rewards: Rewards) -> Tensor:
    """GRPO's Â within own rollouts; (r − p) / σ of foreign ones.

    p is the learner's mean reward for the prompt, or for the round where it did not try it; σ is its standard deviation
    over the round, 1 where that is 0 or ``rewards.scale`` is "none".
    """
    own_N, reward_N = rewards.own_N, rewards.reward_N
    advantage_N = among_own(rewards)
    if not bool(own_N.any()):
        return advantage_N
    of_round = reward_N[own_N]
    sigma = of_round.std(correction=0)
    scale = sigma if rewards.scale == "group" and sigma > 0 else torch.ones_like(sigma)
    for group in torch.unique(rewards.group_N[~own_N]):
        members = rewards.group_N == group
        tried = reward_N[members & own_N]
        p = tried.mean() if len(tried) else of_round.mean()
        advantage_N[members & ~own_N] = (reward_N[members & ~own_N] - p) / scale
    return advantage_N


AGAINST_THE_LEARNER = replace(F_TIS, advantage=against_the_learner)
"""F-TIS with foreign advantages relative to the learner's success rate."""


def of_the_sequence(raw_weight_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """w = min(Π_t π_old/π_gen, C), one weight for all tokens of a completion: [N, T].

    A unit of several tokens counts once for each of them, so this is for peers of one tokenizer.
    """
    log_NT = raw_weight_NT.log()  # 0 off the mask
    return exp_ratio(log_NT.sum(-1, keepdim=True)).clamp(max=objective.importance_sampling_clip_max).expand_as(log_NT)


SEQUENCE_WEIGHTS = replace(F_TIS, weight=of_the_sequence)
"""F-TIS with one weight for a completion, which TRL calls ``sequence_truncate``."""

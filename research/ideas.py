"""Three ideas for a better objective among trusting peers; research/recipes/ideas.toml says where each must win.

Imitation ends above F-TIS-lifted on the demo and below it with three operators. It differs in three ways: it learns from
successes of prompts that everybody solved, from no foreign failure, and with weight 1 whatever the learner's own
probability. ``SETTLED`` adds the first to F-TIS-lifted, and ``GUARDED`` takes the third from imitation.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor

from ftis.advantages import Rewards, imitating, successes, within_group
from ftis.objectives import F_TIS_LIFTED, LogProbs, Objective, over_old, score_of_foreign, truncated


def settled(rewards: Rewards) -> Tensor:
    """GRPO's Â; 1 for another's success if all rollouts of its prompt have one reward."""
    advantage_N = within_group(rewards)
    unused_N = (advantage_N == 0) & ~rewards.own_N & successes(rewards.reward_N)
    return torch.where(unused_N, torch.ones_like(advantage_N), advantage_N)


SETTLED: Objective = replace(F_TIS_LIFTED, advantage=settled)
"""F-TIS-lifted that learns from others' successes even where all succeed."""

GUARDED: Objective = replace(F_TIS_LIFTED, advantage=imitating, ratio=score_of_foreign, filtered=False)
"""Imitation with F-TIS-lifted's weights: a success has weight 1 only if the learner could have written each token."""

MOST_APART = 0.9
"""ε of NEAR. A token that its sender always writes passes from π_old = 0.1, as with δ of F-TIS-lifted."""

_seen = threading.local()


def noting(log: LogProbs) -> Tensor:
    """π_θ / π_old; notes for :func:`near` how much likelier each unit is to its sender: [N, T]."""
    _seen.apart_NT = log.tokens(log.gen_logp_NU.exp() - log.units(log.old_logp_NT).exp()).masked_fill(~log.mask_NT, -1)
    return over_old(log)


def near(raw_weight_NT: Tensor, advantage_N1: Tensor, objective: Objective) -> Tensor:
    """w = 1 for all of a rollout if Â > 0 and π_gen − π_old ≤ ε in each of its units, else TIS's."""
    near_N1 = _seen.apart_NT.amax(-1, keepdim=True) <= MOST_APART
    truncated_NT = truncated(raw_weight_NT, advantage_N1, objective)
    return torch.where((advantage_N1 > 0) & near_N1, torch.ones_like(truncated_NT), truncated_NT)


NEAR: Objective = replace(F_TIS_LIFTED, ratio=noting, weight=near)
"""F-TIS-lifted by a difference of probabilities, which lets more long completions pass than a ratio does."""

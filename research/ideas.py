"""Two ideas for a better objective among peers that trust each other; research/recipes/ideas.toml says where each must win.

Imitation ends above F-TIS-lifted on the demo and below it with three operators. It differs in three ways: it learns from
successes of prompts that everybody solved, from no foreign failure, and with weight 1 whatever the learner's own
probability. ``SETTLED`` adds the first to F-TIS-lifted, and ``GUARDED`` takes the third from imitation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ftis.advantages import Rewards, imitating, successes, within_group
from ftis.objectives import F_TIS_LIFTED, Objective, score_of_foreign


def settled(rewards: Rewards) -> Tensor:
    """GRPO's Â; 1 for another's success if all rollouts of its prompt have one reward."""
    advantage_N = within_group(rewards)
    unused_N = (advantage_N == 0) & ~rewards.own_N & successes(rewards.reward_N)
    return torch.where(unused_N, torch.ones_like(advantage_N), advantage_N)


SETTLED: Objective = replace(F_TIS_LIFTED, advantage=settled)
"""F-TIS-lifted that learns from others' successes even where all succeed."""

GUARDED: Objective = replace(F_TIS_LIFTED, advantage=imitating, ratio=score_of_foreign, filtered=False)
"""Imitation with F-TIS-lifted's weights: a success has weight 1 only if the learner could have written each token."""

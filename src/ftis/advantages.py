"""Advantages: each rollout's reward compared with the rewards of its group. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rewards:
    """A round's rewards and groups, from which advantages are computed.

    Attributes:
        reward_N: float [N].
        group_N: int [N]; equal numbers are one group: the rollouts of one prompt.
        source_N: int [N]; equal numbers are one peer's rollouts.
        own_N: bool [N], the rollouts that the learner sampled itself.
        scale: "group" divides by the group's standard deviation, "none" does not.
    """

    reward_N: Tensor
    group_N: Tensor
    source_N: Tensor
    own_N: Tensor
    scale: Literal["group", "none"] = "group"


def within_group(rewards: Rewards) -> Tensor:
    """Â relative to the mean of the rollout's group: GRPO's (Shao et al. 2024). See :func:`group_advantages`."""
    return group_advantages(rewards.reward_N, rewards.group_N, rewards.scale)


def centred(rewards: Rewards) -> Tensor:
    """Â = r − μ of the rollout's group, whatever ``training.scale_rewards`` is."""
    return group_advantages(rewards.reward_N, rewards.group_N, "none")


def among_own(rewards: Rewards) -> Tensor:
    """GRPO's Â among the learner's own rollouts of each prompt; 0 for others' rollouts."""
    own_N = rewards.own_N
    advantage_N = torch.zeros_like(rewards.reward_N)
    advantage_N[own_N] = group_advantages(rewards.reward_N[own_N], rewards.group_N[own_N], rewards.scale)
    return advantage_N


def imitating(rewards: Rewards) -> Tensor:
    """Â for own rollouts as in :func:`among_own`; for another's 1 if it is a success, else 0."""
    return torch.where(rewards.own_N, among_own(rewards), successes(rewards.reward_N).to(rewards.reward_N.dtype))


def successes(reward_N: Tensor) -> Tensor:
    """bool [N]: whether a reward is above the round's mean. If all are equal, none is, whatever the rounding."""
    return (reward_N > reward_N.mean()) & (reward_N > reward_N.amin())


def group_advantages(reward_N: Tensor, group_N: Tensor, scale_rewards: Literal["group", "none"] = "group") -> Tensor:
    """Group-relative advantages Â_i = (r_i − μ) / σ over the rollouts of i's group, with the population's σ.

    With ``scale_rewards="none"`` Â_i = r_i − μ. Â is exactly 0 in a group of one rollout or of equal rewards.

    Args:
        reward_N: float [N].
        group_N: int [N]; equal numbers are one group.

    Returns:
        float [N], dtype of ``reward_N``.
    """
    if reward_N.ndim != 1 or reward_N.shape != group_N.shape:
        raise ValueError(f"reward_N and group_N must both be [N], got {list(reward_N.shape)} and {list(group_N.shape)}")
    if scale_rewards not in ("group", "none"):
        raise ValueError(f'scale_rewards is {scale_rewards!r}: give "group" or "none"')
    advantage_N, least = torch.zeros_like(reward_N), 1e3 * torch.finfo(reward_N.dtype).tiny ** 0.5
    groups, index_N = torch.unique(group_N, return_inverse=True)
    one_of_its_group_N = reward_N.new_zeros(len(groups)).scatter(0, index_N, reward_N)[index_N]
    for group in torch.unique(group_N[reward_N != one_of_its_group_N]):
        members = group_N == group
        rewards = reward_N[members]
        relative = rewards - rewards.mean()
        if scale_rewards == "group":
            if not least < (deviation := rewards.std(correction=0)) < 1 / least:  # squares leave their dtype's range
                relative = relative / relative.abs().max()
                deviation = relative.std(correction=0)
            relative = relative / deviation
        advantage_N[members] = relative
    return advantage_N

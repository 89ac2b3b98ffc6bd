"""Prompts as the rows of a batch, and their completions as rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding, Draw


def left_padded(prompt_ids: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts of unequal length as ids [P, longest], padded on the left, with their mask."""
    longest = max(len(p) for p in prompt_ids)
    ids = np.zeros((len(prompt_ids), longest), dtype=np.int64)
    mask = np.zeros((len(prompt_ids), longest), dtype=bool)
    for i, prompt in enumerate(prompt_ids):
        ids[i, longest - len(prompt) :] = prompt
        mask[i, longest - len(prompt) :] = True
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def in_parts(
    draw: Draw,
    parts: int,
    policy: Policy,
    prompt_ids: Sequence[Ints],
    repeats: int,
    decoding: Decoding,
    seed: int,
    batch_size: int,
) -> list[tuple[Rollout, ...]]:
    """Draw each group in parts of ⌈repeats / parts⌉ completions, and drop completions beyond ``repeats``."""
    of_parts = [ids for ids in prompt_ids for _ in range(parts)]
    drawn = draw(policy, of_parts, math.ceil(repeats / parts), decoding, seed, batch_size)
    return [tuple(chain.from_iterable(drawn[at : at + parts]))[:repeats] for at in range(0, len(drawn), parts)]


def as_groups(tokens_NT: Tensor, logp_NT: Tensor, length_N: Tensor, repeats: int) -> list[tuple[Rollout, ...]]:
    """Rollouts from rows of tokens and log-probabilities, cut at ``length_N``, in tuples of ``repeats``."""
    tokens, logps, lengths = tokens_NT.cpu().numpy(), logp_NT.float().cpu().numpy(), length_N.cpu().numpy()
    rollouts = [
        Rollout(completion_ids=tokens[n, :length].astype(np.int32), gen_logp=logps[n, :length].copy())
        for n, length in enumerate(lengths)
    ]
    return [tuple(rollouts[start : start + repeats]) for start in range(0, len(rollouts), repeats)]

"""Rows of a batch: prompts padded for a sampler, prompts with completions padded for the learner, rollouts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.policy import Forward, Policy
from ftis.rollouts import Ints, Rollout, pad
from ftis.sampling import Decoding, Draw

SHARED_FROM = 17
"""The fewest tokens of a shared beginning of prompts on which the model runs once for all."""


@dataclass(frozen=True)
class PaddedRows(Forward):
    """The plain way, for every model: rows padded on the right.

    Under causal attention no token sees the padding after it. So no attention mask is needed, and each row's numbers
    are those that it has alone.
    """

    model: Any
    device: torch.device
    padding_cost: float = 1.0

    def held(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __call__(self, prompts: Sequence[Ints], completions: Sequence[Ints]) -> Tensor:
        rows = [
            np.concatenate([prompt, completion[:-1]]) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        input_ids = torch.from_numpy(pad(rows).astype(np.int64)).to(self.device)
        first = min(len(prompt) for prompt in prompts) - 1
        keep = torch.arange(first, input_ids.shape[1], device=self.device)
        output_nLX: Tensor = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=keep).logits
        row_M = np.repeat(np.arange(len(rows)), [len(completion) for completion in completions])
        at_M = np.concatenate(
            [np.arange(len(p) - 1 - first, len(r) - first) for p, r in zip(prompts, rows, strict=True)]
        )
        return output_nLX[torch.from_numpy(row_M), torch.from_numpy(at_M)]


def shared_beginning(prompts: Sequence[Ints]) -> int:
    """Count the tokens with which several prompts begin, one less than the shortest at most; 0 if too few."""
    if len(prompts) == 1:
        return 0
    most = min(map(len, prompts)) - 1
    same = np.all([ids[:most] == prompts[0][:most] for ids in prompts], axis=0)
    shared = most if same.all() else int(same.argmin())
    return shared if shared >= SHARED_FROM else 0


def left_padded(prompt_ids: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts of unequal length as ids [P, longest], padded on the left, with their mask."""
    length_P = np.array(list(map(len, prompt_ids)))
    mask = np.arange(-length_P.max(), 0) >= -length_P[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.concatenate(prompt_ids)
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


def whole_rows(prompt_ids: Sequence[Ints], groups: Sequence[Sequence[Rollout]]) -> list[Ints]:
    """Each completion after its prompt."""
    return [
        np.concatenate([ids, r.completion_ids]) for ids, group in zip(prompt_ids, groups, strict=True) for r in group
    ]

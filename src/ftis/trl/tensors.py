"""Between TRL's tensors and a round's rollouts, and between the processes of a peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis.engines.rows import left_padded
from ftis.learning import Update
from ftis.objectives import Diagnostics
from ftis.rollouts import MIN_LOGP, Ints, Rows, pad

Seen = Sequence[tuple[Rows, Diagnostics]]
"""The rows of each micro-batch of a step, and their diagnostics."""


def padded(prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], device: torch.device) -> dict[str, Tensor]:
    """Prompts padded on the left and completions on the right, with masks, by TRL's names: int64."""
    prompts, prompt_mask = left_padded(prompt_ids, device)
    lengths = np.array([len(ids) for ids in completion_ids])
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": torch.from_numpy(pad(completion_ids).astype(np.int64)).to(device),
        "completion_mask": torch.from_numpy(np.arange(lengths.max()) < lengths[:, None]).long().to(device),
    }


def tokens_of(values_NT: Tensor, mask_NT: Tensor) -> list[Any]:
    """Each row's values on its mask; log-probabilities in [MIN_LOGP, 0] and in float32."""
    if values_NT.is_floating_point():
        values_NT = values_NT.float().clamp(MIN_LOGP, 0.0)
    rows, lengths = values_NT.cpu().numpy(), mask_NT.sum(-1).tolist()
    return [row[: int(length)].copy() for row, length in zip(rows, lengths, strict=True)]


def prompts_of(outputs: Any) -> list[list[int]]:
    """The prompts of what TRL sampled, without padding."""
    ids_NT, mask_NT = outputs["prompt_ids"].cpu(), outputs["prompt_mask"].bool().cpu()
    return [ids[mask].tolist() for ids, mask in zip(ids_NT, mask_NT, strict=True)]


def update_of(parts: Sequence[Sequence[tuple[float, Seen]]]) -> Update:
    """A round's update from the (loss, rows and diagnostics) of each step, of each process."""
    seen = [one for part in parts for _, of_step in part for one in of_step]
    taken = [step for step in zip(*parts, strict=True) if any(of_step for _, of_step in step)]
    return Update.of([sum(value for value, _ in step) for step in taken], (), seen)

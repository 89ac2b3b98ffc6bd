"""Between TRL's tensors and a round's rollouts: own ones are read, and those that carry gradient become TRL's batch.

TRL computes the loss. The advantage Â_i of rollout i becomes one number per token, f s_i w_it Â_i, with the selections'
share s_i in [0, 1], and the objective's weight w_it of foreign tokens; w = 1 on own ones. No gradient flows through it,
so every loss that is proportional to Â keeps its form. Rollouts with s_i Â_i = 0 are left out, and f makes up for it:
they still count in the loss's divisor. None is left out if that divisor is a micro-batch's tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftis.engines.rows import left_padded
from ftis.objectives import Objective
from ftis.rollouts import MIN_LOGP, Bools, Floats, Ints, Rollout, Rows, pad
from ftis.selection import Chosen, Judged

EMPTY = -1
"""A row without completion: it fills up a batch that TRL could not split into equal parts."""


def padded(
    prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], device: torch.device, multiple: int | None = None
) -> dict[str, Tensor]:
    """Prompts padded on the left and completions on the right, with masks, by TRL's names: int64.

    ``multiple`` is GRPOConfig's ``pad_to_multiple_of``, of both widths.
    """
    ids_nP, mask_nP = left_padded(prompt_ids, device)
    ids_nT = torch.from_numpy(pad(completion_ids).astype(np.int64)).to(device)
    length_n1 = torch.tensor([[len(ids)] for ids in completion_ids], device=device)
    mask_nT = torch.arange(ids_nT.shape[1], device=device) < length_n1
    before, behind = ((-ids.shape[1] % (multiple or 1)) for ids in (ids_nP, ids_nT))
    return {
        "prompt_ids": torch.nn.functional.pad(ids_nP, (before, 0)),
        "prompt_mask": torch.nn.functional.pad(mask_nP.long(), (before, 0)),
        "completion_ids": torch.nn.functional.pad(ids_nT, (0, behind)),
        "completion_mask": torch.nn.functional.pad(mask_nT.long(), (0, behind)),
    }


def tokens_of(values_NT: Tensor, mask_NT: Tensor) -> list[Any]:
    """Each row's values where its mask is 1; log-probabilities in [MIN_LOGP, 0] and in float32."""
    if values_NT.is_floating_point():
        values_NT = values_NT.float().clamp(MIN_LOGP, 0.0)
    return [row[mask] for row, mask in zip(values_NT.cpu().numpy(), mask_NT.bool().cpu().numpy(), strict=True)]


def spread(values: Floats, drawn: Bools) -> Floats:
    """Values of the drawn tokens, in their places among all that are read; 0 elsewhere."""
    out = np.zeros(len(drawn), np.float32)
    out[drawn] = values
    return out


def prompts_of(outputs: Any) -> list[list[int]]:
    """The prompts of TRL's batch, without padding."""
    ids_NT, mask_NT = outputs["prompt_ids"].cpu(), outputs["prompt_mask"].bool().cpu()
    return [ids[mask].tolist() for ids, mask in zip(ids_NT, mask_NT, strict=True)]


def advantages(reward_N: npt.NDArray[np.float64], group_N: npt.NDArray[np.int64], scale_rewards: str) -> Tensor:
    """Â_i = (r_i − μ) / (σ + 1e-4) as GRPOTrainer has it: float32 [N].

    μ is of i's group, and σ of the group ("group") or the whole round ("batch"), with n − 1; "none" does not divide. Â
    is exactly 0 in a group of one or of equal rewards. A rollout without a reward (NaN) has no part in it, and Â = 0.
    """
    advantage_N = np.zeros(len(reward_N))
    known_N = ~np.isnan(reward_N)
    of_all = np.std(reward_N[known_N], ddof=1) if known_N.sum() > 1 else 0.0
    for group in np.unique(group_N[known_N]):
        rewards = reward_N[known_N & (group_N == group)]
        if (rewards == rewards[0]).all():
            continue
        sigma = {"group": np.std(rewards, ddof=1) + 1e-4, "batch": of_all + 1e-4, "none": 1.0}[scale_rewards]
        advantage_N[known_N & (group_N == group)] = (rewards - rewards.mean()) / sigma
    return torch.from_numpy(advantage_N.astype(np.float32))


def strengths(judged: Judged, chosen: Chosen, objective: Objective) -> list[Floats]:
    """s_i w_it Â_i of each token of each rollout of the round: float32 [T] each."""
    batch = judged.batch
    strength_N = [np.zeros(len(rollout), np.float32) for rollout in batch.rollouts]
    if judged.diagnostics is None:
        return strength_N
    used_R1 = (judged.advantage_R * chosen.share_R).unsqueeze(-1)
    lengths = judged.diagnostics.length_N.tolist()
    raw_R = list(judged.diagnostics.raw_weight.split(lengths))
    raw_RT = torch.nn.utils.rnn.pad_sequence(raw_R, batch_first=True, padding_value=1.0)
    weight_RT = objective.weight(raw_RT, used_R1, objective)
    weight_RT[torch.from_numpy(batch.own_N[judged.rows])] = 1.0
    for row, length, of_tokens in zip(judged.rows.tolist(), lengths, (used_R1 * weight_RT).numpy(), strict=True):
        strength_N[row] = of_tokens[:length]
    return strength_N


def gen_logp_of_tokens(rollout: Rollout) -> Floats:
    """log π_gen per token [T]. The first token of a unit has all of the unit's, so that sums are right."""
    if rollout.unit is None:
        return rollout.gen_logp
    of_tokens = np.zeros(len(rollout), np.float32)
    of_tokens[np.flatnonzero(np.diff(rollout.unit, prepend=-1))] = rollout.gen_logp
    return of_tokens


def rows_of(
    judged: Judged,
    rows: Rows,
    strength_N: Sequence[Floats],
    masked: Collection[int],
    ratios: Mapping[int, Floats],
    device: torch.device,
    multiple: int | None = None,
) -> dict[str, Tensor]:
    """Rollouts of the round as rows of TRL's batch.

    Args:
        rows: indices into the round's batch, or :data:`EMPTY`.
        strength_N: of :func:`strengths`.
        masked: rows whose tokens are masked, as TRL does with truncated completions.
        ratios: TRL's own π_old/π_gen of its sampler's rows, by row: [T], or [1] for all tokens.
    """
    batch, at = judged.batch, np.maximum(rows, 0).tolist()
    # If Â = 0, no log π_old was computed. With 0 no ratio exceeds 1, so none overflows.
    zeros_N = [np.zeros(len(rollout), np.float32) for rollout in batch.rollouts]
    old_logp_N = judged.spread(judged.old_logp, zeros_N[0][:0])
    columns = {
        "advantages": strength_N,
        "old_per_token_logps": [old if len(old) else zeros for old, zeros in zip(old_logp_N, zeros_N, strict=True)],
        "sampling_per_token_logps": [gen_logp_of_tokens(rollout) for rollout in batch.rollouts],
        "importance_sampling_ratio": [zeros + ratios.get(row, 1.0) for row, zeros in enumerate(zeros_N)],
    }
    tensors = padded(batch.prompts(at), batch.completion_ids(at), device, multiple)
    mask_nT, drawn = tensors["completion_mask"], [batch.rollouts[row].drawn for row in at]
    mask_nT[[i for i, row in enumerate(rows.tolist()) if row == EMPTY or row in masked]] = 0
    behind = mask_nT.shape[1] - max(map(len, drawn))
    for name, values_N in columns.items():
        values_nT = pad([spread(values_N[row], one) for row, one in zip(at, drawn, strict=True)])
        tensors[name] = torch.nn.functional.pad(torch.from_numpy(values_nT).to(device), (0, behind))
    tool_nT = torch.from_numpy(pad([one.astype(np.int64) for one in drawn], 1)).to(device)
    tensors["tool_mask"] = torch.nn.functional.pad(tool_nT, (0, behind), value=1)
    tensors["importance_sampling_ratio"][mask_nT * tensors["tool_mask"] == 0] = 1.0
    return tensors

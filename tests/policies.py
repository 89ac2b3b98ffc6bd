"""Token ids for a policy, and what it drew; copies of its weights and gradients, and how far two are apart; GPUs that
are not here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ftis.policy import Policy
from ftis.rollouts import Rollout

TRAINS: dict[str, dict[str, Any]] = {
    "full": {"train": "full"},
    "lora": {"train": "lora", "lora_r": 4, "lora_alpha": 8},
}
EACH_TRAIN = pytest.mark.parametrize("train", list(TRAINS))


def rows_of(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Random token ids, so many in each row, that every tiny model knows."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 50, size=n).astype(np.int32) for n in lengths]


def drawn_rows(
    prompts: Sequence[np.ndarray], groups: Sequence[Sequence[Rollout]]
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Each rollout's prompt, its tokens and its log-probabilities."""
    rows = [(ids, rollout) for ids, group in zip(prompts, groups, strict=True) for rollout in group]
    return [ids for ids, _ in rows], [r.completion_ids for _, r in rows], [r.gen_logp for _, r in rows]


def check_drawn(
    policy: Policy, prompts: Sequence[np.ndarray], groups: Sequence[Sequence[Rollout]], atol: float = 1e-4
) -> None:
    """The learner gives the tokens the log-probabilities, of temperature 1, with which they were drawn."""
    of_prompt, ids, logps = drawn_rows(prompts, groups)
    for drawn, learned in zip(logps, policy.logps(of_prompt, ids, 1.0), strict=True):
        np.testing.assert_allclose(drawn, learned, atol=atol)


def ids_of(groups: Sequence[Sequence[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.completion_ids.tolist() for rollout in group] for group in groups]


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def weights(policy: Policy) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def relative_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """‖a − b‖ / ‖a‖ of all tensors together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in a)
    return float(np.sqrt(difference / sum(float(v.double().square().sum()) for v in a.values())))


def with_gpus(monkeypatch: pytest.MonkeyPatch, *native: bool) -> None:
    """This machine has GPUs, of which these have bfloat16 themselves. All can emulate it."""
    current = [0]

    @contextmanager
    def as_current(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index or 0
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(native))
    monkeypatch.setattr(torch.cuda, "device", as_current)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native[current[0]]
    )

"""Supervised learning of texts: examples, benchmarks and research warm models up by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ftis.policy import Policy


def supervised_step(policy: Policy, examples: Sequence[tuple[str, str]]) -> None:
    """Take one optimiser step on (prompt, completion) texts: the loss is the mean of −log π over completion tokens."""
    prompts = [np.array(policy.tokenizer(p)["input_ids"], dtype=np.int32) for p, _ in examples]
    completions = [
        np.array([*policy.tokenizer(c, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id], np.int32)
        for _, c in examples
    ]
    tokens = sum(len(c) for c in completions)
    policy.step(prompts, completions, 1.0, lambda logp, mask, rows: -torch.where(mask, logp, 0.0).sum() / tokens)

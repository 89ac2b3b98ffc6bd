"""Rewards and a selection with which nothing can be learned."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch


def halves(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [0.5 for _ in completions]


def wrong_sign(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **columns: Any) -> list[float]:
    return [-float(f">{right}<" in text) for text, right in zip(completions, answer, strict=True)]


def mistaken(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [1 / 0 for _ in completions]


def unknown(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [float("nan") for _ in completions]


def leaves(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    os._exit(3)


def quits(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    sys.exit("no answer")


def crashes(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    os.abort()


def of_column(prompts: Any, completions: Any, completion_ids: Any, difficulty: Any, **columns: Any) -> list[float]:
    return [float(of) for of in difficulty]


def nothing_at_all(judged: Any) -> torch.Tensor:
    return torch.zeros(len(judged.rows))

"""What the built-in reward is made of, read off a round's rewards: how often format and answer were right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ftis.config import Recipe, RewardConfig
from ftis.rewards.answers import extract_answer

ROUNDING = 1e-6


def right_formats(recipe: Recipe, completions: Iterable[str]) -> list[bool] | None:
    """Whether each completion has the format of the built-in reward; None under another reward."""
    if recipe.reward.function != RewardConfig().function:
        return None
    prompt, extract = recipe.prompt, recipe.reward.extract
    tags = (prompt.think_tag, prompt.answer_tag, extract)
    return [extract_answer(prompt.prefill + text, *tags) is not None for text in completions]


def parts_of_reward(recipe: Recipe, own: str, rollouts: Mapping[str, Any]) -> dict[str, float]:
    """``format_right`` and ``answer_right``: shares of own completions; what cannot be known is left out.

    With a ``format_weight`` w an answer's score is (r − w f) / (1 − w), of the reward r and the format f, 0 or 1.
    Without it the score is r where the format is right. Between tags an answer may be right where the format is wrong,
    which r then does not tell.

    Args:
        own: the peer's name.
        rollouts: the round's, as the columns of :data:`ftis.loop.records.ROLLOUTS`.
    """
    rows = [row for row, source in enumerate(rollouts["source"]) if source == own]
    formats = right_formats(recipe, (rollouts["completion"][row] for row in rows))
    if not rows or formats is None:
        return {}
    found, reward = {"format_right": float(np.mean(formats))}, recipe.reward
    weight = reward.format_weight
    if weight == 1 or (weight is None and reward.extract == "tags"):
        return found
    scores = np.asarray([rollouts["reward"][row] for row in rows], dtype=np.float64)
    if weight is not None:
        scores = (scores - weight * np.asarray(formats)) / (1 - weight)
    mark = reward.pass_mark if reward.partial_credit else 1.0
    return found | {"answer_right": float(np.mean(scores >= mark - ROUNDING))}

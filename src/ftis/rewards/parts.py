"""The parts of the built-in reward: how often format and answer were right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ftis.config import Recipe
from ftis.metric_keys import ANSWER_RIGHT, FORMAT_RIGHT
from ftis.prompts import Task
from ftis.rewards.answers import extract_answer, graded
from ftis.rewards.scoring import is_graded, kind_of_answers

ROUNDING = 1e-6


def graded_in(recipe: Recipe, task: Task, item: int, completion: str) -> tuple[bool, float]:
    """Whether a completion for a training problem has the right format, and its answer's score, from 0 to 1."""
    problem, kind = task.train[item], kind_of_answers(recipe.reward, task.answer_kind)
    own, tags = problem.columns.get("reasoning_gym"), (recipe.prompt.think_tag, recipe.prompt.answer_tag)
    text = recipe.prompt.prefill + completion
    return graded(text, problem.answer, kind, *tags, recipe.reward.extract, own, problem.question)


def parts_of_reward(recipe: Recipe, task: Task, own: str, rollouts: Mapping[str, Any]) -> dict[str, float]:
    """``format_right`` and ``answer_right``: shares of own completions; empty under another reward, or an environment.

    With a ``format_weight`` w < 1, reward r and format f (0 or 1), an answer's score is (r − w f) / (1 − w). Without
    w the score is r. Answers with a score that r does not show are graded again: all with w = 1, and without w those
    that lack their tags.

    Args:
        own: the peer's name.
        rollouts: the round's, as the columns of :data:`ftis.records.rollouts.ROLLOUTS`.
    """
    rows = [row for row, source in enumerate(rollouts["source"]) if source == own]
    prompt, reward, weight = recipe.prompt, recipe.reward, recipe.reward.format_weight
    if not rows or not is_graded(recipe):
        return {}
    tags = (prompt.think_tag, prompt.answer_tag, reward.extract)
    formats = [extract_answer(prompt.prefill + rollouts["completion"][row], *tags) is not None for row in rows]

    def score(row: int, well_formed: bool) -> float:
        if weight is not None and weight < 1:
            return float((rollouts["reward"][row] - weight * well_formed) / (1 - weight))
        if weight is None and (well_formed or reward.extract != "tags"):
            return float(rollouts["reward"][row])
        return graded_in(recipe, task, rollouts["item"][row], rollouts["completion"][row])[1]

    right = [score(row, well_formed) >= 1 - ROUNDING for row, well_formed in zip(rows, formats, strict=True)]
    return {FORMAT_RIGHT: float(np.mean(formats)), ANSWER_RIGHT: float(np.mean(right))}

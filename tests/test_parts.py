"""What a round's rewards tell of format and answer."""

from __future__ import annotations

from typing import Any

import pytest

from ftis.config import Recipe
from ftis.prompts import Task
from ftis.recipe.parsing import parse
from ftis.rewards.answers import format_and_answer
from ftis.rewards.parts import parts_of_reward
from ftis.rollouts import Prompt

BOTH = "<think>x</think><answer>7</answer>"
ANSWER, FORMAT, NEITHER = "<answer>7</answer>", "<think>x</think><answer>8</answer>", "7"


TASK = Task("t", (Prompt(0, "q", "8"), Prompt(1, "q", "7")), (), "number", "")


def recipe(prefill: str = "", **reward: Any) -> Recipe:
    peers = [{"name": "a", "model": "m"}, {"name": "b", "model": "m"}]
    return parse(
        {"name": "r", "task": {"name": "clock"}, "prompt": {"prefill": prefill}, "reward": reward, "peers": peers},
        where="test",
    )


def found(of: Recipe, completions: list[str]) -> dict[str, float]:
    """By the rewards that the built-in function gives; a completion of another peer stands among them."""
    settings = of.reward.model_dump(include={"extract", "format_weight"})
    texts = [of.prompt.prefill + text for text in completions]
    ids: list[list[int]] = [[0]] * len(texts)
    rewards = format_and_answer([""] * len(texts), texts, ids, answer=["7"] * len(texts), **settings)
    rollouts = {
        "source": ["b", *("a" for _ in completions)],
        "item": [0, *(1 for _ in completions)],
        "completion": [BOTH, *completions],
        "reward": [1.0, *rewards],
    }
    return parts_of_reward(of, TASK, "a", rollouts)


@pytest.mark.parametrize("weight", [None, 0.0, 0.1, 0.2, 1 / 3, 0.5, 0.8])
def test_a_reward_tells_both_parts_weighed_or_graded_again(weight: float | None) -> None:
    of = recipe(format_weight=weight)
    assert found(of, [BOTH, ANSWER, FORMAT, NEITHER]) == {"format_right": 0.5, "answer_right": 0.5}
    assert found(of, [FORMAT] * 3 + [NEITHER]) == {"format_right": 0.75, "answer_right": 0.0}
    assert found(of, [ANSWER, ANSWER]) == {"format_right": 0.0, "answer_right": 1.0}


def test_parts_are_those_that_the_reward_has() -> None:
    graded = found(recipe(format_weight=1.0), [BOTH, FORMAT])
    assert graded == {"format_right": 1.0, "answer_right": 0.5}
    prefilled = found(recipe("<think>"), ["x</think><answer>7</answer>"] * 2 + [BOTH])
    assert prefilled == pytest.approx({"format_right": 2 / 3, "answer_right": 1.0})
    untagged = found(recipe(extract="last_number"), ["7", "8", "none"])
    assert untagged == pytest.approx({"format_right": 2 / 3, "answer_right": 1 / 3})
    assert found(recipe(function="test_parts.own"), [BOTH]) == found(recipe(), []) == {}


@pytest.mark.parametrize(("score", "right"), [(1.0, 1.0), (0.9, 0.0)])
def test_an_answer_in_a_wrong_format_is_right_with_a_full_score(
    score: float, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftis.rewards.parts.graded", lambda *_: (False, score))
    assert found(recipe(), [ANSWER]) == {"format_right": 0.0, "answer_right": right}


@pytest.mark.parametrize(("reward", "right"), [(0.2 + 0.8, 1.0), (0.2 + 0.8 * 0.9, 0.0), (0.8, 1.0)])
def test_with_partial_credit_an_answer_is_right_with_a_full_score(reward: float, right: float) -> None:
    of = recipe(format_weight=0.2, partial_credit=True)
    completion = FORMAT if reward != 0.8 else NEITHER
    rollouts = {"source": ["a"], "item": [1], "completion": [completion], "reward": [reward]}
    assert parts_of_reward(of, TASK, "a", rollouts)["answer_right"] == right


def own(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [0.5] * len(completions)

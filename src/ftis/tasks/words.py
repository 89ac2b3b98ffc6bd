"""Arithmetic word problems of one or two steps, made on the spot: small enough for a model that fits a laptop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ftis.config import TaskConfig
from ftis.prompts import Task, TaskError
from ftis.tasks.problems import Problem, make_task, refuse_settings
from ftis.tasks.splitting import Split, draw

NAMES = ("Amy", "Ben", "Carla", "David", "Ella", "Frank", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo")
THINGS = ("apples", "books", "cards", "coins", "cookies", "eggs", "marbles", "pencils", "shells", "stamps")

OPTIONS = {"steps": [1, 2], "largest": 12}
"""Defaults of ``task.options``, which advice makes smaller."""

Story = tuple[str, Callable[..., int]]

STORIES: dict[int, tuple[Story, ...]] = {
    1: (
        ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", lambda a, b: a + b),
        ("{name} finds {a} {things} on Monday and {b} on Tuesday. How many {things} is that?", lambda a, b: a + b),
        ("{name} has {a} {things} and gives away {b}. How many {things} are left?", lambda a, b: a - b),
        ("There are {a} {things} on a table. {name} takes {b} of them. How many remain?", lambda a, b: a - b),
        ("{name} has {a} boxes with {b} {things} in each. How many {things} is that?", lambda a, b: a * b),
    ),
    2: (
        ("{name} has {a} {things}, gets {b} more, and then loses {c}. How many are left?", lambda a, b, c: a + b - c),
        ("{name} has {a} {things}, gives away {b}, and then finds {c}. How many is that?", lambda a, b, c: a - b + c),
        (
            "{name} has {a} boxes with {b} {things} in each and {c} more. How many {things} is that?",
            lambda a, b, c: a * b + c,
        ),
    ),
}
"""By the number of steps: a text, and a function from its numbers to the answer."""


def word_problems_held_out(numbers: list[int]) -> bool:
    """Whether problems of these numbers are kept for validation: about a fifth, whatever their order and the seed."""
    mixed = sum(int(number) * 7**place for place, number in enumerate(sorted(numbers)))
    return bool(mixed % 5 == 0)


def load(config: TaskConfig) -> Task:
    """Problems of ``task.options.steps`` steps (1, 2, or both, the default), with numbers from 2 to ``largest`` (12).

    No answer is below 0. Numbers that validation has together never occur together in training.
    """
    refuse_settings(config, "path", "train_file", "validation_file", "question_field", "answer_field")
    if unknown := set(config.options) - OPTIONS.keys():
        raise TaskError(f"task.options.{min(unknown)}: word_problems has the options 'steps' and 'largest'")
    options: dict[str, Any] = {**OPTIONS, **config.options}
    steps, largest = options["steps"], options["largest"]
    if not (isinstance(steps, list) and steps and all(type(s) is int and s in STORIES for s in steps)):
        raise TaskError(f"task.options.steps = {steps!r}: use [1], [2] or [1, 2]")
    if type(largest) is not int or not 5 <= largest <= 1000:
        raise TaskError(f"task.options.largest = {largest!r}: use a whole number from 5 to 1000")
    stories = [story for s in sorted(set(steps)) for story in STORIES[s]]
    train = _draw(config.train_size or 2000, stories, largest, config.seed, "train")
    validation = _draw(config.validation_size or 200, stories, largest, config.seed, "validation")
    return make_task(config.name, train, validation, "number")


def _draw(size: int, stories: list[Story], largest: int, seed: int, split: Split) -> list[Problem]:
    def problem(rng: np.random.Generator) -> Problem | None:
        text, solve = stories[rng.integers(len(stories))]
        letters = "abc" if "{c}" in text else "ab"
        numbers = [int(n) for n in rng.integers(2, largest + 1, size=len(letters))]
        name, things = NAMES[rng.integers(len(NAMES))], THINGS[rng.integers(len(THINGS))]
        answer = solve(*numbers)
        if answer < 0 or word_problems_held_out(numbers) != (split == "validation"):
            return None
        return text.format(name=name, things=things, **dict(zip(letters, numbers, strict=True))), str(answer), {}

    few = f"there are too few different word problems with numbers up to {largest}"
    return draw(problem, size, seed, split, f"{few}; ask for fewer or raise task.options.largest")

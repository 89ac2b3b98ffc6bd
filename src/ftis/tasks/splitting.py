"""Seeded subsets and held-out problems, the same on every peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import numpy as np

from ftis.prompts import TaskError
from ftis.tasks.problems import Problem, asks

Split = Literal["train", "validation"]
T = TypeVar("T")


def generator(seed: int, split: Split) -> np.random.Generator:
    """Random numbers of one split, independent of the other's."""
    return np.random.default_rng([abs(seed), int(seed < 0), int(split == "validation")])


def draw(
    problem: Callable[[np.random.Generator], Problem | None], size: int, seed: int, split: Split, why_few: str
) -> list[Problem]:
    """``size`` different problems. ``problem`` draws one, or None for one of the other split.

    After a hundred draws for each there may still be too few: ``why_few`` is the TaskError's reason and remedy.
    """
    rng = generator(seed, split)
    drawn: dict[str, Problem] = {}
    for _ in range(100 * size):
        if (found := problem(rng)) is not None:
            drawn[found[0]] = found
            if len(drawn) == size:
                return list(drawn.values())
    raise TaskError(f"task.{split}_size = {size}: {why_few}")


def subset(items: Sequence[T], size: int | None, seed: int, split: Split) -> list[T]:
    """``size`` of ``items``, drawn by ``seed``, in their order; all without a size. A TaskError if there are fewer."""
    if size is None:
        return list(items)
    if size > len(items):
        raise TaskError(
            f"task.{split}_size = {size}: there are only {len(items)} problems; ask for at most {len(items)}"
        )
    return [items[i] for i in sorted(generator(seed, split).permutation(len(items))[:size])]


def hold_out(
    problems: Sequence[Problem], size: int | None, seed: int, where: str
) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and those held out for validation, ``size`` questions drawn by ``seed``.

    Without a size it is a tenth of the questions, at least 1 and at most 100. The copies of a held-out problem leave
    training too; validation has the first of them. A TaskError if nothing would be left to train on.
    """
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(asks(problem[0]), problem)
    questions = list(first)
    size = size or max(1, min(100, len(questions) // 10))
    if size >= len(questions):
        raise TaskError(
            f"{where}: holding out {size} of {len(questions)} different problems leaves none to train on; "
            "lower task.validation_size or add problems"
        )
    held_out = {question: first[question] for question in subset(questions, size, seed, "validation")}
    return [problem for problem in problems if asks(problem[0]) not in held_out], list(held_out.values())

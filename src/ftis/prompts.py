"""A task: problems to train on and to validate with, disjoint by question, from a function ``f(TaskConfig) -> Task``.

A split is drawn from the task's own seed, so peers with the same recipe hold the same problems in the same order. They
compare :attr:`Task.digest` to make sure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ftis.config import FtisError
from ftis.rollouts import Prompt

AnswerKind = Literal["number", "math", "exact", "reasoning_gym"]
"""The ways to compare two answers; see :func:`ftis.rewards.answers_equal`."""


class TaskError(FtisError):
    """Problems that cannot be read, split or rendered."""


@dataclass(frozen=True)
class Task:
    """Problems to train on and to validate with. See docs/extending.md."""

    name: str
    train: tuple[Prompt, ...]
    """Empty for a task that only evaluates."""
    validation: tuple[Prompt, ...]
    answer_kind: AnswerKind
    """The way to compare answers unless the recipe's ``reward.answer`` says otherwise."""
    digest: str
    """sha256 of the training questions and answers in order. Peers that train together must have the same."""
    copies: int = 0
    """Problems that training leaves out, since they are copies of held-out ones."""

    def __post_init__(self) -> None:
        if self.answer_kind not in get_args(AnswerKind):
            raise TaskError(
                f"task {self.name!r}: answer_kind = {self.answer_kind!r}; use one of {', '.join(get_args(AnswerKind))}"
            )

"""Loading a task by its name, and making one of problems. The author of a task needs :func:`make_task`:

from ftis.tasks.problems import make_task

def load(config):
    squares = [(f"{n} squared?", str(n * n), {}) for n in range(100)]
    return make_task(config.name, squares[10:], squares[:10], "number")
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ftis.config import TaskConfig, cut
from ftis.prompts import AnswerKind, Task, TaskError
from ftis.rollouts import Prompt
from ftis.seams import TASKS, look_up

Problem = tuple[str, str, Mapping[str, Any]]
"""Question, answer, and further columns for the reward function."""


def make_task(name: str, train: Iterable[Problem], validation: Iterable[Problem], answer_kind: AnswerKind) -> Task:
    """A task from (question, answer, columns) triples, with the digest that peers compare.

    Args:
        name: ``config.name``, for messages and records.
        train: in the same order on every peer; empty for a task that is for evaluation only.
        validation: problems whose questions are not in ``train``.

    Raises:
        TaskError: a question or an answer is not a string, the splits share a question, or there is no such
            ``answer_kind``.
    """
    where = f"task {name!r}"
    train, validation = list(train), list(validation)
    splits = [tuple(_prompts(problems, where)) for problems in (train, validation)]
    require_disjoint(train, validation, f"{where}: train and validation")
    agreed: list[Any] = [[question, answer] for question, answer, _ in train]
    if answer_kind == "reasoning_gym":  # it may depend on the library's version
        agreed.append(answer_kind)
    canonical = json.dumps(agreed, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return Task(name, splits[0], splits[1], answer_kind, digest)


def _prompts(problems: Iterable[tuple[Any, Any, Mapping[str, Any]]], where: str) -> Iterable[Prompt]:
    for item, (question, answer, columns) in enumerate(problems):
        for part, value in (("question", question), ("answer", answer)):
            if not isinstance(value, str):
                raise TaskError(f"{where}: the {part} of problem {item} is {excerpt(value)}; write it as a string")
        yield Prompt(item, question, answer, MappingProxyType(dict(columns)))


def refuse_settings(config: TaskConfig, *keys: str) -> None:
    """Refuse a recipe with keys that the task would ignore.

    Raises:
        TaskError: the first of ``keys`` that is set.
    """
    for key in keys:
        if getattr(config, key):
            raise TaskError(f"task.{key} = {getattr(config, key)!r}: means nothing to {config.name!r}; leave it out")


def asks(question: str) -> str:
    """A question with one space between words: the same for questions that differ in white space alone."""
    return " ".join(question.split())


def require_disjoint(train: Iterable[Problem], validation: Iterable[Problem], where: str) -> None:
    """Refuse validation problems that are training problems too.

    Raises:
        TaskError: how many questions the two share, and one of them.
    """
    shared = {asks(question) for question, _, _ in train} & {asks(question) for question, _, _ in validation}
    if shared:
        raise TaskError(
            f"{where}: share {len(shared)} questions, the first of them {excerpt(min(shared))}; "
            "remove them from one, or validation measures memory"
        )


def require_unseen(task: Task, ood: Task) -> None:
    """Refuse an out-of-distribution task that shares questions with the training problems.

    Raises:
        TaskError: how many questions they share, and one of them.
    """
    shared = {asks(prompt.question) for prompt in task.train} & {asks(prompt.question) for prompt in ood.validation}
    if shared:
        raise TaskError(
            f"ood task {ood.name!r}: {len(shared)} of its questions are trained on, the first of them "
            f"{excerpt(min(shared))}; remove them from one, or the evaluation measures memory"
        )


def load_task(config: TaskConfig) -> Task:
    """The problems that a recipe's ``[task]`` or ``[[ood]]`` section names.

    ``config.name`` is a built-in name, a built-in name with a data set after a colon
    (``reasoning_gym:basic_arithmetic``), or the dotted path of a function ``f(TaskConfig) -> Task``.

    Raises:
        RecipeError: the name is not built in and leads to no object.
        TaskError: the object is no such function, or its problems cannot be read or split.
    """
    family, colon, _ = config.name.partition(":")
    with_dataset = f"{family}:<dataset>"
    load = look_up(with_dataset if colon and with_dataset in TASKS else config.name, "task.name", TASKS)
    where = f"task.name = {config.name!r}"
    if not callable(load):
        raise TaskError(f"{where}: is a {type(load).__name__}, not a function; name a function f(TaskConfig) -> Task")
    task = load(config)
    if not isinstance(task, Task):
        raise TaskError(
            f"{where}: returned {excerpt(task)}, not a Task; return ftis.tasks.problems.make_task(config.name, ...)"
        )
    return task


def excerpt(value: Any) -> str:
    """``value`` as an error message shows it: its ``repr``, cut to 80 characters."""
    return cut(repr(value), 80)

"""Loading a task by its name, and making one of problems. The author of a task needs :func:`make_task`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ftis.config import TaskConfig, excerpt
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

    A TaskError if a question or an answer is not a string, the splits share a question, or there is no such kind.
    """
    where = f"task {name!r}"
    trained, validated = (tuple(_prompts(problems, where)) for problems in (train, validation))
    require_disjoint((p.question for p in trained), (p.question for p in validated), f"{where}: train and validation")
    agreed: list[Any] = [[prompt.question, prompt.answer] for prompt in trained]
    if answer_kind == "reasoning_gym":  # scores may depend on the library's version
        agreed.append(answer_kind)
    digest = hashlib.sha256(json.dumps(agreed, separators=(",", ":")).encode()).hexdigest()
    return Task(name, trained, validated, answer_kind, digest)


def _prompts(problems: Iterable[tuple[Any, Any, Mapping[str, Any]]], where: str) -> Iterable[Prompt]:
    for item, (question, answer, columns) in enumerate(problems):
        for part, value in (("question", question), ("answer", answer)):
            if not isinstance(value, str):
                raise TaskError(f"{where}: the {part} of problem {item} is {excerpt(value)}; write it as a string")
        yield Prompt(item, question, answer, MappingProxyType(dict(columns)))


def refuse_settings(config: TaskConfig, *keys: str) -> None:
    """Refuse a recipe with keys that the task would ignore: a TaskError names the first that is set."""
    for key in keys:
        if getattr(config, key):
            raise TaskError(f"task.{key} = {getattr(config, key)!r}: means nothing to {config.name!r}; leave it out")


def asks(question: str) -> str:
    """A question with one space between words: the same for questions that differ in white space alone."""
    return " ".join(question.split())


def _shared(train: Iterable[str], evaluated: Iterable[str]) -> set[str]:
    return set(map(asks, train)) & set(map(asks, evaluated))


def require_disjoint(train: Iterable[str], evaluated: Iterable[str], where: str) -> None:
    """Refuse questions to evaluate on that are trained on too: a TaskError counts them and names one."""
    if shared := _shared(train, evaluated):
        raise TaskError(
            f"{where}: share {len(shared)} questions, the first of them {excerpt(min(shared))}; "
            "remove them from one, or validation measures memory"
        )


def require_unseen(task: Task, ood: Task) -> None:
    """Refuse an out-of-distribution task that shares questions with the training problems."""
    if shared := _shared((p.question for p in task.train), (p.question for p in ood.validation)):
        raise TaskError(
            f"ood task {ood.name!r}: {len(shared)} of its questions are trained on, the first of them "
            f"{excerpt(min(shared))}; remove them from one, or the evaluation measures memory"
        )


def require_validation(task: Task, name: str) -> None:
    """Refuse the task ``name`` of a recipe if it has no problems to evaluate on."""
    if not task.validation:
        raise TaskError(f"task {name!r} has no problems to validate with: give it some, as evaluation needs them")


def load_task(config: TaskConfig) -> Task:
    """The problems that a recipe's ``[task]`` or ``[[ood]]`` section names.

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

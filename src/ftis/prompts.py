"""Problems and prompts: the task that a recipe names, and how a problem becomes the token ids of a prompt.

A task has problems to train on and problems to validate with, disjoint by question. Everything random about a split
follows from the task's own seed: peers that read the same recipe hold the same problems in the same order. They
compare :attr:`Task.digest` to make sure.

A task is a function ``f(TaskConfig) -> Task``. The built-in ones are in :mod:`ftis.tasks`; a recipe names any other by
its dotted path, and :func:`make_task` makes what it returns::

    def load(config):
        squares = [(f"{n} squared?", str(n * n), {}) for n in range(100)]
        return make_task(config.name, squares[10:], squares[:10], "number")
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ftis.config import FtisError, PromptConfig, TaskConfig
from ftis.rollouts import Prompt
from ftis.seams import TASKS, look_up

AnswerKind = Literal["number", "math", "exact"]
"""How two answers are compared; see :func:`ftis.rewards.answers_equal`."""

Problem = tuple[str, str, Mapping[str, Any]]
"""Question, answer, and further columns for the reward function."""


class TaskError(FtisError):
    """Problems that cannot be read, split or rendered."""


@dataclass(frozen=True)
class Task:
    """Problems to train on and to validate with. :func:`make_task` makes one."""

    name: str
    train: tuple[Prompt, ...]
    """Empty for a task that is for evaluation only."""
    validation: tuple[Prompt, ...]
    answer_kind: AnswerKind
    """How answers are compared unless the recipe's ``reward.answer`` says otherwise."""
    digest: str
    """sha256 of the training questions and answers in order. Peers that train together must have the same."""

    def __post_init__(self) -> None:
        if self.answer_kind not in get_args(AnswerKind):
            raise TaskError(
                f"task {self.name!r}: answer_kind = {self.answer_kind!r}; use one of {', '.join(get_args(AnswerKind))}"
            )


def load_task(config: TaskConfig) -> Task:
    """The problems that a recipe's ``[task]`` or ``[[ood]]`` section names.

    ``config.name`` is a built-in name, a built-in name with a data set after a colon
    (``reasoning_gym:basic_arithmetic``), or the dotted path of a function ``f(TaskConfig) -> Task``.

    Raises:
        RecipeError: the name is not built in and leads to no object.
        TaskError: the object is no such function, or its problems cannot be read or split as asked.
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
            f"{where}: returned {excerpt(task)}, not a Task; return ftis.prompts.make_task(config.name, ...)"
        )
    return task


def make_task(name: str, train: Sequence[Problem], validation: Sequence[Problem], answer_kind: AnswerKind) -> Task:
    """A task from (question, answer, columns) triples, with the digest that peers compare.

    Args:
        name: ``config.name``, which messages and records call the task by.
        train: in an order that is the same on every peer; empty for a task that is for evaluation only.
        validation: no question of these may be in ``train``.

    Raises:
        TaskError: a question or an answer is not a string, the splits share a question, or there is no such
            ``answer_kind``.
    """
    where = f"task {name!r}"
    splits = [tuple(_prompts(problems, where)) for problems in (train, validation)]
    require_disjoint(train, validation, f"{where}: train and validation")
    canonical = json.dumps([[question, answer] for question, answer, _ in train], separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return Task(name, splits[0], splits[1], answer_kind, digest)


def _prompts(problems: Iterable[tuple[Any, Any, Mapping[str, Any]]], where: str) -> Iterable[Prompt]:
    for item, (question, answer, columns) in enumerate(problems):
        for part, value in (("question", question), ("answer", answer)):
            if not isinstance(value, str):
                raise TaskError(f"{where}: the {part} of problem {item} is {excerpt(value)}; write it as a string")
        yield Prompt(item, question, answer, MappingProxyType(dict(columns)))


def refuse_settings(config: TaskConfig, *keys: str) -> None:
    """Refuse a recipe that sets keys which the task would ignore.

    Raises:
        TaskError: the first of ``keys`` that is set.
    """
    for key in keys:
        if getattr(config, key):
            raise TaskError(f"task.{key} = {getattr(config, key)!r}: means nothing to {config.name!r}; leave it out")


def require_disjoint(train: Iterable[Problem], validation: Iterable[Problem], where: str) -> None:
    """Refuse validation problems that are trained on.

    Raises:
        TaskError: how many questions the two share, and one of them.
    """
    shared = {question for question, _, _ in train} & {question for question, _, _ in validation}
    if shared:
        raise TaskError(
            f"{where}: share {len(shared)} questions, the first of them {excerpt(min(shared))}; "
            "remove them from one, or validation measures memory"
        )


def require_unseen(task: Task, ood: Task) -> None:
    """Refuse an out-of-distribution task some of whose problems are trained on.

    Raises:
        TaskError: how many questions they share, and one of them.
    """
    shared = {prompt.question for prompt in task.train} & {prompt.question for prompt in ood.validation}
    if shared:
        raise TaskError(
            f"ood task {ood.name!r}: {len(shared)} of its questions are trained on, the first of them "
            f"{excerpt(min(shared))}; remove them from one, or the evaluation measures memory"
        )


def render_prompt(prompt: Prompt, config: PromptConfig, tokenizer: Any) -> npt.NDArray[np.int32]:
    """Token ids of the text that a model continues, int32 [prompt length].

    With a chat template (and ``chat_template = "auto"``): a system message, unless the system prompt is empty, and a
    user message, up to where the assistant's turn begins. Otherwise the system prompt, a blank line and the user's
    turn as plain text, with the special tokens that the tokenizer puts around a text.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        TaskError: the prompt has no tokens, or the chat template refuses the messages.
    """
    user = config.template.replace("{question}", prompt.question)
    if config.chat_template == "auto" and tokenizer.chat_template:
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": user}]
        if config.system_prompt:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            raise TaskError(
                f"the tokenizer's chat template refuses the prompt of problem {prompt.item}: {error}; set "
                'prompt.system_prompt = "" if it takes no system message, or prompt.chat_template = "never"'
            ) from error
    else:
        text = f"{config.system_prompt}\n\n{user}" if config.system_prompt else user
        ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    if len(ids) == 0:
        raise TaskError(
            f"the prompt of problem {prompt.item} ({excerpt(prompt.question)}) has no tokens; "
            "put some text into prompt.template or prompt.system_prompt"
        )
    return np.array(ids, dtype=np.int32)


def excerpt(value: Any) -> str:
    """``value`` as an error message shows it: its ``repr``, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

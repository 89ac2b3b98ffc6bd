"""Problems and prompts: the task that a recipe names, and how a problem becomes the token ids of a prompt.

A task has problems to train on and problems to validate with, disjoint by question. A split is drawn from the task's
own seed, so peers with the same recipe hold the same problems in the same order. They compare :attr:`Task.digest` to
make sure.

A recipe names a function ``f(TaskConfig) -> Task``; see :mod:`ftis.tasks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ftis.config import FtisError, PromptConfig
from ftis.rollouts import Prompt

AnswerKind = Literal["number", "math", "exact"]
"""How two answers are compared; see :func:`ftis.rewards.answers_equal`."""


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
    """How answers are compared unless the recipe's ``reward.answer`` says otherwise."""
    digest: str
    """sha256 of the training questions and answers in order. Peers that train together must have the same."""

    def __post_init__(self) -> None:
        if self.answer_kind not in get_args(AnswerKind):
            raise TaskError(
                f"task {self.name!r}: answer_kind = {self.answer_kind!r}; use one of {', '.join(get_args(AnswerKind))}"
            )


def render_prompt(prompt: Prompt, config: PromptConfig, tokenizer: Any) -> npt.NDArray[np.int32]:
    """Token ids of the text that a model continues, int32 [prompt length].

    With a chat template (and ``chat_template = "auto"``): a system message, unless the system prompt is empty, and a
    user message, up to the start of the assistant's turn. Otherwise: the system prompt, a blank line and the user's
    turn as plain text, with the tokenizer's usual special tokens.

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

"""How a problem becomes the token ids that a model continues."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftis.config import PromptConfig
from ftis.prompts import TaskError
from ftis.rollouts import Ints, Prompt
from ftis.tasks.problems import excerpt


def render_prompt(prompt: Prompt, config: PromptConfig, tokenizer: Any) -> Ints:
    """Token ids of the text that a model continues, int32 [prompt length].

    With a chat template (and ``chat_template = "auto"``): a system message, unless the system prompt is empty, a user
    and an assistant message for each example, and a user message, up to the start of the assistant's turn. Otherwise
    the same as plain text, with the tokenizer's usual special tokens: each part but the last is followed by a blank
    line, and an example's completion stands right behind its user turn. The prefill comes last.

    Args:
        tokenizer: a tokenizer of transformers.

    Raises:
        TaskError: the prompt has no tokens, or the chat template refuses the messages.
    """
    if config.chat_template == "auto" and tokenizer.chat_template:
        ids = _of_chat(prompt, conversation(prompt, config), config.prefill, tokenizer)
    else:
        before = [config.system_prompt] if config.system_prompt else []
        solved = [_user_turn(config, example.question) + example.completion for example in config.examples]
        text = "\n\n".join([*before, *solved, _user_turn(config, prompt.question) + config.prefill])
        ids = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    if len(ids) == 0:
        raise TaskError(
            f"the prompt of problem {prompt.item} ({excerpt(prompt.question)}) has no tokens; "
            "put some text into prompt.template or prompt.system_prompt"
        )
    return np.array(ids, dtype=np.int32)


def conversation(prompt: Prompt, config: PromptConfig) -> list[dict[str, str]]:
    """The messages of a prompt, without its prefill."""
    messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    for example in config.examples:
        turns = {"user": _user_turn(config, example.question), "assistant": example.completion}
        messages += [{"role": role, "content": content} for role, content in turns.items()]
    return [*messages, {"role": "user", "content": _user_turn(config, prompt.question)}]


def _user_turn(config: PromptConfig, question: str) -> str:
    return config.template.replace("{question}", question)


def _of_chat(prompt: Prompt, messages: list[dict[str, str]], prefill: str, tokenizer: Any) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise TaskError(
            f"the tokenizer's chat template refuses the prompt of problem {prompt.item}: {error}; set "
            'prompt.system_prompt = "" if it takes no system message, or prompt.chat_template = "never"'
        ) from error
    ids: list[int] = tokenizer(text + prefill, add_special_tokens=False, verbose=False)["input_ids"]
    return ids

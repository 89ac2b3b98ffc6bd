"""How a problem becomes the token ids that a model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ftis.config import PromptConfig
from ftis.prompts import TaskError
from ftis.rollouts import Ints, Prompt
from ftis.tasks.problems import excerpt

TODAY = datetime(2025, 1, 1, tzinfo=UTC)
"""The date for chat templates that write today's: the prompts of a run must not differ from day to day."""
DIRECTIVES = "aAbBdeHIjmMpSyY"
"""Of ``strftime``, those that are replaced."""
_DATED = "".join(f"|replace('%{directive}', '{TODAY.strftime(f'%{directive}')}')" for directive in DIRECTIVES)
_NOW = f"{{%- macro strftime_now(format) -%}}{{{{ format{_DATED} }}}}{{%- endmacro %}}{{{{ '' }}}}"
"""Stands before a template, as transformers lets nobody pass a function to one."""


def render_prompt(prompt: Prompt, config: PromptConfig, tokenizer: Any) -> Ints:
    """Token ids of :func:`prompt_text`, int32 [prompt length].

    Args:
        tokenizer: a tokenizer of transformers. Plain text gets its usual special tokens, but no end of sequence.

    Raises:
        TaskError: the prompt has no tokens, or the chat template refuses the messages.
    """
    text, plain = prompt_text(prompt, config, tokenizer), not is_chat(config, tokenizer)
    ids = tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"]
    if plain and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids = ids[:-1]
    if len(ids) == 0:
        raise TaskError(
            f"the prompt of problem {prompt.item} ({excerpt(prompt.question)}) has no tokens; "
            "put some text into prompt.template or prompt.system_prompt"
        )
    return np.array(ids, dtype=np.int32)


def is_chat(config: PromptConfig, tokenizer: Any) -> bool:
    """Whether prompts are written by the tokenizer's chat template."""
    return config.chat_template == "auto" and bool(tokenizer.chat_template)


def prompt_text(prompt: Prompt, config: PromptConfig, tokenizer: Any) -> str:
    """The text that a model continues.

    With a chat template (and ``chat_template = "auto"``): a system message, unless the system prompt is empty, a user
    and an assistant message for each example, and a user message, up to the start of the assistant's turn. Otherwise
    the same as plain text: each part but the last is followed by a blank line, and an example's completion stands right
    behind its user turn. The prefill comes last.

    Raises:
        TaskError: the chat template refuses the messages.
    """
    if is_chat(config, tokenizer):
        return chat_text(conversation(prompt, config), config, tokenizer, f"the prompt of problem {prompt.item}")
    before = [config.system_prompt] if config.system_prompt else []
    solved = [_user_turn(config, example.question) + example.completion for example in config.examples]
    return "\n\n".join([*before, *solved, _user_turn(config, prompt.question) + config.prefill])


def conversation(prompt: Prompt, config: PromptConfig) -> list[dict[str, str]]:
    """The messages of a prompt, without its prefill."""
    messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    for example in config.examples:
        turns = {"user": _user_turn(config, example.question), "assistant": example.completion}
        messages += [{"role": role, "content": content} for role, content in turns.items()]
    return [*messages, {"role": "user", "content": _user_turn(config, prompt.question)}]


def _user_turn(config: PromptConfig, question: str) -> str:
    return config.template.replace("{question}", question)


def chat_text(messages: Sequence[Mapping[str, str]], config: PromptConfig, tokenizer: Any, of: str) -> str:
    """Messages by the chat template: up to the assistant's next turn with its prefill, or with its last turn whole.

    Args:
        of: whose messages they are, for the error.

    Raises:
        TaskError: the template refuses the messages.
    """
    from jinja2 import TemplateError

    goes_on = messages[-1]["role"] != "assistant"
    template, options = tokenizer.chat_template, config.template_options
    if isinstance(template, str) and "strftime_now" in template:
        options = {**options, "chat_template": _NOW + template}
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=goes_on, tokenize=False, **options)
    except TemplateError as error:
        raise TaskError(
            f"the tokenizer's chat template refuses {of}: {error}; set "
            'prompt.system_prompt = "" if it takes no system message, or prompt.chat_template = "never"'
        ) from error
    return f"{text}{config.prefill if goes_on else ''}"

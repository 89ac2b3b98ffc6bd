"""A problem as the token ids that a model continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ftis.config import PromptConfig, excerpt
from ftis.prompts import TaskError
from ftis.rollouts import Ints, Prompt

Tool = Callable[..., Any]

TODAY = {
    **{"%A": "Wednesday", "%a": "Wed", "%B": "January", "%b": "Jan", "%d": "01", "%-d": "1", "%e": " 1", "%j": "001"},
    **{"%m": "01", "%-m": "1", "%Y": "2025", "%y": "25", "%F": "2025-01-01", "%D": "01/01/25"},
    **{"%H": "00", "%I": "12", "%M": "00", "%S": "00", "%p": "AM", "%T": "00:00:00"},
}
"""The date for chat templates that write today's, by ``strftime``'s directives: the prompts of a run must not differ
from day to day."""
_DATED = "".join(f"|replace('{directive}', '{text}')" for directive, text in TODAY.items())
_NOW = f"{{%- macro strftime_now(format) -%}}{{{{ format{_DATED} }}}}{{%- endmacro %}}\n"
"""The text before a template, since transformers passes no functions to one."""
ARGUMENTS = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of ``apply_chat_template`` that are no variables of a template."""


def dated(template: str) -> str:
    """A chat template that writes :data:`TODAY` for the present date."""
    return _NOW + template if "strftime_now" in template else template


def render_prompt(prompt: Prompt, config: PromptConfig, tokenizer: Any, tools: Sequence[Tool] = ()) -> Ints:
    """Token ids of :func:`prompt_text`, int32 [prompt length].

    Args:
        tokenizer: of transformers. Plain text gets its usual special tokens, but no end of sequence.
        tools: functions that the chat template describes to the model.

    A TaskError if the prompt has no tokens, or the chat template refuses the messages.
    """
    text, plain = prompt_text(prompt, config, tokenizer, tools), not is_chat(config, tokenizer)
    ids = tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"]
    ended = bool(plain and ids) and ids[-1] == tokenizer.eos_token_id != tokenizer.unk_token_id
    if ended and not text.endswith(tokenizer.eos_token):
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


def prompt_text(prompt: Prompt, config: PromptConfig, tokenizer: Any, tools: Sequence[Tool] = ()) -> str:
    """The text that a model continues.

    With a chat template (and ``chat_template = "auto"``): a system message, unless the system prompt is empty, a user
    and an assistant message for each example, and a user message, up to the start of the assistant's turn. Otherwise
    the same as plain text: a blank line stands between the parts, and an example's completion right after its user
    turn. The prefill comes last. Arguments and errors are :func:`render_prompt`'s.
    """
    if is_chat(config, tokenizer):
        whose = f"the prompt of problem {prompt.item}"
        return chat_text(conversation(prompt, config), config, tokenizer, whose, tools)
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


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    config: PromptConfig,
    tokenizer: Any,
    whose: str,
    tools: Sequence[Tool] = (),
) -> str:
    """Messages by the chat template: up to the assistant's next turn with its prefill, or with its last turn whole.

    ``whose`` names the messages in the TaskError if the template refuses them; the rest is :func:`render_prompt`'s.
    """
    from jinja2 import TemplateError

    goes_on = messages[-1]["role"] != "assistant"
    options = config.template_options | ({"tools": list(tools)} if tools else {})
    if taken := sorted(ARGUMENTS & config.template_options.keys()):
        raise TaskError(f"prompt.template_options: {taken[0]} is no variable of a chat template: leave it out")
    try:
        template = dated(tokenizer.get_chat_template(tools=list(tools) or None))
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=goes_on, tokenize=False, **options
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise TaskError(
            f"the tokenizer's chat template refuses {whose}: {error}; set "
            'prompt.system_prompt = "" if it takes no system message, or prompt.chat_template = "never"'
        ) from error
    return f"{text}{config.prefill if goes_on else ''}"

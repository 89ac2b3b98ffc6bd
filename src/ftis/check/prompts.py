"""Remarks on a recipe's prompts, as the tokenizers and chat templates of its models write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftis.config import excerpt
from ftis.preparing.prompting import Rendered
from ftis.recipe.parsing import toml


def about_prompts(found: Sequence[Rendered]) -> list[str]:
    """Lines on prompts, each with the model that it is about."""
    return list(dict.fromkeys(f"{one.model}{text}" for one in found for text in _remarks(one)))


def _remarks(one: Rendered) -> Iterator[str]:
    if one.unread:
        yield (
            f" reads {one.unread} of {one.tokens} tokens of a prompt as unknown: write problems and prompt in "
            f"characters or words that its tokenizer has, or train another model"
        )
    yield from (f": its chat template {text}" for text in _by_template(one))


def _by_template(one: Rendered) -> Iterator[str]:
    if one.end:
        yield (
            f"ends a turn by {one.end}, and completions do not end there: set sampling.end_tokens = "
            f'["{one.end}"] if the model writes it'
        )
    if one.changed:
        yield (
            f"changes the completion of an example ({excerpt(one.changed)}), so that it shows another form than the "
            f'reward asks for: give prompt.think_tag another name, or set prompt.chat_template = "never"'
        )
    if one.thought:  # as Qwen3's does without thinking
        by = ", ".join(f"{name} = {toml(value)}" for name, value in one.prompt.template_options.items())
        done = f"begins the completion with {one.thought}"
        if one.thought.startswith("</"):
            done = f"closes <{one.thought[2:]}…{one.thought} before the completion begins{f' ({by})' if by else ''}"
        yield (
            f'{done}; the reward asks the completion itself for this tag: set reward.extract = "last_number" or '
            f'"boxed", or give prompt.think_tag another name'
        )

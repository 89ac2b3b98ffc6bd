"""A look at a recipe's prompts with its models' tokenizers: refusals of what would fail, and facts for remarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ftis.config import PromptConfig, Recipe, RewardConfig, RunError, excerpt
from ftis.engines.models import generation_defaults, load_config, with_tokens_of
from ftis.engines.samplers import check_stop
from ftis.engines.texts import left_out
from ftis.engines.tokenizers import load_tokenizer, tokens_of, unread
from ftis.environments.contract import open_environment
from ftis.environments.play import require_tools
from ftis.models import starters
from ftis.policy import own_ends, positions_of
from ftis.prompts import Task
from ftis.recipe.arms import Arm
from ftis.rewards.scoring import is_built_in
from ftis.rollouts import Prompt
from ftis.tasks.rendering import Tool, chat_text, conversation, is_chat, prompt_text, render_prompt

SPECIAL = 16
"""Tokens of a prompt that may stand for no text: those that a tokenizer or a chat template adds."""
MOST_BEGUN = 64
"""Problems of a task whose episodes are begun to see their prompts: the ones with the longest questions."""
MOST_COMPARED = 16
"""How many of these play a turn in two processes, and of how many problems the prompts' unknown tokens are counted."""
ANSWER = "ANSWER"
"""A stand-in for a completion, behind which a turn's end is looked for."""


class Rendered(NamedTuple):
    """A recipe's prompt as a model's tokenizer writes it. Empty texts and zeros call for no remark.

    Attributes:
        unread, tokens: the number of a prompt's unknown tokens, and of all its tokens.
        end: the token that ends a turn there. No completion ends at it, so the model would go on.
        changed: an example's completion, if the prompt does not hold it unchanged.
        thought: the tag with which the prompt ends, though the reward asks the completion for it.
    """

    model: str
    prompt: PromptConfig
    unread: int
    tokens: int
    end: str = ""
    changed: str = ""
    thought: str = ""


def look_at_prompts(arms: Sequence[Arm], tasks: Sequence[Sequence[Task]]) -> list[Rendered]:
    """Refuse prompts that a peer's model cannot take.

    Args:
        tasks: of each arm, the task that is trained on and those out of distribution.

    Returns:
        each model's prompts that call for a remark.

    Raises:
        RecipeError: a stop string holds a token that text leaves out.
        TaskError: a chat template refuses a problem's messages, or an environment's tools.
        EpisodeError: an environment fails, or depends on its process.
        RunError: a prompt with its completion is longer than the model, holds a token without embedding, or asks for
            tags that text leaves out.
    """
    asked: dict[tuple[str, ...], tuple[str, Recipe, Sequence[Task]]] = {}  # arms share most of these
    for arm, of_arm in zip(arms, tasks, strict=True):
        recipe, sampling = arm.recipe, arm.recipe.sampling
        texts = [one.model_dump_json() for one in (recipe.prompt, recipe.reward, recipe.task, *recipe.ood)]
        texts.append(sampling.model_dump_json(include={"max_completion_length", "end_tokens", "stop"}))
        for peer in recipe.peers:
            asked.setdefault((starters.place_of(peer.model), *texts), (peer.model, recipe, of_arm))
    found: list[Rendered] = []
    for (place, *_), (model, recipe, of_arm) in asked.items():
        tokenizer, most = load_tokenizer(place), recipe.sampling.max_completion_length
        check_stop(recipe.sampling.stop, tokenizer, model)
        _require_tags(model, recipe, tokenizer)
        counts = [(0, 0)]
        for tools, problems in _begun(recipe, of_arm):
            require_tools(tools, recipe.prompt, tokenizer)
            require_fit(model, place, recipe.prompt, most, tokenizer, problems, list(tools.values()))
            for _, problem in problems[:MOST_COMPARED]:
                text = prompt_text(problem, recipe.prompt, tokenizer, tools=list(tools.values()))
                counts.append(unread(tokenizer, text))
        one = Rendered(model, recipe.prompt, *max(counts))
        chat = is_chat(recipe.prompt, tokenizer)
        found.append(_by_template(one, place, recipe, of_arm[0].train[0], tokenizer) if chat else one)
    return [one for one in found if one.unread or one.end or one.changed or one.thought]


def _by_template(one: Rendered, place: str, recipe: Recipe, problem: Prompt, tokenizer: Any) -> Rendered:
    prompt, tag = recipe.prompt, recipe.prompt.think_tag
    ends = {*tokens_of(tokenizer, own_ends(tokenizer, generation_defaults(place))), *recipe.sampling.end_tokens}
    end = _end_of_turn(problem, prompt, tokenizer)
    text = prompt_text(problem, prompt, tokenizer)
    changed = [example.completion for example in prompt.examples if example.completion.strip() not in text]
    bare = prompt_text(problem, prompt.model_copy(update={"prefill": ""}), tokenizer).rstrip()
    tags = (f"<{tag}>", f"</{tag}>") if _asks_for_tags(recipe.reward) else ()
    thought = next((tag for tag in tags if bare.endswith(tag)), "")
    return one._replace(end="" if end in ends else end, changed=changed[0] if changed else "", thought=thought)


def _begun(recipe: Recipe, tasks: Sequence[Task]) -> Iterator[tuple[Mapping[str, Tool], list[tuple[str, Prompt]]]]:
    """Each environment's tools and named problems, as their episodes begin; then no tools and all other problems."""
    plain: list[tuple[str, Prompt]] = []
    for n, (config, task) in enumerate(zip((recipe.task, *recipe.ood), tasks, strict=True)):
        of_task = [
            (f"task {task.name!r}, {split} problem {problem.item}", problem)
            for split, problems in (("training", task.train if n == 0 else ()), ("validation", task.validation))
            for problem in problems
        ]
        if config.environment is None:
            plain += of_task
            continue
        longest = sorted(of_task, key=lambda named: -len(named[1].question))[:MOST_BEGUN]
        environment = open_environment(config.environment)
        try:
            begun = [(name, environment.begun(problem)) for name, problem in longest]
            environment.require_alike([problem for _, problem in longest[:MOST_COMPARED]])
        finally:
            environment.stop()
        yield environment.tools, begun
    yield {}, plain


def _require_tags(model: str, recipe: Recipe, tokenizer: Any) -> None:
    prompt = recipe.prompt
    if not _asks_for_tags(recipe.reward):
        return
    tags = [f"<{slash}{tag}>" for tag in (prompt.think_tag, prompt.answer_tag) for slash in ("", "/")]
    special = left_out(tokenizer)
    if lost := [tag for tag in tags if tag in special]:
        raise RunError(
            f"{lost[0]} is a special token of {model}, which text leaves out, so no completion would earn the reward: "
            f"give prompt.think_tag and prompt.answer_tag other names, or set reward.extract"
        )


def _asks_for_tags(reward: RewardConfig) -> bool:
    return reward.extract == "tags" and is_built_in(reward)


def require_fit(
    model: str,
    place: str,
    prompt: PromptConfig,
    most: int,
    tokenizer: Any,
    problems: Sequence[tuple[str, Prompt]],
    tools: Sequence[Tool] = (),
) -> None:
    """Refuse prompts that a model cannot take with a completion of ``most`` tokens.

    Args:
        place: the directory or Hub id of the model.
        problems: each with its name in messages.
        tools: an environment's, which the chat template describes.

    Raises:
        TaskError, RunError: as :func:`look_at_prompts`.
    """
    positions, rows = _size(place, tokenizer)
    without = [token for token, number in tokenizer.get_vocab().items() if rows is not None and number >= rows]
    for _, problem in problems if without else ():
        text = prompt_text(problem, prompt, tokenizer, tools=tools)
        if lost := [token for token in without if token in text]:
            raise RunError(
                f"{model} has no embedding of {lost[0]!r}, which the prompts hold: resize its embeddings "
                f"(model.resize_token_embeddings), or write prompts without it"
            )
    room = (positions or sys.maxsize) - most

    def length(problem: Prompt) -> int:
        return len(render_prompt(problem, prompt, tokenizer, tools=tools))

    candidates = _long(problems, prompt, tokenizer, room, tools)
    longest = [(n, *named) for named in candidates if (n := length(named[1])) > room]
    if longest:
        tokens, name, problem = max(longest, key=lambda found: found[0])
        raise RunError(
            f"{name} ({excerpt(problem.question)}): its prompt has {tokens} tokens, and with a completion of {most} "
            f"that is more than the {positions} positions of {model}; {len(longest):,} of {len(problems):,} problems "
            f"are too long: leave them out, shorten the prompt, or lower sampling.max_completion_length"
        )


def _long(
    problems: Sequence[tuple[str, Prompt]], prompt: PromptConfig, tokenizer: Any, most: int, tools: Sequence[Tool]
) -> list[tuple[str, Prompt]]:
    """The problems whose prompts may have more than ``most`` tokens: a token stands for a byte at least.

    The text around a question is as long as around the first, so that few of many problems have to be rendered.
    """
    if not problems:
        return []
    times = prompt.template.count("{question}")

    def size(text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    first = problems[0][1]
    around = size(prompt_text(first, prompt, tokenizer, tools=tools)) - times * size(first.question) + SPECIAL
    return [(name, problem) for name, problem in problems if around + times * size(problem.question) > most]


def _size(place: str, tokenizer: Any) -> tuple[int | None, int | None]:
    """A model's positions and its embeddings' rows, as far as its configuration says them."""
    with suppress(OSError, ValueError):
        config = with_tokens_of(place, tokenizer, load_config(place))
        return positions_of(config), getattr(config.get_text_config(decoder=True), "vocab_size", None)
    return None, None


def _end_of_turn(problem: Prompt, prompt: PromptConfig, tokenizer: Any) -> str:
    """The token by which a chat template ends turns; "" for plain text."""
    turns = [*conversation(problem, prompt), {"role": "assistant", "content": ANSWER}]
    behind = chat_text(turns, prompt, tokenizer, "an answered problem").rpartition(ANSWER)[2].lstrip()
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return max((token for token in added if behind.startswith(token)), key=len, default="")

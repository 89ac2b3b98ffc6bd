"""A peer's membership of its swarm, from the recipe: for local, joined and replayed runs, and for a trainer of TRL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from ftis.admission import Admitter, Score, Terms
from ftis.codec import MOST_BYTES, Header
from ftis.codec import VERSION as WIRE_VERSION
from ftis.config import Recipe, RecipeError
from ftis.engines.stops import cut_at
from ftis.engines.tokenizers import ids_of, tokenizer_fingerprint, tokens_of
from ftis.environments.play import Player
from ftis.member import Cursor, Member, PromptIds, wanted
from ftis.objectives import resolve
from ftis.policy import positions_of
from ftis.prompts import Task
from ftis.rollouts import Group, Ints, Prompt
from ftis.schedule import assigned
from ftis.selection import Selection
from ftis.swarm.facts import agreement, run_id
from ftis.text.messages import TextReader, end_of_text, spoken, terms_of_text, write_groups
from ftis.text.token_bytes import TokenBytes
from ftis.text.turns import split

LONGER = 2
"""A completion of another tokenizer may take this many times the longest completion, in a peer's own tokens."""


class Speaker(Protocol):
    """The model of a peer, as far as its messages depend on it."""

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def vocab_size(self) -> int:
        """Ids that the model can embed."""

    @property
    def end_ids(self) -> frozenset[int]:
        """All ids by which the peer ends completions: its model's own and the recipe's."""

    def detokenize(self, completion_ids: Sequence[int]) -> str: ...


def member_of(
    recipe: Recipe,
    name: str,
    task: Task,
    speaker: Speaker,
    own_ends: Collection[int],
    render: Callable[[Prompt], Ints],
    score: Score,
    selections: tuple[Selection, ...],
    *,
    cursor: Cursor = Cursor(),  # noqa: B008 - frozen
    max_staleness: int,
    max_seconds: float,
    episodes: Player | None,
) -> Member:
    """The member ``name`` of the recipe's swarm.

    Args:
        recipe: with exactly the peers of this swarm.
        own_ends: the ids by which its model ends completions, whatever the recipe says.
        max_staleness: the most rounds by which a message may be late.
        max_seconds: the most time spent on one message.
        episodes: of the task's environment, if it has one.

    Raises:
        RecipeError: a turn that is exchanged as text ends with a token of the text.
        AlignmentError: text is exchanged, and the tokens' bytes, or the token by which the model ends, are unknown.
    """
    facts, sampling = agreement(recipe, task.digest, WIRE_VERSION), recipe.sampling
    run = run_id({key: facts[key] for key in facts.keys() - {"rounds"}})  # a longer run takes messages of before
    fingerprint = tokenizer_fingerprint(speaker.tokenizer, tokens_of(speaker.tokenizer, speaker.end_ids))
    of_round = partial(assigned, recipe, len(task.train))
    terms = Terms(
        run=run,
        tokenizer=fingerprint,
        temperature=sampling.temperature,
        vocab_size=speaker.vocab_size,
        end_ids=speaker.end_ids,
        group_size=recipe.rollouts_per_group,
        max_completion_length=sampling.max_completion_length,
        stop=sampling.stop,
        prompts=task.train,
        assigned=of_round,
        wanted=lambda sender, round: wanted(selections, sender, round, of_round(sender, round)),
        roster=frozenset(p.name for p in recipe.peers),
        max_groups=recipe.most_prompts_per_peer,
        max_staleness=max_staleness,
        max_seconds=max_seconds,
    )
    prompt_ids = PromptIds(task.train, render, episodes is not None and episodes.environment.takes_seed)
    if recipe.exchange == "text" and len(recipe.peers) > 1:
        admitter, write = text_form(recipe, name, speaker, own_ends, prompt_ids, terms, score, episodes)
    else:
        admitter = Admitter(terms, score, up_to(sampling.stop, speaker.detokenize), episodes=episodes)
        write = tuple
    return Member(
        config=recipe.peer(name),
        recipe=recipe,
        task=task,
        render=render,
        prompt_ids=prompt_ids,
        admitter=admitter,
        header=Header(run, 0, name, fingerprint, sampling.temperature, sampling.top_k, sampling.top_p),
        objective=resolve(recipe.objective),
        selections=selections,
        detokenize=speaker.detokenize,
        write=write,
        cursor=cursor,
    )


def text_form(
    recipe: Recipe,
    name: str,
    speaker: Speaker,
    own_ends: Collection[int],
    prompt_ids: PromptIds,
    terms: Terms,
    score: Score,
    player: Player | None,
) -> tuple[Admitter, Callable[[Sequence[Group]], Sequence[Group]]]:
    """An admitter of messages of text, and the function that writes own groups as text."""
    sampling = recipe.sampling
    positions = positions_of(speaker.model.config) or sys.maxsize

    def most_tokens(item: int, round: int | None) -> int:
        return min(LONGER * sampling.max_completion_length, positions - len(prompt_ids(item, round)))

    known = TokenBytes.of(speaker.tokenizer)
    end_id = end_of_text(f"peer {name!r}", known, own_ends, ids_of(speaker.tokenizer, sampling.end_tokens))
    # An end with bytes is sent as text. Peers of one fingerprint have the same ends, so they number them alike.
    ends = [end for end in sorted(terms.end_ids) if not known.sizes(np.array([end]))[0]]
    reader = TextReader(terms.tokenizer, known, end_id, ends, most_tokens)
    write = partial(write_groups, known=known, end_ids=ends, most_bytes=MOST_BYTES * sampling.max_completion_length)
    if player is not None:
        if len(ends) < len(terms.end_ids):
            raise RecipeError(
                f"sampling.end_tokens: peer {name!r} ends turns with a token that is text, which cannot end a turn if "
                f"text is exchanged: name it in sampling.stop instead"
            )
        player, reader, write = turn_by_turn(player, reader, write)
    detokenize, text_of = (up_to(sampling.stop, decode) for decode in (speaker.detokenize, spoken))
    return Admitter(terms_of_text(terms), score, detokenize, text_of, reader, player), write


def turn_by_turn(
    player: Player, reader: TextReader, write: partial[list[Group]]
) -> tuple[Player, TextReader, partial[list[Group]]]:
    """A player of episodes that come as text, and a reader and a writer of their turns."""

    def bytes_as_text(ids: Sequence[int]) -> str:
        return reader.known.join(np.array(ids, np.int32)).tobytes().decode("utf-8", "replace")

    player = replace(player, detokenize=bytes_as_text, most_read=reader.most_tokens)
    reader = replace(reader, turns=partial(split, stop=player.stop, most=player.most_turns))
    return player, reader, partial(write, turns=player.turns)


def up_to(stop: Sequence[str], text_of: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """``text_of`` that ends after the first stop string."""
    return lambda ids: cut_at(stop, text_of(ids))


def end_tokens_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, text: bool = False) -> list[str]:
    """The recipe's end tokens for a peer. If ``text`` is exchanged, it has none that its vocabulary lacks."""
    vocabulary = tokenizer.get_vocab()
    text = text or recipe.exchange == "text"
    return [token for token in recipe.sampling.end_tokens if token in vocabulary or not text]

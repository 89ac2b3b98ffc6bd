"""Token ids or text: the form in which the peers of an arm exchange completions, by their vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ftis.config import Recipe, RunError
from ftis.engines.models import generation_defaults
from ftis.engines.places import TOKENIZER
from ftis.engines.tokenizers import ids_of, load_tokenizer, tokens_of, vocabulary_digest
from ftis.models import starters
from ftis.policy import own_ends
from ftis.recipe.arms import Arm
from ftis.text.messages import end_of_text
from ftis.text.token_bytes import TokenBytes


def with_exchange(arm: Arm) -> Arm:
    """The arm with ``exchange`` settled in each swarm of several: text if their vocabularies differ, else ids.

    A joined peer knows its own vocabulary alone, and leaves ``auto`` as it is.

    Raises:
        RunError: peers are to exchange ids, but mean other tokens by them or end completions by others.
        AlignmentError: peers are to exchange text, but their tokens' bytes are not known.
    """
    recipe = arm.recipe
    known = {peer.name: vocabulary(peer.model, recipe.sampling.end_tokens) for peer in recipe.peers}
    _check_ends(arm, known)
    return replace(arm, swarms=tuple(_settled(arm.name, swarm, known) for swarm in arm.swarms))


def _check_ends(arm: Arm, known: Mapping[str, Vocabulary]) -> None:
    """Refuse an end token that no peer has or, if ids are exchanged, that any peer lacks. With text, an end token of
    one peer suffices."""
    recipe = arm.recipe
    known_to = [([name], one.ends) for name, one in known.items() if recipe.exchange == "ids"]
    if len(known) > 1 or recipe.exchange != "text":
        known_to.append((list(known), frozenset().union(*(one.ends for one in known.values()))))
    for names, ends in known_to:
        if unknown := [token for token in recipe.sampling.end_tokens if token not in ends]:
            models = ", ".join(dict.fromkeys(recipe.peer(name).model for name in names))
            raise RunError(
                f"arm {arm.name!r}: sampling.end_tokens names {unknown[0]!r}, which is no token of {models}: write it "
                f'as its tokenizer does; if the peers\' tokenizers differ, let all set exchange = "text"'
            )


def _settled(arm: str, swarm: Recipe, of_arm: Mapping[str, Vocabulary]) -> Recipe:
    if len(swarm.peers) == 1:
        return swarm
    known = {peer.name: of_arm[peer.name] for peer in swarm.peers if peer.name in of_arm}
    differ = len({one.ids for one in known.values()}) > 1
    if swarm.exchange == "text" or (swarm.exchange == "auto" and differ):
        for name in known:
            place = starters.place_of(swarm.peer(name).model)
            _check_text(place, _written(place), f"peer {name!r}", tuple(swarm.sampling.end_tokens))
        return swarm.model_copy(update={"exchange": "text"})
    if differ:
        by_peer = ", ".join(f"{name}: {one.ids[:8]}" for name, one in known.items())
        raise RunError(
            f"arm {arm!r}: the peers' tokenizers differ ({by_peer}), so their token ids mean different text; "
            f'take models of one family, or set exchange = "text"'
        )
    if len({one.ends for one in known.values()}) > 1:
        by_peer = ", ".join(f"{name}: {' and '.join(sorted(one.own_ends))}" for name, one in known.items())
        ends = {token for one in known.values() for token in one.ends}
        every = ", ".join(f'"{token}"' for token in sorted(ends))
        raise RunError(
            f"arm {arm!r}: the peers' models end completions by different tokens ({by_peer}): set "
            f"sampling.end_tokens = [{every}], so that every peer ends at each of them"
        )
    return swarm if len(known) < len(swarm.peers) else swarm.model_copy(update={"exchange": "ids"})


@dataclass(frozen=True)
class Vocabulary:
    """The facts of a tokenizer that a run checks beforehand. A large one takes seconds to load, so they are kept.

    Attributes:
        ids: a digest of its map token → id. Tokenizers with one digest mean the same text by equal ids.
        own_ends: the tokens by which its model ends completions, of the tokenizer and of its generation defaults.
        ends: ``own_ends``, and the tokens of ``sampling.end_tokens`` that the tokenizer has.
    """

    ids: str
    own_ends: frozenset[str]
    ends: frozenset[str]


def vocabulary(model: str, end_tokens: Sequence[str]) -> Vocabulary:
    """The vocabulary of a model's tokenizer.

    Raises:
        ModelError: there is none.
    """
    place = starters.place_of(model)
    return _vocabulary(place, _written(place), tuple(end_tokens))


@lru_cache(maxsize=64)
def _vocabulary(place: str, written: int, end_tokens: tuple[str, ...]) -> Vocabulary:
    tokenizer = load_tokenizer(place)
    tokens = tokenizer.get_vocab()
    own = frozenset(tokens_of(tokenizer, own_ends(tokenizer, generation_defaults(place))))
    return Vocabulary(vocabulary_digest(tokenizer), own, own | {token for token in end_tokens if token in tokens})


@lru_cache(maxsize=64)
def _check_text(place: str, written: int, who: str, end_tokens: tuple[str, ...]) -> None:
    known = _token_bytes(place, written)
    ends = own_ends(known.tokenizer, generation_defaults(place))
    end_of_text(who, known, ends, ids_of(known.tokenizer, end_tokens))


@lru_cache(maxsize=1)
def _token_bytes(place: str, written: int) -> TokenBytes:
    return TokenBytes.of(load_tokenizer(place))


def _written(place: str) -> int:
    """The time of the newest file on a model's tokenizer and ends; 0 if this machine has none yet."""
    files = [Path(place) / name for name in (TOKENIZER, "config.json", "generation_config.json")]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)

"""Tokenizers: loaded as their files say, compared by their vocabularies, and asked for tokens and ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ftis.config import ModelError
from ftis.engines.places import only_here, tokenizer_here
from ftis.engines.sources import NO_CODE, check_directory, place_of_base, why_not_loaded

SAMPLES = [
    "Don't: 12 + 345 = 6789.0;  WE'LL",
    "def f(x):\n\n\treturn x-1 \r\n",
    "Ünïco\u0308dé, 你好世界 \N{ROCKET}\u200d2½",
]
"""Texts on which tokenizers part ways: contractions, numbers, spaces, lines, accents, other scripts."""


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, with these ``options`` of transformers. A LoRA adapter may have its base's.

    Raises:
        ModelError: there is none, it cannot be loaded, or it has no end-of-sequence token.
    """
    check_directory(source)
    if (Path(source) / "adapter_config.json").exists() and not list(Path(source).glob("token*.*")):
        return load_tokenizer(place_of_base(source), **options)
    try:
        asked: dict[str, Any] = {"local_files_only": only_here(source), **NO_CODE, **options}
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **asked)
        if not _as_in_its_file(tokenizer, tokenizer_here(source)):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source, **asked)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"tokenizer of {source!r} cannot be loaded: {why_not_loaded(error, source)}") from None
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):  # transformers makes an empty one up
        raise ModelError(f"no tokenizer at {source}: put its files, such as tokenizer.json, beside the model's")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"tokenizer of {source!r} has no end-of-sequence token: set eos_token in its files")
    return tokenizer


def _as_in_its_file(tokenizer: PreTrainedTokenizerBase, file: Path | None) -> bool:
    """Whether a tokenizer gives the tokens of its ``tokenizer.json``.

    transformers makes some anew from their vocabulary, by the kind of the model, and drops the file's own rules.
    """
    if file is None or type(tokenizer) is PreTrainedTokenizerFast:
        return True
    of_file = Tokenizer.from_file(str(file)).encode_batch(SAMPLES, add_special_tokens=False)
    return bool(tokenizer(SAMPLES, add_special_tokens=False)["input_ids"] == [found.ids for found in of_file])


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[str] = ()) -> str:
    """32 hex digits of the SHA-256 of the map token → id and of the tokens that end a completion.

    Two tokenizers have one fingerprint if equal ids mean equal text, special tokens apart, and equal ends.

    Args:
        end_tokens: of the model's generation defaults and of the recipe, beside the tokenizer's own.
    """
    return vocabulary_digest(tokenizer, {str(tokenizer.eos_token), *end_tokens})[:32]


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase, ends: Collection[str] = ()) -> str:
    """The SHA-256, in hex, of the map token → id and of these ends."""
    facts = [sorted(tokenizer.get_vocab().items()), sorted(ends)]
    return hashlib.sha256(json.dumps(facts, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def unread(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, int]:
    """The number of a text's unknown tokens, without those that it names itself, and of all its tokens."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    named = text.count(str(tokenizer.unk_token))
    return max(0, ids.count(tokenizer.unk_token_id) - named), len(ids)


def tokens_of(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> list[str]:
    """The tokens of these ids, as a recipe writes them; an id that the tokenizer lacks is left out."""
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return [tokens[token_id] for token_id in sorted(ids) if token_id in tokens]


def ids_of(tokenizer: PreTrainedTokenizerBase, tokens: Collection[str]) -> list[int]:
    """The ids of these tokens; a token that the tokenizer lacks is left out."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens if token in vocabulary]


def lacking(tokenizer: PreTrainedTokenizerBase, tokens: Collection[str]) -> str:
    """Those of these tokens that the tokenizer lacks, for a message; "" if it has all."""
    return ", ".join(map(repr, sorted(set(tokens) - tokenizer.get_vocab().keys())))

"""Decoding of completions: the text that continues the prompt, with its leading space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""


def texts_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Make the function that turns completions into text, without special tokens.

    The decoders of Llama 2, Mistral and Phi 3 drop a leading space, since their encoders put one before each text.
    But "The answer is" and a completion ``▁7`` are "The answer is 7". With such a tokenizer, completions are decoded
    after a token whose text is then cut off.
    """
    lead = _lead(tokenizer)
    return partial(_text, tokenizer) if lead is None else partial(_text_behind, tokenizer, lead)


def left_out(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The special tokens, which a completion's text never holds."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _text_behind(tokenizer: PreTrainedTokenizerBase, lead: tuple[int, str], ids: Sequence[int]) -> str:
    return _text(tokenizer, [lead[0], *ids]).removeprefix(lead[1])


def _lead(tokenizer: PreTrainedTokenizerBase) -> tuple[int, str] | None:
    """Find a token, and its text, after which the decoder keeps a leading space; None if it always keeps it."""
    vocabulary = tokenizer.get_vocab().items()
    words = ((n, token[1:]) for token, n in vocabulary if token.startswith(SPACE) and _is_plain(token[1:]))
    spaced = min(words, default=None)
    if spaced is None or _text(tokenizer, [spaced[0]]) != spaced[1]:
        return None
    plain = sorted((n, token) for token, n in vocabulary if _is_plain(token))
    lead = next(((n, token) for n, token in plain if _text(tokenizer, [n]) == token), None)
    if lead is None or _text(tokenizer, [lead[0], spaced[0]]) != f"{lead[1]} {spaced[1]}":
        return None
    return lead


def _is_plain(token: str) -> bool:
    return token.isascii() and token.isalnum()

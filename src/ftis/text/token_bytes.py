"""The bytes that each token stands for, read from a tokenizer's vocabulary.

``decode`` is of no use here: it replaces bytes that are no characters by themselves, and it may change spaces. A
vocabulary names the bytes exactly. It does so in one of three spellings, and the tokenizer's decoder tells which.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ftis.config import FtisError
from ftis.rollouts import Ints

if TYPE_CHECKING:  # reading a message of text loads no tokenizer
    from transformers import PreTrainedTokenizerBase

Bytes = npt.NDArray[np.uint8]

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""
_TRIED_TOKENS = 50


class AlignmentError(FtisError):
    """A tokenizer whose tokens are not known as bytes, or do not keep the bytes of a text."""


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """A tokenizer as a map between tokens and bytes.

    Attributes:
        size_V: int32 [V], the number of bytes of each token. Special tokens and unused ids have none.
        start_V: int64 [V], where a token's bytes start in ``flat``.
        flat: all tokens' bytes, end to end.
    """

    size_V: Ints
    start_V: npt.NDArray[np.int64]
    flat: Bytes
    tokenizer: PreTrainedTokenizerBase

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
        """The bytes of each token of ``tokenizer``.

        Raises:
            AlignmentError: its kind is unknown, or it changes a text that it encodes.
        """
        tokens = token_bytes(tokenizer)
        size_V = np.array([len(token) for token in tokens], dtype=np.int32)
        start_V = np.cumsum(size_V, dtype=np.int64) - size_V
        known = TokenBytes(size_V, start_V, np.frombuffer(b"".join(tokens), np.uint8), _without_normal_forms(tokenizer))
        known.check(tokens)
        return known

    def join(self, ids: Ints) -> Bytes:
        """The bytes of the tokens ``ids``, end to end: uint8 [sum of their sizes].

        An id that the vocabulary lacks has no bytes, as a special token.
        """
        sizes = self.sizes(ids)
        starts = np.zeros(len(ids), np.int64)
        inside = sizes > 0
        starts[inside] = self.start_V[ids[inside]]
        offsets = np.cumsum(sizes, dtype=np.int64) - sizes
        joined: Bytes = self.flat[np.repeat(starts - offsets, sizes) + np.arange(int(sizes.sum()))]
        return joined

    def sizes(self, ids: Ints) -> Ints:
        """The number of bytes of each of ``ids``: int32 [T]."""
        known = ids < len(self.size_V)
        sizes: Ints = np.where(known, self.size_V[np.where(known, ids, 0)], 0)
        return sizes

    @functools.cached_property
    def id_of(self) -> dict[bytes, int]:
        """The id of each spelling. If several ids have one, as Gemma's newline and its byte, the tokenizer decides."""
        spelt: dict[bytes, int] = {}
        twice: set[bytes] = set()
        for number, (start, size) in enumerate(zip(self.start_V.tolist(), self.size_V.tolist(), strict=True)):
            spelling = self.flat[start : start + size].tobytes()
            if size and spelt.setdefault(spelling, number) != number:
                twice.add(spelling)
        for spelling in twice:
            try:
                (ids,) = self.encode([spelling.decode("utf-8")])
            except UnicodeDecodeError:
                continue
            if len(ids) == 1:
                spelt[spelling] = int(ids[0])
        return spelt

    def encode(self, texts: Sequence[str]) -> list[Ints]:
        """The tokens of each text: no special tokens, even if a text spells one."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def check(self, tokens: Sequence[bytes]) -> None:
        """Encode a text of some of the vocabulary's own words, and compare its bytes.

        Raises:
            AlignmentError: they are not the text's.
        """
        text = ""
        for token in [token for token in tokens if token][:: max(len(tokens) // _TRIED_TOKENS, 1)]:
            try:
                text += token.decode("utf-8")
            except UnicodeDecodeError:
                continue  # part of a character
        (ids,) = self.encode([text])
        found = self.join(ids).tobytes()
        if found != text.encode("utf-8"):
            raise AlignmentError(
                f"{_named(self.tokenizer)} changes text: {text[:40]!r} becomes {found[:40]!r}. Set add_prefix_space to "
                f"false and remove its normalizer, or exchange ids with peers of the same tokenizer"
            )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes of each id, empty for special tokens and for ids without a token.

    - Byte-level vocabularies (GPT-2, SmolLM2, Qwen, Llama 3) spell each byte as one printable character.
    - SentencePiece (Gemma, Llama 2) spells a space as ``▁`` and a lone byte as ``<0xNN>``.
    - In other vocabularies a token stands for itself.

    A token that was added to the vocabulary stands for itself as well.

    Raises:
        AlignmentError: the vocabulary spells its tokens in none of these ways.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise AlignmentError(
            f"{_named(tokenizer)} has no tokenizer.json, from which its tokens' bytes could be read: save it once with "
            f"AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…)"
        )
    spelling = _spelling(tokenizer, _state(backend.decoder))
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        tokens[number] = spelling(token)
    for number, added in backend.get_added_tokens_decoder().items():
        tokens[number] = b"" if added.special else added.content.encode("utf-8")
    return tokens


def _spelling(tokenizer: PreTrainedTokenizerBase, decoder: dict[str, Any]) -> Callable[[str], bytes]:
    """The function from a token's spelling to its bytes."""
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    spaced = [step for step in steps if (step.get("pattern"), step.get("content")) == ({"String": _SPACE}, " ")]
    if kinds == {"ByteLevel"}:
        return _from_byte_level
    if "Metaspace" in kinds or (spaced and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}):
        return _from_sentencepiece
    if kinds <= {"Fuse", None}:
        return lambda token: token.encode("utf-8")
    raise AlignmentError(
        f"{_named(tokenizer)} puts its tokens together by {', '.join(sorted(map(str, kinds)))}, and how many bytes a "
        f"token has is known for ByteLevel and SentencePiece only: exchange ids with peers of the same tokenizer"
    )


def _byte_level_map() -> dict[str, int]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the others are U+0100 and up in their order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_level_map()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # the decoder takes such a token for itself
        return token.encode("utf-8")


def _from_sentencepiece(token: str) -> bytes:
    if byte := _BYTE_FALLBACK.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode("utf-8")


def _without_normal_forms(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that does not compose characters before it encodes them.

    Qwen's does. A sender sampled the bytes as they are, and a byte-level vocabulary can spell any.
    """
    kind = _state(tokenizer.backend_tokenizer.normalizer).get("type")
    if kind not in ("NFC", "NFD", "NFKC", "NFKD"):
        return tokenizer
    plain = copy.deepcopy(tokenizer)
    plain.backend_tokenizer.normalizer = None
    return plain


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as in tokenizer.json."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _named(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"

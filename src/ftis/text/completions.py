"""A completion as text: a rollout over bytes, whose units are the tokens that the sender sampled.

No tokenizer is needed to read it. Its ids 0 to 255 are bytes in UTF-8, and those from :data:`END` on are the ends of a
completion. A unit covers the bytes of one of the sender's tokens, and has its log-probability.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ftis.rollouts import Ints, Rollout
from ftis.text.token_bytes import Bytes, TokenBytes

END = 256
"""The id of the sender's first end token; its second has the next id, and so on. An end stands after the last byte of a
completion or turn, and is a unit of its own."""
MOST_ENDS = 4
"""The most ends that a sender may use. A liar that spreads one end's probability over n hides ln n nats at each."""
REPLACED = "\N{REPLACEMENT CHARACTER}"
"""The character for bytes that are none, as in any decoder."""


def as_texts(
    rollouts: Sequence[Rollout], known: TokenBytes, end_ids: Sequence[int], most_bytes: int = sys.maxsize
) -> list[Rollout]:
    """Sampled completions as text.

    Bytes that are no UTF-8 become :data:`REPLACED`; a completion cut off inside a character ends so. A token
    without bytes of its own, as a special token in the middle, is left out with its log-probability: the text has
    about the same probability with or without it. A completion without any bytes becomes :data:`REPLACED` too.
    A completion with too many bytes keeps its first tokens, as if it had been cut off there.

    Args:
        rollouts: of the sender's tokenizer, each token a unit of its own.
        known: that tokenizer.
        end_ids: the sender's ids that end a completion, in their order. None of them has bytes.
        most_bytes: the most of a completion that a message carries.
    """
    ends = {end: END + min(place, MOST_ENDS - 1) for place, end in enumerate(end_ids)}
    return [_as_text(rollout, known, ends, most_bytes) for rollout in rollouts]


def all_utf8(text: Bytes, stops: npt.NDArray[np.integer]) -> bool:
    """Whether each of the texts that end at ``stops`` is UTF-8 by itself."""
    try:
        text.tobytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    starts = stops[:-1][stops[:-1] < len(text)]
    return not ((text[starts] & 0xC0) == 0x80).any()


def _as_text(rollout: Rollout, known: TokenBytes, ends: Mapping[int, int], most_bytes: int) -> Rollout:
    """One completion as text, for any sampled ids."""
    ids = rollout.completion_ids
    ended = bool(len(ids)) and int(ids[-1]) in ends
    spoken = ids[: len(ids) - ended]
    raw = known.join(spoken).astype(np.int32)
    token = np.repeat(np.arange(len(spoken), dtype=np.int32), known.sizes(spoken))
    raw, token = _valid(raw, token)
    if len(raw) > most_bytes:  # part of a character at the new end takes up to two bytes more
        fits = token < token[max(most_bytes - 2, 0)]
        raw, token = _valid(raw[fits], token[fits])
        ended = False
    if ended:
        raw, token = np.append(raw, np.int32(ends[int(ids[-1])])), np.append(token, np.int32(len(spoken)))
    if not len(token):
        raw = np.array([*REPLACED.encode("utf-8")], np.int32)
        token = np.zeros_like(raw)
    present, unit = np.unique(token, return_inverse=True)
    return Rollout(raw, rollout.gen_logp[present], unit.astype(np.int32))


def text_of(rollout: Rollout) -> str:
    """The text of a rollout over bytes, without its ends.

    Raises:
        UnicodeDecodeError: the bytes are no UTF-8. Neither :func:`as_texts` nor the wire gives such bytes.
    """
    return rollout.completion_ids[rollout.completion_ids < END].astype(np.uint8).tobytes().decode("utf-8")


def sizes_of(rollout: Rollout) -> Ints:
    """The bytes of each of the sender's tokens in a rollout over bytes; 0 for an end."""
    assert rollout.unit is not None
    is_byte = rollout.completion_ids < END
    return np.bincount(rollout.unit[is_byte], minlength=len(rollout.gen_logp)).astype(np.int32)


def ended(rollout: Rollout) -> bool:
    """Whether the sender of a rollout over bytes ended it."""
    return bool(len(rollout)) and int(rollout.completion_ids[-1]) >= END


def _valid(raw: Ints, token: npt.NDArray[np.int32]) -> tuple[Ints, npt.NDArray[np.int32]]:
    """Bytes, and the token of each, with :data:`REPLACED` instead of bytes that are no UTF-8.

    The replacement belongs to the token in which the wrong bytes start.
    """
    data, stands_in = raw.astype(np.uint8).tobytes(), np.array([*REPLACED.encode("utf-8")], np.int32)
    parts, tokens, at = list[Ints](), list[Ints](), 0
    while True:
        try:
            data[at:].decode("utf-8")
        except UnicodeDecodeError as error:
            start, stop = at + error.start, at + error.end
            parts += [raw[at:start], stands_in]
            tokens += [token[at:start], np.full(len(stands_in), token[start])]
            at = stop
        else:
            return np.concatenate([*parts, raw[at:]]), np.concatenate([*tokens, token[at:]])

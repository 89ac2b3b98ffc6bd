"""Groups of completions as text, for peers of other tokenizers.

    size  type      field
    4     u32       R, rollouts of all groups
    4     u32       T, tokens of all rollouts, as the sender sampled them
          numbers   2 n + R: the items, the rollouts of each group, the tokens of each rollout
          numbers   T: how many bytes each token has; 0 for an end
          numbers   for each end: which of its sender's ends, from 0; absent if there are none
          stream    the texts in UTF-8, end to end: as many bytes as the tokens have
          streams   the log-probabilities, as in :mod:`ftis.wire.ids`

It carries rollouts over bytes, see :mod:`ftis.text.completions`: each of the sender's tokens is a unit, and so is an
end that the sender sampled. An end within a rollout ends a turn. *Stream* and *numbers* are described in
:mod:`ftis.wire.streams`.
"""

from __future__ import annotations

import numpy as np

from ftis.codec import MOST_BYTES, CodecError, Columns, Form, Limits, Reader
from ftis.text.completions import END, MOST_ENDS, all_utf8
from ftis.wire.streams import (
    PHRASES,
    read_counts,
    read_groups,
    read_logp,
    read_numbers,
    read_stream,
    write_counts,
    write_groups,
    write_logp,
    write_numbers,
    write_stream,
)


def write(columns: Columns) -> list[bytes]:
    """The groups as text.

    Raises:
        ValueError: the rollouts are not over bytes or not UTF-8, or an end is no unit by itself.
    """
    if columns.unit is None or len(columns.unit) != len(columns.ids):
        raise ValueError("a message of text has rollouts over bytes only: make all with as_texts")
    if not columns.lengths.all() or columns.ids.max() >= END + MOST_ENDS:
        raise ValueError("a message of text has an empty rollout, or ids that are neither bytes nor ends")
    stops = np.cumsum(columns.lengths, dtype=np.int64)
    tokens = columns.unit[stops - 1].astype(np.int64) + 1
    unit_M = columns.unit + np.repeat(np.cumsum(tokens) - tokens, columns.lengths)
    is_byte, n_tokens = columns.ids < END, int(tokens.sum())
    sizes = np.bincount(unit_M[is_byte], minlength=n_tokens)
    ended = np.flatnonzero(~is_byte)
    if not np.array_equal(np.flatnonzero(sizes == 0), unit_M[ended]):
        raise ValueError("a message of text has an end that is no token by itself")
    text = columns.ids[is_byte].astype(np.uint8)
    if not all_utf8(text, np.cumsum(is_byte, dtype=np.int64)[stops - 1]):
        raise ValueError("a message of text has a completion that is not UTF-8")
    return [
        write_counts(len(tokens), n_tokens),
        *write_groups(columns, tokens),
        *write_numbers(sizes.astype(np.uint32)),
        *(write_numbers((columns.ids[ended] - END).astype(np.uint32)) if len(ended) else ()),
        *write_stream(text, PHRASES),
        *write_logp(columns.logp),
    ]


def read(reader: Reader, n: int, limits: Limits) -> Columns:
    n_rollouts, n_tokens = read_counts(reader, n, limits)
    items, counts, tokens = read_groups(reader, n, n_rollouts, n_tokens, limits)
    if not tokens.all():
        raise CodecError(f"rollout {int(tokens.argmin())} has no tokens")
    sizes = read_numbers(reader, n_tokens, "the sizes of the tokens").astype(np.int64)
    stops = np.cumsum(tokens, dtype=np.int64)
    empty = np.flatnonzero(sizes == 0)
    ends = read_numbers(reader, len(empty), "the ends") if len(empty) else np.zeros(0, np.uint32)
    if (largest := int(ends.max(initial=0))) >= MOST_ENDS:
        raise CodecError(f"end {largest} of a sender, it may have {MOST_ENDS}")
    byte_stops, most = np.cumsum(sizes), MOST_BYTES * limits.max_completion_length
    if (longest := int(np.diff(byte_stops[stops - 1], prepend=0).max(initial=0))) > most:
        raise CodecError(f"completion of {longest} bytes exceeds the limit of {most}")
    text = read_stream(reader, int(sizes.sum()), "the text")
    if not all_utf8(text, byte_stops[stops - 1]):
        raise CodecError("a completion is not UTF-8")
    logp = read_logp(reader, n_tokens)

    ids = np.insert(text.astype(np.int32), byte_stops[empty], (END + ends).astype(np.int32))
    places = np.maximum(sizes, 1)
    place_T = np.arange(n_tokens, dtype=np.int32) - np.repeat((stops - tokens).astype(np.int32), tokens)
    lengths = np.diff(np.cumsum(places)[stops - 1], prepend=0)
    return Columns(items, counts, lengths, ids, logp, np.repeat(place_T, places))


TEXT = Form(write, read)

"""Groups of token ids, in two to five bytes a token.

    size  type      field
    4     u32       R, rollouts of all groups
    4     u32       T, tokens of all rollouts
          numbers   2 n + R: the items, the rollouts of each group, the tokens of each rollout
          numbers   T: the token ids
          streams   four of T bytes: the log-probabilities in float32, lowest byte first

*Numbers* and *streams* are described in :mod:`ftis.wire.streams`. The reader holds R and T against the limits before it
decompresses anything; the size of every stream follows from them.
"""

from __future__ import annotations

import numpy as np

from ftis.codec import CodecError, Columns, Form, Limits, Reader
from ftis.wire.streams import (
    PHRASES,
    read_counts,
    read_groups,
    read_logp,
    read_numbers,
    write_counts,
    write_groups,
    write_logp,
    write_numbers,
)

_LARGEST_ID = 0x7FFF_FFFF


def write(columns: Columns) -> list[bytes]:
    return [
        write_counts(len(columns.lengths), len(columns.ids)),
        *write_groups(columns, columns.lengths),
        *write_numbers(columns.ids.astype(np.uint32), PHRASES),
        *write_logp(columns.logp),
    ]


def read(reader: Reader, n: int, limits: Limits) -> Columns:
    n_rollouts, n_tokens = read_counts(reader, n, limits)
    items, counts, lengths = read_groups(reader, n, n_rollouts, n_tokens, limits)
    ids = read_numbers(reader, n_tokens, "the token ids")
    if (largest := int(ids.max(initial=0))) > _LARGEST_ID:
        raise CodecError(f"token id {largest} does not fit 31 bits")
    return Columns(items, counts, lengths, ids.astype(np.int32), read_logp(reader, n_tokens))


IDS = Form(write, read)

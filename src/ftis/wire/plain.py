"""The plain form: eight bytes a token in float32, six in a fixed-point precision. Version 1 has no other.

    4 n   u32[n]    item of each group
    2 n   u16[n]    rollouts of each group
    4 R   u32[R]    tokens of each rollout, group after group; R rollouts in all
    4 T   i32[T]    token ids, rollout after rollout; T tokens in all
    4 T   f32[T]    log-probabilities in the same order (2 T, u16[T] in a fixed-point precision)

A reader knows n, finds R and T by addition, and checks each against the bytes that are there before it reads on.
"""

from __future__ import annotations

import math

import numpy as np

from ftis.codec import FRACTION_BITS, CodecError, Columns, Form, Integers, Limits, Numbers, Reader
from ftis.config import LogpPrecision
from ftis.rollouts import Floats


def write(columns: Columns, bits: int) -> list[bytes] | None:
    """The groups, or None if an id is not a unit of its own."""
    if columns.unit is not None:
        return None
    return [
        columns.items.astype("<u4").tobytes(),
        columns.counts.astype("<u2").tobytes(),
        columns.lengths.astype("<u4").tobytes(),
        columns.ids.astype("<i4", copy=False).tobytes(),
        (to_fixed(columns.logp, bits).astype("<u2") if bits else columns.logp.astype("<f4", copy=False)).tobytes(),
    ]


def read(reader: Reader, n: int, bits: int, limits: Limits) -> Columns:
    reader.need(6 * n, f"the table of {n} groups")
    items, counts = reader.array("<u4", n), reader.array("<u2", n)
    limits.check_counts(counts)
    n_rollouts = int(counts.sum(dtype=np.uint64))
    reader.need(4 * n_rollouts, f"the lengths of {n_rollouts} rollouts")
    lengths = reader.array("<u4", n_rollouts)
    limits.check_lengths(lengths)
    n_tokens = int(lengths.sum(dtype=np.uint64))
    rest, size = reader.end - reader.at, (6 if bits else 8) * n_tokens
    if rest != size:
        raise CodecError(f"{n_tokens} tokens take {size} bytes, {rest} are there")
    # Copied into aligned, native arrays: a name of any length leaves the bytes unaligned.
    ids = reader.array("<i4", n_tokens).astype(np.int32)
    if bits:
        return Columns(items, counts, lengths, ids, from_fixed(reader.array("<u2", n_tokens), bits))
    return Columns(items, counts, lengths, ids, reader.array("<f4", n_tokens).astype(np.float32))


def to_fixed(logp: Floats, bits: int) -> Numbers:
    """round(−logp · 2^bits), halves to even. Exact in float32 except for the rounding, since 2^bits is exact."""
    numbers: Numbers = np.rint(-logp * np.float32(2**bits)).astype(np.uint32)
    return numbers


def from_fixed(numbers: Integers, bits: int) -> Floats:
    """−numbers / 2^bits, and never −0."""
    nats: Floats = (np.float32(0) - numbers.astype(np.float32)) * np.float32(2.0**-bits)
    return nats


def weight_error(logp: LogpPrecision) -> float:
    """The largest relative error that a precision causes in one token's importance weight: exp(2^-(b+1)) − 1.

    A log-probability with b bits after the point is off by at most 2^-(b+1) nats. The error of float32 is 0.
    """
    bits = FRACTION_BITS[logp]
    return math.expm1(2.0 ** -(bits + 1)) if bits else 0.0


PLAIN = Form(write, read)

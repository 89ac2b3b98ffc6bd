"""Groups of token ids, in two to four and a half bytes a token.

    size  type      field
    4     u32       R, rollouts of all groups
    4     u32       T, tokens of all rollouts
    4     u32       D, distinct token ids; 0 if they are not listed
          numbers   2 n + R: the items, the rollouts of each group, the tokens of each rollout
          numbers   D: the distinct ids, as gaps
          stream    T bytes: the first byte of each token's number
          stream    the second byte of the numbers that have one
          numbers   T: log-probabilities in fixed point (float32: four streams of T bytes, lowest byte first)

If a list would not pay, D is 0, and T numbers, the ids, stand instead of the list and the two streams.

*Stream* and *numbers* are described in :mod:`ftis.wire.streams`, the numbering of the ids at :class:`_Coded`. The
reader holds R and T against the limits before it decompresses anything; the size of every stream follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftis.codec import CodecError, Columns, Form, Limits, Numbers, Reader
from ftis.rollouts import Ints
from ftis.wire.streams import (
    TEXT_LEVEL,
    Bytes,
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

_LARGEST_VOCABULARY = 65536
_LARGEST_ID = 0x7FFF_FFFF


def write(columns: Columns, bits: int) -> list[bytes]:
    coded = _code_ids(columns.ids)
    return [
        write_counts(len(columns.lengths), len(columns.ids), len(coded.gaps) if coded else 0),
        *write_groups(columns, columns.lengths),
        *(coded.parts() if coded else write_numbers(columns.ids.astype(np.uint32))),
        *write_logp(columns.logp, bits),
    ]


def read(reader: Reader, n: int, bits: int, limits: Limits) -> Columns:
    n_rollouts, n_tokens, n_distinct = read_counts(reader, n, limits)
    if n_distinct and not _pays(n_distinct, n_tokens):
        raise CodecError(f"{n_tokens} tokens with {n_distinct} distinct ids need no list of them")
    items, counts, lengths = read_groups(reader, n, n_rollouts, n_tokens, limits)
    ids = _read_listed(reader, n_tokens, n_distinct) if n_distinct else _read_unlisted(reader, n_tokens)
    return Columns(items, counts, lengths, ids, read_logp(reader, n_tokens, bits))


IDS = Form(write, read)

# ---------------------------------------------------------------------------------------------- token ids


@dataclass(frozen=True, eq=False)
class _Coded:
    """Token ids as numbers of one byte, or of two if the id is rare.

    The D distinct ids are listed in the order of :func:`_list_order` and numbered 0 … D − 1 in that order.

    Attributes:
        gaps: (D,), for each listed id its distance from the one before it, less 1. The list has two parts; the first
            id of a part stands as it is.
        first: (T,), a token's number if it is below k, the length of the list's first part; else k + ⌊r / 256⌋ where
            the number is k + r.
        second: r mod 256 of the tokens whose number is k + r.
    """

    gaps: Numbers
    first: Bytes
    second: Bytes

    def parts(self) -> list[bytes]:
        streams = (part for stream in (self.first, self.second) for part in write_stream(stream, TEXT_LEVEL))
        return [*write_numbers(self.gaps), *streams]


def _pays(n_distinct: int, n_tokens: int) -> bool:
    """Whether a list of the distinct ids pays, and numbers of two bytes suffice."""
    return 2 * n_distinct <= n_tokens and n_distinct <= _LARGEST_VOCABULARY


def _one_byte_ids(n_distinct: int) -> int:
    """k, how many of the D distinct ids get a number of one byte.

    k = D if D ≤ 256. Otherwise k = 256 − e: e = ⌈(D − 256) / 255⌉ first bytes are reserved for the other ids, which is
    room for 256 e of them.
    """
    return n_distinct if n_distinct <= 256 else 256 + (256 - n_distinct) // 255


def _list_order(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """(D,), the indices that put the distinct ids, given in ascending order, into the order of the list.

    The k most frequent ids come first, then the others; each of the two parts is in ascending order. Of equally
    frequent ids the smaller counts as the more frequent.

    Args:
        counts: (D,), how often each id occurs.
    """
    k = _one_byte_ids(len(counts))
    by_count = np.argsort(-counts, kind="stable")
    return np.concatenate([np.sort(by_count[:k]), np.sort(by_count[k:])])


def _code_ids(ids: Ints) -> _Coded | None:
    """The ids as numbers, or None if a list of them does not pay."""
    distinct, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    if not len(ids) or not _pays(len(distinct), len(ids)):
        return None
    k, order = _one_byte_ids(len(distinct)), _list_order(counts)
    listed = distinct[order]
    gaps = np.concatenate([np.diff(part, prepend=-1) - 1 for part in (listed[:k], listed[k:])])
    number = np.empty(len(distinct), dtype=np.int64)
    number[order] = np.arange(len(distinct))
    rest = number - k
    first = np.where(rest < 0, number, k + (rest >> 8)).astype(np.uint8)[place]
    second = (rest & 255).astype(np.uint8)[place[rest[place] >= 0]]
    return _Coded(gaps.astype(np.uint32), first, second)


def _read_unlisted(reader: Reader, n_tokens: int) -> Ints:
    ids = read_numbers(reader, n_tokens, "the token ids")
    if (largest := int(ids.max(initial=0))) > _LARGEST_ID:
        raise CodecError(f"token id {largest} does not fit 31 bits")
    if n_tokens and _pays(len(np.unique(ids)), n_tokens):
        raise CodecError("the token ids are not listed, and a list pays")
    return ids.astype(np.int32)


def _read_listed(reader: Reader, n_tokens: int, n_distinct: int) -> Ints:
    k = _one_byte_ids(n_distinct)
    gaps = read_numbers(reader, n_distinct, "the vocabulary").astype(np.int64)
    listed = np.concatenate([np.cumsum(gaps[:k] + 1), np.cumsum(gaps[k:] + 1)]) - 1
    if (largest := int(listed.max(initial=0))) > _LARGEST_ID:
        raise CodecError(f"token id {largest} does not fit 31 bits")
    number = read_stream(reader, n_tokens, "the token ids").astype(np.int32)
    two = np.flatnonzero(number >= k)
    if n_distinct == k and len(two):
        raise CodecError(f"token of number {int(number.max())} among {n_distinct} distinct ids")
    second = read_stream(reader, len(two), "the rare token ids")
    number[two] = k + ((number[two] - k) << 8) + second
    if (largest := int(number.max(initial=-1))) >= n_distinct:
        raise CodecError(f"token of number {largest} among {n_distinct} distinct ids")
    # A list could also name an id twice, name one that does not occur, or stand in another order. Refusing those
    # leaves one list for each message.
    distinct, where = np.unique(listed, return_index=True)
    counts = np.bincount(number, minlength=n_distinct)[where]
    if len(distinct) < n_distinct or not counts.all() or not np.array_equal(distinct[_list_order(counts)], listed):
        raise CodecError("the token ids are not listed by how often they occur")
    return listed.astype(np.int32)[number]

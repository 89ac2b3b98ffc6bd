"""The packed form of version 2: under two bytes a token, in place of eight.

    size  type      field
    4     u32       R, rollouts of all groups
    4     u32       T, tokens of all rollouts
    4     u32       D, distinct token ids
          numbers   2 n + R: the items, the rollouts of each group, the tokens of each rollout
          numbers   D: the distinct ids, as gaps
          stream    T bytes: the first byte of each token's number
          stream    the second byte of the numbers that have one
          numbers   T: log-probabilities in fixed point (float32: four streams of T bytes, lowest byte first)

*Stream* and *numbers* are described at :func:`_write_stream` and :func:`_write_numbers`, the numbering of the ids at
:class:`_Coded`. The reader holds R and T against the limits before it decompresses anything; the size of every stream
follows from them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from ftis.codec import MOST_ROLLOUTS, CodecError, Columns, Form, Limits, Numbers, Reader
from ftis.rollouts import Ints
from ftis.wire.plain import from_fixed, to_fixed

_COUNTS = struct.Struct("<III")
_SIZE = struct.Struct("<I")

_TEXT_LEVEL = 15
"""zstandard's level for ids: text repays a search for phrases (0.64 bytes a token, 0.68 at level 3)."""
_NOISE_LEVEL = 1
"""For everything else: noise with a skewed distribution, in which a search finds nothing."""
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_MOST = 32768
"""The most bytes that one byte of a frame stands for: a block has at least 4 bytes and at most 128 KiB of content."""
_LARGEST_SYMBOL = 239
_LARGEST_VOCABULARY = 65536
_LARGEST_ID = 0x7FFF_FFFF

Bytes = npt.NDArray[np.uint8]


def write(columns: Columns, bits: int) -> list[bytes] | None:
    """The packed groups, or None if there are more than 65,536 distinct ids."""
    coded = _code_ids(columns.ids)
    if coded is None:
        return None
    table = np.concatenate([columns.items, columns.counts, columns.lengths]).astype(np.uint32)
    if bits:
        logp = _write_numbers(to_fixed(columns.logp, bits))
    else:
        planes = columns.logp.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4).T
        logp = [part for plane in planes for part in _write_stream(plane, _NOISE_LEVEL)]
    return [
        _COUNTS.pack(len(columns.lengths), len(columns.ids), len(coded.gaps)),
        *_write_numbers(table),
        *_write_numbers(coded.gaps),
        *_write_stream(coded.first, _TEXT_LEVEL),
        *_write_stream(coded.second, _TEXT_LEVEL),
        *logp,
    ]


def read(reader: Reader, n: int, bits: int, limits: Limits) -> Columns:
    n_rollouts, n_tokens, n_distinct = _COUNTS.unpack(reader.take(_COUNTS.size, "the counts"))
    # A decompression bomb ends here, before anything is decompressed.
    if n_rollouts > n * limits.max_rollouts_per_group:
        raise CodecError(
            f"{n_rollouts} rollouts in {n} groups exceed the limit of {limits.max_rollouts_per_group} in each"
        )
    if n_tokens > n_rollouts * limits.max_completion_length:
        raise CodecError(
            f"{n_tokens} tokens in {n_rollouts} rollouts exceed the limit of {limits.max_completion_length} in each"
        )
    if not min(n_tokens, 1) <= n_distinct <= min(n_tokens, _LARGEST_VOCABULARY):
        raise CodecError(f"{n_tokens} tokens cannot have {n_distinct} distinct ids in this form")

    items, counts, lengths = np.split(_read_numbers(reader, 2 * n + n_rollouts, "the tables"), [n, 2 * n])
    limits.check_counts(counts)
    limits.check_lengths(lengths)
    if int(counts.max(initial=0)) > MOST_ROLLOUTS:
        raise CodecError(f"group of {int(counts.max())} rollouts, the most is {MOST_ROLLOUTS}")
    if (total := int(counts.sum(dtype=np.uint64))) != n_rollouts:
        raise CodecError(f"groups of {total} rollouts in all, {n_rollouts} are announced")
    if (total := int(lengths.sum(dtype=np.uint64))) != n_tokens:
        raise CodecError(f"completions of {total} tokens in all, {n_tokens} are announced")

    ids = _read_ids(reader, n_tokens, n_distinct)
    if bits:
        logp = from_fixed(_read_numbers(reader, n_tokens, "the log-probabilities"), bits)
    else:
        planes = np.stack([_read_stream(reader, n_tokens, "the log-probabilities") for _ in range(4)], axis=1)
        logp = planes.view("<f4")[:, 0].astype(np.float32)
    return Columns(items, counts, lengths, ids, logp)


PACKED = Form(write, read)

# ---------------------------------------------------------------------------------------------- token ids


@dataclass(frozen=True, eq=False)
class _Coded:
    """Token ids as numbers of one byte, or of two where the id is rare.

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
    """The ids as numbers, or None if there are more than 65,536 distinct ids."""
    distinct, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    if len(distinct) > _LARGEST_VOCABULARY:
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


def _read_ids(reader: Reader, n_tokens: int, n_distinct: int) -> Ints:
    k = _one_byte_ids(n_distinct)
    gaps = _read_numbers(reader, n_distinct, "the vocabulary").astype(np.int64)
    listed = np.concatenate([np.cumsum(gaps[:k] + 1), np.cumsum(gaps[k:] + 1)]) - 1
    if (largest := int(listed.max(initial=0))) > _LARGEST_ID:
        raise CodecError(f"token id {largest} does not fit 31 bits")
    number = _read_stream(reader, n_tokens, "the token ids").astype(np.int32)
    two = np.flatnonzero(number >= k)
    if n_distinct == k and len(two):
        raise CodecError(f"token of number {int(number.max())} among {n_distinct} distinct ids")
    second = _read_stream(reader, len(two), "the rare token ids")
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


# ---------------------------------------------------------------------------------------------- numbers


def _write_numbers(values: Numbers) -> list[bytes]:
    """Numbers of up to 32 bits: a stream of symbols, then the bits that the symbols leave open.

    For a number v of L binary digits let e = max(0, L − 4). Its symbol 8 e + ⌊v / 2^e⌋, at most 239, gives the four
    highest digits; the e lower digits are its open bits. Bit 0 of all numbers with e > 0 comes first, then bit 1 of all
    with e > 1, and so on, eight to a byte from the highest bit down, filled with zeros at the end. Among the numbers of
    one symbol any smooth distribution is nearly flat, so compressing the open bits would gain nothing.
    """
    extra = np.maximum(np.frexp(values.astype(np.float64))[1] - 4, 0).astype(np.uint32)
    symbols = (8 * extra + (values >> extra)).astype(np.uint8)
    planes = [np.zeros(0, np.uint8)]
    for plane, at in _open_bits(extra):
        planes.append(((values[at] >> np.uint32(plane)) & 1).astype(np.uint8))
    return [*_write_stream(symbols, _NOISE_LEVEL), np.packbits(np.concatenate(planes)).tobytes()]


def _read_numbers(reader: Reader, count: int, what: str) -> Numbers:
    """The ``count`` numbers that :func:`_write_numbers` wrote."""
    symbols = _read_stream(reader, count, what)
    if (largest := int(symbols.max(initial=0))) > _LARGEST_SYMBOL:
        raise CodecError(f"{what}: symbol {largest}, the largest is {_LARGEST_SYMBOL}")
    extra = np.maximum(symbols >> 3, 1).astype(np.uint32) - 1
    values: Numbers = (symbols - 8 * extra) << extra
    n_bits = int(extra.sum(dtype=np.uint64))
    packed = np.frombuffer(reader.take((n_bits + 7) // 8, what), np.uint8)
    if n_bits % 8 and packed[-1] & (0xFF >> n_bits % 8):
        raise CodecError(f"{what}: the last byte is not filled with zeros")
    bits = np.unpackbits(packed, count=n_bits)
    used = 0
    for plane, at in _open_bits(extra):
        values[at] |= bits[used : used + len(at)].astype(np.uint32) << np.uint32(plane)
        used += len(at)
    return values


def _open_bits(extra: Numbers) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Each bit position from 0 up, with the indices of the numbers whose symbol leaves that bit open."""
    plane, at = 0, np.flatnonzero(extra)
    while len(at):
        yield plane, at
        plane += 1
        at = at[extra[at] > plane]


# ---------------------------------------------------------------------------------------------- streams


def _write_stream(raw: Bytes, level: int) -> list[bytes]:
    """Bytes whose number the reader knows: a u32 size, then as many bytes.

    They are one zstandard frame that states the size of its content, or ``raw`` itself where the frame is no smaller.
    """
    stored = raw.tobytes()
    framed = zstandard.ZstdCompressor(level=level, write_checksum=False, write_dict_id=False).compress(stored)
    smaller = min(stored, framed, key=len)
    return [_SIZE.pack(len(smaller)), smaller]


def _read_stream(reader: Reader, count: int, what: str) -> Bytes:
    """The ``count`` bytes that :func:`_write_stream` wrote."""
    (size,) = _SIZE.unpack(reader.take(_SIZE.size, what))
    if size > count:
        raise CodecError(f"{what}: a stream of {size} bytes for {count}")
    raw = reader.take(size, what)
    return np.frombuffer(raw if size == count else _read_frame(raw, count, what), np.uint8)


def _read_frame(frame: bytes, count: int, what: str) -> bytes:
    """The content of ``frame``, which must be one zstandard frame that states ``count`` bytes and holds as many."""
    try:
        stated = zstandard.get_frame_parameters(frame)
        if not frame.startswith(_FRAME_MAGIC) or stated.dict_id or stated.has_checksum or stated.content_size != count:
            raise CodecError(f"{what}: not a frame of {count} bytes without dictionary and checksum")
        if count > _FRAME_MOST * len(frame):
            raise CodecError(f"{what}: a frame of {len(frame)} bytes cannot hold {count}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"{what}: {error}") from None
    if len(content) != count:
        raise CodecError(f"{what}: a frame holds {len(content)} bytes in place of {count}")
    return content

"""Groups ⇄ bytes: the message a peer sends once a round. Pure: no socket, no clock, no model.

A message. Integers and floats are little-endian, nothing is padded or aligned; P is the length of the peer's
name, n the number of groups, R that of all their rollouts, T that of all their completion tokens.

    offset  size  type      field
    0       4     bytes     magic, ``FTIS``
    4       2     u16       version, 1 or 2
    6       2     u16       P, 1 to 64           in version 2:  6  1  u8  P
    8       16    bytes     run: what the peers                 7  1  u8  form, 16 · packed + precision
                            agreed on, a digest
    24      16    bytes     tokenizer: its fingerprint
    40      8     f64       temperature ┐
    48      8     f64       top_p       │ of the distribution sampled
    56      4     u32       top_k       ┘
    60      4     u32       round
    64      4     u32       n
    68      P     ASCII     peer, a name as in the recipe

Then, in version 1, and in version 2 if the form says plain:

            4 n   u32[n]    item of each group
            2 n   u16[n]    rollouts of each group
            4 R   u32[R]    tokens of each rollout, group after group
            4 T   i32[T]    token ids, rollout after rollout
            4 T   f32[T]    log-probabilities, in the same order (2 T, u16[T] in a fixed-point precision)

or, if it says packed:

            4     u32       R
            4     u32       T
            4     u32       D, distinct token ids
                  numbers   2 n + R: the items, the rollouts of each group, the tokens of each rollout
                  numbers   D: the distinct ids, as gaps
                  stream    T bytes: each token's id, or the first byte of it
                  stream    a byte for each token whose id takes two
                  numbers   T: log-probabilities in fixed point (float32: four streams, T bytes each)

and at the end of all:

            4     u32       CRC-32 (zlib's) of everything before it

In version 1 there is one way to write a message: ``encode(decode(data)) == data`` for all ``data`` that decodes, bit
by bit (NaNs keep their payload). In version 2 that holds of everything but how the streams are compressed, which is
zstandard's freedom. Bytes from the other side raise :class:`CodecError` and nothing else, and sizes are held against
the limits and against the bytes really there before memory is taken for them. The checksum finds accidents, not
attackers. Whether a message makes *sense* is admission's question. See docs/wire.md.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from ftis.config import NAME_PATTERN, FtisError, LogpPrecision, WireFormat
from ftis.rollouts import MIN_LOGP, Floats, Group, Ints, Rollout

MAGIC = b"FTIS"
VERSION = 2
"""The newest that is read; all from 1 on are."""

_FIXED = struct.Struct("<4sHBB16s16sddIII")  # version 1's u16 P is a byte P and a form that is always 0
_COUNTS = struct.Struct("<III")
_SIZE = struct.Struct("<I")
_CHECKSUM = struct.Struct("<I")
_U16, _I32, _U32 = 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF
_LONGEST_NAME = 64
_NAME = re.compile(NAME_PATTERN)
_DIGEST = re.compile(r"[0-9a-f]{32}")

_FRACTION_BITS: dict[LogpPrecision, int] = {"float32": 0, "fixed6": 6, "fixed9": 9}
"""Of each precision of a log-probability; it is also the precision's number in the form byte. float32 has none."""
_PRECISIONS = {bits: name for name, bits in _FRACTION_BITS.items()}
_PACKED = 16

# One is text and repays a search for phrases (0.64 bytes a token, 0.68 at level 3), the other is noise with a skewed
# distribution, where a search finds nothing.
_TEXT_LEVEL, _NOISE_LEVEL = 15, 1
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_MOST = 32768
"""A frame's bytes stand for this many each at most: a block of at least four for one of at most 128 KiB."""
_LARGEST_SYMBOL = 239
_LARGEST_VOCABULARY = 65536

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint32]


class CodecError(FtisError):
    """Bytes that are not a valid message within the limits."""


@dataclass(frozen=True)
class Header:
    """What a sender says of itself and of everything in the message.

    Attributes:
        run: 32 lower-case hex digits, see :func:`ftis.config.run_id`.
        peer: the sender's name as the recipe has it.
        tokenizer: 32 lower-case hex digits, the tokenizer's fingerprint.
        temperature, top_k, top_p: of the distribution that was sampled and that ``gen_logp`` belongs to.
    """

    run: str
    round: int
    peer: str
    tokenizer: str
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, eq=False)
class Message:
    """A header and the groups it speaks for; their peer and round are the header's."""

    header: Header
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Limits:
    """The most a receiver is willing to decode. ``max_bytes`` are those on the wire.

    The arrays decoded from a packed message are bounded by the other three: max_groups · max_rollouts_per_group ·
    max_completion_length tokens.
    """

    max_bytes: int
    max_groups: int
    max_rollouts_per_group: int
    max_completion_length: int


@dataclass(frozen=True, eq=False)
class _Columns:
    """A message's groups field by field; ids and log-probabilities rollout after rollout."""

    items: npt.NDArray[np.integer]
    counts: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.integer]
    ids: Ints
    logp: Floats


def message_size(tokens: int, rollouts: int, groups: int, peer: str) -> int:
    """Bytes of a message of version 1 from ``peer`` with so many groups, rollouts and completion tokens in all.

    It is the most that the same message takes in version 2, in any precision.
    """
    return _FIXED.size + len(peer) + 6 * groups + 4 * rollouts + 8 * tokens + _CHECKSUM.size


def weight_error(logp: LogpPrecision) -> float:
    """Largest relative error of one token's importance weight that a precision causes.

    A fixed-point log-probability with b bits after the point is off by at most 2^-(b+1) nats, so a weight
    π_old/π_gen is off by a factor of at most exp(2^-(b+1)); what is returned is that minus 1. float32 is exact: 0.
    """
    bits = _FRACTION_BITS[logp]
    return math.expm1(2.0 ** -(bits + 1)) if bits else 0.0


def encode(message: Message, version: WireFormat = 1, logp: LogpPrecision = "float32") -> bytes:
    """The bytes of a message.

    Args:
        version: 2 is never longer than 1 and usually a quarter of it. It is written packed where that is shorter.
        logp: precision of the log-probabilities on the wire; other than ``float32`` in version 2 only. The message
            itself keeps its exact values.

    Raises:
        ValueError: the message cannot be written (a mistake of the caller, never of a peer). In version 2 that
            includes a negative id and a log-probability that is NaN, above 0 or below ``MIN_LOGP``.
    """
    header, groups = message.header, message.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _check_writable(header, groups, rollouts)
    if version == 1 and logp != "float32":
        raise ValueError(f"logp = {logp!r}: version 1 carries float32 only, take version 2")
    columns = _Columns(
        items=np.array([group.item for group in groups], dtype=np.uint32),
        counts=np.array([len(group.rollouts) for group in groups], dtype=np.uint16),
        lengths=np.array([len(rollout) for rollout in rollouts], dtype=np.uint32),
        ids=np.concatenate([np.zeros(0, np.int32), *(rollout.completion_ids for rollout in rollouts)]),
        logp=np.concatenate([np.zeros(0, np.float32), *(rollout.gen_logp for rollout in rollouts)]),
    )
    if version == 1:
        return _seal(header, 1, 0, len(groups), _write_plain(columns, logp))
    if fault := _value_fault(columns):
        raise ValueError(fault)
    plain, packed = _write_plain(columns, logp), _write_packed(columns, logp)
    form = _FRACTION_BITS[logp]
    if packed is not None and sum(map(len, packed)) < sum(map(len, plain)):
        return _seal(header, 2, form + _PACKED, len(groups), packed)
    return _seal(header, 2, form, len(groups), plain)


def decode(data: bytes | bytearray | memoryview, limits: Limits) -> Message:
    """The message in ``data``, which must be all of it. Its arrays are read-only and do not refer to ``data``.

    Raises:
        CodecError: anything whatsoever is wrong with the bytes.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > limits.max_bytes:
        raise CodecError(f"message of {size} bytes exceeds the limit of {limits.max_bytes}")
    if size < _FIXED.size + _CHECKSUM.size:
        raise CodecError(f"message of {size} bytes is shorter than any; was it cut off?")
    data = bytes(data)  # a snapshot: what was checked cannot change underneath (no copy where it is bytes already)
    magic, version, name_size, form, run, tokenizer, temperature, top_p, top_k, round_, n = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise CodecError(f"not a message of ftis: it starts with {magic!r} in place of {MAGIC!r}")
    if not 1 <= version <= VERSION:
        raise CodecError(
            f"message of version {version}, this ftis reads versions 1 to {VERSION}: install the same on both"
        )
    end = size - _CHECKSUM.size
    (checksum,) = _CHECKSUM.unpack_from(data, end)
    actual = zlib.crc32(memoryview(data)[:end])
    if checksum != actual:
        raise CodecError(f"checksum {checksum:08x} in place of {actual:08x}: damaged or cut off on the way")
    if version == 1:
        name_size, form = name_size + 256 * form, 0

    if not 1 <= name_size <= _LONGEST_NAME:
        raise CodecError(f"peer name of {name_size} bytes: it has 1 to {_LONGEST_NAME}")
    reader = _Reader(data, _FIXED.size, end)
    peer = reader.take(name_size, "the peer's name").decode("latin-1")  # the pattern lets only ASCII through
    if not _NAME.fullmatch(peer):
        raise CodecError(f"peer name {peer!r} is not letters, digits, '_', '.', '-'")
    if n > limits.max_groups:
        raise CodecError(f"{n} groups exceed the limit of {limits.max_groups}")
    precision = _PRECISIONS.get(form % _PACKED)
    if precision is None or form // _PACKED > 1:
        raise CodecError(f"form {form:#04x} is not one of this version")
    read = _read_packed if form // _PACKED else _read_plain
    columns = read(reader, n, precision, limits)
    if reader.at != end:
        raise CodecError(f"the groups end at byte {reader.at}, the message ends at {end}")
    if version != 1 and (fault := _value_fault(columns)):
        raise CodecError(fault)

    columns.ids.setflags(write=False)
    columns.logp.setflags(write=False)
    stops = np.cumsum(columns.lengths, dtype=np.int64).tolist()
    rollouts = [
        Rollout(columns.ids[start:stop], columns.logp[start:stop])
        for start, stop in zip([0, *stops[:-1]], stops, strict=False)
    ]
    groups: list[Group] = []
    first = 0
    for item, count in zip(columns.items.tolist(), columns.counts.tolist(), strict=True):
        groups.append(Group(peer, round_, item, tuple(rollouts[first : first + count])))
        first += count
    header = Header(run.hex(), round_, peer, tokenizer.hex(), temperature, top_k, top_p)
    return Message(header, tuple(groups))


def _seal(header: Header, version: int, form: int, n_groups: int, parts: list[bytes]) -> bytes:
    """A whole message: the fixed fields and the name, ``parts``, and the checksum."""
    fixed = _FIXED.pack(
        MAGIC,
        version,
        len(header.peer),
        form,
        bytes.fromhex(header.run),
        bytes.fromhex(header.tokenizer),
        header.temperature,
        header.top_p,
        header.top_k,
        header.round,
        n_groups,
    )
    body = b"".join([fixed, header.peer.encode("ascii"), *parts])
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _write_plain(columns: _Columns, precision: LogpPrecision) -> list[bytes]:
    bits = _FRACTION_BITS[precision]
    return [
        columns.items.astype("<u4").tobytes(),
        columns.counts.astype("<u2").tobytes(),
        columns.lengths.astype("<u4").tobytes(),
        columns.ids.astype("<i4", copy=False).tobytes(),
        (_to_fixed(columns.logp, bits).astype("<u2") if bits else columns.logp.astype("<f4", copy=False)).tobytes(),
    ]


def _read_plain(reader: _Reader, n: int, precision: LogpPrecision, limits: Limits) -> _Columns:
    bits = _FRACTION_BITS[precision]
    reader.need(6 * n, f"the table of {n} groups")
    items, counts = reader.array("<u4", n), reader.array("<u2", n)
    _check_counts(counts, limits)
    n_rollouts = int(counts.sum(dtype=np.uint64))
    reader.need(4 * n_rollouts, f"the lengths of {n_rollouts} rollouts")
    lengths = reader.array("<u4", n_rollouts)
    _check_lengths(lengths, limits)
    n_tokens = int(lengths.sum(dtype=np.uint64))
    rest, size = reader.end - reader.at, (6 if bits else 8) * n_tokens
    if rest != size:
        raise CodecError(f"{n_tokens} tokens take {size} bytes, {rest} are there")
    # Copied into aligned, native arrays: a name of any length leaves the bytes unaligned.
    ids = reader.array("<i4", n_tokens).astype(np.int32)
    if bits:
        return _Columns(items, counts, lengths, ids, _from_fixed(reader.array("<u2", n_tokens), bits))
    return _Columns(items, counts, lengths, ids, reader.array("<f4", n_tokens).astype(np.float32))


def _check_counts(counts: npt.NDArray[np.integer], limits: Limits) -> None:
    if (most := int(counts.max(initial=0))) > limits.max_rollouts_per_group:
        raise CodecError(f"group of {most} rollouts exceeds the limit of {limits.max_rollouts_per_group}")


def _check_lengths(lengths: npt.NDArray[np.integer], limits: Limits) -> None:
    if (longest := int(lengths.max(initial=0))) > limits.max_completion_length:
        raise CodecError(f"completion of {longest} tokens exceeds the limit of {limits.max_completion_length}")


# ------------------------------------------------------------------------------------- version 2: packed


def _write_packed(columns: _Columns, precision: LogpPrecision) -> list[bytes] | None:
    """The packed groups, or None where ids are too many to be numbered in two bytes."""
    coded = _code_ids(columns.ids)
    if coded is None:
        return None
    bits = _FRACTION_BITS[precision]
    table = np.concatenate([columns.items, columns.counts, columns.lengths]).astype(np.uint32)
    if bits:
        logp = _pack_numbers(_to_fixed(columns.logp, bits))
    else:
        planes = columns.logp.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4).T
        logp = [part for plane in planes for part in _pack_stream(plane, _NOISE_LEVEL)]
    return [
        _COUNTS.pack(len(columns.lengths), len(columns.ids), len(coded.gaps)),
        *_pack_numbers(table),
        *_pack_numbers(coded.gaps),
        *_pack_stream(coded.first, _TEXT_LEVEL),
        *_pack_stream(coded.second, _TEXT_LEVEL),
        *logp,
    ]


def _read_packed(reader: _Reader, n: int, precision: LogpPrecision, limits: Limits) -> _Columns:
    bits = _FRACTION_BITS[precision]
    n_rollouts, n_tokens, n_distinct = _COUNTS.unpack(reader.take(_COUNTS.size, "the counts"))
    # Here, before anything is decompressed, is where a bomb ends.
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

    items, counts, lengths = np.split(reader.numbers(2 * n + n_rollouts, "the tables"), [n, 2 * n])
    _check_counts(counts, limits)
    _check_lengths(lengths, limits)
    if int(counts.max(initial=0)) > _U16:
        raise CodecError(f"group of {int(counts.max())} rollouts, the most is {_U16}")
    if (total := int(counts.sum(dtype=np.uint64))) != n_rollouts:
        raise CodecError(f"groups of {total} rollouts in all, {n_rollouts} are announced")
    if (total := int(lengths.sum(dtype=np.uint64))) != n_tokens:
        raise CodecError(f"completions of {total} tokens in all, {n_tokens} are announced")

    ids = _read_ids(reader, n_tokens, n_distinct)
    if bits:
        logp = _from_fixed(reader.numbers(n_tokens, "the log-probabilities"), bits)
    else:
        planes = np.stack([reader.stream(n_tokens, "the log-probabilities") for _ in range(4)], axis=1)
        logp = planes.view("<f4")[:, 0].astype(np.float32)
    return _Columns(items, counts, lengths, ids, logp)


def _value_fault(columns: _Columns) -> str | None:
    """What in the values version 2 does not carry; version 1 carries anything."""
    if (lowest := int(columns.ids.min(initial=0))) < 0:
        return f"token id {lowest} is negative"
    wrong = ~((columns.logp <= 0) & (columns.logp >= MIN_LOGP))  # true of NaN as well
    if wrong.any():
        return f"log-probability {float(columns.logp[wrong.argmax()])} is not in [{MIN_LOGP:g}, 0]"
    return None


def _to_fixed(logp: Floats, bits: int) -> Numbers:
    """round(−logp · 2^bits), to even where halfway. Exact in float32 but for the rounding, as 2^bits is."""
    numbers: Numbers = np.rint(-logp * np.float32(2**bits)).astype(np.uint32)
    return numbers


def _from_fixed(numbers: npt.NDArray[np.integer], bits: int) -> Floats:
    """−numbers / 2^bits, and never −0."""
    nats: Floats = (np.float32(0) - numbers.astype(np.float32)) * np.float32(2.0**-bits)
    return nats


@dataclass(frozen=True, eq=False)
class _Coded:
    """Token ids as numbers of one byte, or of two where they are rare.

    The D distinct ids are listed in the order of :func:`_listed` and numbered 0 … D − 1 as they stand there.

    Attributes:
        gaps: of each listed id the distance from the one before it in its part, less 1; of a part's first the id.
        first: per token, its number if that is below k, the length of the list's first part; else k + ⌊r / 256⌋ where
            the number is k + r.
        second: r mod 256 of the tokens that have such an r.
    """

    gaps: Numbers
    first: Bytes
    second: Bytes


def _direct(n_distinct: int) -> int:
    """k, how many of the distinct ids get a number of one byte.

    All of them if they are 256 at most. Else 256 − e, where e = ⌈(D − 256) / 255⌉ first bytes are set apart for the
    others, which then have room for 256 e of them.
    """
    return n_distinct if n_distinct <= 256 else 256 + (256 - n_distinct) // 255


def _listed(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Where in the ascending distinct ids those stand that are listed, given how often each occurs.

    First the k most frequent (of equally frequent ones the smaller), then the others; either part in ascending order.
    """
    k = _direct(len(counts))
    by_count = np.argsort(-counts, kind="stable")
    return np.concatenate([np.sort(by_count[:k]), np.sort(by_count[k:])])


def _code_ids(ids: Ints) -> _Coded | None:
    """None if there are more than 65,536 distinct ids."""
    distinct, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    if len(distinct) > _LARGEST_VOCABULARY:
        return None
    k, order = _direct(len(distinct)), _listed(counts)
    listed = distinct[order]
    gaps = np.concatenate([np.diff(part, prepend=-1) - 1 for part in (listed[:k], listed[k:])])
    number = np.empty(len(distinct), dtype=np.int64)
    number[order] = np.arange(len(distinct))
    rest = number - k
    first = np.where(rest < 0, number, k + (rest >> 8)).astype(np.uint8)[place]
    second = (rest & 255).astype(np.uint8)[place[rest[place] >= 0]]
    return _Coded(gaps.astype(np.uint32), first, second)


def _read_ids(reader: _Reader, n_tokens: int, n_distinct: int) -> Ints:
    k = _direct(n_distinct)
    gaps = reader.numbers(n_distinct, "the vocabulary").astype(np.int64)
    listed = np.concatenate([np.cumsum(gaps[:k] + 1), np.cumsum(gaps[k:] + 1)]) - 1
    if (largest := int(listed.max(initial=0))) > _I32:
        raise CodecError(f"token id {largest} does not fit 31 bits")
    number = reader.stream(n_tokens, "the token ids").astype(np.int32)
    two = np.flatnonzero(number >= k)
    if n_distinct == k and len(two):
        raise CodecError(f"token of number {int(number.max())} among {n_distinct} distinct ids")
    second = reader.stream(len(two), "the rare token ids")
    number[two] = k + ((number[two] - k) << 8) + second
    if (largest := int(number.max(initial=-1))) >= n_distinct:
        raise CodecError(f"token of number {largest} among {n_distinct} distinct ids")
    # The same ids could be listed in other orders, twice, or without occurring; only one list is a message.
    distinct, where = np.unique(listed, return_index=True)
    counts = np.bincount(number, minlength=n_distinct)[where]
    if len(distinct) < n_distinct or not counts.all() or not np.array_equal(distinct[_listed(counts)], listed):
        raise CodecError("the token ids are not listed by how often they occur")
    return listed.astype(np.int32)[number]


def _pack_numbers(values: Numbers) -> list[bytes]:
    """Numbers of 32 bits as a stream of symbols and the bits these leave open.

    The symbol 8 e + ⌊v / 2^e⌋, at most 239, tells the four highest of a number's L binary digits; e = max(0, L − 4).
    The e lower ones follow as they are: bit 0 of all numbers with e > 0, then bit 1 of all with e > 1, and so on,
    eight to a byte from the highest bit down, zeros at the end. Among the numbers of one symbol any smooth distribution
    is nearly flat, so that their open bits are worth no coding.
    """
    extra = np.maximum(np.frexp(values.astype(np.float64))[1] - 4, 0).astype(np.uint32)
    symbols = (8 * extra + (values >> extra)).astype(np.uint8)
    planes = [np.zeros(0, np.uint8)]
    for plane, at in _planes(extra):
        planes.append(((values[at] >> np.uint32(plane)) & 1).astype(np.uint8))
    return [*_pack_stream(symbols, _NOISE_LEVEL), np.packbits(np.concatenate(planes)).tobytes()]


def _planes(extra: Numbers) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Each bit left open by some symbol, and the places of the numbers that it is left open in."""
    plane, at = 0, np.flatnonzero(extra)
    while len(at):
        yield plane, at
        plane += 1
        at = at[extra[at] > plane]


def _pack_stream(raw: Bytes, level: int) -> list[bytes]:
    """Bytes whose number the reader knows: the size of what follows, then one zstandard frame that states its content's
    size, or the bytes as they are where no frame is smaller."""
    stored = raw.tobytes()
    framed = zstandard.ZstdCompressor(level=level, write_checksum=False, write_dict_id=False).compress(stored)
    smaller = min(stored, framed, key=len)
    return [_SIZE.pack(len(smaller)), smaller]


@dataclass
class _Reader:
    """The bytes of a message, read from ``at`` on. ``end`` is where the checksum starts."""

    data: bytes
    at: int
    end: int

    def need(self, size: int, what: str) -> None:
        if self.at + size > self.end:
            raise CodecError(f"{what} would end at byte {self.at + size}, the message ends at {self.end}")

    def take(self, size: int, what: str) -> bytes:
        self.need(size, what)
        self.at += size
        return self.data[self.at - size : self.at]

    def array(self, dtype: str, count: int) -> npt.NDArray[np.integer]:
        """``count`` values that are known to be there."""
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def stream(self, count: int, what: str) -> Bytes:
        """The ``count`` bytes of a stream."""
        (size,) = _SIZE.unpack(self.take(_SIZE.size, what))
        if size > count:
            raise CodecError(f"{what}: {size} bytes for {count}")
        raw = self.take(size, what)
        return np.frombuffer(raw if size == count else _unframe(raw, count, what), np.uint8)

    def numbers(self, count: int, what: str) -> Numbers:
        """The ``count`` numbers that :func:`_pack_numbers` wrote."""
        symbols = self.stream(count, what)
        if (largest := int(symbols.max(initial=0))) > _LARGEST_SYMBOL:
            raise CodecError(f"{what}: symbol {largest}, the largest is {_LARGEST_SYMBOL}")
        extra = np.maximum(symbols >> 3, 1).astype(np.uint32) - 1
        values: Numbers = (symbols - 8 * extra) << extra
        n_bits = int(extra.sum(dtype=np.uint64))
        packed = np.frombuffer(self.take((n_bits + 7) // 8, what), np.uint8)
        if n_bits % 8 and packed[-1] & (0xFF >> n_bits % 8):
            raise CodecError(f"{what}: the last byte is not filled with zeros")
        bits = np.unpackbits(packed, count=n_bits)
        used = 0
        for plane, at in _planes(extra):
            values[at] |= bits[used : used + len(at)].astype(np.uint32) << np.uint32(plane)
            used += len(at)
        return values


def _unframe(frame: bytes, count: int, what: str) -> bytes:
    """The ``count`` bytes in ``frame``, which must be one zstandard frame, state that size and hold no less."""
    try:
        stated = zstandard.get_frame_parameters(frame)
        if not frame.startswith(_FRAME_MAGIC) or stated.dict_id or stated.has_checksum or stated.content_size != count:
            raise CodecError(f"{what}: not a frame of {count} bytes without dictionary and checksum")
        if count > _FRAME_MOST * len(frame):
            raise CodecError(f"{what}: {len(frame)} bytes cannot hold {count}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"{what}: {error}") from None
    if len(content) != count:
        raise CodecError(f"{what}: {len(content)} bytes in place of {count}")
    return content


def _check_writable(header: Header, groups: tuple[Group, ...], rollouts: list[Rollout]) -> None:
    for name, digest in (("run", header.run), ("tokenizer", header.tokenizer)):
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"header.{name} = {digest!r} is not 32 lower-case hex digits")
    if not _NAME.fullmatch(header.peer):
        raise ValueError(f"header.peer = {header.peer!r} is not a peer's name (letters, digits, '_', '.', '-')")
    for name, number in (("round", header.round), ("top_k", header.top_k), ("groups", len(groups))):
        if not 0 <= number <= _U32:
            raise ValueError(f"{name} = {number} does not fit 32 bits without sign")
    for group in groups:
        if (group.peer, group.round) != (header.peer, header.round):
            raise ValueError(
                f"group of item {group.item} is {group.peer}'s of round {group.round}, "
                f"the header speaks for {header.peer} and round {header.round}: send it in a message of its own"
            )
        if not 0 <= group.item <= _U32:
            raise ValueError(f"item = {group.item} does not fit 32 bits without sign")
        if len(group.rollouts) > _U16:
            raise ValueError(f"group of item {group.item} has {len(group.rollouts)} rollouts, the most is {_U16}")
    for rollout in rollouts:
        if rollout.completion_ids.dtype != np.int32 or rollout.gen_logp.dtype != np.float32:
            raise ValueError(
                f"a rollout has int32 ids and float32 log-probabilities, "
                f"got {rollout.completion_ids.dtype} and {rollout.gen_logp.dtype}"
            )

"""The parts of a message: its counts, streams of bytes, numbers, log-probabilities, and the table of groups.

The reader holds every count against the limits before it decompresses anything; the size of each stream follows from
what it has read before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from ftis.codec import MOST_ROLLOUTS, CodecError, Columns, Integers, Limits, Numbers, Reader
from ftis.rollouts import Floats

TEXT_LEVEL = 15
"""zstandard's level for ids and text, which repay a search for phrases (ids: 0.64 bytes a token, 0.68 at level 3)."""
NOISE_LEVEL = 1
"""For everything else: noise with a skewed distribution, in which a search finds nothing."""
_COUNTS = struct.Struct("<III")
_SIZE = struct.Struct("<I")
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_MOST = 32768
"""The most bytes that one byte of a frame stands for: a block has at least 4 bytes and at most 128 KiB of content."""
_LARGEST_SYMBOL = 239

Bytes = npt.NDArray[np.uint8]

# ---------------------------------------------------------------------------------------------- groups


def write_counts(n_rollouts: int, n_tokens: int, own: int) -> bytes:
    """A message's opening: R, T, and the form's own count."""
    return _COUNTS.pack(n_rollouts, n_tokens, own)


def read_counts(reader: Reader, n: int, limits: Limits) -> tuple[int, int, int]:
    """R, T and the form's own count. A decompression bomb ends here.

    Raises:
        CodecError: n groups may not have as many rollouts and tokens.
    """
    n_rollouts, n_tokens, own = _COUNTS.unpack(reader.take(_COUNTS.size, "the counts"))
    if n_rollouts > n * limits.max_rollouts_per_group:
        raise CodecError(
            f"{n_rollouts} rollouts in {n} groups exceed the limit of {limits.max_rollouts_per_group} in each"
        )
    if n_tokens > n_rollouts * limits.max_completion_length:
        raise CodecError(
            f"{n_tokens} tokens in {n_rollouts} rollouts exceed the limit of {limits.max_completion_length} in each"
        )
    return n_rollouts, n_tokens, own


def write_groups(columns: Columns, lengths: Integers) -> list[bytes]:
    """2 n + R numbers: the items, the number of rollouts of each group, and ``lengths``, the tokens of each rollout."""
    return write_numbers(np.concatenate([columns.items, columns.counts, lengths]).astype(np.uint32))


def read_groups(
    reader: Reader, n: int, n_rollouts: int, n_tokens: int, limits: Limits
) -> tuple[Numbers, Numbers, Numbers]:
    """Items and counts [n], and lengths [R], that :func:`write_groups` wrote, with the totals that were announced."""
    items, counts, lengths = np.split(read_numbers(reader, 2 * n + n_rollouts, "the tables"), [n, 2 * n])
    limits.check_counts(counts)
    limits.check_lengths(lengths)
    if int(counts.max(initial=0)) > MOST_ROLLOUTS:
        raise CodecError(f"group of {int(counts.max())} rollouts, the most is {MOST_ROLLOUTS}")
    if (total := int(counts.sum(dtype=np.uint64))) != n_rollouts:
        raise CodecError(f"groups of {total} rollouts in all, {n_rollouts} are announced")
    if (total := int(lengths.sum(dtype=np.uint64))) != n_tokens:
        raise CodecError(f"completions of {total} tokens in all, {n_tokens} are announced")
    return items, counts, lengths


# ---------------------------------------------------------------------------------------------- log-probabilities


def write_logp(logp: Floats, bits: int) -> list[bytes]:
    """Numbers in fixed point; in float32 (``bits`` 0) four streams, the lowest byte of each value first."""
    if bits:
        return write_numbers(to_fixed(logp, bits))
    planes = logp.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4).T
    return [part for plane in planes for part in write_stream(plane, NOISE_LEVEL)]


def read_logp(reader: Reader, count: int, bits: int) -> Floats:
    """The ``count`` log-probabilities that :func:`write_logp` wrote."""
    if bits:
        return from_fixed(read_numbers(reader, count, "the log-probabilities"), bits)
    planes = np.stack([read_stream(reader, count, "the log-probabilities") for _ in range(4)], axis=1)
    logp: Floats = planes.view("<f4")[:, 0].astype(np.float32)
    return logp


def to_fixed(logp: Floats, bits: int) -> Numbers:
    """round(−logp · 2^bits), halves to even. Exact in float32 except for the rounding, since 2^bits is exact."""
    numbers: Numbers = np.rint(-logp * np.float32(2**bits)).astype(np.uint32)
    return numbers


def from_fixed(numbers: Integers, bits: int) -> Floats:
    """−numbers / 2^bits, and never −0."""
    nats: Floats = (np.float32(0) - numbers.astype(np.float32)) * np.float32(2.0**-bits)
    return nats


# ---------------------------------------------------------------------------------------------- numbers


def write_numbers(values: Numbers) -> list[bytes]:
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
    return [*write_stream(symbols, NOISE_LEVEL), np.packbits(np.concatenate(planes)).tobytes()]


def read_numbers(reader: Reader, count: int, what: str) -> Numbers:
    """The ``count`` numbers that :func:`write_numbers` wrote."""
    symbols = read_stream(reader, count, what)
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


def write_stream(raw: Bytes, level: int) -> list[bytes]:
    """Bytes whose number the reader knows: a u32 size, then as many bytes.

    They are one zstandard frame that states the size of its content, or ``raw`` itself if the frame is no smaller.
    """
    stored = raw.tobytes()
    framed = zstandard.ZstdCompressor(level=level, write_checksum=False, write_dict_id=False).compress(stored)
    smaller = min(stored, framed, key=len)
    return [_SIZE.pack(len(smaller)), smaller]


def read_stream(reader: Reader, count: int, what: str) -> Bytes:
    """The ``count`` bytes that :func:`write_stream` wrote."""
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
        raise CodecError(f"{what}: a frame holds {len(content)} bytes instead of {count}")
    return content

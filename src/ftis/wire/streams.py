"""The parts of a message: its counts, streams of bytes, numbers, log-probabilities, and the table of groups.

The reader holds every count against the limits before it decompresses anything; the size of each stream follows from
what it has read before.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import zstandard

from ftis.codec import MOST_ROLLOUTS, CodecError, Columns, Integers, Limits, Numbers, Reader
from ftis.rollouts import Floats

PHRASES = 15
"""zstandard's level for ids and text, which repay a search for phrases."""
QUICK = 3
"""zstandard's level for everything else."""
_COUNTS = struct.Struct("<II")
_SIZE = struct.Struct("<I")
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_MOST = 32768
"""The most bytes that one byte of a frame stands for: a block has at least 4 bytes and at most 128 KiB of content."""

Bytes = npt.NDArray[np.uint8]


def write_counts(n_rollouts: int, n_tokens: int) -> bytes:
    """The opening of a message's groups: R and T."""
    return _COUNTS.pack(n_rollouts, n_tokens)


def read_counts(reader: Reader, n: int, limits: Limits) -> tuple[int, int]:
    """R and T, within the limits, so that no later stream is a decompression bomb.

    Raises:
        CodecError: n groups may not have as many rollouts and tokens.
    """
    n_rollouts, n_tokens = _COUNTS.unpack(reader.take(_COUNTS.size, "the counts"))
    if n_rollouts > n * limits.max_rollouts_per_group:
        raise CodecError(
            f"{n_rollouts} rollouts in {n} groups exceed the limit of {limits.max_rollouts_per_group} in each"
        )
    if n_tokens > n_rollouts * limits.max_completion_length:
        raise CodecError(
            f"{n_tokens} tokens in {n_rollouts} rollouts exceed the limit of {limits.max_completion_length} in each"
        )
    return n_rollouts, n_tokens


def write_groups(columns: Columns, lengths: Integers) -> list[bytes]:
    """2 n + R numbers: the items, the number of rollouts of each group, and ``lengths``, the tokens of each rollout."""
    return write_numbers(np.concatenate([columns.items, columns.counts, lengths]).astype(np.uint32))


def read_groups(
    reader: Reader, n: int, n_rollouts: int, n_tokens: int, limits: Limits
) -> tuple[Numbers, Numbers, Numbers]:
    """Items and counts [n], and lengths [R], that :func:`write_groups` wrote, with the totals that were announced."""
    items, counts, lengths = np.split(read_numbers(reader, 2 * n + n_rollouts, "the tables"), [n, 2 * n])
    most, longest = int(counts.max(initial=0)), int(lengths.max(initial=0))
    if most > (allowed := min(limits.max_rollouts_per_group, MOST_ROLLOUTS)):
        raise CodecError(f"group of {most} rollouts exceeds the limit of {allowed}")
    if longest > limits.max_completion_length:
        raise CodecError(f"completion of {longest} tokens exceeds the limit of {limits.max_completion_length}")
    if (total := int(counts.sum(dtype=np.uint64))) != n_rollouts:
        raise CodecError(f"groups of {total} rollouts in all, {n_rollouts} are announced")
    if (total := int(lengths.sum(dtype=np.uint64))) != n_tokens:
        raise CodecError(f"completions of {total} tokens in all, {n_tokens} are announced")
    return items, counts, lengths


def write_numbers(values: Numbers, level: int = QUICK) -> list[bytes]:
    """A stream of u32, little-endian."""
    return write_stream(values.astype("<u4", copy=False).view(np.uint8), level)


def read_numbers(reader: Reader, count: int, what: str) -> Numbers:
    """The ``count`` numbers that :func:`write_numbers` wrote."""
    return read_stream(reader, 4 * count, what).view("<u4").astype(np.uint32)


def write_logp(logp: Floats) -> list[bytes]:
    """Four streams, the lowest byte of each float32 first."""
    planes = logp.astype("<f4", copy=False).view(np.uint8).reshape(-1, 4).T
    return [part for plane in planes for part in write_stream(plane, QUICK)]


def read_logp(reader: Reader, count: int) -> Floats:
    """The ``count`` log-probabilities that :func:`write_logp` wrote."""
    planes = np.stack([read_stream(reader, count, "the log-probabilities") for _ in range(4)], axis=1)
    logp: Floats = planes.view("<f4")[:, 0].astype(np.float32)
    return logp


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

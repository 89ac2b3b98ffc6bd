"""Groups ⇄ bytes: the message a peer sends once a round. Pure: no socket, no clock, no model.

A message, version 1. Integers and floats are little-endian, nothing is padded or aligned; P is the length of
the peer's name, n the number of groups, R that of all their rollouts, T that of all their completion tokens.

    offset  size  type      field
    0       4     bytes     magic, ``FTIS``
    4       2     u16       version, 1
    6       2     u16       P, 1 to 64
    8       16    bytes     run: what the peers agreed on, a digest
    24      16    bytes     tokenizer: its fingerprint
    40      8     f64       temperature ┐
    48      8     f64       top_p       │ of the distribution sampled
    56      4     u32       top_k       ┘
    60      4     u32       round
    64      4     u32       n
    68      P     ASCII     peer, a name as in the recipe
            4 n   u32[n]    item of each group
            2 n   u16[n]    rollouts of each group
            4 R   u32[R]    tokens of each rollout, group after group
            4 T   i32[T]    token ids, rollout after rollout
            4 T   f32[T]    log-probabilities, in the same order
            4     u32       CRC-32 (zlib's) of everything before it

There is one way to write a message: ``encode(decode(data)) == data`` for all ``data`` that decodes, bit by bit
(NaNs keep their payload). Bytes from the other side raise :class:`CodecError` and nothing else, and sizes are
held against the limits and against the bytes really there before memory is taken for them. The checksum finds
accidents, not attackers. Whether a message makes *sense* is admission's question. See docs/wire.md.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from ftis.config import FtisError
from ftis.rollouts import Group, Rollout

MAGIC = b"FTIS"
VERSION = 1

_FIXED = struct.Struct("<4sHH16s16sddIII")
_CHECKSUM = struct.Struct("<I")
_U16, _U32 = 0xFFFF, 0xFFFF_FFFF
_LONGEST_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # config.Name
_DIGEST = re.compile(r"[0-9a-f]{32}")


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
    """The most a receiver is willing to decode."""

    max_bytes: int
    max_groups: int
    max_rollouts_per_group: int
    max_completion_length: int


def message_size(tokens: int, rollouts: int, groups: int, peer: str) -> int:
    """Bytes of a message from ``peer`` with so many groups, rollouts and completion tokens in all."""
    return _FIXED.size + len(peer) + 6 * groups + 4 * rollouts + 8 * tokens + _CHECKSUM.size


def encode(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        ValueError: the message cannot be written (a mistake of the caller, never of a peer).
    """
    header, groups = message.header, message.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _check_writable(header, groups, rollouts)
    parts = [
        _FIXED.pack(
            MAGIC,
            VERSION,
            len(header.peer),
            bytes.fromhex(header.run),
            bytes.fromhex(header.tokenizer),
            header.temperature,
            header.top_p,
            header.top_k,
            header.round,
            len(groups),
        ),
        header.peer.encode("ascii"),
        np.array([group.item for group in groups], dtype="<u4").tobytes(),
        np.array([len(group.rollouts) for group in groups], dtype="<u2").tobytes(),
        np.array([len(rollout) for rollout in rollouts], dtype="<u4").tobytes(),
        *(rollout.completion_ids.astype("<i4", copy=False).tobytes() for rollout in rollouts),
        *(rollout.gen_logp.astype("<f4", copy=False).tobytes() for rollout in rollouts),
    ]
    body = b"".join(parts)
    return body + _CHECKSUM.pack(zlib.crc32(body))


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
    magic, version, name_size, run, tokenizer, temperature, top_p, top_k, round_, n = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise CodecError(f"not a message of ftis: it starts with {magic!r} in place of {MAGIC!r}")
    if version != VERSION:
        raise CodecError(f"message of version {version}, this ftis reads version {VERSION}: install the same on both")
    end = size - _CHECKSUM.size
    (checksum,) = _CHECKSUM.unpack_from(data, end)
    actual = zlib.crc32(memoryview(data)[:end])
    if checksum != actual:
        raise CodecError(f"checksum {checksum:08x} in place of {actual:08x}: damaged or cut off on the way")

    if not 1 <= name_size <= _LONGEST_NAME:
        raise CodecError(f"peer name of {name_size} bytes: it has 1 to {_LONGEST_NAME}")
    at = _FIXED.size
    _need(at + name_size, end, "the peer's name")
    peer = data[at : at + name_size].decode("latin-1")  # any byte decodes; the pattern lets only ASCII through
    if not _NAME.fullmatch(peer):
        raise CodecError(f"peer name {peer!r} is not letters, digits, '_', '.', '-'")
    at += name_size

    if n > limits.max_groups:
        raise CodecError(f"{n} groups exceed the limit of {limits.max_groups}")
    _need(at + 6 * n, end, f"the table of {n} groups")
    items = np.frombuffer(data, "<u4", n, at)
    counts = np.frombuffer(data, "<u2", n, at + 4 * n)
    at += 6 * n
    if (most := int(counts.max(initial=0))) > limits.max_rollouts_per_group:
        raise CodecError(f"group of {most} rollouts exceeds the limit of {limits.max_rollouts_per_group}")
    n_rollouts = int(counts.sum(dtype=np.uint64))
    _need(at + 4 * n_rollouts, end, f"the lengths of {n_rollouts} rollouts")
    lengths = np.frombuffer(data, "<u4", n_rollouts, at)
    at += 4 * n_rollouts
    if (longest := int(lengths.max(initial=0))) > limits.max_completion_length:
        raise CodecError(f"completion of {longest} tokens exceeds the limit of {limits.max_completion_length}")
    n_tokens = int(lengths.sum(dtype=np.uint64))
    if at + 8 * n_tokens != end:
        raise CodecError(f"{n_tokens} tokens take {8 * n_tokens} bytes, {end - at} are there")

    # Copied into aligned, native arrays: a name of any length leaves the bytes unaligned.
    ids = np.frombuffer(data, "<i4", n_tokens, at).astype(np.int32)
    logp = np.frombuffer(data, "<f4", n_tokens, at + 4 * n_tokens).astype(np.float32)
    ids.setflags(write=False)
    logp.setflags(write=False)
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    rollouts = [
        Rollout(ids[start:stop], logp[start:stop]) for start, stop in zip([0, *stops[:-1]], stops, strict=False)
    ]
    groups: list[Group] = []
    first = 0
    for item, count in zip(items.tolist(), counts.tolist(), strict=True):
        groups.append(Group(peer, round_, item, tuple(rollouts[first : first + count])))
        first += count
    header = Header(run.hex(), round_, peer, tokenizer.hex(), temperature, top_k, top_p)
    return Message(header, tuple(groups))


def _need(stop: int, end: int, what: str) -> None:
    if stop > end:
        raise CodecError(f"{what} would end at byte {stop}, the message ends at {end}")


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

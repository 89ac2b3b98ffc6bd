"""Groups ⇄ bytes: the message a peer sends once a round. Pure: no socket, no clock, no model.

Numbers are little-endian, nothing is padded or aligned. P is the length of the peer's name, n the number of groups.

    offset  size  type      field
    0       4     bytes     magic, ``FTIS``
    4       2     u16       version, 5
    6       1     u8        P, 1 to 64
    7       1     u8        form: token ids (0) or text (1)
    8       16    bytes     run: digest of the peers' agreement
    24      16    bytes     tokenizer: its fingerprint
    40      8     f64       temperature ┐
    48      8     f64       top_p       │ of the distribution sampled
    56      4     u32       top_k       ┘
    60      4     u32       round
    64      4     u32       n
    68      P     ASCII     peer, a name as in the recipe
                            the groups
            4     u32       CRC-32 (zlib's) of everything before it

:mod:`ftis.wire.ids` and :mod:`ftis.wire.text` write and read the groups; docs/wire.md describes both.

Contents have one layout, but zstandard may compress it in several ways: compare contents, not bytes. :func:`decode`
raises :class:`CodecError` and nothing else. It checks sizes against the limits and the bytes present before it takes
memory. The checksum finds accidents, not attackers. :mod:`ftis.admission` decides whether a message makes sense.
"""

from __future__ import annotations

import functools
import itertools
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ftis.config import PEER_NAME, FtisError
from ftis.rollouts import Floats, Group, Ints, Rollout
from ftis.seams import FORMS, look_up

MAGIC = b"FTIS"
VERSION = 5
"""The only version that is written and read. A change of the layout raises it."""
MOST_ROLLOUTS = 0xFFFF  # of one group
LONGEST_NAME = 64  # of a peer, in bytes
MOST_BYTES = 32
"""The most bytes of a completion of text per token of the maximum length. English has about four a token."""

_FIXED = struct.Struct("<4sHBB16s16sddIII")
_CHECKSUM = struct.Struct("<I")
_OVERHEAD = 64  # counts, and the sizes of up to eight streams

Integers = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.uint32]


class CodecError(FtisError):
    """Bytes that are not a valid message within the limits."""


@dataclass(frozen=True)
class Header:
    """A sender's statements about itself and the whole message.

    Attributes:
        run: 32 lower-case hex digits, see :func:`ftis.swarm.facts.run_id`.
        peer: the sender's name as in the recipe.
        tokenizer: 32 lower-case hex digits, the fingerprint of the sender's tokenizer.
        temperature, top_k, top_p: of the distribution that was sampled; ``gen_logp`` are its log-probabilities.
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
    """A header and groups of the header's peer and round."""

    header: Header
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Limits:
    """The most that a receiver decodes. The counts bound memory, since few compressed bytes may claim many tokens."""

    max_bytes: int
    max_groups: int
    max_rollouts_per_group: int
    max_completion_length: int


@dataclass(frozen=True, eq=False)
class Columns:
    """A message's groups field by field.

    Attributes:
        items, counts: [n], each group's item and number of rollouts.
        lengths: [N], each rollout's number of ids, group after group.
        ids: int32 [M], rollout after rollout.
        logp: float32, one for each unit of each rollout.
        unit: int32 [M], as in rollouts; None if each id is a unit of its own.
    """

    items: Integers
    counts: Integers
    lengths: Integers
    ids: Ints
    logp: Floats
    unit: Ints | None = None


@dataclass
class Reader:
    """The bytes of a message, read from ``at`` up to ``end``, where the checksum starts."""

    data: bytes
    at: int
    end: int

    def take(self, size: int, what: str) -> bytes:
        """The next ``size`` bytes. Raises CodecError if fewer are left for ``what``."""
        if self.at + size > self.end:
            raise CodecError(f"{what} would end at byte {self.at + size}, the message ends at {self.end}")
        self.at += size
        return self.data[self.at - size : self.at]


class Form(NamedTuple):
    """A layout of the groups of a message.

    Attributes:
        write: f(columns) → the bytes in parts; raises ValueError for columns that it cannot carry.
        read: f(reader, n, limits) → the columns of n groups; raises CodecError. Its memory is bounded by the limits and
            the bytes present. :func:`decode` checks the values, and that no bytes are left.
    """

    write: Callable[[Columns], list[bytes]]
    read: Callable[[Reader, int, Limits], Columns]


def largest_message(tokens: int, rollouts: int, groups: int, peer: str, text: bool = False) -> int:
    """The most bytes of a message from ``peer``, with so many tokens, rollouts and groups in all.

    A message has this size if nothing in it can be compressed. A token id then takes 8 bytes with its log-probability.
    A token of text has a log-probability, a size, up to :data:`MOST_BYTES` bytes, and perhaps an end.
    """
    numbers = 2 * groups + rollouts + (3 if text else 2) * tokens
    texts = MOST_BYTES * tokens if text else 0
    return _FIXED.size + len(peer) + _OVERHEAD + 4 * numbers + texts + _CHECKSUM.size


def encode(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        ValueError: a group is not the header's, or a rollout has arrays of another kind or a negative id, as an attack
            or a sampler of one's own may make them.
    """
    header, groups = message.header, message.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for group in groups:
        if (group.peer, group.round) != (header.peer, header.round):
            raise ValueError(
                f"group of item {group.item} is {group.peer}'s of round {group.round}, "
                f"the header speaks for {header.peer} and round {header.round}: send it in a message of its own"
            )
    for rollout in rollouts:
        if rollout.completion_ids.dtype != np.int32 or rollout.gen_logp.dtype != np.float32:
            got = f"{rollout.completion_ids.dtype} and {rollout.gen_logp.dtype}"
            raise ValueError(f"a rollout has int32 ids and float32 log-probabilities, got {got}")
    units = [rollout.unit for rollout in rollouts if rollout.unit is not None]
    columns = Columns(
        items=np.array([group.item for group in groups], dtype=np.uint32),
        counts=np.array([len(group.rollouts) for group in groups], dtype=np.uint16),
        lengths=np.array([len(rollout) for rollout in rollouts], dtype=np.uint32),
        ids=np.concatenate([np.zeros(0, np.int32), *(rollout.completion_ids for rollout in rollouts)]),
        logp=np.concatenate([np.zeros(0, np.float32), *(rollout.gen_logp for rollout in rollouts)]),
        unit=np.concatenate(units) if units else None,
    )
    if (lowest := int(columns.ids.min(initial=0))) < 0:
        raise ValueError(f"token id {lowest} is negative")
    form = int(bool(units))
    parts = _form(form).write(columns)
    digests = (bytes.fromhex(header.run), bytes.fromhex(header.tokenizer))
    numbers = (header.temperature, header.top_p, header.top_k, header.round, len(groups))
    fixed = _FIXED.pack(MAGIC, VERSION, len(header.peer), form, *digests, *numbers)
    body = b"".join([fixed, header.peer.encode("ascii"), *parts])
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode(data: bytes, limits: Limits) -> Message:
    """The message in ``data``, which holds nothing else. Its arrays are read-only.

    Raises:
        CodecError: the bytes are not a valid message within the limits.
    """
    size = len(data)
    if size > limits.max_bytes:
        raise CodecError(f"message of {size} bytes exceeds the limit of {limits.max_bytes}")
    if size < _FIXED.size + _CHECKSUM.size:
        raise CodecError(f"message of {size} bytes is shorter than any message; was it cut off?")
    magic, version, name_size, form, run, tokenizer, temperature, top_p, top_k, round_, n = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise CodecError(f"not a message of ftis: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise CodecError(f"message of version {version}, this ftis reads version {VERSION}: install the same on both")
    end = size - _CHECKSUM.size
    (checksum,) = _CHECKSUM.unpack_from(data, end)
    actual = zlib.crc32(memoryview(data)[:end])
    if checksum != actual:
        raise CodecError(f"checksum {checksum:08x} instead of {actual:08x}: damaged or cut off on the way")
    if not 1 <= name_size <= LONGEST_NAME:
        raise CodecError(f"peer name of {name_size} bytes: it has 1 to {LONGEST_NAME}")
    reader = Reader(data, _FIXED.size, end)
    peer = reader.take(name_size, "the peer's name").decode("latin-1")  # the pattern lets only ASCII through
    if not PEER_NAME.fullmatch(peer):
        raise CodecError(f"peer name {peer!r} is not letters, digits, '_', '.', '-'")
    if n > limits.max_groups:
        raise CodecError(f"{n} groups exceed the limit of {limits.max_groups}")
    if form >= len(FORMS):
        raise CodecError(f"form {form} is neither of ids nor of text")
    columns = _form(form).read(reader, n, limits)
    if reader.at != end:
        raise CodecError(f"the groups end at byte {reader.at}, the message ends at {end}")

    stops = np.cumsum(columns.lengths, dtype=np.int64)
    ids, units = _parts(columns.ids, stops), columns.unit
    if units is None:
        rollouts = list(map(Rollout, ids, _parts(columns.logp, stops)))
    else:
        unit_stops = np.cumsum(units[stops - 1] + 1, dtype=np.int64)
        rollouts = list(map(Rollout, ids, _parts(columns.logp, unit_stops), _parts(units, stops)))
    group_stops = np.cumsum(columns.counts, dtype=np.int64).tolist()
    groups = []
    for item, (start, stop) in zip(columns.items.tolist(), itertools.pairwise([0, *group_stops]), strict=True):
        groups.append(Group(peer, round_, item, tuple(rollouts[start:stop])))
    return Message(Header(run.hex(), round_, peer, tokenizer.hex(), temperature, top_k, top_p), tuple(groups))


def _parts(array: npt.NDArray[Any], stops: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """``array``, made read-only, cut at ``stops``."""
    array.setflags(write=False)
    return [array[start:stop] for start, stop in itertools.pairwise([0, *stops.tolist()])]


@functools.cache
def _form(number: int) -> Form:
    form: Form = look_up(list(FORMS)[number], "form", FORMS)
    return form

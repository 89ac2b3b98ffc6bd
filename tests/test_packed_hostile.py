"""Version 2 of the wire format: damaged, contradictory and exploding bytes, and the limits."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import zstandard
from fuzz_cases import signed
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import peak_of
from wire_messages import (
    BITS,
    BOUNDLESS,
    EXAMPLE,
    GOLDEN,
    HEADER,
    LIMITS,
    PRECISIONS,
    assert_refused_in_little_memory,
    assert_same,
    bits,
    head,
    in_frame,
    packed,
    refused_or_canonical,
    stored,
    synthetic,
    zstd,
)

from ftis.codec import CodecError, Limits, Message, decode, encode
from ftis.config import LogpPrecision
from ftis.rollouts import Group, Rollout


@given(st.integers(0, 2**32), st.sampled_from(PRECISIONS), st.data())
@settings(max_examples=300, deadline=None)
def test_a_flip_anywhere_in_a_packed_message_under_a_right_checksum(
    seed: int, precision: LogpPrecision, data: st.DataObject
) -> None:
    body = bytearray(encode(synthetic(seed, 200, 30), 2, precision)[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    refused_or_canonical(signed(bytes(body)), LIMITS)


def swapped(old: bytes, new: bytes) -> bytes:
    """The example with one part replaced and its checksum made right."""
    assert EXAMPLE.count(old) == 1
    return signed(EXAMPLE[:-4].replace(old, new))


TABLE, IDS = stored([7, 2, 9, 5]), stored([4, 5, 3, 2, 1, 0, 4, 5, 6, 4, 5, 3, 1, 6])
COUNTS = struct.pack("<III", 2, 14, 7)
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"abcd"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (signed(head(1, 0)), "form 0x01"),
        (signed(head(32, 0)), "form 0x20"),
        (signed(head(16 + 9, 0)), "the counts would end"),
        (signed(head(9, 1) + GOLDEN[71:75] + struct.pack("<HIiH", 1, 1, 5, 51201)), r"-100\.00195\d* is not in"),
        (signed(head(6, 1) + GOLDEN[71:75] + struct.pack("<HIiH", 1, 1, 5, 6401)), r"-100\.0\d* is not in"),
        (signed(head(9, 1) + GOLDEN[71:75] + struct.pack("<HIiH", 1, 1, -5, 0)), "id -5 is negative"),
        (signed(head(0, 1) + GOLDEN[71:75] + struct.pack("<HIif", 1, 1, 5, 1e-9)), "is not in"),
        (signed(head(0, 1) + GOLDEN[71:75] + struct.pack("<HIif", 1, 1, 5, np.nan)), "nan is not in"),
        (signed(head(0, 1) + GOLDEN[71:75] + struct.pack("<HIif", 1, 1, 5, -101)), "-101.0 is not in"),
        (signed(head(9, 1) + GOLDEN[71:75] + struct.pack("<HIifH", 1, 1, 5, 0, 0)), "1 tokens take 6 bytes, 10 are"),
        (swapped(TABLE, stored([7, 2, 9, 6])), "completions of 15 tokens in all, 14 are announced"),
        (swapped(TABLE, stored([7, 3, 9, 5])), "groups of 3 rollouts in all, 2 are announced"),
        (swapped(TABLE, stored([7, 2, 9])), "the tables: not a frame|the tables: .*frame"),
        (swapped(TABLE, stored([7, 2, 9, 5, 0])), "the tables: a stream of 5 bytes for 4"),
        (swapped(TABLE, stored([240, 2, 9, 5])), "symbol 240"),
        (swapped(COUNTS, struct.pack("<III", 2, 14, 15)), "14 tokens cannot have 15 distinct ids"),
        (swapped(COUNTS, struct.pack("<III", 2, 14, 0)), "14 tokens cannot have 0 distinct ids"),
        (swapped(IDS, stored([7, *IDS[5:]])), "token of number 7 among 7"),
        (swapped(IDS, stored([255, *IDS[5:]])), "token of number 255 among 7"),
        (swapped(IDS, IDS.replace(b"\6", b"\5")), "listed by how often"),  # the last id does not occur
        (swapped(bits("01000 10101 00000 11101 111 10 11 01 111111")[-1:] + IDS, b"\xfd" + IDS), "filled with zeros"),
        (
            packed(stored([7, 1, 1]), stored([239]), bytes(3) + b"\xf0", stored([0]), stored([]), counts=(1, 1, 1)),
            r"token id \d+ does not fit 31 bits",
        ),
        (
            packed(stored([7, 1, 2]), stored([5, 0]), stored([0, 0]), stored([]), stored([0, 0]), counts=(1, 2, 2)),
            "listed by how often",
        ),
    ],
)
def test_what_a_packed_message_may_not_say(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(data, LIMITS)


def test_only_one_list_of_the_same_ids_is_read() -> None:
    """257 ids: k = 255 of one byte. The two rarest, and of equally rare ones the largest, take two."""
    ids = np.concatenate([np.arange(257), np.arange(255)]).astype(np.int32)
    good = encode(Message(HEADER, (Group("ada", 3, 0, (Rollout(ids, np.zeros(len(ids), np.float32)),)),)), 2, "fixed9")
    decode(good, LIMITS)

    def listed(direct: list[int], others: list[int]) -> bytes:
        number = {i: n for n, i in enumerate(direct + others)}
        gaps = [np.diff(part, prepend=-1) - 1 for part in (direct, others)]
        symbols, rest = [], []
        for gap in np.concatenate(gaps).tolist():  # only small ones and 255, which is 8 * 4 + 15 and 1111
            symbols.append(gap if gap < 16 else {255: 47, 254: 47, 253: 47}[gap])
            rest += [gap] if gap >= 16 else []
        low = "".join(str(gap >> plane & 1) for plane in range(4) for gap in rest)
        numbers = [number[i] for i in ids.tolist()]
        return packed(
            # one item 0, one rollout of 512 = 1000'000000 tokens
            stored([0, 1, 8 * 6 + 8]) + bits("000000"),
            stored(symbols) + bits(low),
            stored([min(n, 255) for n in numbers]),
            stored([n - 255 for n in numbers if n >= 255]),
            stored(bytes(512)),
            counts=(1, 512, 257),
        )

    everything = list(range(257))
    assert_same(decode(listed(everything[:255], [255, 256]), LIMITS), decode(good, LIMITS))
    good = listed(everything[:255], [255, 256])
    assert good.count(stored([0, 1])) == 1, "the second bytes of the two rare ids"
    with pytest.raises(CodecError, match="token of number 257 among 257 distinct ids"):
        decode(signed(good[:-4].replace(stored([0, 1]), stored([0, 2]))), LIMITS)
    for direct, others in [
        ([*everything[:254], 255], [254, 256]),  # 254 is more frequent
        ([*everything[:253], 255, 256], [253, 254]),
    ]:
        with pytest.raises(CodecError, match="listed by how often"):
            decode(listed(direct, others), LIMITS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_frame_has_one_content_of_the_right_size_and_nothing_around_it(precision: LogpPrecision) -> None:
    content = bytes([1, 0] * 100)  # the ids of 200 tokens

    def with_ids(stream: bytes) -> bytes:
        logp = [stored(bytes(200))] * (4 if precision == "float32" else 1)
        table = stored([7, 1, 8 * 4 + 12]) + bits("0001")  # 200 = 1100'1000
        return packed(table, stored([3, 3]), stream, stored([]), *logp, counts=(1, 200, 2), form=16 + BITS[precision])

    good = zstd(content)
    decode(with_ids(in_frame(good)), LIMITS)
    decode(with_ids(stored(content)), LIMITS)
    decode(with_ids(in_frame(zstd(content, level=19))), LIMITS)
    unstated = zstandard.ZstdCompressor().compressobj()
    for frame in [
        good[:-1],
        good + b"\0",
        good + good,
        good + SKIPPABLE,
        SKIPPABLE + good,
        SKIPPABLE,
        zstd(content[:-1]),
        zstd(content + b"\0"),
        zstd(content, write_checksum=True),
        zstd(content, write_content_size=False),
        unstated.compress(content) + unstated.flush(),
        zstd(content[:100]) + zstd(content[100:]),
        good[:5] + b"\xff" * 8,
        b"\0" * 20,
        b"",
    ]:
        with pytest.raises(CodecError, match="token ids"):
            decode(with_ids(in_frame(frame)), LIMITS)


def bomb(content_size: int, blocks: int, form: int = 0xA0) -> bytes:
    """A frame that states ``content_size`` (4 bytes, single segment) and holds ``blocks`` of 128 KiB of zeros each."""
    block = (1 << 17) << 3 | 1 << 1  # repeat one byte
    body = b"".join((block | (i == blocks - 1)).to_bytes(3, "little") + b"\0" for i in range(blocks))
    return b"\x28\xb5\x2f\xfd" + bytes([form]) + struct.pack("<I", content_size) + body


FOUR_GIB = 2**32 - 1


@pytest.mark.parametrize("limits", [LIMITS, BOUNDLESS], ids=["limits", "boundless"])
@pytest.mark.parametrize(
    "data",
    [
        packed(counts=(FOUR_GIB, 0, 0)),
        packed(counts=(FOUR_GIB, FOUR_GIB, FOUR_GIB)),
        packed(counts=(1, FOUR_GIB, 1)),
        signed(head(25, FOUR_GIB) + struct.pack("<III", 0, 0, 0) + in_frame(bomb(FOUR_GIB, 1))),
        # a frame states as much as the counts, and cannot hold it
        packed(in_frame(bomb(FOUR_GIB, 1)), counts=(FOUR_GIB - 2, 0, 0)),
        packed(
            stored([7, 1, 8 * 28 + 15]),
            bits("1" * 28),
            stored([5]),
            in_frame(bomb(FOUR_GIB, 9)),
            counts=(1, FOUR_GIB, 1),
        ),
        # it states little and holds much
        packed(in_frame(bomb(3, 200)), counts=(1, 1, 1)),
        packed(in_frame(bomb(4096, 200)), counts=(4094, 0, 0)),
        # it states nothing, or a window of terabytes
        packed(in_frame(b"\x28\xb5\x2f\xfd\0\x58" + bomb(0, 200)[9:]), counts=(40, 0, 0)),
        packed(in_frame(b"\x28\xb5\x2f\xfd\x80\xf8" + struct.pack("<I", 4096) + bomb(0, 9)[9:]), counts=(4094, 0, 0)),
    ],
)
def test_a_bomb_takes_no_memory(data: bytes, limits: Limits) -> None:
    assert_refused_in_little_memory(data, limits)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            packed(stored([7, 8 * 13 + 8, 1]), bits("0" * 13), counts=(1, 1, 1)),
            "group of 65536 rollouts, the most is 65535",
        ),
        (
            packed(
                stored([7, 1, 8 * 28 + 15]),
                bits("1" * 28),
                stored([5]),
                in_frame(bomb(FOUR_GIB, 9)),
                counts=(1, FOUR_GIB, 1),
            ),
            "bytes cannot hold 4294967295",
        ),
    ],
)
def test_what_a_packed_message_may_not_say_without_limits(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(data, BOUNDLESS)


def test_what_is_decompressed_stays_in_proportion_to_the_limits() -> None:
    """A megabyte of tokens in some hundred bytes: good if the limits allow as much, else refused before it is made."""
    tokens = 16 * 4096
    ids, logp = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    rollouts = tuple(Rollout(*parts) for parts in zip(np.split(ids, 16), np.split(logp, 16), strict=True))
    data = encode(Message(HEADER, (Group("ada", 3, 0, rollouts),)), 2, "fixed9")
    assert len(data) < 250
    assert peak_of(lambda: decode(data, LIMITS)) < 64 * tokens
    fewer = dataclasses.replace(LIMITS, max_rollouts_per_group=15)
    assert_refused_in_little_memory(data, fewer, "16 rollouts in 1 groups exceed the limit of 15", most=100_000)

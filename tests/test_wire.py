"""Both forms of a message: numbers, frames, text, what each may not say, and its size."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from fuzz_cases import signed
from memory import peak_of
from wire_messages import (
    BOUNDLESS,
    ENDS,
    EXAMPLE,
    HEADER,
    LIMITS,
    SIZES,
    TABLE,
    TEXT,
    TEXT_EXAMPLE,
    TEXT_LOGP,
    TEXT_TABLE,
    assert_same,
    bomb,
    head,
    in_frame,
    logps,
    message,
    numbers,
    packed,
    rollout,
    spoken,
    stored,
    zstd,
)

from ftis.codec import CodecError, Header, Limits, Message, decode, encode
from ftis.member import Member
from ftis.rollouts import Group, Rollout
from ftis.text.completions import END

FOUR_GIB = 2**32 - 1


def test_numbers_of_every_size() -> None:
    edges = [max(min(2**e + d, 2**32 - 1), 0) for e in range(33) for d in (-1, 0, 1)]
    made = Message(HEADER, tuple(Group("ada", 3, item, (rollout([5]),)) for item in edges))
    assert_same(decode(encode(made), BOUNDLESS), made)


def test_bytes_a_token_of_a_quarter_million_tokens() -> None:
    rng = np.random.default_rng(0)
    ids = np.split(np.minimum(rng.zipf(1.2, 250_000), 5000).astype(np.int32), 250)
    logp = np.split(-rng.exponential(0.3, 250_000).astype(np.float32), 250)
    rollouts = tuple(Rollout(*parts) for parts in zip(ids, logp, strict=True))
    made = Message(HEADER, tuple(Group("ada", 3, item, rollouts[item : item + 10]) for item in range(0, 250, 10)))
    assert len(encode(made)) / 250_000 < 5.2


def outgoing(*groups: Group) -> Message:
    """The message that ada's groups become."""
    stub: Any = SimpleNamespace(
        name="ada",
        recipe=SimpleNamespace(peers=[SimpleNamespace(name="ada")]),
        header=Header("0" * 32, 0, "ada", "0" * 32, 1.0, 0, 1.0),
        skipped=lambda round: frozenset(),
        write=tuple,
    )
    return decode(Member.outgoing(stub, 4, groups).message, Limits(1000, 9, 9, 9))


def test_a_group_whose_environment_took_too_long_stays_here() -> None:
    late, whole = (Rollout(np.array([5, 2], np.int32), np.zeros(2, np.float32), overdue=late) for late in (True, False))
    groups = Group("ada", 4, 0, (whole, late)), Group("ada", 4, 1, (whole, whole))
    assert [group.item for group in outgoing(*groups).groups] == [1]
    assert outgoing(groups[0]).groups == ()


def test_a_frame_has_one_content_of_the_right_size_and_nothing_around_it() -> None:
    content = struct.pack("<II", 8, 9) * 100  # the ids of 200 tokens
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"abcd"

    def with_ids(stream: bytes) -> bytes:
        return packed(numbers(7, 1, 200), stream, logps(*[0.0] * 200), counts=(1, 200))

    good, unstated = zstd(content), zstandard.ZstdCompressor().compressobj()
    for stream in (in_frame(good), stored(content), in_frame(zstd(content, level=19))):
        decode(with_ids(stream), LIMITS)
    for frame in [
        good[:-1],
        good + b"\0",
        good + good,
        good + skippable,
        skippable + good,
        skippable,
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


BOMBS = {
    "counts": packed(counts=(FOUR_GIB, FOUR_GIB)),
    "rollouts": packed(counts=(FOUR_GIB, 0)),
    "tokens": packed(counts=(1, FOUR_GIB)),
    "groups": signed(head(0, FOUR_GIB) + struct.pack("<II", 0, 0) + in_frame(bomb(FOUR_GIB, 1))),
    "a frame that states as much as the counts": packed(in_frame(bomb(FOUR_GIB - 3, 1)), counts=(FOUR_GIB // 4 - 2, 0)),
    "ids in such a frame": packed(
        numbers(7, 1, FOUR_GIB // 4), in_frame(bomb(FOUR_GIB - 3, 9)), counts=(1, FOUR_GIB // 4)
    ),
    "a frame that states little": packed(in_frame(bomb(12, 200)), counts=(1, 1)),
    "one that states some": packed(in_frame(bomb(4096, 200)), counts=(1022, 0)),
    "one that states nothing": packed(in_frame(b"\x28\xb5\x2f\xfd\0\x58" + bomb(0, 200)[9:]), counts=(40, 0)),
    "a window of terabytes": packed(
        in_frame(b"\x28\xb5\x2f\xfd\x80\xf8" + struct.pack("<I", 4096) + bomb(0, 9)[9:]), counts=(1022, 0)
    ),
    "text": packed(counts=(FOUR_GIB, FOUR_GIB), form=1),
    "tokens of text": packed(counts=(1, FOUR_GIB), form=1),
    "sizes of tokens": packed(numbers(7, 1, 1), numbers(FOUR_GIB), bomb(FOUR_GIB, 9), counts=(1, 1), form=1),
    "text in a frame": packed(numbers(7, 1, 1), numbers(20), in_frame(bomb(20, 200)), counts=(1, 1), form=1),
}


def test_a_bomb_takes_no_memory() -> None:
    for data in BOMBS.values():
        for limits in (LIMITS, BOUNDLESS):

            def refuse(data: bytes = data, limits: Limits = limits) -> None:
                with pytest.raises(CodecError):
                    decode(data, limits)

            assert peak_of(refuse) < 200_000


def swapped(data: bytes, old: bytes, new: bytes) -> bytes:
    """An example with one part replaced and its checksum made right."""
    assert data[:-4].count(old) == 1
    return signed(data[:-4].replace(old, new))


def of_ids(old: bytes, new: bytes) -> bytes:
    return swapped(EXAMPLE, old, new)


def of_text(old: bytes, new: bytes) -> bytes:
    return swapped(TEXT_EXAMPLE, old, new)


def counts(rollouts: int, tokens: int) -> bytes:
    return struct.pack("<II", rollouts, tokens)


FAULTS = [
    (signed(head(2, 0)), "form 2"),
    (signed(head(0, 0)), "the counts would end"),
    (of_ids(TABLE, numbers(7, 2, 3, 3)), "completions of 6 tokens in all, 5 are announced"),
    (of_ids(TABLE, numbers(7, 3, 3, 2)), "groups of 3 rollouts in all, 2 are announced"),
    (of_ids(TABLE, numbers(7, 2, 3)), "the tables: .*frame"),
    (of_ids(TABLE, numbers(7, 2, 3, 2, 0)), "the tables: a stream of 20 bytes for 16"),
    (packed(numbers(7, 1, 1), numbers(2**31), logps(0), counts=(1, 1)), "31 bits"),
    (of_text(TEXT, stored(b"n\xc3\xa9\xc3\xa9")), "the text: "),
    (of_text(TEXT, stored(b"n\xc3\xa9\xc3\xff!")), "not UTF-8"),
    (of_text(TEXT, stored(b"n\xc0\xaf\xc3\xa9!")), "not UTF-8"),  # an overlong slash
    (of_text(TEXT, stored(b"\xed\xa0\x80abc")), "not UTF-8"),  # a surrogate
    (of_text(TEXT, stored(b"nn\xc3\xa9!!")), "not UTF-8"),  # one character in two completions
    (of_text(SIZES, numbers(1, 1, 1, 0, 4)), "the text: "),
    (of_text(SIZES, numbers(1, 1, 1, 0)), "the sizes of the tokens: "),
    (of_text(SIZES + ENDS, SIZES + numbers(4)), "end 4 of a sender"),
    (of_text(SIZES + ENDS, SIZES), "the ends: "),
    (of_text(TEXT_TABLE, numbers(7, 2, 5, 0)), "rollout 1 has no tokens"),
    (of_text(TEXT_TABLE, numbers(7, 2, 4, 2)), "completions of 6 tokens in all, 5 are announced"),
    (of_text(counts(2, 5), counts(65, 5)), "65 rollouts in 1 groups exceed the limit of 64"),
    (of_text(counts(2, 5), counts(2, 8193)), "8193 tokens in 2 rollouts exceed the limit of 4096"),
    (of_text(TEXT_LOGP, TEXT_LOGP + b"\0"), "the groups end at byte"),
]


def test_what_a_message_may_not_say() -> None:
    for data, says in FAULTS:
        with pytest.raises(CodecError, match=says):
            decode(data, LIMITS)
    group = packed(numbers(7, 65536, 1), counts=(1, 1))
    with pytest.raises(CodecError, match="group of 65536 rollouts exceeds the limit of 65535"):
        decode(group, BOUNDLESS)


def test_a_completion_has_32_bytes_for_each_token_that_it_may_have() -> None:
    limits = Limits(1 << 20, 1, 2, max_completion_length=2)
    decode(encode(message(spoken([b"a" * 63, b"b"]), spoken([b"c"]))), limits)
    with pytest.raises(CodecError, match="completion of 65 bytes exceeds the limit of 64"):
        decode(encode(message(spoken([b"a" * 64, b"b"]), spoken([b"c"]))), limits)


def test_a_message_of_text_that_cannot_be_written() -> None:
    def raw(ids: list[int], tokens: int, unit: list[int]) -> Rollout:
        return Rollout(np.array(ids, np.int32), np.zeros(tokens, np.float32), np.array(unit, np.int32))

    mistakes = [
        ([spoken([b"a"]), rollout([5, 2])], "over bytes only"),
        ([raw([260], 1, [0])], "neither bytes nor ends"),
        ([raw([-1], 1, [0])], "negative"),
        ([raw([], 0, [])], "over bytes only|empty"),
        ([spoken([b"\xc3"])], "not UTF-8"),
        ([spoken([b"a\xc3"]), spoken([b"\xa9b"])], "not UTF-8"),
        ([raw([97, END], 1, [0, 0])], "an end"),
    ]
    for rollouts, says in mistakes:
        with pytest.raises(ValueError, match=says):
            encode(message(*rollouts))

"""Version 3 of the wire format, completions as text: an example by hand, round trips, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fuzz_cases import signed
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import peak_of
from test_packed_hostile import FOUR_GIB, bomb
from vocabularies import texts
from wire_messages import (
    BITS,
    BOUNDLESS,
    HEADER,
    LIMITS,
    PRECISIONS,
    assert_refused_in_little_memory,
    assert_same,
    bits,
    head,
    in_frame,
    rollout,
    stored,
    zstd,
)

from ftis.codec import MOST_BYTES, CodecError, Limits, Message, decode, encode
from ftis.config import LogpPrecision
from ftis.rollouts import Group, Rollout
from ftis.text.completions import END, MOST_ENDS
from ftis.wire.plain import weight_error


def spoken(tokens: Sequence[bytes], logp: Sequence[float] | None = None, end: bool = False, which: int = 0) -> Rollout:
    """A rollout over bytes with these tokens."""
    sizes = [len(token) for token in tokens] + [1] * end
    ids = np.array([*b"".join(tokens), *[END + which] * end], np.int32)
    gen_logp = np.array([-1.0] * len(sizes) if logp is None else logp, np.float32)
    return Rollout(ids, gen_logp, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))


def message(*rollouts: Rollout) -> Message:
    return Message(HEADER, (Group("ada", 3, 7, rollouts),))


def textual(*parts: bytes, counts: tuple[int, int, int], groups: int = 1, form: int = 32 + 9) -> bytes:
    return signed(head(form, groups, version=3) + struct.pack("<III", *counts) + b"".join(parts))


def example() -> Message:
    """Two completions: "né" in tokens of a byte each, with its end, and "é!" in one token, cut off."""
    first = spoken([b"n", b"\xc3", b"\xa9"], [-0.5, -0.25, 0.0, -1 / 512], end=True)  # by its first end
    return message(first, spoken(["é!".encode()], [-2 / 512]))


TABLE, SIZES, TEXT = stored([7, 2, 4, 1]), stored([1, 1, 1, 0, 3]), stored("néé!".encode())
LOGP = stored([48, 40, 0, 1, 2]) + bits("00 00 00 00 0")  # 256 128 0 1 2: 256 = 1000'00000, 128 = 1000'0000
ENDS = stored([0])
EXAMPLE = textual(TABLE, SIZES, ENDS, TEXT, LOGP, counts=(2, 5, 6))


def test_an_example_by_hand() -> None:
    assert encode(example(), 2, "fixed9") == EXAMPLE
    assert_same(decode(EXAMPLE, LIMITS), example())
    (group,) = decode(EXAMPLE, LIMITS).groups
    assert [r.completion_ids.tolist() for r in group.rollouts] == [[*"né".encode(), END], [*"é!".encode()]]
    assert [r.unit.tolist() for r in group.rollouts if r.unit is not None] == [[0, 1, 2, 3], [0, 0, 0]]
    for r in group.rollouts:
        assert r.unit is not None
        for array in (r.completion_ids, r.gen_logp, r.unit):
            assert array.dtype.isnative
            assert not array.flags.writeable


def test_the_document_shows_the_fields() -> None:
    document = (Path(__file__).parents[1] / "docs" / "wire.md").read_text(encoding="utf-8")
    section = document.partition("## Version 3")[2].partition("\n## ")[0]
    fields = re.findall(r"^\| \| (?:(\d+) )?\| ([\w-]+) \| ([\w-]+) \|", section, re.MULTILINE)
    assert fields == [
        ("4", "u32", "R"),
        ("4", "u32", "T"),
        ("4", "u32", "B"),
        ("", "numbers", "tables"),
        ("", "numbers", "sizes"),
        ("", "numbers", "ends"),
        ("", "stream", "text"),
        ("", "numbers", "log-probabilities"),
        ("4", "u32", "checksum"),
    ]
    assert f"{MOST_BYTES} bytes" in section


@pytest.mark.parametrize("version", [1, 2, 3])
def test_text_takes_version_3_whichever_is_asked_for(version: int) -> None:
    data = encode(example(), version)
    assert (data[4], data[7]) == (3, 32)
    assert_same(decode(data, LIMITS), example())


def test_ids_are_written_in_version_3_as_in_version_2() -> None:
    ids = message(rollout([5, 2]), rollout([1]))
    three, two = encode(ids, 3, "fixed9"), encode(ids, 2, "fixed9")
    assert three[4] == 3
    assert three[:4] + three[6:-4] == two[:4] + two[6:-4]
    assert_same(decode(three, LIMITS), decode(two, LIMITS))


@st.composite
def texted(draw: st.DrawFn) -> Message:
    """Texts cut into tokens anywhere, also inside characters."""

    def one() -> Rollout:
        raw = draw(texts).encode("utf-8")
        cuts = sorted(draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=20)))
        edges = [0, *(cut for cut in cuts if cut < len(raw)), len(raw)] if raw else []
        tokens = [raw[start:stop] for start, stop in itertools.pairwise(edges)]
        end = draw(st.booleans()) or not tokens
        count = len(tokens) + end
        logp = draw(st.lists(st.floats(-100, 0, width=32), min_size=count, max_size=count))
        return spoken(tokens, logp, end, draw(st.integers(0, MOST_ENDS - 1)))

    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    items = draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(sizes), max_size=len(sizes)))
    groups = (Group("ada", 3, item, tuple(one() for _ in range(size))) for item, size in zip(items, sizes, strict=True))
    return Message(HEADER, tuple(groups))


@given(texted(), st.sampled_from(PRECISIONS))
@settings(max_examples=200, deadline=None)
def test_round_trip(made: Message, precision: LogpPrecision) -> None:
    data = encode(made, 2, precision)
    back = decode(data, BOUNDLESS)
    assert encode(back, 3, precision) == data, "once rounded, it stays"
    for group, other in zip(made.groups, back.groups, strict=True):
        assert group.item == other.item
        for one, sent in zip(group.rollouts, other.rollouts, strict=True):
            assert one.completion_ids.tobytes() == sent.completion_ids.tobytes()
            assert one.unit is not None
            assert sent.unit is not None
            assert one.unit.tobytes() == sent.unit.tobytes()
            error = np.abs(np.expm1(one.gen_logp.astype(np.float64) - sent.gen_logp))
            assert error.max() <= weight_error(precision)


# ----------------------------------------------------------------------------- what is refused


def swapped(old: bytes, new: bytes, counts: tuple[int, int, int] = (2, 5, 6)) -> bytes:
    body = EXAMPLE[:-4].replace(struct.pack("<III", 2, 5, 6), struct.pack("<III", *counts))
    assert body.count(old) == 1
    return signed(body.replace(old, new))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (signed(head(32, 0, version=2)), "form 0x20 is not one of this version"),
        (signed(head(48, 0, version=3)), "form 0x30 is not one of this version"),
        (signed(head(32 + 5, 0, version=3)), "form 0x25"),
        (signed(head(32 + 9, 0, version=3)), "the counts would end"),
        (swapped(TEXT, stored(b"n\xc3\xa9\xc3\xa9")), "the text: "),
        (swapped(TEXT, stored(b"n\xc3\xa9\xc3\xff!")), "not UTF-8"),
        (swapped(TEXT, stored(b"n\xc0\xaf\xc3\xa9!")), "not UTF-8"),  # an overlong slash
        (swapped(TEXT, stored(b"\xed\xa0\x80abc")), "not UTF-8"),  # a surrogate
        (swapped(TEXT, stored(b"nn\xc3\xa9!!")), "not UTF-8"),  # one character in two completions
        (swapped(TEXT, stored(b"nn\xc3!!!")), "not UTF-8"),
        (swapped(SIZES, stored([1, 1, 1, 0, 4])), "tokens of 7 bytes in all, 6 are announced"),
        (swapped(SIZES, stored([1, 1, 0, 1, 3])), "token 2 has no bytes"),
        (swapped(SIZES, stored([0, 1, 1, 1, 3])), "token 0 has no bytes"),
        (swapped(SIZES, stored([1, 1, 1, 0])), "the sizes of the tokens: "),
        (swapped(SIZES + ENDS, SIZES + stored([4])), "end 4 of a sender, it may have 4"),
        (swapped(SIZES + ENDS, SIZES), "the ends: "),
        (swapped(SIZES, stored([240, 1, 1, 0, 3])), "symbol 240"),
        (swapped(TABLE, stored([7, 2, 5, 0])), "rollout 1 has no tokens"),
        (swapped(TABLE, stored([7, 2, 4, 2])), "completions of 6 tokens in all, 5 are announced"),
        (swapped(TABLE, stored([7, 3, 4, 1])), "groups of 3 rollouts in all, 2 are announced"),
        (swapped(TABLE, TABLE, (2, 5, 2)), "2 bytes of text are too few for 5 tokens"),
        (swapped(TABLE, TABLE, (2, 5, 5)), "tokens of 6 bytes in all, 5 are announced"),
        (swapped(TABLE, TABLE, (65, 5, 6)), "65 rollouts in 1 groups exceed the limit of 64"),
        (swapped(TABLE, TABLE, (2, 8193, 8193)), "8193 tokens in 2 rollouts exceed the limit of 4096"),
        (
            swapped(TABLE, TABLE, (2, 5, 2 * 32 * 4096 + 1)),
            "262145 bytes of text in 2 rollouts exceed",
        ),
        (swapped(LOGP, stored([8 * 12 + 12, 0, 0, 0, 0]) + bits("100000000001")), r"-100\.0\d* is not in"),
        (signed(EXAMPLE[:-4] + b"\0"), "the groups end at byte"),
    ],
)
def test_what_a_message_of_text_may_not_say(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(data, LIMITS)


def test_a_completion_has_32_bytes_for_each_token_that_it_may_have() -> None:
    limits = Limits(1 << 20, 1, 2, max_completion_length=2)
    decode(encode(message(spoken([b"a" * 63, b"b"]), spoken([b"c"]))), limits)
    with pytest.raises(CodecError, match="completion of 65 bytes exceeds the limit of 64"):
        decode(encode(message(spoken([b"a" * 64, b"b"]), spoken([b"c"]))), limits)


@pytest.mark.parametrize("limits", [LIMITS, BOUNDLESS], ids=["limits", "boundless"])
@pytest.mark.parametrize(
    "data",
    [
        textual(counts=(FOUR_GIB, FOUR_GIB, FOUR_GIB)),
        textual(counts=(1, 1, FOUR_GIB)),
        textual(counts=(1, FOUR_GIB, FOUR_GIB)),
        textual(in_frame(bomb(FOUR_GIB, 1)), counts=(FOUR_GIB - 2, FOUR_GIB, FOUR_GIB)),
        textual(stored([7, 1, 1]), stored([8 * 28 + 15]), bits("1" * 28), bomb(FOUR_GIB, 9), counts=(1, 1, FOUR_GIB)),
        textual(stored([7, 1, 1]), stored([3]), in_frame(bomb(3, 200)), counts=(1, 1, 3)),
    ],
)  # fmt: skip
def test_a_bomb_takes_no_memory(data: bytes, limits: Limits) -> None:
    assert_refused_in_little_memory(data, limits)


def test_what_is_decompressed_stays_in_proportion_to_the_limits() -> None:
    """A megabyte of text in some hundred bytes is good if the limits allow as much."""
    data = encode(message(*[spoken([b"a" * 15] * 4096, [0.0] * 4096)] * 16), 2, "fixed9")
    assert len(data) < 400
    assert peak_of(lambda: decode(data, LIMITS)) < 40 * 16 * 4096 * 15
    with pytest.raises(CodecError, match="16 rollouts in 1 groups exceed the limit of 15"):
        decode(data, dataclasses.replace(LIMITS, max_rollouts_per_group=15))


def framed() -> bytes:
    """A message with a frame in it."""
    words = ["the ", "answer", " is", " é", "\n", "42", " 🤖"]
    rng = np.random.default_rng(0)

    def one() -> Rollout:
        tokens = [words[i].encode() for i in rng.integers(len(words), size=30)]
        return spoken(tokens, (-rng.exponential(1, 31)).tolist(), end=True)

    return encode(message(*[one() for _ in range(8)]), 2, "fixed9")


def test_the_text_may_stand_in_any_frame() -> None:
    long = b"an answer, an answer, an answer, an answer"
    parts = stored([7, 1, 1]), stored([8 * 2 + 10]) + bits("0 1")
    for stream in (stored(long), in_frame(zstd(long)), in_frame(zstd(long, level=19))):
        (group,) = decode(textual(*parts, stream, stored([0]), counts=(1, 1, 42)), LIMITS).groups
        assert group.rollouts[0].completion_ids.tolist() == [*long]


# ----------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    ("rollouts", "says"),
    [
        ([spoken([b"a"]), rollout([5, 2])], "over bytes only"),
        ([Rollout(np.array([260], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))], "over bytes only"),
        ([Rollout(np.array([-1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))], "negative"),
        ([Rollout(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))], "none is empty"),
        ([spoken([b"\xc3"])], "not UTF-8"),
        ([spoken([b"a\xc3"]), spoken([b"\xa9b"])], "not UTF-8"),
        ([Rollout(np.array([97, END], np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32))], "an end"),
        ([Rollout(np.array([END, 97], np.int32), np.zeros(2, np.float32), np.array([0, 1], np.int32))], "an end"),
        ([spoken([b"a"], [0.5])], "is not in"),
    ],
)  # fmt: skip
def test_a_message_of_text_that_cannot_be_written(rollouts: list[Rollout], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode(message(*rollouts), 2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_forms_number_and_precision(precision: LogpPrecision) -> None:
    assert encode(example(), 2, precision)[7] == 32 + BITS[precision]

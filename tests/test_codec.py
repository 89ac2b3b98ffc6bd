"""The wire format: golden bytes, round trips, and bytes from people who wish us ill."""

from __future__ import annotations

import dataclasses
import re
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ftis import codec, config
from ftis.codec import (
    CodecError,
    Columns,
    Form,
    Header,
    Limits,
    Message,
    Reader,
    decode,
    encode,
    message_size,
    weight_error,
)
from ftis.config import FtisError, LogpPrecision
from ftis.rollouts import MIN_LOGP, Group, Rollout
from ftis.seams import FORMS

RUN = "00112233445566778899aabbccddeeff"
TOKENIZER = "f0e0d0c0b0a090807060504030201000"
HEADER = Header(run=RUN, round=3, peer="ada", tokenizer=TOKENIZER, temperature=0.5, top_k=50, top_p=1.0)
LIMITS = Limits(max_bytes=1 << 20, max_groups=64, max_rollouts_per_group=64, max_completion_length=4096)
BOUNDLESS = Limits(1 << 40, 1 << 32, 1 << 16, 1 << 32)


def rollout(ids: list[int], logp: list[float]) -> Rollout:
    return Rollout(np.array(ids, dtype=np.int32), np.array(logp, dtype=np.float32))


def tiny() -> Message:
    groups = (
        Group("ada", 3, 7, (rollout([5, 2], [-0.5, -0.25]), rollout([1], [-1.0]))),
        Group("ada", 3, 9, (rollout([4, 4, 2], [-2.0, 0.0, -4.0]),)),
    )
    return Message(HEADER, groups)


def signed(body: bytes) -> bytes:
    """``body`` with the checksum that makes the parser look at it."""
    return body + struct.pack("<I", zlib.crc32(body))


def assert_same(a: Message, b: Message) -> None:
    assert a.header == b.header
    assert [(g.peer, g.round, g.item, len(g.rollouts)) for g in a.groups] == [
        (g.peer, g.round, g.item, len(g.rollouts)) for g in b.groups
    ]
    for left, right in zip(a.groups, b.groups, strict=True):
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            assert one.completion_ids.tobytes() == other.completion_ids.tobytes()
            assert one.gen_logp.tobytes() == other.gen_logp.tobytes()


# ---------------------------------------------------------------------------------------------- the format


GOLDEN = signed(
    b"FTIS"
    + struct.pack("<HH", 1, 3)
    + bytes.fromhex(RUN)
    + bytes.fromhex(TOKENIZER)
    + struct.pack("<dd", 0.5, 1.0)
    + struct.pack("<III", 50, 3, 2)
    + b"ada"
    + struct.pack("<2I", 7, 9)
    + struct.pack("<2H", 2, 1)
    + struct.pack("<3I", 2, 1, 3)
    + struct.pack("<6i", 5, 2, 1, 4, 4, 2)
    + struct.pack("<6f", -0.5, -0.25, -1.0, -2.0, 0.0, -4.0)
)


def test_golden_bytes() -> None:
    assert encode(tiny()) == GOLDEN
    assert_same(decode(GOLDEN, LIMITS), tiny())


def test_the_size_is_eight_bytes_a_token_and_known_beforehand() -> None:
    assert len(GOLDEN) == message_size(tokens=6, rollouts=3, groups=2, peer="ada")
    assert message_size(7, 3, 2, "ada") - message_size(6, 3, 2, "ada") == 8


def test_the_document_calculates_as_the_code_does() -> None:
    text = (Path(__file__).parents[1] / "docs" / "wire.md").read_text(encoding="utf-8")
    assert f"{message_size(tokens=144 * 200, rollouts=144, groups=12, peer='large'):,} bytes" in text
    offsets = [
        [int(n) for n in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)] for section in text.split("\n## Version ")
    ]
    assert offsets == [[], [0, 4, 6, 8, 24, 40, 48, 56, 60, 64, 68], [0, 4, 6, 7, 8, 68]]


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview, lambda b: memoryview(b * 1)[::1]])
def test_any_container_decodes_to_arrays_of_their_own(
    container: Callable[[bytes], bytes | bytearray | memoryview],
) -> None:
    message = decode(container(GOLDEN), LIMITS)
    assert_same(message, tiny())
    for group in message.groups:
        for r in group.rollouts:
            assert r.completion_ids.dtype == np.int32
            assert r.gen_logp.dtype == np.float32
            assert r.completion_ids.dtype.isnative
            assert r.gen_logp.flags.aligned
            assert not r.completion_ids.flags.writeable
            assert not r.gen_logp.flags.writeable


def test_a_strided_memoryview_decodes() -> None:
    doubled = bytes(b for byte in GOLDEN for b in (byte, 0))
    assert_same(decode(memoryview(doubled)[::2], LIMITS), tiny())


def test_the_callers_buffer_may_change_afterwards() -> None:
    data = bytearray(GOLDEN)
    message = decode(data, LIMITS)
    data[:] = bytes(len(data))
    assert_same(message, tiny())


def test_no_groups_is_a_message() -> None:
    empty = Message(HEADER, ())
    data = encode(empty)
    assert len(data) == message_size(0, 0, 0, "ada")
    assert_same(decode(data, Limits(1 << 10, 0, 0, 0)), empty)


def test_names_are_the_recipes_names() -> None:
    names = TypeAdapter(config.Name)
    for name in ["a", "0", "a" * 64, "A-b_c.d", "", "a" * 65, ".a", "-a", "a b", "a\n", "é", "a/b", "a\x00"]:
        try:
            names.validate_python(name)
            valid = True
        except ValidationError:
            valid = False
        message = Message(dataclasses.replace(HEADER, peer=name), ())
        if valid:
            assert decode(encode(message), LIMITS).header.peer == name
        else:
            with pytest.raises(ValueError, match="name"):
                encode(message)
            body = bytearray(encode(Message(HEADER, ()))[:-4])
            raw = name.encode("latin-1")
            body[6:8] = struct.pack("<H", len(raw))
            body[68:71] = raw
            with pytest.raises(CodecError, match="name"):
                decode(signed(bytes(body)), LIMITS)


# ---------------------------------------------------------------------------------------------- round trips

f32_bits = st.integers(0, 2**32 - 1)
f64 = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])


@st.composite
def messages(draw: st.DrawFn) -> Message:
    u32 = st.integers(0, 2**32 - 1)
    digest = st.binary(min_size=16, max_size=16).map(bytes.hex)
    header = Header(
        run=draw(digest),
        round=draw(u32),
        peer=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)),
        tokenizer=draw(digest),
        temperature=draw(st.floats(allow_nan=False)),
        top_k=draw(u32),
        top_p=draw(st.floats(allow_nan=False)),
    )
    tokens = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), f32_bits), max_size=5)

    def made(pairs: list[tuple[int, int]]) -> Rollout:
        ids = np.array([i for i, _ in pairs], dtype=np.int32)
        return Rollout(ids, np.array([b for _, b in pairs], dtype=np.uint32).view(np.float32))

    groups = draw(st.lists(st.tuples(u32, st.lists(tokens.map(made), max_size=4)), max_size=4))
    return Message(header, tuple(Group(header.peer, header.round, item, tuple(rs)) for item, rs in groups))


@given(messages())
@settings(max_examples=200, deadline=None)
def test_round_trip(message: Message) -> None:
    data = encode(message)
    assert len(data) == message_size(
        tokens=sum(len(r) for g in message.groups for r in g.rollouts),
        rollouts=sum(len(g.rollouts) for g in message.groups),
        groups=len(message.groups),
        peer=message.header.peer,
    )
    back = decode(data, LIMITS)
    assert_same(back, message)
    assert encode(back) == data


@given(f64, f64, st.lists(f32_bits, min_size=1, max_size=8))
@settings(deadline=None)
def test_every_float_keeps_its_bits(temperature: float, top_p: float, bits: list[int]) -> None:
    logp = np.array(bits, dtype=np.uint32).view(np.float32)
    header = dataclasses.replace(HEADER, temperature=temperature, top_p=top_p)
    data = encode(Message(header, (Group("ada", 3, 0, (Rollout(np.zeros(len(bits), np.int32), logp),)),)))
    back = decode(data, LIMITS)
    assert back.groups[0].rollouts[0].gen_logp.view(np.uint32).tolist() == bits
    assert encode(back) == data


# ---------------------------------------------------------------------------------------------- bad bytes


def test_codec_error_is_an_error_of_ours() -> None:
    assert issubclass(CodecError, FtisError)


def test_every_truncation_and_trailing_garbage_is_refused() -> None:
    for stop in range(len(GOLDEN)):
        with pytest.raises(CodecError):
            decode(GOLDEN[:stop], LIMITS)
        with pytest.raises(CodecError):  # cut, and its checksum made right
            decode(signed(GOLDEN[:-4][:stop][:-1]), LIMITS)
    for garbage in (b"\0", b"FTIS", GOLDEN):
        with pytest.raises(CodecError):
            decode(GOLDEN + garbage, LIMITS)
        with pytest.raises(CodecError):
            decode(signed(GOLDEN[:-4] + garbage), LIMITS)


def test_every_single_bit_flip_is_refused() -> None:
    for at in range(len(GOLDEN)):
        for bit in range(8):
            flipped = bytearray(GOLDEN)
            flipped[at] ^= 1 << bit
            with pytest.raises(CodecError):
                decode(flipped, LIMITS)


def refused_or_canonical(data: bytes, limits: Limits) -> bool:
    try:
        message = decode(data, limits)
    except CodecError:
        return False
    if data[4] == 1:
        assert encode(message) == data
    else:
        precision = PRECISION_OF[data[7] % 16]
        again = encode(message, 2, precision)
        assert_same(decode(again, BOUNDLESS), message)
        if data[7] < 16:  # plain, and so must that be unless packing is shorter
            assert again == data or len(again) < len(data)
    return True


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes(noise: bytes) -> None:
    refused_or_canonical(noise, LIMITS)
    refused_or_canonical(signed(noise), LIMITS)
    refused_or_canonical(signed(GOLDEN[:8] + noise), BOUNDLESS)
    refused_or_canonical(signed(EXAMPLE[:71] + noise), BOUNDLESS)


@given(messages(), st.data())
@settings(max_examples=500, deadline=None)
def test_mutations_under_a_right_checksum_reach_the_parser(message: Message, data: st.DataObject) -> None:
    body = bytearray(encode(message)[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "extreme"])):
            case "set":
                body[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del body[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "extreme":
                body[at : at + 4] = data.draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80", b"\1\0\0\0"]))
    refused_or_canonical(signed(bytes(body)), data.draw(st.sampled_from([LIMITS, BOUNDLESS])))


def test_a_seeded_storm_of_mutations() -> None:
    """Many cheap mutations of one message; most must be refused, and some must get through the parser."""
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(20_000):
        body = bytearray(GOLDEN[:-4])
        for at in rng.integers(0, len(body), size=rng.integers(1, 4)):
            body[at] = rng.integers(256)
        outcomes.append(refused_or_canonical(signed(bytes(body)), BOUNDLESS))
    assert 0.1 < np.mean(outcomes) < 0.9


def promise(groups: int, items: bytes = b"", counts: bytes = b"", lengths: bytes = b"", rest: bytes = b"") -> bytes:
    head = bytearray(encode(Message(HEADER, ()))[:-4])
    head[64:68] = struct.pack("<I", groups)
    return signed(bytes(head) + items + counts + lengths + rest)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (promise(2**32 - 1), "table"),
        (promise(1, bytes(4), struct.pack("<H", 65535)), "lengths"),
        (promise(1, bytes(4), struct.pack("<H", 1), struct.pack("<I", 1_250_000_000)), "10000000000 bytes"),
        (promise(1, bytes(4), struct.pack("<H", 3), struct.pack("<3I", *[2**32 - 1] * 3)), "tokens"),
        (
            promise(1, bytes(4), struct.pack("<H", 2), struct.pack("<2I", 2**31, 2**31)),
            "4294967296 tokens",
        ),  # 0 mod 2^32
        (signed(GOLDEN[:6] + struct.pack("<H", 64) + GOLDEN[8:71]), "name would end at byte 132"),
    ],
)
def test_a_promise_of_gigabytes_takes_no_memory(data: bytes, says: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=says):
            decode(data, BOUNDLESS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_bytes", len(GOLDEN) - 1, f"message of {len(GOLDEN)} bytes"),
        ("max_groups", 1, "2 groups"),
        ("max_rollouts_per_group", 1, "group of 2 rollouts"),
        ("max_completion_length", 2, "completion of 3 tokens"),
    ],
)
def test_each_limit_is_exact_and_named(field: str, value: int, says: str) -> None:
    exact = Limits(len(GOLDEN), max_groups=2, max_rollouts_per_group=2, max_completion_length=3)
    decode(GOLDEN, exact)
    with pytest.raises(CodecError, match=f"{says} exceeds? the limit of {value}|{says} exceed the limit of {value}"):
        decode(GOLDEN, dataclasses.replace(exact, **{field: value}))


def test_another_version_says_what_to_do() -> None:
    body = bytearray(GOLDEN[:-4])
    body[4] = 3
    with pytest.raises(CodecError, match=r"version 3.*versions 1 to 2: install the same"):
        decode(signed(bytes(body)), LIMITS)


# ---------------------------------------------------------------------------------------------- our own mistakes


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Message(dataclasses.replace(HEADER, run="abc"), ()), "header.run"),
        (Message(dataclasses.replace(HEADER, tokenizer=TOKENIZER.upper()), ()), "header.tokenizer"),
        (Message(dataclasses.replace(HEADER, round=-1), ()), "round = -1"),
        (Message(dataclasses.replace(HEADER, top_k=2**32), ()), "top_k"),
        (Message(HEADER, (Group("bob", 3, 0, ()),)), "bob's"),
        (Message(HEADER, (Group("ada", 2, 0, ()),)), "of round 2"),
        (Message(HEADER, (Group("ada", 3, -1, ()),)), "item = -1"),
        (Message(HEADER, (Group("ada", 3, 0, (rollout([1], [0.0]),) * 65536),)), "65536 rollouts"),
        (Message(HEADER, (Group("ada", 3, 0, (Rollout(np.zeros(1), np.zeros(1, np.float32)),)),)), "float64"),  # type: ignore[arg-type]
        (Message(HEADER, (Group("ada", 3, 0, (Rollout(np.zeros(1, np.int32), np.zeros(1)),)),)), "float64"),  # type: ignore[arg-type]
    ],
)
def test_encode_refuses_what_it_cannot_write(message: Message, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode(message)


def test_a_million_tokens() -> None:
    rng = np.random.default_rng(0)
    rollouts = tuple(
        Rollout(rng.integers(0, 9, 1000).astype(np.int32), -rng.random(1000, np.float32)) for _ in range(8)
    )
    message = Message(HEADER, tuple(Group("ada", 3, item, rollouts) for item in range(125)))
    assert_same(decode(encode(message), BOUNDLESS), message)


# ---------------------------------------------------------------------------------------------- version 2

PRECISIONS: tuple[LogpPrecision, ...] = get_args(LogpPrecision)
PRECISION_OF: dict[int, LogpPrecision] = {0: "float32", 6: "fixed6", 9: "fixed9"}
BITS = {"float32": 0, "fixed6": 6, "fixed9": 9}
HEAD = GOLDEN[8:60]
"""Run to top_k, the same in both versions."""


def head(form: int, groups: int, version: int = 2) -> bytes:
    return b"FTIS" + struct.pack("<HBB", version, 3, form) + HEAD + struct.pack("<II", 3, groups) + b"ada"


def bits(text: str) -> bytes:
    """Bits as they are read, from the highest of a byte down: ``bits("1000 01")`` is b"\\x84"."""
    text = text.replace(" ", "")
    return bytes(int(text[at : at + 8].ljust(8, "0"), 2) for at in range(0, len(text), 8))


def stored(content: Sequence[int] | bytes) -> bytes:
    """A stream as it is."""
    return struct.pack("<I", len(content)) + bytes(content)


def in_frame(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


def zstd(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def packed(*parts: bytes, counts: tuple[int, int, int], groups: int = 1, form: int = 16 + 9) -> bytes:
    return signed(head(form, groups) + struct.pack("<III", *counts) + b"".join(parts))


def example() -> Message:
    """One group: two completions of 9 and 5 tokens, seven distinct ids, 151645 ends them."""
    return Message(
        HEADER,
        (
            Group(
                "ada",
                3,
                7,
                (
                    rollout(
                        [785, 4226, 374, 220, 17, 13, 785, 4226, 151645],
                        [-0.5, -0.25, 0.0, -0.001953125, -0.0390625, -1.0, -0.015625, 0.0, -0.03125],
                    ),
                    rollout([785, 4226, 374, 17, 151645], [-0.25, -0.029296875, -0.00390625, -100.0, 0.0]),
                ),
            ),
        ),
    )


# Written by hand. Each number v below 16 is its own symbol; else e = bit length - 4, the symbol is 8 e + (v >> e), and
# the e low bits follow, bit 0 of all such numbers first.
EXAMPLE = packed(
    # item 7, 2 rollouts, 9 and 5 tokens: no open bits
    stored([7, 2, 9, 5]),
    # ids 13 17 220 374 785 4226 151645, and so gaps 13 3 202 153 410 3440 147418 with e = 0 0 4 4 5 8 14:
    # 202 = 1100'1010, 153 = 1001'1001, 410 = 1100'11010, 3440 = 1101'01110000, 147418 = 1000'11111111011010
    stored([13, 3, 8 * 4 + 12, 8 * 4 + 9, 8 * 5 + 12, 8 * 8 + 13, 8 * 14 + 8]),
    # bit 0 of 202 153 410 3440 147418, bit 1, 2, 3; then bit 4 of the last three; then 5, 6, 7 of two; 8 … 13 of one
    bits("01000 10101 00000 11101 111 10 11 01 1 1 1 1 1 1"),
    # the tokens by their places in the list; seven ids all take one byte
    stored([4, 5, 3, 2, 1, 0, 4, 5, 6, 4, 5, 3, 1, 6]),
    stored([]),
    # -log p times 512: 256 128 0 1 20 512 8 0 16, 128 15 2 51200 0; e = 5 4 0 0 1 6 0 0 1, 4 0 0 12 0
    stored([48, 40, 0, 1, 18, 56, 8, 0, 16, 40, 15, 2, 8 * 12 + 12, 0]),
    # all open bits are 0 (51200 = 1100'100000000000 but for its bit 11): bits 0 of 7 numbers, 1 to 3 of 5, 4 of 3,
    # 5 of 2, 6 to 11 of one. 256 = 1000'00000, 20 = 1010'0, 512 = 1000'000000
    bits("0000000 00000 00000 00000 000 00 000001"),
    counts=(2, 14, 7),
)


def test_an_example_packed_by_hand() -> None:
    gaps = [13, 3, 202, 153, 410, 3440, 147418]
    assert np.cumsum([gap + 1 for gap in gaps]).tolist() == [14, 18, 221, 375, 786, 4227, 151646]
    assert encode(example(), 2, "fixed9") == EXAMPLE
    assert_same(decode(EXAMPLE, LIMITS), example())
    assert (len(EXAMPLE), len(encode(example()))) == (156, 201)


def test_the_document_shows_the_example() -> None:
    text = (Path(__file__).parents[1] / "docs" / "wire.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  .*)?$", text, re.MULTILINE)
    assert bytes.fromhex("".join(shown)) == EXAMPLE


@pytest.mark.parametrize(
    ("precision", "numbers"),
    [
        ("float32", struct.pack("<2f", -0.5, -4.0)),
        ("fixed9", struct.pack("<2H", 256, 2048)),
        ("fixed6", struct.pack("<2H", 32, 256)),
    ],
)
def test_a_plain_message_is_version_1_but_for_form_and_precision(precision: LogpPrecision, numbers: bytes) -> None:
    message = Message(HEADER, (Group("ada", 3, 7, (rollout([151645, 2], [-0.5, -4.0]),)),))
    plain = signed(head(BITS[precision], 1) + struct.pack("<IHI2i", 7, 1, 2, 151645, 2) + numbers)
    assert encode(message, 2, precision) == plain
    assert_same(decode(plain, LIMITS), message)
    if precision == "float32":
        assert plain[:4] + plain[8:-4] == (version_1 := encode(message))[:4] + version_1[8:-4]


def test_a_packed_message_longer_than_a_plain_one_is_read_too() -> None:
    """Which of the two is shorter may depend on the compressor, so a reader does not ask."""
    planes = struct.pack("<6f", -0.5, -0.25, -1.0, -2.0, 0.0, -4.0)
    data = packed(
        stored([7, 9, 2, 1, 2, 1, 3]),
        stored([1, 0, 1, 0]) + b"",  # ids 1 2 4 5
        stored([3, 1, 0, 2, 2, 1]),
        stored([]),
        *(stored(planes[byte::4]) for byte in range(4)),
        counts=(3, 6, 4),
        groups=2,
        form=16,
    )
    assert_same(decode(data, LIMITS), tiny())
    assert len(data) > len(encode(tiny(), 2))


def synthetic(seed: int, tokens: int, vocabulary: int, kind: str = "mixture") -> Message:
    """Groups of up to three rollouts with Zipf-like ids scattered over 31 bits and log-probabilities of all sizes."""
    rng = np.random.default_rng(seed)
    known = rng.choice(2**31, vocabulary)
    ids = known[np.minimum(rng.zipf(1.3, tokens), vocabulary) - 1].astype(np.int32)
    logp = -np.minimum(
        np.where(rng.random(tokens) < 0.6, rng.exponential(0.01, tokens), rng.exponential(2, tokens)), 100
    )
    logp[rng.random(tokens) < 0.05] = rng.choice([0.0, -0.0, -100.0, -1e-45])
    cuts = np.sort(rng.integers(0, tokens + 1, size=max(tokens // 40, 1)))
    rollouts = [
        Rollout(*parts) for parts in zip(np.split(ids, cuts), np.split(logp.astype(np.float32), cuts), strict=True)
    ]
    groups = [
        Group("ada", 3, int(rng.integers(2**32)), tuple(rollouts[at : at + 3])) for at in range(0, len(rollouts), 3)
    ]
    return Message(HEADER, tuple(groups))


def flat(message: Message) -> tuple[np.ndarray, np.ndarray]:
    rollouts = [r for g in message.groups for r in g.rollouts]
    return (
        np.concatenate([np.zeros(0, np.int32), *(r.completion_ids for r in rollouts)]),
        np.concatenate([np.zeros(0, np.float32), *(r.gen_logp for r in rollouts)]),
    )


def assert_carried(message: Message, precision: LogpPrecision) -> bytes:
    """``message`` gets through version 2 as it should, and its bytes are no more than version 1's."""
    data = encode(message, 2, precision)
    assert len(data) <= len(encode(message))
    back = decode(data, BOUNDLESS)
    ids, exact = flat(message)
    ids_back, sent = flat(back)
    assert ids_back.tobytes() == ids.tobytes()
    if precision == "float32":
        assert_same(back, message)
    else:
        assert [len(r) for g in back.groups for r in g.rollouts] == [len(r) for g in message.groups for r in g.rollouts]
        assert np.abs(np.expm1(exact.astype(np.float64) - sent)).max(initial=0) <= weight_error(precision)
        assert not np.signbit(sent[sent == 0]).any()
    assert (sent <= 0).all()
    assert (sent >= MIN_LOGP).all()
    assert encode(back, 2, precision) == data, "once rounded, it stays"
    return data


def valid(message: Message) -> Message:
    """The same with values that version 2 carries, made from the bits of others."""

    def mended(r: Rollout) -> Rollout:
        finite = np.where(np.isfinite(r.gen_logp), r.gen_logp, 0)
        return Rollout(r.completion_ids & np.int32(2**31 - 1), -np.minimum(np.abs(finite), np.float32(100)))

    groups = (dataclasses.replace(g, rollouts=tuple(mended(r) for r in g.rollouts)) for g in message.groups)
    return Message(message.header, tuple(groups))


@given(messages(), st.sampled_from(PRECISIONS))
@settings(max_examples=200, deadline=None)
def test_round_trip_of_small_messages(message: Message, precision: LogpPrecision) -> None:
    assert_carried(valid(message), precision)


@given(st.integers(0, 2**32), st.integers(0, 2000), st.integers(1, 3000), st.sampled_from(PRECISIONS))
@settings(max_examples=150, deadline=None)
def test_round_trip_of_packed_messages(seed: int, tokens: int, vocabulary: int, precision: LogpPrecision) -> None:
    data = assert_carried(synthetic(seed, tokens, vocabulary), precision)
    if tokens > 200 and vocabulary < 50:
        assert data[7] == 16 + BITS[precision]


@pytest.mark.parametrize("distinct", [1, 2, 255, 256, 257, 510, 511, 512, 766, 767, 65535, 65536, 65537])
def test_any_number_of_distinct_ids(distinct: int) -> None:
    ids = np.random.default_rng(0).permutation(np.tile(np.arange(distinct, dtype=np.int32), 3))
    logp = np.zeros(len(ids), np.float32)
    data = assert_carried(Message(HEADER, (Group("ada", 3, 0, (Rollout(ids, logp),)),)), "fixed9")
    assert (data[7] == 16 + 9) == (2 < distinct <= 65536), "packed unless plain is shorter or the ids are too many"


def test_numbers_of_every_size() -> None:
    """Items of every bit length, in a message that is shorter when packed."""
    edges = [max(min(2**e + d, 2**32 - 1), 0) for e in range(33) for d in (-1, 0, 1)]
    r = rollout([5] * 100, [-1.0] * 100)
    message = Message(HEADER, tuple(Group("ada", 3, item, (r,)) for item in edges))
    data = assert_carried(message, "float32")
    assert data[7] == 16
    assert [g.item for g in decode(data, BOUNDLESS).groups] == edges


# ----------------------------------------------------------------------------- version 2: rounding


def carried(logp: Any, precision: LogpPrecision) -> np.ndarray:
    logp = np.asarray(logp, dtype=np.float32)
    message = Message(HEADER, (Group("ada", 3, 0, (Rollout(np.zeros(len(logp), np.int32), logp),)),))
    return flat(decode(encode(message, 2, precision), BOUNDLESS))[1]


@pytest.mark.parametrize(
    ("precision", "exact", "sent"),
    [
        ("fixed9", 0.0, 0.0),
        ("fixed9", -0.0, 0.0),
        ("fixed9", -1e-45, 0.0),
        ("fixed9", -1 / 1024, 0.0),  # halfway: to even
        ("fixed9", -1.0001 / 1024, -1 / 512),
        ("fixed9", -3 / 1024, -2 / 512),
        ("fixed9", -0.3, -154 / 512),
        ("fixed9", -99.9999, -100.0),
        ("fixed9", -100.0, -100.0),
        ("fixed6", -1 / 128, 0.0),
        ("fixed6", -0.3, -19 / 64),
        ("fixed6", -100.0, -100.0),
        ("float32", -0.3, np.float32(-0.3)),
        ("float32", -1e-45, np.float32(-1e-45)),
    ],
)
def test_how_a_log_probability_is_rounded(precision: LogpPrecision, exact: float, sent: float) -> None:
    (got,) = carried([exact], precision)
    assert got == sent
    assert not np.signbit(got) or got < 0


@pytest.mark.parametrize("precision", ["fixed9", "fixed6"])
def test_the_bound_on_the_weight_is_kept_and_is_tight(precision: LogpPrecision) -> None:
    step = 2.0 ** -BITS[precision]
    halves = -(np.arange(0, 100 / step) + 0.5) * step
    exact = np.concatenate(
        [halves, np.nextafter(halves.astype(np.float32), np.float32(0)), np.linspace(-100, 0, 10**6)]
    )
    exact = exact.astype(np.float32)
    error = np.abs(np.expm1(exact.astype(np.float64) - carried(exact, precision)))
    assert 0.999 * weight_error(precision) < error.max() <= weight_error(precision)


def test_the_bounds_are_those_promised() -> None:
    assert weight_error("float32") == 0
    assert weight_error("fixed9") < 1e-3 < weight_error("fixed6") < 8e-3


def test_negative_zero_is_exact_in_float32() -> None:
    assert np.signbit(carried([-0.0, 0.0], "float32")).tolist() == [True, False]


def test_the_sender_keeps_its_exact_values() -> None:
    message = synthetic(0, 500, 50)
    before = [part.tobytes() for part in flat(message)]
    encode(message, 2, "fixed6")
    assert [part.tobytes() for part in flat(message)] == before


# ----------------------------------------------------------------------------- version 2: bad bytes


def framed() -> dict[str, bytes]:
    """Messages with frames in them, in every precision, some hundred bytes long."""
    return {precision: encode(synthetic(1, 300, 20), 2, precision) for precision in PRECISIONS}


@pytest.mark.parametrize("data", [EXAMPLE, *framed().values()], ids=["example", *framed()])
def test_every_truncation_of_version_2_is_refused(data: bytes) -> None:
    decode(data, LIMITS)
    for stop in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:stop], LIMITS)
        with pytest.raises(CodecError):
            decode(signed(data[:-4][:stop][:-1]), LIMITS)
    for garbage in (b"\0", b"FTIS", data):
        with pytest.raises(CodecError):
            decode(data + garbage, LIMITS)
        with pytest.raises(CodecError):
            decode(signed(data[:-4] + garbage), LIMITS)


@pytest.mark.parametrize("data", [EXAMPLE, framed()["fixed9"]], ids=["example", "fixed9"])
def test_every_single_bit_flip_of_version_2_is_refused(data: bytes) -> None:
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(CodecError):
                decode(flipped, LIMITS)


@pytest.mark.parametrize("data", [EXAMPLE, *framed().values()], ids=["example", *framed()])
def test_a_seeded_storm_of_mutations_of_version_2(data: bytes) -> None:
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(3000):
        body = bytearray(data[:-4])
        for at in rng.integers(4, len(body), size=rng.integers(1, 4)):
            body[at] = rng.integers(256)
        outcomes.append(refused_or_canonical(signed(bytes(body)), LIMITS))
    assert any(outcomes)
    assert not all(outcomes)


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
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode(data, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


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


def write_short(columns: Columns, bits: int) -> list[bytes] | None:
    """One group of one rollout: its item, and u16 ids; log-probabilities are all -0.5."""
    if len(columns.lengths) != 1 or bits != 0 or columns.ids.max() > 0xFFFF or (columns.logp != -0.5).any():
        return None
    return [struct.pack("<I", columns.items[0]), columns.ids.astype("<u2").tobytes()]


def read_short(reader: Reader, n: int, bits: int, limits: Limits) -> Columns:
    items = np.frombuffer(reader.take(4, "the item"), "<u4")
    count = (reader.end - reader.at) // 2
    ids = reader.array("<u2", count).astype(np.int32)
    return Columns(items, np.ones(1, np.uint16), np.array([count]), ids, np.full(count, -0.5, np.float32))


SHORT = Form(write_short, read_short)


def test_a_form_is_two_functions_and_a_line_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FORMS", {**FORMS, "short": f"{__name__}.SHORT"})
    message = Message(HEADER, (Group("ada", 3, 7, (rollout([5, 2], [-0.5, -0.5]),)),))
    data = encode(message, 2)
    assert data == signed(head(2 * 16, 1) + struct.pack("<I2H", 7, 5, 2))
    assert_same(decode(data, LIMITS), message)
    assert encode(example(), 2, "fixed9") == EXAMPLE, "another form is taken where this one cannot carry the message"
    assert encode(tiny()) == GOLDEN, "version 1 has one form"
    monkeypatch.undo()
    with pytest.raises(CodecError, match="form 0x20 is not one of this version"):
        decode(data, LIMITS)


def test_what_is_decompressed_stays_in_proportion_to_the_limits() -> None:
    """A megabyte of tokens in some hundred bytes: good if the limits allow as much, else refused before it is made."""
    tokens = 16 * 4096
    ids, logp = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)
    rollouts = tuple(Rollout(*parts) for parts in zip(np.split(ids, 16), np.split(logp, 16), strict=True))
    data = encode(Message(HEADER, (Group("ada", 3, 0, rollouts),)), 2, "fixed9")
    assert len(data) < 250
    for limits, most in [(LIMITS, 64 * tokens), (dataclasses.replace(LIMITS, max_rollouts_per_group=15), 100_000)]:
        tracemalloc.start()
        try:
            decode(data, limits)
        except CodecError as error:
            assert "16 rollouts in 1 groups exceed the limit of 15" in str(error)  # noqa: PT017
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_bytes", len(EXAMPLE) - 1, f"message of {len(EXAMPLE)} bytes exceeds"),
        ("max_groups", 0, "1 groups exceed"),
        ("max_rollouts_per_group", 1, "2 rollouts in 1 groups exceed"),
        ("max_completion_length", 8, "completion of 9 tokens exceeds"),
        ("max_completion_length", 6, "14 tokens in 2 rollouts exceed"),
    ],
)
def test_each_limit_is_exact_and_named_in_version_2(field: str, value: int, says: str) -> None:
    exact = Limits(len(EXAMPLE), max_groups=1, max_rollouts_per_group=2, max_completion_length=9)
    decode(EXAMPLE, exact)
    with pytest.raises(CodecError, match=f"{says} the limit of {value}"):
        decode(EXAMPLE, dataclasses.replace(exact, **{field: value}))


# ----------------------------------------------------------------------------- version 2: our own mistakes, and size


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("ids", "logp", "says"),
    [
        ([1, -1], [0.0, 0.0], "token id -1 is negative"),
        ([1, 2], [0.0, 1e-9], "is not in"),
        ([1, 2], [0.0, -100.001], "-100.00"),
        ([1, 2], [0.0, -np.inf], "-inf is not in"),
        ([1, 2], [np.nan, 0.0], "nan is not in"),
    ],
)
def test_version_2_carries_only_values_that_make_sense(
    precision: LogpPrecision, ids: Any, logp: Any, says: str
) -> None:
    message = Message(HEADER, (Group("ada", 3, 0, (rollout(ids, logp),)),))
    with pytest.raises(ValueError, match=says):
        encode(message, 2, precision)
    assert_same(decode(encode(message), LIMITS), message)


@given(messages())
@settings(deadline=None)
def test_version_2_refuses_invalid_values_or_carries_them(message: Message) -> None:
    try:
        data = encode(message, 2)
    except ValueError:
        return
    assert_same(decode(data, BOUNDLESS), message)


@pytest.mark.parametrize("precision", ["fixed9", "fixed6"])
def test_version_1_is_exact_only(precision: LogpPrecision) -> None:
    with pytest.raises(ValueError, match="version 1 carries float32 only"):
        encode(tiny(), 1, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_a_token_of_a_quarter_million_packed_tokens(precision: LogpPrecision) -> None:
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, 250_000), 5000).astype(np.int32)
    logp = -rng.exponential(0.3, 250_000).astype(np.float32)
    rollouts = tuple(Rollout(*parts) for parts in zip(np.split(ids, 250), np.split(logp, 250), strict=True))
    message = Message(HEADER, tuple(Group("ada", 3, item, rollouts[item : item + 10]) for item in range(0, 250, 10)))
    data = assert_carried(message, precision)
    assert len(data) / 250_000 < {"float32": 4.7, "fixed9": 2.4, "fixed6": 2.0}[precision]

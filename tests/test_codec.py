"""The wire format: golden bytes of version 1, round trips, and hostile bytes."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz_cases import signed
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from wire_messages import (
    BOUNDLESS,
    EXAMPLE,
    GOLDEN,
    HEADER,
    LIMITS,
    TOKENIZER,
    assert_refused_in_little_memory,
    assert_same,
    f32_bits,
    f64,
    messages,
    refused_or_canonical,
    rollout,
    tiny,
)

from ftis import config
from ftis.codec import CodecError, Limits, Message, decode, encode, message_size
from ftis.config import FtisError
from ftis.rollouts import Group, Rollout


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
    assert offsets == [[], [0, 4, 6, 8, 24, 40, 48, 56, 60, 64, 68], [0, 4, 6, 7, 8, 68], []]


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
    assert_refused_in_little_memory(data, BOUNDLESS, says, most=100_000)


def test_another_version_says_what_to_do() -> None:
    body = bytearray(GOLDEN[:-4])
    body[4] = 4
    with pytest.raises(CodecError, match=r"version 4.*versions 1 to 3: install the same"):
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

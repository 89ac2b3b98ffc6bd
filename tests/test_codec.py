"""A message's header, limits and checksum, and bytes that were damaged or made to harm, whatever form they have."""

from __future__ import annotations

import dataclasses
import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fuzz_cases import signed
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import peak_of
from pydantic import TypeAdapter, ValidationError
from wire_messages import (
    BOUNDLESS,
    EXAMPLE,
    EXAMPLE_MESSAGE,
    HEADER,
    LIMITS,
    TEXT_EXAMPLE,
    TEXT_MESSAGE,
    assert_same,
    framed,
    message,
    messages,
    rollout,
)

from ftis import config
from ftis.codec import VERSION, CodecError, Limits, Message, decode, encode, largest_message
from ftis.config import FtisError
from ftis.rollouts import Group, Rollout

DOCUMENT = Path(__file__).parents[1] / "docs" / "wire.md"
BASES = {"ids": EXAMPLE, "text": TEXT_EXAMPLE, **framed()}


def test_examples_written_by_hand() -> None:
    for data, made in ((EXAMPLE, EXAMPLE_MESSAGE), (TEXT_EXAMPLE, TEXT_MESSAGE)):
        assert encode(made) == data
        assert_same(decode(data, LIMITS), made)
    shown = re.findall(r"^    ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  .*)?$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert bytes.fromhex("".join(shown)) == EXAMPLE, "the document shows it"


@given(messages())
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_again(made: Message) -> None:
    data = encode(made)
    back = decode(data, BOUNDLESS)
    assert_same(back, made)
    assert encode(back) == data
    for group in back.groups:
        for row in group.rollouts:
            for array in (row.completion_ids, row.gen_logp):
                assert array.dtype.isnative
                assert array.flags.aligned
                assert not array.flags.writeable
    rows = [row for group in made.groups for row in group.rollouts]
    tokens, text = sum(len(row.gen_logp) for row in rows), any(row.unit is not None for row in rows)
    assert len(data) <= largest_message(tokens, len(rows), len(made.groups), made.header.peer, text)


def test_the_largest_message_has_room_for_the_worst() -> None:
    """Ids and floats in which nothing can be compressed. Each float keeps its bits, a NaN too."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**31, 5000).astype(np.int32)
    made = message(Rollout(ids, rng.integers(0, 2**32, 5000, np.uint32).view(np.float32)))
    data, most = encode(made), largest_message(5000, 1, 1, "ada")
    assert 0.95 * most < len(data) <= most
    assert_same(decode(data, BOUNDLESS), made)


def test_names_are_the_recipes_names() -> None:
    names = TypeAdapter(config.Name)
    for name in ["a", "0", "a" * 64, "A-b_c.d", "", "a" * 65, ".a", "-a", "a b", "a\n", "é", "a/b", "a\x00"]:
        body, raw = bytearray(encode(Message(HEADER, ()))[:-4]), name.encode("latin-1")
        body[6], body[68:71] = len(raw), raw
        data = signed(bytes(body))
        try:
            names.validate_python(name)
        except ValidationError:
            with pytest.raises(CodecError, match="name"):
                decode(data, LIMITS)
        else:
            assert decode(data, LIMITS).header.peer == name


def test_another_version_is_refused_with_both_numbers() -> None:
    for version in (0, VERSION - 1, VERSION + 1, 2**16 - 1):
        data = signed(EXAMPLE[:4] + struct.pack("<H", version) + EXAMPLE[6:-4])
        with pytest.raises(CodecError, match=rf"version {version}\b.*version {VERSION}\b"):
            decode(data, LIMITS)


@pytest.mark.parametrize("base", BASES)
def test_every_truncation_flip_and_trailing_garbage_is_refused(base: str) -> None:
    assert issubclass(CodecError, FtisError)
    data = BASES[base]
    decode(data, LIMITS)
    cut = [data[:stop] for stop in range(len(data))]
    remade = [signed(data[:-4][:stop][:-1]) for stop in range(len(data))]
    longer = [made for extra in (b"\0", b"FTIS", data) for made in (data + extra, signed(data[:-4] + extra))]
    flipped = [bytes([*data[:at], data[at] ^ 1 << bit, *data[at + 1 :]]) for at in range(len(data)) for bit in range(8)]
    for bad in [*cut, *remade, *longer, *flipped]:
        with pytest.raises(CodecError):
            decode(bad, LIMITS)


@given(st.sampled_from(sorted(BASES)), st.data())
@settings(max_examples=600, deadline=None)
def test_mutations_under_a_right_checksum_are_refused_or_make_a_whole_message(base: str, data: st.DataObject) -> None:
    body = bytearray(BASES[base][:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        new = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80"]))
        body[at : at + data.draw(st.integers(0, 4))] = new
    try:
        made = decode(signed(bytes(body)), LIMITS)
    except CodecError:
        return
    assert len(made.groups) <= LIMITS.max_groups
    assert_same(decode(encode(made), BOUNDLESS), made)


def test_each_limit_is_exact_and_named() -> None:
    for data, longest, in_all in ((EXAMPLE, 3, 2), (TEXT_EXAMPLE, 4, 2)):
        exact = Limits(len(data), max_groups=1, max_rollouts_per_group=2, max_completion_length=longest)
        decode(data, exact)
        for field, value in (
            ("max_bytes", len(data) - 1),
            ("max_groups", 0),
            ("max_rollouts_per_group", 1),
            ("max_completion_length", longest - 1),
            ("max_completion_length", in_all),
        ):
            with pytest.raises(CodecError, match=f"the limit of {value}"):
                decode(data, dataclasses.replace(exact, **{field: value}))


def test_what_is_decompressed_stays_in_proportion_to_the_limits() -> None:
    """A megabyte in some hundred bytes: good if the limits allow as much, else refused before it is made."""
    ids = Rollout(np.zeros(4096, np.int32), np.zeros(4096, np.float32))
    unit = np.repeat(np.arange(4096, dtype=np.int32), 15)
    text = Rollout(np.full(4096 * 15, 97, np.int32), np.zeros(4096, np.float32), unit)
    for row, most in ((ids, 64 * 16 * 4096), (text, 40 * 16 * 4096 * 15)):
        data = encode(message(*[row] * 16))
        assert len(data) < 400
        assert peak_of(partial(decode, data, LIMITS)) < most
        fewer = dataclasses.replace(LIMITS, max_rollouts_per_group=15)
        assert peak_of(partial(refused, data, fewer, "16 rollouts in 1 groups exceed the limit of 15")) < 200_000


def refused(data: bytes, limits: Limits, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        decode(data, limits)


def test_encode_refuses_what_it_cannot_write() -> None:
    mistakes = [
        (Message(HEADER, (Group("bob", 3, 0, ()),)), "bob's"),
        (Message(HEADER, (Group("ada", 2, 0, ()),)), "of round 2"),
        (message(Rollout(np.zeros(1), np.zeros(1, np.float32))), "float64"),  # type: ignore[arg-type]
        (message(Rollout(np.zeros(1, np.int32), np.zeros(1))), "float64"),  # type: ignore[arg-type]
        (message(rollout([1, -1])), "token id -1 is negative"),
    ]
    for made, says in mistakes:
        with pytest.raises(ValueError, match=says):
            encode(made)

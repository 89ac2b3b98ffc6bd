"""Version 2 of the wire format: an example packed by hand, round trips, rounding, size."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_cases import signed
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import (
    BITS,
    BOUNDLESS,
    EXAMPLE,
    GOLDEN,
    HEADER,
    LIMITS,
    PRECISIONS,
    assert_same,
    example,
    flat,
    head,
    messages,
    packed,
    rollout,
    stored,
    synthetic,
    tiny,
)

from ftis import codec
from ftis.codec import CodecError, Columns, Form, Limits, Message, Reader, decode, encode
from ftis.config import LogpPrecision
from ftis.rollouts import MIN_LOGP, Group, Rollout
from ftis.seams import FORMS
from ftis.wire.plain import weight_error


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
    monkeypatch.setattr(codec, "VERSION", 4)
    message = Message(HEADER, (Group("ada", 3, 7, (rollout([5, 2], [-0.5, -0.5]),)),))
    data = encode(message, 4)
    assert data == signed(head(3 * 16, 1, version=4) + struct.pack("<I2H", 7, 5, 2))
    assert_same(decode(data, LIMITS), message)
    again = encode(example(), 4, "fixed9")
    assert again[8:-4] == EXAMPLE[8:-4], "another form is taken where this one cannot carry the message"
    assert encode(tiny()) == GOLDEN, "version 1 has one form"
    monkeypatch.undo()
    with pytest.raises(CodecError, match="form 0x30 is not one of this version"):
        decode(signed(head(3 * 16, 1, version=3) + data[71:-4]), LIMITS)


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

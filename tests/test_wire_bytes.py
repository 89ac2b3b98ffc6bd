"""Bytes of every form of the wire: cut, flipped and mutated ones are refused, and each limit is exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fuzz_cases import signed
from test_text_form import EXAMPLE as TEXT
from test_text_form import framed as framed_text
from wire_messages import EXAMPLE, GOLDEN, LIMITS, framed, refused_or_canonical

from ftis.codec import CodecError, Limits, decode

PACKED = {"packed": EXAMPLE, **framed(), "text": TEXT, "text in frames": framed_text()}
ALL = {"plain": GOLDEN, **PACKED}


@pytest.mark.parametrize("data", ALL.values(), ids=ALL)
def test_every_truncation_and_trailing_garbage_is_refused(data: bytes) -> None:
    decode(data, LIMITS)
    for stop in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:stop], LIMITS)
        with pytest.raises(CodecError):  # cut, and its checksum made right
            decode(signed(data[:-4][:stop][:-1]), LIMITS)
    for garbage in (b"\0", b"FTIS", data):
        with pytest.raises(CodecError):
            decode(data + garbage, LIMITS)
        with pytest.raises(CodecError):
            decode(signed(data[:-4] + garbage), LIMITS)


@pytest.mark.parametrize("data", ALL.values(), ids=ALL)
def test_every_single_bit_flip_is_refused(data: bytes) -> None:
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(CodecError):
                decode(flipped, LIMITS)


@pytest.mark.parametrize("data", PACKED.values(), ids=PACKED)
def test_a_seeded_storm_of_mutations(data: bytes) -> None:
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(3000):
        body = bytearray(data[:-4])
        for at in rng.integers(4, len(body), size=rng.integers(1, 4)):
            body[at] = rng.integers(256)
        outcomes.append(refused_or_canonical(signed(bytes(body)), LIMITS))
    assert any(outcomes)
    assert not all(outcomes)


@pytest.mark.parametrize(
    ("data", "field", "value", "says"),
    [
        (GOLDEN, "max_bytes", len(GOLDEN) - 1, f"message of {len(GOLDEN)} bytes exceeds"),
        (GOLDEN, "max_groups", 1, "2 groups exceed"),
        (GOLDEN, "max_rollouts_per_group", 1, "group of 2 rollouts exceeds"),
        (GOLDEN, "max_completion_length", 2, "completion of 3 tokens exceeds"),
        (EXAMPLE, "max_bytes", len(EXAMPLE) - 1, f"message of {len(EXAMPLE)} bytes exceeds"),
        (EXAMPLE, "max_groups", 0, "1 groups exceed"),
        (EXAMPLE, "max_rollouts_per_group", 1, "2 rollouts in 1 groups exceed"),
        (EXAMPLE, "max_completion_length", 8, "completion of 9 tokens exceeds"),
        (EXAMPLE, "max_completion_length", 6, "14 tokens in 2 rollouts exceed"),
        (TEXT, "max_bytes", len(TEXT) - 1, f"message of {len(TEXT)} bytes exceeds"),
        (TEXT, "max_groups", 0, "1 groups exceed"),
        (TEXT, "max_rollouts_per_group", 1, "2 rollouts in 1 groups exceed"),
        (TEXT, "max_completion_length", 3, "completion of 4 tokens exceeds"),
        (TEXT, "max_completion_length", 2, "5 tokens in 2 rollouts exceed"),
    ],
)
def test_each_limit_is_exact_and_named(data: bytes, field: str, value: int, says: str) -> None:
    groups, longest = {GOLDEN: (2, 3), EXAMPLE: (1, 9), TEXT: (1, 4)}[data]
    exact = Limits(len(data), max_groups=groups, max_rollouts_per_group=2, max_completion_length=longest)
    decode(data, exact)
    with pytest.raises(CodecError, match=f"{says} the limit of {value}"):
        decode(data, dataclasses.replace(exact, **{field: value}))

"""Messages for the tests of the wire format: by hand, drawn, and as bytes of each version."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import zstandard
from fuzz_cases import signed
from hypothesis import strategies as st
from memory import peak_of

from ftis.codec import CodecError, Header, Limits, Message, decode, encode
from ftis.config import LogpPrecision
from ftis.rollouts import Group, Rollout

RUN = "00112233445566778899aabbccddeeff"
TOKENIZER = "f0e0d0c0b0a090807060504030201000"
HEADER = Header(run=RUN, round=3, peer="ada", tokenizer=TOKENIZER, temperature=0.5, top_k=50, top_p=1.0)
LIMITS = Limits(max_bytes=1 << 20, max_groups=64, max_rollouts_per_group=64, max_completion_length=4096)
BOUNDLESS = Limits(1 << 40, 1 << 32, 1 << 16, 1 << 32)


def rollout(ids: Sequence[int], logp: Sequence[float] | None = None) -> Rollout:
    return Rollout(np.array(ids, np.int32), np.array([-1.0] * len(ids) if logp is None else logp, np.float32))


def tiny() -> Message:
    groups = (
        Group("ada", 3, 7, (rollout([5, 2], [-0.5, -0.25]), rollout([1], [-1.0]))),
        Group("ada", 3, 9, (rollout([4, 4, 2], [-2.0, 0.0, -4.0]),)),
    )
    return Message(HEADER, groups)


def assert_same(a: Message, b: Message) -> None:
    assert a.header == b.header
    assert [(g.peer, g.round, g.item, len(g.rollouts)) for g in a.groups] == [
        (g.peer, g.round, g.item, len(g.rollouts)) for g in b.groups
    ]
    for left, right in zip(a.groups, b.groups, strict=True):
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            assert one.completion_ids.tobytes() == other.completion_ids.tobytes()
            assert one.gen_logp.tobytes() == other.gen_logp.tobytes()
            assert (one.unit is None) == (other.unit is None)
            if one.unit is not None and other.unit is not None:
                assert one.unit.tobytes() == other.unit.tobytes()


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


def refused_or_canonical(data: bytes, limits: Limits) -> bool:
    try:
        message = decode(data, limits)
    except CodecError:
        return False
    if data[4] == 1:
        assert encode(message) == data
    else:
        precision = PRECISION_OF[data[7] % 16]
        again = encode(message, data[4], precision)
        assert_same(decode(again, BOUNDLESS), message)
        if data[7] < 16:  # plain, and so must that be unless packing is shorter
            assert again == data or len(again) < len(data)
    return True


def assert_refused_in_little_memory(data: bytes, limits: Limits, says: str | None = None, most: int = 200_000) -> None:
    def refuse() -> None:
        with pytest.raises(CodecError, match=says):
            decode(data, limits)

    assert peak_of(refuse) < most


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


def framed() -> dict[str, bytes]:
    """Messages with frames in them, in every precision, some hundred bytes long."""
    return {precision: encode(synthetic(1, 300, 20), 2, precision) for precision in PRECISIONS}

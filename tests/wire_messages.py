"""Messages for the tests of the wire format: by hand, drawn, and as bytes."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from fuzz_cases import signed
from hypothesis import strategies as st
from vocabularies import texts

from ftis.codec import Header, Limits, Message, encode
from ftis.rollouts import Floats, Group, Ints, Rollout
from ftis.text.completions import END, MOST_ENDS
from ftis.text.turns import joined

RUN = "00112233445566778899aabbccddeeff"
TOKENIZER = "f0e0d0c0b0a090807060504030201000"
HEADER = Header(run=RUN, round=3, peer="ada", tokenizer=TOKENIZER, temperature=0.5, top_k=50, top_p=1.0)
LIMITS = Limits(max_bytes=1 << 20, max_groups=64, max_rollouts_per_group=64, max_completion_length=4096)
BOUNDLESS = Limits(1 << 40, 1 << 32, 1 << 16, 1 << 32)


def rollout(ids: Sequence[int], logp: Sequence[float] | None = None) -> Rollout:
    return Rollout(np.array(ids, np.int32), np.array([-1.0] * len(ids) if logp is None else logp, np.float32))


def spoken(tokens: Sequence[bytes], logp: Sequence[float] | None = None, end: int | None = None) -> Rollout:
    """A completion as text in these tokens, ended by its sender's end token of that number."""
    sizes = [len(token) for token in tokens] + [1] * (end is not None)
    ids = np.array([*b"".join(tokens), *([] if end is None else [END + end])], np.int32)
    gen_logp = np.array([-1.0] * len(sizes) if logp is None else logp, np.float32)
    return Rollout(ids, gen_logp, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))


def message(*rollouts: Rollout) -> Message:
    return Message(HEADER, (Group("ada", 3, 7, rollouts),))


def flat(message: Message) -> tuple[list[Any], Ints, Floats, Ints]:
    """All of a message but its log-probabilities' bits: header and shape, then ids, log-probabilities and units."""
    rollouts = [r for g in message.groups for r in g.rollouts]
    shape = [(g.peer, g.round, g.item, len(g.rollouts)) for g in message.groups]
    units = [np.zeros(0, np.int32) if r.unit is None else r.unit for r in rollouts]
    empty = [np.zeros(0, np.int32)]
    return (
        [message.header, shape, [(len(r), r.unit is None) for r in rollouts]],
        np.concatenate([*empty, *(r.completion_ids for r in rollouts)]),
        np.concatenate([np.zeros(0, np.float32), *(r.gen_logp for r in rollouts)]),
        np.concatenate([*empty, *units]),
    )


def assert_same(a: Message, b: Message) -> None:
    (shape, ids, logp, unit), (shape_b, ids_b, logp_b, unit_b) = flat(a), flat(b)
    assert repr(shape) == repr(shape_b)  # a NaN of the header is itself
    assert [x.tobytes() for x in (ids, logp, unit)] == [x.tobytes() for x in (ids_b, logp_b, unit_b)]


def head(form: int, groups: int) -> bytes:
    numbers = struct.pack("<ddIII", 0.5, 1.0, 50, 3, groups)
    return b"FTIS" + struct.pack("<HBB", 5, 3, form) + bytes.fromhex(RUN + TOKENIZER) + numbers + b"ada"


def stored(content: Sequence[int] | bytes) -> bytes:
    """A stream as it is."""
    return struct.pack("<I", len(content)) + bytes(content)


def numbers(*values: int) -> bytes:
    """Numbers in a stream as it is."""
    return stored(struct.pack(f"<{len(values)}I", *values))


def logps(*values: float) -> bytes:
    """Log-probabilities in four streams as they are, the lowest bytes first."""
    packed = struct.pack(f"<{len(values)}f", *values)
    return b"".join(stored(packed[place::4]) for place in range(4))


def in_frame(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


def zstd(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def packed(*parts: bytes, counts: tuple[int, int], groups: int = 1, form: int = 0) -> bytes:
    return signed(head(form, groups) + struct.pack("<II", *counts) + b"".join(parts))


EXAMPLE_MESSAGE = message(rollout([785, 4226, 151645], [-0.5, -0.0, -100.0]), rollout([785, 151645], [-0.25, 0.0]))
"""One group: two completions of 3 and 2 tokens, which 151645 ends."""
TABLE, IDS, LOGP = numbers(7, 2, 3, 2), numbers(785, 4226, 151645, 785, 151645), logps(-0.5, -0.0, -100.0, -0.25, 0.0)
EXAMPLE = packed(TABLE, IDS, LOGP, counts=(2, 5))

TEXT_MESSAGE = message(
    spoken([b"n", b"\xc3", b"\xa9"], [-0.5, -0.25, 0.0, -1 / 512], end=0), spoken(["é!".encode()], [-2 / 512])
)
"""Two completions: "né" in tokens of a byte each, with its end, and "é!" in one token, cut off."""
TEXT_TABLE, SIZES, ENDS, TEXT = numbers(7, 2, 4, 1), numbers(1, 1, 1, 0, 3), numbers(0), stored("néé!".encode())
TEXT_LOGP = logps(-0.5, -0.25, 0.0, -1 / 512, -2 / 512)
TEXT_EXAMPLE = packed(TEXT_TABLE, SIZES, ENDS, TEXT, TEXT_LOGP, counts=(2, 5), form=1)


def bomb(content_size: int, blocks: int) -> bytes:
    """A frame that states ``content_size`` (4 bytes, single segment) and holds ``blocks`` of 128 KiB of zeros each."""
    block = (1 << 17) << 3 | 1 << 1  # repeat one byte
    body = b"".join((block | (i == blocks - 1)).to_bytes(3, "little") + b"\0" for i in range(blocks))
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", content_size) + body


def synthetic(seed: int, tokens: int, vocabulary: int) -> Message:
    """Groups of up to three rollouts with Zipf-like ids scattered over 31 bits and log-probabilities of all sizes."""
    rng = np.random.default_rng(seed)
    known = rng.choice(2**31, vocabulary)
    ids = known[np.minimum(rng.zipf(1.3, tokens), vocabulary) - 1].astype(np.int32)
    nats = np.where(rng.random(tokens) < 0.6, rng.exponential(0.01, tokens), rng.exponential(2, tokens))
    logp = -np.minimum(nats, 100).astype(np.float32)
    logp[rng.random(tokens) < 0.05] = rng.choice([0.0, -0.0, -100.0, -1e-45])
    cuts = np.sort(rng.integers(0, tokens + 1, size=max(tokens // 40, 1)))
    rollouts = [Rollout(*parts) for parts in zip(np.split(ids, cuts), np.split(logp, cuts), strict=True)]
    starts = range(0, len(rollouts), 3)
    groups = [Group("ada", 3, int(rng.integers(2**32)), tuple(rollouts[at : at + 3])) for at in starts]
    return Message(HEADER, tuple(groups))


f64 = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
u32 = st.integers(0, 2**32 - 1)
log_probabilities = st.floats(-100, 0, width=32)


@st.composite
def spoken_turns(draw: st.DrawFn) -> Rollout:
    """Text cut into tokens anywhere, also inside characters."""
    raw = draw(texts).encode("utf-8")
    cuts = sorted(draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=20)))
    edges = [0, *(cut for cut in cuts if cut < len(raw)), len(raw)] if raw else []
    tokens = [raw[start:stop] for start, stop in itertools.pairwise(edges)]
    end = draw(st.integers(0, MOST_ENDS - 1)) if not tokens or draw(st.booleans()) else None
    count = len(tokens) + (end is not None)
    return spoken(tokens, draw(st.lists(log_probabilities, min_size=count, max_size=count)), end)


spoken_rollouts = st.lists(spoken_turns(), min_size=1, max_size=3).map(joined)
"""Completions of one turn or more."""


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Messages of ids or of text, small or with many tokens, with any header."""
    name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)
    hexes = st.binary(min_size=16, max_size=16).map(bytes.hex)
    header = Header(draw(hexes), draw(u32), draw(name), draw(hexes), draw(f64), draw(u32), draw(f64))
    if draw(st.integers(0, 3)) == 0:
        made = synthetic(draw(u32), draw(st.integers(0, 2000)), draw(st.integers(1, 3000)))
        groups = [(group.item, list(group.rollouts)) for group in made.groups]
    else:
        pairs = st.lists(st.tuples(st.integers(0, 2**31 - 1), log_probabilities), max_size=5)
        of_ids = pairs.map(lambda drawn: rollout([i for i, _ in drawn], [p for _, p in drawn]))
        of = spoken_rollouts if draw(st.booleans()) else of_ids
        groups = draw(st.lists(st.tuples(u32, st.lists(of, max_size=4)), max_size=4))
    return Message(header, tuple(Group(header.peer, header.round, item, tuple(of)) for item, of in groups))


def framed() -> dict[str, bytes]:
    """Messages of ids and of text with frames in them, some hundred bytes long."""
    rng = np.random.default_rng(0)
    words = [word.encode() for word in ("the ", "answer", " is", " é", "\n", "42", " 🤖")]
    rows = [spoken([words[i] for i in rng.integers(len(words), size=30)], end=0) for _ in range(8)]
    return {"ids in frames": encode(synthetic(1, 300, 20)), "text in frames": encode(message(*rows))}

"""The hostile messages and manifests of ``fuzz.py``: case n of a seed is always the same bytes."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ftis.codec import Header, Message, encode
from ftis.rollouts import Group, Rollout
from ftis.swarm import manifest as manifests
from ftis.swarm.manifest import Manifest
from ftis.text.completions import END as END_OF_TEXT

T = TypeVar("T")
RUN, TOKENIZER = "1" * 32, "2" * 32
END, VOCAB, G, LONGEST, ROUND = 7, 1000, 2, 24, 5


def signed(body: bytes) -> bytes:
    """``body`` with the checksum that makes the parser look at it."""
    return body + struct.pack("<I", zlib.crc32(body))


def _header(peer: str = "ada", round: int = ROUND) -> Header:
    return Header(RUN, round, peer, TOKENIZER, 1.0, 0, 1.0)


def _group(item: int, *completions: list[int], peer: str = "ada", round: int = ROUND) -> Group:
    return Group(
        peer,
        round,
        item,
        tuple(Rollout(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)) for ids in completions),
    )


FULL = list(range(10, 10 + LONGEST))


def _text_group(item: int, *completions: list[bytes], peer: str = "ada", round: int = ROUND) -> Group:
    """Completions as text, each a list of tokens; an empty token is the end."""
    rollouts = []
    for tokens in completions:
        ids = [i for token in tokens for i in (token or [END_OF_TEXT])]
        unit = np.repeat(np.arange(len(tokens), dtype=np.int32), [max(len(token), 1) for token in tokens])
        rollouts.append(Rollout(np.array(ids, np.int32), np.full(len(tokens), -0.5, np.float32), unit))
    return Group(peer, round, item, tuple(rollouts))


SMALL_MESSAGE = Message(_header(), (_group(8, [8, END], [9, 9, END]), _group(9, [9, END], [1])))
FULL_MESSAGE = Message(_header(), (_group(8, FULL, FULL), _group(9, FULL, FULL)))
SMALL_TEXT = Message(
    _header(),
    (_text_group(8, [b"8", b""], ["é".encode(), b"\xf0\x9f", b"\xa4\x96", b""]), _text_group(9, [b"9", b""], [b"9 "])),
)
FULL_TEXT = Message(_header(), tuple(_text_group(item, *[[b"the "] * (LONGEST - 1)] * G) for item in (8, 9)))
GOOD_MESSAGES = [
    encode(SMALL_MESSAGE),
    encode(FULL_MESSAGE),
    encode(Message(_header(round=ROUND - 1), (_group(4, [4, END], [END], round=ROUND - 1),))),
    encode(Message(_header(), ())),
    encode(Message(_header("bob"), (_group(10, [8, END], [9], peer="bob"),))),
    encode(Message(_header(), tuple(_group(item, [1]) for item in range(4)))),
    encode(SMALL_TEXT),
    encode(FULL_TEXT),
]
GOOD_MANIFESTS = [
    manifests.to_bytes(manifests.describe(RUN, "ada", ROUND, 1, b"abc", (8, 9))),
    manifests.to_bytes(manifests.describe(RUN, "bob", 0, 0, b"", ())),
    manifests.to_bytes(Manifest(RUN, "a" * 64, 2**53, 2**53, 1_000_000, ("a" * 64,) * 4, tuple(range(40)))),
]

# ---------------------------------------------------------------------------------------------- cases

EXTREMES = [b"\xff" * 4, bytes(4), b"\0\0\0\x80", b"\1\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff"]
EXTREMES += [b"\0\0\xa0\x7f", struct.pack("<f", -100.0), struct.pack("<f", -1e30), struct.pack("<f", 1e-45), b"\2\0"]
PIECES_OF_TEXT = [b"a", b" the", b"42", "é".encode(), "🤖".encode(), b"\r\n", b"  ", b"e\xcc\x81", b"\xc3\xa9 x"]
IDS = [0, 1, END, VOCAB - 1, VOCAB, 2**31 - 1, 8, 9]
LOGPS = [0.0, -0.0, -1.0, -100.0, -100.01, -1e30, 1e-45, 1.0, float("nan"), float("inf"), float("-inf")]
PIECES = [
    b"1.0",
    b"true",
    b"null",
    b"1e3",
    b"-0",
    b"-1",
    b"NaN",
    b"Infinity",
    b"1e999",
    b'""',
    b"[]",
    b"{}",
    b"[" * 2000,
]
PIECES += [b" ", b"\n", b"\\u0000", b"\\ud800", b"9" * 30, b"9" * 5000, b'"run":1,', b",", b":", b"\xff", b'"', b"0"]
VALUES: list[object] = [0, 1, -1, 2**53, 2**53 + 1, 1.0, 1e3, True, None, "", "ada", "a/b", RUN, [], {}, [[1]], [1, 2]]
VALUES += [[2, 1], [1, 1], ["a" * 64], ["A" * 64], ["a" * 64] * 4, 262_144, 262_145, 10**10, "x" * 70, "\u0660" * 32]


def make(seed: int, number: int) -> tuple[str, bytes]:
    """Case ``number``: what it is, and its bytes."""
    rng = random.Random(seed << 40 | number)
    kind, ways = ("message", MESSAGE_WAYS) if rng.random() < 0.7 else ("manifest", MANIFEST_WAYS)
    (way,) = rng.choices(list(ways), list(ways.values()))
    return kind, way(rng)


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 4, 30, 71, 72, 73, 100, 300)))


def _noise_after_a_good_start(rng: random.Random) -> bytes:
    return signed(rng.choice(GOOD_MESSAGES)[: rng.choice((8, 64, 68, 71))] + _noise(rng))


def _mutate(rng: random.Random, body: bytearray, words: Sequence[bytes], goods: Sequence[bytes]) -> None:
    at = rng.randrange(len(body) + 1)
    match rng.randrange(7):
        case 0 if body:
            body[at % len(body)] ^= 1 << rng.randrange(8)
        case 1:
            del body[at:]
        case 2:
            del body[at : at + rng.randint(1, 8)]
        case 3:
            body[at:at] = rng.choice(words)
        case 4:
            word = rng.choice(words)
            body[at : at + len(word)] = word
        case 5:
            other = rng.choice(goods)
            start = rng.randrange(len(other) + 1)
            if rng.random() < 0.5:
                start = at  # field to field
            body[at:] = other[start:]
        case 6:
            body[at:at] = body[max(0, at - rng.randint(1, 80)) : at] * rng.randint(1, 20)


def _mutated_message(rng: random.Random) -> bytes:
    good = rng.choice(GOOD_MESSAGES)
    keep_checksum = rng.random() < 0.2
    body = bytearray(good if keep_checksum else good[:-4])
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _mutate(rng, body, EXTREMES, GOOD_MESSAGES)
    return bytes(body) if keep_checksum else signed(bytes(body))


def _field_changed(rng: random.Random) -> bytes:
    """One 4-byte word of a good message, on its border, replaced: the lengths stay right more often than not."""
    body = bytearray(rng.choice(GOOD_MESSAGES)[:-4])
    name = body[6]
    starts = [*range(0, 68, 4), *range(68 + name, len(body) - 3, 4), *range(70 + name, len(body) - 3, 4)]
    at = rng.choice(starts)
    body[at : at + 4] = (rng.choice(EXTREMES) + bytes(4))[:4] if rng.random() < 0.8 else rng.randbytes(4)
    return signed(bytes(body))


def _rewritten_message(rng: random.Random) -> bytes:
    """A message that decodes, with anything in it: it is admission's to judge."""
    odd = rng.choice((0.0, 0.03, 0.3))

    def usual_or(usual: T, *others: T) -> T:
        return rng.choice(others) if rng.random() < odd / 2 else usual

    header = Header(
        run=usual_or(RUN, "0" * 32),
        round=usual_or(ROUND, ROUND - 1, ROUND - 2, ROUND + 1, 2**32 - 1),
        peer=usual_or("ada", "bob", "eve", "a" * 64),
        tokenizer=usual_or(TOKENIZER, RUN),
        temperature=usual_or(1.0, 0.0, float("nan"), float("inf"), 1.0 + 1e-15),
        top_k=rng.choice((0, 50, 2**32 - 1)),
        top_p=usual_or(1.0, 0.0, 1e-300, 1.1, float("nan"), -1.0),
    )
    groups: list[Group] = []
    for item in (8, 9)[: rng.randint(0, 2)]:
        rollouts = []
        for _ in range(usual_or(G, 0, 1, 3, 5)):
            length = usual_or(rng.randint(1, LONGEST), 0, LONGEST, LONGEST + 1, 2 * LONGEST, 2 * LONGEST + 1)
            ids = [rng.choice(IDS) if rng.random() < odd / 8 else rng.randrange(8, VOCAB) for _ in range(length)]
            logps = [rng.choice(LOGPS) if rng.random() < odd / 8 else -rng.random() for _ in range(len(ids))]
            if ids and rng.random() < 0.7:
                ids[-1] = END
            if rng.random() < 0.2:
                ids[:-1], logps[:-1] = [item], [-1.0]
            with np.errstate(over="ignore"):
                rollouts.append(Rollout(np.array(ids, np.int32), np.array(logps, np.float32)))
        index = usual_or(item, 8, 4, 12, 2**32 - 1)
        copies = 1 if rng.random() > odd / 2 else 3
        groups += [Group(header.peer, header.round, index, tuple(rollouts))] * copies
    return encode(Message(header, tuple(groups)))


def _rewritten_text(rng: random.Random) -> bytes:
    """A message of text that decodes, or nearly: sizes and ends are as they come."""
    groups = []
    for item in (8, 9)[: rng.randint(1, 2)]:
        completions = []
        for _ in range(rng.choice((G, G, G, 1, 3))):
            tokens = [rng.choice(PIECES_OF_TEXT) for _ in range(rng.choice((1, 2, 5, LONGEST - 1, LONGEST)))]
            completions.append([str(item).encode(), b""] if rng.random() < 0.2 else [*tokens, b""][: LONGEST + 1])
        groups.append(_text_group(item, *completions))
    message = Message(_header(), tuple(groups))
    try:
        data = encode(message)
    except ValueError:  # a character in pieces that do not meet
        return encode(SMALL_TEXT)
    if rng.random() < 0.5:
        return data
    body = bytearray(data[:-4])
    for _ in range(rng.choice((1, 1, 2))):
        body[rng.randrange(71, len(body))] = rng.choice((0, 1, 255, 0x80, 0xC3, rng.randrange(256)))
    return signed(bytes(body))


def _mutated_manifest(rng: random.Random) -> bytes:
    text = bytearray(rng.choice(GOOD_MANIFESTS))
    for _ in range(rng.choice((1, 1, 2, 4))):
        _mutate(rng, text, PIECES, GOOD_MANIFESTS)
    return bytes(text)


def _rewritten_manifest(rng: random.Random) -> bytes:
    """Good JSON with anything in its fields, mostly written as manifests are."""
    document = json.loads(rng.choice(GOOD_MANIFESTS))
    names = list(document)
    for _ in range(rng.choice((0, 1, 1, 2))):
        document[rng.choice(names)] = rng.choice(VALUES) if rng.random() < 0.8 else rng.randrange(2**54)
    if rng.random() < 0.05:
        document[rng.choice(("reward", "", "Run", "peer "))] = rng.choice(VALUES)
    if rng.random() < 0.05:
        del document[rng.choice(names)]
    plain = rng.random() < 0.9
    text = json.dumps(document, sort_keys=plain, separators=(",", ":") if plain else None)
    return (text + rng.choice(("\n", " ")) if rng.random() < 0.05 else text).encode("ascii")


def _digit_changed(rng: random.Random) -> bytes:
    """A digit of a good manifest replaced: another good one, most often."""
    text = bytearray(rng.choice(GOOD_MANIFESTS))
    places = [at for at, byte in enumerate(text) if 48 <= byte <= 57]
    text[rng.choice(places)] = rng.choice(b"0123456789abcdef-")
    return bytes(text)


def _crowded_message(rng: random.Random) -> bytes:
    """Very many rollouts of no tokens, the most memory for the fewest bytes; some promise more than there are."""
    n, count = rng.choice(((1, 65_535), (5_000, 1), (300, 100), (20_000, 0), (4, 4), (3, 4)))
    there = rng.choice((n * count, n * count, n * count - 1))
    body = GOOD_MESSAGES[3][:64] + struct.pack("<I", n) + b"ada"
    return signed(body + bytes(4 * n) + struct.pack("<H", count) * n + bytes(4 * max(there, 0)))


def _long_manifest(rng: random.Random) -> bytes:
    """As long as a manifest may be, or nearly so."""
    piece = rng.choice((b"[],", b"{},", b"1000,", b"1e5,", b'"\\u00e9",', b'{"a":1},', b"[[[[[1]]]]],", b'"a",'))
    head, _, tail = GOOD_MANIFESTS[0].partition(b"8,9")
    length = manifests.MAX_BYTES - len(head) - len(tail) - rng.choice((2, 100, 500_000))
    return head + piece * (length // len(piece)) + rng.choice((b"1", b"")) + tail


MESSAGE_WAYS = {
    _noise: 1000,
    _noise_after_a_good_start: 1000,
    _mutated_message: 6000,
    _field_changed: 6000,
    _rewritten_message: 6000,
    _rewritten_text: 3000,
    _crowded_message: 4,
}
MANIFEST_WAYS = {
    _noise: 1000,
    _mutated_manifest: 8000,
    _rewritten_manifest: 6000,
    _digit_changed: 3000,
    _long_manifest: 10,
}

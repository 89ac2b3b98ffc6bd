"""Manifests: golden bytes, the one way to write them, and bytes from people who wish us ill."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import peak_of

from ftis.config import FtisError
from ftis.swarm.identity import public_hex
from ftis.swarm.manifest import (
    CHUNK_BYTES,
    MAX_BYTES,
    Manifest,
    ManifestError,
    chunk_size,
    describe,
    parse,
    seal,
    signer,
    to_bytes,
)

RUN = "00112233445566778899aabbccddeeff"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SHA_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1

OFFER = describe(RUN, "ada", 7, 1, b"abc", (12, 57))
GOLDEN = (
    b'{"chunks":["' + SHA_OF_ABC.encode() + b'"],"incarnation":1,"items":[12,57],"peer":"ada","round":7,'
    b'"run":"00112233445566778899aabbccddeeff","size":3,"version":1}'
)
SEAL = bytes.fromhex(
    "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    "c4a37eacaa9f7a5aa8ac77ab7006fa280e50924197fabe2a047f84af283a4405"
    "13fa635f2086704bdd9207c9d2efa917e101f0f5d8e64273cff993e0ff732f0b"
)


DOCUMENT: dict[str, Any] = json.loads(GOLDEN)


def written(value: object) -> bytes:
    """As manifests are written, whatever the value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def changed(**changes: Any) -> bytes:
    return written(DOCUMENT | changes)


def replaced(old: bytes, new: bytes) -> bytes:
    assert GOLDEN.count(old) == 1
    return GOLDEN.replace(old, new)


def test_golden_bytes_and_signature() -> None:
    """Ed25519 has one signature for a key and a text; another context or text would have another."""
    assert issubclass(ManifestError, FtisError)
    assert to_bytes(OFFER) == GOLDEN
    assert parse(GOLDEN) == OFFER == Manifest(RUN, "ada", 7, 1, 3, (SHA_OF_ABC,), (12, 57))
    assert seal(KEY, GOLDEN) == SEAL
    assert SEAL[32:] == KEY.sign(b"ftis manifest 1\0" + GOLDEN)
    assert signer(GOLDEN, SEAL) == public_hex(KEY)


numbers = st.one_of(st.integers(0, 100), st.integers(0, 2**53))
manifests = st.builds(
    Manifest,
    run=st.binary(min_size=16, max_size=16).map(bytes.hex),
    peer=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True),
    round=numbers,
    incarnation=numbers,
    size=st.integers(4 * CHUNK_BYTES + 1, 5 * CHUNK_BYTES),
    chunks=st.lists(st.binary(min_size=32, max_size=32).map(bytes.hex), min_size=5, max_size=5).map(tuple),
    items=st.sets(numbers, max_size=8).map(sorted).map(tuple),
    milliseconds=numbers,
)


@given(manifests)
def test_round_trip(manifest: Manifest) -> None:
    data = to_bytes(manifest)
    assert parse(data) == manifest
    assert data.isascii()
    assert (b"milliseconds" in data) == (manifest.milliseconds > 0)


def test_the_chunks_cover_the_contents_exactly_whoever_offers_them() -> None:
    for size in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 700_000):
        contents = bytes(i % 251 for i in range(size))
        manifest = parse(to_bytes(describe(RUN, "ada", 0, 0, contents, ())))
        at = 0
        for index, expected in enumerate(manifest.chunks):
            length = chunk_size(manifest, index)
            assert 1 <= length <= CHUNK_BYTES
            assert hashlib.sha256(contents[at : at + length]).hexdigest() == expected
            at += length
        assert at == size == manifest.size
    assert describe(RUN, "bob", 8, 2, b"abc", (1,)).contents == OFFER.contents
    assert describe(RUN, "ada", 7, 1, b"abd", (12, 57)).contents != OFFER.contents
    assert describe(RUN, "ada", 7, 1, b"abc", (57, 12)) == OFFER


FAULTS = [
    (b"", "is not JSON"),
    (b"\xef\xbb\xbf" + GOLDEN, "is not JSON"),
    (GOLDEN.decode().encode("utf-16"), "is not JSON"),
    (GOLDEN + GOLDEN, "is not JSON"),
    (b"[" * 100_000 + b"]" * 100_000, "is not JSON"),
    (replaced(b'"size":3', b'"size":' + b"9" * 5000), "is not JSON"),
    (b"[]", "not a JSON object"),
    (GOLDEN + b" " * (MAX_BYTES + 1 - len(GOLDEN)), f"{MAX_BYTES + 1} bytes exceeds {MAX_BYTES}"),
    (changed(version=2), "version 2, this ftis reads version 1"),
    (changed(version="v" * 100_000), "manifest.version"),
    *((changed(run=run), "manifest.run") for run in (RUN[1:], RUN.upper(), RUN + "\n", 11)),
    *((changed(peer=name), "manifest.peer") for name in ("", "../ada", "*", "ada\n", "\ud800", "a" * 65, ["ada"])),
    *(
        (changed(**{field: wrong}), f"manifest.{field}")
        for field in ("version", "round", "incarnation", "size", "milliseconds")
        for wrong in (-1, 2**53 + 1, 10**3999, 7.0, 1e999, float("nan"), True, "7", None, [[7]])
    ),
    *((changed(chunks=wrong), "manifest.chunks is not a list") for wrong in ({"0": SHA_OF_ABC}, SHA_OF_ABC, None)),
    *((changed(chunks=[SHA_OF_ABC] * n), f"lists {n} chunks for 3 bytes") for n in (0, 2)),
    *((changed(size=n), f"lists 1 chunks for {n} bytes") for n in (0, CHUNK_BYTES + 1, 10**10, 2**53)),
    *((changed(chunks=[one]), "not a SHA-256") for one in (SHA_OF_ABC[1:], SHA_OF_ABC.upper(), 0, [SHA_OF_ABC])),
    (changed(items=None), "manifest.items is not a list"),
    *((changed(items=[12, one]), "manifest.items holds") for one in (-1, True, 12.0, 2**53 + 1, [12])),
    *((changed(items=items), "ascending") for items in ([12, 12], [57, 12])),
    *((written({k: v for k, v in DOCUMENT.items() if k != name}), f"manifest.{name}") for name in DOCUMENT),
    *((changed(**more), "not written canonically") for more in ({"reward": 1}, {"milliseconds": 0})),
    (replaced(b'"round":7', b'"round":-0'), "not written canonically"),
    (replaced(b'"round":7', b'"round": 7'), "not written canonically"),
    (GOLDEN + b"\n", "not written canonically"),
    (json.dumps(dict(reversed(DOCUMENT.items())), separators=(",", ":")).encode(), "not written canonically"),
    (replaced(b'"round":7', b'"round":6,"round":7'), "not written canonically"),
    (replaced(b'"ada"', b'"\\u0061da"'), "not written canonically"),
]


def test_a_fault_is_refused_by_what_it_is() -> None:
    for data, says in FAULTS:
        with pytest.raises(ManifestError) as caught:
            parse(data)
        text = str(caught.value)
        assert says in text
        assert len(text) < 200
        assert text.isprintable()
    edge = describe(RUN, "ada", 2**53, 2**53, b"", (0, 2**53))
    assert parse(to_bytes(edge)) == edge, "numbers up to 2^53"


def test_truncations_garbage_and_flipped_bits_are_refused_or_another_manifest_and_never_the_signed_one() -> None:
    assert not any(refused_or_canonical(GOLDEN[:stop]) for stop in range(len(GOLDEN)))
    for garbage in (b"\0", b" ", b"}", b",", b"{}"):
        assert not refused_or_canonical(GOLDEN + garbage)
        assert not refused_or_canonical(garbage + GOLDEN)
    for at in range(len(GOLDEN) * 8):
        flipped = bytearray(GOLDEN)
        flipped[at // 8] ^= 1 << at % 8
        refused_or_canonical(bytes(flipped))
        assert signer(bytes(flipped), SEAL) is None, at


def test_a_signature_is_of_one_key_one_text_and_for_manifests_only() -> None:
    other, public = Ed25519PrivateKey.from_private_bytes(bytes(32)), SEAL[:32]
    assert signer(GOLDEN, seal(other, GOLDEN)) == public_hex(other)
    for wrong in (seal(other, GOLDEN)[:32] + SEAL[32:], public + seal(other, GOLDEN)[32:], public, b""):
        assert signer(GOLDEN, wrong) is None
    assert signer(GOLDEN, public + KEY.sign(GOLDEN)) is None, "of the same bytes, for another purpose"
    assert signer(GOLDEN[1:], SEAL) is signer(b"", SEAL) is None


def refused_or_canonical(data: bytes) -> bool:
    try:
        manifest = parse(data)
    except ManifestError:
        return False
    assert to_bytes(manifest) == data
    assert sum(chunk_size(manifest, index) for index in range(len(manifest.chunks))) == manifest.size
    return True


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(SHA_OF_ABC), numbers),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode), json_values.map(written)))
@settings(max_examples=500, deadline=None)
def test_any_bytes_and_any_json_are_refused(data: bytes) -> None:
    assert not refused_or_canonical(data)


@given(st.sampled_from(sorted(DOCUMENT)), json_values)
@settings(max_examples=400, deadline=None)
def test_any_value_in_any_field_is_refused_or_canonical(field: str, value: object) -> None:
    refused_or_canonical(changed(**{field: value}))


def test_what_is_refused_takes_little_memory() -> None:
    def peak_of_refusing(data: bytes) -> int:
        found = list[bool]()
        peak = peak_of(lambda: found.append(refused_or_canonical(data)))
        assert found == [False]
        return peak

    for size in (10**10, 2**53):
        assert peak_of_refusing(changed(size=size)) < 100_000
    assert peak_of_refusing(b"[" * (MAX_BYTES + 1)) < 10_000, "not even read"
    for piece in (b"[],", b"{},", b"1000,", b"1e5,", b'"\\u00e9",', b'{"a":1},', b'[[[[[["a"]]]]]],'):
        head, tail = replaced(b"[12,57]", b"[|]").split(b"|")
        data = head + (piece * (MAX_BYTES // len(piece)))[: MAX_BYTES - len(head) - len(tail) - 4]
        data = data[: data.rindex(b",")] + tail
        json.loads(data)  # nothing wrong with it as JSON
        assert peak_of_refusing(data) < 100 * MAX_BYTES


def test_the_largest_manifest_has_room_for_what_the_module_says() -> None:
    many = to_bytes(Manifest(RUN, "a" * 64, 2**53, 2**53, 3, (SHA_OF_ABC,), tuple(range(100_000))))
    long = to_bytes(Manifest(RUN, "a" * 64, 2**53, 2**53, 3 * 10**9, (SHA_OF_ABC,) * 11_445, ()))
    for data in (many, long):
        assert len(data) <= MAX_BYTES
        assert refused_or_canonical(data)

"""A manifest: the description of a round's message that a peer signs; and the message, put together from its chunks.

A manifest is canonical JSON (sorted keys, no spaces, ASCII), signed as a whole::

    {"chunks": ["<sha256 of each 256 KiB>", …], "incarnation": 1, "items": [12, 57], "peer": "small",
     "round": 7, "run": "<32 hex digits>", "size": 40960, "version": 1}

If shares go by speed, it also has ``milliseconds`` (:mod:`ftis.swarm.shares`), from its sender's second round on.
The digests bind the chunks, so any peer may hand them over. A signature covers ``b"ftis manifest 1\\0"`` and the
manifest's bytes. There is one way to write a manifest; anything else is refused. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.config import PEER_NAME, FtisError
from ftis.swarm.facts import canonical
from ftis.swarm.identity import verify

VERSION = 1
CHUNK_BYTES = 256 * 1024
MAX_BYTES = 1024 * 1024
"""The most bytes of a manifest: enough for 100,000 items or 3 GB of contents."""
BAD_ANSWERS = 3
"""An offer counts as spoiled once so many questions for one chunk were answered by wrong bytes alone."""
_CONTEXT = b"ftis manifest 1\0"
_DIGEST, _RUN = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


class ManifestError(FtisError):
    """The bytes are not a manifest."""


@dataclass(frozen=True)
class Manifest:
    """One peer's offer for one round.

    Attributes:
        incarnation: the number of the peer's starts. A restarted peer has a higher one, and may offer other bytes.
        size: bytes of the message.
        chunks: SHA-256 of each :data:`CHUNK_BYTES` of the message; the last chunk may be shorter.
        items: the prompts of the message's groups, ascending.
        milliseconds: the time of a round with an equal share of the prompts; 0 is left out.
    """

    run: str
    peer: str
    round: int
    incarnation: int
    size: int
    chunks: tuple[str, ...]
    items: tuple[int, ...]
    milliseconds: int = 0

    @property
    def contents(self) -> tuple[int, tuple[str, ...]]:
        """The identity of the offered bytes: equal for equal bytes of any peer."""
        return self.size, self.chunks


def describe(
    run: str, peer: str, round: int, incarnation: int, data: bytes, items: tuple[int, ...], milliseconds: int = 0
) -> Manifest:
    """The manifest of the message ``data``, with groups for the prompts ``items``."""
    digests = tuple(digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
    return Manifest(run, peer, round, incarnation, len(data), digests, tuple(sorted(items)), milliseconds)


def digest(chunk: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(chunk).hexdigest()


def chunk_size(manifest: Manifest, index: int) -> int:
    """Bytes of chunk ``index``."""
    return min(CHUNK_BYTES, manifest.size - index * CHUNK_BYTES)


def to_bytes(manifest: Manifest) -> bytes:
    """``manifest`` in its only written form."""
    written = {key: value for key, value in vars(manifest).items() if key != "milliseconds" or value}
    return canonical({**written, "version": VERSION})


def seal(key: Ed25519PrivateKey, data: bytes) -> bytes:
    """The public key (32 bytes) and its signature of the manifest ``data`` (64 bytes), which travel beside it."""
    return key.public_key().public_bytes_raw() + key.sign(_CONTEXT + data)


def signer(data: bytes, sealed: bytes) -> str | None:
    """The public key (64 hex digits) in a :func:`seal`; None if it has not signed the manifest ``data``."""
    public = sealed[:32].hex()
    return public if verify(public, _CONTEXT + data, sealed[32:]) else None


def parse(data: bytes) -> Manifest:
    """The manifest in ``data``.

    Raises:
        ManifestError: the bytes are not a manifest in its only written form.
    """
    if len(data) > MAX_BYTES:
        raise ManifestError(f"manifest of {len(data)} bytes exceeds {MAX_BYTES}")
    try:
        document = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        raise ManifestError("manifest is not JSON") from None
    if not isinstance(document, dict):
        raise ManifestError("manifest is not a JSON object")
    if (version := _number(document, "version")) != VERSION:
        raise ManifestError(f"manifest of version {version}, this ftis reads version {VERSION}: install the same")
    manifest = Manifest(
        run=_text(document, "run", _RUN),
        peer=_text(document, "peer", PEER_NAME),
        round=_number(document, "round"),
        incarnation=_number(document, "incarnation"),
        size=_number(document, "size"),
        chunks=tuple(_list(document, "chunks")),
        items=tuple(_list(document, "items")),
        milliseconds=_number(document, "milliseconds") if "milliseconds" in document else 0,
    )
    if not all(isinstance(chunk, str) and _DIGEST.fullmatch(chunk) for chunk in manifest.chunks):
        raise ManifestError("manifest.chunks holds something that is not a SHA-256")
    if not all(_is_number(item) for item in manifest.items):
        raise ManifestError("manifest.items holds something that is not a prompt's index")
    if any(item >= after for item, after in pairwise(manifest.items)):
        raise ManifestError("manifest.items is not in ascending order")
    if len(manifest.chunks) != -(-manifest.size // CHUNK_BYTES):
        raise ManifestError(f"manifest lists {len(manifest.chunks)} chunks for {manifest.size} bytes")
    if to_bytes(manifest) != data:
        raise ManifestError("manifest is not written canonically")
    return manifest


def _text(document: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ManifestError(f"manifest.{name} is not what it should be")
    return value


def _number(document: dict[str, Any], name: str) -> int:
    value = document.get(name)
    if not _is_number(value):
        raise ManifestError(f"manifest.{name} is not a number in 0 … 2^53")
    return int(value)  # type: ignore[arg-type]


def _list(document: dict[str, Any], name: str) -> list[Any]:
    value = document.get(name)
    if not isinstance(value, list):
        raise ManifestError(f"manifest.{name} is not a list")
    return value


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= 2**53


class Assembly:
    """The contents of ``offer``, as far as they have come.

    A chunk is known by its digest alone. Anybody may answer in a peer's name, so wrong answers do no harm, and a
    spoiled offer can still be completed.
    """

    def __init__(self, offer: Manifest) -> None:
        self.offer = offer
        self._found: dict[int, bytes] = {}
        self._junk: set[int] = set()
        self._bad: Counter[int] = Counter()

    def missing(self) -> list[int]:
        """The chunks still to be fetched, in order."""
        return [index for index in range(len(self.offer.chunks)) if index not in self._found]

    def hear(self, index: int, data: bytes) -> bool:
        """Take in an answer to the question for chunk ``index``. Returns whether it is the chunk."""
        if len(data) == chunk_size(self.offer, index) and digest(data) == self.offer.chunks[index]:
            self._found[index] = data
            return True
        self._junk.add(index)
        return False

    def over(self, index: int) -> bool:
        """The question for chunk ``index`` is over. Returns whether the chunk came."""
        came = index in self._found
        if index in self._junk and not came:
            self._bad[index] += 1
        self._junk.discard(index)
        return came

    @property
    def spoiled(self) -> bool:
        return max(self._bad.values(), default=0) >= BAD_ANSWERS

    def contents(self) -> bytes | None:
        """The whole message; None while a chunk is missing."""
        return None if self.missing() else b"".join(self._found[index] for index in range(len(self.offer.chunks)))

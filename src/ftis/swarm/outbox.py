"""A peer's own messages as files. A peer that was killed offers the same messages again.

``<directory>/<round>.ftis`` holds the message of a round, and ``prompts.json`` the number of prompts of each, if that
depends on the clock. ``keys.json`` holds the others' keys in an open swarm. One thread writes; others may read what is
on offer meanwhile.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.records.files import read_json, write_json, write_whole
from ftis.records.lines import RecordsError
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import public_hex

OUTBOX, KEYS = "outbox", "keys.json"
"""The directory beside a joined peer's records, and its file of others' keys."""


@dataclass
class Outbox:
    """The messages that one peer of one run has on offer.

    Attributes:
        keep: rounds for which a message stays on offer.
        incarnation: how often the peer has been started.
        signed: by round on offer, its manifest and the seal. An offer replaces the mapping, and changes none.
        first_keys: in an open swarm, the first key that used each name. A broken file counts as none.
    """

    directory: Path
    keep: int
    run: str
    peer: str
    incarnation: int
    key: Ed25519PrivateKey
    signed: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    _newest: tuple[int, bytes] = (-1, b"")

    def __post_init__(self) -> None:
        self.first_keys: dict[str, str] = {}
        with contextlib.suppress(RecordsError):
            self.first_keys = {name: str(key) for name, key in read_json(self.directory / KEYS).items()}
        self._kept = len(self.first_keys)

    def offer(self, round: int, data: bytes, items: tuple[int, ...] = (), milliseconds: int = 0) -> tuple[bytes, bytes]:
        """Put ``data`` on offer. Returns its manifest and the seal.

        The newest message stays in memory, since every other peer asks for it at once. Earlier ones are read from disk.
        """
        offer = manifests.describe(self.run, self.peer, round, self.incarnation, data, items, milliseconds)
        document = manifests.to_bytes(offer)
        signed = document, manifests.seal(self.key, document)
        oldest = round - self.keep
        self._newest = round, data
        self.signed = {old: kept for old, kept in self.signed.items() if old >= oldest} | {round: signed}
        for old in self._rounds():
            if old < oldest:
                self._path(old).unlink(missing_ok=True)
        return signed

    def write(self, round: int, data: bytes) -> None:
        """Keep a message for the next start of this peer."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(round), data, sync=False)

    def prompts(self, round: int, count: int) -> int:
        """Number of prompts to sample in a round: ``count``, or the number before a kill, which others may know.

        A file that a power cut left empty or broken counts as none.
        """
        path = self.directory / "prompts.json"
        known: dict[int, int] = {}
        with contextlib.suppress(RecordsError, ValueError, TypeError):
            known = {int(old): int(n) for old, n in read_json(path).items() if int(n) > 0}
        if round not in known:
            self.directory.mkdir(parents=True, exist_ok=True)
            known = {old: n for old, n in known.items() if round - self.keep <= old} | {round: count}
            write_json(path, known)
        return known[round]

    def keep_keys(self) -> None:
        """Keep :attr:`first_keys` for the next start of this peer, if there are more by now."""
        if len(self.first_keys) > self._kept:
            with contextlib.suppress(OSError):  # tried again with the next offer
                self.directory.mkdir(parents=True, exist_ok=True)
                write_json(self.directory / KEYS, self.first_keys)
                self._kept = len(self.first_keys)

    def offer_again(self, round: int) -> None:
        """After a restart, offer rounds before ``round`` again, and drop later ones, which may come out otherwise."""
        for partial in self.directory.glob(".*.partial-*"):  # of a process that was killed while it wrote
            partial.unlink(missing_ok=True)
        for old in self._rounds():
            if old < round:
                self.offer(old, self._path(old).read_bytes())
            else:
                self._path(old).unlink(missing_ok=True)

    def is_signed_elsewhere(self, document: bytes, seal: bytes) -> bool:
        """Whether an offer in this peer's name shows that its key signs at another place too.

        An offer of a later life than this one does. So does one of this life for a round that this peer has not
        reached, or has offered by another manifest. Offers of earlier lives show nothing: anybody can send them again.
        """
        if manifests.signer(document, seal) != public_hex(self.key):
            return False
        try:
            offer = manifests.parse(document)
        except manifests.ManifestError:
            return False
        is_later = offer.round > max(self.signed, default=-1)
        differs = is_later or self.signed.get(offer.round, (document, b""))[0] != document
        other = offer.incarnation > self.incarnation or (offer.incarnation == self.incarnation and differs)
        return (offer.run, offer.peer) == (self.run, self.peer) and other

    def chunk(self, round: int, index: int) -> bytes:
        """Chunk ``index`` of a message on offer; empty if there is none."""
        if round not in self.signed:
            return b""
        at = index * manifests.CHUNK_BYTES
        newest, data = self._newest
        if round == newest:
            return data[at : at + manifests.CHUNK_BYTES]
        try:
            with self._path(round).open("rb") as file:
                file.seek(at)
                return file.read(manifests.CHUNK_BYTES)
        except OSError:
            return b""

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.directory.glob("*.ftis") if path.stem.isdecimal())

    def _path(self, round: int) -> Path:
        return self.directory / f"{round:06d}.ftis"

"""What the other peers signed in the last rounds, as files, in case one of them has to be shown to others.

``<directory>/<peer>/<round>.signed`` holds a manifest, its seal and the contents, as a bundle does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftis.codec import CodecError, Reader
from ftis.records.files import write_whole
from ftis.swarm import manifest as manifests
from ftis.swarm.bundle import Signed
from ftis.swarm.manifest import Manifest

KEEP_ROUNDS = 32
"""Rounds of each peer that are kept."""
KEEP_BYTES = 64 * 2**20
"""Bytes of each peer that are kept."""


@dataclass(frozen=True)
class Inbox:
    """The last messages of each other peer. Nothing here locks: one peer's messages come one at a time."""

    directory: Path
    keep_rounds: int = KEEP_ROUNDS
    keep_bytes: int = KEEP_BYTES

    def keep(self, offer: Manifest, seal: bytes, contents: bytes) -> None:
        """Keep a message, and delete the oldest ones of its sender beyond the limits."""
        place = self.directory / offer.peer
        place.mkdir(parents=True, exist_ok=True)
        for partial in place.glob(".*.partial-*"):  # of a process that was killed while it wrote
            partial.unlink(missing_ok=True)
        signed = Signed(manifests.to_bytes(offer), seal, contents)
        write_whole(self._path(offer.peer, offer.round), signed.to_bytes(), sync=False)
        bytes_kept = 0
        for count, round in enumerate(sorted(self._rounds(offer.peer), reverse=True)):
            path = self._path(offer.peer, round)
            bytes_kept += path.stat().st_size
            if count >= self.keep_rounds or bytes_kept > self.keep_bytes:
                path.unlink(missing_ok=True)

    def messages(self, peer: str, last_round: int) -> list[Signed]:
        """The messages of ``peer`` up to ``last_round``, in the order of rounds, without files that are damaged."""
        found = []
        for round in sorted(self._rounds(peer)):
            if round <= last_round:
                data = self._path(peer, round).read_bytes()
                try:
                    found.append(Signed.read(Reader(data, 0, len(data))))
                except CodecError:
                    continue
        return found

    def _rounds(self, peer: str) -> list[int]:
        return [int(path.stem) for path in (self.directory / peer).glob("*.signed") if path.stem.isdecimal()]

    def _path(self, peer: str, round: int) -> Path:
        return self.directory / peer / f"{round:06d}.signed"

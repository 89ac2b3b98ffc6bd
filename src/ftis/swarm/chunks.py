"""Putting a message together from its chunks, whoever hands them over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ftis.swarm import manifest as manifests
from ftis.swarm.manifest import Manifest

BAD_ANSWERS = 3
"""An offer counts as spoiled once a chunk was answered so many times by other bytes alone than those signed for."""


class Assembly:
    """The contents of ``offer``, as far as they have come.

    A chunk counts by its digest only. Anyone may answer in a peer's name, so junk beside the truth does no harm, and
    a spoiled offer can still be completed.
    """

    def __init__(self, offer: Manifest) -> None:
        self.offer = offer
        self._found: dict[int, bytes] = {}
        self._bad: Counter[int] = Counter()

    def missing(self) -> list[int]:
        """The chunks still to be fetched, in order."""
        return [index for index in range(len(self.offer.chunks)) if index not in self._found]

    def fits(self, index: int, data: bytes) -> bool:
        """Whether ``data`` is chunk ``index``."""
        right_size = len(data) == manifests.chunk_size(self.offer, index)
        return right_size and manifests.digest(data) == self.offer.chunks[index]

    def take(self, index: int, answers: Iterable[bytes]) -> bool:
        """Whether one of ``answers`` is chunk ``index``. Answers behind the right one are not waited for."""
        junk = False
        for data in answers:
            if self.fits(index, data):
                self._found[index] = data
                return True
            junk = True
        if junk:
            self._bad[index] += 1
        return False

    @property
    def spoiled(self) -> bool:
        return max(self._bad.values(), default=0) >= BAD_ANSWERS

    def contents(self) -> bytes | None:
        """The whole message; None while a chunk is missing."""
        if self.missing():
            return None
        return b"".join(self._found[index] for index in range(len(self.offer.chunks)))

"""A message, put together from its chunks. Anybody may hand a chunk over."""

from __future__ import annotations

from collections import Counter

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
        self._junk: set[int] = set()
        self._bad: Counter[int] = Counter()

    def missing(self) -> list[int]:
        """The chunks still to be fetched, in order."""
        return [index for index in range(len(self.offer.chunks)) if index not in self._found]

    def hear(self, index: int, data: bytes) -> bool:
        """Take in an answer to the question for chunk ``index``. Returns whether it is the chunk."""
        right_size = len(data) == manifests.chunk_size(self.offer, index)
        if not (right_size and manifests.digest(data) == self.offer.chunks[index]):
            self._junk.add(index)
            return False
        self._found[index] = data
        return True

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
        if self.missing():
            return None
        return b"".join(self._found[index] for index in range(len(self.offer.chunks)))

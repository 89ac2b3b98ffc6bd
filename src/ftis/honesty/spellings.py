"""Numbers for the tokens of a sender with another tokenizer. Tokens that stand for the same bytes have one number."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftis.honesty.contexts import START
from ftis.rollouts import Rollout

OTHER: int = START - 1
"""The number of all spellings that have none of their own. Evidence gives them no probability."""
MOST_SPELLINGS = 2**17
"""The most that are known between two messages: about 13 MB for each sender."""
_DIGEST_BYTES = 8
_REPLACED = "\N{REPLACEMENT CHARACTER}".encode()


class Spellings:
    """Numbers for a sender's spellings, in the order in which they first occur.

    A spelling is known by 8 bytes of its BLAKE2 digest, so a long one takes no more room. Many tokens may share a
    spelling with U+FFFD, so all of these are :data:`OTHER`. Beyond :data:`MOST_SPELLINGS`, :meth:`shrink` forgets those
    that were last seen longest ago.

    Args:
        known: digests and their numbers; the last seen stand last.
    """

    def __init__(self, known: Iterable[tuple[int, int]] = ()) -> None:
        self._number: dict[int, int] = dict(known)

    @property
    def is_full(self) -> bool:
        return len(self._number) > MOST_SPELLINGS

    def shrink(self, needed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Keep the half that was seen last, and the numbers ``needed``. All get new numbers.

        Returns:
            the new number of each old one; −1 if its spelling is forgotten. Numbers from :data:`OTHER` on stay.
        """
        new_number = np.full(START + 2, -1)
        new_number[OTHER:] = np.arange(OTHER, len(new_number))
        recent, kept = len(self._number) - MOST_SPELLINGS // 2, set(needed.tolist())
        known = [one for place, one in enumerate(self._number.items()) if place >= recent or one[1] in kept]
        for number, (_, old) in enumerate(known):
            new_number[old] = number
        self._number = {digest: number for number, (digest, _) in enumerate(known)}
        return new_number

    def as_sent(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rollouts as their sender sampled them. A rollout that came as text has the numbers of the sender's tokens
        for ids, each a unit of its own. Others stay as they are."""
        return [self._numbered(rollout) for rollout in rollouts]

    def _numbered(self, rollout: Rollout) -> Rollout:
        if rollout.sent is None and rollout.unit is None:
            return rollout
        numbers = np.array([self._of(spelling) for spelling in _spellings(rollout)], dtype=np.int32)
        return Rollout(numbers, rollout.gen_logp if rollout.sent is None else rollout.sent.gen_logp_S)

    def _of(self, spelling: bytes) -> int:
        if _REPLACED in spelling:
            return OTHER
        digest = int.from_bytes(hashlib.blake2b(spelling, digest_size=_DIGEST_BYTES).digest(), "big")
        number = self._number.pop(digest, None)
        if number is None:
            number = min(len(self._number), OTHER)
        self._number[digest] = number
        return number

    def __deepcopy__(self, memo: object) -> Spellings:
        return Spellings(self._number.items())

    def state(self) -> dict[str, Any]:
        """The arguments with which another goes on from here."""
        return {"known": list(self._number.items())}


def _spellings(rollout: Rollout) -> Iterator[bytes]:
    """The bytes of each of the sender's tokens. An end is 0xFF, which no text holds, as often as its number says."""
    if rollout.sent is not None:
        ends = iter(rollout.sent.ends.tolist())
        for start, stop in itertools.pairwise([0, *np.cumsum(rollout.sent.size_S).tolist()]):
            yield rollout.sent.text[start:stop] if stop > start else b"\xff" * next(ends)
        return
    assert rollout.unit is not None  # over bytes, as it came
    for ids in np.split(rollout.completion_ids, np.flatnonzero(np.diff(rollout.unit)) + 1):
        yield bytes(ids.tolist()) if ids[0] < 256 else b"\xff" * (int(ids[0]) - 256)

"""Numbers for the tokens of a sender with another tokenizer. Tokens that stand for the same bytes have one number."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ftis.honesty.contexts import START
from ftis.rollouts import Rollout

OTHER: int = START - 1
"""The number of all spellings that have none of their own. Evidence gives them no probability."""
MOST_SPELLINGS = 2**17
"""The most that are known at a time: about 13 MB for each sender."""
_DIGEST_BYTES = 8
_REPLACED = "\N{REPLACEMENT CHARACTER}".encode()


class Spellings:
    """Numbers for a sender's spellings, in the order in which they first occur.

    A spelling is known by 8 bytes of its BLAKE2 digest, so a long one takes no more room. When
    :data:`MOST_SPELLINGS` are known, all are forgotten and the next one gets a new number. So no flood of spellings
    keeps later ones from being told apart. Those with U+FFFD, which many tokens may share, are :data:`OTHER`.

    Args:
        first: the number of the first that is known.
    """

    def __init__(self, known: Iterable[int] = (), first: int = 0) -> None:
        self._first = first
        self._number: dict[int, int] = {digest: number for number, digest in enumerate(known, first)}

    @property
    def used_up(self) -> bool:
        """Whether so few numbers are left that numbers and counts of them are to begin anew before the next message."""
        return self._first > OTHER // 2

    def as_sent(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rollouts as their sender sampled them: those that came as text over the numbers of their tokens, each a unit
        of its own. Others stay as they are."""
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
        number = self._number.get(digest)
        if number is None:
            if len(self._number) >= MOST_SPELLINGS:
                self._first, self._number = self._first + len(self._number), {}
            number = min(self._first + len(self._number), OTHER)
            self._number[digest] = number
        return number

    def state(self) -> dict[str, Any]:
        """The arguments with which another goes on from here: digests in the order of their numbers, and the first."""
        return {"known": list(self._number), "first": self._first}


def _spellings(rollout: Rollout) -> Iterator[bytes]:
    """The bytes of each of the sender's tokens. For its n-th end n times 0xFF, which no text holds."""
    if rollout.sent is not None:
        ends = iter(rollout.sent.ends.tolist())
        for start, stop in itertools.pairwise([0, *np.cumsum(rollout.sent.size_S).tolist()]):
            yield rollout.sent.text[start:stop] if stop > start else b"\xff" * next(ends)
        return
    assert rollout.unit is not None  # over bytes, as it came
    for ids in np.split(rollout.completion_ids, np.flatnonzero(np.diff(rollout.unit)) + 1):
        yield bytes(ids.tolist()) if ids[0] < 256 else b"\xff" * (int(ids[0]) - 256)

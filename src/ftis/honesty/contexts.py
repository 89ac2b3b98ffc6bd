"""Counts of a sender's earlier tokens by the tokens before them, and the next token's probabilities by these counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftis.config import FtisError
from ftis.rollouts import Ints

ID_BITS = 21
"""Bits of a token id in a key. Ids up to 2^21 − 2 are told apart; the last one stands before a completion's start."""
START = 2**ID_BITS - 1
MOST_KEYS = 2**14
"""A generation ends when it holds this many pairs of a context and a token, and has at most twice as many."""

Keys = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]


class Contexts:
    """Counts of what followed the last two tokens, and the last one, in all that one sender wrote before.

    With N counts of the past, c the context of two tokens and b that of one, ::

        q(a) = (N(c, a) + q₁(a)) / (N(c) + 1)        q₁(a) = N(b, a) / (N(b) + 1)

    Each is at most 1 when summed over all tokens a, and depends only on tokens before this one. The rest up to 1 is
    given to no token. Contexts do not reach beyond a completion's start.

    The counts are in two generations. When the younger is full it becomes the older, and the older is forgotten.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self.most_keys = most_keys
        self._young: list[dict[int, int]] = [{}, {}, {}, {}]
        self._old: list[dict[int, int]] = [{}, {}, {}, {}]

    def probabilities(self, completions: Sequence[Ints]) -> Probabilities:
        """q of each token of the completions, end to end, each given all before it. The counts take them in.

        Args:
            completions: token ids from 0 to 2^21 − 2, in the order in which they were sampled.
        """
        return np.concatenate([np.zeros(0), *(self._of_part(part) for part in self._parts(completions))])

    def _parts(self, completions: Sequence[Ints]) -> Iterator[list[Ints]]:
        """The completions in parts of at most ``most_keys`` tokens, so that no message takes more room than two."""
        part: list[Ints] = []
        for ids in completions:
            if part and sum(map(len, part)) + len(ids) > self.most_keys:
                yield part
                part = []
            part.append(ids)
        if part:
            yield part

    def _of_part(self, completions: Sequence[Ints]) -> Probabilities:
        if max(map(len, self._young)) >= self.most_keys:
            self._old, self._young = self._young, [{}, {}, {}, {}]
        counted = (self._count(table, keys) for table, keys in enumerate(_keys(completions)))
        pair, context, pair_1, context_1 = counted
        return (pair + pair_1 / (context_1 + 1)) / (context + 1)

    def _count(self, table: int, keys: Keys) -> npt.NDArray[np.int64]:
        """How often each key occurred before its place; then all of them are counted."""
        young, old = self._young[table], self._old[table]
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        first = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
        repeats = np.diff(np.r_[first, len(keys)])
        unique = in_order[first].tolist()
        known = [young.get(key, 0) for key in unique]
        before = np.array([count + old.get(key, 0) for key, count in zip(unique, known, strict=True)], dtype=np.int64)
        young.update(zip(unique, (np.array(known) + repeats).tolist(), strict=True))
        counts = np.empty(len(keys), dtype=np.int64)
        counts[order] = np.repeat(before - first, repeats) + np.arange(len(keys))
        return counts

    def state(self) -> Mapping[str, Any]:
        """The counts as a JSON object."""
        return {
            name: [[list(table), list(table.values())] for table in tables]
            for name, tables in (("young", self._young), ("old", self._old))
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self._young, self._old = (
            [dict(zip(keys, counts, strict=True)) for keys, counts in state[name]] for name in ("young", "old")
        )


def _keys(completions: Sequence[Ints]) -> tuple[Keys, Keys, Keys, Keys]:
    """Of each token: (two before, it), (two before), (one before, it), (one before), as numbers."""
    starts = np.full(2, START, dtype=np.int64)
    padded = np.concatenate([np.zeros(0, np.int64), *(part for ids in completions for part in (starts, ids))])
    inside = np.concatenate([np.zeros(0, bool), *(np.r_[False, False, np.ones(len(ids), bool)] for ids in completions)])
    place = np.flatnonzero(inside)
    if (highest := int(padded[place].max(initial=0))) >= START:
        raise FtisError(
            f'token id {highest}: the honesty test tells ids below {START} apart: set honesty.action = "off"'
        )
    token, last, before = padded[place], padded[place - 1], padded[place - 2]
    context = before << ID_BITS | last
    return context << ID_BITS | token, context, last << ID_BITS | token, last

"""Counts of a sender's earlier tokens, and the next token's probabilities by these counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
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
Counts = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]


class Past:
    """Two ways to predict a sender's next token from its earlier ones; each gives at most 1 to all tokens.

    - ``written``: what followed the last two tokens, and the last one, in everything before;
    - ``raised``: the same in earlier messages' completions with Â > 0.

    A sender can spoil the first with any text. Only completions that a learner makes more probable enter the second.
    """

    def __init__(self) -> None:
        self._counts = {"written": Contexts(), "raised": Contexts()}

    def probabilities(self, completions: Sequence[Ints]) -> Probabilities:
        """q of each token of the completions, end to end, by each way: [T, 2]. ``written`` takes the tokens in."""
        written, raised = self._counts.values()
        return np.stack([written.probabilities(completions), raised.known(completions)], axis=1)

    def add_raised(self, completions: Sequence[Ints]) -> None:
        """Take in a message's completions with Â > 0."""
        self._counts["raised"].add(completions)

    def renumber(self, new_number: Keys) -> None:
        """Give each token its new number, [old number]. Counts of those without one, −1, are forgotten."""
        for counts in self._counts.values():
            counts.renumber(new_number)

    def state(self) -> Mapping[str, Any]:
        """The counts as a JSON object."""
        return {name: counts.state() for name, counts in self._counts.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        for name, counts in self._counts.items():
            counts.restore(state[name])


class Contexts:
    """Counts of what followed the last two tokens, and the last one, in what one sender wrote before.

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

    def add(self, completions: Sequence[Ints]) -> None:
        """Count the tokens of the completions."""
        for part in self._parts(completions):
            self._make_room()
            for young, keys in zip(self._young, _keys(part), strict=True):
                unique, repeats = np.unique(keys, return_counts=True)
                keys_U = unique.tolist()
                young.update(zip(keys_U, (_counts(young, keys_U) + repeats).tolist(), strict=True))

    def _parts(self, completions: Sequence[Ints]) -> Iterator[list[Ints]]:
        """The completions in parts of at most ``most_keys`` tokens, so that no message takes more room than two."""
        part: list[Ints] = []
        tokens = 0
        for ids in completions:
            if part and tokens + len(ids) > self.most_keys:
                yield part
                part, tokens = [], 0
            part.append(ids)
            tokens += len(ids)
        if part:
            yield part

    def known(self, completions: Sequence[Ints]) -> Probabilities:
        """q of each token of the completions, end to end, by earlier counts. Nothing is counted."""
        return _combined(*(self._known(table, keys) for table, keys in enumerate(_keys(completions))))

    def _of_part(self, completions: Sequence[Ints]) -> Probabilities:
        self._make_room()
        return _combined(*(self._count(table, keys) for table, keys in enumerate(_keys(completions))))

    def _make_room(self) -> None:
        if max(map(len, self._young)) >= self.most_keys:
            self._old, self._young = self._young, [{}, {}, {}, {}]

    def _known(self, table: int, keys: Keys) -> Counts:
        """How often each key was counted."""
        unique, place = np.unique(keys, return_inverse=True)
        keys_U = unique.tolist()
        return (_counts(self._young[table], keys_U) + _counts(self._old[table], keys_U))[place]

    def _count(self, table: int, keys: Keys) -> Counts:
        """How often each key occurred before its place; then all of them are counted."""
        young, old = self._young[table], self._old[table]
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        first = np.flatnonzero(np.diff(in_order, prepend=-1))
        repeats = np.diff(first, append=len(keys))
        unique = in_order[first].tolist()
        known = _counts(young, unique)
        before = known + _counts(old, unique)
        young.update(zip(unique, (known + repeats).tolist(), strict=True))
        counts = np.empty(len(keys), dtype=np.int64)
        counts[order] = np.repeat(before - first, repeats) + np.arange(len(keys))
        return counts

    def renumber(self, new_number: Keys) -> None:
        """As :meth:`Past.renumber`."""
        for tables in (self._young, self._old):
            for place, table in enumerate(tables):
                keys = np.fromiter(table, np.int64, len(table))
                keys, kept = renumbered(keys, new_number, (3, 2, 2, 1)[place])
                counts = np.fromiter(table.values(), np.int64, len(table))
                tables[place] = dict(zip(keys[kept].tolist(), counts[kept].tolist(), strict=True))

    def __deepcopy__(self, memo: object) -> Contexts:
        """A copy in milliseconds; the general one takes a tenth of a second."""
        other = Contexts(self.most_keys)
        other._young, other._old = ([dict(table) for table in tables] for tables in (self._young, self._old))
        return other

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


def renumbered(keys: Keys, new_number: Keys, tokens: int) -> tuple[Keys, npt.NDArray[np.bool_]]:
    """Keys of so many tokens, with their new numbers, and whether all of their tokens have one."""
    parts = [new_number[(keys >> place * ID_BITS) & (START if place < tokens - 1 else -1)] for place in range(tokens)]
    there: npt.NDArray[np.bool_] = np.all([part >= 0 for part in parts], axis=0)
    return sum((part << place * ID_BITS for place, part in enumerate(parts)), np.zeros_like(keys)), there


def _counts(of: Mapping[int, int], keys: Sequence[int]) -> Counts:
    return np.fromiter(map(of.get, keys, repeat(0)), np.int64, len(keys)) if of else np.zeros(len(keys), np.int64)


def _combined(pair: Counts, context: Counts, pair_1: Counts, context_1: Counts) -> Probabilities:
    q: Probabilities = (pair + pair_1 / (context_1 + 1)) / (context + 1)
    return q


def _keys(completions: Sequence[Ints]) -> tuple[Keys, ...]:
    """Of each token: its context of two tokens with it and without, and that of one token, as numbers."""
    length_N = np.fromiter(map(len, completions), np.int64)
    place_T = np.arange(length_N.sum()) + np.repeat(np.arange(2, 2 * len(length_N) + 1, 2), length_N)
    padded = np.full(len(place_T) + 2 * len(length_N), START, dtype=np.int64)
    padded[place_T] = token = np.concatenate(completions, dtype=np.int64)
    if (highest := int(token.max(initial=0))) >= START:
        raise FtisError(
            f'token id {highest}: the honesty test tells ids below {START} apart: set honesty.action = "off"'
        )
    one = padded[place_T - 1]
    two = padded[place_T - 2] << ID_BITS | one
    return two << ID_BITS | token, two, one << ID_BITS | token, one

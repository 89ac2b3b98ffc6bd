"""Counts of a sender's earlier tokens, and the next token's probabilities by these counts.

Axes: ``_U`` distinct keys, ``_C`` contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ftis.config import FtisError
from ftis.rollouts import Ints

ID_BITS = 21
"""Bits of a token id in a key. Ids up to 2^21 − 2 are told apart; :data:`START` stands before a completion."""
START = 2**ID_BITS - 1
MOST_KEYS = 2**14
"""A generation ends when it holds this many pairs of a context and a token, and has at most twice as many."""

Keys = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]


class Table(NamedTuple):
    """The keys of one kind for the T tokens of some completions.

    Attributes:
        keys: distinct, ascending.
        number_T: the place in ``keys`` of each token's key.
        repeats_U: how often each of ``keys`` occurs.
    """

    keys: list[int]
    number_T: Counts
    repeats_U: Counts

    @classmethod
    def of(cls, keys_T: Keys) -> Table:
        keys, number_T, repeats_U = np.unique(keys_T, return_inverse=True, return_counts=True)
        return cls(keys.tolist(), number_T, repeats_U)

    def contexts(self) -> Table:
        """The table of the contexts: each key without its last token."""
        context_U = np.array(self.keys, np.int64) >> ID_BITS
        is_first_U = np.diff(context_U, prepend=-1) > 0
        first_C, number_U = np.flatnonzero(is_first_U), is_first_U.cumsum() - 1
        return Table(context_U[first_C].tolist(), number_U[self.number_T], np.add.reduceat(self.repeats_U, first_C))

    def before(self) -> Counts:
        """The number of earlier tokens with each token's key: [T]."""
        place_T = np.arange(len(self.number_T))
        in_order = np.sort(self.number_T << 32 | place_T) & 0xFFFFFFFF  # a stable `argsort` takes five times as long
        before_T = np.empty_like(place_T)
        before_T[in_order] = place_T - np.repeat(self.repeats_U.cumsum() - self.repeats_U, self.repeats_U)
        return before_T


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
        parts = [np.zeros((0, 2))]
        for tables in written.parts(completions):
            parts.append(np.stack([written.probabilities(tables), raised.known(tables)], axis=1))
        return np.concatenate(parts)

    def add_raised(self, completions: Sequence[Ints]) -> None:
        """Take in a message's completions with Â > 0."""
        raised = self._counts["raised"]
        for tables in raised.parts(completions):
            raised.add(tables)

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

    Each sums to at most 1 over all tokens a, and depends on earlier tokens alone. No token gets the rest up to 1.
    Contexts do not reach beyond a completion's start.

    The counts are in two generations. When the younger is full it becomes the older, and the older is forgotten.
    """

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self.most_keys = most_keys
        self._young: list[dict[int, int]] = [{}, {}, {}, {}]
        self._old: list[dict[int, int]] = [{}, {}, {}, {}]

    def parts(self, completions: Sequence[Ints]) -> Iterator[list[Table]]:
        """The keys of completions, in parts of at most ``most_keys`` tokens, or of one longer completion.

        Args:
            completions: token ids from 0 to 2^21 − 2, in the order in which they were sampled.
        """
        part: list[Ints] = []
        tokens = 0
        for ids in completions:
            if part and tokens + len(ids) > self.most_keys:
                yield _tables(part)
                part, tokens = [], 0
            part.append(ids)
            tokens += len(ids)
        if part:
            yield _tables(part)

    def probabilities(self, tables: Sequence[Table]) -> Probabilities:
        """q of each token of a part, end to end, each given all before it. The counts take them in."""
        known = self.add(tables)
        return _combined(*(k_U[t.number_T] + t.before() for k_U, t in zip(known, tables, strict=True)))

    def known(self, tables: Sequence[Table]) -> Probabilities:
        """q of each token of a part, end to end, by earlier counts. Nothing is counted."""
        return _combined(*(k_U[t.number_T] for k_U, t in zip(self._known(tables), tables, strict=True)))

    def add(self, tables: Sequence[Table]) -> list[Counts]:
        """Count the tokens of a part. Returns how often each key was counted before."""
        if max(map(len, self._young)) >= self.most_keys:
            self._old, self._young = self._young, [{}, {}, {}, {}]
        known = []
        for young, old, table in zip(self._young, self._old, tables, strict=True):
            known_U = _counts(young, table.keys)
            young.update(zip(table.keys, (known_U + table.repeats_U).tolist(), strict=True))
            known.append(known_U + _counts(old, table.keys))
        return known

    def _known(self, tables: Sequence[Table]) -> list[Counts]:
        pairs = zip(self._young, self._old, tables, strict=True)
        return [_counts(young, table.keys) + _counts(old, table.keys) for young, old, table in pairs]

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
    """Keys of so many tokens each, by the tokens' new numbers, and whether all tokens of a key have one."""
    *later, first = (keys >> place * ID_BITS for place in range(tokens))  # the first may have one bit more
    parts = [*(new_number[shifted & START] for shifted in later), new_number[first]]
    there: npt.NDArray[np.bool_] = np.all([part >= 0 for part in parts], axis=0)
    return sum((part << place * ID_BITS for place, part in enumerate(parts)), np.zeros_like(keys)), there


def _counts(counts: Mapping[int, int], keys: Sequence[int]) -> Counts:
    found = map(counts.get, keys, repeat(0))
    return np.fromiter(found, np.int64, len(keys)) if counts else np.zeros(len(keys), np.int64)


def _tables(completions: Sequence[Ints]) -> list[Table]:
    """Tables of each token after two tokens, of these two alone, of the token after one, and of this one alone."""
    two, one = (Table.of(keys) for keys in _keys(completions))
    return [two, two.contexts(), one, one.contexts()]


def _combined(pair: Counts, context: Counts, pair_1: Counts, context_1: Counts) -> Probabilities:
    q: Probabilities = (pair + pair_1 / (context_1 + 1)) / (context + 1)
    return q


def _keys(completions: Sequence[Ints]) -> tuple[Keys, Keys]:
    """For each token, as numbers: the two tokens before it with it, and the one before it with it."""
    length_N = np.fromiter(map(len, completions), np.int64)
    place_T = np.arange(length_N.sum()) + np.repeat(np.arange(2, 2 * len(length_N) + 1, 2), length_N)
    padded = np.full(len(place_T) + 2 * len(length_N), START, dtype=np.int64)
    padded[place_T] = token = np.concatenate(completions, dtype=np.int64)
    if (highest := int(token.max(initial=0))) >= START:
        raise FtisError(
            f'token id {highest}: the honesty test handles only ids below {START}: set honesty.action = "off"'
        )
    one = padded[place_T - 1]
    two = padded[place_T - 2] << ID_BITS | one
    return two << ID_BITS | token, one << ID_BITS | token

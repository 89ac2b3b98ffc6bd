"""The n-grams of a round's completions: which stand where, and in how many groups. No torch.

Axes: ``_X`` entries, ``_V`` distinct n-grams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ftis.rollouts import Bools, Ints, Rows

Floats64 = npt.NDArray[np.float64]
NGram = tuple[int, ...]

SIZES = (1, 2, 4, 8)
"""Tokens of an n-gram: each size is twice the one before, so some n-gram covers half of a text or more."""


def parts_of(ids: NGram) -> list[NGram]:
    """The shorter n-grams inside an n-gram."""
    return [ids[at : at + size] for size in SIZES if size < len(ids) for at in range(len(ids) - size + 1)]


class Grams(NamedTuple):
    """The n-grams of some rows, an entry (axis X) for each n-gram of a row, at its first place there.

    Attributes:
        number_X: equal for equal n-grams, ascending.
        row_X: the row.
        at_X, size_X: its place in ``ids``, and its tokens.
        ids, length_N: the rows end to end, and their lengths.
    """

    number_X: Rows
    row_X: Rows
    at_X: Rows
    size_X: Rows
    ids: Ints
    length_N: Rows

    @classmethod
    def of(cls, rows: Sequence[Ints]) -> Grams:
        ids, length_N = np.concatenate(rows), np.array([len(row) for row in rows])
        row_T = np.repeat(np.arange(len(rows)), length_N)
        number_T, count, parts = ids.astype(np.int64), 0, list[Rows]()
        for size in (size for size in SIZES if size <= len(ids)):
            if half := size // 2:  # an n-gram's halves have numbers already, of 32 bits at most
                number_T = number_T[:-half] << 32 | number_T[half:]
            number_T = np.unique(number_T, return_inverse=True)[1]
            inside_T = row_T[: len(number_T)] == row_T[size - 1 :]
            entry_X = np.sort(number_T[inside_T] << 32 | np.flatnonzero(inside_T))
            number_X, at_X = count + (entry_X >> 32), entry_X & 0xFFFFFFFF
            row_X = row_T[at_X]
            first_X = (np.diff(number_X, prepend=-1) != 0) | (np.diff(row_X, prepend=-1) != 0)
            parts.append(np.stack([number_X, row_X, at_X, np.full(len(at_X), size)])[:, first_X])
            count += int(number_T.max()) + 1
        number_X, row_X, at_X, size_X = np.concatenate(parts, axis=1)
        return cls(number_X, row_X, at_X, size_X, ids, length_N)

    def sums(self, value_N: npt.NDArray[Any]) -> Floats64:
        """For each number, the sum of ``value_N`` over the rows among the first N that hold it."""
        inside = self.row_X < len(value_N)
        sums = np.bincount(self.number_X[inside], value_N[self.row_X[inside]], int(self.number_X[-1]) + 1)
        return sums.astype(np.float64)

    def groups(self, of_N: Bools, item_N: Rows) -> Rows:
        """For each number, in how many items a row of the mask holds it."""
        inside = self.row_X < len(of_N)
        number, row = self.number_X[inside], self.row_X[inside]
        place_N = np.unique(item_N, return_inverse=True)[1]
        pairs = np.sort(number[of_N[row]] << 32 | place_N[row[of_N[row]]])  # faster than `np.unique`
        return np.bincount(pairs[np.diff(pairs, prepend=-1) != 0] >> 32, minlength=int(self.number_X[-1]) + 1)

    def holds(self, number_T: Sequence[int], n: int) -> Bools:
        """Whether each of the first n rows (columns) holds each of some n-grams (rows)."""
        place_V = np.full(int(self.number_X[-1]) + 1, -1)
        place_V[list(number_T)] = np.arange(len(number_T))
        place_X = place_V[self.number_X]
        there = (place_X >= 0) & (self.row_X < n)
        holds_TN = np.zeros((len(number_T), n), np.bool_)
        holds_TN[place_X[there], self.row_X[there]] = True
        return holds_TN

    def ids_of(self, number_V: Rows) -> Iterator[NGram]:
        """The tokens of n-grams, in their order."""
        entry_V = np.searchsorted(self.number_X, number_V)
        ids = self.ids.tolist()
        for at, size in zip(self.at_X[entry_V].tolist(), self.size_X[entry_V].tolist(), strict=True):
            yield tuple(ids[at : at + size])

    def whole_rows(self, first: int) -> list[int]:
        """The numbers of the rows from ``first`` on, each an n-gram as a whole."""
        whole = (self.row_X >= first) & (self.size_X == self.length_N[self.row_X])
        return [int(number) for number in self.number_X[whole][np.argsort(self.row_X[whole])]]

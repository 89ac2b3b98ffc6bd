"""The reader of a peer's files of JSON lines, whether finished or still being written.

A look takes the whole lines that were added since the last look; a finished file is read in one look. A line that was
not written to its end is left for the next look. A file that became shorter, or is another one under the same name, was
cut back by a resumed run, and is read again from its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from sys import intern
from typing import Any, Generic, TypeVar

from ftis.config import FtisError

LARGEST = 1 << 30
"""The most bytes of a file that is read whole."""

KNOWN_BY = 256
"""The most bytes before the place of the last look that tell whether a file is still the same."""

PART = 1 << 24
"""The bytes of a followed file that are read at a time. No run writes a longer line."""

Row = TypeVar("Row")
T = TypeVar("T")


class RecordsError(FtisError):
    """Records are absent, damaged, or larger than any run writes."""


def damaged(file: Path, error: object) -> RecordsError:
    """The error for a file with content that no run writes."""
    return RecordsError(f"{file} is damaged ({error}): restore it or run again")


def any_row(line: dict[str, Any]) -> dict[str, Any]:
    """Accept any line as it is."""
    return line


class Lines(Generic[Row]):
    """One file of JSON lines, as far as it was written when :meth:`refresh` last looked.

    Args:
        understand: makes a row from a line's object; ``KeyError``, ``TypeError`` and ``ValueError`` reject the line.
        most: follow the file, and keep about so many rows, at most twice as many: the last ones, and one in every so
            many before them. None keeps all rows.

    Attributes:
        rows: the rows in the file's order.
        thinned: whether some rows are missing from ``rows``.
        changed: the time when the file was last written, in seconds since the epoch; 0 without a file.
        damage: the first line that was rejected, with the reason; "" without one. ``rows`` leaves such lines out.
    """

    def __init__(self, path: Path, understand: Callable[[dict[str, Any]], Row], most: int | None = None) -> None:
        self.path, self._understand, self._most = path, understand, most
        self._forget()

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.thinned, self.changed, self.damage = False, 0.0, ""
        self._kept: list[tuple[int, Row]] = []
        self._file = self._read = self._lines = 0
        self._end = b""
        self._every = 1

    def whole(self) -> list[Row]:
        """All rows; none if there is no file.

        Raises:
            RecordsError: the file is damaged, or too large to be read whole.
        """
        self.refresh()
        if self.damage:
            raise damaged(self.path, self.damage)
        return self.rows

    def refresh(self) -> bool:
        """Read the lines that were added, and return whether anything is new. A missing file has no rows.

        Raises:
            RecordsError: a file that is not followed cannot be read, or is too large to be read whole.
        """
        try:
            stat = self.path.stat()
        except OSError:
            known, before = self._read > 0, self.changed
            self._forget()
            return known or before > 0
        if stat.st_ino != self._file:
            self._forget()
            self._file = stat.st_ino
        if stat.st_size == self._read:
            return False
        if self._most is None and stat.st_size > LARGEST:
            raise RecordsError(f"{self.path} has {stat.st_size:,} bytes, more than the {LARGEST:,} that are read whole")
        read, lines = self._read, list[tuple[int, bytes]]()
        try:
            with self.path.open("rb") as file:
                file.seek(self._read - len(self._end))
                if file.read(len(self._end)) != self._end:  # another file may get the inode of a deleted one
                    self._forget()
                    self._file, read = stat.st_ino, -1
                    file.seek(0)
                size = LARGEST if self._most is None else PART
                data = file.read(size)
                while end := data.rfind(b"\n") + 1:
                    added = data[: end - 1].split(b"\n")
                    lines = self._thin([*lines, *enumerate(added, self._lines + 1)])
                    self._lines += len(added)
                    self._read += end
                    self._end = data[max(0, end - KNOWN_BY) : end]
                    file.seek(self._read)
                    data = file.read(size)
        except OSError as error:
            if self._most is None:
                raise RecordsError(f"{self.path} cannot be read ({error})") from None
            self._forget()
            return False  # the file was replaced just now: the next look finds the new one
        self._take(lines)
        self.changed = stat.st_mtime
        return self._read != read

    def _take(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Make rows of lines with these numbers."""
        for number, line in lines:
            try:
                self._kept.append((number, self._understand(_object(line))))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                self.damage = self.damage or f"line {number:,}: {type(error).__name__}: {error}"
        self._kept = self._thin(self._kept)
        self.rows = [row for _, row in self._kept]

    def _thin(self, numbered: list[tuple[int, T]]) -> list[tuple[int, T]]:
        """Thin too many lines or rows of a followed file to the last ones and one in ``self._every`` of the others."""
        if self._most is None or len(numbered) <= 2 * self._most:
            return numbered
        self.thinned = True
        older, recent = numbered[: -self._most // 2], numbered[-self._most // 2 :]
        while len(older := [one for one in older if (one[0] - 1) % self._every == 0]) > self._most:
            self._every *= 2
        return older + recent


def _object(line: bytes) -> dict[str, Any]:
    """A line's object. Its keys are interned, since all rows share the same hundreds of keys."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("no object")
    return {intern(key): value for key, value in row.items()}

"""The one reader of files of JSON lines, whether finished or still being written.

A look takes the whole lines that were added since the last look; a finished file is read in one look. A line that was
not written to its end is left for the next look. A file that became shorter, or is another one under the same name, was
cut back by a resumed run, and is read again from its beginning.

    RecordsError: records are absent, damaged, or larger than any run writes
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import intern
from typing import IO, Any, Generic, TypeVar

from ftis.config import FtisError

LARGEST = 1 << 30
"""The most bytes of a file that is read whole."""

OPENING = 24_000_000
"""The most bytes of a followed file that are read when it is opened, half of them from its end."""

MOST_ROWS = 512
"""Rows that are kept of a followed file; beyond twice as many, every other one of the older rows is dropped."""

BLOCK = 1 << 16

Row = TypeVar("Row")


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
        opening: follow the file, and read at most so many bytes of it when it is opened; None reads all of it.
        most_rows: rows that are kept of a followed file.

    Attributes:
        rows: the rows in the file's order. A long followed file has only its last rows and some earlier ones.
        thinned: whether some rows are missing from ``rows``.
        changed: the time when the file was last written, in seconds since the epoch; 0 without a file.
        damage: the first line that was rejected, with the reason; "" without one. ``rows`` leaves such lines out.
    """

    def __init__(
        self,
        path: Path,
        understand: Callable[[dict[str, Any]], Row],
        opening: int | None = None,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self.path, self._understand, self._most = path, understand, most_rows
        self._opening = None if opening is None else max(opening, 2 * BLOCK)
        self._forget()

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.thinned, self.changed, self.damage = False, 0.0, ""
        self._file = self._read = self._lines = 0

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
        if stat.st_ino != self._file or stat.st_size < self._read:
            self._forget()
            self._file = stat.st_ino
        if stat.st_size == self._read:
            return False
        if self._opening is None and stat.st_size > LARGEST:
            raise RecordsError(f"{self.path} has {stat.st_size:,} bytes, more than the {LARGEST:,} that are read whole")
        read = self._read
        try:
            with self.path.open("rb") as file:
                if self._opening is not None and stat.st_size - self._read > self._opening:
                    self._sample(file, stat.st_size, self._opening)
                file.seek(self._read)
                self._take(file.read(stat.st_size - self._read))
        except OSError as error:
            if self._opening is None:
                raise RecordsError(f"{self.path} cannot be read ({error})") from None
            return False  # the file was replaced just now: the next look finds the new one
        self.changed = stat.st_mtime
        if self._opening is not None:
            self._thin()
        return self._read != read

    def _sample(self, file: IO[bytes], size: int, opening: int) -> None:
        """Take rows from places at equal distances, and continue near the end of the file."""
        start, end = self._read, size - opening // 2
        places = min(self._most, max(8, opening // 2 // _length_of_a_line(file, end)))
        self.thinned = True
        for i in range(places):
            file.seek(start + (end - start) * i // places)
            if i or start:
                file.readline()  # the rest of a line
            if file.tell() < end and file.tell() >= self._read:
                self._take(file.readline())
                self._read = file.tell()
        file.seek(end)
        file.readline()
        self._read = file.tell()

    def _take(self, data: bytes) -> None:
        whole, newline, _ = data.rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.split(b"\n") if newline else ():
            self._lines += 1
            try:
                self.rows.append(self._understand(_object(line)))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                self.damage = self.damage or f"line {self._lines:,}: {type(error).__name__}: {error}"

    def _thin(self) -> None:
        if len(self.rows) > 2 * self._most:
            older, recent = self.rows[: -self._most // 2], self.rows[-self._most // 2 :]
            step = -(-len(older) // (self._most // 2))
            self.rows, self.thinned = older[::step] + recent, True


def last_row(path: Path) -> dict[str, Any] | None:
    """The object in the last whole line that holds one, however long the file is; None without such a line."""
    try:
        with path.open("rb") as file:
            for line in _backwards(file):
                try:
                    return _object(line)
                except (TypeError, ValueError, RecursionError):
                    continue
    except OSError:
        pass
    return None


def _backwards(file: IO[bytes]) -> Iterator[bytes]:
    """A file's whole lines, the last one first."""
    at, rest = file.seek(0, os.SEEK_END), b""
    torn = True
    while at:
        size = min(BLOCK, at)
        at -= size
        file.seek(at)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        for line in reversed(lines):
            if not torn:
                yield line
            torn = False
    if not torn:
        yield rest


def _length_of_a_line(file: IO[bytes], near: int) -> int:
    file.seek(near)
    file.readline()
    return max(1, len(file.readline()))


def _object(line: bytes) -> dict[str, Any]:
    """A line's object. Its keys are interned, since all rows share the same hundreds of keys."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("no object")
    return {intern(key): value for key, value in row.items()}

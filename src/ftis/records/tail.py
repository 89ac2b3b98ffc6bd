"""Files of JSON lines that somebody else is still writing: only what is new is read, and only so much of a long one.

A line that was not written to its end is left for the next look. A file that became shorter, or is another one under
the same name, was cut back by a resumed run: it is read again from its beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from sys import intern
from typing import IO, Any

OPENING = 24_000_000
"""Bytes that are read of a file at most when it is opened, half of them from its end."""

MOST_ROWS = 512
"""Rows that are kept of a file; beyond twice as many, every other one of the older ones is let go."""

BLOCK = 1 << 16


class Tail:
    """One file of JSON lines, as far as it was written when :meth:`refresh` last looked.

    Attributes:
        rows: in the file's order; all of a short file, of a long one the last ones and some from before.
        thinned: whether some rows are missing from ``rows``.
    """

    def __init__(self, path: Path, opening: int = OPENING, most_rows: int = MOST_ROWS) -> None:
        self.path, self._opening, self._most = path, max(opening, 2 * BLOCK), most_rows
        self._forget()

    def _forget(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.thinned, self.changed = False, 0.0
        self._file, self._read = 0, 0

    def refresh(self) -> bool:
        """Read what was added. Returns whether anything is new; a file that is not there has no rows."""
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
        read = self._read
        try:
            with self.path.open("rb") as file:
                if stat.st_size - self._read > self._opening:
                    self._sample(file, stat.st_size)
                file.seek(self._read)
                self._take(file.read(stat.st_size - self._read))
        except OSError:
            return False  # replaced between the two looks: the next one finds the new file
        self.changed = stat.st_mtime
        self._thin()
        return self._read != read

    def _sample(self, file: IO[bytes], size: int) -> None:
        """Rows from places that lie equally far apart, and go on near the end."""
        start, end = self._read, size - self._opening // 2
        places = min(self._most, max(8, self._opening // 2 // _length_of_a_line(file, end)))
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
        lines = whole.split(b"\n") if newline else ()
        self.rows += [row for line in lines if (row := _row(line)) is not None]

    def _thin(self) -> None:
        if len(self.rows) > 2 * self._most:
            older, recent = self.rows[: -self._most // 2], self.rows[-self._most // 2 :]
            step = -(-len(older) // (self._most // 2))
            self.rows, self.thinned = older[::step] + recent, True


def last_row(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file, however long the file is; None without one."""
    try:
        with path.open("rb") as file:
            return next((row for line in _backwards(file) if (row := _row(line)) is not None), None)
    except OSError:
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


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's object; keys are shared between rows, which have hundreds each."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return {intern(key): value for key, value in row.items()} if isinstance(row, dict) else None

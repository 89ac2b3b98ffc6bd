"""Files and directories that are whole or absent, JSON lines, checkpoints' names, and locks that end with a process."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import filelock

from ftis.config import FtisError
from ftis.engines.places import CHECKPOINT
from ftis.records.lines import Lines, any_row, damaged

METRICS, EVALUATIONS, EVENTS = "metrics.jsonl", "evaluations.jsonl", "events.jsonl"
"""Files of a peer's directory: a line per round, per evaluation of a split, and per event."""

LARGEST_DOCUMENT = 1 << 26
"""The most bytes of a JSON document that is read."""


class InUseError(FtisError):
    """Another process holds a lock."""


def checkpoint_path(peer: Path, step: int) -> Path:
    """The directory of a peer's checkpoint after ``step`` finished rounds."""
    return peer / f"{CHECKPOINT}{step}"


def saved_steps(peer: Path) -> list[int]:
    """The steps of the checkpoints in a peer's directory, ascending."""
    return sorted(step for path in peer.glob(f"{CHECKPOINT}*") if (step := saved_step(path)) is not None)


def saved_step(path: Path) -> int | None:
    """The step of a checkpoint's directory; None for any other path."""
    named = re.fullmatch(rf"{CHECKPOINT}(\d{{1,9}})", path.name)
    return int(named[1]) if named else None


def write_whole(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Write a file so that a reader, even after a crash, finds either the old file or all of ``content``.

    A link stays: the file that it leads to is replaced. A pipe or a device gets the content.

    Args:
        sync: wait for the disk, so that the new file survives a power failure.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with :func:`write_whole`."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line. A last line that a kill cut short is ended first, so that only itself is lost."""
    line = (json.dumps(row) + "\n").encode()
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line per row with :func:`write_whole`."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows), sync=False)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, without a last line that a kill cut short.

    Raises:
        FileNotFoundError: there is no such file.
        RecordsError: a line is damaged, or the file is too large.
    """
    Path(path).stat()
    return Lines(Path(path), any_row).whole()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        RecordsError: the file cannot be read, is too large or holds no object.
    """
    try:
        if path.stat().st_size > LARGEST_DOCUMENT:
            raise damaged(path, f"more than {LARGEST_DOCUMENT:,} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(document, dict):
        raise damaged(path, "no object")
    return document


def timestamp() -> str:
    """The time now in UTC, as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


PARTIAL = ".partial-"
"""The beginning of the name of a directory that is not whole."""


@contextmanager
def partial_directory(parent: Path) -> Iterator[Path]:
    """A directory in ``parent`` that is deleted at the end, unless it was renamed."""
    path = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes ``path`` at the end. Everybody may read its files, except in subdirectories.

    After an error nothing of it is left.
    """
    with partial_directory(path.parent) as partial:
        yield partial
        for file in filter(Path.is_file, partial.iterdir()):  # safetensors lets only the owner read
            file.chmod(0o644)
        partial.chmod(0o755)
        partial.replace(path)


@contextmanager
def locked(*paths: Path, patience: float = 0, remedy: str = "wait for it or stop it") -> Iterator[None]:
    """Hold each of ``paths`` as a lock. The system frees it when the process ends, however it ends.

    Args:
        patience: seconds to wait for another process that holds one.

    Raises:
        InUseError: another process still holds one.
    """
    with ExitStack() as held:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(filelock.FileLock(path, timeout=patience))
            except filelock.Timeout:
                raise InUseError(f"{path.parent} is in use by another process: {remedy}") from None
        yield

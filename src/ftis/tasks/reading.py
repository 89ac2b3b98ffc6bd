"""Rows of data files, and the questions and answers in them. Each row comes with its place, for messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ftis.config import TaskConfig, excerpt, first_line
from ftis.prompts import TaskError
from ftis.tasks.problems import Problem

Row = tuple[Mapping[str, Any], str]
"""The fields of a row, and the file and line it is from."""


def data_directory(config: TaskConfig, hub_id: str, patterns: list[str]) -> Path:
    """The local directory of a data set: ``task.path``, or a download of the files ``patterns`` from the Hub.

    A TaskError if ``task.path`` is neither a directory nor a Hub id, or the Hub is out of reach.
    """
    path = config.path
    if path is not None:
        if Path(path).is_dir():
            return Path(path)
        if Path(path).exists():
            raise TaskError(f"task.path = {path!r}: is a file; name the directory it is in")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
            raise TaskError(f"task.path = {path!r}: there is no such directory; leave it out to use {hub_id!r}")
        hub_id = path
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the base classes of the Hub's own errors
        raise TaskError(
            f"data set {hub_id!r} cannot be fetched from the Hub: {first_line(error)}; "
            "check the connection, or download it and set task.path to its directory"
        ) from error


def split_rows(root: Path, split: str, subset: str = "") -> Iterator[Row]:
    """The rows of one split: JSON Lines, or Parquet as laid out on the Hub. A TaskError if they cannot be read.

    Args:
        subset: the folder of the data set's configuration on the Hub, as in ``main/``.
    """
    patterns = [f"{split}.jsonl", f"{subset}{split}.jsonl", f"{subset}{split}-*.parquet", f"{split}-*.parquet"]
    for pattern in dict.fromkeys([*patterns, f"data/{split}-*.parquet"]):
        for file in (files := sorted(root.glob(pattern))):
            yield from jsonl_rows(file) if file.suffix == ".jsonl" else parquet_rows(file)
        if files:
            return
    raise TaskError(f"{root}: holds no {split!r} split; put {split}.jsonl or {subset}{split}-*.parquet there")


def jsonl_rows(file: Path) -> Iterator[Row]:
    """The objects of a JSON Lines file, without blank lines. A TaskError if there is none, or a line is no object."""
    count = number = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                try:
                    row = json.loads(line.rstrip(), parse_constant=_not_json)
                except (ValueError, RecursionError) as error:
                    why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                    raise TaskError(f"{where}: is not JSON: {why}; write one object a line") from None
                if not isinstance(row, dict):
                    raise TaskError(f"{where}: is a {type(row).__name__}, not an object; write one object a line")
                count += 1
                yield row, where
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}, after line {number}: is not UTF-8: {error}; convert it") from None
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror or error}; check the path and its rights") from error
    if not count:
        raise TaskError(f"{file}: holds no problems; write one JSON object a line")


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def parquet_rows(file: Path) -> Iterator[Row]:
    """The rows of a Parquet file. A TaskError if it cannot be read or holds none."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{file} cannot be read as Parquet: {first_line(error)}; download it again") from error
    if not rows:
        raise TaskError(f"{file}: holds no problems; download it again")
    for number, row in enumerate(rows, 1):
        yield row, f"{file}, row {number}"


def problem_of(row: Mapping[str, Any], question: str, answer: str, where: str) -> Problem:
    """The question and answer in the fields of those names, with the other fields as columns."""
    columns = {name: value for name, value in row.items() if name not in (question, answer)}
    return text_field(row, question, where), answer_field(row, answer, where), columns


def text_field(row: Mapping[str, Any], name: str, where: str, wanted: str = "a text that is not blank") -> str:
    """A field as it is. A TaskError if it is missing, blank, not a string, or holds half of a character."""
    if name not in row:
        present = ", ".join(sorted(map(str, row))) or "none"
        raise TaskError(
            f"{where}: has no field {name!r}; fields there: {present} "
            "(jsonl: name them with task.question_field and task.answer_field)"
        )
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{where}: {name!r} is {excerpt(value)}; write {wanted}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a pair of UTF-16, which JSON can spell and no tokenizer takes
        half = ascii(value[error.start])
        raise TaskError(f"{where}: {name!r} holds {half}, half of a character: write the whole of it") from None
    return value


def answer_field(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field that is an answer, as text without surrounding whitespace; a finite number as JSON writes it.

    A TaskError for any other, as by :func:`text_field`.
    """
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return text_field(row, name, where, "a string that is not blank, or a number").strip()
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:  # JSON's 1e999 is read as infinity
        raise TaskError(f"{where}: {name!r} is {value}, not a finite number; write it as a string") from None

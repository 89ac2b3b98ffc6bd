"""A round's rollouts in a Parquet file: its columns, writing it and reading it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ftis.records.files import write_whole
from ftis.records.lines import RecordsError

ROLLOUTS = pa.schema(
    {
        "round": pa.int64(),
        "source": pa.string(),
        "item": pa.int64(),
        "question": pa.string(),
        "completion": pa.string(),
        "reward": pa.float64(),
        "advantage": pa.float32(),
        "kept": pa.bool_(),
        "kl_k1": pa.float64(),
        "completion_ids": pa.list_(pa.int32()),
        "observed": pa.list_(pa.struct({"at": pa.int32(), "ids": pa.list_(pa.int32())})),
        "gen_logp": pa.list_(pa.float32()),
        "old_logp": pa.list_(pa.float32()),
        "unit": pa.list_(pa.int32()),
        "sent": pa.struct(
            {
                "text": pa.binary(),
                "size_S": pa.list_(pa.int32()),
                "gen_logp_S": pa.list_(pa.float32()),
                "tokens_U": pa.list_(pa.int32()),
                "fault": pa.string(),
                "ends": pa.list_(pa.int32()),
            }
        ),
    }
)
"""Columns of a round's rollouts. Their types are fixed, so that all rounds can be read as one table although a column
is null throughout a round."""

TEXTS = ["source", "question", "completion"]
"""The columns that hold text."""

LARGEST_ROUND = 1 << 30
"""The most bytes of a round's rollouts in memory."""


def rollouts_path(directory: Path, round: int) -> Path:
    return directory / "rollouts" / f"round-{round:06d}.parquet"


def recorded_rounds(directory: Path) -> list[int]:
    """The rounds with recorded rollouts, counted from 0, ascending."""
    matches = (re.fullmatch(r"round-(\d{6,9})\.parquet", path.name) for path in directory.glob("rollouts/round-*"))
    return sorted(int(match[1]) for match in matches if match)


def write_rollouts(directory: Path, round: int, columns: Mapping[str, Any]) -> None:
    """Write a round's rollouts whole, as the columns of :data:`ROLLOUTS`."""
    table = pa.table({name: pa.array(values, ROLLOUTS.field(name).type) for name, values in columns.items()})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=TEXTS)  # numbers hardly repeat
    write_whole(rollouts_path(directory, round), buffer.getvalue().to_pybytes(), sync=False)


def read_rollouts(directory: Path, round: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A round's rollouts as rows, with all columns or the named ones. A list of numbers is a typed array.

    Raises:
        RecordsError: as :func:`read_columns`.
    """
    table = read_columns(directory, round, columns)
    values = {
        name: column.to_numpy() if pa.types.is_list(column.type) else column.to_pylist()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def read_columns(directory: Path, round: int, columns: Sequence[str] | None) -> Any:
    """A round's rollouts as an Arrow table, with all columns or the named ones. Columns that were not recorded are left
    out.

    Compression can hide gigabytes in a file of kilobytes. So the file's counts of rows and bytes are checked first,
    then its counts of values, and columns are loaded last. A repeated text stays an index into a dictionary until the
    total length is known.

    Raises:
        RecordsError: the file cannot be read, holds something else, or more than :data:`LARGEST_ROUND`.
    """
    file = rollouts_path(directory, round)
    try:
        with pq.ParquetFile(file) as parquet:
            schema, about = parquet.schema_arrow, parquet.metadata
            if strange := [f.name for f in schema if f.name not in ROLLOUTS.names or not _fits(f.type, f.name)]:
                raise RecordsError(f"{file} holds no rollouts (column {strange[0]}): delete its directory")
            groups = [about.row_group(i) for i in range(about.num_row_groups)]
            _refuse_beyond(file, sum(max(group.total_byte_size, 8 * group.num_rows, 0) for group in groups))
            parquet.scan_contents()  # finds damage before the columns' counts are read: these would make pyarrow abort
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        _refuse_beyond(file, sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks))
        names = [name for name in schema.names if columns is None or name in columns]
        with pq.ParquetFile(file, read_dictionary=[name for name in names if name in TEXTS]) as parquet:
            table = parquet.read(columns=names, use_threads=False)  # takes a third of read_table's time
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a name is not UTF-8
        raise RecordsError(f"{file} cannot be read ({error}): restore it, or delete its directory") from None
    texts = [table[name] for name in names if name in TEXTS]
    _refuse_beyond(file, sum(_letters(chunk) for column in texts for chunk in column.chunks))
    for i, name in enumerate(names):
        if name in TEXTS:
            table = table.set_column(i, name, table[name].cast(pa.string()))
    return table


def _fits(found: Any, name: str) -> bool:
    """Whether a column has the expected type; texts may be dictionary-encoded."""
    return bool(found == ROLLOUTS.field(name).type or (name in TEXTS and pa.types.is_dictionary(found)))


def _letters(chunk: Any) -> int:
    """The total bytes of the texts in a dictionary-encoded column."""
    lengths = pc.take(pc.binary_length(chunk.dictionary), chunk.indices)
    return pc.sum(lengths).as_py() or 0


def _refuse_beyond(file: Path, size: int) -> None:
    if size > LARGEST_ROUND:
        raise RecordsError(f"{file} would take {size:,} bytes of memory, more than any round: delete its directory")

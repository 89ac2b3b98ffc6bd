"""What a peer leaves behind in its directory: metrics, rollouts and evaluations, appended as the run goes on.

    metrics.jsonl                  one line per round
    evaluations.jsonl              one line per evaluation and split
    evaluations/<split>-<step>.jsonl   one line per problem
    rollouts/round-<number>.parquet    one row per rollout of the round

A resumed peer cuts everything back to its checkpoint first, so that no round stands twice.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ftis.config import RecipeError

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
        "gen_logp": pa.list_(pa.float32()),
        "old_logp": pa.list_(pa.float32()),
    }
)
"""Columns of a round's rollouts. Named here so that a round whose values are all null has the types of the others, and
all rounds can be read as one table."""


class Records:
    """Writes one peer's records under ``directory``."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.directory = directory
        self.trackers = trackers
        (directory / "rollouts").mkdir(parents=True, exist_ok=True)
        (directory / "evaluations").mkdir(exist_ok=True)

    def cut_back_to(self, step: int) -> None:
        """Forget everything after ``step`` finished rounds."""
        for name, keep in (("metrics.jsonl", step), ("evaluations.jsonl", step)):
            path = self.directory / name
            if path.exists():
                kept = [row for row in read_jsonl(path) if row["step"] <= keep]
                _write_atomically(path, kept)
        for path in (self.directory / "rollouts").glob("round-*.parquet"):
            if int(path.stem.removeprefix("round-")) >= step:
                path.unlink()
        for path in (self.directory / "evaluations").glob("*.jsonl"):
            if int(path.stem.rpartition("-")[2]) > step:
                path.unlink()

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append a round's metrics; ``row["step"]`` counts finished rounds."""
        _append(self.directory / "metrics.jsonl", row)
        for tracker in self.trackers:
            tracker.log({k: v for k, v in row.items() if isinstance(v, (int, float))}, int(row["step"]))

    def evaluation(self, summary: Mapping[str, Any], problems: Iterable[Mapping[str, Any]]) -> None:
        """Append one split's evaluation and write its per-problem records."""
        name = f"{summary['split']}-{summary['step']}.jsonl"
        _write_atomically(self.directory / "evaluations" / name, problems)
        _append(self.directory / "evaluations.jsonl", summary)
        for tracker in self.trackers:
            tracker.log({f"eval/{summary['split']}/accuracy": summary["accuracy"]}, int(summary["step"]))

    def rollouts(self, round: int, columns: Mapping[str, Any]) -> None:
        """Write a round's rollouts as one Parquet file."""
        path = rollouts_path(self.directory, round)
        partial = path.with_suffix(".partial")
        table = pa.table({name: pa.array(values, ROLLOUTS.field(name).type) for name, values in columns.items()})
        try:
            pq.write_table(table, partial, compression="zstd")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()


class Tracker:
    """One experiment tracker named in ``report_to``; its package is imported here and nowhere else."""

    def __init__(self, kind: str, project: str, run: str, directory: Path) -> None:
        self.kind = kind
        if kind == "tensorboard":
            self._client = _import("torch.utils.tensorboard", kind).SummaryWriter(str(directory / "tensorboard"))
        elif kind == "wandb":
            self._client = _import("wandb", kind).init(
                project=project, name=run, dir=str(directory), reinit="create_new"
            )
        else:
            self._client = _import("trackio", kind)
            self._client.init(project=project, name=run)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self.kind == "tensorboard":
            for name, value in values.items():
                self._client.add_scalar(name, value, step)
        else:
            self._client.log(dict(values), step=step)

    def finish(self) -> None:
        if self.kind == "tensorboard":
            self._client.close()
        else:
            self._client.finish()


def _import(module: str, kind: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RecipeError(f'report_to: {kind} is not installed; run pip install "ftis[{kind}]"') from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; a last line that a kill cut short is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def rollouts_path(directory: Path, round: int) -> Path:
    return directory / "rollouts" / f"round-{round:06d}.parquet"


def read_rollouts(directory: Path, round: int) -> list[dict[str, Any]]:
    """A round's rollouts as they were written, a row each; lists of numbers are arrays of the column's type."""
    table = pq.ParquetFile(rollouts_path(directory, round)).read()
    columns = {
        name: column.to_numpy() if pa.types.is_list(column.type) else column.to_pylist()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _write_atomically(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def clear(directory: Path) -> None:
    """Remove a peer's directory and everything in it."""
    shutil.rmtree(directory, ignore_errors=True)

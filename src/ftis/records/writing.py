"""The records in a peer's directory: metrics, rollouts and evaluations, appended as the run goes on.

    metrics.jsonl                  one line per round
    evaluations.jsonl              one line per evaluation and split
    evaluations/<split>-<step>.jsonl   one line per problem
    rollouts/round-<number>.parquet    one row per rollout of the round

A resumed peer first cuts everything back to its checkpoint, so no round is recorded twice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ftis.config import FtisError
from ftis.metric_keys import by_peer
from ftis.records.events import Evaluated, Event, PeerStarted, RoundEnded, Say, seconds_by_stage, to_json
from ftis.records.files import append_jsonl, read_jsonl, timestamp, write_jsonl, write_whole
from ftis.records.lines import RecordsError
from ftis.seams import TRACKERS, look_up

if TYPE_CHECKING:  # ftis.measures loads torch, and a reader of records does not need it
    from ftis.measures import RoundRecord

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


class Tracker(Protocol):
    """A display of a run's numbers elsewhere. ``report_to`` names ``f(project, run, directory) -> Tracker``."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the numbers after ``step`` finished rounds."""

    def finish(self) -> None:
        """Close the tracker: the run has ended or stopped."""


class TrackerError(FtisError):
    """A tracker raised an error. The numbers that it got are recorded and saved."""


@contextmanager
def _named(tracker: Tracker) -> Iterator[None]:
    """Name the tracker in the error that it raises."""
    try:
        yield
    except Exception as error:  # the user's code, or a service that is not there
        raise TrackerError(
            f"report_to: {type(tracker).__name__} raised {type(error).__name__}: {error}; mend it or leave it out "
            f"(--set 'report_to=[]'), then run the same command with --resume"
        ) from error


def open_trackers(names: Sequence[str], project: str, run: str, directory: Path) -> list[Tracker]:
    """The trackers that ``report_to`` names.

    Raises:
        RecipeError: a tracker does not exist, or its package is not installed.
    """
    return [look_up(name, "report_to", TRACKERS)(project, run, directory) for name in names]


class Records:
    """A writer of one peer's records under ``directory``."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker] = (), keep_rollouts: bool = True) -> None:
        self.directory = directory
        self.trackers = trackers
        self.keep_rollouts = keep_rollouts
        (directory / "rollouts").mkdir(parents=True, exist_ok=True)
        (directory / "evaluations").mkdir(exist_ok=True)

    def cut_back_to(self, step: int) -> None:
        """Delete everything after ``step`` finished rounds."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            path = self.directory / name
            if path.exists():
                write_jsonl(path, [row for row in read_jsonl(path) if row["step"] <= step])
        for path in written_after(self.directory, step):
            path.unlink()

    def round(self, record: RoundRecord) -> None:
        """Write a finished round. Rollouts are written first, so a line of metrics means that the round is complete."""
        step = int(record.metrics["step"])
        if self.keep_rollouts:
            self._write_rollouts(step - 1, record.rollouts)
        append_jsonl(self.directory / "metrics.jsonl", record.metrics)

    def sync(self) -> None:
        """Wait for the disk, so that a power failure leaves no checkpoint of rounds without records."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            with (self.directory / name).open("ab") as file:
                os.fsync(file.fileno())

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Give the numbers of a finished round to the trackers."""
        for tracker in self.trackers:
            with _named(tracker):
                tracker.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, int(metrics["step"]))

    def evaluation(self, summary: Mapping[str, Any], problems: Iterable[Mapping[str, Any]]) -> None:
        """Append one split's evaluation and write its problems."""
        name = f"{summary['split']}-{summary['step']}.jsonl"
        write_jsonl(self.directory / "evaluations" / name, problems)
        append_jsonl(self.directory / "evaluations.jsonl", summary)
        for tracker in self.trackers:
            with _named(tracker):
                tracker.log({f"eval/{summary['split']}/accuracy": summary["accuracy"]}, int(summary["step"]))

    def _write_rollouts(self, round: int, columns: Mapping[str, Any]) -> None:
        table = pa.table({name: pa.array(values, ROLLOUTS.field(name).type) for name, values in columns.items()})
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        write_whole(rollouts_path(self.directory, round), buffer.getvalue().to_pybytes(), sync=False)

    def close(self) -> None:
        for tracker in self.trackers:
            with _named(tracker):
                tracker.finish()


class EventLog:
    """Passes a peer's events on, and appends them with the time to events.jsonl in its directory.

    Attributes:
        status: the facts that ``ftis status`` shows of this peer.
    """

    def __init__(self, directory: Path, say: Say) -> None:
        self.path, self._say = directory / "events.jsonl", say
        self.status: dict[str, Any] = {}
        self._lock = threading.Lock()  # the network calls from threads of its own
        self._totals: dict[str, dict[str, int]] = {}
        self._since = time.monotonic()

    def _add(self, seconds: Mapping[str, float]) -> None:
        spent = self.status.get("seconds", {})
        self.status["seconds"] = spent | {name: spent.get(name, 0.0) + of for name, of in seconds.items()}

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RoundEnded):
                self._count(event.metrics)
                self._add(seconds_by_stage(event.metrics))
            elif isinstance(event, Evaluated):
                self._add({"evaluating": time.monotonic() - self._since})
            if isinstance(event, (RoundEnded, Evaluated, PeerStarted)):
                self._since = time.monotonic()
            if not isinstance(event, RoundEnded):
                append_jsonl(self.path, {"time": timestamp(), **to_json(event)})
            self._say(event)

    def _count(self, metrics: Mapping[str, Any]) -> None:
        """Add a round to the totals per peer, counted since this one was started."""
        for name, measures in by_peer(metrics).items():
            totals = self._totals.setdefault(name, {})
            for measure in ("admitted", "kept", "rejected", "late", "bytes"):
                totals[measure] = totals.get(measure, 0) + int(measures.get(measure, 0))
            totals["quarantined"] = int(measures.get("honesty/quarantined", False))
        self.status |= {"step": metrics["step"], "reward": metrics["reward"], "from": dict(self._totals)}


def written_after(directory: Path, step: int) -> list[Path]:
    """The files of a peer's rounds and evaluations after ``step`` finished rounds."""
    rounds, evaluations = (directory / "rollouts").glob("round-*.parquet"), (directory / "evaluations").glob("*.jsonl")
    return [
        *(path for path in sorted(rounds) if int(path.stem.removeprefix("round-")) >= step),
        *(path for path in sorted(evaluations) if int(path.stem.rpartition("-")[2]) > step),
    ]


def rollouts_path(directory: Path, round: int) -> Path:
    return directory / "rollouts" / f"round-{round:06d}.parquet"


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


def read_columns(directory: Path, round: int, columns: Sequence[str] | None = None) -> Any:
    """A round's rollouts as an Arrow table, with all columns or the named ones. Columns that were not recorded are left
    out.

    Compression can hide gigabytes in a file of kilobytes. So the file's own counts of rows and bytes are checked before
    anything else is read, those of values before these are, and a repeated text stays an index into a dictionary until
    the total length is known.

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
            _refuse_beyond(file, sum(max(of.total_byte_size, 8 * of.num_rows, 0) for of in groups))
            parquet.scan_contents()  # finds damage before the columns' counts are read: these would make pyarrow abort
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        _refuse_beyond(file, sum(max(of.total_uncompressed_size, 8 * of.num_values) for of in chunks))
        names = [name for name in schema.names if columns is None or name in columns]
        with pq.ParquetFile(file, read_dictionary=[name for name in names if name in TEXTS]) as parquet:
            table = parquet.read(columns=names, use_threads=False)  # takes a third of read_table's time
    except (OSError, ValueError, pa.ArrowException) as error:  # a ValueError of a name that is not UTF-8
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

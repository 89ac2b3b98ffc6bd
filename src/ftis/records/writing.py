"""The records in a peer's directory: metrics, rollouts and evaluations, appended as the run goes on.

    metrics.jsonl                  one line per round
    evaluations.jsonl              one line per evaluation and split
    evaluations/<split>-<step>.jsonl   one line per problem
    rollouts/round-<number>.parquet    one row per rollout of the round

A resumed peer first cuts these back to its checkpoint, so they have no round twice. Trackers may.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis.records.events import Event, RoundEnded, Say, to_json
from ftis.records.files import EVALUATIONS, EVENTS, METRICS, append_jsonl, read_jsonl, timestamp, write_jsonl
from ftis.records.rollouts import recorded_rounds, rollouts_path, write_rollouts
from ftis.records.trackers import Tracker, named

if TYPE_CHECKING:  # ftis.measures loads torch, and a reader of records does not need it
    from ftis.measures import RoundRecord


class Records:
    """A writer of one peer's records under ``directory``."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker] = (), keep_rollouts: bool = True) -> None:
        self.directory = directory
        self.trackers = trackers
        self.keep_rollouts = keep_rollouts
        rollouts_path(directory, 0).parent.mkdir(parents=True, exist_ok=True)
        (directory / "evaluations").mkdir(exist_ok=True)

    def cut_back_to(self, step: int) -> None:
        """Delete everything after ``step`` finished rounds."""
        for name in (METRICS, EVALUATIONS):
            path = self.directory / name
            if path.exists():
                write_jsonl(path, [row for row in read_jsonl(path) if row["step"] <= step])
        for path in written_after(self.directory, step):
            path.unlink()

    def round(self, record: RoundRecord) -> None:
        """Write a finished round. Rollouts are written first, so a line of metrics means that the round is complete."""
        step = int(record.metrics["step"])
        if self.keep_rollouts:
            write_rollouts(self.directory, step - 1, record.rollouts)
        append_jsonl(self.directory / METRICS, record.metrics)

    def sync(self) -> None:
        """Wait for the disk, so that a power failure leaves no checkpoint of rounds without metrics and evaluations."""
        for name in (METRICS, EVALUATIONS):
            with (self.directory / name).open("ab") as file:
                os.fsync(file.fileno())

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Give the numbers of a finished round to the trackers."""
        for tracker in self.trackers:
            with named(type(tracker).__name__):
                tracker.log({k: v for k, v in metrics.items() if isinstance(v, (int, float))}, int(metrics["step"]))

    def evaluation(self, summary: Mapping[str, Any], problems: Iterable[Mapping[str, Any]]) -> None:
        """Append one split's evaluation and write its problems."""
        write_jsonl(answers_path(self.directory, summary["split"], summary["step"]), problems)
        append_jsonl(self.directory / EVALUATIONS, summary)
        for tracker in self.trackers:
            with named(type(tracker).__name__):
                tracker.log({f"eval/{summary['split']}/accuracy": summary["accuracy"]}, int(summary["step"]))

    def close(self) -> None:
        """Finish every tracker, also after another one's error."""
        with ExitStack() as finished:
            for tracker in self.trackers:
                finished.enter_context(named(type(tracker).__name__))
                finished.callback(tracker.finish)


class EventLog:
    """A peer's events.jsonl. Each event is appended with the time, and passed on to ``say``."""

    def __init__(self, directory: Path, say: Say) -> None:
        self.path, self.say = directory / EVENTS, say
        self._lock = threading.Lock()  # the network calls from threads of its own

    def __call__(self, event: Event) -> None:
        with self._lock:
            if not isinstance(event, RoundEnded):
                append_jsonl(self.path, {"time": timestamp(), **to_json(event)})
            self.say(event)


def answers_path(directory: Path, split: str, step: int) -> Path:
    """The file of one evaluation's answers in a peer's directory."""
    return directory / "evaluations" / f"{split}-{step}.jsonl"


def written_after(directory: Path, step: int) -> list[Path]:
    """The files of a peer's rounds and evaluations after ``step`` finished rounds."""
    answers = sorted((directory / "evaluations").glob("*.jsonl"))
    named = [(path, re.search(r"-(\d+)$", path.stem)) for path in answers]
    return [
        *(rollouts_path(directory, round) for round in recorded_rounds(directory) if round >= step),
        *(path for path, number in named if number and int(number[1]) > step),
    ]

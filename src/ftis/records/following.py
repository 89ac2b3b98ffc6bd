"""A run's or an experiment's directory, read again and again while it is written. Reading locks nothing.

Each look takes the records as they are, even if the run was killed, resumed, cut back or deleted since the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis.recipe.arms import Arm
from ftis.records.lines import OPENING, Lines, last_row
from ftis.records.reading import VALIDATION, EvaluationRow, RoundRow, read_plan


@dataclass(frozen=True)
class Progress:
    """The progress of one peer of an arm.

    Attributes:
        accuracy: accuracy on validation at the last evaluation; None without one.
        evaluated: rounds that were finished at that evaluation.
        step_time: seconds of its last round.
        changed: the time of its last record, in seconds since the epoch; 0 without records.
    """

    step: int = 0
    rounds: int = 0
    accuracy: float | None = None
    evaluated: int = 0
    reward: float | None = None
    step_time: float = 0.0
    changed: float = 0.0

    @property
    def started(self) -> bool:
        return self.changed > 0

    @property
    def finished(self) -> bool:
        return min(self.step, self.evaluated) >= self.rounds  # the last evaluation comes after the last round


class Directory:
    """A directory that ``ftis train`` or ``ftis join`` writes.

    Raises:
        RecordsError: the directory holds neither a run nor an experiment, or one of another version of ftis.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks: dict[Path, tuple[tuple[int, int, int], Any]] = {}
        self.look()

    def look(self) -> None:
        """Read the recipe again: the run may have been deleted and started anew, or given more seeds."""
        found = {name: _mark(self.path / name) for name in ("experiment.json", "recipe.json")}
        if found != getattr(self, "_found", None):
            self.plan = read_plan(self.path)
            self._found = found

    def peers_of(self, seed: int, arm: Arm) -> Sequence[str]:
        """The peers with records in this directory: all peers of the arm, or the one of a joined run."""
        place = self.plan.run_of(seed) / arm.name
        here = [peer for peer in arm.peers if (place / peer).is_dir()]
        joined = len(here) == 1 and (place / here[0] / "events.jsonl").exists()
        return here if joined else arm.peers

    def progress(self, seed: int, arm: Arm, peer: str) -> Progress:
        """A peer's progress by the last lines of its records; a file that has not changed is not read again."""
        place = self.plan.run_of(seed) / arm.name / peer
        row, changed = self._last(place / "metrics.jsonl", _last_round)
        last, written = self._last(place / "evaluations.jsonl", _last_validation)
        measures: Mapping[str, Any] = row.measures if row else {}
        return Progress(
            step=row.step if row else 0,
            rounds=arm.recipe.training.rounds,
            accuracy=last.accuracy if last else None,
            evaluated=last.step if last else 0,
            reward=measures.get("reward"),
            step_time=measures.get("step_time", 0.0),
            changed=max(changed, written),
        )

    def _last(self, path: Path, read: Callable[[Path], Any]) -> tuple[Any, float]:
        """The result of ``read`` on a file, and the time when the file was last written."""
        mark = _mark(path)
        if mark is None:
            self._marks.pop(path, None)
            return None, 0.0
        known = self._marks.get(path)
        if known is None or known[0] != mark:
            known = self._marks[path] = (mark, read(path))
        return known[1], mark[2] / 1e9

    def busiest(self) -> tuple[int, Arm]:
        """The seed and arm that recorded something last; the first ones while nothing was recorded."""
        found = [
            (max(self.progress(seed, arm, peer).changed for peer in arm.peers), -i, seed, arm)
            for seed in self.plan.seeds
            for i, arm in enumerate(self.plan.arms)
        ]
        _, _, seed, arm = max(found, key=lambda one: one[:2])
        return seed, arm


def _mark(path: Path) -> tuple[int, int, int] | None:
    """A mark that changes whenever a file is written; None without a file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _last_round(path: Path) -> RoundRow | None:
    try:
        return RoundRow.of(last_row(path) or {})
    except (KeyError, TypeError):
        return None


def _last_validation(path: Path) -> EvaluationRow | None:
    lines = Lines(path, EvaluationRow.of, OPENING, 64)
    lines.refresh()
    return next((row for row in reversed(lines.rows) if row.split == VALIDATION), None)

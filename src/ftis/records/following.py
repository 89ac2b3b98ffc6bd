"""A run's or an experiment's directory, read again and again while it is written. Reading locks nothing.

Each look takes the records as they are, even if the run was killed, resumed, cut back or deleted since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftis.recipe.arms import Arm
from ftis.records.plan import EXPERIMENT, RECIPE, read_plan
from ftis.records.reading import VALIDATION, PeerRun


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
        self._peers: dict[Path, PeerRun] = {}
        self.look()

    def look(self) -> None:
        """Read the recipe again: the run may have been deleted and started anew, or given more seeds."""
        found = {name: _mark(self.path / name) for name in (EXPERIMENT, RECIPE)}
        if found != getattr(self, "_found", None):
            self.plan = read_plan(self.path)
            self._found = found

    def progress(self, seed: int, arm: Arm, peer: str) -> Progress:
        """A peer's progress by its last records."""
        place = self.plan.run_of(seed) / arm.name / peer
        records = self._peers.setdefault(place, PeerRun(place, 2))
        records.refresh()
        measures = records.rounds[-1].measures if records.rounds else {}
        evaluations = records.on(VALIDATION)
        return Progress(
            step=records.step,
            rounds=arm.recipe.training.rounds,
            accuracy=evaluations[-1].accuracy if evaluations else None,
            evaluated=evaluations[-1].step if evaluations else 0,
            reward=measures.get("reward"),
            step_time=measures.get("step_time", 0.0),
            changed=records.changed,
        )

    def busiest(self) -> tuple[int, Arm]:
        """The seed and arm that recorded something last; the first ones while nothing was recorded."""

        def written(job: tuple[int, Arm]) -> int:
            files = (self.plan.run_of(job[0]) / job[1].name).glob("*/*.jsonl")
            return max((mark[2] for file in files if (mark := _mark(file))), default=0)

        return max(((seed, arm) for seed in self.plan.seeds for arm in self.plan.arms), key=written)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """A mark that changes whenever a file is written; None without a file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns

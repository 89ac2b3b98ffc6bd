"""A run's or an experiment's directory, read again and again while it is written. Reading locks nothing.

Each look takes the records as they are, even if the run was killed, resumed, cut back or deleted since the last one.
"""

from __future__ import annotations

from pathlib import Path

from ftis.recipe.arms import Arm
from ftis.records.plan import EXPERIMENT, RECIPE, read_plan
from ftis.records.reading import PeerRun


class Directory:
    """A directory that ``ftis train`` or ``ftis join`` writes.

    Raises:
        RecordsError: the directory holds neither a run nor an experiment, or one of another version of ftis.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._peers = path, dict[Path, PeerRun]()
        self._found: dict[str, tuple[int, int, int] | None] = {}
        self.look()

    def look(self) -> None:
        """Read the recipe again: the run may have been deleted and started anew, or given more seeds."""
        found = {name: _mark(self.path / name) for name in (EXPERIMENT, RECIPE)}
        if found != self._found:
            self.plan = read_plan(self.path)
            self._found = found

    def peer(self, seed: int, arm: str, peer: str) -> PeerRun:
        """The first and the last records of a peer now."""
        place = self.plan.run_of(seed) / arm / peer
        records = self._peers.setdefault(place, PeerRun(place, 2))
        records.refresh()
        return records

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

"""A run's or an experiment's directory, read again and again while it is written. Nothing is changed or locked there.

:class:`Directory` knows the runs in it and how far each peer is; :class:`ArmOfRun` follows the records of one arm.
Records of a run that was killed, resumed, cut back or deleted are what they are at each look.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftis.config import Recipe, RecipeError
from ftis.recipe.arms import PROVENANCE, Arm, arms_of
from ftis.recipe.parsing import parse
from ftis.records.reading import VALIDATION, ReportError, RoundRow, recorded_rounds
from ftis.records.standing import Formats, RewardMeans, Standing, standing
from ftis.records.tail import OPENING, Tail, last_row
from ftis.records.writing import read_rollouts, rollouts_path
from ftis.rewards.parts import right_formats

SEEN_ROUNDS = 3
"""Rounds that must have passed before their pace is believed more than the rounds' own seconds."""

RECENT = 32
"""Rounds that are looked at peer by peer."""

NOTICE_SECONDS = 60.0
"""Seconds after which something a peer said about the network is no longer news."""


@dataclass(frozen=True)
class Progress:
    """How far one peer of an arm is.

    Attributes:
        accuracy: on validation, of the last evaluation; None without one.
        evaluated: rounds that were finished then.
        step_time: seconds of its last round.
        changed: when it last recorded something, in seconds since the epoch; 0 if nothing.
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
        ReportError: it holds neither a run nor an experiment, or of another version of ftis.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_experiment = (path / "experiment.json").exists()
        self._marks: dict[Path, tuple[tuple[int, int, int], Any]] = {}
        self.look()

    def look(self) -> None:
        """Read the recipe again, as after the run was deleted and started anew, or given more seeds."""
        file = self.path / ("experiment.json" if self.is_experiment else "recipe.json")
        if not file.exists():
            raise ReportError(
                f"{self.path} holds neither a run nor an experiment (no recipe.json, no experiment.json): give the "
                f"directory that ftis train or ftis join named, once it has begun"
            )
        text = file.read_text(encoding="utf-8")
        self.recipe, self.seeds, self.arms = _understood(text, file, self.is_experiment)

    def run_of(self, seed: int) -> Path:
        return self.path / f"{self.recipe.name}-seed{seed}" if self.is_experiment else self.path

    def peers_of(self, seed: int, arm: Arm) -> Sequence[str]:
        """The peers whose records are here: of a joined run, its one."""
        here = [peer for peer in arm.peers if (self.run_of(seed) / arm.name / peer).is_dir()]
        joined = len(here) == 1 and (self.run_of(seed) / arm.name / here[0] / "events.jsonl").exists()
        return here if joined else arm.peers

    def progress(self, seed: int, arm: Arm, peer: str) -> Progress:
        """From the last lines of its records; a file that has not changed is not read again."""
        place = self.run_of(seed) / arm.name / peer
        rounds = arm.recipe.training.rounds
        row, changed = self._last(place / "metrics.jsonl", last_row)
        of_last, written = self._last(place / "evaluations.jsonl", _last_validation)
        row, of_last = row or {}, of_last or {}
        return Progress(
            step=int(row.get("step", 0)),
            rounds=rounds,
            accuracy=of_last.get("accuracy"),
            evaluated=int(of_last.get("step", 0)),
            reward=row.get("reward"),
            step_time=float(row.get("step_time", 0.0)),
            changed=max(changed, written),
        )

    def _last(self, path: Path, read: Callable[[Path], Any]) -> tuple[Any, float]:
        """What ``read`` finds in a file, and when the file was last written."""
        try:
            stat = path.stat()
        except OSError:
            self._marks.pop(path, None)
            return None, 0.0
        mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = self._marks.get(path)
        if known is None or known[0] != mark:
            known = self._marks[path] = (mark, read(path))
        return known[1], stat.st_mtime

    def busiest(self) -> tuple[int, Arm]:
        """The run and arm that recorded something last; the first of all while nothing was recorded."""
        found = [
            (max(self.progress(seed, arm, peer).changed for peer in arm.peers), -i, seed, arm)
            for seed in self.seeds
            for i, arm in enumerate(self.arms)
        ]
        _, _, seed, arm = max(found, key=lambda one: one[:2])
        return seed, arm


@lru_cache(maxsize=4)
def _understood(text: str, file: Path, is_experiment: bool) -> tuple[Recipe, tuple[int, ...], tuple[Arm, ...]]:
    """Recipe, seeds and arms of a recipe.json or an experiment.json."""
    try:
        document = json.loads(text)
        recorded = document["recipe"] if is_experiment else document
        recipe = parse(recorded, str(file))
        seeds = tuple(document["seeds"]) if is_experiment else (recipe.seed,)
        arms = tuple(arms_of(recipe))
    except RecipeError as error:
        raise ReportError(_of_another_version(file, str(error))) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{file} is damaged ({error}): restore it or run again") from None
    return recipe, seeds, arms


def _of_another_version(file: Path, why: str) -> str:
    """The error of a recipe that this version does not understand, with the version that wrote it."""
    here = importlib.metadata.version("ftis")
    wrote = _recorded(file, "versions", "ftis")
    if wrote and wrote != here:
        return f"{why}. The run was recorded by ftis {wrote}, this is ftis {here}: watch it with ftis {wrote}"
    commit = _recorded(file, "commit")
    told = f", recorded at commit {commit[:12]}" if commit else ""
    return f"{why}. The recipe may be of another ftis {here}{told}: watch it with the one that recorded it"


def _recorded(file: Path, *keys: str) -> str:
    """What the provenance beside a recipe says, "" if nothing."""
    for name in (file.name, PROVENANCE):
        try:
            found = json.loads((file.parent / name).read_text(encoding="utf-8"))
            for key in keys:
                found = found[key]
            return str(found or "")
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def _last_validation(path: Path) -> Mapping[str, Any] | None:
    tail = Tail(path, most_rows=64)
    tail.refresh()
    return next((row for row in reversed(tail.rows) if row.get("split") == VALIDATION), None)


class PeerRecords:
    """The records of one peer of the arm that is shown, and the pace at which its rounds were seen to end."""

    def __init__(self, directory: Path, opening: int) -> None:
        self.directory, self.name = directory, directory.name
        self.metrics = Tail(directory / "metrics.jsonl", opening)
        self.evaluations = Tail(directory / "evaluations.jsonl")
        self.events = Tail(directory / "events.jsonl", most_rows=64)
        self._seen: list[tuple[float, int]] = []
        self._recent: list[RoundRow] = []
        self._means = RewardMeans()

    def refresh(self) -> bool:
        before = self.step
        tails = (self.metrics, self.evaluations, self.events)
        changed = sum(tail.refresh() for tail in tails) > 0  # every one of them is asked
        if self.step < before:
            self._seen = []
        if self.step and (not self._seen or self.step > self._seen[-1][1]):
            self._seen = [*self._seen[-9:], (time.monotonic(), self.step)]
        return changed

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.metrics.rows

    @property
    def rounds(self) -> Sequence[RoundRow]:
        """All rounds that are kept; only those of :attr:`recent` remember what they say of each peer."""
        return [*map(RoundRow.of, self.rows[:-RECENT]), *self.recent]

    @property
    def recent(self) -> Sequence[RoundRow]:
        """The last rounds, sorted by peer once each: a row of a large swarm has thousands of keys."""
        known = {id(row.measures): row for row in self._recent}
        self._recent = [known.get(id(row)) or RoundRow.of(row) for row in self.rows[-RECENT:]]
        return self._recent

    @property
    def reward_means(self) -> Sequence[tuple[int, float]]:
        return self._means.of(self.rows)

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def changed(self) -> float:
        return max(self.metrics.changed, self.evaluations.changed, self.events.changed)

    @property
    def seconds_per_round(self) -> float | None:
        """As they were seen to pass; None until some have."""
        if len(self._seen) <= SEEN_ROUNDS:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (now - began) / (last - first)

    def notice(self, now: float) -> str:
        """The last thing it said about the network, unless a round has ended since or it is long ago."""
        said = [row for row in self.events.rows if row.get("kind") == "network"][-1:]
        news = now - self.events.changed < NOTICE_SECONDS and self.events.changed >= self.metrics.changed
        if not said or not news or said[0].get("what") not in ("waiting", "alone", "aside", "mismatch", "behind"):
            return ""
        return str(said[0].get("text", ""))

    def of_round(self, round: int) -> list[dict[str, Any]]:
        """A round's rollouts, counted from 0; none where they were not recorded or are being written."""
        try:
            return read_rollouts(self.directory, round)
        except (OSError, ValueError):
            return []

    @property
    def last_recorded(self) -> int | None:
        """The last round whose rollouts are there."""
        last = self.step - 1
        if last >= 0 and rollouts_path(self.directory, last).exists():
            return last
        recorded = recorded_rounds(self.directory)
        return recorded[-1] if recorded else None


class ArmOfRun:
    """One arm of one run, followed peer by peer."""

    def __init__(self, run: Path, arm: Arm, here: Sequence[str]) -> None:
        self.run, self.arm, self.rounds = run, arm, arm.recipe.training.rounds
        self.peers = {name: PeerRecords(run / arm.name / name, OPENING // max(1, len(here))) for name in here}
        self._formats: dict[tuple[str, int], Formats | None] = {}

    @property
    def recipe(self) -> Recipe:
        return self.arm.recipe

    def refresh(self) -> bool:
        """Read what was added; whether anything was."""
        return sum(peer.refresh() for peer in self.peers.values()) > 0  # every one of them is asked

    @property
    def started(self) -> bool:
        """Whether anything of it was recorded."""
        return any(peer.changed for peer in self.peers.values())

    def swarm_of(self, peer: str) -> tuple[str, ...]:
        return next(tuple(p.name for p in s.peers) for s in self.arm.swarms if peer in {p.name for p in s.peers})

    def colour_of(self, peer: str) -> int:
        """The number of a peer's colour, the same in every chart."""
        return self.arm.peers.index(peer)

    def standings(self, now: float | None = None) -> list[Standing]:
        """How each peer stands.

        Args:
            now: seconds since the epoch, to tell who has been silent; None for records that nobody writes any more.
        """
        steps = {name: peer.step for name, peer in self.peers.items()}
        found = []
        for name, peer in self.peers.items():
            of_peer = standing(
                name,
                self.rounds,
                peer.rows,
                peer.recent,
                peer.reward_means,
                swarm=self.swarm_of(name),
                steps=steps,
                started=bool(peer.evaluations.rows),
                seconds_per_round=peer.seconds_per_round,
                silent_for=None if now is None or not peer.changed else now - peer.changed,
                notice="" if now is None else peer.notice(now),
            )
            found.append(of_peer if not of_peer.unrewarded else self._with_formats(of_peer, peer))
        return found

    def _with_formats(self, of: Standing, peer: PeerRecords) -> Standing:
        last = peer.last_recorded
        if last is None:
            return of
        if (of.name, last) not in self._formats:
            self._formats = {key: value for key, value in self._formats.items() if key[0] != of.name}
            self._formats[of.name, last] = formats(self.recipe, of.name, peer.of_round(last))
        return replace(of, formats=self._formats[of.name, last])


def formats(recipe: Recipe, name: str, rows: Sequence[Mapping[str, Any]]) -> Formats | None:
    """How many of a peer's own completions have the format of the built-in reward; None under another reward."""
    own = [row for row in rows if row["source"] == name]
    right = right_formats(recipe, (str(row["completion"]) for row in own))
    return Formats(sum(right), len(own)) if right else None

"""The one reader of a run's or an experiment's directory, whole or while it is written, as typed values.

Reading loads no model, imports nothing that a record names, and changes nothing.

    PeerRun        one peer's records
    ArmOfRun       the peers of one arm of a run
    read_study     every run of a directory, whole
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypedDict, cast

from ftis import metric_keys as keys
from ftis.config import Recipe
from ftis.engines.places import TOKENIZER
from ftis.recipe.arms import Arm, arm_configs
from ftis.records.events import Event, of_json
from ftis.records.files import EVALUATIONS, EVENTS, METRICS, checkpoint_path, saved_steps
from ftis.records.lines import Lines, RecordsError, any_row, damaged
from ftis.records.plan import RECIPE, Plan, Provenance, provenances, read_plan
from ftis.records.rollouts import read_rollouts, recorded_rounds, rollouts_path
from ftis.records.writing import answers_path
from ftis.rollouts import Floats, Ints

VALIDATION: Final = "validation"
"""The split of the task itself. Others are out of distribution."""

NUMBER, NUMBER_OR_NONE = (int, float), (int, float, type(None))

LAST_EVALUATIONS = 3
"""Evaluations in the mean that is a final accuracy: a single one of a few hundred problems is noisy."""


class RolloutRow(TypedDict):
    """A rollout of a round: the columns that a reader needs; the others serve a replay.

    Log π_old, KL and fate are None if Â = 0 and β = 0. A rollout of an older version may lack its last two columns.
    """

    round: int
    source: str
    question: str
    completion: str
    reward: float
    advantage: float
    completion_ids: Ints
    gen_logp: Floats
    kept: bool | None
    kl_k1: Any
    old_logp: Any
    unit: Any
    observed: Any


EVERY, SHOWN = tuple(RolloutRow.__annotations__)[:8], tuple(RolloutRow.__annotations__)
"""The columns that no rollout lacks, and all columns of a row."""


@dataclass(frozen=True)
class EvaluationRow:
    """A line of ``evaluations.jsonl``: the mean reward of greedy completions on one split after ``step`` rounds.

    The fields are the line's keys, in its order.

    Attributes:
        accuracy: for rewards 0 and 1 greedy pass@1.
        reward_std: the standard deviation of the problems' rewards; None: these are 0 and 1.
        mean_length: tokens of a completion.
    """

    step: int
    split: str
    accuracy: float
    problems: int
    reward_std: float | None = None
    mean_length: float | None = None
    seconds: float = 0.0

    @property
    def error(self) -> float:
        """The standard error of the accuracy."""
        variance = self.accuracy * (1 - self.accuracy) if self.reward_std is None else self.reward_std**2
        return math.sqrt(max(0.0, variance) / self.problems)

    @staticmethod
    def of(line: Mapping[str, Any]) -> EvaluationRow:
        """The row of a line. Raises KeyError or TypeError if the line holds no such row."""
        line = {"reward_std": None, "mean_length": None, "seconds": 0.0, **line, "split": str(line["split"])}
        _require(line, int, "step", "problems")
        _require(line, NUMBER, "accuracy", "seconds")
        _require(line, NUMBER_OR_NONE, "reward_std", "mean_length")
        return EvaluationRow(**{known.name: line[known.name] for known in fields(EvaluationRow)})


@dataclass(frozen=True, eq=False)  # equal to itself alone, so that something can be remembered about it
class RoundRow:
    """A line of ``metrics.jsonl``; docs/metrics.md lists the keys.

    Attributes:
        step: the number of finished rounds, this one included.
        measures: the whole line.
    """

    step: int
    measures: Mapping[str, Any]

    @staticmethod
    def of(line: Mapping[str, Any]) -> RoundRow:
        """The row of a line. Raises KeyError or TypeError if the line holds no such row."""
        _require(line, NUMBER_OR_NONE, *(key for key in line if "/" in key and not key.endswith(keys.NO_NUMBERS)))
        _require(line, NUMBER, *(key for key in ("reward", keys.TOKENS_SAMPLED, keys.STEP_TIME) if key in line))
        _require(line, int, "step")
        return RoundRow(line["step"], line)

    @cached_property  # a line of a large swarm has thousands of keys
    def by_peer(self) -> Mapping[str, Mapping[str, Any]]:
        """The line's measures about each peer, by name and measure."""
        return keys.by_peer(self.measures)


@dataclass(frozen=True)
class EventRow:
    """A line of ``events.jsonl``.

    Attributes:
        time: as the line writes it.
        event: None if this version knows no such kind.
    """

    time: str
    event: Event | None

    @staticmethod
    def of(line: Mapping[str, Any]) -> EventRow:
        """The row of a line. Raises TypeError if the line holds no such row."""
        if (event := of_json(line)) is not None:
            _require(line, int, *({"step", "round"} & line.keys()))
            _require(line, str, *({"text"} & line.keys()))
        return EventRow(str(line.get("time", "")), event)


def _require(line: Mapping[str, Any], kind: type | tuple[type, ...], *names: str) -> None:
    for name in names:
        if not isinstance(line[name], kind):
            raise TypeError(f"{name} is {line[name]!r}")


OWN_WORK = {"sampling": (keys.SAMPLE,), "exchange": (keys.EXCHANGE, keys.ADMIT), "training": (keys.LOGP, keys.UPDATE)}
"""A peer's own work, without evaluation and without waiting for the others, each part with the keys of its stages."""


def own_seconds(rounds: Iterable[RoundRow]) -> dict[str, float]:
    """Seconds of each part of a peer's own work over some rounds."""
    return keys.seconds_by_stage(*(row.measures for row in rounds), states=OWN_WORK)


class PeerRun:
    """The records of one peer in one arm under one seed, as far as they were written at the last look.

    Args:
        directory: the peer's directory; a peer that was not started has none, and no records.
        most: follow the records, and keep about so many rounds; None keeps all.
    """

    def __init__(self, directory: Path, most: int | None = None) -> None:
        self.directory, self.name = directory, directory.name
        self._metrics = Lines(directory / METRICS, RoundRow.of, most)
        self._evaluations = Lines(directory / EVALUATIONS, EvaluationRow.of, most and 512)
        self._events = Lines(directory / EVENTS, EventRow.of, most and 64)
        self._spent: dict[int, tuple[int, float]] = {}

    @staticmethod
    def read(directory: Path) -> PeerRun:
        """Read all records.

        Raises:
            RecordsError: records are damaged or too large. A damaged event is left out.
        """
        peer = PeerRun(directory)
        peer.refresh()
        for lines in (peer._metrics, peer._evaluations):
            lines.whole()
        return peer

    def refresh(self) -> bool:
        """Read the records that were added, and return whether there were any."""
        changed = [lines.refresh() for lines in (self._metrics, self._evaluations, self._events)]
        if changed[0]:
            self._spent = {}
        return any(changed)

    @property
    def rounds(self) -> Sequence[RoundRow]:
        """The known rounds; if a long run is followed, some in between are left out."""
        return self._metrics.rows

    @property
    def evaluations(self) -> Sequence[EvaluationRow]:
        return self._evaluations.rows

    @property
    def events(self) -> Sequence[EventRow]:
        """The events that the peer noticed."""
        return self._events.rows

    @property
    def thinned(self) -> bool:
        """Whether some rounds in between are left out."""
        return self._metrics.thinned

    @property
    def damage(self) -> str:
        """The first line that was rejected, with the reason; "" without one."""
        files = (self._metrics, self._evaluations, self._events)
        return next((f"{lines.path.name}, {lines.damage}" for lines in files if lines.damage), "")

    @property
    def changed(self) -> float:
        """The time of the peer's last record, in seconds since the epoch; 0 without records."""
        return max(lines.changed for lines in (self._metrics, self._evaluations, self._events))

    @property
    def noticed(self) -> float:
        """The time of its last event after its last round, in seconds since the epoch; 0 without one."""
        return self._events.changed if self._events.changed >= self._metrics.changed else 0.0

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.split for row in self.evaluations))

    def evaluated(self, step: int) -> set[str]:
        """The splits on which the peer was evaluated after ``step`` rounds."""
        return {row.split for row in self._evaluations.whole() if row.step == step}

    def on(self, split: str) -> tuple[EvaluationRow, ...]:
        """The evaluations on one split, the untrained model's first."""
        return tuple(row for row in self.evaluations if row.split == split)

    @property
    def step(self) -> int:
        """The number of its last round. It can exceed the number of lines, if the peer joined late or was away."""
        return self.rounds[-1].step if self.rounds else 0

    @property
    def last(self) -> Mapping[str, Any]:
        """The measures of its last round; {} without one."""
        return self.rounds[-1].measures if self.rounds else {}

    def standing_for(self) -> Iterator[tuple[RoundRow, int]]:
        """Each known round, and the number of rounds it stands for: itself and the left-out ones before it."""
        before = 0
        for row in self.rounds:
            yield row, row.step - before if self.thinned else 1
            before = row.step

    def total(self, measure: str) -> float:
        """The sum of a measure over all rounds; rounds without it count 0."""
        return float(sum(n * row.measures.get(measure, 0) for row, n in self.standing_for()))

    @property
    def learned_alone(self) -> bool:
        """Whether it collaborated and used no foreign rollout in any round, though a round could have."""
        return self.total(keys.WITHOUT_FOREIGN) > 0 and not self.total(keys.FOREIGN_USED)

    def spent_by(self, step: int) -> tuple[int | None, float | None]:
        """Tokens that it sampled and seconds of its own work in its first ``step`` rounds.

        Both are None if the last of these rounds is not recorded.
        """
        if not self._spent:
            seconds = 0.0
            self._spent[0] = (0, seconds)
            for row, n in self.standing_for():
                seconds += n * sum(own_seconds([row]).values())
                self._spent[row.step] = (row.measures.get(keys.TOKENS_SAMPLED, 0), seconds)
        if self.thinned:
            step = max((known for known in self._spent if known <= step), default=0)
        return self._spent.get(step, (None, None))

    @property
    def bytes_sent(self) -> int:
        """Bytes that the peer offered to each of the others, over all rounds."""
        return int(self.total(keys.peer_key(self.name, "bytes")))

    @property
    def bytes_received(self) -> int:
        every = ((name, measures, n) for row, n in self.standing_for() for name, measures in row.by_peer.items())
        return sum(n * of_peer.get("bytes", 0) for name, of_peer, n in every if name != self.name)

    def answers(self, split: str, step: int | None = None) -> list[dict[str, Any]]:
        """An evaluation's answers, problem by problem; none if they were deleted.

        Args:
            step: the finished rounds before the evaluation; by default the last one counts.
        """
        after = self.on(split)[-1].step if step is None else step
        return Lines(answers_path(self.directory, split, after), any_row).whole()

    @property
    def last_recorded(self) -> int | None:
        """The last round with recorded rollouts, counted from 0; None without one."""
        last = self.step - 1
        if last >= 0 and rollouts_path(self.directory, last).exists():
            return last
        return max(recorded_rounds(self.directory), default=None)

    def rollouts(self, round: int) -> list[RolloutRow]:
        """A round's rollouts, a row each.

        Raises:
            RecordsError: the rollouts are absent, damaged, or larger than any run writes.
        """
        rows = read_rollouts(self.directory, round, SHOWN)
        for number, row in enumerate(rows):
            if not _is_rollout(row):
                raise damaged(rollouts_path(self.directory, round), f"row {number} is no rollout")
        return cast(list[RolloutRow], rows)

    @property
    def best(self) -> int:
        """The step of the checkpoint with the best validation accuracy, the first of equals; 0 without one."""
        steps = saved_steps(self.directory)
        rows = [row for row in self.on(VALIDATION) if row.step in steps]
        return max(rows, key=lambda row: row.accuracy).step if rows else 0

    @property
    def tokenizer(self) -> Path | None:
        """The file of the tokenizer in its newest checkpoint; None without a checkpoint."""
        steps = saved_steps(self.directory)
        return checkpoint_path(self.directory, steps[-1]) / TOKENIZER if steps else None

    @property
    def started(self) -> bool:
        """Whether it has records. A TRL script has rounds alone."""
        return bool(self.evaluations or self.rounds)

    def missing(self, rounds: int) -> str | None:
        """A text that names the records still missing from a run of ``rounds`` rounds; None if it is complete."""
        if not self.started:
            return "not started"
        if self.step < rounds:
            return f"{self.step} of {rounds} rounds"
        if not self.evaluations:
            return "all rounds but no evaluations, like a TRL script's"
        if any(self.on(split)[-1].step < rounds for split in self.splits):
            return "not evaluated after its last round"
        return None


def observed_in(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """An environment's answers in a recorded rollout, each with ``at`` and ``ids``."""
    answers = row.get("observed")
    return [] if answers is None else list(answers)


def _is_rollout(row: Mapping[str, Any]) -> bool:
    """Whether a row has the fields of every rollout, with arrays of matching lengths."""
    if any(row.get(key) is None for key in EVERY):
        return False
    old, unit, n = row.get("old_logp"), row.get("unit"), len(row["completion_ids"])
    for answer in observed_in(row):
        if answer is None or answer["ids"] is None or answer["at"] not in range(n + 1):
            return False
    if old is None:
        return True
    units = range(n) if unit is None else unit
    inside = all(0 <= u < len(row["gen_logp"]) for u in units)
    return row.get("kl_k1") is not None and len(old) == len(units) == n and inside


def final_accuracy(evaluations: Sequence[EvaluationRow]) -> float:
    """The mean accuracy of the last three evaluations; the untrained model's counts only if there is no other."""
    trained = [row for row in evaluations if row.step] or evaluations
    return fmean(row.accuracy for row in trained[-LAST_EVALUATIONS:])


@dataclass(frozen=True)
class ArmOfRun:
    """One arm of one run: the peers with records here."""

    run: Path
    arm: Arm
    peers: Mapping[str, PeerRun]

    @staticmethod
    def followed(run: Path, arm: Arm, here: Sequence[str]) -> ArmOfRun:
        """An arm to follow while it is written, before the first look."""
        return ArmOfRun(run, arm, {name: PeerRun(run / arm.name / name, 512) for name in here})

    @property
    def rounds(self) -> int:
        return self.arm.recipe.training.rounds

    def refresh(self) -> bool:
        """Read the records that were added, and return whether there were any."""
        return sum(peer.refresh() for peer in self.peers.values()) > 0  # a sum, unlike any(), refreshes every peer


@dataclass(frozen=True)
class Run:
    """One run directory: a recipe under one seed, and the records by arm and peer."""

    directory: Path
    recipe: Recipe
    peers: dict[tuple[str, str], PeerRun]


@dataclass(frozen=True)
class Study:
    """All records of a directory: of one run, or of the runs of an experiment, one per seed.

    Attributes:
        runs: the runs by seed.
        arms: the arms that were started under some seed.
        not_run: the names of the other arms.
        seeds: the complete seeds, with every arm and peer trained and evaluated to its last round. Only these seeds are
            compared.
        left_out: the reason why each other seed is not complete.
        peer_names: the peers with records here.
        elsewhere: the other peers of a joined run; their records are on their own machines.
        provenances: versions, commit and machine of each time that rounds were trained.
    """

    directory: Path
    recipe: Recipe
    runs: dict[int, Run]
    arms: tuple[Arm, ...]
    not_run: tuple[str, ...]
    seeds: tuple[int, ...]
    left_out: dict[int, str]
    peer_names: tuple[str, ...]
    elsewhere: tuple[str, ...]
    provenances: tuple[Provenance, ...]
    plan: Plan = field(repr=False)

    def peer(self, seed: int, arm: str, peer: str) -> PeerRun:
        return self.runs[seed].peers[arm, peer]

    def arm_of(self, seed: int, arm: Arm) -> ArmOfRun:
        """One arm under one seed."""
        peers = {peer: self.peer(seed, arm.name, peer) for peer in self.peer_names}
        return ArmOfRun(self.runs[seed].directory, arm, peers)

    @property
    def seeds_shown(self) -> tuple[int, ...]:
        """The complete seeds; while there are none, the seeds that were started."""
        return self.seeds or tuple(self.runs)

    @property
    def splits(self) -> tuple[str, ...]:
        found = dict.fromkeys(s for run in self.runs.values() for peer in run.peers.values() for s in peer.splits)
        return (VALIDATION, *(split for split in found if split != VALIDATION))

    @property
    def baselines(self) -> tuple[str, ...]:
        """The started arms that every other arm is compared with."""
        run = {arm.name for arm in self.arms}
        return tuple(name for name in self.recipe.experiment.baselines if name in run)


def read_run(directory: Path) -> Run:
    """Read the records of one run.

    Raises:
        RecordsError: the directory holds no run or one of another version of ftis, or a file is damaged.
    """
    if not (directory / RECIPE).exists():
        raise RecordsError(f"{directory} holds no run (no {RECIPE}): give the directory that ftis train or join named")
    return _run(directory, read_plan(directory).recipe)


def read_study(directory: Path) -> Study:
    """Read the records of an experiment or of one run.

    Raises:
        RecordsError: the directory holds neither, nothing was recorded yet, or a file is damaged or of another version
            of ftis.
    """
    plan = read_plan(directory)
    recipe = plan.recipe
    runs = {seed: _run(plan.run_of(seed), recipe.model_copy(update={"seed": seed})) for seed in plan.seeds}
    started = {arm for run in runs.values() for (arm, _), peer in run.peers.items() if peer.started}
    if not started:
        raise RecordsError(f"{directory}: nothing was recorded yet; report again after the first evaluation or round")
    arms = tuple(arm for arm in plan.arms if arm.name in started)
    every = [peer.name for peer in recipe.peers]
    names = plan.here(every)
    left_out = {seed: why for seed, run in runs.items() if (why := _unfinished(run, arms, names)) is not None}
    return Study(
        directory=directory,
        recipe=recipe,
        runs=runs,
        arms=arms,
        not_run=tuple(arm.name for arm in plan.arms if arm.name not in started),
        seeds=tuple(seed for seed in runs if seed not in left_out),
        left_out=left_out,
        peer_names=names,
        elsewhere=tuple(name for name in every if name not in names),
        provenances=tuple(part for run in runs.values() for part in provenances(run.directory)),
        plan=plan,
    )


def _run(directory: Path, recipe: Recipe) -> Run:
    peers = {
        (arm.name, peer.name): PeerRun.read(directory / arm.name / peer.name)
        for arm in arm_configs(recipe)
        for peer in recipe.peers
    }
    return Run(directory, recipe, peers)


def _unfinished(run: Run, arms: Sequence[Arm], peers: Sequence[str]) -> str | None:
    """A text that names the first incomplete peer of a run and its missing records; None if all are complete."""
    for arm in arms:
        for peer in peers:
            if missing := run.peers[arm.name, peer].missing(arm.recipe.training.rounds):
                return f"{arm.name}, {peer}: {missing}"
    return None

"""The one reader of what runs leave behind: an experiment's or a run's directory, as typed values.

Reading loads no model and changes nothing. Whatever the summary, the comparison and the page show comes through here.

    ReportError: a directory that holds no run or experiment, or records that are damaged
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from ftis.config import ArmConfig, FtisError, Recipe
from ftis.metric_keys import by_peer
from ftis.recipe.arms import PROVENANCE, arm_configs
from ftis.recipe.parsing import parse, with_arm
from ftis.records.files import read_jsonl
from ftis.records.writing import read_rollouts, rollouts_path

VALIDATION = "validation"

LAST_EVALUATIONS = 3
"""A final accuracy is the mean of so many last evaluations: a single one of a few hundred problems swings."""


class ReportError(FtisError):
    """Nothing can be reported from a directory."""


@dataclass(frozen=True)
class EvaluationRow:
    """A line of ``evaluations.jsonl``: greedy pass@1 on one split after ``step`` rounds, a share in 0 … 1."""

    step: int
    split: str
    accuracy: float
    problems: int


@dataclass(frozen=True, eq=False)  # a row is itself alone, so that something can be remembered about it
class RoundRow:
    """A line of ``metrics.jsonl``; docs/metrics.md lists the keys.

    Attributes:
        step: rounds that were finished then.
        measures: the whole line.
    """

    step: int
    measures: Mapping[str, Any]

    @staticmethod
    def of(line: Mapping[str, Any]) -> RoundRow:
        return RoundRow(line["step"], line)

    @cached_property  # a line of a large swarm has thousands of keys
    def by_peer(self) -> Mapping[str, Mapping[str, Any]]:
        """What the line says about each peer, by name and measure."""
        return by_peer(self.measures)


@dataclass(frozen=True)
class OwnSeconds:
    """What a peer worked itself over some rounds, without evaluation and without waiting for the others.

    Attributes:
        sampling: of its own rollouts, with their rewards.
        exchange: writing its own message, reading and judging the others'.
        training: log-probabilities and the update.
    """

    sampling: float
    exchange: float
    training: float

    @property
    def total(self) -> float:
        return self.sampling + self.exchange + self.training

    @staticmethod
    def over(rounds: Sequence[RoundRow]) -> OwnSeconds | None:
        """The sum over rounds; None if one was recorded before waiting was told apart from work (``time/wait``)."""
        measures = [row.measures for row in rounds]
        if any("time/wait" not in of_round for of_round in measures):
            return None

        def total(*stages: str) -> float:
            return float(sum(of_round.get(f"time/{stage}", 0) for of_round in measures for stage in stages))

        return OwnSeconds(total("sample"), total("exchange", "admit"), total("logp", "update"))


@dataclass(frozen=True)
class PeerRun:
    """The records of one peer in one arm under one seed; a peer that was not started has none."""

    directory: Path
    evaluations: tuple[EvaluationRow, ...]
    rounds: tuple[RoundRow, ...]

    @staticmethod
    def read(directory: Path) -> PeerRun:
        evaluations, rounds = (_lines(directory / name) for name in ("evaluations.jsonl", "metrics.jsonl"))
        try:
            rows = tuple(EvaluationRow(e["step"], e["split"], e["accuracy"], e["problems"]) for e in evaluations)
            return PeerRun(directory, rows, tuple(map(RoundRow.of, rounds)))
        except (KeyError, TypeError, AttributeError) as error:
            raise _damaged(directory, error) from None

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.split for row in self.evaluations))

    def on(self, split: str) -> tuple[EvaluationRow, ...]:
        """The evaluations on one split, the untrained model's first."""
        return tuple(row for row in self.evaluations if row.split == split)

    def total(self, measure: str) -> float:
        """The sum of a measure over all rounds; rounds without it count 0."""
        total: float = sum(row.measures.get(measure, 0) for row in self.rounds)
        return total

    @property
    def own_seconds(self) -> OwnSeconds | None:
        """Its own work in all rounds; None where waiting was not told apart."""
        return OwnSeconds.over(self.rounds)

    @property
    def seconds_waited(self) -> float | None:
        """For the others, over all rounds; None where it was not told apart."""
        return self.total("time/wait") if self.own_seconds is not None else None

    def tokens_after(self, step: int) -> int | None:
        """Tokens the peer sampled itself in its first ``step`` rounds; None if the last of them is not recorded."""
        if step == 0:
            return 0
        return next((row.measures["tokens_sampled"] for row in self.rounds if row.step == step), None)

    def seconds_after(self, step: int) -> float | None:
        """Its own seconds in its first ``step`` rounds; None if they are not known."""
        if self.tokens_after(step) is None:
            return None
        own = OwnSeconds.over([row for row in self.rounds if row.step <= step])
        return None if own is None else own.total

    @property
    def bytes_sent(self) -> int:
        """What the peer offered to each of the others, over all rounds."""
        return sum(row.by_peer.get(self.name, {}).get("bytes", 0) for row in self.rounds)

    @property
    def bytes_received(self) -> int:
        return sum(
            of_peer.get("bytes", 0) for row in self.rounds for name, of_peer in row.by_peer.items() if name != self.name
        )

    def last_answers(self, split: str) -> list[dict[str, Any]]:
        """The last evaluation's answers, problem by problem; none if they were deleted."""
        file = self.directory / "evaluations" / f"{split}-{self.on(split)[-1].step}.jsonl"
        return _lines(file)

    def rollouts(self, round: int) -> list[dict[str, Any]]:
        """A round's rollouts, a row each."""
        return read_rollouts(self.directory, round)

    def rollouts_kept_and_tokens(self) -> tuple[int, int] | None:
        """Rollouts that carried gradient and tokens of all rollouts, over all rounds; None unless all are recorded."""
        recorded = recorded_rounds(self.directory)
        if len(recorded) != len(self.rounds):
            return None
        kept = tokens = 0
        for round in recorded:
            file = rollouts_path(self.directory, round)
            try:
                with pq.ParquetFile(file) as recorded_round:  # a third of the time that read_table takes
                    table = recorded_round.read(columns=["kept", "completion_ids"], use_threads=False)
            except (OSError, ValueError) as error:
                raise ReportError(f"{file} cannot be read ({error}): delete the directory it is in") from error
            kept += pc.sum(table["kept"]).as_py() or 0
            tokens += pc.sum(pc.list_value_length(table["completion_ids"])).as_py() or 0
        return kept, tokens

    @property
    def step(self) -> int:
        """How far it came, in rounds; one that joined late or was away has fewer lines."""
        return self.rounds[-1].step if self.rounds else 0

    def missing(self, rounds: int) -> str | None:
        """What a run of ``rounds`` rounds still lacks, in words; None if it is complete."""
        if not self.evaluations:
            return "not started"
        if self.step < rounds:
            return f"{self.step} of {rounds} rounds"
        if any(self.on(split)[-1].step < rounds for split in self.splits):
            return "not evaluated after its last round"
        return None


def recorded_rounds(peer: Path) -> list[int]:
    """The rounds whose rollouts were recorded in a peer's directory, in order."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in (peer / "rollouts").glob("round-*.parquet"))


def tokenizer_file(peer: Path) -> Path | None:
    """The tokenizer in the newest checkpoint of a peer's directory; None without a checkpoint."""
    steps = (path.name.removeprefix("checkpoint-") for path in peer.glob("checkpoint-*"))
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    return None if newest is None else peer / f"checkpoint-{newest}" / "tokenizer.json"


def final_accuracy(evaluations: Sequence[EvaluationRow]) -> float:
    """The mean of the last three evaluations; the untrained model's counts only where there is no other."""
    trained = [row for row in evaluations if row.step] or evaluations
    return fmean(row.accuracy for row in trained[-LAST_EVALUATIONS:])


@dataclass(frozen=True)
class Run:
    """One run directory: a recipe under one seed, and the records by arm and peer."""

    directory: Path
    recipe: Recipe
    peers: dict[tuple[str, str], PeerRun]


@dataclass(frozen=True)
class Study:
    """What a directory holds: one run, or the runs of an experiment, one per seed.

    Attributes:
        runs: by seed.
        arms: those that were started under some seed.
        not_run: names of those that were not.
        seeds: the complete ones, where every arm and peer was trained and evaluated to its last round. Only they are
            compared.
        left_out: why each other seed is not complete.
        peer_names: the peers whose records are here.
        elsewhere: the other peers of a joined run, whose records are on their own machines.
        provenances: with which versions, commit and machine, of each time that rounds were trained.
    """

    directory: Path
    recipe: Recipe
    runs: dict[int, Run]
    arms: tuple[ArmConfig, ...]
    not_run: tuple[str, ...]
    seeds: tuple[int, ...]
    left_out: dict[int, str]
    peer_names: tuple[str, ...]
    elsewhere: tuple[str, ...]
    provenances: tuple[dict[str, Any], ...]

    def peer(self, seed: int, arm: str, peer: str) -> PeerRun:
        return self.runs[seed].peers[arm, peer]

    @property
    def seeds_shown(self) -> tuple[int, ...]:
        """The complete seeds; while there is none, those that were started."""
        return self.seeds or tuple(self.runs)

    @property
    def splits(self) -> tuple[str, ...]:
        found = dict.fromkeys(s for run in self.runs.values() for peer in run.peers.values() for s in peer.splits)
        return (VALIDATION, *(split for split in found if split != VALIDATION))

    @property
    def baselines(self) -> tuple[str, ...]:
        """The arms that each other arm is compared with, of those that were run."""
        run = {arm.name for arm in self.arms}
        return tuple(name for name in self.recipe.experiment.baselines if name in run)


def read_run(directory: Path) -> Run:
    """Read the records of one run.

    Raises:
        ReportError: no run is there, or its recipe is damaged.
        RecipeError: its recipe is of another version of ftis.
    """
    if not (directory / "recipe.json").exists():
        raise ReportError(
            f"{directory} holds no run (no recipe.json): give the directory that ftis train or ftis join named"
        )
    return _run(directory, parse(_json(directory / "recipe.json"), str(directory / "recipe.json")))


def read_study(directory: Path) -> Study:
    """Read the records of an experiment or of one run.

    Raises:
        ReportError: neither is there, nothing was recorded yet, or a file is damaged.
        RecipeError: its recipe is of another version of ftis.
    """
    experiment = directory / "experiment.json"
    if experiment.exists():
        written = _json(experiment)
        try:
            document, seeds = written["recipe"], written["seeds"]
        except KeyError as error:
            raise _damaged(experiment, error) from None
        recipe = parse(document, str(experiment))
        runs = {
            seed: _run(directory / f"{recipe.name}-seed{seed}", recipe.model_copy(update={"seed": seed}))
            for seed in seeds
        }
    elif (directory / "recipe.json").exists():
        run = read_run(directory)
        recipe, runs = run.recipe, {run.recipe.seed: run}
    else:
        raise ReportError(
            f"{directory} holds neither a run nor an experiment (no recipe.json, no experiment.json): give the "
            f"directory that ftis train or ftis join named"
        )
    started = {arm for run in runs.values() for (arm, _), peer in run.peers.items() if peer.evaluations}
    if not started:
        raise ReportError(f"{directory}: nothing was recorded yet; report again after the first evaluation")
    arms = tuple(arm for arm in arm_configs(recipe) if arm.name in started)
    elsewhere = _elsewhere(recipe, runs)
    names = tuple(peer.name for peer in recipe.peers if peer.name not in elsewhere)
    left_out = {seed: why for seed, run in runs.items() if (why := _unfinished(run, recipe, arms, names)) is not None}
    return Study(
        directory=directory,
        recipe=recipe,
        runs=runs,
        arms=arms,
        not_run=tuple(arm.name for arm in arm_configs(recipe) if arm.name not in started),
        seeds=tuple(seed for seed in runs if seed not in left_out),
        left_out=left_out,
        peer_names=names,
        elsewhere=elsewhere,
        provenances=tuple(part for run in runs.values() for part in _provenances(run.directory)),
    )


def _provenances(run: Path) -> list[dict[str, Any]]:
    """What its provenance says of when the run began, and of when arms were added or it went on otherwise."""
    of_run = _json(run / PROVENANCE) if (run / PROVENANCE).exists() else {}
    return [of_run, *of_run.get("added", {}).values(), *of_run.get("continued", ())]


@dataclass(frozen=True)
class Probe:
    """What ``ftis probe`` left: values of each objective, by measure, and the ceiling's.

    A value is a mapping with ``value``, ``low`` and ``high``, or a number; None is undefined.
    """

    arm: str
    peer: str
    step: int
    rollouts: int
    sources: tuple[str, ...]
    ceiling: Mapping[str, Any]
    objectives: Mapping[str, Mapping[str, Any]]


def read_probes(study: Study) -> list[Probe]:
    """The probes in a study's directory and its runs'; files of another form are skipped."""
    places = dict.fromkeys([study.directory, *(run.directory for run in study.runs.values())])
    files = [file for place in places for name in ("probe*.json", "probe/*.json") for file in sorted(place.glob(name))]
    probes = []
    for file in files:
        try:
            probes.append(_probe(json.loads(file.read_text(encoding="utf-8"))))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return probes


def _probe(document: Mapping[str, Any]) -> Probe:
    foreign = document.get("foreign", {})
    objectives = {name: dict(values) for name, values in document["objectives"].items()}
    ceiling = dict(document.get("ceiling", {}))
    for values in (ceiling, *objectives.values()):
        for value in values.values():
            if isinstance(value, dict):
                value["value"]
            elif not isinstance(value, (int, float, str, type(None))):
                raise TypeError(f"a probe's value is {value!r}")
    return Probe(
        arm=document["arm"],
        peer=document["peer"],
        step=document["step"],
        rollouts=foreign.get("rollouts", 0),
        sources=tuple(foreign.get("sources", ())),
        ceiling=ceiling,
        objectives=objectives,
    )


def _run(directory: Path, recipe: Recipe) -> Run:
    peers = {
        (arm.name, peer.name): PeerRun.read(directory / arm.name / peer.name)
        for arm in arm_configs(recipe)
        for peer in recipe.peers
    }
    return Run(directory, recipe, peers)


def _unfinished(run: Run, recipe: Recipe, arms: Sequence[ArmConfig], peers: Sequence[str]) -> str | None:
    """What the first incomplete peer of a run lacks, in words."""
    for arm in arms:
        rounds = with_arm(recipe, arm).training.rounds
        for peer in peers:
            missing = run.peers[arm.name, peer].missing(rounds)
            if missing:
                return f"{arm.name}, {peer}: {missing}"
    return None


def _elsewhere(recipe: Recipe, runs: Mapping[int, Run]) -> tuple[str, ...]:
    """The peers that a joined run has no records of: ``ftis join`` keeps one peer's and the events it met."""
    records = [peer for run in runs.values() for peer in run.peers.values() if peer.evaluations]
    here = {peer.name for peer in records}
    if len(here) > 1 or not all((peer.directory / "events.jsonl").exists() for peer in records):
        return ()
    return tuple(peer.name for peer in recipe.peers if peer.name not in here)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none where it is not there."""
    try:
        return read_jsonl(file) if file.exists() else []
    except ValueError as error:
        raise _damaged(file, error) from None


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise _damaged(file, error) from None
    if not isinstance(document, dict):
        raise _damaged(file, TypeError("not an object"))
    return document


def _damaged(file: Path, error: Exception) -> ReportError:
    return ReportError(f"{file} is damaged ({error}): restore it or run again")

"""A peer trained again on the rollouts that a run recorded: same batches, same steps, another objective.

A replay samples only for evaluations and exchanges nothing. Under the recorded objective it gives the recorded weights
bit for bit on the same machine. So under another objective, every difference comes from the objective and none from
another draw. The answer is about *these* rollouts: a peer that had learned under the other objective would have sampled
other rollouts.

After an alarm of the no-regret test a replay goes back as the run did, to its own checkpoint of that step. If it began
later than there, it says so and stays.

    <run>/replay/<what>/replay.json        what was replayed, from where, and the replay's provenance
    <run>/replay/<what>/<peer>/            records and final checkpoint, laid out as in a run
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ftis.admission import Admission, Collected
from ftis.cli_options import Overrides, console
from ftis.config import Recipe, RecipeError, RunError, excerpt
from ftis.directory.provenance import provenance
from ftis.machine.resources import with_threads
from ftis.measures import RoundExchange, RoundRecord, Stopwatch
from ftis.metric_keys import by_peer, peer_key
from ftis.models import starters
from ftis.peer import Peer
from ftis.recipe.arms import arms_of, threads_of
from ftis.recipe.parsing import parse, set_key, split_override
from ftis.records.events import ArmBegun, PeerFinished, PeerStarted, Say, placed, unheard
from ftis.records.files import saved_steps, write_json
from ftis.records.plan import PROVENANCE, read_plan, read_provenance
from ftis.records.reading import PeerRun, observed_in
from ftis.records.rollouts import read_rollouts, rollouts_path
from ftis.records.writing import Records
from ftis.rollouts import Batch, Group, Observed, Rollout, ScoredGroup, Sent, collate
from ftis.run.assembly import assemble
from ftis.run.training import Trainer
from ftis.view.progress import Display
from research import commands

REPLAYABLE = ("num_iterations", "steps_per_generation", "scale_rewards", "eval_every", "record_rollouts")
"""Keys of ``training`` that a replay may change, besides all of ``objective``: they say how a peer learns from
rollouts, not which rollouts there are."""

OF_THE_EXCHANGE = ("delivered", "rejected", "first_rejection", "bytes", "passed_over")
"""Metrics of a peer that a replay cannot measure; it copies them from the recorded round."""


@dataclass(frozen=True)
class Recording:
    """One peer of one arm, as a run directory holds it.

    Attributes:
        recipe: with exactly the peers of its swarm.
        threads: CPU threads the peer was trained with.
    """

    run: Path
    arm: str
    recipe: Recipe
    peer: str
    threads: int

    @property
    def directory(self) -> Path:
        return self.run / self.arm / self.peer

    def rounds(self) -> int:
        """The number of rounds that the peer finished."""
        finished = PeerRun.read(self.directory).step
        if not finished:
            raise RunError(
                f"{self.directory} holds no records of peer {self.peer!r}: train that arm first (ftis train --arm "
                f"{self.arm}), or choose another with --arm and --peer"
            )
        return finished

    def metrics(self) -> dict[int, Mapping[str, Any]]:
        """The peer's metrics by the number of finished rounds."""
        return {row.step: row.measures for row in PeerRun.read(self.directory).rounds}

    def check_recorded(self, first: int, last: int) -> None:
        """Refuse rounds ``first`` … ``last`` − 1 unless all their rollouts were recorded.

        Raises:
            RunError: some are missing.
        """
        missing = [round for round in range(first, last) if not rollouts_path(self.directory, round).exists()]
        if missing:
            reason = "" if self.recipe.training.record_rollouts else " (training.record_rollouts was false)"
            raise RunError(
                f"{self.directory}: the rollouts of {len(missing)} of {last - first} rounds, the first being round "
                f"{missing[0] + 1}, were not recorded or are gone{reason}: train again with training.record_rollouts = "
                f"true, or choose other rounds"
            )

    def load(self, step: int, recipe: Recipe | None = None, records: Records | None = None) -> Trainer:
        """The peer after ``step`` finished rounds, optimiser included: untrained for 0, else from its checkpoint.

        Raises:
            RunError: there is no checkpoint of that step, or the starter is not what it was.
        """
        there = saved_steps(self.directory)
        if step and step not in there:
            kept = ", ".join(map(str, there)) or "none"
            raise RunError(
                f"{self.directory} has no checkpoint-{step} (there: {kept}): choose one of those or 0, or train again "
                f"with a larger training.save_total_limit"
            )
        recipe = recipe or self.recipe
        model = recipe.peer(self.peer).model
        if starters.is_starter(model) and (not step or recipe.peer(self.peer).train == "lora"):
            self._check_starter(model)
        return assemble(recipe, self.peer, self.directory, resume_step=step, records=records)

    def _check_starter(self, model: str) -> None:
        """Refuse a starter that is another one now: the rollouts were learned from by other weights."""
        began, now = read_provenance(self.run).get("starters", {}), starters.path_of(model).name
        if began.get(model, now) != now:
            raise RunError(
                f"{self.run} began with {model} as {began[model]}, which is {now} now: use the version in "
                f"{self.run / PROVENANCE}, or train again"
            )

    @contextmanager
    def examined(self, step: int) -> Iterator[Peer]:
        """A context with the peer after ``step`` finished rounds, to look at.

        Raises:
            RunError: there is no checkpoint of that step.
        """
        with closing(self.load(step, self.recipe)) as trainer:
            yield trainer.peer

    def batch(self, peer: Peer, round: int) -> Batch:
        """The round's rollouts, in the order in which the peer learned from them.

        Raises:
            RunError: the file is damaged, or its problems are not those of the task.
        """
        path = rollouts_path(self.directory, round)
        try:
            rows = read_rollouts(self.directory, round)
            groups = [
                _scored_group(key, list(members))
                for key, members in groupby(rows, key=lambda row: (row["round"], row["item"], row["source"]))
            ]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{path} cannot be read ({error}): restore that file or train again") from error
        for row in rows:
            known = peer.member.task.train[row["item"]].question if row["item"] < len(peer.member.task.train) else None
            if known != row["question"]:
                raise RunError(
                    f"{path}: problem {row['item']} reads {row['question']!r}, but {known!r} in the task as it is now: "
                    f"point task.path of {self.run / 'recipe.json'} to the data that the run was recorded with"
                )
        return collate(groups, peer.member.prompt_ids, peer.name)


def _scored_group(key: tuple[int, int, str], rows: Sequence[Mapping[str, Any]]) -> ScoredGroup:
    round, item, source = key
    rollouts = tuple(
        Rollout(
            row["completion_ids"],
            row["gen_logp"],
            row["unit"],
            _sent(row["sent"]),
            tuple(Observed(answer["at"], answer["ids"]) for answer in observed_in(row)),
        )
        for row in rows
    )
    return ScoredGroup(
        Group(source, round, item, rollouts),
        completions=tuple(row["completion"] for row in rows),
        rewards=tuple(row["reward"] for row in rows),
    )


def _sent(came: Mapping[str, Any] | None) -> Sent | None:
    """The text as it came, if a rollout came as text."""
    if came is None:
        return None
    sizes, counts, ends = (np.array(came[name], np.int32) for name in ("size_S", "tokens_U", "ends"))
    return Sent(came["text"], sizes, np.array(came["gen_logp_S"], np.float32), counts, came["fault"], ends)


def recordings(run: Path, arm: str | None = None, peers: Sequence[str] = ()) -> list[Recording]:
    """The recordings of ``peers`` (of all peers if none is named) in one arm of a run directory.

    Raises:
        RunError: not a run directory, several arms and none named, an arm or peer that does not exist.
    """
    recipe = read_plan(run).recipe
    try:
        cores = int(read_provenance(run)["machine"]["cores"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run / PROVENANCE} does not name the machine's cores ({error!r}): restore it") from None
    arms = arms_of(recipe, (arm,) if arm else ())
    if len(arms) > 1:
        recorded = [a for a in arms if (run / a.name).is_dir()]
        if len(recorded) != 1:
            names = ", ".join(a.name for a in recorded or arms)
            raise RunError(f"{run} has several arms: name one with --arm ({names})")
        arms = recorded
    (chosen,) = arms
    for name in peers:
        chosen.recipe.peer(name)
    threads = threads_of(chosen.recipe, cores)
    return [
        Recording(run, chosen.name, swarm, peer.name, threads)
        for swarm in chosen.swarms
        for peer in swarm.peers
        if not peers or peer.name in peers
    ]


def replay(
    run: Path,
    objective: str | None = None,
    *,
    arm: str | None = None,
    peers: Sequence[str] = (),
    from_step: int = 0,
    rounds: int | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    say: Say = unheard,
) -> Path:
    """Train peers of a run again on its recorded rollouts. Returns the directory with a directory per peer.

    Args:
        objective: its name; by default the recorded one.
        arm: whose rollouts to take; needed where the run has several arms.
        peers: by default all peers of the arm.
        from_step: start from ``checkpoint-<from_step>``, optimiser included; 0 is the untrained model.
        rounds: how many to replay; by default all finished ones.
        overrides: ``key=value`` for keys of ``objective`` and those in :data:`REPLAYABLE`.
        output: by default ``<run>/replay/<objective>-on-<arm>…``.

    Raises:
        RunError: nothing was recorded, rounds are missing, or the output exists.
    """
    chosen = recordings(run, arm, peers)
    settings = dict(map(split_override, overrides))
    if objective is not None:
        settings["objective.name"] = objective
    recipes = [_changed(recording.recipe, settings) for recording in chosen]
    lasts = [_last_round(recording, from_step, rounds) for recording in chosen]
    target = output or run / "replay" / _label(recipes[0].objective.name, chosen[0].arm, from_step, rounds, settings)
    for recording, last in zip(chosen, lasts, strict=True):
        recording.check_recorded(from_step, last)
        if (target / recording.peer).exists():
            raise RunError(f"{target / recording.peer} exists: delete it, or name another place with --output")
    target.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "run": str(run),
        "arm": chosen[0].arm,
        "from_step": from_step,
        "settings": settings,
        "rounds": {r.peer: last - from_step for r, last in zip(chosen, lasts, strict=True)},
        "objective": recipes[0].objective.model_dump(),
        **provenance(recipes[0]),
    }
    _add_to_earlier(target / "replay.json", facts)
    say_of_arm = placed(say, arm=target.name)
    say_of_arm(ArmBegun(tuple(r.peer for r in chosen), max(lasts)))
    for recording, recipe, last in zip(chosen, recipes, lasts, strict=True):
        with with_threads(recording.threads):
            _replay_peer(recording, recipe, from_step, last, target / recording.peer, say_of_arm)
    return target


def _add_to_earlier(file: Path, facts: dict[str, Any]) -> None:
    """Write the facts of a replay, beside the peers that the same replay took before.

    Raises:
        RunError: another replay is there.
    """
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for key in ("run", "arm", "from_step", "settings", "objective") if before else ():
        if before.get(key) != facts[key]:
            change = f"{key} was {excerpt(before.get(key))}, now {excerpt(facts[key])}"
            raise RunError(f"{file.parent} holds another replay ({change}): name another place with --output")
    write_json(file, {**facts, "rounds": {**before.get("rounds", {}), **facts["rounds"]}})


def _replay_peer(recording: Recording, recipe: Recipe, first: int, last: int, directory: Path, say: Say) -> None:
    say = placed(say, peer=recording.peer)
    records = Records(directory, keep_rollouts=recipe.training.record_rollouts)
    try:
        trainer = recording.load(first, recipe, records)
    except BaseException:
        shutil.rmtree(directory)  # nothing is in it yet, and it would stand in the way of another try
        raise
    with closing(trainer):
        peer = trainer.peer
        recorded = recording.metrics()
        say(PeerStarted(first))
        say(trainer.evaluate(trainer.splits))
        for round in range(first, last):
            staleness = recorded[round + 1].get("sampling/staleness", 0)
            record = replay_round(peer, round, recording.batch(peer, round), staleness)
            record = record.with_more(_not_replayed(recorded[round + 1]))
            trainer.go_back()
            trainer.record(record, say)
            trainer.report_guard(say)
            if trainer.guard and trainer.is_saved(round, round + 1):
                trainer.save()
            trainer.evaluate_where_due(round, last, say)
        trainer.save()
    say(PeerFinished(last))


def replay_round(peer: Peer, round: int, batch: Batch, staleness: int = 0) -> RoundRecord:
    """Learn from a recorded batch as :meth:`ftis.peer.Peer.finish` does from its own.

    Selections hear of each sender whose rollouts the batch holds, so those that remember decide as in a round.

    Args:
        staleness: rounds that the run had learned from since it sampled its own rollouts.
    """
    for source in batch.sources:
        for selection in peer.member.selections if source != peer.name else ():
            selection.heard(Admission(source, (), ()), round)
    return peer.learn_from(round, batch, RoundExchange(Collected({}), 0, ()), Stopwatch(), staleness)


def _not_replayed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that sampling and exchange recorded."""
    of_exchange = {
        peer_key(name, measure): value
        for name, measures in by_peer(metrics).items()
        for measure, value in measures.items()
        if measure.partition("/")[0] in OF_THE_EXCHANGE
    }
    return of_exchange | {"tokens_sampled": metrics["tokens_sampled"]}


def _changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    document = recipe.model_dump()
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        if not rest or section not in ("objective", "training") or (section == "training" and rest not in REPLAYABLE):
            raise RecipeError(
                f"--set {key}: a replay cannot change which rollouts there are, only how a peer learns: set "
                f"objective.* or training.{{{','.join(REPLAYABLE)}}}"
            )
        set_key(document, key, value)
    return parse(document, where="replay")


def _last_round(recording: Recording, from_step: int, rounds: int | None) -> int:
    finished = recording.rounds()
    last = finished if rounds is None else from_step + rounds
    if not 0 <= from_step < last <= finished:
        raise RunError(
            f"{recording.directory} has {finished} finished rounds: steps {from_step} to {last} are not among them; "
            f"lower --from-step or --rounds"
        )
    return last


def _label(objective: str, arm: str, from_step: int, rounds: int | None, settings: Mapping[str, Any]) -> str:
    parts = [objective, "on", arm]
    parts += [f"from-{from_step}"] if from_step else []
    parts += [f"rounds-{rounds}"] if rounds is not None else []
    parts += [f"{key.partition('.')[2]}-{value}" for key, value in settings.items() if key != "objective.name"]
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", "-".join(parts))


def replay_run(
    run: Annotated[Path, typer.Argument(help="A run directory, as runs/demo-seed0.", show_default=False)],
    objective: Annotated[
        str | None, typer.Option(help="As a recipe's objective.name, e.g. TIS; by default the recorded one.")
    ] = None,
    arm: Annotated[str | None, typer.Option(help="Whose rollouts; needed where the run has several arms.")] = None,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="Only this peer. Repeatable.")] = None,
    from_step: Annotated[int, typer.Option(min=0, help="Start from this checkpoint; 0 is the untrained model.")] = 0,
    rounds: Annotated[int | None, typer.Option(min=1, help="How many; by default all there are.")] = None,
    set_: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Where to; by default RUN/replay/<objective>-on-<arm>…")] = None,
) -> None:
    """Train again on recorded rollouts, by another objective."""
    display = Display(console)
    with display.live(resumes=False):
        directory = replay(
            run,
            objective,
            arm=arm,
            peers=peer or (),
            from_step=from_step,
            rounds=rounds,
            overrides=set_ or (),
            output=output,
            say=display,
        )
    console.print(f"records and final checkpoints in {directory}")


if __name__ == "__main__":
    commands.run(replay_run)

"""The honesty test on recorded runs of honest peers: does it accuse anybody, and how soon does it find a lie?

    python benchmarks/honesty.py runs/scaling runs/demo               # of experiments or runs that recorded rollouts
    python benchmarks/honesty.py --lies 0.05 0.1 0.3 1 -- runs/demo   # with log-probabilities lowered by so many nats
    python benchmarks/honesty.py --cost                               # what the defaults of join cost in a round

Each learner tests each peer that it hears, a *pair*, over a whole run, as :class:`ftis.honesty.selection.HonestyTest`
did or would have done. ``highest`` is the highest evidence after any round, beside the threshold at which a peer
is accused with α = 1e-6. With ``--lies`` every reported log-probability is lowered from the first round on: ``found``
counts the pairs that are found, ``median`` and ``most`` the sender's tokens until then.

``--cost``: processor seconds of the tests over those of a run of 20 rounds with an evaluation at both ends, with the
defaults of ``join`` and all peers in this process, of a pair and of four over shared prompts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ftis
from ftis.config import Recipe
from ftis.guards.regret import NoRegret
from ftis.honesty.selection import HonestyTest
from ftis.joining.join import NO_REGRET
from ftis.recipe.arms import arms_of
from ftis.recipe.parsing import load
from ftis.records.reading import read_study
from ftis.records.rollouts import read_rollouts
from ftis.rollouts import MIN_LOGP, Group, Rollout, ScoredGroup, collate
from ftis.selection import Judged


@dataclass
class Found:
    """What became of the pairs of one directory."""

    pairs: int = 0
    tokens: int = 0
    threshold: float = 0.0
    highest: float = 0.0
    after: list[int] = field(default_factory=list)


def learners(directory: Path) -> Iterator[tuple[Recipe, str, Path]]:
    """Each swarm's recipe, a peer of it, and the place of its records."""
    study = read_study(directory)
    for run, arm in itertools.product(study.runs.values(), arms_of(study.recipe)):
        for swarm in arm.swarms:
            for peer in swarm.peers if len(swarm.peers) > 1 else ():
                if (place := run.directory / arm.name / peer.name / "rollouts").is_dir():
                    yield swarm, peer.name, place.parent


def judged_rounds(own: str, directory: Path, lie: float) -> Iterator[Judged]:
    """The recorded rounds as they were judged, with others' log-probabilities lowered by ``lie``."""
    for file in sorted((directory / "rollouts").glob("round-*.parquet")):
        rows = read_rollouts(directory, int(file.stem.rpartition("-")[2]))
        groups, old = [], []
        for (round, item, source), group in itertools.groupby(rows, lambda r: (r["round"], r["item"], r["source"])):
            members = list(group)
            off = np.float32(0 if source == own else lie)
            told = tuple(Rollout(r["completion_ids"], (r["gen_logp"] - off).clip(MIN_LOGP)) for r in members)
            rewards = tuple(r["reward"] for r in members)
            groups.append(ScoredGroup(Group(source, round, item, told), tuple("" for _ in members), rewards))
            old += [r["old_logp"] for r in members]
        known = np.array([row for row, logp in enumerate(old) if logp is not None], dtype=np.int64)
        advantage_N = torch.zeros(len(rows))
        advantage_N[known] = 1.0
        none, batch = np.zeros(0, np.float32), collate(groups, lambda *_: np.zeros(1, np.int32), own)
        yield Judged(batch, advantage_N, known, [old[row] for row in known], None, none)


def examined(directory: Path, lie: float = 0.0) -> Found:
    """All pairs of a directory."""
    found = Found()
    for recipe, own, place in learners(directory):
        test = HonestyTest(recipe)
        for judged in judged_rounds(own, place, lie):
            test.examine(judged)
            for sender in test.senders.values():
                found.highest = max(found.highest, sender.detector.nats)
            if lie and test.senders and all(sender.found is not None for sender in test.senders.values()):
                break
        found.pairs += len(test.senders)
        found.tokens += sum(sender.tokens for sender in test.senders.values())
        found.threshold = max(found.threshold, test.threshold)
        found.after += [s.found_after for s in test.senders.values() if s.found_after is not None]
    return found


def print_honest(directories: Sequence[Path]) -> None:
    print("| runs | pairs | tokens | highest evidence | threshold | accused |\n|---|---|---|---|---|---|")
    for directory in directories:
        of = examined(directory)
        numbers = f"{of.pairs:,} | {of.tokens:,} | {of.highest:.1f} | {of.threshold:.1f} | {len(of.after)}"
        print(f"| {directory.name} | {numbers} |", flush=True)


def print_lies(directories: Sequence[Path], lies: Sequence[float]) -> None:
    print("| runs | lowered by, nats | pairs | found | median tokens | most tokens |\n|---|---|---|---|---|---|")
    for directory, lie in itertools.product(directories, lies):
        of = examined(directory, lie)
        tokens = f"{statistics.median(of.after):,.0f} | {max(of.after):,}" if of.after else " | "
        print(f"| {directory.name} | {lie:g} | {of.pairs:,} | {len(of.after):,} | {tokens} |", flush=True)


def print_cost(rounds: int = 20) -> None:
    """Run the demo's pair and its four with the defaults of ``join``, and time the tests and all."""
    print("| swarm | honesty test | texts and no-regret | processor seconds |\n|---|---|---|---|")
    for name, mode in (("demo_pair", "vertical"), ("demo", "horizontal")):
        given = load(Path(__file__).parent.parent / "recipes" / f"{name}.toml")
        defaults = {"foreign_failures": False, "no_regret": NO_REGRET, "mode": mode}
        training = given.training.model_copy(
            update={"rounds": rounds, "eval_every": 0, "save_every": rounds, **defaults}
        )
        alone = {"processes": "inline", "threads": 1}
        with tempfile.TemporaryDirectory() as place, timed(HonestyTest) as honesty, timed(NoRegret) as regret:
            recipe = given.model_copy(update={"training": training, "arms": (), "output_dir": place, **alone})
            began = time.process_time()
            ftis.train(recipe)
            total = time.process_time() - began
        print(f"| {name} | {sum(honesty) / total:.1%} | {sum(regret) / total:.1%} | {total:.1f} |", flush=True)


@contextmanager
def timed(test: type[HonestyTest | NoRegret]) -> Iterator[list[float]]:
    """The processor seconds of each examination by a test."""
    seconds, examine = list[float](), test.examine

    def examined(self: Any, judged: Judged) -> None:
        began = time.process_time()
        examine(self, judged)
        seconds.append(time.process_time() - began)

    test.examine = examined  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        test.examine = examine  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path)
    parser.add_argument("--lies", nargs="+", type=float, default=[])
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    if given.cost:
        print_cost()
    elif given.lies:
        print_lies(given.directories, given.lies)
    else:
        print_honest(given.directories)


if __name__ == "__main__":
    main()

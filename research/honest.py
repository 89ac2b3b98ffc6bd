"""Honest swarms with the defaults of ``join``: false accusations, false alarms, and texts found by mistake.

    python -m research.honest                                   # everything that was not run yet
    python -m research.honest --testbeds pair late --seeds 10   # a part of it

All testbeds are of recipes/ and train for 40 rounds. Their peers are honest, at the recipes' rates:

- ``pair``, ``four``: small and large models in full, over prompts of their own and over shared ones;
- ``lora``: one model in full and through LoRA;
- ``tokenizers``: two models with different tokenizers, over text;
- ``bfloat16``: the pair with weights and log-probabilities in bfloat16;
- ``late``: the pair, and each message comes a round late.

The table has, of each testbed: runs; accusations by the honesty test of any peer; alarms of the no-regret test; texts
that the test of texts found; foreign rollouts that a peer learned from, a round; and the peers' mean final accuracy.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from pydantic import BaseModel

from ftis.admission import Collected
from ftis.guards.regret import NoRegret
from ftis.member import Outgoing
from ftis.recipe.parsing import load
from ftis.records.reading import VALIDATION, PeerRun
from ftis.run.assembly import assemble
from ftis.run.together import Rounds, in_turns
from research.adaptive import DEFENCES, test_of
from research.findings.__main__ import FINDINGS, Summary, written

ROUNDS = 40
TESTBEDS: Mapping[str, tuple[str, Sequence[str], int]] = {
    "pair": ("demo_pair.toml", (), 80),
    "four": ("demo.toml", (), 30),
    "lora": ("demo_lora.toml", (), 60),
    "tokenizers": ("tokenizers/small.toml", ('exchange="text"',), 50),
    "bfloat16": ("demo_pair.toml", ('peers.*.dtype="bfloat16"',), 40),
    "late": ("demo_pair.toml", (), 40),
}
"""A recipe, what is set, and the number of seeds: 300 in all."""


class Outcome(BaseModel):
    """Of an honest run: false findings, foreign rollouts learned from a round, and final accuracies by peer."""

    accusations: int
    alarms: int
    texts: int
    foreign: float
    accuracies: dict[str, float]


def a_round_late(peers: Mapping[str, Rounds]) -> None:
    """Let the peers of a swarm go on, each with the others' messages of the round before."""
    before: dict[str, Outgoing] = {}
    replies: dict[str, Collected | None] = dict.fromkeys(peers)
    going = dict(peers)
    while going:
        sent = dict[str, Outgoing]()
        for name, rounds in peers.items():
            try:
                sent[name] = rounds.send(replies[name])
            except StopIteration:
                going.pop(name, None)
        for name in going:
            others = tuple(other for other in peers if other != name)
            late = tuple((other, before[other].round, before[other].message) for other in others if other in before)
            replies[name] = Collected({}, missing=others, late=late)
        before = sent


def run(testbed: str, seed: int, rounds: int, directory: Path, more: Sequence[str] = ()) -> Outcome:
    """One honest run."""
    file, keys, _ = TESTBEDS[testbed]
    shape = (f"seed={seed}", f"training.rounds={rounds}", f"training.eval_every={rounds}", "ood=[]", "arms=[]")
    recipe = load(Path(__file__).parents[1] / "recipes" / file, [*shape, *DEFENCES["defaults"], *keys, *more])
    names = tuple(peer.name for peer in recipe.peers)
    of_swarm = recipe.of_swarm(names)
    is_late = testbed == "late"
    trainers = {name: assemble(of_swarm, name, directory / name, networked=is_late) for name in names}
    together = a_round_late if is_late else in_turns
    together({name: one.train(lambda event: None) for name, one in trainers.items()})
    tests = [test for one in trainers.values() if (test := test_of(one.peer)) is not None]
    guards = [guard for one in trainers.values() for guard in one.peer.member.selections if isinstance(guard, NoRegret)]
    if not len(tests) == len(guards) == len(names):
        raise AssertionError(f"{testbed}: {len(tests)} honesty tests and {len(guards)} guards for {len(names)} peers")
    records = {name: PeerRun.read(directory / name) for name in names}
    return Outcome(
        accusations=sum(sender.found is not None for test in tests for sender in test.senders.values()),
        alarms=sum(guard.alarms for guard in guards),
        texts=sum(len(guard.plants.found) for guard in guards),
        foreign=fmean(row.measures["foreign_used"] for of in records.values() for row in of.rounds),
        accuracies={name: of.on(VALIDATION)[-1].accuracy for name, of in records.items()},
    )


def summary(to: Path, commit: str) -> Summary:
    """The table of all runs that ``to`` holds."""
    rows, most = list[tuple[str | int | float, ...]](), 0
    for testbed, (_, _, seeds) in TESTBEDS.items():
        files = [file for seed in range(seeds) if (file := to / f"{testbed}.{seed}.json").exists()]
        of = [Outcome.model_validate_json(file.read_text("utf-8")) for file in files]
        if not of:
            continue
        most = max(most, len(of))
        counts = (sum(getattr(one, name) for one in of) for name in ("accusations", "alarms", "texts"))
        accuracy = fmean(fmean(one.accuracies.values()) for one in of)
        rows.append((f"`{testbed}`", len(of), *counts, fmean(one.foreign for one in of), accuracy))
    return Summary(
        command="python -m research.honest --write COMMIT",
        commit=commit,
        machine="2 cores of an x86-64 machine, torch 2.13",
        seeds=tuple(range(most)),
        comparisons=0,
        digits={"foreign": 0},
        columns=("testbed", "runs", "accusations", "alarms", "texts", "foreign", "accuracy"),
        rows=tuple(rows),
    )


def main(arguments: Sequence[str] | None = None, findings: Path = FINDINGS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testbeds", nargs="+", choices=list(TESTBEDS), default=list(TESTBEDS))
    parser.add_argument("--seeds", type=int, help="the most seeds of a testbed")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--to", type=Path, default=Path("runs/honest"), help="keep the outcomes here, and go on from")
    parser.add_argument("--write", metavar="COMMIT", help="write findings/data/honest.json of all outcomes there")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.to.mkdir(parents=True, exist_ok=True)
    most = max(TESTBEDS[testbed][2] for testbed in given.testbeds)
    for seed, testbed in product(range(most if given.seeds is None else given.seeds), given.testbeds):
        file = given.to / f"{testbed}.{seed}.json"
        if file.exists() or seed >= TESTBEDS[testbed][2]:
            continue
        with TemporaryDirectory() as place:
            outcome = run(testbed, seed, given.rounds, Path(place))
        file.write_text(outcome.model_dump_json(), encoding="utf-8")
        print(testbed, seed, outcome, flush=True)
    if given.write:
        (findings / "data" / "honest.json").write_text(written(summary(given.to, given.write)), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Honest swarms with the defaults of ``join``: false accusations, false alarms, texts found by mistake, and the cost.

    python -m research.honest                                     # everything that was not run yet
    python -m research.honest --testbeds pair late --seeds 10     # a part of it
    python -m research.honest --defences before --seeds 10        # the same without those defaults, for their cost

Testbeds are of recipes/ and train for 40 rounds. Their peers are honest, at the recipes' rates:

- ``pair``, ``four``: small and large models in full, each over prompts of its own;
- ``shared``: the four over shared prompts;
- ``lora``: one model in full and through LoRA;
- ``tokenizers``: two models with different tokenizers, over text;
- ``bfloat16``: the pair with weights and log-probabilities in bfloat16;
- ``late``: the pair, and each message comes a round late;
- ``smollm2``: four adapters of SmolLM2-135M over shared prompts, by research/recipes/needle_four.toml. It runs only if
  it is named: 24 rounds of a seed take twelve minutes, and ``ftis models smollm2-135m`` fetches the model.

Texts are not tested over shared prompts, of which each peer samples one completion.

The table has, of each testbed: runs; accusations by the honesty test of any peer; alarms of the no-regret test; texts
that the test of texts found; foreign rollouts that a peer learned from, a round; and the peers' mean final accuracy.
A second table has, over seeds that were run both ways, what accuracy the defaults add: to the mean of the peers, and
to the stronger half of them, those that end higher without the defaults.
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
from ftis.comparison.stats import mean_interval
from ftis.guards.regret import NoRegret
from ftis.member import Outgoing
from ftis.recipe.parsing import load
from ftis.records.reading import VALIDATION, PeerRun
from ftis.run.assembly import assemble
from ftis.run.together import TurnTaking, in_turns
from research.adaptive import DEFENCES, test_of
from research.findings.__main__ import FINDINGS, Cell, Summary, written

ROUNDS = 40
HORIZONTAL = 'training.mode="horizontal"'
TESTBEDS: Mapping[str, tuple[str, Sequence[str], int]] = {
    "pair": ("demo_pair.toml", (), 80),
    "four": ("demo.toml", (), 30),
    "shared": ("demo.toml", (HORIZONTAL,), 20),
    "lora": ("demo_lora.toml", (), 60),
    "tokenizers": ("tokenizers/small.toml", ('exchange="text"',), 50),
    "bfloat16": ("demo_pair.toml", ('peers.*.dtype="bfloat16"',), 40),
    "late": ("demo_pair.toml", (), 40),
    "smollm2": ("../research/recipes/needle_four.toml", (HORIZONTAL, "task.validation_size=100"), 5),
}
"""A recipe, what is set, and the number of seeds."""
SMALL = [testbed for testbed in TESTBEDS if testbed != "smollm2"]


class Outcome(BaseModel):
    """Of an honest run: false findings, foreign rollouts learned from a round, and final accuracies by peer."""

    accusations: int
    alarms: int
    texts: int
    foreign: float
    accuracies: dict[str, float]


def a_round_late(peers: Mapping[str, TurnTaking]) -> None:
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


def run(
    testbed: str, seed: int, rounds: int, directory: Path, more: Sequence[str] = (), defences: str = "defaults"
) -> Outcome:
    """One honest run."""
    file, keys, _ = TESTBEDS[testbed]
    shape = (f"seed={seed}", f"training.rounds={rounds}", f"training.eval_every={rounds}", "ood=[]", "arms=[]")
    recipe = load(Path(__file__).parents[1] / "recipes" / file, [*shape, *DEFENCES[defences], *keys, *more])
    names = tuple(peer.name for peer in recipe.peers)
    of_swarm = recipe.of_swarm(names)
    is_late = testbed == "late"
    trainers = {name: assemble(of_swarm, name, directory / name, networked=is_late) for name in names}
    together = a_round_late if is_late else in_turns
    together({name: one.train(lambda event: None) for name, one in trainers.items()})
    tests = [test for one in trainers.values() if (test := test_of(one.peer)) is not None]
    guards = [guard for one in trainers.values() for guard in one.peer.member.selections if isinstance(guard, NoRegret)]
    if len(tests) != len(names) or len(guards) != (len(names) if defences == "defaults" else 0):
        raise AssertionError(f"{testbed}: {len(tests)} honesty tests and {len(guards)} guards for {len(names)} peers")
    records = {name: PeerRun.read(directory / name) for name in names}
    return Outcome(
        accusations=sum(sender.found is not None for test in tests for sender in test.senders.values()),
        alarms=sum(guard.alarms for guard in guards),
        texts=sum(len(guard.plants.found) for guard in guards),
        foreign=fmean(row.measures["foreign_used"] for of in records.values() for row in of.rounds),
        accuracies={name: of.on(VALIDATION)[-1].accuracy for name, of in records.items()},
    )


def kept(to: Path, testbed: str, defences: str = "defaults") -> dict[int, Outcome]:
    """The outcomes of a testbed that ``to`` holds, by seed."""
    files = {seed: place(to, testbed, seed, defences) for seed in range(TESTBEDS[testbed][2])}
    return {seed: Outcome.model_validate_json(of.read_text("utf-8")) for seed, of in files.items() if of.exists()}


def place(to: Path, testbed: str, seed: int, defences: str) -> Path:
    way = "" if defences == "defaults" else f".{defences}"
    return to / f"{testbed}{way}.{seed}.json"


def cost(to: Path, commit: str) -> Summary:
    """The table of accuracy that the defaults add, over the seeds of ``to`` that were run both ways."""
    rows, all_seeds = list[tuple[Cell, ...]](), set[int]()
    for testbed in TESTBEDS:
        with_them, without = kept(to, testbed), kept(to, testbed, "before")
        if len(seeds := sorted(with_them.keys() & without.keys())) < 2:
            continue
        all_seeds.update(seeds)
        names = sorted(without[seeds[0]].accuracies, key=lambda name: fmean(without[s].accuracies[name] for s in seeds))
        cells: list[Cell] = []
        for of in (names, names[len(names) // 2 :]):
            interval = mean_interval(
                [fmean(with_them[s].accuracies[n] - without[s].accuracies[n] for n in of) for s in seeds]
            )
            cells.append((interval.mean, (interval.low, interval.high)))
        before = fmean(fmean(without[seed].accuracies.values()) for seed in seeds)
        rows.append((f"`{testbed}`", len(seeds), before, *cells))
    return Summary(
        command="python -m research.honest --seeds 10\n"
        "python -m research.honest --defences before --seeds 10 --write COMMIT",
        commit=commit,
        machine="2 cores of an x86-64 machine, torch 2.13",
        seeds=tuple(sorted(all_seeds)),
        comparisons=0,
        differences=("the mean", "the stronger half"),
        columns=("testbed", "runs", "without", "the mean", "the stronger half"),
        rows=tuple(rows),
    )


def summary(to: Path, commit: str) -> Summary:
    """The table of all runs that ``to`` holds."""
    rows, most = list[tuple[Cell, ...]](), 0
    for testbed in TESTBEDS:
        of = list(kept(to, testbed).values())
        if not of:
            continue
        most = max(most, len(of))
        accusations, alarms, texts = (sum(getattr(one, n) for one in of) for n in ("accusations", "alarms", "texts"))
        tested = None if HORIZONTAL in TESTBEDS[testbed][1] else texts
        accuracy = fmean(fmean(one.accuracies.values()) for one in of)
        rows.append((f"`{testbed}`", len(of), accusations, alarms, tested, fmean(one.foreign for one in of), accuracy))
    return Summary(
        command="python -m research.honest\npython -m research.honest --testbeds smollm2 --rounds 24 --write COMMIT",
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
    parser.add_argument("--testbeds", nargs="+", choices=list(TESTBEDS), default=SMALL)
    parser.add_argument("--seeds", type=int, help="the most seeds of a testbed")
    parser.add_argument("--defences", choices=("defaults", "before"), default="defaults")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--to", type=Path, default=Path("runs/honest"), help="keep the outcomes here, and go on from")
    parser.add_argument("--write", metavar="COMMIT", help="write the tables of all outcomes there")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.to.mkdir(parents=True, exist_ok=True)
    most = max(TESTBEDS[testbed][2] for testbed in given.testbeds)
    for seed, testbed in product(range(most if given.seeds is None else given.seeds), given.testbeds):
        file = place(given.to, testbed, seed, given.defences)
        if file.exists() or seed >= TESTBEDS[testbed][2]:
            continue
        with TemporaryDirectory() as directory:
            outcome = run(testbed, seed, given.rounds, Path(directory), defences=given.defences)
        file.write_text(outcome.model_dump_json(), encoding="utf-8")
        print(testbed, seed, outcome, flush=True)
    if given.write:
        for name, of in (("honest", summary), ("honest-cost", cost)):
            if (table := of(given.to, given.write)).rows:
                (findings / "data" / f"{name}.json").write_text(written(table), encoding="utf-8")


if __name__ == "__main__":
    main()

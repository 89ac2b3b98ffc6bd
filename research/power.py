"""How much an adaptive liar plants under the honesty test, by simulation.

    python -m research.power --commit COMMIT    # ten minutes of one core; writes findings/data/power.json row by row

A sender draws 12 groups of 12 completions a round from a bigram model over 400 tokens, with about 3 nats a token. Half
of a group is right. In a share of the right ones the sender plants a text anywhere and reports it ℓ nats too low in
all. The wrong ones are nonsense, which costs the sender nothing. Before it sends, it runs the test on its message, and
plants in the largest share that passes: 1, 1/2, 1/4, ..., 1/64, or none.

- ``exact``: it knows the learner's π_old, so it plants at π_old, and runs the very test of the learner;
- ``noise``: its log π_old of each token is off by 1 nat on average, so its test of itself differs;
- ``text``: over text, where the test has no π_old.

A cell is the share of right completions with the plant, the mean over the rounds of all seeds. ``found`` is the round
in which a sender is found that plants in all and does not test itself.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from ftis.honesty.contexts import Past
from ftis.honesty.evidence import Detector, ratios_of, share_of
from ftis.honesty.frequent import Frequent
from ftis.rollouts import Floats, Ints, Rollout
from research.findings.__main__ import FINDINGS, Cell, Summary, read, written

VOCABULARY, GROUP, GROUPS, ROUNDS = 400, 12, 12, 12
RUN = 40
"""Rounds of the run that the bound is for."""
PLANTS: Sequence[tuple[float, int]] = ((5, 1), (7, 1), (9, 1), (12, 6), (36, 6))
"""(ℓ in nats, tokens)."""
LENGTHS = (17, 64, 256)
SHARES = (1.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 32, 1 / 64, 0.0)
NOISE = 1.0
KNOWLEDGE = ("exact", "noise", "text")


@dataclass
class Test:
    """The honesty test of one learner, on one sender whose completions have up to twice ``length`` tokens."""

    length: int
    detector: Detector = field(init=False)
    frequent: Frequent = field(init=False)
    past: Past = field(default_factory=Past)

    def __post_init__(self) -> None:
        self.detector = Detector(RUN * GROUPS, share_of(2 * self.length))
        self.frequent = Frequent(RUN * GROUPS)

    def accuses(self, rows: Sequence[Rollout], right: Sequence[bool], old: Sequence[Floats | None]) -> bool:
        """Take in a message as :class:`ftis.honesty.selection.HonestyTest` does."""
        group_N = np.repeat(np.arange(GROUPS), GROUP)
        nats_N, _ = self.detector.add(ratios_of(rows, group_N, self.past, old))
        nats_P = np.logaddexp(nats_N[GROUP - 1 :: GROUP], self.frequent.add(rows, group_N)) - math.log(2)
        self.past.add_raised([row.completion_ids for row, is_right in zip(rows, right, strict=True) if is_right])
        return bool(nats_P.max() >= math.log(RUN * GROUPS * 2 / 1e-6))


@dataclass
class Sender:
    """A liar with its own copy of the learner's test."""

    knowledge: str
    plant: tuple[float, int]
    length: int
    rng: np.random.Generator
    test: Test = field(init=False)
    share: float = 1.0

    def __post_init__(self) -> None:
        self.test = Test(self.length)

    def message(self, share: float, seed: int) -> tuple[list[Rollout], list[bool], list[list[Floats | None]]]:
        """Completions, whether each is right, and log π_old as the sender believes it to be and as it is."""
        rng, (nats, tokens) = np.random.default_rng(seed), self.plant
        ids_NT, logp_NT = drawn(rng, GROUPS * GROUP, self.length)
        rows: list[Rollout] = []
        rights: list[bool] = []
        believed: list[Floats | None] = []
        true: list[Floats | None] = []
        text = np.arange(VOCABULARY, VOCABULARY + tokens)
        for row, (ids, logp) in enumerate(zip(ids_NT, logp_NT, strict=True)):
            right = row % GROUP < GROUP // 2
            if not right:
                ids, logp = rng.integers(0, VOCABULARY, self.length), np.full(self.length, -math.log(VOCABULARY))
            known = logp
            if right and rng.random() < share:
                place, low = int(rng.integers(self.length)), np.full(tokens, -nats / tokens)
                ids = np.insert(ids, place, text)
                off = rng.normal(0, NOISE * math.sqrt(math.pi / 2), tokens) if self.knowledge == "noise" else 0.0
                known, logp = np.insert(logp, place, low + off), np.insert(logp, place, low)
            rows.append(Rollout(ids.astype(np.int32), logp.astype(np.float32)))
            rights.append(right)
            believed.append(None if self.knowledge == "text" else logp.astype(np.float32))
            true.append(None if self.knowledge == "text" else known.astype(np.float32))
        return rows, rights, [believed, true]

    def largest_that_passes(self, seed: int) -> float:
        """The largest share of :data:`SHARES` that the sender's own test passes, at most twice that of before."""
        for share in SHARES:
            if share > 2 * self.share and share > SHARES[-2]:
                continue
            rows, rights, (believed, _) = self.message(share, seed)
            tried = copy.deepcopy(self.test)
            if not tried.accuses(rows, rights, believed) or not share:
                self.test, self.share = tried, share
                return share
        return 0.0


BIGRAM = np.random.default_rng(99).dirichlet(np.full(VOCABULARY, 0.03), size=VOCABULARY)


def drawn(rng: np.random.Generator, rows: int, length: int) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Completions of :data:`BIGRAM`, and their log-probabilities: [N, T] each."""
    sums, last, ids = BIGRAM.cumsum(1), np.zeros(rows, np.int64), []
    for _ in range(length):
        last = (sums[last] < rng.random(rows)[:, None]).sum(1).clip(max=VOCABULARY - 1)
        ids.append(last)
    ids_NT = np.stack(ids, axis=1)
    before_NT = np.concatenate([np.zeros((rows, 1), np.int64), ids_NT[:, :-1]], axis=1)
    return ids_NT.astype(np.int32), np.log(BIGRAM[before_NT, ids_NT])


def adaptive(knowledge: str, plant: tuple[float, int], length: int, seed: int) -> tuple[float, int | None]:
    """The mean share planted before the sender is found, and the round of that, from 1."""
    sender, test = Sender(knowledge, plant, length, np.random.default_rng(seed)), Test(length)
    planted: list[float] = []
    for round in range(ROUNDS):
        share = sender.largest_that_passes(1000 * seed + round)
        rows, rights, (_, true) = sender.message(share, 1000 * seed + round)
        if test.accuses(rows, rights, true):
            return fmean([*planted, 0.0]), round + 1
        planted.append(share)
    return fmean(planted), None


def careless(plant: tuple[float, int], length: int, seed: int) -> int | None:
    """The round, from 1, in which a sender is found that plants in all right completions."""
    sender, test = Sender("exact", plant, length, np.random.default_rng(seed)), Test(length)
    for round in range(ROUNDS):
        rows, rights, (_, true) = sender.message(1.0, 1000 * seed + round)
        if test.accuses(rows, rights, true):
            return round + 1
    return None


def row_of(length: int, plant: tuple[float, int], seeds: int) -> tuple[Cell, ...]:
    """The cells after a row's name: when a careless sender is found, and what an adaptive one plants."""
    rounds = [careless(plant, length, seed) for seed in range(seeds)]
    named = [round for round in rounds if round is not None]
    when = f"{median(named):.0f}" if len(named) == seeds else f"{len(named)} of {seeds}" if named else "never"
    by_knowledge: list[Cell] = []
    for knowledge in KNOWLEDGE:
        results = [adaptive(knowledge, plant, length, seed) for seed in range(seeds)]
        found = sum(round is not None for _, round in results)
        share = f"{fmean(share for share, _ in results):.3f}"
        by_knowledge.append(f"{share} ({found} of {seeds} found)" if found else share)
    return when, *by_knowledge


def table(known: Mapping[tuple[int, str], tuple[Cell, ...]], seeds: int, commit: str) -> Summary:
    """All rows; one that is not known says so."""
    empty: tuple[Cell, ...] = ("not run", *[None] * len(KNOWLEDGE))
    names = [(length, lie(plant)) for length in LENGTHS for plant in PLANTS]
    return Summary(
        command=f"python -m research.power --seeds {seeds}",
        commit=commit,
        machine="2 cores of an x86-64 machine",
        seeds=tuple(range(seeds)),
        comparisons=0,
        columns=("tokens", "lie", "in all: found in round", *KNOWLEDGE),
        rows=tuple((*name, *known.get(name, empty)) for name in names),
    )


def lie(plant: tuple[float, int]) -> str:
    return f"{plant[0]} nats on {plant[1]}"


def main(arguments: Sequence[str] | None = None, findings: Path = FINDINGS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS, help="rows to run again")
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args(arguments)
    there = read("power", findings).rows if (findings / "data" / "power.json").exists() else ()
    known = {(int(str(row[0])), str(row[1])): row[2:] for row in there if row[2] != "not run"}
    for length, plant in product(given.lengths, PLANTS):
        known[length, lie(plant)] = row_of(length, plant, given.seeds)
        made = table(known, given.seeds, given.commit)
        (findings / "data" / "power.json").write_text(written(made), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measures that an arm's peers record about each other in each round, over one seed or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ftis.metric_keys import peer_key
from ftis.recipe.arms import Arm
from ftis.records.reading import ArmOfRun, RoundRow, Study

MOST_FIGURES = 12
"""The most figures of a kind, enough for the pairs in a swarm of four. With more, a figure shows several pairs."""


@dataclass(frozen=True)
class PairMeasures:
    """Measures of learners about sources: of one pair, or of several pairs together as if each were a seed.

    Attributes:
        rounds: the source's name and the learner's rounds, for each pair and seed.
    """

    arm: str
    learner: str
    source: str
    rounds: Sequence[tuple[str, Sequence[RoundRow]]]

    def values(self, measure: str) -> dict[int, list[float]]:
        """A measure by finished rounds, with a value per pair and seed that has it."""
        found: dict[int, list[float]] = {}
        for source, rounds in self.rounds:
            key = peer_key(source, measure)
            for row in rounds:
                value = row.measures.get(key)
                if value is not None:
                    found.setdefault(row.step, []).append(value)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class ArmRounds:
    """The rounds of one arm's peers with records here.

    Attributes:
        arm: the arm's name.
        sources: the peers that each peer learns from, by learner; the next one in its swarm comes first.
        runs: the rounds of each peer, by seed and peer.
    """

    arm: str
    sources: Mapping[str, Sequence[str]]
    runs: Mapping[int, Mapping[str, Sequence[RoundRow]]]

    @staticmethod
    def studied(study: Study, arm: Arm) -> ArmRounds:
        """Every round of an arm, for the seeds that the report shows."""
        names = study.peer_names
        runs = {seed: {name: study.peer(seed, arm.name, name).rounds for name in names} for seed in study.seeds_shown}
        return ArmRounds(arm.name, _sources(arm, names), runs)

    @staticmethod
    def followed(arm: ArmOfRun) -> ArmRounds:
        """The known rounds of one run; it may still be running."""
        runs = {name: peer.rounds for name, peer in arm.peers.items()}
        return ArmRounds(arm.arm.name, _sources(arm.arm, arm.peers), {arm.arm.recipe.seed: runs})

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of a learner and a source, in such an order that a line of panels has each learner once."""
        of_learners = ([(learner, source) for source in sources] for learner, sources in self.sources.items())
        return [pair for line in zip_longest(*of_learners) for pair in line if pair]

    @property
    def recorded(self) -> bool:
        return any(rounds for run in self.runs.values() for rounds in run.values())

    def measures(self, learner: str, sources: Sequence[str], name: str = "") -> PairMeasures:
        """Measures of a learner about some sources; ``name`` is their common name if there are several."""
        rounds = [(source, run[learner]) for source in sources for run in self.runs.values()]
        return PairMeasures(self.arm, learner, name or sources[0], rounds)

    def grouped(self) -> list[PairMeasures]:
        """The measures for each figure: one pair each if there are few.

        With many pairs, a figure has one learner with all its sources; with many learners, one figure has all.
        """
        if len(self.pairs) <= MOST_FIGURES:
            return [self.measures(learner, [source]) for learner, source in self.pairs]
        by_learner = [self.measures(learner, sources, "others") for learner, sources in self.sources.items()]
        if len(by_learner) <= MOST_FIGURES:
            return by_learner
        return [PairMeasures(self.arm, "peers", "others", [rounds for of in by_learner for rounds in of.rounds])]


def _sources(arm: Arm, here: Iterable[str]) -> dict[str, list[str]]:
    swarms = [[peer.name for peer in swarm.peers] for swarm in arm.swarms]
    swarm_of = {name: swarm for swarm in swarms for name in swarm}
    found = {}
    for name in here:
        swarm = swarm_of[name]
        at = swarm.index(name)
        found[name] = swarm[at + 1 :] + swarm[:at]
    return found

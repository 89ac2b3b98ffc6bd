"""What the peers of one arm measured of each other round by round, from one seed or several, whole or followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ftis.metric_keys import peer_key
from ftis.recipe.arms import Arm
from ftis.records.reading import ArmOfRun, RoundRow, Study

MOST_FIGURES = 12
"""Figures of a kind, as of the pairs in a swarm of four. Beyond, figures show several pairs together."""


@dataclass(frozen=True)
class PairMeasures:
    """What learners measured of sources: one of one, or several pairs together as if each were a seed.

    Attributes:
        rounds: for each pair and seed, the source's name and the learner's rounds.
    """

    arm: str
    learner: str
    source: str
    rounds: Sequence[tuple[str, Sequence[RoundRow]]]

    def values(self, measure: str, absent: float | None = None) -> dict[int, list[float]]:
        """A measure by finished rounds, a value per pair and seed; those without it count ``absent``, or not at all."""
        found: dict[int, list[float]] = {}
        for source, rounds in self.rounds:
            key = peer_key(source, measure)
            for row in rounds:
                value = row.measures.get(key, absent)
                if value is not None:
                    found.setdefault(row.step, []).append(value)
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class ArmRounds:
    """One arm's peers whose records are here.

    Attributes:
        arm: its name.
        sources: whom each of them learns from, the next of its swarm first.
        runs: by seed, the rounds of each of them.
    """

    arm: str
    sources: Mapping[str, Sequence[str]]
    runs: Mapping[int, Mapping[str, Sequence[RoundRow]]]

    @staticmethod
    def studied(study: Study, name: str) -> ArmRounds:
        """Every round of an arm, of the seeds that the report shows."""
        arms = {seed: study.arm_of(seed, name) for seed in study.seeds_shown}
        runs = {seed: {peer: of.rounds for peer, of in arm.peers.items()} for seed, arm in arms.items()}
        return ArmRounds(name, _sources(next(iter(arms.values())).arm, study.peer_names), runs)

    @staticmethod
    def followed(arm: ArmOfRun) -> ArmRounds:
        """The rounds that are known of one run, which may still be written."""
        runs = {name: peer.rounds for name, peer in arm.peers.items()}
        return ArmRounds(arm.arm.name, _sources(arm.arm, arm.peers), {arm.arm.recipe.seed: runs})

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Learners and sources, in an order in which a line of panels has each learner once."""
        of_learners = ([(learner, source) for source in sources] for learner, sources in self.sources.items())
        return [pair for line in zip_longest(*of_learners) for pair in line if pair]

    @property
    def recorded(self) -> bool:
        return any(rounds for run in self.runs.values() for rounds in run.values())

    def measures(self, learner: str, sources: Sequence[str], name: str = "") -> PairMeasures:
        """What a learner measured of some sources, which are called ``name`` if there are several."""
        rounds = [(source, run[learner]) for source in sources for run in self.runs.values()]
        return PairMeasures(self.arm, learner, name or sources[0], rounds)

    def grouped(self) -> list[PairMeasures]:
        """For figures: each pair; of many pairs each learner with all its sources; of many learners all in one."""
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

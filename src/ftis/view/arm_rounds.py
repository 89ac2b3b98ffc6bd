"""What the peers of one arm recorded of each other round by round, for the report and for the page that is watched.

The report reads whole files of one seed or several, the watched page what it keeps of one run's. Both show the values
that follow from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ftis.metric_keys import peer_key
from ftis.recipe.arms import Arm
from ftis.records.following import ArmOfRun
from ftis.records.reading import RoundRow, Study
from ftis.view.drawing import short

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

    @property
    def title(self) -> str:
        return f"{short(self.learner)} ← {short(self.source)}"

    def name(self, kind: str) -> str:
        """Of a figure of that kind."""
        return f"{kind}-{self.arm}-{self.learner}-from-{self.source}"

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
    def studied(study: Study, arm: Arm) -> ArmRounds:
        """Every round, of the seeds that the report shows."""
        peers = study.peer_names
        runs = {seed: {name: study.peer(seed, arm.name, name).rounds for name in peers} for seed in study.seeds_shown}
        return ArmRounds(arm.name, _sources(arm, peers), runs)

    @staticmethod
    def followed(arm: ArmOfRun, *, lately: bool = False) -> ArmRounds:
        """The rounds that are kept of a run that may still be written; ``lately`` the last of them."""
        runs = {name: peer.recent if lately else peer.rounds for name, peer in arm.peers.items()}
        return ArmRounds(arm.arm.name, _sources(arm.arm, arm.peers), {arm.recipe.seed: runs})

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Learners and sources, in an order in which a line of panels has each learner once."""
        of_learners = ([(learner, source) for source in sources] for learner, sources in self.sources.items())
        return [pair for line in zip_longest(*of_learners) for pair in line if pair]

    @property
    def recorded(self) -> bool:
        return any(rounds for run in self.runs.values() for rounds in run.values())

    def measures(self, learner: str, sources: Sequence[str], name: str = "") -> PairMeasures:
        """What a learner measured of some sources, which are called ``name`` where there are several."""
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

"""What the peers of an arm took from each other, as sections of the report and of the page that is watched.

Both show the same figures and the same table of evidence. The report adds means over rounds and seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ftis.comparison.budgets import round_budget
from ftis.config import ArmConfig
from ftis.metric_keys import peer_key
from ftis.recipe.arms import arm_of
from ftis.records.reading import Study
from ftis.records.standing import source_of
from ftis.view import exchange_figures
from ftis.view.arm_rounds import MOST_FIGURES, ArmRounds, PairMeasures
from ftis.view.corrections import Correction, correction_of
from ftis.view.exchange_figures import EFFECTIVE, WEIGHT
from ftis.view.taken import Taken, taken
from ftis.view.views import Cell, PanelRow, RowGroup, Table

LONGEST_REASON = 300
"""Letters of a first rejection, or of telling passages, that are shown."""

LEARNED = {
    "admitted": ("Came", 1),
    "zero_advantage": ("Without signal", 1),
    "dropped": ("Dropped", 1),
    "kept": ("Learned from", 1),
    "kl/k1": ("k1, nats", 2),
    f"{WEIGHT}mean": ("Weight", 3),
    EFFECTIVE: ("Effective sample size", 2),
}
"""Measures of a source's rollouts: their titles in the table, and digits."""

GAP = "sampling/checked_logp_difference/max"


@dataclass(frozen=True)
class Weighed:
    """Figures of importance weights and divergence.

    Attributes:
        use: what the objective does with the weights, in words; "" where that is not known.
        weights: before and after truncation; None where it is not known.
        filter: what the filter does, in words; "" where that is not known.
    """

    use: str
    weights: PanelRow | None
    shares: PanelRow
    filter: str
    divergence: PanelRow


@dataclass(frozen=True)
class ArmExchange:
    """One arm's figures and what stands between them.

    Attributes:
        together: what a figure shows together, in words; "" if each pair has figures of its own.
        expected: rollouts that a peer offers in a round.
        taken: mark by mark, of one seed in which something did not come as it should; None else.
        learned: what became of each source's rollouts, its own among them, in numbers.
        refusals: what was refused and why; None if nothing was.
        honesty: the evidence on each source; None where there was no test.
        sampler_gap: by how many nats sampler and learner disagree on the own tokens that were checked, at most; "" if
            it was not measured.
    """

    name: str
    together: str
    expected: int
    participation: PanelRow
    taken: Taken | None
    learned: Table
    refusals: Table | None
    honesty: Table | None
    weighed: Weighed | None
    sampler_gap: str


def exchanges(study: Study) -> list[ArmExchange] | None:
    """Of each arm whose peers learn together; None where there is none."""
    together = [arm for arm in study.arms if arm.collaborate and len(study.recipe.peers) > 1]
    return [_arm_exchange(study, arm) for arm in together] or None


def _arm_exchange(study: Study, config: ArmConfig) -> ArmExchange:
    arm = arm_of(study.recipe, config)
    rounds, expected = ArmRounds.studied(study, arm), round_budget(study.recipe, config).generated
    heard = rounds.grouped()
    marks = taken(rounds) if len(rounds.runs) == 1 else None
    figures = [exchange_figures.participation(of, expected) for of in heard]
    return ArmExchange(
        name=arm.name,
        together="" if len(heard) == len(rounds.pairs) else _together(rounds),
        expected=expected,
        participation=PanelRow.of(figures, len(rounds.sources)),
        taken=marks if marks and marks.is_news else None,
        learned=_learned(rounds),
        refusals=_refusals(rounds),
        honesty=honesty(rounds),
        weighed=weighed(rounds, correction_of(arm.recipe)),
        sampler_gap=_sampler_gap(rounds),
    )


def _together(rounds: ArmRounds) -> str:
    return "each learner with all its sources" if len(rounds.sources) <= MOST_FIGURES else f"{len(rounds.pairs)} pairs"


def weighed(rounds: ArmRounds, correction: Correction | None = None) -> Weighed | None:
    """None where nothing was recorded. Only torch knows the correction; the page that is watched does without."""
    if not rounds.pairs or not rounds.recorded:
        return None
    heard, learners = rounds.grouped(), len(rounds.sources)
    use = filter = ""
    weights, reduction, threshold = None, None, None
    if correction is not None:
        use, filter = _use_in_words(correction), _filter_in_words(correction)
        weights = PanelRow.of([panel for of in heard for panel in exchange_figures.weights(of, correction.cap)], 2)
        reduction, threshold = correction.objective.kl_reduction, correction.threshold
    shares = [exchange_figures.shares(of) for of in heard]
    divergence = [exchange_figures.divergence(of, reduction, threshold) for of in heard]
    of_shares, of_divergence = (PanelRow.of(of, learners if learners > 1 else len(of)) for of in (shares, divergence))
    return Weighed(use, weights, of_shares, filter, of_divergence)


def _use_in_words(correction: Correction) -> str:
    cut = f"what C = {correction.cap:g} would cut is shown for comparison"
    if correction.weighted is None:
        return f"{correction.name} is not importable here, so the page cannot say whether it uses the weights: {cut}"
    if correction.truncated:
        return f"It multiplies the gradient, cut at C = {correction.cap:g}"
    if correction.weighted:
        return f"{correction.name} has a weight of its own that follows from it: {cut}"
    return f"{correction.name} does not use it: {cut}"


def _filter_in_words(correction: Correction) -> str:
    if correction.filtered is None:
        return f"{correction.name} is not importable here, so the page cannot say whether it filters"
    if correction.filtered:
        return (
            f"The filter drops a rollout with Â ≤ 0 whose {correction.objective.kl_estimator} reaches "
            f"g = {correction.objective.kl_threshold:g}"
        )
    return f"{correction.name} has no filter"


def _learned(rounds: ArmRounds) -> Table:
    """What became of each learner's own rollouts and of every other's, on the mean over rounds and seeds."""
    rows = []
    for learner, sources in rounds.sources.items():
        told = [rounds.measures(learner, [learner], f"{learner} itself")]
        few = len(rounds.pairs) <= MOST_FIGURES
        told += (
            [rounds.measures(learner, [s]) for s in sources] if few else [rounds.measures(learner, sources, "another")]
        )
        rows += [[Cell(learner), Cell(of.source), *_mean_cells(of)] for of in told]
    head = ["Learner", "Source", *(title for title, _ in LEARNED.values())]
    caption = f"{rounds.arm}: rollouts a round, and their weights; means over rounds and seeds"
    return Table(caption, head, [RowGroup(None, rows)])


def _mean_cells(heard: PairMeasures) -> Iterable[Cell]:
    for measure, (_, digits) in LEARNED.items():
        values = [float(value) for of_round in heard.values(measure).values() for value in of_round]
        yield Cell(f"{fmean(values):.{digits}f}" if values else "–")


def _refusals(rounds: ArmRounds) -> Table | None:
    """What each learner refused of each source and why, and what came late or not at all, over all rounds and seeds."""
    rows = []
    for learner, source in sorted(rounds.pairs):
        told = [source_of(source, run[learner]) for run in rounds.runs.values() if run[learner]]
        times: Counter[str] = Counter()
        for of_seed in told:
            times.update({**of_seed.rejected, "nothing came": of_seed.missing, "late": of_seed.late})
        why = ", ".join(f"{reason}: {n}" for reason, n in sorted(times.items()) if n)
        if why:
            first = next((of_seed.first_rejection for of_seed in told if of_seed.first_rejection), "")
            rows.append([Cell(learner), Cell(source), Cell(why), Cell(first[:LONGEST_REASON])])
    if not rows:
        return None
    head = ["Learner", "Source", "Reasons, times", "The last, in words"]
    return Table(f"{rounds.arm}: refused, late or missing", head, [RowGroup(None, rows)])


def honesty(rounds: ArmRounds) -> Table | None:
    """The honesty test's evidence on each source: the highest that any learner had in any round, and who found it."""
    tested: dict[str, list[tuple[float, str, Mapping[str, Any]]]] = {}
    found: dict[str, list[str]] = {}
    for seed, run in rounds.runs.items():
        of_seed = f" of seed {seed}" if len(rounds.runs) > 1 else ""
        for learner, source in sorted(rounds.pairs):
            last = run[learner][-1].by_peer.get(source, {}) if run[learner] else {}
            if "honesty/evidence" not in last:
                continue
            key = peer_key(source, "honesty/evidence")
            nats = max(row.measures.get(key, 0.0) for row in run[learner])
            tested.setdefault(source, []).append((nats, learner, last))
            if "honesty/found_in_round" in last:
                when = f"round {last['honesty/found_in_round']}{of_seed}"
                after = f"after {last['honesty/found_after_tokens']:,} tokens"
                found.setdefault(source, []).append(f"{learner} in {when}, {after}")
    rows = []
    for source, tests in tested.items():
        nats, learner, last = max(tests, key=lambda test: test[0])
        cells = [
            Cell(f"{nats:.1f}", strong=source in found),
            Cell(f"{last['honesty/threshold']:.1f}"),
            Cell(learner),
            Cell(f"{max(of_last['honesty/tokens'] for _, _, of_last in tests):,}"),
            Cell("; ".join(found.get(source, ["nobody"]))),
            Cell(", ".join(map(repr, last.get("honesty/passages", ())))[:LONGEST_REASON]),
        ]
        rows.append((nats, [Cell(source), *cells]))
    if not rows:
        return None
    head = ["Source", "Evidence, nats", "Needed", "Highest at", "Tokens tested", "Found by", "Telling passages"]
    caption = (
        f"{rounds.arm}: evidence that a source does not draw its tokens from the log-probabilities that it reports"
    )
    return Table(caption, head, [RowGroup(None, [row for _, row in sorted(rows, key=lambda of: -of[0])])])


def _sampler_gap(rounds: ArmRounds) -> str:
    every = (row.measures for run in rounds.runs.values() for of_peer in run.values() for row in of_peer)
    gaps = [measures[GAP] for measures in every if GAP in measures]
    return f"{max(gaps):.1e}" if gaps else ""

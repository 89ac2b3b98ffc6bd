"""The exchange between the peers of an arm, as sections of the report and of the live page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ftis import metric_keys as keys
from ftis.config import ObjectiveConfig
from ftis.diagnosis.sources import source_of
from ftis.records.reading import RoundRow, Study
from ftis.view import figures
from ftis.view.pairs import MOST_FIGURES, ArmRounds, PairMeasures
from ftis.view.sections import Cell, ChartRow, RowGroup, Table
from ftis.view.sentences import DROPS, REASONS

LONGEST_REASON = 300
"""The most letters of a first rejection, or of telling passages, that a page shows."""

LEARNED = {
    keys.ADMITTED: ("Came", 1),
    keys.ZERO_ADVANTAGE: ("Without signal", 1),
    "dropped": ("Dropped", 1),
    keys.KEPT: ("Learned from", 1),
    keys.K1: ("k1, nats", 2),
    f"{keys.WEIGHT}/mean": ("Weight", 3),
    keys.EFFECTIVE: ("Effective sample size", 2),
}
"""Measures of a source's rollouts: each with its title in the table and its number of digits."""

LAST_ROUNDS = 30
"""The most columns of the matrix, one per round."""

MOST_ROWS = 24
"""The most rows of the matrix, one per pair of a learner and a source. With more pairs, each learner has one row."""

STATES: Mapping[str, tuple[str, str]] = {
    "kept": ("●", "learned from"),
    "late": ("◔", "learned from, some of it late"),
    "partly": ("◐", "learned from; some dropped, or without signal"),
    "dropped": ("○", "all dropped, or without signal"),
    "rejected": ("×", "something rejected"),
    "missing": ("–", "nothing came"),
    "quarantined": ("■", "in quarantine"),
}
"""The states of a cell of the matrix: each with its sign and its meaning."""


@dataclass(frozen=True)
class Mark:
    """A cell of the matrix: one of :data:`STATES`, its sign, and its text in words."""

    state: str
    sign: str
    words: str


@dataclass(frozen=True)
class MatrixRow:
    """A row of the matrix: a learner, a source, and a mark per round; None for a round without a record."""

    learner: str
    source: str
    marks: Sequence[Mark | None]


@dataclass(frozen=True)
class Taken:
    """The matrix of learners and sources in the last rounds; ``together``: a row has all of a learner's sources."""

    first: int
    last: int
    rows: Sequence[MatrixRow]
    together: bool
    legend: Mapping[str, tuple[str, str]] = field(default_factory=lambda: STATES)


@dataclass(frozen=True)
class Weighed:
    """Figures of importance weights and divergence."""

    weights: ChartRow
    divergence: ChartRow


@dataclass(frozen=True)
class ArmExchange:
    """One arm's figures, and the tables and texts between them.

    Attributes:
        together: words for the pairs that one figure shows together; "" if each pair has figures of its own.
        taken: None with several seeds.
        refusals: None if nothing was refused.
        honesty: None if there was no test.
        sampler_gap: the largest difference of log-probabilities, in nats; "" if it was not measured.
    """

    name: str
    together: str
    taken: Taken | None
    learned: Table
    refusals: Table | None
    honesty: Table | None
    weighed: Weighed | None
    sampler_gap: str


def exchanges(study: Study) -> list[ArmExchange] | None:
    """The exchange in each arm whose peers learn together; None if there is no such arm."""
    together = [arm for arm in study.arms if any(len(swarm.peers) > 1 for swarm in arm.swarms)]
    return [_arm_exchange(ArmRounds.studied(study, arm), arm.recipe.objective) for arm in together] or None


def _arm_exchange(rounds: ArmRounds, objective: ObjectiveConfig) -> ArmExchange:
    many = len(rounds.sources) > MOST_FIGURES
    together = f"{len(rounds.pairs)} pairs" if many else "each learner with all its sources"
    return ArmExchange(
        name=rounds.arm,
        together=together if len(rounds.pairs) > MOST_FIGURES else "",
        taken=taken(rounds) if len(rounds.runs) == 1 else None,
        learned=_learned(rounds),
        refusals=_refusals(rounds),
        honesty=honesty(rounds),
        weighed=weighed(rounds, objective),
        sampler_gap=_sampler_gap(rounds),
    )


def taken(rounds: ArmRounds) -> Taken | None:
    """The matrix of the last rounds of one seed; None if no peers learn together or no round has ended."""
    (run,) = rounds.runs.values()
    last = max((of_peer[-1].step for of_peer in run.values() if of_peer), default=0)
    if not rounds.pairs or not last:
        return None
    first = max(1, last - LAST_ROUNDS + 1)
    together = len(rounds.pairs) > MOST_ROWS
    rows = []
    for learner, sources in rounds.sources.items():
        by_step = {row.step: row for row in run[learner][-LAST_ROUNDS:]}
        for name, others in [("the others", sources)] if together else [(source, [source]) for source in sources]:
            marks = [_mark(by_step[step], others) if step in by_step else None for step in range(first, last + 1)]
            rows.append(MatrixRow(learner, name, marks))
    return Taken(first, last, rows, together)


def _mark(row: RoundRow, others: Sequence[str]) -> Mark:
    """The mark for the rollouts of some sources in one round: that of the worst source."""
    found = [source_of(other, [row]) for other in others]
    kept, zero, late, missing = (sum(getattr(one, key) for one in found) for key in ("used", "zero", "late", "missing"))
    dropped, rejected = Counter[str](), Counter[str]()
    for one in found:
        dropped.update(one.dropped)
        rejected.update(one.rejected)
    came = len(others) - missing
    if any(one.quarantined_since is not None for one in found):
        state = "quarantined"
    elif rejected:
        state = "rejected"
    elif missing:
        state = "missing"
    elif not kept:
        state = "dropped"
    elif late:
        state = "late"
    else:
        state = "partly" if dropped or zero else "kept"
    counts = {"learned from": kept, "without signal": zero}
    counts |= {f"dropped by {DROPS.get(reason, reason)}": n for reason, n in dropped.items()}
    counts |= {f"rejected as {REASONS.get(reason, reason)}": n for reason, n in rejected.items()}
    of_one = "" if came else "nothing came; "
    of_peers = f"{came} of {len(others)} came; " if len(others) > 1 else of_one
    words = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing of it"
    return Mark(state, STATES[state][0], f"round {row.step}: {of_peers}{words}")


def weighed(rounds: ArmRounds, objective: ObjectiveConfig) -> Weighed | None:
    """Figures of weights and divergence; None if nothing was recorded.

    C and the filter come from the recipe and the records: no objective is imported.
    """
    if not rounds.pairs or not rounds.recorded:
        return None
    heard, learners = rounds.grouped(), len(rounds.sources)
    cap, columns = cap_of(rounds, objective), learners if learners > 1 else len(heard)
    filters = any(map(any, (values for pair in heard for values in pair.values("dropped").values())))
    threshold = None
    if filters and objective.kl_estimator and objective.kl_threshold not in (None, math.inf):
        threshold = objective.kl_estimator, objective.kl_threshold
    return Weighed(
        ChartRow.of([figures.weights(pair, cap) for pair in heard], columns),
        ChartRow.of([figures.divergence(pair, objective.kl_reduction, threshold) for pair in heard], columns),
    )


def cap_of(rounds: ArmRounds, objective: ObjectiveConfig) -> float | None:
    """C by the recipe, else by the first round with a ratio above its largest weight.

    None if it is infinite or there is no such round.
    """
    if (cap := objective.importance_sampling_clip_max) is not None:
        return cap if cap < math.inf else None
    for learner, source in rounds.pairs:
        ratio, weight = (keys.peer_key(source, f"{kind}/max") for kind in (keys.RATIO, keys.WEIGHT))
        for row in (row.measures for run in rounds.runs.values() for row in run[learner]):
            if (row.get(ratio) or 0) > (row.get(weight) or float("inf")):
                return float(row[weight])
    return None


def _learned(rounds: ArmRounds) -> Table:
    """A table of the fate of each learner's own rollouts and of the others', as means over rounds and seeds."""
    rows = []
    for learner, sources in rounds.sources.items():
        measured = [rounds.measures(learner, [learner], f"{learner} itself")]
        if len(rounds.pairs) <= MOST_FIGURES:
            measured += [rounds.measures(learner, [source]) for source in sources]
        else:
            measured.append(rounds.measures(learner, sources, "another"))
        rows += [[learner, pair.source, *_means(pair)] for pair in measured]
    head = ["Learner", "Source", *(title for title, _ in LEARNED.values())]
    return Table.of(f"{rounds.arm}: rollouts a round, and their weights; means over rounds and seeds", head, rows)


def _means(heard: PairMeasures) -> list[str]:
    texts = []
    for measure, (_, digits) in LEARNED.items():
        values = [float(value) for of_round in heard.values(measure).values() for value in of_round]
        texts.append(f"{fmean(values):.{digits}f}" if values else "–")
    return texts


def _refusals(rounds: ArmRounds) -> Table | None:
    """A table of refused, late and missing rollouts with reasons, by learner and source, over all rounds and seeds."""
    rows = []
    for learner, source in sorted(rounds.pairs):
        found = [source_of(source, run[learner]) for run in rounds.runs.values() if run[learner]]
        times: Counter[str] = Counter()
        for of_seed in found:
            times.update({**of_seed.rejected, "nothing came": of_seed.missing, "late": of_seed.late})
        why = ", ".join(f"{reason}: {n}" for reason, n in sorted(times.items()) if n)
        if why:
            first = next((of_seed.first_rejection for of_seed in found if of_seed.first_rejection), "")
            rows.append([learner, source, why, first[:LONGEST_REASON]])
    head = ["Learner", "Source", "Reasons, times", "The last, in words"]
    return Table.of(f"{rounds.arm}: refused, late or missing", head, rows) if rows else None


def honesty(rounds: ArmRounds) -> Table | None:
    """A table of the highest evidence on each source, and of who had it; None if there was no test."""
    tested: dict[str, list[tuple[float, str, Mapping[str, Any]]]] = {}
    found: dict[str, list[str]] = {}
    for seed, run in rounds.runs.items():
        of_seed = f" of seed {seed}" if len(rounds.runs) > 1 else ""
        for learner, source in sorted(rounds.pairs):
            last = run[learner][-1].by_peer.get(source, {}) if run[learner] else {}
            if keys.EVIDENCE not in last:
                continue
            key = keys.peer_key(source, keys.EVIDENCE)
            nats = max(row.measures.get(key, 0.0) for row in run[learner])
            tested.setdefault(source, []).append((nats, learner, last))
            if keys.FOUND_IN in last:
                when = f"round {last[keys.FOUND_IN]}{of_seed}"
                after = f"after {last.get(keys.FOUND_AFTER, 0):,} tokens"
                found.setdefault(source, []).append(f"{learner} in {when}, {after}")
    rows = []
    for source, tests in tested.items():
        nats, learner, last = max(tests, key=lambda test: test[0])
        cells = [
            Cell(f"{nats:.1f}", strong=source in found),
            Cell(f"{last.get(keys.THRESHOLD, 0):.1f}"),
            Cell(learner),
            Cell(f"{max(of_last.get(keys.TESTED, 0) for _, _, of_last in tests):,}"),
            Cell("; ".join(found.get(source, ["nobody"]))),
            Cell(", ".join(map(repr, last.get(keys.TELLING) or ()))[:LONGEST_REASON]),
        ]
        rows.append((nats, [Cell(source), *cells]))
    head = ["Source", "Evidence, nats", "Needed", "Highest at", "Tokens tested", "Found by", "Telling passages"]
    caption = (
        f"{rounds.arm}: evidence that a source does not draw its tokens from the log-probabilities that it reports"
    )
    rows.sort(key=lambda row: -row[0])
    return Table(caption, head, [RowGroup(None, [row for _, row in rows])]) if rows else None


def _sampler_gap(rounds: ArmRounds) -> str:
    every = (row.measures for run in rounds.runs.values() for of_peer in run.values() for row in of_peer)
    gaps = [measures[keys.LOGP_GAP] for measures in every if keys.LOGP_GAP in measures]
    return f"{max(gaps):.1e}" if gaps else ""

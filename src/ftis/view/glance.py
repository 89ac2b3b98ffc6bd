"""One arm of a run at a glance, as sections of a page: is it working, curves, cost, events.

The page that is watched and the static report lay out the same values. What peers took from each other is in
exchanges.py and taken.py, completions are in completions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ftis.check.formatting import amount, counted, seconds_text
from ftis.records.following import ArmOfRun, PeerRecords
from ftis.records.reading import VALIDATION, OwnSeconds, RoundRow
from ftis.view.plots import ROUND, Chart, Series, chart
from ftis.view.sentences import About, about, headline
from ftis.view.views import Cell, RowGroup, Table

LAST_EVENTS = 40
"""Events that are shown."""

LONGEST_EVENT = 400
"""Letters of an event's text that are shown."""


@dataclass(frozen=True)
class Glance:
    """Whether it is working: of all together, and a sentence per peer."""

    headline: str
    peers: Sequence[About]


@dataclass(frozen=True)
class CurveAxis:
    """Curves over one thing; ``key`` names it in the page."""

    key: str
    label: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class CurveSet:
    """The same curves over rounds, own tokens and own seconds, of which one is shown."""

    overs: Sequence[CurveAxis]
    thinned: bool
    arm: str


@dataclass(frozen=True)
class Cost:
    table: Table
    about: bool


@dataclass(frozen=True)
class EventLine:
    when: str
    peer: str
    text: str


@dataclass(frozen=True)
class Events:
    lines: Sequence[EventLine]


def glance(arm: ArmOfRun, now: float | None = None) -> Glance:
    """How the peers stand; ``now`` in seconds since the epoch, or None for records that nobody writes any more."""
    standings = arm.standings(now)
    peers = [about(of) for of in standings]
    return Glance(headline(peers, standings), peers)


@dataclass(frozen=True)
class _CostAt:
    """What a peer had spent itself after ``step`` rounds."""

    step: int
    tokens: float
    seconds: float


def rounds(arm: ArmOfRun) -> CurveSet | None:
    """Accuracy and reward of every peer; None before anything was measured."""
    if not any(peer.rows or peer.evaluations.rows for peer in arm.peers.values()):
        return None
    spent = {name: _spent(peer.rows) for name, peer in arm.peers.items()}
    axes: list[tuple[str, str, Callable[[_CostAt], float]]] = [
        ("rounds", ROUND, lambda at: at.step),
        ("tokens", "own tokens", lambda at: at.tokens),
        ("seconds", "own seconds", lambda at: at.seconds),
    ]
    overs = []
    for key, label, of in axes:
        accuracy = [
            Series(name, arm.colour_of(name), _accuracies(peer, spent[name], of)) for name, peer in arm.peers.items()
        ]
        rewards = [
            Series(name, arm.colour_of(name), _rewards(peer, spent[name], of)) for name, peer in arm.peers.items()
        ]
        charts = [chart("Accuracy on validation", label, accuracy), chart("Reward of own completions", label, rewards)]
        overs.append(CurveAxis(key, label, charts))
    return CurveSet(overs, any(peer.metrics.thinned for peer in arm.peers.values()), arm.arm.name)


def _spent(rows: Sequence[Mapping[str, Any]]) -> dict[int, _CostAt]:
    """By step. Where rows are left out, a row's seconds stand for those before it too."""
    found, seconds, before = {0: _CostAt(0, 0.0, 0.0)}, 0.0, 0
    for row in rows:
        step = int(row["step"])
        own = row.get("step_time", 0.0) - row.get("time/wait", 0.0)
        seconds += own * (step - before)
        found[step] = _CostAt(step, float(row.get("tokens_sampled", 0)), seconds)
        before = step
    return found


def _accuracies(
    peer: PeerRecords, spent: Mapping[int, _CostAt], of: Callable[[_CostAt], float]
) -> list[tuple[float, float]]:
    steps = sorted(spent)
    points = []
    for row in peer.evaluations.rows:
        if row.get("split") != VALIDATION:
            continue
        nearest = max((step for step in steps if step <= row["step"]), default=0)
        at = spent[nearest] if nearest == row["step"] else replace(spent[nearest], step=int(row["step"]))
        points.append((of(at), float(row["accuracy"])))
    return points


def _rewards(
    peer: PeerRecords, spent: Mapping[int, _CostAt], of: Callable[[_CostAt], float]
) -> list[tuple[float, float]]:
    return [(of(spent[step]), mean) for step, mean in peer.reward_means]


def spent_table(arm: ArmOfRun) -> Cost | None:
    """What each peer has spent so far; None before the first round. Where rows are left out, totals are about right."""
    rows = []
    for name, peer in arm.peers.items():
        if not peer.rows:
            continue
        lately = peer.recent
        own, step = OwnSeconds.over(lately), lately[-1].step
        waited = fmean(row.measures.get("time/wait", 0.0) for row in lately)

        def each(seconds: float | None, n: int = len(lately)) -> str:
            return "–" if seconds is None else seconds_text(seconds / n)

        sent, received = _bytes(peer)
        rows.append(
            [
                Cell(name),
                Cell(f"{step:,}"),
                Cell(amount(lately[-1].measures.get("tokens_sampled"))),
                Cell(_megabytes(sent)),
                Cell(_megabytes(received)),
                Cell(each(None if own is None else own.sampling)),
                Cell(each(None if own is None else own.exchange)),
                Cell(each(None if own is None else own.training)),
                Cell(seconds_text(waited) if own else "–"),
                Cell(_tokens_per_second(lately)),
            ]
        )
    if not rows:
        return None
    head = ["Peer", "Rounds", "Own tokens", "MB sent", "MB received"]
    head += ["s sampling", "s exchange", "s training", "s waiting", "Tokens/s"]
    caption = "What each peer has spent; seconds of a round are means of the last ones"
    return Cost(Table(caption, head, [RowGroup(None, rows)]), any(p.metrics.thinned for p in arm.peers.values()))


def _bytes(peer: PeerRecords) -> tuple[float, float]:
    """Offered to each of the others, and received, over all rounds; a row stands for those left out before it."""
    sent, received, before = 0.0, 0.0, 0
    for row in peer.rows:
        step = int(row["step"])
        for key, value in row.items():
            if key.endswith("/bytes"):
                own = key == f"peer/{peer.name}/bytes"
                sent, received = sent + value * (step - before) * own, received + value * (step - before) * (not own)
        before = step
    return sent, received


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def _tokens_per_second(rows: Sequence[RoundRow]) -> str:
    seconds = sum(row.measures.get("time/sample", 0.0) for row in rows[1:])
    first, last = (row.measures.get("tokens_sampled") for row in (rows[0], rows[-1]))
    return amount((last - first) / seconds) if seconds and first is not None and last is not None else "–"


def events(arm: ArmOfRun) -> Events | None:
    """What happened, the newest first: what peers noticed, and evaluations."""
    found: list[tuple[str, int, EventLine]] = []
    for name, peer in arm.peers.items():
        for row in peer.events.rows:
            text = _in_words(row, arm.rounds)
            if text:
                when, after = str(row.get("time", "")), int(row.get("step", row.get("round", 0)) or 0)
                found.append((when, after, EventLine(when, name, text[:LONGEST_EVENT])))
        if not peer.events.rows:
            by_step: dict[int, dict[str, float]] = {}
            for row in peer.evaluations.rows:
                by_step.setdefault(int(row["step"]), {})[str(row["split"])] = float(row["accuracy"])
            for step, splits in by_step.items():
                found.append(("", step, EventLine(f"round {step}", name, _evaluated(splits))))
    found.sort(key=lambda event: event[:2], reverse=True)
    return Events([line for _, _, line in found[:LAST_EVENTS]]) if found else None


def _in_words(row: Mapping[str, Any], rounds: int) -> str:
    step = row.get("step", 0)
    match row.get("kind"):
        case "network":
            return str(row.get("text", ""))
        case "start":
            return f"ready, {step} of {counted(rounds, 'round')} finished"
        case "evaluation":
            splits = {k: v for k, v in row.items() if k not in ("time", "kind", "step") and isinstance(v, float)}
            return f"{_evaluated(splits)} after {counted(int(step), 'round')}"
        case "stopped":
            return f"stopped after {counted(int(step), 'round')}, as it was asked to"
        case "finished":
            return f"finished its last round, {step}"
    return ""


def _evaluated(splits: Mapping[str, float]) -> str:
    return "evaluated: " + ", ".join(f"{split} {accuracy:.3f}" for split, accuracy in splits.items())

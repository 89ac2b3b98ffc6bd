"""One arm of a run, as sections of a page: is it working, curves, cost, events.

The live page and the static report lay out the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftis.check.quantities import counted
from ftis.diagnosis.standing import standings
from ftis.diagnosis.troubles import reward_means
from ftis.metric_keys import DRAW, SAMPLE, TOKENS_SAMPLED, seconds_by_stage
from ftis.records.events import Evaluated, Event, NetworkEvent, PeerFinished, PeerStarted, PeerStopped
from ftis.records.reading import VALIDATION, ArmOfRun, PeerRun, RoundRow, Study, own_seconds
from ftis.view.charts import ROUND, Chart, Series, chart
from ftis.view.completions import latest
from ftis.view.exchanges import honesty, taken, weighed
from ftis.view.formatting import amount, seconds_text
from ftis.view.pairs import ArmRounds
from ftis.view.sections import Table
from ftis.view.sentences import About, about, headline, of_its_time

LATELY = 32
"""Rounds over which a round's seconds are averaged."""

LAST_EVENTS = 40
"""The number of events that a page shows."""

LONGEST_EVENT = 400
"""The most letters of an event's text that a page shows."""


@dataclass(frozen=True)
class Glance:
    """Whether the arm is working: a headline on all peers together, and a sentence per peer."""

    headline: str
    peers: Sequence[About]


@dataclass(frozen=True)
class CurveAxis:
    """Charts over one x axis; ``key`` names the axis in the page."""

    key: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class CurveSet:
    """The same curves over rounds, own tokens and own seconds; a page shows one of the three at a time."""

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


def glance(arm: ArmOfRun, now: float | None = None) -> Glance:
    """The state of every peer at ``now``, in seconds since the epoch; None if nobody writes the records any more."""
    found = standings(arm, now)
    peers = [about(standing) for standing in found]
    return Glance(headline(peers, found), peers)


def troubles(study: Study) -> list[str]:
    """The troubles of every peer that was trained, by seed and arm."""
    found = []
    for seed in study.runs:
        of_seed = f"seed {seed} " if len(study.runs) > 1 else ""
        for arm in study.arms:
            for peer in glance(study.arm_of(seed, arm)).peers:
                texts = (remark.text for remark in peer.remarks if remark.level == "trouble")
                found += [f"{of_seed}{arm.name}/{peer.name}: {text}" for text in texts]
    return found


def rounds(arm: ArmOfRun) -> CurveSet | None:
    """Accuracy and reward of every peer; None before anything was measured."""
    if not any(peer.started for peer in arm.peers.values()):
        return None
    axes: list[tuple[str, str, Callable[[PeerRun, int], float | None]]] = [
        ("rounds", ROUND, lambda peer, step: step),
        ("tokens", "own tokens", lambda peer, step: peer.spent_by(step)[0]),
        ("seconds", "own seconds", lambda peer, step: peer.spent_by(step)[1]),
    ]
    measured: dict[str, Callable[[PeerRun], list[tuple[int, float]]]] = {
        "Accuracy on validation": lambda peer: [(row.step, row.accuracy) for row in peer.on(VALIDATION)],
        "Reward of own completions": lambda peer: reward_means(peer.rounds),
    }
    overs = []  # a peer has the same colour in every chart
    for key, label, over in axes:
        charts = []
        for title, values in measured.items():
            drawn = []
            for name, peer in arm.peers.items():
                points = [(x, y) for step, y in values(peer) if (x := over(peer, step)) is not None]
                drawn.append(Series(name, arm.arm.peers.index(name), points))
            charts.append(chart(title, label, drawn))
        overs.append(CurveAxis(key, charts))
    return CurveSet(overs, any(peer.thinned for peer in arm.peers.values()), arm.arm.name)


def spent_table(arm: ArmOfRun) -> Cost | None:
    """A table of each peer's cost so far; None before the first round. Totals are approximate if rows are left out."""
    rows = []
    for name, peer in arm.peers.items():
        if not peer.rounds:
            continue
        lately = peer.rounds[-LATELY:]
        stages = seconds_by_stage(*(row.measures for row in lately))
        each = [seconds_text(seconds / len(lately)) for seconds in (*own_seconds(lately).values(), stages["waiting"])]
        tokens = amount(lately[-1].measures.get(TOKENS_SAMPLED))
        moved = (_megabytes(peer.bytes_sent), _megabytes(peer.bytes_received))
        evaluating = sum(row.seconds for row in peer.evaluations if row.step >= lately[0].step)
        spent = of_its_time({**stages, "evaluating": evaluating})
        rows.append([name, f"{lately[-1].step:,}", tokens, *moved, *each, _tokens_per_second(lately), spent])
    if not rows:
        return None
    head = ["Peer", "Rounds", "Own tokens", "MB sent", "MB received"]
    head += ["s sampling", "s exchange", "s training", "s waiting", "Tokens/s", "Its time"]
    caption = "What each peer has spent; seconds of a round are means of the last ones"
    return Cost(Table.of(caption, head, rows), any(peer.thinned for peer in arm.peers.values()))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def _tokens_per_second(rows: Sequence[RoundRow]) -> str:
    seconds = sum(row.measures.get(DRAW) or row.measures.get(SAMPLE, 0.0) for row in rows[1:])
    first, last = (row.measures.get(TOKENS_SAMPLED) for row in (rows[0], rows[-1]))
    return amount((last - first) / seconds) if seconds and first is not None and last is not None else "–"


def events(arm: ArmOfRun) -> list[EventLine] | None:
    """The events of joined peers, the newest first; None if there are none."""
    found: list[tuple[str, int, EventLine]] = []
    for name, peer in arm.peers.items():
        for row in peer.events:
            after, text = _in_words(row.event, arm.rounds)
            if text:
                found.append((row.time, after, EventLine(row.time, name, text[:LONGEST_EVENT])))
    found.sort(key=lambda event: event[:2], reverse=True)
    return [line for _, _, line in found[:LAST_EVENTS]] or None


def _in_words(event: Event | None, rounds: int) -> tuple[int, str]:
    """The round of an event, and its text; "" if a page does not show it."""
    match event:
        case NetworkEvent(text=text, round=round):
            return round, text
        case PeerStarted(step):
            return step, f"ready, {step} of {counted(rounds, 'round')} finished"
        case Evaluated(step, accuracies):
            each = ", ".join(f"{split} {value:.3f}" for split, value in accuracies.items() if isinstance(value, float))
            return step, f"evaluated: {each} after {counted(step, 'round')}"
        case PeerStopped(step):
            return step, f"stopped after {counted(step, 'round')}, as it was asked to"
        case PeerFinished(step):
            return step, f"finished its last round, {step}"
    return 0, ""


def sections_of(arm: ArmOfRun, seen: Glance) -> dict[str, tuple[str, Callable[[], object]]]:
    """An arm's sections by anchor: each a title and a function that makes the view."""
    pairs = ArmRounds.followed(arm)
    return {
        "glance": ("Is it working?", lambda: seen),
        "rounds": ("Curves", lambda: rounds(arm)),
        "taken": ("Who learned from whom", lambda: taken(pairs)),
        "weighed": ("Weights and divergence", lambda: weighed(pairs, arm.arm.recipe.objective)),
        "honesty": ("Honesty", lambda: honesty(pairs)),
        "spent": ("Cost", lambda: spent_table(arm)),
        "completions": ("Last completions", lambda: latest(arm)),
        "events": ("Events", lambda: events(arm)),
    }

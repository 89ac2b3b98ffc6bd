"""What happens in a run, as typed values: said by whoever does the work, read by displays, logs and trackers.

An event says what happened; its ``place`` says where. Whoever knows a part of the place adds it on the way
(:func:`placed`): a peer says that a round ended, the run in which arm, an experiment in which of its jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where something happened; parts that do not apply are empty.

    Attributes:
        job: one arm under one seed of an experiment, as ``seed 0 F-TIS``.
    """

    arm: str = ""
    peer: str = ""
    job: str = ""


@dataclass(frozen=True)
class WarmUp:
    """A starter has been warmed up for ``step`` of at most ``most`` optimiser steps."""

    starter: str
    step: int
    most: int
    place: Place = Place()


@dataclass(frozen=True)
class JobsKnown:
    """An experiment has ``jobs`` jobs, of which ``done`` were finished before."""

    jobs: int
    done: int
    place: Place = Place()


@dataclass(frozen=True)
class JobEnded:
    """A job of an experiment is finished."""

    place: Place = Place()


@dataclass(frozen=True)
class ArmBegun:
    """An arm goes on to ``rounds`` rounds with ``peers``, those that had finished before not among them."""

    peers: tuple[str, ...]
    rounds: int
    place: Place = Place()


@dataclass(frozen=True)
class PeerStarted:
    """A peer is ready to train, with ``step`` rounds finished."""

    step: int
    place: Place = Place()


@dataclass(frozen=True)
class Evaluated:
    """A peer was evaluated after ``step`` rounds.

    Attributes:
        accuracies: share of problems answered rightly, by split.
    """

    step: int
    accuracies: Mapping[str, float]
    place: Place = Place()


@dataclass(frozen=True)
class RoundEnded:
    """A peer finished a round.

    Attributes:
        metrics: its line of metrics.jsonl; docs/metrics.md explains the keys.
    """

    metrics: Mapping[str, Any]
    place: Place = Place()

    @property
    def step(self) -> int:
        """Rounds finished."""
        return int(self.metrics["step"])


@dataclass(frozen=True)
class PeerStopped:
    """A peer stopped when asked to, with ``step`` rounds finished and saved."""

    step: int
    place: Place = Place()


@dataclass(frozen=True)
class PeerFinished:
    """A peer finished its last round."""

    step: int
    place: Place = Place()


@dataclass(frozen=True)
class NetworkEvent:
    """Something a peer noticed on the network.

    Attributes:
        what: one word; docs/metrics.md lists them.
        text: the same for people.
        round: the round the peer was in.
    """

    what: str
    text: str
    round: int
    place: Place = Place()


@dataclass(frozen=True)
class Stopping:
    """Somebody asked the run to stop: its peers finish the rounds they are in."""

    place: Place = Place()


@dataclass(frozen=True)
class Failed:
    """A job in a process of its own met an error."""

    message: str
    place: Place = Place()


Event = (
    WarmUp
    | JobsKnown
    | JobEnded
    | ArmBegun
    | PeerStarted
    | Evaluated
    | RoundEnded
    | PeerStopped
    | PeerFinished
    | NetworkEvent
    | Stopping
    | Failed
)
Say = Callable[[Event], None]

KINDS: Mapping[str, type[Event]] = {
    "warm-up": WarmUp,
    "experiment": JobsKnown,
    "job": JobEnded,
    "arm": ArmBegun,
    "start": PeerStarted,
    "evaluation": Evaluated,
    "round": RoundEnded,
    "stopped": PeerStopped,
    "finished": PeerFinished,
    "network": NetworkEvent,
    "stopping": Stopping,
    "failed": Failed,
}
"""The ``kind`` of each event in events.jsonl."""

_KIND_OF = {event: kind for kind, event in KINDS.items()}
_SPREAD: Mapping[type[Event], str] = {Evaluated: "accuracies", RoundEnded: "metrics"}
"""Fields whose entries stand among the other keys of an event's line."""


def unheard(event: Event) -> None:
    """The listener of a run that nobody watches."""


def placed(say: Say, **parts: str) -> Say:
    """A listener that adds these parts of :class:`Place` to each event and passes it on to ``say``."""

    def say_where(event: Event) -> None:
        say(replace(event, place=replace(event.place, **parts)))

    return say_where


def to_json(event: Event) -> dict[str, Any]:
    """An event as a line of events.jsonl: its kind, its fields, and the parts of its place that are known."""
    spread = _SPREAD.get(type(event))
    values = {f.name: getattr(event, f.name) for f in fields(event) if f.name not in ("place", spread)}
    spread_values = getattr(event, spread) if spread else {}
    place = {name: part for name, part in vars(event.place).items() if part}
    return {"kind": _KIND_OF[type(event)], **values, **spread_values, **place}


def from_json(line: Mapping[str, Any]) -> Event:
    """The event of a line of events.jsonl; its ``time`` is left out.

    Raises:
        ValueError: the line is no event: an unknown kind, a field that is missing, a key too many.
    """
    rest = {key: value for key, value in line.items() if key not in ("kind", "time")}
    event = KINDS.get(line.get("kind", ""))
    if event is None:
        raise ValueError(f"kind = {line.get('kind')!r} is no event: there are {', '.join(KINDS)}")
    place = Place(**{f.name: rest.pop(f.name) for f in fields(Place) if f.name in rest})
    spread = _SPREAD.get(event)
    names = [f.name for f in fields(event) if f.name not in ("place", spread)]
    values = {name: rest.pop(name) for name in names if name in rest}
    if spread is not None:
        values[spread], rest = rest, {}
    if rest or len(values) < len(names):
        wrong = sorted(rest) or [name for name in names if name not in values]
        raise ValueError(
            f"an event of kind {line['kind']!r} has the keys {', '.join(names)}: see to {', '.join(wrong)}"
        )
    if "peers" in values:
        values["peers"] = tuple(values["peers"])
    return event(**values, place=place)

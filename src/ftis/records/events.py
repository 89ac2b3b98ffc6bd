"""The events of a run, as typed values that displays, logs and trackers read.

An event says what happened, and its ``place`` where. Each caller adds the part of the place that it knows
(:func:`placed`): a peer reports that a round ended, the run adds the arm, an experiment adds the job. An event's
``kind`` is its name in events.jsonl.

``step`` in events, metrics, cursors and checkpoint names counts finished rounds, a name kept for compatibility.
Everywhere else a step is an optimiser's step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, get_args


class Stopped(Exception):  # noqa: N818 - a request, not an error
    """The run was asked to stop. The code that raises it has changed nothing since the last finished round."""


@dataclass(frozen=True)
class Place:
    """The place of an event. Parts that do not apply are empty.

    Attributes:
        job: one swarm of one arm of an experiment under one seed, such as ``seed 0 F-TIS`` or ``seed 0 alone small``.
    """

    arm: str = ""
    peer: str = ""
    job: str = ""


@dataclass(frozen=True)
class Planned:
    """Lines for people before training: what was checked, the plan, remarks."""

    kind: ClassVar[str] = "plan"
    lines: tuple[str, ...]
    place: Place = Place()


@dataclass(frozen=True)
class GroupsTried:
    """Pre-flight has done ``groups`` of a peer's ``most``; the first event has 0, once the peer is loaded.

    A group counts once for sampling, and several times for learning, since learning takes longer.
    """

    kind: ClassVar[str] = "preflight"
    groups: int
    most: int
    place: Place = Place()


@dataclass(frozen=True)
class FirstGroup:
    """Pre-flight has sampled the first of a peer's groups, and has not learned from any.

    Attributes:
        reward: the mean reward of its completions.
        formats, answers: completions with the right format, and with the right answer; None with the recipe's own
            reward.
        unfinished: completions that reached the longest length.
        tokens_per_second: the speed of sampling, the first calls of the process included.
        seconds: a guess of the seconds of sampling a round, by this group alone.
    """

    kind: ClassVar[str] = "first-group"
    completions: int
    reward: float
    formats: int | None
    answers: int | None
    unfinished: int
    tokens_per_second: float
    place: Place = Place()
    seconds: float = 0.0


@dataclass(frozen=True)
class JobsKnown:
    """An experiment has ``jobs`` jobs, and ``done`` of them were finished before.

    Attributes:
        left: the arm and the rounds of each other job, by its name.
        at_a_time: the jobs that run side by side.
    """

    kind: ClassVar[str] = "experiment"
    jobs: int
    done: int
    left: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    at_a_time: int = 1
    place: Place = Place()


@dataclass(frozen=True)
class JobEnded:
    """A job of an experiment is finished."""

    kind: ClassVar[str] = "job"
    place: Place = Place()


@dataclass(frozen=True)
class ArmBegun:
    """An arm trains ``peers`` up to ``rounds`` rounds; peers that had finished are left out.

    Attributes:
        text: whether the peers exchange text instead of token ids.
    """

    kind: ClassVar[str] = "arm"
    peers: tuple[str, ...]
    rounds: int
    text: bool = False
    place: Place = Place()


@dataclass(frozen=True)
class PeerStarted:
    """A peer is ready to train, with ``step`` rounds finished.

    Attributes:
        slow: how it samples, if faster ways do not fit its model.
    """

    kind: ClassVar[str] = "start"
    step: int
    place: Place = Place()
    slow: str = ""


@dataclass(frozen=True)
class Evaluated:
    """A peer was evaluated after ``step`` rounds.

    Attributes:
        accuracies: fraction of problems answered correctly, by split.
        problems, reward_std: of the first split the number of problems, and the standard deviation of their rewards.
    """

    kind: ClassVar[str] = "evaluation"
    step: int
    accuracies: Mapping[str, float]
    place: Place = Place()
    problems: int = 1
    reward_std: float | None = None


@dataclass(frozen=True)
class RoundEnded:
    """A peer finished a round.

    Attributes:
        metrics: the round's line of metrics.jsonl; docs/metrics.md explains the keys.
    """

    kind: ClassVar[str] = "round"
    metrics: Mapping[str, Any]
    place: Place = Place()

    @property
    def step(self) -> int:
        """The number of finished rounds."""
        return int(self.metrics["step"])


@dataclass(frozen=True)
class PeerStopped:
    """A peer stopped when asked to, with ``step`` rounds finished and saved."""

    kind: ClassVar[str] = "stopped"
    step: int
    place: Place = Place()


@dataclass(frozen=True)
class PeerFinished:
    """A peer finished its last round."""

    kind: ClassVar[str] = "finished"
    step: int
    place: Place = Place()


@dataclass(frozen=True)
class NetworkEvent:
    """An observation of a peer on the network.

    Attributes:
        what: the observation in one word; docs/metrics.md lists the words.
        text: the same as a sentence.
        round: the peer's round.
    """

    kind: ClassVar[str] = "network"
    what: str
    text: str
    round: int
    place: Place = Place()


@dataclass(frozen=True)
class AskedToStop:
    """The run was asked to stop; its peers finish their rounds."""

    kind: ClassVar[str] = "stopping"
    place: Place = Place()


@dataclass(frozen=True)
class Failed:
    """A job in its own process met an error."""

    kind: ClassVar[str] = "failed"
    message: str
    place: Place = Place()


Event = (
    Planned
    | GroupsTried
    | FirstGroup
    | JobsKnown
    | JobEnded
    | ArmBegun
    | PeerStarted
    | Evaluated
    | RoundEnded
    | PeerStopped
    | PeerFinished
    | NetworkEvent
    | AskedToStop
    | Failed
)
Say = Callable[[Event], None]


def unheard(event: Event) -> None:
    """Ignore an event: the listener of a run that nobody watches."""


def placed(say: Say, **parts: str) -> Say:
    """A listener that adds ``parts`` of :class:`Place` to each event and passes it on to ``say``."""

    def say_where(event: Event) -> None:
        say(replace(event, place=replace(event.place, **parts)))

    return say_where


_SPREAD: Mapping[type[Event], str] = {Evaluated: "accuracies", RoundEnded: "metrics"}
"""Fields whose entries stand among the other keys of an event's line."""


def to_json(event: Event) -> dict[str, Any]:
    """An event as a line of events.jsonl: its kind, its fields, and the parts of its place that are known."""
    spread = _SPREAD.get(type(event))
    values = {f.name: getattr(event, f.name) for f in fields(event) if f.name not in ("place", spread)}
    spread_values = getattr(event, spread) if spread else {}
    place = {name: part for name, part in vars(event.place).items() if part}
    return {"kind": event.kind, **values, **spread_values, **place}


_KINDS: Mapping[str, type[Event]] = {event.kind: event for event in get_args(Event)}


def of_json(line: Mapping[str, Any]) -> Event | None:
    """The event of a line; None for a line of no known kind. Raises TypeError if a field is missing."""
    event = _KINDS.get(str(line.get("kind")))
    if event is None:
        return None
    place = {name: line[name] for name in vars(Place()) if name in line}
    values = {f.name: line[f.name] for f in fields(event) if f.name in line}
    if spread := _SPREAD.get(event):
        others = {"kind", "time", *place, *values}
        values[spread] = {name: value for name, value in line.items() if name not in others}
    return event(**values, place=Place(**place))

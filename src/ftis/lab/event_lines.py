"""Events as lines of events.jsonl, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from ftis.loop.events import Evaluated, Event, Place, RoundEnded

KINDS: Mapping[str, type[Event]] = {event.kind: event for event in get_args(Event)}
"""The events by their ``kind`` in events.jsonl."""

_SPREAD: Mapping[type[Event], str] = {Evaluated: "accuracies", RoundEnded: "metrics"}
"""Fields whose entries stand among the other keys of an event's line."""


def to_json(event: Event) -> dict[str, Any]:
    """An event as a line of events.jsonl: its kind, its fields, and the parts of its place that are known."""
    spread = _SPREAD.get(type(event))
    values = {f.name: getattr(event, f.name) for f in fields(event) if f.name not in ("place", spread)}
    spread_values = getattr(event, spread) if spread else {}
    place = {name: part for name, part in vars(event.place).items() if part}
    return {"kind": event.kind, **values, **spread_values, **place}


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
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return event(**values, place=place)

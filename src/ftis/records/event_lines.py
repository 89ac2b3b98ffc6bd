"""Events as lines of events.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ftis.records.events import Evaluated, Event, RoundEnded

_SPREAD: Mapping[type[Event], str] = {Evaluated: "accuracies", RoundEnded: "metrics"}
"""Fields whose entries stand among the other keys of an event's line."""


def to_json(event: Event) -> dict[str, Any]:
    """An event as a line of events.jsonl: its kind, its fields, and the parts of its place that are known."""
    spread = _SPREAD.get(type(event))
    values = {f.name: getattr(event, f.name) for f in fields(event) if f.name not in ("place", spread)}
    spread_values = getattr(event, spread) if spread else {}
    place = {name: part for name, part in vars(event.place).items() if part}
    return {"kind": event.kind, **values, **spread_values, **place}

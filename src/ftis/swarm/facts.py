"""What peers mean by a recipe, compared. Pure; what comes from others is never trusted to be printable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MAX_FACTS_BYTES = 64 * 1024
SHOWN = 10
"""Differences that are named in one message."""


def read_facts(data: bytes) -> dict[str, Any] | None:
    """The JSON object in ``data``; None for anything else and above :data:`MAX_FACTS_BYTES`."""
    if len(data) > MAX_FACTS_BYTES:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def mismatch(peer: str, recipe: str, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """A sentence on what ``peer`` means by ``recipe`` and this peer does not; None if they mean the same."""
    differing = sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
    if not differing:
        return None
    shown = "; ".join(
        f"{_printable(key)}: {_printable(own.get(key))} here, {_printable(theirs.get(key))} there"
        for key in differing[:SHOWN]
    )
    return f"{peer} means another run by {recipe!r} and is not heard ({shown})"


def _printable(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= 40 else f"{text[:28]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"

"""The keys ``peer/<name>/<measure>`` of a round's metrics, written and read here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def peer_key(name: str, measure: str) -> str:
    """The key of one measure of one peer; names hold no slash."""
    return f"peer/{name}/{measure}"


def by_peer(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The measures of each peer that a row of metrics holds."""
    peers: dict[str, dict[str, Any]] = {}
    for key, value in row.items():
        if key.startswith("peer/"):
            _, name, measure = key.split("/", 2)
            peers.setdefault(name, {})[measure] = value
    return peers

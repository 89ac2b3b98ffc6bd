"""The status of a peer for ``ftis status``: its own statement, and the reading of others' statements."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis.config import PEER_NAME
from ftis.metric_keys import ADMITTED, QUARANTINED, STAGES, by_peer, seconds_by_stage
from ftis.records.events import Evaluated, Event, PeerStarted, RoundEnded
from ftis.swarm.facts import read_facts
from ftis.version import VERSION

LONGEST_TEXT, MOST_PEERS = 64, 256
"""The most letters of a text, and the most names, that are taken from a status."""
COUNTS = (ADMITTED, "rejected", "late", "bytes")
"""The measures of another peer that a status sums up."""


class Status:
    """The ``facts`` that a peer states of itself, as JSON. Seconds, and counts by peer, are totals since its start."""

    def __init__(self, name: str, run: str, peer: str) -> None:
        self.facts = dict[str, Any](name=name, run=run, peer=peer, state="starting", version=VERSION)
        self._since = time.monotonic()

    def doing(self, state: str, **rounds: int) -> None:
        """State what the peer does from now on, and in which of how many rounds."""
        self.facts |= {"state": state, **rounds}

    def stated(self, live: Sequence[str]) -> str:
        """The statement as JSON, with the names of the peers that are seen."""
        return json.dumps({**self.facts, "live": live})

    def hear(self, event: Event) -> None:
        """Add a round or an evaluation that ended to the totals."""
        if isinstance(event, RoundEnded):
            totals = dict(self.facts.get("from", {}))
            for name, measures in by_peer(event.metrics).items():
                counts = {key: int(measures.get(key, 0)) for key in COUNTS}
                quarantined = int(measures.get(QUARANTINED, False))
                totals[name] = _sum(totals.get(name, {}), counts) | {"quarantined": quarantined}
            self.facts |= {"reward": event.metrics["reward"], "from": totals}
        if isinstance(event, (RoundEnded, Evaluated, PeerStarted)):
            began, self._since = self._since, time.monotonic()
            spent = seconds_by_stage(event.metrics) if isinstance(event, RoundEnded) else {}
            if isinstance(event, Evaluated):
                spent["evaluating"] = self._since - began
            self.facts["seconds"] = _sum(self.facts.get("seconds", {}), spent)


def _sum(before: Mapping[str, Any], more: Mapping[str, float]) -> dict[str, Any]:
    return {**before, **{key: before.get(key, 0) + count for key, count in more.items()}}


@dataclass(frozen=True)
class Stated:
    """The status of a peer of any swarm, as it says itself; None for a part that it does not state.

    Attributes:
        live: the peers that it sees.
        sources: of each peer, the totals of :data:`COUNTS`, and whether it is in quarantine.
    """

    run: str | None = None
    peer: str | None = None
    name: str | None = None
    state: str | None = None
    version: str | None = None
    round: int | None = None
    rounds: int | None = None
    reward: float | None = None
    seconds: Mapping[str, float] | None = None
    live: Sequence[str] | None = None
    sources: Mapping[str, Mapping[str, int]] | None = None

    def keyed(self) -> dict[str, Any]:
        """The stated parts by their keys in JSON."""
        return {"from" if key == "sources" else key: part for key, part in vars(self).items() if part is not None}


def read_status(data: bytes) -> Stated | None:
    """The status of a peer; None for anything but a JSON object with some part of one.

    Parts of a wrong type or size are left out; long texts and lists are cut.
    """
    claims = read_facts(data)
    if claims is None:
        return None
    texts = {key: claims.get(key) for key in ("run", "peer", "name", "state", "version")}
    found: dict[str, Any] = {key: text[:LONGEST_TEXT] for key, text in texts.items() if isinstance(text, str)}
    found |= {key: claims[key] for key in ("round", "rounds") if _is_count(claims.get(key))}
    if isinstance(claims.get("reward"), (int, float)) and abs(claims["reward"]) < 1e9:
        found["reward"] = float(claims["reward"])
    live, sources, seconds = claims.get("live"), claims.get("from"), claims.get("seconds")
    if isinstance(seconds, dict):
        known = {name: seconds.get(name) for name in (*STAGES, "evaluating")}
        found["seconds"] = {k: float(v) for k, v in known.items() if isinstance(v, (int, float)) and 0 <= v < 1e9}
    if isinstance(live, list):
        found["live"] = [name for name in live[:MOST_PEERS] if isinstance(name, str) and PEER_NAME.fullmatch(name)]
    if isinstance(sources, dict):
        found["sources"] = {
            name: {k: v for k, v in totals.items() if _is_count(v)}
            for name, totals in list(sources.items())[:MOST_PEERS]
            if isinstance(totals, dict) and PEER_NAME.fullmatch(name)
        }
    return Stated(**found) if found else None


def _is_count(value: Any) -> bool:
    """Whether a value from anybody is a whole number of a size that a table can show."""
    return type(value) is int and 0 <= value < 2**53

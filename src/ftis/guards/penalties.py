"""Peers whose messages are rejected too often are set aside for some rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftis.admission import Admission, Reason
from ftis.config import Recipe
from ftis.selection import Selection

OWN_FAULTS = (Reason.OVER_TIME, Reason.UNSCORED)
"""Faults that may be this peer's own: its slowness, or its reward function's mistake."""


@dataclass
class Penalties(Selection):
    """A selection that sets a peer aside for some rounds after too many rejections since its last faultless message.

    A message is faultless if a part of it was admitted and no part rejected by its sender's fault.

    Attributes:
        max_rejections: the most that a peer may have; 0: no limit.
        rounds: how many rounds a peer is set aside for.
        rejections: by peer, since its last faultless message.
        until: by peer, the first round in which it takes part again.
    """

    max_rejections: int
    rounds: int
    rejections: dict[str, int] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)
    name: str = "penalty"

    def skipped(self, round: int) -> Collection[str]:
        return frozenset(peer for peer, until in self.until.items() if round < until)

    def heard(self, admission: Admission, round: int) -> None:
        peer = admission.peer
        if any(r.reason == Reason.NOT_IN_ROSTER for r in admission.rejections):
            return
        faults = sum(r.reason not in OWN_FAULTS for r in admission.rejections)
        if faults or not admission.admitted:
            self.rejections[peer] = self.rejections.get(peer, 0) + faults
        else:
            self.rejections[peer] = 0
        if self.max_rejections and self.rejections[peer] > self.max_rejections:
            self.until[peer] = round + 1 + self.rounds
            self.rejections[peer] = 0

    def state(self) -> Mapping[str, Any]:
        return {"rejections": dict(self.rejections), "until": dict(self.until)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rejections, self.until = dict(state["rejections"]), dict(state["until"])


def penalties(recipe: Recipe, own: str) -> Penalties:
    """The penalties that ``[network]`` sets."""
    return Penalties(recipe.network.max_rejections, recipe.network.set_aside_rounds)

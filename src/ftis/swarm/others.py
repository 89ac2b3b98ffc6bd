"""A peer's knowledge of one other peer. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftis.swarm.manifest import Manifest


@dataclass
class Other:
    """One other peer, as far as it was heard.

    Attributes:
        presence: sign of presence -> the round from which on the peer takes part.
        gone_since: when the last of those signs went away.
        met: whether it was ever present.
        refused: rounds whose offer contradicts another one that it signed too, or cannot be fetched at all.
        corrupt: rounds for which other contents than those signed for came. They are asked for again, since anybody
            may have sent them.
        taken: rounds whose contents were handed on.
        offers_only: rounds for which its offer suffices.
        fetching: the round being fetched.
        answered: the rounds that it offered when it was last asked.
        comings: how often it came or went since the last round that was closed.
        newest: the latest round for which it signed an offer.
        milliseconds: its statement in that offer.
    """

    presence: dict[str, int] = field(default_factory=dict)
    gone_since: float | None = None
    met: bool = False
    offers: dict[int, Manifest] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    contents: dict[int, bytes] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    offers_only: set[int] = field(default_factory=set)
    fetching: int | None = None
    answered: frozenset[int] = frozenset()
    comings: int = 0
    newest: int = -1
    milliseconds: int = 0

    @property
    def live(self) -> bool:
        return bool(self.presence)

    @property
    def reached(self) -> int:
        """The latest round for which its offer stands; −1, before the first round, if there is none."""
        return self.newest if self.newest not in self.refused else max(self.offers, default=-1)

    def has_delivered(self, round: int) -> bool:
        return round in (self.offers if round in self.offers_only else self.contents)

    def is_past(self, round: int) -> bool:
        """Whether it is beyond ``round`` and no longer offers it."""
        beyond = self.newest > round and max(self.answered, default=-1) > round
        return beyond and round not in self.offers and round not in self.answered

    def has_finished(self, last_round: int) -> bool:
        """Whether it left after the run's last round: it signed an offer for that round, and the offer stands."""
        return self.met and not self.live and self.newest == last_round and last_round not in self.refused

    def state(self, round: int) -> str:
        """How it stands with ``round``, for people."""
        if round in self.refused | self.corrupt:
            return "refused"
        if round in self.offers:
            return "being fetched"
        if not self.met:
            return "not seen yet"
        return "sampling" if self.live else "gone"

    def forget_before(self, round: int) -> None:
        self.offers = {place: offer for place, offer in self.offers.items() if place >= round}
        for rounds in (self.refused, self.corrupt, self.taken, self.offers_only):
            rounds -= {place for place in rounds if place < round}

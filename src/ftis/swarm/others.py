"""A peer's knowledge of one other peer. No input or output and no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftis.swarm.manifest import Manifest


@dataclass
class Other:
    """One other peer, as far as it was heard.

    Attributes:
        presence: sign of presence -> the round from which on the peer takes part.
        serving: signs that it has finished the run, and stays for those who still need its messages.
        gone_since: the time at which the last sign of either kind went away.
        met: whether it was ever present.
        done: whether it ever showed a sign that it has finished.
        refused: by round, the life in which the peer signed two different offers or one too large. Its offer in a later
            life may stand.
        corrupt: rounds for which contents came that it did not sign. This peer asks again, since anybody may have sent
            them.
        contents: the messages that came, by round, until they are handed on.
        taken: rounds whose contents were handed on.
        offers_only: rounds for which its offer suffices.
        fetching: the rounds being fetched.
        answered: the rounds that it offered when it was last asked.
        comings: how often it came or went since the last round that was closed.
        newest: the latest round for which it signed an offer.
        milliseconds: its statement in the latest offer.
    """

    presence: dict[str, int] = field(default_factory=dict)
    serving: set[str] = field(default_factory=set)
    gone_since: float | None = None
    met: bool = False
    done: bool = False
    offers: dict[int, Manifest] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    corrupt: set[int] = field(default_factory=set)
    contents: dict[int, bytes] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    offers_only: set[int] = field(default_factory=set)
    fetching: set[int] = field(default_factory=set)
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
        """Whether it has finished the run: it says so, and signed an offer for the last round, and the offer stands.

        A peer that was killed after that offer says nothing, and comes back for the others' messages.
        """
        stands = self.newest == last_round and last_round not in self.refused
        return self.done and not self.live and stands

    def serves(self, round: int) -> bool:
        """Whether it has finished, and still offers its message of ``round``."""
        return bool(self.serving) and round in self.offers

    def state(self, round: int) -> str:
        """Its state in ``round``, in words."""
        if round in self.refused or round in self.corrupt:
            return "refused"
        if round in self.offers:
            return "being fetched"
        if not self.met:
            return "not seen yet"
        return "sampling" if self.live else "gone"

    def forget_before(self, round: int) -> None:
        self.offers = {place: offer for place, offer in self.offers.items() if place >= round}
        self.refused = {place: life for place, life in self.refused.items() if place >= round}
        for rounds in (self.corrupt, self.taken, self.offers_only):
            rounds -= {place for place in rounds if place < round}

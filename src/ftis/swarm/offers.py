"""The test of an offer: a peer of the run signed it itself, for this run, within the limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftis.admission import Reason
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import Roster
from ftis.swarm.manifest import Manifest, ManifestError


@dataclass(frozen=True)
class Refusal:
    """The reason why an offer does not count.

    Attributes:
        round: the round for which the peer can no longer deliver; None if it did not sign the fault itself.
        incarnation: the life in which it signed the fault. A later one may offer for that round again.
    """

    reason: Reason
    detail: str
    round: int | None = None
    incarnation: int = 0


@dataclass
class OfferCheck:
    """The test that every offer has to pass.

    Attributes:
        run: the run's digest.
        rounds: how many rounds the run has.
        roster: public keys by peer. None means an open swarm: the first key to sign for a name keeps it.
        max_bytes: the most bytes of one message.
        max_items: the most groups of one message.
        first_keys: in an open swarm, the key that each name has by now. A restarted peer passes its earlier ones.
    """

    run: str
    rounds: int
    roster: Roster | None
    max_bytes: int
    max_items: int
    first_keys: dict[str, str] = field(default_factory=dict)

    def read(self, peer: str, round: int, document: bytes, seal: bytes) -> Manifest | Refusal:
        """The manifest in ``document``, found in the place of ``peer`` and ``round``, or its refusal.

        The cheap tests come first: nothing is parsed that has not been signed by the peer's key.
        """
        if len(document) > manifests.MAX_BYTES:
            return Refusal(Reason.OVER_BUDGET, f"a manifest of {len(document)} bytes, at most {manifests.MAX_BYTES}")
        public = manifests.signer(document, seal)
        expected = self.first_keys.get(peer, public) if self.roster is None else self.roster.get(peer)
        if public is None or public != expected:
            return Refusal(Reason.FORGED, f"a manifest that {peer!r} did not sign")
        try:
            offer = manifests.parse(document)
        except ManifestError as error:
            return Refusal(Reason.MALFORMED, str(error))
        if (offer.peer, offer.round, offer.run) != (peer, round, self.run):
            found = f"{offer.peer!r} for round {offer.round + 1} of run {offer.run}"
            return Refusal(Reason.WRONG_SENDER, f"a manifest of {found} in the place of {peer!r}, round {round + 1}")
        if self.roster is None:
            self.first_keys.setdefault(peer, public)
        if offer.round >= self.rounds:
            detail = f"a manifest for round {offer.round + 1}, the run has {self.rounds} rounds"
            return Refusal(Reason.WRONG_ROUND, detail)
        if offer.size > self.max_bytes or len(offer.items) > self.max_items:
            detail = f"{offer.size} bytes and {len(offer.items)} groups, at most {self.max_bytes} and {self.max_items}"
            return Refusal(Reason.OVER_BUDGET, detail, offer.round, offer.incarnation)
        return offer

"""A peer's rounds with others, on a clock that the tests turn; the others do what a test says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ftis.admission import Collected
from ftis.config import NetworkConfig
from ftis.records.events import NetworkEvent
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import public_hex
from ftis.swarm.manifest import CHUNK_BYTES, Assembly, Manifest
from ftis.swarm.offers import OfferCheck
from ftis.swarm.rounds import Announce, Ask, Decision, Rounds

RUN = "0" * 32
ROUNDS = 20
TICK = 0.5
NEVER = 1000.0
KEYS = {name: Ed25519PrivateKey.from_private_bytes(name.encode() * 32) for name in "abcdefghxyz"}
MAX_BYTES, MAX_ITEMS = 600_000, 4


def contents_of(peer: str, round: int) -> bytes:
    return f"{peer} in round {round}".encode()


@dataclass
class Table:
    """A peer's rounds, by default ``a``'s with ``b``, ``c`` and ``d``; who sits there does what a test says."""

    settings: dict[str, Any] = field(default_factory=dict)
    names: str = "bcd"
    is_open: bool = False
    now: float = 100.0
    total: int = ROUNDS

    def __post_init__(self) -> None:
        usual = {"deadline": 20.0, "start_seconds": 10.0, "patience": math.inf}
        network = NetworkConfig.model_validate(usual | self.settings)
        roster = None if self.is_open else {name: public_hex(KEYS[name]) for name in {*"abcd", *self.names}}
        check = OfferCheck(RUN, self.total, roster, MAX_BYTES, MAX_ITEMS)
        self.rounds = Rounds(tuple(self.names), self.total, network, check)
        self.said: list[NetworkEvent] = []
        self.asked: list[str | None] = []
        self.to_fetch: list[Manifest] = []
        self.announced: list[int] = []
        self.closed: Collected | None = None

    def heed(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case NetworkEvent():
                    self.said.append(decision)
                case Ask(peer):
                    self.asked.append(peer)
                case Manifest():
                    self.to_fetch.append(decision)
                case Announce(round):
                    self.announced.append(round)
                case Collected():
                    self.closed = decision

    def enter(self, round: int = 0) -> int:
        self.rounds.enter(round, self.now)
        return self.catch_up(round)

    def catch_up(self, round: int) -> int:
        target, decisions = self.rounds.catch_up(round)
        self.heed(decisions)
        return target

    def comes(self, *names: str, since: int = 0, token: str = "1") -> None:
        for name in names:
            self.heed(self.rounds.present(name, f"{name}/{token}/{since}", since))

    def leaves(self, name: str, since: int = 0, token: str = "1") -> None:
        self.heed(self.rounds.absent(name, f"{name}/{token}/{since}", self.now))

    def finishes(self, name: str) -> None:
        """``name`` has finished the run, and stays for those who still need its messages."""
        self.comes(name, since=ROUNDS)
        self.leaves(name)

    def offers(self, name: str, round: int, data: bytes | None = None, life: int = 1, **other: Any) -> None:
        """``other``: where it is found (``place``), who signs it, or fields that say something else."""
        found_peer, found_round = other.pop("place", (name, round))
        signer = other.pop("signer", name)
        data = contents_of(name, round) if data is None else data
        document = manifests.to_bytes(replace(manifests.describe(RUN, name, round, life, data, ()), **other))
        seal = manifests.seal(KEYS[signer], document)
        self.heed(self.rounds.offered(found_peer, found_round, document, seal, self.now))

    def collect(self, round: int, skip: str = "", offers_only: str = "") -> None:
        self.closed = None
        self.rounds.collect(round, self.now, skip, offers_only)

    def poll(self) -> Collected | None:
        self.heed(self.rounds.poll(self.now))
        return self.closed

    def serve(self, name: str, data: bytes | None = None) -> None:
        """``name`` sends what is being fetched of it, or other bytes."""
        for offer in [o for o in self.to_fetch if o.peer == name]:
            self.to_fetch.remove(offer)
            assembly = Assembly(offer)
            full = contents_of(name, offer.round) if data is None else data
            for index in range(len(offer.chunks)):
                assembly.hear(index, full[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
            self.rounds.fetched(assembly)

    def delivers(self, names: str, round: int) -> None:
        for name in names:
            self.offers(name, round)
            self.heed(self.rounds.poll(self.now))
            self.serve(name)

    def fetching(self) -> list[int]:
        """The rounds whose contents are being fetched."""
        return [offer.round for offer in self.to_fetch]

    def run(self, until: float = NEVER) -> Collected | None:
        """Poll each half second until the round closes."""
        end = self.now + until
        while self.poll() is None and self.now < end:
            self.now += TICK
        return self.closed

    def closes(self) -> Collected:
        """The messages of the awaited round, which closes."""
        collected = self.run()
        assert collected is not None
        return collected

    def round_of(self, round: int, *names: str) -> Collected:
        """A round in which these deliver at once."""
        self.collect(round)
        self.delivers("".join(names), round)
        return self.closes()

    def kinds(self) -> list[str]:
        return [notice.what for notice in self.said]

    def reasons(self) -> list[tuple[str, str]]:
        return [(r.peer, str(r.reason)) for r in self.rounds._rejections]

    def offers_of(self, peer: str) -> dict[int, Manifest]:
        return self.rounds._others[peer].offers


def seated(settings: dict[str, Any] | None = None, **more: Any) -> Table:
    """A table at which ``a`` has entered round 0, and ``b``, ``c`` and ``d`` have come."""
    table = Table(settings or {}, **more)
    table.enter()
    table.comes(*"bcd")
    return table

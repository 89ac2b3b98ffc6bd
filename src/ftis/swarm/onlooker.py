"""An onlooker's knowledge of a swarm: signed offers of its peers, and claims in their names.

Pure: a transport hands over everything that it hears, with the time, and :meth:`Onlooker.runs` sorts it by run and
peer. A peer's signature makes two things certain: its offers, and the facts of their run, by its digest. Anybody with
a link can claim the rest (presence, status, other facts) in any name.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ftis.admission import Reason
from ftis.config import NAME_PATTERN
from ftis.swarm.facts import LONGEST_TEXT, MOST_PEERS, mismatch, read_facts, read_status, run_id
from ftis.swarm.identity import Roster, roster_digest
from ftis.swarm.manifest import Manifest, unseal
from ftis.swarm.offers import OfferCheck

MOST_RUNS, MOST_TOKENS, MOST_ROUNDS, MOST_EVENTS = 16, 16, 64, 200
"""Limits of memory: anybody with a link can make up names, signs of presence and rounds."""

ANY_BYTES, ANY_ITEMS, ANY_ROUND = 2**50, 100_000, 2**31
"""An onlooker fetches no contents, so that an offer's size does it no harm."""

_RUN, _NAME, _COUNT = re.compile(r"[0-9a-f]{32}"), re.compile(NAME_PATTERN), re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Happened:
    """Something that the onlooker noticed: the time (seconds since the epoch), the peer, and words."""

    at: float
    peer: str
    text: str


@dataclass(frozen=True)
class SignedWord:
    """A peer's offers that count.

    Attributes:
        key: the public key that signed them, 64 hex digits: the roster's of the peer; without a roster the first that
            signed in its name.
        round: the newest, counted from 0.
        at: when the newest was first heard.
        pace: seconds between rounds, as they were heard; None before two.
        bytes: of all offers that were heard.
        twice: the last round for which it signed two different offers; None if there is none.
    """

    key: str
    round: int
    at: float
    pace: float | None
    bytes: int
    twice: int | None


@dataclass(frozen=True)
class PeerView:
    """Knowledge of one peer of one run.

    Attributes:
        present: whether anybody declares it present; ``changed`` is since when, None if it never was.
        signed: its offers; None if none counts.
        forged: offers in its name that its key did not sign.
        claims: what its status says, each value of a known type; {} if it does not answer.
        claimed_at: when it last answered; None if it did not.
        facts: what it means by the recipe.
        committed: whether those facts are the ones whose digest it signed.
    """

    peer: str
    present: bool
    changed: float | None
    signed: SignedWord | None
    forged: int
    claims: Mapping[str, Any]
    claimed_at: float | None
    facts: Mapping[str, Any]
    committed: bool

    @property
    def met(self) -> bool:
        """Whether anybody spoke for the peer, and it is not only named by others."""
        return self.changed is not None or self.signed is not None or bool(self.claims)


@dataclass(frozen=True)
class NetworkRun:
    """The peers that mean the same run.

    Attributes:
        id: the run's digest.
        name: the recipe's, as peers claim it; "" if nothing is.
        facts: those with the digest ``id``; {} if they were not heard.
        differs: the difference from the first run of its name; "" for the first.
    """

    id: str
    name: str
    facts: Mapping[str, Any]
    peers: Sequence[PeerView]
    differs: str = ""

    @cached_property
    def newest(self) -> int:
        """The newest round with a signed offer of any peer, counted from 0; 0 without any."""
        return max((peer.signed.round for peer in self.peers if peer.signed is not None), default=0)


@dataclass
class _PeerNotes:
    """All that is kept of one peer of one run."""

    tokens: set[str] = field(default_factory=set)
    changed: float | None = None
    offers: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by round: incarnation and digest of contents
    digests: dict[int, bytes] = field(default_factory=dict)
    heard_at: list[tuple[float, int]] = field(default_factory=list)
    key: str = ""
    bytes: int = 0
    twice: int | None = None
    forged: int = 0
    claims: dict[str, Any] = field(default_factory=dict)
    claimed_at: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = ""


class Onlooker:
    """Everything heard so far. Its methods may be called from several threads.

    Args:
        roster: public keys by name; without it the first key to use a peer's name keeps it.
    """

    def __init__(self, roster: Roster | None = None) -> None:
        self.roster = roster
        self.reached = False
        """Whether anybody has answered at all."""
        self._lock = threading.Lock()
        self._runs: dict[str, dict[str, _PeerNotes]] = {}
        self._checks: dict[str, OfferCheck] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._events: list[Happened] = []

    # --- heard ----------------------------------------------------------------------------------------

    def token(self, key: str, present: bool, now: float) -> None:
        """A sign of presence at ``ftis/<run>/live/<peer>/<incarnation>/<round>`` came, or went."""
        parts = key.split("/")
        with self._lock:
            if len(parts) != 6 or not all(_COUNT.fullmatch(part) for part in parts[4:]):
                return
            if (notes := self._notes_on(parts[1], parts[3])) is None:
                return
            before = bool(notes.tokens)
            if present and len(notes.tokens) < MOST_TOKENS:
                notes.tokens.add(key)
            elif not present:
                notes.tokens.discard(key)
            if bool(notes.tokens) != before:
                came_back = notes.changed is not None
                notes.changed = now
                words = "is there again" if came_back else "is there"
                self._note(now, parts[3], words if notes.tokens else "is gone: nobody declares it present any more")

    def offer(self, key: str, document: bytes, seal: bytes, now: float) -> None:
        """An offer came, at ``ftis/<run>/man/<peer>/<round>``."""
        parts = key.split("/")
        if len(parts) != 5 or not parts[4].isdecimal() or len(parts[4]) > 9:
            return
        run, peer, round = parts[1], parts[3], int(parts[4])
        with self._lock:
            notes = self._notes_on(run, peer)
            digest = hashlib.sha256(document).digest()
            if notes is None or notes.digests.get(round) == digest:
                return
            if len(notes.offers) >= MOST_ROUNDS and round < min(notes.offers):
                return  # forgotten before, and not to be counted twice
            check = self._checks.setdefault(run, OfferCheck(run, ANY_ROUND, self.roster, ANY_BYTES, ANY_ITEMS))
            offer = check.read(peer, round, document, seal)
            if not isinstance(offer, Manifest):
                if offer.reason is Reason.FORGED:
                    if not notes.forged:
                        self._note(now, peer, f"an offer in its name for round {round + 1} is not signed by its key")
                    notes.forged = min(notes.forged + 1, 1000)
                return
            notes.key, notes.digests[round] = unseal(seal)[0], digest
            self._take(notes, offer, now)

    def _take(self, notes: _PeerNotes, offer: Manifest, now: float) -> None:
        before = notes.offers.get(offer.round)
        now_offered = offer.incarnation, hashlib.sha256(repr(offer.contents).encode()).digest()
        if before is None:
            notes.bytes += offer.size
        elif before[0] == offer.incarnation and before != now_offered and notes.twice != offer.round:
            self._note(now, offer.peer, f"signed two different offers for round {offer.round + 1}")
            notes.twice = offer.round
        notes.offers[offer.round] = now_offered
        for old in sorted(notes.offers)[:-MOST_ROUNDS]:
            del notes.offers[old], notes.digests[old]
        if not notes.heard_at or offer.round > notes.heard_at[-1][1]:
            notes.heard_at = [*notes.heard_at[-9:], (now, offer.round)]

    def status(self, key: str, data: bytes, now: float) -> None:
        """Somebody answered at ``ftis/status/<recipe's name>/<peer>``."""
        status, parts = read_status(data), key.split("/")
        if status is None or len(parts) != 4:
            return
        with self._lock:
            self.reached = True
            notes = self._notes_on(str(status.get("run")), parts[3])
            if notes is None:
                return
            notes.name = notes.name or parts[2][:LONGEST_TEXT]
            notes.claims, notes.claimed_at = status, now

    def facts(self, key: str, data: bytes, now: float) -> None:
        """Somebody answered at ``ftis/facts/<recipe's name>/<peer>``."""
        facts, parts = read_facts(data), key.split("/")
        if facts is None or len(parts) != 4:
            return
        with self._lock:
            self.reached = True
            try:
                run = run_id(facts)
            except ValueError:  # no canonical form: a number that is none
                return
            notes = self._notes_on(run, parts[3])
            if notes is not None:
                notes.name = notes.name or parts[2][:LONGEST_TEXT]
                notes.facts = self._facts.setdefault(run, facts)  # the run is a digest of all in them that counts

    def _notes_on(self, run: str, peer: str) -> _PeerNotes | None:
        """The notes about a peer; None for a wrong name, and if there are too many.

        With a roster its names always have room, and a run in which nobody has signed anything makes room for another:
        anybody can make names and runs up.
        """
        if not _RUN.fullmatch(run) or not _NAME.fullmatch(peer):
            return None
        if run not in self._runs and len(self._runs) >= MOST_RUNS:
            unsigned = (id for id, peers in self._runs.items() if not any(notes.heard_at for notes in peers.values()))
            if self.roster is None or (made_up := next(unsigned, None)) is None:
                return None
            for known in (self._runs, self._facts, self._checks):  # it comes again if there is something to it
                known.pop(made_up, None)
        peers = self._runs.setdefault(run, {})
        if peer not in peers and len(peers) >= MOST_PEERS and peer not in (self.roster or ()):
            return None
        return peers.setdefault(peer, _PeerNotes())

    def _note(self, now: float, peer: str, text: str) -> None:
        self._events = [*self._events[-MOST_EVENTS + 1 :], Happened(now, peer, text)]

    # --- known ----------------------------------------------------------------------------------------

    @property
    def events(self) -> Sequence[Happened]:
        """Everything noticed, the newest last."""
        with self._lock:
            return list(self._events)

    def runs(self) -> list[NetworkRun]:
        """All runs: of each recipe's name the roster's run first, else that of most peers."""
        with self._lock:
            runs = [self._run(id, peers) for id, peers in self._runs.items()]
        runs = [run for run in runs if run.peers]
        of_roster = roster_digest(self.roster) if self.roster is not None else None

        def order(run: NetworkRun) -> tuple[Any, ...]:
            signed, there = sum(p.signed is not None for p in run.peers), sum(p.met for p in run.peers)
            return run.name, run.facts.get("roster") != of_roster, -signed, -there, run.id

        runs.sort(key=order)
        found: list[NetworkRun] = []
        for run in runs:
            first = next((other for other in found if other.name == run.name), None)
            differs = _difference(first, run) if first is not None else ""
            found.append(NetworkRun(run.id, run.name, run.facts, run.peers, differs))
        return found

    def _run(self, id: str, peers: Mapping[str, _PeerNotes]) -> NetworkRun:
        seen = [self._seen(id, name, notes) for name, notes in sorted(peers.items())]
        facts = next((notes.facts for notes in peers.values() if notes.facts), {})
        names = facts.get("peers", [])
        there = {peer.peer for peer in seen}
        for name in names[:MOST_PEERS] if isinstance(names, list) else []:
            if isinstance(name, str) and _NAME.fullmatch(name) and name not in there:
                seen.append(self._seen(id, name, _PeerNotes()))
        name = next((notes.name for notes in peers.values() if notes.name), "")
        return NetworkRun(id, name, facts, seen)

    def _seen(self, run: str, name: str, notes: _PeerNotes) -> PeerView:
        signed = None
        if notes.heard_at:
            (began, first), (at, round) = notes.heard_at[0], notes.heard_at[-1]
            pace = (at - began) / (round - first) if round > first else None
            signed = SignedWord(notes.key, round, at, pace, notes.bytes, notes.twice)
        return PeerView(
            peer=name,
            present=bool(notes.tokens),
            changed=notes.changed,
            signed=signed,
            forged=notes.forged,
            claims=notes.claims,
            claimed_at=notes.claimed_at,
            facts=notes.facts,
            committed=signed is not None and bool(notes.facts),  # kept under the digest of these facts
        )


def _difference(first: NetworkRun, run: NetworkRun) -> str:
    if not first.facts or not run.facts:
        return "another run"
    differs = mismatch(run.name, first.facts, run.facts)
    return differs.differing if differs else "another run"

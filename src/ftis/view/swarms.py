"""A swarm that an onlooker hears, as sections of a page.

A peer's signed statements stand as they are. Unsigned statements are quoted, since anybody with a link could have made
them: a peer's presence, its state, its reward, and the rollouts that it took from others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftis.check.formatting import counted, in_time
from ftis.swarm.facts import is_count
from ftis.swarm.onlooker import Happened, NetworkRun, Onlooker, PeerView
from ftis.view.arm import LAST_EVENTS, EventLine, Events, Glance
from ftis.view.sections import Cell, RowGroup, Table
from ftis.view.sentences import (
    LATE_BY,
    SILENT,
    SILENT_ROUNDS,
    UNREWARDED,
    About,
    Level,
    Remark,
    enumerated,
    everybody,
    level_of,
    share,
)

ANSWERS_WITHIN = 15.0
"""Seconds within which a present peer has answered."""

DIGITS = 8
"""The digits of a digest or a key that a page shows."""


@dataclass(frozen=True)
class Members:
    """The table of peers; ``roster`` is whether a roster vouches for the names."""

    table: Table
    roster: bool


def swarm_glance(runs: Sequence[NetworkRun], onlooker: Onlooker, now: float) -> Glance:
    """The state of every peer, by everything heard up to ``now`` (seconds since the epoch)."""
    found = []
    rarer = _rarer_versions(runs)
    for run in runs:
        for peer in _shown_of(run, runs):
            remarks = remarks_on(peer, run, rarer, onlooker, now)
            remarks.sort(key=lambda remark: remark.level != "trouble")
            found.append(About(peer.peer, level_of(remarks), where(peer), remarks))
    return Glance(_headline(found, runs), found)


def _shown_of(run: NetworkRun, runs: Sequence[NetworkRun]) -> list[PeerView]:
    """The peers of a run that a page shows.

    A peer that nobody spoke for is left out if the run differs, or if it was met in another run of the same name.
    """
    met = {p.peer for other in runs if other.name == run.name and other.id != run.id for p in other.peers if p.met}
    return [peer for peer in run.peers if peer.met or (not run.differs and peer.peer not in met)]


def _headline(peers: Sequence[About], runs: Sequence[NetworkRun]) -> str:
    if not peers:
        return "Nobody is there yet"
    for level, words in (("trouble", "Trouble at"), ("look", "Working; have a look at")):
        names = list(dict.fromkeys(of.name for of in peers if of.level == level))
        if names:
            return f"{words} {enumerated(names)}"
    return everybody(len(peers), all(has_finished(peer) for run in runs for peer in run.peers))


def has_finished(peer: PeerView) -> bool:
    """Whether the peer has signed its offer of the last round."""
    return peer.signed is not None and peer.signed.round + 1 == _rounds(peer)


def _rounds(peer: PeerView) -> int | None:
    """The number of rounds of the peer's run, by its signed facts; while these are unknown, by its status."""
    rounds = (peer.facts if peer.committed else peer.claims).get("rounds")
    return rounds if is_count(rounds) else None  # a member may sign anything


def where(peer: PeerView) -> str:
    """``signed its offer of round 12; says that it is “training”, reward “.62”``."""
    parts = ["signed no offer yet"]
    if peer.signed is not None:
        rounds = _rounds(peer)
        of = "" if rounds is None else f" of {rounds}" if peer.committed else f" of “{rounds}”"
        parts = [f"signed its offer of round {peer.signed.round + 1}{of}"]
        if peer.signed.pace is not None and peer.signed.pace >= 1:
            parts[0] += f", one each {in_time(peer.signed.pace)}"
    claims = [f"is “{peer.claims['state']}”"] if "state" in peer.claims and peer.present else []
    if "reward" in peer.claims:
        claims.append(f"had a reward of “{share(peer.claims['reward'])}”")
    if claims:
        parts.append(f"says that it {' and '.join(claims)}")
    return "; ".join(parts)


def _rarer_versions(runs: Sequence[NetworkRun]) -> Mapping[str, str]:
    """The versions of ftis that fewer peers claim than the usual one, each with the usual version as its value."""
    count = Counter(str(peer.claims["version"]) for run in runs for peer in run.peers if "version" in peer.claims)
    usual, most = max(count.items(), key=lambda one: one[1], default=("", 0))
    return {version: usual for version, of in count.items() if of < most}


def remarks_on(
    peer: PeerView, run: NetworkRun, rarer: Mapping[str, str], onlooker: Onlooker, now: float
) -> list[Remark]:
    """Remarks on a peer, facts before claims. ``rarer`` is as of :func:`_rarer_versions`."""
    found = []
    if run.differs:
        verb = "Means" if peer.committed else "“Means”"
        found.append(Remark("trouble", f"{verb} another run, and none of the others hears it ({run.differs})"))
    found += _of_presence(peer, run, now)
    if peer.signed is not None and peer.signed.twice is not None:
        found.append(Remark("trouble", f"Signed two different offers for round {peer.signed.twice + 1}"))
    if peer.forged:
        n = f"{peer.forged:,}" if peer.forged < 1000 else "1,000 or more"
        found.append(Remark("look", f"{n} offers in its name were not signed by its key; anyone may have sent them"))
    if onlooker.roster is not None and peer.peer not in onlooker.roster:
        found.append(Remark("look", "It is not in the roster: nobody vouches for anything said in this name"))
    if unrewarded := int(peer.claims.get("unrewarded", 0)):
        rounds = "the last round" if unrewarded == 1 else f"the last “{unrewarded:,}” rounds"
        level: Level = "trouble" if unrewarded >= UNREWARDED else "look"
        found.append(Remark(level, f"Says that it earned no reward in {rounds}"))
    if "version" in peer.claims and (usual := rarer.get(peer.claims["version"])) is not None:
        found.append(Remark("look", f"Says that it runs ftis “{peer.claims['version']}”, most say “{usual}”"))
    for other in run.peers:
        totals = other.claims.get("from", {}).get(peer.peer, {}) if other.peer != peer.peer else {}
        if totals.get("quarantined"):
            found.append(Remark("look", f"{other.peer} says that it has {peer.peer} “in quarantine”"))
        elif totals.get("rejected"):
            found.append(Remark("look", f"{other.peer} says that it rejected “{totals['rejected']:,}” of {peer.peer}"))
    return found


def _of_presence(peer: PeerView, run: NetworkRun, now: float) -> list[Remark]:
    signed = peer.signed
    if has_finished(peer):
        says = "" if peer.committed else f"; says that its run has “{_rounds(peer):,}” rounds"
        return [] if peer.present else [Remark("fine", f"Gone after its last round{says}")]
    if not peer.present:
        last = "" if signed is None else f"; its last offer was of round {signed.round + 1}"
        if peer.changed is None:
            return [Remark("trouble", f"Nobody declares it present{last}")]
        return [Remark("trouble", f"Gone for {in_time(now - peer.changed)}{last}")]
    found = []
    behind = run.newest - signed.round if signed is not None else 0
    if behind >= LATE_BY:
        found.append(Remark("look", f"{behind} rounds behind the newest offer"))
    if signed is not None and now - signed.at > max(SILENT, SILENT_ROUNDS * (signed.pace or 0)):
        usual = "" if signed.pace is None else f"; before, one came each {in_time(signed.pace)}"
        found.append(Remark("trouble", f"No new offer for {in_time(now - signed.at)}{usual}"))
    heard = max(peer.claimed_at or 0.0, peer.changed or 0.0)
    if now - heard > ANSWERS_WITHIN:
        found.append(Remark("look", f"Declared present, but it has not answered for {in_time(now - heard)}"))
    return found


def members(runs: Sequence[NetworkRun], onlooker: Onlooker) -> Members | None:
    """A table with a row for every peer, by run; None while nobody was heard."""
    groups, known = [], onlooker.roster is not None
    for run in runs:
        title = f"{run.name or 'a run'}, digest {run.id[:DIGITS]}"
        groups.append(RowGroup(title, [_row(peer, run.newest, known) for peer in _shown_of(run, runs)]))
    if not groups:
        return None
    head = ["Peer", "Present", "Doing", "Offer of round", "Behind", "MB offered", "Reward", "Seed", "Tokenizer"]
    head += ["ftis", "Signed by"]
    return Members(Table("Peers, by the run that they mean", head, groups), known)


def _row(peer: PeerView, newest: int, known: bool) -> list[Cell]:
    signed, claims = peer.signed, peer.claims
    present = Cell("here", claimed=True) if peer.present else Cell("not seen" if peer.changed is None else "gone")
    reward = f"{claims['reward']:.2f}" if "reward" in claims else ""
    return [
        Cell(peer.peer),
        present,
        _claimed(str(claims.get("state", "")) if peer.present else ""),
        Cell("–" if signed is None else f"{signed.round + 1:,}"),
        Cell("–" if signed is None else f"{newest - signed.round:,}"),
        Cell("–" if signed is None else f"{signed.bytes / 1e6:.2f}"),
        _claimed(reward),
        _fact(peer, "seed"),
        # Peers that exchange text need not agree on a tokenizer, so it is no fact of the swarm then.
        _fact(peer, "tokenizer") if "tokenizer" in peer.facts else _claimed(str(claims.get("tokenizer", ""))[:DIGITS]),
        _claimed(str(claims.get("version", ""))),
        _key(peer, known),
    ]


def _claimed(text: str) -> Cell:
    return Cell(text, claimed=True) if text else Cell("–")


def _fact(peer: PeerView, key: str) -> Cell:
    """A cell with a fact of the peer's recipe: plain if the peer signed its digest, else marked as a claim."""
    value = peer.facts.get(key)
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return Cell(text[:DIGITS], claimed=not peer.committed) if text else Cell("–")


def _key(peer: PeerView, known: bool) -> Cell:
    """A cell with the peer's key; ``known`` is whether a roster names the key's owner."""
    if peer.signed is None:
        return Cell("–")
    return Cell(f"{'its ' if known else ''}key {peer.signed.key[:DIGITS]}")


def learned(runs: Sequence[NetworkRun]) -> list[Table] | None:
    """A table per run of the rollouts that each peer claims to have learned from each other; None without claims."""
    tables = []
    for run in runs:
        learners = [peer for peer in run.peers if peer.claims.get("from")]
        if not learners:
            continue
        names = [peer.peer for peer in run.peers]
        rows = [[Cell(peer.peer), *(_learned_cell(peer, name) for name in names)] for peer in learners]
        title = f"{run.name}, digest {run.id[:DIGITS]}: rollouts learned from, of those admitted"
        tables.append(Table(title, ["Learner", *(f"← {name}" for name in names)], [RowGroup(None, rows)]))
    return tables or None


def _learned_cell(learner: PeerView, source: str) -> Cell:
    totals: Mapping[str, Any] = learner.claims["from"].get(source, {})
    if not totals:
        return Cell("–")
    text = f"{totals.get('admitted', 0):,}"
    if "kept" in totals:
        text = f"{totals['kept']:,} of {text}"
    if source != learner.peer:
        text += f", {totals['rejected']:,} rejected" if totals.get("rejected") else ""
        text += ", in quarantine" if totals.get("quarantined") else ""
    return Cell(text, claimed=True)


def events(happened: Sequence[Happened]) -> Events | None:
    """The events that the onlooker noticed, the newest first; None if there are none."""
    lines = [
        EventLine(time.strftime("%H:%M:%S", time.localtime(one.at)), one.peer, one.text) for one in reversed(happened)
    ]
    return Events(lines[:LAST_EVENTS]) if lines else None


def page_facts(runs: Sequence[NetworkRun], onlooker: Onlooker) -> list[str]:
    """The facts above the page's title."""
    there = sum(peer.present for run in runs for peer in run.peers)
    facts = [
        "swarm",
        *dict.fromkeys(run.name for run in runs if run.name),
        counted(len(runs), "run"),
        f"{counted(there, 'peer')} present" if there else "nobody present",
    ]
    return [*facts, "names by a roster" if onlooker.roster is not None else "no roster: nobody vouches for names"]

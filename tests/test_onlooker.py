"""What an onlooker of a swarm believes, whatever it hears; and that it disturbs nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from light_peer import light_recipe
from test_network import NAMES, PATIENCE, Peers, both_ready, one_round

from ftis.codec import VERSION
from ftis.config import NetworkConfig
from ftis.swarm import manifest as manifests
from ftis.swarm import onlooker as onlookers
from ftis.swarm.facts import MOST_PEERS, agreement, run_id
from ftis.swarm.identity import load_key, new_key, public_hex, roster_digest
from ftis.swarm.listener import Listener
from ftis.swarm.onlooker import NetworkRun, Onlooker, PeerView
from ftis.view import live, swarms

AT = 1_000_000.0
RECIPE = light_recipe(NAMES, 6, 2, 4, 8, {})


class Heard:
    """An onlooker and all that it takes to speak in anybody's name."""

    def __init__(self, place: Path, roster: bool = True) -> None:
        self.public = {name: new_key(place, name) for name in (*NAMES, "stranger")}
        self.keys = {name: load_key(place / f"{name}.key") for name in self.public}
        self.roster = {name: self.public[name] for name in NAMES}
        self.of = Onlooker(self.roster if roster else None)

    def meant(self, seed: int = 0, **changes: Any) -> dict[str, Any]:
        """What a peer means by the recipe."""
        recipe = RECIPE.model_copy(update={"seed": seed})
        facts = agreement(recipe, "light", VERSION)
        return {**facts, "roster": roster_digest(self.roster), "tokenizer": "f" * 32, **changes}

    def come(self, name: str, seed: int = 0, at: float = AT, gone: bool = False) -> None:
        self.of.token(f"ftis/{run_id(self.meant(seed))}/live/{name}/1/0", not gone, at)

    def mean(self, name: str, seed: int = 0, at: float = AT, **changes: Any) -> None:
        self.of.facts(f"ftis/facts/light/{name}", json.dumps(self.meant(seed, **changes)).encode(), at)

    def sign(
        self,
        name: str,
        round: int,
        at: float = AT,
        *,
        seed: int = 0,
        key: str = "",
        data: bytes = b"x" * 10,
        **changes: Any,
    ) -> None:
        run = run_id(self.meant(seed))
        offer = replace(manifests.describe(run, name, round, 1, data, ()), **changes)
        document = manifests.to_bytes(offer)
        self.of.offer(f"ftis/{run}/man/{name}/{round}", document, manifests.seal(self.keys[key or name], document), at)

    def say(self, name: str, seed: int = 0, at: float = AT, **said: Any) -> None:
        status = {"run": run_id(self.meant(seed)), "state": "training", "rounds": 6, **said}
        self.of.status(f"ftis/status/light/{name}", json.dumps(status).encode(), at)

    def run(self, seed: int = 0) -> NetworkRun:
        return next(run for run in self.of.runs() if run.id == run_id(self.meant(seed)))

    def peer(self, name: str, seed: int = 0) -> PeerView:
        return next(peer for peer in self.run(seed).peers if peer.peer == name)

    def remarks(self, name: str, at: float = AT) -> list[str]:
        about = swarms.swarm_glance(self.of.runs(), self.of, at).peers
        return [remark.text for of in about if of.name == name for remark in of.remarks]

    def signed_by(self, name: str) -> str:
        """What the table says of a peer's key."""
        members = swarms.members(self.of.runs(), self.of)
        assert members is not None
        return next(row[-1].text for group in members.table.groups for row in group.rows if row[0].text == name)

    def headline(self, at: float = AT) -> str:
        return swarms.swarm_glance(self.of.runs(), self.of, at).headline


@pytest.fixture
def heard_of(tmp_path: Path) -> Heard:
    """Three peers of a run, each with an offer of round 3, counted from 0."""
    made = Heard(tmp_path)
    for name in NAMES:
        made.come(name)
        made.mean(name)
        made.sign(name, 2, AT - 4)
        made.sign(name, 3)
        made.say(name, round=4, step=3, reward=0.5)
    return made


def test_what_a_peer_signed_is_known_and_the_rest_is_said(heard_of: Heard) -> None:
    a = heard_of.peer("a")
    assert a.signed is not None
    assert (a.signed.round, a.signed.bytes, a.signed.pace) == (3, 20, 4.0)
    assert a.signed.key == heard_of.public["a"]
    assert heard_of.signed_by("a") == f"its key {a.signed.key[:8]}"
    assert a.committed
    assert (a.present, a.claims["state"], a.claims["reward"]) == (True, "training", 0.5)
    assert heard_of.headline() == "All 3 peers are working"


def test_what_another_key_signed_is_no_offer_of_the_peer(heard_of: Heard) -> None:
    heard_of.sign("a", 9, key="stranger")
    a = heard_of.peer("a")
    assert a.signed is not None
    assert (a.signed.round, a.forged) == (3, 1)
    assert "1 offers in its name were not signed by its key; anyone may have sent them" in heard_of.remarks("a")


def test_without_a_roster_the_first_key_keeps_a_name(tmp_path: Path) -> None:
    made = Heard(tmp_path, roster=False)
    made.sign("a", 0)
    made.sign("a", 1, key="stranger")
    a = made.peer("a")
    assert a.signed is not None
    assert (a.signed.round, a.forged) == (0, 1)
    assert made.signed_by("a") == f"key {a.signed.key[:8]}"


def test_an_offer_at_another_place_or_heard_again_is_no_other(heard_of: Heard) -> None:
    known = heard_of.peer("a").signed
    for changes in ({"run": "0" * 32}, {"peer": "b"}, {"items": (2, 1)}):
        heard_of.sign("a", 4, **changes)
        heard_of.sign("a", 3)
        assert heard_of.peer("a").signed == known


def test_facts_are_signed_only_where_their_digest_was(heard_of: Heard) -> None:
    heard_of.mean("a", temperature=0.5)  # said in its name, or its own: nothing signed has this digest
    assert heard_of.peer("a").committed
    strange = [run for run in heard_of.of.runs() if run.facts.get("temperature") == 0.5]
    assert [peer.committed for run in strange for peer in run.peers if peer.peer == "a"] == [False]


def test_two_offers_for_a_round_are_a_fact_against_who_signed_them(heard_of: Heard) -> None:
    heard_of.sign("b", 3, data=b"other bytes")
    heard_of.sign("b", 3)
    assert "Signed two different offers for round 4" in heard_of.remarks("b")
    assert heard_of.headline() == "Trouble at b"
    assert [e.text for e in heard_of.of.events if e.peer == "b"] == [
        "is there",
        "signed two different offers for round 4",
    ]


def test_one_killed_one_of_another_seed_and_one_without_reward_are_each_named(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    for name, seed in (("a", 0), ("b", 0), ("eve", 7)):
        made.come(name, seed)
        made.mean(name, seed)
        made.say(name, seed, step=5, reward=0.25, unrewarded=4 if name == "b" else 0)
    made.sign("a", 1)
    made.sign("b", 1)
    made.come("a", gone=True, at=AT + 1)
    assert made.headline(AT + 9) == "Trouble at a, b and eve"
    assert made.remarks("a", AT + 9) == ["Gone for 8 s; its last offer was of round 2"]
    assert made.remarks("b", AT + 9) == ["Says that it earned no reward in the last “4” rounds"]
    assert made.remarks("eve", AT + 9) == [
        "“Means” another run, and none of the others hears it (seed: 0 here, 7 there)",
    ]
    made.sign("eve", 0, seed=7)
    assert made.remarks("eve", AT + 9)[0].startswith("Means another run")


def test_made_up_peers_do_not_make_a_run_of_their_own_the_one_that_counts(heard_of: Heard) -> None:
    for name in (*NAMES, "d", "e", "f"):
        heard_of.come(name, seed=7)
        heard_of.mean(name, seed=7)
    first, second = heard_of.of.runs()
    assert (first.id, first.differs) == (heard_of.run().id, "")
    assert second.differs == "seed: 0 here, 7 there"


def test_the_rosters_run_is_first_and_names_a_peer_that_never_came(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    made.come("a")
    made.mean("a")
    assert made.remarks("eve") == ["Nobody declares it present"]
    elsewhere = run_id(made.meant(roster="of others"))
    for name in NAMES:
        made.mean(name, roster="of others")
        made.of.token(f"ftis/{elsewhere}/live/{name}/1/0", True, AT)
    assert [run.id for run in made.of.runs()] == [made.run().id, elsewhere]


def test_who_is_late_silent_or_stuck_is_named(heard_of: Heard) -> None:
    for round in (4, 5):
        heard_of.sign("a", round, AT + 1)
    assert "2 rounds behind the newest offer" in heard_of.remarks("b", AT + 1)
    later = " ".join(heard_of.remarks("b", AT + 100))
    assert "No new offer for 1.7 min; before, one came each 4 s" in later
    assert "not answered for 1.7 min" in later


def test_who_has_finished_may_leave(heard_of: Heard) -> None:
    for name in NAMES:
        heard_of.sign(name, 5, AT + 1)
        heard_of.come(name, gone=True, at=AT + 2)
    assert heard_of.headline(AT + 100) == "All 3 peers have finished"
    assert heard_of.remarks("a", AT + 100) == ["Gone after its last round"]


def test_how_many_rounds_a_run_has_is_claimed_until_its_facts_are_known(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    made.come("a")
    made.sign("a", 5)
    made.say("a")
    assert swarms.where(made.peer("a")).startswith("signed its offer of round 6 of “6”")
    made.come("a", gone=True, at=AT + 2)
    assert made.remarks("a", AT + 100) == ["Gone after its last round; says that its run has “6” rounds"]
    made.mean("a")
    made.say("a", rounds=7)  # whatever it says by now, it signed that there are six
    assert swarms.where(made.peer("a")).startswith("signed its offer of round 6 of 6")
    assert made.remarks("a", AT + 100) == ["Gone after its last round"]


def test_rounds_that_are_no_count_finish_nothing(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    made.come("a")
    made.sign("a", 0)
    made.say("a")
    for rounds in (True, 10**30, "6", -1, None):
        peer = replace(made.peer("a"), facts={"rounds": rounds}, committed=True)
        assert not swarms.has_finished(peer)
        assert swarms.where(peer).startswith("signed its offer of round 1;")


def test_one_peer_by_itself_is_not_called_all(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    made.come("a")
    for round, headline in ((4, "Working"), (5, "Finished")):
        made.sign("a", round)
        made.say("a")
        assert made.headline() == headline


def test_what_peers_say_of_each_other_is_quoted(heard_of: Heard) -> None:
    said: Any = {"from": {"b": {"admitted": 12, "kept": 7, "rejected": 3}, "eve": {"quarantined": 1}}}
    heard_of.say("a", **said)
    assert "a says that it rejected “3” of b" in heard_of.remarks("b")
    assert "a says that it has eve “in quarantine”" in heard_of.remarks("eve")
    shown = swarms.learned(heard_of.of.runs())
    assert shown is not None
    cells = {cell.text: cell.claimed for cell in shown[0].groups[0].rows[0]}
    assert cells == {"a": False, "–": False, "7 of 12, 3 rejected": True, "0, in quarantine": True}


def test_another_version_and_who_is_in_no_roster_are_named(heard_of: Heard) -> None:
    for name in NAMES:
        heard_of.say(name, version="0.9" if name == "eve" else "1.0")
    assert "Says that it runs ftis “0.9”, most say “1.0”" in heard_of.remarks("eve")
    assert not any("“1.0”, most" in remark for remark in heard_of.remarks("a"))
    heard_of.come("stranger")
    assert "not in the roster" in heard_of.remarks("stranger")[0]


NONSENSE = [b"[1", b'"text"', b"[" * 50_000, b"{}", b'{"run": 3}', b'{"run": "' + b"0" * 32 + b'", "round": "far"}']


def test_nonsense_does_no_harm(tmp_path: Path) -> None:
    for number, data in enumerate(NONSENSE):
        made = Heard(tmp_path / str(number))
        for key in ("ftis/status/light/a", "ftis/facts/light/a", "ftis/status", "", "ftis/facts/light/\x1b[2J"):
            made.of.status(key, data, AT)
            made.of.facts(key, data, AT)
            made.of.offer(key, data, data, AT)
            made.of.token(key, True, AT)
        made.of.status(
            "ftis/status/light/a", json.dumps({"run": "0" * 32, "from": {"b": {"kept": "x"}}, "live": 3}).encode(), AT
        )
        runs = made.of.runs()
        assert made.of.events == []
        (about,) = swarms.swarm_glance(runs, made.of, AT).peers
        assert (about.name, about.sentence) == ("a", "signed no offer yet")
        assert [remark.text for remark in about.remarks] == ["Nobody declares it present"]
        members, learned = swarms.members(runs, made.of), swarms.learned(runs)
        assert members is not None
        assert learned is not None
        (row,) = [row for group in members.table.groups for row in group.rows]
        assert [cell.text for cell in row] == ["a", "not seen", *["–"] * 9]
        assert [[cell.text for cell in row] for row in learned[0].groups[0].rows] == [["a", "–"]]


def test_a_flood_takes_no_room(tmp_path: Path) -> None:
    made = Heard(tmp_path, roster=False)
    for i in range(2 * MOST_PEERS):
        made.of.token(f"ftis/{'0' * 32}/live/p{i}/1/0", True, AT)
        made.of.token(f"ftis/{i:032x}/live/a/{i}/0", True, AT)
        made.of.token(f"ftis/{'0' * 32}/live/a/{i}/0", True, AT)
    runs = made.of.runs()
    assert len(runs) == onlookers.MOST_RUNS
    assert max(len(run.peers) for run in runs) == MOST_PEERS
    assert len(made.of.events) == onlookers.MOST_EVENTS


def test_what_many_say_a_run_is_about_is_held_once(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    said = json.dumps(made.meant(0) | {"more": [[]] * 10_000}).encode()
    for i in range(50):
        made.of.facts(f"ftis/facts/light/p{i}", said, AT)
    (run,) = made.of.runs()
    assert len(run.peers) >= 50
    assert len({id(peer.facts) for peer in run.peers if peer.facts}) == 1


def test_a_sign_of_presence_without_a_start_and_a_round_is_none(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    for end in ("x/0", "1/x", "1/-1", "1/0123456789", "/0"):
        made.of.token(f"ftis/{'0' * 32}/live/a/{end}", True, AT)
        assert made.of.runs() == []


def test_made_up_runs_and_names_hide_none_that_members_signed(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    for i in range(2 * onlookers.MOST_RUNS):
        made.of.token(f"ftis/{i:032x}/live/a/1/0", True, AT)
    for i in range(2 * MOST_PEERS):
        made.of.token(f"ftis/{run_id(made.meant())}/live/p{i}/1/0", True, AT)
    made.sign("a", 0)
    for i in range(100, 100 + 2 * onlookers.MOST_RUNS):
        made.of.token(f"ftis/{i:032x}/live/a/1/0", True, AT)
    assert made.peer("a").signed is not None
    assert len(made.of.runs()) == onlookers.MOST_RUNS


def test_old_rounds_are_forgotten_and_still_counted(tmp_path: Path) -> None:
    made = Heard(tmp_path)
    for round in range(onlookers.MOST_ROUNDS + 5):
        made.sign("a", round)
    a = made.peer("a")
    assert a.signed is not None
    assert (a.signed.bytes, a.signed.round) == (10 * (onlookers.MOST_ROUNDS + 5), onlookers.MOST_ROUNDS + 4)
    for _ in range(3):
        made.sign("a", 2)  # as anybody can send it again
    assert made.peer("a").signed == a.signed


def test_it_looks_on_over_the_network_and_no_peer_notices(tmp_path: Path) -> None:
    peers = Peers(tmp_path)
    with peers.stack:
        a, b = peers.open("a"), peers.open("b")
        both_ready(a, b)
        onlooker = Onlooker({name: peers.public[name] for name in NAMES})
        settings = NetworkConfig(connect=(f"tcp/127.0.0.1:{peers.recipe.network.port}",))
        with Listener(settings, onlooker):
            one_round(peers, a, b)

            def known() -> list[PeerView]:
                return [p for run in onlooker.runs() for p in run.peers if p.signed and p.claims and p.facts]

            give_up = time.monotonic() + PATIENCE
            while len(known()) < 2:  # it asks in its own time
                assert time.monotonic() < give_up, onlooker.runs()
                threading.Event().wait(0.05)
            (run,) = onlooker.runs()
            assert (run.id, [p.peer for p in run.peers if p.present]) == (peers.run, ["a", "b"])
            assert [p.claims["live"] for p in run.peers if p.present] == [["b"], ["a"]]
            assert a.rounds.live == ["b"]
            assert run.peers[0].signed is not None
            assert run.peers[0].signed.key == public_hex(peers.keys["a"])
        assert b.rounds.live == ["a"]


def test_a_look_at_nothing_new_costs_no_sentences(heard_of: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    tell = swarms.swarm_glance

    def counted(runs: Sequence[NetworkRun], onlooker: Onlooker, now: float) -> Any:
        told.append(now)
        return tell(runs, onlooker, now)

    now = SimpleNamespace(time=lambda: AT)
    monkeypatch.setattr(live, "time", now)
    monkeypatch.setattr(swarms, "swarm_glance", counted)
    page = live.OfSwarm(heard_of.of)
    page.look(tell_time=False)
    now.time = lambda: AT + 4
    page.look(tell_time=False)
    assert told == [AT]
    page.look(tell_time=True)
    assert told == [AT, AT + 4]
    heard_of.say("a", unrewarded=2)
    assert page.look(tell_time=False).page.title == "Working; have a look at a"
    assert told == [AT, AT + 4, AT + 4]


def test_a_page_shows_a_swarm_and_what_peers_call_themselves_is_text(
    heard_of: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="ftis[watch] is not installed")
    from test_watch import Page, get

    from ftis.view.watch import application

    clocks = {"monotonic": time.monotonic, "perf_counter": time.perf_counter}
    monkeypatch.setattr(live, "time", SimpleNamespace(time=lambda: AT, **clocks))
    for name in ("a", "eve"):
        heard_of.say(name, version="1.0")
    heard_of.say("b", state="<script>alert(1)</script>", version="\u202e9", reward=0.25)
    taken: Any = {"from": {"b": {"admitted": 12, "kept": 7}}}
    heard_of.say("a", version="1.0", **taken)
    status, _, html = get(application(heard_of.of), "/")
    assert status == 200
    assert "<script>alert" not in html
    page = Page(html)
    assert [script["src"] for script in page.scripts] == ["/watch.js"]
    for text in ("have a look at b", "“<script>alert(1)</script>”", "“⟨U+202E⟩9”"):
        assert text in page.text
    assert "b: signed its offer of round 4 of 6, one each 4 s; says that it is “<script>" in page.text
    assert "“7 of 12”" in page.text
    assert f"its key {heard_of.public['a'][:8]}" in page.text
    assert "no peer counts it" in page.text

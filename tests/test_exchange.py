"""Exchanges on one machine: everybody's messages, whole, in turn, or a clear word on why not."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ftis.exchange import Collected, Stopped
from ftis.records.files import InUseError, locked
from ftis.run.local import KEEP_ROUNDS, AloneExchange, Cores, Delayed, DirectoryExchange, Hub

PATIENCE = 120.0
"""Seconds until a test that hangs fails; no test needs them."""


def message(peer: str, round: int) -> bytes:
    return f"{peer} in round {round}".encode() + bytes(round + 1)


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run in a thread that, should it hang, keeps nobody from exiting."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# --- alone ------------------------------------------------------------------------------------------------------------


def test_a_peer_alone_hears_from_nobody() -> None:
    exchange = AloneExchange()
    exchange.publish(0, b"to whom")
    assert exchange.collect(0) == Collected({}, ())
    assert exchange.collect(5).messages == {}


# --- the hub ----------------------------------------------------------------------------------------------------------


def collect(hub: Hub, peer: str, round: int) -> Collected:
    """As a peer's thread does it, in its turn."""

    def run() -> Collected:
        with hub.turn:
            return hub.endpoint(peer).collect(round)

    collected: Collected = in_thread(run).result(timeout=PATIENCE)
    return collected


class Turns:
    """Checks that whoever works is alone in it."""

    def __init__(self) -> None:
        self.working: str | None = None
        self.log: list[str] = []

    def work(self, name: str) -> None:
        assert self.working is None, f"{name} works while {self.working} does"
        self.working = name
        self.log.append(name)
        for _ in range(10):
            time.sleep(0)  # lets the other threads run, so that one would break in, were it let
        assert self.working == name
        self.working = None


@pytest.mark.parametrize("roster", [("a", "b"), ("a", "b", "c", "d")])
def test_peers_of_a_hub_take_turns_and_hear_from_all_others(roster: tuple[str, ...]) -> None:
    hub, turns, rounds = Hub(roster), Turns(), 12
    heard: dict[str, list[Collected]] = {name: [] for name in roster}

    def run(name: str) -> None:
        endpoint = hub.endpoint(name)
        with hub.turn:
            for round in range(rounds):
                turns.work(name)
                endpoint.publish(round, message(name, round))
                turns.work(name)
                heard[name].append(endpoint.collect(round))
                turns.work(name)

    for future in [in_thread(run, name) for name in roster]:
        future.result(timeout=PATIENCE)
    for name in roster:
        assert [c.messages for c in heard[name]] == [
            {other: message(other, round) for other in roster if other != name} for round in range(rounds)
        ]
        assert all(c.missing == () for c in heard[name])
    assert {name: turns.log.count(name) for name in roster} == dict.fromkeys(roster, 3 * rounds)
    assert not hub.turn.locked()


def test_the_turn_is_held_again_after_collecting() -> None:
    hub = Hub(("a", "b"))
    hub.endpoint("b").publish(0, b"b")
    hub.endpoint("a").publish(0, b"a")

    def run() -> None:
        with hub.turn:
            assert hub.endpoint("a").collect(0).messages == {"b": b"b"}
            assert hub.turn.locked()
            assert not hub.turn.acquire(blocking=False)

    in_thread(run).result(timeout=PATIENCE)
    assert not hub.turn.locked()


def test_publishing_again_replaces() -> None:
    hub = Hub(("a", "b"))
    hub.endpoint("b").publish(0, b"first")
    hub.endpoint("b").publish(0, b"second")
    assert collect(hub, "a", 0).messages == {"b": b"second"}


def test_a_message_of_another_round_does_not_count() -> None:
    hub = Hub(("a", "b"))
    hub.endpoint("b").publish(1, b"of round 1")
    hub.leave("b")
    with pytest.raises(Stopped):
        collect(hub, "a", 0)


def test_a_waiting_peer_is_woken_and_keeps_its_turn() -> None:
    hub = Hub(("a", "b", "c"))
    outcome: list[str] = []
    waiting = threading.Event()

    def run() -> None:
        with hub.turn:
            hub.endpoint("a").publish(0, b"a")
            waiting.set()
            try:
                hub.endpoint("a").collect(0)
            except Stopped:
                outcome.append("stopped with the turn" if hub.turn.locked() else "stopped without the turn")

    running = in_thread(run)
    assert waiting.wait(PATIENCE)
    hub.endpoint("b").publish(0, b"b")
    hub.leave("b")  # it has published, and c is still missing
    assert not outcome
    hub.leave("c")
    running.result(timeout=PATIENCE)
    assert outcome == ["stopped with the turn"]
    assert not hub.turn.locked()


def test_what_a_peer_has_published_is_handed_over_after_it_has_left() -> None:
    """The round can be finished, and is then not lost."""
    hub = Hub(("a", "b"))
    hub.endpoint("b").publish(0, b"b")
    hub.leave("b")
    assert collect(hub, "a", 0).messages == {"b": b"b"}


def test_a_hub_forgets_old_rounds_but_keeps_those_others_may_still_want() -> None:
    hub = Hub(("a", "b"))
    for round in range(10):
        hub.endpoint("b").publish(round, message("b", round))
    hub.leave("b")
    for round in range(10 - 1 - KEEP_ROUNDS, 10):
        assert collect(hub, "a", round).messages == {"b": message("b", round)}
    for round in range(10 - 1 - KEEP_ROUNDS):
        with pytest.raises(Stopped):
            collect(hub, "a", round)


def test_peers_of_whom_the_offer_suffices_are_waited_for_and_not_handed_over(tmp_path: Path) -> None:
    hub = Hub(("a", "b", "c"))
    peers = {name: directory_exchange(tmp_path, name, patience=0.05) for name in "abc"}

    def from_hub() -> Collected:
        with hub.turn:
            return hub.endpoint("a").collect(0, offers_only=("c",))

    hub.endpoint("b").publish(0, b"b")
    hub.leave("c")
    peers["b"].publish(0, b"b")
    with pytest.raises(Stopped):
        from_hub()
    with pytest.raises(Stopped):
        peers["a"].collect(0, offers_only=("c",))
    hub.endpoint("c").publish(0, b"c")
    peers["c"].publish(0, b"c")
    expected = Collected({"b": b"b"}, offered_only=("c",))
    assert from_hub() == expected
    assert peers["a"].collect(0, offers_only=("c",)) == expected


# --- the directory ----------------------------------------------------------------------------------------------------


def directory_exchange(
    directory: Path, peer: str, roster: tuple[str, ...] = ("a", "b", "c"), patience: float = PATIENCE
) -> DirectoryExchange:
    """One that is asked to stop, the others having left, where it would wait for longer than ``patience``."""
    give_up = time.monotonic() + patience
    return DirectoryExchange(directory, peer, roster, lambda: time.monotonic() > give_up, lambda peer: True)


def test_messages_go_through_a_directory(tmp_path: Path) -> None:
    peers = {name: directory_exchange(tmp_path / "new" / "place", name) for name in ("a", "b", "c")}
    for round in range(3):
        for name, exchange in peers.items():
            exchange.publish(round, message(name, round))
        for name, exchange in peers.items():
            others = {other: message(other, round) for other in peers if other != name}
            assert exchange.collect(round) == Collected(others)
            assert exchange.collect(round) == Collected(others)  # a peer killed meanwhile collects again


def test_a_peer_waits_for_the_last_message(tmp_path: Path) -> None:
    a, b, c = (directory_exchange(tmp_path, name) for name in "abc")
    b.publish(0, b"b")
    collecting = in_thread(a.collect, 0)
    a.publish(0, b"a")  # one's own does not count
    c.publish(1, b"another round")
    with pytest.raises(TimeoutError):
        collecting.result(timeout=0.05)
    c.publish(0, b"c")
    assert collecting.result(timeout=PATIENCE).messages == {"b": b"b", "c": b"c"}


def test_publishing_again_replaces_the_file(tmp_path: Path) -> None:
    a, b = (directory_exchange(tmp_path, name, ("a", "b")) for name in "ab")
    b.publish(0, b"a long first message")
    b.publish(0, b"second")
    assert a.collect(0).messages == {"b": b"second"}
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_message_is_a_message(tmp_path: Path) -> None:
    a, b = (directory_exchange(tmp_path, name, ("a", "b")) for name in "ab")
    b.publish(0, b"")
    assert a.collect(0).messages == {"b": b""}


def test_names_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    roster = ("a", "a.b", "a-b", "a.partial-1", "A_B", "b", "0", "1-a")
    peers = {name: directory_exchange(tmp_path, name, roster) for name in roster}
    for name, exchange in peers.items():
        exchange.publish(0, name.encode())
        exchange.publish(1, name.encode() * 2)
    for name, exchange in peers.items():
        assert exchange.collect(0).messages == {n: n.encode() for n in roster if n != name}
        assert exchange.collect(1).messages == {n: n.encode() * 2 for n in roster if n != name}


def test_a_message_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (directory_exchange(tmp_path, name, ("a", "b"), patience=0.0) for name in "ab")

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)  # the last thing to happen
    with pytest.raises(KeyboardInterrupt):
        b.publish(0, b"0123456789")
    monkeypatch.undo()
    with pytest.raises(Stopped):
        a.collect(0)
    b.publish(0, b"0123456789")
    assert a.collect(0).messages == {"b": b"0123456789"}


def test_readers_never_see_a_part_of_a_message_that_is_replaced(tmp_path: Path) -> None:
    a, b = (directory_exchange(tmp_path, name, ("a", "b")) for name in "ab")
    versions = [bytes([i]) * 300_000 for i in range(4)]
    b.publish(0, versions[0])
    done = threading.Event()

    def rewrite() -> None:
        try:
            for i in range(120):
                b.publish(0, versions[i % 4])
        finally:
            done.set()

    writing = in_thread(rewrite)
    seen = set()
    while not done.is_set():
        seen.add(a.collect(0).messages["b"])
    writing.result(timeout=PATIENCE)
    assert seen <= set(versions)


@pytest.mark.parametrize("published", [False, True])
def test_a_peer_asked_to_stop_waits_for_those_who_may_finish_the_round(tmp_path: Path, published: bool) -> None:
    stop, left = threading.Event(), set[str]()
    a = DirectoryExchange(tmp_path, "a", ("a", "b", "c"), stop.is_set, left.__contains__)
    b, c = (directory_exchange(tmp_path, name) for name in "bc")
    b.publish(0, b"b")
    collecting = in_thread(a.collect, 0)
    left.add("c")  # which may be started again, as long as the run goes on
    with pytest.raises(TimeoutError):
        collecting.result(timeout=0.05)
    left.clear()
    stop.set()
    with pytest.raises(TimeoutError):  # c may be about to publish
        collecting.result(timeout=0.05)
    if published:
        c.publish(0, b"c")
        assert collecting.result(timeout=PATIENCE).messages == {"b": b"b", "c": b"c"}
    left.update("bc")
    if not published:
        with pytest.raises(Stopped):
            collecting.result(timeout=PATIENCE)


def test_peers_that_may_be_asked_to_stop_at_any_moment_stop_after_the_same_round(tmp_path: Path) -> None:
    """Each peer hears the request at a moment of its own, as processes do."""

    def run(directory: Path, name: str, heard_after: int, left: set[str]) -> int:
        looks = itertools.count()
        exchange = DirectoryExchange(
            directory, name, ("a", "b", "c"), lambda: next(looks) >= heard_after, left.__contains__
        )
        try:
            for round in range(200):
                if exchange.should_stop():
                    return round
                exchange.publish(round, b"")
                exchange.collect(round)
            raise AssertionError("it was never asked to stop")
        except Stopped:
            return round
        finally:
            left.add(name)

    for trial in range(20):
        moments, left, place = random.Random(trial), set[str](), tmp_path / str(trial)
        peers = [in_thread(run, place, name, moments.randrange(1, 40), left) for name in "abc"]
        assert len({peer.result(timeout=PATIENCE) for peer in peers}) == 1


def test_what_has_arrived_in_the_directory_is_handed_over_even_when_asked_to_stop(tmp_path: Path) -> None:
    a = DirectoryExchange(tmp_path, "a", ("a", "b"), lambda: True, lambda peer: True)
    directory_exchange(tmp_path, "b").publish(0, b"b")
    assert a.collect(0).messages == {"b": b"b"}


def test_old_messages_are_deleted_by_their_sender_alone(tmp_path: Path) -> None:
    a, b = (directory_exchange(tmp_path, name, ("a", "b")) for name in "ab")
    b.publish(0, b"b's first and only")
    for round in range(10):
        a.publish(round, message("a", round))
    kept = range(10 - 1 - KEEP_ROUNDS, 10)
    assert len(list(tmp_path.iterdir())) == len(kept) + 1
    for round in kept:
        assert b.collect(round).messages == {"a": message("a", round)}
    assert a.collect(0).messages == {"b": b"b's first and only"}


def test_who_waits_for_messages_leaves_its_core_to_others(tmp_path: Path) -> None:
    cores = {name: Cores(tmp_path, 1) for name in "ab"}
    a, b = (DirectoryExchange(tmp_path, name, ("a", "b"), cores=cores[name]) for name in "ab")
    core = tmp_path / ".core@0"
    cores["a"].take()

    def work_and_publish() -> None:
        cores["b"].take()
        b.publish(0, b"b")
        cores["b"].give_up()

    working = in_thread(work_and_publish)
    with pytest.raises(TimeoutError):
        working.result(timeout=0.05)
    assert a.collect(0).messages == {"b": b"b"}
    working.result(timeout=PATIENCE)
    with pytest.raises(InUseError), locked(core, 0):  # a computes again
        pass
    cores["a"].give_up()
    with locked(core, 0):
        pass


def test_as_many_compute_at_a_time_as_there_are_cores(tmp_path: Path) -> None:
    first, second, third = (Cores(tmp_path, 2) for _ in range(3))
    first.take()
    second.take()
    waiting = in_thread(third.take)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.05)
    first.give_up()
    waiting.result(timeout=PATIENCE)


PEER = """
import sys
from pathlib import Path
from ftis.run.local import DirectoryExchange

directory, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
exchange = DirectoryExchange(directory, name, ("a", "b"))
other = "b" if name == "a" else "a"
for round in range(rounds):
    exchange.publish(round, f"{name}{round};".encode() * 20_000)
    if round == 0:
        print("began", flush=True)
    assert exchange.collect(round).messages == {other: f"{other}{round};".encode() * 20_000}, round
print("done")
"""


def test_two_processes_exchange_a_hundred_rounds(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PEER, str(tmp_path), name, "100"], stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    try:
        assert [process.communicate(timeout=PATIENCE)[0] for process in processes] == ["began\ndone\n"] * 2
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(list(tmp_path.iterdir())) == 2 * (KEEP_ROUNDS + 1)


def test_a_killed_process_is_waited_for_and_its_successor_takes_over(tmp_path: Path) -> None:
    """The other peer notices nothing but the time it took."""

    def start(name: str, rounds: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PEER, str(tmp_path), name, str(rounds)],
            stdout=subprocess.PIPE,
            text=True,
        )

    killed = start("a", 10_000)
    started = [killed]
    try:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "began\n"
        killed.kill()  # in its first round, for b has not begun
        killed.wait()
        (tmp_path / f".000000-a.ftis.partial-{killed.pid}").write_bytes(b"a0;a0")  # as it may have left
        started += [start("b", 5), start("a", 5)]
        assert [process.communicate(timeout=PATIENCE)[0] for process in started[1:]] == ["began\ndone\n"] * 2
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_messages_of_slow_peers_come_late_and_once(tmp_path: Path) -> None:
    class Everybody:
        def catch_up(self, round: int) -> int:
            return round

        def publish(self, round: int, data: bytes, items: Any = ()) -> None: ...

        def collect(self, round: int, skip: Any = (), offers_only: Any = ()) -> Collected:
            return Collected({name: message(name, round) for name in ("b", "c", "d") if name not in offers_only})

    exchange = Delayed(Everybody(), {"c": 1, "d": 2}, tmp_path)
    rounds = [exchange.collect(round) for round in range(3)]
    assert [list(collected.messages) for collected in rounds] == [["b"]] * 3
    assert [collected.missing for collected in rounds] == [("c", "d")] * 3
    assert [collected.late for collected in rounds] == [
        (),
        (("c", 0, message("c", 0)),),
        (("c", 1, message("c", 1)), ("d", 0, message("d", 0))),
    ]
    exchange = Delayed(Everybody(), {"c": 1, "d": 2}, tmp_path)  # resumed, it finds what is on its way
    again = exchange.collect(2)
    assert again.late == rounds[2].late
    after = exchange.collect(3, offers_only=("c",))
    assert (after.missing, after.late) == (("d",), (("c", 2, message("c", 2)), ("d", 1, message("d", 1))))
    assert exchange.collect(4).late == (("d", 2, message("d", 2)),)  # c offered only

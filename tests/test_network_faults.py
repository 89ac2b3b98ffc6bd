"""Peers that are killed, come late, stall or lose each other: the others finish all rounds and say who was missing.

Light peers in processes of their own, on loopback; hosts of their own where network namespaces may be made.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest
from light_swarm import Swarm, free_port
from watched import HUNG

pytestmark = pytest.mark.slow

KINDS = {"network", "sampled", "published", "recorded"}
NEVER = 600.0
"""A deadline that no test outlives: a round that waits for it fails the test."""


def rounds(swarm: Swarm, name: str) -> list[int]:
    return [record["round"] for record in swarm.records(name)]


def delivered(swarm: Swarm, name: str, by: str) -> list[int]:
    """The rounds in which ``name`` heard ``by`` in time."""
    return [record["round"] for record in swarm.records(name) if by in record["delivered"]]


def every_round_came(swarm: Swarm) -> None:
    """Nobody missed a round, nor anybody in it."""
    for name in swarm.names:
        assert rounds(swarm, name) == list(range(swarm.rounds))
        assert all(len(record["delivered"]) == len(swarm.names) - 1 for record in swarm.records(name))


def test_a_killed_peer_is_missed_at_once_and_comes_back(tmp_path: Path) -> None:
    held = {"a": 12, "b": 12}  # as a process may take long to start
    with Swarm(tmp_path, "abc", rounds=20, network={"deadline": NEVER}, holds=held) as swarm:
        swarm.start()
        swarm.until_round("c", 3)
        swarm.kill("c")
        swarm.until_round("a", 8)
        swarm.start("c")
        swarm.until(lambda: any(e["kind"] == "published" and e["round"] >= 8 for e in swarm.log("c")))
        swarm.release()
        swarm.finish()
        for name, other in (("a", "b"), ("b", "a")):
            assert rounds(swarm, name) == delivered(swarm, name, other) == list(range(20))
            heard = delivered(swarm, name, "c")
            assert heard[:3] == [0, 1, 2]
            assert all(("c" in r["missing"]) == (r["round"] not in heard) for r in swarm.records(name))
            assert swarm.says(name, "c is gone")
            assert {json.loads(line)["kind"] for line in swarm.lines(name)} <= KINDS
        of_c = rounds(swarm, "c")
        assert of_c == sorted(set(of_c))
        assert [step for step in itertools.pairwise(of_c) if step[1] - step[0] > 1]  # it did not hold the others up
        assert delivered(swarm, "a", "c")[-1] == 19


def test_a_finished_peer_started_again_serves_the_one_that_died_near_the_end(tmp_path: Path) -> None:
    with Swarm(tmp_path, "ab", rounds=8, network={"deadline": 30.0}) as swarm:
        swarm.start()
        swarm.finish()
        lines = swarm.out("a").read_text().splitlines(keepends=True)
        swarm.out("a").write_text("".join(lines[:5]))  # its last checkpoint was earlier
        swarm.pauses["a"] = 1.5  # it samples for longer than a peer that has gone is waited for
        swarm.start()
        swarm.finish()
        every_round_came(swarm)


def test_a_slow_peer_is_heard_late_and_holds_nobody_up_beyond_the_deadline(tmp_path: Path) -> None:
    with Swarm(tmp_path, "abc", rounds=16, network={"deadline": 0.7}, pauses={"c": 1.0}) as swarm:
        swarm.start()
        swarm.finish()
        assert rounds(swarm, "a") == rounds(swarm, "b") == list(range(16))
        late = [record for record in swarm.records("a") if "c" in record["late"]]
        assert late
        assert all(record["admitted"]["c"] > 0 for record in late)
        assert not any(record["rejected"] for record in swarm.records("a"))
        assert swarm.says("a", "closed at its deadline without c")


def test_a_peer_that_stops_reading_is_not_waited_for_twice_over(tmp_path: Path) -> None:
    size = ["--tokens", "400", "--groups", "8"]  # 300 kB a round: more than buffers swallow
    with Swarm(tmp_path, "abc", rounds=12, network={"deadline": 2.0}, arguments=size) as swarm:
        swarm.start()
        swarm.until_round("c", 3)
        swarm.processes["c"].signal(signal.SIGSTOP)
        swarm.finish("a", "b")
        for name, other in (("a", "b"), ("b", "a")):
            assert rounds(swarm, name) == list(range(12))
            assert delivered(swarm, name, other) == list(range(12))
            closed = [e for e in swarm.log(name) if "closed at its deadline" in e.get("text", "")]
            assert 1 <= len(closed) <= 3


def test_a_router_that_restarts_loses_no_round(tmp_path: Path) -> None:
    port = free_port()
    listen = f"tcp/127.0.0.1:{port}"

    def router() -> subprocess.Popen[bytes]:
        code = f"from ftis.cli import main; main(['router', '--listen', {listen!r}])"
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    network: dict[str, Any] = {"deadline": NEVER, "quorum": 2, "mode": "client", "connect": [listen]}
    relay = router()
    try:
        with Swarm(tmp_path, "abc", rounds=15, network=network) as swarm:
            swarm.start()
            swarm.until_round("a", 4)
            relay.kill()
            relay.wait()
            for name in "abc":
                swarm.until(partial(swarm.says, name, "is gone"))
            relay = router()
            swarm.finish()
            every_round_came(swarm)
    finally:
        relay.kill()
        relay.wait()


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int said = real(id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += HOURS * 3600;
    return said;
}
"""
"""The clock on the wall, some hours ahead for whoever loads this."""


def test_clocks_an_hour_ahead_and_an_hour_behind_change_nothing(tmp_path: Path) -> None:
    """With certificates, which are valid from some time on."""
    if not shutil.which("gcc"):
        pytest.skip("a wrong clock needs gcc")
    (tmp_path / "clock.c").write_text(CLOCK)
    wrong = {}
    for name, hours in (("b", -1), ("c", 1)):
        library = str(tmp_path / f"{name}.so")
        run("gcc", "-shared", "-fPIC", f"-DHOURS=({hours})", "-o", library, str(tmp_path / "clock.c"), "-ldl")
        wrong[name] = ["env", f"LD_PRELOAD={library}"]
        now = subprocess.run(
            [*wrong[name], sys.executable, "-c", "import time; print(time.time())"], capture_output=True
        )
        assert float(now.stdout) - time.time() == pytest.approx(3600 * hours, abs=60)
    with Swarm(tmp_path, "abc", rounds=3, network={"deadline": NEVER}, prefix=wrong, tls=True) as swarm:
        swarm.start()
        swarm.finish()
        every_round_came(swarm)


def test_a_peer_below_the_quorum_stops_with_an_error_where_the_recipe_says_so(tmp_path: Path) -> None:
    with Swarm(tmp_path, "ab", rounds=500, network={"deadline": NEVER, "below_quorum": "stop"}) as swarm:
        swarm.start()
        swarm.until_round("b", 2)
        swarm.kill("b")
        assert swarm.processes["a"].wait(HUNG) != 0
        assert 'network.below_quorum = "stop"' in (tmp_path / "a.log").read_text()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def ip(words: str) -> None:
    run("ip", *words.split())


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Three hosts on one switch: name -> address. Their names are the machine's, so tests take turns."""
    addresses = {name: f"10.77.0.{i}" for i, name in enumerate("abc", 1)}

    def delete() -> None:
        for name in addresses:
            subprocess.run(["ip", "netns", "delete", f"ftis-{name}"], capture_output=True)
        subprocess.run(["ip", "link", "delete", "ftisbr"], capture_output=True)

    if not shutil.which("ip"):
        pytest.skip("hosts of their own need iproute2")
    with filelock.FileLock(Path(tempfile.gettempdir()) / "ftis-hosts.lock"):
        delete()
        try:
            ip("link add ftisbr type bridge")
            ip("link set ftisbr up")
            for name, address in addresses.items():
                space = f"ftis-{name}"
                ip(f"netns add {space}")
                ip(f"-n {space} link set lo up")
                ip(f"link add ftis{name}0 type veth peer name eth0 netns {space}")
                ip(f"link set ftis{name}0 master ftisbr up")
                ip(f"-n {space} addr add {address}/24 dev eth0")
                ip(f"-n {space} link set eth0 up")
            yield addresses
        except subprocess.CalledProcessError as error:
            pytest.skip(f"hosts cannot be made here: {error.stderr.decode().strip()}")
        finally:
            delete()


def test_a_partition_that_heals_loses_no_round_where_all_are_needed(tmp_path: Path, hosts: dict[str, str]) -> None:
    at = {name: f"tcp/{address}:7447" for name, address in hosts.items()}
    own = {name: {"listen": [at[name]], "connect": [at[other] for other in at if other != name]} for name in at}
    prefix = {name: ["ip", "netns", "exec", f"ftis-{name}"] for name in hosts}
    network = {"deadline": NEVER, "quorum": 2}
    with Swarm(tmp_path, "abc", rounds=15, network=network, own_network=own, prefix=prefix) as swarm:
        swarm.start()
        swarm.until_round("a", 3)
        ip("link set ftisc0 down")
        for name, lost in (("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")):
            swarm.until(partial(swarm.says, name, f"{lost} is gone"))
        during = rounds(swarm, "a")[-1]
        ip("link set ftisc0 up")
        swarm.finish()
        assert during < 14
        every_round_came(swarm)

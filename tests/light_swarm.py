"""Light peers (light_peer.py) as processes, for tests that break the network under them, and for benchmarks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from watched import HUNG, Watched

from ftis.swarm.certificates import network_keys, new_certificates
from ftis.swarm.identity import collect_roster, new_key, roster_text

SCRIPT = Path(__file__).with_name("light_peer.py")
QUICK = {"deadline": 20.0, "start_seconds": 20.0}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Swarm:
    """Peers of one run in ``place``; each can be started, killed, frozen and started again.

    What the peers print goes to ``<name>.log`` and wakes whoever waits in :meth:`until`.
    """

    place: Path
    names: Sequence[str]
    rounds: int = 8
    network: dict[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    pauses: dict[str, float] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    """The round that a peer does not begin before :meth:`release`."""
    prefix: dict[str, list[str]] = field(default_factory=dict)
    """A command in front of a peer's own, as ``ip netns exec``."""
    own_network: dict[str, dict[str, Any]] = field(default_factory=dict)
    tls: bool = False
    """Mutual TLS, each peer with a port and a certificate of its own."""

    def __post_init__(self) -> None:
        self.network = {**QUICK, "port": free_port(), **self.network}
        self.processes: dict[str, Watched] = {}
        self._earlier: dict[str, list[str]] = {name: [] for name in self.names}
        self._heard = threading.Condition()
        for name in self.names:
            new_key(self.place, name)
        public = [self.place / f"{name}.pub" for name in self.names]
        (self.place / "roster.toml").write_text(roster_text(collect_roster(public)))
        if self.tls:
            new_certificates(self.place, self.names)
            address = {name: f"tls/127.0.0.1:{free_port()}" for name in self.names}
            for name in self.names:
                others = [address[other] for other in self.names if other != name]
                self.own_network[name] = {
                    "listen": [address[name]],
                    "connect": others,
                    **network_keys(self.place / name),
                }

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *exception: object) -> None:
        for name in self.processes:
            self.kill(name)

    def start(self, *names: str) -> None:
        for name in names or self.names:
            options = {
                **{"name": name, "peers": ",".join(self.names), "rounds": self.rounds, "out": self.out(name)},
                **{"key": self.place / f"{name}.key", "roster": self.place / "roster.toml"},
                **{"pause": self.pauses.get(name, 0.1), "hold": self.holds.get(name, -1)},
                "network": json.dumps({**self.network, **self.own_network.get(name, {})}),
            }
            command = [*self.prefix.get(name, []), sys.executable, str(SCRIPT)]
            command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
            if name in self.processes:
                self._earlier[name] += self.processes[name].lines
            log, quiet = self.place / f"{name}.log", {"RUST_LOG": "error"}
            self.processes[name] = Watched([*command, *self.arguments], log, self._heard, environment=quiet)

    def out(self, name: str) -> Path:
        return self.place / f"{name}.jsonl"

    def records(self, name: str) -> list[dict[str, Any]]:
        if not self.out(name).exists():
            return []
        return [json.loads(line) for line in self.out(name).read_text().splitlines()]

    def lines(self, name: str) -> list[str]:
        """What the peer has printed so far."""
        with self._heard:
            return [*self._earlier[name], *(self.processes[name].lines if name in self.processes else ())]

    def log(self, name: str) -> list[dict[str, Any]]:
        """The events among them."""
        return [json.loads(line) for line in self.lines(name) if line.startswith("{") and line.endswith("}\n")]

    def says(self, name: str, text: str) -> bool:
        """Whether the peer has told of an event with ``text`` in it."""
        return any(text in event.get("text", "") for event in self.log(name))

    def until(self, condition: Callable[[], bool], seconds: float = HUNG) -> None:
        """Wait until what the peers print or record makes ``condition`` true."""
        with self._heard:
            if not self._heard.wait_for(condition, seconds):
                raise AssertionError(self.state())

    def until_round(self, name: str, round: int) -> None:
        self.until(lambda: any(r["round"] >= round for r in self.records(name)))

    def release(self) -> None:
        (self.place / "go").touch()

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def finish(self, *names: str, seconds: float = HUNG) -> None:
        """Wait until these peers end, and hold that each finished all rounds."""
        give_up = time.monotonic() + seconds
        for name in names or self.names:
            try:
                code = self.processes[name].wait(give_up - time.monotonic())
            except subprocess.TimeoutExpired:
                raise AssertionError(self.state()) from None
            assert code == 0, self.state()
            assert self.records(name)[-1]["round"] == self.rounds - 1, self.state()

    def state(self) -> str:
        """The rounds each peer has recorded and the end of its log, for a failed assertion."""
        parts = []
        for name in self.names:
            tail = "".join(self.lines(name))[-1500:]
            parts.append(f"--- {name}: {[r['round'] for r in self.records(name)]}\n{tail}")
        return "\n".join(parts)

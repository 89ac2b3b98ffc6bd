"""Light peers (light_peer.py) as processes: for benchmarks, and for tests that break the network under them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftis.swarm.identity import collect_roster, new_certificates, new_key, roster_text

SCRIPT = Path(__file__).with_name("light_peer.py")
QUICK = {"deadline": 20.0, "start_seconds": 20.0}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Swarm:
    """Peers of one run in ``place``; each can be started, killed, frozen and started again."""

    place: Path
    names: Sequence[str]
    rounds: int = 8
    network: dict[str, Any] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    pauses: dict[str, float] = field(default_factory=dict)
    prefix: dict[str, list[str]] = field(default_factory=dict)
    """A command in front of a peer's own, as ``ip netns exec``."""
    own_network: dict[str, dict[str, Any]] = field(default_factory=dict)
    tls: bool = False
    """Mutual TLS, each peer with a port and a certificate of its own."""

    def __post_init__(self) -> None:
        self.network = {**QUICK, "port": free_port(), **self.network}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for name in self.names:
            new_key(self.place, name)
        public = [self.place / f"{name}.pub" for name in self.names]
        (self.place / "roster.toml").write_text(roster_text(collect_roster(public)))
        if self.tls:
            new_certificates(self.place, self.names)
            address = {name: f"tls/127.0.0.1:{free_port()}" for name in self.names}
            for name in self.names:
                self.own_network[name] = {
                    "listen": [address[name]],
                    "connect": [address[other] for other in self.names if other != name],
                    "tls_authority": str(self.place / "ca.pem"),
                    "tls_certificate": str(self.place / f"{name}.pem"),
                    "tls_key": str(self.place / f"{name}.tls.key"),
                }

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, *names: str) -> None:
        for name in names or self.names:
            command = [*self.prefix.get(name, []), sys.executable, str(SCRIPT), "--name", name]
            command += ["--peers", ",".join(self.names), "--rounds", str(self.rounds)]
            command += ["--pause", str(self.pauses.get(name, 0.1)), "--key", str(self.place / f"{name}.key")]
            command += ["--roster", str(self.place / "roster.toml"), "--out", str(self.out(name))]
            command += ["--network", json.dumps({**self.network, **self.own_network.get(name, {})})]
            log = (self.place / f"{name}.log").open("a")
            self.processes[name] = subprocess.Popen(
                [*command, *self.arguments], stdout=log, stderr=log, text=True, env={**os.environ, "RUST_LOG": "error"}
            )
            log.close()

    def out(self, name: str) -> Path:
        return self.place / f"{name}.jsonl"

    def records(self, name: str) -> list[dict[str, Any]]:
        if not self.out(name).exists():
            return []
        return [json.loads(line) for line in self.out(name).read_text().splitlines()]

    def log(self, name: str) -> list[dict[str, Any]]:
        lines = (self.place / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        give_up = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up, self.state()
            time.sleep(0.01)

    def until_round(self, name: str, round: int) -> None:
        self.until(lambda: any(r["round"] >= round for r in self.records(name)))

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def finish(self, *names: str, seconds: float = 90) -> None:
        """Wait until these peers end, and hold that each finished all rounds."""
        give_up = time.monotonic() + seconds
        for name in names or self.names:
            try:
                code = self.processes[name].wait(timeout=max(0.1, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(self.state()) from None
            assert code == 0, self.state()
            assert self.records(name)[-1]["round"] == self.rounds - 1, self.state()

    def state(self) -> str:
        """All there is to know, for a failed assertion."""
        parts = []
        for name in self.names:
            log = self.place / f"{name}.log"
            tail = log.read_text()[-1500:] if log.exists() else ""
            parts.append(f"--- {name}: {[r['round'] for r in self.records(name)]}\n{tail}")
        return "\n".join(parts)

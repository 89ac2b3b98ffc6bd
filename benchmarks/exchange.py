"""How long a round's exchange takes on this machine: from publishing to having everybody's message.

    python benchmarks/exchange.py                # all three
    python benchmarks/exchange.py --only demo

Light peers as processes on loopback, with signatures, manifests, chunks and digests as in a run; no model. All publish
at the same tick of the machine's clock, so that waiting for the slowest sampler is not part of it; ``skew`` is by how
much they missed it. Making, encoding and admitting rollouts is not part of it either.

- ``demo``: 3 peers with 12 groups of 12 rollouts of 12 tokens each, as in the demonstration.
- ``large``: 4 peers with 16 MB each, over plain TCP; ``large_tls``: the same with mutual TLS.

The last line is one JSON object, in seconds: the median, 90th percentile and maximum over peers and rounds, without
the ``warm_up`` rounds; the load of the machine before, since other work on it counts in full.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubles import Swarm

WARM_UP = 2
"""The first round waits for processes to start, the second still for links among them."""


@dataclass(frozen=True)
class Case:
    peers: int
    groups: int
    rollouts: int
    tokens: int
    rounds: int
    beat: float
    tls: bool = False


CASES = {
    "demo": Case(peers=3, groups=12, rollouts=12, tokens=12, rounds=40, beat=0.2),
    "large": Case(peers=4, groups=12, rollouts=12, tokens=13_900, rounds=12, beat=4.0),
    "large_tls": Case(peers=4, groups=12, rollouts=12, tokens=13_900, rounds=12, beat=4.0, tls=True),
}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    names = [f"p{i}" for i in range(case.peers)]
    arguments = ["--groups", str(case.groups), "--rollouts", str(case.rollouts), "--tokens", str(case.tokens)]
    with tempfile.TemporaryDirectory() as place:
        swarm = Swarm(
            Path(place),
            names,
            rounds=rounds + WARM_UP,
            network={"deadline": 120.0, "start_seconds": 120.0, "quorum": case.peers - 1},
            arguments=[*arguments, "--beat", str(case.beat)],
            pauses=dict.fromkeys(names, 0.0),
            tls=case.tls,
        )
        with swarm:
            swarm.start()
            swarm.finish(seconds=60 + 4 * case.beat * (rounds + WARM_UP))
            records = {name: swarm.records(name)[WARM_UP:] for name in names}
    of_round = list(zip(*records.values(), strict=True))
    seconds = [record["exchange_seconds"] for of_peers in of_round for record in of_peers]
    began = [[record["published_at"] for record in of_peers] for of_peers in of_round]
    return {
        "peers": case.peers,
        "rounds": len(of_round),
        "bytes": records[names[0]][0]["bytes_sent"],
        "tls": case.tls,
        "median": statistics.median(seconds),
        "p90": statistics.quantiles(seconds, n=10)[-1],
        "max": max(seconds),
        "skew": statistics.median(max(times) - min(times) for times in began),
        "cpu": statistics.median(record["exchange_cpu_seconds"] for of_peers in of_round for record in of_peers),
        "admit": statistics.median(record["admit_seconds"] for of_peers in of_round for record in of_peers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", help="one case; may be given again")
    parser.add_argument("--rounds", type=int, help="measured, at least 5")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 5:
        parser.error("--rounds: a median of at least 5")
    result: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "warm_up": WARM_UP}
    print(f"{os.cpu_count()} cores, load {result['load']} before; seconds from publishing to everybody's message")
    for name in arguments.only or CASES:
        found = measure(CASES[name], arguments.rounds or CASES[name].rounds)
        result[name] = {key: round(v, 4) if isinstance(v, float) else v for key, v in found.items()}
        print(
            f"{name:10} {found['peers']} peers × {found['bytes'] / 1e6:.3f} MB: median {found['median']:.3f}, "
            f"90% {found['p90']:.3f}, worst {found['max']:.3f}, skew {found['skew']:.4f}, "
            f"CPU of a peer {found['cpu']:.3f} ({found['rounds']} rounds)"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()

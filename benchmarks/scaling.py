"""How the cost of a round for one peer grows with the number of peers.

    python benchmarks/scaling.py --live 24 --rounds 50     # do so many peers last on this machine?

``--live N``: N light peers as processes on loopback. All must have finished all rounds and heard everybody in each;
``slope`` is by how many kB a round a peer's resident memory grows from round 10 on (least squares; the worst peer and
the median one), ``growth`` the MB between the means of the first and last five of those rounds.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from swarm_of_light_peers import Swarm

SETTLED = 10
"""Rounds until caches, pools and buffers have their size."""


def live(peers: int, rounds: int, seconds: float, tokens: int = 16) -> dict[str, Any]:
    names = [f"p{i:02}" for i in range(peers)]
    with tempfile.TemporaryDirectory() as place:
        swarm = Swarm(
            Path(place),
            names,
            rounds=rounds,
            network={"deadline": seconds, "start_seconds": seconds, "quorum": peers - 1},
            arguments=["--tokens", str(tokens)],
            pauses=dict.fromkeys(names, 0.0),
        )
        began = time.monotonic()
        with swarm:
            swarm.start()
            swarm.finish(seconds=seconds)
            records = {name: swarm.records(name) for name in names}
    return {"peers": peers, "rounds": rounds, "seconds": time.monotonic() - began, **lasting(records)}


def lasting(records: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Whether every round had everybody's message, and what became of the peers' memory after the first rounds."""
    complete = all(len(r["delivered"]) == len(records) - 1 and not r["rejected"] for of in records.values() for r in of)
    memory = np.array([[r["megabytes"] for r in of[SETTLED:]] for of in records.values()])
    half = (SETTLED + memory.shape[1]) // 2
    slopes, later = (1000 * np.polyfit(np.arange(m.shape[1]), m.T, 1)[0] for m in (memory, memory[:, -half:]))
    growth = memory[:, -5:].mean(axis=1) - memory[:, :5].mean(axis=1)
    return {
        "complete": complete,
        "megabytes": float(np.median(memory[:, -1])),
        "slope": float(np.median(slopes)),
        "worst_slope": float(slopes.max()),
        "later_slope": float(np.median(later)),
        "growth": float(np.median(growth)),
        "worst_growth": float(growth.max()),
        "exchange": statistics.median(r["exchange_seconds"] for of in records.values() for r in of[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, metavar="N", help="only so many peers on this machine, for --rounds")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which --live gives up")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    if arguments.rounds < SETTLED + 10:
        parser.error(f"--rounds: memory is looked at from round {SETTLED} on, take {SETTLED + 10} or more")
    found = live(arguments.live, arguments.rounds, arguments.seconds)
    print(
        f"{found['peers']} peers, {found['rounds']} rounds in {found['seconds']:.1f} s, complete: {found['complete']}"
    )
    print(
        f"resident memory {found['megabytes']:.0f} MB a peer, from round {SETTLED} on {found['slope']:+.1f} kB "
        f"a round (worst {found['worst_slope']:+.1f}), in the second half {found['later_slope']:+.1f}"
    )
    print(f"exchange, with everybody on {os.cpu_count()} cores: median {found['exchange']:.2f} s")
    result["live"] = {key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

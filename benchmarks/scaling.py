"""How the cost of a round for one peer grows with the number of peers.

    python benchmarks/scaling.py                           # measured up to 64 peers, then simulated
    python benchmarks/scaling.py --live 24 --rounds 50     # do so many peers last on this machine?

Light peers: everything of a run but the model. Each samples 2 groups of 12 rollouts of 64 tokens a round, however many
others there are, and learns either from all of the others' or from at most 288 foreign rollouts, 24 groups
(``training.max_foreign_rollouts``). Two measurements:

- ``admission``: one peer in this process, the others' messages of a round made up: bytes that it receives, CPU seconds
  of decoding and admitting them, peak memory that it takes, manifests' bytes and CPU seconds. Medians of 7.
- ``exchange``: all peers as processes on this machine's cores, which they share, so that seconds grow with the square
  of their number; CPU seconds of one peer's process, publishing to collected, are what a machine of its own would work.

``simulated`` is no measurement: straight lines through those medians, constant + slope · (messages read) + slope ·
(manifests read), evaluated for up to 10,000 peers. It says what a peer would compute and receive if the network
itself were free and everybody were linked with everybody; it knows nothing of latency, loss, relays, the engine's own
messages about who is there, or what 10,000 links cost. ``check`` is admission measured with 1,000 peers, which no
line was drawn through; the line is about a half too low there, since the share of a sender is found anew for each of
its messages in time that grows with the number of peers. So read the simulation as a lower bound.

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
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from doubles import TOKENIZER, Swarm, light_admitter, light_recipe, made_up_groups
from timing import median_seconds

from ftis.codec import Header, Message, encode
from ftis.guards.limit import groups_per_peer
from ftis.swarm import manifest as manifests
from ftis.swarm.identity import public_hex

GROUPS, ROLLOUTS, TOKENS = 2, 12, 64
LIMIT = 288
REPEAT = 7
CHECK = 1000
"""Peers for which admission is measured as well, to hold the line against it."""
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
    """Which rounds lacked whose message, for whom, and what became of the peers' memory after the first rounds."""
    missing = [[r["round"], name, other] for name, of in records.items() for r in of for other in r["missing"]]
    rejected = [[r["round"], name, *what] for name, of in records.items() for r in of for what in r["rejected"]]
    memory = np.array([[r["megabytes"] for r in of[SETTLED:]] for of in records.values()])
    half = (SETTLED + memory.shape[1]) // 2
    slopes, later = (1000 * np.polyfit(np.arange(m.shape[1]), m.T, 1)[0] for m in (memory, memory[:, -half:]))
    growth = memory[:, -5:].mean(axis=1) - memory[:, :5].mean(axis=1)
    return {
        "complete": not missing and not rejected,
        "missing": missing[:20],
        "rejected": rejected[:20],
        "megabytes": float(np.median(memory[:, -1])),
        "slope": float(np.median(slopes)),
        "worst_slope": float(slopes.max()),
        "later_slope": float(np.median(later)),
        "growth": float(np.median(growth)),
        "worst_growth": float(growth.max()),
        "exchange": statistics.median(r["exchange_seconds"] for of in records.values() for r in of[2:]),
    }


def admission(peers: int, limit: int) -> dict[str, float]:
    """What one peer does with a round of the others', without a network."""
    recipe = light_recipe([f"p{i:05}" for i in range(peers)], 100, GROUPS, ROLLOUTS, TOKENS, {}, limit)
    own, others = recipe.peers[0].name, [p.name for p in recipe.peers[1:]]
    run = "0" * 32
    key = Ed25519PrivateKey.generate()
    public, signed = public_hex(key), []
    messages = {}
    for name in others:
        groups = made_up_groups(recipe, name, 0)
        data = encode(Message(Header(run, 0, name, TOKENIZER, 1.0, 0, 1.0), tuple(groups)))
        document = manifests.to_bytes(manifests.describe(run, name, 0, 1, data, tuple(g.item for g in groups)))
        signed.append((document, manifests.seal(key, document)))
        if name in groups_per_peer(recipe, own, 0):
            messages[name] = data

    admitters = [light_admitter(recipe, run, own) for _ in range(REPEAT + 2)]

    def admit() -> int:
        admitter = admitters.pop()  # one that has not admitted these before
        return sum(len(admitter.admit(name, data, 0).admitted) for name, data in messages.items())

    def read() -> None:
        for document, seal in signed:
            assert manifests.signer(document, seal) == public
            manifests.parse(document)

    tracemalloc.start()
    admitted = admit()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert admitted == min(GROUPS * len(others), limit // ROLLOUTS if limit else GROUPS * len(others))
    return {
        "peers": peers,
        "messages": len(messages),
        "bytes": sum(map(len, messages.values())),
        "manifest_bytes": sum(len(document) + 96 for document, _ in signed),
        "rollouts": admitted * ROLLOUTS,
        "admit_seconds": median_seconds(admit, REPEAT, clock=time.process_time),
        "manifest_seconds": median_seconds(read, REPEAT, clock=time.process_time),
        "peak_megabytes": peak / 1e6,
    }


def exchange(peers: int, limit: int, rounds: int = 8) -> dict[str, float]:
    """What a round costs peers that are all on this machine; the first two rounds are not counted."""
    names = [f"p{i:02}" for i in range(peers)]
    sizes = ["--groups", str(GROUPS), "--rollouts", str(ROLLOUTS), "--tokens", str(TOKENS)]
    with tempfile.TemporaryDirectory() as place:
        swarm = Swarm(
            Path(place),
            names,
            rounds=rounds,
            network={"deadline": 300.0, "start_seconds": 300.0, "quorum": peers - 1},
            arguments=[*sizes, "--max-foreign", str(limit)],
            pauses=dict.fromkeys(names, 0.0),
        )
        with swarm:
            swarm.start()
            swarm.finish(seconds=300)
            records = [r for name in names for r in swarm.records(name)[2:]]
    assert all(len(r["delivered"]) + len(r["offered_only"]) == peers - 1 for r in records)
    return {
        "peers": peers,
        "bytes": statistics.median(r["bytes_received"] for r in records),
        "exchange_seconds": statistics.median(r["exchange_seconds"] for r in records),
        "exchange_cpu_seconds": statistics.median(r["exchange_cpu_seconds"] for r in records),
        "admit_seconds": statistics.median(r["admit_seconds"] for r in records),
        "resident_megabytes": statistics.median(r["megabytes"] for r in records),
    }


def simulated(
    measured: list[dict[str, float]], lived: list[dict[str, float]], peers: int, limit: int
) -> dict[str, Any]:
    """Straight lines through what was measured without a limit, evaluated; no measurement."""
    others = [m["peers"] - 1 for m in measured]
    by_message = {
        k: np.polyfit(others, [m[k] for m in measured], 1) for k in ("bytes", "admit_seconds", "peak_megabytes")
    }
    by_manifest = {k: np.polyfit(others, [m[k] for m in measured], 1) for k in ("manifest_bytes", "manifest_seconds")}
    cpu = np.polyfit([m["peers"] - 1 for m in lived], [m["exchange_cpu_seconds"] for m in lived], 1)
    read = min(peers - 1, limit // ROLLOUTS) if limit else peers - 1
    found = {k: float(np.polyval(line, read)) for k, line in by_message.items()}
    found |= {k: float(np.polyval(line, peers - 1)) for k, line in by_manifest.items()}
    return {"peers": peers, "messages": read, **found, "exchange_cpu_seconds": float(np.polyval(cpu, read))}


def grow(most: int) -> dict[str, Any]:
    result: dict[str, Any] = {"groups": GROUPS, "rollouts": ROLLOUTS, "tokens": TOKENS, "limit": LIMIT}
    sizes = [n for n in (2, 4, 8, 16, 32, 64) if n <= most]
    print("one peer's round, measured        MB read   admit s   peak MB   manifests s")
    for label, limit in (("all", 0), ("limited", LIMIT)):
        result[f"admission_{label}"] = rows = [admission(n, limit) for n in sizes]
        for row in rows:
            print(
                f"{label:8} {row['peers']:6} peers {row['bytes'] / 1e6:18.3f} {row['admit_seconds']:9.4f} "
                f"{row['peak_megabytes']:9.1f} {row['manifest_seconds']:13.4f}"
            )
    print("all on this machine, measured     MB read  exchange s   its CPU s   resident MB")
    for label, limit in (("all", 0), ("limited", LIMIT)):
        result[f"exchange_{label}"] = rows = [exchange(n, limit) for n in sizes]
        for row in rows:
            print(
                f"{label:8} {row['peers']:6} peers {row['bytes'] / 1e6:18.3f} {row['exchange_seconds']:11.3f} "
                f"{row['exchange_cpu_seconds']:11.3f} {row['resident_megabytes']:13.0f}"
            )
    print("SIMULATED: lines through the above  MB read   admit s   peak MB   manifests s   CPU s of fetching")
    for label, limit in (("all", 0), ("limited", LIMIT)):
        measured, lived = result["admission_all"], result["exchange_all"]
        result[f"simulated_{label}"] = rows = [simulated(measured, lived, n, limit) for n in (100, 1000, 10_000)]
        for row in rows:
            print(
                f"{label:8} {row['peers']:6} peers {row['bytes'] / 1e6:20.3f} {row['admit_seconds']:9.4f} "
                f"{row['peak_megabytes']:9.1f} {row['manifest_seconds']:13.4f} {row['exchange_cpu_seconds']:19.2f}"
            )
        result[f"check_{label}"] = row = admission(CHECK, limit)
        print(
            f"{label:8} {row['peers']:6} measured {row['bytes'] / 1e6:17.3f} {row['admit_seconds']:9.4f} "
            f"{row['peak_megabytes']:9.1f} {row['manifest_seconds']:13.4f}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, metavar="N", help="only so many peers on this machine, for --rounds")
    parser.add_argument("--most", type=int, default=64, help="peers that are measured, without --live")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which --live gives up")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    if arguments.live is None:
        result |= grow(arguments.most)
    elif arguments.rounds < SETTLED + 10:
        parser.error(f"--rounds: memory is looked at from round {SETTLED} on, take {SETTLED + 10} or more")
    else:
        result["live"] = last(arguments.live, arguments.rounds, arguments.seconds)
    print(json.dumps(rounded(result)))


def last(peers: int, rounds: int, seconds: float) -> dict[str, Any]:
    found = live(peers, rounds, seconds)
    whole = "all complete" if found["complete"] else f"missing: {found['missing']}, rejected: {found['rejected']}"
    print(f"{peers} peers, {rounds} rounds in {found['seconds']:.1f} s, {whole}")
    print(
        f"resident memory {found['megabytes']:.0f} MB a peer, from round {SETTLED} on {found['slope']:+.1f} kB a round "
        f"(worst {found['worst_slope']:+.1f}), in the second half {found['later_slope']:+.1f}"
    )
    print(f"exchange, with everybody on {os.cpu_count()} cores: median {found['exchange']:.2f} s")
    return found


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()

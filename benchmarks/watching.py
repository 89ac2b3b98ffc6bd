"""What watching a long run takes: the time until its page is there, the server's memory, and its share of a core.

    python benchmarks/watching.py                      10,000 rounds of 8 peers
    python benchmarks/watching.py --every 5 --seconds 60   while each peer ends a round every 5 s
    python benchmarks/watching.py --demo 10            the demo of 10 rounds, without and with somebody who watches

It writes the records of such a run (0.9 GB for the first), serves them in a process of its own, and opens the page.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ftis.metric_keys import peer_key
from ftis.recipe.arms import run_directory
from ftis.recipe.parsing import parse

RATIO, WEIGHT = "sampling/importance_sampling_ratio/", "sampling/importance_sampling_weight/"
QUANTILES = ("min", "p10", "p50", "p90", "max")
PROGRAM = "from ftis.cli import main; main()"


def row(step: int, names: list[str], own: str) -> dict[str, Any]:
    """A line of metrics.jsonl with the keys that a round of a swarm has, and numbers as long as real ones."""
    noise = ((step * 7919) % 1000) / 1000 + 1e-13
    line: dict[str, Any] = {
        "step": step,
        "reward": noise,
        "frac_reward_zero_std": noise,
        "tokens_sampled": 400 * step,
        "step_time": 3 + noise,
        **{f"time/{stage}": noise for stage in ("sample", "exchange", "wait", "admit", "logp", "update")},
        **{f"completions/{what}": noise for what in ("mean_length", "min_length", "max_length", "clipped_ratio")},
    }
    for name in names:
        line |= {peer_key(name, what): 9 for what in ("admitted", "kept", "bytes")}
        line |= {peer_key(name, what): 0 for what in ("late", "rejected", "zero_advantage", "dropped", "passed_over")}
        line |= {peer_key(name, what): noise for what in ("reward", "kl/k1", "kl/k3", "clip_ratio/low_mean")}
        line |= {peer_key(name, f"sampling/{what}"): noise for what in ("truncated_fraction", "effective_sample_size")}
        line |= {peer_key(name, f"{kind}{q}"): noise for kind in (RATIO, WEIGHT) for q in QUANTILES}
        line[peer_key(name, "delivered")] = True
        if name != own:
            line |= {peer_key(name, "honesty/evidence"): noise, peer_key(name, "honesty/threshold"): 40.0}
            line |= {peer_key(name, "honesty/tokens"): 100 * step, peer_key(name, "honesty/quarantined"): False}
    return line


def write_run(place: Path, peers: int, rounds: int) -> Path:
    """The records of such a run, half of its rounds."""
    names = [f"peer-{i}" for i in range(peers)]
    recipe = parse(
        {
            "name": "long",
            "output_dir": str(place),
            "task": {"name": "clock"},
            "training": {"rounds": 2 * rounds, "prompts_per_round": peers},
            "peers": [{"name": name, "model": "starter:small"} for name in names],
        }
    )
    run = run_directory(recipe)
    for name in names:
        directory = run / recipe.objective.name / name
        directory.mkdir(parents=True)
        with (directory / "metrics.jsonl").open("w") as file:
            for step in range(1, rounds + 1):
                file.write(json.dumps(row(step, names, name)) + "\n")
        with (directory / "evaluations.jsonl").open("w") as file:
            for step in range(0, rounds + 1, 100):
                file.write(json.dumps({"step": step, "split": "validation", "accuracy": 0.5, "problems": 300}) + "\n")
    (run / "recipe.json").write_text(recipe.model_dump_json())
    return run


def served(run: Path) -> tuple[subprocess.Popen[str], str]:
    """``ftis watch`` of a run in a process of its own, and the address of its page."""
    command = [sys.executable, "-c", PROGRAM, "watch", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.search(r"http://\S+", server.stdout.readline())
    assert address
    return server, address.group()


def port_of(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


def used(pid: int) -> tuple[float, float]:
    """Seconds of processor time and the most megabytes of memory that a process has had (Linux)."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak
    return (int(ticks[11]) + int(ticks[12])) / 100, int(peak.group(1)) / 1000


def opened(port: int, path: str) -> tuple[float, bytes]:
    """Seconds until an answer is there, and the answer."""
    connection, began = http.client.HTTPConnection("127.0.0.1", port, timeout=120), time.perf_counter()
    connection.request("GET", path)
    body = connection.getresponse().read()
    return time.perf_counter() - began, body


def listen(port: int, path: str, heard: list[float], ended: threading.Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path)
    answer = connection.getresponse()
    while not ended.is_set() and (line := answer.readline()):
        if line.startswith(b"data: "):
            heard.append(time.perf_counter())


def measure(run: Path, every: float, seconds: float) -> dict[str, Any]:
    """Serve the run, open its page, and keep it open while rounds end."""
    began = time.perf_counter()
    server, address = served(run)
    try:
        port = port_of(address)
        started = time.perf_counter() - began
        first, page = opened(port, "/")
        second, _ = opened(port, "/")
        found = {"seconds to start": started, "seconds to open": first, "seconds to open again": second}
        found |= {"kB of the page": len(page) / 1000, "MB of memory": used(server.pid)[1]}
        if seconds:
            heard: list[float] = []
            ended = threading.Event()
            threading.Thread(target=listen, args=(port, events_of(page), heard, ended), daemon=True).start()
            time.sleep(2)
            found |= _while_rounds_end(run, server.pid, every, seconds, heard)
            ended.set()
            found["MB of memory"] = used(server.pid)[1]
        return found
    finally:
        server.kill()


def _while_rounds_end(run: Path, pid: int, every: float, seconds: float, heard: list[float]) -> dict[str, float]:
    """The server's share of a core, and the longest time from the end of a round to a message about it."""
    files = sorted(run.glob("*/*/metrics.jsonl"))
    names = [file.parent.name for file in files]
    step = int(json.loads(files[0].read_bytes().rstrip(b"\n").rpartition(b"\n")[2])["step"])
    before, began, late = used(pid)[0], time.perf_counter(), 0.0
    while time.perf_counter() - began < seconds:
        step, at = step + 1, time.perf_counter()
        for file, name in zip(files, names, strict=True):
            with file.open("a") as more:
                more.write(json.dumps(row(step, names, name)) + "\n")
        time.sleep(max(0.0, every - (time.perf_counter() - at)))
        after = [moment for moment in heard if moment > at]
        late = max(late, (after[0] if after else time.perf_counter()) - at)
    return {
        "part of a core": (used(pid)[0] - before) / (time.perf_counter() - began),
        "seconds until a round is shown": late,
    }


def demo(rounds: int) -> dict[str, Any]:
    """Processor seconds and seconds of the demo by itself and watched, and what the server took meanwhile."""
    found: dict[str, Any] = {"rounds": rounds}
    for watched in (False, True):
        with tempfile.TemporaryDirectory() as place:
            arguments = ["demo", "--output-dir", place, "--set", f"training.rounds={rounds}"]
            began, run = time.perf_counter(), Path(place) / "demo-seed0"
            process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.DEVNULL)
            server = _watched_while_it_goes(process, run) if watched else None
            _, status, spent = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            name = "watched" if watched else "by itself"
            found |= {f"seconds {name}": seconds, f"processor seconds {name}": spent.ru_utime + spent.ru_stime}
            assert status == 0, status
            if server is not None:
                (serving, before), (took, memory) = server, used(server[0].pid)
                found |= {"processor seconds of the server": took, "of these until the page was open": before}
                found |= {"part of a core from then on": (took - before) / seconds}
                found |= {"part of the run": took / (spent.ru_utime + spent.ru_stime), "MB of memory": memory}
                serving.kill()
                serving.wait()
    return found


def _watched_while_it_goes(process: subprocess.Popen[bytes], run: Path) -> tuple[subprocess.Popen[str], float]:
    """A server of the run's page with one page open, and its processor seconds until then."""
    while not (run / "recipe.json").exists() and process.poll() is None:
        time.sleep(0.1)
    server, address = served(run)
    port = port_of(address)
    _, page = opened(port, "/")
    threading.Thread(target=listen, args=(port, events_of(page), [], threading.Event()), daemon=True).start()
    return server, used(server.pid)[0]


def events_of(page: bytes) -> str:
    """The address of a page's events."""
    events = re.search(rb'data-events="([^"]*)"', page)
    assert events
    return events.group(1).decode().replace("&amp;", "&")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--every", type=float, default=5.0, help="seconds of a round while it is watched")
    parser.add_argument("--seconds", type=float, default=0.0, help="for so long it is watched; 0: only opened")
    parser.add_argument("--demo", type=int, metavar="ROUNDS", help="watch the demo instead, of so many rounds")
    settings = parser.parse_args()
    if settings.demo:
        print(json.dumps(demo(settings.demo), indent=1))
        return
    with tempfile.TemporaryDirectory() as place:
        run = write_run(Path(place), settings.peers, settings.rounds)
        size = sum(file.stat().st_size for file in run.rglob("*.jsonl"))
        found = {"peers": settings.peers, "rounds": settings.rounds, "MB of records": size / 1e6}
        print(json.dumps(found | measure(run, settings.every, settings.seconds), indent=1))


if __name__ == "__main__":
    main()

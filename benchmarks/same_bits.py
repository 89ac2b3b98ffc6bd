"""Whether two checkouts train to the same bits: records and weights of the demo, of a joined run and of a replay.

    python benchmarks/same_bits.py BEFORE AFTER [--recipe demo_pair] [--rounds 80]

``--before-recipe`` names the recipe in BEFORE where it had another name. ``--set`` is for both.

Each checkout runs its own code, by ``PYTHONPATH``, with this interpreter and its installed packages. What is compared:
every round's metrics except seconds and memory, every rollout, every evaluation, and the weights and optimiser states
of every checkpoint. Metrics that only one of them has are listed. Ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from doubles import free_port
from safetensors import safe_open
from watching import PROGRAM

ARMS = ("alone", "NoIS", "F-TIS")


def command(checkout: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """``ftis`` with these arguments, or ``research.replay``."""
    paths = os.pathsep.join(map(str, (checkout / "src", checkout)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = ["-c", PROGRAM, *arguments]
    if arguments[0] == "replay" and (checkout / "research").exists():
        program = ["-m", "research.replay", *arguments[1:]]
    return subprocess.Popen([sys.executable, *program], cwd=checkout, env=environment)


def run_all(checkout: Path, place: Path, rounds: int, recipe: str, settings: Sequence[str]) -> None:
    """The demo's arms, one of them joined over loopback, and one replayed under another objective."""
    demo = str(checkout / "recipes" / f"{recipe}.toml")
    both = [word for setting in settings for word in ("--set", setting)]
    shorter = ["--set", f"training.rounds={rounds}", *both, "--set", "processes=inline", "--set", "threads=1"]
    arms = [word for arm in ARMS for word in ("--arm", arm)]
    finish([command(checkout, ["train", demo, *arms, *shorter, "--set", f"output_dir={place / 'runs'}"])])
    run = next((place / "runs").iterdir())
    finish([command(checkout, ["replay", str(run), "--arm", "F-TIS", "--objective", "TIS"])])
    joined = [*shorter[:2], *both, "--set", f"output_dir={place / 'joined'}", "--set", f"network.port={free_port()}"]
    names = [peer["name"] for peer in json.loads((run / "recipe.json").read_text())["peers"]]
    finish([command(checkout, ["join", demo, "--arm", "F-TIS", "--open", "--peer", n, *joined]) for n in names])


def finish(running: Sequence[subprocess.Popen[bytes]]) -> None:
    codes = [process.wait() for process in running]
    if any(codes):
        failed = next(process for process in running if process.returncode)
        sys.exit(f"failed: {failed.args!r}")


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def content(path: Path) -> dict[str, str]:
    """What a file holds, as far as it must not differ: name of each part -> digest."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        parts: dict[str, list[Any]] = {}
        for row in rows:
            for key, value in row.items():
                timed = key.startswith("time/") or key.endswith("/waited")
                if not (timed or key in ("step_time", "seconds", "time", "peak_memory")):
                    parts.setdefault(key, []).append(value)
        return {key: digest(values) for key, values in parts.items()}
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return {name: digest(table[name].to_pylist()) for name in table.column_names}
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as tensors:
            return {name: digest(tensors.get_tensor(name).numpy().tobytes()) for name in tensors.keys()}  # noqa: SIM118
    state = torch.load(path, weights_only=True)["state"]
    return {f"{k}/{name}": digest(t.numpy().tobytes()) for k, of in state.items() for name, t in of.items()}


def contents(place: Path) -> dict[str, dict[str, str]]:
    patterns = ("*.safetensors", "*.parquet", "optimizer.pt", "metrics.jsonl", "evaluations.jsonl", "evaluations/*")
    files = {path for pattern in patterns for path in place.rglob(pattern) if path.is_file()}
    return {str(path.relative_to(place)): content(path) for path in sorted(files)}


def compare(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What differs, a line each."""
    found = [f"{name}: only in one of them" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        found += [f"{name}: {key} differs" for key in sorted(one.keys() & other.keys()) if one[key] != other[key]]
        found += [f"{name}: {key} is gone" for key in sorted(one.keys() - other.keys())]
    return found


def run_of(line: str) -> str:
    """The run that a line of :func:`compare` is about."""
    return line.partition("/")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--recipe", default="demo_pair")
    parser.add_argument("--before-recipe")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, help="Where runs are kept; those found there are not run again.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = {}
        for name in ("before", "after"):
            checkout = getattr(options, name).resolve()
            place = (options.keep.resolve() if options.keep else Path(temporary)) / name
            if not place.exists():
                recipe = (options.before_recipe if name == "before" else None) or options.recipe
                run_all(checkout, place, options.rounds, recipe, options.settings)
            found[name] = contents(place)
    differing = compare(found["before"], found["after"])
    new = {key for name, parts in found["after"].items() for key in parts.keys() - found["before"].get(name, {}).keys()}
    parts = sum(map(len, found["before"].values()))
    print(f"{len(found['before'])} files, {parts} parts compared; new: {', '.join(sorted(new)) or 'nothing'}")
    for run, lines in groupby(sorted(differing, key=run_of), run_of):
        first, *more = lines
        print("\n".join([first, *more[:24]]) + f"\n{run}: {len(more) - 24} more" * (len(more) > 24))
    if not differing:
        print("the same bits")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()

"""Memory that two LoRA peers of one model take as they are loaded in one process, by how their base is kept.

    python benchmarks/loading.py models/smollm2-135m

Each way of keeping the base has a process of its own. Told is what its resident size grows by as the first peer is
loaded, and as the second is, whose base lies in memory already. Rank 16; the arithmetic is in the base's type, of 4
bits in float32. Medians over tries, since not all that a process has freed goes back to the system.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from ftis.config import PeerConfig
from ftis.machine.resources import return_freed_memory
from ftis.policy import Policy

ARITHMETIC = {"float32": "float32", "bfloat16": "bfloat16", "nf4": "float32"}


def resident() -> float:
    """Of this process, in MB, on Linux."""
    return_freed_memory()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def load_two(model: str, kept: str) -> None:
    policies, before = [], resident()
    for name in "ab":
        settings: dict[str, Any] = {"train": "lora", "lora_r": 16, "frozen_dtype": kept, "dtype": ARITHMETIC[kept]}
        policies.append(Policy.load(PeerConfig(name=name, model=model, **settings)))
        after = resident()
        print(after - before)
        before = after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--kept", choices=list(ARITHMETIC), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.kept:
        load_two(chosen.model, chosen.kept)
        return
    for kept in ARITHMETIC:
        command = [sys.executable, __file__, chosen.model, "--kept", kept]
        tried = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(chosen.tries)]
        sizes = [[float(size) for size in one.stdout.split()[-2:]] for one in tried]
        first, second = map(median, zip(*sizes, strict=True))
        print(f"{kept}: the first {first:.0f} MB, the second {second:.0f} MB", flush=True)


if __name__ == "__main__":
    main()

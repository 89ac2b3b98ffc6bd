"""A round of one peer in one process, in several that hold all of the model, and in several that keep a part each.

    python benchmarks/processes.py                          # two processes against one of as many threads
    python benchmarks/processes.py --processes 4 --rounds 6

SmolLM2-135M (``ftis models smollm2-135m``) is trained in full on arithmetic word problems, alone. Printed are
medians over rounds, the first left out, of wall seconds by stage, and what each process took at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from ftis.engines.machine import cores

RECIPE = """
name = "processes"
output_dir = "{place}"
threads = {threads}
[task]
name = "word_problems"
validation_size = 8
[prompt]
system_prompt = ""
chat_template = "never"
template = "Q: {{question}}\\nA:"
[[prompt.examples]]
question = "Sam has 3 pens and gets 4 more. How many is that?"
completion = " 3 + 4 = 7"
[reward]
extract = "last_number"
[sampling]
num_generations = 8
max_completion_length = 32
[training]
rounds = {rounds}
prompts_per_round = 12
eval_every = 0
save_every = 1000
[[peers]]
name = "a"
model = "{model}"
learning_rate = 1e-5
tokens_per_microbatch = 2048
data_parallel_size = {processes}
fsdp = {fsdp}
"""
STAGES = ("sample", "logp", "update")


def peaks(process: subprocess.Popen[bytes]) -> list[float]:
    """The largest resident size of each process that a command starts, in GB, the largest first."""
    peak: dict[int, float] = {}
    while process.poll() is None:
        waiting = [process.pid]
        while waiting:
            pid = waiting.pop()
            try:
                status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
                peak[pid] = int(status.partition("VmHWM:")[2].split()[0]) / 1e6
                for task in Path(f"/proc/{pid}/task").glob("*/children"):
                    waiting += map(int, task.read_text(encoding="ascii").split())
            except (OSError, IndexError):
                continue  # it has just ended
        time.sleep(0.2)
    return sorted((size for size in peak.values() if size > 0.1), reverse=True)


def measured(model: Path, processes: int, fsdp: bool, rounds: int, threads: int) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as place:
        recipe = Path(place) / "recipe.toml"
        settings = {"place": place, "model": model.resolve(), "processes": processes, "rounds": rounds}
        recipe.write_text(RECIPE.format(**settings, fsdp=str(fsdp).lower(), threads=threads), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("ftis")), "train", str(recipe)]
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        sizes = peaks(started)
        if started.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        (metrics,) = Path(place).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][1:]
    seconds = [median(row.get(f"time/{stage}", 0.0) for row in rows) for stage in STAGES]
    how = "one process" if processes == 1 else f"{processes}, a part in each" if fsdp else f"{processes}, all in each"
    cells = [*(f"{s:.2f}" for s in seconds), f"{sum(seconds):.2f}", ", ".join(f"{size:.1f}" for size in sizes)]
    return f"| {how} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    threads = cores()
    print(f"{threads} threads in all\n| processes | sampling | log-probs | updates | together | peak memory, GB |")
    print("|---|---|---|---|---|---|")
    for processes, fsdp in ((1, False), (asked.processes, False), (asked.processes, True)):
        print(measured(asked.model, processes, fsdp, asked.rounds, threads), flush=True)


if __name__ == "__main__":
    main()

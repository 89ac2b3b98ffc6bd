"""The likely peak memory that ``ftis train --dry-run`` prints, beside the peak of the run itself.

    python benchmarks/likely_memory.py models/smollm2-135m models/gemma3-270m

Each row is one round on word problems, on one thread of a CPU: each model in full and through LoRA at two lengths, and
other shapes of a round. *said* is the likely memory in the dry run's line of all peers; it assumes half of the length
and signal in half of the groups. *low* and *high* are its spread, of half and twice as many tokens with signal, where
there is one peer. *measured* is the largest resident size of the whole process of ``ftis train`` (``ru_maxrss``), with
loading, sampling, training, evaluations and the checkpoint. *signal* and *length* are those of the round: without
signal no step is taken, and a peer trained in full has no moments yet. A row takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

SHORT, LONG = 16, 64
RECIPE = """
name = "memory"
processes = "inline"
threads = 1
output_dir = {place}

[task]
name = "word_problems"
options = {{ steps = [1], largest = 6 }}
validation_size = 4

[prompt]
system_prompt = ""
chat_template = "never"
template = "Q: {{question}}\\nA:"

[[prompt.examples]]
question = "Sam has 3 pens and gets 4 more. How many is that?"
completion = " 3 + 4 = 7"

[[prompt.examples]]
question = "Ann has 2 bags with 5 nuts in each and eats 1. How many are left?"
completion = " 2 * 5 - 1 = 9"

[reward]
extract = "last_number"

[sampling]
num_generations = 4
max_completion_length = {length}
temperature = 0.7
stop = ["\\n"]

[training]
rounds = 1
prompts_per_round = {prompts}
mode = "{mode}"
eval_every = 0
"""
PEER = """
[[peers]]
name = "p{number}"
model = {model}
train = "{train}"
learning_rate = 1e-6
{keys}
"""
SIZES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Case:
    """A recipe of peers of one model, each trained in one of the ways ``train``; ``keys`` are every peer's."""

    model: str
    train: tuple[str, ...]
    length: int
    prompts: int = 4
    mode: str = "vertical"
    keys: str = ""

    def recipe(self, place: Path) -> str:
        model = json.dumps(str(Path(self.model).absolute()))
        runs = json.dumps(str(place / "runs"))
        text = RECIPE.format(place=runs, length=self.length, prompts=self.prompts, mode=self.mode)
        return text + "".join(
            PEER.format(number=n, model=model, train=train, keys=self.keys) for n, train in enumerate(self.train)
        )


def cases(models: Sequence[str]) -> list[Case]:
    first, last = models[0], models[-1]
    return [
        *(Case(model, (train,), length) for model in models for train in ("full", "lora") for length in (SHORT, LONG)),
        Case(first, ("full", "lora"), SHORT, mode="horizontal"),
        Case(last, ("lora", "lora"), SHORT),
        Case(first, ("full",), SHORT, prompts=16, keys="tokens_per_microbatch = 16384"),
    ]


def measure(case: Case) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "memory.toml").write_text(case.recipe(place), encoding="utf-8")
        command = [sys.executable, "-m", "ftis", "train", str(place / "memory.toml")]
        dry = subprocess.run([*command, "--dry-run"], stdout=subprocess.PIPE, text=True, check=True)
        said = " ".join(dry.stdout.split())
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(training.pid, 0)
        training.returncode = os.waitstatus_to_exitcode(status)
        if training.returncode not in (0, 3):  # 3: nothing of the others' was used
            raise SystemExit(f"{case}: ftis train ended with {training.returncode}")
        rounds = [json.loads(file.read_text(encoding="utf-8")) for file in place.rglob("metrics.jsonl")]
    found = {"said": in_bytes(r"together: .*? likely (\S+ \wB)", said)}
    if len(case.train) == 1:
        found |= {
            "low": in_bytes(r"; (\S+ \wB) with half", said),
            "high": in_bytes(r"tokens, (\S+ \wB) with twice", said),
        }
    return found | {
        "measured": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "signal": 1 - fmean(row["frac_reward_zero_std"] for row in rounds),
        "length": fmean(row["completions/mean_length"] for row in rounds) / case.length,
    }


def in_bytes(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"the dry run does not say {pattern!r}: {text}")
    value, unit = found[1].split()
    return float(value) * SIZES[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="directories of pretrained models")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of rows, from 0")
    settings = parser.parse_args()
    every = cases(settings.models)
    within, chosen = 0, settings.only or range(len(every))
    for number in chosen:
        case, found = every[number], measure(every[number])
        ratio = found["said"] / found["measured"]
        within += 0.8 <= ratio <= 1.2
        spread = f" ({found['low'] / 1e9:.2f} to {found['high'] / 1e9:.2f})" if "low" in found else ""
        print(
            f"{number}: {Path(case.model).name} {'+'.join(case.train)}, {case.length} tokens x {case.prompts} prompts, "
            f"{case.mode} {case.keys}: said {found['said'] / 1e9:.2f}{spread} GB, measured "
            f"{found['measured'] / 1e9:.2f}, ratio {ratio:.2f}; signal {found['signal']:.2f}, length "
            f"{found['length']:.2f}",
            flush=True,
        )
    print(f"{within} of {len(chosen)} within 20%")


if __name__ == "__main__":
    main()

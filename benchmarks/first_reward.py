"""From the default prompt to a recipe that learns: what ``ftis preflight`` sees of a model, and where its advice leads.

    python benchmarks/first_reward.py models/smollm2-135m models/gemma3-270m
    python benchmarks/first_reward.py models/smollm2-135m --train 3

Sums of two digits, for two peers of one model, in full and through LoRA. Each model is tried with the default prompt
and with two easier formats; preflight prints the first where a default earns nothing. 4 completions a group, of at most
32 tokens. Both peers are the same untrained model, so a row has twice the groups. ``--train N`` trains with the part
that gives the most groups signal: twelve rounds of 12 prompts by 8 completions of at most 24 tokens, under seeds 0 to
N − 1, beginning with ``--rates`` in full and through LoRA. It says what the peers solve of 40 problems before and
after. ``sampling_cost`` are seconds to sample a rollout over seconds to train on one, by peer. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ftis.check.advice import easy_lines
from ftis.check.preflight import Sounding, preflight
from ftis.comparison.summary import summarise
from ftis.experiment.runs import run
from ftis.preparing.checks import check
from ftis.recipe.arms import arms_of, run_directory
from ftis.recipe.parsing import load
from ftis.records.events import unheard

DEFAULT = "default prompt"
RECIPE = """
name = "first-reward"
seed = {seed}
output_dir = {output_dir}

[task]
name = "reasoning_gym:chain_sum"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
train_size = 60
validation_size = {validation_size}

[training]
rounds = 12
prompts_per_round = 12
eval_every = 12
save_every = 12

[[peers]]
name = "full"
model = {model}
learning_rate = {full}
lr_scheduler_type = "linear"

[[peers]]
name = "lora"
model = {model}
train = "lora"
learning_rate = {lora}
lr_scheduler_type = "linear"

"""


WITHOUT_TAGS = """
  [prompt]
  system_prompt = ""
  template = "{question} Give only the number."
  [reward]
  extract = "last_number"
"""
EASY_FORMATS = {"with examples": easy_lines(None, as_numbers=True), "without tags": WITHOUT_TAGS}
"""The part of a recipe that preflight prints, and another."""


def recipe_text(model: str, part: str, **values: Any) -> str:
    rates = {"full": 1e-6, "lora": 1e-4, **values}
    quoted = {key: json.dumps(value) for key, value in {"model": model, **rates}.items()}
    return RECIPE.format(**quoted) + part


def row(name: str, soundings: Sequence[Sounding], seconds: float) -> dict[str, Any]:
    completions = sum(sounding.completions for sounding in soundings)
    formats = sum(sounding.formats or 0 for sounding in soundings)
    return {
        "recipe": name,
        "reward": fmean(sounding.reward for sounding in soundings),
        "format_right": formats / completions,
        "signal": fmean(sounding.signal for sounding in soundings),
        "sampling_cost": {sounding.peer: sounding.sampling_cost for sounding in soundings},
        "seconds": seconds,
    }


def tried(model: str, groups: int, place: Path) -> list[dict[str, Any]]:
    """A row for the default prompt and for each part that preflight prints."""
    rows = []
    for name, part in {DEFAULT: "", **EASY_FORMATS}.items():
        file = place / "recipe.toml"
        text = recipe_text(model, part, seed=0, output_dir=str(place), validation_size=8)
        file.write_text(text, encoding="utf-8")
        recipe = load(file, ["sampling.num_generations=4", "sampling.max_completion_length=32"])
        began = time.monotonic()
        soundings = preflight(check(arms_of(recipe)[:1]), groups, unheard)
        rows.append(row(name, soundings, time.monotonic() - began))
        told = "{recipe}: reward {reward:.2f}, format right {format_right:.0%}, groups with signal {signal:.0%}"
        print(f"{model}, {told.format(**rows[-1])}, {rows[-1]['seconds']:.0f} s", flush=True)
    return rows


def trained(model: str, name: str, seed: int, rates: Sequence[float], place: Path) -> dict[str, Any]:
    """Accuracy of each peer before and after training with the part of that name."""
    file = place / "recipe.toml"
    full, lora = rates
    part = EASY_FORMATS[name]
    text = recipe_text(model, part, seed=seed, output_dir=str(place), validation_size=40, full=full, lora=lora)
    file.write_text(text, encoding="utf-8")
    recipe = load(file, ["sampling.num_generations=8", "sampling.max_completion_length=24"])
    began = time.monotonic()
    run(recipe, overwrite=True)
    (peers,) = summarise(run_directory(recipe)).arms.values()
    ends = {peer: (of.start, of.last) for peer, of in peers.items()}
    told = ", ".join(f"{peer} {start:.3f} to {last:.3f}" for peer, (start, last) in ends.items())
    print(f"{model}, {name}, seed {seed}: {told}, {time.monotonic() - began:.0f} s", flush=True)
    return {"recipe": name, "seed": seed, "ends": ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--train", type=int, default=0, metavar="N")
    parser.add_argument("--rates", type=float, nargs=2, default=(1e-5, 3e-4), metavar=("FULL", "LORA"))
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for model in chosen.models:
            rows = tried(model, chosen.groups, place)
            best = max(rows[1:], key=lambda of: float(of["signal"]))["recipe"]
            runs = [trained(model, best, seed, chosen.rates, place) for seed in range(chosen.train)]
            found[model] = {"preflight": rows, "trained": runs}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

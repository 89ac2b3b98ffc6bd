"""What each part of an update is worth: the same work with and without it, taking turns.

    python benchmarks/update.py        # about four minutes on one core
    python benchmarks/update.py --real models/smollm2-135m

Qwen2 models of random weights, 24 prompts of 7 to 9 tokens x 12 completions of at most 40 tokens (geometric lengths,
a mean of 16), one thread, float32. Gains are medians over repeats of the ratio of times. "rows in one line" is one of
four optimiser steps, on a quarter of the rollouts; "micro-batches cut to their lengths" takes all of them as padded
rows, which is how models run that cannot run in one line; "own log-probabilities kept" compares scoring all of a
round's rollouts with scoring the few that are checked; "in chunks" takes log-probabilities and gradients of 470 tokens.
--real takes a pretrained model: old log-probabilities and the update of 8 word problems x 8 completions of 16 tokens,
in processor seconds, with rows split by what prompts and gradients cost, and by their lengths alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sampling import random_policy

import ftis
from ftis.config import PeerConfig
from ftis.engines.microbatches import FIXED_COST, cheapest, fit
from ftis.engines.rows import PaddedRows
from ftis.learning import CHECKED_ROLLOUTS
from ftis.machine.resources import keep_freed_memory
from ftis.policy import Policy, TokenSplit
from ftis.rollouts import Ints, Rows
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

PROMPTS, GROUP, LONGEST, MEAN = 24, 12, 40, 16
SHAPES = {
    "starter": {"vocab_size": 23, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2},
    "12.6M": {"vocab_size": 23, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
}
VOCABULARIES = (4_096, 32_000, 152_000)


def rollouts() -> tuple[list[Ints], list[Ints]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 23, rng.integers(7, 10)).astype(np.int32) for _ in range(PROMPTS)]
    lengths = np.minimum(LONGEST, rng.geometric(1 / MEAN, PROMPTS * GROUP))
    return [p for p in prompts for _ in range(GROUP)], [rng.integers(3, 23, n).astype(np.int32) for n in lengths]


def gain(with_it: Callable[[], object], without_it: Callable[[], object], repeats: int) -> tuple[float, float]:
    """How many times as long it takes without, and seconds with it; the first of each warms up."""
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for taken, body in zip(seconds, (with_it, without_it), strict=True):
            began = time.perf_counter()
            body()
            taken.append(time.perf_counter() - began)
    ratios = [slow / fast for fast, slow in zip(*(taken[1:] for taken in seconds), strict=True)]
    return statistics.median(ratios), statistics.median(seconds[0][1:])


def backward(policy: Policy, prompts: list[Ints], completions: list[Ints]) -> None:
    policy.backward(prompts, completions, 1.0, lambda logp, mask, rows: -torch.where(mask, logp, 0.0).sum())


def with_attribute(policy: Policy, name: str, value: object, body: Callable[[], object]) -> None:
    kept = getattr(policy, name)
    setattr(policy, name, value)
    body()
    setattr(policy, name, kept)


def cases(shape: str) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    policy = random_policy(SHAPES[shape])
    prompts, completions = rollouts()
    order = np.random.default_rng(1).permutation(len(prompts))
    step = order[: len(order) // 4]
    of_step = [prompts[i] for i in step], [completions[i] for i in step]
    rows = random_policy(SHAPES[shape])
    rows.forward = PaddedRows(rows.model, rows.device)
    cut = fit(rows.forward.padding_cost, rows.n_parameters, rows.device, rows.model.config, rows.config)
    rows.split, uncut = cut, replace(cut, overhead=1e12)
    all_rows = partial(backward, rows, prompts, completions)
    checked = range(0, len(prompts), len(prompts) // CHECKED_ROLLOUTS)
    few = [[of[i] for i in checked] for of in (prompts, completions)]
    fused = policy.optimizer
    plain = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in policy.trainable], foreach=False)
    for parameter, twin in zip(policy.trainable, plain.param_groups[0]["params"], strict=True):
        parameter.grad, twin.grad = torch.ones_like(parameter), torch.ones_like(parameter)
    return {
        "AdamW in one kernel": (fused.step, plain.step),
        "rows in one line": (partial(backward, policy, *of_step), partial(backward, rows, *of_step)),
        "micro-batches cut to their lengths": (all_rows, partial(with_attribute, rows, "split", uncut, all_rows)),
        "own log-probabilities kept": (
            partial(policy.logps, few[0], few[1], 1.0),
            partial(policy.logps, prompts, completions, 1.0),
        ),
    }


def chunks(vocabulary: int) -> tuple[Callable[[], object], Callable[[], object]]:
    policy = random_policy({**SHAPES["starter"], "vocab_size": vocabulary})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocabulary, 8).astype(np.int32) for _ in range(20)]
    completions = [rng.integers(0, vocabulary, int(n)).astype(np.int32) for n in np.linspace(7, 40, 20)]
    body = partial(backward, policy, prompts, completions)
    return body, partial(with_attribute, policy, "head", None, body)


def real(directory: str, repeats: int) -> dict[str, object]:
    """What two choices are worth to a pretrained model."""
    recipe = ftis.load(Path(__file__).parents[1] / "recipes" / "smollm2_words.toml")
    policy = Policy.load(PeerConfig(name="full", model=directory, device="cpu", dtype="float32"))
    problems = load_task(recipe.task).train[:8]
    prompts = [render_prompt(problem, recipe.prompt, policy.tokenizer) for problem in problems for _ in range(8)]
    rng = np.random.default_rng(0)
    completions = [rng.integers(0, policy.vocab_size, int(n)).astype(np.int32) for n in rng.integers(5, 17, 64)]

    grouped = fit(policy.forward.padding_cost, policy.n_parameters, policy.device, policy.model.config, policy.config)

    def by_length(prompt_ids: Sequence[Ints], completion_ids: Sequence[Ints], budget: int) -> list[Rows]:
        length_N = np.array([len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)])
        nothing_again = np.zeros(len(length_N))
        overhead = FIXED_COST["cpu"] / policy.n_parameters / policy.forward.padding_cost
        return cheapest(length_N, np.arange(len(length_N)), nothing_again, budget, overhead)

    def update(split: TokenSplit) -> float:
        policy.split = split
        began = time.process_time()
        policy.logps(prompts, completions, 1.0)
        backward(policy, prompts, completions)
        return time.process_time() - began

    seconds = [(update(grouped), update(by_length)) for _ in range(repeats)]
    return {
        "model": Path(directory).name,
        "prompt_tokens": max(map(len, prompts)),
        "grouped_seconds": round(statistics.median(s for s, _ in seconds), 2),
        "by_length_seconds": round(statistics.median(s for _, s in seconds), 2),
        "gain": round(statistics.median(b / a for a, b in seconds), 2),
        "microbatches": [
            len(s(prompts, completions, recipe.peers[0].tokens_per_microbatch)) for s in (grouped, by_length)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--vocabularies", nargs="*", type=int, default=list(VOCABULARIES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--real", metavar="DIRECTORY", help="a pretrained model instead of random ones")
    settings = parser.parse_args()
    keep_freed_memory()  # as the commands do
    torch.set_num_threads(1)
    print(f"{vars(settings)}, one thread, torch {torch.__version__}", flush=True)
    if settings.real:
        found = real(settings.real, settings.repeats)
        print("  ".join(f"{key} {value}" for key, value in found.items()))
        print(json.dumps({"benchmark": "update of a pretrained model", **found}))
        return
    results = []

    def measure(model: str, part: str, with_it: Callable[[], object], without_it: Callable[[], object]) -> None:
        ratio, seconds = gain(with_it, without_it, settings.repeats)
        results.append({"model": model, "part": part, "gain": round(ratio, 2), "seconds": round(seconds, 5)})
        print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)

    for shape in settings.models:
        for part, pair in cases(shape).items():
            measure(shape, part, *pair)
    for vocabulary in settings.vocabularies:
        measure("starter", f"log-probabilities in chunks, vocabulary {vocabulary}", *chunks(vocabulary))
    print(json.dumps({"benchmark": "update", "cases": results}))


if __name__ == "__main__":
    main()

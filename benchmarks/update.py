"""What each part of an update is worth: the same work with and without it, taking turns.

    python benchmarks/update.py        # about four minutes on one core

Qwen2 models of random weights, 24 prompts of 7 to 9 tokens x 12 completions of at most 40 tokens (geometric lengths,
a mean of 16), one thread, float32. Gains are medians over repeats of the ratio of times. "rows in one line" is one of
four optimiser steps, on a quarter of the rollouts; "micro-batches cut to their lengths" takes all of them as padded
rows, which is how models run that cannot run in one line; "own log-probabilities kept" compares scoring all of a
round's rollouts with scoring the few that are checked; "in chunks" takes log-probabilities and gradients of 470 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from sampling import random_policy

from ftis.engines.microbatches import fit
from ftis.learning import CHECKED_ROLLOUTS
from ftis.policy import PaddedRows, Policy
from ftis.rollouts import Ints

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
    cut = fit(rows.forward.padding_cost, rows.n_parameters, rows.device)
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
        "micro-batches cut to their lengths": (
            all_rows,
            partial(with_attribute, rows, "split", uncut, all_rows),
        ),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--vocabularies", nargs="*", type=int, default=list(VOCABULARIES))
    parser.add_argument("--repeats", type=int, default=7)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{vars(settings)}, one thread, torch {torch.__version__}", flush=True)
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

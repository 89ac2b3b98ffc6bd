"""Peak memory of an update with a large vocabulary: log-probabilities in chunks against all logits at once.

    python benchmarks/update_memory.py
    python benchmarks/update_memory.py --model models/smollm2-135m

A Qwen2 of two layers, hidden size 64 and 152,000 tokens learns from rollouts of up to 1,024 tokens. Each case runs in a
process of its own: a forward and backward pass over all of its rollouts, and the growth of the process's largest
resident size over what it was with the model loaded and its gradients allocated. The whole run takes about ten minutes
on one core; --rollouts 36 is enough to see the memory. Seconds are medians over repeats, of the cases with --timed
rollouts only.

With --model it is a step of that model instead, in micro-batches of the default's tokens, of 4,096 and of 16,384:
12 completions of 200 to 768 tokens of 2 prompts of 60. Told are the process's largest resident size, all of it, and
the processor seconds of the second step.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from make_starters import make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis.config import PeerConfig
from ftis.policy import Policy

VOCABULARY, LONGEST, PROMPT = 152_000, 1024, 16


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, rollouts: int, budget: int, repeats: int) -> dict[str, object]:
    """One case, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
    )
    peer = PeerConfig(name="p", model="random", device="cpu", dtype="float32", tokens_per_microbatch=budget)
    policy = Policy(Qwen2ForCausalLM(config), make_tokenizer(), peer)
    if way == "all at once":
        policy.head = None
    rng = np.random.default_rng(0)
    lengths = [LONGEST, *rng.integers(1, LONGEST + 1, rollouts - 1)]
    prompts = [rng.integers(0, VOCABULARY, PROMPT, dtype=np.int32) for _ in lengths]
    completions = [rng.integers(0, VOCABULARY, int(n), dtype=np.int32) for n in lengths]
    for parameter in policy.trainable:
        parameter.grad = torch.ones_like(parameter)
    before, seconds = megabytes(), []
    for _ in range(repeats):
        began = time.perf_counter()
        policy.backward(prompts, completions, 1.0, lambda logp, mask, rows: -torch.where(mask, logp, 0.0).sum())
        seconds.append(time.perf_counter() - began)
    return {
        "way": way,
        "rollouts": rollouts,
        "tokens_per_microbatch": budget,
        "tokens": int(sum(lengths)),
        "megabytes": round(megabytes() - before),
        "seconds": round(statistics.median(seconds), 2),
    }


def measure_model(model: str, budget: int) -> dict[str, object]:
    """A step of a pretrained model, in this process."""
    policy = Policy.load(PeerConfig(name="p", model=model, learning_rate=1e-6, tokens_per_microbatch=budget))
    rng = np.random.default_rng(0)
    highest = policy.vocab_size - 1
    prompts = [rng.integers(0, highest, 60, dtype=np.int32) for _ in range(2)]
    rows = [prompt for prompt in prompts for _ in range(6)]
    completions = [rng.integers(0, highest, int(n), dtype=np.int32) for n in rng.integers(200, 769, len(rows))]
    seconds = []
    for _ in range(2):  # the first makes the optimiser's moments
        began = time.process_time()
        policy.step(rows, completions, 1.0, lambda logp, mask, _: -torch.where(mask, logp, 0.0).sum() / len(rows))
        seconds.append(time.process_time() - began)
    return {
        "tokens_per_microbatch": budget,
        "microbatches": len(policy.split(rows, completions, budget)),
        "megabytes": round(megabytes()),
        "processor seconds": round(seconds[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=288)
    parser.add_argument("--timed", type=int, default=3, help="rollouts in the cases that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="a pretrained model's directory")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.case:
        case = json.loads(settings.case)
        print(json.dumps(measure_model(**case) if "model" in case else measure(**case)))
        return
    if settings.model:
        run_cases([{"model": settings.model, "budget": budget} for budget in (0, 4096, 16384)])
        return
    print(f"vocabulary {VOCABULARY}, completions of 1 to {LONGEST} tokens, one thread, torch {torch.__version__}")
    cases = [("all at once", settings.timed, budget, settings.repeats) for budget in (1040, 2080)]
    cases += [("in chunks", settings.timed, budget, settings.repeats) for budget in (1040, 2080)]
    cases += [("in chunks", min(36, settings.rollouts), budget, 1) for budget in (4160, 16640)]
    cases += [("in chunks", settings.rollouts, 16640, 1)]
    run_cases([dict(zip(("way", "rollouts", "budget", "repeats"), case, strict=True)) for case in cases])


def run_cases(cases: Sequence[Mapping[str, object]]) -> None:
    """Each in a process of its own, since a process's largest size never falls."""
    results = []
    for case in cases:
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        results.append(json.loads(run.stdout.splitlines()[-1]))
        print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "update_memory", "cases": results}))


if __name__ == "__main__":
    main()

"""Peak memory of an update with a large vocabulary: log-probabilities in chunks against all logits at once.

    python benchmarks/update_memory.py

A Qwen2 of two layers, hidden size 64 and 152,000 tokens learns from rollouts of up to 1,024 tokens. Each case runs in a
process of its own: a forward and backward pass over all of its rollouts, and the growth of the process's largest
resident size over what it was with the model loaded and its gradients allocated. The whole run takes about ten minutes
on one core; --rollouts 36 is enough to see the memory. Seconds are medians over repeats, of the cases with --timed
rollouts only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis.config import PeerConfig
from ftis.lab.starters import make_tokenizer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=288)
    parser.add_argument("--timed", type=int, default=3, help="rollouts in the cases that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.case:
        print(json.dumps(measure(**json.loads(settings.case))))
        return
    print(f"vocabulary {VOCABULARY}, completions of 1 to {LONGEST} tokens, one thread, torch {torch.__version__}")
    cases = [("all at once", settings.timed, budget, settings.repeats) for budget in (1040, 2080)]
    cases += [("in chunks", settings.timed, budget, settings.repeats) for budget in (1040, 2080)]
    cases += [("in chunks", min(36, settings.rollouts), budget, 1) for budget in (4160, 16640)]
    cases += [("in chunks", settings.rollouts, 16640, 1)]
    results = []
    for case in cases:
        arguments = json.dumps(dict(zip(("way", "rollouts", "budget", "repeats"), case, strict=True)))
        run = subprocess.run(
            [sys.executable, __file__, "--case", arguments], capture_output=True, text=True, check=True
        )
        results.append(json.loads(run.stdout.splitlines()[-1]))
        print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    print(json.dumps({"benchmark": "update_memory", "cases": results}))


if __name__ == "__main__":
    main()

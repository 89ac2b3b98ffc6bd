"""Tokens sampled a second: the built-in sampler against transformers' generate, and against the machine's limits.

    python benchmarks/sampling.py                      # about five minutes on one core
    python benchmarks/sampling.py --models starter     # the 88k-parameter starter's shape only
    python benchmarks/sampling.py --parts              # what each part of the built-in sampler is worth
    python benchmarks/sampling.py --real models/smollm2-135m models/gemma3-270m --threads 2

Models of random weights, prompts shared by groups of 12, one thread, float32. Lengths are "equal" (no token ends a
completion) or "geometric" (every token may, so that the mean is a quarter of the maximum), by the choice of ids that
end one. Both samplers draw completions and record their log-probabilities. The two take turns, so that whatever else
the machine does hits both: rates and their ratio are medians over repeats, the latter of the pairs.

The limits are measured here: arithmetic by one large matrix product, memory by one large copy. A token takes two
floating-point operations a parameter, a step reads all parameters once; the share of the limit is the larger of these
two times over the time taken.

--real takes pretrained models: 4 arithmetic word problems behind two worked ones, 8 completions each, whose log-probs
are also compared with the learner's, and whose greedy text with generate's. Seconds are the processor's.

transformers' continuous batching (generate_batch) is tried as well where it runs; where it does not, the reason is
printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from make_starters import make_tokenizer
from timing import median_seconds
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

import ftis
import ftis.engines.builtin
import ftis.engines.linear
from ftis.config import PeerConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.generate import generate_sampler
from ftis.machine.resources import keep_freed_memory
from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding, Draw
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

GROUP, PROMPT = 12, 8
SAMPLERS = {"builtin": builtin_sampler, "generate": generate_sampler}

SHAPES = {
    "starter": {"vocab_size": 22, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2},
    "large starter": {"vocab_size": 22, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2},
    "16M": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
}


def random_policy(sizes: dict[str, int]) -> Policy:
    """A Qwen2 of random weights, on the CPU in float32."""
    torch.manual_seed(0)
    heads = 4 if sizes["hidden_size"] < 128 else 6
    config = Qwen2Config(
        **sizes,  # type: ignore[arg-type]
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    peer = PeerConfig(name="p", model="random", device="cpu", dtype="float32")
    return Policy(Qwen2ForCausalLM(config), make_tokenizer(), peer)


def make_policy(shape: str, spread: str, length: int) -> Policy:
    policy = random_policy(SHAPES[shape])
    with torch.no_grad():  # every token as likely as any other, whatever came before
        policy.model.model.norm.weight.fill_(1e-4)
    vocabulary = policy.vocab_size
    n_ends = max(1, round(vocabulary / (length / 4)))
    policy.end_ids = frozenset(range(2, 2 + n_ends)) if spread == "geometric" else frozenset({vocabulary})
    return policy


def prompts_of(batch: int, seed: int) -> list[Ints]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 22, PROMPT).astype(np.int32) for _ in range(max(1, batch // GROUP))]


def tokens_of(sampler: Draw, policy: Policy, batch: int, length: int, seed: int) -> int:
    groups = sampler(policy, prompts_of(batch, seed), min(batch, GROUP), Decoding(length), seed)
    return sum(len(rollout) for group in groups for rollout in group)


def continuous(policy: Policy, batch: int, length: int, seed: int) -> int:
    prompts = [prompt.tolist() for prompt in prompts_of(batch, seed) for _ in range(GROUP)]
    settings = GenerationConfig(
        max_new_tokens=length, do_sample=True, eos_token_id=sorted(policy.end_ids)[0], pad_token_id=0
    )
    outputs = policy.model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    return sum(len(output.generated_tokens) for output in outputs.values())


def limits() -> tuple[float, float]:
    """Floating-point operations and bytes a second."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.randn(32 * 2**20)
    target = torch.empty_like(source)
    return (
        2 * 1024**3 / median_seconds(lambda: a @ b, 9),
        2 * source.numel() * 4 / median_seconds(lambda: target.copy_(source), 9),
    )


def compare(shape: str, spread: str, batch: int, length: int, repeats: int) -> dict[str, object]:
    policy = make_policy(shape, spread, length)
    parameters = sum(p.numel() for p in policy.model.parameters())
    rates: dict[str, list[float]] = {"builtin": [], "generate": []}
    for seed in range(repeats + 1):
        for name, sampler in SAMPLERS.items():
            began = time.perf_counter()
            tokens = tokens_of(sampler, policy, batch, length, seed)
            if seed:  # the first round warms up
                rates[name].append(tokens / (time.perf_counter() - began))
    flops, bytes_a_second = limits()
    per_token = max(2 * parameters / flops, 4 * parameters / bytes_a_second / batch)
    built_in, generate = (statistics.median(rates[name]) for name in ("builtin", "generate"))
    ratios = [a / b for a, b in zip(rates["builtin"], rates["generate"], strict=True)]
    return {
        "model": shape,
        "parameters": parameters,
        "lengths": spread,
        "batch": batch,
        "max_length": length,
        "tokens_per_second": round(built_in),
        "generate_tokens_per_second": round(generate),
        "ratio": round(statistics.median(ratios), 2),
        "share_of_limit": round(built_in * per_token, 3),
    }


def one_after_the_other(
    policy: Policy, prompts: Sequence[Ints], repeats: int, decoding: Decoding, seed: int, batch_size: int
) -> list[tuple[Rollout, ...]]:
    """The built-in sampler, batch after batch instead of places taken over."""
    at_a_time = batch_size // repeats
    starts = range(0, len(prompts), at_a_time)
    return [g for i in starts for g in builtin_sampler(policy, prompts[i : i + at_a_time], repeats, decoding, seed + i)]


def each_row_its_prompt(
    policy: Policy, prompts: Sequence[Ints], repeats: int, decoding: Decoding, seed: int
) -> list[tuple[Rollout, ...]]:
    """The built-in sampler with every prompt prefilled once a rollout."""
    return builtin_sampler(policy, [p for p in prompts for _ in range(repeats)], 1, decoding, seed)


def parts(shape: str, length: int, repeats: int) -> list[dict[str, object]]:
    """Each part of the built-in sampler left out, and how many times as long 288 completions then take."""
    policy = make_policy(shape, "geometric", length)
    prompts = prompts_of(288, 0)
    rows = Decoding(length)
    whole = partial(builtin_sampler, policy, prompts, GROUP, rows)
    few = prompts_of(GROUP, 0)
    recording_versions = torch.no_grad()(builtin_sampler.__wrapped__)  # type: ignore[attr-defined]
    cases: dict[str, tuple[Callable[[int], object], Callable[[int], object], dict[str, object]]] = {
        "fused steps": (whole, whole, {"fuses": lambda model: False}),
        "inference mode, 12 at a time": (
            partial(builtin_sampler, policy, few, GROUP, rows),
            partial(recording_versions, policy, few, GROUP, rows),
            {},
        ),
        "ended rows of 12 stay": (
            partial(builtin_sampler, policy, few, GROUP, rows),
            partial(builtin_sampler, policy, few, GROUP, rows),
            {"WORTH_DROPPING": {"cpu": 0.0, "cuda": 0.0}},
        ),
        "dropping ended rows": (whole, whole, {"COMPACT_BELOW": 0.0}),
        "one prefill a group": (whole, partial(each_row_its_prompt, policy, prompts, GROUP, rows), {}),
        "places taken over, 72 at a time": (
            partial(whole, batch_size=72),
            partial(one_after_the_other, policy, prompts, GROUP, rows, batch_size=72),
            {},
        ),
    }
    if 288 * policy.vocab_size > ftis.engines.builtin.RACE_UP_TO:
        cases["one random number a row"] = (whole, whole, {"RACE_UP_TO": 2**62})
    if max(p.numel() for p in policy.model.parameters()) >= ftis.engines.linear.PACKED_FROM:
        cases["packed weights"] = (whole, whole, {"linear.PACKED_FROM": 2**62})
    results: list[dict[str, object]] = []
    for name, (with_it, without_it, replaced) in cases.items():
        ratios = []
        for seed in range(repeats + 1):
            fast = median_seconds(partial(with_it, seed), 1, warm=0)
            with pytest.MonkeyPatch.context() as patch:
                for key, value in replaced.items():
                    module, _, attribute = f"builtin.{key}".rpartition(".")
                    patch.setattr(f"ftis.engines.{module.rpartition('.')[2]}.{attribute}", value)
                ratios.append(median_seconds(partial(without_it, seed), 1, warm=0) / fast)
        results.append({"model": shape, "part": name, "gain": round(statistics.median(ratios[1:]), 2)})
        print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    return results


def real(directory: str, length: int, repeats: int) -> dict[str, object]:
    """A pretrained model on prompts of recipes/smollm2_words.toml, with completions of equal length."""
    recipe = ftis.load(Path(__file__).parents[1] / "recipes" / "smollm2_words.toml")
    policy = Policy.load(PeerConfig(name="p", model=directory, device="cpu", dtype="float32"))
    problems = load_task(recipe.task).train[:4]
    prompts = [render_prompt(problem, recipe.prompt, policy.tokenizer) for problem in problems]
    greedy = Decoding(length, temperature=0.0)
    texts = [[r.completion_ids.tolist() for (r,) in s(policy, prompts, 1, greedy, 0)] for s in SAMPLERS.values()]
    policy.end_ids = frozenset({policy.vocab_size})
    rates: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    gap = 0.0
    for seed in range(repeats + 1):
        for name, sampler in SAMPLERS.items():
            began = time.process_time()
            groups = sampler(policy, prompts, 8, Decoding(length), seed)
            if seed:  # the first round warms up
                rates[name].append(32 * length / (time.process_time() - began))
            elif name == "builtin":
                drawn = [rollout for group in groups for rollout in group]
                asked = [prompt for prompt in prompts for _ in range(8)]
                logps = policy.logps(asked, [rollout.completion_ids for rollout in drawn], 1.0)
                gap = max(float(np.abs(r.gen_logp - logp).max()) for r, logp in zip(drawn, logps, strict=True))
    ratios = [a / b for a, b in zip(rates["builtin"], rates["generate"], strict=True)]
    return {
        "model": Path(directory).name,
        "parameters": policy.n_parameters,
        "prompt_tokens": max(map(len, prompts)),
        "completion_tokens": length,
        **{f"{name}_tokens_per_second": round(statistics.median(rate), 1) for name, rate in rates.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "same_greedy_text": texts[0] == texts[1],
        "largest_gap_to_learner": f"{gap:.1e}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", choices=["equal", "geometric"], default=["equal", "geometric"])
    parser.add_argument("--batches", nargs="+", type=int, default=[12, 72, 288])
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--real", nargs="+", metavar="DIRECTORY", help="pretrained models instead of random ones")
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    keep_freed_memory()  # as the commands do
    torch.set_num_threads(settings.threads)
    print(f"{vars(settings)}, torch {torch.__version__}")
    results = []
    if settings.real:
        for directory in settings.real:
            for length in (16, 64):
                results.append(real(directory, length, settings.repeats))
                print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
        print(json.dumps({"benchmark": "sampling of pretrained models", "cases": results}))
        return
    if settings.parts:
        for shape in settings.models:
            results += parts(shape, settings.max_length, settings.repeats)
        print(json.dumps({"benchmark": "sampling parts", "cases": results}))
        return
    for shape in settings.models:
        for spread in settings.lengths:
            for batch in settings.batches:
                if shape == "16M" and batch == 288 and spread == "equal":
                    continue  # minutes, and nothing to learn that the smaller batch does not show
                results.append(compare(shape, spread, batch, settings.max_length, settings.repeats))
                print("  ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    policy = make_policy(settings.models[0], "geometric", settings.max_length)
    try:
        rates = []
        for seed in range(3):
            began = time.perf_counter()
            tokens = continuous(policy, 72, settings.max_length, seed)
            rates.append(tokens / (time.perf_counter() - began))
        batching: object = round(statistics.median(rates))
    except Exception as error:  # whatever it is, it is the result
        batching = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"generate_batch, {settings.models[0]}, geometric, batch 72: {batching}")
    print(json.dumps({"benchmark": "sampling", "cases": results, "generate_batch": batching}))


if __name__ == "__main__":
    main()

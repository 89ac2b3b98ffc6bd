"""Sampling, update and round of Qwen2 shapes with random weights (135M, 0.5B, 1.5B), in bfloat16 on a GPU.

    python benchmarks/gpu.py                        # needs a CUDA device; repeats are cut towards eight minutes
    python benchmarks/gpu.py --tiny --device cpu    # the same code at toy size, anywhere

It checks itself first: in float32, greedy tokens of the built-in sampler, with and without CUDA graphs, are those of
transformers' generate, and its log-probabilities the learner's; in bfloat16 the latter differ by less than 0.05 nats on
average. Then it measures, as medians over repeats: tokens a second when 24 prompts x 12 completions are sampled, with
and without CUDA graphs, their ratio to generate's, the share of the memory's bandwidth that decoding reaches
(parameters and cached keys and values read once a step, against a large copy); seconds of an optimiser step and its
share of the arithmetic that a large matrix product reaches (6 operations a parameter and token that the model is
passed, which is each prompt once); and a round of one sampling, the check of log-probabilities and four steps.
Then the seconds of a batch of lengths that were not seen before, of one whose rows end, and of a step in micro-batches
of several sizes. Last, for each way to keep a model (in full, also with AdamW in 8 bits, on a GPU paged too; through
LoRA, its base in float32, bfloat16 or 4 bits): tokens a second, seconds of an optimiser step, and the most memory of
both as torch counts it, without the pages that bitsandbytes keeps by itself.

What fails is told and left out, the rest is measured, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ftis.config import PeerConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.decoder import fuses
from ftis.engines.generate import generate_sampler
from ftis.engines.models import load_model
from ftis.models.starters import make_tokenizer
from ftis.policy import Policy
from ftis.rollouts import Ints, Rollout
from ftis.sampling import Decoding

SHAPES: dict[str, dict[str, int]] = {
    "135M": {  # SmolLM2's
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
}
TINY = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2000,
    }
}
T = TypeVar("T")
GROUP, STEPS = 12, 4
MICROBATCHES = (8192, 16384, 32768)
"""Padded tokens."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, AdamW in 8 bits": {"optim": "adamw_8bit"},
    "LoRA": {"train": "lora"},
    "LoRA, base in bfloat16": {"train": "lora", "frozen_dtype": "bfloat16"},
    "LoRA, base in 4 bits": {"train": "lora", "frozen_dtype": "nf4"},
    "full, AdamW in 8 bits, paged": {"optim": "paged_adamw_8bit"},  # last: a failure there may end the process
}
"""Ways to keep a model, as settings of its peer."""
GPU_ONLY = {"full, AdamW in 8 bits, paged"}
LARGEST_GAP = 0.05
"""Mean difference in nats between the sampler's log-probabilities and the learner's in bfloat16."""


class CheckError(Exception):
    """What is to be measured computes something else."""


class Bench:
    """Where and how long: the settings every measurement shares."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        self.began = time.monotonic()
        self.failed = False

    def tried(self, case: dict[str, Any], body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``body`` found, printed; where it fails, the ``case`` and why, and the rest is measured all the same."""
        try:
            found = body()
        except Exception as error:
            self.failed = True
            traceback.print_exc()
            found = case | {"failed": f"{type(error).__name__}: {error}".split("\n")[0]}
        print("  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
        return found

    def seconds(self, body: Callable[[], object], repeats: int) -> float:
        """Median over ``repeats`` after one run to warm up; fewer once three quarters of the time are spent."""
        taken: list[float] = []
        for _ in range(repeats + 1):
            self.synchronize()
            began = time.perf_counter()
            body()
            self.synchronize()
            taken.append(time.perf_counter() - began)
            if len(taken) > 1 and time.monotonic() - self.began > 0.75 * self.settings.seconds:
                break
        return statistics.median(taken[1:])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            gc.collect()  # an earlier model, which its hooks refer to
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, float]:
        """The most memory since :meth:`forget_peak`, where it is told."""
        return {"gigabytes": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if self.device.type == "cuda" else {}

    def limits(self) -> tuple[float, float]:
        """Floating-point operations (bfloat16) and bytes a second."""
        n, numbers = (512, 2**22) if self.settings.tiny else (8192, 2**30)
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        source = torch.zeros(numbers, device=self.device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        return (
            2 * n**3 / self.seconds(lambda: a @ b, 9),
            2 * source.numel() * 2 / self.seconds(lambda: target.copy_(source), 9),
        )

    def policy(self, shape: dict[str, int], dtype: Literal["float32", "bfloat16"], **kept: Any) -> Policy:
        """A model of random weights, kept as these settings of its peer say."""
        torch.manual_seed(0)
        config = Qwen2Config(
            **shape,  # type: ignore[arg-type]
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=2,
        )
        with self.device:
            model: PreTrainedModel = Qwen2ForCausalLM(config)
        peer = PeerConfig(
            name="p",
            model="random",
            device=self.settings.device,
            dtype=dtype,
            tokens_per_microbatch=self.settings.tokens_per_microbatch,
            gradient_checkpointing=self.settings.gradient_checkpointing,
            cuda_graphs=False,  # but within captured_steps
            **kept,
        )
        if peer.frozen_dtype == "nf4":  # which only loading makes of a model
            with tempfile.TemporaryDirectory() as place:
                model.save_pretrained(place)
                del model
                model = load_model(place, peer)
        policy = Policy(model, make_tokenizer(), peer)
        policy.end_ids = frozenset({shape["vocab_size"]})  # no completion ends early: every step is a full one
        return policy


def prompts_of(n: int, length: int, seed: int = 0) -> list[Ints]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 2000, length).astype(np.int32) for _ in range(n)]


def logp_gaps(policy: Policy, prompts: list[Ints], groups: list[tuple[Rollout, ...]]) -> np.ndarray[Any, Any]:
    rows = [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]
    learned = policy.logps([p for p, _ in rows], [r.completion_ids for _, r in rows], 1.0)
    return np.concatenate([np.abs(a - r.gen_logp) for a, (_, r) in zip(learned, rows, strict=True)])


@contextmanager
def captured_steps(policy: Policy) -> Iterator[None]:
    """Sample with CUDA graphs; where a step cannot be captured, fail, as the sampler would go on without."""
    policy.config = policy.config.model_copy(update={"cuda_graphs": True})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="CUDA graphs are left out")
            yield
    finally:
        policy.config = policy.config.model_copy(update={"cuda_graphs": False})


def checked(bench: Bench, shape: dict[str, int]) -> dict[str, Any]:
    """Greedy parity and log-probabilities in float32."""
    policy = bench.policy(shape, "float32")
    prompts = [p[: 20 + i] for i, p in enumerate(prompts_of(6, 32))]  # of unequal length
    greedy = Decoding(16, 0.0)
    fast, slow = (sampler(policy, prompts, 1, greedy, 0) for sampler in (builtin_sampler, generate_sampler))
    with captured_steps(policy):
        captured = builtin_sampler(policy, prompts, 1, greedy, 0)
    same = [
        a.completion_ids.tolist() == b.completion_ids.tolist() == c.completion_ids.tolist()
        for (a,), (b,), (c,) in zip(fast, slow, captured, strict=True)
    ]
    gap = float(logp_gaps(policy, prompts, builtin_sampler(policy, prompts, 2, Decoding(16), 0)).max())
    fused = fuses(policy.model)
    if not (all(same) and fused and gap < 1e-3):
        raise CheckError(f"in float32: greedy {same}, fused {fused}, log-probability gap {gap}")
    return {"greedy_parity": True, "float32_logp_gap_max": gap}


def measure(bench: Bench, name: str, shape: dict[str, int], limits: tuple[float, float]) -> dict[str, Any]:
    settings, (flops, bandwidth) = bench.settings, limits
    result: dict[str, Any] = {"model": name, **checked(bench, shape)}
    bench.forget_peak()
    policy = bench.policy(shape, "bfloat16")
    parameters = sum(p.numel() for p in policy.model.parameters())
    prompts = prompts_of(settings.prompts, settings.prompt_length)
    decoding, length = Decoding(settings.length), settings.length
    rollouts = [r for group in builtin_sampler(policy, prompts, GROUP, decoding, 0) for r in group]
    result["parameters"] = parameters

    gaps = logp_gaps(policy, prompts[:1], builtin_sampler(policy, prompts[:1], GROUP, decoding, 1))
    result["bfloat16_logp_gap_mean"] = float(gaps.mean())
    if gaps.mean() > LARGEST_GAP:
        raise CheckError(f"in bfloat16: mean log-probability gap {gaps.mean()}")

    n_rows, tokens = len(rollouts), len(rollouts) * length
    sampling = bench.seconds(lambda: builtin_sampler(policy, prompts, GROUP, decoding, 0), settings.repeats)
    if bench.device.type == "cuda":  # elsewhere there is nothing to capture
        with captured_steps(policy):
            captured = bench.seconds(lambda: builtin_sampler(policy, prompts, GROUP, decoding, 0), settings.repeats)
        result["cuda_graphs_tokens_per_second"] = round(tokens / captured)
    generate = bench.seconds(lambda: generate_sampler(policy, prompts, GROUP, decoding, 0), settings.generate_repeats)
    result["sampling_tokens_per_second"] = round(tokens / sampling)
    result["ratio_to_generate"] = round(generate / sampling, 2)
    config = policy.model.config
    width = config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * width  # bytes a slot: keys and values
    slots = n_rows * sum(settings.prompt_length + t for t in range(length))
    result["share_of_bandwidth"] = round((2 * parameters * length + cache * slots) / bandwidth / sampling, 3)

    parts = np.array_split(np.random.default_rng(0).permutation(n_rows), STEPS)

    def step(part: Any) -> None:
        step_of(policy, prompts, rollouts, part)

    update = bench.seconds(lambda: step(parts[0]), settings.repeats)
    passed: list[int] = []
    hook = policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    step(parts[0])
    hook.remove()
    trained = sum(passed)
    result["update_seconds"] = round(update, 4)
    result["update_mfu"] = round(6 * parameters * trained / update / flops, 3)

    def a_round() -> None:
        groups = builtin_sampler(policy, prompts, GROUP, decoding, 0)
        logp_gaps(policy, prompts[:1], groups[:1])
        for part in parts:
            step(part)

    result["round_seconds"] = round(bench.seconds(a_round, settings.generate_repeats), 3)
    return result | bench.peak()


def step_of(policy: Policy, prompts: list[Ints], rollouts: list[Rollout], part: Any) -> None:
    """An optimiser step on these of all rollouts, ``GROUP`` of each prompt."""
    tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
    policy.set_learning_rate(1e-7)
    policy.step(
        [prompts[i // GROUP] for i in part],
        [rollouts[i].completion_ids for i in part],
        1.0,
        lambda logp, mask, rows: -torch.where(mask, logp, 0.0).sum() / tokens,
    )


def shapes_of(bench: Bench, name: str, shape: dict[str, int]) -> dict[str, Any]:
    """What batches of new shapes cost, rows that end, and micro-batches of several sizes; in seconds, clocked once."""
    settings, result = bench.settings, dict[str, Any](model=name)
    bench.forget_peak()
    policy, decoding = bench.policy(shape, "bfloat16"), Decoding(settings.length)
    prompts = prompts_of(settings.prompts, settings.prompt_length)

    def once(body: Callable[[], T]) -> tuple[float, T]:
        bench.synchronize()
        began = time.perf_counter()
        found = body()
        bench.synchronize()
        return round(time.perf_counter() - began, 3), found

    def sampled(of: list[Ints]) -> tuple[float, list[tuple[Rollout, ...]]]:
        return once(lambda: builtin_sampler(policy, of, GROUP, decoding, 0))

    def step(part: Any) -> None:
        step_of(policy, prompts, rollouts, part)

    sampled(prompts)  # what is made ready once
    ways = (("", 1, nullcontext()), ("_cuda_graphs", 2, captured_steps(policy)))
    for which, cut, way in ways:
        shorter = [prompt[cut:] for prompt in prompts]
        with way:
            result[f"new_length{which}"] = sampled(shorter)[0]
            result[f"same_length{which}"] = sampled(shorter)[0]
            policy.end_ids = frozenset(range(0, shape["vocab_size"], settings.length))  # two thirds of the rows end
            result[f"rows_end{which}"] = sampled(shorter)[0]
            policy.end_ids = frozenset({shape["vocab_size"]})
    rollouts = [rollout for group in sampled(prompts)[1] for rollout in group]
    everything = np.arange(len(rollouts))
    for tokens in MICROBATCHES:
        policy.config = policy.config.model_copy(update={"tokens_per_microbatch": tokens})
        once(lambda: step(everything))
        result[f"step_in_{tokens}"] = once(lambda: step(everything))[0]
    return result | bench.peak()


def kept(bench: Bench, name: str, shape: dict[str, int], way: str) -> dict[str, Any]:
    """Speed and memory of a model kept in one of :data:`WAYS`."""
    settings = bench.settings
    bench.forget_peak()
    policy = bench.policy(shape, "bfloat16", **WAYS[way])
    prompts, decoding = prompts_of(settings.prompts, settings.prompt_length), Decoding(settings.length)
    groups = builtin_sampler(policy, prompts, GROUP, decoding, 0)
    gap = float(logp_gaps(policy, prompts[:1], groups[:1]).mean())
    if gap > LARGEST_GAP:
        raise CheckError(f"mean log-probability gap {gap}")
    rollouts = [rollout for group in groups for rollout in group]
    part = np.random.default_rng(0).permutation(len(rollouts))[: len(rollouts) // STEPS]
    bench.forget_peak()
    with captured_steps(policy):  # those of other models are left alone
        sampling = bench.seconds(
            lambda: builtin_sampler(policy, prompts, GROUP, decoding, 0), settings.generate_repeats
        )
    update = bench.seconds(lambda: step_of(policy, prompts, rollouts, part), settings.generate_repeats)
    return {
        "model": name,
        "way": way,
        "trained": sum(p.numel() for p in policy.trainable),
        "logp_gap_mean": gap,
        "sampling_tokens_per_second": round(len(rollouts) * settings.length / sampling),
        "update_seconds": round(update, 4),
    } | bench.peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to run all of the code anywhere")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--only", choices=["speed", "shapes", "ways"], help="leave out the rest")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens-per-microbatch", type=int, default=0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--generate-repeats", type=int, default=2, help="also of a round: both take long")
    parser.add_argument("--seconds", type=float, default=480, help="repeats are cut short towards this")
    settings = parser.parse_args()
    if settings.tiny:
        settings.prompts, settings.prompt_length, settings.length = 2, 16, 8
        settings.tokens_per_microbatch = 200
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: nothing was measured (--tiny --device cpu runs the code without one)")
    bench = Bench(settings)
    where = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {vars(settings)}", flush=True)
    limits = bench.limits()
    print(f"limits: {limits[0] / 1e12:.4g} TFLOP/s in bfloat16, {limits[1] / 1e9:.4g} GB/s", flush=True)
    shapes = TINY if settings.tiny else {name: SHAPES[name] for name in settings.models}
    results = [
        bench.tried({"model": name}, partial(measure, bench, name, shape, limits))
        for name, shape in shapes.items()
        if settings.only in (None, "speed")
    ]
    of_shapes = [
        bench.tried({"model": name}, partial(shapes_of, bench, name, shape))
        for name, shape in shapes.items()
        if settings.only in (None, "shapes")
    ]
    here = [way for way in WAYS if bench.device.type == "cuda" or way not in GPU_ONLY]
    ways = [
        bench.tried({"model": name, "way": way}, partial(kept, bench, name, shape, way))
        for way in here
        for name, shape in shapes.items()
        if settings.only in (None, "ways")
    ]
    facts = {"device": where, "tflops": round(limits[0] / 1e12, 4), "gigabytes_per_second": round(limits[1] / 1e9, 2)}
    print(json.dumps({"benchmark": "gpu", **facts, "cases": results, "shapes": of_shapes, "ways": ways}))
    if bench.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()

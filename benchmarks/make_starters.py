"""Make starters: warm up small models, round them to float16, and measure where they start.

    python benchmarks/make_starters.py OUT                         # those that the package ships: about five minutes
    python benchmarks/make_starters.py OUT small@3 large@14 …      # others, of another seed: a recipe names OUT/small-3

A short supervised run on the clock calculator (:mod:`ftis.tasks.clock`) warms a starter up in a mixture of styles: most
completions answer without reasoning, and only some styles earn reward. The starter then solves some of the problems,
so reinforcement learning has something to select.

A starter is written to ``OUT/<name>-<digits of its sha256>``, as in ``src/ftis/starters``, and one with a seed to
``OUT/<name>-<seed>``. It is loaded again, in float32, and answers the demo's validation problems: greedily, and by
sampling at temperature 1. Prints one line a starter: name, seed, steps, fraction right when reasoned, greedy and
sampled accuracy, CPU seconds, directory.

Another CPU or another version of torch rounds a warm-up otherwise and makes another model, which is why the package
ships them. To ship others, replace those in ``src/ftis/starters``, the digests in ``ftis.models.starters.SHIPPED`` and
the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from ftis import supervised_step
from ftis.config import PeerConfig, PromptConfig, RewardConfig, TaskConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.samplers import InPlace
from ftis.models.starters import DIGITS
from ftis.policy import Policy
from ftis.rewards import extract_answer
from ftis.rewards.scoring import load_scorer
from ftis.run.evaluate import Exam
from ftis.sampling import Decoding
from ftis.tasks.clock import clock_held_out, clock_solution
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

TASK = TaskConfig(name="clock", options={"operators": 2}, validation_size=300)
PROMPT = PromptConfig(system_prompt="", template="{question}=")
LENGTH, DRAWS = 40, 8


SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
SYMBOLS = "0123456789+-*=;"
MERGES = tuple((sign, digit) for sign in "+-*=;" for digit in "0123456789")
"""Symbols that are one token together in a merged vocabulary."""

STYLES = {"reasoned": 0.24, "direct": 0.56, "slip": 0.06, "untagged": 0.14}
"""Fraction of warm-up completions in each style: correct reasoning and tags; no reasoning; reasoning with one wrong
line; correct reasoning whose answer lacks its tags."""

OPERATOR_COUNTS = (1, 1, 2, 2, 3, 4)
BATCH_SIZE = 32
RAMP_STEPS = 50
MAX_STEPS = 1500
CHECK_EVERY = 50
CHECK_PROBLEMS = 256
CHECK_OPERATORS = 2
TARGET = 0.55
"""Warm-up stops once this fraction of sampled two-operator completions with reasoning and tags is correct. A fixed
number of steps would not do: the step at which a model grasps the task varies by hundreds with the seed."""


@dataclass(frozen=True)
class Starter:
    """The size, data and seed of a starter."""

    hidden_size: int
    intermediate_size: int
    learning_rate: float
    operators: str
    """Operators are drawn from this string, repeats being weights."""
    seed: int
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    merged: bool = False
    """Whether its vocabulary has :data:`MERGES`."""


STARTERS: dict[str, Starter] = {
    "small": Starter(hidden_size=64, intermediate_size=160, learning_rate=5e-3, operators="+-*", seed=3),
    "small-b": Starter(hidden_size=64, intermediate_size=160, learning_rate=5e-3, operators="+-*", seed=7),
    "large": Starter(hidden_size=96, intermediate_size=256, learning_rate=4e-3, operators="+-*", seed=16),
    "large-b": Starter(hidden_size=96, intermediate_size=256, learning_rate=4e-3, operators="+-*", seed=13),
    "adder": Starter(hidden_size=64, intermediate_size=160, learning_rate=5e-3, operators="++--*", seed=21),
    "multiplier": Starter(hidden_size=64, intermediate_size=160, learning_rate=5e-3, operators="+-****", seed=22),
    "large-multiplier": Starter(hidden_size=96, intermediate_size=256, learning_rate=4e-3, operators="+-****", seed=23),
    "small-merged": Starter(
        hidden_size=64, intermediate_size=160, learning_rate=5e-3, operators="+-*", seed=3, merged=True
    ),
}


def lookup(name: str) -> tuple[str, Starter]:
    """The label and ingredients of ``<name>`` or ``<name>@<seed>``.

    Raises:
        ValueError: no such starter.
    """
    known, _, seed = name.partition("@")
    if known not in STARTERS or not re.fullmatch("|@[0-9]{1,9}", name.removeprefix(known)):
        raise ValueError(f"unknown starter {name!r}: there are {', '.join(STARTERS)}, each also as <name>@<seed>")
    return name.replace("@", "-"), replace(STARTERS[known], seed=int(seed)) if seed else STARTERS[known]


def warm_up(starter: Starter) -> tuple[Policy, int, float]:
    """Train a new model on solved problems until it solves enough of them.

    Returns:
        The model, the optimiser steps taken, and the fraction of :data:`TARGET` that it reached.
    """
    torch.manual_seed(starter.seed)
    tokenizer = make_tokenizer(starter.merged)
    # transformers gives every Qwen2 model Qwen's own splitting of text, which parts each digit from its sign.
    architecture = LlamaConfig if starter.merged else Qwen2Config
    config = architecture(
        vocab_size=len(tokenizer),
        hidden_size=starter.hidden_size,
        intermediate_size=starter.intermediate_size,
        num_hidden_layers=starter.num_hidden_layers,
        num_attention_heads=starter.num_attention_heads,
        num_key_value_heads=starter.num_key_value_heads,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    peer = PeerConfig(
        name="starter",
        model="starter",
        learning_rate=starter.learning_rate,
        adam_beta2=0.98,
        device="cpu",
        dtype="float32",
    )
    policy = Policy(AutoModelForCausalLM.from_config(config), tokenizer, peer)
    rng = np.random.default_rng(starter.seed)
    checks = np.random.default_rng([starter.seed, 1])
    right = 0.0
    for step in range(1, MAX_STEPS + 1):
        ramp, decay = min(1.0, step / RAMP_STEPS), 1 - 0.9 * step / MAX_STEPS
        policy.set_learning_rate(starter.learning_rate * ramp * decay)
        supervised_step(policy, [_example(starter, rng) for _ in range(BATCH_SIZE)])
        if step % CHECK_EVERY == 0:
            right = _right_when_reasoned(policy, starter, checks)
            if right >= TARGET:
                break
    return policy, step, right


def make_tokenizer(merged: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each symbol and each tag. It puts a beginning-of-sequence token in front.

    Args:
        merged: with a token for each pair of :data:`MERGES` too.
    """
    merges = MERGES if merged else ()
    tokens = [*SPECIAL_TOKENS, *TAGS, *SYMBOLS, *(sign + digit for sign, digit in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if merged:
        tokenizer = Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>"))
    else:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    # Not special: rewards read the tags in the decoded text.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def write_completion(question: str, style: str, rng: np.random.Generator) -> str:
    """A warm-up completion of the given style, without the end-of-sequence token."""
    steps, answer = clock_solution(question)
    if style == "direct":
        return f"<think></think><answer>{answer}</answer>"
    if style == "slip":
        steps, answer = _with_slip(steps, int(rng.integers(len(steps))), int(rng.integers(1, 10)))
    reasoning = f"<think>{';'.join(steps)}</think>"
    return f"{reasoning}{answer}" if style == "untagged" else f"{reasoning}<answer>{answer}</answer>"


def _with_slip(steps: tuple[str, ...], at: int, error: int) -> tuple[tuple[str, ...], str]:
    """``steps`` with the result of line ``at`` off by ``error``; later lines compute correctly from there."""
    out: list[str] = []
    value = steps[0][0]
    for i, step in enumerate(steps):
        expression = value + step[1:3]
        _, value = clock_solution(expression)
        if i == at:
            value = str((int(value) + error) % 10)
        out.append(f"{expression}={value}")
    return tuple(out), value


def _problem(starter: Starter, rng: np.random.Generator, count: int) -> str:
    """A problem with ``count`` operators of the starter that is in no validation split."""
    while True:
        question = str(rng.integers(10))
        for _ in range(count):
            question += starter.operators[int(rng.integers(len(starter.operators)))] + str(rng.integers(1, 10))
        if not clock_held_out(question):
            return question


def _example(starter: Starter, rng: np.random.Generator) -> tuple[str, str]:
    question = _problem(starter, rng, int(rng.choice(OPERATOR_COUNTS)))
    style = str(rng.choice(list(STYLES), p=list(STYLES.values())))
    return f"{question}=", write_completion(question, style, rng)


def _right_when_reasoned(policy: Policy, starter: Starter, rng: np.random.Generator) -> float:
    """The fraction of correct answers among sampled completions with reasoning and tags."""
    questions = [_problem(starter, rng, CHECK_OPERATORS) for _ in range(CHECK_PROBLEMS)]
    prompts = [np.array(policy.tokenizer(f"{q}=")["input_ids"], dtype=np.int32) for q in questions]
    groups = builtin_sampler(policy, prompts, 2, Decoding(max_completion_length=40), int(rng.integers(2**31)))
    right = reasoned = 0
    for question, group in zip(questions, groups, strict=True):
        for rollout in group:
            text = policy.detokenize(rollout.completion_ids.tolist())
            answer = extract_answer(text)
            if answer is not None and not text.startswith("<think></think>"):
                reasoned += 1
                right += answer == clock_solution(question)[1]
    return right / max(reasoned, 1)


def load(directory: Path) -> Policy:
    return Policy.load(PeerConfig(name="starter", model=str(directory), device="cpu", dtype="float32"))


def write(made: Path, out: Path, label: str, starter: Starter) -> Path:
    """Round the starter in ``made`` to float16 and write it to ``out`` under its label, and its digest if shipped.

    Raises:
        ValueError: a weight is beyond float16's range.
    """
    policy = load(made)
    policy.model.half()
    beyond = [key for key, weight in policy.model.named_parameters() if not weight.isfinite().all()]
    if beyond:
        raise ValueError(f"{made}: {beyond[0]} holds weights beyond float16's range; ship it in bfloat16")
    partial = out / f".partial-{label}"
    policy.model.save_pretrained(partial)
    make_tokenizer(starter.merged).save_pretrained(partial)  # transformers has read it as Qwen2's own kind
    for file in partial.iterdir():
        file.chmod(0o644)  # transformers writes weights for their owner alone
    digest = hashlib.sha256((partial / "model.safetensors").read_bytes()).hexdigest()
    target = out / (f"{label}-{digest[:DIGITS]}" if label in STARTERS else label)
    if target.exists():
        for file in target.iterdir():
            file.unlink()
        target.rmdir()
    return partial.rename(target)


def start(directory: Path) -> dict[str, float]:
    """Accuracy before training, on the demo's validation problems: greedy, and the mean over samples of each."""
    policy = load(directory)
    task = load_task(TASK)
    score = load_scorer(RewardConfig(), PROMPT, task.answer_kind)
    render = partial(render_prompt, config=PROMPT, tokenizer=policy.tokenizer)
    exam = Exam(policy, InPlace(builtin_sampler), task.validation, render, score, Decoding(LENGTH))
    greedy = exam.greedy().accuracy
    groups = builtin_sampler(policy, list(map(render, task.validation)), DRAWS, Decoding(LENGTH), 0)
    rewards: list[float] = []
    for problem, group in zip(task.validation, groups, strict=True):
        ids = [rollout.completion_ids.tolist() for rollout in group]
        rewards += score(problem, [policy.detokenize(i) for i in ids], ids)
    return {"greedy": round(greedy, 4), "sampled": round(sum(rewards) / len(rewards), 4)}


def make(name: str, out: Path) -> dict[str, Any]:
    """Warm up, round, write and measure one starter; what its line of the table says."""
    label, starter = lookup(name)
    began = time.process_time()
    policy, steps, right = warm_up(starter)
    seconds = time.process_time() - began
    with tempfile.TemporaryDirectory() as warm:
        policy.save_pretrained(Path(warm))
        directory = write(Path(warm), out, label, starter)
    card = {**asdict(starter), "warm_up_steps": steps, "right_when_reasoned": right}
    card |= {"start": start(directory), "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    (directory / "starter.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return card | {"label": label, "directory": directory.name, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME[@SEED]", help="by default those that the package ships")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen.names or STARTERS:
        made = make(name, chosen.out)
        print(
            f"| {made['label']} | {made['seed']} | {made['warm_up_steps']} | {made['right_when_reasoned']:.3f} "
            f"| {made['start']['greedy']:.3f} | {made['start']['sampled']:.3f} | {made['seconds']:.0f} "
            f"| `{made['directory']}` |",
            flush=True,
        )


if __name__ == "__main__":
    main()

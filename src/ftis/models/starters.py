"""Starters: small models that come with the package, for machines without a GPU or a hub.

A short supervised run on the clock calculator (:mod:`ftis.tasks.clock`) warms a starter up in a mixture of styles: most
completions answer without reasoning, and only some styles earn reward. The starter then solves some of the problems,
so reinforcement learning has something to select. ``starter:small`` and ``starter:large`` differ in size;
``starter:small-b`` and ``starter:large-b`` differ from those in the seed of their warm-up; ``starter:adder`` and
``starter:multiplier`` have the size of ``small`` and other mixtures of operators; ``starter:large-multiplier`` has the
size of ``large``. ``starter:small-merged`` is a Llama and has another tokenizer, with a token for each sign and the
digit behind it.

A named starter is shipped: the package holds its weights, rounded to float16, in ``ftis/starters``, so it is the same
model on every machine. Its directory's name ends in the first digits of the weights' sha256.

``starter:small@7`` is a variant, ``small`` with another seed. It is warmed up where it is first used and kept under
``$FTIS_HOME/starters`` (default ``~/.cache/ftis``). It is deterministic on one machine only, since another CPU rounds
differently: its directory's name ends in a digest of everything that the variant depends on. ``small`` with its own
seed is a variant too, and is not ``small``.

All are ordinary Hugging Face directories, of Qwen2's architecture where nothing else is said.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers import __version__ as transformers_version

from ftis.config import PeerConfig
from ftis.engines.builtin import builtin_sampler
from ftis.engines.machine import with_threads
from ftis.policy import ModelError, Policy
from ftis.records.files import partial_directory, write_json
from ftis.rewards import extract_answer
from ftis.sampling import Decoding
from ftis.tasks.clock import clock_held_out, clock_solution

PREFIX = "starter:"
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

SHIPPED = {
    "small": "adebb870b35297452c453e60bca7773ee8f4ffa504e15344d5805ff527b8a006",
    "small-b": "7d1e7daa00c1c9a245e5a4de42dec1629319dd89880315c25e72d19cfc677312",
    "large": "70d85dccd802f5df82ce3b031318f51d7493c566e058a28951a9f459381acd68",
    "large-b": "26544a27575ab90203c58bf3053a715747cd8f3389e665986a812bb7655fa02c",
    "adder": "29342f3c90684241975212515b9109305c31e276833ce915fc575451a47955a5",
    "multiplier": "915aa7412522eda5a7b1c61c67d2e4c63d2fc8d8e381a67a81e48726892fc2ef",
    "large-multiplier": "fcfe6fb45f3043f8c4353b0a7c7079a17ccf1c53cc5e717c59761bbd32a1a068",
    "small-merged": "42951880e6cec646c2a2277b6e7b9f6f49f7e2cecfaba58693e954c820e9e59c",
}
"""sha256 of the weights of each named starter, ``model.safetensors``. ``benchmarks/make_starters.py`` makes them from
:data:`STARTERS`."""

DIGITS = 12
"""Of a digest, in the name of a directory."""

CODE = (
    "models/starters.py",
    "policy.py",
    "sampling.py",
    *(f"engines/{name}.py" for name in ("devices", "optimizers", "hub", "texts", "models", "windows", "lines", "head")),
    *(
        f"engines/{name}.py"
        for name in (
            "linear",
            "decoder",
            "rows",
            "slots",
            "stops",
            "samplers",
            "generate",
            "builtin",
            "agreement",
            "lengths",
        )
    ),
)
"""The code that computes a warm-up's steps and samples: a change of it can change the last bits."""

Report = Callable[[str, int, int], None]
"""(starter, optimiser steps taken, most steps): the progress of a warm-up."""


def is_starter(model: str) -> bool:
    return model.startswith(PREFIX)


def lookup(model: str) -> tuple[str, Starter]:
    """The label and ingredients of ``starter:<name>`` or ``starter:<name>@<seed>``.

    Raises:
        ModelError: no such starter.
    """
    label = model.removeprefix(PREFIX)
    name, _, seed = label.partition("@")
    if name not in STARTERS or not re.fullmatch("|@[0-9]{1,9}", label.removeprefix(name)):
        raise ModelError(f"unknown starter {label!r}: there are {', '.join(STARTERS)}, each also as <name>@<seed>")
    return label, replace(STARTERS[name], seed=int(seed)) if seed else STARTERS[name]


def listed() -> list[str]:
    """A line for each starter: its size and its place."""
    return [
        f"{PREFIX}{name}: {starter.num_hidden_layers} layers of {starter.hidden_size}, {starter.operators}; "
        f"here: {path_of(PREFIX + name)}"
        for name, starter in STARTERS.items()
    ]


def home() -> Path:
    return Path(os.environ.get("FTIS_HOME") or Path.home() / ".cache" / "ftis") / "starters"


def path_of(model: str) -> Path:
    """The directory of a starter, whether a variant has been made or not."""
    label, starter = lookup(model)
    if label in SHIPPED:
        return Path(__file__).parents[1] / "starters" / f"{label}-{SHIPPED[label][:DIGITS]}"
    ingredients = json.dumps(
        {
            "starter": asdict(starter),
            "code": [(Path(__file__).parents[1] / file).read_text(encoding="utf-8") for file in CODE],
            "task": [inspect.getsource(function) for function in (clock_held_out, clock_solution)],
            "torch": torch.__version__,
            "transformers": transformers_version,
            "numpy": np.__version__,
            "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        },
        sort_keys=True,
    )
    return home() / f"{label.replace('@', '-')}-{hashlib.sha256(ingredients.encode()).hexdigest()[:DIGITS]}"


def make(model: str, report: Report = lambda name, step, of: None) -> Path:
    """The directory of a starter. A variant is made first if it does not exist yet.

    Raises:
        ModelError: no such starter, or the weights of a shipped one are not those that this version ships.
    """
    target = path_of(model)
    label, starter = lookup(model)
    if label in SHIPPED:
        _check_shipped(target, SHIPPED[label])
        return target
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with partial_directory(target.parent) as partial:
        with with_threads(1):  # fastest for small models
            policy, steps, right = warm_up(starter, lambda step: report(label, step, MAX_STEPS))
        policy.save_pretrained(partial)
        write_json(partial / "starter.json", {**asdict(starter), "warm_up_steps": steps, "right_when_reasoned": right})
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            if not (target / "config.json").exists():  # otherwise another process has just made the same starter
                raise
    return target


def _check_shipped(directory: Path, digest: str) -> None:
    weights = directory / "model.safetensors"
    if not weights.exists():
        raise ModelError(f"{weights} is missing: it comes with ftis; install ftis again")
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != digest:
        raise ModelError(f"{weights} has sha256 {found[:DIGITS]}…, not {digest[:DIGITS]}…: install ftis again")


def warm_up(starter: Starter, report: Callable[[int], None]) -> tuple[Policy, int, float]:
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
            report(step)
            if right >= TARGET:
                break
    else:
        step = MAX_STEPS
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


def supervised_step(policy: Policy, examples: Sequence[tuple[str, str]]) -> None:
    """Take one optimiser step on (prompt, completion) texts: the loss is the mean of −log π over completion tokens."""
    prompts = [np.array(policy.tokenizer(p)["input_ids"], dtype=np.int32) for p, _ in examples]
    completions = [
        np.array([*policy.tokenizer(c, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id], np.int32)
        for _, c in examples
    ]
    tokens = sum(len(c) for c in completions)
    policy.step(prompts, completions, 1.0, lambda logp, mask, rows: -torch.where(mask, logp, 0.0).sum() / tokens)


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

"""Warm four small models up on a data set of reasoning-gym, then see what each gains from learning with the others.

This is for machines that cannot reach the Hub. The models are new, of Qwen2's architecture: two sizes, two seeds each.
They copy worked solutions in several styles, and only one style earns reward. Then they train on the data set together,
each sampling a quarter. The script compares that with training alone on the quarter, on as much that is spread over
more prompts, and on everything.

    python examples/gym_starters.py spell_backward --out runs/gym               # two CPU cores, half an hour
    python examples/gym_starters.py --headroom --out runs/gym                   # what each data set leaves to learn
    python examples/gym_starters.py gsm_symbolic --scale gpu --out runs/gym     # 51M and 148M parameters, a GPU
    python examples/gym_starters.py chain_sum --scale tiny --out runs/tiny      # does it run at all?

It writes a recipe for all commands to OUT/<data set>.toml. python -m research.rates fits each arm's learning rate.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import ftis
from ftis import PeerConfig, Policy, Recipe, supervised_step
from ftis.engines.samplers import open_sampler
from ftis.prompts import Task
from ftis.rewards import extract_answer
from ftis.rewards.scoring import load_scorer
from ftis.rollouts import Prompt
from ftis.run.evaluate import Exam
from ftis.sampling import Decoding
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
STYLES = {"reasoned": 0.3, "direct": 0.5, "untagged": 0.2}
TARGET = 0.55
"""Warm-up stops once this fraction of sampled completions with reasoning and tags is right."""
CHECK_EVERY, CHECK_PROBLEMS = 100, 128
HEADROOM_PROBLEMS, HEADROOM_SAMPLES = 100, 12
SHIFTS = 10
"""Of how many other problems the samples are tried, to see what guessing solves."""
FAR = 20_000_000
"""Added to the seed of warm-up problems, so that they are none of the task's."""

Solve = Callable[[str, str, Mapping[str, Any]], str]
"""(question, answer, metadata) -> the reasoning that a worked solution shows."""


def running_sum(question: str, answer: str, metadata: Mapping[str, Any]) -> str:
    """``8 + 0 - 7`` -> ``8+0=8;8-7=1``."""
    first, *rest = re.findall(r"[+-]?\d+", metadata["expression"].replace(" ", ""))
    total, steps = int(first), []
    for term in rest:
        steps.append(f"{total}{term}={total + int(term)}")
        total += int(term)
    return ";".join(steps)


def spelled(question: str, answer: str, metadata: Mapping[str, Any]) -> str:
    """``sun`` -> ``s1u2n3``."""
    return "".join(f"{letter}{place}" for place, letter in enumerate(metadata["word"], 1))


def counted(question: str, answer: str, metadata: Mapping[str, Any]) -> str:
    """The letter e in ``we see`` -> ``we:1;see:3``, the count so far after each word."""
    count, steps = 0, []
    for word in metadata["span"]:
        count += word.lower().count(metadata["target_letter"])
        steps.append(f"{word}:{count}")
    return ";".join(steps)


def isolated(question: str, answer: str, metadata: Mapping[str, Any]) -> str:
    """``8*t - 9 = 23`` -> ``8*t=32``."""
    left, right = metadata["equation"].split(" = ")
    terms = re.findall(r"[+-]?[\w*]+", left.replace(" ", ""))
    (unknown,) = [term for term in terms if metadata["variable"] in term]
    return f"{unknown.removeprefix('+')}={int(right) - sum(int(term) for term in terms if term != unknown)}"


def told(question: str, answer: str, metadata: Mapping[str, Any]) -> str:
    """The data set's own worked solution."""
    return str(metadata["answer_cot"]).partition("\n####")[0]


@dataclass(frozen=True)
class Problems:
    """A data set of reasoning-gym, and how its problems are solved.

    Attributes:
        options: the data set's settings.
        rate_over: divides a size's learning rate: of 1, 2, 4, 8 and 16 the one that served training alone best, on
            problems that the comparison does not report.
        tokens: the longest completion.
    """

    solve: Solve
    options: Mapping[str, Any]
    rate_over: int = 1
    tokens: int = 64


DATASETS: dict[str, Problems] = {
    "chain_sum": Problems(running_sum, {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}, rate_over=4),
    "spell_backward": Problems(spelled, {"min_word_len": 3, "max_word_len": 7}, rate_over=4),
    "letter_counting": Problems(counted, {"min_words": 2, "max_words": 4}),
    "simple_equations": Problems(
        isolated, {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9}, rate_over=16
    ),
    "gsm_symbolic": Problems(told, {}, tokens=256),
}


@dataclass(frozen=True)
class Size:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    warm_up_rate: float
    learning_rate: float


@dataclass(frozen=True)
class Scale:
    """Attributes: ``vocabulary`` counts tokens, the 256 bytes among them."""

    sizes: Mapping[str, Size]
    vocabulary: int
    examples: int
    batch: int
    steps: int
    rounds: int
    prompts_per_peer: int = 6
    num_generations: int = 12
    train_size: int = 2000
    validation_size: int = 200
    eval_every: int = 5


SCALES = {
    "cpu": Scale(
        sizes={
            "small": Size(64, 160, 2, 4, 2, 5e-3, 1.2e-3),  # 104,000 parameters
            "large": Size(96, 256, 2, 4, 2, 4e-3, 1.2e-3),  # 229,000
        },
        vocabulary=263,
        examples=20_000,
        batch=32,
        steps=1500,
        rounds=40,
    ),
    "gpu": Scale(
        sizes={
            "small": Size(512, 2048, 12, 8, 4, 8e-4, 3e-5),  # 51M parameters
            "large": Size(768, 3072, 16, 12, 6, 5e-4, 2e-5),  # 148M
        },
        vocabulary=8192,
        examples=60_000,
        batch=96,
        steps=3000,
        rounds=60,
    ),
    "tiny": Scale(
        sizes={"small": Size(32, 64, 1, 2, 1, 1e-3, 1e-3), "large": Size(48, 96, 1, 2, 1, 1e-3, 1e-3)},
        vocabulary=263,
        examples=64,
        batch=4,
        steps=3,
        rounds=1,
        prompts_per_peer=1,
        num_generations=8,
        train_size=100,
        validation_size=8,
    ),
}
SEEDS = {"": 0, "-b": 1}
"""What a model's name ends in, and the seed of its warm-up."""


def recipe_of(dataset: str, scale: Scale, out: Path) -> Recipe:
    """The comparison, as a file in ``out`` that the commands of ftis read too."""
    peers = len(scale.sizes) * len(SEEDS)
    prompts = peers * peers * scale.prompts_per_peer
    spread = f"training.prompts_per_round = {prompts}, sampling.num_generations = {scale.num_generations // peers}"
    text = f"""# reasoning-gym's {dataset}: four models that examples/gym_starters.py has warmed up.
name = "{dataset}"
output_dir = "{out}"

[experiment]
title = "What joining is worth on {dataset}"
question = "What does each of four models gain from the others' completions at the sampling it does anyway?"
baselines = ["alone-spread", "alone-reuse", "imitation", "alone"]

[task]
name = "reasoning_gym:{dataset}"
options = {{ {", ".join(f"{key} = {value}" for key, value in DATASETS[dataset].options.items())} }}
train_size = {scale.train_size}
validation_size = {scale.validation_size}

[prompt]
system_prompt = ""
chat_template = "never"

[reward]
answer = "exact"                # the warm-up shows one spelling

[sampling]
num_generations = {scale.num_generations}
max_completion_length = {DATASETS[dataset].tokens}

[training]
rounds = {scale.rounds}
prompts_per_round = {peers * scale.prompts_per_peer}
steps_per_generation = 4
eval_every = {scale.eval_every}

[objective]
name = "F-TIS"
kl_estimator = "k3"
kl_threshold = 0.5

[[arms]]
name = "alone-spread"           # as much sampling as in the swarm, over all of a round's prompts
collaborate = false
budget = "generated"
set = {{ {spread} }}

[[arms]]
name = "alone-reuse"            # alone-spread that learns from its rollouts twice
collaborate = false
budget = "generated"
set = {{ {spread}, training.num_iterations = 2 }}

[[arms]]
name = "imitation"              # own GRPO as in alone-spread, and supervised learning of others' successes
set = {{ {spread}, objective.name = "imitation" }}

[[arms]]
name = "F-TIS"

[[arms]]
name = "F-TIS-horizontal"
set = {{ training.mode = "horizontal" }}

[[arms]]
name = "F-TIS-lifted-horizontal"
set = {{ training.mode = "horizontal", objective.name = "F-TIS-lifted" }}

[[arms]]
name = "alone"                  # four times the sampling
collaborate = false
"""
    for name, size in scale.sizes.items():
        for suffix in SEEDS:
            text += f"""
[[peers]]
name = "{name}{suffix}"
model = "{model_directory(out, dataset, name, suffix)}"
learning_rate = {size.learning_rate / DATASETS[dataset].rate_over}
lr_scheduler_type = "linear"
adam_beta2 = 0.95
"""
    path = out / f"{dataset}.toml"
    path.write_text(text, encoding="utf-8")
    return ftis.load(path)


def model_directory(out: Path, dataset: str, name: str, suffix: str) -> Path:
    return out / "models" / dataset / f"{name}{suffix}"


def worked_problems(dataset: str, count: int, unseen: set[str]) -> list[tuple[str, str, str]]:
    """(question, reasoning, answer) of generated problems, none of which is in ``unseen``."""
    problems, solve = DATASETS[dataset], DATASETS[dataset].solve
    entries = reasoning_gym.create_dataset(dataset, size=count, seed=FAR, **problems.options)
    found = [(e["question"], solve(e["question"], e["answer"], e["metadata"]), e["answer"]) for e in entries]
    return [problem for problem in found if problem[0] not in unseen]


def completion(reasoning: str, answer: str, style: str) -> str:
    if style == "direct":
        return f"<think></think><answer>{answer}</answer>"
    reasoned = f"<think>{reasoning}</think>"
    return f"{reasoned}{answer}" if style == "untagged" else f"{reasoned}<answer>{answer}</answer>"


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token=None
    )


def new_policy(name: str, size: Size, tokenizer: PreTrainedTokenizerFast, seed: int) -> Policy:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        max_position_embeddings=1024,
        initializer_range=0.06 if size.hidden_size < 128 else 0.02,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    peer = PeerConfig(name=name, model=name, learning_rate=size.warm_up_rate, adam_beta2=0.98)
    return Policy(Qwen2ForCausalLM(config), tokenizer, peer)


def right_when_reasoned(policy: Policy, problems: Sequence[tuple[str, str, str]], tokens: int, seed: int) -> float:
    """The fraction of right answers among sampled completions with reasoning and tags."""
    prompts = [np.array(policy.tokenizer(question)["input_ids"], np.int32) for question, _, _ in problems]
    sampler = open_sampler("auto", policy)
    groups = sampler(policy, prompts, 2, Decoding(max_completion_length=tokens), seed, 0)
    right = reasoned = 0
    for (_, _, answer), group in zip(problems, groups, strict=True):
        for rollout in group:
            text = policy.detokenize(rollout.completion_ids.tolist())
            given = extract_answer(text)
            if given is not None and not text.startswith("<think></think>"):
                reasoned += 1
                right += given == answer
    return right / max(reasoned, 1)


def warm_up(dataset: str, name: str, suffix: str, scale: Scale, out: Path, console: Console) -> None:
    """Train one model on worked problems until it is right often enough, and save it as a Hugging Face directory."""
    recipe, size, seed = recipe_of(dataset, scale, out), scale.sizes[name], SEEDS[suffix]
    task = load_task(recipe.task)
    problems = worked_problems(dataset, scale.examples, {prompt.question for prompt in (*task.train, *task.validation)})
    tokenizer = make_tokenizer([f"{question} {reasoning}" for question, reasoning, _ in problems], scale.vocabulary)
    policy = new_policy(f"{name}{suffix}", size, tokenizer, seed)
    rng, began, right = np.random.default_rng(seed), time.monotonic(), 0.0
    for step in range(1, scale.steps + 1):
        ramp, decay = min(1.0, step / 50), 1 - 0.9 * step / scale.steps
        policy.set_learning_rate(size.warm_up_rate * ramp * decay)
        chosen = [problems[i] for i in rng.integers(len(problems), size=scale.batch)]
        styles = rng.choice(list(STYLES), p=list(STYLES.values()), size=scale.batch)
        examples = [(q, completion(r, a, str(style))) for (q, r, a), style in zip(chosen, styles, strict=True)]
        supervised_step(policy, examples)
        if step % CHECK_EVERY == 0 or step == scale.steps:
            looked_at = [problems[i] for i in rng.integers(len(problems), size=CHECK_PROBLEMS)]
            right = right_when_reasoned(policy, looked_at, DATASETS[dataset].tokens, step)
            if right >= TARGET:
                break
    parameters = f"{policy.n_parameters:,} parameters on {policy.device}"
    seconds = f"{time.monotonic() - began:.0f} s"
    console.print(f"{dataset}, {name}{suffix}: {parameters}, {step} steps, {right:.2f} right when reasoned, {seconds}")
    target = model_directory(out, dataset, name, suffix)
    target.mkdir(parents=True, exist_ok=True)
    policy.save_pretrained(target)


def warm_up_all(dataset: str, scale: Scale, out: Path, console: Console) -> None:
    for name in scale.sizes:
        for suffix in SEEDS:
            if not (model_directory(out, dataset, name, suffix) / "config.json").exists():
                warm_up(dataset, name, suffix, scale, out, console)


def print_headroom(dataset: str, scale: Scale, out: Path, console: Console) -> None:
    """What each model can be taught: greedy and sampled accuracy, and problems solved in one of 12 samples.

    Reinforcement learning teaches what a model samples now and then, so what there is to learn is the distance from
    the mean to the best of 12. Where answers are few, guessing solves one of 12 too. The samples for another problem
    show how often, and what they solve does not count. Measured on training problems, before any arm has run.
    """
    recipe = recipe_of(dataset, scale, out)
    task: Task = load_task(recipe.task)
    problems = task.train[:HEADROOM_PROBLEMS]
    score = load_scorer(recipe.reward, recipe.prompt, task.answer_kind)
    decoding = Decoding(max_completion_length=recipe.sampling.max_completion_length)
    left_of_each = []
    for peer in recipe.peers:
        policy = Policy.load(peer)
        render = partial(render_prompt, config=recipe.prompt, tokenizer=policy.tokenizer)
        exam = Exam(policy, open_sampler("auto", policy), problems, render, score, decoding)
        greedy, drawn = exam.greedy().accuracy, exam.sampled(HEADROOM_SAMPLES)
        mean, best = drawn.mean_reward, drawn.pass_at(HEADROOM_SAMPLES)
        guessed = solved_by_guessing(problems, drawn.completions, score)
        left_of_each.append(best - max(mean, guessed))
        console.print(
            f"{dataset}, {peer.name}: greedy {greedy:.2f}, sampled {mean:.2f}, best of 12 {best:.2f}, "
            f"by guessing {guessed:.2f}, left to learn {left_of_each[-1]:.2f}"
        )
    console.print(f"{dataset}: left to learn {sum(left_of_each) / len(left_of_each):.3f} on the mean")


def solved_by_guessing(
    problems: Sequence[Prompt], completions: Sequence[Sequence[str]], score: Callable[..., Sequence[float]]
) -> float:
    """The fraction of problems that one of another problem's samples solves, on the mean over :data:`SHIFTS` others."""
    solved = [
        max(score(problem, completions[other], [[]] * len(completions[other]))) >= 1
        for i, problem in enumerate(problems)
        for other in ((i + shift) % len(problems) for shift in range(1, SHIFTS + 1))
    ]
    return sum(solved) / len(solved)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset", nargs="*", help=f"of {', '.join(DATASETS)}; by default all but the last")
    parser.add_argument("--out", type=Path, required=True, help="where models, recipes, runs and reports go")
    parser.add_argument("--scale", choices=list(SCALES), default="cpu")
    parser.add_argument("--headroom", action="store_true", help="only warm up, and measure what is left to learn")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="arms trained at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.dataset) - set(DATASETS):
        parser.error(f"no data set {sorted(unknown)[0]!r} here: choose of {', '.join(DATASETS)}")
    scale, console, out = SCALES[arguments.scale], Console(soft_wrap=True), arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for dataset in arguments.dataset or list(DATASETS)[:-1]:
        warm_up_all(dataset, scale, out, console)
        if arguments.headroom:
            print_headroom(dataset, scale, out, console)
            continue
        recipe, display = recipe_of(dataset, scale, out), ftis.Display(console)
        with display.live():
            finished = ftis.run_experiment(recipe, range(arguments.seeds), arguments.jobs, display)
        if not finished:
            return
        directory = ftis.experiment_directory(recipe)
        ftis.print_comparison(ftis.compare(directory), console)
        console.print(f"report: {ftis.write_page(directory)}")


if __name__ == "__main__":
    main()

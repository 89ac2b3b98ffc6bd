"""Make a 50M- and a 150M-parameter model on this machine's GPU, then compare alone, NoIS and F-TIS over seeds.

For a GPU machine that cannot reach the Hub: two Qwen2 models with fresh weights are warmed up on word problems of
reasoning-gym's ``gsm_symbolic``, whose worked solutions they copy, and on its ``chain_sum``. As with the built-in
starters, only some styles of the warm-up earn reward. Then the models train together on ``gsm_symbolic``.

    python examples/word_problem_starters.py --out runs/word-problems            # a GPU, within an hour
    python examples/word_problem_starters.py --out runs/tiny --scale tiny        # does it run at all? minutes on a CPU
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import reasoning_gym
import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import ftis
from ftis import PeerConfig, Policy, Recipe, RewardConfig, supervised_step
from ftis.loop.evaluate import evaluate
from ftis.prompts import render_prompt
from ftis.rewards.scoring import load_scorer
from ftis.sampling import open_sampler
from ftis.tasks.problems import load_task

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
STYLES = {"reasoned": 0.35, "direct": 0.45, "untagged": 0.2}
QUESTION_TAIL = " Give the result as your final answer. Do not include units."

RECIPE = """
name = "word-problems"

[experiment]
title = "Word problems: 50M with 150M parameters"
question = "Does either of two models of different size gain from learning together?"

[task]
name = "reasoning_gym:gsm_symbolic"
train_size = 2000
validation_size = 200

[[ood]]
name = "reasoning_gym:chain_sum"
validation_size = 200

[prompt]
system_prompt = ""
chat_template = "never"

[sampling]
num_generations = 12
max_completion_length = 256

[training]
rounds = {rounds}
prompts_per_round = 24
steps_per_generation = 4
eval_every = 10
save_every = 20
record_rollouts = false

[objective]
name = "F-TIS"
kl_threshold = 20.0             # sum of k1; completions have about 80 tokens

[[peers]]
name = "small"
model = "{small}"
learning_rate = 3e-5
lr_scheduler_type = "linear"
adam_beta2 = 0.95

[[peers]]
name = "large"
model = "{large}"
learning_rate = 2e-5
lr_scheduler_type = "linear"
adam_beta2 = 0.95

[[arms]]
name = "alone"
collaborate = false

[[arms]]
name = "NoIS"
set = {{ objective.name = "NoIS" }}

[[arms]]
name = "F-TIS"
"""


@dataclass(frozen=True)
class Size:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    learning_rate: float


@dataclass(frozen=True)
class Scale:
    small: Size
    large: Size
    vocabulary: int
    examples: int
    batch: int
    steps: int
    rounds: int


SCALES = {
    "gpu": Scale(
        small=Size(512, 2048, 12, 8, 4, 8e-4),  # 51M parameters
        large=Size(768, 3072, 16, 12, 6, 5e-4),  # 148M
        vocabulary=8192,
        examples=60_000,
        batch=96,
        steps=3000,
        rounds=60,
    ),
    "tiny": Scale(
        small=Size(32, 64, 1, 2, 1, 1e-3),
        large=Size(48, 96, 1, 2, 1, 1e-3),
        vocabulary=600,
        examples=64,
        batch=4,
        steps=3,
        rounds=1,
    ),
}
TARGET = 0.3
"""Warm-up stops once this fraction of held-out word problems is answered rightly: reinforcement needs room above."""


def worked_problems(count: int, unseen: set[str]) -> list[tuple[str, str, str]]:
    """(question, worked solution, answer) of generated problems, none of which is in ``unseen``."""
    found = []
    for name, fraction in (("gsm_symbolic", 0.8), ("chain_sum", 0.2)):
        for entry in reasoning_gym.create_dataset(name, size=int(count * fraction), seed=20_000):
            if entry["question"] in unseen:
                continue
            solution = entry["metadata"].get("answer_cot", entry["question"] + " " + entry["answer"])
            found.append((entry["question"], solution.partition("\n####")[0], entry["answer"]))
    return found


def completion(solution: str, answer: str, style: str) -> str:
    if style == "direct":
        return f"<think></think><answer>{answer}</answer>"
    reasoned = f"<think>{solution}</think>"
    return f"{reasoned}{answer}" if style == "untagged" else f"{reasoned}<answer>{answer}</answer>"


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
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


def warm_up(name: str, size: Size, scale: Scale, target: Path, console: Console) -> None:
    """Train one model on worked problems and save it as a Hugging Face directory."""
    recipe = load_recipe(target.parent, scale)
    task = load_task(recipe.task)
    unseen = {prompt.question for of in (task, *map(load_task, recipe.ood)) for prompt in of.validation}
    problems = worked_problems(scale.examples, unseen)
    tokenizer = make_tokenizer([f"{q} {s}" for q, s, _ in problems], scale.vocabulary)
    torch.manual_seed(len(name))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_hidden_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    peer = PeerConfig(name=name, model=name, learning_rate=size.learning_rate, adam_beta2=0.98)
    policy = Policy(Qwen2ForCausalLM(config), tokenizer, peer)
    parameters = sum(p.numel() for p in policy.model.parameters())
    console.print(f"{name}: {parameters:,} parameters on {policy.device}, {len(problems):,} worked problems")
    rng, began, accuracy = np.random.default_rng(len(name)), time.monotonic(), 0.0
    score = load_scorer(RewardConfig(), recipe.prompt, task.answer_kind)
    looked_at = task.train[:100]  # generated, as all training problems are; validation stays untouched
    for step in range(1, scale.steps + 1):
        ramp, decay = min(1.0, step / 100), 1 - 0.9 * step / scale.steps
        policy.set_learning_rate(size.learning_rate * ramp * decay)
        chosen = [problems[i] for i in rng.integers(len(problems), size=scale.batch)]
        styles = rng.choice(list(STYLES), p=list(STYLES.values()), size=scale.batch)
        examples = [(q, completion(s, a, str(style))) for (q, s, a), style in zip(chosen, styles, strict=True)]
        supervised_step(policy, examples)
        if step % 250 == 0 or step == scale.steps:
            rendered = [render_prompt(p, recipe.prompt, tokenizer) for p in looked_at]
            length = recipe.sampling.max_completion_length
            accuracy = evaluate(policy, open_sampler("auto", policy), looked_at, rendered, score, length).accuracy
            console.print(f"{name}: step {step}, greedy pass@1 {accuracy:.2f}, {time.monotonic() - began:.0f} s")
            if accuracy >= TARGET:
                break
    target.mkdir(parents=True, exist_ok=True)
    policy.save_pretrained(target)


def load_recipe(out: Path, scale: Scale) -> Recipe:
    path = out / "word_problems.toml"
    path.write_text(RECIPE.format(rounds=scale.rounds, small=out / "small", large=out / "large"), encoding="utf-8")
    overrides = [f"output_dir={out}"]
    if scale.rounds == 1:
        overrides += ["task.train_size=100", "task.validation_size=8", "ood.0.validation_size=8"]
        overrides += ["sampling.num_generations=2", "sampling.max_completion_length=16"]
    return ftis.load(path, overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where models, runs and the report go")
    parser.add_argument("--scale", choices=list(SCALES), default="gpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3, help="arms trained at a time on the one device")
    arguments = parser.parse_args()
    scale, console = SCALES[arguments.scale], Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, size in (("small", scale.small), ("large", scale.large)):
        if not (arguments.out / name / "config.json").exists():
            warm_up(name, size, scale, arguments.out / name, console)
    recipe = load_recipe(arguments.out, scale)
    display = ftis.Display(console)
    with display.live():
        finished = ftis.run_experiment(recipe, range(arguments.seeds), arguments.jobs, display)
    if finished:
        directory = ftis.experiment_directory(recipe)
        ftis.print_comparison(ftis.compare(directory), console)
        console.print(f"report: {ftis.write_page(directory)}")


if __name__ == "__main__":
    main()

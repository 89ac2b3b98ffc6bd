"""Make three models of one small language model, apart in expertise and in size, for recipes/smollm2_gsm8k.toml.

``money`` and ``amounts`` copy GSM8K's worked solutions of problems about money, and of as many others. ``pruned`` keeps
20 of 30 layers, those that change their input most (Men et al., arXiv 2403.03853), and is healed on all solutions.

    ftis models smollm2-135m
    python examples/gsm8k_specialists.py --out models/gsm8k                  # a GPU; GSM8K comes from the Hub
    python examples/gsm8k_specialists.py --out models/gsm8k --path GSM8K     # a directory with train.jsonl, test.jsonl
    ftis preflight recipes/smollm2_gsm8k.toml --arm F-TIS
    ftis train recipes/smollm2_gsm8k.toml --seeds 3
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn import ModuleList
from torch.nn.functional import cosine_similarity

import ftis
from ftis import PeerConfig, Policy, supervised_step
from ftis.rollouts import Prompt
from ftis.tasks.problems import load_task

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_gsm8k.toml"
MONEY = re.compile(r"\$|\b(?:dollars?|cents?|costs?|pays?|paid|price|prices|buys?|bought|sells?|sold|earns?|earned)\b")
KEPT = 2 / 3
"""Of the layers, in the pruned model."""
LOOKED_AT = 32
"""Problems on which the layers are compared, and as many that no model copies, on which the loss is told."""
NOTE = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator notes: ``48/2=<<48/2=24>>24``."""


def worked(problem: Prompt) -> tuple[str, str]:
    """The prompt of recipes/smollm2_gsm8k.toml, and a solution that ends in the answer."""
    solution = NOTE.sub("", problem.columns["solution"]).rpartition("####")[0].strip()
    return f"Question: {problem.question}\nAnswer:", f" {solution}\nThe answer is {problem.answer}."


def parts_of(problems: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """The problems that each model copies. The first two parts have no problem in common and are of one size."""
    money = [p for p in problems if MONEY.search(p.question.lower())]
    amounts = [p for p in problems if not MONEY.search(p.question.lower())]
    size = min(len(money), len(amounts))
    return {"money": money[:size], "amounts": amounts[:size], "pruned": list(problems)}


@torch.no_grad()
def prune(policy: Policy, problems: Sequence[Prompt]) -> list[int]:
    """Drop the layers that change their input least. Returns those kept.

    A layer's influence is 1 less the mean cosine between what goes in and what comes out, over tokens.
    """
    layers = policy.model.model.layers
    influence = np.zeros(len(layers))
    for question, solution in map(worked, problems[:LOOKED_AT]):
        ids = policy.tokenizer(question + solution, return_tensors="pt")["input_ids"].to(policy.device)
        states = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        for i, (before, after) in enumerate(pairwise(states)):
            influence[i] += 1 - float(cosine_similarity(before.float(), after.float(), dim=-1).mean())
    kept = sorted(np.argsort(-influence)[: round(KEPT * len(layers))].tolist())
    policy.model.model.layers = ModuleList([layers[i] for i in kept])
    policy.model.config.num_hidden_layers = len(kept)
    if getattr(policy.model.config, "layer_types", None):
        policy.model.config.layer_types = [policy.model.config.layer_types[i] for i in kept]
    return kept


def loss_of(policy: Policy, problems: Sequence[Prompt]) -> float:
    """The mean of −log π over the tokens of worked solutions, in nats."""
    encode, texts = policy.tokenizer, list(map(worked, problems))
    prompts = [np.array(encode(question)["input_ids"], np.int32) for question, _ in texts]
    solutions = [np.array(encode(text, add_special_tokens=False)["input_ids"], np.int32) for _, text in texts]
    return -float(np.concatenate(policy.logps(prompts, solutions, 1.0)).mean())


def warm_up(policy: Policy, problems: Sequence[Prompt], settings: argparse.Namespace, console: Console) -> None:
    """Copy worked solutions for some epochs, or for so many steps, at a rate that falls linearly."""
    rng, began = np.random.default_rng(0), time.monotonic()
    steps = settings.steps or round(settings.epochs * len(problems) / settings.batch)
    order = np.concatenate([rng.permutation(len(problems)) for _ in range(1 + steps * settings.batch // len(problems))])
    for step in range(steps):
        policy.set_learning_rate(settings.learning_rate * (1 - step / steps))
        chosen = order[step * settings.batch : (step + 1) * settings.batch]
        supervised_step(policy, [worked(problems[i]) for i in chosen])
        if step % 20 == 0:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1)
            console.print(f"{policy.config.name}: step {step + 1} of {steps}, {left:.0f} s left", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--out", type=Path, required=True, help="where the three models go")
    parser.add_argument("--path", help="a directory with GSM8K; by default the Hub")
    parser.add_argument("--only", choices=["money", "amounts", "pruned"], help="make just this one")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--steps", type=int, help="in place of --epochs")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    settings, console = parser.parse_args(), Console(soft_wrap=True)
    whole = {"path": settings.path, "validation_size": None}
    task = load_task(ftis.load(RECIPE).task.model_copy(update=whole))
    held_back, copied = task.train[:LOOKED_AT], task.train[LOOKED_AT:]

    def tell_loss(policy: Policy, what: str) -> None:
        loss = f"{loss_of(policy, held_back):.2f} nats a token on {len(held_back)} problems held back"
        console.print(f"{policy.config.name}, {what}: {loss}", highlight=False)

    for name, problems in parts_of(copied).items():
        target = settings.out / name
        if settings.only not in (None, name):
            continue
        if (target / "config.json").exists():
            console.print(f"{target} is there already")
            continue
        peer = PeerConfig(name=name, model=str(settings.model), learning_rate=settings.learning_rate, adam_beta2=0.95)
        policy = Policy.load(peer)
        tell_loss(policy, "as it came")
        if name == "pruned":
            kept = prune(policy, problems)
            policy.save_pretrained(settings.out / "cut")  # loaded again, so that layers count from 0
            policy = Policy.load(peer, str(settings.out / "cut"))
            tell_loss(policy, f"{len(kept)} layers kept, {kept}")
        warm_up(policy, problems, settings, console)
        tell_loss(policy, "warmed up")
        policy.save_pretrained(target)
        console.print(f"{target}: {policy.n_parameters:,} parameters, {len(problems)} problems", highlight=False)


if __name__ == "__main__":
    main()

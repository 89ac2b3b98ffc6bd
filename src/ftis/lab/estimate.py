"""What a run would take, estimated before it starts: memory, bytes on the wire, and a guess of the seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ftis.codec import message_size
from ftis.config import PeerConfig, Recipe
from ftis.lab import starters
from ftis.lab.arms import Arm, rollouts_per_round
from ftis.policy import resolve_device, resolve_dtype

SAMPLING_RATE, TRAINING_RATE = 1.5e10, 3e10
"""Floating-point operations a second on one core: measured on the starters, which sample at 1.2 to 2.2 · 10¹⁰ and
train at 2.3 to 4 · 10¹⁰. Counted are 2 a parameter and token to sample; 8 to train, for a forward pass that gives old
log-probabilities, and another with its backward pass."""

LENGTH = 0.5
"""Mean length of a completion, as a part of the maximum."""

UNKNOWN_PROBLEMS = 300
"""What a task is taken to validate with if the recipe does not say."""

UNKNOWN_PARAMETERS = 100_000_000
"""What a model is taken to have if it cannot be examined."""


def estimate(recipe: Recipe) -> list[str]:
    """Lines to print: parameters and memory per peer, bytes on the wire per round.

    Memory counts weights, gradients, AdamW's two moments, the largest micro-batch's logits (three float32 copies of
    completion tokens × vocabulary) and the sampler's keys and values. Activations come on top. Bytes are an upper
    bound, reached when every completion has the maximum length.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    lines = []
    sampling, training = recipe.sampling, recipe.training
    prompts = recipe.prompts_per_peer
    rollouts = prompts * recipe.rollouts_per_group
    for peer in recipe.peers:
        if starters.is_starter(peer.model):
            source = starters.path_of(peer.model)
            if not (source / "config.json").exists():
                lines.append(f"{peer.name}: {peer.model} is made when training starts (a minute or so, once)")
                continue
        else:
            source = Path(peer.model)
        try:
            config = AutoConfig.from_pretrained(str(source))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            lines.append(f"{peer.name}: {peer.model} cannot be examined ({str(error).strip().splitlines()[0]})")
            continue
        total = sum(p.numel() for p in model.parameters())
        trained = _trained_parameters(model, peer)
        text = config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        number = 2 if resolve_dtype(peer.dtype, resolve_device("auto")) == torch.bfloat16 else 4
        at_a_time = min(rollouts, sampling.batch_size or rollouts)
        cache = at_a_time * sampling.max_completion_length * text.num_hidden_layers * kv_heads * head_dim * 2 * number
        logits = min(peer.tokens_per_microbatch, rollouts * sampling.max_completion_length) * text.vocab_size * 4 * 3
        states = total * 4 + trained * 12
        lines.append(
            f"{peer.name}: {total:,} parameters, {trained:,} trained; weights, gradients and optimiser "
            f"{in_bytes(states)}, logits of a micro-batch up to {in_bytes(logits)}, "
            f"sampling cache up to {in_bytes(cache)}"
        )
    if recipe.swarm_size > 1:
        tokens = rollouts * sampling.max_completion_length
        sent = message_size(tokens, rollouts, prompts, max((p.name for p in recipe.peers), key=len))
        lines.append(
            f"wire: each peer offers at most {in_bytes(sent)} a round and receives "
            f"{in_bytes(sent * (recipe.swarm_size - 1))}; {in_bytes(sent * training.rounds)} offered in all rounds"
        )
    return lines


def validation_problems(recipe: Recipe) -> int:
    """How many problems one evaluation has, out of distribution too, as far as the recipe says. Loads no task."""
    return sum(task.validation_size or UNKNOWN_PROBLEMS for task in (recipe.task, *recipe.ood))


def known_parameters(recipe: Recipe, arms: Sequence[Arm]) -> dict[str, int]:
    """The parameters of each model in the arms. Loads no weights."""
    models = sorted({peer.model for arm in arms for peer in arm.recipe.peers} | {peer.model for peer in recipe.peers})
    return {model: _parameters(model) for model in models}


def guess_seconds(swarm: Recipe, parameters: Mapping[str, int], problems: int) -> float:
    """A guess of the seconds of one round of one peer on one core: sampling, training, and its part of evaluations.

    Args:
        swarm: with exactly the peers of the swarm.
        parameters: of each model.
        problems: that one evaluation has.
    """
    training = swarm.training
    evaluations = 2 + (training.rounds // training.eval_every if training.eval_every else 0)
    sampled, trained = rollouts_per_round(swarm)
    sampled_and_evaluated = sampled + problems * evaluations / training.rounds
    tokens = LENGTH * swarm.sampling.max_completion_length
    operations_each = 2 * sampled_and_evaluated / SAMPLING_RATE + 8 * trained / TRAINING_RATE
    return fmean(parameters[peer.model] for peer in swarm.peers) * tokens * operations_each


def _parameters(model: str) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = model
    if starters.is_starter(model):
        source = str(starters.path_of(model))
        if not (Path(source) / "config.json").exists():
            made_of = starters.lookup(model)[1]
            width, heads = made_of.hidden_size, made_of.num_attention_heads
            attention = 2 * width * width * (1 + made_of.num_key_value_heads / heads)
            return int(made_of.num_hidden_layers * (attention + 3 * width * made_of.intermediate_size))
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    except (OSError, ValueError, KeyError):
        return UNKNOWN_PARAMETERS
    return sum(p.numel() for p in made.parameters())


def _trained_parameters(model: Any, peer: PeerConfig) -> int:
    if peer.train == "lora":
        targets = [
            m
            for n, m in model.named_modules()
            if n.rpartition(".")[2] in peer.lora_target_modules and hasattr(m, "in_features")
        ]
        return sum(peer.lora_r * (m.in_features + m.out_features) for m in targets)
    patterns = peer.trainable_parameters if peer.train == "subset" else ("",)
    return sum(p.numel() for n, p in model.named_parameters() if any(re.search(x, n) for x in patterns))


def in_bytes(count: float) -> str:
    """A number of bytes as a text such as ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

"""The memory and bytes of a run, estimated before it starts: ``ftis train --dry-run``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ftis.codec import message_size
from ftis.config import PeerConfig, Recipe
from ftis.lab import starters
from ftis.policy import resolve_device, resolve_dtype


def estimate(recipe: Recipe) -> list[str]:
    """Lines to print: parameters and memory per peer, bytes on the wire per round.

    Memory counts weights, gradients, AdamW's two moments, the largest micro-batch's logits (three float32 copies of
    completion tokens × vocabulary) and the sampler's keys and values. Activations come on top. Bytes are an upper
    bound, reached when every completion has the maximum length.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    lines = []
    sampling, training = recipe.sampling, recipe.training
    prompts = (
        training.prompts_per_round if training.mode == "horizontal" else training.prompts_per_round // recipe.swarm_size
    )
    repeats = recipe.rollouts_per_group
    rollouts = prompts * repeats
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

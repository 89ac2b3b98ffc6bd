"""What a run would take, estimated before it starts: memory, bytes on the wire, and a guess of the seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ftis.codec import message_size
from ftis.config import FtisError, PeerConfig, Recipe
from ftis.engines.models import load_tokenizer
from ftis.lab import starters
from ftis.lab.arms import Arm, arms_of, rollouts_per_round, swarms_of
from ftis.lab.memory import Memory, Shape, available_bytes, checkpoint_bytes, peak_memory, resident_bytes
from ftis.lab.prepare import tokenizers_here, with_exchange
from ftis.policy import resolve_device
from ftis.schedule import assigned
from ftis.tasks.problems import load_task
from ftis.tasks.rendering import render_prompt

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


SMALL = 20_000_000
"""Parameters below which any number of models fits."""

UNKNOWN_PROMPT = 256
"""Tokens that a prompt is taken to have if the task cannot be loaded."""


def estimate(recipe: Recipe) -> list[str]:
    """Lines to print: parameters, memory and checkpoints per peer and together, bytes on the wire per round.

    Memory is that of a round in which every completion has the maximum length and every group carries signal. Bytes are
    an upper bound too.
    """
    lines: list[str] = []
    training, peaks, checkpoints = recipe.training, 0, 0
    for peer, shape, memory in _examined(recipe, lines):
        checkpoint = checkpoint_bytes(peer, shape.parameters, shape.trained)
        peaks += memory.peak * peer.data_parallel_size
        checkpoints += checkpoint * training.save_total_limit
        each = f" in each of {peer.data_parallel_size} processes" if peer.data_parallel_size > 1 else ""
        parts = {
            "program": memory.program,
            "weights": memory.weights,
            "gradients and moments": memory.gradients + memory.moments,
            "an update": memory.update,
            "sampling": memory.sampling,
        }
        lines.append(
            f"{peer.name}: {shape.parameters:,} parameters, {shape.trained:,} trained; a checkpoint "
            f"{in_bytes(checkpoint)}; peak memory {in_bytes(memory.peak)}{each} "
            f"({', '.join(f'{name} {in_bytes(size)}' for name, size in parts.items())})"
        )
    arms = arms_of(recipe)
    if peaks:
        lines.append(
            f"together: at most {in_bytes(peaks)} of memory where all peers work at once, and "
            f"{in_bytes(len(arms) * checkpoints)} of disk for {training.save_total_limit} checkpoints of each"
            + (f" in {len(arms)} arms" if len(arms) > 1 else "")
        )
    if recipe.swarm_size > 1:
        prompts = recipe.prompts_per_peer
        rollouts = prompts * recipe.rollouts_per_group
        tokens = rollouts * recipe.sampling.max_completion_length
        text = any(s.exchange == "text" for arm in arms for s in with_exchange(arm, tokenizers_here(arm)).swarms)
        sent = message_size(tokens, rollouts, prompts, max((p.name for p in recipe.peers), key=len), text)
        lines.append(
            f"wire: each peer offers at most {in_bytes(sent)} a round and receives "
            f"{in_bytes(sent * (recipe.swarm_size - 1))}; {in_bytes(sent * training.rounds)} offered in all rounds"
        )
    return lines


def fitting_jobs(recipe: Recipe, jobs: int, free: int | None = None) -> int:
    """How many of ``jobs`` swarms, each in one process, fit into ``free`` bytes of memory at a time; at least 1.

    It is 1 where a peer of a large model cannot be examined.

    Args:
        free: by default what this machine has available. Where that is not known, or a peer has a GPU, all fit.
    """
    arms = arms_of(recipe)
    if max(known_parameters(recipe, arms).values()) < SMALL:
        return jobs
    free = available_bytes() if free is None else free
    swarms: dict[str, Recipe] = {}  # of one set of peers, that with the most prompts
    for swarm in sorted((s for arm in arms for s in arm.swarms), key=lambda s: s.training.prompts_per_round):
        swarms["".join(peer.model_dump_json() for peer in swarm.peers)] = swarm
    if not free or any(resolve_device(p.device).type != "cpu" for swarm in swarms.values() for p in swarm.peers):
        return jobs
    job = max(_in_one_process(swarm, free) for swarm in swarms.values())
    return max(1, min(jobs, free // job)) if job else jobs


def _in_one_process(swarm: Recipe, free: int) -> int:
    """Bytes of a process with all peers of a swarm, of which one works at a time; ``free`` where one cannot be told."""
    lasting, working, program = 0, 0, 0
    bases: dict[tuple[str, ...], int] = {}  # LoRA peers of one model share it, unless it is in 4 bits
    examined = list(_examined(swarm, []))
    if len(examined) < sum(not starters.is_starter(peer.model) for peer in swarm.peers):
        return free
    if any(peer.data_parallel_size > 1 for peer, _, _ in examined):  # then each peer has processes of its own
        return sum(memory.peak * peer.data_parallel_size for peer, _, memory in examined)
    for peer, _, memory in examined:
        shared = peer.train == "lora" and peer.frozen_dtype != "nf4"
        bases[peer.model, peer.frozen_dtype, "" if shared else peer.name] = memory.weights
        lasting += memory.moments + memory.gradients
        working, program = max(working, memory.update + memory.sampling), memory.program
    return program + sum(bases.values()) + lasting + working


def _examined(recipe: Recipe, lines: list[str]) -> Iterator[tuple[PeerConfig, Shape, Memory]]:
    """Each peer with its model and its memory. A line says why one is left out."""
    program, lengths = resident_bytes(), dict[str, list[int]]()
    for swarm in swarms_of(recipe):
        for peer in swarm.peers:
            source = peer.model
            if starters.is_starter(peer.model):
                source = str(starters.path_of(peer.model))
                if not (Path(source) / "config.json").exists():
                    lines.append(f"{peer.name}: {peer.model} is made when training starts (a minute or so, once)")
                    continue
            try:
                shape = _shape(source, peer)
                if source not in lengths:
                    lengths[source] = _prompt_lengths(swarm, shape.tokenizer, lines)
                yield peer, shape, peak_memory(swarm, peer, shape, lengths[source], program)
            except (FtisError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                lines.append(f"{peer.name}: {peer.model} cannot be examined ({why})")


def _shape(source: str, peer: PeerConfig) -> Shape:
    """The model's size. Loads no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    trained = _trained_parameters(model, peer)
    parameters = sum(p.numel() for p in model.parameters()) + (trained if peer.train == "lora" else 0)
    return Shape(config, load_tokenizer(source), parameters, trained)


def _prompt_lengths(swarm: Recipe, tokenizer: Any, lines: list[str]) -> list[int]:
    """Of the first round's prompts, in tokens; a line says so where they are not known."""
    try:
        task = load_task(swarm.task)
        n = swarm.prompts_per_peer
        items = sorted({item for peer in swarm.peers for item in assigned(swarm, len(task.train), peer.name, 0)[:n]})
        return [len(render_prompt(task.train[item], swarm.prompt, tokenizer)) for item in items]
    except FtisError as error:
        lines.append(f"prompts: taken to have {UNKNOWN_PROMPT} tokens, since they are not known ({error})")
        return [UNKNOWN_PROMPT] * swarm.training.prompts_per_round


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

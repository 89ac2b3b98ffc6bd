"""Decisions on processes: which peers run in parallel, how many compute at a time, which share a base or a GPU.

The sizes of models decide. This module also guesses the duration of training before any round is measured, so that the
longest jobs begin first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from ftis.config import PeerConfig, Recipe
from ftis.machine.resources import cores
from ftis.models.sizes import is_large
from ftis.policy import resolve_device
from ftis.recipe.arms import rollouts_per_round

PEERS_A_CORE = 2
"""The number of small models on one core that get a process each. In turns they would keep one core of several busy."""

SAMPLING_RATE, TRAINING_RATE = 1.5e10, 3e10
"""Floating-point operations a second on one core: measured on the starters, which sample at 1.2 to 2.2 · 10¹⁰ and train
at 2.3 to 4 · 10¹⁰. A parameter and token counts as 2 operations to sample and 8 to train: a forward pass that gives old
log-probabilities, and another with its backward pass."""

LIKELY_SIGNAL, LIKELY_LENGTH = 0.5, 0.5
"""Assumed: the probability that a group has signal, and the mean completion's fraction of the maximum."""

UNKNOWN_PROBLEMS = 300
"""The assumed number of validation problems of a task whose section gives none."""


def runs_in_parallel(recipe: Recipe) -> bool:
    """Whether every peer gets a process of its own. The numbers are the same either way, see :class:`Recipe`.

    ``auto``: yes if each has a core or a GPU of its own, or if small models share a core in pairs.
    """
    if recipe.processes != "auto":
        return recipe.processes == "parallel"
    if _on_gpu(recipe):
        return torch.cuda.device_count() >= recipe.swarm_size  # each has its own GPU, and shares none
    if cores() >= recipe.swarm_size:
        return not any(is_large(model) for model, *_ in shared_bases(recipe.peers))
    some_share = cores() > 1 and recipe.swarm_size <= PEERS_A_CORE * cores()
    return some_share and not any(map(is_large, {peer.model for peer in recipe.peers}))


def computing_at_a_time(recipe: Recipe) -> int:
    """The number of peers, each in its own process, that compute at a time: on the CPU no more than cores."""
    return recipe.swarm_size if _on_gpu(recipe) else min(cores(), recipe.swarm_size)


def offloads(recipe: Recipe, peers: Sequence[PeerConfig]) -> bool:
    """Whether these peers, which take turns in one process, leave their device while they wait."""
    devices = [resolve_device(peer.device) for peer in peers]
    gpus = Counter(device.index or 0 for device in devices if device.type == "cuda")
    auto = recipe.offload == "auto" and max(gpus.values(), default=0) > 1
    return len(peers) > 1 and (auto or recipe.offload == "always")


def shared_bases(peers: Sequence[PeerConfig]) -> set[tuple[str, str, str]]:
    """The keys of frozen weights that several of these peers share, if they are in one process."""
    return {base for base, n in Counter(map(frozen_base, peers)).items() if base and n > 1}


def frozen_base(peer: PeerConfig) -> tuple[str, str, str] | None:
    """The key under which LoRA peers of one process share frozen weights; None: the peer shares none."""
    return (peer.model, peer.frozen_dtype, peer.device) if peer.train == "lora" else None


def _on_gpu(recipe: Recipe) -> bool:
    return torch.cuda.is_available() and any(peer.device != "cpu" for peer in recipe.peers)


def guess_seconds(swarm: Recipe, parameters: Mapping[str, int]) -> float:
    """A guess of the seconds of one round of one peer on one core: sampling, training, and its part of evaluations.

    Args:
        swarm: with exactly the peers of the swarm.
        parameters: of each model.
    """
    training = swarm.training
    evaluations = 2 + (training.rounds // training.eval_every if training.eval_every else 0)
    problems = sum(task.validation_size or UNKNOWN_PROBLEMS for task in (swarm.task, *swarm.ood))
    sampled, trained = rollouts_per_round(swarm)
    sampled_and_evaluated = sampled + problems * evaluations / training.rounds
    tokens = LIKELY_LENGTH * swarm.sampling.max_completion_length
    operations_each = 2 * sampled_and_evaluated / SAMPLING_RATE + 8 * trained / TRAINING_RATE
    return fmean(parameters[peer.model] for peer in swarm.peers) * tokens * operations_each

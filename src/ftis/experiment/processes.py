"""Decisions on processes: which peers run in parallel, how many compute at a time, which share a base or a GPU.

The sizes of models decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ftis.config import PeerConfig, Recipe
from ftis.machine.resources import cores
from ftis.models.sizes import is_large
from ftis.policy import resolve_device

PEERS_A_CORE = 2
"""The number of small models on one core that get a process each. In turns they would keep one core of several busy."""


def runs_in_parallel(recipe: Recipe) -> bool:
    """Whether every peer gets a process of its own. The numbers are the same either way, see :class:`Recipe`.

    ``auto``: yes if each has a core or a GPU of its own, or if small models share a core in pairs.
    """
    if recipe.processes != "auto":
        return recipe.processes == "parallel"
    if _on_gpu(recipe):
        return _share_no_gpu(recipe)
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


def _share_no_gpu(recipe: Recipe) -> bool:
    """Whether no two peers that train at a time are on one GPU: all are spread by ``auto``, or each names another."""
    named = [resolve_device(peer.device).index or 0 for peer in recipe.peers if peer.device not in ("auto", "cpu")]
    apart = not named or len(set(named)) == len(recipe.peers)
    return apart and torch.cuda.device_count() >= recipe.swarm_size


def _on_gpu(recipe: Recipe) -> bool:
    return torch.cuda.is_available() and any(peer.device != "cpu" for peer in recipe.peers)

"""A policy's AdamW, in float32 or with moments in 8 bits by bitsandbytes, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from ftis.config import ModelError, PeerConfig, TrainingConfig
from ftis.version import extra

BITSANDBYTES: Mapping[str, str] = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
"""``peers.optim`` -> its class in ``bitsandbytes.optim``."""

MOMENT_BYTES: Mapping[str, int] = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}
"""Bytes of a trained number's two moments, without the scales of blocks."""


def adamw(trainable: Sequence[Parameter], config: PeerConfig) -> torch.optim.Optimizer:
    """AdamW as ``config`` says.

    Raises:
        ModelError: it asks for bitsandbytes, which is not installed.
    """
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.optim == "adamw":
        return torch.optim.AdamW(trainable, **settings, fused=True)
    made: torch.optim.Optimizer = getattr(bitsandbytes(config, "optim").optim, BITSANDBYTES[config.optim])(
        trainable, **settings
    )
    return made


def load_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Go on from ``optimizer.state_dict()``. By itself bitsandbytes would put all paged moments on the GPU."""
    if not getattr(optimizer, "is_paged", False):
        optimizer.load_state_dict(state)
        return
    optimizer.load_state_dict(state, move_to_device=False)
    for parameter, of_parameter in optimizer.state.items():
        for moment in ("state1", "state2"):
            paged = optimizer.get_state_buffer(parameter, dtype=of_parameter[moment].dtype)
            of_parameter[moment] = paged.copy_(of_parameter[moment])


def bitsandbytes(config: PeerConfig, key: str) -> Any:
    """The library, for the peer's setting ``key``.

    Raises:
        ModelError: it, or accelerate, with which transformers loads 4 bits, is not installed.
    """
    try:
        import accelerate  # noqa: F401
        import bitsandbytes as library
    except ImportError:
        raise ModelError(
            f"peer {config.name!r}: {key} = {getattr(config, key)!r} needs bitsandbytes: pip install "
            f"{extra('bitsandbytes')}, or leave {key} out"
        ) from None
    return library


DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "constant_with_warmup": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
}
"""``peers.lr_scheduler_type`` -> the rate by the share p of the steps after the warm-up."""


def learning_rate(peer: PeerConfig, training: TrainingConfig, round: int) -> float:
    """The round's learning rate, transformers' at the round's first optimiser step: with s steps before it, S in all
    rounds and w of these in the warm-up, ``learning_rate`` times s/w if s < w, else decay((s − w)/(S − w))."""
    each = training.num_iterations * training.steps_per_generation
    step, steps, warmup = round * each, training.rounds * each, peer.warmup_steps
    warmup = int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    if step < warmup:
        return peer.learning_rate * (step / warmup)
    return peer.learning_rate * DECAYS[peer.lr_scheduler_type]((step - warmup) / (steps - warmup))

"""The number of a model's parameters, without loading its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftis.config import Recipe
from ftis.models import starters
from ftis.recipe.arms import Arm

SMALL = 20_000_000
"""Parameters below which any number of models fits."""

UNKNOWN_PARAMETERS = 100_000_000
"""Parameters assumed of a model that cannot be examined."""


def parameters_of(model: str) -> int:
    """The number of a model's parameters, or a guess. Loads no weights."""
    from transformers import AutoModelForCausalLM

    from ftis.engines.models import load_config

    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(load_config(starters.place_of(model)))
    except (OSError, ValueError, KeyError):
        return UNKNOWN_PARAMETERS
    return sum(p.numel() for p in made.parameters())


def is_large(model: str) -> bool:
    """Whether a model is so large that memory limits how many fit."""
    return parameters_of(model) >= SMALL


def known_parameters(recipe: Recipe, arms: Sequence[Arm]) -> dict[str, int]:
    """The parameters of each model in the arms and the recipe. Loads no weights."""
    models = sorted({peer.model for arm in arms for peer in arm.recipe.peers} | {peer.model for peer in recipe.peers})
    return {model: parameters_of(model) for model in models}

"""Starters: small models that come with the package, for machines without a GPU or a hub.

They were warmed up on the clock calculator (:mod:`ftis.tasks.clock`), so that they solve some of its problems and
reinforcement learning has something to select. ``small`` and ``large`` differ in size, ``small-b`` and ``large-b`` from
those in their seed; ``adder`` and the multipliers saw other mixtures of operators; ``small-merged`` is a Llama with a
token for each sign and the digit after it. ``benchmarks/make_starters.py`` makes them, and others.

All are ordinary Hugging Face directories in ``ftis/starters``, of Qwen2's architecture unless said otherwise, with
weights in float16: the same model on every machine. A directory's name ends in the first digits of the weights' sha256.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ftis.config import ModelError

PREFIX = "starter:"

SHIPPED = {
    "small": "adebb870b35297452c453e60bca7773ee8f4ffa504e15344d5805ff527b8a006",
    "small-b": "7d1e7daa00c1c9a245e5a4de42dec1629319dd89880315c25e72d19cfc677312",
    "large": "70d85dccd802f5df82ce3b031318f51d7493c566e058a28951a9f459381acd68",
    "large-b": "26544a27575ab90203c58bf3053a715747cd8f3389e665986a812bb7655fa02c",
    "adder": "29342f3c90684241975212515b9109305c31e276833ce915fc575451a47955a5",
    "multiplier": "915aa7412522eda5a7b1c61c67d2e4c63d2fc8d8e381a67a81e48726892fc2ef",
    "large-multiplier": "fcfe6fb45f3043f8c4353b0a7c7079a17ccf1c53cc5e717c59761bbd32a1a068",
    "small-merged": "42951880e6cec646c2a2277b6e7b9f6f49f7e2cecfaba58693e954c820e9e59c",
}
"""sha256 of the weights of each starter, ``model.safetensors``."""

DIGITS = 12
"""Digits of a digest in a directory's name."""


def is_starter(model: str) -> bool:
    return model.startswith(PREFIX)


def place_of(model: str) -> str:
    """The place from which a model loads: a starter's directory; of any other model its own name."""
    return str(path_of(model)) if is_starter(model) else model


def path_of(model: str) -> Path:
    """The directory of ``starter:<name>``.

    Raises:
        ModelError: no such starter, or its weights are not those that this version ships.
    """
    name = model.removeprefix(PREFIX)
    if name not in SHIPPED:
        raise ModelError(
            f"unknown starter {name!r}: there are {', '.join(SHIPPED)}; benchmarks/make_starters.py makes others, "
            f"which a recipe names by their directories"
        )
    directory = Path(__file__).parents[1] / "starters" / f"{name}-{SHIPPED[name][:DIGITS]}"
    weights = directory / "model.safetensors"
    if not weights.exists():
        raise ModelError(f"{weights} is missing: it comes with ftis; install ftis again")
    if (found := hashlib.sha256(weights.read_bytes()).hexdigest()) != SHIPPED[name]:
        raise ModelError(f"{weights} has sha256 {found[:DIGITS]}…, not {SHIPPED[name][:DIGITS]}…: install ftis again")
    return directory

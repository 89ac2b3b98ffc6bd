"""The schedule: the prompts that each peer samples, and its optimiser steps. No torch.

Everything here is a function of the recipe, a peer's name and the round. So all peers agree on it without a message,
and any round can be computed without earlier ones.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ftis.config import Recipe, RecipeError


def seed_of(recipe: Recipe, peer: str, round: int, purpose: str) -> int:
    """The seed for one purpose in one round. So no draw depends on earlier draws."""
    text = f"{recipe.seed}/{peer}/{round}/{purpose}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def draw_items(n_items: int, count: int, round: int, seed: int) -> list[int]:
    """The round's prompts: ``count`` indices out of ``n_items``, the same on every peer.

    Each epoch shuffles the training split, seeded by (seed, epoch), and reads it in order. So the indices of a round
    are distinct, and a problem occurs at most once an epoch. Problems that do not fill a last round wait for the next
    epoch."""
    if not 1 <= count <= n_items:
        raise ValueError(f"cannot draw {count} distinct prompts out of {n_items}")
    rounds_per_epoch = n_items // count
    epoch, position = divmod(round, rounds_per_epoch)
    items: list[int] = _order(n_items, seed, epoch)[position * count : (position + 1) * count].tolist()
    return items


@lru_cache(maxsize=4)
def _order(n_items: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """An epoch's order of the training split. A round asks for it several times for each of its peers."""
    return np.random.default_rng([abs(seed), int(seed < 0), epoch]).permutation(n_items)


def assigned(recipe: Recipe, n_items: int, peer: str, round: int) -> list[int]:
    """The prompts that ``peer`` may sample in ``round``: its slice of the round's, or all of them in horizontal mode.

    If shares go by speed, it samples the first ones of a longer slice. Slices are disjoint, whatever the peers sample.

    Args:
        recipe: with exactly the peers of one swarm.
        n_items: size of the task's training split.

    Raises:
        RecipeError: the task has fewer problems than a round needs.
    """
    names, each = [p.name for p in recipe.peers], recipe.most_prompts_per_peer
    count = each if recipe.training.mode == "horizontal" else each * len(names)
    if count > n_items:
        by_speed = f' and share = "speed" take {count}' if recipe.training.share == "speed" else ""
        raise RecipeError(
            f"training.prompts_per_round = {recipe.training.prompts_per_round}{by_speed}, but the task has only "
            f"{n_items} training problems: lower it or raise task.train_size"
        )
    items = draw_items(n_items, count, round, recipe.seed)
    if recipe.training.mode == "horizontal":
        return items
    position = names.index(peer)
    return items[position * each : (position + 1) * each]


def minibatches(recipe: Recipe, peer: str, round: int, n_rollouts: int) -> list[npt.NDArray[np.int64]]:
    """The rollouts of each optimiser step: ``num_iterations`` passes of ``steps_per_generation`` steps.

    Each pass shuffles the round's rollouts and splits them into parts of nearly equal size.
    """
    steps: list[npt.NDArray[np.int64]] = []
    for iteration in range(recipe.training.num_iterations):
        rng = np.random.default_rng(seed_of(recipe, peer, round, f"steps-{iteration}"))
        steps += np.array_split(rng.permutation(n_rollouts), recipe.training.steps_per_generation)
    return steps

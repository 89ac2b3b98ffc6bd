"""``ftis join`` as people run it: a recipe of tiny peers with their keys and roster, and each peer as a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from commands import command, ftis
from watched import Watched

from ftis.objectives import Objective
from recipes import write_recipe

REWARDS = """
def even_length(prompts, completions, completion_ids, **columns):
    return [float(len(ids) % 2 == 0) for ids in completion_ids]
"""


def prepare(
    place: Path,
    name: str,
    models: Mapping[str, Path],
    training: Mapping[str, int],
    network: Mapping[str, int],
) -> None:
    """Write the recipe ``name`` of the peers in ``models``, its rewards, their keys and the roster.

    Args:
        place: the working directory.
        training, network: keys of those sections, beyond what a tiny recipe has.
    """
    write_recipe(
        place,
        {peer: {"model": model, "learning_rate": 1e-3} for peer, model in models.items()},
        top={"name": name, "threads": 1},
        task={"options": {"operators": 1}, "validation_size": 6},
        reward={"function": "swarm_rewards.even_length"},
        objective={"kl_threshold": Objective.kl_threshold, "kl_estimator": Objective.kl_estimator},
        training={"eval_every": 0, **training},
        network={"deadline": 600, **network},
    )
    (place / "swarm_rewards.py").write_text(REWARDS)
    assert ftis("keys", "new", *models) == 0
    assert ftis("keys", "roster", *(f"keys/{peer}.pub" for peer in models)) == 0


def joined(place: Path, name: str, *arguments: str, **environment: str) -> Watched:
    """A peer as a process."""
    join = command("join", "recipe.toml", "--peer", name, "--key", f"keys/{name}.key", "--roster", "roster.toml")
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
    return Watched([*join, *arguments], place / f"{name}.log", cwd=place, environment=settings)

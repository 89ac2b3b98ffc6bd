"""The arms of a recipe: what is compared, and which peers form a swarm in each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ftis.config import ArmConfig, FtisError, Recipe
from ftis.lab.recipes import with_arm


class RunError(FtisError):
    """A run directory that cannot be used, or a peer's process that failed."""


@dataclass(frozen=True)
class Arm:
    """One arm: its recipe, and the swarms it consists of. A peer that trains alone is a swarm of its own.

    Attributes:
        first: of a part of an arm: how many of the arm's peers stand before it.
    """

    name: str
    recipe: Recipe
    swarms: tuple[Recipe, ...]
    first: int = 0

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers' names, swarm by swarm."""
        return tuple(peer.name for swarm in self.swarms for peer in swarm.peers)

    def parts(self) -> list[Arm]:
        """A part for each swarm. Swarms know nothing of each other, so parts can be run apart."""
        size = len(self.swarms[0].peers)
        return [
            replace(self, recipe=swarm, swarms=(swarm,), first=self.first + i * size)
            for i, swarm in enumerate(self.swarms)
        ]

    def part_of(self, peer: str) -> Arm:
        """The part that ``peer`` is in."""
        self.recipe.peer(peer)
        return next(part for part in self.parts() if peer in part.peers)


def arms_of(recipe: Recipe, only: tuple[str, ...] = ()) -> list[Arm]:
    """The recipe's arms (or those named), each with its own recipe. Without arms: one, named after the objective.

    Raises:
        RunError: ``only`` names an arm that the recipe does not have.
    """
    configs = recipe.arms or (ArmConfig(name=recipe.objective.name),)
    unknown = set(only) - {config.name for config in configs}
    if unknown:
        raise RunError(f"no arm {sorted(unknown)[0]!r} in the recipe: it has {', '.join(c.name for c in configs)}")
    return [_arm(recipe, config) for config in configs if not only or config.name in only]


def _arm(recipe: Recipe, config: ArmConfig) -> Arm:
    resolved = with_arm(recipe, config)
    if config.collaborate:
        together = resolved.training.swarms or ([peer.name for peer in resolved.peers],)
        return Arm(config.name, resolved, tuple(resolved.of_swarm(names) for names in together))
    prompts = resolved.training.prompts_per_round // (resolved.swarm_size if config.budget == "generated" else 1)
    training = resolved.training.model_copy(update={"prompts_per_round": prompts, "prompts_per_peer": None})
    alone = resolved.model_copy(update={"training": training})
    return Arm(config.name, resolved, tuple(alone.of_swarm({peer.name}) for peer in resolved.peers))


def experiment_directory(recipe: Recipe) -> Path:
    """Where the runs of an experiment lie side by side."""
    return Path(recipe.output_dir) / recipe.name

"""The arms of a recipe, which are compared, and the swarms of peers in each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ftis.config import ArmConfig, Recipe, RunError, as_name
from ftis.recipe.parsing import with_arm


@dataclass(frozen=True)
class Arm:
    """One arm: its recipe, and the swarms it consists of. A peer that trains alone is a swarm of its own.

    Attributes:
        first: the index of this part's first peer among all peers of the arm; 0 for a whole arm.
    """

    config: ArmConfig
    recipe: Recipe
    swarms: tuple[Recipe, ...]
    first: int = 0

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers' names, swarm by swarm."""
        return tuple(peer.name for swarm in self.swarms for peer in swarm.peers)

    def parts(self) -> list[Arm]:
        """A part for each swarm. Swarms know nothing of each other, so parts can be run apart."""
        firsts = accumulate((len(swarm.peers) for swarm in self.swarms), initial=self.first)
        return [
            replace(self, recipe=swarm, swarms=(swarm,), first=first)
            for swarm, first in zip(self.swarms, firsts, strict=False)
        ]

    def part_of(self, peer: str) -> Arm:
        """The part that ``peer`` is in."""
        self.recipe.peer(peer)
        return next(part for part in self.parts() if peer in part.peers)

    def swarm_of(self, peer: str) -> Recipe:
        """The swarm that ``peer`` is in."""
        return self.part_of(peer).recipe


def arm_configs(recipe: Recipe) -> tuple[ArmConfig, ...]:
    """The recipe's arms. A recipe without arms is one arm, named after its objective."""
    return recipe.arms or (ArmConfig(name=as_name(recipe.objective.name[-64:]) or "objective"),)


def arms_of(recipe: Recipe, only: tuple[str, ...] = ()) -> list[Arm]:
    """The recipe's arms (or those named), each with its own recipe. Without arms: one, named after the objective.

    Raises:
        RunError: ``only`` names an arm that the recipe does not have.
    """
    configs = arm_configs(recipe)
    unknown = set(only) - {config.name for config in configs}
    if unknown:
        raise RunError(f"no arm {sorted(unknown)[0]!r} in the recipe: it has {', '.join(c.name for c in configs)}")
    return [arm_of(recipe, config) for config in configs if not only or config.name in only]


def check_baselines(recipe: Recipe) -> None:
    """Raise a RunError if a baseline is no arm."""
    names = [arm.name for arm in arm_configs(recipe)]
    if unknown := sorted(set(recipe.experiment.baselines) - set(names)):
        raise RunError(
            f"experiment.baselines: {unknown[0]!r} is none of the arms ({', '.join(names)}): name those to compare "
            f"with, as in --set 'experiment.baselines=[\"{names[0]}\"]'"
        )


def keep_arms(recipe: Recipe, only: tuple[str, ...]) -> Recipe:
    """The recipe with the named arms, and the baselines among them. Without names, the whole recipe.

    Raises:
        RunError: the recipe has no such arm, none of them is a baseline, or a baseline is no arm.
    """
    check_baselines(recipe)
    if not only:
        return recipe
    arms_of(recipe, only)  # refuses a name that it does not have
    arms = tuple(config for config in recipe.arms if config.name in only)
    baselines = tuple(name for name in recipe.experiment.baselines if name in only)
    if not baselines:
        named = " or ".join(f"--arm {name}" for name in recipe.experiment.baselines)
        raise RunError(f"none of the arms {', '.join(only)} is one to compare with: add {named}")
    experiment = recipe.experiment.model_copy(update={"baselines": baselines})
    return recipe.model_copy(update={"arms": arms, "experiment": experiment})


def arm_of(recipe: Recipe, config: ArmConfig) -> Arm:
    """One arm of the recipe."""
    resolved = with_arm(recipe, config)
    if config.collaborate:
        return Arm(config, resolved, swarms_of(resolved))
    generated, trained = rollouts_per_round(swarms_of(resolved)[0])
    alike = generated if config.budget == "generated" else trained  # of a peer alone and one of a swarm
    prompts = max(1, alike // resolved.sampling.num_generations)
    update = {"prompts_per_round": prompts, "max_foreign_rollouts": 0}
    training = resolved.training.model_copy(update=update)
    alone = resolved.model_copy(update={"training": training})
    return Arm(config, resolved, tuple(alone.of_swarm({peer.name}) for peer in resolved.peers))


def swarms_of(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipe of each set of peers that learn together."""
    names, m = [peer.name for peer in recipe.peers], recipe.swarm_size
    return tuple(recipe.of_swarm(names[first : first + m]) for first in range(0, len(names), m))


def rollouts_per_round(swarm: Recipe) -> tuple[int, int]:
    """The rollouts that a peer of a swarm samples and trains on in a round, if nothing is filtered.

    Args:
        swarm: with exactly the peers of the swarm.
    """
    own = swarm.prompts_per_peer * swarm.rollouts_per_group
    foreign = own * (len(swarm.peers) - 1)
    limit = swarm.training.max_foreign_rollouts
    return own, own + (min(foreign, limit // swarm.rollouts_per_group * swarm.rollouts_per_group) if limit else foreign)


def threads_of(recipe: Recipe, cores: int) -> int:
    """Torch's threads of each peer: as the recipe says, or the cores divided among those that learn together.

    Args:
        recipe: the arm's. Peers that train alone do so at the same time.
    """
    return recipe.threads or max(1, cores // recipe.swarm_size)


def run_directory(recipe: Recipe) -> Path:
    """The directory to which :func:`ftis.train` writes: ``<output_dir>/<name>-seed<seed>``."""
    return Path(recipe.output_dir) / f"{recipe.name}-seed{recipe.seed}"


def experiment_directory(recipe: Recipe) -> Path:
    """The directory of an experiment's runs, one beside the other."""
    return Path(recipe.output_dir) / recipe.name

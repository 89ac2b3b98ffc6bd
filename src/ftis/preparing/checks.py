"""Refusing arms that cannot run, before anything is written."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import NamedTuple

from ftis.config import Recipe, RewardConfig, RunError, TaskConfig
from ftis.engines import vllm
from ftis.engines.models import require_precision, require_trainable
from ftis.engines.samplers import opener
from ftis.environments.contract import open_environment
from ftis.environments.play import require_stop
from ftis.models import starters
from ftis.objectives import resolve
from ftis.preparing.exchange import vocabulary, with_exchange
from ftis.preparing.prompting import Rendered, look_at_prompts
from ftis.prompts import Task
from ftis.recipe.arms import Arm, run_directory
from ftis.recipe.own_code import staying
from ftis.records.trackers import package
from ftis.rewards.answers import require_rewardable
from ftis.rewards.scoring import RewardError, is_built_in, kind_of_answers, load_scorer, parts_of, require_columns
from ftis.run import checkpoint
from ftis.schedule import assigned
from ftis.seams import ENVIRONMENTS, TRACKERS, look_up
from ftis.selection import selections_of
from ftis.tasks.problems import load_task, require_unseen, require_validation

OF_TRAINABLE = {"train", "lora_r", "lora_alpha", "lora_target_modules"}
"""Settings of a peer that its model must fit."""


class Checked(NamedTuple):
    """Arms that can run, of each its task and those out of distribution, and prompts that call for a remark.

    Their swarms' ``exchange`` is settled.
    """

    arms: list[Arm]
    tasks: dict[str, list[Task]]
    prompts: list[Rendered]


def check(arms: list[Arm], prompts: bool = True) -> Checked:
    """Refuse arms that cannot run: their models, devices, tasks, rewards, answers that earn none, prompts.

    Args:
        prompts: whether to look at prompts, too. A job need not, since its experiment has.

    Raises:
        FtisError: the first mistake, in the words of the module that would have met it.
    """
    tasks: dict[str, Task] = {}
    rewarded: set[tuple[str, ...]] = set()
    of_arms = dict[str, list[Task]]()
    for arm in arms:
        _check_place(run_directory(arm.recipe))
        with staying():
            _check_names(arm.recipe)
        for peer in arm.recipe.peers:
            require_precision(peer)
            vocabulary(peer.model, arm.recipe.sampling.end_tokens)
        loaded = [_load(config, arm.recipe, tasks, rewarded) for config in (arm.recipe.task, *arm.recipe.ood)]
        if not loaded[0].train:
            raise RunError(
                f"task {loaded[0].name!r} has no problems to train on: put it under [[ood]], and name another in [task]"
            )
        _check_scores(arm.recipe.reward, loaded[0])
        for ood in loaded[1:]:
            require_unseen(loaded[0], ood)
        for swarm in arm.swarms:
            assigned(swarm, len(loaded[0].train), swarm.peers[0].name, 0)
        of_arms[arm.name] = loaded
    trainable = {}
    for peer in (peer for arm in arms for peer in arm.recipe.peers):
        place = starters.place_of(peer.model)
        trainable[place, peer.model_dump_json(include=OF_TRAINABLE)] = peer, place
    for peer, place in trainable.values():
        require_trainable(peer, place)
    found = look_at_prompts(arms, list(of_arms.values())) if prompts else []
    return Checked([with_exchange(arm) for arm in arms], of_arms, found)


def check_to_train(arms: list[Arm], prompts: bool = True) -> Checked:
    """:func:`check` of arms whose peers are all trained here.

    Raises:
        RunError: their shares go by speed, which peers measure and state only over a network.
    """
    if any(swarm.training.share == "speed" and len(swarm.peers) > 1 for arm in arms for swarm in arm.swarms):
        raise RunError('training.share = "speed" is for ftis join: here, set training.share = "equal"')
    return check(arms, prompts)


def _check_names(recipe: Recipe) -> None:
    """Look up every dotted path of the recipe, so that a mistake shows before anything is loaded.

    Raises:
        RecipeError: a name leads nowhere or to an object of the wrong kind, or a tracker is not installed.
        SamplerError: vLLM is not installed.
    """
    objective = resolve(recipe.objective)
    for peer in recipe.peers:
        checkpoint.states_of(selections_of(recipe, peer.name, objective))
        if peer.attack:
            look_up(peer.attack, f"peers.{peer.name}.attack")
    if recipe.sampling.sampler != "auto" or recipe.sampling.options:
        opener(recipe.sampling.sampler, recipe.sampling.options)
    if recipe.sampling.sampler == "vllm":
        vllm.require_installed(recipe.sampling.options)
    for tracker in recipe.report_to:
        look_up(tracker, "report_to", TRACKERS)
        if tracker in TRACKERS:
            package(tracker)


def owns_reward(environment: str | None) -> bool:
    """Whether an environment gives the reward itself. A class tells, since making an instance may take long."""
    if environment is None:
        return False
    made = look_up(environment, "task.environment", ENVIRONMENTS)
    return hasattr(made if inspect.isclass(made) else open_environment(environment, apart=False).instance, "get_reward")


def _check_place(directory: Path) -> None:
    """Refuse a run's directory that is a file, or lies below one."""
    for place in (directory, *directory.parents):
        if place.exists() and not place.is_dir():
            raise RunError(f"{directory} cannot be a run's directory: {place} is a file; name another output_dir")


def _load(config: TaskConfig, recipe: Recipe, tasks: dict[str, Task], rewarded: set[tuple[str, ...]]) -> Task:
    """A task of an arm, once each of its answers is known to earn a reward. Arms share most tasks: each is loaded once.

    Args:
        tasks, rewarded: the tasks loaded, and the rewards tried, for earlier arms; added to.
    """
    key = config.model_dump_json()
    with staying():
        task = tasks[key] = tasks.get(key) or load_task(config)
        score = load_scorer(recipe.reward, recipe.prompt, task.answer_kind)
    require_validation(task, config.name)
    require_stop(config, recipe)
    asked = (key, recipe.reward.model_dump_json(), recipe.prompt.model_dump_json())
    if asked not in rewarded:
        for part in () if owns_reward(config.environment) else parts_of(score):
            require_columns(part, task.validation[0], config.name)
            require_rewardable(part, task.train, f"task {config.name!r}, training problem")
            require_rewardable(part, task.validation, f"task {config.name!r}, validation problem")
        rewarded.add(asked)
    return task


def _check_scores(reward: RewardConfig, task: Task) -> None:
    """Refuse a part of a score from a task whose answers are right or wrong."""
    if reward.partial_credit and is_built_in(reward) and kind_of_answers(reward, task.answer_kind) != "reasoning_gym":
        raise RewardError(
            f"reward.partial_credit = true: answers of {task.name!r} are right or wrong and have no score; leave it out"
        )

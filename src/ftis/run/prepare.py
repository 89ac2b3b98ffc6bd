"""Checks before anything is written: whether arms can run, and what their peers exchange."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ftis.config import PeerConfig, Recipe, RewardConfig, TaskConfig
from ftis.engines.models import generation_defaults, load_tokenizer, require_precision, require_trainable, tokens_of
from ftis.environments.contract import open_environment
from ftis.models import starters
from ftis.policy import own_ends
from ftis.prompts import Task, TaskError
from ftis.recipe.arms import Arm, RunError, run_directory
from ftis.recipe.own_code import staying
from ftis.rewards.answers import require_rewardable
from ftis.rewards.scoring import RewardError, is_built_in, kind_of_answers, load_scorer, parts_of, require_columns
from ftis.run.assembly import check_names
from ftis.run.prompting import look_at_prompts
from ftis.schedule import assigned
from ftis.seams import ENVIRONMENTS, look_up
from ftis.tasks.problems import load_task, require_unseen
from ftis.text.messages import end_of_text
from ftis.text.token_bytes import TokenBytes

OF_TRAINABLE = {"train", "lora_r", "lora_alpha", "lora_target_modules"}
"""Settings of a peer that its model must fit."""


class Checked(NamedTuple):
    """Arms that can run, the first one's task and those out of distribution, and remarks on the prompts.

    Their swarms' ``exchange`` is settled.
    """

    arms: list[Arm]
    tasks: list[Task]
    remarks: list[str]


def check(arms: list[Arm], prompts: bool = True) -> Checked:
    """Refuse arms that cannot run: their models, devices, tasks, rewards, answers that earn none, prompts.

    Args:
        prompts: look at them too. A job of an experiment need not, since the experiment has.

    Raises:
        FtisError: the first mistake, in the words of the module that would have met it.
    """
    tasks: dict[str, Task] = {}
    rewarded: set[tuple[str, ...]] = set()
    of_arms = []
    for arm in arms:
        _check_place(run_directory(arm.recipe))
        with staying():
            check_names(arm.recipe)
        for peer in arm.recipe.peers:
            _check_model(peer, arm.recipe.sampling.end_tokens)
        loaded = [_load(config, arm.recipe, tasks, rewarded) for config in (arm.recipe.task, *arm.recipe.ood)]
        _check_scores(arm.recipe.reward, loaded[0])
        for ood in loaded[1:]:
            require_unseen(loaded[0], ood)
        for swarm in arm.swarms:
            assigned(swarm, len(loaded[0].train), swarm.peers[0].name, 0)
        of_arms.append(loaded)
    for source, peer in {_of_trainable(peer): peer for arm in arms for peer in arm.recipe.peers}.items():
        require_trainable(peer, source[0])
    remarks = [*_of_environment(arms[0].recipe.task), *look_at_prompts(arms, of_arms)] if prompts else []
    return Checked([with_exchange(arm) for arm in arms], of_arms[0], remarks)


def check_to_train(arms: list[Arm], prompts: bool = True) -> Checked:
    """:func:`check` of arms whose peers are all trained here.

    Raises:
        RunError: their shares go by speed, which peers measure and state over a network alone.
    """
    if any(swarm.training.share == "speed" and len(swarm.peers) > 1 for arm in arms for swarm in arm.swarms):
        raise RunError('training.share = "speed" is for ftis join: here, set training.share = "equal"')
    return check(arms, prompts)


def _of_environment(config: TaskConfig) -> list[str]:
    """A remark on an environment without a reward, which a forgotten or misspelt method makes."""
    if config.environment is None or _owns_reward(config.environment):
        return []
    return [f"task.environment {config.environment!r} has no get_reward: the recipe's reward scores whole completions"]


def _owns_reward(environment: str) -> bool:
    """Whether an environment gives the reward itself. Making one may be dear, so a class tells."""
    made = look_up(environment, "task.environment", ENVIRONMENTS)
    return hasattr(made if inspect.isclass(made) else open_environment(environment, apart=False).instance, "get_reward")


def _check_place(directory: Path) -> None:
    """Refuse a run's directory that is a file, or lies below one."""
    for place in (directory, *directory.parents):
        if place.exists() and not place.is_dir():
            raise RunError(f"{directory} cannot be a run's directory: {place} is a file; name another output_dir")


def _check_model(peer: PeerConfig, end_tokens: Sequence[str]) -> None:
    require_precision(peer)
    vocabulary(peer.model, end_tokens)


def _load(config: TaskConfig, recipe: Recipe, tasks: dict[str, Task], rewarded: set[tuple[str, ...]]) -> Task:
    """A task of an arm, once each of its answers is known to earn a reward. Arms share most tasks: each is loaded once.

    Args:
        tasks, rewarded: the tasks loaded, and the rewards tried, for earlier arms; added to.
    """
    key = config.model_dump_json()
    with staying():
        task = tasks[key] = tasks.get(key) or load_task(config)
        score = load_scorer(recipe.reward, recipe.prompt, task.answer_kind)
    if not task.validation:
        raise TaskError(
            f"task {config.name!r} has no problems to validate with: give it some, as evaluation needs them"
        )
    asked = (key, recipe.reward.model_dump_json(), recipe.prompt.model_dump_json())
    if asked not in rewarded:
        owned = config.environment is not None and _owns_reward(config.environment)
        for part in () if owned else parts_of(score):
            require_columns(part, task.validation[0], config.name)
            require_rewardable(part, task.train, f"task {config.name!r}, training problem")
            require_rewardable(part, task.validation, f"task {config.name!r}, validation problem")
        rewarded.add(asked)
    return task


def _of_trainable(peer: PeerConfig) -> tuple[str, str]:
    """The place of a peer's model, and the settings that it must fit."""
    return starters.place_of(peer.model), peer.model_dump_json(include=OF_TRAINABLE)


def _check_scores(reward: RewardConfig, task: Task) -> None:
    """Refuse settings of scores for a task whose answers are right or wrong."""
    kind = kind_of_answers(reward, task.answer_kind)
    for key, default in (("pass_mark", 1.0), ("partial_credit", False)):
        value = getattr(reward, key)
        if kind != "reasoning_gym" and value != default and is_built_in(reward):
            raise RewardError(
                f"reward.{key} = {value}: answers of {task.name!r} are right or wrong and have no score; leave it out"
            )
    if reward.partial_credit and reward.pass_mark != 1.0:
        raise RewardError("reward.pass_mark means nothing with reward.partial_credit = true: leave one of them out")


def with_exchange(arm: Arm) -> Arm:
    """The arm with ``exchange`` settled in each swarm of several: text where their vocabularies differ, else ids.

    A joined peer knows its own vocabulary alone, and leaves ``auto`` as it is.

    Raises:
        RunError: peers are to exchange ids, but mean other tokens by them or end completions by others.
        AlignmentError: peers are to exchange text, but their tokens' bytes are not known.
    """
    recipe = arm.recipe
    known = {peer.name: vocabulary(peer.model, recipe.sampling.end_tokens) for peer in recipe.peers}
    _check_ends(arm, known)
    return replace(arm, swarms=tuple(_settled(arm.name, swarm, known) for swarm in arm.swarms))


def _check_ends(arm: Arm, known: Mapping[str, Vocabulary]) -> None:
    """Refuse an end token that no peer has or, where ids are exchanged, that any peer lacks. With text it may be
    another peer's."""
    recipe = arm.recipe
    if recipe.exchange == "ids":
        for name, of in known.items():
            _check_end(arm.name, recipe, of.ends, recipe.peer(name).model)
    if len(known) == 1 and recipe.exchange == "text":
        return
    every: frozenset[str] = frozenset().union(*(of.ends for of in known.values()))
    _check_end(arm.name, recipe, every, ", ".join(dict.fromkeys(peer.model for peer in recipe.peers)))


def _check_end(arm: str, recipe: Recipe, known: Collection[str], models: str) -> None:
    if unknown := [token for token in recipe.sampling.end_tokens if token not in known]:
        raise RunError(
            f"arm {arm!r}: sampling.end_tokens names {unknown[0]!r}, which is no token of {models}: write it as its "
            f"tokenizer does"
        )


def _settled(arm: str, swarm: Recipe, of_arm: Mapping[str, Vocabulary]) -> Recipe:
    if len(swarm.peers) == 1:
        return swarm
    known = {peer.name: of_arm[peer.name] for peer in swarm.peers if peer.name in of_arm}
    differ = len({of.ids for of in known.values()}) > 1
    if swarm.exchange == "text" or (swarm.exchange == "auto" and differ):
        for name in known:
            place = starters.place_of(swarm.peer(name).model)
            _check_text(place, _written(place), f"peer {name!r}", tuple(swarm.sampling.end_tokens))
        return swarm.model_copy(update={"exchange": "text"})
    if differ:
        by_peer = ", ".join(f"{name}: {of.ids[:8]}" for name, of in known.items())
        raise RunError(
            f"arm {arm!r}: the peers' tokenizers differ ({by_peer}), so their token ids mean different text; "
            f'take models of one family, or set exchange = "text"'
        )
    if len({of.ends for of in known.values()}) > 1:
        by_peer = ", ".join(f"{name}: {' and '.join(sorted(of.own_ends))}" for name, of in known.items())
        every = ", ".join(f'"{token}"' for token in sorted(frozenset().union(*(of.ends for of in known.values()))))
        raise RunError(
            f"arm {arm!r}: the peers' models end completions by different tokens ({by_peer}): set "
            f"sampling.end_tokens = [{every}], so that every peer ends at each of them"
        )
    return swarm if len(known) < len(swarm.peers) else swarm.model_copy(update={"exchange": "ids"})


@dataclass(frozen=True)
class Vocabulary:
    """The facts of a tokenizer that a run checks beforehand. A large one takes seconds to load, so they are kept.

    Attributes:
        ids: a digest of its map token → id. Tokenizers with one digest mean the same text by equal ids.
        own_ends: the tokens by which its model ends completions: the tokenizer's and those of its generation defaults.
        ends: these, and the tokens of ``sampling.end_tokens`` that it has.
    """

    ids: str
    own_ends: frozenset[str]
    ends: frozenset[str]


def vocabulary(model: str, end_tokens: Sequence[str]) -> Vocabulary:
    """The vocabulary of a model's tokenizer.

    Raises:
        ModelError: there is none.
    """
    place = starters.place_of(model)
    return _vocabulary(place, _written(place), tuple(end_tokens))


@lru_cache(maxsize=64)
def _vocabulary(place: str, written: int, end_tokens: tuple[str, ...]) -> Vocabulary:
    tokenizer = load_tokenizer(place)
    tokens = tokenizer.get_vocab()
    ids = hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()
    own = frozenset(tokens_of(tokenizer, own_ends(tokenizer, generation_defaults(place))))
    return Vocabulary(ids, own, own | {token for token in end_tokens if token in tokens})


@lru_cache(maxsize=64)
def _check_text(place: str, written: int, who: str, end_tokens: tuple[str, ...]) -> None:
    known = _token_bytes(place, written)
    tokens = known.tokenizer.get_vocab()
    ends = own_ends(known.tokenizer, generation_defaults(place))
    end_of_text(who, known, ends, [tokens[token] for token in end_tokens if token in tokens])


@lru_cache(maxsize=1)
def _token_bytes(place: str, written: int) -> TokenBytes:
    return TokenBytes.of(load_tokenizer(place))


def _written(place: str) -> int:
    """The time of the newest file on a model's tokenizer and ends; 0 if this machine has none yet."""
    files = [Path(place) / name for name in ("tokenizer.json", "config.json", "generation_config.json")]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)

"""A swarm's episodes within TRL.

TRL's own loop parses calls in the format of the model's family, and handles a wrong call differently from other peers.
In a swarm :class:`~ftis.environments.play.Player` plays instead, with the same tokens as in every peer, and TRL draws.
For the rewards TRL's environments play each episode once more: they are then in its last state, where ``get_reward``
and reward functions look at them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from ftis.config import Recipe
from ftis.environments.contract import Message, open_environment, tools_of
from ftis.environments.play import Played, Player
from ftis.rollouts import Prompt, Rollout
from ftis.seams import ENVIRONMENTS, look_up
from ftis.trl.options import OptionError


def factory_of(recipe: Recipe, given: Any, without_us: Mapping[str, Any]) -> Any:
    """The class of ``task.environment``, for GRPOTrainer.

    Args:
        given: the script's ``environment_factory``, or None.
        without_us: the data sets by name from which TRL alone plays. Their rows lack the seed of a swarm's problem.

    Raises:
        OptionError: it is not the recipe's, or TRL cannot play it.
    """
    path = recipe.task.environment
    if path is None:
        raise OptionError("environment_factory: the recipe names no task.environment; name the class there")
    made = look_up(path, "task.environment", ENVIRONMENTS)
    if given not in (None, made):
        raise OptionError(f"environment_factory = {given!r}: the recipe's task.environment is {path!r}; leave it out")
    environment = open_environment(path, apart=False)
    if not environment.tools:
        raise OptionError(
            f"task.environment = {path!r} has reply(text), and TRL's environments have tools alone: let ftis join "
            f"train this peer, or write public methods instead"
        )
    if not hasattr(environment.instance, "__dict__"):
        why = "an episode that took too long needs another get_reward on its object"
        raise OptionError(f"task.environment = {path!r} has __slots__, but {why}: leave them out")
    seed = inspect.signature(environment.instance.reset).parameters.get("seed")
    for name, rows in without_us.items() if seed is not None and seed.default is seed.empty else ():
        each = rows.values() if isinstance(rows, dict) else [rows]
        if not all("seed" in (getattr(one, "column_names", None) or ()) for one in each):
            takes = f"which reset of task.environment = {path!r} takes"
            raise OptionError(f"{name} has no column seed, {takes}: add one, or give the argument a default")
    return made


@dataclass(frozen=True)
class Stage:
    """The environments of one process, and the swarm's player.

    Attributes:
        factory: makes one more environment.
        pool: TRL's environments, used again and again.
    """

    player: Player
    factory: Callable[[], Any]
    pool: list[Any]

    @staticmethod
    def of(player: Player, dataset: Any, factory: Callable[[], Any], pool: list[Any]) -> Stage:
        """The stage of a player.

        Raises:
            OptionError: the data set's prompts cannot show an environment's tools.
            EpisodeError: its rows cannot reach the environment's process.
        """
        if not is_conversational(dataset[0]):
            raise OptionError(
                "train_dataset: its prompts are text, and a model sees an environment's tools in conversations alone; "
                "let each prompt be a list of messages"
            )
        if player.environment.helper is None:
            warnings.warn(
                f"environment_factory: {factory.__name__} is a class of this script, so others' episodes play in this "
                f"process, without limits of time and memory: write it into a module and import it",
                stacklevel=4,
            )
        else:
            player.environment.require_json(dataset[0])
        return Stage(player, factory, pool)

    def environments(self, n: int) -> list[Any]:
        """``n`` environments."""
        self.pool.extend(self.factory() for _ in range(n - len(self.pool)))
        return self.pool[:n]

    def observation(self, prompt: Prompt) -> str:
        """The text that ``reset`` appends to a prompt."""
        return self.player.environment.play(prompt, ()).observation

    def finished(self, environment: Any, prompt: Prompt, rollout: Rollout) -> Played:
        """Play an episode in ``environment``, which is then in its last state.

        New actions are played first in a process with limits of time. If the last turn takes too long there, the
        episode is only begun in ``environment``, which gives 0, and the pool gets a new environment instead.

        Raises:
            EpisodeError: the environment raises, or answers otherwise than before.
        """
        here = replace(self.player.environment, instance=environment, tools=tools_of(environment), helper=None)
        if rollout.overdue is not False and self.player.environment.helper is not None:
            played = self.player.again(prompt, rollout)
            if played.overdue:
                here.play(prompt, ())
                environment.get_reward = lambda: 0.0
                self.pool[[one is environment for one in self.pool].index(True)] = self.factory()
                return played
        return replace(self.player, environment=here).again(prompt, rollout)

    def messages(self, prompt_ids: Sequence[int], rollout: Rollout, played: Played) -> list[Message]:
        """An episode as the conversation that TRL gives to reward functions."""
        tools, read = list(self.player.environment.tools.values()), list(prompt_ids)
        turns = np.split(rollout.completion_ids, [at for at, _ in rollout.observed])
        found: list[Message] = []
        for number, turn in enumerate(turns):
            found.append(parse_response(self.player.tokenizer, turn.tolist(), prefix=read, tools=tools))
            if number < len(rollout.observed):
                found += played.answers[number]
                read = [*read, *turn.tolist(), *rollout.observed[number].ids.tolist()]
        return found

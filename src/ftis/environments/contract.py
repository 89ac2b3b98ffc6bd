"""The contract of environments, which is TRL's, and a plainer one for models without a template for tools.

Both are a class, made without arguments and used again after ``reset``:

- ``reset(**row)`` begins an episode. The row holds the problem's columns, with ``question`` and ``answer``. A text that
  it returns is appended to the question.
- Public methods are tools, described by type hints and a docstring in Google's style. The model's chat template writes
  them. Or ``reply(text) -> str | None`` answers a turn as text; None ends the episode.
- ``get_reward() -> float`` is asked at the end. Without it the recipe's reward function scores the whole completion.

An environment must answer the same actions of the same row alike: each peer plays the others' episodes itself.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftis.config import RecipeError
from ftis.episodes import EpisodeError
from ftis.rollouts import Prompt
from ftis.seams import ENVIRONMENTS, look_up

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""A call as Qwen, SmolLM3 and Hermes write it: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
NO_TOOLS = {"reset", "reply", "get_reward", "close"}

Message = dict[str, Any]
"""A message of a chat template: role and content."""


@dataclass(frozen=True)
class Environment:
    """An environment of the user's, checked, with its errors attributed.

    Attributes:
        path: its dotted path, for messages.
        tools: its public methods by name; empty for one with ``reply``.
    """

    path: str
    instance: Any
    tools: Mapping[str, Callable[..., Any]]

    def reset(self, prompt: Prompt) -> str:
        """Begin a problem's episode. Returns the text behind the question."""
        row = {**prompt.columns, "question": prompt.question, "answer": prompt.answer}
        parameters = inspect.signature(self.instance.reset).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            row = {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}
        told = self._call("reset", self.instance.reset, **row)
        if not (told is None or isinstance(told, str)):
            raise EpisodeError(f"task.environment {self.path!r}: reset returned {told!r:.80}; return text or None")
        return told or ""

    def answers(self, text: str) -> list[Message]:
        """The messages that answer a turn; none: the episode is over."""
        if not self.tools:
            told = self._call("reply", self.instance.reply, text)
            if not (told is None or isinstance(told, str)):
                raise EpisodeError(f"task.environment {self.path!r}: reply returned {told!r:.80}; return text or None")
            return [] if told is None else [{"role": "user", "content": told}]
        return [self._use(call) for call in CALL.findall(text)]

    def reward(self) -> float | None:
        """The finished episode's reward; None if the environment gives none."""
        if not hasattr(self.instance, "get_reward"):
            return None
        reward = self._call("get_reward", self.instance.get_reward)
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EpisodeError(
                f"task.environment {self.path!r}: get_reward returned {reward!r:.80}; return a finite number"
            )
        return float(reward)

    def _use(self, call: str) -> Message:
        """Call a tool as the model asks. A mistake, the model's or the tool's, is text for the model."""
        name = ""
        try:
            asked = json.loads(call)
            name, arguments = str(asked["name"]), asked.get("arguments") or {}
            if name not in self.tools:
                raise LookupError(f"there is no tool {name}")
            told: Any = self.tools[name](**arguments)
        except Exception as error:  # the model's text and the user's code: anything may be wrong
            told = {"error": f"{type(error).__name__}: {error}"}
        return {"role": "tool", "name": name, "content": str(told)}

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **row: Any) -> Any:
        try:
            return function(*arguments, **row)
        except Exception as error:  # the user's code may raise anything
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise EpisodeError(
                f"task.environment {self.path!r}: {name} raised {type(error).__name__}: {error} "
                f"({place.filename}, line {place.lineno}); correct it there"
            ) from error


def open_environment(path: str) -> Environment:
    """The environment that ``task.environment`` names.

    Raises:
        RecipeError: the path leads nowhere, or to an object without the contract.
    """
    where = f"task.environment = {path!r}"
    made = look_up(path, "task.environment", ENVIRONMENTS)
    try:
        instance = made()
    except Exception as error:
        raise RecipeError(
            f"{where}: making one raised {type(error).__name__}: {error}; it takes no arguments"
        ) from error
    if not callable(getattr(instance, "reset", None)):
        raise RecipeError(f"{where}: has no method reset(**row); see docs/environments.md")
    if callable(getattr(instance, "reply", None)):
        return Environment(path, instance, {})
    public = inspect.getmembers(instance, inspect.ismethod)
    tools = {name: method for name, method in public if not name.startswith("_") and name not in NO_TOOLS}
    if not tools:
        raise RecipeError(f"{where}: has neither reply(text) nor a public method as a tool; see docs/environments.md")
    return Environment(path, instance, tools)


def owns_reward(path: str) -> bool:
    """Whether an environment gives the reward itself, so that no reward function is asked.

    Raises:
        RecipeError: as :func:`open_environment`.
    """
    return hasattr(open_environment(path).instance, "get_reward")

"""The contract of environments, which is TRL's, and a plainer one for models without a template for tools.

Both are a class, made without arguments and used again after ``reset``:

- ``reset(**row)`` begins an episode with the problem's columns, ``question`` and ``answer`` among them, and the same
  ``seed`` for all peers. A text that it returns is appended to the question.
- Public methods are tools, which the chat template writes. Or ``reply(text) -> str | None`` answers a turn as text;
  None ends the episode.
- ``get_reward() -> float`` is asked at the end. Without it the recipe's reward function scores the whole completion.

Equal row, seed and actions give equal answers, since each peer plays the others' episodes. A user's environment plays
in a process with limits (:mod:`ftis.machine.helper`), since the actions may be a stranger's.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from ftis.config import RecipeError
from ftis.episodes import EpisodeError
from ftis.machine.helper import Helper, Judge, RetireError, serve
from ftis.rewards.scoring import LARGEST_REWARD
from ftis.rollouts import Prompt
from ftis.seams import ENVIRONMENTS, GIVEN, look_up

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""A call as Qwen, SmolLM3 and Hermes write it: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
NO_TOOLS = {"reset", "reply", "get_reward", "close"}
LATER = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
"""Kinds of functions that answer with an object instead of their result."""
TURN_SECONDS, TURN_WAITS = 1.0, 20.0
"""The most processor seconds, and the most seconds by the clock, that an environment's process takes for a turn."""

Message = dict[str, Any]
"""A message of a chat template: role and content."""


class OverdueError(BaseException):
    """A turn took too long. No ``except Exception`` of an environment catches it."""


class Transcript(NamedTuple):
    """An environment's part of an episode."""

    observation: str
    """The text that ``reset`` appends to the question."""
    answers: list[list[Message]]
    """The messages that answer each turn, up to the first turn without any, which ends the episode."""
    reward: float | None
    """After the last of these turns; None if the environment gives none."""
    overdue: bool = False
    """Whether the last of these turns took too long. It has no answer, and the environment's reward is 0."""


class Actions(NamedTuple):
    """The model's part of an episode, with the texts of its turns."""

    prompt: Prompt
    turns: Sequence[str]
    known: int = 0
    """The number of turns that an earlier play has timed. The machine may be slower now, so they have no limit."""
    overdue: bool = False
    """Whether the last of these turns took too long in an earlier play. It is not played again."""


@dataclass(frozen=True)
class Environment:
    """An environment of the user's, checked, with its errors attributed."""

    path: str
    instance: Any
    tools: Mapping[str, Callable[..., Any]]
    """Its public methods by name; empty for one with ``reply``."""
    helper: Helper | None = None
    """The process in which it plays; None: this one."""
    limited: bool = False
    """Whether this process has a limit for each turn, as a helper has."""
    seed: int = 0
    """The run's."""

    @property
    def owns_reward(self) -> bool:
        """Whether it gives the reward itself, so that no reward function is asked."""
        return hasattr(self.instance, "get_reward")

    def begun(self, prompt: Prompt) -> Prompt:
        """A problem as its episode begins: ``reset``'s text after the question."""
        return replace(prompt, question=prompt.question + self.play(prompt, ()).observation)

    def stop(self) -> None:
        """End its process. It is used no more."""
        if self.helper is not None:
            self.helper.stop()

    def play(self, prompt: Prompt, turns: Sequence[str]) -> Transcript:
        """:meth:`play_all` of one episode, with answers of any length."""
        return next(self.play_all([Actions(prompt, turns)], sys.maxsize))

    def play_all(self, episodes: Sequence[Actions], most: int) -> Iterator[Transcript]:
        """Play episodes from their beginnings. Answers to a turn of more than ``most`` characters end an episode.

        An EpisodeError follows the episodes before it, if a method raised, returned another type or took too long.
        """
        requests = list[dict[str, Any]]()
        for prompt, turns, known, overdue in episodes:
            row = {**self.seed_of(prompt), **prompt.columns, "question": prompt.question, "answer": prompt.answer}
            requests.append({"row": row, "turns": list(turns), "most": most, "known": known, "overdue": overdue})
        if self.helper is None:
            yield from (self.play_here(**request) for request in requests)
            return
        for request in requests:
            self.require_json(request["row"])
        for (prompt, *_), found in zip(episodes, self.helper.ask_all(requests), strict=False):
            if found is None:
                raise EpisodeError(
                    f"task.environment {self.path!r} did not answer within its limits of time and memory, in item "
                    f"{prompt.item}: let it answer or end the episode sooner"
                )
            if "error" in found:
                raise EpisodeError(found["error"])
            yield Transcript(*found["played"])

    def require_alike(self, prompts: Sequence[Prompt]) -> None:
        """Play a turn of each problem in two processes. An EpisodeError if answers or rewards differ."""
        calls = "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in self.tools)
        episodes, plays = [Actions(prompt, [calls or prompt.answer]) for prompt in prompts], list[list[Transcript]]()
        for _ in range(2):
            plays.append(list(self.play_all(episodes, sys.maxsize)))
            self.stop()  # the next process has another seed of Python's hash()
        for prompt, one, other in zip(prompts, *plays, strict=True):
            if one != other and not (one.overdue or other.overdue):
                raise EpisodeError(
                    f"task.environment {self.path!r} played item {prompt.item} otherwise in a second process: make "
                    f"answers and rewards depend on the row, the seed and the actions alone; Python's hash() of a text "
                    f"differs between processes"
                )

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of ``reset``."""
        return inspect.signature(self.instance.reset).parameters

    @property
    def takes_seed(self) -> bool:
        """Whether ``reset`` has a parameter ``seed``, so a problem's prompt may vary by round."""
        return "seed" in self.parameters

    def seed_of(self, prompt: Prompt) -> dict[str, int]:
        """The argument ``seed`` of ``reset``, if there is one."""
        if not self.takes_seed:
            return {}
        # To SeedSequence a last 0 is nothing, so round 0 would have an evaluation's seed.
        of_round = () if prompt.round is None else (prompt.round + 1,)
        return {"seed": int(np.random.SeedSequence((self.seed, prompt.item, *of_round)).generate_state(1)[0])}

    def require_json(self, row: Mapping[str, Any]) -> None:
        """Refuse a row that another process cannot read, with an EpisodeError that names the column."""
        for name, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise EpisodeError(
                    f"task.environment {self.path!r}: column {name!r} holds {value!r:.80}, and a row goes to the "
                    f"environment's process as JSON: leave the column out, or write it as text or numbers"
                ) from error

    def play_here(self, **request: Any) -> Transcript:
        """Play an episode in this process. All that goes wrong is an EpisodeError: the actions may be a stranger's."""
        return cast(Transcript, self._call("an episode", self._play, **request))

    def _play(self, row: Mapping[str, Any], turns: Sequence[str], most: int, known: int, overdue: bool) -> Transcript:
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values()):
            row = {name: row[name] for name in self.parameters if name in row}
        observation, answers = self._text("reset", self.instance.reset, **row) or "", list[list[Message]]()
        for number, turn in enumerate(turns, 1):
            answers_to = self._answers if number <= known else self._in_time
            found = None if overdue and number == known else answers_to(turn)
            if found is None:
                return Transcript(observation, [*answers, []], 0.0 if self.owns_reward else None, overdue=True)
            answers.append(found if sum(len(one["content"]) for one in found) <= most else [])
            if not answers[-1]:
                break
        if not self.owns_reward:
            return Transcript(observation, answers, None)
        reward: Any = self._call("get_reward", self.instance.get_reward)
        is_number = isinstance(reward, (int, float, np.integer, np.floating)) and not isinstance(reward, bool)
        if not is_number or not abs(reward) <= LARGEST_REWARD:
            why = f"get_reward returned {reward!r:.80}; return a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
            raise EpisodeError(f"task.environment {self.path!r}: {why}")
        return Transcript(observation, answers, float(reward))

    def _in_time(self, text: str) -> list[Message] | None:
        """The answers to a turn; None if it takes too long. Only the process's own limit ends a call in C."""
        clocks = ("VIRTUAL", "SIGVTALRM", TURN_SECONDS), ("REAL", "SIGALRM", TURN_WAITS)
        timers = clocks if self.limited and hasattr(signal, "setitimer") else ()
        on = True

        def ring(number: int, frame: object) -> None:
            nonlocal on
            if on:  # a second error would keep the timers from being stopped
                on = False
                raise OverdueError

        try:
            for timer, name, seconds in timers:
                signal.signal(getattr(signal, name), ring)
                signal.setitimer(getattr(signal, f"ITIMER_{timer}"), seconds)
            return self._answers(text)
        except OverdueError:
            return None
        finally:
            on = False
            for timer, *_ in timers:
                signal.setitimer(getattr(signal, f"ITIMER_{timer}"), 0.0)

    def _answers(self, text: str) -> list[Message]:
        if self.tools:
            return [self._use(call) for call in CALL.findall(text)]
        reply = self._text("reply", self.instance.reply, text)
        return [] if reply is None else [{"role": "user", "content": reply}]

    def _use(self, call: str) -> Message:
        """Call a tool as the model asks. A mistake, the model's or the tool's, is text for the model."""
        name = ""
        try:
            request = json.loads(call)
            name, arguments = encodable(str(request["name"])), request.get("arguments") or {}
            if name not in self.tools:
                raise LookupError(f"there is no tool {name}")
            result = str(self.tools[name](**arguments))
        except (Exception, SystemExit) as error:  # the model's text, perhaps exit(), and the user's code
            result = str({"error": described(error)})
        return {"role": "tool", "name": name, "content": encodable(result)}

    # Parameters are positional, since a row's columns may have their names.
    def _text(self, name: str, function: Callable[..., Any], /, *arguments: Any, **row: Any) -> str | None:
        text = self._call(name, function, *arguments, **row)
        if text is None or isinstance(text, str):
            return text and encodable(text)
        raise EpisodeError(f"task.environment {self.path!r}: {name} returned {text!r:.80}; return text or None")

    def _call(self, name: str, function: Callable[..., Any], /, *arguments: Any, **row: Any) -> Any:
        try:
            return function(*arguments, **row)
        except EpisodeError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            *within, (path, line, *_) = traceback.extract_tb(error.__traceback__)
            if not within and (code := getattr(function, "__code__", None)):  # the arguments do not fit the method
                path, line = code.co_filename, code.co_firstlineno
            raise EpisodeError(
                f"task.environment {self.path!r}: {name} raised {encodable(described(error)):.300} "
                f"({path}, line {line}); correct it there"
            ) from error


def encodable(text: str) -> str:
    """A text that every tokenizer takes: ``?`` for half of a surrogate pair, which JSON can write."""
    return text.encode("utf-8", "replace").decode()


def described(error: BaseException) -> str:
    """An error's kind and, if it can be written, its text: a KeyError of a number may have too many digits."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def open_environment(path: str, apart: bool = True) -> Environment:
    """The environment that ``task.environment`` names; a RecipeError if that is none.

    With ``apart`` it plays in a process of its own, unless it is built in or an object of this program.
    """
    where = f"task.environment = {path!r}"
    made = look_up(path, "task.environment", ENVIRONMENTS)
    try:
        instance = made()
    except Exception as error:
        raise RecipeError(
            f"{where}: it cannot be made: {type(error).__name__}: {error}; let it be made without arguments"
        ) from error
    if not callable(getattr(instance, "reset", None)):
        raise RecipeError(f"{where}: has no method reset(**row); see docs/environments.md")
    tools = tools_of(instance)
    if not tools and not callable(getattr(instance, "reply", None)):
        raise RecipeError(f"{where}: has neither reply(text) nor a public method as a tool; see docs/environments.md")
    contract = {name: inspect.getattr_static(instance, name, None) for name in ("reset", "reply", "get_reward")}
    for name, method in {**contract, **tools}.items():
        if any(is_of_kind(getattr(method, "__func__", method)) for is_of_kind in LATER):
            raise RecipeError(f"{where}: {name} is async or a generator; write it as a plain method")
    helper = None
    if apart and path not in {*GIVEN, *ENVIRONMENTS}:
        needs = "what the environment imports"
        helper = Helper("ftis.environments.contract", f"plays {path}", needs, [path, *filter(None, sys.path)])
    return Environment(path, instance, tools, helper)


def tools_of(instance: Any) -> dict[str, Callable[..., Any]]:
    """An environment's public methods by name; none if it has ``reply``."""
    if callable(getattr(instance, "reply", None)):
        return {}
    static = dict(inspect.getmembers_static(instance))  # a property may not work before reset
    names = [name for name, value in static.items() if callable(value) or isinstance(value, classmethod)]
    methods = {name: getattr(instance, name) for name in names if not name.startswith("_") and name not in NO_TOOLS}
    kinds = {n: inspect.isfunction if isinstance(static[n], staticmethod) else inspect.ismethod for n in methods}
    return {name: method for name, method in methods.items() if kinds[name](method)}


def tools_named(path: str | None) -> list[Callable[..., Any]]:
    """The tools of the environment that ``task.environment`` names, none without one. Raises as open_environment."""
    return list(open_environment(path, apart=False).tools.values()) if path is not None else []


def load() -> Judge:
    """The work of the helper's process: playing episodes of the environment that its arguments name."""
    sys.path += [place for place in sys.argv[3:] if place not in sys.path]
    environment = replace(open_environment(sys.argv[2], apart=False), limited=True)

    def played(request: dict[str, Any]) -> dict[str, Any]:
        try:
            found = environment.play_here(**request)
        except EpisodeError as error:
            return {"error": str(error)}
        if found.overdue and not request["overdue"]:
            raise RetireError({"played": found})  # the stop may have left the environment broken
        return {"played": found}

    return played


if __name__ == "__main__":
    serve(load)

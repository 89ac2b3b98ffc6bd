"""Completions to rewards: find the recipe's reward function, call it, check its result.

A reward function has TRL's signature, and a recipe names it by its dotted path (``reward.function``)::

    def shorter_is_better(prompts, completions, completion_ids, **columns):
        return [1.0 / len(ids) for ids in completion_ids]

The built-in one, :func:`ftis.rewards.format_and_answer`, is found and called in the same way.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftis.admission import Score, ScoringError
from ftis.config import FtisError, PromptConfig, Recipe, RewardConfig, excerpt
from ftis.prompts import AnswerKind
from ftis.rollouts import Ints, Prompt
from ftis.seams import look_up

RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids", "answer"})
"""Arguments of every reward function. A data set's column of the same name does not replace one."""

LARGEST_REWARD = 1e9
"""The largest size of a reward, and of a weighted sum. The squares of a round's rewards then add up within float32."""


class RewardError(FtisError):
    """A reward function cannot be called, raises, or returns no rewards."""


class CompletionError(RewardError, ScoringError):
    """A reward function fails on some completion. It may not fail on others."""


class CountError(CompletionError):
    """A reward function does not return one number for each completion, whatever they are."""


RewardFunction = Callable[..., Iterable[float]]
"""A function that scores N completions of one prompt: a finite number each, of at most :data:`LARGEST_REWARD` in size.

It is called with names: ``prompts``, N times the question, without template and system prompt; ``completions``, N
texts, each after the prompt's prefill; ``completion_ids``, the token ids of each; ``answer``, N times the expected
answer; and N times the value of each further column of the data set. A parameter named ``answer_kind``,
``think_tag``, ``answer_tag``, ``extract``, ``format_weight`` or ``partial_credit`` gets the recipe's one value.
"""


@dataclass(frozen=True)
class Scorer:
    """A reward function, ready to score the completions of one prompt. :func:`load_scorer` makes one."""

    function: RewardFunction
    path: str
    """The function's dotted path, for messages."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's values of parameters in the function's signature."""
    prefill: str = ""
    """The beginning of each completion, which the prompt holds."""
    required: Sequence[str] = ()
    """The function's arguments without a default."""

    def __call__(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int] | Ints]
    ) -> tuple[float, ...]:
        """One reward per completion. A RewardError if the function raised, or did not return a number for each."""
        n = len(completions)
        taken = RESERVED_COLUMNS | self.settings.keys()
        columns = {name: [value] * n for name, value in prompt.columns.items() if name not in taken}
        try:
            returned = self.function(
                prompts=[prompt.question] * n,
                completions=[self.prefill + completion for completion in completions],
                completion_ids=[ids.tolist() if isinstance(ids, np.ndarray) else list(ids) for ids in completion_ids],
                answer=[prompt.answer] * n,
                **columns,
                **self.settings,
            )
        except FtisError:  # names its own remedy
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise CompletionError(
                f"reward.function {self.path!r} raised {type(error).__name__}: {error} "
                f"({place.filename}, line {place.lineno}); correct it there"
            ) from error
        return self._checked(returned, n)

    def _checked(self, returned: Any, n: int) -> tuple[float, ...]:
        where = f"reward.function {self.path!r} returned"
        try:
            values = None if isinstance(returned, (str, bytes, dict)) else list(returned)
        except TypeError:
            values = None
        if values is None:
            raise CountError(f"{where} {excerpt(returned)}; return a list of {n} numbers, one per completion")
        if len(values) != n:
            found = f"{len(values)} values for {n} completions: {excerpt(returned)}"
            raise CountError(f"{where} {found}; return one number per completion")
        return tuple(_number(value, self.path, position) for position, value in enumerate(values))


@dataclass(frozen=True)
class WeightedScorer:
    """Several reward functions with weights: r = Σ w_i r_i, as in TRL."""

    parts: Sequence[Scorer]
    weights: Sequence[float]
    seen: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """The functions' rewards of each (question, completion) since the last call of :meth:`means`."""

    @property
    def path(self) -> str:
        """The functions' dotted paths, for messages."""
        return ", ".join(part.path for part in self.parts)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The recipe's values of parameters in any function's signature."""
        return {name: value for part in self.parts for name, value in part.settings.items()}

    def __call__(
        self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int] | Ints]
    ) -> tuple[float, ...]:
        """One reward per completion. Raises as :class:`Scorer`."""
        by_part = [part(prompt, completions, completion_ids) for part in self.parts]
        each = list(zip(*by_part, strict=True))
        self.seen.update({(prompt.question, text): rewards for text, rewards in zip(completions, each, strict=True)})
        weighted = [[w * r for w, r in zip(self.weights, rewards, strict=True)] for rewards in each]
        return tuple(_number(_sum(rewards), self.path, position) for position, rewards in enumerate(weighted))

    def means(
        self, own: Iterable[tuple[str, str]], later: Collection[tuple[str, str]] = frozenset()
    ) -> dict[str, float]:
        """``rewards/<function>/mean``, as in TRL, over these (question, completion). Forgets all but ``later`` ones."""
        each_N = [self.seen[one] for one in own if one in self.seen]  # an environment may give the reward itself
        for one in self.seen.keys() - later:
            del self.seen[one]
        means = np.mean(each_N, axis=0).tolist() if each_N else []
        return {f"rewards/{name_of(part.path)}/mean": m for part, m in zip(self.parts, means, strict=False)}


def _sum(parts: Sequence[float]) -> float:
    """The sum to twelve digits. Sums that only rounding sets apart become equal: a group of them has no signal."""
    bits = math.frexp(max(map(abs, parts)))[1]
    return round(sum(parts), 12 - bits * 3 // 10)  # a bit is about 3/10 of a decimal digit


def _number(value: Any, path: str, position: int) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST_REWARD:
        raise CompletionError(
            f"reward.function {path!r} returned {excerpt(value)} for completion {position}; return a finite number "
            f"from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g} for every completion (0.0 for none)"
        )
    return number


def parts_of(score: Score) -> Sequence[Scorer]:
    """The reward functions that a score is made of; none of a score that no recipe names."""
    if isinstance(score, WeightedScorer):
        return score.parts
    return [score] if isinstance(score, Scorer) else []


def name_of(path: str) -> str:
    """The last part of a dotted path."""
    return path.rpartition(".")[2]


def require_columns(score: Scorer, problem: Prompt, task: str) -> None:
    """Refuse a reward function with an argument that no column of a task has. All problems have the same columns."""
    given = {*RESERVED_COLUMNS, *problem.columns, *score.settings}
    if lacking := [name for name in score.required if name not in given]:
        columns = ", ".join(["answer", *problem.columns])
        raise RewardError(
            f"reward.function {score.path!r} takes {lacking[0]!r}, which is no column of task {task!r} (it has "
            f"{columns}; the question is in prompts): give the argument a default, or the problems that column"
        )


def kind_of_answers(reward: RewardConfig, tasks_own: AnswerKind) -> AnswerKind:
    """The recipe's way to compare answers, by default the task's own."""
    return tasks_own if reward.answer == "auto" else reward.answer


def is_built_in(reward: RewardConfig) -> bool:
    """Whether format and answer alone make the reward, and no function of the user's own."""
    return reward.function == RewardConfig().function


def is_graded(recipe: Recipe) -> bool:
    """Whether a completion is one turn that the built-in reward scores, so that its format and answer are known."""
    return recipe.task.environment is None and is_built_in(recipe.reward)


def load_scorer(reward: RewardConfig, prompt: PromptConfig, answer_kind: AnswerKind) -> Scorer | WeightedScorer:
    """The recipe's reward function or weighted functions, ready to call. ``answer_kind`` is the task's own.

    Raises:
        RecipeError: a path leads to no object.
        RewardError: an object cannot be called with a data set's columns, two functions have one name, or the weights
            are not as many as the functions.
    """
    paths, weights = reward.function, reward.reward_weights
    if weights and len(weights) != len(paths):
        counts = f"{len(weights)} weights of {len(paths)} functions in reward.function"
        raise RewardError(f"reward.reward_weights = {list(weights)}: {counts}; give each function one")
    if twice := [path for i, path in enumerate(paths) if name_of(path) in map(name_of, paths[:i])]:
        raise RewardError(f"reward.function: two are called {name_of(twice[0])!r}, as {twice[0]!r} is: rename one")
    parts = [_load(path, reward, prompt, answer_kind) for path in paths]
    if len(parts) > 1 or weights:
        return WeightedScorer(parts, weights or (1.0,) * len(parts))
    return parts[0]


def _load(path: str, reward: RewardConfig, prompt: PromptConfig, answer_kind: AnswerKind) -> Scorer:
    function = look_up(path, "reward.function")
    where = f"reward.function = {path!r}"
    if not callable(function):
        raise RewardError(
            f"{where}: is a {type(function).__name__}, not a function; "
            "name a function f(prompts, completions, completion_ids, **columns) -> list[float]"
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return Scorer(function, path, prefill=prompt.prefill)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise RewardError(
            f"{where}: does not take the data set's columns; add **columns to its arguments, as in "
            "f(prompts, completions, completion_ids, **columns)"
        )
    settings: dict[str, Any] = {
        "answer_kind": kind_of_answers(reward, answer_kind),
        "think_tag": prompt.think_tag,
        "answer_tag": prompt.answer_tag,
        "extract": reward.extract,
        "format_weight": reward.format_weight,
        "partial_credit": reward.partial_credit,
    }
    named = {name: value for name, value in settings.items() if name in parameters}
    by_name = (p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    required = tuple(p.name for p in by_name if p.default is p.empty)
    return Scorer(function, path, named, prompt.prefill, required)

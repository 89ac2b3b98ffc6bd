"""A verdict on a few groups that a peer sampled: whether it can learn from them, and what to change if it cannot."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftis.config import ArmConfig, FtisError, Recipe
from ftis.prompts import AnswerKind
from ftis.recipe.parsing import toml, with_arm
from ftis.rewards.scoring import is_built_in
from ftis.seams import GIVEN, TASKS
from ftis.tasks.problems import load_task

ENOUGH = 0.25
"""The share of groups with signal from which on advice is silent about it."""

PLAIN = "Question: {question}\nAnswer:"
"""The template that advice shows."""
BELOW = "as below"
"""The words by which advice refers to :func:`easy_format`."""


@dataclass(frozen=True)
class Outcome:
    """The rewards of a few groups of one peer.

    Attributes:
        rewards: by group.
        formats, answers: completions whose format, and whose answer, is right; None with a reward of the recipe's own.
        unfinished: completions that reached the longest length.
        groups_a_round: groups that the peer learns from in a round, if nothing is filtered.
        compared: the way to compare answers; None with a reward of the recipe's own.
        example: a problem and its answer if not all answers are numbers; None if they are, and with a reward of the
            recipe's own.
        reads_plain: whether the tokenizer has tokens for :data:`PLAIN`.
    """

    peer: str
    rewards: Sequence[Sequence[float]]
    formats: int | None
    answers: int | None
    unfinished: int
    groups_a_round: int
    compared: AnswerKind | None
    example: Sequence[str] | None
    reads_plain: bool

    @property
    def completions(self) -> int:
        return sum(map(len, self.rewards))

    @property
    def reward(self) -> float:
        return float(np.mean([reward for group in self.rewards for reward in group]))

    @property
    def signal(self) -> float:
        """The share of groups whose rewards differ, so that they carry a gradient."""
        return float(np.mean([len(set(group)) > 1 for group in self.rewards]))

    @property
    def with_signal(self) -> float:
        """The groups of a round that would carry signal, if other peers' groups carry it as often."""
        return self.signal * self.groups_a_round


def verdict(outcome: Outcome) -> str:
    """A sentence on whether there is something to learn from."""
    n = len(outcome.rewards)
    if not outcome.signal:
        return f"in none of {n} groups do the rewards differ, so nothing would be learned"
    from scipy.stats import binomtest  # half a second, which ftis train need not wait for

    interval = binomtest(round(outcome.signal * n), n).proportion_ci()
    if outcome.signal < ENOUGH:
        learns = "it has little"
    else:
        learns = "it has something" if interval.low >= ENOUGH / 2 else "it seems to have something"
    of_all = f"{interval.low:.0%} to {interval.high:.0%} of all, by a 95% interval"
    return f"{outcome.signal:.0%} of {n} groups carry signal ({of_all}), so {learns} to learn from"


def takes(recipe: Recipe, key: str, value: Any) -> bool:
    """Whether training would take the recipe with this setting too."""
    try:
        changed = with_arm(recipe, ArmConfig(name="tried", set={key: value}))
        if changed.task != recipe.task:
            load_task(changed.task)
    except FtisError:
        return False
    return True


def advice(outcome: Outcome, recipe: Recipe) -> list[str]:
    """Changes that let a peer learn; empty if it learns without them.

    Args:
        recipe: of the peer's swarm.
    """
    n, changes = outcome.completions, _about_rewards(outcome, recipe)
    if outcome.unfinished > n / 2:
        end = "end them by sampling.stop, as in stop = ['\\n'] where an answer is a line, or "
        if recipe.sampling.stop:
            end = "show in prompt.examples how they end, or "
        if recipe.task.environment or not outcome.reads_plain:
            end = ""
        changes.append(
            f"{outcome.unfinished} of {n} {_drawn(recipe)} do not end: {end}raise sampling.max_completion_length"
        )
    return changes


def easy_format(recipe: Recipe, example: Sequence[str] | None, compared: str | None) -> str:
    """The part of a recipe that advice refers to, with a line before it; empty if the recipe has it already.

    ``example`` and ``compared`` are those of an :class:`Outcome`.
    """
    if not is_built_in(recipe.reward) or _asks_plainly(recipe, example):  # a user's reward reads answers in its own way
        return ""
    what = "shown how in plain text, and stopped where the next problem would begin"
    text_or_formula = recipe.reward.answer == "auto" and compared in ("exact", "math")
    lines = easy_lines(example, as_numbers=text_or_formula and not example)
    return f"{what} (each line goes into the recipe's own section of that name):\n{lines}"


def easy_lines(example: Sequence[str] | None, as_numbers: bool) -> str:
    """A part of a recipe in which small pretrained models earn a first reward.

    Args:
        example: a problem and its answer, which is boxed; None: answers are numbers.
        as_numbers: whether to compare them as numbers, for a task that by itself does not.
    """
    question, answer = example or ("3 + 4 =", "7")
    shown = {"question": question, "completion": f" \\boxed{{{answer}}}" if example else f" {answer}"}
    stop = "\nQuestion:" if "\n" in answer else "\n"
    about = "; this is a problem of the task" if example else ", in the task's own words"
    lines = [
        "[prompt]",
        'system_prompt = ""',
        'chat_template = "never"',
        f"template = {toml(PLAIN)}",
        *([r'prefill = " \\boxed{"'] if example else []),  # the model then writes the format
        f"[[prompt.examples]]    # two or three{about}",
        *(f"{key} = {toml(text)}" for key, text in shown.items()),
        "[reward]",
        f'extract = "{_extract(example)}"',
        *(['answer = "number"'] if as_numbers else []),
        "[sampling]",
        f"stop = [{toml(stop)}]",
    ]
    return "".join(f"  {line}\n" for line in lines)


def _drawn(recipe: Recipe) -> str:
    return "completions" if recipe.task.environment is None else "episodes"


def _shows(recipe: Recipe) -> bool:
    return bool(recipe.prompt.examples) and recipe.prompt.chat_template == "never"


def _extract(example: Sequence[str] | None) -> str:
    return "boxed" if example else "last_number"


def _asks_plainly(recipe: Recipe, example: Sequence[str] | None) -> bool:
    return _shows(recipe) and not recipe.prompt.system_prompt and recipe.reward.extract == _extract(example)


def _easier(recipe: Recipe, outcome: Outcome, more: str = "") -> str:
    """The ways to more right answers, ``more`` last, and whether lines below show one. Loads easier tasks."""
    easier = f"give easier problems ({', '.join(easier_tasks(recipe)) or 'in the data'})"
    if recipe.task.environment is not None:
        return f"{easier}, or raise sampling.max_turns{more}"
    if outcome.reads_plain and not _shows(recipe):
        easier += ', show worked ones in plain text (prompt.examples, prompt.chat_template = "never")'
    return f"{easier}{more}{_below(recipe, outcome)}"


def _below(recipe: Recipe, outcome: Outcome) -> str:
    fits = outcome.reads_plain and easy_format(recipe, outcome.example, outcome.compared)
    return f", {BELOW}" if fits else ""


def easier_tasks(recipe: Recipe) -> list[str]:
    """Settings of ``task.options``, as texts, that training takes and that make problems smaller.

    A whole number is halved, and a list is cut to its first entry. Options that the recipe leaves out are tried at
    the value that the task's module names in ``OPTIONS``.
    """
    path = "" if recipe.task.name in GIVEN else TASKS.get(recipe.task.name, recipe.task.name)
    module = importlib.import_module(path.rpartition(".")[0] or "ftis")
    found = []
    for key, value in {**getattr(module, "OPTIONS", {}), **recipe.task.options}.items():
        smaller: Any = None
        if type(value) is int and value > 1:
            smaller = value // 2
        elif isinstance(value, list) and len(value) > 1:
            smaller = value[:1]
        if smaller is not None and takes(recipe, f"task.options.{key}", smaller):
            found.append(f"task.options.{key} = {smaller}")
    return found


def _about_rewards(outcome: Outcome, recipe: Recipe) -> list[str]:
    """Changes if few groups carry signal, or if their signal is that of the format alone."""
    n, formats, answers, reward = outcome.completions, outcome.formats, outcome.answers, recipe.reward
    if outcome.signal >= ENOUGH:
        of_format = answers == 0 and reward.format_weight is not None and reward.format_weight < 1
        learned = "so what would be learned is the format alone"
        only_format = of_format and not reward.partial_credit
        return [f"0 of {n} answers are right, {learned}: {_easier(recipe, outcome)}"] if only_format else []
    if formats is not None and formats < n / 10:
        ways = "show it in prompt.examples, or begin it in prompt.prefill, or say in prompt.system_prompt what it is"
        if reward.extract == "tags":
            others = '"boxed"' if outcome.example else '"last_number" or "boxed"'
            how = f"read the answer another way (reward.extract = {others}) and stop asking for tags"
            ways = f'show it in prompt.examples, or begin it in prompt.prefill, or {how} (prompt.system_prompt = "")'
        if not outcome.reads_plain:
            ways = "write prompts in a form that the model knows, and read its answers in its own (reward.extract)"
        return [f"the format is right in {formats} of {n} completions: {ways}{_below(recipe, outcome)}"]
    most = max((reward for group in outcome.rewards for reward in group), default=1.0)
    if outcome.reward > 0.9 and (most <= 1 if answers is None else answers > 0.9 * n):
        return [f"nearly all {_drawn(recipe)} earn the reward already: give harder problems"]
    more = "raise sampling.num_generations"
    if not takes(recipe, "sampling.num_generations", 2 * recipe.sampling.num_generations):
        more = ""
    or_more = f", or {more}" if more else ""
    if answers is not None and answers < n / 10:
        return [f"{answers} of {n} answers are right: {_easier(recipe, outcome, or_more if answers else '')}"]
    if outcome.reward < 0.1:
        earned = sum(reward > 0 for group in outcome.rewards for reward in group)
        return [f"{earned} of {n} {_drawn(recipe)} earn a reward: {_easier(recipe, outcome, or_more)}"]
    return [
        f"about {outcome.with_signal:.0f} of a round's {outcome.groups_a_round} groups carry signal, in the others "
        f"all rewards are equal: {more or 'give other problems'}"
    ]

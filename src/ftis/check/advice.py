"""A verdict on a few groups that a peer sampled: whether it can learn from them, and what to change if it cannot."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

import numpy as np

from ftis.config import ArmConfig, FtisError, Recipe
from ftis.prompts import AnswerKind
from ftis.recipe.parsing import with_arm
from ftis.rewards.scoring import load_scorer
from ftis.seams import TASKS
from ftis.tasks.problems import load_task

ENOUGH = 0.25
"""The share of groups with signal from which on advice is silent about it."""

BELOW = "as below"
"""The words by which advice refers to :func:`easy_formats`."""
WITH_EXAMPLES = """\
  [prompt]
  system_prompt = ""
  chat_template = "never"
  template = "Question: {question}\\nAnswer:"
  [[prompt.examples]]    # two or three, in the task's own words
  question = "3 + 4 ="
  completion = " 7"
  [reward]
  extract = "last_number"
  [sampling]
  stop = ["\\n"]
"""
WITHOUT_TAGS = """\
  [prompt]
  system_prompt = ""
  template = "{question} Give only the number."
  [reward]
  extract = "last_number"
"""
"""Two parts of recipes in which small pretrained models earn a first reward, the one with more signal first."""
IN_A_BOX = """\
  [prompt]
  system_prompt = ""
  chat_template = "never"
  template = "Question: {question}\\nAnswer:"
  prefill = " \\\\boxed{"
  [[prompt.examples]]    # two or three; this is a problem of the task
  question = $question
  completion = $completion
  [reward]
  extract = "boxed"
  [sampling]
  stop = [$stop]
"""
"""The same for answers that are not numbers. The prompt begins the answer, so that the model writes the format."""
AN_EXAMPLE = [{"question": "3 + 4 =", "completion": "7"}]
EXTRACT, AS_NUMBERS = '  extract = "last_number"\n', '  answer = "number"\n'
"""A line of both, and the line after it if a task by itself compares answers as text or as mathematics."""


@dataclass(frozen=True)
class Outcome:
    """The rewards of a few groups of one peer.

    Attributes:
        rewards: by group.
        formats, answers: completions whose format, and whose answer, is right; None with a reward of the recipe's own.
        unfinished: completions that reached the longest length.
        groups_a_round: groups that the peer learns from in a round, if nothing is filtered.
        compared: the way to compare answers; None with a reward of the recipe's own.
        instruct: whether the model's tokenizer has a chat template.
        example: a problem and its answer if not all answers are numbers; None if they are, and with a reward of the
            recipe's own.
    """

    peer: str
    rewards: tuple[tuple[float, ...], ...]
    formats: int | None
    answers: int | None
    unfinished: int
    groups_a_round: int
    compared: AnswerKind | None
    instruct: bool
    example: tuple[str, str] | None

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
        """The groups of a round that would carry signal, if the other peers' do as often."""
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


def takes(recipe: Recipe, settings: Mapping[str, Any]) -> bool:
    """Whether training would take the recipe with these settings too, and whether each would have an effect."""
    try:
        changed = with_arm(recipe, ArmConfig(name="tried", set=dict(settings)))
        if changed.task != recipe.task:
            load_task(changed.task)
        kind: AnswerKind = "exact"
        before, after = (load_scorer(one.reward, one.prompt, kind) for one in (recipe, changed))
    except FtisError:
        return False
    idle = changed.reward != recipe.reward and before.settings == after.settings
    return changed != recipe and not idle


Way = tuple[str, Mapping[str, Any]]
"""A change in words, and its settings as an example."""


def _ways(recipe: Recipe, ways: Sequence[Way]) -> str:
    """The changes in words whose settings the recipe takes, as a part of a sentence."""
    return ", or ".join(words for words, settings in ways if takes(recipe, settings))


def advice(outcome: Outcome, recipe: Recipe) -> list[str]:
    """Changes that let a peer learn and that training takes with this recipe; empty if it learns without them.

    Args:
        recipe: of the peer's swarm.
    """
    n, sampling = outcome.completions, recipe.sampling
    changes = _about_rewards(outcome, recipe)
    if outcome.unfinished > n / 2:
        longer = (
            "raise sampling.max_completion_length",
            {"sampling.max_completion_length": 2 * sampling.max_completion_length},
        )
        end: Way = ("show in prompt.examples how they end", {"prompt.examples": AN_EXAMPLE})
        if not sampling.stop:
            end = (
                "end them by sampling.stop, as in stop = ['\\n'] where an answer is a line",
                {"sampling.stop": ["\n"]},
            )
        ways = _ways(recipe, [longer] if recipe.task.environment else [end, longer])
        changes.append(f"{outcome.unfinished} of {n} {_drawn(recipe)} do not end: {ways}")
    return changes


def easy_formats(outcomes: Sequence[Outcome], recipe: Recipe) -> list[str]:
    """The parts of recipes that advice refers to, with a line before each, without those that the recipe has.

    Examples are for any model; the other part is for one with a chat template, which it keeps.

    Args:
        outcomes: of the peers that were referred to them.
    """
    example = next((one.example for one in outcomes if one.example), None)
    asks_plainly = _asks_plainly(recipe, example)
    parts = []
    if not takes(recipe, {"reward.extract": "boxed" if recipe.reward.extract == "last_number" else "last_number"}):
        return []  # a reward of the recipe's own reads answers in its own way
    if outcomes and not (asks_plainly and _shows(recipe)):
        what = "shown how in plain text, and stopped where the next problem would begin"
        lines = _in_a_box(*example) if example else WITH_EXAMPLES
        parts.append(f"{what} (each line goes into the recipe's own section of that name):\n{lines}")
    if any(one.instruct for one in outcomes) and not asks_plainly and not example:
        parts.append(f"or, where that is too little, a chat model asked for a number alone:\n{WITHOUT_TAGS}")
    if recipe.reward.answer == "auto" and any(one.compared in ("exact", "math") for one in outcomes):
        parts = [part.replace(EXTRACT, EXTRACT + AS_NUMBERS) for part in parts]
    return parts


def _in_a_box(question: str, answer: str) -> str:
    stop = "\nQuestion:" if "\n" in answer else "\n"
    texts = {"question": question, "completion": f" \\boxed{{{answer}}}", "stop": stop}
    return Template(IN_A_BOX).substitute({key: json.dumps(text, ensure_ascii=False) for key, text in texts.items()})


def _drawn(recipe: Recipe) -> str:
    return "completions" if recipe.task.environment is None else "episodes"


def _asks_plainly(recipe: Recipe, example: tuple[str, str] | None) -> bool:
    return not recipe.prompt.system_prompt and recipe.reward.extract == ("boxed" if example else "last_number")


def _shows(recipe: Recipe) -> bool:
    return bool(recipe.prompt.examples) and recipe.prompt.chat_template == "never"


def _easier(recipe: Recipe, or_else: str = "") -> str:
    """The ways to more right answers, then ``or_else``, and where they are shown. Each easier task is loaded."""
    prompt = recipe.prompt
    easier = f"give easier problems ({', '.join(easier_tasks(recipe)) or 'in the data'})"
    if recipe.task.environment is not None:
        turns = _ways(recipe, [("raise sampling.max_turns", {"sampling.max_turns": recipe.sampling.max_turns + 2})])
        return f"{easier}, or {turns}{or_else}" if turns else f"{easier}{or_else}"
    if _shows(recipe):
        return f"{easier}{or_else}"
    shown = "show the worked ones" if prompt.examples else "show worked ones in prompt.examples"
    if prompt.chat_template != "never":
        comma = "" if prompt.examples else ","
        shown += f'{comma} in plain text (prompt.chat_template = "never", prompt.system_prompt = "")'
    return f"{easier}, {shown}{or_else}, {BELOW}"


def easier_tasks(recipe: Recipe) -> list[str]:
    """Settings of ``task.options``, as texts, that training takes and that make problems smaller.

    A whole number is halved, and a list is cut to its first entry. Options that the recipe leaves out are tried at
    the value that the task's module names in ``OPTIONS``.
    """
    module = importlib.import_module(TASKS.get(recipe.task.name, recipe.task.name).rpartition(".")[0] or "ftis")
    found = []
    for key, value in {**getattr(module, "OPTIONS", {}), **recipe.task.options}.items():
        smaller: Any = None
        if type(value) is int and value > 1:
            smaller = value // 2
        elif isinstance(value, list) and len(value) > 1:
            smaller = value[:1]
        if smaller is not None and takes(recipe, {f"task.options.{key}": smaller}):
            found.append(f"task.options.{key} = {smaller}")
    return found


def _about_rewards(outcome: Outcome, recipe: Recipe) -> list[str]:
    """Changes if few groups carry signal, or if it is that of the format alone."""
    n, formats, answers, reward = outcome.completions, outcome.formats, outcome.answers, recipe.reward
    more: Way = ("raise sampling.num_generations", {"sampling.num_generations": 2 * recipe.sampling.num_generations})
    low, weight = outcome.signal < ENOUGH, reward.format_weight
    if not low:
        of_format = answers == 0 and weight is not None and weight < 1 and not reward.partial_credit
        learned = "so what would be learned is the format alone"
        return [f"0 of {n} answers are right, {learned}: {_easier(recipe)}"] if of_format else []
    if formats is not None and formats < n / 10:
        other: Way = ("say in prompt.system_prompt what it is", {"prompt.system_prompt": "Answer with a number."})
        if reward.extract == "tags":
            ways = '"boxed"' if outcome.example else '"last_number" or "boxed"'
            how = f"read the answer another way (reward.extract = {ways}) and ask for tags no more"
            other = (f'{how} (prompt.system_prompt = "")', {"reward.extract": "boxed"})
        ways = _ways(
            recipe,
            [
                ("show it in prompt.examples", {"prompt.examples": AN_EXAMPLE}),
                ("begin it in prompt.prefill", {"prompt.prefill": f"{recipe.prompt.prefill} "}),
                other,
            ],
        )
        shown = "" if _asks_plainly(recipe, outcome.example) and _shows(recipe) else f", {BELOW}"
        return [f"the format is right in {formats} of {n} completions: {ways}{shown}"]
    if outcome.reward > 0.9 and (answers is None or answers > 0.9 * n):
        return [f"nearly all {_drawn(recipe)} earn the reward already: give harder problems"]
    if answers is not None and answers < n / 10:
        raised = f", or {ways}" if answers and (ways := _ways(recipe, [more])) else ""
        return [f"{answers} of {n} answers are right: {_easier(recipe, raised)}"]
    if outcome.reward < 0.1:
        earned = sum(reward > 0 for group in outcome.rewards for reward in group)
        raised = f", or {ways}" if (ways := _ways(recipe, [more])) else ""
        return [f"{earned} of {n} {_drawn(recipe)} earn a reward: {_easier(recipe, raised)}"]
    ways = _ways(recipe, [more]) or "give other problems"
    return [
        f"about {outcome.with_signal:.0f} of a round's {outcome.groups_a_round} groups carry signal, in the others "
        f"all rewards are equal: {ways}"
    ]

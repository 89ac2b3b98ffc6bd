"""A verdict on a few groups that a peer sampled: whether it can learn from them, and what to change if it cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

import numpy as np
from scipy.stats import binomtest

from ftis.config import PromptConfig, RewardConfig
from ftis.prompts import AnswerKind

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
EXTRACT, AS_NUMBERS = '  extract = "last_number"\n', '  answer = "number"\n'
"""A line of both, and the line behind it if a task by itself compares answers as text or as mathematics."""


@dataclass(frozen=True)
class Outcome:
    """The rewards of a few groups of one peer.

    Attributes:
        rewards: by group.
        formats, answers: completions whose format, and whose answer, is right; None with a reward of the recipe's own.
        unfinished: completions that reached the longest length.
        groups_a_round: groups that the peer learns from in a round, if nothing is filtered.
        reserve: prompts in reserve for each of a round's, see ``training.resample``.
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
    reserve: float
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
        return min(1.0, self.signal * (1 + self.reserve)) * self.groups_a_round


def verdict(outcome: Outcome) -> str:
    """A sentence on whether there is something to learn from."""
    n = len(outcome.rewards)
    if not outcome.signal:
        return f"in none of {n} groups do the rewards differ, so nothing would be learned"
    interval = binomtest(round(outcome.signal * n), n).proportion_ci()
    if outcome.signal < ENOUGH:
        learns = "it has little"
    else:
        learns = "it has something" if interval.low >= ENOUGH / 2 else "it seems to have something"
    of_all = f"{interval.low:.0%} to {interval.high:.0%} of all, by a 95% interval"
    return f"{outcome.signal:.0%} of {n} groups carry signal ({of_all}), so {learns} to learn from"


def advice(outcome: Outcome, reward: RewardConfig, stop: tuple[str, ...], prompt: PromptConfig) -> list[str]:
    """Changes that let a peer learn; empty if it would. Settings that the recipe has already are left out.

    Args:
        stop: the recipe's ``sampling.stop``.
    """
    n = outcome.completions
    said = _about_rewards(outcome, reward, prompt)
    if outcome.unfinished > n / 2:
        end = (
            "show in prompt.examples how they end"
            if stop
            else "end them by sampling.stop, as in stop = ['\\n'] where an answer is a line"
        )
        said.append(
            f"{outcome.unfinished} of {n} completions do not end: {end}, or raise sampling.max_completion_length"
        )
    return said


def easy_formats(outcomes: Sequence[Outcome], prompt: PromptConfig, reward: RewardConfig) -> list[str]:
    """The parts of recipes that advice refers to, with a line before each, without those that the recipe has.

    Examples are for any model; the other part is for one with a chat template, which it keeps.

    Args:
        outcomes: of the peers that were referred to them.
    """
    example = next((one.example for one in outcomes if one.example), None)
    asks_plainly = _asks_plainly(prompt, reward, example)
    parts = []
    if outcomes and not (asks_plainly and _shows(prompt)):
        what = "shown how in plain text, and stopped where the next problem would begin"
        lines = _in_a_box(*example) if example else WITH_EXAMPLES
        parts.append(f"{what} (each line goes into the recipe's own section of that name):\n{lines}")
    if any(one.instruct for one in outcomes) and not asks_plainly and not example:
        parts.append(f"or, where that is too little, a chat model asked for a number alone:\n{WITHOUT_TAGS}")
    if reward.answer == "auto" and any(one.compared in ("exact", "math") for one in outcomes):
        parts = [part.replace(EXTRACT, EXTRACT + AS_NUMBERS) for part in parts]
    return parts


def _in_a_box(question: str, answer: str) -> str:
    stop = "\nQuestion:" if "\n" in answer else "\n"
    texts = {"question": question, "completion": f" \\boxed{{{answer}}}", "stop": stop}
    return Template(IN_A_BOX).substitute({key: json.dumps(text, ensure_ascii=False) for key, text in texts.items()})


def _asks_plainly(prompt: PromptConfig, reward: RewardConfig, example: tuple[str, str] | None) -> bool:
    return not prompt.system_prompt and reward.extract == ("boxed" if example else "last_number")


def _shows(prompt: PromptConfig) -> bool:
    return bool(prompt.examples) and prompt.chat_template == "never"


def _easier(prompt: PromptConfig) -> tuple[str, str]:
    """The way to more right answers, and where it is shown."""
    easier, plain = "give easier problems (by task.options, or in the data)", prompt.chat_template == "never"
    if prompt.examples and plain:
        return easier, ""
    shown = "show the worked ones" if prompt.examples else "show worked ones in prompt.examples"
    if not plain:
        comma = "" if prompt.examples else ","
        shown += f'{comma} in plain text (prompt.chat_template = "never", prompt.system_prompt = "")'
    return f"{easier}, {shown}", f", {BELOW}"


def _about_rewards(outcome: Outcome, reward: RewardConfig, prompt: PromptConfig) -> list[str]:
    """Changes if few groups carry signal, or if it is that of the format alone."""
    n, formats, answers = outcome.completions, outcome.formats, outcome.answers
    easier, below = _easier(prompt)
    low, weight = outcome.signal < ENOUGH, reward.format_weight
    if not low:
        of_format = answers == 0 and weight is not None and weight < 1 and not reward.partial_credit
        learned = "so what would be learned is the format alone"
        return [f"0 of {n} answers are right, {learned}: {easier}{below}"] if of_format else []
    if formats is not None and formats < n / 10:
        other = "say in prompt.system_prompt what it is"
        if reward.extract == "tags":
            ways = '"boxed"' if outcome.example else '"last_number" or "boxed"'
            other = (
                f"read the answer another way (reward.extract = {ways}) and ask for tags no more "
                f'(prompt.system_prompt = "")'
            )
        shown = "" if _asks_plainly(prompt, reward, outcome.example) and _shows(prompt) else f", {BELOW}"
        return [
            f"the format is right in {formats} of {n} completions: show it in prompt.examples, begin it in "
            f"prompt.prefill, or {other}{shown}"
        ]
    if outcome.reward > 0.9 and (answers is None or answers > 0.9 * n):
        return ["nearly all completions earn the reward already: give harder problems"]
    if answers is not None and answers < n / 10:
        more = ", or raise sampling.num_generations" if answers else ""
        return [f"{answers} of {n} answers are right: {easier}{more}{below}"]
    if outcome.reward < 0.1:
        earned = sum(reward > 0 for group in outcome.rewards for reward in group)
        return [f"{earned} of {n} completions earn a reward: {easier}, or raise sampling.num_generations{below}"]
    filled = "raise training.resample_budget" if outcome.reserve else 'set training.resample = "fill"'
    return [
        f"about {outcome.with_signal:.0f} of a round's {outcome.groups_a_round} groups carry signal, in the others "
        f"all rewards are equal: raise sampling.num_generations, or {filled}"
    ]

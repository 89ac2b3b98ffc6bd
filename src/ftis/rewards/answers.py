"""The built-in reward: the paper's binary one, 1 if format and answer are both right, or a weighted mean of the two.

Other people's models wrote the text, so everything here is bounded in time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ftis.config import excerpt
from ftis.prompts import AnswerKind
from ftis.rewards import gym
from ftis.rewards.formulas import formulas_equal
from ftis.rewards.grammar import partners
from ftis.rewards.gym_judge import OwnScore
from ftis.rewards.numbers import MAX_ANSWER_LENGTH, last_number, read_number
from ftis.rewards.scoring import RewardError, Scorer
from ftis.rewards.words import units_differ, without_asked
from ftis.rollouts import Prompt

Extract = Literal["tags", "boxed", "last_number"]
"""The place of an answer in a completion; see :func:`extract_answer`."""


def format_and_answer(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[str],
    answer_kind: AnswerKind = "number",
    think_tag: str = "think",
    answer_tag: str = "answer",
    extract: Extract = "tags",
    format_weight: float | None = None,
    partial_credit: bool = False,
    reasoning_gym: Sequence[OwnScore | None] | None = None,
    **columns: Any,
) -> list[float]:
    """The reward of each of N completions: f · a, or w f + (1 − w) a with a ``format_weight`` w.

    f is 1 if the format is right, else 0. a is 1 if the answer is right, else 0; with ``partial_credit`` it is the
    answer's score. :func:`graded` gives both.

    Args:
        prompts: [N] the problems; an answer may name the things that its problem asks to count.
        answer_kind: how answers are compared, see :func:`answers_equal`.
        think_tag, answer_tag, extract: the format, see :func:`extract_answer`.
        reasoning_gym: [N] the problem's own scorer, for ``answer_kind = "reasoning_gym"``.
    """
    rewards = []
    own_scores = reasoning_gym or [None] * len(completions)
    for prompt, completion, expected, own in zip(prompts, completions, answer, own_scores, strict=True):
        well_formed, score = graded(completion, expected, answer_kind, think_tag, answer_tag, extract, own, str(prompt))
        right, w = score if partial_credit else float(score >= 1), format_weight
        rewards.append(well_formed * right if w is None else w * well_formed + (1 - w) * right)
    return rewards


def graded(
    completion: str,
    expected: str,
    answer_kind: AnswerKind,
    think_tag: str = "think",
    answer_tag: str = "answer",
    extract: Extract = "tags",
    own: OwnScore | None = None,
    problem: str = "",
) -> tuple[bool, float]:
    """Whether a completion's format is right, and its answer's score, from 0 to 1.

    A text in a wrong format may still have an answer: the text between its last pair of answer tags.
    """
    given = extract_answer(completion, think_tag, answer_tag, extract)
    well_formed = given is not None
    if given is None and extract == "tags":
        before, closed, _ = completion.rpartition(f"</{answer_tag}>")
        _, opened, inside = before.rpartition(f"<{answer_tag}>")
        if closed and opened:
            given = inside.strip() or None
    if given is not None and answer_kind in ("number", "math") and len(given) <= MAX_ANSWER_LENGTH:
        given = without_asked(given, problem)
    return well_formed, 0.0 if given is None else answer_score(given, expected, answer_kind, own)


def require_rewardable(score: object, problems: Iterable[Prompt], where: str) -> None:
    """Refuse a problem whose own answer, written in the reward's format, earns nothing from the built-in reward.

    Only an answer that the format changes is compared; any other is right. A problem of reasoning-gym may have no
    answer, as its data set scores any solution. Another reward may read answers in another way.
    """
    if not isinstance(score, Scorer) or score.function is not format_and_answer:
        return
    kind, partial = score.settings["answer_kind"], score.settings["partial_credit"]
    layout = think, tag, extract = score.settings["think_tag"], score.settings["answer_tag"], score.settings["extract"]
    for problem in problems:
        answer, own = problem.answer, problem.columns.get("reasoning_gym")
        written = {
            "tags": f"<{think}></{think}><{tag}>{answer}</{tag}>",
            "boxed": f"\\boxed{{{answer}}}",
            "last_number": answer,
        }[extract]
        if kind == "number" and answer.strip() and read_number(answer) is None:
            tags = ' with reward.extract = "tags"' if extract == "last_number" else ""
            why = f'is no number, and answers are compared as numbers: set reward.answer = "exact" or "math"{tags}'
        elif (own and not answer and kind == "reasoning_gym") or extract_answer(written, *layout) == answer.strip():
            continue
        else:
            well_formed, found = graded(written, answer, kind, *layout, own)
            if well_formed and found and (found >= 1 or partial):
                continue
            why = f"earns nothing with reward.extract = {extract!r}: {_REMEDIES[extract]}"
        place = f"{where} {problem.item} ({excerpt(problem.question)}): its answer {excerpt(answer)}"
        raise RewardError(f"{place} {why}, or leave the problem out")


_REMEDIES = {
    "tags": "an answer may not be blank or hold the tags; choose others by prompt.think_tag and prompt.answer_tag",
    "boxed": 'the braces of an answer in a box must balance; set reward.extract = "tags"',
    "last_number": 'only a number can be right; set reward.extract = "tags" or "boxed"',
}


def extract_answer(
    completion: str, think_tag: str = "think", answer_tag: str = "answer", extract: Extract = "tags"
) -> str | None:
    """The answer of a completion in the right format, without surrounding whitespace, else ``None``. Linear time.

    - ``tags``: ``<think>…</think><answer>…</answer>``, each of the four tags once and in this order, nothing but
      whitespace before, between and after, and an answer that is not blank.
    - ``boxed``: the content of the last ``\\boxed{…}`` or ``\\fbox{…}`` with any, whose braces must balance.
    - ``last_number``: the last number of the text.
    """
    if extract == "boxed":
        return _last_boxed(completion)
    if extract == "last_number":
        return last_number(completion)
    text = completion.strip()
    think, end_think = f"<{think_tag}>", f"</{think_tag}>"
    answer, end_answer = f"<{answer_tag}>", f"</{answer_tag}>"
    if any(text.count(tag) != 1 for tag in (think, end_think, answer, end_answer)):
        return None
    if not (text.startswith(think) and text.endswith(end_answer)):
        return None
    # Each tag occurs once, so each partition is the only possible one.
    _, _, rest = text.partition(end_think)
    between, _, tail = rest.partition(answer)
    if between.strip() or not tail.endswith(end_answer):
        return None
    return tail.removesuffix(end_answer).strip() or None


def _last_boxed(text: str) -> str | None:
    """The content of the last box that is not empty, unless its braces never close."""
    ends = partners(text)
    for found in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*(?=\{)", text))):
        if found.end() not in ends:
            return None
        if inside := text[found.end() + 1 : ends[found.end()]].strip():
            return inside
    return None


def answer_score(given: str, expected: str, kind: AnswerKind, own: OwnScore | None) -> float:
    """1 if a given answer means the expected one, else 0; or the score of the problem's ``own`` scorer."""
    if kind != "reasoning_gym":
        return float(answers_equal(given, expected, kind))
    if own is None:
        raise RewardError('answer kind "reasoning_gym": only problems of reasoning-gym have a scorer; use another kind')
    given, expected = given.strip(), expected.strip()
    if given == expected or not given or len(given) > max(MAX_ANSWER_LENGTH, 2 * len(expected)):
        return float(given == expected and bool(given))
    return gym.score(own["dataset"], own["options"], own["entry"], given)


def answers_equal(given: str, expected: str, kind: AnswerKind) -> bool:
    """Whether a given answer means the expected one. Bounded in time and memory for any ``given``.

    - ``number``: equal rational numbers, after removing currency and percent signs, thousands separators, units and a
      final period (``$1,000.0`` is ``1000``; ``1/2`` is ``0.5``; ``50%`` is ``50``). If both answers have a unit, here
      and below, it must be the same.
    - ``math``: equal LaTeX, by math-verify, decimals to six digits after the point. If both answers have a rate or a
      base, it must be the same.
    - ``exact``: equal text, without surrounding whitespace.

    A RewardError if there is no such kind, a RunError if the process that compares LaTeX cannot be started.
    """
    if kind not in ("number", "math", "exact"):
        raise RewardError(f"answer kind {kind!r}: use one of number, math, exact")
    given, expected = given.strip(), expected.strip()
    if given == expected:
        return bool(given)
    if kind == "exact" or len(given) > MAX_ANSWER_LENGTH:
        return False
    if kind == "number":
        number = read_number(given)
        return number is not None and number == read_number(expected) and not units_differ(given, expected)
    return formulas_equal(given, expected)

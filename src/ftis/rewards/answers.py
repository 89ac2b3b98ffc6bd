"""The built-in reward: the paper's binary one, 1 where format and answer are both right, or the two weighed apart.

Rewards are computed from text that other people's models wrote, so everything here is bounded in time and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ftis.prompts import AnswerKind
from ftis.rewards import gym
from ftis.rewards.formulas import formulas_equal
from ftis.rewards.numbers import MAX_ANSWER_LENGTH, last_number, read_number
from ftis.rewards.scoring import RewardError, Scorer
from ftis.rollouts import Prompt
from ftis.tasks.gym_judge import OwnScore
from ftis.tasks.problems import excerpt

Extract = Literal["tags", "boxed", "last_number"]
"""Where an answer stands in a completion."""


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
    pass_mark: float = 1.0,
    partial_credit: bool = False,
    reasoning_gym: Sequence[OwnScore | None] | None = None,
    **columns: Any,
) -> list[float]:
    """For each completion f · a, or w f + (1 − w) a with a ``format_weight`` w; f and a are 1 where format and answer
    are right, else 0. With ``partial_credit`` a is the answer's score.

    :func:`graded` tells f and a.

    Args:
        completions: [N] texts.
        answer: [N] the expected answers.
        answer_kind: how answers are compared, see :func:`answers_equal`.
        think_tag, answer_tag, extract: the format, see :func:`extract_answer`.
        pass_mark: the least score of a right answer.
        reasoning_gym: [N] how the data set scores an answer itself.
        prompts, completion_ids, columns: ignored; they belong to the signature of reward functions.
    """
    rewards = []
    own_scores = reasoning_gym or [None] * len(completions)
    for completion, expected, own in zip(completions, answer, own_scores, strict=True):
        well_formed, score = graded(completion, expected, answer_kind, think_tag, answer_tag, extract, own)
        right = score if partial_credit else float(score >= pass_mark)
        if format_weight is None:
            rewards.append(well_formed * right)
        else:
            rewards.append(format_weight * well_formed + (1 - format_weight) * right)
    return rewards


def graded(
    completion: str,
    expected: str,
    answer_kind: AnswerKind,
    think_tag: str = "think",
    answer_tag: str = "answer",
    extract: Extract = "tags",
    own: OwnScore | None = None,
) -> tuple[bool, float]:
    """Whether a completion's format is right, and its answer's score, from 0 to 1.

    With tags, an answer counts where the format is wrong too: that between the last pair of answer tags.
    """
    given = extract_answer(completion, think_tag, answer_tag, extract)
    well_formed = given is not None
    if given is None and extract == "tags":
        given = _last_between(completion, f"<{answer_tag}>", f"</{answer_tag}>")
    return well_formed, 0.0 if given is None else answer_score(given, expected, answer_kind, own)


def require_rewardable(score: object, problems: Iterable[Prompt], where: str) -> None:
    """Refuse a problem whose own answer, written in the reward's format, is not right to the built-in reward.

    An answer that comes out of the format as it was put in is right by itself; others alone are compared. A problem of
    reasoning-gym that has none is scored by what solves it.

    Args:
        score: anything but a :class:`~ftis.rewards.scoring.Scorer` of the built-in reward has answers of its own.
        where: what the problems are, for messages.

    Raises:
        RewardError: the first such problem, its answer and what to do.
    """
    if not isinstance(score, Scorer) or score.function is not format_and_answer:
        return
    of = score.settings
    layout = (of["think_tag"], of["answer_tag"], of["extract"])
    think, answer, extract = layout
    for problem in problems:
        if of["answer_kind"] == "number" and problem.answer.strip() and read_number(problem.answer) is None:
            tags = ' with reward.extract = "tags"' if extract == "last_number" else ""
            why = f'is no number, and answers are compared as numbers: set reward.answer = "exact" or "math"{tags}'
            raise _refusal(problem, where, why)
        if not problem.answer and of["answer_kind"] == "reasoning_gym" and "reasoning_gym" in problem.columns:
            continue
        written = {
            "tags": f"<{think}></{think}><{answer}>{problem.answer}</{answer}>",
            "boxed": f"\\boxed{{{problem.answer}}}",
            "last_number": problem.answer,
        }[extract]
        if extract_answer(written, *layout) == problem.answer.strip():
            continue
        well_formed, found = graded(
            written, problem.answer, of["answer_kind"], *layout, problem.columns.get("reasoning_gym")
        )
        if not well_formed or not found or (found < of["pass_mark"] and not of["partial_credit"]):
            raise _refusal(problem, where, f"earns nothing with reward.extract = {extract!r}: {_REMEDIES[extract]}")


def _refusal(problem: Prompt, where: str, why: str) -> RewardError:
    about = f"{where} {problem.item} ({excerpt(problem.question)}): its answer {excerpt(problem.answer)}"
    return RewardError(f"{about} {why}, or leave the problem out")


_REMEDIES = {
    "tags": "it may not be blank nor hold the tags; choose others by prompt.think_tag and prompt.answer_tag",
    "boxed": 'the braces of an answer in a box must balance; set reward.extract = "tags"',
    "last_number": 'only numbers can be right there; set reward.extract = "tags" or "boxed"',
}


def extract_answer(
    completion: str, think_tag: str = "think", answer_tag: str = "answer", extract: Extract = "tags"
) -> str | None:
    """The answer of a completion in the right format, without surrounding whitespace, else ``None``.

    The format of ``tags`` is ``<think>…</think><answer>…</answer>``: each of the four tags exactly once and in this
    order, nothing but whitespace before, between and after, and an answer that is not blank. That of ``boxed`` is a
    ``\\boxed{…}`` with balanced braces; the last one counts. That of ``last_number`` is any number; the last one
    counts. Linear in the text.
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


def _last_between(text: str, start: str, end: str) -> str | None:
    """What stands between the last ``end`` and the ``start`` before it."""
    before, found, _ = text.rpartition(end)
    _, begun, inside = before.rpartition(start)
    return inside.strip() or None if found and begun else None


def _last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{…}``, whose braces must balance."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:end].strip() or None
    return None


def answer_score(given: str, expected: str, kind: AnswerKind, own: OwnScore | None = None) -> float:
    """1 where a given answer means the expected one, else 0, or its data set's ``own`` score.

    Raises:
        RewardError: there is no such kind, ``reasoning_gym`` has no ``own``, or the process that compares or scores
            cannot be started.
    """
    if kind != "reasoning_gym":
        return float(answers_equal(given, expected, kind))
    if own is None:
        raise RewardError('answer kind "reasoning_gym": only its own problems can be scored so; use another')
    given, expected = given.strip(), expected.strip()
    if given == expected or not given or len(given) > max(MAX_ANSWER_LENGTH, 2 * len(expected)):
        return float(given == expected and bool(given))
    return gym.score(own["dataset"], own["options"], own["entry"], given)


def answers_equal(given: str, expected: str, kind: AnswerKind) -> bool:
    """Whether a given answer means the expected one. Bounded in time and memory for any ``given``.

    Args:
        given: from a completion; may be hostile.
        expected: from the data set.
        kind: ``number``: equal as rational numbers, after removing currency and percent signs, thousands
            separators, units and a final period (``$1,000.0`` is ``1000``; ``1/2`` is ``0.5``; ``50%`` is ``50``).
            ``math``: equal as LaTeX, by math-verify, decimals to six digits behind the point; units, rates and bases
            that both have must be the same. ``exact``: equal as text without surrounding whitespace.

    Raises:
        RewardError: there is no such kind, or the process that compares LaTeX cannot be started.
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
        return number is not None and number == read_number(expected)
    return formulas_equal(given, expected)

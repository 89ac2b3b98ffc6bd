"""The paper's binary reward: 1 where a completion has the right format and the right final answer, else 0.

Rewards are computed from text that other people's models wrote, so everything here is bounded in time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from ftis.prompts import AnswerKind
from ftis.rewards.numbers import MAX_ANSWER_LENGTH, read_number
from ftis.rewards.scoring import RewardError


def format_and_answer(
    prompts: Sequence[Any],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[str],
    answer_kind: AnswerKind = "number",
    think_tag: str = "think",
    answer_tag: str = "answer",
    **columns: Any,
) -> list[float]:
    """1 for each completion whose format and answer are both right, else 0.

    Args:
        completions: [N] texts.
        answer: [N] the expected answers.
        answer_kind: how answers are compared, see :func:`answers_equal`.
        think_tag, answer_tag: the format's tags, see :func:`extract_answer`.
        prompts, completion_ids, columns: ignored; they belong to the signature of reward functions.
    """
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        given = extract_answer(completion, think_tag, answer_tag)
        rewards.append(float(given is not None and answers_equal(given, expected, answer_kind)))
    return rewards


def extract_answer(completion: str, think_tag: str = "think", answer_tag: str = "answer") -> str | None:
    """The answer of a completion in the right format, else ``None``.

    The format is ``<think>…</think><answer>…</answer>``: each of the four tags exactly once and in this order,
    nothing but whitespace before, between and after, and an answer that is not blank. Linear in the text.

    Returns:
        The text between the answer tags without surrounding whitespace.
    """
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


def answers_equal(given: str, expected: str, kind: AnswerKind) -> bool:
    """Whether a given answer means the expected one. Bounded in time and memory for any ``given``.

    Args:
        given: from a completion; may be hostile.
        expected: from the data set.
        kind: ``number``: equal as rational numbers, after removing currency and percent signs, thousands
            separators and a final period (``$1,000.0`` is ``1000``; ``1/2`` is ``0.5``; ``50%`` is ``50``).
            ``math``: equal as LaTeX, by math-verify. ``exact``: equal as text without surrounding whitespace.

    Raises:
        RewardError: there is no such kind, or the process that compares LaTeX cannot be started.
    """
    if kind not in get_args(AnswerKind):
        raise RewardError(f"answer kind {kind!r}: use one of {', '.join(get_args(AnswerKind))}")
    if len(given) > MAX_ANSWER_LENGTH:
        return False
    given, expected = given.strip(), expected.strip()
    if given == expected:
        return bool(given)
    if kind == "exact":
        return False
    if kind == "number":
        number = read_number(given)
        return number is not None and number == read_number(expected)
    # Imported here because latex.py is also run as a process, which imports this package first.
    from ftis.rewards.latex import formulas_equal

    return formulas_equal(given, expected)

"""The score of an answer by its data set of reasoning-gym, with guards against answers that it was not made for.

Many problems have more than one right answer, and many answers more than one spelling. Some data sets evaluate an
answer as Python: here it can be a literal or a formula and nothing else. Some give the full score to a text that is no
answer: ``nan`` is at least as good as any number, and ``x/x`` is a 1 without any given number. Such answers score
0. A data set that gives the full score to other texts does not score itself (:func:`scores_itself`).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, TypedDict

from ftis.rewards.numbers import read_number

NAMES = frozenset(
    {"Integer", "Float", "Rational", "Symbol", "sqrt", "exp", "log", "Abs", "erf", "sin", "cos", "tan", "sec", "csc"}
    | {"cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "pi", "E", "I"}
)
"""Names that a formula may use, besides its data set's own symbols."""
NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)
SUMS = {"countdown", "puzzle24"}
"""Data sets whose answers combine given numbers. Their scorers only look for digits."""
SUM = re.compile(r"[0-9+\-*/() ]+")
EVALUATES_ITSELF = {"reasoning_gym.arithmetic.bitwise_arithmetic"}
"""Modules that evaluate their own problems, and no answer."""

TRIED = 8
"""Problems that try a data set's own scorer before its use."""
RIGHT, MOST_SHARED = 0.75, 0.5
"""The least share of the problems' own answers that must earn 1, and the share of other problems' answers that may not.
Small boards share solutions: 7% of n_queens' answers are right for another problem."""
WRONG = ("", "x", "0", "1", "-1", "True", "[]", "[0]", "no idea", "nan", "0 0 0 0")

_ALLOWED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.BinOp, ast.UnaryOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd),
)


class OwnScore(TypedDict):
    """The arguments of :func:`ftis.rewards.gym.score` besides the answer."""

    dataset: str
    options: str
    """The data set's settings, as JSON."""
    entry: str
    """Question, answer and metadata of the problem, as JSON."""


def judge(dataset: str, options: str, entry: Mapping[str, Any], answer: str) -> float:
    """The data set's score of an answer, from 0 to 1, as in :class:`OwnScore`. It may raise any Exception."""
    if NO_NUMBER.search(answer) or (dataset in SUMS and not _combines(entry, answer)):
        return 0.0
    score = float(_dataset(dataset, options).score_answer(answer, entry))
    if score >= 1 and dataset in SUMS and read_number(f"{answer} = {entry['metadata'].get('target', 24)}") is None:
        return 0.0  # the data sets round
    return min(1.0, max(0.0, score)) if score == score else 0.0


def _combines(entry: Mapping[str, Any], answer: str) -> bool:
    """Whether an answer has the given numbers alone, each at most as often as it is given."""
    given = Counter(map(int, entry["metadata"]["numbers"]))
    return SUM.fullmatch(answer) is not None and Counter(map(int, re.findall("[0-9]+", answer))) <= given


@cache
def _dataset(name: str, options: str) -> Any:
    import reasoning_gym

    _guard(False)  # a data set evaluates its own problems while it makes them
    try:
        return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
    finally:
        _guard(True)


def _guard(on: bool) -> None:
    """Make the modules of reasoning-gym read literals instead of evaluating, and sympy read formulas; or undo it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name not in EVALUATES_ITSELF:
            for builtin in ("eval", "exec"):
                if on:
                    setattr(module, builtin, ast.literal_eval)
                elif builtin in vars(module):
                    delattr(module, builtin)
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    plain = getattr(parser.eval_expr, "plain", parser.eval_expr)

    def evaluate_formula(code: str, local_dict: Mapping[str, Any], global_dict: Mapping[str, Any]) -> Any:
        require_formula(code, local_dict)
        return plain(code, local_dict, global_dict)

    evaluate_formula.plain = plain  # type: ignore[attr-defined]
    parser.eval_expr = evaluate_formula if on else plain


def require_formula(code: str, symbols: Mapping[str, Any]) -> None:
    """Refuse Python code that is no formula of numbers, ``symbols`` and well-known functions, with a ValueError."""
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"{type(node).__name__} is no part of a formula")
        if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name)):
            raise ValueError("only a function of formulas is called")
        if isinstance(node, ast.Name) and node.id not in NAMES | symbols.keys():
            raise ValueError(f"{node.id!r} is no name of a formula")
        if isinstance(node, ast.Constant) and not (isinstance(node.value, (int, float)) or _plain(node.value)):
            raise ValueError("a text is no formula")


def _plain(value: object) -> bool:
    """Whether a text is the name of a symbol or a number, as in ``Symbol('x')`` and ``Float('1.5')``."""
    return isinstance(value, str) and len(value) <= 64 and value.replace(".", "").replace("_", "").isalnum()


def scores_itself(dataset: str, options: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the data set has a scorer of its own that can be trusted with these problems.

    The scorer is tried on the first :data:`TRIED` problems, read back from JSON. It must give 1 to at least
    :data:`RIGHT` of their answers, and less to each of :data:`WRONG` and to most of the other problems' answers. Some
    of those may be right: boards share solutions. An answer that the scorer cannot read counts letter by letter.
    A data set without answers is tried with :data:`WRONG` alone.
    """
    from reasoning_gym.dataset import ProceduralDataset

    settings = json.dumps(dict(options))
    if type(_dataset(dataset, settings)).score_answer is ProceduralDataset.score_answer:
        return False
    if any("metadata" not in entry or entry["question"] is None for entry in entries):
        return False
    tried = [json.loads(json.dumps(entry)) for entry in entries[:TRIED]]
    right, others_right = list[bool](), list[bool]()
    for entry in tried:
        if any(_right(dataset, settings, entry, WRONG)):
            return False
        if entry["answer"] is None:
            continue
        right.append(_score(dataset, settings, entry, entry["answer"].strip()) == 1)
        different = [other for other in tried if other["question"] != entry["question"]]
        others = {other["answer"].strip() for other in different if other["answer"] is not None}
        others_right += _right(dataset, settings, entry, others)
    return (not right or fmean(right) >= RIGHT) and (not others_right or fmean(others_right) < MOST_SHARED)


def _right(dataset: str, options: str, entry: Mapping[str, Any], texts: Iterable[str]) -> list[bool]:
    """Whether the scorer takes each text for right, except those that are the entry's answer."""
    expected = (entry["answer"] or "").strip()
    other = [text for text in texts if text != expected and not _same_number(text, expected)]
    return [_score(dataset, options, entry, text) == 1 for text in other]


def _same_number(one: str, other: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(one) == float(other)
    return False


def _score(dataset: str, options: str, entry: Mapping[str, Any], answer: str) -> float:
    with contextlib.suppress(Exception):  # a data set may raise anything
        return judge(dataset, options, entry, answer)
    return 0.0

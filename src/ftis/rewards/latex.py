"""Equality of LaTeX formulas, compared by math-verify in a process with limits (``python -m ftis.rewards.latex``).

A comparison that exceeds a limit of the :mod:`ftis.rewards.helper` counts as unequal.
"""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

from ftis.rewards import equations, words, writing
from ftis.rewards.helper import Helper, Judge, serve

DIGITS = 6
"""Behind the point: to so many a decimal must equal an exact value, as ``0.333333`` a third. math-verify's default."""
SMALL, OF_A_SMALL = 1e-3, 5e-3
"""Below this an answer must be right to three digits as well: to six behind the point all of them are like 0."""
_PLAIN_CODE = re.compile(r"(?:Integer|Float) ?\( ?'?[0-9.eE+-]*'? ?\)|Symbol ?\('[A-Za-z]+' ?\)|[A-Za-z]+")
_CAPITALS = re.compile("[A-Z]{2,}")
"""The letters of points, whose order counts, though a product of so many factors would be another's."""
_SEVERAL_FORMULAS = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[()\[\]])|\\boxed|[\r\n]")


def formulas_equal(given: str, expected: str) -> bool:
    """Whether two LaTeX formulas are equal. False also where a comparison exceeds its limits.

    Args:
        given: at most a few hundred characters; may be hostile.

    Raises:
        RewardError: the helper process cannot be started.
    """
    if writing.too_nested(given, writing.MOST_WRITTEN):
        return False
    if _said(given) == _said(expected):
        return True
    given, expected = writing.in_latex(writing.in_powers_of_ten(given, expected)), writing.in_latex(expected)
    one, other = _tidy(given), words.as_text(_tidy(expected) or expected)
    if one is None or writing.too_nested(one) or words.units_differ(writing.bare(given), writing.bare(expected)):
        return False
    one = words.as_text(one, other)
    if words.says_more(one, other) or equations.goes_on(one, other) or equations.is_inequality(one, other):
        return False
    one, other = words.without_nouns(one).strip(), words.without_nouns(other).strip()
    if one != other and _CAPITALS.fullmatch(one) and _CAPITALS.fullmatch(other):
        return False
    one, other = writing.with_cases_apart(one, other)
    sides = [one, *equations.sides_to_check(one, other)]
    if any(writing.bases_differ(side, other) for side in sides):
        return False
    pairs = [(*writing.with_both_signs(*writing.as_intervals(side, other)), DIGITS) for side in sides]
    if any(equations.is_more_infinite(given, expected) for given, expected, _ in pairs):
        return False
    if (last := equations.rounded(one, other)) is not None:
        pairs.insert(0, (last[0], other, DIGITS if last[1] is None else last[1]))
    return _all_equal(tuple(pairs))


def _said(text: str) -> str:
    """A text without the commands around its words: ``June 20`` for ``\\text{June 20}``."""

    def bare(found: re.Match[str]) -> str:
        raised = found.string[: found.start()].rstrip().endswith(("^", "_"))  # where TeX takes one sign without braces
        return found[0] if raised or found[2] != "}" else found[1]

    return " ".join(words.WORDS.sub(bare, text).split())


def _tidy(text: str) -> str | None:
    """One formula without delimiters around it, or None if the text is not one formula.

    math-verify looks for formulas in running text and takes one of several, so a completion could give several
    answers. What it gets here is exactly one formula in balanced braces.
    """
    text = re.sub(r"^\s*=(?!=)", "", writing.tidied(writing.bare(writing.tidied(writing.bare(text)))))
    if text.count("$") == 1:  # an amount, written as people do
        text = re.sub(r"^([+-]?)\$(?=[0-9.])", r"\1", text)
    text = re.sub(r"\s*[\r\n]\s*", " ", text) if "\\begin{" in text else text  # matrices are written over lines
    return text if text and writing.balanced(text) and not _SEVERAL_FORMULAS.search(text) else None


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def _all_equal(pairs: tuple[tuple[str, str, int], ...]) -> bool:
    """Whether in each pair (given, expected, digits) both are equal: one request, so one time limit for an answer."""
    return bool(_helper.ask({"pairs": pairs}))


_helper = Helper("ftis.rewards.latex", "compares LaTeX", "math-verify")

# --- the helper process ---------------------------------------------------------------------------------------------


def _load_math_verify() -> Judge:
    import logging

    from latex2sympy2_extended.sets import FiniteSet
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, Expr, Interval, Set, Tuple

    logging.disable(logging.CRITICAL)

    latex_only = [LatexExtractionConfig(boxed_match_priority=-1)]

    def read(text: str) -> Any:
        return parse(f"${text}$", latex_only, parsing_timeout=None)

    def compare(given: str, expected: str, digits: int) -> bool:
        gold, answer = read(expected), read(given)

        def equal(one: Any, other: Any) -> bool:
            return bool(verify(one, other, float_rounding=digits, timeout_seconds=None))

        if not equal(gold, answer):
            return False
        # A list is a set to math-verify: 9,9,9 has one element, and (2,1) is the list 1,2.
        one, other = (side.rhs if isinstance(side, Eq) else side for side in (gold[0], answer[0]))
        if all(isinstance(side, Expr) and side.is_number and side.is_real for side in (one, other)):
            size = abs(one.evalf())
            return not 0 < size < SMALL or bool(abs((other - one).evalf()) <= OF_A_SMALL * size)
        if isinstance(one, Expr):
            return not isinstance(other, Set) or len(getattr(other, "_unsorted_args", ())) == 1
        in_order = isinstance(one, FiniteSet) and isinstance(other, Tuple | Interval) and "\\pm" not in expected
        return not in_order or equal(Tuple(*one._unsorted_args), other)

    # These comparisons, one of numbers and one of symbols, load what later ones need.
    if not (compare("\\frac{1}{2}", "0.5", DIGITS) and compare("(x-1)(x+1)", "x^2-1", DIGITS)):
        raise ImportError("this math-verify cannot tell that 1/2 is 0.5")

    # sympy turns strings into expressions with eval(). The grammar that parses LaTeX needs this for plain numbers
    # only, so any other text is refused.
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    evaluate = parser.eval_expr

    def evaluate_plain(code: str, *scopes: Any) -> Any:
        if not _PLAIN_CODE.fullmatch(code.strip()):
            raise ValueError("text is not evaluated as Python")
        return evaluate(code, *scopes)

    parser.eval_expr = evaluate_plain
    return lambda request: all(compare(*pair) for pair in request["pairs"])


if __name__ == "__main__":
    serve(_load_math_verify)

"""The process that compares LaTeX formulas by math-verify, with limits (``python -m ftis.rewards.latex``)."""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

from ftis.rewards.helper import Helper, Judge, serve

SMALL, OF_A_SMALL = 1e-3, 5e-3
"""Below this an answer must be right to three digits as well: to six behind the point all of them are like 0."""
_PLAIN_CODE = re.compile(r"(?:Integer|Float) ?\( ?'?[0-9.eE+-]*'? ?\)|Symbol ?\('[A-Za-z]+' ?\)|[A-Za-z]+")


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def all_equal(pairs: tuple[tuple[str, str, int], ...]) -> bool:
    """Whether in each pair (given, expected, digits) both are equal: one request, so one time limit for an answer.

    Raises:
        RewardError: the helper process cannot be started.
    """
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
    if not (compare("\\frac{1}{2}", "0.5", 6) and compare("(x-1)(x+1)", "x^2-1", 6)):
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

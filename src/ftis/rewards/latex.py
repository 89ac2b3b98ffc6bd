"""The process that compares LaTeX formulas by math-verify, with limits (``python -m ftis.rewards.latex``)."""

from __future__ import annotations

import contextlib
import importlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ftis.rewards.helper import Helper, Judge, serve

if TYPE_CHECKING:
    from ftis.rewards.shapes import Question

SMALL, OF_A_SMALL, OF_AN_EXACT = 1e-3, 5e-3, 5e-6
"""Below this an answer must be right to three digits of a decimal, to six of an exact value: to six behind the point
all of them are like 0."""
PLACES = 60
"""Digits to which numbers are computed. Two exact ones are equal if 40 are."""
_PLAIN_CODE = re.compile(r"(?:Integer|Float) ?\( ?'?[0-9.eE+-]*'? ?\)|Symbol ?\('[A-Za-z]+' ?\)|[A-Za-z]+")


@lru_cache(maxsize=4096)  # completions of a group often give the same answer
def holds(question: Question) -> bool:
    """Whether the answer to a question is yes: one request, so one time limit for an answer.

    Raises:
        RewardError: the helper process cannot be started.
    """
    return bool(_helper.ask({"question": question}))


_helper = Helper("ftis.rewards.latex", "compares LaTeX", "math-verify")

# --- the helper process ---------------------------------------------------------------------------------------------


def _load_math_verify() -> Judge:
    import logging

    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import verify

    logging.disable(logging.CRITICAL)
    layout = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")

    @lru_cache(maxsize=256)
    def read(text: str, lowercase: bool = True) -> Any:
        cases = ConversionConfig(lowercase_symbols=lowercase)
        return imaginary(latex2sympy(text, is_real=True, normalization_config=layout, conversion_config=cases))

    def imaginary(side: Any) -> Any:
        """A formula with i as the imaginary unit."""
        changed = {symbol: sympy.I for symbol in side.free_symbols if symbol.name == "i"}
        if changed and isinstance(side, sympy.Rel):  # it would become true or false
            return side.func(*(argument.xreplace(changed) for argument in side.args), evaluate=False)
        return side.xreplace(changed) if changed else side

    def equal(given: str, expected: str, digits: int) -> bool:
        texts = (set(re.findall("[A-Za-z]+", text)) for text in (given, expected))
        lowercase = not any(name.lower() in names - {name} for names in texts for name in names)  # none in both cases
        one, other = read(given, lowercase), read(expected, lowercase)
        if (verdict := same(one, other, digits)) is not None:
            return verdict
        if isinstance(other, sympy.Eq) and (isinstance(other.rhs, sympy.MatrixBase) or not sympy.solve(other)):
            return False  # verify compares solutions, and takes none for none
        return bool(verify(other, one, float_rounding=digits, timeout_seconds=None))

    def same(one: Any, other: Any, digits: int) -> bool | None:
        """Whether two expressions or matrices have the same values; None if values do not decide.

        Formulas with variables are compared at three points. √x² = x and the like hold for positive numbers only, so
        at one of them.
        """
        matrices = sympy.MatrixBase | sympy.MatrixExpr
        if isinstance(one, matrices) and isinstance(other, matrices):
            one, other = one.doit(), other.doit()
            if one.shape != other.shape:
                return False
            verdicts = [same(*pair, digits) for pair in zip(one.flat(), other.flat(), strict=True)]
            return None if None in verdicts else all(verdicts)
        if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
            return None
        symbols = one.free_symbols | other.free_symbols
        word = any(isinstance(side, sympy.Symbol) and {side} < symbols for side in (one, other))
        loops = (sympy.Sum, sympy.Product, sympy.Integral)
        if word or (symbols and (one.has(*loops) or other.has(*loops))):
            return None
        verdicts = []
        for low in (1000, -1700, -400) if symbols else (0,):
            point = {symbol: sympy.Rational(low + crc32(symbol.name.encode()) % 1000, 701) for symbol in symbols}
            verdicts.append(near(one.xreplace(point), other.xreplace(point), digits))
        return False if verdicts[0] is False else True if all(verdicts) else None

    def near(one: Any, other: Any, digits: int) -> bool | None:
        """Whether two numbers are equal, decimals to some digits; None if they cannot be computed."""
        exact = not other.has(sympy.Float)
        rounded = not (exact and other.is_integer) and (one.has(sympy.Float) or not exact)
        one, other = in_fractions(one), in_fractions(other)
        values = [one.evalf(PLACES), other.evalf(PLACES)]
        if any(value.has(sympy.nan, sympy.zoo) for value in values):
            return False
        parts = [part for value in values for part in value.as_real_imag()]
        if not all(isinstance(part, sympy.Number) for part in parts):
            return None
        if any(part.is_infinite for part in parts):
            return bool(values[0] == values[1])
        # one bit of precision is what rounding leaves of 0
        real, imaginary, *right = (0 if getattr(part, "_prec", 0) == 1 else part for part in parts)
        gap, size = (sympy.sqrt(x**2 + y**2) for x, y in ((real - right[0], imaginary - right[1]), right))
        if not rounded:
            if gap > size * 10**-40:
                return False
            rest = one.doit() - other.doit() if one.is_rational and other.is_rational else sympy.S.Zero
            return bool(rest == 0 or not isinstance(rest, sympy.Rational))
        most = 0.5000001 * 10**-digits
        return bool(gap <= (most if size > SMALL else min(most, (OF_AN_EXACT if exact else OF_A_SMALL) * size)))

    def in_fractions(side: Any) -> Any:
        return side.xreplace({number: sympy.Rational(str(number)) for number in side.atoms(sympy.Float)})

    def reals(given: list[list[str]], expected: list[list[str]]) -> bool:
        """Whether two unions of intersections of sets and inequalities are one set of reals, and not empty."""
        one, other = (
            sympy.Union(*(sympy.Intersection(*map(solved, part)) for part in side)) for side in (given, expected)
        )
        return not one.is_empty and (one == other or bool((one ^ other).is_empty))

    def solved(text: str) -> Any:
        found = read(text).doit()
        found = found if isinstance(found, sympy.Set) else found.as_set()
        return in_fractions(found)

    def decide(asked: list[Any]) -> bool:
        kind, *rest = asked
        if kind == "all":
            return all(map(decide, rest))
        with contextlib.suppress(Exception):  # libraries on a stranger's text may raise anything
            return equal(*rest) if kind == "equal" else reals(*rest) if kind == "reals" else any(map(decide, rest))
        return False

    # These comparisons, one of numbers and one of symbols, load what later ones need.
    if not (equal("\\frac{1}{2}", "0.5", 6) and equal("x^2=1", "(x-1)(x+1)=0", 6)):
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
    return lambda request: decide(request["question"])


if __name__ == "__main__":
    serve(_load_math_verify)

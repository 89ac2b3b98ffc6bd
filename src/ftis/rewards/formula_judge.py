"""Whether two formulas in LaTeX are equal, by math-verify and sympy. :mod:`ftis.rewards.latex` asks, with limits."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify

SMALL, OF_A_SMALL, OF_AN_EXACT = 1e-3, 5e-3, 5e-6
"""If the expected answer is at most ``SMALL``, another may be off by a part of it: ``OF_A_SMALL`` of a decimal, else
``OF_AN_EXACT``. Six digits after the point alone would take 1e-7 for 0."""
PLACES = 60
"""Digits to which numbers are computed. Two exact numbers are equal if 40 digits are."""
POINTS = (1000, -1700, -400)
"""Formulas with variables are compared from these values on, in units of 1/701. Some are negative, where √x² ≠ x."""

_PLAIN_CODE = re.compile(r"(?:Integer|Float) ?\( ?'?[0-9.eE+-]*'? ?\)|Symbol ?\('[A-Za-z]+' ?\)|[A-Za-z]+")
_LAYOUT = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_MATRICES = sympy.MatrixBase | sympy.MatrixExpr
_LOOPS = (sympy.Sum, sympy.Product, sympy.Integral)

# sympy turns strings into expressions with eval(). The grammar that parses LaTeX needs this for plain numbers only, so
# any other text is refused.
_parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
_evaluate = _parser.eval_expr


def _evaluate_plain(code: str, *scopes: Any) -> Any:
    if not _PLAIN_CODE.fullmatch(code.strip()):
        raise ValueError("text is not evaluated as Python")
    return _evaluate(code, *scopes)


def open_judge() -> Callable[[Sequence[Any]], bool]:
    """The function that decides. It may read strangers' texts, so this changes its process.

    Nothing is logged from here on, and sympy evaluates plain numbers only.
    """
    logging.disable(logging.CRITICAL)
    _parser.eval_expr = _evaluate_plain
    return _decide


def _decide(asked: Sequence[Any]) -> bool:
    """The answer to a :data:`~ftis.rewards.shapes.Question`; no, if a library fails on it."""
    kind, *rest = asked
    if kind in ("all", "any"):
        decide = all if kind == "all" else any
        return decide(map(_decide, rest))
    with contextlib.suppress(Exception):  # libraries on a stranger's text may raise anything
        return _equal(*rest) if kind == "equal" else _reals(*rest)
    return False


@lru_cache(maxsize=256)
def _read(text: str, lowercase: bool = True) -> Any:
    cases = ConversionConfig(lowercase_symbols=lowercase)
    return _imaginary(latex2sympy(text, is_real=True, normalization_config=_LAYOUT, conversion_config=cases))


def _imaginary(side: Any) -> Any:
    """A formula with i as the imaginary unit."""
    changed = {symbol: sympy.I for symbol in side.free_symbols if symbol.name == "i"}
    if changed and isinstance(side, sympy.Rel):  # else it would become true or false
        return side.func(*(argument.xreplace(changed) for argument in side.args), evaluate=False)
    return side.xreplace(changed) if changed else side


def _equal(given: str, expected: str, digits: int) -> bool:
    texts = (set(re.findall("[A-Za-z]+", text)) for text in (given, expected))
    in_both_cases = (name.lower() in names - {name} for names in texts for name in names)
    lowercase = not any(in_both_cases)
    one, other = _read(given, lowercase), _read(expected, lowercase)
    if (verdict := _same(one, other, digits)) is not None:
        return verdict
    if isinstance(other, sympy.Eq) and (isinstance(other.rhs, sympy.MatrixBase) or not sympy.solve(other)):
        return False  # verify compares solutions, and takes none for none
    return bool(verify(other, one, float_rounding=digits, timeout_seconds=None))


def _same(one: Any, other: Any, digits: int) -> bool | None:
    """Whether two expressions or matrices have the same values; None if values do not decide."""
    if isinstance(one, _MATRICES) and isinstance(other, _MATRICES):
        one, other = one.doit(), other.doit()
        if one.shape != other.shape:
            return False
        verdicts = [_same(*pair, digits) for pair in zip(one.flat(), other.flat(), strict=True)]
        return None if None in verdicts else all(verdicts)
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return None
    symbols = one.free_symbols | other.free_symbols
    word = any(isinstance(side, sympy.Symbol) and {side} < symbols for side in (one, other))
    if word or (symbols and (one.has(*_LOOPS) or other.has(*_LOOPS))):
        return None
    verdicts = []
    for low in POINTS if symbols else (0,):
        point = {symbol: sympy.Rational(low + crc32(symbol.name.encode()) % 1000, 701) for symbol in symbols}
        verdicts.append(_near(one.xreplace(point), other.xreplace(point), digits))
    if all(verdicts):
        return True
    return False if verdicts[0] is False else None


def _near(one: Any, other: Any, digits: int) -> bool | None:
    """Whether two numbers are equal, decimals to some digits; None if they cannot be computed."""
    exact = not other.has(sympy.Float)
    rounded = not (exact and other.is_integer) and (one.has(sympy.Float) or not exact)
    one, other = _in_fractions(one), _in_fractions(other)
    values = [one.evalf(PLACES), other.evalf(PLACES)]
    if any(value.has(sympy.nan, sympy.zoo) for value in values):
        return False
    parts = [part for value in values for part in value.as_real_imag()]
    if not all(isinstance(part, sympy.Number) for part in parts):
        return None
    if any(part.is_infinite for part in parts):
        return bool(values[0] == values[1])
    # rounding leaves one bit of precision of 0
    real, imaginary, *right = (0 if getattr(part, "_prec", 0) == 1 else part for part in parts)
    size = sympy.sqrt(right[0] ** 2 + right[1] ** 2)
    gap = sympy.sqrt((real - right[0]) ** 2 + (imaginary - right[1]) ** 2)
    if not rounded:
        if gap > size * 10**-40:
            return False
        rest = one.doit() - other.doit() if one.is_rational and other.is_rational else sympy.S.Zero
        return bool(rest == 0 or not isinstance(rest, sympy.Rational))
    most = 0.5000001 * 10**-digits
    of_its_size = size * (OF_AN_EXACT if exact else OF_A_SMALL)
    return bool(gap <= (most if size > SMALL else min(most, of_its_size)))


def _in_fractions(side: Any) -> Any:
    return side.xreplace({number: sympy.Rational(str(number)) for number in side.atoms(sympy.Float)})


def _reals(given: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> bool:
    """Whether two unions of intersections of sets and inequalities are one set of reals, and not empty."""
    one, other = (
        sympy.Union(*(sympy.Intersection(*map(_solved, part)) for part in side)) for side in (given, expected)
    )
    return not one.is_empty and (one == other or bool((one ^ other).is_empty))


def _solved(text: str) -> Any:
    found = _read(text).doit()
    return _in_fractions(found if isinstance(found, sympy.Set) else found.as_set())

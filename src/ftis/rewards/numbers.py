"""Numbers as people write them in answers: ``$1,000.0``, ``1/2``, ``50%``, ``2.5e-1``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from ftis.rewards.grammar import FORMULA, FRACTION, INTEGER, NUMBER, PROSE, SIGNS, bare, rewrite
from ftis.rewards.words import POWERS

MAX_ANSWER_LENGTH = 512
"""Characters. A longer answer is right only if it is the expected one letter by letter."""

_DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_RAISED = r"\s?\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([+-]?[0-9]{1,3}))(?![0-9])"
_AMOUNT = (
    rf"(?:(?:[0-9]+ ?)?{FRACTION}|[0-9]+ +[0-9]+/[0-9]+|{INTEGER}\s*/\s*{INTEGER}"
    rf"|{_DECIMAL}(?:\s*(?:\\cdot|\\times|[*xX])\s*10{_RAISED}|[eE][+-]?[0-9]{{1,3}}|{_RAISED})?)"
)

_IN_TEXT = re.compile(
    # A number may touch letters before it in languages without spaces between words only.
    rf"(?<![0-9A-Za-z_.\u00c0-\u05ff])(?<!,[0-9]{{3}},)(?<![A-Za-z}}]\^)(?<![A-Za-z}}]\^[{{-])-?\\?\$?{_AMOUNT}"
    r"(?![0-9]|(?:st|nd|rd|th)\b)"
)
_IN_ROOT = re.compile(
    r"\\sqrt[ \t]*(?:\[[^\[\]\n=]*\][ \t]*)?(?:\{[^{}\n=]*)?$|\\sqrt[ \t]*\[[^\[\]\n=]*$|√\([^()\n=]*$"
)
_IN_FRACTION = re.compile(r"\\[dtcsx]?frac\s*(?:\{[^{}\n]*\}\s*)?\{[^{}\n]*$")
_FACTOR_BEHIND = re.compile(r"[ \t]*\\(?:pi|sqrt)(?![A-Za-z])")
_POWER_BEHIND = re.compile(rf"(?i:\s?(?:{POWERS}))|!(?!=)|[kKMB]\b")


def last_number(text: str) -> str | None:
    """The last number in a text, with its sign. A hyphen after a number or a letter is no sign, an ordinal no number.

    A number may touch the text after it, as in ``36kg`` and ``$70/week``, but not a letter before it. The power of a
    unit is no number, as in ``18 cm^2``. A number keeps its power: ``10^3``. It keeps words and signs that scale it:
    ``18k``, ``18!``, ``18 and a half``. ``70 000`` is one number, and so are ``3 1/2`` and ``\\frac{1}{2}``. A text
    whose last number stands inside a root or a fraction of other things, or right before a root or π, has none.
    """
    text = rewrite((*SIGNS, *PROSE), text)
    numbers = list(_IN_TEXT.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    if any(within.search(text, 0, last.start()) for within in (_IN_ROOT, _IN_FRACTION)):
        return None
    if _FACTOR_BEHIND.match(text, last.end()):
        return None
    power = _POWER_BEHIND.match(text, last.end())
    return last[0] + (power[0] if power else "")  # nobody reads 3 millones, $3k or 3! as 3


_DOLLAR_WITHIN = re.compile(r"[0-9]\s*\\?\$+\s*[0-9]")
_WHOLE_ANSWER = re.compile(rf"[+-]?\s*{_AMOUNT}")
_NAME = re.compile(r"(?:\\?[A-Za-z]|[A-Z]{2,4})?")
_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_WHOLE = re.compile(rf"([0-9]+)?\s*{FRACTION}")
_LITERAL = re.compile(r"(?=\.?[0-9])([0-9]*)\.?([0-9]*)(?:[eE]([+-]?[0-9]{1,3}))?")
_BESIDE = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_PLAIN = re.compile(r"[0-9]*\.?[0-9]+")
_SUM = re.compile(r"(?!.*//)[0-9+\-*/() ]+")


def read_number(text: str) -> Fraction | None:
    """The rational number that a text denotes, without currency, percent sign, separators, units and counted things.

    In an equation it is the last side. The first may be its name, as in ``x = 18``. Any other must have the same
    value, as in ``2 * 9 = 18`` and ``18 dollars = 18``. ``None`` if the text is no number, is longer than
    :data:`MAX_ANSWER_LENGTH`, or has an exponent of more than three digits.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    if text.isascii() and text.isdigit():  # most answers
        return Fraction(text)
    text = rewrite((*SIGNS, *FORMULA, *NUMBER), text)
    if _DOLLAR_WITHIN.search(text):
        return None
    *others, last = (bare(re.sub(r"\\?\$", "", side)) for side in text.split("="))
    if not _WHOLE_ANSWER.fullmatch(last):
        return None
    value = _computed(last)
    checked = others[1:] if others and _NAME.fullmatch(others[0]) else others
    return None if any(_computed(side) != value for side in checked) else value


def _computed(side: str) -> Fraction | None:
    """The value of ``2 * 9`` or ``3\\frac{1}{2}``; None for any expression that is not made of numbers."""
    side = re.sub(_RAISED, lambda power: f"**{power[1] or power[2]}", _COMMA.sub("", _WHOLE.sub(_mixed, side)))
    side = re.sub(r"\\(?:times|cdot)(?![A-Za-z])|(?<=[0-9])\s*[xX](?=\s*[0-9])", "*", side).replace(r"\div", "/")
    side = _BESIDE.sub("*", _LITERAL.sub(_exact, side)).strip()
    return arithmetic(side) if _SUM.fullmatch(side) else None


def _mixed(found: re.Match[str]) -> str:
    over, under = found[2] or found[4], found[3] or found[5]
    proper = not found[1] or int(over) < int(under)
    return f"({found[1] or 0}+{over}/{under})" if proper else found[0]


def _exact(found: re.Match[str]) -> str:
    """A decimal as a fraction of integers: Python reads decimals to 17 digits."""
    part, power = found[2], f"*10**{found[3]}" if found[3] else ""
    number = str(int(found[1] + part))
    return f"({number}/{10 ** len(part)}{power})" if part or power else number


def arithmetic(source: str) -> Fraction | None:
    """The exact value of a calculation with plain numbers in Python's signs, without large powers; else None."""
    try:
        return _value(ast.parse(source, mode="eval").body, source)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant() if _PLAIN.fullmatch(written := source[node.col_offset : node.end_col_offset]):
            return Fraction(written)  # the node's value may be a float, which has fewer digits
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, source), _value(right, source))
    raise ValueError


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """A power that takes no time: a sum of such fractions may have digits without end."""
    small = abs(base.numerator) < 10**9 and base.denominator < 10**9 and abs(exponent) < (1000 if base == 10 else 100)
    if not small or exponent.denominator != 1:
        raise ValueError
    return base**exponent.numerator


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    ast.Pow: _power,
}

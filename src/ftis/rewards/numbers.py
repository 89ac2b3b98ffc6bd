"""Numbers as people write them in answers: ``$1,000.0``, ``1/2``, ``50%``, ``2.5e-1``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from ftis.rewards.grammar import AMOUNT, CURRENCIES, FRACTION, INTEGER, NUMBER, PROSE, rewrite
from ftis.rewards.units import ABROAD, COUNTS, MONEY, MOST_WORDS, NUMBER_WORDS, POWERS_ABROAD, harmless

MAX_ANSWER_LENGTH = 512
"""Characters. A longer answer is right only if it is the expected one letter by letter."""

_DECIMAL = re.compile(
    rf"(?:(?P<whole>{INTEGER})(?:\.(?P<part>[0-9]+))?|\.(?P<only>[0-9]+))(?:[eE](?P<exp>[+-]?[0-9]{{1,3}}))?"
)
_RATIO = re.compile(rf"(?P<over>{INTEGER})\s*/\s*(?P<under>{INTEGER})")
_MIXED = re.compile(r"(?P<whole>[0-9]{1,9}) +(?P<over>[0-9]{1,4})/(?P<under>[0-9]{1,4})")
_POWER = re.compile(
    r"(?P<base>[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2}|[1-9][0-9]{0,8})"
    r"\^(?:\{\s*(?P<braced>-?[0-9]{1,2})\s*\}|(?P<plain>-?[0-9]{1,2}))"
)
_SIGN = re.compile(rf"([+-]?)\s*(?:(?:US|AU?|CA?|NZ)?\\?\$|{MONEY}|(?:{CURRENCIES})(?=[\s0-9+-]))?\s*([+-]?)\s*")

_IN_TEXT = re.compile(
    # A number may touch letters before it in languages without spaces between words only.
    rf"(?<![0-9A-Za-z_.\u00c0-\u05ff])(?<!,[0-9]{{3}},)(?<![A-Za-z}}]\^)(?<![A-Za-z}}]\^[{{-])-?\\?\$?"
    rf"(?:(?:[0-9]+ ?)?{FRACTION}|(?P<mixed>{_MIXED.pattern})|{INTEGER}\s*/\s*{INTEGER}"
    rf"|{INTEGER}(?:\.[0-9]+)?\^(?:-?[0-9]+|\{{-?[0-9]+\}})"
    rf"|(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?)"
    r"(?![0-9]|(?:st|nd|rd|th)\b)"
)
_IN_ROOT = re.compile(
    r"\\sqrt[ \t]*(?:\[[^\[\]\n=]*\][ \t]*)?(?:\{[^{}\n=]*)?$|\\sqrt[ \t]*\[[^\[\]\n=]*$|√\([^()\n=]*$"
)
_FACTOR_BEHIND = re.compile(r"[ \t]*\\(?:pi|sqrt)(?![A-Za-z])")

_POWER_BEHIND = re.compile(rf"(?i:\s?(?:{POWERS_ABROAD}))")

_NAME = re.compile(rf"[A-Za-z{ABROAD}][A-Za-z{ABROAD}' ]*|\\text\{{(?P<text>[A-Za-z' ]*)\}}")
_TIMES = re.compile(r"\\(?:times|cdot)(?![A-Za-z])|(?<=[0-9])\s*[xX](?=\s*\$?[0-9])")
_OVER = re.compile(r"\\div(?![A-Za-z])")
_MONEY = re.compile(rf"\\?\$|{MONEY}|(?<=[0-9]),(?=[0-9]{{3}}(?![0-9]))")
_COUNTED = re.compile(r"(?<=[0-9])\s*([A-Za-z]{2,})")
_BESIDE = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_SUM = re.compile(r"(?!.*(?:\*\*|//))[0-9.+\-*/() ]+")


def last_number(text: str) -> str | None:
    """The last number in a text, with its sign. A hyphen behind a number or a letter is no sign, an ordinal no number.

    A number may touch the text behind it, as in ``36kg`` and ``$70/week``, but not a letter before it. The power of a
    unit is none, as in ``18 cm^2``, and that of a number stays with it: ``10^3``. ``70 000`` is one number, and so are
    ``3 1/2`` and ``\\frac{1}{2}``. A text whose last number stands inside a root, or right before one or π, has none.
    """
    text = rewrite(PROSE, text)
    numbers = list(_IN_TEXT.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    if _IN_ROOT.search(text, 0, last.start()) or _FACTOR_BEHIND.match(text, last.end()):
        return None
    if power := _POWER_BEHIND.match(text, last.end()):
        return last[0] + power[0]  # nobody reads 3 millones as 3
    if len(last[0]) > MAX_ANSWER_LENGTH:  # nor does int() read digits without end
        return last[0]
    if last["mixed"] and int(last["over"]) >= int(last["under"]):
        return f"{last['over']}/{last['under']}"
    if (part := re.search(FRACTION, last[0])) and int(part[1] or part[3]) >= int(part[2] or part[4]):
        return part[0] if part.start() and last[0][part.start() - 1] in "0123456789 " else last[0]
    return last[0]


def read_number(text: str) -> Fraction | None:
    """The rational number that a text denotes, without currency, percent sign, separators, units and counted things.

    In an equation it is the last side. The first may be its name, as in ``Total = 18``. Any other must have the same
    value, as in ``2 * 9 = 18`` and ``18 dollars = 18``.

    Returns:
        ``None`` if the text is no number, is longer than :data:`MAX_ANSWER_LENGTH`, or has an exponent of more than
        three digits.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    first, *others = rewrite(NUMBER, text).split("=")
    if not others:
        return _amount(first)
    value = _amount(others.pop())
    named = not first.strip() or _is_name(first.strip())
    checked = others if named else [first, *others]
    return None if value is None or any(value not in (_computed(side), _amount(side)) for side in checked) else value


def _is_name(side: str) -> bool:
    """Whether a side only names the other's value, in a few words without a number."""
    found = _NAME.fullmatch(side)
    words = (found["text"] or side).split() if found else []
    return 0 < len(words) <= MOST_WORDS and not COUNTS.search(side) and not any(map(NUMBER_WORDS.fullmatch, words))


def _computed(side: str) -> Fraction | None:
    """The value of ``2 * 9`` or ``9 apples + 9 apples``; None for any expression that is no sum of numbers."""
    if len({word.removesuffix("s") for word in _COUNTED.findall(side)}) == 1:
        side = _COUNTED.sub(lambda found: "" if harmless(found[1]) else found[0], side)
    side = _BESIDE.sub("*", _MONEY.sub("", _OVER.sub("/", _TIMES.sub("*", side)))).strip()
    if not _SUM.fullmatch(side):
        return None
    try:
        return _value(ast.parse(side, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _amount(side: str) -> Fraction | None:
    """The number on one side of an equation, whatever stands around it by the grammar."""
    text = rewrite(AMOUNT, side)
    signs = _SIGN.match(text)
    assert signs is not None  # every part of the pattern is optional
    if signs[1] and signs[2]:  # before or after the currency sign, but not both
        return None
    text = text[signs.end() :].removesuffix("$").removesuffix("\\").rstrip()
    value = _unsigned(text)
    return value if value is None or "-" not in (signs[1], signs[2]) else -value


def _unsigned(text: str) -> Fraction | None:
    """The value of ``1,000.5``, ``2.5e3``, ``10^2``, ``3 1/2`` or ``1/2``."""
    if found := _DECIMAL.fullmatch(text):
        whole, part = _digits(found["whole"] or ""), found["part"] or found["only"] or ""
        return Fraction(int(whole + part), 10 ** len(part)) * Fraction(10) ** int(found["exp"] or 0)
    if found := _POWER.fullmatch(text):
        return Fraction(int(_digits(found["base"]))) ** int(found["braced"] or found["plain"])
    if found := _MIXED.fullmatch(text):
        over, under = int(found["over"]), int(found["under"])
        return int(found["whole"]) + Fraction(over, under) if over < under else None
    if found := _RATIO.fullmatch(text):
        over, under = int(_digits(found["over"])), int(_digits(found["under"]))
        return Fraction(over, under) if under else None
    return None


def _digits(text: str) -> str:
    return text.replace(",", "")

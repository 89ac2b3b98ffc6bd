"""Numbers as people write them in answers: ``$1,000.0``, ``1/2``, ``50%``, ``2.5e-1``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from ftis.rewards.words import (
    COUNTS,
    DEGREES,
    MOST_WORDS,
    NUMBER_WORDS,
    RATE,
    SYMBOLS,
    TEXT,
    as_text,
    harmless,
    without_nouns,
    without_unit,
)
from ftis.rewards.writing import bare, raised

MAX_ANSWER_LENGTH = 512
"""Characters; a longer answer is right only where it is the expected one letter by letter."""

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(
    rf"(?:(?P<whole>{_WHOLE})(?:\.(?P<part>[0-9]+))?|\.(?P<only>[0-9]+))(?:[eE](?P<exp>[+-]?[0-9]{{1,3}}))?"
)
_CODES = "USD|EUR|GBP"
_SIGN = re.compile(rf"([+-]?)\s*(?:(?:US|AU?|CA?|NZ)?\\?\$|[€£¥₹]|(?:{_CODES})(?=[\s0-9+-]))?\s*([+-]?)\s*")
_IN_WORDS = re.compile(rf"{TEXT}([^{{}}A-Za-z]*)\}}")
_NAME = re.compile(r"[A-Za-z][A-Za-z' ]*|\\text\{(?P<text>[A-Za-z' ]*)\}")
_COLON = re.compile(r"^([A-Za-z][A-Za-z' ]*):(?=\s)")
_CURRENCY_BEHIND = re.compile(r"(?<=[0-9.])\s*[€£¥₹¢]$")
_TOUCHING = re.compile(r"(?<=[0-9])(?=[A-Za-z]{2})")
_SYMBOL = re.compile(rf"(?<=[0-9])\s+(?:[shlL]|{SYMBOLS})$")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))(?![.,]?[0-9])")
_RATIO = re.compile(rf"(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})")
_MIXED = re.compile(r"(?P<whole>[0-9]{1,9}) +(?P<over>[0-9]{1,4})/(?P<under>[0-9]{1,4})")

_GAP = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,;!]|['’])(?=[0-9]{3}(?![0-9]))")
_SPACES = " \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}"
_THOUSANDS = re.compile(rf"(?<![\w.,^])[1-9][0-9]{{0,2}}(?:[{_SPACES}][0-9]{{3}})+(?![\w/]|,[0-9])")
_SCIENTIFIC = re.compile(
    rf"(?<![\w.,^])(?P<digits>{_WHOLE}(?:\.[0-9]+)?)\s*(?:[×·*xX]|\\times(?![A-Za-z])|\\cdot(?![A-Za-z]))\s*10\s*\^\s*"
    r"(?:\{\s*(?P<braced>[+-]?[0-9]{1,3})\s*\}|(?P<plain>[+-]?[0-9]{1,3}))(?![0-9]|\.[0-9])"
)
_FRACTIONS = str.maketrans({"½": " 1/2", "¼": " 1/4", "¾": " 3/4"})
_DASHES = str.maketrans("\N{MINUS SIGN}\N{EN DASH}", "--")
_CODE = re.compile(rf"\b(?:{_CODES})(?=[0-9])")
_IN_TEXT = re.compile(
    rf"(?<![\w.])(?<!,[0-9]{{3}},)(?<![A-Za-z}}]\^)(?<![A-Za-z}}]\^[{{-])[-\N{{MINUS SIGN}}\N{{EN DASH}}]?\\?\$?"
    rf"(?:(?:[0-9]+ ?)?{_FRACTION.pattern}|(?P<mixed>{_MIXED.pattern})|{_WHOLE}\s*/\s*{_WHOLE}"
    rf"|{_WHOLE}(?:\.[0-9]+)?\^(?:-?[0-9]+|\{{-?[0-9]+\}})"
    rf"|(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?)(?![0-9]|(?:st|nd|rd|th)\b)"
)
_IN_ROOT = re.compile(
    r"\\sqrt[ \t]*(?:\[[^\[\]\n=]*\][ \t]*)?(?:\{[^{}\n=]*)?$|\\sqrt[ \t]*\[[^\[\]\n=]*$|√(?:\([^()\n=]*)?$"
)
_TIMES_MORE = re.compile(r"[ \t]*(?:\\(?:pi|sqrt)(?![A-Za-z])|π|√(?=[0-9({]))")
_POWER = re.compile(
    r"(?P<base>[1-9][0-9]{0,2}(?:,[0-9]{3}){1,2}|[1-9][0-9]{0,8})"
    r"\^(?:\{\s*(?P<braced>-?[0-9]{1,2})\s*\}|(?P<plain>-?[0-9]{1,2}))"
)
_TIMES = re.compile(r"[×·]|\\(?:times|cdot)(?![A-Za-z])|(?<=[0-9])\s*[xX](?=\s*\$?[0-9])")
_OVER = re.compile(r"÷|\\div(?![A-Za-z])")
_MONEY = re.compile(r"\\?\$|[€£¥₹¢]|(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_COUNTED = re.compile(r"(?<=[0-9])\s*([A-Za-z]{2,})")
_BESIDE = re.compile(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=[0-9])")
_BRACKETED = re.compile(r"\(\s*([0-9.,]+)\s*\)")
_SUM = re.compile(r"(?!.*(?:\*\*|//))[0-9.+\-*/() ]+")


def last_number(text: str) -> str | None:
    """The last number in a text, with its sign. A hyphen behind a number or a letter is no sign, an ordinal no number.

    A number may touch what follows it, as in ``36kg`` and ``$70/week``, but not a letter before it. The power of a unit
    is none, as in ``18 cm^2``, and that of a number stays with it: ``10^3``. ``70 000`` is one number, and so are
    ``3 1/2`` and ``\\frac{1}{2}``. There is none where the last stands inside a root, or right before one or π.
    """
    text = _joined(_CODE.sub(" ", raised(text)).translate(_FRACTIONS))
    numbers = list(_IN_TEXT.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    if _IN_ROOT.search(text, 0, last.start()) or _TIMES_MORE.match(text, last.end()):
        return None
    if len(last[0]) > MAX_ANSWER_LENGTH:  # nor does int() read digits without end
        return last[0]
    if last["mixed"] and int(last["over"]) >= int(last["under"]):
        return f"{last['over']}/{last['under']}"
    if (part := _FRACTION.search(last[0])) and int(part[1] or part[3]) >= int(part[2] or part[4]):
        return part[0] if part.start() and last[0][part.start() - 1] in "0123456789 " else last[0]
    return last[0]


def _joined(text: str) -> str:
    """A text whose numbers have no gaps between their thousands, and stand as ``1.5e3`` where they are 1.5 × 10³."""
    text = _THOUSANDS.sub(lambda found: re.sub(rf"[{_SPACES}]", "", found[0]), _GAP.sub("", text))
    return _SCIENTIFIC.sub(lambda found: f"{found['digits']}e{found['braced'] or found['plain']}", text)


def read_number(text: str) -> Fraction | None:
    """The rational number that a text denotes: without currency and percent signs, thousands separators, final period,
    and without the units or things that it counts, as in ``18kg`` and ``18 apples per day``.

    In an equation the last side is it. The first may be its name, as in ``Total = 18``, and any other must be worth the
    same, as in ``2 * 9 = 18`` and ``18 dollars = 18``.

    Returns:
        ``None`` where the text is no number, is longer than :data:`MAX_ANSWER_LENGTH`, or has an exponent of more than
        three digits.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    text = _joined(raised(text.strip()).translate(_DASHES).translate(_FRACTIONS)).replace("{,}", ",")
    text = _IN_WORDS.sub(r"\1", text)
    text = _FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}", bare(text.lstrip("#")))
    first, *others = _COLON.sub(r"\1=", text).split("=")
    if not others:
        return _amount(first)
    value = _amount(others.pop())
    named = not first.strip() or _is_name(first.strip())
    checked = others if named else [first, *others]
    return None if value is None or any(value not in (_computed(side), _amount(side)) for side in checked) else value


def _is_name(side: str) -> bool:
    """Whether a side only names what the other is worth, in a few words of which none is a number."""
    found = _NAME.fullmatch(side)
    words = (found["text"] or side).split() if found else []
    return 0 < len(words) <= MOST_WORDS and not COUNTS.search(side) and not any(map(NUMBER_WORDS.fullmatch, words))


def _computed(side: str) -> Fraction | None:
    """What a sum of numbers is worth, as ``2 * 9`` and ``9 apples + 9 apples``; None where it is another expression."""
    if len({word.removesuffix("s") for word in _COUNTED.findall(side)}) == 1:
        side = _COUNTED.sub(lambda found: "" if harmless(found[1]) else found[0], side)
    side = _BESIDE.sub("*", _MONEY.sub("", _OVER.sub("/", _TIMES.sub("*", side)))).strip()
    if not _SUM.fullmatch(side):
        return None
    try:
        return _worth(ast.parse(side, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _worth(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        inner = _worth(node.operand)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _worth(node.left), _worth(node.right)
    return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _amount(text: str) -> Fraction | None:
    """What one side says, without units and the like behind it."""
    text = _TOUCHING.sub(" ", bare(text))
    text = _SYMBOL.sub("", text)  # a variable in a formula, but numbers have none
    text = without_nouns(as_text(DEGREES.sub("", RATE.sub("", without_unit(text))))).rstrip()
    text = _CURRENCY_BEHIND.sub("", text)
    text = text.removesuffix("%").removesuffix("\\").rstrip()
    if found := _BRACKETED.fullmatch(text):
        text = found[1]
    signs = _SIGN.match(text)
    assert signs is not None  # every part of the pattern is optional
    if signs[1] and signs[2]:  # before or after the currency sign, but not both
        return None
    text = text[signs.end() :].removesuffix("$").removesuffix("\\").rstrip()
    value: Fraction
    if found := _DECIMAL.fullmatch(text):
        whole, part = (found["whole"] or "").replace(",", ""), found["part"] or found["only"] or ""
        value = Fraction(int(whole + part), 10 ** len(part)) * Fraction(10) ** int(found["exp"] or 0)
    elif found := _POWER.fullmatch(text):
        value = Fraction(int(found["base"].replace(",", ""))) ** int(found["braced"] or found["plain"])
    elif found := _MIXED.fullmatch(text):
        over, under = int(found["over"]), int(found["under"])
        if over >= under:
            return None
        value = int(found["whole"]) + Fraction(over, under)
    elif found := _RATIO.fullmatch(text):
        under = int(found["under"].replace(",", ""))
        if under == 0:
            return None
        value = Fraction(int(found["over"].replace(",", "")), under)
    else:
        return None
    return -value if "-" in (signs[1], signs[2]) else value

"""Equality of LaTeX formulas: the rules that need both answers. :mod:`ftis.rewards.grammar` has those that take one.

:data:`ANOTHER` lists the signs of another answer, each with an example. The rest brings two formulas into forms that
math-verify compares rightly: it takes a letter and its capital for one symbol, ± by its letters, and an interval for
another thing than an inequality. Each function's docstring has examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from ftis.rewards.grammar import FORMULA, MOST_WRITTEN, SIGNS, balanced, bare, rewrite, too_nested
from ftis.rewards.latex import all_equal
from ftis.rewards.units import (
    NUMBER_WORDS,
    RELATION,
    TEXT,
    WORDS,
    as_text,
    says_more,
    units_differ,
    without_nouns,
    without_unit,
)

DIGITS = 6
"""Digits behind the point to which a decimal must equal an exact value, as ``0.333333`` a third. math-verify's
default."""


def formulas_equal(given: str, expected: str) -> bool:
    """Whether two LaTeX formulas are equal. False also if the comparison exceeds a limit.

    Args:
        given: at most a few hundred characters; may be hostile.

    Raises:
        RewardError: the helper process cannot be started.
    """
    if too_nested(given, MOST_WRITTEN):
        return False
    if _in_plain_words(given) == _in_plain_words(expected):
        return True
    given, expected = rewrite(SIGNS, _in_powers_of_ten(given, expected)), rewrite(SIGNS, expected)
    one, other = _one_formula(given), as_text(_one_formula(expected) or expected)
    if one is None or too_nested(one) or units_differ(bare(given), bare(expected)):
        return False
    one = as_text(one, other)
    if any(sign.means_another(one, other) for sign in ANOTHER):
        return False
    one, other = _with_cases_apart(without_nouns(one).strip(), without_nouns(other).strip())
    sides = [one, *sides_to_check(one, other)]
    if any(bases_differ(side, other) for side in sides):
        return False
    pairs = [(*_with_both_signs(*_as_intervals(side, other)), DIGITS) for side in sides]
    if any(is_more_infinite(given, expected) for given, expected, _ in pairs):
        return False
    if (last := _rounded(one, other)) is not None:
        pairs.insert(0, (last[0], other, DIGITS if last[1] is None else last[1]))
    return all_equal(tuple(pairs))


_SEVERAL = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[()\[\]])|\\boxed|[\r\n]")


def _one_formula(text: str) -> str | None:
    """One formula in the grammar's writing, or None if the text is not one formula.

    math-verify looks for formulas in running text and takes one of several, so a completion could give several
    answers. Here it gets exactly one formula in balanced braces.
    """
    text = rewrite(FORMULA, text)
    return text if text and balanced(text) and not _SEVERAL.search(text) else None


def _in_plain_words(text: str) -> str:
    """A text without the commands around its words: ``June 20`` for ``\\text{June 20}``."""

    def plain(found: re.Match[str]) -> str:
        raised = found.string[: found.start()].rstrip().endswith(("^", "_"))  # where TeX takes one sign without braces
        return found[0] if raised or found[2] != "}" else found[1]

    return " ".join(WORDS.sub(plain, text).split())


_EXPONENT = re.compile(r"^\s*([+-]?[0-9]*\.?[0-9]+)[eE](-[0-9]{1,3})\s*$")


def _in_powers_of_ten(given: str, expected: str) -> str:
    """``6.72e-5`` as a decimal times a power of ten, unless the e may be Euler's because ``expected`` has one."""
    has_e = "e" in re.sub(r"\\[A-Za-z]+", "", expected)
    return given if has_e else _EXPONENT.sub(r"\1\\cdot 10^{\2}", given)


# --- signs of another answer ------------------------------------------------------------------------------------------

_GOES_ON = re.compile(r"(?<=[0-9})])\s*(?:'+|[+,]?\s*(?:\.\.\.|…|\\[lc]?dots))\s*$|\\[pb]?mod(?![A-Za-z])")
_INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:[lg](?:eq?(?:slant)?|t)|neq?)(?![a-z])|\\not\s*=")
_RANGE = re.compile(r"[\[(]|\\(?:infty|cup|cap|mathbb|emptyset|varnothing)(?![A-Za-z])")
_CAPITALS = re.compile("[A-Z]{2,}")
_IN_BASE = re.compile(
    r"(?<![\\A-Za-z0-9.])(?:[A-Za-z]*[0-9.][0-9A-Za-z.]*|[A-Za-z]{2,}|^[A-Za-z](?=\s*_[^_=]*$)|[)\]}])(?:\s|\\[,;:! ])*"
    r"_\s*(?:\{([^{}]+)\}|([0-9]+|[A-Za-z]))"
)
_WHOLE_IN_BASE = re.compile(r"[+-]?[0-9][0-9A-Za-z.]*\s*_[^_=]*")


def goes_on(given: str, expected: str) -> bool:
    """Whether dots, a prime or a modulus stand behind the number of ``given`` and make another of it."""
    return _GOES_ON.search(RELATION.split(given)[-1]) is not None and not _GOES_ON.search(expected)


def is_inequality(given: str, expected: str) -> bool:
    """Whether ``given`` ends in an inequality, and ``expected`` is neither an inequality nor a set."""
    ends_in_one = _INEQUALITY.search(RELATION.split(given)[-1]) is not None
    return ends_in_one and not (_INEQUALITY.search(expected) or _RANGE.search(expected))


def points_differ(given: str, expected: str) -> bool:
    """Whether both are names of points in different orders. As products of their letters they would be equal."""
    one, other = given.strip(), expected.strip()
    return one != other and _CAPITALS.fullmatch(one) is not None and _CAPITALS.fullmatch(other) is not None


def bases_differ(given: str, expected: str) -> bool:
    """Whether both have numbers in a base and the bases differ, or ``expected`` is a number in none.

    A number in none is one in base ten. Only ``given`` may leave out the base, as the problem names it.
    """
    one, other = _bases(given), _bases(expected)
    if not other:
        plain = _WHOLE_IN_BASE.fullmatch(RELATION.split(given)[-1].strip()) and re.fullmatch(r"[+-]?[0-9.]+", expected)
        return plain is not None and one not in (set(), {"10"})
    return bool(one) and one != other


def _bases(text: str) -> set[str]:
    return {(found[1] or found[2]).strip("() ") for found in _IN_BASE.finditer(text)}


def is_more_infinite(given: str, expected: str) -> bool:
    """Whether ``given`` has more infinities than ``expected``: sympy takes ``\\pi\\infty^2`` for equal to any number.

    An expected inequality may be an interval that ends there, and all reals are one.
    """
    if _INEQUALITY.search(expected) or r"\mathbb{R}" in expected:
        return False
    return RELATION.split(given)[-1].count(r"\infty") > expected.count(r"\infty")


class Another(NamedTuple):
    """A sign that a given answer is another than the expected one."""

    given: str
    expected: str
    means_another: Callable[[str, str], bool]


ANOTHER = (
    Another(r"9\text{ thousand}", "9", says_more),
    Another(r"9\ldots", "9", goes_on),
    Another("x>9", "9", is_inequality),
    Another("ABC", "CBA", points_differ),
)

# --- the sides of an equation -----------------------------------------------------------------------------------------

_OPERATIONS = re.compile(
    r"\\(?:[dtc]?frac|sqrt|cdot|times|div|left|right|pm|mp|pi|infty|[dt]?binom|[lr](?:floor|ceil|vert)|arc(?:sin|cos|tan)|"
    r"(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|gcd|min|max)(?![A-Za-z])"
)
"""Commands that make a number of numbers."""
_NOUN = re.compile(r"(?<=[0-9])\s+[A-Za-z]{4,}\s*$")
_THEREFORE = re.compile(r"\\(?:[Rr]ightarrow|implies|therefore)(?![A-Za-z])|[⇒∴]")
_CONSTANTS = {"e"}
_LETTER = r"(?:\\[A-Za-z]+|[A-Za-z])(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*"
_VARIABLE = rf"{_LETTER}(?:\s*(?:\^\s*(?:-1|\{{\s*-1\s*\}})\s*)?\([^()A-Za-z]*\))?"
_VARIABLES = re.compile(_VARIABLE)
_FUNCTION = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp)(?:\s*[\^_]\s*(?:\{[^{}]*\}|[0-9]))?(?![a-z])"
_NAME = re.compile(rf"(?:{_FUNCTION}\s*[({{\[|]?\s*[0-9]*|[({{\[|]?)\s*{_VARIABLE}\s*[)}}\]|]?")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])|≈")
_DECIMAL = re.compile(r"[+-]?[0-9]*(?:\.([0-9]+)|(?<=[0-9]))")


def sides_to_check(given: str, expected: str) -> list[str]:
    """The sides of the equation ``given``, except its last, that must equal ``expected`` themselves.

    ``x = 5`` gives x, so its last side counts. So do ``f(2) = 5``, ``\\text{Area} = 5``, and a side of several
    variables, as ``a + b = 5``. In ``2 + 3 = 5`` the first must be right as well, or ``10 = 9`` would pass for 9, and
    so in ``10 \\equiv 9``. Nor does one variable name an answer with more than its name, as in ``2x = 9``, unless a
    name stands before it: ``A = \\pi r^2 = 9\\pi``. An expected equation is compared whole, and so is a list such as
    ``x = 5, y = 6``.
    """
    if RELATION.search(expected):
        return []
    *earlier, last = _THEREFORE.split(given)
    checked = [side for statement in earlier for side in _sides(statement) if side and not _has_letters(side)]
    named = "matrix" in expected  # the question may ask for a power of a matrix, as for its inverse
    for side in _sides(last):
        if not side or (_has_letters(side) and _is_name(side)):
            named = True
        elif not named or not _has_letters(side):
            checked.append(side)
    return checked


def _sides(statement: str) -> list[str]:
    """All sides but the last, without words and units, except parts of lists, which cannot be read alone."""
    sides = [re.sub(r"\\q?quad(?![A-Za-z])", "", WORDS.sub(_word, side)) for side in RELATION.split(statement)[:-1]]
    plain = [_NOUN.sub("", without_unit(side.strip())).strip() for side in sides]
    alone = [side for side in plain if "," not in side and "dots" not in side]
    return [side for side in alone if all(side.count(a) == side.count(b) for a, b in ("()", "[]", "{}"))]


def _word(found: re.Match[str]) -> str:
    """Nothing for words, except a number, a letter or the sign of a list."""
    words = found[1].strip()
    if found[2] != "}":
        return found[0]
    if words in ("or", "and"):
        return ","
    letter = found[0].startswith("\\math") and len(words) == 1
    return words if letter or words[:1].isdigit() or NUMBER_WORDS.fullmatch(words) else ""


def _has_letters(side: str) -> bool:
    return re.search("[A-Za-z]", _OPERATIONS.sub("", side)) is not None


def _is_name(side: str) -> bool:
    """Whether a side with letters is one variable or function alone, or has several variables."""
    side = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]", "", side)
    if NUMBER_WORDS.fullmatch(side):
        return False
    side = re.sub(r"\([^()]*\)", _argument, side)
    variables = set(_VARIABLES.findall(_OPERATIONS.sub(" ", side))) - _CONSTANTS
    return _NAME.fullmatch(side) is not None or len(variables) > 1


def _argument(found: re.Match[str]) -> str:
    """A bracket; a number in it loses its commands, whose letters are no variables: ``f(\\frac{1}{2})``."""
    return found[0] if _has_letters(found[0]) else _OPERATIONS.sub("", found[0])


def _rounded(given: str, expected: str) -> tuple[str, int | None] | None:
    """The side behind the last ``\\approx`` of ``given``, and its digits behind the point, which must all be right."""
    *before, last = _ABOUT.split(given)
    if not before or RELATION.search(expected):
        return None
    last = RELATION.split(last)[-1].strip()
    found = _DECIMAL.fullmatch(last)
    if found is None:
        return last, None
    return (last, len(found[1])) if found[1] else (f"{last}.0", 0)


# --- letters, signs, intervals ----------------------------------------------------------------------------------------

_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z](?!_)")
_SIGNED_FRACTION = re.compile(r"\\[dtc]?frac[^=]*\\pm(?![A-Za-z])")
_ORDER = re.compile(r"(<=|>=|[<>≤≥]|\\[lg](?:eq?(?:slant)?|t)(?![A-Za-z]))")
_STRICT = ("<", ">", r"\lt", r"\gt")
_MORE = (">", "≥", r"\g")
_INTERVAL = re.compile(r"[\[(][^,]*,[^,]*[\])]")
_AROUND_INTERVALS = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*|\\(?:left|right)(?![A-Za-z])\s*")
_AND = re.compile(rf"\s+and\s+|{TEXT}\s*and\s*\}}|\\(?:land|wedge)(?![A-Za-z])")
_OR = re.compile(rf"\s+or\s+|{TEXT}\s*or\s*\}}|\\(?:lor|vee)(?![A-Za-z])")


def _with_cases_apart(given: str, expected: str) -> tuple[str, str]:
    """Both with a mark on the capitals of letters that ``expected`` has in both cases: R_{c} - r for R - r.

    To math-verify a letter and its capital are one symbol, by which R - r is 0.
    """
    names = set(_SYMBOL.findall(expected))
    capitals = {name for name in names if _small(name) in names - {name}}
    if not capitals or "\\text" in expected:
        return given, expected

    def marked(found: re.Match[str]) -> str:
        return f"{_small(found[0])}_{{c}}" if found[0] in capitals else found[0]

    return _SYMBOL.sub(marked, given), _SYMBOL.sub(marked, expected)


def _small(name: str) -> str:
    """A letter in lower case: ``\\theta`` for ``\\Theta``."""
    return name.lower() if len(name) == 1 or name[1:].istitle() else name


def _with_both_signs(given: str, expected: str) -> tuple[str, str]:
    """Both as lists of two values if one has ``\\pm`` inside a fraction, which math-verify compares by letters."""
    if not any(_SIGNED_FRACTION.search(text) for text in (given, expected)):
        return given, expected
    return _both_signs(given), _both_signs(expected)


def _both_signs(text: str) -> str:
    value = RELATION.split(text)[-1]
    if value.count(r"\pm") != 1 or "," in value:
        return text
    return ", ".join(value.replace(r"\pm", sign) for sign in "+-")


def _as_intervals(given: str, expected: str) -> tuple[str, str]:
    """Both as intervals if one is a union of intervals and the other has inequalities: ``3 < x \\le 4`` as ``(3,4]``.

    ``(1,2)`` may be a point, so an interval alone has a square bracket or an infinite end.
    """
    one, other = _AROUND_INTERVALS.sub("", given), _AROUND_INTERVALS.sub("", expected)
    if _is_interval(one):
        return one, _intervals(other)
    return (_intervals(one), other) if _is_interval(other) else (given, expected)


def _is_interval(text: str) -> bool:
    parts = [part.strip() for part in text.split(r"\cup")]
    certain = len(parts) > 1 or "[" in text or "]" in text or "\\infty" in text
    return certain and all(map(_INTERVAL.fullmatch, parts))


def _intervals(text: str) -> str:
    """The intervals of inequalities in one variable that ``or`` and ``and`` join, else the text."""
    parts = _OR.split(text)
    joined = r" \cup ".join(map(_interval, parts))
    variables = {name for part in parts for name in re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", part)}
    alone = len(parts) == 1 and not _AND.search(text)
    return joined if alone or (len(variables) == 1 and _is_interval(joined)) else text


def _interval(text: str) -> str:
    """The interval of ``3 < x \\le 4``, ``x > 3`` or ``x > 3 and x \\le 4``; any other text as it is."""
    both = _AND.split(text)
    if len(both) == 2:
        low, high = sorted(map(_interval, both), key=lambda one: one.startswith(r"(-\infty,"))
        bounded = low.endswith(r",\infty)") and high.startswith(r"(-\infty,")
        return low.removesuffix(r"\infty)") + high.removeprefix(r"(-\infty,") if bounded else text
    parts = [part.strip() for part in _ORDER.split(text)]
    if len({part.startswith(_MORE) for part in parts[1::2]}) != 1 or any("=" in part for part in parts[::2]):
        return text
    if parts[1].startswith(_MORE):
        parts.reverse()
    variables = [place for place in range(0, len(parts), 2) if re.fullmatch("[A-Za-z]", parts[place])]
    if len(parts) == 3 and variables == [0]:
        parts = [r"-\infty", "<", *parts]
    elif len(parts) == 3 and variables == [2]:
        parts = [*parts, "<", r"\infty"]
    elif len(parts) != 5 or variables != [2]:
        return text
    low, left, _, right, high = parts
    return f"{'(' if left in _STRICT else '['}{low},{high}{')' if right in _STRICT else ']'}"

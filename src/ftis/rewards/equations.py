"""The sides of an equation that is given for an answer: which say what the answer is, and which must equal it."""

from __future__ import annotations

import re

from ftis.rewards.words import NUMBER_WORDS, RELATION, WORDS, without_unit

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
_INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:[lg](?:eq?(?:slant)?|t)|neq?)(?![a-z])|\\not\s*=")
_RANGE = re.compile(r"[\[(]|\\(?:infty|cup|cap|mathbb|emptyset|varnothing)(?![A-Za-z])")
_ABOUT = re.compile(r"\\approx(?![A-Za-z])|≈")
_DECIMAL = re.compile(r"[+-]?[0-9]*(?:\.([0-9]+)|(?<=[0-9]))")
_GOES_ON = re.compile(r"(?<=[0-9})])\s*(?:'+|[+,]?\s*(?:\.\.\.|…|\\[lc]?dots))\s*$|\\[pb]?mod(?![A-Za-z])")


def goes_on(given: str, expected: str) -> bool:
    """Whether behind the number of ``given`` stands what makes another of it: dots, a prime, a modulus."""
    return _GOES_ON.search(RELATION.split(given)[-1]) is not None and not _GOES_ON.search(expected)


def is_inequality(given: str, expected: str) -> bool:
    """Whether ``given`` ends in an inequality where neither an inequality nor a set is expected."""
    ends_in_one = _INEQUALITY.search(RELATION.split(given)[-1]) is not None
    return ends_in_one and not (_INEQUALITY.search(expected) or _RANGE.search(expected))


def is_more_infinite(given: str, expected: str) -> bool:
    """Whether ``given`` has more infinities than ``expected``: sympy takes ``\\pi\\infty^2`` for equal to any number.

    An expected inequality may be an interval that ends there, and all reals are one.
    """
    if _INEQUALITY.search(expected) or r"\mathbb{R}" in expected:
        return False
    return RELATION.split(given)[-1].count(r"\infty") > expected.count(r"\infty")


def rounded(given: str, expected: str) -> tuple[str, int | None] | None:
    """What stands behind the last ``\\approx`` of ``given``, and a decimal's digits behind the point, which are as many
    as are to be right."""
    *before, last = _ABOUT.split(given)
    if not before or RELATION.search(expected):
        return None
    last = RELATION.split(last)[-1].strip()
    found = _DECIMAL.fullmatch(last)
    if found is None:
        return last, None
    return (last, len(found[1])) if found[1] else (f"{last}.0", 0)


def sides_to_check(given: str, expected: str) -> list[str]:
    """The sides of the equation ``given``, but for its last, that must equal ``expected`` themselves.

    ``x = 5`` says what x is, so its last side counts. So do ``f(2) = 5``, ``\\text{Area} = 5``, and a side of several
    variables, as ``a + b = 5``. In ``2 + 3 = 5`` the first must be right as well, or ``10 = 9`` would pass for 9, and
    so in ``10 \\equiv 9``. Nor does one variable name an answer with more than its name, as in ``2x = 9``, unless a
    name stands before it: ``A = \\pi r^2 = 9\\pi``. An expected equation is compared whole, and so is a list such as
    ``x = 5, y = 6``.
    """
    if RELATION.search(expected):
        return []
    *earlier, last = _THEREFORE.split(given)
    checked = [side for statement in earlier for side in _sides(statement) if side and not _has_letters(side)]
    named = "matrix" in expected  # what is asked for may be a power there, as a matrix's inverse is
    for side in _sides(last):
        if not side or (_has_letters(side) and _is_name(side)):
            named = True
        elif not named or not _has_letters(side):
            checked.append(side)
    return checked


def _sides(statement: str) -> list[str]:
    """All sides but the last, without words and units. Those that cannot be read alone, as lists, are left out."""
    said = [re.sub(r"\\q?quad(?![A-Za-z])", "", WORDS.sub(_word, side)) for side in RELATION.split(statement)[:-1]]
    plain = [_NOUN.sub("", without_unit(side.strip())).strip() for side in said]
    alone = [side for side in plain if "," not in side and "dots" not in side]
    return [side for side in alone if all(side.count(a) == side.count(b) for a, b in ("()", "[]", "{}"))]


def _word(found: re.Match[str]) -> str:
    """Nothing for words, but for those that are a number, a letter or the sign of a list."""
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
    """A bracket; where it holds a number, without commands, whose letters are no variables: ``f(\\frac{1}{2})``."""
    return found[0] if _has_letters(found[0]) else _OPERATIONS.sub("", found[0])

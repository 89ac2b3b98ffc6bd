"""Equality of LaTeX formulas: the rules that need both answers. :mod:`ftis.rewards.grammar` has those that take one.

Words, points and times are compared as texts. Then come signs of another answer and the sides of an equation, and
:mod:`ftis.rewards.shapes` takes the rest apart. Each function's docstring has examples.
"""

from __future__ import annotations

import re

from ftis.rewards.grammar import FORMULA, FRACTION, LETTER, RELATION, SIGNS, balanced, bare, rewrite, too_nested
from ftis.rewards.latex import holds
from ftis.rewards.numbers import read_number
from ftis.rewards.shapes import DIGITS, Question, question
from ftis.rewards.words import TEXT, WORDS, last_words, measure, units_differ


def formulas_equal(given: str, expected: str) -> bool:
    """Whether two LaTeX formulas are equal. False also if the comparison exceeds a limit. ``given`` may be hostile."""
    given, expected = (bare(rewrite(SIGNS, side)) for side in (given, expected))
    if too_nested(given):
        return False
    if (verdict := _same_words(given, expected)) is not None:
        return verdict
    one, other = _one_formula(given), _one_formula(expected) or expected
    if one is not None and _by_cents(given, expected):
        return True
    if one is None or units_differ(given, expected) or says_more(one, other):
        return False
    if last_words(other) and last_words(given) and not last_words(one):
        return False  # eggs are no dozen
    one, other = (_LAST_WORDS.sub("", side).strip() for side in (one, other))
    sides = sides_to_check(one, other)
    if any(bases_differ(side, other) for side in (one, *sides)):
        return False
    last, digits = _THEREFORE.split(one)[-1].strip(), DIGITS
    if sides and (rounded := _rounded(one, other)) is not None:
        last, digits = rounded
    asked: Question = ("all", question(last, other, digits), *(question(side, other) for side in sides))
    if (share := _PERCENT.search(given) is not None) != (_PERCENT.search(expected) is not None):
        value, right = RELATION.split(one)[-1], RELATION.split(other)[-1]
        parts = (f"({value})/100", right) if share else (value, f"({right})/100")
        number = read_number(right)
        small = share and number is not None and abs(number) < 1  # 0.5% is no half
        asked = question(*parts) if small else ("any", asked, question(*parts))
    return holds(asked)


_LAST_WORDS = re.compile(rf"(?<=[0-9])\s*{TEXT}[^{{}}]*\}}\s*$")
_PERCENT = re.compile("%|per ?cent(?!s)")
_SEVERAL = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\\[()\[\]])|\\boxed|(?<!\\)[\r\n]")


def _by_cents(given: str, expected: str) -> bool:
    """Whether one amount is in dollars, the other in cents, and both are the same money: ``\\$5.50`` is 550 cents."""
    one, other = measure(given), measure(expected)
    if one is None or other is None or {one.name, other.name} != {"cent", "dollar"} or one[1:] != other[1:]:
        return False
    left, right = read_number(given), read_number(expected)
    if left is None or right is None:
        return False
    return left * 100 == right if one.name == "dollar" else left == right * 100


def _one_formula(text: str) -> str | None:
    """One formula in the grammar's writing, in balanced braces; None for anything else.

    From running text math-verify would take one formula of several, and a completion could give several answers.
    """
    text = rewrite(FORMULA, text)
    return text if text and balanced(text) and not _SEVERAL.search(text) else None


def _in_plain_words(text: str) -> str:
    """A text without the commands around its words: ``June 20`` for ``\\text{June 20}``."""
    plain = WORDS.sub(lambda found: found[1] if found[2] == "}" else found[0], text)
    return " ".join(re.sub(r"\\[,;: ]", " ", plain).split())


_PHRASE = re.compile("[A-Za-z][a-z]+(?: [a-z]+)+")
_POINTS = re.compile(
    r"(?:\\(overline|overleftrightarrow|overrightarrow|angle|triangle)(?![A-Za-z])\s*\{?\s*)?([A-Z]{2,4})\s*\}?"
)
_CLOCK = re.compile(r"(?:[a-z] ?= ?)?([0-9]{1,2})(?: ?: ?([0-5][0-9]))? ?(?:([ap])\.? ?m\.?)?")
_DATE = re.compile(r"([0-9]{1,2})([/-])([0-9]{1,2})\2([0-9]{4})")
_RATIO = re.compile(rf"[1-9][0-9]* ?[:/] ?[1-9][0-9]*|{FRACTION}")


def _same_words(given: str, expected: str) -> bool | None:
    """Whether two texts, names of points, times or dates are the same; None if they are none of these.

    ``\\text{True}`` is ``true``, ``\\overline{AB}`` is ``AB`` and not ``BA``. A time is no ratio: ``4:30``
    is not ``2:15``. ``6:12`` is a ratio only if the expected answer is one, as ``\\frac12``.
    """
    one, other = (bare(_in_plain_words(text)) for text in (given, expected))
    worded = WORDS.search(expected) or _UNKNOWN_WORD.fullmatch(other) or _PHRASE.fullmatch(other)
    if one == other or (worded and one.lower() == other.lower()):
        return True
    if worded and one.isalpha() and other.isalpha() and min(len(one), len(other)) > 1:
        return False
    points = [_POINTS.fullmatch(text) for text in (one, other)]
    if points[0] and points[1]:
        marks = {points[0][1], points[1][1]} - {None}
        return points[0][2] == points[1][2] and len(marks) < 2
    if dates := [tuple(map(int, found.group(1, 3, 4))) for text in (one, other) if (found := _DATE.fullmatch(text))]:
        return len(dates) == 2 and dates[0] == dates[1]
    times = [_CLOCK.fullmatch(text.lower()) for text in (one, other)]
    if times[1] is None and _RATIO.fullmatch(one) and _RATIO.fullmatch(other):
        return None
    return _same_time(*times)


def _same_time(given: re.Match[str] | None, expected: re.Match[str] | None) -> bool | None:
    """Whether two times are equal, as ``5 PM`` and ``17:00``; None if ``expected`` is no time and ``given`` may be."""
    if expected is None or not (expected[2] or expected[3]):
        return False if given and given[2] else None
    if given is None or int(given[2] or 0) != int(expected[2] or 0):
        return False
    hours, halves = [int(given[1]), int(expected[1])], [given[3], expected[3]]
    of_day = [hour % 12 + 12 * (half == "p") if half else hour for hour, half in zip(hours, halves, strict=True)]
    return of_day[0] == of_day[1] or (hours[0] == hours[1] and None in halves)


# --- signs of another answer ------------------------------------------------------------------------------------------

_GOES_ON = re.compile(
    r"(?<=[0-9})])\s*(?:'+|[+,]?\s*(?:\.\.\.|\\[lc]?dots))\s*$|\\[pb]?mod(?![A-Za-z])"
    r"|\\(?:gcd|(?:operatorname\s*\{\s*)?lcm\}?)\s*\([^()]*[A-Za-z]"
)
_PROSE = re.compile(r"(?:[^\W\d_]|[\s.,:;()])*")
_WORD = re.compile(r"[^\W\d_]+")
_IN_BASE = re.compile(
    r"(?<![\\A-Za-z0-9.])(?:[A-Za-z]*[0-9.][0-9A-Za-z.]*|[A-Za-z]{2,}|^[A-Za-z](?=\s*_[^_=]*$)|[)\]}])(?:\s|\\[,;:! ])*"
    r"_\s*(?:\{([^{}]+)\}|([0-9]+|[A-Za-z]))"
)
_WHOLE_IN_BASE = re.compile(r"[+-]?[0-9][0-9A-Za-z.]*\s*_[^_=]*")


def says_more(given: str, expected: str) -> bool:
    """Whether something beside the formula of ``given`` makes another answer of it.

    Such are words that the grammar keeps and ``expected`` lacks, as in ``9\\text{ thousand}``; dots, primes and moduli
    after a number; and divisors of letters, since libraries take them for numbers.
    """
    known = {*_WORD.findall(re.sub(r"\\[A-Za-z]+", "", expected)), "or", "and"}
    for words, behind in WORDS.findall(given):
        if behind != "}" or not _PROSE.fullmatch(words) or not known.issuperset(_WORD.findall(words)):
            return True
    return _GOES_ON.search(RELATION.split(given)[-1]) is not None and not _GOES_ON.search(expected)


def bases_differ(given: str, expected: str) -> bool:
    """Whether the bases of numbers differ. A number without a base in ``expected`` is in base ten.

    ``given`` may leave out the base, as the problem names it.
    """
    one, other = (
        {(found[1] or found[2]).strip("() ") for found in _IN_BASE.finditer(side)} for side in (given, expected)
    )
    if not other:
        plain = _WHOLE_IN_BASE.fullmatch(RELATION.split(given)[-1].strip()) and re.fullmatch(r"[+-]?[0-9.]+", expected)
        return plain is not None and one not in (set(), {"10"})
    return bool(one) and one != other


# --- the sides of an equation -----------------------------------------------------------------------------------------

_OPERATIONS = re.compile(
    r"\\(?:frac|sqrt|cdot|times|div|left|right|pm|mp|pi|infty|[dt]?binom|[lr](?:floor|ceil|vert)|q?quad|"
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|gcd|min|max)(?![A-Za-z])"
)
"""Commands that make a number of numbers."""
_THEREFORE = re.compile(r"\\(?:[Rr]ightarrow|implies|therefore)(?![A-Za-z])")
_FUNCTION = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp)(?:\s*[\^_]\s*(?:\{[^{}]*\}|[0-9]))?(?![a-z])"
_NAME = re.compile(rf"(?:{_FUNCTION}\s*[({{\[|]?\s*[0-9]*|[({{\[|]?)\s*{LETTER}\s*[)}}\]|]?")
_UNKNOWN_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:[A-Z]+|(?i:a?[b-df-hj-np-tv-z]{1,3}))(?![A-Za-z]))[A-Za-z]{2,}")
"""Letters that name no points and no product, as few variables are vowels."""
_POWER = re.compile(r"\^\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9])")
"""A question may ask for a power of a matrix, as for its inverse."""
_ABOUT = re.compile(r"\\approx(?![A-Za-z])")
_DECIMAL = re.compile(r"[+-]?[0-9]*(?:\.([0-9]+)|(?<=[0-9]))")


def sides_to_check(given: str, expected: str) -> list[str]:
    """The sides of the equation ``given``, except its last, that must equal ``expected`` themselves.

    A side may name the answer: a variable, as in ``x = 5``, a function, as in ``f(2) = 5``, or several variables, as
    in ``a + b = 5``. Any other must be right, as in ``2 + 3 = 5``: else ``10 = 9``, ``10 \\equiv 9``, ``nicht = 9`` and
    ``2x = 9`` would pass for 9. After a name, sides with letters are free: ``A = \\pi r^2 = 9\\pi``. An expected
    equation is compared whole, and so is a list.
    """
    if RELATION.search(expected):
        return []
    *earlier, last = _THEREFORE.split(given)
    checked = [side for statement in earlier for side in _sides(statement) if side and not _has_letters(side)]
    named = False
    for side in _sides(last):
        side = _POWER.sub("", side) if "matrix" in expected else side
        if not side or (_has_letters(side) and _is_name(side)):
            named = True
        elif not named or not _has_letters(side):
            checked.append(side)
    return checked


def _sides(statement: str) -> list[str]:
    """All sides but the last, except parts of lists, which cannot be read alone."""
    sides = [re.sub(r"\\q?quad(?![A-Za-z])", "", side).strip() for side in RELATION.split(statement)[:-1]]
    alone = [side for side in sides if "," not in side and "dots" not in side]
    return [side for side in alone if all(side.count(a) == side.count(b) for a, b in ("()", "[]", "{}"))]


def _has_letters(side: str) -> bool:
    return re.search("[A-Za-z]", _OPERATIONS.sub("", side)) is not None


def _is_name(side: str) -> bool:
    """Whether a side with letters is one variable or function alone, or has several variables."""
    side = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\\operatorname\s*\{[A-Za-z]+\}", "", side)
    if _UNKNOWN_WORD.search(side):
        return False
    variables = set(re.findall(rf"{LETTER}(?:\([^()A-Za-z]*\))?", _OPERATIONS.sub(" ", side))) - {"e"}
    side = re.sub(r"(?:\^\s*\{?\s*-1\s*\}?\s*)?\(([^()]*)\)", lambda m: m[0] if _has_letters(m[1]) else "", side)
    return len(variables) > 1 or _NAME.fullmatch(side) is not None


def _rounded(given: str, expected: str) -> tuple[str, int] | None:
    """The side after the last ``\\approx`` of ``given``, and its digits after the point, which must all be right."""
    *before, last = _ABOUT.split(given)
    if not before or RELATION.search(expected):
        return None
    last = RELATION.split(last)[-1].strip()
    found = _DECIMAL.fullmatch(last)
    if found is None:
        return last, DIGITS
    return (last, len(found[1])) if found[1] else (f"{last}.0", 0)

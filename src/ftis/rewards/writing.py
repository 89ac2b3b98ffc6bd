"""Answers as people write them, brought to one way of writing before they are compared.

Nothing here evaluates anything. A unit that is taken off an answer is taken off the expected one as well.
"""

from __future__ import annotations

import re

MOST_NESTED = 30
"""Brackets inside brackets; the grammar that reads LaTeX takes exponentially long for them."""

UNITS = (
    r"dollars?|cents?|euros?|pounds?|yen|rupees?|percent|degrees?|radians?|"
    r"seconds?|sec|minutes?|min|hours?|hrs?|days?|weeks?|months?|years?|"
    r"mm|cm|km|m|met(?:er|re)s?|(?:centi|kilo|milli)met(?:er|re)s?|inch(?:es)?|in|feet|foot|ft|yards?|miles?|"
    r"mg|kg|g|grams?|kilograms?|ounces?|oz|lbs?|tons?|lit(?:er|re)s?|ml|gallons?|units?|"
    r"mph|km/h|m/s|square (?:units?|feet|inches|miles|cm|km|m)|cubic (?:units?|feet|inches|cm|m)"
)
"""What may stand behind a number without changing it, as thousand and dozen may not."""

_UNIT = re.compile(rf"(?<=[0-9}})$])\s*(?:\\[,; ]\s*)*(?:\s(?:{UNITS})|\\(?:text|mathrm|mbox)\{{\s*(?:{UNITS})\s*\}})"
                   r"(?:\s*\^\s*\{?[23]\}?)?\s*$")  # fmt: skip
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)")
_SIZES = re.compile(r"\\[bB]igg?[lrm]?(?![A-Za-z])\s*")
_LINE_GAP = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_DIGIT_GAP = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|~)(?=[0-9]{3}(?![0-9]))")
_MIXED = re.compile(r"^([+-]?)\s*([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)$")
_UNION = re.compile(r"([\])])\s*(?:U|∪)\s*(?=[\[(])")
_LESS = r"(<|≤|<=|\\leq?(?:slant)?(?![a-z])|\\lt(?![a-z]))"
_BETWEEN = re.compile(rf"^([^<>≤=]+?)\s*{_LESS}\s*[A-Za-z]\s*{_LESS}\s*([^<>≤=]+)$")
_INTERVAL = re.compile(r"^[\[(][^,]*,[^,]*[\])]$")
_IN_BASE = re.compile(r"^([0-9A-Za-z]+)\s*_\s*\{?\s*([0-9]+)\s*\}?$")
_NAME = re.compile(r"^(?:\\?[A-Za-z]+|\\angle\s*[A-Za-z]+)(?:\s*_\s*\{?\w+\}?)?(?:\s*\([A-Za-z0-9, ]*\))?$")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit)\s*\{([^{}]*)\}")


def too_nested(text: str) -> bool:
    """Whether brackets of any kind stand more than :data:`MOST_NESTED` deep."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MOST_NESTED:
            return True
    return False


def tidied(formula: str) -> str:
    """A formula with one way to write what people write in several: degrees, spaces in numbers, brackets, units."""
    formula = _LINE_GAP.sub(r"\\\\", formula)
    formula = _SIZES.sub("", formula)
    formula = _DIGIT_GAP.sub("", formula)
    formula = _UNION.sub(r"\1 \\cup ", formula)
    formula = _MIXED.sub(r"\1\2\\frac{\3}{\4}", formula)
    return _DEGREES.sub("", _UNIT.sub("", formula)).strip()


def as_intervals(given: str, expected: str) -> tuple[str, str]:
    """Both as intervals where one of them is an interval and the other an inequality such as ``3 < x \\le 4``."""
    if _INTERVAL.match(given):
        return given, _interval(expected)
    return (_interval(given), expected) if _INTERVAL.match(expected) else (given, expected)


def _interval(text: str) -> str:
    found = _BETWEEN.match(text)
    if not found:
        return text
    low, left, right, high = found.groups()
    return (
        f"{'(' if left in ('<', chr(92) + 'lt') else '['}{low},{high}{')' if right in ('<', chr(92) + 'lt') else ']'}"
    )


def bases_differ(given: str, expected: str) -> bool:
    """Whether both are numbers in a base, as ``52_8``, and the bases are two."""
    one, other = _IN_BASE.match(given), _IN_BASE.match(expected)
    return one is not None and other is not None and one[2] != other[2]


def says_more(given: str, expected: str) -> bool:
    """Whether words stand in ``given``, beside a formula, that do not stand in ``expected``."""
    words = _WORDS.findall(given)
    beside = _WORDS.sub("", given).strip()
    return bool(beside) and any(word.strip() and word.strip() not in expected for word in words)


def sides(given: str, expected: str) -> list[str]:
    """The parts of ``given`` that must each equal ``expected``.

    ``x = 5`` names what 5 is, so 5 alone counts. In another equation, such as ``2 + 3 = 5``, every side does: its last
    one may be right by accident. An expected equation is compared whole.
    """
    parts = [part.strip() for part in re.split(r"(?<![<>!\\])=", given)]
    if len(parts) == 1 or "=" in expected:
        return [given]
    return parts[1:] if _NAME.match(parts[0]) else parts

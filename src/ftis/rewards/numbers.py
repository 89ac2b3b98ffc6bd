"""Numbers as people write them in answers: ``$1,000.0``, ``1/2``, ``50%``, ``2.5e-1``."""

from __future__ import annotations

import re
from fractions import Fraction

from ftis.rewards.words import UNITS

MAX_ANSWER_LENGTH = 512
"""Characters; a longer answer is right only where it is the expected one letter by letter."""

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(
    rf"(?:(?P<whole>{_WHOLE})(?:\.(?P<part>[0-9]*))?|\.(?P<only>[0-9]+))(?:[eE](?P<exp>[+-]?[0-9]{{1,3}}))?"
)
_SIGN = re.compile(r"([+-]?)\s*(?:\\?\$|[€£¥])?\s*([+-]?)\s*")
_AROUND = re.compile(
    r"\*\*(?P<bold>.*)\*\*|\\boxed\{(?P<box>.*)\}|\$(?P<maths>[^$]*)\$|[A-Za-z]\s*=\s*(?P<named>[^=]*)"
)
"""What people put around a number without meaning another: bold type, a box, dollar signs, the name of what it is."""
_BEHIND = re.compile(rf"(?<=[0-9.])\s*(?:\s(?:{UNITS})|\\text\{{\s*(?:{UNITS})\s*\}}|[€£¥])$")
_RATIO = re.compile(rf"(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})")


_GAP = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,;!])(?=[0-9]{3}(?![0-9]))")
_IN_TEXT = re.compile(
    rf"(?<![\w.])(?<!,[0-9]{{3}},)[-\N{{MINUS SIGN}}]?\\?\$?"
    rf"(?:{_WHOLE}\s*/\s*{_WHOLE}|(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?)(?![0-9]|(?:st|nd|rd|th)\b)"
)


def last_number(text: str) -> str | None:
    """The last number in a text, with its sign. A hyphen behind a number or a letter is no sign, an ordinal no number.

    A number may touch what follows it, as in ``36kg`` and ``$70/week``, but not a letter before it.
    """
    numbers = _IN_TEXT.findall(_GAP.sub("", text))
    return numbers[-1] if numbers else None


def read_number(text: str) -> Fraction | None:
    """The rational number that a text denotes, without currency and percent signs, thousands separators, final period.

    Returns:
        ``None`` where the text is no number, is longer than :data:`MAX_ANSWER_LENGTH`, or has an exponent of more than
        three digits.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        return None
    text = _GAP.sub("", text.strip().replace("\N{MINUS SIGN}", "-")).replace("{,}", ",")
    while found := _AROUND.fullmatch(text.removesuffix(".").rstrip()):
        text = next(part for part in found.groups() if part is not None).strip()
    text = _BEHIND.sub("", text.removesuffix(".").rstrip()).rstrip()
    text = text.removesuffix("%").removesuffix("\\").rstrip()
    signs = _SIGN.match(text)
    assert signs is not None  # every part of the pattern is optional
    if signs[1] and signs[2]:  # before or after the currency sign, but not both
        return None
    text = text[signs.end() :].removesuffix("$").removesuffix("\\").rstrip()
    value: Fraction
    if found := _DECIMAL.fullmatch(text):
        whole, part = (found["whole"] or "").replace(",", ""), found["part"] or found["only"] or ""
        value = Fraction(int(whole + part), 10 ** len(part)) * Fraction(10) ** int(found["exp"] or 0)
    elif found := _RATIO.fullmatch(text):
        under = int(found["under"].replace(",", ""))
        if under == 0:
            return None
        value = Fraction(int(found["over"].replace(",", "")), under)
    else:
        return None
    return -value if "-" in (signs[1], signs[2]) else value

"""Measures and names as text, the same on a terminal and on the page."""

from __future__ import annotations

import re
import unicodedata


def number(value: float | None, sign: str = "") -> str:
    """An accuracy, or a difference of two with ``sign="+"``."""
    return "–" if value is None else f"{value:{sign}z.3f}"


def interval_text(low: float | None, high: float | None, sign: str, between: str) -> str:
    """The interval's ends."""
    return f"{number(low, sign)}{between}{number(high, sign)}"


def p_text(p: float | None) -> str:
    return "–" if p is None else ("<0.001" if p < 0.001 else f"{p:.3f}")


def amount(value: float | None, per: float = 1) -> str:
    """``value / per`` as a whole number: a total, or its amount per round."""
    return "–" if value is None else f"{value / per:,.0f}"


def seconds_text(seconds: float | None) -> str:
    """Seconds in three figures, without fractions from 100 s on."""
    if seconds is None:
        return "–"
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def true_minus(text: str) -> str:
    """A true minus sign before digits."""
    return re.sub(r"(?<![\w.])-(?=[\d.])", "−", text)


def visible(text: object) -> str:
    """Text whose invisible characters are spelled out, so that it cannot pass for another text."""
    text = str(text)
    if text.isprintable():  # most are, and a watched page has thousands of texts
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cc" and ord(character) < 32:
        return chr(0x2400 + ord(character))
    if category[0] == "C" or category in ("Zl", "Zp"):  # no right-to-left overrides, no zero width, no surrogates
        return f"⟨U+{ord(character):04X}⟩"
    return character

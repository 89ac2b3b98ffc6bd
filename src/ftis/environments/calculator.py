"""A calculator for word problems: it completes a model's calculations, as ``12 * 7 =``."""

from __future__ import annotations

import re
from decimal import Decimal, Inexact, localcontext

from ftis.rewards.numbers import arithmetic

LONGEST = 100
"""Characters of an expression."""
MONEY = "$€£"
EXPRESSION = re.compile(rf"[-+*/().,{MONEY}\d ]{{1,{LONGEST}}}$")
BEGIN = re.compile(r"(?<![\w.,)])[-+]?(?:\(|\.?\d)")
"""A place at which an expression may begin: no word or number goes on there, and a sign has its number right after."""
GOES_ON = re.compile(
    r"(?:\d.|\)[-+(]|[^\W\d_][-+]|\S[^\S\n]*[-+*/×÷·−–^%][^\S\n(]*.|√.|[\d%] of.|\\[a-z]+."
    r"|(?<![^\W\d_])(?:x|times|plus|minus|(?:divid|multipli)ed by).)$",
    re.IGNORECASE,
)
"""A line up to an expression's first character, if the calculation began before it. A lone ``-`` begins a list."""
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Calculator:
    """A tool that completes a turn after ``=`` by its expression's value. It needs ``sampling.stop = ["="]``."""

    before = ""
    """The end of earlier turns and answers, since a calculation may go on after an answer."""

    def reset(self, **row: object) -> None:
        self.before = ""

    def reply(self, text: str) -> str | None:
        """A space and the value; nothing if no expression stands there; None for a turn with another end."""
        if not text.endswith("="):
            return None
        written = (self.before + text)[-3 * LONGEST :]
        value = last_value(written[:-1])
        answer = "" if value is None else f" {value}"
        self.before = written + answer
        return answer


def last_value(text: str) -> str | None:
    """The value of the longest expression at a text's end. None: there is none, or only a part of it can be read."""
    found = EXPRESSION.search(text)
    for begin in BEGIN.finditer(text, found.start()) if found else ():
        at = begin.start()
        if (value := calculated(text[at:])) is not None:
            line = text[:at].rpartition("\n")[2].rstrip(f"{MONEY} ")
            return None if GOES_ON.search(line + text[at]) else value
    return None


def calculated(expression: str) -> str | None:
    """The exact value of sums, differences, products and quotients: ``7/2`` is 3.5, ``1/3`` is 1/3. None: no value."""
    source = THOUSANDS.sub("", re.sub(f"[{MONEY}]", " ", expression)).strip()
    value = None if "**" in source else arithmetic(source)
    if value is None:
        return None
    with localcontext(prec=2 * LONGEST) as context:
        context.traps[Inexact] = True
        try:
            return f"{(Decimal(value.numerator) / value.denominator).normalize():f}"
        except Inexact:
            return str(value)

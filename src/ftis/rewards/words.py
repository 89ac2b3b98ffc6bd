"""Units and words beside a number: which change nothing, and which make another answer of it."""

from __future__ import annotations

import re

_SPELLINGS = {
    "dollar": r"dollars?|USD",
    "cent": r"cents?",
    "euro": r"euros?",
    "pound": r"pounds?|lbs?",
    "yen": r"yen",
    "rupee": r"rupees?",
    "percent": r"percent",
    "degree": r"degrees?",
    "radian": r"radians?",
    "second": r"seconds?|sec",
    "minute": r"minutes?|min",
    "hour": r"hours?|hrs?",
    "day": r"days?",
    "week": r"weeks?",
    "month": r"months?",
    "year": r"years?",
    "mm": r"mm|millimet(?:er|re)s?",
    "cm": r"cm|centimet(?:er|re)s?",
    "m": r"m|met(?:er|re)s?",
    "km": r"km|kilomet(?:er|re)s?",
    "inch": r"inch(?:es)?|in",
    "foot": r"feet|foot|ft",
    "yard": r"yards?",
    "mile": r"miles?",
    "mg": r"mg",
    "g": r"g|grams?",
    "kg": r"kg|kilograms?",
    "ounce": r"ounces?|oz",
    "ton": r"tons?",
    "ml": r"ml",
    "liter": r"lit(?:er|re)s?",
    "gallon": r"gallons?",
    "unit": r"units?",
    "mph": r"mph|miles per hour",
    "km/h": r"km/h",
    "m/s": r"m/s",
}
UNITS = rf"(?:(?:square|cubic)\s+)?(?:{'|'.join(_SPELLINGS.values())})"
"""What may stand behind a number without changing it, as thousand and dozen may not."""

UNIT = re.compile(
    rf"(?<=[0-9}})$])\s*(?:\\[,; ]\s*)*(?:\s(?P<plain>{UNITS})|\\(?:text|mathrm|mbox)\{{\s*(?P<text>{UNITS})\s*\}}"
    r"|(?P<close>mm|cm|km|ft|in)(?=\s*\^))(?:\s*\^\s*(?:(?P<power>[23])|\{\s*(?P<braced>[23])\s*\}))?\s*$"
)
_CLOSE = re.compile(r"(?<=[0-9])(?P<close>mm|cm|km|mg|kg|ml|ft|lbs?|oz|mph)\s*$")
DEGREE = (
    r"(?:\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°)"
    r"|(?<=[0-9])\^(?:o(?![A-Za-z])|\{o\}))"
)
"""How degrees are written behind a number."""
_MARKS = {
    "degree": re.compile(rf"(?:{DEGREE}|\^\s*\{{\s*\\degree\s*\}})\s*$"),
    "percent": re.compile(r"%\s*$"),
    "dollar": re.compile(r"^\s*-?\s*\\?\$\s*-?[0-9.]"),
    "euro": re.compile(r"€"),
    "yen": re.compile(r"¥"),
    **{
        f"{half}m": re.compile(
            rf"(?<=[0-9])\s*(?:\\(?:text|mathrm|mbox)\{{)?\s*[{half}{half.upper()}]\.?[mM]\.?\s*\}}?\s*$"
        )
        for half in "ap"
    },
}
"""How units are written that are no words."""
WORDS = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{([^{}]*)(.)", re.DOTALL
)
COUNTS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|or|and|not|no|is|isn['’]?t|are|was|wrong|incorrect|"
    r"false|if|but|than|least|most|plus|minus|times|negative|per cent)\b",
    re.IGNORECASE,
)
"""Words that make another answer of an equation whose first side they name."""
RELATION = re.compile(r"(?<![<>!\\])=|\\(?:equiv|approx|in)(?![A-Za-z])|[≡≈∈]")
"""What stands between the sides of an equation."""
MOST_WORDS = 3
_SAID = re.compile(r"(?:[^\W\d_]|[\s.,:;()])*")
_MEASURE = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:{UNITS}|[hslLCFNJWV]|rad|deg|yd|mi)(?:\s+(?:squared|cubed))?"
_CARDINALS = (
    r"zeroe?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|"
    r"nine)t(?:y|ie)|hundred|thousand|lakh|million|crore|billion|trillion|dozen"
)
NUMBER_WORDS = re.compile(rf"(?i:(?:(?:{_CARDINALS})(?:[\s-]+|$))+)")
_NUMBERS = (
    rf"{_CARDINALS}|score|half|halve|quarter|third|(?:four|fif|six|seven|eigh|"
    r"nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand|million)th|double|triple|negative|equal|time|percent|doe"
)
_NOUNS = (
    r"(?:(?:positive|different|distinct|possible|whole|real|complex|rational|integer|prime|such)\s+)*"
    r"(?:people|men|women|children|sheep|fish|mice|geese|vertices|"
    rf"(?!(?i:{_NUMBERS})s\b)[A-Za-z]{{2,}}[^\W\d_siu]s)"
)
_OF = rf"(?:(?:\s*/\s*|\s+(?:per|an?|of|in)\s+)(?:{_MEASURE}|(?!(?i:{_NUMBERS}|cent)s?\b)[A-Za-z]{{3,}}))?"
RATE = re.compile(rf"(?<=[0-9])(?:\s*/\s*|\s+(?:per|an?)\s+)(?:{_MEASURE}|(?!(?i:{_NUMBERS}|cent)s?\b)[A-Za-z]{{3,}})$")
"""What an amount is for, as in ``$18 per day`` and ``$18/day``."""
_ALL = "in total|total|altogether|in all|each|left|remaining|tall|long|wide|high|deep|old|ago|away|apart|later|earlier"
_HARMLESS = re.compile(rf"(?:{_MEASURE}|{_NOUNS}){_OF}(?:\s+(?:{_ALL}|Celsius|Fahrenheit))?|{_ALL}|[ap]\.?m\.?")
_PLAIN_WORDS = re.compile(r"(?<=[0-9})])\s+([A-Za-z]{3,}(?:(?:\s+|/)[A-Za-z]+)*)\s*$")
_SINGULAR = re.compile(rf"(?!(?i:{_NUMBERS}|less|more|short)\b)[A-Za-z]+[^\W\ds](?<!ed)")
"""What may stand behind a number: units, and a noun in the plural that is no number, as in ``5\\text{ apples}``; or
behind 1 one in the singular."""


def units_differ(given: str, expected: str) -> bool:
    """Whether both have units, and not the same: cents for dollars, or lengths for areas. ``units`` may be any."""
    one, other = _unit(given), _unit(expected)
    if one is None or other is None or one == other:
        return False
    return one[1] != other[1] or "unit" not in (one[0], other[0])


def _unit(text: str) -> tuple[str, int] | None:
    """The name and the power of a number's unit: ``("cm", 2)`` of ``15\\text{ cm}^2``, ``("dollar", 1)`` of ``$9``."""
    found = UNIT.search(text) or _CLOSE.search(text)
    if found is None:
        return next(((name, 1) for name, mark in _MARKS.items() if mark.search(text)), None)
    known = found.groupdict()
    words = (known.get("plain") or known.get("text") or known["close"]).split()
    of_kind = {"square": 2, "cubic": 3}.get(words[0])
    written = " ".join(words[1:] if of_kind else words)
    name = next(name for name, spelling in _SPELLINGS.items() if re.fullmatch(spelling, written))
    return name, of_kind or int(known.get("power") or known.get("braced") or 1)


def as_text(formula: str, expected: str = "") -> str:
    """A formula whose words behind a number stand in ``\\text{…}``: ``9\\text{ people}`` for ``9 people``.

    Letters that ``expected`` has are no words, as in ``2 abc`` for ``2abc``. Without ``expected`` only words that
    change nothing are put there.
    """
    found = _PLAIN_WORDS.search(formula)
    if not found:
        return formula
    if not harmless(found[1]):
        letters = set(re.sub(r"\\[A-Za-z]+|[^A-Za-z]", "", expected))
        if not expected or letters.issuperset(re.sub(r"[\s/]", "", found[1])):
            return formula
    return f"{formula[: found.start()]}\\text{{ {found[1]}}}"


def harmless(words: str) -> bool:
    """Whether words behind a number leave it as it is: a unit, or a noun in the plural that is no number."""
    return _HARMLESS.fullmatch(words) is not None


def without_nouns(formula: str) -> str:
    """A formula without the harmless words behind its numbers, for math-verify takes one number of those between."""
    return WORDS.sub(_without_noun, formula)


def _without_noun(found: re.Match[str]) -> str:
    before, after = found.string[: found.start()].rstrip("}) ")[-1:], found.string[found.end() :].lstrip()[:1]
    alone = before.isdigit() and after != "^" and not after.isdigit()
    return " " if alone and found[2] == "}" and harmless(found[1].strip()) else found[0]


def says_more(given: str, expected: str) -> bool:
    """Whether words stand beside the formula of ``given`` that make another answer of it.

    Units and a noun in the plural do not, as in ``5\\text{ apples}``, nor do words of ``expected``. Others may only
    name the first side of an equation, as in ``\\text{Area} = 5``: at most :data:`MOST_WORDS`.
    """
    if not WORDS.search(given) or not re.sub(r"[{}\s]", "", WORDS.sub("", given)):
        return False  # no words, or nothing else
    known = set(re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", "", expected)))
    sides = RELATION.split(given)
    for place, side in enumerate(sides, 1):
        number = WORDS.sub(_without_word, side).strip()
        names, one = place < len(sides) and not re.search("[0-9]", number), number == "1"
        for text, behind in WORDS.findall(side):
            words = text.strip()
            listed = "," in expected and words in ("or", "and")
            if behind != "}":
                return True
            plain = _SAID.fullmatch(words) is not None
            if words == expected or listed or (plain and known.issuperset(re.findall(r"[^\W\d_]+", words))):
                continue
            if names:
                if COUNTS.search(words) or len(words.split()) > MOST_WORDS:
                    return True
            elif not harmless(words) and not (one and _SINGULAR.fullmatch(words) and not COUNTS.search(words)):
                return True
    return False


def _without_word(found: re.Match[str]) -> str:
    return "" if found[2] == "}" else found[0]

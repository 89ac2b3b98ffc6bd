"""Units and words beside a number: which change nothing, and which make another answer of it."""

from __future__ import annotations

import re

_SPELLINGS = {
    "dollar": r"dollars?|USD|bucks?",
    "cent": r"cents?|penn(?:y|ies)",
    "nickel": r"nickels?",
    "dime": r"dimes?",
    "euro": r"euros?",
    "pound": r"pounds?|lbs?",
    "yen": r"yen",
    "rupee": r"rupees?",
    "percent": r"percent",
    "degree": r"deg(?:rees?)?",
    "celsius": r"(?:deg(?:rees?)?\s+)?(?:[Cc]elsius|C)",
    "fahrenheit": r"(?:deg(?:rees?)?\s+)?(?:[Ff]ahrenheit|F)",
    "radian": r"radians?|rad",
    "nanosecond": r"ns|nanoseconds?",
    "microsecond": r"microseconds?",
    "millisecond": r"ms|milliseconds?",
    "second": r"seconds?|secs?|s",
    "minute": r"minutes?|mins?",
    "hour": r"hours?|hrs?|h",
    "day": r"days?",
    "week": r"weeks?",
    "month": r"months?",
    "year": r"years?|yrs?",
    "nm": r"nm|nanomet(?:er|re)s?",
    "micrometer": r"micromet(?:er|re)s?|microns?",
    "mm": r"mm|millimet(?:er|re)s?",
    "cm": r"cm|centimet(?:er|re)s?",
    "m": r"m|met(?:er|re)s?",
    "km": r"km|kilomet(?:er|re)s?",
    "inch": r"inch(?:es)?|in(?!\s+(?:total|all|each)\b)",
    "foot": r"feet|foot|ft",
    "yard": r"yards?|yds?",
    "mile": r"miles?|mi",
    "acre": r"acres?",
    "hectare": r"hectares?",
    "mg": r"mg|milligrams?",
    "g": r"g|grams?",
    "kg": r"kg|kilograms?|kilos?",
    "ounce": r"ounces?|oz",
    "ton": r"tons?|tonnes?",
    "ml": r"m[lL]|millilit(?:er|re)s?",
    "liter": r"lit(?:er|re)s?|l|L",
    "teaspoon": r"teaspoons?|tsps?",
    "tablespoon": r"tablespoons?|tbsps?",
    "cup": r"cups?",
    "pint": r"pints?",
    "quart": r"quarts?",
    "gallon": r"gallons?",
    "newton": r"newtons?|N",
    "kilonewton": r"kN|kilonewtons?",
    "joule": r"joules?|J",
    "kilojoule": r"kJ|kilojoules?",
    "calorie": r"calories?|cals?",
    "kilocalorie": r"kcals?|kilocalories?",
    "watt": r"watts?|W",
    "kilowatt": r"kW|kilowatts?",
    "megawatt": r"MW|megawatts?",
    "volt": r"volts?|V",
    "kilovolt": r"kV|kilovolts?",
    "ampere": r"amps?|amperes?",
    "ohm": r"ohms?",
    "hertz": r"hertz|Hz",
    "kilohertz": r"kilohertz|kHz",
    "megahertz": r"megahertz|MHz",
    "mole": r"moles?|mol",
    "unit": r"units?",
    "mile/hour": r"mph",
    "km/hour": r"kmh|kmph|kph",
}
"""What may stand behind a number without changing it, and all that is compared where both answers have it."""
_MULTIPLES = {
    "pair": r"pair",
    "couple": r"couple",
    "trio": r"trio",
    "dozen": r"dozen",
    "score": r"score",
    "gross": r"grosse?",
    "fortnight": r"fortnight",
    "decade": r"decade",
    "century": r"centur(?:y|ie)",
    "millennium": r"millenni(?:um|a)",
}
"""What makes another number of it. An expected answer that has one may still be given without, as without a unit."""
_SPELLED = {name: re.compile(rf"(?:{spelling})s?") for name, spelling in (_SPELLINGS | _MULTIPLES).items()}
_UNITS = "|".join(_SPELLINGS.values())
_MULTIPLE = "|".join(_MULTIPLES.values())
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "squared": 2, "cubic": 3, "cu": 3, "cu.": 3, "cubed": 3}
_MEASURE = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:{_UNITS})(?:\s+(?:squared|cubed))?"
SYMBOLS = r"n[sm]|ms|k[NJWV]|MW"
"""Units of two letters that behind a space may be variables, as those of one letter may."""
_LENGTHS = ("mm", "cm", "m", "km", "inch", "foot", "yard", "mile")

TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{"

_CARDINALS = (
    r"zeroe?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|"
    r"nine)t(?:y|ie)|hundred|thousand|lakh|million|crore|billion|trillion|dozen"
)
NUMBER_WORDS = re.compile(rf"(?i:(?:(?:{_CARDINALS})(?:[\s-]+|$))+)")
_NUMBERS = (
    rf"{_CARDINALS}|{_MULTIPLE}|half|halve|quarter|third|(?:four|fif|six|seven|eigh|"
    r"nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand)th|[a-z]*illion(?:th)?|sixe|grand|double|triple|negative|"
    r"equal|time|percent|doe|wrong|not|minuse|pluse"
)
_NO_NUMBER = rf"(?!(?i:{_NUMBERS})s?\b)"
_NOUNS = (
    r"(?:(?:positive|different|distinct|possible|whole|real|complex|rational|integer|prime|such)\s+)*"
    rf"(?:people|men|women|children|sheep|fish|mice|geese|vertices|{_NO_NUMBER}[A-Za-z]{{2,}}[^\W\d_siu]s)"
)
_THING = rf"(?:{_MEASURE}|(?!(?i:cents?)\b){_NO_NUMBER}[A-Za-z]{{3,}})"
_PER = r"(?:\s*/\s*|\s+(?:per|an?)\s+)"
_OF = rf"(?:{_PER}(?P<per>{_THING})|\s+(?:of|in)\s+{_THING})?"
RATE = re.compile(rf"(?<=[0-9])(?:{_PER}{_THING}|\s*{TEXT}{_PER}{_THING}\s*\}})$")
"""What an amount is for, as in ``$18 per day`` and ``$18/day``."""
_ALL = (
    "in total|total|altogether|in all|in each|each|left|remaining|tall|long|wide|high|deep|old|"
    "ago|away|apart|later|earlier"
)
_PHRASE = rf"(?P<measure>{_MEASURE}){_OF}(?:\s+(?:{_ALL}))?"
_HARMLESS = re.compile(rf"(?:{_MEASURE}|{_NOUNS}){_OF}(?:\s+(?:{_ALL}))?|{_ALL}|[ap]\.?m\.?")
"""What may stand behind a number: units, and a noun in the plural that is no number, as in ``5\\text{ apples}``."""
_SINGULAR = re.compile(rf"(?!(?i:{_NUMBERS}|less|more|short)\b)[A-Za-z]+[^\W\ds](?<!ed)")
"""What may stand behind 1 besides."""
_PLAIN_WORDS = re.compile(r"(?<=[0-9})])\s+([A-Za-z]{3,}(?:(?:\s+|/)[A-Za-z]+)*)\s*$")

WORDS = re.compile(rf"{TEXT}([^{{}}]*)(.)", re.DOTALL)
_UNIT = re.compile(
    # Behind a variable only words in braces are a unit. Letters alone behind a space are variables, but for m and g.
    rf"(?:(?<=[0-9}})$])|(?<=[A-Za-z!])(?=\s*(?:\\[,; ]\s*)*{TEXT}))"
    rf"\s*(?:\\[,; ]\s*)*(?:(?P<text>{TEXT}\s*)|\s(?!(?:[hslLCFNJWV]|{SYMBOLS})\b)|(?=(?:mm|cm|km|ft|in)\s*\^))"
    rf"{_PHRASE}(?(text)\s*\}})(?:\s*\^\s*(?:(?P<power>[23])|\{{\s*(?P<braced>-?[1-3])\s*\}}))?\s*$"
)
_ONLY_WORDS = re.compile(rf"{TEXT}[^{{}}0-9]*\}}\s*$")
_TOUCHING = re.compile(rf"(?<=[0-9}})])\s*(?:{TEXT})?\s*(?P<measure>{_UNITS}|(?:{_MULTIPLE})s?)\s*\}}?\s*$")
"""What is compared but not taken off here. math-verify takes off some of it, as in ``9cm`` and ``9 s``."""
DEGREE = (
    r"(?:\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|[°º˚])"
    r"|(?<=[0-9])\^(?:o(?![A-Za-z])|\{o\}))"
)
"""How degrees are written behind a number."""
DEGREES = re.compile(rf"{DEGREE}(?:\s*[CF]\s*$)?")
_MARKS = {
    "celsius": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*C(?:elsius)?\s*\}}?\s*$"),
    "fahrenheit": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*F(?:ahrenheit)?\s*\}}?\s*$"),
    "degree": re.compile(rf"(?:{DEGREE}|\^\s*\{{\s*\\degree\s*\}})\s*$"),
    "percent": re.compile(r"%\s*$"),
    "dollar": re.compile(r"^\s*-?\s*\\?\$\s*-?[0-9.]"),
    "euro": re.compile(r"€"),
    "yen": re.compile(r"¥"),
    **{
        f"{half}m": re.compile(rf"(?<=[0-9])\s*(?:{TEXT})?\s*[{half}{half.upper()}]\.?[mM]\.?\s*\}}?\s*$")
        for half in "ap"
    },
}
"""How units are written that are no words."""
COUNTS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|or|and|not|no|is|isn['’]?t|are|was|wrong|incorrect|"
    r"false|if|but|than|least|most|plus|minus|times|negative|per cent|twice|thrice|"
    r"(?:double|triple)(?! (?:product|integral)))\b|^\s*(?:squared|cubed)\b",
    re.IGNORECASE,
)
"""Words that make another answer of an equation whose first side they name."""
RELATION = re.compile(r"(?<![<>!\\])=|\\(?:equiv|approx|in)(?![A-Za-z])|[≡≈∈]")
"""What stands between the sides of an equation."""
MOST_WORDS = 3
_SAID = re.compile(r"(?:[^\W\d_]|[\s.,:;()])*")


def without_unit(text: str) -> str:
    """A text without the unit behind its number, which :func:`units_differ` compares.

    Words are no number: ``\\text{(B)}\\text{ C}`` stays as it is.
    """
    found = _UNIT.search(_small(text))
    return text if found is None or _ONLY_WORDS.search(text, 0, found.start()) else text[: found.start()]


def _small(text: str) -> str:
    """A text whose words begin small, as units in the table do."""
    return re.sub(r"\b[A-Z](?=[a-z]{2})", lambda found: found[0].lower(), text)


def units_differ(given: str, expected: str) -> bool:
    """Whether both have units, and not the same: cents for dollars, lengths for areas, miles per second for per hour.

    ``units`` may be any, and degrees may be of any scale. What an amount is per may be left out, but not of a speed,
    which is no length.
    """
    one, other = _unit(given), _unit(expected)
    if one is None or other is None:
        return False
    return one[1] != other[1] or not (one[0] in _names(other[0]) or other[0] in _names(one[0]))


def _names(unit: str) -> set[str]:
    """What a unit may be called in short."""
    amount = unit.partition("/")[0]
    scale = {"degree"} if unit in ("celsius", "fahrenheit") else set()
    return {"unit", unit, *scale} if amount in _LENGTHS else {"unit", unit, amount, *scale}


def _unit(text: str) -> tuple[str, int] | None:
    """A number's unit, its name and power: ``("cm", 2)`` of ``15\\text{ cm}^2``, ``("mile/hour", 1)`` of ``9 mph``."""
    found = _UNIT.search(_small(text)) or _TOUCHING.search(_small(text))
    if found is None:
        return next(((name, 1) for name, mark in _MARKS.items() if mark.search(text)), None)
    parts = found.groupdict()
    name, power = _named(parts["measure"])
    per, of = _named(parts.get("per") or "")
    rate = f"/{per}" * of if per else ""
    unit = name + rate, int(parts.get("power") or parts.get("braced") or power)
    return ("m/second", 1) if unit == ("millisecond", -1) else unit


def _named(measure: str) -> tuple[str, int]:
    """A unit's name and its power in words. A thing is no unit and has no name, as in ``cents per apple``."""
    words = measure.split()
    written = " ".join(word for word in words if word not in _POWERS)
    powers = [_POWERS[word] for word in words if word in _POWERS]
    names = (name for name, spelling in _SPELLED.items() if spelling.fullmatch(written))
    return next(names, ""), max(powers, default=1)


def as_text(formula: str, expected: str = "") -> str:
    """A formula whose words behind a number stand in ``\\text{…}``: ``9\\text{ people}`` for ``9 people``.

    Letters that ``expected`` has are no words, as in ``2 abc`` for ``2abc``. Without ``expected`` only words that
    change nothing or are one of ``_MULTIPLES`` are put there.
    """
    found = _PLAIN_WORDS.search(formula)
    if not found:
        return formula
    if not harmless(found[1]) and (expected or not _named(found[1])[0]):
        letters = set(re.sub(r"\\[A-Za-z]+|[^A-Za-z]", "", WORDS.sub("", expected)))
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

"""Answers as people write them, brought to one way of writing before they are compared.

Nothing here evaluates anything. A unit that is taken off an answer is taken off the expected one as well.
"""

from __future__ import annotations

import re

MOST_WRITTEN = 30
"""Brackets inside brackets, those counted that change nothing, as in ``{{{5}}}``."""
MOST_NESTED = 8
"""Brackets inside brackets, without those. The grammar that reads LaTeX takes exponentially long for them: half a
second for eight at most, three and more for fifteen."""
MOST_POWERS = 3
"""Powers of powers; what they are worth cannot be computed."""

UNITS = (
    r"dollars?|cents?|euros?|pounds?|yen|rupees?|percent|degrees?|radians?|"
    r"seconds?|sec|minutes?|min|hours?|hrs?|days?|weeks?|months?|years?|"
    r"mm|cm|km|m|met(?:er|re)s?|(?:centi|kilo|milli)met(?:er|re)s?|inch(?:es)?|in|feet|foot|ft|yards?|miles?|"
    r"mg|kg|g|grams?|kilograms?|ounces?|oz|lbs?|tons?|lit(?:er|re)s?|ml|gallons?|units?|"
    r"mph|km/h|m/s|square (?:units?|feet|inches|miles|cm|km|m)|cubic (?:units?|feet|inches|cm|m)"
)
"""What may stand behind a number without changing it, as thousand and dozen may not."""

_UNIT = re.compile(
    rf"(?<=[0-9}})$])\s*(?:\\[,; ]\s*)*(?:\s(?:{UNITS})|\\(?:text|mathrm|mbox)\{{\s*(?:{UNITS})\s*\}})"
    r"(?:\s*\^\s*(?:([23])|\{\s*([23])\s*\}))?\s*$"
)
_DEGREE = r"\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°)"
_DEGREES = re.compile(_DEGREE)
_OF_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*(?:[0-9]|\{\s*[0-9]\s*\})\s*)?(?:\\left)?[({]?\s*)"
    rf"([0-9]+(?:\.[0-9]+)?){_DEGREE}"
)
_SIZES = re.compile(r"\\[bB]igg?[lrm]?(?![A-Za-z])\s*")
_LINE_GAP = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_DIGIT_GAP = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|,\\!\s*|\{,\}|~)(?=[0-9]{3}(?![0-9]))")
_MIXED = re.compile(r"^([+-]?)\s*([0-9]+)(?:\s|~|\\[,;:! ])+([0-9]+)\s*/\s*([0-9]+)$")
_UNION = re.compile(r"([\])])\s*(?:U|∪)\s*(?=[\[(])")
_LESS = r"(<|≤|<=|\\leq?(?:slant)?(?![a-z])|\\lt(?![a-z]))"
_STRICT = ("<", r"\lt")
_BETWEEN = re.compile(rf"^([^<>≤=]+?)\s*{_LESS}\s*[A-Za-z]\s*{_LESS}\s*([^<>≤=]+)$")
_INTERVAL = re.compile(r"^[\[(][^,]*,[^,]*[\])]$")
_RELATION = re.compile(r"(?<![<>!\\])=|\\(?:equiv|approx|in)(?![A-Za-z])|[≡≈∈]")
_IN_BASE = re.compile(
    r"(?<![\\A-Za-z0-9.])(?:[A-Za-z]*[0-9.][0-9A-Za-z.]*|[A-Za-z]{2,}|^[A-Za-z](?=\s*_[^_=]*$)|[)\]}])(?:\s|\\[,;:! ])*"
    r"_\s*(?:\{([^{}]+)\}|([0-9]+|[A-Za-z]))"
)
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
_BASES += ["fourteen", "fifteen", "sixteen"]
_NAMED_BASE = re.compile(rf"_((?:\s|\{{|\\(?:text|mathrm|mbox)\s*\{{)+)({'|'.join(_BASES)})((?:\s*\}})+)")
_WORDS = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{([^{}]*)(.)", re.DOTALL
)
_COUNTS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|half|or|and|not|no|is|isn['’]?t|are|was|wrong|incorrect|"
    r"false|if|but|than|least|most|plus|minus|times|negative|per cent)\b",
    re.IGNORECASE,
)
"""Words that make another answer of an equation whose first side they name."""
MOST_WORDS = 3
_SAID = re.compile(r"(?:[^\W\d_]|[\s.,:;()])*")
_MEASURE = rf"(?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:{UNITS}|[hslLCFNJWV]|rad|deg|yd|mi)(?:\s+(?:squared|cubed))?"
_NUMBERS = (
    r"zeroe?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|"
    r"nine)t(?:y|ie)|hundred|thousand|million|billion|trillion|dozen|score|half|halve|quarter|third|(?:four|fif|six|seven|eigh|"
    r"nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand|million)th|double|triple|negative|equal|time|percent|doe"
)
_NOUNS = (
    r"(?:(?:positive|different|distinct|possible|whole|real|complex|rational|integer|prime|such)\s+)*"
    r"(?:people|men|women|children|sheep|fish|mice|geese|vertices|"
    rf"(?!(?i:{_NUMBERS})s\b)[A-Za-z]{{2,}}[^\W\d_siu]s)"
)
_OF = rf"(?:(?:\s*/\s*|\s+(?:per|an?|of|in)\s+)(?:{_MEASURE}|(?!(?i:{_NUMBERS}|cent)s?\b)[A-Za-z]{{3,}}))?"
_ALL = "in total|total|altogether|in all|each|left|remaining|tall|long|wide|high|deep|old|ago|away|apart|later|earlier"
_HARMLESS = re.compile(rf"(?:{_MEASURE}|{_NOUNS}){_OF}(?:\s+(?:{_ALL}|Celsius|Fahrenheit))?|{_ALL}|[ap]\.?m\.?|USD")
_SINGULAR = re.compile(rf"(?!(?i:{_NUMBERS}|less|more|short)\b)[A-Za-z]+[^\W\ds](?<!ed)")
"""What may stand behind a number: units, and a noun in the plural that is no number, as in ``5\\text{ apples}``; or
behind 1 one in the singular."""
_BRACKET = re.compile(
    r"(?P<power>\^\s*)?(?:\\left\s*)?(?P<opening>\\l(?:floor|ceil|angle|vert)(?![A-Za-z])|\\?[(\[{])"
    r"|\\r(?:floor|ceil|angle|vert)(?![A-Za-z])|[)\]}]"
)
_CHAIN = re.compile(
    rf"(?:[\^_]\s*(?:\{{[^{{}}]*\}}|\\[A-Za-z]+|[^\s{{}}])\s*){{{MOST_POWERS + 1},}}|!{{{MOST_POWERS},}}"
)
_OPERATIONS = re.compile(
    r"\\(?:[dtc]?frac|sqrt|cdot|times|div|left|right|pm|mp|pi|infty|[dt]?binom|[lr](?:floor|ceil|vert)|arc(?:sin|cos|tan)|"
    r"(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|gcd|min|max)(?![A-Za-z])"
)
"""Commands that make a number of numbers."""
_NOUN = re.compile(r"(?<=[0-9])\s+[A-Za-z]{4,}\s*$")


def too_nested(text: str, most: int = MOST_NESTED) -> bool:
    """Whether brackets of any kind stand more than ``most`` deep, or powers more than :data:`MOST_POWERS`."""
    powers: list[bool] = []  # of the brackets that are open
    for found in _BRACKET.finditer(text):
        if found["opening"]:
            powers.append(found["power"] is not None)
        elif powers:
            powers.pop()
        if len(powers) > most or sum(powers) > MOST_POWERS:
            return True
    return _CHAIN.search(text) is not None


def without_doubles(text: str) -> str:
    """A text without brackets around nothing but brackets of their kind: ``{5}`` for ``{{5}}``."""
    ends: dict[int, int] = {}
    for opening, closing in ("{}", "()"):
        starts: list[int] = []
        for found in re.finditer(rf"\\.|[{opening}{closing}]", text, re.DOTALL):
            if found[0] == opening:
                starts.append(found.start())
            elif found[0] == closing and starts:
                ends[starts.pop()] = found.start()
    double = {start for start, end in ends.items() if text[start + 1] == text[start] and ends.get(start + 1) == end - 1}
    dropped = double | {ends[start] for start in double}
    return "".join(character for place, character in enumerate(text) if place not in dropped)


def tidied(formula: str) -> str:
    """A formula with one way to write what people write in several: degrees, spaces in numbers, brackets, units."""
    formula = without_doubles(formula)
    formula = _LINE_GAP.sub(r"\\\\", formula)
    formula = _SIZES.sub("", formula)
    formula = _DIGIT_GAP.sub("", formula).replace("~", " ")
    formula = _UNION.sub(r"\1 \\cup ", formula)
    formula = _NAMED_BASE.sub(_with_digits, formula)
    formula = _OF_DEGREES.sub(r"\1\\frac{\2\\pi}{180}", formula)
    formula = _DEGREES.sub("", _UNIT.sub("", formula)).strip()
    return _MIXED.sub(r"\1\2\\frac{\3}{\4}", formula)


def _with_digits(found: re.Match[str]) -> str:
    """``_{\\text{eight}}`` as ``_{8}``."""
    opened, name, closed = found.groups()
    left = closed.count("}") - opened.count("{")
    return found[0] if left < 0 else f"_{{{_BASES.index(name) + 2}}}{'}' * left}"


def as_intervals(given: str, expected: str) -> tuple[str, str]:
    """Both as intervals where one of them is an interval and the other an inequality such as ``3 < x \\le 4``.

    ``(1,2)`` may be a point, so an interval has a square bracket or an infinite end.
    """
    if _is_interval(given):
        return given, _interval(expected)
    return (_interval(given), expected) if _is_interval(expected) else (given, expected)


def _is_interval(text: str) -> bool:
    return bool(_INTERVAL.match(text)) and ("[" in text or "]" in text or "\\infty" in text)


def _interval(text: str) -> str:
    found = _BETWEEN.match(text)
    if not found:
        return text
    low, left, right, high = found.groups()
    return f"{'(' if left in _STRICT else '['}{low},{high}{')' if right in _STRICT else ']'}"


def bases_differ(given: str, expected: str) -> bool:
    """Whether both have numbers in a base, as ``52_8``, and not the same bases."""
    one, other = _bases(given), _bases(expected)
    return bool(one) and bool(other) and one != other


def _bases(text: str) -> set[str]:
    return {(found[1] or found[2]).strip("() ") for found in _IN_BASE.finditer(text)}


def powers_differ(given: str, expected: str) -> bool:
    """Whether both have units and one is of lengths, the other of areas or volumes."""
    one, other = _UNIT.search(given), _UNIT.search(expected)
    return one is not None and other is not None and (one[1] or one[2]) != (other[1] or other[2])


def says_more(given: str, expected: str) -> bool:
    """Whether words stand beside the formula of ``given`` that make another answer of it.

    Units and a noun in the plural do not, as in ``5\\text{ apples}``, nor do words of ``expected``. Others may only
    name the first side of an equation, as in ``\\text{Area} = 5``: at most :data:`MOST_WORDS`.
    """
    if not _WORDS.search(given) or not re.sub(r"[{}\s]", "", _WORDS.sub("", given)):
        return False  # no words, or nothing else
    known = set(re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", "", expected)))
    sides = _RELATION.split(given)
    for place, side in enumerate(sides, 1):
        number = _WORDS.sub(_without_word, side).strip()
        names, one = place < len(sides) and not re.search("[0-9]", number), number == "1"
        for text, behind in _WORDS.findall(side):
            words = text.strip()
            listed = "," in expected and words in ("or", "and")
            if behind != "}":
                return True
            plain = _SAID.fullmatch(words) is not None
            if words == expected or listed or (plain and known.issuperset(re.findall(r"[^\W\d_]+", words))):
                continue
            if names:
                if _COUNTS.search(words) or len(words.split()) > MOST_WORDS:
                    return True
            elif not _HARMLESS.fullmatch(words) and not (
                one and _SINGULAR.fullmatch(words) and not _COUNTS.search(words)
            ):
                return True
    return False


def numbers_named(given: str, expected: str) -> list[str]:
    """The sides of the equation ``given``, but for its last, that have no letters: each must equal ``expected``.

    ``x = 5`` says what x is, so its last side counts. In ``2 + 3 = 5`` the first must be right as well, or ``10 = 9``
    would pass for 9, and so in ``10 \\equiv 9``. Words and units are no letters, nor are π and functions. An expected
    equation is compared whole, and so is a list such as ``x = 5, y = 6``.
    """
    if _RELATION.search(expected):
        return []
    numbers = []
    for side in _RELATION.split(given)[:-1]:
        number = re.sub(r"\\q?quad(?![A-Za-z])", "", _WORDS.sub(_without_word, side)).strip()
        number = _NOUN.sub("", _UNIT.sub("", number)).strip()
        letters = re.search(r"[A-Za-z]", _OPERATIONS.sub("", number))
        if number and "," not in number and not letters:
            numbers.append(number)
    return [side for side in numbers if all(side.count(a) == side.count(b) for a, b in ("()", "[]", "{}"))]


def _without_word(found: re.Match[str]) -> str:
    return "" if found[2] == "}" else found[0]

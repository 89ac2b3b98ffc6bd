"""Words beside a value, in any language. A word is left out only if it is known to leave the value as it is.

The tables in words.txt list units of measure, counted things and names of quantities. The thing that the problem asks
*how many* of is known too. Any other word makes another answer, unless the expected answer has it too: ``24 dozen`` and
``nicht = 24`` are not 24. So a right answer in an unusual word may be refused, but no wrong one is accepted.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

_TABLES = {
    table.partition("]")[0]: table.partition("\n")[2].split()
    for table in normalize("NFKC", Path(__file__).with_name("words.txt").read_text(encoding="utf-8")).split("\n[")
}
UNITS = {one: entry.partition("=")[0] for entry in _TABLES["units"] for one in entry.partition("=")[2].split(",")}
"""Spellings of units, without a plural s, and the unit's name. Two answers that both have a unit must have the same."""
_BESIDE, _THINGS, _JOINERS, _NAMES = (frozenset(_TABLES[name]) for name in ("beside", "things", "joiners", "names"))
_EAST = "|".join(_TABLES["counted"])
_KNOWN_ABROAD = re.compile(
    rf"{'|'.join(_TABLES['abroad'])}|(?:{'|'.join(_TABLES['counters'])})(?:の|\s)?(?:{_EAST})?|{_EAST}", re.IGNORECASE
)
POWERS = "|".join(_TABLES["powers"])
"""Words after a number that multiply or divide it, or add a part to it."""
SAYS = "|".join(_TABLES["says"])
"""Words before an answer, as *the answer is*."""
_ASKED = re.compile(rf"(?i:(number\sof)|{'|'.join(_TABLES['asked'])})\s*")
_SCALING = re.compile(rf"{'|'.join(_TABLES['scaling'])}|{POWERS}", re.IGNORECASE)
_DIMENSIONS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_LENGTHS = ("mm", "cm", "m", "km", "inch", "foot", "yard", "mile")
SYMBOLS = r"n[sm]|ms|k[NJWV]|MW"
"""Units of two letters. Outside braces they may be variables, as a unit of one letter may."""
MONEY = "[\u00a2-\u00a5\u0e3f\u20a0-\u20c0]"
CURRENCIES = (
    "USD|EUR|GBP|JPY|CNY|INR|CHF|CAD|AUD|NZD|HKD|SGD|SEK|NOK|DKK|PLN|CZK|HUF|RUB|UAH|TRY|BRL|MXN|ZAR|KRW|THB|IDR|VND"
)
ABROAD = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u1fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Letters of other languages than English, for a class of a pattern."""
_PHRASE_END = re.compile(rf"[^\w\s.'’{ABROAD}-]|[.](?!\w)|\b(?:{'|'.join(_TABLES['ends'])})\b")

# --- words in a text --------------------------------------------------------------------------------------------------

TEXT = r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{"
"""The beginning of words in LaTeX."""
WORDS = re.compile(rf"{TEXT}([^{{}}]*)(.)", re.DOTALL)
"""Words in LaTeX, and the character after them: ``}``, unless braces stand among the words."""
_GAP = r"(?:\s|~|\\[,;:! ])"
_WORD = rf"[A-Za-z{ABROAD}][A-Za-z{ABROAD}.'’]*"
_GROUP = rf"{TEXT}[^{{}}]*+\}}"
_PER = rf"/(?={_GAP}*(?:{_GROUP}|{_WORD}))"
_RAISED = r"\^(?:[1-3](?![0-9])|\{\s*-?[1-3]\s*\})"
_RUN = re.compile(
    rf"(?:(?<=[0-9)}}\]°%])|(?<=[A-Za-z!])(?={_GAP}*{TEXT}))"
    rf"(?:{_GAP}*+(?:{_GROUP}|{_WORD}|{_PER})(?:\s*{_RAISED})?)++"
)
"""Words after a value, in braces or not."""
_TOKEN = re.compile(rf"\^\{{?\s*(-?[1-3])\s*\}}?|({_WORD}|/)")
_LABEL = re.compile(
    rf"^\s*((?:{_GROUP}|[A-Za-z{ABROAD}'’ ])++)(?:\s*[=:]|(?=\\approx(?![A-Za-z]))|(?<=\sis\s)(?=[+-]?\\?\$?[0-9]))"
)


class Measure(NamedTuple):
    """``("cm", 2, "")`` of ``15\\text{ cm}^2``, ``("mile", 1, "hour")`` of ``9 mph``; the name of a thing is ""."""

    name: str
    power: int
    per: str


def _plain(run: str) -> str:
    return re.sub(rf"{TEXT}|[}}~]|\\[,;:! ]", " ", run.replace("{-", "-").replace("^{", "^"))


def _singulars(word: str) -> set[str]:
    """The word, and the words whose plural it may be."""
    small = word.strip(".").lower()
    ends = (("s", ""), ("es", ""), ("ies", "y"))
    return {word.strip("."), small} | {small.removesuffix(end) + more for end, more in ends if small.endswith(end)}


def _unit(word: str) -> str:
    """The name of a unit, or ""."""
    short = word.strip(".")
    return UNITS.get(short, "") or next((UNITS[one] for one in _singulars(word) if len(one) > 2 and one in UNITS), "")


@lru_cache(maxsize=4096)
def _known(word: str) -> bool:
    alike = _singulars(word)
    return bool(_unit(word) or alike & (_THINGS | _BESIDE) or _KNOWN_ABROAD.fullmatch(word.strip(".")))


def harmless(run: str) -> bool:
    """Whether all words after a value are known to leave it as it is."""
    plain = _plain(run)
    words = [found[2].strip(".") for found in _TOKEN.finditer(plain) if found[2]]
    if not words or _TOKEN.sub("", plain).strip() or words[-1].lower() in _JOINERS - {"in"}:
        return False
    units = any(map(_unit, words))
    return all(_known(word) or word.lower() in _JOINERS or (units and word in _DIMENSIONS) for word in words)


def _names(words: str) -> bool:
    """Whether all words are known in the name of a quantity, as in ``Area of square`` and ``side x``."""
    found = _plain(words).split()
    known = [word for word in found if len(word) > 1 or not word.isascii()]
    return bool(known) and all(_known(word) or word.lower() in _NAMES | _JOINERS for word in known)


def without_words(text: str) -> str:
    """``x=2+3`` for ``Sum: 2 cm+3 cm``: no known words after values, and x for a known name before them.

    Letters outside braces may be variables, so words there have at least two.
    """
    return _LABEL.sub(_without_label, _RUN.sub(_without_run, text))


def _without_label(found: re.Match[str]) -> str:
    sign = "" if found.string[found.end() :].startswith("\\approx") else "="
    return f"x{sign}" if _names(found[1]) else found[0]


def _without_run(found: re.Match[str]) -> str:
    bare = re.findall(rf"[A-Za-z{ABROAD}]+", WORDS.sub("", found[0]))
    variable = "/" not in found[0] and any(re.fullmatch(rf"(?!a)[A-Za-z]|{SYMBOLS}", word) for word in bare)
    before, after = WORDS.sub("", found.string[: found.start()]), found.string[found.end() :].lstrip()[:1]
    alone = re.search("[0-9A-Za-z]", before) and not (after.isalnum() or after in tuple("({^_"))
    return " " if alone and not variable and harmless(found[0]) else found[0]


def last_words(text: str) -> re.Match[str] | None:
    """The words after a text's last value."""
    return next((found for found in _RUN.finditer(text) if not text[found.end() :].strip("}. ")), None)


def measure(text: str) -> Measure | None:
    """The unit after a number, or in signs beside it; None if there is none."""
    found = last_words(text)
    if found is None:
        return next((Measure(name, 1, "") for name, mark in _MARKS.items() if mark.search(text)), None)
    parts, powers, place = ["", ""], [1, 1], 0
    for token in _TOKEN.finditer(re.sub(r"\bin\s+(?=[a-z])", "", _plain(found[0]))):
        if token[1]:
            powers[place] = int(token[1])
        elif token[2] in ("/", "per", "a", "an") and not place:
            place = 1
        elif power := _DIMENSIONS.get(token[2].strip(".")):
            powers[place] = power
        else:
            parts[place] = _unit(token[2]) or parts[place]
    name, _, per = parts[0].partition("/")
    return Measure(name, powers[0], per or parts[1] * powers[1]) if name else None


DEGREE = (
    r"(?:\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|[°º˚])"
    r"|(?<=[0-9])\^(?:o(?![A-Za-z])|\{o\}))"
)
"""Ways to write degrees after a number."""
_MARKS = {
    "celsius": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*C(?:elsius)?\s*\}}?\s*$"),
    "fahrenheit": re.compile(rf"{DEGREE}\s*(?:{TEXT})?\s*F(?:ahrenheit)?\s*\}}?\s*$"),
    "degree": re.compile(rf"(?:{DEGREE}|\^\s*\{{\s*\\degree\s*\}})\s*$"),
    "percent": re.compile(r"%\s*$"),
    "dollar": re.compile(r"^\s*-?\s*\\?\$\s*-?[0-9.]"),
    **{name: re.compile(sign) for sign, name in UNITS.items() if re.fullmatch(MONEY, sign)},
}
"""Units that are no words."""


def units_differ(given: str, expected: str) -> bool:
    """Whether both have units, and different ones: cents and dollars, a length and an area, miles and miles per hour.

    ``units`` may stand for any unit, and degrees for any scale. An answer may leave out what an amount is for, as
    dollars do for dollars per day. A length is no speed.
    """
    one, other = measure(given), measure(expected)
    if one is None or other is None:
        return False
    names = {one.name, other.name}
    if "unit" in names:
        return one.power != other.power
    same = len(names) == 1 or ("degree" in names and names <= {"degree", "celsius", "fahrenheit"})
    rates = one.per == other.per or ("" in (one.per, other.per) and one.name not in _LENGTHS)
    return not same or one.power != other.power or not rates


def without_asked(answer: str, problem: str) -> str:
    """``5`` for ``5 figurines`` if the last question of the problem is how many figurines, or how many more.

    Without such a question the last ``number of`` counts. A word that scales or negates stays, as ``pairs`` of shoes
    do, unless the question begins with it: ``How many pairs of shoes?``
    """
    found = last_words(answer)
    if found is None or harmless(found[0]):
        return answer
    questions = list(_ASKED.finditer(problem))
    asked = next((one for one in reversed(questions) if not one[1]), questions[-1] if questions else None)
    if asked is None:
        return answer
    words = _plain(found[0]).lower().rstrip(". ").split()
    phrase = _PHRASE_END.split(problem[asked.end() :].lower(), maxsplit=1)[0].split()
    thing = " ".join(rf"{re.escape(word.removesuffix('s'))}s?" for word in words)
    same = re.match(rf"(?:more )?{thing}(?![A-Za-z])", " ".join(phrase))
    here = same and not any(map(_SCALING.fullmatch, words[1:]))
    return answer[: found.start()] + answer[found.end() :] if here else answer

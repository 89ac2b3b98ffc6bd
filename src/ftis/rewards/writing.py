"""Answers as people write them, brought to one way of writing before they are compared.

Nothing here evaluates anything. A unit that is taken off an answer is taken off the expected one as well.
"""

from __future__ import annotations

import re

from ftis.rewards.words import DEGREE, DEGREES, RATE, RELATION, TEXT, without_unit

MOST_WRITTEN = 30
"""Brackets inside brackets, those counted that change nothing, as in ``{{{5}}}``."""
MOST_NESTED = 8
"""Brackets inside brackets, without those. The grammar that reads LaTeX takes exponentially long for them: half a
second for eight at most, three and more for fifteen."""
MOST_POWERS = 3
"""Powers of powers; what they are worth cannot be computed."""

_WRAPPERS = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
    *((f"\\{command}{{", "}") for command in ("boxed", "boldsymbol", "bm", "mathbf")),
    ("{", "}"),
)
"""What people put around an answer without meaning another: bold type, a box, dollar signs."""
_SIGNS = {"∞": r"\infty ", "π": r"\pi ", "−": "-", "–": "-", "·": r"\cdot ", "×": r"\times ", "∅": r"\emptyset "}
_SIGNS |= {sign: rf"\frac{{{over}}}{{{under}}}" for sign, over, under in ("½12", "¼14", "¾34", "⅓13", "⅔23")}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_OF_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*(?:[0-9]|\{\s*[0-9]\s*\})\s*)?(?:\\left)?[({]?\s*)"
    rf"([0-9]+(?:\.[0-9]+)?){DEGREE}"
)
_SIZES = re.compile(r"\\[bB]igg?[lrm]?(?![A-Za-z])\s*")
_EMPTY = re.compile(r"\\varnothing(?![A-Za-z])")
_LINE_GAP = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_DIGIT_GAP = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|,\\!\s*|\{,\}|~)(?=[0-9]{3}(?![0-9]))")
_THOUSANDS = re.compile(r"^([+-]?[1-9][0-9]{0,2})((?: [0-9]{3})+)(?=$|\.[0-9]+$)")
_GROUPED = re.compile(r"(?<=[=≈])(\s*(?:\\?\$\s*)?(?:[+-]\s*)?[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?=(?:\.[0-9]+)?$)")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*(?:\{([0-9]+)\}|([0-9]))(?![0-9])")
_TIMES = re.compile(r"(^|[\s+\-*/=(,])([0-9]+)\s*((?:\\left\s*)?\((?:[0-9]|\\[dtc]?frac))")
_POWER = re.compile(r"(?<=[\w)}\]])\s*\*\*\s*(-?[0-9]+(?![0-9])|[A-Za-z]|\([^()]*\))(?!\s*\*\*)")
_EXPONENT = re.compile(r"(?<![\w.\\}])([0-9]+(?:\.[0-9]+)?)[eE]([0-9]{1,3})(?![\w.^]|\s*_)")
_ALL_EXPONENT = re.compile(r"^\s*([+-]?[0-9]*\.?[0-9]+)[eE](-[0-9]{1,3})\s*$")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_EDGE = re.compile(r"^(?:\\[,;:!]|\\\s|~|\s)+|(?:(?<!\\)\\[,;:!]|(?<!\\)\\(?:\s|$)|~|\s)+$")
_SIGNED_FRACTION = re.compile(r"\\[dtc]?frac[^=]*\\pm(?![A-Za-z])")
_IMAGINARY = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*i(?![A-Za-z])"
)
_POWER_IN_TEXT = re.compile(rf"({TEXT}[^{{}}^]*[a-z])\s*\^([23])\s*\}}")
_DOT_IN_TEXT = re.compile(rf"({TEXT}[^{{}}]*[a-z])\.(?=\s*\}})")
_MIXED = re.compile(r"^([+-]?)\s*([0-9]+)(?:\s|~|\\[,;:! ])+([0-9]+)\s*/\s*([0-9]+)$")
_UNION = re.compile(rf"([\])])\s*(?:U|∪|\\bigcup(?![A-Za-z])|{TEXT}\s*U\s*\}})\s*(?=(?:\\left\s*)?[\[(])")
_ORDER = re.compile(r"(<=|>=|[<>≤≥]|\\[lg](?:eq?(?:slant)?|t)(?![A-Za-z]))")
_STRICT = ("<", ">", r"\lt", r"\gt")
_MORE = (">", "≥", r"\g")
_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z](?!_)")
_INTERVAL = re.compile(r"[\[(][^,]*,[^,]*[\])]")
_AROUND_INTERVALS = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*|\\(?:left|right)(?![A-Za-z])\s*")
_AND = re.compile(rf"\s+and\s+|{TEXT}\s*and\s*\}}|\\(?:land|wedge)(?![A-Za-z])")
_OR = re.compile(rf"\s+or\s+|{TEXT}\s*or\s*\}}|\\(?:lor|vee)(?![A-Za-z])")
_IN_BASE = re.compile(
    r"(?<![\\A-Za-z0-9.])(?:[A-Za-z]*[0-9.][0-9A-Za-z.]*|[A-Za-z]{2,}|^[A-Za-z](?=\s*_[^_=]*$)|[)\]}])(?:\s|\\[,;:! ])*"
    r"_\s*(?:\{([^{}]+)\}|([0-9]+|[A-Za-z]))"
)
_BRACKETED = re.compile(r"\(([0-9][0-9A-Za-z]*)\)\s*(?=_)")
_WHOLE_IN_BASE = re.compile(r"[+-]?[0-9][0-9A-Za-z.]*\s*_[^_=]*")
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
_BASES += ["fourteen", "fifteen", "sixteen"]
_NAMED_BASE = re.compile(rf"_((?:\s|\{{|\\(?:text|mathrm|mbox)\s*\{{)+)({'|'.join(_BASES)})((?:\s*\}})+)")
_BASE_IN_TEXT = re.compile(rf"_\s*\{{\s*{TEXT}\s*([0-9]+)\s*\}}\s*\}}")
_BRACKET = re.compile(
    r"(?P<power>\^\s*)?(?:\\left\s*)?(?P<opening>\\l(?:floor|ceil|angle|vert)(?![A-Za-z])|\\?[(\[{])"
    r"|\\r(?:floor|ceil|angle|vert)(?![A-Za-z])|[)\]}]"
)
_CHAIN = re.compile(
    rf"(?:[\^_]\s*(?:\{{[^{{}}]*\}}|\\[A-Za-z]+|[^\s{{}}])\s*){{{MOST_POWERS + 1},}}|(?:![\s)\]}}]*){{{MOST_POWERS},}}"
)


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


def bare(text: str) -> str:
    """A text without final period and without the delimiters around all of it."""
    text = _EDGE.sub("", _EDGE.sub("", text.strip()).removesuffix("."))
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and not inner.endswith("\\") and balanced(inner) and not (opening[0] in "*_`" and opening in inner):
            return bare(inner)
    return text


def balanced(text: str) -> bool:
    """Whether each brace has its own."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


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


def in_latex(text: str) -> str:
    """A text with commands for the signs of Unicode and for a spelled ``pi``: ``\\sqrt{2}`` for ``√2``."""
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda found: _after("_", found[0].translate(_LOWERED)), raised(text))
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3] or ''}}}", text)
    text = _POWER_IN_TEXT.sub(r"\1}^\2", _DOT_IN_TEXT.sub(r"\1", text))  # 12\text{ in.}, 5\text{ cm^2}
    return _PI.sub(r"\\pi ", text).strip()


def raised(text: str) -> str:
    """A text whose powers stand behind ``^``: ``x^4`` for ``x⁴``."""
    return re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: _after("^", found[0].translate(_RAISED)), text)


def _after(mark: str, digits: str) -> str:
    """A power or an index; braces only around several characters."""
    return f"{mark}{digits}" if len(digits) == 1 else f"{mark}{{{digits}}}"


def tidied(formula: str) -> str:
    """A formula with one way to write what people write in several: degrees, spaces in numbers, brackets, units."""
    formula = without_doubles(formula)
    formula = _EMPTY.sub(r"\\emptyset ", _LINE_GAP.sub(r"\\\\", formula))
    formula = _SIZES.sub("", formula)
    formula = _DIGIT_GAP.sub("", formula).replace("~", " ")
    formula = _IMAGINARY.sub(_with_i_above, formula)
    formula = _UNION.sub(r"\1 \\cup ", formula)
    formula = _BASE_IN_TEXT.sub(r"_{\1}", _BRACKETED.sub(r"\1", _NAMED_BASE.sub(_with_digits, formula)))
    formula = _REPEATING.sub(_as_fraction, formula)
    formula = _OF_DEGREES.sub(r"\1\\frac{\2\\pi}{180}", formula)
    if formula.lstrip("+-").startswith(("$", r"\$")):
        formula = RATE.sub("", formula)
    formula = DEGREES.sub("", without_unit(formula)).strip()
    formula = _THOUSANDS.sub(lambda found: found[1] + found[2].replace(" ", ""), formula)
    formula = _GROUPED.sub(lambda found: found[1].replace(",", "").replace("$", "").replace("\\", ""), formula)
    formula = _EXPONENT.sub(r"\1\\cdot 10^{\2}", _POWER.sub(r"^{\1}", formula))
    formula = _TIMES.sub(r"\1\2\\cdot \3", formula)
    return _MIXED.sub(r"\1\2\\frac{\3}{\4}", formula)


def in_powers_of_ten(given: str, expected: str) -> str:
    """``6.72e-5`` as a decimal times a power of ten, where the e cannot be Euler's, as the expected answer has none."""
    return given if "e" in _COMMAND.sub("", expected) else _ALL_EXPONENT.sub(r"\1\\cdot 10^{\2}", given)


def _with_i_above(found: re.Match[str]) -> str:
    """``\\frac{4i}{5}`` for ``\\frac{4}{5}i``, which math-verify reads as a fraction and a variable."""
    return rf"\frac{{{found[1] or found[2]}i}}{{{found[3] or found[4]}}}"


def _as_fraction(found: re.Match[str]) -> str:
    """A decimal that repeats digits for ever: ``\\frac{1}{3}`` in lowest terms or not, for ``0.\\overline{3}``."""
    whole, fixed, again = found[1], found[2], found[3] or found[4]
    over = int(whole + fixed + again) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"


def _with_digits(found: re.Match[str]) -> str:
    """``_{\\text{eight}}`` as ``_{8}``."""
    opened, name, closed = found.groups()
    left = closed.count("}") - opened.count("{")
    return found[0] if left < 0 else f"_{{{_BASES.index(name) + 2}}}{'}' * left}"


def with_cases_apart(given: str, expected: str) -> tuple[str, str]:
    """Both with the capitals marked of letters that ``expected`` has in both cases: R_{c} - r for R - r.

    To math-verify a letter and its capital are one symbol, by which R - r is 0.
    """
    names = set(_LETTER.findall(expected))
    capitals = {name for name in names if _small(name) in names - {name}}
    if not capitals or "\\text" in expected:
        return given, expected

    def marked(found: re.Match[str]) -> str:
        return f"{_small(found[0])}_{{c}}" if found[0] in capitals else found[0]

    return _LETTER.sub(marked, given), _LETTER.sub(marked, expected)


def _small(name: str) -> str:
    """A letter in lower case: ``\\theta`` for ``\\Theta``."""
    return name.lower() if len(name) == 1 or name[1:].istitle() else name


def with_both_signs(given: str, expected: str) -> tuple[str, str]:
    """Both as lists of two values where one has ``\\pm`` inside a fraction, which math-verify compares by letters."""
    if not any(_SIGNED_FRACTION.search(text) for text in (given, expected)):
        return given, expected
    return _both_signs(given), _both_signs(expected)


def _both_signs(text: str) -> str:
    value = RELATION.split(text)[-1]
    if value.count(r"\pm") != 1 or "," in value:
        return text
    return ", ".join(value.replace(r"\pm", sign) for sign in "+-")


def as_intervals(given: str, expected: str) -> tuple[str, str]:
    """Both as intervals where one is an interval or a union of some and the other has inequalities: ``3 < x \\le 4``,
    ``x < 1 or x > 2``.

    ``(1,2)`` may be a point, so an interval alone has a square bracket or an infinite end.
    """
    one, other = _AROUND_INTERVALS.sub("", given), _AROUND_INTERVALS.sub("", expected)
    if _is_interval(one):
        return one, _intervals(other)
    return (_intervals(one), other) if _is_interval(other) else (given, expected)


def _is_interval(text: str) -> bool:
    parts = [part.strip() for part in text.split(r"\cup")]
    certain = len(parts) > 1 or "[" in text or "]" in text or "\\infty" in text
    return certain and all(map(_INTERVAL.fullmatch, parts))


def _intervals(text: str) -> str:
    """The intervals of inequalities that ``or`` and ``and`` join, in one variable, else the text."""
    parts = _OR.split(text)
    joined = r" \cup ".join(map(_interval, parts))
    variables = {name for part in parts for name in re.findall(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", part)}
    alone = len(parts) == 1 and not _AND.search(text)
    return joined if alone or (len(variables) == 1 and _is_interval(joined)) else text


def _interval(text: str) -> str:
    """The interval of an inequality with one variable between or beside its bounds, or of two, as in ``x > 3 and
    x \\le 4``; else the text."""
    both = _AND.split(text)
    if len(both) == 2:
        low, high = sorted(map(_interval, both), key=lambda one: one.startswith(r"(-\infty,"))
        bounded = low.endswith(r",\infty)") and high.startswith(r"(-\infty,")
        return low.removesuffix(r"\infty)") + high.removeprefix(r"(-\infty,") if bounded else text
    parts = [part.strip() for part in _ORDER.split(text)]
    if len({part.startswith(_MORE) for part in parts[1::2]}) != 1 or any("=" in part for part in parts[::2]):
        return text
    if parts[1].startswith(_MORE):
        parts.reverse()
    variables = [place for place in range(0, len(parts), 2) if re.fullmatch("[A-Za-z]", parts[place])]
    if len(parts) == 3 and variables == [0]:
        parts = [r"-\infty", "<", *parts]
    elif len(parts) == 3 and variables == [2]:
        parts = [*parts, "<", r"\infty"]
    elif len(parts) != 5 or variables != [2]:
        return text
    low, left, _, right, high = parts
    return f"{'(' if left in _STRICT else '['}{low},{high}{')' if right in _STRICT else ']'}"


def bases_differ(given: str, expected: str) -> bool:
    """Whether both have numbers in a base, as ``52_8``, and not the same bases, or ``expected`` is a number in none.

    A number in none is one in base ten, and may leave out a base that the problem names only where it is ``given``.
    """
    one, other = _bases(given), _bases(expected)
    if not other:
        plain = _WHOLE_IN_BASE.fullmatch(RELATION.split(given)[-1].strip()) and re.fullmatch(r"[+-]?[0-9.]+", expected)
        return plain is not None and one not in (set(), {"10"})
    return bool(one) and one != other


def _bases(text: str) -> set[str]:
    return {(found[1] or found[2]).strip("() ") for found in _IN_BASE.finditer(text)}

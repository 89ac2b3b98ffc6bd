"""The grammar of answers: each way that people write one, and the one way in which it is compared.

Each rule has an example beside it, the text before and after; a test runs them all. Rules apply in the order of their
table, to the given and to the expected answer alike. No rule evaluates anything.

===============  =======================================================================================
:data:`SIGNS`    formulas: signs of Unicode as LaTeX
:data:`FORMULA`  formulas: dollar signs, units, spaces in numbers, degrees, bases, powers and the like
:data:`NUMBER`   numbers: signs and gaps of a whole answer, which may be an equation
:data:`AMOUNT`   numbers: units, words and brackets around the number on one side of it
:data:`PROSE`    running text: gaps inside numbers, and currencies before them
===============  =======================================================================================

:mod:`ftis.rewards.formulas` has the rules that take both answers, :mod:`ftis.rewards.units` the units and words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unicodedata import normalize

from ftis.rewards.units import DEGREE, DEGREES, RATE, SYMBOLS, TEXT, as_text, without_nouns, without_unit

MOST_WRITTEN = 30
"""Brackets inside brackets, with those that change nothing, as in ``{{{5}}}``."""
MOST_NESTED = 8
"""Brackets inside brackets, without those. The grammar that reads LaTeX takes exponentially long for them: half a
second for eight at most, three and more for fifteen."""
MOST_POWERS = 3
"""Powers of powers. Nobody can compute their value."""


class Rule(NamedTuple):
    """One way of writing, with an example: ``change(before) == after``."""

    before: str
    after: str
    change: Callable[[str], str]


def _sub(before: str, after: str, pattern: str, by: str | Callable[[re.Match[str]], str] = "") -> Rule:
    return Rule(before, after, partial(re.compile(pattern).sub, by))


def rewrite(rules: tuple[Rule, ...], text: str) -> str:
    for rule in rules:
        text = rule.change(text)
    return text


# --- functions of rules -----------------------------------------------------------------------------------------------

_WRAPPERS = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")),
    *((f"\\{command}{{", "}") for command in ("boxed", "boldsymbol", "bm", "mathbf")),
    ("{", "}"),
)
_EDGE = re.compile(r"^(?:\\[,;:!]|\\\s|~|\s)+|(?:(?<!\\)\\[,;:!]|(?<!\\)\\(?:\s|$)|~|\s)+$")


def bare(text: str) -> str:
    """A text without final period and without the bold type, box or dollar signs around all of it."""
    text = _EDGE.sub("", _EDGE.sub("", text.strip()).removesuffix("."))
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and not inner.endswith("\\") and balanced(inner) and not (opening[0] in "*_`" and opening in inner):
            return bare(inner)
    return text


def balanced(text: str) -> bool:
    """Whether each brace has its partner."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def without_doubles(text: str) -> str:
    """A text without brackets around nothing but brackets of their kind."""
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


def _script(mark: str, small: str) -> Callable[[re.Match[str]], str]:
    """Raised or lowered digits as plain ones behind ``mark``; braces only around several."""
    plain = str.maketrans(small, "0123456789-"[: len(small)])

    def behind_mark(found: re.Match[str]) -> str:
        digits = found[0].translate(plain)
        return f"{mark}{digits}" if len(digits) == 1 else f"{mark}{{{digits}}}"

    return behind_mark


def _as_fraction(found: re.Match[str]) -> str:
    """A decimal that repeats digits for ever, in lowest terms or not."""
    whole, fixed, again = found[1], found[2], found[3] or found[4]
    over = int(whole + fixed + again) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"


_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
_BASES += ["fourteen", "fifteen", "sixteen"]


def _base_in_digits(found: re.Match[str]) -> str:
    opened, name, closed = found.groups()
    left = closed.count("}") - opened.count("{")
    return found[0] if left < 0 else f"_{{{_BASES.index(name) + 2}}}{'}' * left}"


def _without_rate(text: str) -> str:
    return re.sub(RATE, "", text) if text.lstrip("+-").startswith(("$", r"\$")) else text


def _joined_lines(text: str) -> str:
    return re.sub(r"\s*[\r\n]\s*", " ", text) if "\\begin{" in text else text


# --- patterns that several rules share --------------------------------------------------------------------------------

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_SPACES = " \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}"
_POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_INDICES = "₀₁₂₃₄₅₆₇₈₉"
FRACTION = r"\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))(?![.,]?[0-9])"
CURRENCIES = "USD|EUR|GBP"

_RAISED = _sub("x¹²", "x^{12}", f"[{_POWERS}]+", _script("^", _POWERS))

# --- formulas ---------------------------------------------------------------------------------------------------------

_LATEX = {"∞": r"\infty ", "π": r"\pi ", "−": "-", "–": "-", "·": r"\cdot ", "×": r"\times ", "∅": r"\emptyset "}
_LATEX |= {"⁄": "/", "\u200b": ""}
_LATEX |= {sign: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("⁄")) for sign in "½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}

SIGNS = (
    _sub("−½π⁄2", r"-\frac{1}{2}\pi /2", f"[{''.join(_LATEX)}]", lambda found: _LATEX[found[0]]),
    _RAISED,
    _sub("52₈", "52_8", f"[{_INDICES}]+", _script("_", _INDICES)),
    _sub(
        "3√2+√(x)",
        r"3\sqrt{2}+\sqrt{x}",
        r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))",
        lambda found: rf"\sqrt{{{found[1] or found[2] or found[3] or ''}}}",
    ),
    _sub(r"12\text{ in.}", r"12\text{ in}", rf"({TEXT}[^{{}}]*[a-z])\.(?=\s*\}})", r"\1"),
    _sub(r"5\text{ cm^2}", r"5\text{ cm}^2", rf"({TEXT}[^{{}}^]*[a-z])\s*\^([23])\s*\}}", r"\1}^\2"),
    _sub("2pi", r"2\pi ", r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
)

_TIDY = (
    Rule("**$5$.**", "5", bare),
    Rule("{{5}}+((1))", "{5}+(1)", without_doubles),
    _sub(r"1\\[4pt]2", r"1\\2", r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
    _sub(r"\varnothing", r"\emptyset ", r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
    _sub(r"\bigl(1,2\bigr)", "(1,2)", r"\\[bB]igg?[lrm]?(?![A-Za-z])\s*"),
    _sub(r"10,\!080", "10080", r"(?<=[0-9])(?:\\[,;:! ]|,\\!\s*|\{,\}|~)(?=[0-9]{3}(?![0-9]))"),
    _sub("9~kg", "9 kg", "~", " "),
    # math-verify reads 3/5 i as a fraction and a variable
    _sub(
        r"\frac{3}{5}i",
        r"\frac{3i}{5}",
        r"\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*i(?![A-Za-z])",
        lambda found: rf"\frac{{{found[1] or found[2]}i}}{{{found[3] or found[4]}}}",
    ),
    _sub(
        "(1,2)U(3,4)",
        r"(1,2) \cup (3,4)",
        rf"([\])])\s*(?:U|∪|\\bigcup(?![A-Za-z])|{TEXT}\s*U\s*\}})\s*(?=(?:\\left\s*)?[\[(])",
        r"\1 \\cup ",
    ),
    _sub(
        r"52_{\text{eight}}",
        "52_{8}",
        rf"_((?:\s|\{{|\\(?:text|mathrm|mbox)\s*\{{)+)({'|'.join(_BASES)})((?:\s*\}})+)",
        _base_in_digits,
    ),
    _sub("(52)_8", "52_8", r"\(([0-9][0-9A-Za-z]*)\)\s*(?=_)", r"\1"),
    _sub(r"52_{\text{8}}", "52_{8}", rf"_\s*\{{\s*{TEXT}\s*([0-9]+)\s*\}}\s*\}}", r"_{\1}"),
    _sub(
        r"0.\overline{3}",
        r"\frac{3}{9}",
        r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*(?:\{([0-9]+)\}|([0-9]))(?![0-9])",
        _as_fraction,
    ),
    _sub(
        r"\sin 30°",
        r"\sin \frac{30\pi}{180}",
        r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*(?:[0-9]|\{\s*[0-9]\s*\})\s*)?(?:\\left)?[({]?\s*)"
        rf"([0-9]+(?:\.[0-9]+)?){DEGREE}",
        r"\1\\frac{\2\\pi}{180}",
    ),
    Rule(r"\$5 per hour", r"\$5", _without_rate),
    Rule(r"15\text{ cm}^2", "15", without_unit),  # both answers' units are compared before
    _sub("90°", "90", DEGREES),
    _sub(
        "2 220", "2220", r"^[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?=$|\.[0-9]+$)", lambda found: found[0].replace(" ", "")
    ),
    _sub(
        r"x = \$58,500",
        "x = 58500",
        r"(?<=[=≈])\s*(?:\\?\$\s*)?(?:[+-]\s*)?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?=(?:\.[0-9]+)?$)",
        lambda found: re.sub(r"[,$\\]", "", found[0]),
    ),
    _sub("x**2", "x^{2}", r"(?<=[\w)}\]])\s*\*\*\s*(-?[0-9]+(?![0-9])|[A-Za-z]|\([^()]*\))(?!\s*\*\*)", r"^{\1}"),
    _sub(
        "2.5e3",
        r"2.5\cdot 10^{3}",
        r"(?<![\w.\\}])([0-9]+(?:\.[0-9]+)?)[eE]([0-9]{1,3})(?![\w.^]|\s*_)",
        r"\1\\cdot 10^{\2}",
    ),
    # math-verify reads 4(2/3) as a mixed number
    _sub(
        "4(2/3)",
        r"4\cdot (2/3)",
        r"(^|[\s+\-*/=(,])([0-9]+)\s*((?:\\left\s*)?\((?:[0-9]|\\[dtc]?frac))",
        r"\1\2\\cdot \3",
    ),
    _sub(
        "4 2/3",
        r"4\frac{2}{3}",
        r"^([+-]?)\s*([0-9]+)(?:\s|~|\\[,;:! ])+([0-9]+)\s*/\s*([0-9]+)$",
        r"\1\2\\frac{\3}{\4}",
    ),
)
FORMULA = (
    *_TIDY,
    *_TIDY,  # behind a unit a dollar sign may close: $5$ cm
    _sub("= 5", " 5", r"^\s*=(?!=)"),
    _sub("-$36", "-36", r"^([+-]?)\$(?=[0-9.][^$]*\Z)", r"\1"),
    Rule("\\begin{pmatrix}1\n\\end{pmatrix}", r"\begin{pmatrix}1 \end{pmatrix}", _joined_lines),
)

# --- numbers ----------------------------------------------------------------------------------------------------------

_HALVES = _sub("3½", "3 1/2", "[½¼¾]", lambda found: {"½": " 1/2", "¼": " 1/4", "¾": " 3/4"}[found[0]])
_JOINED = (
    _sub("12'000 or 12{,}000", "12000 or 12000", r"(?<=[0-9])(?:\{,\}|\\[,;!]|['’])(?=[0-9]{3}(?![0-9]))"),
    _sub(
        "70 000",
        "70000",
        rf"(?<![\w.,^])[1-9][0-9]{{0,2}}(?:[{_SPACES}][0-9]{{3}})+(?![\w/]|,[0-9])",
        lambda found: re.sub(f"[{_SPACES}]", "", found[0]),
    ),
    _sub(
        "1.5 × 10^3",
        "1.5e3",
        rf"(?<![\w.,^])({INTEGER}(?:\.[0-9]+)?)\s*(?:[×·*xX]|\\times(?![A-Za-z])|\\cdot(?![A-Za-z]))\s*10\s*\^\s*"
        r"(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([+-]?[0-9]{1,3}))(?![0-9]|\.[0-9])",
        lambda found: f"{found[1]}e{found[2] or found[3]}",
    ),
)

NUMBER = (
    _RAISED,
    _sub("−5", "-5", "[\N{MINUS SIGN}\N{EN DASH}]", "-"),
    _HALVES,
    *_JOINED,
    _sub(r"\text{18}", "18", rf"{TEXT}([^{{}}A-Za-z]*)\}}", r"\1"),
    _sub("#### 18", " 18", "^#+"),
    Rule(r"\boxed{**18**}.", "18", bare),
    _sub(r"3\frac{1}{2}", "3 1/2", FRACTION, lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}"),
    _sub("Total: 18", "Total= 18", r"^([A-Za-z][A-Za-z' ]*):(?=\s)", r"\1="),
)

AMOUNT = (
    Rule("**18**", "18", bare),
    _sub("18kg", "18 kg", r"(?<=[0-9])(?=[A-Za-z]{2})", " "),
    # A variable in a formula; a number has none.
    _sub("18 s", "18", rf"(?<=[0-9])\s+(?:[shlL]|{SYMBOLS})$"),
    Rule("18 cm^2", "18", without_unit),
    _sub("18 per day", "18", RATE),
    _sub("18°C", "18", DEGREES),
    Rule("18 apples", r"18\text{ apples}", as_text),
    Rule(r"18\text{ apples}", "18 ", without_nouns),
    _sub("18 €", "18", r"(?<=[0-9.])\s*[€£¥₹¢]$"),
    _sub(r"50\%", "50", r"\s*\\?%?$"),
    _sub("(18)", "18", r"^\(\s*([0-9.,]+)\s*\)\s*\Z", r"\1"),
)

PROSE = (
    _RAISED,
    _sub("USD20", " 20", rf"\b(?:{CURRENCIES})(?=[0-9])", " "),
    _HALVES,
    *_JOINED,
)

# --- brackets ---------------------------------------------------------------------------------------------------------

_BRACKET = re.compile(
    r"(?P<power>\^\s*)?(?:\\left\s*)?(?P<opening>\\l(?:floor|ceil|angle|vert)(?![A-Za-z])|\\?[(\[{])"
    r"|\\r(?:floor|ceil|angle|vert)(?![A-Za-z])|[)\]}]"
)
_CHAIN = re.compile(
    rf"(?:[\^_]\s*(?:\{{[^{{}}]*\}}|\\[A-Za-z]+|[^\s{{}}])\s*){{{MOST_POWERS + 1},}}|(?:![\s)\]}}]*){{{MOST_POWERS},}}"
)


def too_nested(text: str, most: int = MOST_NESTED) -> bool:
    """Whether brackets of any kind stand more than ``most`` deep, or powers more than :data:`MOST_POWERS`."""
    powers: list[bool] = []  # of the open brackets
    for found in _BRACKET.finditer(text):
        if found["opening"]:
            powers.append(found["power"] is not None)
        elif powers:
            powers.pop()
        if len(powers) > most or sum(powers) > MOST_POWERS:
            return True
    return _CHAIN.search(text) is not None

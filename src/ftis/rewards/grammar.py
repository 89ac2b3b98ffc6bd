"""The grammar of answers: each way that people write one, and the one way in which it is compared.

Each rule has an example beside it, the text before and after; a test runs them all. Rules apply in the order of their
table, to the given and to the expected answer alike. No rule evaluates anything.

===============  =======================================================================================
:data:`SIGNS`    all: signs of Unicode as LaTeX, digits of any script, powers of ten in words
:data:`FORMULA`  formulas: dollar signs, units, spaces in numbers, degrees, bases, powers and the like
:data:`NUMBER`   numbers: signs and gaps of a whole answer, which may be an equation
:data:`AMOUNT`   numbers: units, words and brackets around the number on one side of it
:data:`PROSE`    running text: gaps inside numbers, and currencies before them
===============  =======================================================================================

:mod:`ftis.rewards.formulas` has the rules that take both answers, :mod:`ftis.rewards.units` the units and words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from unicodedata import decimal, normalize

from ftis.rewards.units import (
    ABROAD,
    DEGREE,
    DEGREES,
    MONEY,
    RATE,
    SCALE,
    SCALES,
    SYMBOLS,
    TEXT,
    as_text,
    without_nouns,
    without_unit,
)

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
    text = _EDGE.sub("", text.strip())
    text = text if text.endswith("..") else _EDGE.sub("", text.removesuffix("."))
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and not inner.endswith("\\") and balanced(inner) and not (opening[0] in "*_`" and opening in inner):
            return bare(inner)
    return text


def without_doubles(text: str) -> str:
    """A text without brackets around nothing but brackets of their kind."""
    ends = partners(text) | partners(text, "(", ")")
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


def _plain(found: re.Match[str]) -> str:
    """A sign in the letters that it stands for: those of a unit are words, as in ``㎡``."""
    plain = str(decimal(found[0], "")) or normalize("NFKC", found[0])
    return re.sub("^([^23]+)([23]?)$", _unit, plain) if "\u3380" <= found[0] <= "\u33df" else plain


def _unit(found: re.Match[str]) -> str:
    return rf"\text{{ {found[1]}}}" + (f"^{found[2]}" if found[2] else "")


def _root(found: re.Match[str]) -> str:
    index = f"[{normalize('NFKC', found[1])}]" if found[1] else found[2]
    return rf"\sqrt{index}{{{found[3] or found[4] or found[5] or ''}}}"


def _scaled(found: re.Match[str]) -> str:
    """The power of ten that a word stands for; more words of the same ``\\text`` stay in it."""
    word = (found[2] or found[4]).lower()
    power = next(power for power, words in SCALES.items() if re.fullmatch(words, word))
    return rf"\cdot 10^{{{power}}}{found[1] if found[1] and not found[3] else ''}"


def _statements(found: re.Match[str]) -> str:
    return ", ".join(" ".join(line.replace("&", "").split()) for line in found[1].split(r"\\") if line.strip())


def _turned(found: re.Match[str]) -> str:
    return f"{found[1]}{'[' if found[2] == '[' else '('}{found[3]}{']' if found[4] == ']' else ')'}"


def _as_fraction(found: re.Match[str]) -> str:
    """A decimal that repeats digits for ever, in lowest terms or not."""
    whole, fixed, again = found[1], found[2], found[3] or found[4] or found[5] or found[6]
    over = int(whole + fixed + again) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"


_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
_BASES += ["fourteen", "fifteen", "sixteen"]


def _base_in_digits(found: re.Match[str]) -> str:
    base = found[1] or found[2] or found[3]
    return f"_{{{_BASES.index(base) + 2 if base in _BASES else base}}}"


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
_BASE = "|".join(_BASES)

_GROUPED = (
    _sub(r"12'000 or 12,\!000", "12000 or 12000", r"(?<=[0-9])(?:\{,\}|\\[,;:! ]|,\\!\s*|~|['’])(?=[0-9]{3}(?![0-9]))"),
    _sub(
        "70 000",
        "70000",
        rf"(?<![0-9A-Za-z.,^])[1-9][0-9]{{0,2}}(?:[{_SPACES}][0-9]{{3}})+(?![0-9A-Za-z/]|,[0-9])",
        lambda found: re.sub(f"[{_SPACES}]", "", found[0]),
    ),
)
_ANSWER = _sub(
    "The answer is: 5",
    "5",
    rf"^(?:{TEXT}\s*)?(?i:(?:the )?(?:final )?answer(?: is)?|答案是?|答えは?)(?![a-z])\s*[:=]?\s*\}}?\s*",
)

# --- formulas ---------------------------------------------------------------------------------------------------------

_COMMANDS = (
    "∞infty πpi ·cdot ×times ÷div ∅emptyset ±pm ∓mp ≤le ≥ge ≠neq ∪cup ∩cap ∈in ⌊lfloor ⌋rfloor ⌈lceil ⌉rceil ⟨langle "
    "⟩rangle ℓell ⩽le ⩾ge •cdot →to ⊂subset ∠angle △triangle ≈approx ≡equiv ⇒Rightarrow ∴therefore …ldots"
)
_LATEX = {sign[0]: f"\\{sign[1:]} " for sign in _COMMANDS.split()}
_LATEX |= {sign: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("⁄")) for sign in "½¼¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_LATEX |= {"ℝ": r"\mathbb{R}", "、": ", ", "∛": "√[3]", "∜": "√[4]"} | dict(zip("−–⁄。٫٬٪∶′", "--/..,%:'", strict=True))

SIGNS = (
    _sub("2，5", "2, 5", "(?<![０-９])，|，(?![０-９]{3})", ", "),
    _sub(
        "１８.５％٣ ㎡",
        r"18.5%3 \text{ m}^2",
        r"\d|[\u3000\u2103\u2109\u3380-\u33df\uff01-\uff5e\uffe0-\uffe6\ufe50-\ufe6b\U0001d400-\U0001d7ff]",
        _plain,
    ),
    _sub("−½π⁄2", r"-\frac{1}{2}\pi /2", f"[{''.join(_LATEX)}]", lambda found: _LATEX[found[0]]),
    _sub("5\N{ZERO WIDTH SPACE}", "5", r"[\u200b-\u200f\u2060\ufeff]"),
    _sub(
        "³√2+2√[3](x)",
        r"\sqrt[3]{2}+2\sqrt[3]{x}",
        r"(?:(?<![\w)}\]])([³-⁹]))?√((?:\[[34]\])?)(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))",
        _root,
    ),
    _sub("x¹²", "x^{12}", f"[{_POWERS}]+", _script("^", _POWERS)),
    _sub("52₈", "52_8", f"[{_INDICES}]+", _script("_", _INDICES)),
    _sub(r"\bigl(1\bigr)", "(1)", r"\\[bB]igg?[lrm]?(?![A-Za-z])\s*|\\(?:left|right)\s*(?:\.|(?=\\?[()[\]{}]))"),
    _sub("x!=3", r"x\neq 3", r"(?:!|\\not\s*)=", r"\\neq "),
    _sub(r"12\text{ in.}", r"12\text{ in}", rf"({TEXT}[^{{}}]*[a-z])\.(?=\s*\}})", r"\1"),
    _sub(r"5\text{ cm^2}", r"5\text{ cm}^2", rf"({TEXT}[^{{}}^]*[a-z])\s*\^([23])\s*\}}", r"\1}^\2"),
    _sub(r"7\mathrm{~km}", r"7\mathrm{ km}", rf"({TEXT}[^{{}}~]*)~", r"\1 "),
    _sub(r"7\mathrm{ km} / \mathrm{h}", r"7\mathrm{ km/h}", rf"({TEXT}[^{{}}]*)\}}\s*/\s*{TEXT}\s*", r"\1/"),
    _sub(r"\pounds 5", "£5", r"\\pounds(?![A-Za-z])\s*", "£"),
    _sub(r"5\text{€}", "5€", rf"{TEXT}\s*({MONEY})\s*\}}", r"\1"),
    _sub(
        r"3\text{ million eggs}",
        r"3\cdot 10^{6}\text{ eggs}",
        rf"(?<=[0-9])(?:\s|\\[,;: ])*(?i:({TEXT})\s*({SCALE})(?![A-Za-z])(\s*\}})?|({SCALE})(?![A-Za-z]))",
        _scaled,
    ),
    _sub("2pi", r"2\pi ", r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
)

_TIDY = (
    _ANSWER,
    Rule("**$5$.**", "5", bare),
    Rule("{{5}}+((1))", "{5}+(1)", without_doubles),
    _sub(r"1\\[4pt]2", r"1\\2", r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
    _sub(
        r"\{\begin{array}{l}x=1\\y=2\end{array}",
        "x=1, y=2",
        r"(?:\\\{\s*\\begin\{array\}\s*\{[lcr]*\}|\\begin\{(?:cases|aligned|gathered)\})((?:[^&\\]|&\s*=|\\(?!end))*)"
        r"\\end\{[a-z]+\}",
        _statements,
    ),
    _sub("]0,1[", "(0,1)", r"(^|\\cup|\\in|[=\s])([\[\]])([^\[\],]+,[^\[\],]+)([\[\]])", _turned),
    _sub("all real numbers", r"\mathbb{R}", rf"^(?:{TEXT})?\s*all real(?:s| numbers)\s*\}}?$", r"\\mathbb{R}"),
    _sub(r"\varnothing", r"\emptyset ", r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    *_GROUPED,
    _sub("9~kg", "9 kg", "~", " "),
    _sub(r"\sqrt[3]2", r"\sqrt[3]{2}", r"\\sqrt\s*(\[[^\[\]]*\])\s*([0-9A-Za-z])", r"\\sqrt\1{\2}"),
    _sub(r"\mathrm{i}", "i", r"\\math(?:rm|bf|it)\s*\{([ei])\}", r"\1"),
    _sub(r"\binom52", r"\binom{5}{2}", r"\\([dt]?binom)\s*([0-9])\s*([0-9])", r"\\\1{\2}{\3}"),
    _sub(
        "(1,2)U(3,4)",
        r"(1,2) \cup (3,4)",
        rf"([\])])\s*(?:U|\\bigcup(?![A-Za-z])|{TEXT}\s*U\s*\}})\s*(?=[\[(])",
        r"\1 \\cup ",
    ),
    _sub(
        r"52_{\text{eight}}",
        "52_{8}",
        rf"_\s*(?:\{{\s*{TEXT}\s*([0-9]+|{_BASE})\s*\}}\s*\}}|{TEXT}\s*([0-9]+|{_BASE})\s*\}}|\{{\s*({_BASE})\s*\}})",
        _base_in_digits,
    ),
    _sub("(52)_8", "52_8", r"\(([0-9][0-9A-Za-z]*)\)\s*(?=_)", r"\1"),
    _sub(
        r"0.\overline{3}+0.1\dot{6}+0.1666\ldots",
        r"\frac{3}{9}+\frac{15}{90}+\frac{15}{90}",
        r"([0-9]*)\.([0-9]*?)(?:\\(?:overline|bar|dot)\s*(?:\{([0-9]+)\}|([0-9]))(?![0-9])|\(([0-9]+)\)$|"
        r"([0-9]{1,9}?)\6+\s*(?:\.\.\.|\\[lc]?dots(?![A-Za-z])))",
        _as_fraction,
    ),
    _sub(
        r"\sin 30°",
        r"\sin \frac{30\pi}{180}",
        r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*(?:[0-9]|\{\s*[0-9]\s*\})\s*)?[({]?\s*)"
        rf"([0-9]+(?:\.[0-9]+)?){DEGREE}",
        r"\1\\frac{\2\\pi}{180}",
    ),
    Rule(r"\$5 per hour", r"\$5", _without_rate),
    Rule(r"15\text{ cm}^2", "15", without_unit),  # both answers' units are compared before
    _sub("90°", "90", DEGREES),
    _sub("£5", "5", rf"\s*{MONEY}\s*"),
    _sub(r"50\%", "50", r"(?<=[0-9)}])(?:\s|\\[,;: ])*\\?%"),
    _sub(
        r"x = \$58,500",
        "x = 58500",
        r"(?:(?<==)|(?<=\\approx)|^)\s*(?:\\?\$\s*)?(?:[+-]\s*)?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?=(?:\.[0-9]+)?$)",
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
    _sub("4(2/3)", r"4\cdot (2/3)", r"(^|[\s+\-*/=(,])([0-9]+)\s*(\((?:[0-9]|\\[dtc]?frac))", r"\1\2\\cdot \3"),
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

_JOINED = (
    *_GROUPED,
    _sub(
        r"1.5 \times 10^3",
        "1.5e3",
        rf"(?<![0-9A-Za-z.,^])({INTEGER}(?:\.[0-9]+)?)\s*(?:[*xX]|\\times(?![A-Za-z])|\\cdot(?![A-Za-z]))\s*10\s*\^\s*"
        r"(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([+-]?[0-9]{1,3}))(?![0-9]|\.[0-9])",
        lambda found: f"{found[1]}e{found[2] or found[3]}",
    ),
)

NUMBER = (
    *SIGNS,
    *_JOINED,
    _ANSWER,
    _sub(r"\text{18}", "18", rf"{TEXT}([^{{}}A-Za-z]*)\}}", r"\1"),
    _sub("#### 18", " 18", "^#+"),
    Rule(r"\boxed{**18**}.", "18", bare),
    _sub(r"3\frac{1}{2}", "3 1/2", FRACTION, lambda found: f" {found[1] or found[3]}/{found[2] or found[4]}"),
    _sub("Total: 18", "Total= 18", rf"^([A-Za-z{ABROAD}][A-Za-z{ABROAD}' ]*)(?:(?<=[{ABROAD}]):|:(?=\s))", r"\1="),
)

AMOUNT = (
    Rule("**18**", "18", bare),
    _sub("2,5", "2.5", r"^(-?[0-9]+),([0-9]{1,2})(?![0-9,.])", r"\1.\2"),
    _sub("18kg", "18 kg", r"(?<=[0-9])(?=[A-Za-z]{2})", " "),
    # A variable in a formula; a number has none.
    _sub("18 s", "18", rf"(?<=[0-9])\s+(?:[shlL]|{SYMBOLS})$"),
    Rule("18 cm^2", "18", without_unit),
    _sub("18 м^{2}", "18 м", rf"(?<=[{ABROAD}])\^(?:[23]|\{{[23]\}})$"),
    _sub("18 per day", "18", RATE),
    _sub("18°C", "18", DEGREES),
    Rule("18 apples", r"18\text{ apples}", as_text),
    Rule(r"18\text{ apples}", "18 ", without_nouns),
    _sub("18 €", "18", rf"(?<=[0-9.])\s*{MONEY}$"),
    _sub(r"50\%", "50", r"\s*\\?%?$"),
    _sub("(18)", "18", r"^\(\s*([0-9.,]+)\s*\)\s*\Z", r"\1"),
)

PROSE = (
    *SIGNS,
    _sub("2,50 €", "2.50 €", r"(?<![0-9,.])([0-9]+),([0-9]{1,2})(?=\s?(?:€|zł|руб|euros?\b))", r"\1.\2"),
    _sub("USD20", " 20", rf"\b(?:{CURRENCIES})(?=[0-9])", " "),
    *_JOINED,
)

# --- brackets ---------------------------------------------------------------------------------------------------------

_TOKENS = re.compile(r"\\(?:[A-Za-z]+|.)|[{}()\[\]]", re.DOTALL)
_OPENING = ("{", "(", "[", r"\{", r"\(", r"\[", r"\langle", r"\lfloor", r"\lceil", r"\lvert")
_CLOSING = ("}", ")", "]", r"\}", r"\)", r"\]", r"\rangle", r"\rfloor", r"\rceil", r"\rvert")
_CHAIN = re.compile(
    rf"(?:[\^_]\s*(?:\{{[^{{}}]*\}}|\\[A-Za-z]+|[^\s{{}}])\s*){{{MOST_POWERS + 1},}}|(?:![\s)\]}}]*){{{MOST_POWERS},}}"
)


def partners(text: str, opening: Sequence[str] = "{", closing: Sequence[str] = "}") -> dict[int, int]:
    """The place of each bracket that is closed, and that of its partner. ``\\{`` is no brace. Linear time."""
    places: dict[int, int] = {}
    opened: list[int] = []
    for found in _TOKENS.finditer(text):
        if found[0] in opening:
            opened.append(found.start())
        elif found[0] in closing and opened:
            places[opened.pop()] = found.start()
    return places


def balanced(text: str) -> bool:
    """Whether each brace has its partner."""
    return 2 * len(partners(text)) == sum(found in ("{", "}") for found in _TOKENS.findall(text))


def split(text: str, cut: re.Pattern[str]) -> list[str]:
    """The parts of a text between cuts outside all brackets, which may be of two kinds: ``(1,2],3`` has two parts."""
    spans = partners(text, _OPENING, _CLOSING).items()
    parts, start = [], 0
    for found in cut.finditer(text):
        if not any(opening < found.start() < closing for opening, closing in spans):
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [part for part in (*parts, text[start:].strip()) if part]


def inside(text: str) -> tuple[str, str]:
    """The brackets around all of a text, and the text inside: ``("[)", "1,2")`` for ``[1,2)``; else ``("", text)``."""
    end = partners(text, _OPENING, _CLOSING).get(0, len(text))
    opening = _TOKENS.match(text)
    if opening is None or text[end:] not in _CLOSING:
        return "", text
    return opening[0] + text[end:], text[opening.end() : end]


def too_nested(text: str, most: int = MOST_NESTED) -> bool:
    """Whether brackets of any kind stand more than ``most`` deep, or powers more than :data:`MOST_POWERS`."""
    powers: list[bool] = []  # of the open brackets
    for found in _TOKENS.finditer(text):
        if found[0] in _OPENING:
            powers.append(text[: found.start()].rstrip().removesuffix(r"\left").rstrip().endswith("^"))
        elif found[0] in _CLOSING and powers:
            powers.pop()
        if len(powers) > most or sum(powers) > MOST_POWERS:
            return True
    return _CHAIN.search(text) is not None

"""The grammar of answers: each way that people write one, and the one way in which it is compared.

Each rule has an example beside it, the text before and after; a test runs them all. Rules apply in the order of their
table, to the given and to the expected answer alike. No rule evaluates anything.

===============  =======================================================================================
:data:`SIGNS`    all: signs of Unicode as LaTeX, digits of any script, powers of ten in words
:data:`FORMULA`  all but running text: dollar signs, words, spaces in numbers, degrees, bases and the like
:data:`NUMBER`   numbers, afterwards: what would be a list or a variable in a formula
:data:`PROSE`    running text: gaps inside numbers, and currencies before them
===============  =======================================================================================

:mod:`ftis.rewards.formulas` has the rules that take both answers, :mod:`ftis.rewards.words` the words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from unicodedata import decimal, normalize

from ftis.rewards.words import CURRENCIES, DEGREE, MONEY, SAYS, SYMBOLS, TEXT, without_words

MOST_NESTED = 8
"""Brackets inside brackets. Reading LaTeX takes exponentially long: half a second for eight, three for fifteen."""
MOST_POWERS = 3
"""Powers of powers. Nobody can compute their value."""


class Rule(NamedTuple):
    """One way of writing, with an example: ``change(before) == after``."""

    before: str
    after: str
    change: Callable[[str], str]


def _sub(before: str, after: str, pattern: str, by: str | Callable[[re.Match[str]], str] = "") -> Rule:
    """A rule by a pattern, in which a name in angle brackets stands for a pattern of :data:`_SHARED`."""
    for name, shared in _SHARED.items():
        pattern = pattern.replace(f"<{name}>", shared)
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
    """A text without a final period or comma, and without the bold type, box or dollar signs around all of it."""
    text = _EDGE.sub("", text.strip())
    if not text.endswith(".."):
        text = _EDGE.sub("", text[:-1] if text.endswith((".", ",", ";")) else text)
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)]
        wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if wrapped and not inner.endswith("\\") and balanced(inner) and not (opening[0] in "*_`" and opening in inner):
            return bare(inner)
    return text


def _compatible(text: str) -> str:
    """A text with its full-width, mathematical and squared letters as plain ones, and digits of any script as ours."""
    return re.sub(r"\d", lambda digit: str(decimal(digit[0])), normalize("NFKC", text))


_SMALL = {"⁰¹²³⁴⁵⁶⁷⁸⁹⁻": "^", "₀₁₂₃₄₅₆₇₈₉": "_"}


def _script(found: re.Match[str]) -> str:
    """Raised or lowered digits as plain ones after their mark; braces only around several."""
    digits = normalize("NFKC", found[0]).replace("\N{MINUS SIGN}", "-")
    mark = next(mark for small, mark in _SMALL.items() if found[0][0] in small)
    return mark + (digits if len(digits) == 1 else f"{{{digits}}}")


def _root(found: re.Match[str]) -> str:
    index = f"[{normalize('NFKC', found[1])}]" if found[1] else found[2]
    return rf"\sqrt{index}{{{found[3] or found[4] or found[5] or ''}}}"


_SCALES = {"hundred|[百백]": 2, "thousand|[千천](?![克米瓦])": 3, "[万萬만]": 4, "million": 6, "[亿億억]": 8}
_SCALES |= {"billion": 9, "trillion": 12}
"""Patterns of words after a number that multiply it, and their powers of ten."""


def _scaled(found: re.Match[str]) -> str:
    """The power of ten that a word stands for; more words of the same ``\\text`` stay in it."""
    word = (found[2] or found[4]).lower()
    power = next(power for words, power in _SCALES.items() if re.fullmatch(words, word))
    return rf"\cdot 10^{{{power}}}{found[1] if found[1] and not found[3] else ''}"


def _statements(found: re.Match[str]) -> str:
    return ", ".join(" ".join(line.replace("&", "").split()) for line in found[1].split(r"\\") if line.strip())


def _at_once(found: re.Match[str]) -> str:
    """A point of several names and as many values, which may be a point already."""
    names, values = (split(side, re.compile(",")) for side in (found[1], inside(found[2])[1]))
    return f"({','.join(names)})=({','.join(values)})" if len(names) == len(values) else found[0]


def _as_fraction(found: re.Match[str]) -> str:
    """A decimal that repeats digits for ever, in lowest terms or not."""
    whole, fixed, again = found[1], found[2], found[3] or found[4] or found[5]
    over = int(whole + fixed + again) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"


_BASES = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen"


def _base_in_digits(found: re.Match[str]) -> str:
    return f"_{{{found[1] if found[1].isdigit() else _BASES.split('|').index(found[1]) + 2}}}"


# --- patterns that several rules share --------------------------------------------------------------------------------

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
FRACTION = r"\\frac\s*(?:\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))(?![.,]?[0-9])"
LETTER = r"(?:\\[A-Za-z]+|[A-Za-z])(?:\s*_\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z0-9]))?'*"
RELATION = re.compile(r"(?<![<>\\])=|\\(?:equiv|approx|in)(?![A-Za-z])")
"""The signs between the sides of an equation."""
_SHARED = {"end": "(?![A-Za-z])", "gap": r"(?:\s|\\[,;:! ])", "text": TEXT, "says": SAYS, "letter": LETTER}
_SHARED |= {"money": MONEY, "codes": CURRENCIES, "degree": DEGREE, "symbols": SYMBOLS}
_SHARED |= {"scale": "|".join(_SCALES), "bases": _BASES}

_GROUPED = (
    _sub(r"12'000 or 12,\!000", "12000 or 12000", r"(?<=[0-9])(?:\{,\}|\\[,;:! ]|,\\!\s*|['’])(?=[0-9]{3}(?![0-9]))"),
    _sub(
        "70 000",
        "70000",
        r"(?<![0-9A-Za-z.,^])[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9A-Za-z/]|,[0-9])",
        lambda found: found[0].replace(" ", ""),
    ),
    _sub(
        "1.234.567 or 1.234,5",
        "1234567 or 1234.5",
        # (1.125,2) is a pair
        r"(?<![0-9A-Za-z.,^])[1-9][0-9]{0,2}(?:(?:\.[0-9]{3}){2,}(?:,[0-9]{1,2})?"
        r"|(?<![(\[{][0-9])(?<![(\[{][0-9]{2})(?<![(\[{][0-9]{3})\.[0-9]{3},[0-9]{1,2}(?!\s*\\?[)\]}]))(?![0-9.,])",
        lambda found: found[0].replace(".", "").replace(",", "."),
    ),
)

_INDIAN = _sub(
    "2,00,000", "200000", r"(?<![0-9.,])[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9,])", lambda m: m[0].replace(",", "")
)

# --- all --------------------------------------------------------------------------------------------------------------

_COMMANDS = (
    "∞infty πpi ·cdot ×times ÷div ∅emptyset ±pm ∓mp ≤le ≥ge ≠neq ∪cup ∩cap ∈in ⌊lfloor ⌋rfloor ⌈lceil ⌉rceil ⟨langle "
    "⟩rangle ℓell ⩽le ⩾ge •cdot →to ⊂subset ∠angle △triangle ≈approx ≡equiv ⇒Rightarrow ∴therefore …ldots"
)
_LATEX = {sign[0]: f"\\{sign[1:]} " for sign in _COMMANDS.split()}
_LATEX |= {sign: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", sign).split("⁄")) for sign in "½¼¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_LATEX |= {"ℝ": r"\mathbb{R}", "、": ", ", "∛": "√[3]", "∜": "√[4]", "㎡": r"\text{ m}^2", "㎥": r"\text{ m}^3"}
_LATEX |= {"º": "°", "˚": "°", "′": "'"} | dict(zip("−–⁄。٫٬٪∶", "--/..,%:", strict=True))

SIGNS = (
    _sub(  # π in a Greek word is a letter
        "−½π⁄2",
        r"-\frac{1}{2}\pi /2",
        f"(?!(?<=[Ͱ-Ͽ]{{2}})π|π[Ͱ-Ͽ]{{2}})[{''.join(_LATEX)}]",
        lambda found: _LATEX[found[0]],
    ),
    _sub("5\N{ZERO WIDTH SPACE}", "5", r"[\u200b-\u200f\u2060\ufeff]"),
    _sub(
        "³√2+2√[3](x)",
        r"\sqrt[3]{2}+2\sqrt[3]{x}",
        r"(?:(?<![\w)}\]])([³-⁹]))?√((?:\[[34]\])?)(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))",
        _root,
    ),
    _sub("x¹²+52₈", "x^{12}+52_8", "|".join(f"[{small}]+" for small in _SMALL), _script),
    Rule("１８.５％٣", "18.5%3", _compatible),
    _sub("9~kg", "9 kg", "~", " "),
    _sub(r"\bigl(1\bigr)", "(1)", r"\\[bB]igg?[lrm]?<end>\s*|\\(?:left|right)\s*(?:\.|(?=\\?[()[\]{}]))"),
    _sub(r"{\color{red}\textstyle 5}", "{5}", r"\\(?:text)?color\s*\{[^{}]*\}\s*|\\(?:display|text)style<end>\s*"),
    _sub(r"\dfrac12+\nicefrac{1}{2}", r"\frac12+\frac{1}{2}", r"\\(?:[dtcsx]|nice)frac<end>", r"\\frac"),
    _sub(  # sec is a second before anything but a bracket or a power
        "2ln(3)+arcsin x",
        r"2\ln(3)+\arcsin x",
        r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)h?|cot|csc|ln|log|exp|sec(?=[(^]))"
        r"(?=\s*[\^_({0-9\\]|\s+[A-Za-z](?![A-Za-z]))",
        r"\\\1",
    ),
    _sub(
        r"\arctg x+\operatorname{tg} x",
        r"\arctan x+\tan x",
        r"(?:\\operatorname\s*\{|\\|(?<![\\A-Za-z])(?=arc))(arc)?(c?)tg(?:\}|<end>)",
        lambda found: rf"\{found[1] or ''}{'cot' if found[2] else 'tan'}",
    ),
    _sub("x!=3", r"x\neq 3", r"(?:(?<![0-9)])!|\\not\s*)=", r"\\neq "),
    _sub(
        r"3\text{ million eggs}",
        r"3\cdot 10^{6}\text{ eggs}",
        r"(?<=[0-9])<gap>*(?i:(<text>)\s*(<scale>)<end>(\s*\})?|(<scale>)<end>)",
        _scaled,
    ),
    _sub("2pi", r"2\pi ", r"(?<![\\A-Za-z])pi<end>", r"\\pi "),
)

# --- all but running text ---------------------------------------------------------------------------------------------

_TIDY = (
    _sub("The answer is: 5", "5", r"^(?:<text>\s*)?(?i:<says>)<end>\s*[:=—]?\s*\}?\s*"),
    _sub("#### 18", "18", r"^\s*#+\s*"),
    Rule("**$5$.**", "5", bare),
    _sub(r"1\\[4pt]2", r"1\\2", r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
    _sub(
        r"\{\begin{array}{l}x=1\\y=2\end{array}",
        "x=1, y=2",
        r"(?:\\\{\s*\\begin\{array\}\s*\{[lcr]*\}|\\begin\{(?:cases|aligned|gathered)\})((?:[^&\\]|&\s*=|\\(?!end))*)"
        r"\\end\{[a-z]+\}",
        _statements,
    ),
    _sub("x, y = 1, 2", "(x,y)=(1,2)", r"^\s*(<letter>(?:\s*,\s*<letter>)+)\s*=\s*([^=]+?)\s*$", _at_once),
    _sub(
        r"\{t\in\mathbb{R}\mid t>2\}",
        "x>2",
        r"^\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?<gap>*(?:\\mid<end>|:|\|)<gap>*(.*?[<>=\\].*?)<gap>*\\\}$",
        lambda found: re.sub(rf"(?<![\\A-Za-z]){found[1]}(?![A-Za-z])", "x", found[2]),
    ),
    _sub(
        "]0,1[",
        "(0,1)",
        r"(^|\\cup|\\in|[=\s])([\[\]])([^\[\],;]+[,;][^\[\],;]+)([\[\]])",
        lambda found: f"{found[1]}{'[' if found[2] == '[' else '('}{found[3]}{']' if found[4] == ']' else ')'}",
    ),
    _sub(r"\varnothing", r"\emptyset ", r"\\varnothing<end>|\\\{\s*\\\}", r"\\emptyset "),
    *_GROUPED,
    _sub(
        r"\mathbf{v}=\mathrm{i}",
        "v=i",
        r"\\(?:math(?:rm|bf|it)\s*\{(?=[ei]\})|(?:mathbf|boldsymbol|bm)\s*\{(?=[A-Za-z]\}\s*=))(.)\}",
        r"\1",
    ),
    _sub(r"2<x<\infty", "2<x", r"((?:<|\\leq?<end>).*[A-Za-z])\s*<\s*\+?\s*\\infty\s*$", r"\1"),
    _sub(r"-\infty<x<2", "x<2", r"^\s*-\s*\\infty\s*<(?=\s*[A-Za-z]\s*(?:<|\\leq?<end>))\s*"),
    _sub("(1,2)U(3,4)", r"(1,2) \cup (3,4)", r"([\])])\s*(?:<text>\s*)?U\s*\}?\s*(?=[\[(])", r"\1 \\cup "),
    _sub(
        r"5_{\text{six}}", "5_{6}", r"_\s*(?:\{\s*<text>|<text>|\{)\s*([0-9]+|<bases>)\s*\}(?:\s*\})?", _base_in_digits
    ),
    _sub("(52)_8", "52_8", r"\(([0-9][0-9A-Za-z]*)\)\s*(?=_)", r"\1"),
    _sub(
        r"0.\overline{3}+0.1\dot{6}+0.1666\ldots",
        r"\frac{3}{9}+\frac{15}{90}+\frac{15}{90}",
        r"([0-9]*)\.([0-9]*?)(?:\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?(?![0-9])|\(([0-9]+)\)$|"
        r"([0-9]{1,9}?)\5+\s*(?:\.\.\.|\\[lc]?dots<end>))",
        _as_fraction,
    ),
    _sub(
        r"\sin 30°",
        r"\sin \frac{30\pi}{180}",
        r"(\\(?:sin|cos|tan|cot|sec|csc)<end>\s*(?:\^\s*\{?\s*[0-9]\s*\}?\s*)?[({]?\s*)([0-9]+(?:\.[0-9]+)?)<degree>",
        r"\1\\frac{\2\\pi}{180}",
    ),
    _sub(r"\text{18 ways}", "18 ways", r"^<text>\s*([0-9][^{}]*)\}$", r"\1"),
    Rule(r"\text{Area}=15\text{ cm}^2", "x=15 ", without_words),  # both answers' units are compared before
    _sub("90° C", "90", r"<degree>(?:\s*[CF]\s*$)?"),
    _sub("£5", "5", r"\s*(?:<text>\s*<money>\s*\}|<money>|\\pounds<end>)\s*"),
    _sub("-US$5", "-$5", r"^([+-]?)(?:(?:US|AU?|CA?|NZ|HK|S|R|MX)(?=\\?\$)|(?:<codes>)(?=[\s0-9+-]))\s*", r"\1"),
    _sub(r"50\%", "50", r"(?<=[0-9)}])<gap>*\\?%"),
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
    _sub("2.5e-3", r"2.5\cdot 10^{-3}", r"^([+-]?[0-9]*\.?[0-9]+)[eE](-[0-9]{1,3})$", r"\1\\cdot 10^{\2}"),
    # math-verify reads 4(2/3) as a mixed number
    _sub("4(2/3)", r"4\cdot (2/3)", r"(^|[\s+\-*/=(,])([0-9]+)\s*(\((?:[0-9]|\\frac))", r"\1\2\\cdot \3"),
    _sub("4 2/3", r"4\frac{2}{3}", r"^([+-]?\s*[0-9]+)<gap>+([0-9]+)\s*/\s*([0-9]+)\s*$", r"\1\\frac{\2}{\3}"),
)
FORMULA = (
    *_TIDY,
    *_TIDY,  # after a unit a dollar sign may close: $5$ cm
    _sub("x=-$36", "x=-36", r"((?:^|=)\s*[+-]?)\\?\$\s*(?=[+-]?[0-9.][^$]*\Z)", r"\1"),
)

# --- numbers ----------------------------------------------------------------------------------------------------------

NUMBER = (
    _INDIAN,
    _sub("2,5", "2.5", r"^([+-]?[0-9]+),([0-9]{1,2})(?![0-9,.])", r"\1.\2"),
    _sub("18 s", "18", r"(?<=[0-9])\s+(?:[shlLmg]|<symbols>)(?=\s*$)"),
    _sub("(-18)", "-18", r"^\(\s*([+-]?[0-9.,]+)\s*\)$", r"\1"),
    _sub(r"\frac{-1}{2}", r"-\frac{1}{2}", r"^\\frac\s*\{\s*-\s*([0-9]+)\s*\}", r"-\\frac{\1}"),
    _sub(r"\frac{1}{-2}", r"-\frac{1}{2}", r"^(\\frac\s*\{\s*[0-9]+\s*\}\s*\{)\s*-\s*(?=[0-9])", r"-\1"),
)

PROSE = (
    _sub("2,50 €", "2.50 €", r"(?<![0-9,.])([0-9]+),([0-9]{1,2})(?=\s?(?:€|zł|руб|euros?\b))", r"\1.\2"),
    _sub("USD20", " 20", r"\b(?:<codes>)(?=[0-9])", " "),
    _INDIAN,
    *_GROUPED,
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


def too_nested(text: str) -> bool:
    """Whether brackets stand more than :data:`MOST_NESTED` deep, or powers more than :data:`MOST_POWERS`."""
    powers: list[bool] = []  # of the open brackets
    for found in _TOKENS.finditer(text):
        if found[0] in _OPENING:
            powers.append(text[: found.start()].rstrip().removesuffix(r"\left").rstrip().endswith("^"))
        elif found[0] in _CLOSING and powers:
            powers.pop()
        if len(powers) > MOST_NESTED or sum(powers) > MOST_POWERS:
            return True
    return _CHAIN.search(text) is not None

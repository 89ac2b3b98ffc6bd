"""Answers with parts: lists, sets, points, assignments and sets of reals, each compared by the order that it has.

math-verify takes a list for a set and a point for an interval, and loses names. So it compares answers without parts.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

from ftis.rewards.grammar import LETTER, RELATION, inside, split
from ftis.rewards.words import TEXT

Question = tuple[Any, ...]
"""A question to the helper: ``("equal", given, expected, digits)``, ``("reals", given, expected)``, all or any of more
questions: ``("all", …)``, ``("any", …)``."""
NEVER: Question = ("any",)
DIGITS = 6
"""Digits after the point to which a decimal must equal an exact value, as ``0.333333`` a third, as in math-verify."""
MOST_PAIRS = 400
"""The most parts of one answer times parts of the other."""

_AND = rf"(?:\s+|(?<=[,;]))and(?![A-Za-z])\s*|{TEXT}\s*and\s*\}}|\\(?:land|wedge)(?![A-Za-z])"
_OR = rf"(?:\s+|(?<=[,;]))or(?![A-Za-z])\s*|{TEXT}\s*or\s*\}}|\\(?:lor|vee)(?![A-Za-z])"
_CUT = re.compile(rf"(?:[,;]\s*)?(?:{_AND}|{_OR})|(?<!\\)[,;]")
_NAMED = re.compile(rf"\s*({LETTER}(?:\([^()=,]*\))?|\([^()=]*\))\s*(?:=|\\in(?![A-Za-z]))(.*)", re.DOTALL)
_COLON = re.compile(":")
_SIGN = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_SPACE = re.compile(r"(?<!\w)\s+|\s+(?![\w\s])")
_SET, _POINT, _LIST = r"\{\}", "()", ""


class Shape(NamedTuple):
    """The parts of an answer, the name of each or "", and the brackets around all of them, as ``()`` or ``[)``."""

    brackets: str
    names: list[str]
    parts: list[str]
    ordered: bool  # false if nobody can tell the order of the names, as of k and a

    @property
    def assigns(self) -> bool:
        return len(self.names) == len(set(self.names) - {""}) > 1

    @property
    def roots(self) -> bool:
        return any(self.names) and len(self.names) > 1 and not self.assigns


def shape(text: str, spread: bool = False) -> Shape:
    """The parts of an answer: 1 and 4 of ``1,4``, ``\\{4,1\\}``, ``x=1, y=4`` and ``(x,y)=(1,4)``; a ± has two.

    With ``spread`` the one name before the first part is that of all, as in ``x = 1, 4``.
    """
    whole = found = _NAMED.fullmatch(text)
    brackets, content = inside(RELATION.split(text)[-1].strip() if found else text.strip())
    several = len(split(content, _CUT)) > 1 and not _SIGN.search(content)
    if len(split(text, _CUT)) > 1 or "emptyset" in content or not (brackets == _SET or (brackets and several)):
        brackets, content = _LIST, text
    names, parts = list[str](), list[str]()
    for statement in split(content, _CUT):
        found = _NAMED.fullmatch(statement)
        value = RELATION.split(statement)[-1].strip() if found else statement
        upper = _SIGN.sub(lambda sign: {"pm": "+", "mp": "-"}[sign[1]], value)
        lower = _SIGN.sub(lambda sign: {"pm": "-", "mp": "+"}[sign[1]], value)
        parts += [value] if upper == lower else [upper, lower]
        names += [found[1] if found else ""] * (len(parts) - len(names))
    if whole and brackets and (left := split(inside(whole[1])[1], _CUT))[1:] and len(left) == len(parts):
        names = left
    elif spread and len(names) > 1 and names[0] and not any(names[1:]):
        names = [names[0]] * len(names)
    elif len({name.partition("_")[0] for name in names}) == 1:  # x_1 and x_2 are roots
        names = [name.partition("_")[0] for name in names]
    places = _places(names)
    if places is not None and len(set(places)) == len(names) > 1:  # coordinates
        of_places = sorted(zip(places, names, parts, strict=True))
        names, parts = [name for _, name, _ in of_places], [part for _, _, part in of_places]
    brackets = _POINT if brackets == r"\langle\rangle" else brackets
    return Shape(brackets, names, parts, places is not None or brackets != _LIST)


_ORDERS = ("mb", "rtp")
"""First letters of names that people order otherwise than the alphabet: slope and intercept; ρ, θ and φ."""


def _places(names: list[str]) -> list[tuple[int, ...]] | None:
    """The place of each name in the order in which people ask for values; None if nobody can tell.

    Letters near each other stand in the order of the alphabet, as (a,b), (x,y) and f(1), f(2).
    """
    letters = [name.lstrip("\\")[:1] or " " for name in names]
    order = next((order for order in _ORDERS if set(order) == set(letters)), None)
    if order is None and names and ord(max(letters)) - ord(min(letters)) >= max(4, len(names)):
        return None
    numbers = [map(int, re.findall("-?[0-9]+", name)) for name in names]
    return [(order.index(one) if order else ord(one), *number) for one, number in zip(letters, numbers, strict=True)]


def _vector(text: str, like: str) -> str:
    """A point as the row or column of its coordinates, whichever ``like`` is; any other text as it is."""
    brackets, content = inside(RELATION.split(text)[-1].strip())
    parts = split(content, _CUT)
    if brackets not in (_POINT, r"\langle\rangle") or len(parts) < 2:
        return text
    return r"\begin{pmatrix}" + ("&" if "&" in like and r"\\" not in like else r"\\").join(parts) + r"\end{pmatrix}"


def question(given: str, expected: str, digits: int = DIGITS, part: bool = False) -> Question:
    """Whether two formulas are equal, for the helper.

    Lists and sets have no order. Points have one, and so have values of several names: ``x=1, y=2`` is ``(1,2)`` and
    ``1,2``, not ``2,1``. A list may stand for a point or a set, unless it is ``part`` of an answer. A set
    stands for no point. A point may be a row or a column. ``2:3:4`` is no division.
    """
    given, expected = (_SPACE.sub("", text) for text in (given, expected))
    if given == expected:
        return ("all",)
    if ("matrix" in given) != ("matrix" in expected):
        given, expected = _vector(given, expected), _vector(expected, given)
    if (sets := _reals(given, expected)) is not None:
        return "reals", *sets
    named = all(map(RELATION.search, (given, expected)))
    ratios = [split(text if named else RELATION.split(text)[-1], _COLON) for text in (given, expected)]
    if max(map(len, ratios)) > 2:
        return ("all", *map(question, *ratios)) if len(ratios[0]) == len(ratios[1]) else NEVER
    one, other = shape(given), shape(expected)
    if len({*one.names, *other.names} - {""}) == 1:
        one, other = shape(given, spread=True), shape(expected, spread=True)
    if one.brackets == other.brackets == _LIST and len(one.parts) == len(other.parts) == 1:
        if one.names == other.names != [""] or (other.names != [""] and not RELATION.search(given)):
            given, expected = one.parts[0], other.parts[0]
        return "equal", given if RELATION.search(expected) else RELATION.split(given)[-1], expected, digits
    unordered = {one.brackets, other.brackets} <= {_LIST, _SET} and not (one.assigns or other.assigns)
    as_many = len(one.parts) == len(other.parts) or (unordered and len(other.parts) > 1)
    if not as_many or not _comparable(one, other, part):
        return NEVER
    of_part = partial(question, part=True)
    if one.assigns and other.assigns:
        values = dict(zip(one.names, one.parts, strict=True))
        return "all", *map(of_part, [values.get(name, "") for name in other.names], other.parts)
    if not unordered and not _SIGN.search(expected):
        return "all", *map(of_part, one.parts, other.parts)
    rows = [[of_part(left, right) for right in other.parts] for left in one.parts]
    return "all", *(("any", *of_one) for of_one in [*rows, *zip(*rows, strict=True)])


def _comparable(one: Shape, other: Shape, part: bool) -> bool:
    """Whether the parts of one answer may be those of the other."""
    kinds, assign = {one.brackets, other.brackets}, one.assigns or other.assigns
    if len(kinds) > 1 and (part or kinds not in ({_LIST, _SET}, {_LIST, _POINT})):
        return False
    if (assign and _SET in kinds) or len(one.parts) * len(other.parts) > MOST_PAIRS:
        return False
    if (one.roots or other.roots) and (assign or _POINT in kinds):
        return False
    if len(set(one.parts)) < 2 or (one.assigns and other.assigns):
        return True
    return one.ordered and other.ordered


INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:eq?(?:slant)?|t)|neq?)(?![a-z])")
_INTERVAL = re.compile(r"[\[(][^,]*,[^,]*[\])]")
_PAIR = re.compile(r"\([^,]*,[^,]*\)")
_GREEK = r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|omega|phi|rho|sigma|tau)(?![A-Za-z])"
_MEMBER = re.compile(rf"^\s*(?:[A-Za-z]|{_GREEK})\s*\\in(?![A-Za-z])\s*")
_COMMA = re.compile(rf",(?=[^,()\[\]]*(?:{INEQUALITY.pattern}))")
_VARIABLE = re.compile(rf"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])|{_GREEK}")


def _reals(given: str, expected: str) -> list[Any] | None:
    """Both answers as unions of intersections, if both are sets of reals, as ``x \\neq 0``, ``|x|>1`` and ``(3,4]``.

    ``(1,2)`` may be a point, so one of both must be more than a pair in round brackets.
    """
    sides = [_COMMA.sub(r"\\land ", _MEMBER.sub("", text).strip().replace(";", ",")) for text in (given, expected)]
    variables = [set(_VARIABLE.findall(side)) if INEQUALITY.search(side) else set() for side in sides]
    known = [
        len(names) == 1 or r"\mathbb{R}" in side or all(map(_INTERVAL.fullmatch, map(str.strip, side.split(r"\cup"))))
        for side, names in zip(sides, variables, strict=True)
    ]
    points = [_PAIR.fullmatch(side) is not None and r"\infty" not in side for side in sides]
    if not all(known) or all(points) or (all(variables) and variables[0] != variables[1]):
        return None
    return [tuple(tuple(re.split(_AND, part)) for part in re.split(_OR, side)) for side in sides]

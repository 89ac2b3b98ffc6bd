"""A calculator for word problems: it completes a model's calculations, as ``12 * 7 =``."""

from __future__ import annotations

import ast
import operator
import re
from decimal import Decimal, Inexact, localcontext
from fractions import Fraction

LONGEST = 100
"""Characters of an expression."""
EXPRESSION = re.compile(rf"[-+*/().,\d ]{{1,{LONGEST}}}$")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Calculator:
    """A tool that completes a turn behind ``=`` by its expression's value. It needs ``sampling.stop = ["="]``."""

    def reset(self, **row: object) -> None:
        return None

    def reply(self, text: str) -> str | None:
        """A space and the value; nothing if no expression stands there; None for a turn with another end."""
        if not text.endswith("="):
            return None
        found = EXPRESSION.search(text[:-1])
        value = calculated(found.group()) if found else None
        return "" if value is None else f" {value}"


def calculated(expression: str) -> str | None:
    """The exact value of sums, differences, products and quotients: ``7/2`` is 3.5, ``1/3`` is 1/3. None: no value."""
    try:
        value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    with localcontext(prec=2 * LONGEST) as context:
        context.traps[Inexact] = True
        try:
            return f"{(Decimal(value.numerator) / value.denominator).normalize():f}"
        except Inexact:
            return str(value)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            found: Fraction = OPERATORS[type(op)](_value(left), _value(right))
            return found
    raise ValueError

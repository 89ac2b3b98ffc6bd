"""A calculator for word problems: what stands between ``<<`` and ``=`` is computed, as in ``<<12*7=84>>``."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 100
"""Letters of an expression."""


class Calculator:
    """Answers a turn that ends in ``<<…=`` with the value and ``>>``. Wants ``sampling.stop = ["="]``."""

    def reset(self, **row: object) -> None:
        return None

    def reply(self, text: str) -> str | None:
        """The value, or an error in words; None if nothing is asked."""
        _, asked, expression = text.rpartition("<<")
        if not asked or not expression.endswith("="):
            return None if not text.endswith("=") else ""
        return f"{calculated(expression[:-1])}>>"


def calculated(expression: str) -> str:
    """The value of sums, differences, products and quotients, exactly: ``7/2`` is 3.5, and ``1/3`` is 1/3."""
    try:
        if len(expression) > LONGEST:
            raise ValueError
        value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return "error"
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return f"{float(value):.12g}" if rest == 1 else str(value)


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

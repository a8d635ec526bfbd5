r"""Whether two LaTeX expressions have the same value, found by evaluating them at a few points.

Equality at random points is a proof for practical purposes (Schwartz, "Fast probabilistic algorithms for verification
of polynomial identities", 1980) and, unlike symbolic simplification, it always ends soon.

Invariant: a model's text is never executed. It is translated to arithmetic, parsed, and only numbers, names, + - * /
powers and the functions below are evaluated, with bounds on size.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Value = Fraction | complex
"""Rational numbers stay exact; everything else is a complex floating point number."""
Names = dict[str, complex]

_MAX_LENGTH = 400
_MAX_NODES = 200
_MAX_EXPONENT = 1000
_MAX_BITS = 20_000
_POINTS = 3
_TOLERANCE = 1e-9
_CONSTANTS: Names = {"pi": math.pi, "e": math.e, "i": 1j}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "exp": cmath.exp,
    "ln": cmath.log,
    "log": cmath.log10,
    "abs": abs,
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|,|!|;|:|\s)|\s+|~")
_COMMANDS = {"cdot": "*", "times": "*", "div": "/", "pm": "pm", "infty": "oo"}
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|[A-Za-z]+|\*\*|[-+*/()]")


class _NotArithmeticError(Exception):
    """The text is not an expression that can be evaluated."""


def normalize(latex: str) -> str:
    """The text without what does not change its meaning: spacing, $, units in \\text, thousands commas, \\dfrac."""
    text = latex.strip().strip("$").rstrip(".").replace("\u2212", "-").replace("{,}", "").replace("\\\\", ";")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\$", "").replace("\\%", "%")
    text = re.sub(r"\^\{?\\circ\}?|\\degree", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))(?![^(\[{]*[)\]}])", "", text)
    bare_words = _WORDS.sub("", text).strip()
    text = bare_words if bare_words else _WORDS.sub(r"\1", text)
    text = text.replace("\\{", "{").replace("\\}", "}")
    # A space that ends a command (\\pi r) must leave a trace.
    text = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", r"\1{}", text)
    return _SPACING.sub("", text).rstrip("%")


def same_value(left: str, right: str) -> bool:
    """Whether two normalised expressions agree at every point tried; False if one cannot be evaluated."""
    try:
        left_tree, right_tree = _parse(left), _parse(right)
        names = sorted((_names(left_tree) | _names(right_tree)) - set(_CONSTANTS))
        rng = random.Random(0)
        for _ in range(_POINTS if names else 1):
            point = {name: complex(rng.uniform(0.5, 2.0)) for name in names}
            if not _close(_evaluate(left_tree, point), _evaluate(right_tree, point)):
                return False
    except (_NotArithmeticError, ArithmeticError, ValueError, RecursionError):
        return False
    return True


def _close(left: Value, right: Value) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = complex(left), complex(right)
    if not (cmath.isfinite(left) and cmath.isfinite(right)):
        return False
    return abs(left - right) <= _TOLERANCE * max(1.0, abs(left), abs(right))


def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise _NotArithmeticError
    try:
        tree = ast.parse(_to_arithmetic(text), mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:
        raise _NotArithmeticError from error
    if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
        raise _NotArithmeticError
    return tree


def _to_arithmetic(text: str) -> str:
    """LaTeX to Python arithmetic: \\frac{1}{2}x -> ((1)/(2))*x."""
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^(-?)(\d+)(?=\\frac\{\d+\}\{\d+\}$)", r"\1(\2)mixed", text)
    braces = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    for pattern, replacement in (
        (rf"\\frac{braces}{braces}", r"((\1)/(\2))"),
        (rf"\\sqrt\[(\d+)\]{braces}", r"((\2)**(1/(\1)))"),
        (rf"\\sqrt{braces}", r"sqrt(\1)"),
    ):
        changed = 1
        while changed:
            text, changed = re.subn(pattern, replacement, text)
    # A mixed number, 1\frac{1}{2}, is a sum although it is written like a product.
    if (mixed := re.fullmatch(r"(-?)\((\d+)\)mixed(.*)", text)) is not None:
        text = f"{mixed[1]}({mixed[2]}+{mixed[3]})"
    text = text.replace("{}", " ")
    text = re.sub(r"\|([^|]+)\|", r"abs(\1)", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda match: _COMMANDS.get(match[1], f" {match[1]} "), text)
    text = text.replace("^", "**").replace("{", "(").replace("}", ")").replace("[", "(").replace("]", ")")
    return _with_products(text)


def _with_products(text: str) -> str:
    """Write out the products that mathematics leaves out: 2x(y) -> 2*x*(y), xy -> x*y."""
    if _TOKEN.sub("", text).strip():
        raise _NotArithmeticError
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        known = token in _FUNCTIONS or token in _CONSTANTS
        tokens += [token] if known or not token.isalpha() or len(token) > 6 else list(token)
    written = ""
    for before, token in zip(["", *tokens], tokens, strict=False):
        ends_value = before == ")" or before[-1:].isalnum() or before[-1:] == "."
        starts_value = token == "(" or token[0].isalnum() or token[0] == "."
        if ends_value and starts_value and not (before in _FUNCTIONS and token == "("):
            if before in _FUNCTIONS:
                raise _NotArithmeticError
            written += "*"
        written += token
    return re.sub(r"(?<![\w.])0+(?=\d)", "", written)


def _names(tree: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(_FUNCTIONS)


def _evaluate(node: ast.expr, point: Names) -> Value:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.Name(id=name) if name in point or name in _CONSTANTS:
            return point[name] if name in point else _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, point)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, point)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_evaluate(left, point), _evaluate(right, point))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _binary(_OPERATORS[type(kind)], _evaluate(left, point), _evaluate(right, point))
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _FUNCTIONS:
            return complex(_FUNCTIONS[name](complex(_evaluate(argument, point))))
        case _:
            raise _NotArithmeticError


def _binary(function: Callable[[Any, Any], Any], left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return Fraction(function(left, right))
    return complex(function(complex(left), complex(right)))


def _power(base: Value, exponent: Value) -> Value:
    """Exact for rationals with whole exponents, as far as the result has a bounded size."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) > _MAX_EXPONENT or bits * abs(exponent) > _MAX_BITS:
            raise _NotArithmeticError
        return Fraction(base**exponent.numerator)
    return complex(complex(base) ** complex(exponent))

"""The calculator that a model calls as its Python tool while it answers."""

import ast
import math
import operator
from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LONGEST = 200


def calculate(expression: str) -> str | None:
    """What the tool writes back for ``expression``, or None where it writes nothing.

    Numbers, + - * / // % and parentheses, commas between digits left out; nothing else, so that no model-written code
    is run. Whole results are written without a decimal point, others with at most six significant digits, as GSM8K's
    own calculations mostly are.
    """
    expression = expression.replace(",", "").strip()
    if not expression or len(expression) > _LONGEST:
        return None
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    if not math.isfinite(value) or abs(value) >= 1e15:
        return None
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not arithmetic")

"""Integer expressions over named values, evaluated safely.

Used wherever a file may hold a formula: extents in manifests (`ceil_div(T, 8)`), derived values in specs
(`${model.heads // ranks}`), constraints of sweeps. Only literals, names, dotted names, arithmetic, comparisons, `and`, `or`,
`not`, conditional expressions and the functions below are understood; nothing else of Python is reachable.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

Value = int | float | bool | str

_LONGEST = 500  # characters; an honest formula is a line
_LARGEST = 1 << 63

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b not below a."""
    return ceil_div(a, b) * b


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": ceil_div, "round_up": round_up, "min": min, "max": max, "abs": abs, "sqrt": math.sqrt, "log": math.log,
}  # fmt: skip


class ExpressionError(ValueError):
    """The text is not an expression kdgen understands, or it names something unknown."""


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ExpressionError(f"expression of {len(text)} characters; at most {_LONGEST} are allowed")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"{text!r} is not an expression") from error


def names_in(text: str) -> frozenset[str]:
    """The (dotted) names an expression reads, function names excluded."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            for argument in node.args:
                visit(argument)
            return
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(_dotted(node))
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(_parse(text))
    return frozenset(found)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ExpressionError(f"'{ast.unparse(node)}' is not a name")


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The value of `text` with names looked up in `values` (dotted names are plain keys: `values["model.heads"]`).

    Raises:
        ExpressionError: not an expression, an unknown name, a forbidden construct, a division by zero, a huge result.
    """

    def walk(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | bool() | str()):
                return node.value
            case ast.Name() | ast.Attribute():
                name = _dotted(node)
                if name not in values:
                    raise ExpressionError(f"unknown name '{name}' in '{text}'; known: {', '.join(sorted(values)) or 'none'}")
                return values[name]
            case ast.UnaryOp(op=ast.USub()):
                return -walk(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not walk(node.operand)
            case ast.BinOp() if type(node.op) in _BINARY:
                left, right = walk(node.left), walk(node.right)
                if isinstance(left, str) or isinstance(right, str):
                    raise ExpressionError(f"'{text}' does arithmetic on text")
                return _bounded(_BINARY[type(node.op)](left, right), text)
            case ast.BoolOp(op=ast.And()):
                return all(walk(item) for item in node.values)
            case ast.BoolOp(op=ast.Or()):
                return any(walk(item) for item in node.values)
            case ast.Compare():
                left = walk(node.left)
                for operation, item in zip(node.ops, node.comparators, strict=True):
                    if type(operation) not in _COMPARE:
                        break
                    right = walk(item)
                    if not _COMPARE[type(operation)](left, right):
                        return False
                    left = right
                else:
                    return True
            case ast.IfExp():
                return walk(node.body) if walk(node.test) else walk(node.orelse)
            case ast.Tuple() | ast.List():
                return tuple(walk(item) for item in node.elts)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return _bounded(FUNCTIONS[name](*(walk(item) for item in node.args)), text)
            case _:
                pass
        raise ExpressionError(
            f"'{ast.unparse(node)}' is not allowed in an expression; use + - * // / %, comparisons, and/or/not, "
            f"x if c else y, and {', '.join(FUNCTIONS)}"
        )

    try:
        return walk(_parse(text))
    except ExpressionError:
        raise
    except (ValueError, ZeroDivisionError, TypeError, OverflowError, RecursionError) as error:
        raise ExpressionError(f"'{text}': {error}") from error


def _bounded(value: Any, text: str) -> Any:
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ExpressionError(f"'{text}' is beyond 64 bits")
    return value


def extent(value: int | str, dimensions: Mapping[str, int]) -> int:
    """An extent (an integer, or an expression over dimensions) as an integer."""
    if isinstance(value, int):
        return value
    result = evaluate(value, dimensions)
    if not isinstance(result, int):
        raise ExpressionError(f"'{value}' is {result!r}, not an integer")
    return result

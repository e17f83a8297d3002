"""The fingerprint of a program: what it does, however it is written down."""

from __future__ import annotations

import ast
import hashlib
from functools import cache

# Without effect on what a program does.
_IGNORED = {"annotation", "returns", "type_comment", "ctx", "kind"}


@cache
def fingerprint(program: str) -> str:
    """Hash of a Python program's syntax tree.

    It does not depend on comments, docstrings, type annotations, formatting, or on which Python
    (3.10 or newer) computes it.
    """
    tokens: list[str] = []
    _append(tokens, ast.parse(program))
    return hashlib.sha256("\n".join(tokens).encode("utf-8", "backslashreplace")).hexdigest()


def _append(tokens: list[str], node: object) -> None:
    """The tree in one fixed order. Empty fields are left out: newer Pythons add some."""
    if isinstance(node, ast.Constant):
        tokens.append(f"constant {node.value!r}")
    elif isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty constants
        tokens.append("JoinedStr")
        _append(tokens, [each for each in node.values if getattr(each, "value", None) != ""])
    elif isinstance(node, ast.AST):
        tokens.append(type(node).__name__)
        for name in _counted(node._fields):
            value = getattr(node, name, None)
            if value is not None and value != []:
                tokens.append(name)
                _append(tokens, value)
        tokens.append(")")
    elif isinstance(node, list):
        for each in node:
            if not _is_idle(each):
                _append(tokens, each)
        tokens.append("]")
    else:
        tokens.append(repr(node))


@cache
def _counted(fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*fields} - _IGNORED))


def _is_idle(statement: object) -> bool:
    """Whether a statement is a docstring, or imports names for annotations."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "typing"
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )

"""Where the source of a training program uses its local rank, and how it loops.

On one host the local rank equals the rank, so that only the source tells which one is meant. Runs
on Python 3.6 and newer.
"""

import ast
from typing import Any, Set


def lines(node: Any) -> Set[int]:
    """All lines of a node of a syntax tree (end_lineno is of Python 3.8)."""
    numbers = [each.lineno for each in ast.walk(node) if hasattr(each, "lineno")]
    return set(range(min(numbers), max(numbers) + 1)) if numbers else set()


def _lines_of(nodes: Any) -> Set[int]:
    return set().union(*map(lines, nodes))


def _text(node: Any) -> str:
    return ast.dump(node).replace("Store()", "Load()")


def _name(node: Any) -> str:
    """The last name of ``hvd.local_rank``, or of ``local_rank``."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


class Source:
    """One file of a program.

    Attributes:
        named: variables that hold the local rank, or a comparison of it.
    """

    def __init__(self, text: bytes) -> None:
        self.tree = ast.parse(text)
        self.named: Set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)

    def _assign(self, target: Any, value: Any) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts):
                self._assign(each, part)
        elif self.is_local(value):
            self.named.add(_text(target))

    def is_local(self, node: Any) -> bool:
        """Whether an expression is the local rank, or compares it and not the rank."""
        if isinstance(node, ast.Call):
            return _name(node.func) == "local_rank"
        if isinstance(node, ast.Compare):
            return any(map(self.is_local, [node.left, *node.comparators]))
        if isinstance(node, ast.BoolOp):
            ranks = [
                each for part in node.values for each in ast.walk(part) if _name(each) == "rank"
            ]
            return any(map(self.is_local, node.values)) and not ranks
        if isinstance(node, ast.UnaryOp):
            return self.is_local(node.operand)
        return _text(node) in self.named

    def decides(self, line: int) -> bool:
        """Whether an ``if`` on the local rank decides that a line runs."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and self.is_local(node.test):
                if line in _lines_of(node.body + node.orelse):
                    return True
                # A function that returns early on other local ranks.
                leaves = any(isinstance(each, ast.Return) for each in node.body)
                if leaves and line in self._rest_of_function(node):
                    return True
        return False

    def _rest_of_function(self, node: Any) -> Set[int]:
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef) and node in function.body:
                return _lines_of(function.body[function.body.index(node) + 1 :])
        return set()

    def gives(self, line: int, function: str, place: int, keyword: str) -> bool:
        """Whether a call in a line gives the local rank as an argument, by place or by keyword."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and line in lines(node):
                given = [each.value for each in node.keywords if each.arg == keyword]
                if _name(node.func).endswith(function):
                    given += node.args[place : place + 1]
                if any(map(self.is_local, given)):
                    return True
        return False

    def reads_all(self, line: int) -> bool:
        """Whether the loop that begins in a line reads all that its iterable has."""
        ends = ast.Break, ast.Return, ast.Raise
        for node in ast.walk(self.tree):
            if isinstance(node, ast.For) and line in lines(node.iter):
                data: Any = node.iter
                while isinstance(data, ast.Call) and _name(data.func) in ("enumerate", "tqdm"):
                    data = data.args[0] if data.args else None
                whole = isinstance(data, (ast.Name, ast.Attribute))
                return whole and not any(isinstance(each, ends) for each in ast.walk(node))
        return False

"""The files of a training program: where it is, where it uses its local rank, and how it loops.

On one host the local rank equals the rank, so that only the source tells which one is meant. Runs
on Python 3.6 and newer.
"""

import ast
import os
import sys
from typing import Any, Dict, Iterator, Set

HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = os.path.dirname(os.__file__)
_PACKAGES = "/site-packages/", "/dist-packages/", "/horovod/"


def stack() -> Iterator[Any]:
    """The frames of this thread, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back


def caller() -> Any:
    """The innermost frame that is not of these modules."""
    return next(each for each in stack() if not each.f_code.co_filename.startswith(HERE + os.sep))


def lines(*nodes: Any) -> Set[int]:
    """All lines of nodes of a syntax tree (end_lineno is of Python 3.8)."""
    found: Set[int] = set()
    for node in nodes:
        numbers = [each.lineno for each in ast.walk(node) if hasattr(each, "lineno")]
        found.update(range(min(numbers), max(numbers) + 1) if numbers else ())
    return found


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
        for node in self.nodes(ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)

    def nodes(self, kind: Any) -> Iterator[Any]:
        """All nodes of a kind."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kind))

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
            ranks = any(_name(each) == "rank" for each in ast.walk(node))
            return any(map(self.is_local, node.values)) and not ranks
        if isinstance(node, ast.UnaryOp):
            return self.is_local(node.operand)
        return _text(node) in self.named

    def decides(self, line: int) -> bool:
        """Whether an ``if`` on the local rank decides that a line runs."""
        found: Set[int] = set()
        for node in filter(lambda each: self.is_local(each.test), self.nodes(ast.If)):
            found |= lines(*node.body, *node.orelse)
            if any(isinstance(each, ast.Return) for each in node.body):
                for function in self.nodes(ast.FunctionDef):  # it goes on with other local ranks
                    if node in function.body:
                        found |= lines(*function.body[function.body.index(node) + 1 :])
        return line in found

    def gives(self, line: int) -> bool:
        """Whether a call in a line gives the local rank as an argument."""
        calls = [each for each in self.nodes(ast.Call) if line in lines(each)]
        given = [each for call in calls for each in call.args]
        given += [each.value for call in calls for each in call.keywords]
        return any(map(self.is_local, given))

    def reads_all(self, line: int) -> bool:
        """Whether the loop that begins in a line reads all that its iterable has."""
        ends = ast.Break, ast.Return, ast.Raise
        for node in self.nodes(ast.For):
            if line in lines(node.iter):
                data: Any = node.iter
                while isinstance(data, ast.Call) and _name(data.func) in ("enumerate", "tqdm"):
                    data = data.args[0] if data.args else None
                whole = isinstance(data, (ast.Name, ast.Attribute))
                return whole and not any(isinstance(each, ends) for each in ast.walk(node))
        return False


class Program:
    """The files of the program, and where it is now.

    Attributes:
        script: its first file; empty for a module.
        home: the directory of its own modules.
    """

    def __init__(self, script: str, home: str) -> None:
        self.script = script
        self.home = home
        self._sources: Dict[str, Source] = {}

    def has(self, name: str) -> bool:
        """Whether a file belongs to the program rather than to an installed package."""
        # TensorFlow rewrites functions into files of this name.
        if name.startswith((HERE + os.sep, "<")) or "__autograph_generated_file" in name:
            return False
        if name == self.script or os.path.dirname(name) == self.home:
            return True
        return not (name.startswith(_LIBRARIES) or any(part in name for part in _PACKAGES))

    def site(self) -> str:
        """Where the program is: ``train.py:12``; empty if it is nowhere on the stack."""
        for frame in stack():
            name = frame.f_code.co_filename
            if self.has(name):
                short = os.path.relpath(name, self.home)
                return "{}:{}".format(name if short.startswith("..") else short, frame.f_lineno)
        return ""

    def _asks(self, question: str) -> Iterator[bool]:
        """The answers of sources to a question about the lines where the program is."""
        for frame in stack():
            name = frame.f_code.co_filename
            if self.has(name):
                if name not in self._sources:
                    with open(name, "rb") as stream:
                        self._sources[name] = Source(stream.read())
                yield getattr(self._sources[name], question)(frame.f_lineno)

    def decided_by_local_rank(self) -> bool:
        """Whether the local rank decides that the program gets to where it is."""
        return any(self._asks("decides"))

    def gives_local_rank(self) -> bool:
        """Whether the program makes a call with the local rank as an argument."""
        return next(self._asks("gives"), False)

    def reads_all(self) -> bool:
        """Whether the program is at a loop without ``break``."""
        return next(self._asks("reads_all"), False)

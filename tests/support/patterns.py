"""Texts on which a regular expression takes long in Python's engine, which backtracks.

Each loop of a pattern gets texts that lead to it and then go around it again and again: what other
loops can read, too, is divided among them in every way. The words to repeat are single characters,
and examples of what the loop repeats. What a pattern takes for these texts is measured.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

_INSIDE_RE = sys.version_info >= (3, 11)
parser: Any = importlib.import_module("re._parser" if _INSIDE_RE else "sre_parse")
compiler: Any = importlib.import_module("re._compiler" if _INSIDE_RE else "sre_compile")
sre: Any = importlib.import_module("re._constants" if _INSIDE_RE else "sre_constants")

_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, getattr(sre, "POSSESSIVE_REPEAT", None))
# What people write, and what patterns are about, besides the characters of a pattern itself.
_COMMON = "aZ019 \t\n.,:;=-_/\\'\"<>()[]{}$#é"
# Up to here each step could be the last one of a pattern whose time doubles with each character.
_LENGTHS = (*range(8, 36, 4), 300, 2000)
# How many single characters a loop is tried with.
_FEW = 6


class _Walk:
    """The loops of a pattern, each with a text that leads to it."""

    def __init__(self, pattern: str, flags: int) -> None:
        self.tree = parser.parse(pattern, flags)
        self.named = sorted({chr(code) for code in _literals(self.tree)})
        self.alphabet = [*dict.fromkeys(("a", "0", " ", *self.named, *_COMMON))]
        self.found: dict[tuple[str, str], None] = {}
        self._sequence(list(self.tree), "")

    def _compiled(self, nodes: Sequence[Any]) -> re.Pattern[str]:
        part = parser.SubPattern(self.tree.state, list(nodes))
        compiled: re.Pattern[str] = compiler.compile(part, self.tree.state.flags)
        return compiled

    def _sequence(self, nodes: Sequence[Any], before: str) -> list[str]:
        """Examples of what some nodes read; those for each branch of the last one that has some."""
        texts = [""]
        for kind, value in nodes:
            several = self._node(kind, value, before + texts[0])
            texts = [texts[0] + each for each in several] + [
                other + several[0] for other in texts[1:]
            ]
        return texts[:6]

    def _node(self, kind: Any, value: Any, before: str) -> list[str]:
        if kind is sre.SUBPATTERN:
            return self._sequence(list(value[3]), before)
        if kind is sre.BRANCH:
            return [text for each in value[1] for text in self._sequence(list(each), before)[:2]]
        if kind in _REPEATS:
            return self._repeat(value[0], value[1], list(value[2]), before)
        if kind in (sre.ASSERT, sre.ASSERT_NOT):
            self._sequence(list(value[1]), before)
            return [""]
        if kind in (sre.AT, sre.GROUPREF):
            return [""]
        return [self._character(kind, value)]

    def _character(self, kind: Any, value: Any) -> str:
        if kind is sre.LITERAL:
            return chr(value)
        one = self._compiled([(kind, value)])
        return next(filter(one.fullmatch, self.alphabet), "")

    def _repeat(self, least: int, most: int, nodes: Sequence[Any], before: str) -> list[str]:
        texts = self._sequence(nodes, before)
        if most > least + 3:
            whole = self._compiled(nodes)
            words = [each for each in self.alphabet if whole.fullmatch(each)][:_FEW]
            for word in filter(None, (*words, *texts)):
                self.found[before, word] = None
            if before:  # a search starts again at each
                self.found["", before] = None
        copies = max(1, min(least, 16))
        return [each * copies for each in texts] + ([""] if least == 0 else [])


def _literals(nodes: Any) -> Iterator[int]:
    for each in nodes:
        if isinstance(each, tuple) and len(each) == 2 and each[0] in (sre.LITERAL, sre.NOT_LITERAL):
            yield each[1]
        elif isinstance(each, (list, tuple, parser.SubPattern)):
            yield from _literals(each)


def slow_text(
    pattern: str, flags: int, method: str, length: int, seconds: float
) -> tuple[str, int] | None:
    """The start of a text for which a pattern takes longer, and how long that is; None if there is none.

    Args:
        method: the function of `re` that it is for.
        length: of the texts, at most.
    """
    compiled = re.compile(pattern, flags)
    walk = _Walk(pattern, flags)
    # What makes a match fail, and what satisfies a condition only at the very end.
    ends = ("\0", "\n\0", "".join(walk.named) + "\0")
    for before, word in walk.found:
        for size in (each for each in (*_LENGTHS, length) if each <= length):
            text = (before + word * (size // len(word) + 1))[:size]
            for end in ends:
                # What else this process does, such as collecting garbage, counts too, but not each time.
                if all(_seconds(compiled, method, text + end) > seconds for _ in range(5)):
                    return text[:100], size
    return None


def _seconds(compiled: re.Pattern[str], method: str, text: str) -> float:
    began = time.process_time()
    if method in ("sub", "subn"):
        compiled.sub("", text)
    elif method == "finditer":
        list(compiled.finditer(text))
    else:
        getattr(compiled, method)(text)
    return time.process_time() - began

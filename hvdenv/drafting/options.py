"""Splits the arguments of a program into options, their values and the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Options(NamedTuple):
    """The arguments of a program; an option without a value has an empty one."""

    given: tuple[tuple[str, str], ...]
    rest: tuple[str, ...]

    def all(self, *names: str) -> list[str]:
        return [value for name, value in self.given if name in names]

    def last(self, *names: str) -> str:
        return (self.all(*names) or [""])[-1]

    def has(self, *names: str) -> bool:
        return any(name in names for name, _ in self.given)


def split(
    words: Sequence[str],
    with_value: Collection[str] | Mapping[str, int],
    *,
    program: bool = False,
) -> Options:
    """Read the arguments of a program.

    Args:
        with_value: options that are followed by a value, or by several (a mapping).
        program: stop at the first word that is no option.
    """
    given, rest, position = [], list[str](), 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            rest += words[position:]
            break
        if not word.startswith("-") or word == "-":
            if program:
                rest += words[position - 1 :]
                break
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        short = word[:2]
        if equals and name.startswith("--"):
            given.append((name, value))
        elif word in with_value:
            count = with_value[word] if isinstance(with_value, Mapping) else 1
            given.append((word, "=".join(words[position : position + count])))
            position += count
        elif short in with_value and len(word) > 2 and not word.startswith("--"):
            given.append((short, word[2:].removeprefix("=")))
        else:
            given.append((word, ""))
    return Options(tuple(given), tuple(rest))

"""Splits the arguments of a program into options, their values and the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml

# How many words follow an option.
_VALUES = {"flags": 0, "options": 1, "pairs": 2}


class Option(NamedTuple):
    """What an option means.

    Attributes:
        meaning: a field of jobs or launchers, or the reason to leave it out (several words).
    """

    meaning: str
    values: int


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


@lru_cache(maxsize=1)
def tables() -> dict[str, dict[str, Option]]:
    """The options of batch systems and launchers."""
    document = parse_toml(read_text(Path(__file__).with_suffix(".toml"), OWN))
    listed = decode(dict[str, dict[str, dict[str, str]]], document)
    return {
        name: {
            option: Option(meaning, _VALUES[part])
            for part, meanings in parts.items()
            for meaning, options in meanings.items()
            for option in options.split()
        }
        for name, parts in listed.items()
    }


def split(
    words: Sequence[str],
    known: Mapping[str, Option] | Collection[str],
    *,
    program: bool = False,
) -> Options:
    """Read the arguments of a program.

    Args:
        known: options and how many values follow them; if it names only options, one.
        program: stop at the first word that is no option.
    """
    table = known if isinstance(known, Mapping) else dict.fromkeys(known, Option("", 1))
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
        count = table[word].values if word in table else 0
        if equals and name.startswith("--"):
            given.append((name, value))
        elif count:
            given.append((word, "=".join(words[position : position + count])))
            position += count
        elif len(word) > 2 and word[:2] in table and table[word[:2]].values and word[1] != "-":
            given.append((word[:2], word[2:].removeprefix("=")))
        else:
            given.append((word, ""))
    return Options(tuple(given), tuple(rest))

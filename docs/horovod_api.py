"""What Horovod's documentation calls, and whether verify calls it: horovod-api.toml as a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import decode, parse_toml

FILE = Path(__file__).with_name("horovod-api.toml")
TITLES = {
    "default": "Called by default",
    "no": "Not called",
}


class Group(NamedTuple):
    """Names that verify treats alike.

    Attributes:
        modules: each has at least one of the names.
        names: of a function or class, or of an attribute after a dot; ``*`` for all of a module.
        exercised: when verify calls them.
        how: the part of verify that does, or why none does.
    """

    modules: tuple[str, ...]
    names: tuple[str, ...]
    exercised: Literal["default", "no"]
    how: str


class Api(NamedTuple):
    """All groups."""

    group: tuple[Group, ...]


def groups() -> tuple[Group, ...]:
    return decode(Api, parse_toml(read_text(FILE, OWN))).group


def known(chosen: Iterable[Group]) -> set[tuple[str, str]]:
    """Pairs of a module and a name; those of callbacks and elastic are pairs of their own module."""
    pairs = set()
    for group in chosen:
        for module in group.modules:
            for name in group.names:
                inner, _, last = name.rpartition(".")
                below = inner in ("callbacks", "elastic")
                pairs.add((f"{module}.{inner}", last) if below else (module, name))
    return pairs


def page() -> str:
    """The tables, for the page of the report."""
    parts = []
    for exercised, title in TITLES.items():
        rows = [
            f"| {_code(group.modules)} | {_code(group.names)} | {group.how} |"
            for group in groups()
            if group.exercised == exercised
        ]
        parts += [
            f"### {title}",
            "\n".join(["| of | name | how, or why not |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

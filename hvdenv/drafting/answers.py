"""Values that the user gives: with --set, or as answers to questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hvdenv.drafting.combine import Choice
from hvdenv.drafting.values import GIVEN, Drafted, Found, Key, Origin
from hvdenv.errors import UsageError
from hvdenv.schema import parse_toml

ANSWER = Origin("your answer")


def parse(text: str, origin: Origin) -> list[Drafted]:
    """``KEY=VALUE`` as values of the recipe.

    Raises:
        UsageError: it is neither TOML nor a text.
    """
    key, equals, value = text.partition("=")
    for written in (f"{key} = {value}", f"{key} = '{value}'"):
        try:
            if equals:
                return list(_leaves(parse_toml(written), origin))
        except ValueError:
            continue
    raise UsageError(
        f"--set {text}: it is not KEY=VALUE", remedy="write, for example, --set mpi.version=5.0.11"
    )


def _leaves(table: dict[str, Any], origin: Origin, path: Key = ()) -> Iterator[Drafted]:
    for name, value in table.items():
        key = (*path, name)
        if isinstance(value, dict):
            yield from _leaves(value, origin, key)
        elif isinstance(value, list):
            yield from (Drafted(key, each, origin, GIVEN, item=True) for each in value)
        else:
            yield Drafted(key, value, origin, GIVEN)


def give(found: Found, given: Iterable[Drafted]) -> Found:
    """Values that replace those of other sources; a list replaces the whole list."""
    given = tuple(given)
    lists = {each.key for each in given if each.item}
    kept = (each for each in found.values if not any(each.key[: len(key)] == key for key in lists))
    return found._replace(values=(*kept, *given))


def choose(found: Found, choice: Choice, chosen: Drafted) -> Found:
    """One value of a choice, at its place, and none of the others."""

    def of_choice(each: Drafted) -> bool:
        return any(
            (each.value, each.origin) == (other.value, other.origin)
            and each.key[: len(other.key)] == other.key
            for other in choice.values
        )

    values = (
        each._replace(key=chosen.key, weight=GIVEN) if of_choice(each) else each
        for each in found.values
        if each.value == chosen.value or not of_choice(each)
    )
    return found._replace(values=tuple(values))

"""Values that the user gives: with --set, or as answers to questions."""

from __future__ import annotations

from collections.abc import Iterable

from hvdenv.drafting.values import GIVEN, Found, Origin, Value
from hvdenv.errors import UsageError
from hvdenv.model.layers import assigned
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import leaves
from hvdenv.schema import Problem, check_part

ANSWER = Origin("your answer")


def parse(text: str, origin: Origin) -> list[Value]:
    """``KEY=VALUE`` as values of the recipe.

    Raises:
        UsageError: a recipe has no such key, or the key no such value.
    """
    table = assigned(text)
    try:
        check_part(Recipe, table)
    except Problem as problem:
        raise UsageError(
            f"--set {text}: {problem.message}",
            remedy="`hvdenv show --schema` prints the keys of a recipe",
        ) from problem
    return [
        Value(path, each, origin, GIVEN, item=isinstance(value, list))
        for path, value in leaves(table)
        for each in (value if isinstance(value, list) else [value])
    ]


def give(found: Found, given: Iterable[Value]) -> Found:
    """Values that replace those of other sources; a list replaces the whole list."""
    given = tuple(given)
    lists = {each.key for each in given if each.item}
    kept = (each for each in found.values if each.key not in lists)
    return found._replace(values=(*kept, *given))

"""Values of no page: those that the user gives, and those proposed for what a draft lacks.

A proposal is a combination of versions that was verified, on machines without GPUs: which GPUs to build
for is for the user to decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvdenv.base.errors import UsageError
from hvdenv.base.reading import RECIPE, read_text
from hvdenv.base.schema import Problem, check_part, parse_toml
from hvdenv.drafting.draft import Missing
from hvdenv.drafting.values import Found, Key, Origin, Value, Weight, at
from hvdenv.knowledge.combinations import NONE, TriedRow
from hvdenv.knowledge.observables import minor
from hvdenv.model.facts import Facts
from hvdenv.model.layers import assigned
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import leaves, recipe_folder

_DEFAULT = ("torch",)
_LOCAL = Origin("proposed: as in the recipe local")


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
        Value(path, each, origin, Weight.GIVEN, item=isinstance(value, list))
        for path, value in leaves(table)
        for each in (value if isinstance(value, list) else [value])
    ]


def give(found: Found, given: Iterable[Value]) -> Found:
    """Values that replace those of other sources; a list replaces the whole list."""
    given = tuple(given)
    lists = {each.key for each in given if each.item}
    kept = (each for each in found.facts if each.key not in lists)
    return found._replace(facts=(*kept, *given))


def propose(
    missing: Iterable[Missing], values: Sequence[Value], facts: Facts, rows: Iterable[TriedRow]
) -> list[Value]:
    """Values for missing keys, from the newest verified combination that fits the others.

    Args:
        values: what the sources state.
        facts: of this machine.
        rows: the verified combinations.
    """
    keys = {each.key for each in missing}
    has_gpus = facts.gpus or any(each.key[-1] == "gpus" for each in values)
    row = None if has_gpus else _newest(values, facts, rows)
    if not keys or row is None:
        return []
    origin = Origin(f"proposed: verified on {row.date} (combination {row.name})")
    found = [*_row_values(row, keys, origin), *_local_values(row, keys)]
    return [each._replace(weight=Weight.INFERRED) for each in found]


def _newest(values: Sequence[Value], facts: Facts, rows: Iterable[TriedRow]) -> TriedRow | None:
    """The row with the newest frameworks, or else the newest Python."""
    stated = {each.key: str(each.value) for each in values if not each.item}
    listed = [str(each.value) for each in values if each.key == at("horovod.frameworks")]
    pythons = {minor(each.version) for each in facts.interpreters if each.complete}
    fitting = [
        row
        for row in rows
        if row.verdict == "pass" and row.machine == facts.machine and row.cuda in ("", NONE)
        if {*row.frameworks} == {*(listed or _DEFAULT)}
        if row.mpi == stated.get(at("mpi.kind"), "openmpi")
        and (at("mpi.version") in stated or row.mpi_version.startswith("4."))
        and _agrees(row, stated, pythons)
    ]
    return max(fitting, key=_age, default=None)


def _agrees(row: TriedRow, stated: dict[Key, str], pythons: Collection[str]) -> bool:
    python = stated.get(at("python.version"))
    if not (SpecifierSet(python).contains(row.python) if python else minor(row.python) in pythons):
        return False
    versions = {at("horovod.version"): row.horovod}
    versions |= {at("frameworks", name, "version"): v for name, v in row.frameworks.items()}
    return all(
        Version(stated.get(key, v)).public == Version(v).public for key, v in versions.items()
    )


def _age(row: TriedRow) -> tuple[list[Version], Version]:
    return [Version(row.frameworks[name]) for name in sorted(row.frameworks)], Version(row.python)


def _row_values(row: TriedRow, keys: Collection[Key], origin: Origin) -> Iterator[Value]:
    settings = {
        **row.settings,
        "horovod.version": f'"{row.horovod}"',
        "horovod.controllers": '["mpi", "gloo"]',
    }
    # Other packages, such as an older numpy, go with the versions of the frameworks.
    versions = any(key[0] == "frameworks" for key in keys)
    for name, text in settings.items():
        if at(name) in keys or (versions and name.startswith("packages.")):
            yield from parse(f"{name}={text}", origin)


def _local_values(row: TriedRow, keys: Collection[Key]) -> Iterator[Value]:
    """Packages and indexes of CPU builds, and the MPI, which rows have from the recipe local."""
    local = parse_toml(read_text(recipe_folder() / "local.toml", RECIPE))
    for name in row.frameworks:
        if at("frameworks", name, "version") in keys:
            for key in ("package", "cpu_index"):
                if value := local["frameworks"][name].get(key):
                    yield Value(at("frameworks", name, key), value, _LOCAL)
    if at("mpi.kind") in keys:
        yield Value(at("mpi.package"), row.mpi, _LOCAL)
        yield Value(at("mpi.version"), row.mpi_version, _LOCAL)

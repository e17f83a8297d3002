"""Combines what all sources yield into one draft: conflicts, what follows, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from hvdenv.drafting.inferred import gpu_option, inferred, mpi_module
from hvdenv.drafting.shell import shown_whole
from hvdenv.drafting.values import WITHOUT, Found, Key, Left, Origin, Value, at
from hvdenv.knowledge.horovod_releases import releases
from hvdenv.model.cluster import LauncherName
from hvdenv.model.recipe import Recipe
from hvdenv.schema import Problem, Table, check_part, decode

# Every recipe has them.
_TABLES: Table = {"horovod": {}, "frameworks": {}}
# What a missing key needs, for people.
_NEEDS = {
    "python.version": 'such as "==3.10.*"; with a Python of the modules, exactly its version',
    "horovod.frameworks": 'such as ["torch"]',
    "horovod.controllers": '["mpi"], ["gloo"] or both',
    "version": "the release to install",
    "conda.channels": 'such as ["conda-forge"]',
}


class Choice(NamedTuple):
    """A key for which the sources state different values. The draft has none of them."""

    key: Key
    values: tuple[Value, ...]


class Missing(NamedTuple):
    key: Key
    needs: str


class Draft(NamedTuple):
    """A recipe as far as the sources state it.

    Attributes:
        values: in the order of the sources; items of a list one by one.
        left: every other line of the sources, and parts of lines.
        commands: how many commands the page has.
        partition: of the job, if nothing is known about its nodes.
    """

    name: str
    values: tuple[Value, ...]
    choices: tuple[Choice, ...]
    missing: tuple[Missing, ...]
    left: tuple[Left, ...]
    commands: int
    partition: str = ""


def combine(name: str, found: Found, defaults: Table) -> Draft:
    """The draft of a recipe; ``defaults`` is the layer below every recipe."""
    left = list(found.left)
    valid = _valid(_without_some_images(list(_horovodrun(found.values)), left), left)
    merged, choices = _merged(valid, left)
    merged = _without_unknown_launcher(merged, left)
    chosen = _with_partition(merged, left)
    chosen += inferred(chosen, {str(each.value) for each in valid if each.item})
    chosen += gpu_option(chosen, [each.origin.text for each in found.lines])
    chosen, alternatives = _without_alternatives(chosen, choices, valid)
    choices += alternatives
    pending = {each.key for each in choices}
    draft = Draft(
        name=name,
        values=tuple(chosen),
        choices=tuple(choices),
        missing=tuple(_missing(name, chosen, pending, defaults)),
        left=tuple(left),
        commands=found.commands,
        partition=_bare_partition(chosen),
    )
    return draft._replace(left=tuple(_every_line(draft, found)))


def _every_line(draft: Draft, found: Found) -> Iterator[Left]:
    """What the draft does not have as values, so that it names every line of the sources.

    A line that needs no key is left out if it has values as well.
    """
    used = {each.origin for each in shown_values(draft)}
    left = [each for each in draft.left
            if not each.understood or each.table or each.origin not in used]  # fmt: skip
    named = used | {each.origin for each in left}
    places = {(each.key, str(each.value)): each.origin.place for each in draft.values}
    again = {each.origin: places.get((each.key, str(each.value))) for each in found.values}
    left += [
        Left(origin, f"the same as {place}" if place else "another line takes precedence", True)
        for origin, place in again.items()
        if origin.line and origin not in named
    ]
    lines = {place for origin in {*named, *again} for place in _lines_of(origin)}
    left += [each for each in found.lines if lines.isdisjoint(_lines_of(each.origin))]
    yield from (each._replace(reason=shown_whole(each.reason)) for each in left)


def shown_values(draft: Draft) -> Iterator[Value]:
    """Those of choices as well."""
    yield from draft.values
    yield from (each for choice in draft.choices for each in choice.values)


def _lines_of(origin: Origin) -> Iterator[tuple[str, int]]:
    last = max(origin.line, origin.last)
    yield from ((origin.source, line) for line in range(origin.line, last + 1) if line)


def _find(values: Iterable[Value], key: str) -> Value | None:
    return next((each for each in values if each.key == at(key)), None)


def _bare_partition(values: Sequence[Value]) -> str:
    named = _find(values, "job.partition")
    described = {each.key[1] for each in values if each.key[0] == "partitions"}
    return str(named.value) if named and named.value not in described else ""


def nested(values: Iterable[Value]) -> Table:
    document: Table = {}
    for each in values:
        table = document
        for part in each.key[:-1]:
            table = table.setdefault(part, {})
        if each.item:
            table.setdefault(each.key[-1], []).append(each.value)
        else:
            table[each.key[-1]] = each.value
    return document


def _valid(values: Iterable[Value], left: list[Left]) -> list[Value]:
    """Values that the recipe format accepts; the others by their commands."""
    good = []
    for each in values:
        key = each.key
        if key[:2] == ("partitions", ""):
            key = at("partitions", "x", *key[2:])
        elif key[:2] == ("modules", "load"):
            key = key[:2]
        value = each.value
        if each.item and isinstance(value, str):
            value = value.removeprefix(WITHOUT)
        try:
            check_part(Recipe, nested([each._replace(key=key, value=value)]))
            good.append(each)
        except Problem as problem:
            told = f"{each.value!r} does not fit {'.'.join(key)}: {problem.message}"
            left.append(Left(each.origin, told, table=".".join(each.key[:-1])))
    return good


def _without_some_images(values: list[Value], left: list[Left]) -> list[Value]:
    """A page that starts ranks with and without an image shows two ways."""
    images = [each for each in values if each.key[0] == "container"]
    launches = {each.origin for each in values if each.key == at("launch.launcher")}
    if not images or launches <= {each.origin for each in images}:
        return values
    told = "other commands of the page start ranks without an image"
    left += [Left(each.origin, told) for each in images]
    return [each for each in values if each.key[0] != "container"]


def _without_unknown_launcher(values: list[Value], left: list[Left]) -> list[Value]:
    """A launcher that hvdenv does not know is no value, but it is one in a choice."""
    launcher = _find(values, "launch.launcher")
    of_site = {each.key[2] for each in values if each.key[:2] == ("launch", "launchers")}
    if not launcher or launcher.value in (*get_args(LauncherName), *of_site):
        return values
    told = f"hvdenv does not know the launcher {launcher.value}"
    if launcher.value == "horovodrun-":
        told = "horovodrun uses MPI or Gloo, and the page does not state which"
    left.append(Left(launcher.origin, told, table="launch"))
    return [each for each in values if each is not launcher]


def _merged(values: Iterable[Value], left: list[Left]) -> tuple[list[Value], list[Choice]]:
    """Each key once, and each item of a list, with the value of most weight.

    Several values of the same weight are a choice.
    """
    slots: dict[Key, dict[str, Value]] = {}
    for each in values:
        text = str(each.value)
        several = each.item and not _labelled(each.key)
        slot = (*each.key, text.removeprefix(WITHOUT)) if several else each.key
        known = slots.setdefault((*slot, "" if several else "."), {})
        if text not in known or known[text].weight < each.weight:
            known[text] = each
    merged, choices = list[Value](), list[Choice]()
    for slot, known in slots.items():
        most = max(each.weight for each in known.values())
        best = [each for each in known.values() if each.weight == most]
        key = best[0].key
        left += [_overruled(each, best[0]) for each in known.values() if each.weight < most]
        if key[:2] == ("partitions", "") and len(best) > 1:
            told = "the page's scripts are for different partitions"
            left += [Left(each.origin, told) for each in best]
        elif _labelled(key):
            choices.append(Choice(key, tuple(each._replace(key=key[:2]) for each in best)))
        elif len(best) > 1:
            choices.append(Choice(slot[:-1], tuple(best)))
        elif not str(best[0].value).startswith(WITHOUT):
            merged.append(best[0])
    return merged, choices


def _labelled(key: Key) -> bool:
    """Whether a key is that of an alternative: see modulelines.drafted."""
    return len(key) > 2 and key[:2] == ("modules", "load")


def _overruled(each: Value, other: Value) -> Left:
    told = f"{'.'.join(each.key)}: {other.origin.place} takes precedence over {each.value}"
    return Left(each.origin, told, table=".".join(each.key[:-1]))


def _without_alternatives(
    values: Sequence[Value], choices: Sequence[Choice], every: Sequence[Value]
) -> tuple[list[Value], list[Choice]]:
    """Packages installed with only some of several framework versions become choices as well."""
    lines = {
        value.origin
        for choice in choices
        if choice.key[0] == "frameworks" and choice.key[-1] == "version"
        for value in choice.values
    }
    with_one = [
        each for each in values
        if each.key[0] == "packages" and each.origin in lines
        and not lines <= {other.origin for other in every if other[:2] == each[:2]}
    ]  # fmt: skip
    kept = [each for each in values if each not in with_one]
    return kept, [Choice(each.key, (each,)) for each in with_one]


def _with_partition(values: list[Value], left: list[Left]) -> list[Value]:
    """The facts of a job's partition under its name."""
    partition = _find(values, "job.partition")
    placed = []
    for each in values:
        if each.key[:2] != ("partitions", ""):
            placed.append(each)
        elif partition and partition.value:
            placed.append(each._replace(key=("partitions", str(partition.value), *each.key[2:])))
        else:
            left.append(Left(each.origin, f"no partition is known that has {each.value}"))
    return placed


def _horovodrun(values: Sequence[Value]) -> Iterator[Value]:
    """horovodrun without --mpi and --gloo uses MPI if Horovod was built with it."""
    controllers = {each.value for each in values if each.key == at("horovod.controllers")}
    mpi = "mpi" in controllers or mpi_module(values)
    which = "gloo" if f"{WITHOUT}mpi" in controllers else "mpi" if mpi else ""
    for each in values:
        plain = each.key == at("launch.launcher") and each.value == "horovodrun-"
        yield each._replace(value=f"horovodrun-{which}") if plain else each


def _missing(
    name: str, values: Sequence[Value], pending: set[Key], defaults: Table
) -> Iterator[Missing]:
    document = nested(values)
    document |= {"format": 1, "name": name, "summary": "x", "status": "documented"}
    for key, below in (*defaults.items(), *_TABLES.items()):
        stated = document.get(key, {} if isinstance(below, dict) else below)
        document[key] = {**below, **(stated or {})} if isinstance(below, dict) else stated
    yield from _missing_gpus(values)
    if "mpi" in document["horovod"].get("controllers", []) and "mpi" not in document:
        yield Missing(at("mpi.kind"), 'such as "openmpi": Horovod is to use MPI')
    for framework in document["horovod"].get("frameworks", []):
        if framework not in document["frameworks"]:
            yield Missing(at("frameworks", framework, "version"), _NEEDS["version"])
    try:
        decode(Recipe, document)
    except Problem as problem:
        for each in problem.all:
            path = tuple(str(part) for part in each.path)
            of_framework = (path[0], path[-1]) == ("frameworks", "version")
            dotted = "version" if of_framework else ".".join(path)
            told = _release() if dotted == "horovod.version" else _NEEDS.get(dotted, each.message)
            if path not in pending:
                yield Missing(path, told)


def _missing_gpus(values: Sequence[Value]) -> Iterator[Missing]:
    """A job that requests GPUs states the least that a node has, not how many it has."""
    partition, gpus = _find(values, "job.partition"), _find(values, "job.gpus_per_node")
    key = ("partitions", str(partition.value if partition else ""), "gpus")
    if partition and gpus and not any(each.key == key for each in values):
        needs = f"GPUs of a node, {gpus.value} or more: `sinfo`, or --here on the cluster"
        yield Missing(key, needs)


def _release() -> str:
    latest = list(releases().values())[-1]
    return f'such as "{latest.version}", the latest release ({latest.uploaded})'

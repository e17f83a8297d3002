"""Combines what all sources yield into one draft: conflicts, what follows, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from hvdenv.drafting.inferred import gpu_option, inferred, mpi_module
from hvdenv.drafting.modulelines import LOAD
from hvdenv.drafting.shell import shown_whole
from hvdenv.drafting.values import GIVEN, OPEN, WITHOUT, Found, Key, Left, Value, at
from hvdenv.knowledge.patches import releases
from hvdenv.model.cluster import LauncherName
from hvdenv.model.layers import decode_whole
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import DEFAULTS
from hvdenv.reading import OWN, read_text
from hvdenv.schema import Problem, Table, check_part, parse_toml

_LAUNCHER = at("launch.launcher")
_UNNAMED_PARTITION = ("partitions", "")
# What a missing key needs, for people.
_NEEDS = {
    "python.version": 'such as "==3.10.*"; with a Python of the modules, exactly its version',
    "horovod.frameworks": 'such as ["torch"]; then also frameworks.torch.version',
    "horovod.controllers": '["mpi"], ["gloo"] or both',
    "version": "the release to install",
    "mpi.kind": 'such as "openmpi": Horovod is to use MPI',
    "conda.channels": 'such as ["conda-forge"]',
    "job.nodes": "number of nodes",
    "job.ranks_per_node": "ranks of a node, usually one per GPU",
}
_WITH_PYTHON = frozenset({"conda-forge", "defaults", "main", "anaconda", "intel"})
# The keys of tables that a recipe lacks as a whole.
_REQUIRED = {"frameworks": "version", "mpi": "kind", "conda": "channels"}


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
        slurm: whether its scheduler is Slurm.
    """

    name: str
    values: tuple[Value, ...]
    choices: tuple[Choice, ...]
    missing: tuple[Missing, ...]
    left: tuple[Left, ...]
    commands: int
    partition: str = ""
    slurm: bool = False


def combine(name: str, found: Found) -> Draft:
    """The draft of a recipe."""
    left = list(found.left)
    valid = list(_valid(_horovodrun(found.values), left))
    chosen, choices = _merged(valid, left)
    chosen = list(_placed(chosen, left))
    left += _without_python(chosen)
    chosen += inferred(chosen, {str(each.value) for each in valid if each.item})
    chosen += gpu_option(chosen, [each.origin.text for each in found.lines])
    alternatives = _alternatives(chosen, choices, valid)
    chosen = [each for each in chosen if each not in alternatives]
    choices += [Choice(each.key, (each,)) for each in alternatives]
    pending = {each.key for each in choices}
    partition = _find(chosen, "job.partition")
    described = any(
        partition and each.key[1] == partition.value
        for each in chosen
        if each.key[0] == "partitions"
    )
    return Draft(
        name=name,
        values=tuple(chosen),
        choices=tuple(choices),
        missing=tuple(each for each in _missing(name, chosen) if each.key not in pending),
        left=tuple(_every_line(chosen, choices, left, found)),
        commands=found.commands,
        partition=str(partition.value) if partition and not described else "",
        slurm=_is_slurm(chosen),
    )


def _find(values: Iterable[Value], key: str) -> Value | None:
    return next((each for each in values if each.key == at(key)), None)


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


def _horovodrun(values: Sequence[Value]) -> Iterator[Value]:
    """horovodrun without --mpi and --gloo uses MPI if Horovod was built with it."""
    controllers = {each.value for each in values if each.key == at("horovod.controllers")}
    mpi = "mpi" in controllers or mpi_module(values)
    which = "gloo" if f"{WITHOUT}mpi" in controllers else "mpi" if mpi else ""
    for each in values:
        plain = each.key == _LAUNCHER and each.value == "horovodrun-"
        yield each._replace(value=f"horovodrun-{which}") if plain else each


def _valid(values: Iterable[Value], left: list[Left]) -> Iterator[Value]:
    """Values that the recipe format accepts, and one way to start ranks; the others are left."""
    values = list(values)
    images = {each.origin for each in values if each.key[0] == "container"}
    several = not {each.origin for each in values if each.key == _LAUNCHER} <= images
    for each in values:
        plain = each
        if each.key[:2] == _UNNAMED_PARTITION:
            plain = plain._replace(key=("partitions", "x", *each.key[2:]))
        if each.item and isinstance(each.value, str):
            plain = plain._replace(value=each.value.removeprefix(WITHOUT))
        try:
            check_part(Recipe, nested([plain]))
        except Problem as problem:
            told = f"{each.value!r} does not fit {'.'.join(each.key)}: {problem.message}"
            left.append(Left(each.origin, told, table=each.table))
            continue
        of_image = each.key[0] == "container" and each.key[1] not in ("base", "packages")
        if of_image and several:
            told = "other commands of the page start ranks without an image"
            left.append(Left(each.origin, told))
        else:
            yield each


def _merged(values: Iterable[Value], left: list[Left]) -> tuple[list[Value], list[Choice]]:
    """Each key once, and each item of a list, with the value of most weight.

    Several values of the same weight are a choice.
    """
    slots: dict[tuple[Key, str, bool], dict[str, Value]] = {}
    for each in values:
        text = str(each.value)
        slot = each.role or text.removeprefix(WITHOUT) if each.item else ""
        known = slots.setdefault((each.key, slot, each.item), {})
        if text not in known or known[text].weight < each.weight:
            known[text] = each
    merged, choices = list[Value](), list[Choice]()
    for (key, slot, _), known in slots.items():
        most = max(each.weight for each in known.values())
        best = [each for each in known.values() if each.weight == most]
        for each in known.values():
            if OPEN < each.weight < most:
                told = f"{'.'.join(key)}: {best[0].origin.place} takes precedence over {each.value}"
                left.append(Left(each.origin, told, table=each.table))
        if key[:2] == _UNNAMED_PARTITION and len(best) > 1:
            told = "the page's scripts are for different partitions"
            left += [Left(each.origin, told) for each in best]
        # A module that has a role has alternatives, if only to load none.
        elif len(best) > 1 or (best[0].role and key == LOAD and most < GIVEN):
            choices.append(Choice((*key, slot) if slot else key, tuple(best)))
        elif not str(best[0].value).startswith(WITHOUT):
            merged.append(best[0]._replace(role=""))
    return merged, choices


def _placed(values: Sequence[Value], left: list[Left]) -> Iterator[Value]:
    """Values whose partition and launcher are known; the facts of a job's partition by its name."""
    partition = _find(values, "job.partition")
    own = {each.key[2] for each in values if each.key[:2] == ("launch", "launchers")}
    for each in values:
        if each.key[:2] == _UNNAMED_PARTITION and not partition:
            left.append(Left(each.origin, f"no partition is known that has {each.value}"))
        elif each.key[:2] == _UNNAMED_PARTITION and partition:
            yield each._replace(key=("partitions", str(partition.value), *each.key[2:]))
        elif each.key == _LAUNCHER and each.value not in (*get_args(LauncherName), *own):
            told = f"hvdenv does not know the launcher {each.value}"
            if each.value == "horovodrun-":
                told = "horovodrun uses MPI or Gloo, and the page does not state which"
            left.append(Left(each.origin, told, table="launch"))
        else:
            yield each


def _without_python(values: Iterable[Value]) -> Iterator[Left]:
    """A note on channels that have no Python of their own."""
    channels = [each for each in values if each.key == at("conda.channels")]
    names = {str(each.value).rstrip("/").rpartition("/")[2] for each in channels}
    if channels and not names & _WITH_PYTHON:
        told = "conda adds its default channels to these, a recipe does not: add conda-forge"
        yield Left(channels[0].origin, told, table="conda")


def _alternatives(
    values: Sequence[Value], choices: Sequence[Choice], every: Sequence[Value]
) -> list[Value]:
    """Packages that are installed with only some of several versions of a framework."""
    lines = {
        value.origin
        for choice in choices
        if choice.key[0] == "frameworks" and choice.key[-1] == "version"
        for value in choice.values
    }
    return [
        each
        for each in values
        if each.key[0] == "packages"
        and each.origin in lines
        and not lines <= {other.origin for other in every if other[:2] == each[:2]}
    ]


def _missing(name: str, values: Sequence[Value]) -> Iterator[Missing]:
    """What the loaded recipe would lack, and what a job of it needs."""
    partition, gpus = _find(values, "job.partition"), _find(values, "job.gpus_per_node")
    if partition and gpus:
        of_nodes = ("partitions", str(partition.value), "gpus")
        if not any(each.key == of_nodes for each in values):
            # A job states the least that a node has, not how many it has.
            asks = ", or --here on the cluster" if _is_slurm(values) else ""
            needs = f"GPUs of a node, {gpus.value} or more{asks}"
            yield Missing(of_nodes, needs)
    defaults = parse_toml(read_text(DEFAULTS, OWN))
    document = nested(values)
    given = {"format": 1, "name": name, "summary": "x", "status": "documented"}
    for key, below in {**defaults, **given}.items():
        above = document.get(key, {})
        document[key] = {**below, **above} if isinstance(below, dict) else above or below
    if partition:
        document.setdefault("partitions", {}).setdefault(str(partition.value), {})
    lines = {each.key: each.origin.place for each in values if each.weight == OPEN}
    for problem in decode_whole(document)[1]:
        path = tuple(str(part) for part in problem.path)
        if path[0] in _REQUIRED and len(path) == (2 if path[0] == "frameworks" else 1):
            path += (_REQUIRED[path[0]],)
        left_open = f"; {lines[path]} leaves it open" if path in lines else ""
        yield Missing(path, _needs(path, problem.message) + left_open)


def _is_slurm(values: Iterable[Value]) -> bool:
    """Only Slurm tells --here what its nodes have."""
    scheduler = _find(values, "scheduler")
    return scheduler is not None and scheduler.value == "slurm"


def _needs(path: Key, message: str) -> str:
    latest = list(releases().values())[-1]
    if path == at("horovod.version"):
        return f'such as "{latest.version}", the latest release ({latest.uploaded})'
    if path == at("horovod.sha256"):
        return f'"{latest.sha256}" for {latest.version}'
    return _NEEDS.get("version" if path[0] == "frameworks" else ".".join(path), message)


def _every_line(
    values: Sequence[Value], choices: Sequence[Choice], left: Sequence[Left], found: Found
) -> Iterator[Left]:
    """What the draft does not have as values, so that it names every line of the sources.

    A line that needs no key is left out if it has values as well.
    """
    shown = [*values, *(each for choice in choices for each in choice.values)]
    named = {each.origin for each in shown}
    kept = [each for each in left if not each.understood or each.table or each.origin not in named]
    named |= {each.origin for each in kept}
    places = {(each.key, str(each.value)): each.origin.place for each in values}
    for origin, (key, text) in {
        each.origin: (each.key, str(each.value)) for each in found.values
    }.items():
        if origin.line and origin not in named:
            place = places.get((key, text))
            told = f"the same as {place}" if place else "another line takes precedence"
            if text.startswith(WITHOUT):
                told = f"the draft has no {text.removeprefix(WITHOUT)}"
            kept.append(Left(origin, told, understood=True))
            named.add(origin)
    lines = set[tuple[str, int]]().union(*(each.lines for each in named))
    kept += [each for each in found.lines if lines.isdisjoint(each.origin.lines)]
    yield from (each._replace(reason=shown_whole(each.reason)) for each in kept)

"""Combines what all sources yield into one draft: conflicts, what follows, and what is missing."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import Problem, Table, check_part, parse_toml
from hvdenv.drafting.commands import module_role
from hvdenv.drafting.values import (
    LOAD,
    WITHOUT,
    Found,
    Key,
    Left,
    Origin,
    Scalar,
    Value,
    Weight,
    at,
    find,
    shown_whole,
)
from hvdenv.knowledge.observables import mpis_named
from hvdenv.knowledge.patches import releases
from hvdenv.model.layers import decode_whole
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import DEFAULTS
from hvdenv.sites.modules import OFFERS, module_family

# What a missing key needs, for people.
_NEEDS = {
    "python.version": 'such as "==3.10.*"; with a Python of the modules, exactly its version',
    "horovod.version": 'such as "{0}", the latest release',
    "horovod.sha256": '"{1}" for {0}',
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


class Draft(NamedTuple):
    """A recipe as far as the sources state it.

    Attributes:
        values: in the order of the sources; items of a list one by one.
        missing: keys, and what each needs.
        left: every other line of the sources, and parts of lines.
        base: the recipe that it extends, if any.
    """

    name: str
    values: tuple[Value, ...]
    choices: tuple[Choice, ...]
    missing: tuple[tuple[Key, str], ...]
    left: tuple[Left, ...]
    base: str = ""


def combine(name: str, found: Found, base: str = "") -> Draft:
    """The draft of a recipe; ``base`` is a recipe that states what the sources do not."""
    left = [each for each in found.facts if isinstance(each, Left)]
    valid = [*_valid(found.values, left)]
    chosen, choices = _merged(valid)
    left += _default_channels(chosen)
    chosen += _inferred(chosen, {str(each.value) for each in valid if each.item})
    pending = {each.key for each in choices}
    missing = () if base else _missing(name, chosen)
    shown = [*chosen, *(each for choice in choices for each in choice.values)]
    return Draft(
        name=name,
        values=tuple(chosen),
        choices=tuple(choices),
        missing=tuple(each for each in missing if each[0] not in pending),
        left=tuple(_every_line(shown, valid, left, found)),
        base=base,
    )


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


def _valid(values: Sequence[Value], left: list[Left]) -> Iterator[Value]:
    """Values that the recipe format accepts; the others are left."""
    for each in values:
        text = isinstance(each.value, str) and each.value.removeprefix(WITHOUT)
        try:
            check_part(Recipe, nested([each._replace(value=text or each.value)]))
        except Problem as problem:
            told = f"{each.value!r} does not fit {'.'.join(each.key)}: {problem.message}"
            left.append(Left(each.origin, told, table=each.table))
        else:
            yield each


def _merged(values: Iterable[Value]) -> tuple[list[Value], list[Choice]]:
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
        # A module that has a role has alternatives, if only to load none.
        if len(best) > 1 or (best[0].role and key == LOAD):
            choices.append(Choice((*key, slot) if slot else key, tuple(best)))
        elif not str(best[0].value).startswith(WITHOUT):
            merged.append(best[0]._replace(role=""))
    return merged, choices


def _default_channels(values: Sequence[Value]) -> Iterator[Left]:
    channels = [each for each in values if each.key == at("conda.channels")]
    names = {str(each.value).rstrip("/").rpartition("/")[2] for each in channels}
    if channels and not names & _WITH_PYTHON:
        told = "conda adds its default channels to these, a recipe does not: add conda-forge"
        yield Left(channels[0].origin, told, table="conda")


_PYTHON = re.compile(r"(?i)(?:^|/)(?:cray-)?python\d?/")
# In the last part of a module's name.
_VERSION = re.compile(r"(?:^|-)v?(\d{1,6}(?:\.\d{1,6}){1,5})")
# After the name of an MPI, not of the compiler behind it: openmpi/4.0.5/gnu-10.2.0.
_MPI_VERSION = re.compile(r"(?:-|/|/.*/)v?(\d+(?:\.\d+)+)")


def _inferred(values: Sequence[Value], items: Collection[str]) -> list[Value]:
    """What follows from the values, where the sources do not state it.

    Args:
        items: of all lists; WITHOUT in front excludes one.
    """
    keys = {each.key for each in values}
    builds = at("horovod.provider") not in keys and any(
        key[:2] == ("horovod", "gpu") or key == at("horovod.version") for key in keys
    )
    found = [*_of_modules(values, builds=builds), *_of_horovod(values, items)]
    stated = {_slot(each) for each in values}
    first = {_slot(each): each for each in reversed(found)}
    return [each for slot, each in reversed(first.items()) if slot not in stated]


def _slot(value: Value) -> tuple[Key, str]:
    """What only one value can have: a key, or an item of a list."""
    return value.key, str(value.value) if value.item else ""


def _follows(key: str, value: Scalar, each: Value, why: str = "", *, item: bool = False) -> Value:
    origin = each.origin._replace(text=why) if why else each.origin
    return Value(at(key), value, origin, Weight.INFERRED, item=item)


def _of_modules(values: Sequence[Value], *, builds: bool) -> Iterator[Value]:
    provider = find(values, "python.provider")
    venv = not provider or provider.value == "venv"
    roles = {each: module_role(str(each.value)) for each in values if each.key == LOAD}
    present = "Horovod" in roles.values() and not builds
    for each, role in roles.items():
        name = str(each.value)
        version = _VERSION.search(name.rpartition("/")[2])
        yield from _mpi(each, role)
        if role == "Horovod" and present:
            yield _follows("horovod.provider", "present", each)
            yield _follows("python.provider", "modules", each)
            # Others have versions of their own (open-ce), or only the first numbers.
            if version and "horovod" in module_family(name) and version[1] in releases():
                yield _follows("horovod.version", version[1], each)
        elif role == "Python" and _PYTHON.search(name) and venv:
            yield _follows("python.from_modules", True, each)
            if version and re.fullmatch(r"3\.\d{1,2}(?:\.\d{1,2})?", version[1]):
                more = "" if version[1].count(".") == 2 else ".*"
                yield _follows("python.version", f"=={version[1]}{more}", each)
    for each in values:
        if each.key == at("modules.unload"):
            why = "it changes modules that are loaded by default"
            yield _follows("modules.purge", "no", each, why)


def _mpi(each: Value, role: str) -> Iterator[Value]:
    why = "" if role == "MPI" else "the MPI of this toolchain of EasyBuild"
    for kind in mpis_named([str(each.value)]):
        yield _follows("mpi.kind", kind, each, why)
        if kind == "cray-mpich":
            yield _follows("mpi.cxx", "CC", each, "the wrapper of Cray's compilers")
    found = OFFERS["MPI"].search(str(each.value))
    version = _MPI_VERSION.match(str(each.value)[found.end(2) :]) if found else None
    if found and version and found[2].lower() != "hpcx":  # it has versions of its own
        yield _follows("mpi.version", version[1], each)


def _of_horovod(values: Sequence[Value], items: Collection[str]) -> Iterator[Value]:
    version = find(values, "horovod.version")
    if version and version.value in releases():
        hashed = releases()[str(version.value)]
        origin = Origin("the table of Horovod's releases")
        yield Value(at("horovod.sha256"), hashed, origin, Weight.INFERRED)
    of_page = [each for each in values if each.key[0] == "horovod" and each.origin.line]
    # That of a framework only implies Horovod.
    built = max(of_page, key=lambda each: each.weight > Weight.INFERRED, default=None)
    if not built:
        return
    loads = (each for each in values if each.key == LOAD and not each.role)
    modules = (each for each in loads if module_role(str(each.value)) == "MPI")
    mpi = next(modules, None) or find(values, "mpi.kind")
    if mpi and not {"mpi", f"{WITHOUT}mpi"} & {*items}:
        yield _follows("horovod.controllers", "mpi", mpi, item=True)
    stated = find(values, "horovod.controllers")
    if (mpi or stated) and not {"gloo", f"{WITHOUT}gloo"} & {*items}:
        why = "Horovod builds Gloo unless HOROVOD_WITHOUT_GLOO=1"
        yield _follows("horovod.controllers", "gloo", built, why, item=True)


def _missing(name: str, values: Sequence[Value]) -> Iterator[tuple[Key, str]]:
    """What the loaded recipe would lack, and what a job of it needs."""
    partition, gpus = find(values, "job.partition"), find(values, "job.gpus_per_node")
    if partition and gpus:
        of_nodes = ("partitions", str(partition.value), "gpus")
        if not any(each.key == of_nodes for each in values):
            # A job states the least that a node has, not how many it has.
            yield of_nodes, f"GPUs of a node, {gpus.value} or more"
    defaults = parse_toml(read_text(DEFAULTS, OWN))
    document = nested(values)
    given = {"format": 1, "name": name, "summary": "x", "status": "documented"}
    for key, below in {**defaults, **given}.items():
        above = document.get(key, {})
        document[key] = {**below, **above} if isinstance(below, dict) else above or below
    if partition:
        document.setdefault("partitions", {}).setdefault(str(partition.value), {})
    for problem in decode_whole(document)[1]:
        path = tuple(str(part) for part in problem.path)
        if path[0] in _REQUIRED and len(path) == (2 if path[0] == "frameworks" else 1):
            path += (_REQUIRED[path[0]],)
        present = find(values, "horovod.provider")
        needs = _NEEDS.get("version" if path[0] == "frameworks" else ".".join(path))
        if path == at("horovod.version") and present:
            needs = f"the full release of the module ({present.origin.place})"
        elif path[0] == "horovod":
            needs = needs and needs.format(*[*releases().items()][-1])
        yield path, needs or problem.message


def _every_line(
    shown: Sequence[Value], valid: Sequence[Value], left: Sequence[Left], found: Found
) -> Iterator[Left]:
    """What the draft does not have as values, so that it names every line of the sources.

    A line that needs no key is left out if it has values as well.
    """
    named = {each.origin for each in shown}
    named |= {each.origin for each in left if not each.understood}
    kept = [each for each in left if not each.understood or each.table or each.origin not in named]
    named |= {each.origin for each in kept}
    places = {(each.key, str(each.value)): each.origin.place for each in shown}
    instead = {each.key: each.origin.place for each in shown if not each.item}
    # The first value of a line may only be implied, such as the scheduler by each directive.
    states = {each.origin: each for each in valid}
    for each in valid:
        text = str(each.value)
        same = places.get((each.key, text))
        if each.key in instead and not same and each.weight > Weight.OPEN:
            told = f"{'.'.join(each.key)}: {instead[each.key]} takes precedence over {text}"
            kept.append(Left(each.origin, told, table=each.table))
        elif each is not states[each.origin]:
            continue
        elif each.origin.line and each.origin not in named:
            told = f"the same as {same}" if same else "another line takes precedence"
            if text.startswith(WITHOUT):
                told = f"the draft has no {text.removeprefix(WITHOUT)}"
            kept.append(Left(each.origin, told, understood=True))
        named.add(each.origin)
    lines = set[tuple[str, int]]().union(*(each.lines for each in named))
    kept += [each for each in found.lines if lines.isdisjoint(each.origin.lines)]
    yield from dict.fromkeys(each._replace(reason=shown_whole(each.reason)) for each in kept)

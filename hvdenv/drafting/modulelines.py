"""The module commands of a page: which modules it loads, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

from hvdenv.drafting.values import Key, Origin, Read, Value, at, leave
from hvdenv.sites.modules import OFFERS, family_of

_LISTS = frozenset({
    "avail", "available", "av", "list", "spider", "show", "display", "help", "whatis", "keyword", "key", "save",
    "savelist", "is-loaded", "overview", "", "--version",
})  # fmt: skip
_ACTIONS = frozenset({
    "load", "add", "try-load", "unload", "rm", "del", "swap", "switch", "purge", "use", "unuse",
    "restore", "reset", "refresh", "update",
})  # fmt: skip
_PYTHON = re.compile(
    r"(?:.*/)?(?:python\d?|anaconda\d?|miniconda\d?|pythonanaconda|cray-python)", re.I
)
# Begins the name of a choice that is about several modules at once.
SET = "the set at line"
_CMAKE = re.compile(r"cmake\b", re.IGNORECASE)


class Load(NamedTuple):
    """One module that a page loads."""

    module: str
    origin: Origin
    weight: int


class Loads:
    """The modules of a page, by sequences that start from nothing."""

    def __init__(self) -> None:
        self.sequences: list[list[Load]] = [[]]
        self.purged = False

    def purge(self) -> None:
        self.sequences.append([])
        self.purged = False

    def add(self, load: Load) -> None:
        """A module that is loaded again begins a new sequence."""
        if any(each.module == load.module for each in self.sequences[-1]):
            self.purge()
        self.sequences[-1].append(load)

    def refuses(self, read: Value, line: int) -> bool:
        """Whether recipes cannot express it here; a purge begins a new sequence.

        After a purge, only modules of the page can have loaded what it unloads. Recipes unload
        before they load.
        """
        if read.key == at("modules.purge"):
            self.purge()
            self.purged = True
        earlier = any(each.origin.line < line for each in self.sequences[-1])
        return read.key == at("modules.unload") and self.purged and earlier


def words_of_ml(words: Sequence[str]) -> tuple[str, ...]:
    if words and (words[0] in _LISTS | _ACTIONS or words[0].startswith("--")):
        return tuple(words)
    return ("load", *words)


def module(words: Sequence[str]) -> Iterator[Read | str]:
    """The arguments of ``module``. Texts are modules to load."""
    options = len(list(takewhile(lambda word: word.startswith("-"), words)))
    plain = [word for word in words[options:] if not word.startswith("--")]
    action, *names = plain or [""]
    if action in _LISTS:
        yield leave("it changes nothing", understood=True)
    elif "module" in names:
        yield leave("several commands on one line")
    elif action in ("load", "add", "try-load"):
        for name in names:
            unloads = name.startswith("-") and action == "load"
            yield Value(at("modules.unload"), name[1:], item=True) if unloads else name
    elif action in ("unload", "rm", "del"):
        yield from (Value(at("modules.unload"), name, item=True) for name in names)
    elif action in ("swap", "switch") and len(names) == 2:
        yield Value(at("modules.swap"), {"out": names[0], "into": names[1]}, item=True)
    elif action == "reset":
        yield leave(
            'does the environment need the default modules? modules.purge = "no" keeps them'
        )
    elif action == "purge":
        forced = "--force" in words or "-f" in words
        yield Value(at("modules.purge"), "force" if forced else "yes")
    elif action == "use":
        yield from (Value(at("modules.use"), name, item=True) for name in names if name != "-a")
    else:
        yield leave(f"recipes have no key for module {action}")


@lru_cache(maxsize=10_000)
def role_of(name: str) -> str:
    """What only one module of a set can be."""
    if any(map(_PYTHON.fullmatch, name.split("/")[:-1] or [name])):
        return "Python"
    of_mpi = [what for what in ("MPI", "NCCL", "Horovod") if OFFERS[what].search(name)]
    if of_mpi:
        return of_mpi[0]
    family = family_of(name)
    return "PrgEnv" if family.startswith("prgenv-") else family


def drafted(loads: Loads, *, builds_horovod: bool) -> Iterator[Value]:
    """Items of modules.load and modules.build.

    Alternatives have a key of their own: ``modules``, ``load``, and what they are alternatives of.
    """
    different = dict[tuple[str, ...], list[Load]]()
    for sequence in loads.sequences:
        different.setdefault(tuple(load.module for load in sequence), sequence)
    every = [each for each in different.values() if each]
    # The site's Horovod is an alternative to building one.
    sites = "Horovod, which the page also builds" if builds_horovod else ""
    sequences = [
        [load for load in each if not (sites and role_of(load.module) == "Horovod")]
        for each in every
    ]
    labels = _labels([each for each in sequences if each])
    by_role: dict[str, set[str]] = {}
    for load in (load for each in sequences for load in each):
        by_role.setdefault(role_of(load.module), set()).add(load.module)
    keys = {
        load.module: _key(load, sequences, by_role, labels.get(load.module, sites))
        for each in every
        for load in each
    }
    for load in (load for each in loads.sequences for load in each):
        yield Value(keys[load.module], load.module, load.origin, load.weight, item=True)


def _labels(sequences: list[list[Load]]) -> dict[str, str]:
    """For each module the set it belongs to, if the page has sets without a common module."""
    groups: list[list[Load]] = []
    for sequence in sequences:
        names = {each.module for each in sequence}
        joined = [group for group in groups if names & {each.module for each in group}]
        groups = [group for group in groups if group not in joined]
        groups.append([*(load for group in joined for load in group), *sequence])
    if len(groups) < 2:
        return {load.module: "" for group in groups for load in group}
    return {
        load.module: f"{SET} {min(each.origin.line for each in group)}"
        for group in groups
        for load in group
    }


def _key(
    load: Load, sequences: list[list[Load]], by_role: Mapping[str, set[str]], label: str
) -> Key:
    name = load.module
    if _CMAKE.match(name.rpartition("/")[2]) or _CMAKE.match(name):
        return at("modules.build")
    if label:
        return at("modules.load", label)
    role = role_of(name)
    if len(by_role.get(role, ())) > 1 or (role == "MPI" and _only_in_one_way(name, sequences)):
        return at("modules.load", role)
    return at("modules.load")


def _only_in_one_way(name: str, sequences: list[list[Load]]) -> bool:
    roles = [{role_of(each.module): each.module for each in seq} for seq in sequences if seq]
    ways = any(
        one[role] != other[role]
        for one in roles
        for other in roles
        for role in one.keys() & other.keys()
    )
    return ways and not all(name in one.values() for one in roles)

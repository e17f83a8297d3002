"""The module commands of a page: which modules it loads, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations

from hvdenv.drafting.page import Loads, Page
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import Read, Scalar, Value, at, leave
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
_CMAKE = re.compile(r"(?:^|/)cmake\b", re.IGNORECASE)
_PROFILES = re.compile(
    r"(?:~|\$HOME)/\.\w+|.*/(?:etc/profile\.d/conda\.sh|bin/activate|\.bashrc|activate)|activate"
)
LOAD = at("modules.load")
# Begins the name of a choice that is about several modules at once.
SET = "the set at line"


def module(statement: Statement, page: Page) -> Iterator[Read]:
    """``module`` and ``ml``."""
    name, *words = statement.words
    if name == "ml" and (words[:1] or ["load"])[0] not in _LISTS | _ACTIONS:
        words = ["load", *words] if not words[0].startswith("--") else words
    action, *names = [each for each in words if not each.startswith("--")] or [""]
    while action.startswith("-") and names:
        action = names.pop(0)
    if action in _LISTS:
        yield leave("it changes nothing", understood=True)
    elif "module" in names:
        yield leave("several commands on one line")
    elif action in ("load", "add", "try-load"):
        for each in names:
            key = at("modules.unload") if each.startswith("-") else LOAD
            yield Value(key, each.removeprefix("-"), item=True)
    elif action in ("unload", "rm", "del"):
        # After a purge, only modules of the page can have loaded what it unloads.
        before = page.loads.purged and bool(page.loads.sequences[-1])
        told = "recipes unload modules before they load others"
        yield from (
            leave(told) if before else Value(at("modules.unload"), each, item=True)
            for each in names
        )
    else:
        yield from _other(action, names, words, page)


def _other(action: str, names: list[str], words: Sequence[str], page: Page) -> Iterator[Read]:
    if action in ("swap", "switch") and len(names) == 2:
        yield Value(at("modules.swap"), {"out": names[0], "into": names[1]}, item=True)
    elif action == "reset":
        page.loads.purge()
        told = 'does the environment need the default modules? modules.purge = "no" keeps them'
        yield leave(told)
    elif action == "purge":
        page.loads.purge(stated=True)
        forced = "--force" in words or "-f" in words
        yield Value(at("modules.purge"), "force" if forced else "yes")
    elif action == "use":
        yield from (Value(at("modules.use"), name, item=True) for name in names if name != "-a")
    else:
        yield leave(f"recipes have no key for module {action}")


def source(statement: Statement, _: Page) -> Iterator[Read]:
    path = (statement.words[1:2] or ("",))[0]
    if _PROFILES.fullmatch(path):
        yield leave("hvdenv activates the environment itself", understood=True)
    else:
        yield leave(
            "what does this script set? hvdenv does not run it; if the environment needs it, add it to"
            " modules.source: then every check, build and job runs it"
        )


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
    # The site's Horovod is an alternative to building one.
    sites = "Horovod, which the page also builds" if builds_horovod else ""
    sequences = [
        [each for each in sequence if not (sites and _role(each) == "Horovod")]
        for sequence in loads.sequences
    ]
    labels = _labels([each for each in sequences if each])
    by_role: dict[str, set[Scalar]] = {}
    for each in chain.from_iterable(sequences):
        by_role.setdefault(_role(each), set()).add(each.value)
    of_mpi = [{each.value for each in sequence} for sequence in _ways(sequences)]
    for each in chain.from_iterable(loads.sequences):
        role, name = _role(each), str(each.value)
        in_one_way = role == "MPI" and not all(each.value in way for way in of_mpi)
        label = labels.get(name) or (sites if role == "Horovod" else "")
        if not label and (len(by_role.get(role, ())) > 1 or in_one_way):
            label = role
        key = at("modules.build") if _CMAKE.search(name) else (*LOAD, *([label] if label else []))
        yield each._replace(key=key)


def _role(load: Value) -> str:
    return role_of(str(load.value))


def _labels(sequences: list[list[Value]]) -> dict[str, str]:
    """For each module the set it belongs to, if the page has sets without a common module."""
    groups: list[list[Value]] = []
    for sequence in sequences:
        names = {each.value for each in sequence}
        joined = [group for group in groups if names & {each.value for each in group}]
        groups = [group for group in groups if group not in joined]
        groups.append([*chain.from_iterable(joined), *sequence])
    first = [min(each.origin.line for each in group) for group in groups]
    return {
        str(load.value): f"{SET} {line}" if len(groups) > 1 else ""
        for group, line in zip(groups, first, strict=True)
        for load in group
    }


def _ways(sequences: list[list[Value]]) -> list[list[Value]]:
    """The sequences, if two of them load different modules of one role."""
    ways = [each for each in sequences if each][:100]
    roles = [{_role(each): each.value for each in way} for way in ways]
    differ = any(
        one[role] != other[role]
        for one, other in combinations(roles, 2)
        for role in one.keys() & other.keys()
    )
    return ways if differ else []

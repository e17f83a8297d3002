"""The module commands of a page: which modules it loads, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain

from hvdenv.drafting.page import Page
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import INFERRED, Left, Read, Scalar, Value, at, leave
from hvdenv.sites.modules import OFFERS, module_family

_LISTS = frozenset({
    "avail", "available", "av", "list", "spider", "show", "display", "help", "whatis", "keyword", "key", "save",
    "savelist", "is-loaded", "overview", "", "--version",
})  # fmt: skip
_PYTHON = re.compile(
    r"(?:.*/)?(?:python\d?|anaconda\d?|miniconda\d?|pythonanaconda|cray-python)", re.I
)
_CMAKE = re.compile(r"(?:^|/)cmake\b", re.IGNORECASE)
_PROFILES = re.compile(
    r"(?:~|\$HOME)/\.\w+|.*/(?:etc/profile\.d/conda\.sh|bin/activate|\.bashrc|activate)|activate"
)
LOAD, _UNLOAD = at("modules.load"), at("modules.unload")
# Begins the name of a choice that is about several modules at once.
SET = "the set at line"


def module(statement: Statement, page: Page) -> Iterator[Read]:
    """``module`` and ``ml``."""
    name, *words = statement.words
    if name == "ml" and words and words[0] not in _KNOWN and not words[0].startswith("--"):
        words = ["load", *words]
    action, *names = [each for each in words if not each.startswith("--")] or [""]
    while action.startswith("-") and names:
        action = names.pop(0)
    if action in _LISTS:
        yield leave("it changes nothing", understood=True)
    elif "module" in names:
        yield leave("several commands on one line")
    elif action in _ACTIONS:
        forced = bool({"--force", "-f"} & {*words})
        yield from _ACTIONS[action](names, page, forced)
    else:
        yield leave(f"recipes have no key for module {action}")


def _load(names: list[str], _: Page, __: bool) -> Iterator[Read]:
    for each in names:
        yield Value(_UNLOAD if each.startswith("-") else LOAD, each.removeprefix("-"), item=True)


def _unload(names: list[str], page: Page, _: bool) -> Iterator[Read]:
    for each in names:
        if load := page.remove_module(each):
            yield Left(load.origin, f"the page unloads {load.value} again")
            yield leave(f"it unloads {load.value}, which the page loads", understood=True)
        # After a purge, only modules of the page can have loaded what it unloads.
        elif page.purged and page.modules[-1]:
            yield leave("recipes unload modules before they load others")
        else:
            yield Value(_UNLOAD, each, item=True)


def _swap(names: list[str], page: Page, _: bool) -> Iterator[Read]:
    """Of a module that the page loads, or of one that is loaded by default."""
    if len(names) not in (1, 2):
        yield leave("modules.swap needs two modules")
        return
    # With one name, another version of the same module goes.
    out, into = names[0].rpartition("/")[0] if len(names) == 1 else names[0], names[-1]
    if load := page.remove_module(out, swap=True):
        yield Left(load.origin, f"the page loads {into} in place of {load.value}")
        yield Value(LOAD, into, item=True)
    elif out:
        yield Value(at("modules.swap"), {"out": out, "into": into}, item=True)
    else:
        yield leave("modules.swap needs two modules")


def _reset(_: list[str], page: Page, __: bool) -> Iterator[Read]:
    page.start_modules()
    yield leave('does the environment need the default modules? modules.purge = "no" keeps them')


def _purge(_: list[str], page: Page, forced: bool) -> Iterator[Read]:
    page.start_modules(stated=True)
    yield Value(at("modules.purge"), "force" if forced else "yes")


def _use(names: list[str], _: Page, __: bool) -> Iterator[Read]:
    yield from (Value(at("modules.use"), each, item=True) for each in names if each != "-a")


_ACTIONS: dict[str, Callable[[list[str], Page, bool], Iterator[Read]]] = {
    **dict.fromkeys(("load", "add", "try-load"), _load),
    **dict.fromkeys(("unload", "rm", "del"), _unload),
    **dict.fromkeys(("swap", "switch"), _swap),
    "reset": _reset,
    "purge": _purge,
    "use": _use,
}
_KNOWN = _LISTS | _ACTIONS.keys() | {"unuse", "restore", "refresh", "update"}


def source(statement: Statement, _: Page) -> Iterator[Read]:
    path = (statement.words[1:2] or ("",))[0]
    if path == "activate":  # of conda
        yield Value(at("python.provider"), "conda", weight=INFERRED)
    if _PROFILES.fullmatch(path):
        yield leave("hvdenv activates the environment itself", understood=True)
    else:
        yield leave(
            "what does this script set? hvdenv does not run it; if the environment needs it, add it to"
            " modules.source: then every check, build and job runs it"
        )


@lru_cache(maxsize=10_000)
def module_role(name: str) -> str:
    """What only one module of a set can be."""
    if any(map(_PYTHON.fullmatch, name.split("/")[:-1] or [name])):
        return "Python"
    if offered := [what for what in ("MPI", "NCCL", "Horovod") if OFFERS[what].search(name)]:
        return offered[0]
    family = module_family(name)
    return "PrgEnv" if family.startswith("prgenv-") else family


def drafted(page: Page) -> Iterator[Value]:
    """Items of modules.load and modules.build. Alternatives have a role."""
    sets = _sets(page.modules)
    names: dict[str, set[Scalar]] = {}
    for each in chain.from_iterable(page.modules):
        names.setdefault(module_role(str(each.value)), set()).add(each.value)
    for each in chain.from_iterable(page.modules):
        name = str(each.value)
        role = module_role(name)
        if _CMAKE.search(name):
            yield each._replace(key=at("modules.build"))
        elif role == "Horovod" and page.builds_horovod:
            yield each._replace(role="Horovod, which the page also builds")
        else:
            yield each._replace(role=sets.get(name) or (role if len(names[role]) > 1 else ""))


def _sets(sequences: list[list[Value]]) -> dict[str, str]:
    """For each module the set it belongs to, if the page has sets without a common module."""
    groups: list[list[Value]] = []
    for sequence in filter(None, sequences):
        names = {each.value for each in sequence}
        joined = [group for group in groups if names & {each.value for each in group}]
        groups = [group for group in groups if group not in joined]
        groups.append([*chain.from_iterable(joined), *sequence])
    return {
        str(load.value): f"{SET} {min(each.origin.line for each in group)}"
        for group in (groups if len(groups) > 1 else [])
        for load in group
    }

"""The commands of a page: which program each calls, and what it means in a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from hvdenv.drafting import jobs, packages
from hvdenv.drafting.options import meaning_of, program_kind, tables
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import BUILD, LOAD, Fact, Left, Value, Weight, at, leave
from hvdenv.sites.modules import OFFERS, module_family

_PYTHON = re.compile(
    r"(?:.*/)?(?:python\d?|anaconda\d?|miniconda\d?|pythonanaconda|cray-python)", re.I
)
_CMAKE = re.compile(r"(?:^|/)cmake\b", re.IGNORECASE)
_PROFILES = re.compile(
    r"(?:~|\$HOME)/\.\w+|.*/(?:etc/profile\.d/conda\.sh|bin/activate|\.bashrc|activate)|activate"
)
_UNLOAD = at("modules.unload")
# What takes the place of an unloaded module.
_SWAP = "swap"
# A script starts from nothing, and so does what follows a purge.
START = Value(at("modules.start"), "")


def module(statement: Statement) -> Iterator[Fact]:
    """``module`` and ``ml``."""
    name, *words = statement.words
    known = words and (words[0].startswith("--") or words[0] in tables()["module"])
    if name == "ml" and words and not known:
        words = ["load", *words]
    action, *names = [each for each in words if not each.startswith("-")] or ["list"]
    if name == "ml" and action == "load":
        unloaded = [each[1:] for each in words if re.match(r"-\w", each)]
        yield from (Value(_UNLOAD, each, item=True) for each in unloaded)
    meaning = meaning_of(action, "module") or f"recipes have no key for module {action}"
    if "module" in names:
        yield leave("several commands on one line")
    elif meaning == "purge":
        yield START
        forced = {"--force", "-f"} & {*words}
        yield Value(at("modules.purge"), "force" if forced else "yes")
    elif meaning == "reset":
        yield START
        yield leave(
            'does the environment need the default modules? modules.purge = "no" keeps them'
        )
    elif meaning == "swap" and names:
        # With one name, another version of the same module goes.
        out = names[0] if len(names) == 2 else names[0].rpartition("/")[0]
        yield Value(_UNLOAD, out, item=True, role=_SWAP)
        yield Value(LOAD, names[-1], item=True)
    elif " " not in meaning:
        yield from (Value(at("modules", meaning), each, item=True) for each in names)
    else:
        yield leave(meaning, understood=meaning == "it changes nothing")


def source(statement: Statement) -> Iterator[Fact]:
    path = (statement.words[1:2] or ("",))[0]
    if path == "activate":  # of conda
        yield Value(at("python.provider"), "conda", weight=Weight.INFERRED)
    if _PROFILES.fullmatch(path):
        yield leave("hvdenv activates the environment itself", understood=True)
    else:
        yield leave(
            "what does this script set? hvdenv does not run it; if the environment needs it, add it to"
            " modules.source: then every check, build and job runs it"
        )


def with_modules(facts: Iterable[Fact]) -> list[Fact]:
    """The facts of a page with the modules that are loaded in the end; alternatives have a role."""
    sequences, others = [list[Value]()], list[Fact]()
    # Where the module that a command unloads was loaded.
    freed, place = Value(_UNLOAD, ""), 0
    for each in facts:
        loads = sequences[-1]
        if isinstance(each, Left) or each.key not in (LOAD, _UNLOAD, START.key):
            others.append(each)
        elif each.key == START.key:
            sequences.append([])
        elif each.key == LOAD:
            loads.insert(place if freed.origin == each.origin else len(loads), each)
        # With or without its version.
        elif gone := [load for load in loads if f"{load.value}/".startswith(f"{each.value}/")]:
            freed, place = each, loads.index(gone[0])
            loads[:] = [load for load in loads if load not in gone]
            for load in gone:
                told = f"{each.origin.place} unloads {load.value} again"
                others.append(Left(load.origin, told, table="modules"))
            others.append(Left(each.origin, f"it unloads {gone[-1].value}", understood=True))
        elif each.role == _SWAP or not loads:
            others.append(each._replace(role=""))
        else:
            told = "recipes unload modules before they load others"
            others.append(Left(each.origin, told, table="modules"))
    kept = [each for each in others if each.key != BUILD]
    return [*_loaded(sequences, builds=len(kept) < len(others)), *kept]


def _loaded(sequences: Sequence[Sequence[Value]], *, builds: bool) -> Iterator[Value]:
    """Items of modules.load and modules.build."""
    differ, names = _differ(sequences), dict[str, set[str]]()
    for each in chain.from_iterable(sequences):
        names.setdefault(module_role(str(each.value)), set()).add(str(each.value))
    for each in chain.from_iterable(sequences):
        name = str(each.value)
        role = module_role(name)
        if _CMAKE.search(name):
            yield each._replace(key=at("modules.build"))
        elif role == "Horovod" and builds:
            yield each._replace(role="Horovod, which the page also builds")
        elif differ:  # merged, they would be none of the page's lists
            yield each._replace(role="one list of several", weight=Weight.COMMAND)
        else:
            yield each._replace(role=role if len(names[role]) > 1 else "")


def _differ(sequences: Iterable[Sequence[Value]]) -> bool:
    """Whether a list has no module in common with those before it."""
    known = set[str]()
    for names in ({str(load.value) for load in each} for each in sequences if each):
        if known and known.isdisjoint(names):
            return True
        known |= names
    return False


@lru_cache(maxsize=10_000)
def module_role(name: str) -> str:
    """What only one module of a set can be."""
    if any(map(_PYTHON.fullmatch, name.split("/")[:-1] or [name])):
        return "Python"
    if offered := [what for what in ("MPI", "NCCL", "Horovod") if OFFERS[what].search(name)]:
        return offered[0]
    family = module_family(name)
    return "PrgEnv" if family.startswith("prgenv-") else family


def _export(statement: Statement) -> Iterator[Fact]:
    if not statement.variables:
        yield leave("the page sets its value elsewhere", understood=True)


def _without_key(statement: Statement) -> Iterator[Fact]:
    told = program_kind(statement.program)
    yield leave(told, understood=not told.endswith("?"))


# Kinds of programs, the tables of recipes that they are about, and what a command of them means.
_PROGRAMS: dict[str, tuple[str, Callable[[Statement], Iterator[Fact]]]] = {
    "launch": ("launch", jobs.launch),
    "request": ("job", jobs.request),
    "module": ("modules", module),
    "source": ("modules", source),
    "conda": ("conda", packages.conda),
    "pip": ("packages", packages.pip),
    "python": ("packages", packages.python),
    "export": ("environment.run", _export),
}


def table_of(statement: Statement) -> str:
    """The table of the recipe that a command is about."""
    if statement.directive or not statement.words:
        return "job" if statement.directive else "environment.run"
    return _PROGRAMS.get(program_kind(statement.program), ("", _without_key))[0]


def meaning(statement: Statement) -> Iterator[Fact]:
    """What a command means, without its variables."""
    if kind := program_kind(statement.program):
        yield from _PROGRAMS.get(kind, ("", _without_key))[1](statement)
    elif statement.program.strip("."):
        yield leave(f"hvdenv does not know {statement.program}")

"""The commands of a page: which program each calls, and what it means in a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, get_args

from hvdenv.drafting import jobs, packages
from hvdenv.drafting.options import meaning_of, tables
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import BUILD, LOAD, Fact, Left, Value, Weight, at, leave
from hvdenv.model.cluster import LauncherName
from hvdenv.sites.modules import OFFERS, module_family

_PYTHON = re.compile(
    r"(?:.*/)?(?:python\d?|anaconda\d?|miniconda\d?|pythonanaconda|cray-python)", re.I
)
_CMAKE = re.compile(r"(?:^|/)cmake\b", re.IGNORECASE)
_PROFILES = re.compile(
    r"(?:~|\$HOME)/\.\w+|.*/(?:etc/profile\.d/conda\.sh|bin/activate|\.bashrc|activate)|activate"
)
UNLOAD, SWAP = at("modules.unload"), at("modules.swap")
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
        yield from (Value(UNLOAD, each, item=True) for each in unloaded)
    meaning = meaning_of(action, "module")
    if "module" in names:
        yield leave("several commands on one line")
    elif meaning in ("purge", "reset"):
        yield START
        forced = {"--force", "-f"} & {*words}
        told = 'does the environment need the default modules? modules.purge = "no" keeps them'
        purge = Value(at("modules.purge"), "force" if forced else "yes")
        yield purge if meaning == "purge" else leave(told)
    elif meaning == "swap":
        # With one name, another version of the same module goes.
        out = names[0] if len(names) == 2 else "".join(names).rpartition("/")[0]
        swap = Value(SWAP, {"out": out, "into": names[-1]}, item=True) if out else None
        yield swap or leave("a swap needs two modules")
    elif meaning in ("load", "unload", "use"):
        yield from (Value(at("modules", meaning), each, item=True) for each in names)
    else:
        needless = meaning == "it changes nothing"
        told = meaning if needless else f"recipes have no key for module {action}"
        yield leave(told, understood=needless)


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
    for each in facts:
        if isinstance(each, Left) or each.key not in (LOAD, UNLOAD, SWAP, START.key):
            others.append(each)
        elif each.key == START.key:
            sequences.append([])
        elif each.key == LOAD:
            sequences[-1].append(each)
        else:
            others += _take_out(each, sequences[-1])
    kept = [each for each in others if each.key != BUILD]
    return [*_loaded(sequences, builds=len(kept) < len(others)), *kept]


def _take_out(command: Value, loads: list[Value]) -> Iterator[Fact]:
    """Unload or swap a module that the page loads, or one that is loaded by default."""
    swap = command.value if isinstance(command.value, dict) else {}
    out, into = swap.get("out", command.value), swap.get("into", "")
    # With or without its version.
    gone = [each for each in loads if f"{each.value}/".startswith(f"{out}/")]
    if not gone and (into or not loads):
        yield command._replace(key=UNLOAD, value=out)
        loads += [command._replace(key=LOAD, value=into)] if into else []
        return
    if not gone:
        told = "recipes unload modules before they load others"
        yield Left(command.origin, told, table="modules")
        return
    name, place = gone[-1].value, loads.index(gone[0])
    told = f"the page loads {into} in place of {name}" if into else f"the page unloads {name} again"
    yield from (Left(each.origin, told, table="modules") for each in gone)
    loads[:] = [each for each in loads if each not in gone]
    if into:
        loads.insert(place, command._replace(key=LOAD, value=into))
    else:
        yield Left(command.origin, f"it unloads {name}, which the page loads", understood=True)


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
    told = meaning_of(statement.program, "programs")
    yield leave(told, understood=not told.endswith("?"))


class Program(NamedTuple):
    """A program of pages.

    Attributes:
        table: of the recipe that it is about.
        read: what a command of it means.
    """

    table: str
    read: Callable[[Statement], Iterator[Fact]]


_PROGRAMS = {
    "launch": Program("launch", jobs.launch),
    "request": Program("job", jobs.request),
    "module": Program("modules", module),
    "source": Program("modules", source),
    "conda": Program("conda", packages.conda),
    "pip": Program("packages", packages.pip),
    "python": Program("packages", packages.python),
    "export": Program("environment.run", _export),
}
_VERSIONED = re.compile(r"(?:.*/)?(python|pip)[\d.]*")


def find_program(name: str) -> Program | None:
    found = _VERSIONED.fullmatch(name)
    meaning = meaning_of(found[1] if found else name, "programs")
    if not meaning and name in get_args(LauncherName):
        meaning = "launch"
    return _PROGRAMS.get(meaning, Program("", _without_key)) if meaning else None


def is_known(name: str) -> bool:
    return name != "." and find_program(name) is not None


def table_of(statement: Statement) -> str:
    """The table of the recipe that a command is about."""
    if statement.directive:
        return "job"
    program = find_program(statement.program)
    return program.table if program else "" if statement.words else "environment.run"

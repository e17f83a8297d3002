"""The module commands of a page: which modules it loads in the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from hvdenv.drafting.options import meaning_of, tables
from hvdenv.drafting.shell import Page, Statement
from hvdenv.drafting.values import BUILD, LOAD, Fact, Left, Value, Weight, at, leave
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


def module(statement: Statement, _: Page) -> Iterator[Fact]:
    """``module`` and ``ml``."""
    name, *words = statement.words
    known = words and (words[0].startswith("--") or words[0] in tables()["module"])
    if name == "ml" and words and not known:
        words = ["load", *words]
    action, *names = [each for each in words if not each.startswith("--")] or ["list"]
    while action.startswith("-") and names:
        action = names.pop(0)
    meaning = meaning_of(action, "module")
    if meaning == "it changes nothing":
        yield leave(meaning, understood=True)
    elif "module" in names:
        yield leave("several commands on one line")
    elif meaning in ("purge", "reset"):
        yield START._replace(value="purged" if meaning == "purge" else "")
        forced = {"--force", "-f"} & {*words}
        told = 'does the environment need the default modules? modules.purge = "no" keeps them'
        purge = Value(at("modules.purge"), "force" if forced else "yes")
        yield purge if meaning == "purge" else leave(told)
    elif meaning and " " not in meaning:
        yield from _changes(meaning, names)
    else:
        yield leave(f"recipes have no key for module {action}")


def _changes(meaning: str, names: Sequence[str]) -> Iterator[Fact]:
    if meaning == "swap":
        # With one name, another version of the same module goes.
        out = names[0] if len(names) == 2 else "".join(names).rpartition("/")[0]
        swap = Value(SWAP, {"out": out, "into": names[-1]}, item=True) if out else None
        yield swap or leave("modules.swap needs two modules")
        return
    for each in names:
        if meaning == "use":
            yield from [Value(at("modules.use"), each, item=True)] if each != "-a" else []
        elif each.startswith("-"):
            yield Value(UNLOAD, each[1:], item=True, role="of the site")
        else:
            yield Value(UNLOAD if meaning == "unload" else LOAD, each, item=True)


def source(statement: Statement, _: Page) -> Iterator[Fact]:
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
    sequences, others, purged = [list[Value]()], list[Fact](), False
    for each in facts:
        if isinstance(each, Left) or each.key not in (LOAD, UNLOAD, SWAP, START.key):
            others.append(each)
        elif each.key == START.key:
            sequences.append([])
            purged = bool(each.value)
        elif each.key == LOAD:
            sequences[-1].append(each)
        elif each.role:  # only loaded by default
            others.append(each._replace(role=""))
        else:
            others += _take_out(each, sequences[-1], purged=purged)
    kept = [each for each in others if each.key != BUILD]
    return [*_loaded(sequences, builds=len(kept) < len(others)), *kept]


def _take_out(command: Value, loads: list[Value], *, purged: bool) -> Iterator[Fact]:
    """Unload or swap a module that the page loads, or one that is loaded by default."""
    swap = command.value if isinstance(command.value, dict) else {}
    out, into = swap.get("out", command.value), swap.get("into", "")
    # With or without its version.
    gone = [each for each in loads if f"{each.value}/".startswith(f"{out}/")]
    if not gone:
        # Only modules of the page can be loaded after a purge.
        told = "recipes unload modules before they load others"
        late = purged and loads and not into
        yield Left(command.origin, told, table="modules") if late else command
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

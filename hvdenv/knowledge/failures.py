"""Known failures: events that logs show, and their causes, as data in hvdenv/knowledge/failures.

- ``wordings/*.toml``: how programs print events; a new wording is one line.
- ``events.toml``: what each event means when nothing more is known.
- ``causes/*.toml``: what is known where an event has certain slots, or the log a certain context.
- ``families.toml``: which names (headers, libraries, packages, symbols) are installed together.
- ``texts.toml``: versions, contexts and lines that every log is searched for.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from hvdenv.reading import OWN, read_text
from hvdenv.schema import Pattern, decode, parse_toml

FOLDER = Path(__file__).parent / "failures"

Kind = Literal["cause", "symptom", "consequence", "warning"]
# How certain a source is, as in rules, and the source.
Source = Annotated[
    str, Pattern(r"(run|source|documented|reported|general): \S.*", '"reported: URL" or the like')
]
# What a name is the name of; a library is missing for a program or, "linked", for the linker.
Member = Literal["headers", "libraries", "linked", "packages", "symbols", "modules"]


class Family(NamedTuple):
    """What is installed together. A name that ends with ``*`` stands for all that begin so.

    Attributes:
        id, about: its short name, and what it is called.
        headers: as in ``#include``.
        libraries: names without ``lib`` in front and ``.so`` behind.
        packages: as CMake and pkg-config call it.
        symbols: functions that its libraries define.
        modules: of Python.
        build: how to make it available to compilers and linkers, besides installing it.
        run: how to make its libraries available to programs, besides installing them.
        link: what adds its libraries to the linker's command line.
        apt, dnf, conda, pip: names of its packages for building; the first two need an administrator.
        apt_run, dnf_run, conda_run, pip_run: and for programs, where they differ.
    """

    id: str
    about: str
    headers: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    link: str = ""
    apt: str = ""
    dnf: str = ""
    conda: str = ""
    pip: str = ""
    apt_run: str = ""
    dnf_run: str = ""
    conda_run: str = ""
    pip_run: str = ""

    def has(self, member: Member, name: str) -> bool:
        """Whether a name is one of its own; that of a package in any case of letters."""
        names: tuple[str, ...] = getattr(self, "libraries" if member == "linked" else member)
        if member in ("libraries", "linked"):
            name = name.rpartition("/")[2].removeprefix("lib").partition(".so")[0]
            name = name.partition(".a")[0]
        if member == "packages":
            name, names = name.lower(), tuple(each.lower() for each in names)
        return any(fnmatchcase(name, each) for each in names)

    def remedies(self, member: Member, contexts: frozenset[str]) -> list[str]:
        """How to make a name of it available, first by the package manager of the log's system."""
        running = member in ("libraries", "modules")
        linking = f"link it after the objects: add {self.link} to LIBS or target_link_libraries"
        first = [linking] if member == "symbols" and self.link else []
        packages = {
            system: (getattr(self, f"{system}_run") if running else "") or getattr(self, system)
            for system in _INSTALL
        }
        known = [system for system in _INSTALL if packages[system]]
        known.sort(key=lambda system: _SYSTEMS.get(system) not in contexts)
        return [
            *first,
            *(self.run if running else self.build),
            *(_INSTALL[system].format(packages[system]) for system in known),
        ]


_SYSTEMS = {"apt": "debian", "dnf": "rhel", "conda": "conda"}
_INSTALL = {
    "pip": "`pip install {}`",
    "apt": "`sudo apt install {}` (Debian and Ubuntu; an administrator)",
    "dnf": "`sudo dnf install {}` (RHEL; an administrator)",
    "conda": "`conda install -c conda-forge {}` (in a conda environment)",
}


class EventType(NamedTuple):
    """What an event means where no cause is known that fits better.

    Attributes:
        name: as wordings and causes call it.
        says: what happened; ``{slot}`` stands for a slot.
        remedies: what to do, the most likely first.
        kind: a ``cause`` says why; a ``symptom`` only where it stopped; a ``consequence`` follows
            from an earlier event; a ``warning`` also occurs in successful runs.
        member: its slot ``name`` is such a name; if a family has it, this is a cause.
        steps_back: a cause only if no other one is found, as all those of a member.
        known: the cause if a family has the name; ``{family}`` stands for what that is called.
        most: how many lines to keep of each wording.
        general: an event of a higher number counts only where nothing below it is found.
        inside: remedies that come first in a context.
        rules: globs for ids of rules of `check`; if one of them applies to the versions that the
            log names, it is the cause.
        of_others: as in Cause.
        kill: reports that a process was killed, which launchers and schedulers also do to the
            remaining ranks when one has ended.
    """

    name: str
    says: str
    remedies: tuple[str, ...] = ()
    kind: Kind = "symptom"
    member: Member | None = None
    steps_back: bool = False
    known: str = ""
    most: int = 3
    general: int = 0
    inside: dict[str, str | tuple[str, ...]] = {}
    rules: tuple[str, ...] = ()
    of_others: bool = False
    kill: bool = False


class Cause(NamedTuple):
    """Why an event happened, where more is known than its type says.

    Attributes:
        id: stable name.
        says, remedies, inside, kind, general: as in EventType, instead of the type's.
        event: the types of events that it explains.
        texts: wordings that only this cause has.
        when: conditions on slots; all must hold, with `texts` too. A glob, ``!glob``, ``@family``,
            or ``!= {slot}`` for another slot; of several, one must hold. A slot that the log does
            not fill is empty.
        context: contexts that the log must have, or with ``!`` must not.
        needs, unless: wordings of which the log must contain one, or none.
        rules: ids of rules of `check` that find it before a build.
        of_others: no rank has failed by itself: the one that prints it waited for others, or all were ended.
        source: how certain it is, as in rules, and what says so.
    """

    id: str
    says: str
    source: Source
    remedies: tuple[str, ...] = ()
    event: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    when: dict[str, str | tuple[str, ...]] = {}
    context: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    kind: Kind = "cause"
    rules: tuple[str, ...] = ()
    inside: dict[str, str | tuple[str, ...]] = {}
    general: int = 0
    of_others: bool = False
    theme: str = ""


class Named(NamedTuple):
    """Wordings of a context or of a fact that a log names; a path begins at its first slash."""

    name: str
    wordings: tuple[str, ...]
    fact: str = ""
    is_path: bool = False


class Texts(NamedTuple):
    """What every log is searched for, besides events."""

    mention: tuple[Named, ...]
    context: tuple[Named, ...]
    errors: tuple[str, ...]
    hints: tuple[str, ...]
    crashes: tuple[str, ...]
    advice: tuple[str, ...]
    no_advice: tuple[str, ...]


class _Families(NamedTuple):
    """Families, and single libraries of systems, which come after them."""

    family: tuple[Family, ...]
    library: tuple[Family, ...] = ()


class _Events(NamedTuple):
    event: tuple[EventType, ...]


class _Causes(NamedTuple):
    about: str
    cause: tuple[Cause, ...]


class _Wordings(NamedTuple):
    about: str
    wordings: dict[str, tuple[str, ...]]


class Failures(NamedTuple):
    """All that is known.

    Attributes:
        wordings: by type of event, in the order of files.
        causes: specific ones before general ones.
        families: specific ones before general ones.
    """

    events: dict[str, EventType]
    wordings: dict[str, tuple[str, ...]]
    causes: tuple[Cause, ...]
    families: tuple[Family, ...]
    texts: Texts
    themes: dict[str, str]

    def family_of(self, member: Member, name: str) -> Family | None:
        """The first family that has a name."""
        return next((each for each in self.families if each.has(member, name)), None)

    def named(self) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """Wordings with the name of the event type or cause, and what it says."""
        for kind in self.events.values():
            yield self.wordings.get(kind.name, ()), kind.name, kind.says
        yield from ((each.texts, each.id, each.says) for each in self.causes)


@cache
def all_failures() -> Failures:
    """Read the data."""
    events = decode(_Events, _table(FOLDER / "events.toml")).event
    families = decode(_Families, _table(FOLDER / "families.toml"))
    wordings: dict[str, tuple[str, ...]] = {}
    for path in sorted((FOLDER / "wordings").glob("*.toml")):
        for name, texts in decode(_Wordings, _table(path)).wordings.items():
            wordings[name] = (*wordings.get(name, ()), *texts)
    files = {
        path.stem: decode(_Causes, _table(path))
        for path in sorted((FOLDER / "causes").glob("*.toml"))
    }
    return Failures(
        events={each.name: each for each in events},
        wordings=wordings,
        causes=tuple(
            each._replace(theme=theme) for theme, file in files.items() for each in file.cause
        ),
        families=(*families.family, *families.library),
        texts=decode(Texts, _table(FOLDER / "texts.toml")),
        themes={theme: file.about for theme, file in files.items()},
    )


def _table(path: Path) -> dict[str, object]:
    return parse_toml(read_text(path, OWN))

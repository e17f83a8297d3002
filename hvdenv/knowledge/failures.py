"""Known failures: events that logs show, and their causes, as data in hvdenv/knowledge/failures.

- ``wordings/*.toml``: how programs print events; a new wording is one line.
- ``events.toml``: what each event means when nothing more is known.
- ``causes/*.toml``: what is known where an event has certain slots, or the log a certain context.
- ``families.toml``: which names (headers, libraries, packages, symbols) are installed together.
- ``texts.toml``: versions, contexts and lines that every log is searched for.

A wording is how a program prints an event, as a line with slots.
``fatal error: {name}: No such file`` has a slot ``name``. In a wording

- ``{name}`` is a word without spaces and quotes, ``{name:text}`` any text up to what follows,
  ``{name:number}`` and ``{name:version}`` what they say, and ``{name:a|b}`` one of these;
- without a name, ``{:number}`` and ``{:a|b}`` match without being kept, and one of several texts may be
  empty; ``{}`` is any text or none;
- ``\\n`` is the end of a line; a space stands for several, but what the search looks for has one where
  a wording has one, so write two where a program may print more; ``'`` for any quotation mark;
- ``^`` and ``$`` at the ends are those of a line. Upper and lower case are the same;
- ``mpirun``, ``orted``, ``ORTE`` and ``slurmstepd`` stand for the names of other releases, too.

All of them are bounded, so no log makes a search slow.
"""

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import Pattern, decode, parse_toml

FOLDER = Path(__file__).parent / "failures"
T = TypeVar("T")

_OF_WORDS = r"""^\s'"`,;()<>"""
_SHAPES = {
    "": rf"[{_OF_WORDS}]{{1,300}}",
    "any": r"[^\n]{0,200}?",
    "text": r"[^\n]{1,300}?",
    "path": r"""[^\n'"`:]{1,300}?""",
    "number": r"\d{1,15}",
    "version": r"v?\d[\w.+]{0,40}",
}
_OF_ANY_TEXT = ("any", "text", "path")
_SPECIAL = re.compile(r"\{(?P<name>\w*)(?::(?P<shape>[^{}]+))?\}|\\n|'| +")
# Open MPI 5 and its launcher PRRTE have other names for programs of Open MPI 4, and Slurm 23 and
# newer writes `slurmstepd-HOST`.
_NAMES = {
    "ORTE": "(?:ORTE|PRRTE|PRTE)",
    "orted": "(?:orted|prted)",
    "mpirun": "(?:mpirun|prterun|orterun|mpiexec)",
    "slurmstepd": r"slurmstepd(?:-[\w.-]{1,64})?",
}
_NAME = re.compile(r"\b(?:ORTE|orted|mpirun|slurmstepd)\b")
# What may be printed in several ways, so that no anchor contains it.
_VARYING = re.compile(r"\{[^{}]*\}|  +|\b(?:ORTE|orted|mpirun)\b|(?<=slurmstepd)(?=:)")
_LOWER = bytes(
    ord("'") if chr(n) in '"`' else ord(chr(n).lower()) if n < 128 else n for n in range(256)
)
_CURLY = tuple((each.encode(), b"'") for each in "\u2018\u2019\u201c\u201d\xb4")
# Texts that are searched for: shorter ones stand in too many lines.
SHORTEST = 4


def straight(text: bytes) -> bytes:
    """The text with straight quotation marks for curly ones."""
    if b"\xe2\x80" in text or b"\xc2\xb4" in text:
        for curly, plain in _CURLY:
            text = text.replace(curly, plain)
    return text


def folded(text: bytes) -> bytes:
    """The text as anchors are compared: of the same length, in lower case, with one sort of quotation mark."""
    return text.translate(_LOWER)


@cache
def anchor(wording: str) -> bytes:
    """The longest text of a wording's first line, folded; a line without it is not looked at."""
    first = wording.split("\\n")[0].removeprefix("^").removesuffix("$")
    return folded(max(map(str.strip, _VARYING.split(first)), key=len).encode())


@cache
def pattern(wording: str) -> re.Pattern[str]:
    """The pattern of a wording, for lines in which a space stands for several.

    From one slot of any text to the next, the first place where the wording goes on is taken for
    good: `(?=(...))` and a reference to it never try another one. Otherwise, a crafted line would
    be divided among the slots in every way.
    """
    inner = wording.removeprefix("^").removesuffix("$")
    parts = [""]
    at = 0
    for special in _SPECIAL.finditer(inner):
        parts[-1] += _literal(inner[at : special.start()])
        if _shape(special) in _OF_ANY_TEXT:
            parts.append("")
        parts[-1] += _part(special, last=special.end() == len(inner))
        at = special.end()
    parts[-1] += _literal(inner[at:])
    start, end = "^ ?" if wording[0] == "^" else "", " ?$" if wording[-1] == "$" else ""
    if re.match(r"\{\w*\}", inner):
        start += f"(?<![{_OF_WORDS}])"  # a word is not tried from each of its characters
    first, *others = parts
    taken = [f"(?=(?P<_{n}>{each}))(?P=_{n})" for n, each in enumerate(others)]
    return re.compile(start + first + "".join(taken) + end, re.IGNORECASE | re.MULTILINE)


def _literal(text: str) -> str:
    return _NAME.sub(lambda name: _NAMES[name[0]], re.escape(text))


def _shape(special: re.Match[str]) -> str | None:
    """The shape of a slot; None for what is no slot."""
    if special["name"] is None:
        return None
    return special["shape"] or ("" if special["name"] else "any")


def _part(special: re.Match[str], *, last: bool) -> str:
    """The pattern of one special part; at the end of a wording, as much as there is."""
    shape = _shape(special)
    if shape is None:
        return {"'": "['\"`]", "\\n": r" ?\n ?"}.get(special[0], " ")
    if shape in _SHAPES:
        one_of = _SHAPES[shape].removesuffix("?" if last else "")
    else:
        one_of = "|".join(map(_literal, shape.split("|")))
    return f"(?P<{special['name']}>{one_of})" if special["name"] else f"(?:{one_of})"


Kind = Literal["cause", "symptom", "consequence", "warning"]
# How certain a source is, as in rules, and the source.
Source = Annotated[
    str, Pattern(r"(run|source|documented|reported|general): \S.*", '"reported: URL" or the like')
]
# What a name is the name of; a library is missing for a program or, "linked", for the linker.
Member = Literal["headers", "libraries", "linked", "packages", "symbols", "modules"]
# Package managers, with the context of a log in which each comes first, and its command.
System = Literal["pip", "apt", "dnf", "conda"]
_SYSTEMS: dict[System, tuple[str, str]] = {
    "pip": ("", "`pip install {}`"),
    "apt": ("debian", "`sudo apt install {}` (Debian and Ubuntu; an administrator)"),
    "dnf": ("rhel", "`sudo dnf install {}` (RHEL; an administrator)"),
    "conda": ("conda", "`conda install -c conda-forge {}` (in a conda environment)"),
}


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
        install: names of its packages for building.
        install_run: and for programs, where they differ.
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
    install: dict[System, str] = {}
    install_run: dict[System, str] = {}

    def has(self, member: Member, name: str) -> bool:
        """Whether a name is one of its own; that of a package in any case of letters."""
        names: tuple[str, ...] = getattr(self, "libraries" if member == "linked" else member)
        if member in ("libraries", "linked"):
            name = name.rpartition("/")[2].removeprefix("lib").partition(".so")[0]
            name = name.partition(".a")[0]
        if member == "packages":
            name, names = name.lower(), tuple(each.lower() for each in names)
        return any(fnmatchcase(name, each) for each in names)

    def remedies(self, member: Member, contexts: frozenset[str]) -> tuple[str, ...]:
        """How to make a name of it available, first by the package manager of the log's system."""
        running = member in ("libraries", "modules")
        linking = f"link it after the objects: add {self.link} to LIBS or target_link_libraries"
        first = (linking,) if member == "symbols" and self.link else ()
        packages = self.install | (self.install_run if running else {})
        systems = sorted(_SYSTEMS, key=lambda system: _SYSTEMS[system][0] not in contexts)
        return (
            *first,
            *(self.run if running else self.build),
            *(_SYSTEMS[each][1].format(packages[each]) for each in systems if each in packages),
        )


class Meaning(NamedTuple):
    """What an event of a log means, as far as its type says, or why it happened: a cause.

    Attributes:
        id: stable name.
        says: what happened, or why; ``{slot}`` stands for a slot.
        remedies: what to do, the most likely first.
        kind: a ``cause`` says why; a ``symptom`` only where it stopped; a ``consequence`` follows
            from an earlier event; a ``warning`` also occurs in successful runs.
        texts: wordings of the event, or those that only this cause has.
        inside: remedies that come first in a context.
        general: an event of a higher number counts only where nothing below it is found.
        of_others: no rank has failed by itself: the one that prints it waited for others, or all were ended.

    Of types of events only:
        member: its slot ``name`` is such a name; if a family has it, this is a cause.
        known: the cause if a family has the name; ``{family}`` stands for what that is called.
        steps_back: a cause only if no other one is found, as all those of a member.
        most: how many lines to keep.
        kill: reports that a process was killed, which launchers and schedulers also do to the
            remaining ranks when one has ended.

    Of causes only:
        source: how certain it is, as in rules, and what says so.
        event: the types of events that it explains.
        when: conditions on slots; all must hold, with `texts` too. A glob, ``!glob``, ``@family``,
            or ``!= {slot}`` for another slot; of several, one must hold. A slot that the log does
            not fill is empty.
        needs, unless: contexts and wordings of which the log must have one, or none.
        rules: ids of rules of `check` that find it before a build.
        theme: the name of its file.
    """

    id: str
    says: str
    remedies: tuple[str, ...] = ()
    kind: Kind = "cause"
    texts: tuple[str, ...] = ()
    inside: dict[str, str | tuple[str, ...]] = {}
    general: int = 0
    of_others: bool = False
    member: Member | None = None
    known: str = ""
    steps_back: bool = False
    most: int = 3
    kill: bool = False
    source: Source = ""
    event: tuple[str, ...] = ()
    when: dict[str, str | tuple[str, ...]] = {}
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    theme: str = ""


class Named(NamedTuple):
    """Wordings of a context, or of what a log names; only `parts` of a value count, if stated."""

    name: str
    wordings: tuple[str, ...]
    parts: str = ""


class Texts(NamedTuple):
    """What every log is searched for, besides events."""

    mention: tuple[Named, ...]
    context: tuple[Named, ...]
    errors: tuple[str, ...]
    hints: tuple[str, ...]
    crashes: tuple[str, ...]
    frames: tuple[str, ...]


class _File(NamedTuple):
    """A file of one of these kinds; `library` has single libraries of systems, which come after families."""

    about: str = ""
    family: tuple[Family, ...] = ()
    library: tuple[Family, ...] = ()
    event: tuple[Meaning, ...] = ()
    cause: tuple[Meaning, ...] = ()
    wordings: dict[str, tuple[str, ...]] = {}


class Failures(NamedTuple):
    """All that is known.

    Attributes:
        events: types of events, with the wordings of all files.
        causes: specific ones before general ones.
        families: specific ones before general ones.
        themes: what each file of causes is about.
    """

    events: tuple[Meaning, ...]
    causes: tuple[Meaning, ...]
    families: tuple[Family, ...]
    texts: Texts
    themes: dict[str, str]


@cache
def all_failures() -> Failures:
    """Read the data."""
    families = _read(_File, FOLDER / "families.toml")
    files = {path.stem: _read(_File, path) for path in sorted(FOLDER.glob("causes/*.toml"))}
    wordings = [_read(_File, path) for path in sorted(FOLDER.glob("wordings/*.toml"))]
    return Failures(
        events=tuple(
            each._replace(
                texts=tuple(text for w in wordings for text in w.wordings.get(each.id, ()))
            )
            for each in _read(_File, FOLDER / "events.toml").event
        ),
        causes=tuple(
            each._replace(theme=theme) for theme, file in files.items() for each in file.cause
        ),
        families=(*families.family, *families.library),
        texts=_read(Texts, FOLDER / "texts.toml"),
        themes={theme: file.about for theme, file in files.items()},
    )


def _read(kind: type[T], path: Path) -> T:
    return decode(kind, parse_toml(read_text(path, OWN)))

"""Known failure texts: data in hvdenv/knowledge/signatures, which diagnosis.py searches for.

hvdenv/knowledge/families.toml says which headers, libraries, CMake packages and symbols belong to
one package, and how to install it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml

FOLDER = Path(__file__).parent / "signatures"
FAMILIES = Path(__file__).parent / "families.toml"

Phase = Literal["build", "run"]
Kind = Literal["cause", "symptom", "consequence", "warning"]


# What a name is the name of; a library is missing for a program or, "linked", for the linker.
Member = Literal["headers", "libraries", "linked", "packages", "symbols"]


class Family(NamedTuple):
    """What is installed together. A name that ends with ``*`` stands for all that begin so.

    Attributes:
        about: what it is called.
        build: how to make it available to compilers and linkers.
        run: how to make its libraries available to programs.
        link: what adds its libraries to the linker's command line.
        headers: as in ``#include``.
        libraries: names without ``lib`` in front and ``.so`` behind.
        packages: as CMake and pkg-config call it.
        symbols: functions that its libraries define.
        modules: as in Signature.
    """

    about: str
    build: str
    run: str = ""
    link: str = ""
    headers: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    modules: str = ""

    def has(self, member: Member, name: str) -> bool:
        """Whether a name is one of its own; that of a package in any case of letters."""
        names = self.names(member)
        if member in ("libraries", "linked"):
            name = name.removeprefix("lib").partition(".so")[0]
        if member == "packages":
            name, names = name.lower(), tuple(each.lower() for each in names)
        known = any(name == each or _is_start(each, name) for each in names)
        return known and bool(self.remedy(member))

    def names(self, member: Member) -> tuple[str, ...]:
        """All names of its own of one sort."""
        named: tuple[str, ...] = getattr(self, "libraries" if member == "linked" else member)
        return named

    def remedy(self, member: Member | None) -> str:
        """How to make it available."""
        if member == "symbols" and self.link:
            return f"link it after the objects: add {self.link} to LIBS or target_link_libraries; {self.build}"
        return self.run if member == "libraries" else self.build


def _is_start(pattern: str, name: str) -> bool:
    return pattern.endswith("*") and name.startswith(pattern[:-1])


class Refinement(NamedTuple):
    """What is known where the lines that match also contain one of some texts.

    Attributes:
        texts: literal; one of them is in the lines.
        near: literal; one of them is within 2,000 characters. With texts, both must hold.
        remedy: takes the place of the signature's, and of its `modules`.
        cause: takes the place of the signature's, unless empty.
    """

    remedy: str
    texts: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    cause: str = ""

    def holds(self, lines: str, around: str) -> bool:
        """Whether it applies to lines with what is near them."""
        said = not self.texts or any(text in lines for text in self.texts)
        return said and (not self.near or any(text in around for text in self.near))


class Signature(NamedTuple):
    """A known failure, recognised by its text.

    Attributes:
        id: stable name.
        phases: whether builds print it, or runs, or both.
        texts: literal texts; one of them must be in the line.
        cause: what happened; ``{0}`` stands for the pattern's first group, ``{where}`` for
            `` in LIBRARY (FUNCTION)`` where a backtrace names what crashed.
        remedy: what to do, the most likely first; a semicolon separates alternatives.
        source: where the text comes from.
        certainty: as in rules.
        pattern: a regular expression that must also match the line, and may continue into the
            next two. A group ``rank`` names the rank concerned; if it is empty, no rank is.
        kind: a ``cause`` says why; a ``symptom`` only where it stopped; a ``consequence`` is a
            follow-on error of an earlier one; a ``warning`` also occurs in successful runs.
        rules: ids of the rules that find it before a build.
        needs: counts only if the log also contains one of these.
        unless: does not count if the log contains one of these.
        near: as needs, but within 2,000 characters of the line.
        not_near: as unless, but within 2,000 characters of the line.
        refined: by texts in the line, in the next two or near them; the first one that is there
            counts.
        when: comparisons of the pattern's groups that must all hold, as ``{0} < 20.3``.
        modules: what to do on a machine with environment modules; not for containers and pods.
        horovod: what to do if the log names Horovod.
        recipe: what to change in a recipe; for readers who use hvdenv.
        member: the pattern's group ``name`` is such a name; if a family has it, this is a cause,
            and the family's remedy takes the place of this one, of `refined` and of `modules`.
        known: the cause if a family has the name; ``{family}`` and ``{name}`` stand for both.
        before: a regular expression; the first groups of those lines right before this one that
            match it are ``{before}`` in the cause.
        kill: reports that a process was killed, which launchers and schedulers also do to the
            remaining ranks when one has ended.
        general: 1 repeats what a program says of itself, 2 what it says of another; each counts
            only if no less general cause or symptom is found, and nothing else in the same lines.
        theme: name of its file.
    """

    id: str
    phases: tuple[Phase, ...]
    texts: tuple[str, ...]
    cause: str
    remedy: str
    source: str
    certainty: Literal["run", "source", "documented", "reported", "general"]
    pattern: str = ""
    kind: Kind = "cause"
    rules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    not_near: tuple[str, ...] = ()
    refined: tuple[Refinement, ...] = ()
    when: tuple[str, ...] = ()
    modules: str = ""
    horovod: str = ""
    recipe: str = ""
    member: Member | None = None
    known: str = ""
    before: str = ""
    kill: bool = False
    general: int = 0
    theme: str = ""

    def refined_by(self, lines: str, around: str = "", name: str = "") -> Signature:
        """The signature with what is known of these lines, of what is near them, and of the name."""
        family = _family(self.member, name) if self.member and name else None
        if family:
            return self._of_family(family, name)
        found = next((each for each in self.refined if each.holds(lines, around)), None)
        if not found:
            return self
        return self._replace(cause=found.cause or self.cause, remedy=found.remedy, modules="")

    def _of_family(self, family: Family, name: str) -> Signature:
        """That something of a family is missing is a cause."""
        return self._replace(
            kind="cause",
            cause=self.known.replace("{family}", family.about).replace("{name}", _plain(name)),
            remedy=_plain(family.remedy(self.member)),
            modules=_plain(family.modules),
        )


def _plain(text: str) -> str:
    """The text as a format without placeholders."""
    return text.replace("{", "{{").replace("}", "}}")


class _FamilyFile(NamedTuple):
    """The families: specific ones before general ones."""

    family: tuple[Family, ...]


class _SignatureFile(NamedTuple):
    about: str
    signature: tuple[Signature, ...]


_WHOLE = re.compile(r"`[^`]{0,300}`|\([^()]{0,300}\)")


def alternatives(remedy: str) -> list[str]:
    """What to try, in order. A semicolon in parentheses or in a command does not separate."""
    kept = _WHOLE.sub(lambda part: part[0].replace("; ", ";\0"), remedy)
    return [each.replace("\0", " ") for each in kept.split("; ")]


@lru_cache(maxsize=1)
def all_signatures() -> tuple[Signature, ...]:
    """All signatures, in the order of files and of entries."""
    return tuple(
        signature._replace(theme=path.stem)
        for path in sorted(FOLDER.glob("*.toml"))
        for signature in _read(path).signature
    )


@lru_cache(maxsize=1)
def all_families() -> tuple[Family, ...]:
    """All families, in the order of the file."""
    return decode(_FamilyFile, parse_toml(read_text(FAMILIES, OWN))).family


def _family(member: Member, name: str) -> Family | None:
    """The first family that has the name."""
    return next((each for each in all_families() if each.has(member, name)), None)


def themes() -> dict[str, str]:
    return {path.stem: _read(path).about for path in sorted(FOLDER.glob("*.toml"))}


def _read(path: Path) -> _SignatureFile:
    return decode(_SignatureFile, parse_toml(read_text(path, OWN)))

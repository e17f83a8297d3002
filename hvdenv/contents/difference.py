"""Differences between the contents of two environments, as a change log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from hvdenv.contents.packages import Contents, Horovod, Package
from hvdenv.masking import plain
from hvdenv.sites.modules import family_of

Kind = Literal["added", "removed", "up", "down", "changed"]
# In the order in which people read them.
KINDS: tuple[Kind, ...] = ("added", "removed", "up", "down", "changed")

_COLOURS: dict[Kind, str] = {"added": "32", "removed": "31", "up": "36", "down": "33"}
_SHORT = 12


class Difference(NamedTuple):
    """One difference between two environments.

    Attributes:
        group: ``recipe``, ``python``, ``packages``, ``horovod``, ``patches``, ``flags``,
            ``modules``, ``toolchain`` or ``wheel``.
        kind: ``up`` and ``down`` are for versions that can be compared.
        before: in the first; empty if it has none.
    """

    group: str
    subject: str
    kind: Kind
    before: str
    after: str


def compare(first: Contents, second: Contents) -> tuple[Difference, ...]:
    """The differences, in groups; in each group, added items come first.

    For an environment that hvdenv did not build, only packages, Python and wheel are compared.
    """
    one, two = first.horovod or Horovod(""), second.horovod or Horovod("")
    groups = [
        _texts("python", _python(first, second), _python(second, first)),
        _packages(first, second),
        _texts("horovod", _given("Horovod", one.version), _given("Horovod", two.version)),
    ]
    if first.recipe and second.recipe:
        source = "source archive"
        groups = [
            _texts("recipe", {"recipe": first.name}, {"recipe": second.name}, versions=False),
            *groups,
            _texts(
                "horovod", _given(source, one.source), _given(source, two.source), versions=False
            ),
            _texts("patches", one.patches, two.patches, versions=False),
            _texts("flags", one.variables, two.variables, versions=False),
            _modules(first, second),
            _texts("toolchain", first.toolchain, second.toolchain),
        ]
    if one.wheel and two.wheel:
        wheel = "Horovod's wheel"
        groups += [_texts("wheel", {wheel: one.wheel}, {wheel: two.wheel}, versions=False)]
    return tuple(
        each
        for found in groups
        for each in sorted(found, key=lambda one: (KINDS.index(one.kind), one.subject))
    )


def render(found: tuple[Difference, ...], *, colour: bool = False) -> str:
    lines: list[str] = []
    for group, each in groupby(found, key=lambda one: one.group):
        lines += ["", f"{group.capitalize()}:", *(_line(one, colour) for one in each)]
    return "\n".join(lines[1:]) + "\n" if lines else ""


def document(found: tuple[Difference, ...]) -> dict[str, object]:
    return {
        "schema": "hvdenv.diff/1",
        "same": not found,
        "changes": [each._asdict() for each in found],
    }


def _line(change: Difference, colour: bool) -> str:
    one, two = _short(change.before), _short(change.after)
    if one == two:  # they differ after the cut
        one, two = change.before, change.after
    values = {"added": two, "removed": one}.get(change.kind, f"{one} -> {two}")
    code = _COLOURS.get(change.kind, "")
    word = f"{change.kind:8}"
    word = f"\x1b[{code}m{word}\x1b[0m" if colour and code else word
    return f"  {word} {plain(change.subject)}  {plain(values)}"


def _short(text: str) -> str:
    """Shorten hashes; --json has them in full."""
    return re.sub(rf"\b([0-9a-f]{{{_SHORT}}})[0-9a-f]{{28,}}\b", r"\1", text)


def _python(contents: Contents, other: Contents) -> dict[str, str]:
    """Without the architecture if one of the two does not state it."""
    machine = contents.machine if other.machine else ""
    return {**_given("Python", contents.python), **_given("machine", machine)}


def _given(name: str, value: str) -> dict[str, str]:
    return {name: value} if value else {}


def _packages(first: Contents, second: Contents) -> Iterator[Difference]:
    one, two = (
        {(each.kind, each.name): each for each in side.packages} for side in (first, second)
    )
    for key in sorted(one.keys() | two.keys()):
        before, after = one.get(key), two.get(key)
        if before and after:
            yield from _package(before, after)
        else:
            values = (each and _version(each) for each in (before, after))
            yield _change("packages", _subject(key), *values)


def _package(before: Package, after: Package) -> Iterator[Difference]:
    change = partial(_change, "packages", _subject((before.kind, before.name)))
    if before.version != after.version:
        kind = _direction(before.version, after.version)
        yield change(before.version, after.version, kind=kind)
    elif before.build != after.build:
        yield change(_version(before), _version(after))
    # Unknown hashes are not compared.
    elif before.sha256 and after.sha256 and before.sha256 != after.sha256:
        yield change(*(f"{each.version} (sha256 {each.sha256})" for each in (before, after)))


def _subject(key: tuple[str, str]) -> str:
    kind, name = key
    return name if kind == "pypi" else f"{name} ({kind})"


def _version(package: Package) -> str:
    return f"{package.version} {package.build}".rstrip()


def _modules(first: Contents, second: Contents) -> Iterator[Difference]:
    """Two versions of one module are one change."""
    one, two = (
        {family_of(name): (name, digest) for name, digest in side.modules.items()}
        for side in (first, second)
    )
    for family in sorted(one.keys() | two.keys()):
        (before, old), (after, new) = one.get(family, ("", "")), two.get(family, ("", ""))
        change = partial(_change, "modules", family)
        if not before or not after:
            yield change(before or None, after or None)
        elif before != after:
            versions = (each.rpartition("/")[2] for each in (before, after))
            yield change(before, after, kind=_direction(*versions))
        elif old and new and old != new:
            yield change(*(f"{before} (sha256 {digest})" for digest in (old, new)))


def _texts(
    group: str, one: Mapping[str, str], two: Mapping[str, str], *, versions: bool = True
) -> Iterator[Difference]:
    """Differences between two tables of texts."""
    for name in {**one, **two}:
        before, after = one.get(name), two.get(name)
        if before != after:
            kind = _direction(before or "", after or "") if versions else "changed"
            yield _change(group, name, before, after, kind=kind)


def _change(
    group: str, subject: str, before: str | None, after: str | None, *, kind: Kind = "changed"
) -> Difference:
    """A difference; None for what one side lacks, whatever the kind."""
    if before is None or after is None:
        kind = "added" if before is None else "removed"
    return Difference(
        group=group, subject=subject, kind=kind, before=before or "", after=after or ""
    )


def _direction(before: str, after: str) -> Kind:
    """Whether a version went up or down; ``changed`` if the two cannot be compared."""
    try:
        one, two = Version(before), Version(after)
    except InvalidVersion:
        return _by_parts(before, after)
    return "up" if one < two else "down" if one > two else "changed"


def _by_parts(before: str, after: str) -> Kind:
    """The same for versions that are not PEP 440, such as 1.1.1w or Open MPI 4.1.8."""
    one, two = re.split(r"(\d+)", before), re.split(r"(\d+)", after)
    if one[0] != two[0]:
        return "changed"
    numbers = ([int(each) if each.isdecimal() else each for each in parts] for parts in (one, two))
    # Text and numbers alternate, so parts of one kind are compared.
    older, newer = numbers
    return "up" if older < newer else "down" if older > newer else "changed"

"""Differences between the contents of two environments, as a change log."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar

from hvdenv.base.masking import plain
from hvdenv.locks.packages import Contents, Horovod
from hvdenv.sites.modules import module_family

Kind = Literal["added", "removed", "changed"]
# In the order in which people read them.
KINDS: tuple[Kind, ...] = ("added", "removed", "changed")

_SHORT = 12
T = TypeVar("T")


class Difference(NamedTuple):
    """One difference between two environments.

    Attributes:
        group: ``recipe``, ``python``, ``packages``, ``horovod``, ``patches``, ``flags``,
            ``modules``, ``toolchain`` or ``wheel``.
        before: in the first; empty if it has none.
    """

    group: str
    subject: str
    kind: Kind
    before: str
    after: str


class Item(NamedTuple):
    """What a side has of a subject.

    Attributes:
        text: a version or another value.
        mark: a hash, for example; not compared if one side does not know its own.
    """

    text: str = ""
    mark: str = ""


def compare(first: Contents, second: Contents) -> tuple[Difference, ...]:
    """The differences, in groups; in each group, added items come first."""
    one, two = _groups(first), _groups(second)
    return tuple(
        each
        for group in one
        # A build that failed to observe has none.
        if group != "toolchain" or (first.toolchain and second.toolchain)
        for each in sorted(
            _differences(group, one[group], two[group]),
            key=lambda each: (KINDS.index(each.kind), each.subject),
        )
    )


def _groups(contents: Contents) -> Mapping[str, Mapping[str, Item]]:
    horovod = contents.horovod or Horovod("")
    return {
        "recipe": {"recipe": Item(contents.name)},
        "python": {"Python": Item(contents.python), "machine": Item(mark=contents.machine)},
        "packages": {
            each.name if each.kind == "pypi" else f"{each.name} ({each.kind})": Item(
                f"{each.version} {each.build}".strip(), each.sha256
            )
            for each in contents.packages
        },
        "horovod": {
            **({"Horovod": Item(horovod.version)} if horovod.version else {}),
            "source archive": Item(mark=horovod.source),
        },
        "patches": {name: Item(mark=digest) for name, digest in horovod.patches.items()},
        "flags": {name: Item(value) for name, value in horovod.variables.items()},
        # Two versions of one module are one change.
        "modules": {
            module_family(name): Item(name, mark=digest)
            for name, digest in contents.modules.items()
        },
        "toolchain": {name: Item(version) for name, version in contents.toolchain.items()},
        "wheel": {"Horovod's wheel": Item(mark=horovod.wheel)},
    }


def differing(
    one: Mapping[str, T], two: Mapping[str, T]
) -> Iterator[tuple[str, T | None, T | None]]:
    """Values that either has and that differ, by name; None where one has none."""
    for name in sorted(one.keys() | two.keys()):
        if (before := one.get(name)) != (after := two.get(name)):
            yield name, before, after


def _differences(
    group: str, one: Mapping[str, Item], two: Mapping[str, Item]
) -> Iterator[Difference]:
    for subject, before, after in differing(one, two):
        kind: Kind = "changed"
        if before is None or after is None:
            kind = "removed" if before else "added"
            texts = [each.text or each.mark if each else "" for each in (before, after)]
        elif before.text != after.text:
            texts = [before.text, after.text]
        elif before.mark and after.mark:
            form = f"{before.text} (sha256 {{}})" if before.text else "{}"
            texts = [form.format(each.mark) for each in (before, after)]
        else:
            continue
        old, new = texts
        yield Difference(group=group, subject=subject, kind=kind, before=old, after=new)


def render(found: tuple[Difference, ...]) -> str:
    lines: list[str] = []
    for group, each in groupby(found, key=lambda one: one.group):
        lines += ["", f"{group.capitalize()}:", *map(_line, each)]
    return "\n".join(lines[1:]) + "\n" if lines else ""


def document(found: tuple[Difference, ...]) -> dict[str, object]:
    return {
        "schema": "hvdenv.diff/1",
        "same": not found,
        "changes": [each._asdict() for each in found],
    }


def _line(change: Difference) -> str:
    one, two = _short(change.before), _short(change.after)
    if one == two:  # they differ after the cut
        one, two = change.before, change.after
    values = {"added": two, "removed": one}.get(change.kind, f"{one} -> {two}")
    return f"  {change.kind:8} {plain(change.subject)}  {plain(values)}"


def _short(text: str) -> str:
    """Shorten hashes; --json has them in full."""
    return re.sub(rf"\b([0-9a-f]{{{_SHORT}}})[0-9a-f]{{28,}}\b", r"\1", text)

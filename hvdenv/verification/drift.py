"""What has changed in an environment since it was built, and whether it matters.

A change matters if it changes what a process of the environment loads: its interpreter, packages
or MPI, or the files that Horovod's extensions link. Other modules or another driver are named:
they matter by the files that they provide.
"""

from collections.abc import Iterator
from os.path import isabs
from typing import NamedTuple

from hvdenv.locks.difference import differing
from hvdenv.sites.launchers import parse_mpi_library
from hvdenv.sites.modules import module_family

_REBUILD = "or rebuild for this machine: `hvdenv build RECIPE --rebuild`"


class File(NamedTuple):
    """A program or library.

    Attributes:
        path: without symbolic links; empty if there is none.
        version: of a Python or mpirun; the name of an MPI library; the highest GLIBCXX of a
            libstdc++.
        kind: the MPI of an mpirun.
        build: build id of a library, or its size.
    """

    path: str = ""
    version: str = ""
    kind: str = ""
    build: str = ""

    def __str__(self) -> str:
        known = f"{self.kind} {self.version}".strip()
        return f"{self.path} ({known})" if self.path and known else self.path

    @property
    def mpi(self) -> tuple[str, tuple[int, ...]]:
        """Kind and series of the MPI that it belongs to."""
        if self.kind:
            return self.kind, _series(self.version)
        found = parse_mpi_library(self.version)
        return found.kind, _series(found.version)


class Linked(NamedTuple):
    """The libraries that an extension links, by name, without those of its framework and glibc.

    Attributes:
        glibcxx, glibc: the versions of libstdc++ and glibc that it needs.
    """

    libraries: dict[str, File]
    glibcxx: str = ""
    glibc: str = ""


class Module(NamedTuple):
    """A loaded module, its modulefile, and the hash of that file."""

    name: str
    file: str = ""
    digest: str = ""


class Observation(NamedTuple):
    """The contents of an environment, as hvdenv/standalone/inspect/observe_env.py saw them.

    Paths in the environment are relative; others are absolute.

    Attributes:
        built_with: versions of frameworks in Horovod's metadata.json.
        extensions: by framework.
        driver: version of NVIDIA's kernel driver; empty without one.
        modules: in the order in which they were loaded.
    """

    host: str
    python: File
    built_with: dict[str, str] = {}
    packages: dict[str, str] = {}
    extensions: dict[str, Linked] = {}
    mpirun: File = File()
    glibc: str = ""
    driver: str = ""
    modules: tuple[Module, ...] = ()


class Drift(NamedTuple):
    """One change.

    Attributes:
        subject: such as ``libmpi.so.40``.
        what: the new and the old state, in one sentence.
        why: the reason why it matters; empty if it is harmless.
        remedy: how to restore what was there, if it matters.
    """

    subject: str
    what: str
    why: str = ""
    remedy: str = ""

    @property
    def matters(self) -> bool:
        return bool(self.why)


def compare(was: Observation, now: Observation) -> tuple[Drift, ...]:
    """The changes; those that matter come first."""
    rules = (_programs, _libraries, _versions, _modules)
    changes = [change for rule in rules for change in rule(was, now)]
    harmless = [Drift(change.subject, change.what) for change in changes if not change.matters]
    return (*(change for change in changes if change.matters), *harmless)


def _programs(was: Observation, now: Observation) -> Iterator[Drift]:
    before, after = was.python, now.python
    if before != after:
        same = _series(before.version) == _series(after.version)
        why = "" if same else "packages and extensions work with one series of Python only"
        remedy = f"restore Python {before.version}, {_REBUILD}"
        yield Drift("Python", _told("Python", before, after), why, remedy)
    if was.mpirun != now.mpirun:
        # Whether mpirun is needed at all, ranks show.
        linked = {name for each in was.extensions.values() for name in each.libraries}
        why = _other_mpi(was.mpirun, now.mpirun) if any(map(_is_mpi, linked)) else ""
        remedy = _bring_back("the MPI", was, now)
        yield Drift("mpirun", _told("mpirun", was.mpirun, now.mpirun), why, remedy)


def _libraries(was: Observation, now: Observation) -> Iterator[Drift]:
    """The same change for several frameworks is one change."""
    found: dict[tuple[str, File, File], list[str]] = {}
    for framework, linked in was.extensions.items():
        others = now.extensions.get(framework, Linked({})).libraries
        for name, before, after in differing(linked.libraries, others):
            if before and after and before.path:
                found.setdefault((name, before, after), []).append(framework)
    for (name, before, after), frameworks in found.items():
        what = f"{_told(name, before, after)} (linked for {', '.join(frameworks)})"
        why = _harm(name, before, after, [each.glibcxx for each in was.extensions.values()])
        yield Drift(name, what, why, _bring_back(name, was, now))


def _harm(name: str, before: File, after: File, glibcxx: list[str]) -> str:
    """Why a different file for a library matters; empty if it does not."""
    if not after.path:
        return "the extension cannot load without it"
    if name.startswith("libstdc++."):
        return _lacks("GLIBCXX", after.version, glibcxx)
    if not isabs(before.path) and isabs(after.path):  # from inside the environment to outside
        return "the environment's own file is not used"
    # Elsewhere the same name means the same interface.
    return _other_mpi(before, after) if _is_mpi(name) else ""


def _is_mpi(library: str) -> bool:
    return library.startswith("libmpi")


def _other_mpi(before: File, after: File) -> str:
    """How one belongs to another MPI than before; empty if it does not, or nobody knows."""
    if not (before.version and after.version) or before.mpi == after.mpi:
        return ""
    old, new = (f"{each.kind} {each.version}".strip() for each in (before, after))
    return f"Horovod was built with {old}, and this is {new}"


def _lacks(series: str, found: str, needed: list[str]) -> str:
    highest = max(needed, key=_numbers, default="")
    if not found or _numbers(found) >= _numbers(highest):
        return ""
    return f"it has {series} up to {found}, but the extension needs {highest}"


def _versions(was: Observation, now: Observation) -> Iterator[Drift]:
    """Of glibc, the driver and packages."""
    before, after = (
        {"glibc": each.glibc, "NVIDIA's kernel driver": each.driver, **each.packages}
        for each in (was, now)
    )
    for name, old, new in differing(before, after):
        framework = name.removesuffix("-cpu").removesuffix("-gpu")
        why, remedy = "", f"install {name}=={old} again, {_REBUILD}"
        if name == "glibc":
            why = _lacks("GLIBC", new or "", [each.glibc for each in was.extensions.values()])
            remedy = f"use hosts with the glibc of {was.host}, {_REBUILD}"
        elif old and name == "horovod":
            why = "this is not the Horovod that was built"
        # If Horovod recorded what it was built with, the check of the extension compares it.
        elif old and framework in was.extensions and framework not in was.built_with:
            why = "Horovod was built with the other one"
        yield Drift(name, _told(name, old, new), why, remedy)


def _modules(was: Observation, now: Observation) -> Iterator[Drift]:
    before, after = (
        {module_family(each.name): each for each in seen.modules} for seen in (was, now)
    )
    for family, one, other in differing(before, after):
        old, new = (each or Module("not loaded") for each in (one, other))
        if old.name != new.name:
            yield Drift(family, _told(f"the module {family}", old.name, new.name))
        elif old.file != new.file:
            yield Drift(family, _told(f"the module {new.name}", old.file, new.file))
        else:
            yield Drift(family, f"the modulefile of {new.name} was edited: {new.file}")


def _told(subject: str, before: object, after: object) -> str:
    """A change in one sentence; None and what has an empty text are missing."""
    old, new = (str(each or "") or "missing" for each in (before, after))
    if old == new:
        return f"{subject} is a different build now: {new}"
    return f"{subject} is {new} now and was {old}"


def _bring_back(what: str, was: Observation, now: Observation) -> str:
    """How to restore something; modules that differ may be the cause."""
    differ = [change.what for change in _modules(was, now)]
    modules = f"; modules differ: {', '.join(differ)}" if differ else ""
    paths = "PATH, LD_LIBRARY_PATH and modules select it"
    return f"restore {what} of the build ({paths}), {_REBUILD}{modules}"


def _series(version: str) -> tuple[int, ...]:
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

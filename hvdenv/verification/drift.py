"""What has changed in an environment since it was built, and whether it matters.

A change matters if it changes what a process of the environment loads: its interpreter, packages
or MPI, or the files that Horovod's extensions link. Other modules or another driver are named:
they matter by the files that they provide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os.path import dirname, isabs
from typing import Any, NamedTuple

from hvdenv.launch.launchers import parse_mpi_library
from hvdenv.reports.report import EVERYTHING, About
from hvdenv.sites.modules import module_family

_REBUILD = "or rebuild for this machine: `hvdenv build RECIPE --rebuild`"


class Python(NamedTuple):
    """The interpreter; its path has no symbolic links."""

    version: str
    path: str


class Mpirun(NamedTuple):
    """The mpirun that is found first; empty without one."""

    path: str = ""
    kind: str = ""
    version: str = ""

    def __str__(self) -> str:
        known = f"{self.kind} {self.version}" if self.version else "of an unknown MPI"
        return f"{self.path} ({known})" if self.path else ""


class Library(NamedTuple):
    """The file that a library's name resolves to.

    Attributes:
        path: without symbolic links; empty if there is none.
        build: its build id, or its size.
        version: the name of an MPI; the highest GLIBCXX of a libstdc++.
    """

    path: str = ""
    build: str = ""
    version: str = ""


class Linked(NamedTuple):
    """The libraries that an extension links, by name, without those of its framework and glibc.

    Attributes:
        glibcxx, glibc: the versions of libstdc++ and glibc that it needs.
    """

    libraries: dict[str, Library]
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
        places: the directory from which a package is imported.
        built_with: versions of frameworks in Horovod's metadata.json.
        extensions: by framework.
        driver: version of NVIDIA's kernel driver; empty without one.
        modules: in the order in which they were loaded.
    """

    host: str
    python: Python
    places: dict[str, str] = {}
    built_with: dict[str, str] = {}
    packages: dict[str, str] = {}
    extensions: dict[str, Linked] = {}
    mpirun: Mpirun = Mpirun()
    glibc: str = ""
    driver: str = ""
    modules: tuple[Module, ...] = ()


class Change(NamedTuple):
    """One change.

    Attributes:
        subject: such as ``libmpi.so.40``.
        what: the new and the old state, in one sentence.
        why: the reason why it matters; empty if it is harmless.
        remedy: how to restore what was there, if it matters.
        about: what cannot be relied on if it matters.
    """

    subject: str
    what: str
    why: str = ""
    remedy: str = ""
    about: About = EVERYTHING

    @property
    def matters(self) -> bool:
        return bool(self.why)


def compare(was: Observation, now: Observation) -> tuple[Change, ...]:
    """The changes; those that matter come first."""
    rules = (_python, _places, _mpirun, _libraries, _glibc, _packages, _driver, _modules)
    changes = [change for rule in rules for change in rule(was, now)]
    return (
        *(change for change in changes if change.matters),
        *(change._replace(remedy="") for change in changes if not change.matters),
    )


def _python(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = was.python, now.python
    if before.version != after.version:
        same = _series(before.version) == _series(after.version)
        why = "" if same else "packages and extensions work with one series of Python only"
        remedy = f"restore Python {before.version}, {_REBUILD}"
        yield Change("Python", _told("Python", before.version, after.version), why, remedy)
    elif before.path != after.path:
        yield Change("Python", _told("Python", before.path, after.path))


def _places(was: Observation, now: Observation) -> Iterator[Change]:
    for name, before, after in _differing(was.places, now.places):
        if before and after:
            what = f"{name} is imported from {after} now and was from {before}"
            left = _left(before, after)
            why = f"this {name} does not belong to the environment" if left else ""
            remedy = "find what adds its directory to PYTHONPATH, such as a module, and remove it"
            yield Change(name, what, why, remedy, about=_framework(name, was))


def _mpirun(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = was.mpirun, now.mpirun
    if before == after:
        return
    other = (before.kind, _series(before.version)) != (after.kind, _series(after.version))
    # Whether mpirun is needed at all, ranks show.
    known = {before.kind, after.kind}.isdisjoint({"unknown", ""})
    linked = any(
        name.startswith("libmpi") for each in was.extensions.values() for name in each.libraries
    )
    why = "Horovod was built with the other one" if other and known and linked else ""
    about = About((), ("MPI",), ("MPI",))
    remedy = _bring_back("the MPI", was, now)
    yield Change("mpirun", _told("mpirun", before, after), why, remedy, about=about)


def _libraries(was: Observation, now: Observation) -> Iterator[Change]:
    """The same change for several frameworks is one change."""
    found: dict[tuple[str, Library, Library], list[str]] = {}
    for framework, linked in was.extensions.items():
        others = now.extensions.get(framework, Linked({})).libraries
        for name, before, after in _differing(linked.libraries, others):
            if before and after and before.path:
                found.setdefault((name, before, after), []).append(framework)
    for (name, before, after), frameworks in found.items():
        what = f"{_replaced(name, before, after)} (linked for {', '.join(frameworks)})"
        why = _harm(name, before, after, was, now)
        mpi = ("MPI",) if name.startswith("libmpi") else ()
        about = About(tuple(frameworks), mpi, mpi)
        yield Change(name, what, why, _bring_back(name, was, now), about=about)


def _replaced(name: str, before: Library, after: Library) -> str:
    version = f" ({after.version})" if after.version not in ("", before.version) else ""
    if before.path == after.path:
        return f"{name} is a different build now{version}: {after.path}"
    return _told(name, before.path, after.path and after.path + version)


def _harm(name: str, before: Library, after: Library, was: Observation, now: Observation) -> str:
    """Why a different file for a library matters; empty if it does not."""
    if not after.path:
        return "the extension cannot load without it"
    if name.startswith("libstdc++."):
        return _lacks("GLIBCXX", after.version, [each.glibcxx for each in was.extensions.values()])
    if _left(before.path, after.path):
        return "the environment's own file is not used"
    if not name.startswith("libmpi"):
        return ""  # the same name means the same interface
    old, new = parse_mpi_library(before.version), parse_mpi_library(after.version)
    other = (old.kind, _series(old.version)) != (new.kind, _series(new.version))
    if before.version and after.version and other:
        return f"Horovod was built with {before.version}, and this is {after.version}"
    if now.mpirun.path and _is_beside(was.mpirun, before) and not _is_beside(now.mpirun, after):
        return f"it does not belong to the MPI of {now.mpirun.path}, which starts the ranks"
    return ""


def _is_beside(mpirun: Mpirun, library: Library) -> bool:
    """Whether a library is in the directory of its launcher's MPI."""
    prefix = dirname(dirname(mpirun.path))
    return bool(prefix) and library.path.startswith(f"{prefix}/lib")


def _lacks(series: str, found: str, needed: list[str]) -> str:
    highest = max(needed, key=_numbers, default="")
    if not found or _numbers(found) >= _numbers(highest):
        return ""
    return f"it has {series} up to {found}, but the extension needs {highest}"


def _glibc(was: Observation, now: Observation) -> Iterator[Change]:
    if was.glibc != now.glibc:
        why = _lacks("GLIBC", now.glibc, [each.glibc for each in was.extensions.values()])
        remedy = f"use hosts with the glibc of {was.host}, {_REBUILD}"
        yield Change("glibc", _told("glibc", was.glibc, now.glibc), why, remedy)


def _packages(was: Observation, now: Observation) -> Iterator[Change]:
    for name, before, after in _differing(was.packages, now.packages):
        framework = name.removesuffix("-cpu").removesuffix("-gpu")
        why = ""
        if before and name == "horovod":
            why = "this is not the Horovod that was built"
        # If Horovod recorded what it was built with, the check of the extension compares it.
        elif before and framework in was.extensions and framework not in was.built_with:
            why = "Horovod was built with the other one"
        remedy = f"install {name}=={before} again, {_REBUILD}"
        yield Change(
            name, _told(name, before, after), why, remedy, about=_framework(framework, was)
        )


def _driver(was: Observation, now: Observation) -> Iterator[Change]:
    if was.driver != now.driver:
        yield Change("driver", _told("NVIDIA's kernel driver", was.driver, now.driver))


def _modules(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = (
        {module_family(each.name): each for each in seen.modules} for seen in (was, now)
    )
    for name, old, new in _differing(before, after):
        if old is None or new is None:
            loaded = "is loaded now and was not" if new else "is not loaded now and was"
            yield Change(name, f"the module {(new or old).name} {loaded}")
        elif old.name != new.name:
            yield Change(name, f"the module {old.name} is {new.name} now")
        elif old.file != new.file:
            yield Change(name, _told(f"the module {new.name}", old.file, new.file))
        else:
            yield Change(name, f"the modulefile of {new.name} was edited: {new.file}")


def _told(subject: str, before: object, after: object) -> str:
    """A change in one sentence; None and what has an empty text are missing."""
    old, new = (str(each or "") or "missing" for each in (before, after))
    return f"{subject} is {new} now and was {old}"


def _framework(name: str, was: Observation) -> About:
    return About((name,)) if name in was.extensions else EVERYTHING


def _bring_back(what: str, was: Observation, now: Observation) -> str:
    """How to restore something; modules that differ may be the cause."""
    differ = [change.what for change in _modules(was, now)]
    modules = f"; modules differ: {', '.join(differ)}" if differ else ""
    paths = "PATH, LD_LIBRARY_PATH and modules select it"
    return f"restore {what} of the build ({paths}), {_REBUILD}{modules}"


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Values that either has and that differ; None where one has none."""
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        if before != after:
            yield name, before, after


def _left(before: str, after: str) -> bool:
    """Whether a path moved from inside the environment to outside."""
    return not isabs(before) and isabs(after)


def _series(version: str) -> tuple[int, ...]:
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

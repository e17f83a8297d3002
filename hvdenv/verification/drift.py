"""What has changed in an environment since it was built, and whether it matters.

A change matters if it changes what a process of the environment loads: its interpreter, packages
or MPI, or the files that Horovod's extensions link. Other modules or another driver are named:
they matter by the files that they provide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os.path import dirname, isabs
from typing import Any, NamedTuple

from hvdenv.reports.report import EVERYTHING, About
from hvdenv.schema import decode
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
        places: the folder from which a package is imported.
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


def read(document: Mapping[str, object]) -> Observation:
    """An observation from its record; unknown keys are ignored.

    Raises:
        Problem: it does not fit.
    """
    return decode(Observation, document, lenient=True)


def compare(was: Observation, now: Observation) -> tuple[Change, ...]:
    """The changes; those that matter come first."""
    rules = (_python, _places, _mpirun, _libraries, _glibc, _packages, _driver, _modules)
    changes = [change for rule in rules for change in rule(was, now)]
    return tuple(sorted(changes, key=lambda change: not change.matters))


def _python(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = was.python, now.python
    if before.version != after.version:
        what = f"Python is {after.version} now and was {before.version}"
        if _series(before.version) == _series(after.version):
            yield Change("Python", what)
        else:
            why = "packages and extensions work with one series of Python only"
            yield Change("Python", what, why, f"restore Python {before.version}, {_REBUILD}")
    elif before.path != after.path:
        yield Change("Python", f"Python is {after.path} now and was {before.path}")


def _places(was: Observation, now: Observation) -> Iterator[Change]:
    for name, before, after in _differing(was.places, now.places, ""):
        what = f"{name} is imported from {after} now and was from {before}"
        if not (before and after):
            continue
        if _left(before, after):
            why = f"this {name} does not belong to the environment"
            remedy = "find what adds its folder to PYTHONPATH, such as a module, and remove it"
            about = About((name,)) if name in was.extensions else EVERYTHING
            yield Change(name, what, why, remedy, about=about)
        else:
            yield Change(name, what)


def _mpirun(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = was.mpirun, now.mpirun
    if before == after:
        return
    what = f"mpirun is {_described(after)} now and was {_described(before)}"
    same = before.kind == after.kind and _series(before.version) == _series(after.version)
    # Whether mpirun is needed at all, ranks show.
    known = {before.kind, after.kind}.isdisjoint({"unknown", ""})
    links_mpi = any(
        name.startswith("libmpi") for each in was.extensions.values() for name in each.libraries
    )
    if same or not known or not links_mpi:
        yield Change("mpirun", what)
    else:
        why = "Horovod was built with the other one"
        remedy = _bring_back("the MPI", was, now)
        yield Change("mpirun", what, why, remedy, about=About((), ("MPI",), ("MPI",)))


def _described(mpirun: Mpirun) -> str:
    named = f"{mpirun.kind} {mpirun.version}" if mpirun.version else "of an unknown MPI"
    return f"{mpirun.path} ({named})" if mpirun.path else "missing"


def _libraries(was: Observation, now: Observation) -> Iterator[Change]:
    """The same change for several frameworks is one change."""
    found: dict[tuple[str, Library, Library], list[str]] = {}
    for framework, linked in was.extensions.items():
        others = now.extensions.get(framework, Linked({})).libraries
        for name, before, after in _differing(linked.libraries, others, None):
            if before and after and before.path:
                found.setdefault((name, before, after), []).append(framework)
    for (name, before, after), frameworks in found.items():
        why = _harm(name, before, after, was, now)
        what = f"{name} {_instead(before, after)} (linked for {', '.join(frameworks)})"
        mpi = ("MPI",) if name.startswith("libmpi") else ()
        remedy = _bring_back(name, was, now) if why else ""
        yield Change(name, what, why, remedy, about=About(tuple(frameworks), mpi, mpi))


def _instead(before: Library, after: Library) -> str:
    version = f" ({after.version})" if after.version not in ("", before.version) else ""
    if before.path == after.path:
        return f"is a different build now{version}: {after.path}"
    return f"is {after.path or 'missing'}{version if after.path else ''} now and was {before.path}"


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
    asked = before.version and after.version
    if asked and _mpi_series(before.version) != _mpi_series(after.version):
        return f"Horovod was built with {before.version}, and this is {after.version}"
    if now.mpirun.path and _is_of(was.mpirun, before) and not _is_of(now.mpirun, after):
        return f"it does not belong to the MPI of {now.mpirun.path}, which starts the ranks"
    return ""


def _is_of(mpirun: Mpirun, library: Library) -> bool:
    """Whether a library is in the folder of its launcher's MPI."""
    prefix = dirname(dirname(mpirun.path))
    return bool(prefix) and library.path.startswith(f"{prefix}/lib")


def _lacks(series: str, found: str, needed: list[str]) -> str:
    highest = max(needed, key=_numbers, default="")
    if not found or _numbers(found) >= _numbers(highest):
        return ""
    return f"it has {series} up to {found}, but the extension needs {highest}"


def _glibc(was: Observation, now: Observation) -> Iterator[Change]:
    if was.glibc != now.glibc:
        what = f"glibc is {now.glibc} now and was {was.glibc}"
        why = _lacks("GLIBC", now.glibc, [each.glibc for each in was.extensions.values()])
        remedy = f"use hosts with the glibc of {was.host}, {_REBUILD}" if why else ""
        yield Change("glibc", what, why, remedy)


def _packages(was: Observation, now: Observation) -> Iterator[Change]:
    for name, before, after in _differing(was.packages, now.packages, ""):
        what = f"{name} is {after or 'missing'} now and was {before or 'missing'}"
        framework = name.removesuffix("-cpu").removesuffix("-gpu")
        why = ""
        if before and name == "horovod":
            why = "this is not the Horovod that was built"
        # If Horovod recorded what it was built with, the check of the extension compares it.
        elif before and framework in was.extensions and framework not in was.built_with:
            why = "Horovod was built with the other one"
        remedy = f"install {name}=={before} again, {_REBUILD}" if why else ""
        about = About((framework,)) if framework in was.extensions else EVERYTHING
        yield Change(name, what, why, remedy, about=about)


def _driver(was: Observation, now: Observation) -> Iterator[Change]:
    if was.driver != now.driver:
        after, before = now.driver or "missing", was.driver or "missing"
        yield Change("driver", f"NVIDIA's kernel driver is {after} now and was {before}")


def _modules(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = (
        {module_family(each.name): each for each in seen.modules} for seen in (was, now)
    )
    for name, old, new in _differing(before, after, None):
        if old is None or new is None:
            loaded = "is loaded now and was not" if new else "is not loaded now and was"
            yield Change(name, f"the module {(new or old).name} {loaded}")
        elif old.name != new.name:
            yield Change(name, f"the module {old.name} is {new.name} now")
        elif old.file != new.file:
            yield Change(name, f"the module {new.name} is {new.file} now and was {old.file}")
        else:
            yield Change(name, f"the modulefile of {new.name} was edited: {new.file}")


def _bring_back(what: str, was: Observation, now: Observation) -> str:
    """How to restore something; modules that differ may be the cause."""
    differ = [change.what for change in _modules(was, now)]
    modules = f"; modules differ: {', '.join(differ)}" if differ else ""
    paths = "PATH, LD_LIBRARY_PATH and modules select it"
    return f"restore {what} of the build ({paths}), {_REBUILD}{modules}"


def _differing(
    was: Mapping[str, object], now: Mapping[str, object], none: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Values that either has and that differ."""
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name, none), now.get(name, none)
        if before != after:
            yield name, before, after


def _left(before: str, after: str) -> bool:
    """Whether a path moved from inside the environment to outside."""
    return not isabs(before) and isabs(after)


def _mpi_series(version: str) -> tuple[str, tuple[int, ...]]:
    """Name and series of what an MPI library calls itself: Open MPI v4.1.8."""
    name = re.match(r"\D*", version)
    return name[0] if name else "", _series(version[name.end() if name else 0 :].split(" ")[0])


def _series(version: str) -> tuple[int, ...]:
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

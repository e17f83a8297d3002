"""What has changed in an environment since it was built, and whether it matters.

What matters is what a process of the environment meets: its interpreter, its packages, its
MPI, the files that Horovod's extensions link. Modules of other versions, another driver and
the like are said; they matter by what they bring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from os.path import dirname, isabs
from typing import Any, NamedTuple, TypeVar

from hvdenv.schema import decode
from hvdenv.sites.modules import family_of

T = TypeVar("T")

# Distributions that the extension of a framework is built against.
FRAMEWORK_OF = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-cpu": "tensorflow",
    "tensorflow-gpu": "tensorflow",
    "mxnet": "mxnet",
}
_REBUILD = "or build it again for what is here: `hvdenv build RECIPE --rebuild`"


class Python(NamedTuple):
    """The interpreter; its path is without links."""

    version: str
    path: str


class Mpirun(NamedTuple):
    """The mpirun that is found first; empty where there is none."""

    path: str = ""
    kind: str = ""
    version: str = ""


class Library(NamedTuple):
    """The file that the name of a library means.

    Attributes:
        path: without links; empty if there is none.
        build: its build id, or its size.
        version: what an MPI calls itself; the highest GLIBCXX of a libstdc++.
    """

    path: str = ""
    build: str = ""
    version: str = ""


class Linked(NamedTuple):
    """What an extension links.

    Attributes:
        libraries: by name, without those of its framework and of glibc.
        glibcxx, glibc: the versions of libstdc++ and glibc that it needs.
    """

    libraries: dict[str, Library]
    glibcxx: str = ""
    glibc: str = ""


class Module(NamedTuple):
    """A module that is loaded, its modulefile, and the hash of that."""

    name: str
    file: str = ""
    digest: str = ""


class Observation(NamedTuple):
    """What an environment has, as hvdenv/standalone/inspect/observe_env.py saw it.

    Paths in the environment are relative; others are absolute.

    Attributes:
        host: where it was seen.
        python: the interpreter.
        places: the folder that a package is imported from.
        built_with: versions of frameworks in Horovod's metadata.json.
        packages: versions of all Python packages.
        extensions: by framework.
        mpirun: the first on PATH.
        glibc: its version.
        driver: version of NVIDIA's kernel driver; empty without one.
        modules: in the order of their loading.
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
    """One thing that is not as it was.

    Attributes:
        subject: what it is about, such as ``libmpi.so.40``.
        what: what it is now and was, in one sentence.
        why: it matters; empty if it does no harm.
        remedy: what to do about it.
    """

    subject: str
    what: str
    why: str = ""
    remedy: str = ""

    @property
    def matters(self) -> bool:
        return bool(self.why)


def read(document: Mapping[str, Any]) -> Observation:
    """An observation from its record; keys that are not known are let through.

    Raises:
        Problem: it does not fit.
    """
    known = {key: value for key, value in document.items() if key in Observation._fields}
    return decode(Observation, known)


def compare(was: Observation, now: Observation) -> tuple[Change, ...]:
    """What has changed; what matters comes first."""
    rules: tuple[Callable[[Observation, Observation], Iterator[Change]], ...] = (
        _python,
        _places,
        _mpirun,
        _libraries,
        _glibc,
        _packages,
        _driver,
        _modules,
    )
    changes = [change for rule in rules for change in rule(was, now)]
    return tuple(sorted(changes, key=lambda change: not change.matters))


def _python(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = was.python, now.python
    if before.version != after.version:
        what = f"Python is {after.version} now and was {before.version}"
        if _series(before.version) == _series(after.version):
            yield Change("Python", what)
        else:
            why = "packages and extensions are for one Python"
            yield Change("Python", what, why, f"bring {before.version} back, {_REBUILD}")
    elif before.path != after.path:
        yield Change("Python", f"Python is {after.path} now and was {before.path}")


def _places(was: Observation, now: Observation) -> Iterator[Change]:
    for name, before, after in _both(was.places, now.places):
        what = f"{name} is imported from {after} now and was from {before}"
        if _left(before, after):
            why = f"that {name} is not the environment's"
            remedy = "look what puts its folder into PYTHONPATH, such as a module, and leave it out"
            yield Change(name, what, why, remedy)
        else:
            yield Change(name, what)


def _mpirun(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = was.mpirun, now.mpirun
    if before == after:
        return
    what = f"mpirun is {_told(after)} now and was {_told(before)}"
    same = before.kind == after.kind and _series(before.version) == _series(after.version)
    # Whether there has to be one, ranks show.
    known = {before.kind, after.kind}.isdisjoint({"unknown", ""})
    if same or not known or not _links_mpi(was):
        yield Change("mpirun", what)
    else:
        why = "Horovod was built with the other one"
        yield Change("mpirun", what, why, _bring_back("the MPI", was, now))


def _told(mpirun: Mpirun) -> str:
    if not mpirun.path:
        return "not there"
    named = f"{mpirun.kind} {mpirun.version}" if mpirun.version else "of an unknown MPI"
    return f"{mpirun.path} ({named})"


def _links_mpi(seen: Observation) -> bool:
    return any(_is_mpi(name) for linked in seen.extensions.values() for name in linked.libraries)


def _is_mpi(name: str) -> bool:
    return name.startswith("libmpi")


def _libraries(was: Observation, now: Observation) -> Iterator[Change]:
    """The same change for several frameworks is said once."""
    found: dict[tuple[str, Library, Library], list[str]] = {}
    for framework, linked in was.extensions.items():
        others = now.extensions.get(framework, Linked({})).libraries
        for name, before, after in _both(linked.libraries, others):
            if before.path:
                found.setdefault((name, before, after), []).append(framework)
    for (name, before, after), frameworks in found.items():
        why = _harm(name, before, after, was, now)
        what = f"{name} {_instead(before, after)} (linked for {', '.join(frameworks)})"
        yield Change(name, what, why, _bring_back(name, was, now) if why else "")


def _instead(before: Library, after: Library) -> str:
    if not after.path:
        return f"is not found any more and was {before.path}"
    version = f" ({after.version})" if after.version not in ("", before.version) else ""
    if before.path == after.path:
        return f"is another build now{version}: {after.path}"
    return f"is {after.path}{version} now and was {before.path}"


def _harm(name: str, before: Library, after: Library, was: Observation, now: Observation) -> str:
    """Why another file under the name of a library matters; empty if it does not."""
    if not after.path:
        return "the extension does not load without it"
    if name.startswith("libstdc++."):
        return _lacks("GLIBCXX", after.version, [each.glibcxx for each in was.extensions.values()])
    if _left(before.path, after.path):
        return "the environment has a file of its own for it, which is not used"
    if not _is_mpi(name):
        return ""  # its name stands for an interface, and that is the same
    asked = before.version and after.version
    if asked and _mpi_series(before.version) != _mpi_series(after.version):
        return f"Horovod was built with {before.version}; this is {after.version}"
    if now.mpirun.path and _is_of(was.mpirun, before) and not _is_of(now.mpirun, after):
        return f"that is not the MPI of {now.mpirun.path}, which starts the ranks"
    return ""


def _is_of(mpirun: Mpirun, library: Library) -> bool:
    """Whether a library lies where its launcher's do."""
    prefix = dirname(dirname(mpirun.path))
    return bool(prefix) and library.path.startswith(f"{prefix}/lib")


def _lacks(series: str, found: str, needed: list[str]) -> str:
    highest = max(needed, key=_numbers, default="")
    if not found or _numbers(found) >= _numbers(highest):
        return ""
    return f"it has {series} up to {found}, and the extension needs {highest}"


def _glibc(was: Observation, now: Observation) -> Iterator[Change]:
    if was.glibc == now.glibc:
        return
    what = f"glibc is {now.glibc} now and was {was.glibc}"
    why = _lacks("GLIBC", now.glibc, [each.glibc for each in was.extensions.values()])
    remedy = f"use it where glibc is as on {was.host}, {_REBUILD}" if why else ""
    yield Change("glibc", what, why, remedy)


def _packages(was: Observation, now: Observation) -> Iterator[Change]:
    for name, before, after in _any(was.packages, now.packages, ""):
        what = f"{name} is {after or 'not there'} now and was {before or 'not there'}"
        framework = FRAMEWORK_OF.get(name, "")
        why = ""
        if before and name == "horovod":
            why = "that is not the Horovod that was built"
        # What it was built with stands in the extension; the check of that says it.
        elif before and framework in was.extensions and framework not in was.built_with:
            why = "Horovod was built with the other one"
        remedy = f"install {name}=={before} again, {_REBUILD}" if why else ""
        yield Change(name, what, why, remedy)


def _driver(was: Observation, now: Observation) -> Iterator[Change]:
    if was.driver != now.driver:
        after, before = now.driver or "not there", was.driver or "not there"
        yield Change("driver", f"NVIDIA's kernel driver is {after} now and was {before}")


def _modules(was: Observation, now: Observation) -> Iterator[Change]:
    before, after = ({family_of(each.name): each for each in seen.modules} for seen in (was, now))
    for name, old, new in _any(before, after, None):
        if old is None or new is None:
            loaded = "is loaded now and was not" if new else "is not loaded now and was"
            yield Change(name, f"the module {(new or old).name} {loaded}")
        elif old.name != new.name:
            yield Change(name, f"the module {old.name} is {new.name} now")
        elif old.file != new.file:
            yield Change(name, f"the module {new.name} is {new.file} now and was {old.file}")
        else:
            yield Change(name, f"the file of the module {new.name} was edited: {new.file}")


def _bring_back(what: str, was: Observation, now: Observation) -> str:
    """How to have something as it was; modules that differ may be the cause."""
    differ = [change.what for change in _modules(was, now)]
    modules = f"; modules differ: {', '.join(differ)}" if differ else ""
    paths = "PATH, LD_LIBRARY_PATH and modules decide it"
    return f"see that {what} is the one that was there ({paths}), {_REBUILD}{modules}"


def _both(was: Mapping[str, T], now: Mapping[str, T]) -> Iterator[tuple[str, T, T]]:
    """What both have and is not the same."""
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield name, was[name], now[name]


def _any(
    was: Mapping[str, Any], now: Mapping[str, Any], none: Any
) -> Iterator[tuple[str, Any, Any]]:
    """What either has and is not the same."""
    names = {**was, **now}
    for name in sorted(names):
        before, after = was.get(name, none), now.get(name, none)
        if before != after:
            yield name, before, after


def _left(before: str, after: str) -> bool:
    """Whether what was in the environment is outside of it."""
    return not isabs(before) and isabs(after)


def _mpi_series(version: str) -> tuple[str, tuple[int, ...]]:
    """What an MPI library calls itself, without what may change: Open MPI v4.1.8."""
    name = re.match(r"\D*", version)
    return name[0] if name else "", _series(version[name.end() if name else 0 :].split(" ")[0])


def _series(version: str) -> tuple[int, ...]:
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

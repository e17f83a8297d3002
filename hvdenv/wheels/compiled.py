"""Compiled wheels that `hvdenv fetch` adds to the fetched files of a lock.

Which wheel a build can use depends on the compiler, MPI and C library of the machine that
builds. So all wheels are added that fit as far as the lock states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hvdenv.errors import HvdenvError
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, Locked
from hvdenv.wheels import wheelcache
from hvdenv.wheels.wheelcache import Cache, NotUsedError

# A wheel cache in the folder of fetched files.
FOLDER = "wheels"


def carry(
    caches: Iterable[Cache], wheel_inputs: Mapping[str, Any], locked: Locked, to: Path
) -> tuple[int, tuple[str, ...]]:
    """Copy the compiled wheels that a build from a lock may use into a folder of fetched files.

    Returns how many there are, and why others were left out.

    Args:
        wheel_inputs: of the plan of that build.

    Raises:
        StepError: the folder cannot be written.
    """
    target, notes = Cache(to / FOLDER), []
    for cache in caches:
        try:
            names = wheelcache.names(cache)
        except HvdenvError as error:
            notes.append(f"cached wheels not used: {error.where}: {error.message}")
            continue
        for name in names:
            try:
                record = wheelcache.read(cache, name)
                if record and _fits(record.inputs, wheel_inputs, locked):
                    with TemporaryDirectory() as folder:
                        wheel = Path(folder) / record.file
                        wheelcache.check(cache, record, wheel)
                        wheelcache.store(target, record.inputs, wheel)
            except NotUsedError as error:
                notes.append(f"cached wheel not used: {error}")
    return len(wheelcache.names(target)), tuple(notes)


def _fits(inputs: Mapping[str, Any], wheel_inputs: Mapping[str, Any], locked: Locked) -> bool:
    stack, target = inputs.get("stack", {}), locked.lock.inputs
    same = {name: value for name, value in inputs.items() if name != "stack"} == wheel_inputs
    versions = {each.name: each.version for each in pypi.packages(locked)}
    if CONDA in locked.texts:
        versions |= condalock.for_pip(condalock.packages(locked))
    return (
        same
        and f"cpython-{target.python.replace('.', '')}" in stack.get("soabi", "")
        and stack.get("machine") == target.platform.partition("-")[2]
        and all(
            versions.get(each["package"], each["version"]) == each["version"]
            for each in stack.get("frameworks", {}).values()
        )
    )


def cache_in(source: Path | None) -> tuple[str, ...]:
    """The folder of wheels among fetched files; empty if there is none."""
    folder = source / FOLDER if source else None
    return (str(folder),) if folder and folder.is_dir() else ()

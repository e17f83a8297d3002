"""Compiled wheels that `hvdenv fetch` adds to the fetched files of a lock.

Which wheel a build can use depends on the compiler, MPI and C library of the machine that
builds. So all wheels are added that fit as far as the lock states.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdenv.errors import HvdenvError
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, Locked
from hvdenv.wheels import wheelcache
from hvdenv.wheels.cache_entry import Cache, NotUsedError, check, open_entry

# A wheel cache in the folder of fetched files.
FOLDER = "wheels"


def fitting(
    caches: Iterable[Cache], wheel_inputs: Mapping[str, Any], locked: Locked
) -> tuple[dict[str, Cache], tuple[str, ...]]:
    """The compiled wheels that a build from a lock may use, if its plan has these wheel_inputs.

    Returns the key of each with the first cache that has it, and why others were left out.
    """
    chosen: dict[str, Cache] = {}
    notes = []
    for cache in caches:
        try:
            names = wheelcache.names(cache)
        except HvdenvError as error:
            notes.append(f"cached wheels not used: {error.where}: {error.message}")
            continue
        for name in names:
            try:
                with open_entry(cache, name) as entry:
                    if entry:
                        check(entry)
                        if _fits(entry.inputs, wheel_inputs, locked):
                            chosen.setdefault(name, cache)
            except NotUsedError as error:
                notes.append(f"cached wheel not used: {error}")
    return chosen, tuple(notes)


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


def carry(chosen: Mapping[str, Cache], to: Path) -> None:
    """Copy wheels from fitting() into a folder of fetched files.

    Raises:
        RecipeError: an entry was damaged meanwhile.
        StepError: the folder cannot be written.
    """
    if not chosen:
        return
    folder = to / FOLDER
    folder.mkdir(exist_ok=True)
    # Entries of a folder that others can write would not be used.
    os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) & 0o755)
    wheelcache.copy(chosen, Cache(folder, shared=True))


def cache_in(source: Path | None) -> tuple[str, ...]:
    """The folder of wheels among fetched files; empty if there is none."""
    folder = source / FOLDER if source else None
    return (str(folder),) if folder and folder.is_dir() else ()

"""Compiled wheels that go along with the fetched files of a lock.

Which one a build takes is only known where it builds: its compiler, MPI and C library have a
part in that. So all go along that fit as far as the lock can tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdenv.errors import HvdenvError
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, Locked
from hvdenv.runner import Runner
from hvdenv.wheels import wheelarchive, wheelcache
from hvdenv.wheels.cache_entry import Cache, NotUsedError, whole

# Below the folder of fetched files: a cache of wheels.
FOLDER = "wheels"


def fitting(
    caches: Iterable[Cache], wheel_inputs: Mapping[str, Any], locked: Locked, runner: Runner
) -> tuple[dict[str, Cache], tuple[str, ...]]:
    """The wheels that a build of a lock may be able to take.

    Args:
        caches: where to look, in this order.
        wheel_inputs: of the plan.
        locked: the lock.
        runner: runs what verifies signatures.

    Returns:
        The key of each with the cache that has it; and why caches or entries were left out.
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
                with whole(cache, name, runner) as entry:
                    if entry and _fits(entry.inputs, wheel_inputs, locked):
                        chosen.setdefault(name, cache)
            except NotUsedError as error:
                notes.append(f"cached wheel not used: {error}")
    return chosen, tuple(notes)


def _fits(inputs: Mapping[str, Any], wheel_inputs: Mapping[str, Any], locked: Locked) -> bool:
    stack, wanted = inputs.get("stack", {}), locked.lock.inputs
    same = {name: value for name, value in inputs.items() if name != "stack"} == wheel_inputs
    versions = {each.name: each.version for each in pypi.packages(locked)}
    if CONDA in locked.texts:
        versions |= condalock.for_pip(condalock.packages(locked))
    return (
        same
        and f"cpython-{wanted.python.replace('.', '')}" in stack.get("soabi", "")
        and stack.get("machine") == wanted.platform.partition("-")[2]
        and all(
            versions.get(each["package"], each["version"]) == each["version"]
            for each in stack.get("frameworks", {}).values()
        )
    )


def carry(chosen: Mapping[str, Cache], to: Path, work: Path, runner: Runner) -> None:
    """Put wheels into a folder of fetched files.

    Args:
        chosen: as fitting() has them.
        to: the folder.
        work: a folder for what is needed on the way.
        runner: runs what verifies signatures.

    Raises:
        RecipeError: an entry was damaged meanwhile.
        StepError: the folder cannot be written.
    """
    if not chosen:
        return
    folder, archive = to / FOLDER, work / "wheels.tar"
    folder.mkdir(exist_ok=True)
    # Entries of a folder that others can write are not used.
    os.chmod(folder, 0o755)
    wheelarchive.export(chosen, archive, runner)
    wheelarchive.take_in(Cache(folder, shared=True), archive, runner)


def cache_in(source: Path | None) -> tuple[str, ...]:
    """The folder of wheels among fetched files; none if none went along."""
    folder = source / FOLDER if source else None
    return (str(folder),) if folder and folder.is_dir() else ()

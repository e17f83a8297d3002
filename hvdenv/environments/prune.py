"""Going back to an earlier generation, and removing environments and generations.

Nothing without hvdenv's marker is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from hvdenv.environments import prefix_lock
from hvdenv.environments.generations import TEMPORARY, Environment, delete, erase, switch
from hvdenv.environments.in_use import Uses, uses
from hvdenv.environments.prefixes import occupant
from hvdenv.errors import BusyError, UsageError
from hvdenv.places import LEFT_ALONE_SECONDS, reporting, sweep, sync


class Cleared(NamedTuple):
    """What remove() or prune() did.

    Attributes:
        kept: generation or path, and why it was not deleted.
        unseen: number of other users' processes that could not be checked.
    """

    removed: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    unseen: int


def rollback(environment: Environment, identity: str = "") -> str:
    """Point the prefix to a complete generation (default: the one before), and return it.

    Raises:
        UsageError: there is no such generation.
        BusyError: a build holds the environment.
    """
    _require(environment)
    with prefix_lock.hold(environment.store, wait=0):
        known = _whole(environment)
        active = environment.active()
        older = known[known.index(active) + 1 :] if active in known else known
        wanted = identity or (older[0] if older else "")
        if wanted not in known:
            raise UsageError(
                f"no complete generation {identity}" if identity else "no earlier generation",
                where=str(environment.prefix),
                remedy=f"complete are: {', '.join(known) or 'none'}; active is {active or 'none'}",
            )
        switch(environment, wanted)
    return wanted


def remove(environment: Environment, *, force: bool = False) -> Cleared:
    """Remove an environment: its link and every generation that hvdenv made for it.

    Raises:
        UsageError: there is no environment.
        BusyError: a build holds it, or a process uses it.
        StepError: no permission.
    """
    _require(environment)
    prefix, store = environment.prefix, environment.store
    with prefix_lock.hold(store, wait=0):
        found = Uses((), 0) if force else uses(environment)
        if found.users:
            raise BusyError(
                f"in use by {found}",
                where=str(prefix),
                remedy="end them first, or remove it anyway with --force "
                "(processes on other hosts are not checked)",
            )
        kept = []
        if environment.pointed():
            with reporting(prefix, "remove"):
                prefix.unlink()
                sync(prefix.parent)
        elif os.path.lexists(prefix):
            kept.append((str(prefix), f"is {occupant(prefix)}"))
        cleared = _delete(environment, environment.identities(), found)
        kept += [*cleared.kept, *_clean(store, seconds=0)]
    try:
        store.rmdir()
    except OSError:
        # Besides the lock of a new build, and what could not be deleted.
        ours = (prefix_lock.PREFIX, *TEMPORARY)
        others = sorted(each for each in store.glob("*") if not each.name.startswith(ours))
        kept += [(str(each), "hvdenv did not make it") for each in others]
    return cleared._replace(kept=tuple(kept))


def prune(
    environment: Environment,
    *,
    keep: int,
    spare: Callable[[str], bool] = lambda identity: False,
    dry_run: bool = False,
) -> Cleared:
    """Remove old and unfinished generations, except those that processes use.

    Args:
        keep: how many complete ones to keep besides the active one, newest first.

    Raises:
        UsageError: there is no environment.
        BusyError: a build holds it.
        StepError: no permission.
    """
    _require(environment)
    with nullcontext() if dry_run else prefix_lock.hold(environment.store, wait=0):
        pointed = environment.pointed()
        complete = [identity for identity in _whole(environment) if identity != pointed]
        spared = {pointed, *complete[:keep]}
        old = [each for each in environment.identities() if each not in spared and not spare(each)]
        cleared = _delete(environment, old, uses(environment), dry_run=dry_run)
        kept = () if dry_run else _clean(environment.store)
    return cleared._replace(kept=(*cleared.kept, *kept))


def _delete(
    environment: Environment, identities: Iterable[str], found: Uses, *, dry_run: bool = False
) -> Cleared:
    """Delete the generations that no process uses."""
    removed, kept = [], []
    for identity in identities:
        if users := found.select(identity):
            note = f"in use by {users}"
        else:
            note = "" if dry_run else delete(environment, identity)
        if note:
            kept.append((identity, note))
        else:
            removed.append(identity)
    return Cleared(tuple(removed), tuple(kept), found.unseen)


def _whole(environment: Environment) -> list[str]:
    """The complete generations whose files are there, the newest first."""
    return [each for each in environment.records() if not environment.damage(each)]


def _require(environment: Environment) -> None:
    if not environment.store.is_dir() or environment.store.is_symlink():
        raise UsageError(
            "no environment that hvdenv built",
            where=str(environment.prefix),
            remedy="list them with `hvdenv envs`",
        )


def _clean(store: Path, seconds: float = LEFT_ALONE_SECONDS) -> tuple[tuple[str, str], ...]:
    """Delete what killed processes left in a store whose lock is held; see sweep()."""
    sweep(store, seconds=seconds)
    left = (each for each in sorted(store.iterdir()) if each.name.startswith(TEMPORARY))
    return tuple((str(each), note) for each in left if (note := erase(each)))

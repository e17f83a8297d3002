"""Going back to an earlier generation, and removing environments and generations.

Nothing without hvdenv's marker is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from hvdenv.environments import prefix_lock
from hvdenv.environments.generations import TEMPORARY, Environment, delete, erase, switch
from hvdenv.environments.in_use import User, Uses, uses
from hvdenv.environments.prefixes import what_is_at
from hvdenv.errors import BusyError, UsageError
from hvdenv.places import reporting, sweep, sync


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
        known = list(environment.records())
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
    with prefix_lock.hold(environment.store, wait=0):
        found = Uses((), 0) if force else uses(environment)
        if found.users:
            raise BusyError(
                f"in use by {_name(found.users)}",
                where=str(environment.prefix),
                remedy="end them first, or remove it anyway with --force "
                "(processes on other hosts are not checked)",
            )
        kept = []
        if environment.pointed():
            with reporting(environment.prefix, "remove"):
                environment.prefix.unlink()
                sync(environment.prefix.parent)
        elif os.path.lexists(environment.prefix):
            kept.append((str(environment.prefix), f"is {what_is_at(environment.prefix)}"))
        identities = environment.identities()
        kept += [(name, note) for name in identities if (note := delete(environment, name))]
        sweep(environment.store, seconds=0)
        kept += _clean(environment.store)
    try:
        environment.store.rmdir()
    except OSError:
        kept += _strangers(environment.store)
    kept_names = {name for name, _ in kept}
    return Cleared(
        tuple(name for name in identities if name not in kept_names), tuple(kept), found.unseen
    )


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
    removed, kept = [], []
    with nullcontext() if dry_run else prefix_lock.hold(environment.store, wait=0):
        found = uses(environment)
        for identity in _prunable(environment, keep, spare):
            if users := found.of(identity):
                note = f"in use by {_name(users)}"
            else:
                note = "" if dry_run else delete(environment, identity)
            if note:
                kept.append((identity, note))
            else:
                removed.append(identity)
        kept += [] if dry_run else _clean(environment.store)
    return Cleared(tuple(removed), tuple(kept), found.unseen)


def _prunable(environment: Environment, keep: int, spare: Callable[[str], bool]) -> list[str]:
    """The generations to remove unless a process uses them."""
    pointed = environment.pointed()
    complete = [identity for identity in environment.records() if identity != pointed]
    spared = {pointed, *complete[:keep]}
    return [each for each in environment.identities() if each not in spared and not spare(each)]


def _require(environment: Environment) -> None:
    if not environment.store.is_dir() or environment.store.is_symlink():
        raise UsageError(
            "no environment that hvdenv built",
            where=str(environment.prefix),
            remedy="list them with `hvdenv envs`",
        )


def _clean(store: Path) -> list[tuple[str, str]]:
    """Delete what killed processes left in a store whose lock is held."""
    sweep(store)
    kept = []
    for name in sorted(os.listdir(store)):
        if name.startswith(TEMPORARY) and (note := erase(store / name)):
            kept.append((str(store / name), note))
    return kept


def _strangers(store: Path) -> list[tuple[str, str]]:
    """What keeps a store from being removed, other than the lock of a new build."""
    try:
        names = sorted(os.listdir(store))
    except FileNotFoundError:
        return []
    return [
        (str(store / name), "hvdenv did not make it")
        for name in names
        if not name.startswith((prefix_lock.PREFIX, *TEMPORARY))
    ]


def _name(users: tuple[User, ...]) -> str:
    shown = [f"process {user.pid} ({user.name})" for user in users[:5]]
    more = [f"{len(users) - 5} more"] if len(users) > 5 else []
    return ", ".join(shown + more)

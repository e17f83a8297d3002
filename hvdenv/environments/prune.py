"""Remove generations and environments that no process on this host uses, and roll back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdenv.base import runner
from hvdenv.base.errors import BusyError
from hvdenv.base.places import LEFT_ALONE_SECONDS, reporting, sweep, sync
from hvdenv.base.reading import SYSTEM, open_file
from hvdenv.environments import prefix_lock
from hvdenv.environments.activation import ACTIVE, SHELL
from hvdenv.environments.generations import (
    IMAGE,
    TEMPORARY,
    Environment,
    begins,
    delete,
    erase,
    occupant,
    require,
    switch,
)


class Process(NamedTuple):
    """A process that uses some generations; none are named if it is unknown which."""

    pid: int
    name: str
    generations: frozenset[str]

    def uses(self, identity: str) -> bool:
        """Whether it uses a generation, or may do so."""
        return identity in (self.generations or {identity})


def _said(processes: Sequence[Process]) -> str:
    shown = [f"process {each.pid} ({each.name})" for each in processes[:5]]
    more = [f"{len(processes) - 5} more"] if len(processes) > 5 else []
    return f"in use by {', '.join(shown + more)}"


def users(environment: Environment) -> list[Process]:
    """Find the processes on this host that run from, work in, have loaded or activated a generation.

    A process that was started through the prefix and shows no generation counts as a user of
    every one: the link may have been switched. Only its children show what a shell activated.
    Processes of other users show little.
    """
    processes, roots = [], _roots(environment)
    for process in psutil.process_iter(["cmdline", "environ", "exe", "cwd", "name"]):
        if process.pid == os.getpid():
            continue
        # None is what this user may not see.
        arguments, *places = (process.info[each] for each in ("cmdline", "exe", "cwd"))
        named = (os.path.join(places[1] or "", each) for each in arguments or ())
        used = _inside(roots, [*named, *filter(None, places), *_mapped(process.pid)])
        variables = [process.info["environ"] or {}]
        variables += [runner.environment()] if process.pid == os.getppid() else []
        values = [each.get(name, "") for each in variables for name in (*ACTIVE, SHELL, "PATH")]
        activated = _inside(roots, [path for each in values for path in each.split(os.pathsep)])
        if used or activated:
            # A variable that names the prefix leads to whichever generation is active.
            found = used | {each or environment.pointed() for each in activated}
            known = frozenset() if used == {""} else frozenset(found - {""})
            processes.append(Process(process.pid, process.info["name"], known))
    return processes


def _mapped(pid: int) -> set[str]:
    """The files that a process has mapped into its memory, as far as this user may see them."""
    try:
        with open_file(f"/proc/{pid}/maps", SYSTEM) as stream:
            fields = (os.fsdecode(line).rstrip("\n").split(None, 5) for line in stream)
            return {field[5] for field in fields if len(field) == 6}
    except OSError:
        return set()


def _roots(environment: Environment) -> dict[str, bool]:
    """How paths in an environment begin, and whether the name of a generation follows."""
    parent = environment.prefix.parent
    folders = {os.fspath(parent), os.path.realpath(parent)}
    names = ((environment.store.name, True), (environment.prefix.name, False))
    return {os.path.join(folder, name, ""): each for name, each in names for folder in folders}


def _inside(roots: dict[str, bool], paths: Iterable[str]) -> set[str]:
    """The generations that paths are in; empty for one that is in the environment otherwise."""
    found = set()
    for path in map(os.path.normpath, paths):
        for root, generations in roots.items():
            # The prefix alone, with or without a slash, is an option of some command.
            if path.startswith(root):
                name = path[len(root) :].partition(os.sep)[0] if generations else ""
                # Of ONE.sqsh.enter.py too, which stays in the command line of a launcher.
                found.add(name.partition(IMAGE)[0])
    return found


class Cleared(NamedTuple):
    """What remove() or prune() did.

    Attributes:
        kept: generation or path, and why it was not deleted.
    """

    removed: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]


def rollback(environment: Environment, identity: str = "") -> str:
    """Point the prefix to a complete generation (default: the one before), and return it.

    Args:
        identity: the generation, or its first digits.

    Raises:
        UsageError: there is no such generation, or several.
        BusyError: a build holds the environment.
    """
    require(environment)
    with prefix_lock.hold(environment.store, wait=0):
        known = _whole(environment)
        active = environment.active()
        older = known[known.index(active) + 1 :] if active in known else known
        wanted = identity or next(iter(older), "")
        found = begins(environment, known, wanted, "no earlier generation")
        switch(environment, found)
    return found


def remove(environment: Environment, *, force: bool = False) -> Cleared:
    """Remove an environment: its link and every generation that hvdenv made for it.

    Raises:
        UsageError: there is no environment.
        BusyError: a build holds it, or a process uses it.
        StepError: no permission.
    """
    require(environment)
    prefix, store = environment.prefix, environment.store
    with prefix_lock.hold(store, wait=0):
        if found := [] if force else users(environment):
            raise BusyError(
                _said(found),
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
        cleared = _delete(environment, environment.identities(), [])
        kept += [*cleared.kept, *_clean(store, seconds=0)]
    try:
        store.rmdir()
    except OSError:
        # Besides the lock of a new build, and what could not be deleted.
        ours = (prefix_lock.PREFIX, f".{prefix_lock.PREFIX}", *TEMPORARY)
        others = sorted(each for each in store.glob("*") if not each.name.startswith(ours))
        kept += [(str(each), "hvdenv did not make it") for each in others]
    return cleared._replace(kept=tuple(kept))


def prune(
    environment: Environment,
    *,
    keep: int,
    before: str = "",
    dry_run: bool = False,
) -> Cleared:
    """Remove old and unfinished generations, except those that processes use.

    Args:
        keep: how many complete ones to keep besides the active one, newest first.
        before: complete ones that were built after this time are kept, too; empty for no time.

    Raises:
        UsageError: there is no environment.
        BusyError: a build holds it.
        StepError: no permission.
    """
    require(environment)
    with nullcontext() if dry_run else prefix_lock.hold(environment.store, wait=0):
        pointed = environment.pointed()
        complete = [identity for identity in _whole(environment) if identity != pointed]
        spared = {pointed, *complete[:keep]}
        if before:
            records = environment.records().items()
            spared |= {identity for identity, record in records if record.created > before}
        old = [each for each in environment.identities() if each not in spared]
        found = users(environment) if old else []
        cleared = _delete(environment, old, found, dry_run=dry_run)
        kept = () if dry_run else _clean(environment.store)
    return cleared._replace(kept=(*cleared.kept, *kept))


def _delete(
    environment: Environment,
    identities: Iterable[str],
    found: Sequence[Process],
    *,
    dry_run: bool = False,
) -> Cleared:
    """Delete the generations that no process uses."""
    removed, kept = [], []
    for identity in identities:
        if using := [each for each in found if each.uses(identity)]:
            note = _said(using)
        else:
            note = "" if dry_run else delete(environment, identity)
        if note:
            kept.append((identity, note))
        else:
            removed.append(identity)
    return Cleared(tuple(removed), tuple(kept))


def _whole(environment: Environment) -> list[str]:
    """The complete generations whose files are there, the newest first."""
    return [each for each in environment.records() if not environment.damage(each)]


def _clean(store: Path, seconds: float = LEFT_ALONE_SECONDS) -> tuple[tuple[str, str], ...]:
    """Delete what killed processes left in a store whose lock is held; see sweep()."""
    sweep(store, seconds=seconds)
    # One that another process is about to use is written again.
    sweep(store, prefix_lock.PREFIX, seconds=0)
    left = (each for each in sorted(store.iterdir()) if each.name.startswith(TEMPORARY))
    return tuple((str(each), note) for each in left if (note := erase(each)))

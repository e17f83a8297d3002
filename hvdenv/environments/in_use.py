"""Which processes on this host use the generations of an environment."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

import psutil

from hvdenv.environments.generations import IMAGE, Environment
from hvdenv.reading import SYSTEM, open_file


class User(NamedTuple):
    """A process that uses a generation; the generation's name is empty if unknown."""

    pid: int
    name: str
    generation: str


class Uses(NamedTuple):
    """The processes that use an environment, and how many others could not be checked."""

    users: tuple[User, ...]
    unseen: int

    def of(self, identity: str) -> Uses:
        """Those that use this generation, or may do so."""
        users = (user for user in self.users if user.generation in ("", identity))
        return self._replace(users=tuple(users))

    def __bool__(self) -> bool:
        return bool(self.users)

    def __str__(self) -> str:
        shown = [f"process {user.pid} ({user.name})" for user in self.users[:5]]
        more = [f"{len(self.users) - 5} more"] if len(self.users) > 5 else []
        return ", ".join(shown + more)


def uses(environment: Environment) -> Uses:
    """Find the processes on this host that run from, work in or have loaded a generation.

    A process that was started through the prefix and shows no generation counts as a
    user of every one: the link may have been switched since.
    """
    users = []
    unseen = 0
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        paths, whole = _paths_of(process)
        unseen += not whole
        seen = [found for path in paths if (found := _inside(environment, path)) is not None]
        if seen:
            with suppress(psutil.Error):
                users.append(User(process.pid, process.name(), max(seen)))
    return Uses(tuple(users), unseen)


def _paths_of(process: psutil.Process) -> tuple[list[str], bool]:
    """Every path by which a process can use an environment, and whether all could be read."""
    paths: list[str] = []
    whole = True
    try:
        arguments = process.cmdline()
        paths += arguments
    except psutil.Error:
        return paths, True
    for look in (process.exe, process.cwd):
        try:
            paths.append(look())
        except psutil.AccessDenied:
            whole = whole and not arguments  # kernel threads have no arguments
        except psutil.Error:
            return paths, True
    try:
        with open_file(f"/proc/{process.pid}/maps", SYSTEM) as stream:
            fields = (os.fsdecode(line).rstrip("\n").split(None, 5) for line in stream)
            paths += {field[5] for field in fields if len(field) == 6}
    except OSError:
        pass
    return paths, whole


def _inside(environment: Environment, path: str) -> str | None:
    """The generation that a path is in, or empty if unknown; None if it is elsewhere."""
    for name, generations in ((environment.store.name, True), (environment.prefix.name, False)):
        parent = environment.prefix.parent
        for folder in {os.fspath(parent), os.path.realpath(parent)}:
            root = os.path.join(folder, name) + os.sep
            # The prefix alone, with or without a slash, is an option of some command.
            if path.rstrip(os.sep).startswith(root):
                name = path[len(root) :].partition(os.sep)[0] if generations else ""
                # Of ONE.sqsh.enter.py too, which stays in the command line of a launcher.
                return name.partition(IMAGE)[0]
    return None

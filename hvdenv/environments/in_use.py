"""Which processes on this host use the generations of an environment."""

from __future__ import annotations

import os
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

    def select(self, identity: str) -> Uses:
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
    for process in psutil.process_iter(["cmdline", "exe", "cwd", "name"]):
        if process.pid == os.getpid():
            continue
        # None is what this user may not see. Kernel threads have no arguments.
        arguments, *places = (process.info[each] for each in ("cmdline", "exe", "cwd"))
        unseen += bool(arguments) and None in places
        paths = [*(arguments or ()), *filter(None, places), *_mapped(process.pid)]
        seen = [found for path in paths if (found := _inside(environment, path)) is not None]
        if seen:
            users.append(User(process.pid, process.info["name"], max(seen)))
    return Uses(tuple(users), unseen)


def _mapped(pid: int) -> set[str]:
    """The files that a process has mapped into its memory, as far as this user may see them."""
    try:
        with open_file(f"/proc/{pid}/maps", SYSTEM) as stream:
            fields = (os.fsdecode(line).rstrip("\n").split(None, 5) for line in stream)
            return {field[5] for field in fields if len(field) == 6}
    except OSError:
        return set()


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

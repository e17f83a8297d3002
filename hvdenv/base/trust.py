"""Whose files hvdenv executes: the one place that decides, in the manner of sshd's StrictModes.

A file that hvdenv reads is judged by the descriptor that its bytes came from, what programs open
later by its path. Each link on the way counts, and each directory up to the first one of root or of
the user; directories above that one only must not let everybody exchange it.
"""

import grp
import os
import pwd
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from glob import escape, glob
from os.path import dirname
from typing import NamedTuple

from hvdenv.base.places import OTHERS_WRITE, user_name, walk
from hvdenv.base.reading import RECIPE, SYSTEM, Content, read_text

Owners = frozenset[int]
Status = os.stat_result
# Directories of an environment whose entries count without `whole`, too: bin/activate, *.pth.
_EXECUTED = re.compile(
    r"((venv|conda)/?)?(bin|lib(64)?(/python3[^/]*)?(/site-packages)?|etc(/conda)?(/activate\.d)?)?"
)
# What pyvenv.cfg and .pth files name.
_HOME = re.compile(r"(?im)^[ \t]*home[ \t]*=(.*)")
_FOLDERS = re.compile(r"(?im)^(?!import[ \t])(.+)")


class Fault(NamedTuple):
    """Why another user can change something; a note if clusters are like that, and it is used."""

    path: str
    problem: str
    remedy: str
    note: bool = False


def trusted_owners(names: Iterable[str] = ()) -> Owners:
    """Users whose files are used: this one, root, the owners of hvdenv and of its Python (whose
    code runs already), and those that a site file names. An unknown name is nobody."""
    found = {os.geteuid(), 0, *map(user_id, names)}
    for each in (__file__, sys.executable):
        with suppress(OSError):
            found.add(os.stat(each).st_uid)
    return frozenset(each for each in found if each not in (None, _overflow("uid")))


def user_id(name: str) -> int | None:
    """The id of a user by name or number; None if this host does not know the user."""
    with suppress(KeyError):
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    return None


@cache
def _overflow(kind: str) -> int:
    """The id that stands for all users ("uid") or groups ("gid") that this host does not know."""
    with suppress(OSError, ValueError):
        return int(read_text(f"/proc/sys/kernel/overflow{kind}", SYSTEM))
    return 65534


def judge(path: str, status: Status, owners: Owners, *, last: bool = True) -> Iterator[Fault]:
    """What lets others change a file or directory, or exchange a link.

    Args:
        last: it is used itself. Otherwise it leads there, and the sticky bit of a trusted owner
            helps: nobody else can rename or remove what is in the directory.
    """
    mode = status.st_mode
    if status.st_uid not in owners:
        yield _foreign(path, status.st_uid)
    if stat.S_ISLNK(mode) or (_is_sticky(mode) and not last and status.st_uid in owners):
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        yield Fault(path, "is neither a file nor a directory", "name another one")
    elif mode & stat.S_IWOTH:
        fix = f"`chmod o-w {shlex.quote(path)}` if it is yours"
        yield Fault(path, "can be written by everybody", fix)
    elif mode & stat.S_IWGRP:
        yield from _by_group(path, status)


def _is_sticky(mode: int) -> bool:
    return stat.S_ISDIR(mode) and mode & stat.S_ISVTX != 0


def _foreign(path: str, owner: int) -> Fault:
    name = user_name(owner)
    problem = f"belongs to {'uid ' * name.isdecimal()}{name}"
    if owner != _overflow("uid"):
        fix = f'to trust this user, set trust.owners = ["{name}"] in a site file'
        return Fault(path, problem, fix)
    why = "the file server does not show who owns it"
    with suppress(OSError, ValueError):
        if sum(map(int, read_text("/proc/self/uid_map", SYSTEM).split()[2::3])) < 2**32 - 1:
            why = "this user namespace does not show all users"
    problem += f": ownership cannot be judged here, because {why}"
    return Fault(path, problem, "look at it on a host that shows its owner")


def _by_group(path: str, status: Status) -> Iterator[Fault]:
    """What members of its group can write, or users whom an access control list names. A list is
    not parsed: the group's rights in the mode are the most that it gives."""
    group, quoted = status.st_gid, shlex.quote(path)
    member = group in {os.getegid(), *os.getgroups()} - {_overflow("gid")}
    with suppress(OSError):  # there is none, or the file system has none
        os.getxattr(path, "system.posix_acl_access")
        problem = "can be written by those whom its access control list names"
        project = member and status.st_uid == 0 and stat.S_ISDIR(status.st_mode)
        yield Fault(path, problem, f"`setfacl -b {quoted}` if it is yours", project)
        return
    # Not the owner's private group.
    if group != 0 and _members(group) != {user_name(status.st_uid)}:
        fix = f"`chmod g-w {quoted}` if it is yours"
        problem = f"can be written by the group {_group_name(group)}"
        yield Fault(path, problem, fix, note=member)


@cache
def _members(group: int) -> frozenset[str]:
    """The name of a group, and those of its members, as far as this host lists them."""
    listed = {each.pw_name for each in pwd.getpwall() if each.pw_gid == group}
    with suppress(KeyError):
        listed.update(grp.getgrgid(group).gr_mem)
    return frozenset({_group_name(group), *listed})


def _group_name(group: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(group).gr_name
    return f"id {group}"


def judge_way(
    path: str | os.PathLike[str], owners: Owners, *, used: bool = False
) -> Iterator[Fault]:
    """What lets others change which file or directory is at a path, or add to it. It need not exist.

    Args:
        used: programs use it as soon as somebody creates it: nobody else may.
    """
    way = []
    with suppress(OSError):  # where this user cannot look, no program of the user's can
        for here, found, last in walk(path):
            way += [(here, found, last)] if found else []
            if not found and used and way:
                way[-1] = (*way[-1][:2], True)
    public = {here for here, status, _ in way if status.st_mode & stat.S_IWOTH}
    below, settled = "", False
    for here, status, last in reversed(way):
        mode, owner = status.st_mode, status.st_uid
        if stat.S_ISREG(mode) and status.st_nlink > 1 and dirname(here) in public:
            yield Fault(here, "is a hard link, which everybody can make there", "copy it")
        settled = settled and dirname(below) == here  # otherwise a link or ".." leads to it
        if not settled:
            yield from judge(here, status, owners, last=last)
        elif mode & stat.S_IWOTH and not (
            _is_sticky(mode) and owner in {*owners, _overflow("uid")}
        ):
            yield from judge(here, status, owners | {owner})
        settled |= stat.S_ISDIR(mode) and owner in owners & {0, os.geteuid()}
        below = here


def judge_content(content: Content, owners: Owners) -> Iterator[Fault]:
    """What could have let others write bytes; the file is not opened again."""
    yield from judge(os.path.abspath(content.path), content.status, owners)
    yield from judge_way(content.path, owners)


def judge_environment(prefix: str, owners: Owners, *, whole: bool = False) -> Iterator[Fault]:
    """What lets others change what an environment executes or imports: the way to it, all entries
    of the directories above (``whole``: all files), and what links, ``.pth`` files and ``pyvenv.cfg``
    lead to."""
    yield from judge_way(prefix, owners)
    root = os.path.realpath(prefix)
    folders = [root]
    while folders:
        for path, status in _entries(folders.pop()):
            # Fast path for nearly all of 50,000 files.
            if status.st_uid not in owners or status.st_mode & OTHERS_WRITE:
                yield from judge(path, status, owners)
            if not stat.S_ISDIR(status.st_mode):
                for each in _targets(path, root, status.st_mode):
                    yield from judge_way(each, owners, used=True)
            elif whole or _EXECUTED.fullmatch(path[len(root) + 1 :]):
                folders.append(path)


def _entries(folder: str) -> Iterator[tuple[str, Status]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # it was removed
                yield entry.path, entry.stat(follow_symlinks=False)


def _targets(path: str, root: str, mode: int) -> Iterator[str]:
    """Where a file of an environment leads Python to, or programs if it is a link."""
    folder, name = os.path.split(path)
    with suppress(OSError):
        if stat.S_ISLNK(mode):
            if "/" in os.readlink(path) and not os.path.realpath(path).startswith(f"{root}/"):
                yield path
        elif name == "pyvenv.cfg" or (name.endswith(".pth") and folder.endswith("-packages")):
            text = read_text(path, RECIPE, "replace").replace("\0", "")
            for found in (_HOME if name == "pyvenv.cfg" else _FOLDERS).findall(text):
                yield (named := os.path.join(folder, found.strip()))
                if name == "pyvenv.cfg":
                    yield from glob(f"{escape(dirname(named))}/lib*/python3*")

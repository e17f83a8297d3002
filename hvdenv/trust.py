"""Who could have changed what is about to be used: the one place that decides whether it is.

Recipes, site files and locks are judged by the bytes that were read: the owner and mode come from
the descriptor that they were read from. What programs open later (scripts, prefixes) is judged by
its path. In both cases the whole way counts: every folder and every link that leads there.

The way is looked at after the file was opened. That is no race: where every folder on it passes,
nobody else can have exchanged anything on it in the meantime.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv.errors import UntrustedError
from hvdenv.places import OTHERS_WRITE, Places, make_folder, walk, write_json
from hvdenv.reading import RECIPE, STATE, Content, read_file
from hvdenv.schema import Problem, decode

FORMAT = 1


class Granted(NamedTuple):
    """A file or folder that the user trusts (``hvdenv trust``).

    Attributes:
        path: absolute; only its last part may be a link.
        sha256: of a file's bytes; empty for a folder.
        owners: for a folder, user ids that may own it, what is in it and what leads to it.
        groups: for a folder, ids of groups that may write there.
    """

    path: str
    sha256: str = ""
    owners: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


class Policy(NamedTuple):
    """Users and groups whose files hvdenv uses.

    Attributes:
        groups: ids of groups whose members are trusted too.
    """

    owners: frozenset[int]
    groups: frozenset[int] = frozenset()
    granted: tuple[Granted, ...] = ()

    def owns(self, user: int) -> bool:
        return user in self.owners or bool(self.groups and self.groups & _groups_of(user))

    def shares(self, group: int) -> bool:
        """Whether a group may write: all of its members are trusted anyway."""
        return group in self.groups or self._nobody_else(group)

    def _nobody_else(self, group: int) -> bool:
        """Whether it is root's group, or the private group of a trusted user.

        Any other group can be the primary group of users who are not listed in it.
        """
        name, members = _group(group)
        private = group == 0 or any(_private(user, group, name) for user in self.owners)
        return private and all(self.owns(user) for user in members)

    def at(self, path: str) -> Policy:
        """The policy, extended by what was granted for a folder or one of its parents."""
        owners, groups = set(self.owners), set(self.groups)
        for each in self.granted:
            if not each.sha256 and f"{path}/".startswith(f"{each.path}/"):
                owners |= {*each.owners}
                groups |= {*each.groups}
        return self._replace(owners=frozenset(owners), groups=frozenset(groups))


class Fault(NamedTuple):
    """A reason why another user can change something.

    Attributes:
        problem: such as "belongs to ann".
        owner: the user id, where it is the owner.
        group: the group's id, where it is the group.
    """

    path: str
    problem: str
    owner: int | None = None
    group: int | None = None

    @property
    def everybody(self) -> bool:
        """Whether everybody can write: trusting an owner does not help."""
        return self.owner is None and self.group is None


def own_policy() -> Policy:
    """Trusted by default: this user, root, and the owners of hvdenv and of its Python, since
    their code runs already."""
    installed = {os.stat(each).st_uid for each in (__file__, os.path.realpath(sys.executable))}
    return Policy(frozenset({os.geteuid(), 0, *installed}))


def is_of_root(content: Content) -> bool:
    """Whether only root could have written a file."""
    return next(_of_content(content, Policy(frozenset({0}))), None) is None


def with_names(policy: Policy, owners: Iterable[str], groups: Iterable[str]) -> Policy:
    """The policy with owners and groups by name or number; one that does not exist is nobody."""

    def numbers(names: Iterable[str], lookup: Any) -> Iterator[int]:
        for name in names:
            try:
                yield int(name) if name.isdecimal() else lookup(name)[2]
            except (KeyError, OverflowError):
                continue

    return policy._replace(
        owners=policy.owners | {*numbers(owners, pwd.getpwnam)},
        groups=policy.groups | {*numbers(groups, grp.getgrnam)},
    )


def faults_on_way(path: str | os.PathLike[str], policy: Policy) -> Iterator[Fault]:
    """What lets others change which file or folder is at a path, or what is in it.

    In a folder with the sticky bit nobody can rename what others own: there, the owner of each
    entry counts. At the end of the way the sticky bit does not help: anybody could add a file.

    Args:
        path: need not exist.
    """
    found, whole = _way(path)
    for number, (here, status) in enumerate(found, 1):
        yield from _faults(here, status, policy, last=whole and number == len(found))


def _faults(here: str, status: os.stat_result, policy: Policy, *, last: bool) -> Iterator[Fault]:
    mode = status.st_mode
    if not policy.owns(status.st_uid):
        yield Fault(here, f"belongs to {_user(status.st_uid)}", owner=status.st_uid)
    if stat.S_ISLNK(mode) or (mode & stat.S_ISVTX and stat.S_ISDIR(mode) and not last):
        return
    if mode & stat.S_IWOTH:
        yield Fault(here, "can be written by everybody")
    elif mode & stat.S_IWGRP and not policy.shares(status.st_gid):
        yield _by_group(here, status.st_gid)
    if mode & stat.S_IWGRP:  # or nothing in an access control list counts
        yield from _faults_of_list(here, policy)


def _by_group(here: str, group: int) -> Fault:
    name = _group(group)[0] or str(group)
    return Fault(here, f"can be written by the group {name}", group=group)


_LIST = "system.posix_acl_access"
_USER, _GROUP, _WRITE = 0x02, 0x08, 0x02  # as in linux/posix_acl.h


def _faults_of_list(here: str, policy: Policy) -> Iterator[Fault]:
    """Users and groups whom an access control list (setfacl) allows to write."""
    try:
        entries = os.getxattr(here, _LIST)[4:]
    except OSError:  # there is none, or the file system has none
        return
    for at in range(0, len(entries) - 7, 8):
        tag, rights, number = struct.unpack_from("<HHI", entries, at)
        if tag == _USER and rights & _WRITE and not policy.owns(number):
            yield Fault(here, f"can be written by {_user(number)}", owner=number)
        elif tag == _GROUP and rights & _WRITE and not policy.shares(number):
            yield _by_group(here, number)


def _way(path: str | os.PathLike[str]) -> tuple[list[tuple[str, os.stat_result]], bool]:
    """Each folder and link that leads to a path, and what is there; and whether anything is."""
    found: list[tuple[str, os.stat_result]] = []
    try:
        for here, status, _ in walk(path):
            if status is None:
                return found, False
            found.append((here, status))
    except OSError:
        if not found:  # not even the current folder is known
            raise
        return found, False
    return found, True


def refuse_content(content: Content, policy: Policy, use: str) -> None:
    """Refuse bytes that another user could have written.

    Args:
        content: as it was read; its path is looked at, and not opened again.
        use: what hvdenv would do with it, such as "hvdenv would run what it names".

    Raises:
        UntrustedError: with who could have, and what to do.
    """
    path = real_path(content.path)
    if Granted(path, hashlib.sha256(content.data).hexdigest()) in policy.granted:
        return
    for fault in _of_content(content, policy.at(path)):
        raise refusal(fault, path, use)


def _of_content(content: Content, policy: Policy) -> Iterator[Fault]:
    yield from _faults(real_path(content.path), content.status, policy, last=True)
    here, status = _way(content.path)[0][-1]
    if not os.path.samestat(status, content.status):
        yield Fault(here, "was replaced while hvdenv read it")
    yield from faults_on_way(content.path, policy)


def refuse_path(path: str | os.PathLike[str], policy: Policy, use: str) -> None:
    """Refuse a script or folder that programs will use, if another user could change it.

    A hash cannot vouch for a script: its owner can change it before a shell opens it.

    Raises:
        UntrustedError: with who could, and what to do.
    """
    here = real_path(path)
    for fault in faults_on_way(path, policy.at(here)):
        granted = here if os.path.isdir(here) else os.path.dirname(here)
        raise refusal(fault, here, use, granted)


def refuse_prefix(
    prefix: str | os.PathLike[str], policy: Policy, use: str, *, whole: bool, also: str = ""
) -> None:
    """Refuse an environment if another user could change what it executes or imports.

    Args:
        prefix: the folder or link; need not exist.
        whole: look at every file, not only at those that faults_in() names.
        also: a further folder with its Python, where that is elsewhere.

    Raises:
        UntrustedError: with who could, and what to do.
    """
    here = real_path(prefix)
    for folder in filter(None, (os.fspath(prefix), also)):
        for fault in faults_in(folder, policy.at(here), whole=whole):
            raise refusal(fault, here, use)


# Of an environment, besides the interpreter and what leads to it: these folders and what is in
# them, not in their folders. (bin/activate, site-packages/*.pth, sitecustomize.py, packages' own.)
_PARTS = ("", "bin", "lib", "lib64", "etc/conda/activate.d")


def faults_in(prefix: str, policy: Policy, *, whole: bool) -> Iterator[Fault]:
    """What lets others change what an environment executes or imports.

    Looked at are: the way to it; ``activate.sh``; the interpreter with all links that lead to it;
    all entries of its folder, of ``bin``, ``lib``, ``lib/python3*`` and ``site-packages``; folders
    that ``.pth`` files and ``pyvenv.cfg`` name; with ``whole``, every file.
    """
    yield from faults_on_way(prefix, policy)
    root = os.path.realpath(prefix)
    bases = [each for each in (root, f"{root}/venv", f"{root}/conda") if os.path.isdir(each)]
    for base in bases:
        for folder in [f"{base}/{part}".rstrip("/") for part in _PARTS] + _libraries(base):
            if os.path.isdir(folder):
                yield from faults_on_way(folder, policy)
                yield from _faults_of_entries(folder, root, policy)
        for each in (*_named_by_pth(base), *_home_of_venv(base)):
            yield from faults_on_way(each, policy)
    if whole:
        folders = [root]
        while folders:
            yield from _faults_of_entries(folders.pop(), root, policy, folders)


def _libraries(base: str) -> list[str]:
    found = glob(f"{escape(base)}/lib*/python3*")
    return [*found, *(f"{each}/site-packages" for each in found)]


def _faults_of_entries(
    folder: str, root: str, policy: Policy, folders: list[str] | None = None
) -> Iterator[Fault]:
    """Of each entry of a folder, and where it is a link that leads away, of the way there.

    Folders in it are added to ``folders``.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:  # the folder itself is on the way, and has been judged
        return
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if folders is not None and stat.S_ISDIR(status.st_mode):
            folders.append(entry.path)
        # Fast path for nearly all of 50,000 files.
        if status.st_uid not in policy.owners or status.st_mode & OTHERS_WRITE:
            yield from _faults(entry.path, status, policy, last=True)
        if stat.S_ISLNK(status.st_mode) and _leads_away(entry.path, root):
            yield from faults_on_way(entry.path, policy)


def _leads_away(link: str, root: str) -> bool:
    """Whether a link leads out of a folder; one to a file beside it does not."""
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return "/" in target and not os.path.realpath(link).startswith(f"{root}/")


def _named_by_pth(base: str) -> Iterator[str]:
    """Folders that .pth files of an environment put on the search path of modules."""
    for folder in _libraries(base):
        if not folder.endswith("/site-packages") or not os.path.isdir(folder):
            continue
        for name in sorted(os.listdir(folder)):
            if not name.endswith(".pth"):
                continue
            try:
                text = read_file(f"{folder}/{name}", RECIPE).data.decode("utf-8", "replace")
            except OSError:
                continue
            for line in text.splitlines():
                if line.strip() and not line.startswith(("#", "import ", "import\t")):
                    yield os.path.join(folder, line.strip())


def _home_of_venv(base: str) -> Iterator[str]:
    """The folder of the Python that a venv takes its standard library from.

    Its interpreter leads there as well, unless it is a copy.
    """
    try:
        text = read_file(f"{base}/pyvenv.cfg", RECIPE).data.decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "home" and value.strip():
            yield os.path.join(base, value.strip())


def refuse_home(home: Path, policy: Policy, *, way: bool = True) -> None:
    """Refuse an HVDENV_HOME that another user can change.

    The folder itself is checked before grants are read from it.

    Args:
        home: need not exist.
        policy: without what was granted.
        way: also check the folders that lead there, for which grants can exist.

    Raises:
        UntrustedError: with who could write it, and what to do.
    """
    found, there = _way(home)
    for fault in _faults(*found[-1], policy, last=True) if there else ():
        raise _no_home(fault)
    policy = policy._replace(granted=read_granted(Places(home))).at(real_path(home))
    for folder in (home, *(home / each for each in _OF_HOME)) if way else ():
        for fault in faults_on_way(folder, policy):
            raise _no_way(fault, home)


# What programs are run from or installed from; wheels of the cache are judged one by one.
_CACHES = ("scratch", "files", "conda", "uv", "suite")
_OF_HOME = ("envs", "jobs", "cache", *(f"cache/{each}" for each in _CACHES))


def _no_way(fault: Fault, home: Path) -> UntrustedError:
    make = "" if home.exists() else f"mkdir -p {shlex.quote(str(home))} && "
    trusting = (
        f"`{make}hvdenv trust {shlex.quote(str(home))}` if you trust everybody who can change it; "
    )
    fixing = f"{_fix(fault)}; "
    inside = fault.path.startswith(f"{real_path(home)}/")
    return UntrustedError(
        f"{'' if inside else 'its folder '}{fault.path} {fault.problem}, and hvdenv would run"
        " programs from below it",
        where=f"HVDENV_HOME: {home}",
        remedy=f"{fixing if fault.owner is None else ''}{'' if fault.everybody else trusting}"
        "or name a folder of your own: export HVDENV_HOME=...; or --trust for this call",
    )


def _no_home(fault: Fault) -> UntrustedError:
    return UntrustedError(
        f"this folder {fault.problem}, and hvdenv runs programs from it",
        where=f"HVDENV_HOME: {fault.path}",
        remedy=f"{_fix(fault)}; or name a folder of your"
        " own: export HVDENV_HOME=...; a site file that belongs to root can name a group that shares it"
        ' ([trust] groups = ["..."])',
    )


def _fix(fault: Fault) -> str:
    """What its owner can do. A device must keep its mode."""
    if not os.path.isfile(fault.path) and not os.path.isdir(fault.path):
        return "name another place: this is neither a file nor a folder"
    return f"`chmod go-w {shlex.quote(fault.path)}` if it is yours"


def refusal(fault: Fault, path: str, use: str, granted: str = "") -> UntrustedError:
    """The error for something that another user could change.

    Args:
        granted: the path to pass to `hvdenv trust`, if another.
    """
    folder = os.path.isdir(path)
    if fault.path == path:
        subject = f"this {'folder' if folder else 'file'}"
    elif path.startswith(f"{fault.path}/"):
        subject = f"its folder {fault.path}"
    else:
        subject = f"{fault.path} in it" if fault.path.startswith(f"{path}/") else fault.path
    by_owner = folder or bool(granted)
    vouch = (
        "if you trust everybody who can change it:" if by_owner else "read it; if it is harmless:"
    )
    remedy = f"{vouch} `hvdenv trust {shlex.quote(granted or path)}`"
    if fault.owner is None:
        fix = _fix(fault)
        remedy = fix if fault.everybody and by_owner else f"{fix}; or {remedy}"
    return UntrustedError(
        f"{subject} {fault.problem}, and {use}",
        where=path,
        remedy=f"{remedy}; or --trust for this call",
    )


def real_path(path: str | os.PathLike[str]) -> str:
    """The absolute path, in which only the last part may be a link."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def grant(path: Path, policy: Policy) -> Granted:
    """The record that makes a file, or a folder with its contents, trusted from now on.

    Args:
        policy: without what was granted.

    Raises:
        UntrustedError: everybody can write the folder.
        OSError: the file cannot be read.
    """
    here = real_path(path)
    if not os.path.isdir(path):
        return Granted(here, hashlib.sha256(read_file(path, STATE).data).hexdigest())
    faults = list(faults_in(here, policy, whole=True))
    for fault in faults:
        if fault.everybody:
            raise UntrustedError(
                f"{fault.path} {fault.problem}, so it cannot be trusted", where=here,
                remedy=f"chmod o-w {shlex.quote(fault.path)}",
            )  # fmt: skip
    owners = {fault.owner for fault in faults if fault.owner is not None}
    groups = {fault.group for fault in faults if fault.group is not None}
    return Granted(here, "", tuple(sorted(owners)), tuple(sorted(groups)))


class _Record(NamedTuple):
    trusted: tuple[Granted, ...]


def _record(places: Places) -> Path:
    return places.home / "trusted" / f"{os.geteuid()}.json"


def read_granted(places: Places) -> tuple[Granted, ...]:
    """The grants of this user; none if another user can write the record."""
    try:
        content = read_file(_record(places), STATE)
        status = content.status
        if status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
            return ()
        return decode(_Record, json.loads(content.data), lenient=True).trusted
    except (OSError, ValueError, RecursionError, Problem):
        return ()


def write_granted(places: Places, granted: Collection[Granted]) -> None:
    """Record what this user grants.

    Raises:
        StepError: it cannot be written.
    """
    make_folder(_record(places).parent)
    entries = [each._asdict() for each in granted]
    write_json(_record(places), {"format": FORMAT, "trusted": entries}, 0o600)


def described(granted: Granted) -> str:
    """A grant in words, such as ``sha256 …`` or ``files of ann, group mygroup``."""
    if granted.sha256:
        return f"sha256 {granted.sha256}"
    names = [_user(each) for each in granted.owners]
    names += [f"group {_group(each)[0] or each}" for each in granted.groups]
    return f"files of {', '.join(names)}" if names else "nothing that was not trusted before"


@cache
def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


def _private(user: int, group: int, name: str) -> bool:
    """Whether a group is a user's own, as useradd makes one for each user."""
    try:
        found = pwd.getpwuid(user)
        return (found.pw_name, found.pw_gid) == (name, group)
    except KeyError:
        return False


@cache
def _group(number: int) -> tuple[str, tuple[int, ...]]:
    """Name of a group, and the ids of its listed members; empty if it has no name."""
    try:
        found = grp.getgrgid(number)
    except KeyError:
        return "", ()
    members = []
    for name in found.gr_mem:
        try:
            members.append(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    return found.gr_name, tuple(members)


@cache
def _groups_of(user: int) -> frozenset[int]:
    try:
        found = pwd.getpwuid(user)
        return frozenset(os.getgrouplist(found.pw_name, found.pw_gid))
    except (KeyError, OSError):
        return frozenset()

"""The directories of HVDENV_HOME, and atomic writes of small files."""

import errno
import glob
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.runner import environment

T = TypeVar("T")

HOME_VARIABLE = "HVDENV_HOME"
# How long files of a process are left alone that may run on another host.
LEFT_ALONE_SECONDS = 86400.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TEMPORARY = re.compile(r"\..{1,100}\.[0-9a-f]{32}")  # as replacing() names them


class Places(NamedTuple):
    home: Path

    @property
    def envs(self) -> Path:
        """Environments without an explicit prefix."""
        return self.home / "envs"

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    @property
    def scratch(self) -> Path:
        """Temporary files of running commands."""
        return self.cache / "scratch"

    @property
    def wheels(self) -> Path:
        """Wheels that hvdenv compiled, by the hash of their inputs."""
        return self.cache / "wheels"

    @property
    def reports(self) -> Path:
        return self.home / "reports"

    @property
    def jobs(self) -> Path:
        """Scripts of submitted jobs, and one small file for each job."""
        return self.home / "jobs"

    @property
    def registry(self) -> Path:
        """One small file for each environment, wherever its prefix is."""
        return self.home / "registry"


def find_places() -> Places:
    """HVDENV_HOME, or the user's XDG data directory if that is not set."""
    environ = environment()
    if named := environ.get(HOME_VARIABLE, ""):
        return Places(Path(os.path.abspath(os.path.expanduser(named))))
    data = os.path.expanduser(environ.get("XDG_DATA_HOME", "").strip())
    if not os.path.isabs(data):  # the specification says to ignore it then
        return Places(home_folder() / ".local" / "share" / "hvdenv")
    return Places(Path(data, "hvdenv"))


def home_folder() -> Path:
    """The user's home directory; as in containers, / for a user without one."""
    return Path("/", os.path.expanduser("~").lstrip("~"))


def login_name() -> str:
    """The name by which this user logged in, also where only variables know it."""
    names = map(environment().get, ("LOGNAME", "USER", "LNAME", "USERNAME"))
    return next(filter(None, names), None) or user_name(os.getuid())


def user_name(number: int) -> str:
    """The login name of a user id; the id itself of a user without a name, as `id -un` prints."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def environment_name(recipe: str, variants: Iterable[str]) -> str:
    """The name of the environment of a recipe with variants.

    Args:
        recipe: the recipe's name, such as ``local``.
        variants: names of variants; order and repetition do not matter.

    Returns:
        ``local`` or, for instance, ``local+torch+x``.

    Raises:
        UsageError: a name has characters that are not allowed in a directory's name.
    """
    names = [recipe, *sorted(set(variants))]
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of a recipe or variant",
                remedy="use up to 64 letters, digits, dots, underscores and hyphens, "
                "beginning with a letter or digit",
            )
    return "+".join(names)


def make_folder(folder: Path) -> Path:
    """Create a directory and its parents.

    Raises:
        StepError: it cannot be created or written to.
    """
    with reporting(folder):
        # Not mkdir(parents=True): with a umask of 000, everybody could write to the parents.
        for each in (*reversed(folder.parents), folder):
            if not each.is_dir():
                each.mkdir(mode=0o775, exist_ok=True)
    return folder


@contextmanager
def reporting(path: Path, doing: str = "write", *, inside: bool = False) -> Iterator[None]:
    """Report what a file system refuses.

    Args:
        inside: whether to name the file below the path that the error is about.

    Raises:
        StepError: as blocked() makes it.
    """
    try:
        yield
    except OSError as error:
        where = Path(error.filename) if inside and error.filename else path
        raise blocked(where, error, doing) from error


def blocked(path: Path, error: OSError, doing: str = "write") -> StepError:
    elsewhere = (
        f"name another place ({HOME_VARIABLE}, --prefix, or the option that names this path)"
    )
    ways = (*_WAYS_OUT, _OF_THE_PATH)
    known = next((text for numbers, text in ways if error.errno in numbers), None)
    return StepError(
        f"cannot {doing}: {error.strerror or error}",
        where=str(path),
        remedy=f"{known or 'look at the permissions, the free space and the quota there'}, or "
        f"{elsewhere}",
    )


# Remedies for errors of a file system, by errno.
_WAYS_OUT = (
    ({errno.EACCES, errno.EPERM}, "look at the owner and the permissions there (ls -ld)"),
    ({errno.EROFS}, "use a host where this file system is not mounted read-only"),
    ({errno.ENOSPC}, "free space there (df -h; df -i for the number of files)"),
    ({errno.EDQUOT}, "free some of your quota there (quota -s)"),
    (
        {errno.EIO, errno.ESTALE, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EUCLEAN},
        "run the command again once the disk or file server works (dmesg; ask support)",
    ),
)
_OF_THE_PATH = (
    {errno.ENOENT, errno.ENOTDIR, errno.EEXIST},
    "check this path: a part of it is missing, or is a file instead of a directory",
)
# Errors of the machine, never of hvdenv.
OF_THE_MACHINE = frozenset(number for numbers, _ in _WAYS_OUT for number in numbers)


def named_file(path: Path) -> Path:
    """Follow the links of a file that a user names as output.

    As root, a rename would replace /dev/null, or a link, by a file.

    Raises:
        StepError: the path is a directory or a device, belongs to another user in a directory that
            others can write, or is behind a link that another user could have made.
    """
    found = named_folder(path, last=True)
    try:
        status, folder = os.lstat(found), os.stat(found.parent)
    except OSError:
        return found
    if not stat.S_ISREG(status.st_mode):
        raise StepError("this is not a regular file", where=str(path), remedy="name a file")
    if folder.st_mode & OTHERS_WRITE and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise _not_ours("file", found, status)
    return found


def named_folder(path: Path, *, last: bool = False) -> Path:
    """Follow the links of a directory that a user names as output.

    Args:
        path: need not exist.
        last: the last part may be a link only if it belongs to the user or root.

    Raises:
        StepError: a link on the way belongs to another user, in a directory that others can
            write, such as /tmp.
    """
    done = ""
    try:
        for here, status, is_last in walk(os.path.expanduser(path)):
            if status is None or not stat.S_ISLNK(status.st_mode):
                done = here
            elif _is_suspect(here, status, strict=last and is_last):
                raise _not_ours("link", Path(here), status)
    except OSError as error:
        doing = "write" if error.errno == errno.ELOOP else "look at it"
        raise blocked(Path(error.filename or path), error, doing) from error
    return Path(done)


OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as of Linux


def walk(path: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result | None, bool]]:
    """Each directory and link that leads to a path, and what is there.

    Yields its path, its status (None for what does not exist), and whether no name follows it.

    Raises:
        OSError: one cannot be looked at, or there are too many links.
    """

    left = [*reversed(Path(path).absolute().parts)]
    at, links = "/", 0
    while left:
        name = left.pop()
        here = {".": at, "..": os.path.dirname(at), "//": "/"}.get(name) or os.path.join(at, name)
        try:
            status: os.stat_result | None = os.lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            status = None
        yield here, status, not left
        if status is None or not stat.S_ISLNK(status.st_mode):
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        # A link to "." can be the last one: the way ends at its directory.
        left += reversed(Path(os.readlink(here)).parts or (".",))


def _is_suspect(link: str, status: os.stat_result, *, strict: bool) -> bool:
    """Whether another user could have made a link to redirect the output."""
    if status.st_uid in (os.geteuid(), 0):
        return False
    folder = os.lstat(os.path.dirname(link))
    return strict or bool(folder.st_mode & OTHERS_WRITE and status.st_uid != folder.st_uid)


def _not_ours(what: str, path: Path, status: os.stat_result) -> StepError:
    return StepError(
        f"this {what} belongs to another user (uid {status.st_uid}), so hvdenv does not write to it",
        where=str(path),
        remedy="name a file in a directory of your own",
    )


def sync_tree(root: Path) -> None:
    """Flush a tree to disk, so that it survives a power cut.

    Args:
        root: a directory; need not exist.

    Raises:
        OSError: the file system cannot store it.
    """
    if not root.exists():
        return
    _sync_file_system(root)
    # Each sync may wait for a file server, so several run in parallel.
    for _ in in_shares(_sync_all, [*_files_below(root)], threads=8):
        pass


def _sync_all(paths: Iterable[str]) -> None:
    for path in paths:
        sync(path)


def in_shares(
    work: Callable[[Sequence[str]], T], paths: Sequence[str], *, threads: int
) -> Iterator[T]:
    """The results of threads that each work on their share of many files.

    A task for each file would cost more than flushing it.
    """
    from concurrent.futures import ThreadPoolExecutor  # no light command should wait for it

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, (paths[number::threads] for number in range(threads)))


def _sync_file_system(path: Path) -> None:
    """Flush a file system at once if it can, which leaves little to do for each file.

    Only flushing a file reports that it could not be stored.
    """
    # Some Pythons lack ctypes, and some C libraries syncfs().
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        syncfs = ctypes.CDLL(None).syncfs
        descriptor = os.open(path, os.O_RDONLY)
        syncfs(descriptor)
        os.close(descriptor)


def _files_below(root: Path) -> Iterator[str]:
    """The files and directories of a tree, and its root."""
    folders = [os.fspath(root)]
    yield os.fspath(root)
    while folders:
        with os.scandir(folders.pop()) as children:
            for child in children:
                if child.is_dir(follow_symlinks=False):
                    folders.append(child.path)
                elif not child.is_file(follow_symlinks=False):
                    continue
                yield child.path


def sync(path: Path | str) -> None:
    """Flush a file or directory to disk.

    Raises:
        OSError: the file system cannot store it. Not supporting directories is no error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


# Errors of file systems that cannot flush a directory.
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EISDIR})


def write_json(path: Path, data: Mapping[str, object], mode: int = 0o666) -> None:
    """Write a JSON file; see write_text().

    Args:
        mode: permissions before the umask applies.

    Raises:
        StepError: the directory cannot be written to.
    """
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", mode)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically: a kill at any moment leaves the old or the new one.

    Args:
        text: its content; bytes that are not UTF-8 as Python's surrogates.
        mode: as of write_bytes().

    Raises:
        StepError: the directory cannot be written to.
    """
    write_bytes(path, [text.encode("utf-8", "surrogateescape")], mode)


def write_bytes(
    path: Path, content: Iterable[bytes], mode: int = 0o666, *, exactly: bool = False
) -> None:
    """Write a file atomically, as write_text() does.

    Args:
        mode: permissions of a new file before the umask applies. An existing file keeps its
            permissions, and its owner and group if possible.
        exactly: give the file this mode in any case.

    Raises:
        StepError: the directory cannot be written to.
    """
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode & ~0o002)
        with open(descriptor, "wb") as stream:
            if exactly:
                os.fchmod(descriptor, mode)
            else:
                _keep_mode(descriptor, path)
            stream.writelines(content)
            stream.flush()
            os.fsync(descriptor)


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """A path for the block to create and flush, which then replaces a file atomically.

    Args:
        temporary: the other path, in the same file system; by default beside the file.

    Raises:
        StepError: it cannot be written.
    """
    temporary = temporary or path.with_name(f".{path.name[:100]}.{os.urandom(16).hex()}")
    try:
        with reporting(path):
            yield temporary
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def sweep(folder: Path, name: str = "", seconds: float = LEFT_ALONE_SECONDS) -> None:
    """Remove temporary files of replacing() that killed processes left.

    Args:
        folder: need not exist.
        name: how the names of the files that they would have replaced begin.
        seconds: since they were last written to; less may be in use.
    """
    before = time.time() - seconds
    for path in folder.glob(f".{glob.escape(name[:100])}*"):
        with suppress(OSError):
            if _TEMPORARY.fullmatch(path.name) and path.lstat().st_mtime <= before:
                path.unlink()


def _keep_mode(descriptor: int, path: Path) -> None:
    """Give a new file the permissions, owner and group of the file that it replaces."""
    if not os.path.lexists(path) or not stat.S_ISREG((found := os.lstat(path)).st_mode):
        return
    mode = found.st_mode & 0o777
    try:
        os.fchown(descriptor, found.st_uid, found.st_gid)
    except PermissionError:
        if os.fstat(descriptor).st_gid != found.st_gid:
            mode &= 0o707  # the permissions of one group must not apply to another
    os.fchmod(descriptor, mode)

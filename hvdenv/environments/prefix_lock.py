"""One build at a time for a prefix, also on file systems without flock; and scratch directories.

Each process that wants the lock creates a file of its own and then looks for those of others. If
the owner of one may still run, it removes its own file and waits; otherwise it holds the lock. Of
two processes that do this at the same time, at least one sees the file of the other, so there is
never a second holder. If both see it, both give way, and pauses of random length decide.

Each file is named after a token that is never used again, and is removed only by its owner, or
when its owner is certainly gone. So nobody can remove a lock that is not the one it has judged. The
holder touches its file every few seconds.

A scratch directory holds the lock of its process, so that the next command can tell which ones a
killed process has left.
"""

import errno
import json
import math
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.errors import BusyError, HvdenvError, StepError
from hvdenv.base.masking import learn_from_pip
from hvdenv.base.places import (
    LEFT_ALONE_SECONDS,
    blocked,
    make_folder,
    reporting,
    user_name,
    write_json,
)
from hvdenv.base.reading import STATE, SYSTEM, read_file, read_text
from hvdenv.base.runner import Runner, end_marked, environment
from hvdenv.base.schema import Problem, decode
from hvdenv.environments.generations import timestamp
from hvdenv.model.dialect import job_id

# How the names of the files begin.
PREFIX = "lock-"
_GONE = {errno.ENOENT, errno.ESTALE}
# A rebooted machine cannot have touched its file within this time; if the file was touched, that
# was another machine with the same name.
_REBOOT_SECONDS = 60.0
# A power cut has emptied a file, and nobody touches it.
_EMPTY_SECONDS = 60.0


class Holder(NamedTuple):
    """Who holds a lock.

    Attributes:
        boot: the kernel's id of this boot; empty if it has none.
        started: start time of that process, in the kernel's units; may be empty.
        job: id of the batch job; empty outside of one.
        since: when the lock was taken, in UTC.
        token: identifies this holding of the lock, and marks the processes started during it.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str
    job: str
    user: str
    since: str
    token: str

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} of {self.user} on {self.host}{job}, since {self.since}"

    def is_visible(self) -> bool:
        """Whether this process would see that process, if it still runs."""
        here = (os.uname().nodename, boot_id(), _namespace())
        return (self.host, self.boot, self.namespace) == here

    def may_run(self) -> bool:
        """Whether a visible process may still run."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # of another user; /proc may hide it
        started = _started(self.pid)
        return not started or not self.started or started == self.started


class _Seen(NamedTuple):
    """The file of another process.

    Attributes:
        holder: None if it names none.
        age: seconds since its holder touched it, by the clock of the file server.
    """

    path: Path
    holder: Holder | None
    is_empty: bool
    age: float

    def is_gone(self, stale: float) -> bool:
        """Whether its holder cannot be running any more; see hold()."""
        if self.holder is None:
            return self.age > (_EMPTY_SECONDS if self.is_empty else stale)
        if self.holder.is_visible():
            return not self.holder.may_run()
        if self.holder.host == os.uname().nodename and self.holder.boot != boot_id():
            return self.age > _REBOOT_SECONDS
        return self.age > stale

    def error(self) -> BusyError:
        beat = f"last heartbeat {self.age:.0f} s ago"
        if self.holder is None:
            message = f"the lock of this prefix names no holder ({beat})"
            remedy = "if no build of it runs on any host, build with --take-over"
        else:
            message = f"another build holds this prefix: {self.holder}, {beat}"
            remedy = (
                f"check on {self.holder.host} whether it still runs; if it is certainly gone,"
                " build with --take-over"
            )
            if self.holder.is_visible():
                remedy = f"wait for it, or end it: kill {self.holder.pid}"
        return BusyError(message, where=str(self.path), remedy=remedy)


class Held:
    """A lock that is held.

    Attributes:
        token: pass it to the Runner, so that its processes can be found later.
        replaced: tokens of holders that are gone, whose processes may still run: end_marked().
    """

    def __init__(self, path: Path, token: str, replaced: tuple[str, ...]) -> None:
        self.token = token
        self.replaced = replaced
        self._path = path

    def check(self) -> None:
        """Touch the lock, which must still be held; call it before each lasting change.

        Raises:
            BusyError: another process broke the lock.
            StepError: the file cannot be touched.
        """
        try:
            os.utime(self._path)
        except OSError as error:
            if error.errno not in _GONE:
                raise blocked(self._path, error) from error
            raise BusyError(
                "another process removed the lock of this build",
                where=str(self._path),
                remedy="wait until the other build has finished, then build again",
            ) from error

    def _beat(self, stop: threading.Event, interval: float) -> None:
        while not stop.wait(interval):
            with suppress(HvdenvError, OSError):  # check() of the build itself reports it
                self.check()


@contextmanager
def hold(
    store: Path,
    *,
    wait: float,
    break_lock: bool = False,
    stale: float = math.inf,
    beat: float = 10.0,
) -> Iterator[Held]:
    """Hold the lock of a store, a directory that is created if it does not exist.

    Args:
        wait: seconds to wait for another holder, or for one that tries at the same time.
        break_lock: take the lock over from the present holder, whoever that is.
        stale: seconds without a heartbeat after which a holder on another host counts as gone.
        beat: seconds between two heartbeats.

    Raises:
        BusyError: another process holds it.
        StepError: the store cannot be written.
    """
    mine = _myself()
    path = store / f"{PREFIX}{mine.token}"
    stop = threading.Event()
    try:
        with reporting(store):
            replaced = _acquire(path, mine, wait, break_lock, stale)
        held = Held(path, mine.token, replaced)
        heart = threading.Thread(target=held._beat, args=(stop, beat), daemon=True)
        heart.start()
        try:
            yield held
        finally:
            stop.set()
            heart.join()
    finally:
        with suppress(OSError):  # the next holder removes it
            path.unlink()


def _acquire(
    path: Path, mine: Holder, wait: float, break_lock: bool, stale: float
) -> tuple[str, ...]:
    """Take the lock; the tokens of those who held it and are gone."""
    deadline = time.monotonic() + wait
    pause = 0.02
    # Only what is there before our own announcement: of two builds that take over at the same time,
    # the later one finds the file of the earlier one, or waits for it.
    condemned = {*path.parent.glob(f"{PREFIX}*")} if break_lock else set[Path]()
    while True:
        others = _announce(path, mine)
        running = [o for o in others if o.path not in condemned and not o.is_gone(stale)]
        if not running:
            for each in others:
                each.path.unlink(missing_ok=True)
            return tuple(each.holder.token for each in others if each.holder)
        path.unlink(missing_ok=True)
        if time.monotonic() >= deadline:
            raise running[0].error()
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(pause * 1.5, 1.0)


def _announce(path: Path, mine: Holder) -> list[_Seen]:
    """Create our own file, flushed and whole from the first moment, and look at those of others.

    A listing without our own file says nothing about others: the file was removed, or the listing
    is an old one of a file server's client.
    """
    while True:
        make_folder(path.parent)
        path.unlink(missing_ok=True)
        try:
            write_json(path, mine._asdict())
            # On the clock of the file server, which dates the other files too.
            others = _look(path, path.stat().st_mtime)
            if path.name in os.listdir(path.parent):
                return others
        except (FileNotFoundError, StepError) as error:
            # The store may have been removed meanwhile.
            if not isinstance(error.__cause__ or error, FileNotFoundError):
                raise
        time.sleep(0.02)


def _look(path: Path, now: float) -> list[_Seen]:
    """The files beside our own.

    Raises:
        OSError: they cannot be listed or read, so that one of them may be a holder's.
    """
    seen = []
    for name in os.listdir(path.parent):
        other = path.parent / name
        if other == path or not name.startswith(PREFIX):
            continue
        try:
            content = read_file(other, STATE)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            continue
        age = max(0.0, now - content.status.st_mtime)
        seen.append(_Seen(other, _holder(content.data), not content.data, age))
    return seen


def _holder(data: bytes) -> Holder | None:
    try:
        holder = decode(Holder, json.loads(data))
    except (ValueError, RecursionError, Problem):
        return None
    return holder if 0 < holder.pid < 1 << 31 else None


def _myself() -> Holder:
    return Holder(
        host=os.uname().nodename,
        boot=boot_id(),
        namespace=_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()),
        job=job_id(environment()),
        user=user_name(os.getuid()),
        since=timestamp(precision="seconds"),
        token=os.urandom(16).hex(),
    )


def boot_id() -> str:
    try:
        return read_text("/proc/sys/kernel/random/boot_id", SYSTEM).strip()
    except OSError:
        return ""


def _namespace() -> str:
    """The process id namespace: containers on one machine may share only the host name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started: empty if unknown, "ended" if it is a zombie."""
    try:
        stat = read_text(f"/proc/{pid}/stat", SYSTEM, errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "ended" if state in "ZX" else fields[18]


# The directories may be in /tmp, which other programs use as well.
_SCRATCH = "hvdenv-scratch-"
_SETTLE_SECONDS = 10.0


class Scratch(NamedTuple):
    """A directory that is deleted in the end, and a runner whose commands have it as TMPDIR."""

    path: Path
    runner: Runner


@contextmanager
def scratch_folder(root: Path, purpose: str) -> Iterator[Scratch]:
    """Create a directory below ``root``; those of killed runs are deleted first.

    From now on, passwords of pip's configuration are masked: what runs here reads it.

    Raises:
        StepError: ``root`` cannot be written.
    """
    learn_from_pip()
    for left in list(make_folder(root).glob(f"{_SCRATCH}*")):
        _delete_if_left(left)
    with reporting(root):
        path = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{purpose}-", dir=root))
    try:
        # Another process may be looking whether this one is gone.
        with hold(path, wait=_SETTLE_SECONDS) as held:
            yield Scratch(path, Runner(token=held.token).changed({"TMPDIR": str(path)}))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _delete_if_left(path: Path) -> None:
    """Delete a scratch directory of a process that is gone, and end the processes that it left running."""
    with suppress(OSError, HvdenvError):
        if path.lstat().st_uid != os.getuid():
            return
        is_new = time.time() - path.stat().st_mtime < LEFT_ALONE_SECONDS
        if is_new and not any(path.glob(f"{PREFIX}*")):
            return  # another process has just created it
        with hold(path, wait=0, stale=LEFT_ALONE_SECONDS) as held:
            for token in held.replaced:
                end_marked(token)
            shutil.rmtree(path, ignore_errors=True)

"""One build at a time for a prefix, also on file systems without flock.

The lock is a file that names its holder: host, boot, process and job. The holder touches it
every few seconds. It is taken over only when the holder is certainly gone.

What prevents two holders: an existing lock file is removed or replaced only by the owner of
the *claim* on that very lock, a second file named after the lock's token, and only after the
owner has read that token again. Tokens are never reused. A claim is made, judged and taken
over like a lock, by the same functions.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hvdenv.environments.generations import timestamp
from hvdenv.errors import BusyError, HvdenvError
from hvdenv.model.dialect import job_id
from hvdenv.places import make_folder, reporting, user_name
from hvdenv.reading import STATE, SYSTEM, read_file, read_text
from hvdenv.runner import environment
from hvdenv.schema import Problem, decode

LOCK = "lock"
_DRAFT, _CLAIM = ".lock-draft-", ".lock-claim-"
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}
_GONE = {errno.ENOENT, errno.ESTALE}

# A rebooted machine cannot have touched the lock within this time; if the lock was touched,
# that was another machine with the same name.
_REBOOT_SECONDS = 60.0
# How long to keep trying for the lock of a dead holder while others try as well.
_HANDOVER_SECONDS = 5.0
# A claim is held for milliseconds, so after this time its owner is dead. The same is true of the
# holder of an empty lock: a live one would have noticed, and would no longer touch it.
_CLAIM_SECONDS = 60.0
_DRAFT_SECONDS = 5.0


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


# The holder in an empty file: a process is about to fill it, or a power cut has emptied it.
_NOBODY = Holder(
    host="", boot="", namespace="", pid=0, started="", job="", user="", since="", token=""
)


class Held:
    """A lock that is held.

    Attributes:
        token: pass it to the Runner, so that its processes can be found later.
        replaced: the holder whose lock was taken over; None if it was free. Its processes may
            still run: ``runner.end_marked(replaced.token)``.
    """

    def __init__(self, store: Path, mine: Holder, replaced: Holder | None) -> None:
        self.token = mine.token
        self.replaced = replaced
        self._store = store
        self._mine = mine
        self._path = store / LOCK

    def check(self) -> None:
        """Check that the lock is still held; call it before each lasting change.

        Raises:
            BusyError: another process broke the lock.
            StepError: the file cannot be read.
        """
        with reporting(self._path, "read"):
            holder, _ = _read(self._path)
        if holder is None or holder.token != self.token:
            who = f"; {_describe(holder)} holds it now" if holder and holder.pid else ""
            raise BusyError(
                f"another process removed the lock of this build{who}",
                where=str(self._path),
                remedy="wait until the other build has finished, then build again",
            )

    def _beat(self, stop: threading.Event, interval: float) -> None:
        while not stop.wait(interval):
            try:
                self.check()
                os.utime(self._path)
            except (HvdenvError, OSError):
                continue  # the next check() of the build itself reports it

    def _release(self) -> None:
        try:
            with _claim(self._store, self.token, self._mine, break_lock=False) as owned:
                holder, _ = _read(self._path)
                if owned and holder is not None and holder.token == self.token:
                    self._path.unlink()
        except OSError:
            # The store was removed, or the disk is full. The next build takes a left lock
            # over, since this process will be gone.
            pass


@contextmanager
def hold(
    store: Path, *, wait: float, break_lock: bool = False, beat: float = 10.0
) -> Iterator[Held]:
    """Hold the lock of a store.

    Args:
        wait: seconds to wait for another holder.
        break_lock: take the lock over from the present holder, whoever that is.
        beat: seconds between two heartbeats.

    Raises:
        BusyError: another process holds it.
        StepError: the store cannot be written.
    """
    mine = _myself()
    with reporting(store):
        replaced = _acquire(store, mine, wait, break_lock)
    with suppress(OSError):
        sweep(store)
    held = Held(store, mine, replaced)
    stop = threading.Event()
    heart = threading.Thread(target=held._beat, args=(stop, beat), daemon=True)
    heart.start()
    try:
        yield held
    finally:
        stop.set()
        heart.join()
        held._release()


def sweep(store: Path) -> None:
    """Delete what killed processes left beside the lock. The lock must be held.

    A draft is in use for milliseconds. A claim is kept while its owner may be alive. The
    others are claims on earlier locks: a process that makes such a claim again finds another
    token in the lock, and does nothing.
    """
    now = _server_time(store)
    for path in store.iterdir():
        try:
            if path.name.startswith(_DRAFT):
                if now - path.lstat().st_mtime > _DRAFT_SECONDS:
                    path.unlink()
            elif path.name.startswith(_CLAIM):
                owner, _ = _read(path)
                age = now - path.lstat().st_mtime
                if age > _CLAIM_SECONDS or _surely_gone(owner, age):
                    path.unlink()
        except FileNotFoundError:
            continue


def _acquire(store: Path, mine: Holder, wait: float, break_lock: bool) -> Holder | None:
    """Take the lock, if necessary from a holder that is gone; returns that holder."""
    deadline = time.monotonic() + wait
    pause = 0.02
    condemned: str | None = None
    while True:
        make_folder(store)
        try:
            if _create(store, LOCK, mine):
                return None
            holder, age = _read(store / LOCK, store)
            if age is None and (store / LOCK).is_symlink():
                raise BusyError(
                    "the lock of this prefix is a link to a file that does not exist",
                    where=str(store / LOCK),
                    remedy=f"hvdenv makes no such link; remove it: rm {shlex.quote(str(store / LOCK))}",
                )
            token = holder.token if holder else ""
            if break_lock and condemned is None and age is not None:
                condemned = token
            gone = _surely_gone(holder, age)
            if (gone or token == condemned) and _take(store, LOCK, token, mine, break_lock):
                return None if holder == _NOBODY else holder
        except FileNotFoundError:
            # The store was removed meanwhile, or our draft was swept.
            continue
        late = time.monotonic() - deadline
        if age is not None and late >= (_HANDOVER_SECONDS if gone else 0):
            raise _busy(store, holder, age)
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)


def _take(store: Path, name: str, token: str, mine: Holder, break_lock: bool) -> bool:
    """Replace the lock or claim with this token by our own; returns whether that worked."""
    with _claim(store, token, mine, break_lock) as owned:
        if not owned:
            return False
        holder, age = _read(store / name)
        if age is None or (holder.token if holder else "") != token:
            return False
        draft = _draft(store, mine)
        try:
            os.replace(draft, store / name)
        finally:
            draft.unlink(missing_ok=True)
        return True


@contextmanager
def _claim(store: Path, token: str, mine: Holder, break_lock: bool) -> Iterator[bool]:
    """Own the right to replace or remove the lock or claim with this token.

    Yields whether it is owned: not while another process that may be alive owns it.
    """
    name = f"{_CLAIM}{token or 'unreadable'}"
    claimant = mine._replace(token=os.urandom(16).hex())
    owned = _create(store, name, claimant)
    if not owned:
        holder, age = _read(store / name, store)
        gone = _surely_gone(holder, age) or (break_lock and (age or 0) > _CLAIM_SECONDS)
        if age is not None and gone:
            owned = _take(store, name, holder.token if holder else "", claimant, break_lock)
    try:
        yield owned
    finally:
        if owned:
            owner, _ = _read(store / name)
            if owner is not None and owner.token == claimant.token:
                (store / name).unlink(missing_ok=True)


def _create(store: Path, name: str, holder: Holder) -> bool:
    """Create a lock or claim together with its content; False if it exists."""
    draft = _draft(store, holder)
    try:
        os.link(draft, store / name)
    except FileExistsError:
        # A file server that answers a repeated request reports this for our own link.
        owner, _ = _read(store / name)
        return owner is not None and owner.token == holder.token
    except OSError as error:
        if error.errno in _NO_LINKS:
            return _create_exclusively(store / name, holder)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return True


def _create_exclusively(path: Path, holder: Holder) -> bool:
    """The same for file systems without hard links: for an instant the file is empty.

    An empty file names no holder, so no process takes it over.
    """
    try:
        _write(path, holder)
    except FileExistsError:
        return False
    return True


def _draft(store: Path, holder: Holder) -> Path:
    path = store / f"{_DRAFT}{os.urandom(16).hex()}"
    _write(path, holder)
    return path


def _write(path: Path, holder: Holder) -> None:
    """Write a new lock, claim or draft; if the disk is full, leave no empty file.

    It is synced before it gets its name: a power cut would leave a lock without a holder.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(json.dumps(holder._asdict()).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _read(path: Path, store: Path | None = None) -> tuple[Holder | None, float | None]:
    """The holder of a lock, and its age: seconds since the last heartbeat.

    The age is None if there is no lock. It is measured on the clock of the file server if the
    store is given, and 0 otherwise.
    """
    try:
        content = read_file(path, STATE)
    except OSError as error:
        if error.errno in _GONE:
            return None, None
        raise
    age = max(0.0, _server_time(store) - content.status.st_mtime) if store else 0.0
    if not content.data:
        return _NOBODY, age
    try:
        holder = decode(Holder, json.loads(content.data))
    except (ValueError, RecursionError, Problem):
        return None, age
    return (holder if 0 < holder.pid < 1 << 31 else None), age


def _server_time(store: Path) -> float:
    """The present time on the file server's clock, which dates the files of this folder."""
    path = store / f"{_DRAFT}{os.urandom(16).hex()}"
    try:
        path.touch()
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
    finally:
        path.unlink(missing_ok=True)


def _surely_gone(holder: Holder | None, age: float | None) -> bool:
    """Whether the holder cannot be running any more, on any machine."""
    if age is None:
        return False
    if holder == _NOBODY:
        return age > _CLAIM_SECONDS
    if holder is None or holder.host != os.uname().nodename:
        return False
    if holder.boot != boot_id():
        return age > _REBOOT_SECONDS
    if holder.namespace != _namespace():
        return False
    return not _alive(holder)


def _alive(holder: Holder) -> bool:
    """Whether the holder's process may still run, in this boot and namespace."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user; /proc may hide it
    started = _started(holder.pid)
    return not started or not holder.started or started == holder.started


def _busy(store: Path, holder: Holder | None, age: float) -> BusyError:
    beat = f"last heartbeat {age:.0f} s ago"
    if holder is None or holder == _NOBODY:
        message = f"the lock of this prefix names no holder ({beat})"
        remedy = "if no build of it runs on any host, build with --break-lock"
    else:
        message = f"another build holds this prefix: {_describe(holder)}, {beat}"
        remedy = (
            f"check on {holder.host} whether it still runs; if it is certainly gone, build with"
            " --break-lock"
        )
        here = (os.uname().nodename, boot_id(), _namespace())
        if (holder.host, holder.boot, holder.namespace) == here:
            remedy = "wait for it, or end it"
    return BusyError(message, where=str(store / LOCK), remedy=remedy)


def _describe(holder: Holder) -> str:
    job = f", job {holder.job}" if holder.job else ""
    return f"process {holder.pid} of {holder.user} on {holder.host}{job}, since {holder.since}"


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


def runs_here(store: Path) -> bool:
    """Whether the holder of a store's lock runs on this host, whatever its heartbeat's age."""
    holder, age = _read(store / LOCK)
    here = (os.uname().nodename, boot_id(), _namespace())
    return holder is not None and age is not None and here == holder[:3] and _alive(holder)


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

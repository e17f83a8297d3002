"""Runs a program with an environment's image mounted in the place of the environment.

usage: python -I -S enter.py MANIFEST SHA256 JOB -- PROGRAM [ARGUMENT...]
       python -I -S enter.py --detect

MANIFEST is the file that `hvdenv pack` writes beside the image, and SHA256 its digest. The first
process of a JOB on a host (in Slurm, of a job step) becomes the parent of a keeper, which compares
the image with its hash, makes a mount namespace and starts squashfuse there. All processes of the
job on this host join that namespace: they share one page cache, and MPI may copy between their
memories. The keeper ends when the last of them has ended, also by SIGKILL, and squashfuse ends with
the keeper. Nothing is left then: the mounts are only in the namespace.

If a host cannot mount images, the program runs without: only a wrong image is an error. Runs on
Python 3.6 and newer with its standard library, in one thread, as setns(2) requires.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any, Dict, List, NamedTuple, NoReturn, Set, Tuple

FAILED = 125
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
PR_SET_PDEATHSIG, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 47, 2
CAP_SYS_ADMIN = 21
CAPABILITY_VERSION = 0x20080522
# Apptainer brings its own, in a folder that is not in PATH.
PROGRAMS = ("squashfuse_ll", "squashfuse")
FOLDERS = (
    "/usr/bin", "/usr/local/bin", "/usr/libexec/apptainer/bin", "/usr/local/libexec/apptainer/bin",
)  # fmt: skip
# What schedulers and users send to all processes of a job, some as a warning before its time is up:
# ranks handle them, and need their files until they have ended. squashfuse ignores them too then.
IGNORED = tuple(
    getattr(signal, "SIG" + name)
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU", "TSTP")
)
BLOCK = 1 << 20
# Seconds for reading the whole image from a busy file system, for its mount, and for the first
# process to connect.
READ_SECONDS, MOUNT_SECONDS, FIRST_SECONDS = 1800.0, 60.0, 30.0

libc = ctypes.CDLL(None, use_errno=True)


class CannotMount(Exception):
    """This host lacks something."""


class WrongImage(Exception):
    """The image is not the one that was packed."""


class Image(NamedTuple):
    """The image that a manifest states, and where its folders are mounted.

    copy_to is the folder of this host to which the image is copied first, or empty.
    """

    path: str
    sha256: str
    copy_to: str
    mounts: List[Tuple[str, str]]

    @property
    def source(self) -> str:
        """How /proc/self/mountinfo names its mount."""
        return "hvdenv:" + self.sha256


class Answer(NamedTuple):
    """What the keeper reports: its process, whether it has a user namespace, or what is wrong."""

    pid: int = 0
    user: bool = False
    wrong: str = ""
    lacks: str = ""


def call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "{}: {}".format(name, os.strerror(number)))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (os.fsencode(source), os.fsencode(target), os.fsencode(kind))
    call("mount", *words, ctypes.c_ulong(flags), os.fsencode(options))


def find_program() -> str:
    """Path of squashfuse; empty if this host has none."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *FOLDERS])
    return next(filter(None, (shutil.which(name, path=path) for name in PROGRAMS)), "")


def new_namespace() -> bool:
    """Enter a mount namespace of its own; returns whether this took a user namespace.

    In a user namespace, ids other than the user's and the group's are shown as nobody's.

    Raises:
        CannotMount: the host does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    alone = libc.unshare(CLONE_NEWNS) == 0
    try:
        if not alone:
            call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
            for name, text in (
                ("uid_map", "{0} {0} 1".format(user)),
                ("setgroups", "deny"),
                ("gid_map", "{0} {0} 1".format(group)),
            ):
                with open("/proc/self/" + name, "w") as stream:
                    stream.write(text)
        # Mounts that the host makes later are seen, and none of ours leaves.
        mount("none", "/", "", MS_REC | MS_SLAVE)
    except OSError as error:
        raise CannotMount(
            "users may not make namespaces here ({}); see /proc/sys/user/max_user_namespaces and"
            " kernel.apparmor_restrict_unprivileged_userns".format(error)
        ) from error
    return not alone


def checked_file(image: Image) -> int:
    """The descriptor of the image, or of a copy of it on this host, after reading all of it.

    The copy has no name: it is gone with the last process that uses it.

    Raises:
        WrongImage: its hash differs.
        CannotMount: it cannot be read or copied.
    """
    # A part of a copy would fill the folder for as long as the keeper lives.
    with contextlib.ExitStack() as unused:
        try:
            kept = file = os.open(image.path, os.O_RDONLY)
            unused.callback(os.close, file)
            if image.copy_to:
                folder = os.path.expandvars(image.copy_to)
                kept, path = tempfile.mkstemp(prefix="hvdenv-image-", dir=folder)
                os.unlink(path)
                unused.callback(os.close, kept)
            digest = read_whole(file, copy=kept if image.copy_to else -1)
        except OSError as error:
            raise CannotMount("cannot read or copy {}: {}".format(image.path, error)) from error
        if digest != image.sha256:
            differs = "the image differs from its manifest: its SHA-256 is {}, expected {}"
            raise WrongImage(differs.format(digest, image.sha256))
        return os.dup(kept)


def read_whole(file: int, copy: int) -> str:
    """The SHA-256 of a file; what is read is also written to a copy, unless that is -1."""
    digest = hashlib.sha256()
    for block in iter(lambda: os.read(file, BLOCK), b""):
        digest.update(block)
        rest = memoryview(block)
        while copy >= 0 and rest:
            rest = rest[os.write(copy, rest) :]
    return digest.hexdigest()


def mount_image(file: int, image: Image) -> int:
    """Mount an image in this namespace, and bind each of its folders to its place.

    Returns the process id of squashfuse.

    Libraries of FUSE 2 refuse a folder with files as mount point. So squashfuse gets an empty
    folder, on a tmpfs which its own folders then hide.
    """
    program = find_program()
    if not program:
        raise CannotMount("there is no squashfuse_ll or squashfuse: install squashfuse, or load"
                          " the module of Apptainer")  # fmt: skip
    hidden = image.mounts[0][1]
    try:
        mount("tmpfs", hidden, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
        point = os.path.join(hidden, "image")
        os.mkdir(point)
        server = start_server(program, file, image.source, point)
        # The one that hides the mount point comes last.
        for folder, at in reversed(image.mounts):
            mount(os.path.join(point, folder), at, "", MS_BIND)
        return server
    except OSError as error:
        raise CannotMount("the image cannot be mounted: {}".format(error)) from error


def start_server(program: str, file: int, source: str, point: str) -> int:
    """Start squashfuse, which dies with this process, and wait for its mount; its process id."""
    before = os.stat(point).st_dev
    output, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            keep_capability()
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.set_inheritable(file, True)
            if os.getppid() == parent:
                options = "ro,fsname={}".format(source)
                words = [program, "-f", "-o", options, "/proc/self/fd/{}".format(file), point]
                os.execv(program, words)
        finally:
            os._exit(127)
    os.close(writer)
    end = time.monotonic() + MOUNT_SECONDS
    try:
        while os.stat(point).st_dev == before:
            if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > end:
                ready = select.select([output], [], [], 0)[0]
                said = os.read(output, 4096).decode("utf-8", "replace") if ready else ""
                raise CannotMount(
                    "{} does not mount it: {}".format(program, " ".join(said.split()))
                )
            time.sleep(0.005)
    finally:
        # Or what it prints would fill the pipe; it ignores SIGPIPE, as Python does.
        os.close(output)
    return pid


def keep_capability() -> None:
    """Let squashfuse mount: a program that is not root's otherwise loses all capabilities."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
    call("capget", header, data)
    data[2] |= 1 << CAP_SYS_ADMIN
    call("capset", header, data)
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN, 0, 0)


def start_keeper(listener: socket.socket, image: Image) -> None:
    """Start the keeper, which is no child of the program that this process becomes."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            keep(listener, image)
    finally:
        os._exit(0)


def keep(listener: socket.socket, image: Image) -> None:
    """The keeper: mounts the image, and stays until no process uses it."""
    let_go({listener.fileno()})
    server = 0
    try:
        file = checked_file(image)
        answer = Answer(os.getpid(), new_namespace())
        server = mount_image(file, image)
    except WrongImage as error:
        answer = Answer(wrong=str(error))
    except CannotMount as error:
        answer = Answer(lacks=str(error))
    serve(listener, json.dumps(answer).encode())
    if server:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def let_go(kept: Set[int]) -> None:
    """Close what the launcher waits for, such as its pipes, and leave the user's folder."""
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def serve(listener: socket.socket, answer: bytes) -> None:
    """Answer every process of this user, and return when all have ended."""
    users = {}  # type: Dict[socket.socket, Tuple[int, str]]
    left = set()  # type: Set[Tuple[int, str]]
    wait = FIRST_SECONDS
    while True:
        ready = select.select([listener, *users], [], [], wait)[0]
        if listener in ready:
            connection, _ = listener.accept()
            pid, user = peer_of(connection)
            if user == os.geteuid():
                users[connection] = pid, began(pid)
                with contextlib.suppress(OSError):  # it has ended already
                    connection.sendall(answer)
            continue
        for connection in ready:
            left.add(users.pop(connection))
            connection.close()
        # A program may close descriptors that it does not know.
        left = {(pid, when) for pid, when in left if when and began(pid) == when}
        if not users and not left:
            return
        wait = 0.1 if left else FIRST_SECONDS


def peer_of(connection: socket.socket) -> Tuple[int, int]:
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", found)
    return pid, user


def began(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; empty if it has ended."""
    try:
        with open("/proc/{}/stat".format(pid)) as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def ask_keeper(name: str, image: Image) -> Tuple[Answer, int, bool]:
    """The keeper's answer, the descriptor of the connection, and whether this process has started it.

    The connection stays open until this process and its children have ended.

    Raises:
        CannotMount: there is no answer.
    """
    end = time.monotonic() + READ_SECONDS
    first = False
    while time.monotonic() < end:
        listener = socket.socket(socket.AF_UNIX)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(READ_SECONDS)
        try:
            listener.bind(name)
            listener.listen(512)
            first = True
            start_keeper(listener, image)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        finally:
            listener.close()
        try:
            connection.connect(name)
            if peer_of(connection)[1] != os.geteuid():
                connection.close()
                raise CannotMount("another user's process holds its name")
            answer = connection.recv(65536)
        except OSError:
            answer = b""
        if answer:
            descriptor = connection.detach()
            os.set_inheritable(descriptor, True)
            return Answer(*json.loads(answer.decode())), descriptor, first
        connection.close()
        time.sleep(0.01)  # the keeper is about to listen, or to end
    raise CannotMount("the process that mounts it does not answer")


def join(answer: Answer, connection: int) -> None:
    """Enter the keeper's namespaces, in the same folder.

    Raises:
        OSError: the keeper has ended.
    """
    here = os.getcwd()
    kinds = [("user", CLONE_NEWUSER)] if answer.user else []
    spaces = [
        (os.open("/proc/{}/ns/{}".format(answer.pid, name), os.O_RDONLY), flag)
        for name, flag in [*kinds, ("mnt", CLONE_NEWNS)]
    ]
    if select.select([connection], [], [], 0)[0]:  # and another process may have its number
        raise OSError("the process that mounted it has ended")
    for descriptor, flag in spaces:
        call("setns", descriptor, flag)
        os.close(descriptor)
    os.chdir(here)


def read_manifest(path: str, sha256: str) -> Image:
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except OSError as error:
        raise CannotMount("its manifest cannot be read: {}".format(error)) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise WrongImage("its manifest {} has changed since the command began".format(path))
    manifest = json.loads(data.decode())
    mounts = [(each["folder"], each["at"]) for each in manifest["mounts"]]
    return Image(path[: -len(".json")], manifest["sha256"], manifest["copy_to"], mounts)


def enter(path: str, sha256: str, job: str) -> None:
    """Enter the namespace of a job on this host.

    Raises:
        WrongImage: the image is not what its manifest states.
    """
    first = True
    try:
        image = read_manifest(path, sha256)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as stream:
            sources = [line.split(" - ")[1].split()[1] for line in stream]
        if image.source in sources:
            return  # it is in a namespace with the image already
        # When a job step of Slurm ends, its keeper does too.
        step = os.environ.get("SLURM_STEP_ID", "")
        words = "{} {} {} {}".format(sha256, job, step, os.geteuid()).encode()
        name = "\0hvdenv-image-" + hashlib.sha256(words).hexdigest()
        answer, connection, first = ask_keeper(name, image)
        if answer.wrong:
            raise WrongImage(answer.wrong)
        if answer.lacks:
            raise CannotMount(answer.lacks)
        join(answer, connection)
    except (CannotMount, OSError) as error:
        if first or isinstance(error, OSError):  # the keeper's answer is the same for all
            tell("{}; the program runs without the image".format(error))


def tell(text: str) -> None:
    sys.stderr.write("hvdenv: image on {}: {}\n".format(socket.gethostname(), text))
    sys.stderr.flush()


def detect() -> Dict[str, Any]:
    """What this host has for images; asked in a child, which may enter a namespace."""
    space = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    allowed = os.fork()
    if allowed == 0:
        try:
            new_namespace()
            os._exit(0)
        finally:
            os._exit(1)
    return {
        "squashfuse": find_program(),
        "fuse": os.access("/dev/fuse", os.R_OK | os.W_OK),
        "namespaces": os.waitpid(allowed, 0)[1] == 0,
        "shm_bytes": space.f_bavail * space.f_frsize if space else 0,
        "spindle": shutil.which("spindle") or "",
        "copper": shutil.which("cu_fuse") or "",
    }


def main(words: List[str]) -> NoReturn:
    if words == ["--detect"]:
        sys.stdout.write(json.dumps(detect()) + "\n")
        sys.exit(0)
    path, sha256, job, dashes = words[:4]
    assert dashes == "--"
    try:
        enter(path, sha256, job)
        os.execvp(words[4], words[4:])
    except WrongImage as error:
        tell("{}: {}\nwhat to do: hvdenv pack RECIPE, or run with --no-image".format(path, error))
    except OSError as error:
        sys.stderr.write("hvdenv: cannot start {}: {}\n".format(words[4], error.strerror))
    sys.exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])

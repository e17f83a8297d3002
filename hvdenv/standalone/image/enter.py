"""Runs a program with an environment's image mounted in the place of the environment.

usage: python -I -S enter.py IMAGE SHA256 JOB FOLDER... -- PROGRAM [ARGUMENT...]

The first process of a JOB on a host (in Slurm, of a job step) starts a keeper, which compares the
image with its hash and mounts it with squashfuse in a namespace of `unshare`, at the FOLDERs that it
holds. All processes of the job on this host join the namespace with `nsenter`: they share one page
cache, and MPI may copy between their memories.

mount(8) serves only root. So the keeper is root in a user namespace, and the programs are in a
second one inside of it, in which the user has the usual id. The keeper unmounts the image in its own
namespace again. So the kernel ends squashfuse when the last program has ended, also by SIGKILL, and
nothing is left.

If a host cannot mount images, the program runs without: only a wrong image is an error. Runs on
Python 3.6 and newer with its standard library, and util-linux 2.32 and newer (RHEL 8).
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from typing import List, NoReturn, Tuple

FAILED = 125
# Apptainer brings its own, in a directory that is not in PATH.
PROGRAMS = ("squashfuse_ll", "squashfuse")
FOLDERS = (
    "/usr/bin",
    "/usr/local/bin",
    "/usr/libexec/apptainer/bin",
    "/usr/local/libexec/apptainer/bin",
)
# Seconds for reading the whole image from a busy file system, for its mount, and for the first
# process to connect.
READ_SECONDS, MOUNT_SECONDS, FIRST_SECONDS = 1800.0, 60.0, 30.0
# The keeper is no child of the program that this process becomes. Schedulers and users send these
# signals to all processes of a job, some as a warning before its time is up: ranks handle them, and
# need their files until they have ended. Programs that the keeper starts ignore them too.
DETACHED = """trap "" INT TERM HUP QUIT USR1 USR2 ALRM XCPU TSTP PIPE; "$@" &"""
# The directory that nsenter can stay in is that of the host, behind the mounts.
IN_FOLDER = """cd "$1" && shift && exec "$@" """


class CannotMount(Exception):
    """This host lacks something."""


class WrongImage(Exception):
    """The image is not the one that was packed."""


def find_unshare() -> Tuple[List[str], str]:
    """Words that start a program as root in a mount namespace, or why this host allows none.

    Mounts that the host makes later are seen there, and none of ours leaves.
    """
    why = ""
    for options in (["--mount"], ["--map-root-user", "--mount"]):
        words = ["unshare", *options, "--propagation", "slave"]
        try:
            run(*words, "true")
            return words, ""
        except CannotMount as error:
            why = (
                "users may not make namespaces here ({}); see /proc/sys/user/max_user_namespaces"
                " and kernel.apparmor_restrict_unprivileged_userns".format(error)
            )
    return [], why


def run(*words: str) -> None:
    try:
        subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    except OSError as error:
        raise CannotMount("cannot start {}: {}".format(words[0], error)) from error
    except subprocess.CalledProcessError as error:
        raise CannotMount(error.output.decode("utf-8", "replace").strip()) from error


def checked_file(path: str, sha256: str) -> int:
    """The descriptor of an image, after reading all of it.

    Raises:
        WrongImage: its hash differs.
        CannotMount: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as image:
            for block in iter(lambda: image.read(1 << 20), b""):
                digest.update(block)
            file = os.dup(image.fileno())
    except OSError as error:
        raise CannotMount("cannot read {}: {}".format(path, error)) from error
    if digest.hexdigest() != sha256:
        differs = "the image differs from its manifest: its SHA-256 is {}, expected {}"
        raise WrongImage(differs.format(digest.hexdigest(), sha256))
    return file


def mount_image(file: int, source: str, folders: List[str]) -> None:
    """Mount an image in this namespace, and bind each of its directories to its place.

    Libraries of FUSE 2 refuse a directory with files as mount point. So squashfuse gets an empty
    directory, on a tmpfs which its own directories then hide.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *FOLDERS])
    program = next(filter(None, (shutil.which(name, path=path) for name in PROGRAMS)), "")
    if not program:
        raise CannotMount(
            "there is no squashfuse_ll or squashfuse: install squashfuse, or load"
            " the module of Apptainer"
        )
    run("mount", "-t", "tmpfs", "-o", "nosuid,nodev,size=64k,mode=755", "tmpfs", folders[0])
    point = os.path.join(folders[0], "image")
    os.mkdir(point)
    before = os.stat(point).st_dev
    words = [program, "-f", "-o", "ro,fsname=" + source, "/proc/self/fd/{}".format(file), point]
    server = subprocess.Popen(
        words,
        pass_fds=[file],
        restore_signals=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    end = time.monotonic() + MOUNT_SECONDS
    while os.stat(point).st_dev == before:
        if server.poll() is not None or time.monotonic() > end:
            server.kill()
            said = server.communicate()[0].decode("utf-8", "replace")
            raise CannotMount("{} does not mount it: {}".format(program, " ".join(said.split())))
        time.sleep(0.005)
    assert server.stdout
    server.stdout.close()  # or what it prints would fill the pipe
    # The one that hides the mount point comes last.
    for folder in reversed(folders):
        run("mount", "--bind", os.path.join(point, os.path.basename(folder)), folder)


def make_spaces(user: str, group: str) -> List[int]:
    """Descriptors of a mount namespace with the image for programs, and of its user namespace.

    In a user namespace, ids other than the user's and the group's are shown as nobody's. Without
    ids, there is none.
    """
    words = ["unshare", *(["--user"] if user else []), "--mount", "--propagation", "slave", "cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()  # it is there when cat runs
        for name, number in (("uid_map", user), ("gid_map", group)) if user else ():
            with open("/proc/{}/{}".format(child.pid, name), "w") as stream:
                stream.write("{} 0 1".format(number))
        kinds = ("mnt", "user") if user else ("mnt",)
        return [os.open("/proc/{}/ns/{}".format(child.pid, kind), os.O_RDONLY) for kind in kinds]


def start_keeper(listener: socket.socket, image: List[str]) -> None:
    """Start the keeper, without what the launcher waits for, such as its pipes."""
    space, why = find_unshare()
    is_user = "--map-root-user" in space
    ids = [str(os.geteuid()), str(os.getegid())] if is_user else ["", ""]
    listening = listener.fileno()
    program = [*space, sys.executable, "-I", "-S", os.path.abspath(__file__), "--keep"]
    words = [*program, str(listening), *ids, why, *image]
    subprocess.Popen(
        ["sh", "-c", DETACHED, "sh", *words],
        cwd="/",
        start_new_session=True,
        pass_fds=[listening],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ).wait()


def keep(listening: str, user: str, group: str, why: str, *image: str) -> None:
    """The keeper: mounts the image, and answers until no process uses it."""
    spaces, wrong, lacks = [], "", why
    path, sha256, *folders = image
    try:
        if not why:
            mount_image(checked_file(path, sha256), "hvdenv:" + sha256, folders)
            made = make_spaces(user, group)
            run("umount", "--lazy", *folders, folders[0])  # also the tmpfs below the first
            spaces = made
    except WrongImage as error:
        wrong = str(error)
    except (CannotMount, OSError) as error:
        lacks = str(error)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, int(listening)) as listener:
        serve(listener, json.dumps([wrong, lacks, os.getpid(), spaces]).encode(), spaces)


def serve(listener: socket.socket, answer: bytes, spaces: List[int]) -> None:
    """Answer every process, and return when none has come and none runs in the namespace."""
    wait = FIRST_SECONDS
    while True:
        listener.settimeout(wait)
        try:
            connection, _ = listener.accept()
        except socket.timeout:
            if not any(map(is_used, spaces[:1])):
                return
            wait = min(2 * wait, 60.0)
            continue
        wait = 1.0
        with connection, contextlib.suppress(OSError):  # it has ended already
            connection.sendall(answer)


def is_used(space: int) -> bool:
    """Whether a process is in a mount namespace."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.stat("/proc/{}/ns/mnt".format(pid)).st_ino == os.fstat(space).st_ino:
                return True
    return False


def ask_keeper(name: str, image: List[str]) -> Tuple[str, str, List[int], bool]:
    """The keeper's answer, the namespaces, and whether this process has started the keeper.

    Raises:
        CannotMount: there is no answer.
    """
    end = time.monotonic() + READ_SECONDS
    first = False
    while not first and time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(name)
                listener.listen(512)
                first = True
                start_keeper(listener, image)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(READ_SECONDS)
            connection.connect(name)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if struct.unpack("3i", credentials)[1] != os.geteuid():
                raise CannotMount("another user's process holds its name")
            wrong, lacks, pid, spaces = json.loads(connection.makefile().read())
            paths = ["/proc/{}/fd/{}".format(pid, space) for space in spaces]
            return wrong, lacks, [os.open(path, os.O_RDONLY) for path in paths], first
        time.sleep(0.01)  # the keeper is about to listen, or to end
    raise CannotMount("the process that mounts it does not answer")


def enter(job: str, image: List[str]) -> List[str]:
    """Words that start a program in the namespace of a job on this host; none if it has none.

    Raises:
        WrongImage: the image is not what its manifest states.
    """
    try:
        source, here = "hvdenv:" + image[1], os.getcwd()
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as stream:
            if any(line.split(" - ")[1].split()[1] == source for line in stream):
                return []  # it is in a namespace with the image already
        # When a job step of Slurm ends, its keeper does too.
        step = os.environ.get("SLURM_STEP_ID", "")
        words = "{} {} {} {}".format(source, job, step, os.geteuid()).encode()
        name = "\0hvdenv-image-" + hashlib.sha256(words).hexdigest()
        wrong, lacks, spaces, first = ask_keeper(name, image)
    except (CannotMount, OSError) as error:
        wrong, lacks, spaces, first = "", str(error), [], True
    if wrong:
        raise WrongImage(wrong)
    if lacks and first:  # the keeper's answer is the same for all
        tell("{}; the program runs without the image".format(lacks))
    if not spaces:
        return []
    for space in spaces:
        os.set_inheritable(space, True)
    joined = ["--{}=/proc/self/fd/{}".format(*each) for each in zip(("mount", "user"), spaces)]
    return ["nsenter", "--preserve-credentials", *joined, "sh", "-c", IN_FOLDER, "sh", here]


def tell(text: str) -> None:
    sys.stderr.write("hvdenv: image on {}: {}\n".format(socket.gethostname(), text))
    sys.stderr.flush()


def main(words: List[str]) -> NoReturn:
    if words[0] == "--keep":
        keep(*words[1:])
        sys.exit(0)
    path, sha256, job, *rest = words
    end = rest.index("--")
    try:
        command = enter(job, [path, sha256, *rest[:end]]) + rest[end + 1 :]
        os.execvp(command[0], command)
    except WrongImage as error:
        tell("{}: {}\nwhat to do: hvdenv pack RECIPE, or run with --no-image".format(path, error))
    except OSError as error:
        sys.stderr.write("hvdenv: cannot start {}: {}\n".format(command[0], error.strerror))
    sys.exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])

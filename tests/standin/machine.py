"""What the machine under a stand-in has to have, and what one leaves there while it lives."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.modulesystems import RUNS_ON, Kind
from tests.support.needs import SYSTEM_PATH, need

# Short, because sockets lie in it, and their paths have an end at 107 characters.
BASE = Path("/tmp")
PREFIX = "hvdenv-standin-"

PACKAGES = (
    "iproute2",
    "munge",
    "slurm-client",
    "slurmctld",
    "slurmd",
    "libpmix-dev",
    "openssh-client",
    "openssh-server",
    "procps",
    "util-linux",
)


class StandinError(Exception):
    """A part of the stand-in did not do what it should."""


def check_machine(modules: Kind) -> None:
    """Check that this machine can run a stand-in with a module system.

    Raises:
        Missing: it cannot.
    """
    need("root", *PACKAGES, *RUNS_ON[modules], path=SYSTEM_PATH)
    need("namespaces")


def make_folder() -> Path:
    """A directory whose name says which process it belongs to."""
    remove_remains()
    owner = f"{os.getpid()}-{started(os.getpid())}"
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner}-", dir=BASE))
    folder.chmod(0o755)
    return folder


def remove_remains() -> None:
    """Remove directories whose owner and keeper were both killed."""
    for folder in BASE.glob(f"{PREFIX}*-*-*"):
        pid, start, _ = folder.name.removeprefix(PREFIX).split("-", 2)
        if started(int(pid)) != start and folder.stat().st_uid == 0:
            shutil.rmtree(folder, ignore_errors=True)


def started(pid: int) -> str:
    """When a process started, as the kernel counts; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def run(
    *argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    check: bool = True,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it prints.

    Args:
        argv: lists of words that make the command together.
        env: its whole environment.
        stdin: what it reads.
        check: whether a status other than 0 raises.
        timeout: seconds after which it and its children are killed.

    Raises:
        StandinError: it failed, and `check` is true.
        subprocess.TimeoutExpired: it took too long.
    """
    words = [word for part in argv for word in part]
    with subprocess.Popen(
        words,
        env=env,
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if check and process.returncode:
        raise StandinError(f"{shlex.join(words)} ended with {process.returncode}\n{stdout}{stderr}")
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def enter(pid: int, *namespaces: str) -> list[str]:
    """The words before a command that runs in namespaces of a process."""
    options = [f"--{name}" for name in namespaces]
    if "mount" in namespaces:
        options.append("--wd=/")
    return ["nsenter", f"--target={pid}", *options, "--"]


def wait_for(condition: Callable[[], bool], failure: str, detail: Callable[[], str]) -> None:
    """Wait until something holds, two minutes at most.

    Raises:
        StandinError: it does not.
    """
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise StandinError(f"{failure}\n{detail()}")
        time.sleep(0.02)

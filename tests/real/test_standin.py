"""The stand-in of a cluster is one: other tests rely on what is seen here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.real.conftest import processes_of
from tests.standin import Cluster
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# Of namespaces, as /proc calls them.
KINDS = ("net", "pid", "mnt")
OWNER = """
import time
from tests.standin import Cluster
with Cluster(hosts=["lone1"]) as cluster:
    spaces = cluster.on("lone1", ["readlink", "/proc/self/ns/net", "/proc/self/ns/pid"]).stdout
    print(cluster.folder, cluster.interface, *spaces.split(), flush=True)
    time.sleep(600)
"""


class Traces:
    """What a stand-in could leave behind."""

    def __init__(self, folder: Path, interface: str, spaces: Sequence[str]) -> None:
        self.folder = folder
        self.interface = interface
        self.spaces = set(spaces)

    def found(self) -> list[str]:
        found = [*processes_of(self.folder), *self._members()]
        found += [str(self.folder)] if self.folder.exists() else []
        found += [self.interface] if Path("/sys/class/net", self.interface).exists() else []
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return found + [line for line in mounts if str(self.folder) in line]

    def _members(self) -> list[str]:
        """Processes in the namespaces of its hosts."""
        members = []
        for pid in psutil.pids():
            for kind in KINDS:
                with suppress(OSError):  # it has ended meanwhile
                    if os.readlink(link := f"/proc/{pid}/ns/{kind}") in self.spaces:
                        members.append(link)
        return members


def start_owner() -> tuple[subprocess.Popen[str], Traces]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    folder, interface, *spaces = owner.stdout.readline().split()
    return owner, Traces(Path(folder), interface, spaces)


@pytest.mark.usefixtures("cluster")
def test_nothing_is_left_when_its_owner_is_killed() -> None:
    owner, traces = start_owner()
    with owner:
        assert traces.found()
        owner.kill()
    wait_until(lambda: not traces.found(), 60)


@pytest.mark.usefixtures("cluster")
def test_the_next_one_removes_what_is_left_when_all_were_killed() -> None:
    owner, traces = start_owner()
    with owner:
        os.kill(keeper_of(traces.folder), signal.SIGKILL)
        owner.kill()
    # Another worker may begin a stand-in now, which removes the directory too.
    wait_until(lambda: {*traces.found()} <= {str(traces.folder)}, 60)
    with Cluster(hosts=["lone1"]):
        assert not traces.folder.exists()


def keeper_of(folder: Path) -> int:
    words = ["sh", str(ROOT / "tests/standin/keeper.sh"), str(folder)]
    (keeper,) = (
        each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == words
    )
    return keeper

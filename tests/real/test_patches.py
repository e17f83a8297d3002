"""All patches together on Horovod's real source, in any order, and what they leave as it is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from packaging.specifiers import SpecifierSet

from hvdenv import STEP_PROGRAMS
from hvdenv.environments.installation import Installation
from hvdenv.knowledge.patches import Patch, all_patches
from tests.real.doctored import TIMEOUT
from tests.support.files import programs


def prepare(python: Path, version: str, patches: Sequence[Patch], folder: Path) -> Path:
    """The source of a release of Horovod with patches; the release is kept beside the directory."""
    folder.mkdir(exist_ok=True)
    archive = folder.parent / f"horovod-{version}.tar.gz"
    if not archive.exists():
        subprocess.run(
            [
                python,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                "horovod",
                "--dest",
                folder.parent,
                f"horovod=={version}",
            ],
            check=True,
        )
    data = [
        {"name": patch.name, "edits": [edit._asdict() for edit in patch.edit]} for patch in patches
    ]
    (folder / "patches.json").write_text(json.dumps(data))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    source = folder / f"source-{len(patches)}"
    subprocess.run(
        [
            sys.executable,
            STEP_PROGRAMS / "prepare_source.py",
            archive,
            sha256,
            source,
            folder / "patches.json",
        ],
        check=True,
    )
    return source


def first_release(patch: Patch) -> str:
    return next(each.version for each in SpecifierSet(patch.horovod) if each.operator == ">=")


# In CI the release that recipes name; the texts of others change only with the patches.
CURRENT = "0.28.1"
OLDER = sorted({*map(first_release, all_patches())} - {CURRENT})


@pytest.mark.parametrize(
    "version", [CURRENT, *(pytest.param(each, marks=pytest.mark.optin) for each in OLDER)]
)
def test_patches_fit_the_source(version: str, local_prefix: Path, tmp_path: Path) -> None:
    """By name, and in the opposite order."""
    patches = [p for p in all_patches() if SpecifierSet(p.horovod).contains(version)]
    assert patches
    for ordered in (patches, patches[::-1]):
        source = prepare(local_prefix / "venv" / "bin" / "python", version, ordered, tmp_path)
        for patch in patches:
            for edit in patch.edit:
                assert edit.replace in (source / edit.file).read_text()
        shutil.rmtree(source)


# Prints what horovodrun --mpi would execute on as many hosts as it has settings of its own for.
LAUNCH = """
import os, sys
from horovod.runner import mpi_run
from horovod.runner.common.util.settings import Settings
os.execve = lambda program, words, env: print(words[-1])
hosts = ",".join("n%d:1" % number for number in range(64))
settings = Settings(num_proc=64, hosts=hosts, ssh_port=1022, ssh_identity_file="key", verbose=0)
mpi_run.mpi_run(settings, ["lo"], dict(os.environ), ["prog", "-mca", "-bind-to none"])
"""


@pytest.fixture(scope="module")
def sources(local_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Horovod's source without patches, and with those that concern its launcher."""
    python = local_prefix / "venv" / "bin" / "python"
    folder = tmp_path_factory.mktemp("horovod")
    patches = [p for p in all_patches() if any("/runner/" in edit.file for edit in p.edit)]
    return (
        prepare(python, "0.28.1", [], folder),
        prepare(python, "0.28.1", patches, folder),
    )


@pytest.fixture
def launched(
    sources: tuple[Path, Path], local_prefix: Path, tmp_path: Path
) -> Callable[[str], tuple[str, str]]:
    """What horovodrun executes where mpirun says what it is: without and with patches."""

    def run(says: str) -> tuple[str, str]:
        programs(tmp_path, mpirun=f"echo '{says}'")
        stock, patched = (
            subprocess.run(
                [local_prefix / "venv" / "bin" / "python", "-c", LAUNCH],
                env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(source)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.replace(str(source), "SOURCE")
            for source in sources
        )
        return stock, patched

    return run


@pytest.mark.parametrize(
    "says", ["mpirun (Open MPI) 4.1.8", "mpirun (IBM Spectrum MPI) 10.4", "Intel(R) MPI Library"]
)
def test_the_launch_line_of_other_mpis_stays(
    launched: Callable[[str], tuple[str, str]], says: str
) -> None:
    stock, patched = launched(says)
    assert "-np 64" in patched
    assert patched == stock


def test_the_launch_line_of_open_mpi_5(launched: Callable[[str], tuple[str, str]]) -> None:
    stock, patched = launched("mpirun (Open MPI) 5.0.11")
    options, program = stock.split(" prog ")
    for name in ("mca", "bind-to", "map-by"):
        assert f" -{name} " in options
        options = options.replace(f" -{name} ", f" --{name} ")
    assert patched == f"{options} prog {program}"


# What a rendezvous server knows after a meeting of two ranks on one host, in an order in which
# two quick ranks leave the meetings of all, of the host, and of each with itself.
MEETING = """
import collections, threading, types
from horovod.runner.http.http_server import RendezvousHandler
handler = RendezvousHandler.__new__(RendezvousHandler)
handler.send_status_code = lambda code: None
size = {"global": 2, "local_h": 2, "cross_0": 1, "cross_1": 1}
handler.server = types.SimpleNamespace(
    cache={scope: {"0": b"", "1": b""} for scope in size}, cache_lock=threading.Lock(),
    finished_list=collections.defaultdict(list), finished_list_lock=threading.Lock(),
    scope_size=size, verbose=False,
)
for path in "global/0 global/1 local_h/0 cross_0/0 local_h/1 cross_1/0".split():
    handler.path = "/" + path
    handler.do_DELETE()
print(sorted(scope for scope, keys in handler.server.cache.items() if keys))
"""


def test_no_address_is_left_for_the_next_init(
    sources: tuple[Path, Path], local_prefix: Path
) -> None:
    stock, patched = (
        subprocess.run(
            [local_prefix / "venv" / "bin" / "python", "-c", MEETING],
            env={"PYTHONPATH": str(source)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        for source in sources
    )
    assert (stock, patched) == ("['local_h']", "[]")


# Each rank prints the addresses of its connections, a gradient, and what is left after shutdown.
PROCESS_SETS = """
import json, os, sys, time, psutil, torch, horovod.torch as hvd

def connections():
    return [each for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"]

os.environ["HOROVOD_GLOO_IFACE"] = sys.argv[1]
hvd.init()
pair = hvd.add_process_set([0, 1])
for number in range(3 if pair.included() else 0):
    hvd.allreduce(torch.ones(1), name=f"in the pair {number}", process_set=pair)
x = torch.ones(1, requires_grad=True)
(hvd.allreduce(x, name="of all", op=hvd.Sum) * 2).backward()
addresses = sorted({each.laddr.ip for each in connections()})
hvd.shutdown()
time.sleep(1)
left = len(connections())
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
print(json.dumps([addresses, x.grad.item(), left, total.item()]), flush=True)
"""


def test_process_sets_over_gloo(original: Installation) -> None:
    """The chosen network, unnamed operations after those of a set, no connection after shutdown."""
    # Not that of the host's name, on most machines; such as eth0.
    addresses = {
        name: each.address
        for name, all_of_it in psutil.net_if_addrs().items()
        for each in all_of_it
        if each.family == socket.AF_INET
    }
    network = next((name for name in addresses if name != "lo"), "lo")
    path = os.pathsep.join([*original.path, os.environ["PATH"]])
    found = subprocess.run(
        [
            original.program("horovodrun"),
            "--gloo",
            "-np",
            "3",
            original.python,
            "-c",
            PROCESS_SETS,
            network,
        ],
        env={**os.environ, "PATH": path, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT,
    )
    printed = [json.loads(line.partition(":")[2]) for line in found.stdout.splitlines()]
    assert printed == [[[addresses[network]], 6.0, 0, 3.0]] * 3

"""No value of a user's variable is on a command line, which other users of a host can list."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.verification import rank_judgement
from tests.real.conftest import Cli
from tests.real.test_launch_traps import start, told_of
from tests.standin import Cluster
from tests.support.files import programs

MARK = secrets.token_hex(8)
# Shells change or drop most of these.
ODD = f'{MARK} it\'s "$(id)" `id` \\ a=b\n\n üß\udcff ! '
VARIABLES = {"MY_API_TOKEN": MARK, "ODD": ODD, "EMPTY": "", "LONG": MARK * 6000}
# horovodrun passes these on as well. Shells have their own meaning for them, or cannot have them.
OF_HOROVODRUN = {"RANDOM": MARK, "UID": MARK, "a.b": MARK, "x(y)": MARK}
WATCHER = """
import os, sys, select
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
found = set()
while not select.select([sys.stdin], [], [], 0)[0]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read()
        except OSError:
            continue
        if os.environb[b"MARK"] in words:
            found.add(words[:2000])
print(os.getuid(), len(os.listdir("/proc")), *found, sep="\\n")
"""
RANK = """
import json, os, sys, time
import horovod.torch as hvd
hvd.init()
assert sys.stdin.read() == ""
values = {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}
with open(f"{sys.argv[1]}/{hvd.rank()}.json", "w") as stream:
    json.dump(values, stream)
time.sleep(1)
"""
BY_SSH = ("--network-interface", "{interface}")
HOROVODRUN = {
    "one host": ("--gloo", "-H", "gpu32:2"),
    "two hosts": ("--gloo", *BY_SSH, "-H", "gpu32:1,gpu33:1"),
    "elastic": ("--gloo", *BY_SSH, "--min-np", "2", "--host-discovery-script", "{folder}/hosts"),
    "over MPI": ("--mpi", *BY_SSH, "-H", "gpu32:1,gpu33:1", "--mpi-args=--prefix {mpi}"),
}
ON_BOTH = ("-n", "2", "--hosts", "gpu32:1,gpu33:1")
SECONDS = 300
GIVEN = 'it\'s "$(id)" a=b\n\\ ü'
NAMES = (*(word for name in VARIABLES for word in ("-x", name)), "-x", f"GIVEN={GIVEN}")


@contextmanager
def watched() -> Iterator[None]:
    """Another user lists all command lines of the machine and its hosts, all the time."""
    argv = [sys.executable, "-I", "-c", WATCHER]
    with subprocess.Popen(
        argv, env={"MARK": MARK}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as watcher:
        try:
            yield
        finally:
            seen = watcher.communicate(b"\n")[0].split(b"\n")
    assert seen[0] == b"65534" and int(seen[1]) > 20
    assert seen[2:] == [b""], seen[2:]


@pytest.fixture
def program(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "rank.py").write_text(RANK)
    programs(tmp_path, hosts="echo gpu32:1; echo gpu33:1")
    return ("python", str(tmp_path / "rank.py"), str(tmp_path))


def assert_exact(folder: Path, expected: dict[str, str]) -> None:
    for rank in range(2):
        values = json.loads((folder / f"{rank}.json").read_text())
        assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "how",
    [
        name if name == "two hosts" else pytest.param(name, marks=pytest.mark.optin)
        for name in HOROVODRUN
    ],
)
def test_horovodrun(
    original: Installation, cluster: Cluster, program: tuple[str, ...], tmp_path: Path, how: str
) -> None:
    values = {
        "folder": tmp_path,
        "mpi": Path(original.path[-1]).parent,
        "interface": cluster.interface,
    }
    options = [word.format(**values) for word in HOROVODRUN[how]]
    argv = ("horovodrun", "-np", "2", *options, *program)
    others = {} if how == "over MPI" else OF_HOROVODRUN
    environ = {"PATH": ":".join([*original.path, "/usr/bin", "/bin"]), **VARIABLES, **others}
    with watched():
        done = cluster.on("gpu32", argv, env=environ, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_exact(tmp_path, {**VARIABLES, **others})


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun-gloo"])
def test_run_by_ssh(
    original: Installation,
    cli: Cli,
    cluster: Cluster,
    program: tuple[str, ...],
    tmp_path: Path,
    launcher: str,
) -> None:
    words = (sys.executable, "-m", "hvdenv", "run", "--prefix", original.prefix)
    given = {**VARIABLES, "HVDENV_HOME": str(cli.home)}
    with watched():
        done = cluster.on(
            "gpu32",
            [*words, *ON_BOTH, "--launcher", launcher, *NAMES, "--", *program],
            env=given,
            check=False,
            timeout=SECONDS,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_exact(tmp_path, {**VARIABLES, "GIVEN": GIVEN})


def test_run_in_a_job(
    original: Installation, cli: Cli, cluster: Cluster, program: tuple[str, ...], tmp_path: Path
) -> None:
    job = ("salloc", "--quiet", "-p", cluster.partition, "-N2", "--ntasks-per-node=1")
    words = (sys.executable, "-m", "hvdenv", "run", "--prefix", original.prefix)
    with watched():
        cluster.run(
            [*job, *words, "--launcher", "srun", *NAMES, "--", *program],
            env={**VARIABLES, "HVDENV_HOME": str(cli.home), "SLURM_MPI_TYPE": "pmix"},
            timeout=SECONDS,
        )
    assert_exact(tmp_path, {**VARIABLES, "GIVEN": GIVEN})


def test_ranks_of_verify(original: Installation, cluster: Cluster) -> None:
    launch = told_of(cluster)._replace(variables=tuple(VARIABLES.items()))
    runner = Runner({**cluster.environ, **VARIABLES, "HOROVOD_MINE": MARK})
    with watched():
        judgement = rank_judgement.judge_run(start(original, runner, "horovodrun-gloo", launch))
    assert judgement.status == "pass", judgement

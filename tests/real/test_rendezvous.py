"""What strangers can do to the servers of horovodrun with the patch safe-rendezvous: nothing."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.verification import inspection
from hvdenv.verification.installation_checks import check_rendezvous
from hvdenv.verification.setup import Setup
from tests.standin import Cluster
from tests.support.evidence import evidence
from tests.support.files import programs

KEY = "HOROVOD_RENDEZVOUS_KEY"
ADVISORIES = ("CVE-2024-10190", "CVE-2026-31234")
# Each runs on the first host, with ranks on both.
ELASTIC = (
    "horovodrun",
    "--gloo",
    "-np",
    "2",
    "--min-np",
    "2",
    "--host-discovery-script",
    "{folder}/hosts",
    "--network-interface",
    "{interface}",
    "sleep",
    "6",
)
# Horovod keeps the name of the interface for an hour, longer than a stand-in lasts.
FUNCTION = (
    "python",
    "-c",
    "import time, horovod; print('results', horovod.run(lambda: time.sleep(4) or 7,"
    " np=2, hosts='gpu32:1,gpu33:1', disable_cache=True, {by}))",
)
BY_MPI = "use_mpi=True, network_interfaces=['{interface}'], mpi_args='--prefix {mpi}'"
JOBS = {
    "elastic": ELASTIC,
    "function over Gloo": (*FUNCTION[:2], FUNCTION[2].replace("{by}", "use_gloo=True")),
    "function over MPI": (*FUNCTION[:2], FUNCTION[2].replace("{by}", BY_MPI)),
}
# Sends what the advisories describe to each port of another host.
ATTACK = """
import base64, http.client, pickle, sys
directory, address, *ports = sys.argv[1:]
class Payload:
    def __init__(self, name):
        self.name = name
    def __reduce__(self):
        return exec, (f"open('{folder}/{self.name}', 'w')",)
paths = {"CVE-2024-10190": "/worker_addresses/gpu32:0", "CVE-2026-31234": "/runfunc/func"}
for port in ports:
    for name, path in paths.items():
        client = http.client.HTTPConnection(address, int(port), timeout=1)
        try:
            client.request("PUT", path, base64.b64encode(pickle.dumps(Payload(name))))
            print(port, name, client.getresponse().status)
        except Exception as error:
            print(port, name, error)
"""


class Seen(NamedTuple):
    """What was seen while a job ran: keys in environments, command lines, and open ports."""

    keys: set[str]
    command_lines: set[tuple[str, ...]]
    listening: set[str]


def look(seen: Seen, folder: Path) -> None:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            seen.command_lines.add(tuple(words))
            variables = process.environ()
            if str(folder) in variables.get("PATH", ""):
                seen.keys.update(filter(None, [variables.get(KEY)]))


def watch(seen: Seen, folder: Path, running: Future[Any]) -> None:
    """Look at processes as long as a job runs; an attack can take longer than a rank lives."""
    while not running.done():
        look(seen, folder)
        time.sleep(0.05)


def listening(cluster: Cluster) -> set[str]:
    """Addresses at which programs of the first host listen."""
    lines = cluster.on("gpu32", ["ss", "-Hltn"]).stdout.splitlines()
    return {line.split()[3] for line in lines}


def attacked(
    cluster: Cluster, installation: Installation, job: tuple[str, ...], folder: Path
) -> tuple[subprocess.CompletedProcess[str], Seen]:
    """Run a job on both hosts, and attack it from the second one for as long as it runs."""
    programs(folder, hosts="echo gpu32:1; echo gpu33:1")
    (folder / "attack.py").write_text(ATTACK)
    path = ":".join([*installation.path, "/usr/bin", "/bin"])
    mpi = Path(installation.path[-1]).parent  # a copy has none of its own
    argv = [word.format(folder=folder, interface=cluster.interface, mpi=mpi) for word in job]
    seen, before = Seen(set(), set(), set()), listening(cluster)
    with ThreadPoolExecutor() as pool:
        running: Future[subprocess.CompletedProcess[str]] = pool.submit(
            cluster.on, "gpu32", argv, env={"PATH": path}, check=False, timeout=100
        )
        watching = pool.submit(watch, seen, Path(installation.prefix), running)
        while not running.done():
            new = listening(cluster) - before
            seen.listening.update(new)
            ports = sorted({address.rpartition(":")[2] for address in new})
            attack = [
                sys.executable,
                f"{folder}/attack.py",
                str(folder),
                cluster.addresses["gpu32"],
            ]
            cluster.on("gpu33", [*attack, *ports])
        watching.result()
    return running.result(), seen


def judged(installation: Installation, runner: Runner) -> str:
    """What verify says."""
    setup = Setup(installation, runner)
    found = evidence(rendezvous=inspection.rendezvous(setup, 20.0))
    return next(check_rendezvous(setup, found)).status


@pytest.mark.parametrize(
    "name",
    [
        "function over MPI",
        *(
            pytest.param(each, marks=pytest.mark.optin)
            for each in ("elastic", "function over Gloo")
        ),
    ],
)
def test_strangers_are_refused(
    copy: Callable[..., Installation], cluster: Cluster, runner: Runner, tmp_path: Path, name: str
) -> None:
    """Jobs end well; their key is in no command line; they listen on one interface only."""
    installation = copy()
    assert judged(installation, runner) == "pass"
    job, seen = attacked(cluster, installation, JOBS[name], tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert ("results [7, 7]" in job.stdout) == (name != "elastic")
    assert not [each for each in ADVISORIES if (tmp_path / each).exists()]
    assert len(seen.keys) == 1
    (key,) = seen.keys
    assert not [words for words in seen.command_lines if key in " ".join(words)]
    assert not [words for words in seen.command_lines if has_service_key(words)]
    if name == "elastic":  # it was told of the interface, and mpirun has ports of its own
        own = cluster.addresses["gpu32"]
        assert {address.rpartition(":")[0] for address in seen.listening} == {own}


def has_service_key(words: tuple[str, ...]) -> bool:
    """Whether the settings that a host gets from horovodrun contain the key of its services."""
    *_, settings = [word for text in words for word in text.split()] or [""]
    if not any("horovod.runner.task_fn" in word for word in words):
        return False
    with suppress(ValueError):
        return b"C\x20" in base64.b64decode(settings)  # a pickle of 32 bytes
    return False


def test_fuzzing(original: Installation, tmp_path: Path) -> None:
    program, seconds = Path(__file__).parents[1] / "support/fuzz.py", 5
    argv = [original.python, str(program), str(seconds), "1", f"{tmp_path}/marker"]
    found = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds + 60,
    )
    assert found.returncode == 0, found.stdout
    print(found.stdout)

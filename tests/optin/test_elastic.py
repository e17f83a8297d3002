"""Elastic jobs on two hosts, and the deadlocks and aborts of them that users reported.

Not part of `make test`, since it takes up to a quarter of an hour: `python -m pytest
tests/optin/test_elastic.py`. HVDENV_TEST_PREFIX names the environment; without it, one is
built. docs/explanation/measurements.md has the results.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.launch.launchers import Launch, Mpi
from hvdenv.runner import Runner
from hvdenv.sites.hosts import Host
from hvdenv.standalone.ranks.events import World
from hvdenv.verification import elastic
from hvdenv.verification.collection import Setup
from hvdenv.verification.collectors import rank_run
from hvdenv.verification.ranks import RankRun
from tests.real.conftest import cluster, home, original
from tests.real.doctored import PATIENCE, TIMEOUT
from tests.real.test_elastic import FAULTS, check_fault
from tests.standin import Cluster

__all__ = ["cluster", "home", "original"]
FIRST, SECOND, THIRD = "localhost:2\n", "127.0.0.1:1\n", f"{os.uname().nodename}:1\n"
KILLS = 8


def job(
    installation: Installation,
    folder: Path,
    then: list[tuple[str, str]],
    seconds: float,
    *words: str,
    script: str = "",
) -> RankRun:
    """An elastic job on three ranks; standalone/ranks/elastic.py explains `then`.

    Args:
        words: arguments of horovodrun.
        script: what the discovery script does before it prints the list of hosts.
    """
    hosts, discovery = folder / "hosts", folder / "discovery.sh"
    hosts.write_text(FIRST + SECOND)
    discovery.write_text(f"#!/bin/sh\n{script}\ncat {hosts}\n")
    discovery.chmod(0o755)
    plan = {"steps": 3, "patience": 60.0 * PATIENCE, "hosts": str(hosts), "then": then}
    (folder / "plan.json").write_text(json.dumps(plan))
    launch = Launch((), 3, discovery=str(discovery))
    launch = launch._replace(settings=launch.settings._replace(horovodrun=words))
    runner = Runner(dict(os.environ))
    setup = Setup(installation, runner, launch=launch, exercises=(f"elastic={folder}/plan.json",))
    return rank_run(setup, (Mpi("unknown"), ""), seconds * PATIENCE, "torch", "Gloo")


def sizes(run: RankRun) -> list[int]:
    """The size of each world that the oldest rank has seen, and once more at the end."""
    return [world.size for world in max((rank.all(World) for rank in run.ranks), key=len)]


def test_two_hosts_over_ssh(original: Installation, cluster: Cluster, home: Path) -> None:
    launch = Launch((), 2, hosts=tuple(Host(name, 1) for name in cluster.hosts))
    launch = launch._replace(network=launch.network._replace(use=(cluster.interface,)))
    setup = Setup(original, Runner(cluster.environ), launch=launch)
    run = elastic.elastic_run(setup, str(home), (Mpi("unknown"), ""), 2 * TIMEOUT)
    judgement = elastic.judge(run, elastic.two_hosts(launch))
    assert judgement.status == "pass", judgement
    assert {rank.host for rank in run.ranks} == set(cluster.hosts)


def test_a_host_is_replaced_while_there_are_too_few(original: Installation, tmp_path: Path) -> None:
    """hvd#3494: a host leaves, and a different one comes when the others already wait for it.

    Without the patch elastic-sync, old ranks skip the sync in which the new one waits.
    """
    script = (
        f"grep -q 127 {tmp_path}/hosts || echo >> {tmp_path}/calls\n"
        f'[ "$(wc -l < {tmp_path}/calls)" -lt 6 ] || printf "{THIRD.strip()}\\n"'
    )
    (tmp_path / "calls").write_text("")
    then = [("hosts", FIRST)]
    run = job(original, tmp_path, then, 120, "--min-np", "3", "--max-np", "3", script=script)
    assert sizes(run) == [3, 3, 3], [rank.ending for rank in run.ranks]
    assert run.returncode == 0


def test_survivors_of_many_killed_ranks_do_not_abort(
    original: Installation, tmp_path: Path
) -> None:
    """hvd#3264: survivors that queued tensors while Horovod shut down aborted (exit 134)."""
    then = [("kill", "127.0.0.1"), ("wait", "")] * KILLS
    words = ("--min-np", "2", "--max-np", "3", "--blacklist-cooldown-range", "2", "4")
    run = job(original, tmp_path, then, 90.0 * KILLS, *words)
    signals = [rank.exited.signal for rank in run.ranks if rank.exited]
    assert signals.count("SIGABRT") == 0, signals
    assert signals.count("SIGKILL") == KILLS
    assert sizes(run) == [3, 2] * KILLS + [3, 3]
    assert run.returncode == 0


@pytest.mark.parametrize("name", list(FAULTS)[1:])
def test_a_fault_is_named(
    original: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check_fault(original, Runner(), tmp_path, monkeypatch, name)

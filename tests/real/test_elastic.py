"""verify --elastic: a job whose ranks and hosts come and go, in good and in broken installations.

Survivors may notice a killed rank only after 30 seconds, so a test takes one to two minutes.
tests/optin/test_elastic.py has the other faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.launch.launchers import Launch, Mpi
from hvdenv.runner import Runner
from hvdenv.verification import elastic
from hvdenv.verification.collection import Setup
from hvdenv.verification.ranks import Judgement
from tests.real.doctored import PATIENCE, TIMEOUT, make_copy, purelib

DISCOVERY = "horovod/runner/elastic/discovery.py"
# By name: the file, what is added to it, and the message.
FAULTS = {
    "the state is not restored": (
        "horovod/torch/__init__.py",
        "elastic.TorchState.restore = lambda self: None\n",
        "after the rank on 127.0.0.1 was killed, the parameter is ",
    ),
    "allreduce is wrong after a change": (
        "horovod/torch/__init__.py",
        "_right = allreduce\n"
        "def allreduce(tensor, *args, **kwargs):\n"
        "    found = _right(tensor, *args, **kwargs)\n"
        "    if kwargs.get('name') == 'elastic.look' and size() == 2:\n"
        "        found[0] += 1\n"
        "    return found\n",
        "after the rank on 127.0.0.1 was killed, allreduce returns 4, not 3, on rank ",
    ),
    "a lost host is never taken back": (
        DISCOVERY,
        "HostState.is_resurrected = lambda self: False\n",
        "after Horovod took 127.0.0.1 back, 0 of 3 ranks went on: ",
    ),
    "a new host is ignored": (
        DISCOVERY,
        "_script = HostDiscoveryScript.find_available_hosts_and_slots\n"
        "_named, _gone = set(), set()\n"
        "def _known(self):\n"
        "    hosts = _script(self)\n"
        "    _named.update(hosts)\n"
        "    _gone.update(_named.difference(hosts))\n"
        "    return {name: hosts[name] for name in hosts if name not in _gone}\n"
        "HostDiscoveryScript.find_available_hosts_and_slots = _known\n",
        "after 127.0.0.1 was added to the list of hosts, 0 of 3 ranks went on: ",
    ),
}


def judged(installation: Installation, runner: Runner, folder: Path) -> Judgement:
    setup = Setup(installation, runner, launch=Launch((), 2))
    run = elastic.elastic_run(setup, str(folder), (Mpi("unknown"), ""), 2 * TIMEOUT)
    assert not list(folder.glob("elastic-*"))
    return elastic.judge(run, elastic.two_hosts(setup.launch))


def test_training_survives(original: Installation, runner: Runner, tmp_path: Path) -> None:
    judgement = judged(original, runner, tmp_path)
    assert judgement.status == "pass", judgement
    assert "(3, 2, 3, 2, 3 ranks)" in judgement.message
    assert "step 15, parameter -212, sum 6" in judgement.evidence


def test_a_lost_state_is_named(
    original: Installation, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fault(original, runner, tmp_path, monkeypatch, "the state is not restored")


def check_fault(
    original: Installation,
    runner: Runner,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(elastic, "PATIENCE", 15.0 * PATIENCE)
    file, fault, message = FAULTS[name]
    copy = make_copy(original, folder / "copy")
    with (purelib(Path(copy.python)) / file).open("a") as stream:
        stream.write(f"\n{fault}")
    judgement = judged(copy, runner, folder)
    assert judgement.status == "fail"
    assert judgement.message.startswith(message), judgement
    if file == DISCOVERY:
        assert "horovodrun announced no change of hosts within " in judgement.message

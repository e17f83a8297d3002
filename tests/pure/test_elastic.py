"""What verify concludes from the events of an elastic job."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.launch.launchers import Launch, horovodrun_gloo
from hvdenv.runner import Runner
from hvdenv.sites.hosts import Host
from hvdenv.standalone.ranks.events import Joined, Received, World
from hvdenv.verification import elastic
from hvdenv.verification.collection import Setup
from hvdenv.verification.ranks import Judgement, RankRun, collect
from tests.rank_events import event, exited, extension, good

HOSTS = ("n1", "n2")
STAGES = elastic.stages(*HOSTS)


def worlds(last: int = len(STAGES), **changed: object) -> list[Received]:
    """The events of a job up to a stage; `changed` is what rank 1 finds in its last one."""
    found = []
    for number, stage in enumerate(STAGES[:last]):
        step, total = 3 * number, sum(range(1, stage.size + 1))
        for rank in range(stage.size):
            world = World(number, rank, stage.size, step, elastic.parameter(step), total)
            if number == last - 1 and rank == 1:
                world = world._replace(**changed)  # type: ignore[arg-type]
            # The second host has a new process each time.
            pid = 200 + number if rank == 2 else 0
            found += [event(rank, Joined(rank, 3, 0, 1), pid=pid), event(rank, world, pid=pid)]
    return found


def judged(events: list[Received], returncode: int = 0) -> Judgement:
    run = RankRun(
        launcher="horovodrun-gloo", controller="Gloo", argv=("horovodrun",), size=3,
        ranks=collect(events), returncode=returncode, timeout=60,
    )  # fmt: skip
    return elastic.judge(run, HOSTS)


def test_a_job_that_survives() -> None:
    judgement = judged(worlds())
    assert judgement.status == "pass"
    assert "a rank of n2 was killed, after that host returned" in judgement.message


@pytest.mark.parametrize(
    ("last", "changed", "message"),
    [
        (2, {"step": 4}, "after the rank on n2 was killed, training continues at step 4, not at"),
        (2, {"value": 1e6}, "after the rank on n2 was killed, the parameter is 1e+06, not -7.75"),
        (3, {"step": 0, "value": 0.0}, "after Horovod took n2 back, training continues at step 0"),
        (4, {"size": 3}, "after n2 left the list of hosts, Horovod's size is 3, not 2,"),
        (5, {"total": 3}, "after n2 was added to the list of hosts, allreduce returns 3, not 6,"),
        (6, {"value": 1.0}, "at the end, the parameter is 1, not -212"),
    ],
)  # fmt: skip
def test_the_first_thing_that_is_wrong(last: int, changed: dict[str, object], message: str) -> None:
    judgement = judged(worlds(last, **changed), returncode=1)
    assert judgement.status == "fail"
    assert judgement.message.startswith(message)
    assert judgement.message.endswith(" on rank 1 on n1")


def test_ranks_that_do_not_go_on() -> None:
    """The rank that was killed on purpose is not the cause."""
    ends = [
        exited(2, code=-9, signal="SIGKILL", stage="elastic", detail="ranks of n2 are killed"),
        exited(0, code=-6, signal="SIGABRT", stage="elastic", detail="training"),
        exited(1, code=1, stage="elastic", detail="training", ended_by="deadline"),
    ]
    judgement = judged([*worlds(1)[:4], event(2, worlds(1)[5].event), *ends], returncode=1)
    assert judgement.status == "fail"
    assert judgement.message.startswith("after the rank on n2 was killed, 0 of 2 ranks went on: ")
    assert "was ended by SIGABRT, in elastic (training)" in judgement.message
    assert "SIGKILL" not in judgement.message


def test_a_launcher_that_fails_at_the_end() -> None:
    message = "training survived every change, but horovodrun exited with code 1"
    assert judged(worlds(), returncode=1).message == message


def test_the_job_is_started_with_a_list_of_hosts_that_may_change(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    discovery = elastic.write_files(folder, HOSTS)
    # Horovod calls it with a shell.
    printed = subprocess.run(discovery, shell=True, capture_output=True, text=True, check=True)
    assert printed.stdout == "n1:2\nn2:1\n"
    launch = elastic.elastic_launch(Launch(("python",), 2), HOSTS, discovery)
    words = horovodrun_gloo(launch).argv
    assert words[:5] == ("horovodrun", "-np", "3", "--host-discovery-script", discovery)
    limits = " --min-np 2 --max-np 3 --blacklist-cooldown-range 4 8 --gloo python"
    assert limits in " ".join(words)
    assert json.loads((folder / "plan.json").read_text())["then"][0] == ["kill", "n2"]


def test_the_host_of_horovodrun_keeps_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"nodename": "n2.example"}))
    three = (Host("n1"), Host("n2"), Host("n3"))
    assert elastic.two_hosts(Launch((), 2, hosts=three)) == ("n2", "n3")
    assert elastic.two_hosts(Launch((), 2, hosts=three[:1])) == ("localhost", "127.0.0.1")


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.28.1", ""), ("0.24.0", ""), ("0.23.0", "cannot take back"), (None, "does not start")],
)
def test_where_no_elastic_job_is_tried(version: str | None, words: str) -> None:
    setup = Setup(Installation("/env", "/env/bin/python", ()), Runner({}))
    run = None
    if version:
        events = [*good(logged={"controller": "Gloo"}), extension(0, version=version)]
        run = RankRun("horovodrun-gloo", "Gloo", (), 2, collect(events))
    reason = elastic.why_not(setup, {("torch", "Gloo"): run})
    assert words in reason
    assert bool(words) == bool(reason)

"""What verify --startup concludes from what ranks measured."""

from __future__ import annotations

from typing import Any

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.launch.launchers import Launch, Mpi
from hvdenv.reports.report import IMPORTS, INIT, STARTUP
from hvdenv.runner import Runner
from hvdenv.sites.hosts import Host
from hvdenv.standalone.ranks.events import Imported, Joined, Received, Startup
from hvdenv.verification import collectors, startup
from hvdenv.verification.collection import Setup
from hvdenv.verification.ranks import RankRun
from hvdenv.verification.startup import FIRST, Start
from tests.rank_events import event, exited, run, started

MEASURED = Startup(
    started=101.0, interpreter=0.1, framework=2.0, horovod=0.5, init=0.3, modules=900, opens=1000,
    lookups=9000, failed=600, inside=8000, slowest=[Imported("torch._C", 0.7)],
)  # fmt: skip


def rank(number: int, size: int, host: str, **changed: Any) -> list[Received]:
    events = [
        started(number, host),
        event(number, Joined(number, size, 0, 1), host),
        event(number, MEASURED._replace(**changed), host),
    ]
    return [*events, exited(number, host=host)]


def start(nodes: int, *, again: bool = True, **changed: Any) -> Start:
    """One rank on each node, of which the last differs."""
    events = [
        each for n in range(nodes)
        for each in rank(n, nodes, f"n{n}", **(changed if n == nodes - 1 else {}))
    ]  # fmt: skip
    return Start(run(*events, size=nodes), 100.0, 60.0, again)


def test_the_slowest_rank_counts() -> None:
    starts = (start(2, again=False, framework=40.0), start(1), start(2, framework=3.0))
    found = startup.judge(starts)
    assert found.status == "pass"
    assert found.message == (
        "41.90 s from launch to the end of hvd.init() on 2 nodes, 4.90 s when repeated; the"
        " slowest, rank 1 on n1: launcher 1.00 s, interpreter 0.10 s, framework 40.00 s, horovod"
        " 0.50 s, init 0.30 s; 1,000 files opened, 9,000 other look-ups, 600 of which failed"
    )
    assert "   0.700 s  torch._C" in found.evidence and "estimate" not in found.evidence
    assert [each[:2] + each[-1:] for each in startup.measurements("torch", starts)] == [
        (FIRST, 41.9, 2), (STARTUP, 3.9, 1), (IMPORTS, 2.5, 1), (INIT, 0.3, 1), (STARTUP, 4.9, 2),
        (IMPORTS, 3.5, 2), (INIT, 0.3, 2),
    ]  # fmt: skip
    records = list(startup.records("torch", starts))
    assert [(each.nodes, each.again, each.host) for each in records] == [
        (2, False, "n0"), (2, False, "n1"), (1, True, "n0"), (2, True, "n0"), (2, True, "n1")
    ]  # fmt: skip
    assert records[0].launcher == 1.0 and records[0].slowest == {"torch._C": 0.7}


@pytest.mark.parametrize("clock", [20.0, 158.0, 4000.0])
def test_the_clock_of_another_host_is_not_believed(clock: float) -> None:
    found = start(1, started=clock)
    assert next(startup.records("torch", [found])).launcher is None
    assert found.total(found.slowest[1]) == pytest.approx(2.9)
    assert "launcher unknown (clocks differ)" in startup.judge([found]).message


def test_a_rank_that_fails_is_a_failure() -> None:
    events = [*rank(0, 2, "n0"), started(1, "n1"), exited(1, host="n1", code=1, stage="start")]
    found = startup.judge([Start(run(*events), 100.0, 60.0)])
    assert found.status == "fail" and "rank 1 on n1" in found.message


def test_an_estimate_follows_from_the_rate_of_operations() -> None:
    """One node more took 8 s longer for 10,000 operations: 1,250 a second."""
    starts = (start(2, again=False), start(1), start(2, framework=10.0))
    (estimated,) = (e for e in startup.measurements("torch", starts) if e.name == startup.ESTIMATE)
    # 7 times 20,000 operations more than the 11.9 s on 2 nodes
    assert (estimated.value, estimated.ranks) == (11.9 + 7 * 20_000 / 1250, 16)
    assert "estimate for 16 nodes: 124 s" in startup.judge(starts).evidence
    # There is none without growth.
    assert startup.estimate((start(4, again=False), start(1), start(4, framework=2.5))) is None
    assert startup.estimate((start(1, again=False), start(1))) is None


def test_ranks_start_on_some_nodes_and_on_all() -> None:
    hosts = tuple(Host(f"n{number}", 2) for number in range(6))
    setup = Setup(Installation("/env", "python", ()), Runner(), launch=Launch((), 12, hosts=hosts))
    launches = [each.launch for each in startup.launches(setup)]
    assert [(len(each.hosts), each.ranks) for each in launches] == [(1, 2), (2, 4), (4, 8), (6, 12)]


def test_the_first_start_has_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tuple(Host(f"n{number}", 1) for number in range(8))
    setup = Setup(Installation("/env", "python", ()), Runner(), launch=Launch((), 8, hosts=hosts))
    shares: list[float] = []

    def rank_run(setup: Setup, mpi: object, timeout: float, *_: str) -> RankRun:
        shares.append(timeout)
        return start(setup.launch.ranks).run

    monkeypatch.setattr(collectors, "rank_run", rank_run)
    monkeypatch.setattr(collectors, "_can_run", lambda *_: True)
    collectors.starts(setup, True, {}, (Mpi("unknown"), ""), 600.0, "torch")
    assert shares == pytest.approx([300.0] * 4 + [600.0], abs=30)

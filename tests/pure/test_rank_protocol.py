"""What ranks report survives whatever launchers and programs print around it."""

from __future__ import annotations

import base64
import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.masking import mask, plain
from hvdenv.ranks import Rank, RankRun, collect, judge, parse_events

TOKEN = "0123abc"


def line(event: dict[str, Any], token: str = TOKEN) -> str:
    """As hvdenv/probes/rank.py writes it."""
    payload = base64.b64encode(json.dumps(event).encode()).rstrip(b"=")
    return f"@hvdenv {token} {zlib.crc32(payload):08x} {payload.decode()}"


def started(rank: int, pid: int = 0) -> dict[str, Any]:
    variables = {"OMPI_COMM_WORLD_RANK": str(rank)}
    return {"event": "started", "host": "n1", "pid": pid or 100 + rank, "variables": variables}


def result(rank: int, size: int = 2, **changed: Any) -> dict[str, Any]:
    values = {
        "event": "result", "host": "n1", "pid": 100 + rank,
        "said": {"controller": "MPI", "cpu": "MPI"}, "rank": rank, "size": size,
        "local_rank": rank, "local_size": size, "cross_rank": 0, "cross_size": 1,
        "mpi_enabled": True, "gloo_enabled": False, "tests": 30, "failed": 0, "wrong": [],
    }  # fmt: skip
    return {**values, **changed}


def exited(rank: int, **changed: Any) -> dict[str, Any]:
    values = {
        "event": "exited", "host": "n1", "pid": 100 + rank, "code": 0, "signal": "",
        "ended_by": "", "seconds": 4.0, "tail": "",
    }  # fmt: skip
    return {**values, **changed}


def overdue(rank: int, tail: str) -> dict[str, Any]:
    return {"event": "overdue", "host": "n1", "pid": 100 + rank, "tail": tail, "seconds": 59.0}


def run(*events: dict[str, Any], size: int = 2, **changed: Any) -> RankRun:
    ranks = collect(events)
    return RankRun("mpirun", "MPI", ("mpirun", "x"), size, ranks, timeout=60.0)._replace(**changed)


def good(size: int = 2) -> list[dict[str, Any]]:
    kinds = (started, lambda rank: result(rank, size), exited)
    return [kind(rank) for rank in range(size) for kind in kinds]


PREFIXES = ["", "[0]<stdout>:", "[1,0]<stdout>:", "Thu Nov 21 13:00:00 2026[0]<stdout>:", "0: "]


@given(st.lists(st.sampled_from(PREFIXES), min_size=6, max_size=6), st.text(max_size=200))
def test_prefixes_and_other_lines(prefixes: list[str], noise: str) -> None:
    events = good()
    text = "\n".join(f"{p}{line(e)}\n{noise}" for p, e in zip(prefixes, events, strict=True))
    assert parse_events(text, TOKEN) == events


@given(st.integers(0, 2**32))
def test_a_damaged_line_is_not_believed(seed: int) -> None:
    source = random.Random(seed)
    text = line(result(0))
    at = source.randrange(len(text))
    damaged = text[:at] + chr(source.randrange(32, 127)) + text[at + 1 :]
    assert parse_events(damaged, TOKEN) in ([], [result(0)])


@given(st.integers(0, 500))
def test_two_lines_that_ran_into_each_other(at: int) -> None:
    first, second = line(result(0)), line(result(1))
    for event in parse_events(first[:at] + second + first[at:], TOKEN):
        assert event in (result(0), result(1))


def test_another_runs_events_do_not_count() -> None:
    assert parse_events(line(result(0), "ffff"), TOKEN) == []


def test_what_a_rank_says_is_masked_only_after_it_was_checked() -> None:
    event = exited(0, code=1, tail="token=abc https://me:pass@host \x1b[31mred")
    text = mask(plain(line(event)))
    assert parse_events(text, TOKEN) == [event]
    (rank,) = collect(parse_events(text, TOKEN))
    assert rank.tail == "token=*** https://***@host red"


def test_good_run() -> None:
    judgement = judge(run(*good(3), size=3))
    assert judgement.status == "pass"
    assert "3 ranks on n1 agree on 30 reductions" in judgement.message


def test_rank_numbers_come_from_the_launcher_until_the_rank_says_its_own() -> None:
    assert Rank("n1", 1, started(3)).name == "rank 3 on n1"
    assert Rank("n1", 1, {}).name == "rank unknown on n1"
    assert Rank("n1", 1, started(3), result(1)).name == "rank 1 on n1"


KILLED = exited(1, code=-9, signal="SIGKILL", tail="last words")
STACK = "Timeout (0:00:58)!\n  File train.py, line 3 in wait"
LATE = {"code": -9, "signal": "SIGKILL", "ended_by": "deadline"}
BY_LAUNCHER = {"code": -15, "signal": "SIGTERM", "ended_by": "launcher"}

# name: (run, what the message says, what the evidence shows)
FAILURES: dict[str, tuple[RankRun, str, str]] = {
    "no rank": (run(returncode=213, tail="no such host"), "started none of 2", "no such host"),
    "no rank in time": (run(timed_out=True, returncode=-9), "did not end within 60 s", "mpirun x"),
    "singletons": (
        run(*[kind(r) for r in (0, 1) for kind in (started, exited)],
            result(0, 1), {**result(0, 1), "pid": 101}),
        "each says that it is alone (size 1)", "OMPI_COMM_WORLD_RANK",
    ),
    "killed": (
        run(started(0), started(1), exited(0, **BY_LAUNCHER), KILLED, returncode=137),
        "rank 1 on n1: was ended by SIGKILL", "last words",
    ),
    "crash after the results": (
        run(*good()[:5], exited(1, code=-11, signal="SIGSEGV")),
        "rank 1 on n1: was ended by SIGSEGV", "(no output)",
    ),
    "exit code": (
        run(started(0), started(1), exited(0, code=1, tail="ImportError: x"),
            exited(1, code=1, tail="ImportError: y")),
        "rank 0 on n1, rank 1 on n1: ended with exit code 1", "ImportError: y",
    ),
    "two exit codes": (
        run(started(0), started(1), exited(0, code=1), exited(1, code=3)),
        "rank 0 on n1 ended with exit code 1; rank 1 on n1 ended with exit code 3", "",
    ),
    "hang": (
        run(*good()[:3], started(1), overdue(1, STACK), exited(1, **LATE)),
        "rank 1 on n1: no end within 60 s; results came from rank 0 on n1", "line 3 in wait",
    ),
    "hang, then ended by the launcher": (
        run(started(0), overdue(0, STACK), exited(0, **LATE),
            started(1), overdue(1, STACK), exited(1, **BY_LAUNCHER)),
        "rank 0 on n1, rank 1 on n1: no end within 60 s; results came from no rank", "in wait",
    ),
    "hang without a last word": (
        run(*good()[:3], started(1), overdue(1, STACK)), "rank 1 on n1: no end", "in wait",
    ),
    "lost": (run(*good()[:3], started(1)), "rank 1 on n1: was lost without a word", "(no output)"),
    "no result": (
        run(*good()[:3], started(1), exited(1)), "rank 1 on n1: ended without a result", "",
    ),
    "too few": (run(*good(2), size=3), "2 of 3 ranks reported; Horovod's size is 2, not 3", ""),
    "other size": (
        run(*[kind(r) for r in (0, 1) for kind in (started, exited)], result(0, 4), result(1, 4)),
        "Horovod's size is 4, not 2", "size 4",
    ),
    "a rank twice": (
        run(started(0), started(1), result(0), exited(0), exited(1), {**result(1), "rank": 0}),
        "the ranks are [0, 0], not 0 to 1", "",
    ),
    "local ranks": (
        run(*good()[:3], started(1), result(1, local_rank=0), exited(1)),
        "the local ranks on n1 are [0, 0], not 0 to 1", "local_rank 0",
    ),
    "local size": (
        run(*good()[:3], started(1), result(1, local_size=1), exited(1)),
        "the local size on n1 is not 2", "local_size 1",
    ),
    "wrong sums": (
        run(*good()[:3], started(1), exited(1),
            result(1, failed=2, wrong=[{"test": "int64.Sum", "got": "3", "wanted": "5"}])),
        "wrong values on rank 1 on n1: 2 of 30", "test int64.Sum, got 3, wanted 5",
    ),
    "other controller": (
        run(*good()[:3], started(1), result(1, said={"controller": "GLOO"}), exited(1)),
        "rank 1 on n1 used GLOO as its controller, not MPI", "",
    ),
    "launcher failed": (
        run(*good(), returncode=1, tail="finalize"), "but mpirun ended with exit code 1", "finalize",
    ),
    "launcher hung": (run(*good(), returncode=-9, timed_out=True), "but mpirun did not end", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_failures(name: str) -> None:
    failed, message, evidence = FAILURES[name]
    judgement = judge(failed)
    assert judgement.status == "fail"
    assert message in judgement.message
    assert evidence in judgement.evidence
    assert judgement.remedy


def test_other_hosts_have_local_ranks_of_their_own() -> None:
    there = [{**e, "host": "n2"} for e in (started(1), result(1, local_rank=0), exited(1))]
    here = [started(0), result(0, local_size=1), exited(0)]
    there[1]["local_size"] = 1
    assert judge(run(*here, *there)).status == "pass"


def test_an_old_horovod_that_does_not_name_its_controller() -> None:
    def events(**changed: Any) -> list[dict[str, Any]]:
        kinds = (started, lambda rank: result(rank, said={}, **changed), exited)
        return [kind(rank) for rank in (0, 1) for kind in kinds]

    assert judge(run(*events())).status == "pass"
    assert judge(run(*events(mpi_enabled=None, gloo_enabled=None))).status == "unproven"
    assert judge(run(*events(mpi_enabled=False, gloo_enabled=True))).status == "fail"


def test_operations_are_those_that_horovod_names() -> None:
    gloo = [result(0, said={"cpu": "GLOO"}), result(1, said={"cpu": "GLOO"})]
    assert run(*gloo).operations == {"Gloo"}
    assert run(*good()).operations == {"MPI"}
    assert run(started(0)).operations == frozenset()

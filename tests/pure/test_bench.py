"""What benchmarks say: figures of ranks and of the yardstick."""

from __future__ import annotations

from typing import Any, Final

import pytest

from hvdenv.sites.hosts import Host
from hvdenv.sites.launchers import Launch
from hvdenv.standalone.ranks.events import DataPath, RankEvent, Timed
from hvdenv.verification import bench
from hvdenv.verification.bench import Benchmark, Yardstick
from hvdenv.verification.program_start import with_one_rank
from hvdenv.verification.rank_run import RankRun
from tests.support import rank_events
from tests.support.commands import Hvdenv
from tests.support.rank_events import event, exited, good
from tests.support.standalone import load

SUBJECT: Final = "torch over MPI"
MIB = 1 << 20
SIZES = {"1KiB": 1 << 10, "1MiB": MIB, "64MiB": 64 * MIB}
RANK = load("rank")


def measured(**seconds: float) -> list[RankEvent]:
    """What rank 0 reports of sizes, such as 64MiB=0.1 for 0.1 s."""
    return [Timed(SIZES[name], 2, [0.9 * s, s, s, s, 2 * s]) for name, s in seconds.items()]


def run(size: int, *of_first: RankEvent, **ended: Any) -> RankRun:
    """A run whose rank 0 reports these events, and whose others end in this way."""
    events = good(size) + [event(0, each) for each in of_first]
    events += [exited(rank, **ended) for rank in range(1, size) if ended]
    return rank_events.run(*events, size=size, exercises=(bench.EXERCISE,))


def point(name: str, seconds: float, ranks: int = 2) -> Timed:
    return Timed(SIZES[name], ranks, [seconds] * 5)


GOOD = run(2, *measured(**{"1KiB": 85e-6, "64MiB": 0.016}))
MPI = Yardstick((point("1KiB", 3e-6), point("64MiB", 0.012)))
BENCHMARK = Benchmark(SUBJECT, GOOD, MPI)


# Figures


@pytest.mark.parametrize(
    ("ranks", "size", "seconds", "expected"),
    [
        (1, "64MiB", 0.1, 0.0),
        (2, "64MiB", 0.067108864, 1.0),  # each rank sends the message once
        (4, "64MiB", 0.067108864, 1.5),
    ],
)
def test_bus_bandwidth(ranks: int, size: str, seconds: float, expected: float) -> None:
    assert point(size, seconds, ranks).bandwidth == pytest.approx(expected)


def test_the_yardstick_is_read_whatever_is_around_it() -> None:
    text = (
        "warning: x\n"
        '[0]<stdout>:@hvdenv-yardstick {"size": 1024, "ranks": 4, "seconds": [1, 2, 3, 4, 5]}\n'
        '@hvdenv-yardstick {"size": 4096, "ranks\n'
        '@hvdenv-yardstick {"size": 4096, "ranks": 4, "seconds": [1, 2, NaN, 4, 5]}\n'
        '@hvdenv-yardstick {"size": 4096, "ranks": 4, "seconds": [1, 2, "x", 4, 5]}\n'
        "@hvdenv-yardstick {size}\n"
        "bye\n"
    )
    assert bench.parse_yardstick(text) == (Timed(1024, 4, [1, 2, 3, 4, 5]),)


def test_all_figures_become_measurements() -> None:
    found = list(bench.measurements([BENCHMARK]))
    assert [each[1:] for each in found if each.name == "allreduce bandwidth"] == [
        (0.01205, "GB/s", SUBJECT, 1024, 2),
        (4.194, "GB/s", SUBJECT, 64 * MIB, 2),
        (0.3413, "GB/s", "MPI alone", 1024, 2),
        (5.592, "GB/s", "MPI alone", 64 * MIB, 2),
    ]
    latencies = [each.value for each in found if each.name == "allreduce latency"]
    assert latencies == [85, 16000, 3, 12000]
    # The fastest of several runs is the yardstick; that of GPUs is another one.
    nccl = MPI._replace(name="NCCL alone")
    both = bench.measurements([Benchmark(SUBJECT, GOOD, nccl), BENCHMARK])
    assert {"MPI alone", "NCCL alone"} <= {each.subject for each in both}
    runs = [Yardstick((), "no mpicc"), *(Yardstick((point("1MiB", s),)) for s in (9.0, 1.0, 2.0))]
    found = list(bench.measurements([Benchmark(SUBJECT, GOOD, each) for each in runs]))
    assert [e.value for e in found if e.subject == "MPI alone" and e.unit == "us"] == [1e6]


# Judgements


def test_good_figures() -> None:
    judgement = bench.judge_speed(BENCHMARK)
    assert judgement.status == "pass"
    assert judgement.message == "64 MiB: 4.19 GB/s, 75 % of MPI alone; 1 KiB: 85 us"
    line = " ".join(judgement.evidence.splitlines()[2].split())
    assert line == "64 MiB 16000.0 14400.0 16000.0 16000.0 4.194 75 %"
    ended = run(2, *measured(**{"1MiB": 0.016}))
    judgement = bench.judge_speed(Benchmark(SUBJECT, ended, MPI))
    assert "nothing above 1 MiB was measured: --bench-time was too short" in judgement.evidence


def test_ranks_that_break_are_told_and_not_their_figures() -> None:
    dead = {"code": -9, "signal": "SIGKILL", "stage": "bench", "detail": ""}
    broken = run(2, *measured(**{"1KiB": 1e-3}), **dead)
    judgement = bench.judge_speed(Benchmark(SUBJECT, broken, MPI))
    assert judgement.status == "fail"
    assert judgement.message == "rank 1 on n1: was ended by SIGKILL, in bench"


def test_without_a_yardstick_it_is_said_why() -> None:
    none = Yardstick((), "there is no mpicc", "words")
    ((name, judgement),) = bench.judge_yardsticks([Benchmark(SUBJECT, GOOD, none)])
    assert name == "MPI alone"
    assert judgement[:3] == ("skip", "there is no yardstick: there is no mpicc", "words")
    assert list(bench.judge_yardsticks([])) == []
    assert "MPI alone" not in bench.judge_speed(Benchmark(SUBJECT, GOOD, none)).message


@pytest.mark.parametrize(
    ("libraries", "found"),
    [
        ({"libnccl": ["/libnccl.so.2"], "libcudart": ["/c"]}, ("/libnccl.so.2", "/c")),
        # As older wheels of torch name it, with the second of two copies left alone.
        ({"libcudart-d0da41ae": ["/c.so.11.0"], "libnccl": ["/a", "/b"]}, ("/a", "/c.so.11.0")),
        ({"libamdhip64": ["/h"], "librccl": ["/r"]}, ("/r", "/h")),
        ({"libcudart": ["/c"]}, None),  # NCCL is in the extension
        ({}, None),
    ],
)
def test_the_libraries_of_gpus(
    libraries: dict[str, list[str]], found: tuple[str, str] | None
) -> None:
    assert bench.gpu_libraries(run(2, DataPath(libraries=libraries))) == found


def test_one_rank_of_a_launch() -> None:
    hosts = (Host("a", 4), Host("b", 4))
    one = with_one_rank(Launch((), 8, hosts=hosts, hostfile="hosts", ranks_per_node=4))
    assert (one.ranks, one.hosts, one.per_node, one.hostfile) == (1, (Host("a", 1),), 1, "")
    assert one.placed
    here = with_one_rank(Launch((), 4))
    assert (here.ranks, here.hosts, here.placed) == (1, (), False)


TIMEOUT: Final = "HOROVOD_GLOO_TIMEOUT_SECONDS"
CYCLE: Final = "HOROVOD_CYCLE_TIME"


@pytest.mark.parametrize(
    ("words", "given", "name", "value"),
    [
        # Ranks that measure print no more than others do.
        ((), None, "HOROVOD_LOG_LEVEL", "debug"),
        (("bench=1",), None, "HOROVOD_LOG_LEVEL", None),
        # As under `hvdenv run`, Horovod goes by the user's controller.
        ((), None, "HOROVOD_CONTROLLER", "mpi"),
        ((), "gloo", "HOROVOD_CONTROLLER", "gloo"),
        ((), "120", TIMEOUT, "60"),
        # Only ranks that add process sets may.
        (("collectives",), None, "HOROVOD_DYNAMIC_PROCESS_SETS", "1"),
        ((), None, "HOROVOD_DYNAMIC_PROCESS_SETS", None),
        # Ranks that try operations negotiate less often, unless the user says how often.
        (("collectives=", "training"), None, CYCLE, "5"),
        (("collectives=", "training"), "0.1", CYCLE, "0.1"),
        (("bench=1",), None, CYCLE, None),
    ],
)
def test_variables_of_ranks(
    words: tuple[str, ...],
    given: str | None,
    name: str,
    value: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    controller = "Gloo" if name == TIMEOUT else "MPI"
    assert RANK.child_environment(60.0, controller, words).get(name) == value


@pytest.mark.parametrize(
    "words",
    [
        "--bench-time 5",
        "--bench --bench-time 0",
        "--bench --timeout 0",
        "--bench --bench-time nan",
        "--timeout inf",
    ],
)
def test_times_that_make_no_sense(words: str, hvdenv: Hvdenv) -> None:
    assert "what to do: " in hvdenv("verify", *words.split(), "--prefix", "/nowhere", code=2).err

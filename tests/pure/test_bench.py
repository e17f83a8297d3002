"""What benchmarks say: figures of ranks and of the yardstick, and references in recipes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest

from hvdenv.base.errors import RecipeError
from hvdenv.base.schema import decode, encode
from hvdenv.model.cluster import SIZES, Reference
from hvdenv.model.facts import Facts
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import candidates, make_plan, site_python, steps_of
from hvdenv.sites.hosts import Host
from hvdenv.sites.launchers import Launch
from hvdenv.standalone.ranks.events import BenchEnd, DataPath, RankEvent, Timed
from hvdenv.verification import bench
from hvdenv.verification.bench import Benchmark, Point, Yardstick
from hvdenv.verification.rank_run import RankRun
from tests.support import rank_events
from tests.support.commands import Hvdenv
from tests.support.files import write
from tests.support.rank_events import event, exited, good
from tests.support.standalone import load

SUBJECT: Final = "torch over MPI"
MIB = 1 << 20
RANK, RANK_BENCH = load("rank"), load("bench")


def table(name: str) -> Any:
    return json.loads((Path(__file__).parents[1] / f"cases/bench/{name}.json").read_text())


def measured(**seconds: float) -> list[RankEvent]:
    """What rank 0 reports of sizes, such as 64MiB=0.1 for 0.1 s."""
    return [
        Timed("allreduce", SIZES[name], [0.9 * s, s, s, s, 2 * s]) for name, s in seconds.items()
    ]


def speed(samples: int, seconds: float) -> Timed:
    return Timed("step", samples, [seconds] * 5)


def run(size: int, *of_first: RankEvent, **ended: Any) -> RankRun:
    """A run whose rank 0 reports these events, and whose others end in this way."""
    events = good(size) + [event(0, each) for each in of_first]
    events += [exited(rank, **ended) for rank in range(1, size) if ended]
    return rank_events.run(*events, size=size, exercises=bench.EXERCISES)


def point(name: str, seconds: float, ranks: int = 2) -> Point:
    return Point(SIZES[name], ranks, (seconds,) * 5)


GOOD = run(2, *measured(**{"1KiB": 85e-6, "64MiB": 0.016}), speed(128, 0.05))
ONE = run(1, speed(64, 0.045))
MPI = Yardstick((point("1KiB", 3e-6), point("64MiB", 0.012)))
BENCHMARK = Benchmark(SUBJECT, GOOD, MPI, (ONE,))
REFERENCE = Reference("allreduce bandwidth", SUBJECT, 4.0, "GB/s", "64MiB", lower=-0.1)


# Figures


@pytest.mark.parametrize(
    ("ranks", "size", "seconds", "expected"),
    [
        (1, "64MiB", 0.1, 0.0),
        (2, "64MiB", 0.067108864, 1.0),  # each rank sends the message once
        (4, "64MiB", 0.067108864, 1.5),
        (8, "256MiB", 0.1, 2 * 7 / 8 * 256 * MIB / 0.1 / 1e9),
    ],
)
def test_bus_bandwidth(ranks: int, size: str, seconds: float, expected: float) -> None:
    assert point(size, seconds, ranks).bandwidth == pytest.approx(expected)


def test_the_yardstick_is_read_whatever_is_around_it() -> None:
    text = (
        "warning: x\n"
        '[0]<stdout>:@hvdenv-yardstick {"size": 1024, "ranks": 4, "repeats": 9, "seconds": [1, 2, 3, 4, 5]}\n'
        '@hvdenv-yardstick {"size": 4096, "ranks\n'
        '@hvdenv-yardstick {"size": 4096, "ranks": 4, "seconds": [1, 2, NaN, 4, 5]}\n'
        '@hvdenv-yardstick {"size": 4096, "ranks": 4, "seconds": [1, 2, "x", 4, 5]}\n'
        '@hvdenv-yardstick {"size": 4096, "ranks": 0, "seconds": [1, 2, 3, 4, 5]}\n'
        "@hvdenv-yardstick {size}\n"
        "bye\n"
    )
    assert bench.parse_yardstick(text) == (Point(1024, 4, (1, 2, 3, 4, 5)),)


def test_all_figures_become_measurements() -> None:
    found = list(bench.measurements([Benchmark(SUBJECT, GOOD, MPI, (ONE,))]))
    assert [each[1:] for each in found if each.name == "allreduce bandwidth"] == [
        (0.01205, "GB/s", SUBJECT, 1024, 2),
        (4.194, "GB/s", SUBJECT, 64 * MIB, 2),
        (0.3413, "GB/s", "MPI alone", 1024, 2),
        (5.592, "GB/s", "MPI alone", 64 * MIB, 2),
    ]
    assert [each[1:] for each in found if each.name == "training speed"] == [
        (1422.0, "samples/s", SUBJECT, None, 1),
        (2560.0, "samples/s", SUBJECT, None, 2),
    ]
    latencies = [each.value for each in found if each.name == "allreduce latency"]
    assert latencies == [85, 16000, 3, 12000]
    # The fastest of several runs is the yardstick.
    runs = [Yardstick((), "no mpicc"), *(Yardstick((point("1MiB", s),)) for s in (9.0, 1.0, 2.0))]
    found = list(bench.measurements([Benchmark(SUBJECT, GOOD, each) for each in runs]))
    assert [e.value for e in found if e.subject == "MPI alone" and e.unit == "us"] == [1e6]


def test_one_rank_has_no_bandwidth() -> None:
    alone = run(1, *measured(**{"1KiB": 1e-3}), speed(64, 0.05))
    benchmark = Benchmark(SUBJECT, alone)
    names = {each.name for each in bench.measurements([benchmark])}
    assert names == {"allreduce latency", "training speed"}
    assert bench.judge_speed(benchmark, ()).message == "1 KiB: 1000 us; 1280 samples/s"


# Judgements


def test_good_figures() -> None:
    judgement = bench.judge_speed(BENCHMARK, (REFERENCE,))
    assert judgement.status == "pass"
    assert judgement.message == (
        "64 MiB: 4.19 GB/s, 75 % of MPI alone; 1 KiB: 85 us; 2 ranks train 1.8 times as fast as 1 (90 %)"
    )
    line = " ".join(judgement.evidence.splitlines()[2].split())
    assert line == "64 MiB 16000.0 14400.0 16000.0 16000.0 4.194 75 %"
    ended = run(2, *measured(**{"64MiB": 0.016}), BenchEnd(256 * MIB, "memory"))
    judgement = bench.judge_speed(Benchmark(SUBJECT, ended, MPI), ())
    assert judgement.evidence.endswith(
        "256 MiB and more were not measured: the ranks of one host need more memory than is free"
    )


@pytest.mark.parametrize(
    "case", table("references"), ids=lambda case: " ".join(map(str, case.values()))
)
def test_bounds_of_references(case: dict[str, Any]) -> None:
    bounds = {name: case[name] for name in ("lower", "upper") if name in case}
    reference = Reference("allreduce bandwidth", SUBJECT, case["value"], "GB/s", "64MiB", **bounds)
    assert bench.missed(case["found"], reference) == case["said"]


@pytest.mark.parametrize(("lower", "upper"), [(-0.1, None), (None, 0.1)])
def test_nan_misses_every_reference(lower: float | None, upper: float | None) -> None:
    reference = REFERENCE._replace(lower=lower, upper=upper)
    assert bench.missed(math.nan, reference).startswith("is nan GB/s, ")


def judged(*references: Reference) -> tuple[str, str]:
    return bench.judge_speed(BENCHMARK, references)[:2]


def test_a_figure_that_misses_its_reference_fails() -> None:
    slow = REFERENCE._replace(value=5.2, lower=-0.15)
    assert judged(slow) == (
        "fail",
        "allreduce bandwidth at 64 MiB is 4.194 GB/s, less than 4.42 (5.2 GB/s -15 %)",
    )
    late = Reference("allreduce latency", SUBJECT, 50, "us", "1KiB", 2, upper=0.5)
    assert judged(REFERENCE, late) == (
        "fail",
        "allreduce latency at 1 KiB with 2 ranks is 85 us, more than 75 (50 us +50 %)",
    )
    train = Reference("training speed", SUBJECT, 2000, "samples/s", ranks=1, lower=-0.1)
    assert judged(train)[1].startswith("training speed with 1 ranks is 1422 samples/s, less than")


@pytest.mark.parametrize(
    "other",
    [
        {"ranks": 8},
        {"nodes": 2},
        {"subject": "torch over Gloo"},
        {"measure": "training speed", "unit": "samples/s", "size": None, "ranks": 4},
    ],
)
def test_a_reference_for_other_ranks_hosts_or_subjects_is_left_alone(other: dict[str, Any]) -> None:
    assert judged(REFERENCE._replace(value=1e6, **other))[0] == "pass"


def test_a_reference_without_a_figure_is_unproven() -> None:
    status, message = judged(REFERENCE._replace(size="256MiB", nodes=1, ranks=2))
    assert status == "unproven"
    assert message.endswith("no figure, for allreduce bandwidth at 256 MiB with 2 ranks")


@pytest.mark.parametrize("broken", ["all", "smaller"])
def test_ranks_that_break_are_told_and_not_their_figures(broken: str) -> None:
    dead = {"code": -9, "signal": "SIGKILL", "stage": "speed", "detail": ""}
    whole = run(2, *measured(**{"1KiB": 1e-3}), **dead) if broken == "all" else GOOD
    smaller = ONE if broken == "all" else run(2, **dead)._replace(exercises=("speed",))
    judgement = bench.judge_speed(Benchmark(SUBJECT, whole, MPI, (smaller,)), ())
    assert judgement.status == "fail"
    assert judgement.message.startswith("with 2 ranks: rank 1 on n1")
    assert judgement.message.endswith("was ended by SIGKILL, in speed")


@pytest.mark.parametrize(
    "seconds", [[], [1.0], [math.nan] * 5, [math.inf] * 5, [1.0, 1.0, 0.0, 1.0, 1.0], [-1.0] * 5]
)
@pytest.mark.parametrize("what", ["allreduce", "step"])
def test_times_that_no_clock_can_show_are_no_figures(what: str, seconds: list[float]) -> None:
    odd = Benchmark(SUBJECT, run(2, Timed(what, 64 * MIB, seconds)), MPI, (ONE,))
    status, message, evidence, _ = bench.judge_speed(odd, (REFERENCE,))
    assert (status, message) == (
        "fail",
        "with 2 ranks: rank 0 on n1 reported times that no clock can show",
    )
    assert evidence == f"rank 0 on n1: seconds {seconds} for {64 * MIB}"
    assert {each.ranks for each in bench.measurements([odd]) if each.subject == SUBJECT} == {1}


def test_without_a_yardstick_it_is_said_why() -> None:
    none = Yardstick((), "there is no mpicc", "words")
    ((name, judgement),) = bench.judge_yardsticks([Benchmark(SUBJECT, GOOD, none)], ())
    assert name == "MPI alone"
    assert judgement[:3] == ("skip", "there is no yardstick: there is no mpicc", "words")
    assert list(bench.judge_yardsticks([], ())) == []
    assert "MPI alone" not in bench.judge_speed(Benchmark(SUBJECT, GOOD, none), ()).message


def test_gpus_have_a_yardstick_of_their_own() -> None:
    nccl = MPI._replace(name="NCCL alone")
    both = [Benchmark(SUBJECT, GOOD, nccl), BENCHMARK]
    assert "75 % of NCCL alone" in bench.judge_speed(both[0], ()).message
    wanted = REFERENCE._replace(subject="NCCL alone", value=10)
    judged = dict(bench.judge_yardsticks(both, (wanted,)))
    assert [judged[f"{name} alone"].status for name in ("MPI", "NCCL")] == ["pass", "fail"]
    assert judged["MPI alone"].message == "64 MiB: 5.59 GB/s; 1 KiB: 3 us"
    (reached,) = bench.judge_yardsticks(both[:1], (wanted._replace(value=5.5),))
    assert reached[1].status == "pass"
    told = {each.subject for each in bench.measurements(both)}
    assert {"MPI alone", "NCCL alone"} <= told


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


def test_fewer_ranks() -> None:
    smaller = {1: [], 2: [1], 6: [1, 2, 4], 8: [1, 2, 4]}
    assert {count: bench.smaller_counts(count) for count in smaller} == smaller
    hosts = (Host("a", 4), Host("b", 4))
    launch = Launch((), 8, hosts=hosts, hostfile="hosts", ranks_per_node=4)
    one, four = bench.with_fewer(launch, 1), bench.with_fewer(launch, 4)
    assert (one.ranks, one.hosts, one.per_node, one.hostfile) == (1, (Host("a", 1),), 1, "")
    assert (four.hosts, four.placed) == ((Host("a", 4),), True)
    here = bench.with_fewer(Launch((), 4), 2)
    assert (here.ranks, here.hosts, here.placed) == (2, (), False)


# The ranks' side


class Clock:
    """Time as a loop of a given length has it."""

    def __init__(self, one: float, limit: float) -> None:
        self.one, self.left = one, limit

    def time(self, loop: object, repeats: int) -> float:
        self.left -= self.one * repeats
        return self.one


@pytest.mark.parametrize(
    ("one", "limit", "repeats", "rounds"),
    [
        (1e-6, 10.0, 1000, 50),  # not more than it takes
        (1e-3, 10.0, 11, 50),
        (0.2, 10.0, 1, 24),  # half of the time that is left after the trials
        (5.0, 10.0, 1, 3),  # never fewer
    ],
)
def test_how_often_ranks_measure(one: float, limit: float, repeats: int, rounds: int) -> None:
    found, each = RANK_BENCH.measure(Clock(one, limit), lambda: None, 0.5)
    assert (each, len(found)) == (repeats, rounds)
    assert list(RANK_BENCH.SIZES) == list(SIZES.values())


@pytest.mark.parametrize("case", table("memory"), ids=lambda case: case["about"])
def test_memory_that_a_job_can_get(tmp_path: Path, case: dict[str, Any]) -> None:
    memory = {"proc/meminfo": "MemTotal:  900000 kB\nMemAvailable:    65536 kB\n"}
    for name, text in {**memory, **case["files"]}.items():
        write(tmp_path / name, text)
    assert RANK_BENCH.available(str(tmp_path)) == case["mib"] * MIB


TIMEOUT: Final = "HOROVOD_GLOO_TIMEOUT_SECONDS"
CYCLE: Final = "HOROVOD_CYCLE_TIME"


@pytest.mark.parametrize(
    ("words", "given", "name", "value"),
    [
        # Ranks that measure print no more than others do.
        ((), None, "HOROVOD_LOG_LEVEL", "debug"),
        (("bench=1",), None, "HOROVOD_LOG_LEVEL", None),
        (("speed=1",), None, "HOROVOD_LOG_LEVEL", None),
        # As under `hvdenv run`, Horovod goes by the user's controller.
        ((), None, "HOROVOD_CONTROLLER", "mpi"),
        ((), "gloo", "HOROVOD_CONTROLLER", "gloo"),
        ((), None, TIMEOUT, "60"),
        ((), "120", TIMEOUT, "60"),
        # Only ranks that add process sets may.
        (("collectives",), None, "HOROVOD_DYNAMIC_PROCESS_SETS", "1"),
        (("collectives=", "training=x"), None, "HOROVOD_DYNAMIC_PROCESS_SETS", "1"),
        ((), None, "HOROVOD_DYNAMIC_PROCESS_SETS", None),
        # Ranks that try operations negotiate less often, unless the user says how often.
        (("collectives=", "training"), None, CYCLE, "5"),
        (("collectives=", "training"), "0.1", CYCLE, "0.1"),
        (("bench=1",), None, CYCLE, None),
        (("bench=1",), "0.1", CYCLE, "0.1"),
        ((), None, CYCLE, None),
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


# The recipe

RECIPE = """\
format = 1
extends = "local"
name = "local"
summary = "a case"
status = "tested"

[[references]]
measure = "allreduce bandwidth"
subject = "torch over MPI"
ranks = 8
nodes = 2
size = "64MiB"
value = 5
unit = "GB/s"
lower = -0.15
upper = 0.5

[[references]]
measure = "training speed"
subject = "torch over Gloo"
value = 500.5
unit = "samples/s"
lower = -0.2
"""


def resolved(tmp_path: Path, old: str = "", new: str = "") -> Recipe:
    path = tmp_path / "case.toml"
    assert old in RECIPE
    path.write_text(RECIPE.replace(old, new, 1))
    return load_recipe(str(path)).recipe


def test_references_in_a_recipe(tmp_path: Path, hvdenv: Hvdenv) -> None:
    recipe = resolved(tmp_path)
    assert recipe.references == (
        Reference("allreduce bandwidth", SUBJECT, 5.0, "GB/s", "64MiB", 8, 2, -0.15, 0.5),
        Reference("training speed", "torch over Gloo", 500.5, "samples/s", lower=-0.2),
    )
    assert decode(Recipe, json.loads(json.dumps(encode(recipe)))) == recipe
    shown = hvdenv("show", str(tmp_path / "case.toml")).out
    assert (
        "reference: torch over MPI, 8 ranks, 2 nodes, allreduce bandwidth of 64MiB: 5 GB/s -15 % +50 %"
        "  # recipe\n"
    ) in shown
    assert "reference: torch over Gloo, training speed: 500.5 samples/s -20 %" in shown


@pytest.mark.parametrize(("old", "new", "said"), table("refused"))
def test_a_wrong_reference_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolved(tmp_path, old, new)
    begin, _, end = said.partition(".*")
    assert str(caught.value).startswith(f"{tmp_path}/case.toml:{begin}")
    assert end.strip() in str(caught.value)


def test_references_do_not_change_what_is_built(tmp_path: Path, facts: Facts) -> None:
    def digest(recipe: Recipe) -> str:
        python = site_python(recipe) or candidates(recipe, facts)[0]
        return make_plan(steps_of(recipe, facts, python)).digest

    recipe = resolved(tmp_path)
    assert recipe.references
    assert digest(recipe) == digest(recipe._replace(references=()))


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

"""What stands between collectors and checks: names, order, time and errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError
from pathlib import Path

import pytest

from hvdenv.environments.installation import Expectation, Installation
from hvdenv.errors import InterruptedRunError, StepError
from hvdenv.launch.launchers import Launch
from hvdenv.reports.report import About, Finding
from hvdenv.runner import Runner
from hvdenv.verification import collection
from hvdenv.verification.bench import Effort
from hvdenv.verification.collection import Collection, Failed, Key, Setup, check, collector, judge

SETUP = Setup(Installation("/env", "python", ()), Runner(), cores=4)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "COLLECTORS", {})
    monkeypatch.setattr(collection, "CHECKS", {})


def run(setup: Setup = SETUP) -> tuple[Collection, list[Finding]]:
    found = Collection(setup)
    found.run()
    return found, list(judge(setup, found.results))


def test_nothing_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """horovodrun starts Pythons with -c (multiprocessing)."""
    (tmp_path / "pathlib.py").write_text("print('of the folder')")
    monkeypatch.chdir(tmp_path)
    horovodrun = f"{sys.executable} -s -c 'import pathlib; print(pathlib.__file__)'"
    assert "of the folder" not in SETUP.run(("sh", "-c", horovodrun), 60).output


def test_a_collector_and_a_check_are_one_function_each() -> None:
    @collector("release of the kernel")
    def kernel(setup: Setup) -> str:
        return f"6.1 for {setup.installation.prefix}"

    @check("kernel")
    def is_new(kernel: str, expectation: Expectation) -> Iterator[Finding]:
        yield Finding("kernel", "host", "pass", kernel)

    found, findings = run()
    assert findings == [Finding("kernel", "host", "pass", "6.1 for /env")]
    assert [each.name for each in found.measurements] == ["release of the kernel"]


def test_one_for_each_framework_and_all_of_them() -> None:
    @check("all")
    def everything(versions: Mapping[tuple[str, str], str]) -> Iterator[Finding]:
        yield Finding("all", ", ".join("/".join(key) for key in versions), "pass", "")

    @check("each")
    def each(total: str, framework: str) -> Iterator[Finding]:
        yield Finding("each", framework, "pass", total)

    @collector("total of {framework}")
    def total(versions: Mapping[tuple[str, str], str], framework: str) -> str:
        return " ".join(versions.values())

    @collector("{framework} over {controller}", applies=lambda framework: framework != "mxnet")
    def version(framework: str, controller: str, timeout: float) -> str:
        assert timeout > 500
        return f"{framework}-{controller}"

    found, (whole, torch, *_) = run()
    assert whole.subject == (
        "torch/MPI, torch/Gloo, tensorflow/MPI, tensorflow/Gloo, mxnet/MPI, mxnet/Gloo"
    )
    about = About(("torch",))
    assert torch == Finding("each", "torch", "pass", "torch-MPI torch-Gloo", about=about)
    assert found.results[Key("version", "mxnet", "MPI")] is None


def test_what_the_setup_lacks_is_left_out() -> None:
    @collector("speed")
    def speed(effort: Effort) -> float:
        return effort.seconds

    @check("speed")
    def fast(effort: Effort, speed: float) -> Iterator[Finding]:
        yield Finding("speed", "host", "pass", f"{speed} s")

    assert run()[1] == []
    assert run(SETUP._replace(effort=Effort(2.0, "/")))[1][0].message == "2.0 s"


def test_what_fails_is_an_error_of_each_check_that_needs_it() -> None:
    @collector("first")
    def first() -> str:
        raise StepError("no answer", where="/env", remedy="ask again")

    @collector("second")
    def second(first: str) -> str:
        return first

    @check("late")
    def late(second: str) -> Iterator[Finding]:
        yield Finding("late", second, "pass", "")

    found, (finding,) = run()
    assert isinstance(found.results[Key("second")], Failed)
    assert (finding.status, finding.message, finding.remedy) == (
        "error", "/env: no answer", "ask again",
    )  # fmt: skip


def test_a_circle_and_an_unknown_name_are_named() -> None:
    @collector("hen")
    def hen(egg: str) -> str:
        return egg

    @collector("egg")
    def egg(hen: str) -> str:
        return hen

    with pytest.raises(CycleError, match="hen"):
        Collection(SETUP)

    @check("typo")
    def typo(mistyped: str) -> Iterator[Finding]:
        yield Finding("typo", mistyped, "pass", "")

    (finding,) = judge(SETUP, {})
    assert finding.status == "error" and "'mistyped'" in finding.message


def order_of(
    registered: Callable[[Callable[[str], None]], None], setup: Setup = SETUP
) -> list[str]:
    """Names in the order in which collectors begin and end."""
    seen: list[str] = []
    registered(seen.append)
    run(setup)
    return seen


def test_nothing_runs_beside_a_collector_that_runs_alone() -> None:
    def registered(note: Callable[[str], None]) -> None:
        @collector("alone", alone=True)
        def alone() -> None:
            note("alone begins")
            note("alone ends")

        @collector("other")
        def other() -> None:
            note("other")

    assert order_of(registered) == ["alone begins", "alone ends", "other"]


def test_collectors_run_side_by_side_as_far_as_there_are_cores() -> None:
    barrier = threading.Barrier(2, timeout=20)

    def registered(note: Callable[[str], None]) -> None:
        @collector("one", cores=lambda ranks: ranks // 2)
        def one() -> None:
            barrier.wait()

        @collector("two")
        def two() -> None:
            barrier.wait()

        @collector("three", cores=lambda ranks: ranks)
        def three() -> None:
            note("three")

    assert order_of(registered, SETUP._replace(launch=Launch((), 4))) == ["three"]
    assert not barrier.broken


def test_runs_of_ranks_share_the_time() -> None:
    shares = []

    @collector("{framework}", starts_ranks=True, alone=True)
    def ranks(framework: str, timeout: float) -> None:
        shares.append(timeout)

    @collector("facts", least=2.0)
    def facts(timeout: float) -> None:
        shares.append(timeout)

    run(SETUP._replace(seconds=300.0))
    first, *others, last = shares
    assert 85 < first < 90 and all(share > first for share in others)
    assert last > 250
    shares.clear()
    found, _ = run(SETUP._replace(seconds=0.5))
    assert shares == [2.0]
    assert isinstance(found.results[Key("ranks", "torch")], Failed)


def test_a_stopped_runner_leaves_one_finding() -> None:
    @collector("first")
    def first() -> None:
        runner.stop()

    @collector("second")
    def second(first: None) -> str:
        raise AssertionError

    @check("early")
    def early(first: None) -> Iterator[Finding]:
        yield Finding("early", "host", "pass", "")

    @check("late")
    def late(second: str) -> Iterator[Finding]:
        yield Finding("late", second, "pass", "")

    runner = Runner()
    found, findings = run(SETUP._replace(runner=runner))
    assert [each.check for each in findings] == ["early", "interrupted"]
    assert findings[1].message == "it was ended before it could judge: late"
    failed = found.results[Key("second")]
    assert isinstance(failed, Failed) and isinstance(failed.error, InterruptedRunError)


def test_failures_of_interrupted_ranks_are_findings() -> None:
    @collector("{framework} over {controller}")
    def rank_run(setup: Setup, framework: str, controller: str) -> None:
        setup.tell("failed", "wrong values in broadcast")
        runner.stop()
        raise InterruptedRunError

    @check("allreduce")
    def judged(rank_run: None, framework: str, controller: str) -> Iterator[Finding]:
        raise AssertionError

    runner = Runner()
    found, findings = run(SETUP._replace(runner=runner))
    assert [each.check for each in findings] == ["interrupted"]
    failed, *_ = found.unjudged()
    assert (failed.status, failed.message) == ("fail", "wrong values in broadcast")
    assert failed.subject == f"{failed.about.frameworks[0]} over {failed.about.controllers[0]}"

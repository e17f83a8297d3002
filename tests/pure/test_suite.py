"""Which of Horovod's own tests count as tried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.runner import Runner
from hvdenv.standalone.ranks import events
from hvdenv.standalone.ranks.events import Received, Stage, SuiteDone
from hvdenv.verification import suite
from hvdenv.verification.collection import Setup, Suite
from hvdenv.verification.ranks import RankRun
from tests.rank_events import event, exited, run, started

FILE = "parallel/test_torch.py"


def rank(number: int, *tests: events.TestDone, code: int = 0) -> list[Received]:
    """A rank that reports tests and comes to its end, with an exit code of pytest."""
    done = [event(number, each) for each in tests]
    return [started(number), *done, event(number, SuiteDone(code)), exited(number)]


def killed(number: int, test: str, *tests: events.TestDone) -> list[Received]:
    """A rank that is killed in a test."""
    done = [event(number, each) for each in tests]
    stage, end = event(number, Stage("suite", test)), {"stage": "suite", "detail": test}
    return [started(number), *done, stage, exited(number, code=-9, signal="SIGKILL", **end)]


def passed(*names: str) -> list[events.TestDone]:
    return [events.TestDone(name, "passed") for name in names]


def tried(folder: Path, *runs: RankRun) -> tuple[suite.SuiteRun, list[list[str]]]:
    """What came of a file whose runs end like these, and what each run left out."""
    (folder / FILE).parent.mkdir()
    (folder / FILE).touch()
    left_out, rest = [], iter(runs)

    def start(exercise: str, seconds: float) -> RankRun:
        left_out.append(json.loads(Path(exercise.partition("=")[2]).read_text())["done"])
        return next(rest)

    return suite.try_files(Suite(str(folder), "", "", str(folder)), [FILE], start, 60.0), left_out


def test_what_only_some_ranks_finished_is_tried_again(tmp_path: Path) -> None:
    after = [*passed("a", "b", "skips"), events.TestDone("c", "failed", reason="rank 0 is gone")]
    first = run(*killed(0, "b", *passed("a")), *rank(1, *after))
    rest = passed("skips", "c")
    found, left_out = tried(tmp_path, first, run(*rank(0, *rest), *rank(1, *rest)))
    assert left_out == [[], ["a", "b"]]
    assert list(found.crashed) == ["b"]
    assert {test: len(each) for test, each in found.tests.items()} == {"a": 2, "skips": 2, "c": 2}
    assert found.problem is None


def test_a_test_that_its_rank_gave_up_fails(tmp_path: Path) -> None:
    late = events.TestDone("b", "failed", reason="still running")
    own, other = exited(0, stage="suite", detail="b", code=1), exited(1, ended_by="launcher")
    first = run(started(0), event(0, late), own, started(1), other)
    found, left_out = tried(tmp_path, first, run(*rank(0), *rank(1)))
    assert left_out == [[], ["b"]]
    assert list(found.tests["b"].values()) == [late]
    assert not (found.crashed or found.problem)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (rank(0, *passed("a")), "ended without a reason"),
        ([*rank(0, code=3), *rank(1, code=3)], "ended without a reason"),
        ([*rank(0, code=4), *rank(1, code=4)], "ended without a reason"),
    ],
    ids=["a rank is missing", "an internal error of pytest", "a wrong command line"],
)
def test_a_file_that_was_not_tried_is_no_success(
    tmp_path: Path, ranks: Sequence[Received], message: str
) -> None:
    found, _ = tried(tmp_path, run(*ranks))
    assert found.problem and found.problem.status == "error"
    assert message in found.problem.message


def test_a_failing_test_has_a_command_that_runs_it_alone() -> None:
    """With the pytest that was installed for it: the environment has none."""
    setup = Setup(Installation("/my env", "python", ()), Runner())
    command = suite._command(setup, Suite("/tests", "/cache/packages", "", "/work"), 2)
    late = {"rank 0": events.TestDone("a.py::b[x y]", "failed", reason="E  no")}
    (found,) = suite.judge(suite.SuiteRun({"a.py::b[x y]": late}, {}, None), "", command)
    assert found[1].remedy.endswith(
        "`hvdenv run --prefix '/my env' -n 2 -- env PYTHONPATH=/cache/packages python -m pytest"
        " 'a.py::b[x y]'`"
    )


def test_too_many_tests_that_end_ranks(tmp_path: Path) -> None:
    runs = [run(*killed(0, f"t{number}"), *killed(1, f"t{number}")) for number in range(99)]
    found, left_out = tried(tmp_path, *runs)
    assert len(found.crashed) == len(left_out) == 20
    assert found.problem and found.problem.status == "unproven"
    assert "its ranks ended in 20 tests, and the others were not tried" in found.problem.message

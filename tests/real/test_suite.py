"""verify --suite with a few tests of our own in the place of Horovod's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.launch.launchers import Mpi
from hvdenv.runner import Runner
from hvdenv.verification import suite
from hvdenv.verification.collection import Setup, Suite
from tests.real.doctored import TIMEOUT

TESTS = """
import multiprocessing, os, signal, time
import pytest, torch
import horovod.torch as hvd
import common

def setup_module():
    hvd.init()

def test_sum():
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2

def test_wrong_on_one_rank():
    assert hvd.rank() == common.ZERO

def test_of_a_known_fault():
    assert not hvd.rank()

@pytest.mark.skip(reason="no GPU here")
def test_of_a_gpu():
    pass

def test_a_rank_is_killed():
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(2))

def test_a_rank_does_not_come():
    if hvd.rank() == 0:
        time.sleep(1000)
    hvd.allreduce(torch.ones(2))

def test_a_process_of_its_own():
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    assert process.exitcode == 0

def test_after_all_of_that():
    assert hvd.size() == 2
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "test"
    for name, text in (("parallel/test_own.py", TESTS), ("utils/common.py", "ZERO = 0\n")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    (folder / "conftest.py").write_text(
        "import sys, os; sys.path.append(os.path.join(os.path.dirname(__file__), 'utils'))"
    )
    return folder


def test_failing_tests_are_named_and_the_others_still_run(
    original: Installation, runner: Runner, tests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = suite.data()._replace(
        file=(suite.SuiteFile("parallel/test_own.py", "torch", True),),
        known=(
            suite.Known(("test_of_a_known_fault",), ("not 1",), "a fault", "https://example.org"),
            suite.Known(("test_wrong_on_one_rank",), ("text of another failure",), "", ""),
        ),
    )
    monkeypatch.setattr(suite, "data", lambda: own)
    monkeypatch.setattr(suite, "TEST_SECONDS", 10.0)
    setup = Setup(original, runner)
    packages = str(Path(pytest.__file__).parents[1])
    ready = Suite(str(tests), packages, "0.28.1", str(tests.parent))
    run = suite.suite_run(setup, ready, (Mpi("unknown"), ""), 2 * TIMEOUT, "torch", "Gloo")
    found = dict(suite.judge(run, "0.28.1", "pytest"))
    prefix = "parallel/test_own.py::"
    assert found[""].status == "pass"
    assert found[""].message == "3 of Horovod 0.28.1's tests pass; 1 skips itself"
    assert "no GPU here" in found[""].evidence
    assert found["known failures"].status == "skip"
    failed = {
        part.removeprefix(prefix): each for part, each in found.items() if each.status == "fail"
    }
    assert failed.keys() == {
        "test_wrong_on_one_rank", "test_a_rank_is_killed", "test_a_rank_does_not_come",
    }  # fmt: skip
    assert "fails on rank 1" in failed["test_wrong_on_one_rank"].message
    assert "rank 1" in failed["test_a_rank_is_killed"].message
    assert "was ended by SIGKILL" in failed["test_a_rank_is_killed"].message
    assert "still running after 10 s" in failed["test_a_rank_does_not_come"].message
    assert "in test_a_rank_does_not_come" in failed["test_a_rank_does_not_come"].evidence

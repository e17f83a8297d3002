"""Horovod's operations on real ranks, with functions of Horovod that do wrong."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv import RANK_PROGRAMS
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.sites.launchers import Launch
from hvdenv.standalone.ranks.events import Operation
from hvdenv.verification import rank_checks
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.setup import COLLECTIVES, Setup
from hvdenv.verification.verify import usual_ranks, verify
from tests.real.conftest import Cli
from tests.real.doctored import TIMEOUT, found, run_ranks, without_check_build
from tests.support.standalone import load

CONTROLLERS = {"torch": "MPI", "tensorflow": "Gloo"}
HERE = Path(__file__).parent
REDUCED = load("collective_cases").REDUCED


@pytest.fixture(scope="module")
def wrong_run(original: Installation) -> Callable[[str], RankRun]:
    """Ranks of a framework that try all operations of a Horovod with the faults of wrong.py."""
    runs: dict[str, RankRun] = {}
    place = str(Path(__file__).parent)
    doctored = original._replace(env=(*original.env, ("PYTHONPATH", place)))

    def run(framework: str) -> RankRun:
        if framework not in runs:
            run = run_ranks(
                doctored,
                Runner(),
                CONTROLLERS[framework],
                framework=framework,
                exercises=("wrong",),
                timeout=300,
            )
            runs[framework] = run._replace(exercises=(COLLECTIVES,))
        return runs[framework]

    return run


# framework, operation: on which ranks (or all), and what is wrong there
WRONG = [
    ("torch", "allreduce Min", "each of 2 ranks", "Min int32 17: element "),
    ("torch", "grouped allreduce", "rank 1 on {host}", "elements wrong)"),
    ("torch", "allgather", "rank 1 on {host}", "in 2 of 16 cases: int8 3 uneven rows: element "),
    ("torch", "broadcast", "rank 1 on {host}", "elements wrong)"),
    ("torch", "alltoall", "rank 1 on {host}", "elements wrong)"),
    ("torch", "reducescatter", "rank 1 on {host}", "its type is float64, expected int32"),
    ("torch", "grouped reducescatter", "each of 2 ranks", "RuntimeError: a bad day"),
    (
        "torch",
        "forked processes",
        "each of 2 ranks",
        "hvd.init(): RuntimeError: it ended with exit code -11",
    ),
    ("tensorflow", "grouped allreduce", "rank 1 on {host}", "2 tensors, expected 3"),
    ("tensorflow", "broadcast", "rank 1 on {host}", "elements wrong)"),
    ("tensorflow", "reducescatter", "rank 1 on {host}", "its type is float64, expected int32"),
    ("tensorflow", "grouped reducescatter", "each of 2 ranks", "Horovod has been shut down"),
]


@pytest.mark.parametrize(("framework", "operation", "where", "what"), WRONG)
def test_what_does_wrong_is_found(
    wrong_run: Callable[[str], RankRun], framework: str, operation: str, where: str, what: str
) -> None:
    run = wrong_run(framework)
    judgement = dict(rank_checks.judge_collectives(run))[operation]
    assert judgement.status == "fail"
    assert judgement.message.startswith(f"wrong on {where.format(host=run.ranks[0].host)}, in ")
    assert what in judgement.message


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_nothing_else_is_wrong(wrong_run: Callable[[str], RankRun], framework: str) -> None:
    named = {operation for other, operation, *_ in WRONG if other == framework}
    judged = rank_checks.judge_collectives(wrong_run(framework))
    assert {name for name, each in judged if each.status == "fail"} == named


@pytest.mark.parametrize(
    ("framework", "operation", "why"),
    [
        ("torch", "grouped allgather", "there is no horovod.torch.grouped_allgather_async"),
        ("tensorflow", "grouped allgather", "there is no horovod.tensorflow.grouped_allgather"),
    ],
)
def test_what_is_not_there_is_skipped(
    wrong_run: Callable[[str], RankRun], framework: str, operation: str, why: str
) -> None:
    for rank in wrong_run(framework).ranks:
        (event,) = [each for each in rank.all(Operation) if each.operation == operation]
        assert (event.right, event.wrong) == (0, 0)
        assert [each.why for each in event.skipped] == [why]


@pytest.fixture(scope="module")
def wrong_mpi(original: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of wrong_mpi.c."""
    library = tmp_path_factory.mktemp("wrong") / "wrong_mpi.so"
    path = os.pathsep.join((*original.path, os.environ["PATH"]))
    words = ("mpicc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "wrong_mpi.c"))
    subprocess.run(words, check=True, env={**os.environ, "PATH": path})
    return library


# How many cases are wrong, of which the first is which.
WRONG_IN_MPI = {
    **{f"allreduce {each}": f"in 1 of 16 cases: {each} float32 1114113: " for each in REDUCED},
    "grouped allreduce": "in 1 of 4 cases: Sum float32 1114113+5x3: ",
    "allgather": "in 1 of 16 cases: float32 92843 large rows: ",
    "grouped allgather": "in 1 of 5 cases: float32 92843+5x3 large rows: ",
    "broadcast": "in 4 of 23 cases: int8 262145 from 1: ",  # rank 0 has what it gave itself
    "alltoall": "in 1 of 17 cases: float32 92843 large rows: ",
    "reducescatter": "in 1 of 16 cases: Sum float32 7x185686: ",
    "grouped reducescatter": "in 1 of 4 cases: Sum float32 7x185686+5x3: ",
    "process sets": "in 6 of 14 cases: allreduce Sum float32 1003 among all but the last: ",
}


def test_an_mpi_that_is_wrong_in_large_messages_and_in_process_sets(
    original: Installation, wrong_mpi: Path
) -> None:
    """By default, on as many ranks as verify starts, from the user's shell."""
    shell = {**os.environ, "LD_PRELOAD": str(wrong_mpi), "WRONG_ABOVE": str(2**20)}
    report = verify(
        Setup(
            original,
            Runner(shell),
            Expectation(("torch",), ("MPI",)),
            Launch((), usual_ranks()),
            exercises=(COLLECTIVES,),
            seconds=3 * TIMEOUT,
        )
    )
    judged = {name.partition(",")[0]: each for name, each in found(report, "collectives").items()}
    assert judged.keys() == WRONG_IN_MPI.keys()
    for operation, text in WRONG_IN_MPI.items():
        assert text in judged[operation].message
    # Small allreduces are right, and prove nothing beside this.
    assert found(report, "allreduce")["torch over MPI"].status == "pass"
    assert not any(row.proven for row in report.table)


def test_what_verify_judges_is_what_run_runs(
    original: Installation, copy: Callable[..., Installation], cli: Cli, wrong_mpi: Path
) -> None:
    """A library that the user's shell preloads reaches the ranks of both, or of neither."""
    preloaded = {"LD_PRELOAD": str(wrong_mpi), "WRONG_ABOVE": str(2**16)}
    preloaded["UCX_DEBUG_SIGNO"] = "0"  # UCX, which comes along, would handle SIGHUP in hvdenv
    path = os.pathsep.join((*original.path, cli.variables["PATH"]))  # mpirun
    hvdenv = Cli(cli.home, {**cli.variables, **preloaded, "PATH": path})
    words = ("run", "--prefix", original.prefix, "-n", "2", "--launcher", "mpirun")
    program = ("--", "sh", "-c", "echo preloaded: $LD_PRELOAD")
    assert hvdenv(*words, *program).stdout.count(f"preloaded: {wrong_mpi}\n") == 2
    assert hvdenv(*words, "--clean", *program).stdout == "preloaded:\n" * 2

    prefix = without_check_build(copy()).prefix
    words = ("verify", "--prefix", prefix, "--framework", "torch", "--controller", "MPI")
    for option, status, said in (
        (
            (),
            "fail",
            "ranks get LD_PRELOAD, ",
        ),
        (
            ("--clean",),
            "pass",
            "--clean drops LD_PRELOAD, ",
        ),
    ):
        report = hvdenv(*words, "--quick", "--json", *option, code=None).json
        findings = {(each["check"], each["subject"]): each for each in report["findings"]}
        reduced = findings["allreduce", "torch over MPI"]
        assert reduced["status"] == status, reduced
        assert said in findings["variables", "your shell"]["message"]


def test_wrong_answers_differ_from_the_right_ones(original: Installation) -> None:
    program = Path(__file__).parent / "wrong_answers.py"
    output = subprocess.check_output([original.python, str(program), str(RANK_PROGRAMS)], text=True)
    assert int(output) >= 30


@pytest.fixture
def full_socket(tmp_path: Path) -> Path:
    """A library that lets sockets be full for a while on all ranks but rank 0."""
    library = tmp_path / "full_socket.so"
    source = Path(__file__).parent / "full_socket.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def test_right_sums_over_sockets_that_are_full_and_no_proof_of_process_sets(
    original: Installation, runner: Runner, full_socket: Path
) -> None:
    """Without the patch gloo-reducescatter nearly all reducescatters on rank 0 are wrong here."""
    slow = original._replace(env=(*original.env, ("LD_PRELOAD", str(full_socket))))
    run = run_ranks(slow, runner, "Gloo", exercises=(COLLECTIVES,), timeout=300)
    judged = dict(rank_checks.judge_collectives(run))
    assert {name: each.status for name, each in judged.items()} == {
        "": "pass",
        "process sets": "unproven",
    }
    assert judged["process sets"].message == (
        "a process set of two ranks needs a third one beside it"
    )
    assert "-n 3" in judged["process sets"].remedy

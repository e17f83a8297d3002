"""Horovod's operations on real ranks, with functions of Horovod that do wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv import PROBES
from hvdenv.environments.installation import Installation
from hvdenv.runner import Runner
from hvdenv.verification import collectives
from hvdenv.verification.checks import computed
from hvdenv.verification.evidence import Extension
from hvdenv.verification.ranks import RankRun
from tests.real.doctored import run_ranks

CONTROLLERS = {"torch": "MPI", "tensorflow": "Gloo"}


@pytest.fixture(scope="module")
def wrong_run(original: Installation) -> Callable[[str], RankRun]:
    """Ranks of a framework that try all operations of a Horovod with the faults of rank_wrong.py."""
    runs: dict[str, RankRun] = {}
    place = str(Path(__file__).parent)
    doctored = original._replace(env=(*original.env, ("PYTHONPATH", place)))

    def run(framework: str) -> RankRun:
        if framework not in runs:
            run = run_ranks(
                doctored, Runner(), CONTROLLERS[framework],
                framework=framework, exercises=("wrong",), timeout=300,
            )  # fmt: skip
            runs[framework] = run._replace(exercises=(collectives.EXERCISE,))
        return runs[framework]

    return run


# framework, operation: on which ranks (or all), and what is wrong there
WRONG = [
    ("torch", "allreduce Min", "rank 0 on {host}, rank 1 on {host}", "Min int32 17: got "),
    ("torch", "grouped allreduce", "rank 1 on {host}", " are wrong"),
    ("torch", "allgather", "rank 1 on {host}", "in 1 of 10 cases: int8 3 uneven rows: got "),
    ("torch", "broadcast", "rank 1 on {host}", " are wrong"),
    ("torch", "alltoall", "rank 1 on {host}", " are wrong"),
    ("torch", "reducescatter", "rank 1 on {host}", "got float64, wanted int32"),
    ("torch", "grouped reducescatter", "rank 0 on {host}, rank 1 on {host}", "RuntimeError: a bad day"),
    ("torch", "barrier", "rank 0 on {host}, rank 1 on {host}", "got 1, wanted 0"),
    ("torch", "in-place forms", "rank 1 on {host}", "Sum float32 17 in place: got "),
    ("tensorflow", "grouped allreduce", "rank 1 on {host}", "got 2 tensors, wanted 3"),
    ("tensorflow", "broadcast", "rank 1 on {host}", " are wrong"),
    ("tensorflow", "reducescatter", "rank 1 on {host}", "got float64, wanted int32"),
    ("tensorflow", "in-place forms", "rank 0 on {host}, rank 1 on {host}", "broadcast_: got "),
    ("tensorflow", "Keras", "rank 0 on {host}, rank 1 on {host}", "Horovod has been shut down"),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "operation", "where", "what"), WRONG)
def test_what_does_wrong_is_found(
    wrong_run: Callable[[str], RankRun], framework: str, operation: str, where: str, what: str
) -> None:
    run = wrong_run(framework)
    judgement = dict(collectives.judge(run))[operation]
    assert judgement.status == "fail"
    assert judgement.message.startswith(f"wrong on {where.format(host=run.ranks[0].host)}, in ")
    assert what in judgement.message


@pytest.mark.parametrize(
    ("framework", "shared"),
    [
        ("torch", {"repeated names", "process sets", "polled forms"}),
        ("tensorflow", {"repeated names", "process sets", "one graph"}),
    ],
)
def test_nothing_else_is_wrong(
    wrong_run: Callable[[str], RankRun], framework: str, shared: set[str]
) -> None:
    """Operations that share a function may be wrong with it, others must not."""
    named = {operation for other, operation, *_ in WRONG if other == framework}
    judged = dict(collectives.judge(wrong_run(framework)))
    assert named <= judged.keys() <= named | shared


@pytest.mark.parametrize(
    ("framework", "operation", "why"),
    [
        ("torch", "grouped allgather", "there is no horovod.torch.grouped_allgather_async"),
        ("tensorflow", "join", "there is no horovod.tensorflow.join"),
    ],
)
def test_what_is_not_there_is_skipped(
    wrong_run: Callable[[str], RankRun], framework: str, operation: str, why: str
) -> None:
    for rank in wrong_run(framework).ranks:
        (event,) = [e for e in rank.reports["collectives"] if e["operation"] == operation]
        assert (event["right"], event["wrong"]) == (0, 0)
        assert [reason for _, reason, _ in event["skipped"]] == [why]


def test_a_doctored_installation(copy: Callable[..., Installation], runner: Runner) -> None:
    """All the way from the files of Horovod to the findings, with 3 ranks."""
    fault = (
        "del grouped_allgather, grouped_allgather_async\n"
        "_real = alltoall_async\n"
        "def alltoall_async(tensor, *args, **kwargs):\n"
        "    return _real(tensor + (rank() == 2), *args, **kwargs)\n"
    )
    run = run_ranks(copy(fault), runner, "Gloo", size=3, exercises=("collectives",))
    extension = Extension("torch", None, {"built": {"Gloo": 1}})  # type: ignore[arg-type]
    findings = {f.subject: f for f in computed(extension, run, "torch", "Gloo")}
    wrong = findings["alltoall, torch over Gloo"]
    assert (wrong.check, wrong.status) == ("collectives", "fail")
    host = run.ranks[0].host
    assert f"wrong on rank 0 on {host}, rank 1 on {host}, rank 2 on {host}, in " in wrong.message
    others = {"repeated names", "process sets", "polled forms"}
    assert findings.keys() <= {f"{name}, torch over Gloo" for name in {"alltoall", *others}}


def test_wrong_answers_differ_from_the_right_ones(original: Installation) -> None:
    program = Path(__file__).parent / "wrong_answers.py"
    output = subprocess.check_output([original.python, str(program), str(PROBES)], text=True)
    assert int(output) >= 30


@pytest.fixture
def full_socket(tmp_path: Path) -> Path:
    """A library that lets sockets be full for a while on all ranks but rank 0."""
    library = tmp_path / "full_socket.so"
    source = Path(__file__).parent / "full_socket.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def test_right_sums_over_sockets_that_are_full(
    original: Installation, runner: Runner, full_socket: Path
) -> None:
    """Without the patch gloo-reducescatter nearly all reducescatters on rank 0 are wrong here."""
    slow = original._replace(env=(*original.env, ("LD_PRELOAD", str(full_socket))))
    run = run_ranks(slow, runner, "Gloo", exercises=(collectives.EXERCISE,), timeout=300)
    assert {name: said.message for name, said in collectives.judge(run) if name} == {}
    assert [said.status for _, said in collectives.judge(run)] == ["pass"]

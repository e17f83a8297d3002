"""What scripts call besides operations on tensors, on real ranks, and with a Horovod that does wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.runner import Runner
from hvdenv.verification import collectives
from hvdenv.verification.ranks import Judgement, RankRun
from tests.real.doctored import run_ranks

EXERCISES = (collectives.EXERCISE, collectives.SCRIPTS)


@pytest.fixture(scope="module")
def judged(original: Installation) -> Callable[[str], dict[str, Judgement]]:
    """What is said of ranks of a framework with each fault of wrong_scripts.py."""
    runs: dict[str, RankRun] = {}
    place = str(Path(__file__).parent)
    doctored = original._replace(env=(*original.env, ("PYTHONPATH", place)))

    def run(framework: str) -> dict[str, Judgement]:
        if framework not in runs:
            exercises = ("wrong_scripts",)
            runs[framework] = run_ranks(
                doctored, Runner(), "Gloo", size=3, framework=framework, exercises=exercises
            )
        return dict(collectives.judge(runs[framework]._replace(exercises=EXERCISES)))

    return run


EVERYWHERE = "rank 0 on {0}, rank 1 on {0}, rank 2 on {0}"
# framework, fault, script: what is wrong, on all ranks
WRONG = [
    (framework, *fault)
    for framework in ("torch", "tensorflow")
    for fault in (
        (
            "large",
            "objects",
            "in 1 of 3 cases: broadcast_object of 70001 bytes from rank 1: Runtime",
        ),
        (
            "cut",
            "objects",
            "in 1 of 6 cases: allgather_object of 1300007 bytes on each rank: got another",
        ),
        ("alone", "objects", "allgather_object of 1000 bytes on each rank: got 1, wanted 3"),
        (
            "dead",
            "forked processes",
            "a process forked after hvd.init(): the child ended with exit",
        ),
        ("ready", "numbers", "is_initialized: got False, wanted True"),
        ("once", "second init", "hvd.init() a second time: ValueError: Horovod was initialised"),
        ("sets", "second init", "hvd.shutdown(), then hvd.init() with process_sets: "),
    )
] + [
    ("torch", "sparse", "sparse tensors", "sparse_allreduce_async: values differ by"),
    ("tensorflow", "sparse", "sparse tensors", "allreduce of IndexedSlices: values differ by"),
    (
        "tensorflow",
        "plain layer",
        "batch normalisation",
        "SyncBatchNormalization: values differ by",
    ),
    ("tensorflow", "size", "numbers", "size_op: got 1, wanted 3"),
    ("tensorflow", "hosts", "numbers", "is_homogeneous: got False, wanted True"),
]


@pytest.mark.parametrize(("framework", "fault", "script", "what"), WRONG)
def test_what_does_wrong_is_found(
    judged: Callable[[str], dict[str, Judgement]],
    framework: str,
    fault: str,
    script: str,
    what: str,
) -> None:
    judgement = judged(framework)[f"{fault}: {script}"]
    assert judgement.status == "fail"
    assert "on each of 3 ranks" in judgement.message or judgement.message.count("rank ") >= 3
    assert what in judgement.message
    assert judgement.remedy


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_nothing_else_is_wrong(
    judged: Callable[[str], dict[str, Judgement]], framework: str
) -> None:
    named = {f"{fault}: {script}" for other, fault, script, _ in WRONG if other == framework}
    assert judged(framework).keys() == named


def test_large_objects_of_a_doctored_installation(
    copy: Callable[..., Installation], runner: Runner
) -> None:
    """On one rank only: the others wait for it, until it ends the exercise and shuts Horovod down."""
    fault = (
        "_real, _pickled = broadcast_object, __import__('pickle').dumps\n"
        "def broadcast_object(obj, root_rank=0, *more, **named):\n"
        "    if rank() == root_rank and len(_pickled(obj)) > 65536:\n"
        "        raise RuntimeError('too large')\n"
        "    return _real(obj, root_rank, *more, **named)\n"
    )
    run = run_ranks(copy(fault), runner, "MPI", exercises=EXERCISES)
    found = dict(collectives.judge(run))
    assert found["objects"].status == "fail"
    assert "broadcast_object of 70001 bytes from rank 1: RuntimeError: too large" in (
        found["objects"].message
    )

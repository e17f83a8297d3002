"""Training on real ranks, and with parts of Horovod and of the frameworks that do wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv import RANK_PROGRAMS
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.standalone.ranks.events import RankEvent, Training
from hvdenv.verification.rank_checks import judge_training
from hvdenv.verification.rank_judgement import judge_exercise
from hvdenv.verification.rank_run import Rank, RankRun
from hvdenv.verification.setup import TRAINING
from tests.real.doctored import run_ranks
from tests.support.standalone import load

PARTS = load("training").PARTS
CONTROLLERS = {"torch": "MPI", "tensorflow": "Gloo"}


@pytest.fixture(scope="module")
def run_with_faults(original: Installation) -> Callable[[str], RankRun]:
    """Ranks of a framework that train with all faults of faults.py, one after the other."""
    runs: dict[str, RankRun] = {}
    place = str(Path(__file__).parent)
    doctored = original._replace(env=(*original.env, ("PYTHONPATH", place)))

    def run_once(framework: str) -> RankRun:
        if framework not in runs:
            run = run_ranks(
                doctored,
                Runner(),
                CONTROLLERS[framework],
                framework=framework,
                exercises=("faults",),
                timeout=500,
            )
            assert judge_exercise(run, "faults") is None
            runs[framework] = run
        return runs[framework]

    return run_once


def only(run: RankRun, fault: str) -> RankRun:
    """The run as if it had trained with one fault only."""
    ranks = tuple(rank._replace(events=_of_fault(rank, fault)) for rank in run.ranks)
    return run._replace(ranks=ranks, exercises=(TRAINING,))


def _of_fault(rank: Rank, fault: str) -> tuple[RankEvent, ...]:
    parts = [each for each in rank.all(Training) if each.part.startswith(f"{fault}: ")]
    others = [each for each in rank.events if not isinstance(each, Training)]
    return (*others, *(each._replace(part=each.part.removeprefix(f"{fault}: ")) for each in parts))


# framework, fault, part: what is wrong with it
FAULTS = [
    (
        "torch",
        "parameters",
        "DistributedOptimizer: parameters and buffers after broadcast_parameters",
    ),
    ("torch", "buffers", "DistributedOptimizer: parameters and buffers after broadcast_parameters"),
    ("torch", "state", "DistributedOptimizer: state after broadcast_optimizer_state are not equal"),
    ("torch", "alone", "DistributedOptimizer: parameters at the end are not equal: rank 1"),
    ("torch", "alone", "as if it had trained alone"),
    ("torch", "added", "as if gradients were added and not averaged"),
    ("tensorflow", "variables", "DistributedGradientTape: variables after broadcast_variables"),
    ("tensorflow", "alone", "DistributedGradientTape: parameters at the end are not equal: rank 1"),
    ("tensorflow", "alone", "Keras fit: weights after BroadcastGlobalVariablesCallback are not"),
    ("tensorflow", "added", "DistributedGradientTape: parameters of rank 0"),
    ("tensorflow", "optimizer", "Keras fit: parameters of rank 0"),
    ("tensorflow", "plain optimizer", "Keras fit: parameters at the end are not equal: rank 1"),
]


@pytest.mark.parametrize(("framework", "fault", "problem"), FAULTS)
def test_what_does_wrong_is_found(
    run_with_faults: Callable[[str], RankRun], framework: str, fault: str, problem: str
) -> None:
    run = run_with_faults(framework)
    ((_, judgement),) = judge_training(only(run, fault))
    assert judgement.status == "fail"
    assert problem.format(host=run.ranks[0].host) in judgement.evidence


def test_the_cause_comes_first(run_with_faults: Callable[[str], RankRun]) -> None:
    """What a fault does to all that follows is told after it."""
    run = run_with_faults("torch")
    ((_, judgement),) = judge_training(only(run, "parameters"))
    assert judgement.message.startswith(
        "DistributedOptimizer: parameters and buffers after broadcast_parameters are not equal: rank 1"
    )


@pytest.mark.parametrize("framework", CONTROLLERS)
def test_without_a_fault_it_passes(
    run_with_faults: Callable[[str], RankRun], framework: str
) -> None:
    judged = dict(judge_training(only(run_with_faults(framework), "none")))
    assert judged[""].status == "pass", judged
    assert judged[""].message.startswith("parameters are equal on 2 ranks; Distributed")
    assert list(judged) == [""]
    assert judged[""].message.count("loss ") == len(PARTS[framework])


def test_the_bound_holds_and_is_narrow(original: Installation) -> None:
    """Ranks that compute in float32 are within it; wrong gradients are not."""
    program = Path(__file__).parent / "rounding.py"
    output = subprocess.check_output([original.python, str(program), str(RANK_PROGRAMS)], text=True)
    assert int(output) == 10

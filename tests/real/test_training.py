"""Training on real ranks, and with parts of Horovod and of the frameworks that do wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv import RANK_PROGRAMS
from hvdenv.command import Command, Outcome
from hvdenv.environments.installation import Installation
from hvdenv.runner import Runner
from hvdenv.standalone.ranks.events import ExtensionFacts, RankEvent, Training
from hvdenv.verification import training
from hvdenv.verification.checks import trained
from hvdenv.verification.collectors import Extension
from hvdenv.verification.ranks import Rank, RankRun, judge_exercise
from tests.real.doctored import run_ranks

CONTROLLERS = {"torch": "Gloo", "tensorflow": "MPI"}


@pytest.fixture(scope="module")
def run_with_faults(original: Installation) -> Callable[[str], RankRun]:
    """Ranks of a framework that train with all faults of faults.py, one after the other."""
    runs: dict[str, RankRun] = {}
    place = str(Path(__file__).parent)
    doctored = original._replace(env=(*original.env, ("PYTHONPATH", place)))

    def run_once(framework: str) -> RankRun:
        if framework not in runs:
            run = run_ranks(
                doctored, Runner(), CONTROLLERS[framework],
                framework=framework, exercises=("faults",), timeout=500,
            )  # fmt: skip
            assert judge_exercise(run, "faults") is None
            runs[framework] = run
        return runs[framework]

    return run_once


def only(run: RankRun, fault: str) -> RankRun:
    """The run as if it had trained with one fault only."""
    ranks = tuple(rank._replace(events=_of_fault(rank, fault)) for rank in run.ranks)
    return run._replace(ranks=ranks, exercises=(training.EXERCISE,))


def _of_fault(rank: Rank, fault: str) -> tuple[RankEvent, ...]:
    parts = [each for each in rank.all(Training) if each.part.startswith(f"{fault}: ")]
    others = [each for each in rank.events if not isinstance(each, Training)]
    return (*others, *(each._replace(part=each.part.removeprefix(f"{fault}: ")) for each in parts))


# framework, fault, part: what is wrong with it
FAULTS = [
    ("torch", "parameters", "DistributedOptimizer: parameters after broadcast_parameters are not"),
    ("torch", "state", "DistributedOptimizer: state after broadcast_optimizer_state are not equal"),
    ("torch", "alone", "DistributedOptimizer: parameters at the end are not equal: rank 1"),
    ("torch", "alone", "one process on the joined batches, not 0.0001, as if it had trained alone"),
    ("torch", "added", "not 0.0001, as if gradients were added and not averaged"),
    ("torch", "coarse", "DistributedOptimizer with Compression.fp16: parameters of rank 0"),
    ("torch", "shard", "DistributedOptimizer: rank 1 on {host} had 12 samples that rank 0 on"),
    ("torch", "shard", "DistributedOptimizer: no rank had 12 of 24 samples (epoch 4)"),
    ("torch", "metric", "DistributedOptimizer: loss is not averaged on rank 0"),
    ("torch", "checkpoint", "rank 0 on {host} loads other parameters from its checkpoint"),
    ("tensorflow", "variables", "DistributedGradientTape: variables after broadcast_variables"),
    ("tensorflow", "variables", "Keras fit: the learning rate on rank 0 on {host} is 0.125"),
    ("tensorflow", "alone", "DistributedGradientTape: variables at the end are not equal: rank 1"),
    ("tensorflow", "alone", "Keras fit: weights after BroadcastGlobalVariablesCallback are not"),
    ("tensorflow", "added", "DistributedGradientTape: parameters of rank 0"),
    ("tensorflow", "added", "Keras fit: loss of epoch 1 is not averaged on rank 0"),
    ("tensorflow", "optimizer", "Keras fit: parameters of rank 0"),
    ("tensorflow", "optimizer", "DistributedGradientTape: rank 1 on {host} had 12 samples"),
    ("tensorflow", "optimizer", "DistributedGradientTape: rank 1 on {host} wrote a checkpoint"),
    ("tensorflow", "plain optimizer", "Keras fit: weights at the end are not equal: rank 1"),
]


@pytest.mark.parametrize(("framework", "fault", "problem"), FAULTS)
def test_what_does_wrong_is_found(
    run_with_faults: Callable[[str], RankRun], framework: str, fault: str, problem: str
) -> None:
    run = run_with_faults(framework)
    ((_, judgement),) = training.judge(only(run, fault))
    assert judgement.status == "fail"
    assert problem.format(host=run.ranks[0].host) in judgement.evidence


def test_the_cause_comes_first(run_with_faults: Callable[[str], RankRun]) -> None:
    """What a fault does to all that follows is told after it."""
    run = run_with_faults("torch")
    ((_, judgement),) = training.judge(only(run, "parameters"))
    assert judgement.message.startswith(
        "DistributedOptimizer: parameters after broadcast_parameters are not equal: rank 1"
    )


@pytest.mark.parametrize("framework", CONTROLLERS)
def test_without_a_fault_it_passes(
    run_with_faults: Callable[[str], RankRun], framework: str
) -> None:
    ((_, judgement),) = training.judge(only(run_with_faults(framework), "none"))
    assert judgement.status == "pass", judgement
    assert judgement.message.startswith("parameters are equal on 2 ranks; Distributed")
    assert judgement.message.count("loss ") == 2


def test_the_bound_holds_and_is_narrow(original: Installation) -> None:
    """Ranks that compute in float32, and exchange float16, are within it; wrong gradients are not."""
    code = f"""
import sys, numpy
sys.path.insert(0, {str(RANK_PROGRAMS)!r})
import training

def ranks(plan, factor):
    weights, velocity = plan.starts.copy(), plan.velocity
    for rate, rows in plan.steps:
        gradients = []
        for rank, samples in enumerate(rows):
            x, y = (array[samples] for array in plan.data)
            share = numpy.float32(2 / y.size) * (x.T @ (x @ weights[rank] - y))
            gradients.append(share.astype("float16") if plan.half else share)
        mean = (sum(gradients) / gradients[0].dtype.type(len(rows))).astype("float32")
        velocity = numpy.float32(plan.momentum) * velocity + numpy.float32(factor) * mean
        weights[:] = weights[0] - numpy.float32(rate) * velocity
    return weights[0]

for size in (1, 2, 3, 7, 64):
    starts, velocity = training.beginning(numpy, size)
    own = numpy.stack([training.random_values(numpy, rank, "parameters") for rank in range(size)])
    data, order = training.make_data(numpy, size), range(size * training.PER_RANK)
    long = training.steps_of(numpy, order, size, [training.RATE] * 12)
    warmup = training.steps_of(numpy, order, size, training.warmup_rates(size))
    for steps, begin, momentum, half in (
        (long, starts, training.MOMENTUM, False),
        (long, starts, training.MOMENTUM, True),
        (warmup, own, 0.0, False),
    ):
        plan = training.Plan(data, steps, begin, velocity * momentum, momentum, 1.0, half)
        right = training.compare(numpy, plan, 0, ranks(plan, 1.0))
        assert right["difference"] <= right["bound"] < (0.03 if half else 2e-4), right
        wrong = training.compare(numpy, plan, 0, ranks(plan, 1.5 if half else 1.02))
        assert wrong["difference"] > wrong["bound"], (size, half, wrong)
print("done")
"""
    output = subprocess.check_output([original.python, "-c", code], text=True)
    assert output == "done\n"


def test_a_doctored_installation(copy: Callable[..., Installation], runner: Runner) -> None:
    """All the way from the files of Horovod to the finding."""
    fault = "def broadcast_parameters(*args, **kwargs): pass"
    run = run_ranks(copy(fault), runner, "MPI", exercises=("training",))
    (finding,) = trained(
        Extension("torch", Outcome(Command(()), 0, "", 0.0), ExtensionFacts(built={"MPI": 1})),
        run, "torch", "MPI",
    )  # fmt: skip
    assert (finding.check, finding.subject, finding.status) == (
        "training",
        "torch over MPI",
        "fail",
    )
    assert "after broadcast_parameters are not equal: rank 1 on" in finding.message

"""What ranks found when they trained a model is judged together."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvdenv.standalone.ranks.events import Training
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.training import judge_parts
from tests.standalone import load
from tests.support.rank_events import event, exited, result, run, started

PROGRAM = load("training")

Change = Callable[[int, dict[str, Any]], None]


def facts(rank: int, size: int) -> dict[str, Any]:
    """What a rank reports where all is well."""
    return {
        "part": "DistributedOptimizer",
        "seconds": 0.2,
        "steps": 12,
        "losses": [6.5, 0.06],
        "checksums": {"parameters after the broadcast": "a", "at the end": "b"},
        "difference": 7e-8,
        "bound": 1e-4,
        "own_loss": 0.06 + 0.01 * (rank - (size - 1) / 2),
    }


def trained(size: int, *changes: Change) -> RankRun:
    """A run whose ranks report one part each; changes are made to rank numbers and facts."""
    events = []
    for rank in range(size):
        own = facts(rank, size)
        for change in changes:
            change(rank, own)
        host = f"n{rank}"
        numbers = {"local_rank": 0, "local_size": 1, "cross_rank": rank, "cross_size": size}
        events += [started(rank, host), result(rank, size, host=host, **numbers)]
        events += [event(rank, Training(**own), host)] if own else []
        events.append(exited(rank, host=host))
    return run(*events, size=size, exercises=("training",))


@pytest.mark.parametrize("size", [1, 3])
def test_good_training(size: int) -> None:
    ((part, judgement),) = judge_parts(trained(size))
    assert (part, judgement.status) == ("", "pass")
    assert judgement.message == (
        f"parameters are equal on {size} rank{'s' if size > 1 else ''}; DistributedOptimizer:"
        " loss 6.5 to 0.06 in 12 steps, 7e-08 from one process (bound 0.0001)"
    )


def on(number: int, **changed: Any) -> Change:
    return lambda rank, own: own.update(changed) if rank == number else None


def on_all(**changed: Any) -> Change:
    return lambda rank, own: own.update(changed)


def local_loss(rank: int, own: dict[str, Any]) -> None:
    own["losses"] = [own["losses"][0], own["own_loss"]]


NAN = float("nan")

# name: (changes, the message)
FAILURES: dict[str, tuple[list[Change], str]] = {
    "no broadcast": (
        [on(1, checksums={"parameters after the broadcast": "c", "at the end": "b"})],
        "parameters after the broadcast are not equal: rank 1 on n1 and rank 0 on n0 differ",
    ),
    "not equal at the end": (
        [on(1, checksums={"parameters after the broadcast": "a", "at the end": "c"})],
        "at the end are not equal: rank 1 on n1 and rank 0 on n0 differ",
    ),
    "added": (
        [on_all(difference=0.31, like="gradients were added and not averaged")],
        "parameters of rank 0 on n0, rank 1 on n1 are 0.31 from those of one process on the"
        " joined batches (bound 0.0001), as if gradients were added and not averaged",
    ),
    "no number": ([on(1, difference=NAN)], "parameters of rank 1 on n1 are nan from"),
    "a bound without an end": (
        [on(1, difference=9.0, bound=float("inf"))],
        "the bound of rank 1 on n1 is inf, and rounding explains 0.00014",
    ),
    "loss": ([on_all(losses=[0.5, 0.6])], "the loss does not fall on rank 0 on n0: 0.5, and 0.6"),
    "loss is no number": ([on_all(losses=[0.5, NAN])], "the loss does not fall on rank 0"),
    "local loss": (
        [local_loss],
        "the loss is not averaged on rank 0 on n0, rank 1 on n1: 0.055 instead of 0.06 (its own is 0.055",
    ),
    "one rank only": ([lambda rank, own: own.clear() if rank else None], "not all ranks finished"),
    "losses are missing": ([on(1, losses=[])], "not all ranks finished it"),
    "one rank skips": ([on(1, skip="x")], "not all ranks finished it"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_wrong_is_said(name: str) -> None:
    changes, message = FAILURES[name]
    ((part, judgement),) = judge_parts(trained(2, *changes))
    assert (part, judgement.status) == ("", "fail")
    assert judgement.message.startswith(f"DistributedOptimizer: {message}")
    assert judgement.remedy
    assert "command: mpirun x" in judgement.evidence
    assert f"\nDistributedOptimizer: {message}" in judgement.evidence


def test_all_that_is_wrong_is_in_the_evidence() -> None:
    ((_, judgement),) = judge_parts(trained(3, on_all(difference=1.0), on(2, losses=[0.5, 0.6])))
    assert judgement.message.endswith("; and 2 more, see the evidence")
    assert "the loss does not fall on rank 2 on n2" in judgement.evidence
    assert "the loss is not averaged on rank 2 on n2" in judgement.evidence


def test_what_cannot_work_is_skipped_with_its_reason() -> None:
    reason = "Horovod 0.28.1 supports Keras 2 only"
    skips = on_all(part="Keras fit", seconds=0.1, skip=reason)
    ((part, judgement),) = judge_parts(trained(2, lambda _, own: own.clear(), skips))
    assert (part, judgement.status, judgement.message) == ("Keras fit", "skip", reason)


def test_silence_is_no_success() -> None:
    ((_, judgement),) = judge_parts(trained(2, lambda _, own: own.clear()))
    assert (judgement.status, judgement.message) == ("fail", "no rank reported anything")


def test_a_rank_that_reports_twice_is_not_two_ranks() -> None:
    good = trained(2)
    of_first, of_second = (each.events for each in good.ranks)
    reported = [each for each in of_first if isinstance(each, Training)]
    twice = good.ranks[0]._replace(events=(*of_first, *reported))
    silent = good.ranks[1]._replace(
        events=tuple(each for each in of_second if not isinstance(each, Training))
    )
    ((_, judgement),) = judge_parts(good._replace(ranks=(twice, silent)))
    assert (judgement.status, "not all ranks" in judgement.message) == ("fail", True)


def test_ranks_that_did_not_come_to_it() -> None:
    broken = exited(1, host="n1", code=-9, signal="SIGKILL", stage="training", detail="Keras fit")
    whole = trained(2)
    rank = whole.ranks[1]._replace(events=(*whole.ranks[1].events, broken.event))
    ((_, judgement),) = judge_parts(whole._replace(ranks=(whole.ranks[0], rank)))
    assert judgement.status == "fail"
    assert "rank 1 on n1: was ended by SIGKILL, in training (Keras fit)" in judgement.message


KERAS_2, KERAS_3 = SimpleNamespace(get_value=None), SimpleNamespace()

# Keras that TensorFlow has, backend that Horovod takes, Horovod, the reason for no training;
# Horovod with + is patched for Keras 3
LIMITS = [
    ("2.2.4-tf", KERAS_2, "0.19.5", ""),
    ("2.15.0", KERAS_2, "0.28.1", ""),
    ("3.0.0", KERAS_3, "0.28.1", "0.28.1 supports Keras 2 only, and this TensorFlow has Keras 3.0"),
    ("2.16.0", KERAS_3, "0.28.1", "uses the backend of Keras 3, but TensorFlow has Keras 2.16.0"),
    ("2.16.0", KERAS_2, "0.28.1", ""),
    ("3.4.1", KERAS_3, "0.29.0", ""),
    ("3.4.1", KERAS_2, "0.28.1+", ""),
]


@pytest.mark.parametrize(("keras", "backend", "horovod", "reason"), LIMITS)
def test_keras_that_horovod_does_not_know(
    keras: str, backend: SimpleNamespace, horovod: str, reason: str
) -> None:
    module, version = SimpleNamespace(__version__=keras), horovod.rstrip("+")
    said = PROGRAM.keras_limit(module, backend, version, patched=version != horovod)
    assert bool(said) == bool(reason)
    assert reason in said

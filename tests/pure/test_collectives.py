"""What ranks say of Horovod's operations and of training a model, and what is made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.standalone.ranks.events import Operation, Skipped, Stage, Training
from hvdenv.verification.rank_checks import judge_collectives, judge_training
from hvdenv.verification.rank_judgement import Judgement
from hvdenv.verification.rank_run import RankRun, Received, event_of
from tests.support.rank_events import event, exited, good, reduced, run, started
from tests.support.standalone import load


def report(number: int, operation: str = "alltoall", right: int = 3, **changed: Any) -> Received:
    values = {"wrong": 0, "types": ["float32"] if right else [], **changed}
    values["skipped"] = [Skipped(*each) for each in values.get("skipped", ())]
    return event(number, Operation(operation=operation, right=right, **values))


def run_of(*events: Received, size: int = 2) -> RankRun:
    """Ranks that are right but for these events."""
    return run(*good(size), *events, size=size, exercises=("collectives",))


def judged(*events: Received) -> dict[str, Judgement]:
    return dict(judge_collectives(run_of(*events)))


@pytest.fixture
def recorded(cases: Path) -> Callable[[str], list[Received]]:
    """What three ranks with Horovod 0.28.1 reported of all operations."""

    def read(name: str) -> list[Received]:
        lines = (cases / "collectives" / f"{name}.jsonl").read_text().splitlines()
        return [event_of(json.loads(line)) for line in lines]

    return read


GOOD = {
    "torch-mpi": "15 operations in 7 types: 194 cases are right on each of 3 ranks;"
    " not tried: bfloat16, bool",
    "tensorflow-gloo": "15 operations in 8 types: 223 cases are right on each of 3 ranks;"
    " not tried: bfloat16",
}


@pytest.mark.parametrize("name", GOOD)
def test_all_right(recorded: Callable[[str], list[Received]], name: str) -> None:
    ((about, judgement),) = judge_collectives(run_of(*recorded(name), size=3))
    assert (about, judgement.status, judgement.message) == ("", "pass", GOOD[name])
    assert (
        "reducescatter: 16 right in float16, float32, float64, int32, int64" in judgement.evidence
    )


WRONG: dict[str, tuple[list[Received], str]] = {
    "on both": (
        [report(rank, wrong=2, cases=["float32 17: element 0 is 1", "b"]) for rank in (0, 1)],
        "wrong on each of 2 ranks, in 2 of 5 cases: float32 17: element 0 is 1",
    ),
    "given up": (
        [report(r, right=0, wrong=1, cases=["x: 1"], ended="shut down") for r in (0, 1)],
        "wrong on each of 2 ranks, in 1 of 1 cases: x: 1; nothing was tried after that",
    ),
    "no float32": (
        [report(r, skipped=[["float32", "Tensor type x is not supported", 4]]) for r in (0, 1)],
        "it does not even accept float32: Tensor type x is not supported",
    ),
    "other Horovods": (
        [report(0), report(1, right=0, skipped=[["", "there is no hvd.alltoall", 3]])],
        "ranks skipped different cases: rank 0 on n1 skipped nothing;"
        " rank 1 on n1 skipped there is no hvd.alltoall",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    events, message = WRONG[name]
    others = [report(rank, "broadcast") for rank in (0, 1)]
    ((operation, judgement),) = judged(*others, *events).items()
    assert (operation, judgement.status, judgement.message) == ("alltoall", "fail", message)
    assert judgement.remedy
    assert "pw" not in judgement.evidence and "\x1b" not in judgement.evidence


def test_a_rank_that_ends_in_the_middle_does_not_hide_what_was_wrong_before() -> None:
    late: dict[str, Any] = {"code": -9, "signal": "SIGKILL", "stage": "collectives"}
    stage = event(1, Stage("collectives"))
    wrong = [report(rank, "broadcast", wrong=1, cases=["x"]) for rank in (0, 1)]
    found = judged(stage, *wrong, exited(1, detail="join: 1", **late))
    assert list(found) == ["broadcast", ""]
    assert found[""].status == "fail"
    assert "rank 1 on n1: was ended by SIGKILL, in collectives (join: 1)" in found[""].message


def test_a_rank_that_says_or_tries_nothing_without_a_reason_is_no_pass() -> None:
    (judgement,) = judged(report(0)).values()
    assert (judgement.status, judgement.message) == ("fail", "rank 1 on n1 reported nothing")
    (judgement,) = judged(report(0), report(1, right=0)).values()
    assert judgement.status == "fail"
    assert "rank 1 on n1 tried no case and gave no reason" in judgement.message


def test_allreduces_that_are_wrong_come_first() -> None:
    wrong = reduced(1, wrong=1, cases=["x"])
    ((_, judgement),) = judge_collectives(run_of(report(0), report(1), *wrong))
    assert judgement[:2] == ("skip", "the ranks did not reach it: see allreduce")


COUNTS = st.integers(0, 3)


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), COUNTS, COUNTS),
        min_size=1,
        max_size=2,
        unique_by=lambda one: one[0],
    ),
    st.lists(st.tuples(COUNTS, COUNTS), min_size=2, max_size=2),
)
def test_a_wrong_case_is_never_passed(
    first: list[tuple[str, int, int]], others: list[tuple[int, int]]
) -> None:
    """Whatever ranks report: it passes only if nothing is wrong anywhere."""
    events = [
        report(0, name, right, wrong=wrong, cases=["x"] * wrong) for name, right, wrong in first
    ]
    for (name, _, _), (right, wrong) in zip(first, others, strict=False):
        events.append(report(1, name, right, wrong=wrong, cases=["x"] * wrong))
    found = judged(*events)
    # Nothing was skipped, so what was not right was wrong, or not tried without a reason.
    outcomes = [each.event for each in events if isinstance(each.event, Operation)]
    wrong_ones = {each.operation for each in outcomes if each.wrong or not each.right}
    assert {name for name in found if name} == wrong_ones
    assert not wrong_ones or all(each.status == "fail" for each in found.values())


@pytest.mark.parametrize(
    ("elsewhere", "status"),
    # Ranks of an image are on one host where Horovod's own launcher starts them.
    [(0, "unproven"), (2, "unproven"), (4, "skip")],
)
def test_what_more_ranks_would_prove(elsewhere: int, status: str) -> None:
    lacking: dict[str, Any] = {"right": 0, "skipped": [["", "why", 14]], "unproven": "it lacks x"}
    events = [report(rank, "process sets", **lacking) for rank in (0, 1)]
    found = dict(judge_collectives(run_of(*events, report(0), report(1)), elsewhere))
    assert found[""].status == "pass"
    assert "not tried: process sets (why)" in found[""].message
    assert found["process sets"][:2] == (status, "it lacks x")
    assert "-n 3" in found["process sets"].remedy


# The side of the ranks, as far as it can be tried without numpy.


@pytest.fixture(scope="module")
def program() -> Any:
    return load("collectives")


class Stages:
    def stage(self, name: str, detail: str) -> None: ...


@pytest.fixture
def caller(program: Any) -> Any:
    caller = program.Caller.__new__(program.Caller)
    caller.context = Stages()
    return caller


def attempt(program: Any, caller: Any, error: Exception) -> Any:
    def fail() -> None:
        raise error

    tally = program.Tally("alltoall")
    assert caller.attempt(tally, program.collective_cases.case("alltoall"), fail) is None
    return tally


ABSENT = [
    (ValueError("Tensor type torch.BoolTensor is not supported."), "float32"),
    (TypeError("parameter 'tensor' has DataType bool not in list of allowed values"), "float32"),
    (RuntimeError("Type bool is not supported in NCCL mode."), "float32"),
]


@pytest.mark.parametrize(("error", "dtype"), ABSENT)
def test_what_is_not_there_is_no_error(
    program: Any, caller: Any, error: Exception, dtype: str
) -> None:
    tally = attempt(program, caller, error)
    assert (tally.right, tally.wrong) == ([], [])
    ((what, why),) = tally.skipped
    assert what == dtype and why in str(error)


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("bad"), OSError(5, "y")])
def test_any_other_error_is_wrong(program: Any, caller: Any, error: Exception) -> None:
    tally = attempt(program, caller, error)
    assert not tally.skipped
    assert tally.wrong == [f"float32 17: {type(error).__name__}: {error}"]


@pytest.mark.parametrize("text", ["Horovod has been shut down. This was", "shutdown in progress"])
def test_horovod_that_has_ended(program: Any, caller: Any, text: str) -> None:
    with pytest.raises(program.Ended) as raised:
        attempt(program, caller, RuntimeError(text))
    event = raised.value.args[0].event()
    assert (event.wrong, event.ended) == (1, f"RuntimeError: {text}")


def test_a_report_fits_into_one_event(program: Any) -> None:
    """A pipe passes no more in one piece: see rank.py."""
    tally = program.Tally("grouped reducescatter")
    long = program.collective_cases.case("allreduce", label="x" * 300)
    for dtype in program.collective_cases.DTYPES:
        tally.right.append(program.collective_cases.case("allreduce", dtype))
        tally.skipped[dtype, program.shortened("\u20ac" * 300, program.REASON)] = 1
        tally.take(long, "\u20ac" * 300)
    tally.ended = "x" * program.CASE
    assert len(json.dumps(program.events.to_table(tally.event()))) < 2700


def test_every_operation_and_every_type_is_there_by_default(program: Any) -> None:
    cases = program.collective_cases
    tried = [case for _, batches in cases.operations(3) for batch in batches for case in batch]
    names = [(case.kind, case.title) for case in tried]
    assert len(set(names)) == len(names) > 150
    for kind in ("allreduce", "allgather", "broadcast", "alltoall"):
        assert {case.dtype for case in tried if case.kind == kind} == set(cases.DTYPES)
    assert {case.dtype for case in tried if case.kind == "reducescatter"} == set(cases.NUMBERS)
    assert {case.root for case in tried if case.kind == "broadcast"} >= {0, 1, 2}
    assert {0, 1, 17} <= {shape[0] for case in tried for shape in case.shapes if len(shape) == 1}


@pytest.mark.parametrize(
    ("controller", "operation", "patch"),
    [
        ("Gloo", "reducescatter", "gloo-reducescatter"),
        ("Gloo", "grouped reducescatter", "gloo-reducescatter"),
        ("Gloo", "alltoall", ""),
        ("MPI", "reducescatter", ""),
    ],
)
def test_a_known_fault_of_horovod_names_its_patch(
    controller: str, operation: str, patch: str
) -> None:
    events = [report(rank, operation, wrong=1, cases=["x"]) for rank in range(2)]
    run = run_of(*events)._replace(controller=controller)
    remedy = dict(judge_collectives(run))[operation].remedy
    assert re.findall(r"the patch (\S+),", remedy) == ([patch] if patch else [])


# ---------------------------------------------------------------- training

KERAS_2, KERAS_3 = SimpleNamespace(get_value=None), SimpleNamespace()

Change = Callable[[int, dict[str, Any]], None]


def trained_facts(rank: int, size: int) -> dict[str, Any]:
    """What a rank reports where all is well."""
    return {
        "part": "DistributedOptimizer",
        "seconds": 0.2,
        "steps": 12,
        "losses": [6.5, 0.06],
        "checksums": {"parameters after the broadcast": "a", "at the end": "b"},
        "difference": 7e-8,
        "bound": 1e-4,
    }


def trained(size: int, *changes: Change) -> RankRun:
    """A run whose ranks report one part each; changes are made to rank numbers and facts."""
    events = []
    for rank in range(size):
        own = trained_facts(rank, size)
        for change in changes:
            change(rank, own)
        host = f"n{rank}"
        numbers = {"local_rank": 0, "local_size": 1, "cross_rank": rank, "cross_size": size}
        events += [started(rank, host), *reduced(rank, size, host=host, **numbers)]
        events += [event(rank, Training(**own), host)] if own else []
        events.append(exited(rank, host=host))
    return run(*events, size=size, exercises=("training",))


@pytest.mark.parametrize("size", [1, 3])
def test_good_training(size: int) -> None:
    ((part, judgement),) = judge_training(trained(size))
    assert (part, judgement.status) == ("", "pass")
    assert judgement.message == (
        f"parameters are equal on {size} rank{'s' if size > 1 else ''}; DistributedOptimizer:"
        " loss 6.5 to 0.06 in 12 steps, 7e-08 from one process (bound 0.0001)"
    )


def on(number: int, **changed: Any) -> Change:
    return lambda rank, own: own.update(changed) if rank == number else None


def on_all(**changed: Any) -> Change:
    return lambda rank, own: own.update(changed)


NAN = float("nan")

# name: (changes, the message)
UNTRAINED: dict[str, tuple[list[Change], str]] = {
    "no number": ([on(1, difference=NAN)], "parameters of rank 1 on n1 are nan from"),
    "loss": ([on_all(losses=[0.5, 0.6])], "the loss does not fall on rank 0 on n0: 0.5, and 0.6"),
    "loss is no number": ([on_all(losses=[0.5, NAN])], "the loss does not fall on rank 0"),
    "one rank only": ([lambda rank, own: own.clear() if rank else None], "not all ranks finished"),
    "losses are missing": ([on(1, losses=[])], "not all ranks finished it"),
    "one rank skips": ([on(1, skip="x")], "not all ranks finished it"),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_what_is_wrong_with_training_is_said(name: str) -> None:
    changes, message = UNTRAINED[name]
    ((part, judgement),) = judge_training(trained(2, *changes))
    assert (part, judgement.status) == ("", "fail")
    assert judgement.message.startswith(f"DistributedOptimizer: {message}")
    assert judgement.remedy
    assert "command: mpirun x" in judgement.evidence
    assert f"\nDistributedOptimizer: {message}" in judgement.evidence


def test_all_that_is_wrong_with_training_is_in_the_evidence() -> None:
    ((_, judgement),) = judge_training(trained(3, on_all(difference=1.0), on(2, losses=[0.5, 0.6])))
    assert judgement.message.endswith("; and 1 more, see the evidence")
    assert "the loss does not fall on rank 2 on n2" in judgement.evidence


def test_what_cannot_work_is_skipped_with_its_reason() -> None:
    reason = "Horovod 0.28.1 supports Keras 2 only"
    skips = on_all(part="Keras fit", seconds=0.1, skip=reason)
    ((part, judgement),) = judge_training(trained(2, lambda _, own: own.clear(), skips))
    assert (part, judgement.status, judgement.message) == ("Keras fit", "skip", reason)


def test_silence_is_no_success() -> None:
    ((_, judgement),) = judge_training(trained(2, lambda _, own: own.clear()))
    assert (judgement.status, judgement.message) == ("fail", "no rank reported anything")


@pytest.mark.parametrize(
    ("keras", "backend", "patched", "works"),
    [
        ("2.2.4-tf", KERAS_2, False, True),
        ("3.0.0", KERAS_3, False, False),
        ("2.16.0", KERAS_3, False, False),  # Keras 3 beside a TensorFlow with Keras 2
        ("3.4.1", KERAS_3, True, True),
    ],
)
def test_keras_that_horovod_does_not_know(
    keras: str, backend: SimpleNamespace, patched: bool, works: bool
) -> None:
    module = SimpleNamespace(__version__=keras)
    assert load("training").can_train(module, backend, patched) == works

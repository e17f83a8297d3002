"""Judges what ranks report of Horovod's operations (hvdenv/standalone/ranks/collectives.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdenv.masking import clean
from hvdenv.reports.report import Status
from hvdenv.standalone.ranks.events import Operation
from hvdenv.verification.rank_judgement import Judgement, judge_exercise, listed
from hvdenv.verification.rank_run import RankRun

EXERCISE = "collectives"

_PROCESS_SETS = "process sets"
_MORE_RANKS = "verify with three ranks or more: -n 3"
_GPUS = "verify on a node with GPUs"
_REMEDY = (
    "programs that use this operation compute wrong numbers or fail: rebuild Horovod for this"
    " machine; if the failure stays, try the other controller and report it with this evidence"
)
_GLOO_REDUCESCATTER = (
    "a known bug of Horovod up to 0.28.1: Gloo's reducescatter can send data that it has already"
    " overwritten, so sums are occasionally wrong (1 of 12 runs of verify on 3 ranks)."
    " `hvdenv build` applies the patch gloo-reducescatter, which fixes it: rebuild Horovod, or"
    " use MPI for CPU tensors. Earlier results of hvd.reducescatter over Gloo may be wrong"
)
_FORK = (
    "programs that fork after hvd.init() fail here, such as DataLoaders with workers: start the"
    " workers with multiprocessing_context='forkserver' or before hvd.init(); over InfiniBand, try"
    " RDMAV_FORK_SAFE=1"
)
_SECOND_JOIN = (
    "a known bug of Horovod up to 0.28.1 with TensorFlow: only the first hvd.join() of a process"
    " waits for the other ranks. `hvdenv build` applies the patch tensorflow-join, which fixes it:"
    " rebuild Horovod. Results after a second hvd.join() in TensorFlow may be wrong"
)


class Report(NamedTuple):
    """What one rank, by its name, or all of them reported of one operation."""

    rank: str
    outcome: Operation


def judge_operations(run: RankRun, ranks_elsewhere: int = 0) -> Iterator[tuple[str, Judgement]]:
    """What a run proves: each operation that is wrong, or that all are right.

    Args:
        run: of the ranks.
        ranks_elsewhere: how many ranks other runs have, if this one has fewer: they prove
            what needs more ranks.

    Returns:
        Pairs of an operation and its judgement; the operation is empty if it is about all.
    """
    reports = _reports(run)
    wrong = {
        name: found._replace(remedy=_remedy(name, run.controller, found.message))
        for name in reports
        if (found := _wrong(reports[name]))
    }
    yield from wrong.items()
    if broken := judge_exercise(run, EXERCISE):
        yield "", broken
    elif silent := [rank.name for rank in run.ranks if not rank.all(Operation)]:
        yield "", Judgement("fail", f"{listed(silent)} reported nothing", "", _REMEDY)
    elif not wrong:
        yield "", _all_right(run, reports)
    for name, (first, *_) in reports.items():
        if why := first.outcome.unproven:
            sets = name == _PROCESS_SETS
            status: Status = "skip" if sets and ranks_elsewhere > run.size else "unproven"
            yield name, Judgement(status, why, "", _MORE_RANKS if sets else _GPUS)


def _remedy(operation: str, controller: str, message: str) -> str:
    """What to do about an operation that is wrong over a controller."""
    if operation == "join" and "a second time" in message:
        return _SECOND_JOIN
    if operation == "forked processes":
        return _FORK
    known = controller == "Gloo" and operation.endswith("reducescatter")
    return _GLOO_REDUCESCATTER if known else _REMEDY


def _reports(run: RankRun) -> dict[str, list[Report]]:
    """What the ranks reported of each operation."""
    found: dict[str, list[Report]] = {}
    for rank in run.ranks:
        for event in rank.all(Operation):
            found.setdefault(event.operation, []).append(Report(rank.name, _cleaned(event)))
    return found


def _cleaned(event: Operation) -> Operation:
    return event._replace(
        skipped=[each._replace(why=clean(each.why)) for each in event.skipped],
        cases=[clean(text) for text in event.cases],
        ended=clean(event.ended),
        unproven=clean(event.unproven),
    )


def _wrong(reports: Sequence[Report]) -> Judgement | None:
    """What is wrong with an operation; None if nothing is."""
    outcomes = [outcome for _, outcome in reports]
    if wrong := [report for report in reports if report.outcome.wrong]:
        # Ranks that Horovod ended only follow the one that failed.
        first = min(wrong, key=lambda report: bool(report.outcome.ended)).outcome
        names = [report.rank for report in wrong]
        everywhere = f"each of {len(wrong)} ranks" if 1 < len(wrong) == len(reports) else ""
        message = (
            f"wrong on {everywhere or listed(names)}, in {first.wrong} of"
            f" {first.right + first.wrong} cases: {next(iter(first.cases), 'not told which')}"
        )
        if any(report.outcome.ended for report in wrong):
            message += "; nothing was tried after that"
    elif refused := [s.why for each in outcomes for s in each.skipped if s.dtype == "float32"]:
        message = f"it does not even accept float32: {refused[0]}"
    elif idle := [name for name, each in reports if not (each.right or each.skipped)]:
        message = f"{listed(idle)} tried no case and gave no reason"
    elif other := next(
        (each for each in reports if each.outcome.skipped != outcomes[0].skipped), None
    ):
        message = f"ranks skipped different cases: {'; '.join(map(_skipped, (reports[0], other)))}"
    else:
        return None
    return Judgement("fail", message, _evidence(reports))


def _skipped(report: Report) -> str:
    reasons = ", ".join(f"{dtype} {why}".strip() for dtype, why, _ in report.outcome.skipped)
    return f"{report.rank} skipped {reasons or 'nothing'}"


def _evidence(reports: Sequence[Report]) -> str:
    return "\n".join(line for report in reports for line in _lines(*report))


def _lines(name: str, outcome: Operation) -> Iterator[str]:
    """All that was reported of an operation, under the name of a rank or of the operation."""
    wrong = f", {outcome.wrong} wrong" if outcome.wrong else ""
    types = f" in {', '.join(outcome.types)}" if outcome.types else ""
    yield f"{name}: {outcome.right} right{wrong}{types}"
    yield from (f"    {case}" for case in outcome.cases)
    for dtype, why, count in outcome.skipped:
        yield f"    not tried: {dtype or ('1 case' if count == 1 else f'{count} cases')}: {why}"
    if outcome.ended:
        yield f"    Horovod gave up: {outcome.ended}"


def _all_right(run: RankRun, reports: dict[str, list[Report]]) -> Judgement:
    """What was tried and was right; the other operations and types with the reason."""
    # Ranks that are in fewer process sets have fewer cases.
    least = [min((o for _, o in each), key=lambda one: one.right) for each in reports.values()]
    tried = [outcome for outcome in least if outcome.right]
    types = {dtype for outcome in tried for dtype in outcome.types}
    evidence = _evidence([Report(each.operation, each) for each in least])
    if not tried:
        return Judgement("fail", "no operation could be tried", evidence, _REMEDY)
    absent = [f"{o.operation} ({o.skipped[0].why})" for o in least if o.skipped and not o.right]
    absent += sorted({s.dtype for outcome in least for s in outcome.skipped} - types - {""})
    message = (
        f"{len(tried)} operations in {len(types)} types: {sum(o.right for o in tried)} cases are"
        f" right on each of {len(run.ranks)} ranks"
    )
    if absent:
        message += f"; not tried: {', '.join(absent)}"
    return Judgement("pass", message, evidence)

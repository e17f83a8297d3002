"""What ranks report of Horovod's operations (hvdenv/standalone/ranks/collectives.py), and what that proves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hvdenv.masking import mask, plain
from hvdenv.reports.report import Status
from hvdenv.verification import ranks
from hvdenv.verification.ranks import Judgement, Rank, RankRun, listed

EXERCISE = "collectives"
FULL = f"{EXERCISE}=full"

_MORE_RANKS = "verify with three ranks or more: -n 3"
_REMEDY = (
    "what uses this operation computes wrong numbers or fails: build Horovod again for this"
    " machine; if it stays, try the other controller and report it with this evidence"
)
_GLOO_REDUCESCATTER = (
    "a known fault of Horovod up to 0.28.1: gloo's reducescatter can send data that it has"
    " overwritten already, so sums are wrong now and then (1 of 12 runs of verify on 3 ranks)."
    " `hvdenv build` applies the patch gloo-reducescatter, which fixes it: build Horovod again,"
    " or use MPI for CPU tensors. Results of hvd.reducescatter over Gloo so far may be wrong"
)


class Report(NamedTuple):
    """What one rank says of one operation.

    Attributes:
        rank: which one it was.
        right: how many of its cases were.
        wrong: the same.
        types: those of the right cases.
        skipped: type (or empty), reason and how many cases that were not tried.
        cases: what was wrong in the first few.
        ended: why Horovod could not go on; empty if it could.
        unproven: why it could not be tried, where more ranks could have; empty if it was.
    """

    rank: str
    right: int
    wrong: int
    types: tuple[str, ...]
    skipped: tuple[tuple[str, str, int], ...]
    cases: tuple[str, ...]
    ended: str = ""
    unproven: str = ""


def judge(run: RankRun, ranks_elsewhere: int = 0) -> Iterator[tuple[str, Judgement]]:
    """What a run proves: each operation that is wrong, or that all are right.

    Args:
        run: of the ranks.
        ranks_elsewhere: how many ranks other runs have, if these are fewer: what only so
            many can prove is proven there.

    Returns:
        Pairs of an operation, or nothing if it is about all, and what is to be said.
    """
    reports = _reports(run)
    wrong = {
        name: found._replace(remedy=_remedy(name, run.controller))
        for name in reports
        if (found := _wrong(reports[name]))
    }
    yield from wrong.items()
    if broken := ranks.judge_exercise(run, EXERCISE):
        yield "", broken
    elif silent := [rank.name for rank in run.ranks if not rank.reports.get(EXERCISE)]:
        yield "", Judgement("fail", f"nothing was reported by {listed(silent)}", "", _REMEDY)
    elif not wrong:
        yield "", _all_right(run, reports)
    for name, (first, *_) in reports.items():
        if first.unproven:
            status: Status = "skip" if ranks_elsewhere > run.size else "unproven"
            yield name, Judgement(status, first.unproven, "", _MORE_RANKS)


def _remedy(operation: str, controller: str) -> str:
    """What to do about an operation that is wrong over a controller."""
    known = controller == "Gloo" and operation.endswith("reducescatter")
    return _GLOO_REDUCESCATTER if known else _REMEDY


def _reports(run: RankRun) -> dict[str, list[Report]]:
    """What the ranks say of each operation."""
    found: dict[str, list[Report]] = {}
    for rank in run.ranks:
        for event in rank.reports.get(EXERCISE, ()):
            found.setdefault(str(event["operation"]), []).append(_report(rank, event))
    return found


def _report(rank: Rank, event: dict[str, Any]) -> Report:
    return Report(
        rank.name,
        int(event["right"]),
        int(event["wrong"]),
        tuple(event["types"]),
        tuple((dtype, _clean(why), int(count)) for dtype, why, count in event["skipped"]),
        tuple(_clean(text) for text in event["cases"]),
        _clean(event.get("ended", "")),
        _clean(event.get("unproven", "")),
    )


def _clean(text: object) -> str:
    return mask(plain(str(text)))


def _wrong(reports: Sequence[Report]) -> Judgement | None:
    """What is wrong with an operation; None if nothing is."""
    if wrong := [report for report in reports if report.wrong]:
        first = wrong[0]
        tried = first.right + first.wrong
        message = (
            f"wrong on {listed([report.rank for report in wrong])}, in {first.wrong} of {tried}"
            f" cases: {first.cases[0]}"
        )
        if any(report.ended for report in wrong):
            message += "; nothing was tried after that"
    elif refused := [why for r in reports for dtype, why, _ in r.skipped if dtype == "float32"]:
        message = f"it does not even take float32: {refused[0]}"
    elif idle := [r.rank for r in reports if not (r.right or r.skipped)]:
        message = f"no case was tried on {listed(idle)}, and no reason given"
    elif len({report.skipped for report in reports}) > 1:
        message = f"not the same everywhere: {'; '.join(_differences(reports))}"
    else:
        return None
    return Judgement("fail", message, "\n".join(_lines(reports)))


def _differences(reports: Sequence[Report]) -> Iterator[str]:
    """What the first two ranks skipped that did not skip the same."""
    other = next(report for report in reports if report.skipped != reports[0].skipped)
    for report in (reports[0], other):
        reasons = ", ".join(f"{dtype} {why}".strip() for dtype, why, _ in report.skipped)
        yield f"{report.rank} skipped {reasons or 'nothing'}"


def _lines(reports: Sequence[Report]) -> Iterator[str]:
    """All that ranks say of an operation."""
    for report in reports:
        counts = [f"{report.right} right"] * bool(report.right)
        counts += [f"{report.wrong} wrong"] * bool(report.wrong)
        yield f"{report.rank}: {', '.join(counts) or 'no case was tried'}"
        yield from (f"    {case}" for case in report.cases)
        yield from (f"    not tried: {line}" for line in _skips(report))
        if report.ended:
            yield f"    Horovod gave up: {report.ended}"


def _skips(report: Report) -> Iterator[str]:
    for dtype, why, count in report.skipped:
        what = dtype or ("1 case" if count == 1 else f"{count} cases")
        yield f"{what}: {why}"


def _all_right(run: RankRun, reports: dict[str, list[Report]]) -> Judgement:
    """What was tried and was right; the other operations and types with the reason."""
    # Ranks that are in fewer process sets have fewer cases.
    firsts = {name: min(said, key=lambda one: one.right) for name, said in reports.items()}
    tried = [report for report in firsts.values() if report.right]
    types = {dtype for report in tried for dtype in report.types}
    lines = []
    for name, report in firsts.items():
        lines.append(
            f"{name}: {report.right} right{' in ' * bool(report.types)}{', '.join(report.types)}"
        )
        lines += [f"    not tried: {line}" for line in _skips(report)]
    if not tried:
        return Judgement("fail", "no operation could be tried", "\n".join(lines), _REMEDY)
    absent = [
        f"{name} ({r.skipped[0][1]})" for name, r in firsts.items() if r.skipped and not r.right
    ]
    refused = {dtype for report in firsts.values() for dtype, _, _ in report.skipped if dtype}
    absent += sorted(refused - types)
    message = (
        f"{len(tried)} operations in {len(types)} types: {sum(r.right for r in tried)} cases are"
        f" right on each of {len(run.ranks)} ranks"
    )
    if absent:
        message += f"; not tried: {', '.join(absent)}"
    return Judgement("pass", message, "\n".join(lines))

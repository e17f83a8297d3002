"""A report as text: what was expected, built and proven, then what is wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import TextWrapper

from hvdenv.base.masking import mask, plain
from hvdenv.reports.report import (
    Finding,
    RankRecord,
    Report,
    Row,
    Status,
    Verdict,
    causes,
    different_ranks,
)

COLUMNS = 80
VERDICTS: dict[Verdict, str] = {
    "pass": "everything expected was built and proven to work",
    "fail": "something expected is missing or does not work",
    "error": "a check could not run, so not everything is proven",
    "unproven": "nothing failed, but something could not be proven on this host",
}
# The heading of each status, the worst first.
HEADINGS: dict[Status, str] = {
    "fail": "Failed",
    "error": "Could not be checked",
    "unproven": "Not proven on this host",
    "skip": "Does not apply",
    "pass": "Passed",
}
_COLOURS: dict[str, str] = {"pass": "32", "fail": "31", "error": "31", "unproven": "33"}
# Of a finding's evidence; less of what was skipped, which is no failure.
_EVIDENCE_LINES, _SKIPPED_LINES, _RANKS = 60, 3, 16
PROGRAM = ("program", *(f"program-{each}" for each in (
    "init", "device", "rate", "start", "gradients", "data", "steps", "checkpoint", "metrics",
)))  # fmt: skip
# Headings of checks that are shown even if they pass.
_ALWAYS_SHOWN = {
    "Speed": ("bench", "yardstick"),
    "Variables": ("variables",),
    "Training program": PROGRAM,
}
# Characters that neither UTF-8 nor XML can hold; they come from file names and broken output.
_IMPOSSIBLE = re.compile("[\ud800-\udfff\ufffe\uffff]")
_COMMAND = re.compile(r"`[^`]+`")


def verdict_of(report: Report) -> str:
    """The verdict in words."""
    if report.verdict == "pass" and all(each.check in PROGRAM for each in report.findings):
        return "nothing is wrong in the steps of the program that were observed"
    return VERDICTS[report.verdict]


def render(report: Report, *, width: int = COLUMNS, colour: bool = False) -> str:
    """The report as text; without colour it is ASCII, except for output of programs."""
    lines = [
        *_table(report.table),
        *(line for title in _ALWAYS_SHOWN for line in _passed(title, report.findings, width)),
        *_ranks(report.ranks, width),
        *(line for cause in _shown(report) for line in _cause(cause, width, colour)),
    ]
    return "".join(f"{line}\n" for line in lines) + render_summary(
        report, width=width, colour=colour
    )


def render_summary(report: Report, *, width: int = COLUMNS, colour: bool = False) -> str:
    """One line for each finding that did not pass, the worst last, and the verdict."""
    lines = []
    for status in ("unproven", "error", "fail"):
        found = [each for each in report.findings if each.status == status]
        lines += [_coloured(f"{HEADINGS[status]} ({len(found)}):", status, colour)] * bool(found)
        lines += [shortened(f"    {_sentence(each)}", width) for each in found]
        lines += [""] * bool(found)
    lines += _verdict(report, width, colour)
    return "".join(f"{line}\n" for line in lines)


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    rows = tuple(row._replace(section=clean(row.section), name=clean(row.name)) for row in rows)
    width = max((len(f"Available {row.section}:") for row in rows), default=0)
    for section, group in groupby(rows, key=lambda row: row.section):
        yield f"{f'Available {section}:':{width}}  expected  built  proven"
        for row in group:
            marks = (_mark(row.expected), _mark(row.built), _mark(row.proven))
            yield f"    {row.name:{width - 4}}  {marks[0]:^8}  {marks[1]:^5}  {marks[2]:^6}".rstrip()
        yield ""


def _passed(title: str, findings: Sequence[Finding], width: int) -> Iterator[str]:
    """The findings that passed, of the checks under a heading."""
    checks = _ALWAYS_SHOWN[title]
    good = [each for each in findings if each.check in checks and each.status == "pass"]
    if good:
        yield f"{title}:"
        for each in good:
            subject = each.check if checks is PROGRAM else each.subject
            yield from _wrapped(f"{subject}: {each.message}", width, 4)
        yield ""


def _ranks(ranks: Sequence[RankRecord], width: int) -> Iterator[str]:
    """Only the ranks that failed or differ, those of one run with one reason together."""
    found = different_ranks(ranks)
    reasons: dict[tuple[str, str], list[str]] = {}
    for rank, why in found:
        of_reason = reasons.setdefault((rank.run, f"{rank.status}: {why}"), [])
        of_reason.append(f"{rank.name} (process {rank.pid})")
    if found:
        yield f"Ranks that failed or differ ({len(found)} of {len(ranks)}):"
        for (run, reason), names in [*reasons.items()][:_RANKS]:
            more = f" and {len(names) - _RANKS} more" if len(names) > _RANKS else ""
            yield from _wrapped(f"{run}: {', '.join(names[:_RANKS])}{more}: {reason}", width, 4)
        if len(reasons) > _RANKS:
            yield f"    and {len(reasons) - _RANKS} more reasons, see --json"
        yield ""


def _mark(value: bool | None) -> str:
    return "-" if value is None else "[X]" if value else "[ ]"


def _shown(report: Report) -> list[list[Finding]]:
    """Findings that did not pass, by cause; skipped ones only with evidence."""
    return causes(
        [f for f in report.findings if f.status != "pass" and (f.status != "skip" or f.evidence)]
    )


def _cause(findings: Sequence[Finding], width: int, colour: bool) -> Iterator[str]:
    """The first finding of a cause with its evidence; the summary names the others."""
    first, *others = findings
    head, *rest = _wrapped(f"{first.status}: {_sentence(first)}", width)
    yield _coloured(first.status, first.status, colour) + head[len(first.status) :]
    yield from rest
    yield from _evidence(first, width)
    if others:
        more = f"and {len(others)} more of this cause, listed below; --json has their evidence"
        yield from _wrapped(more, width, 2)
    if first.remedy:
        yield from _wrapped(f"what to do: {first.remedy}", width, 2)
    yield ""


def _evidence(finding: Finding, width: int) -> Iterator[str]:
    """The last lines of a finding's evidence, with its own indentation."""
    lines = []
    for line in clean(finding.evidence).splitlines():
        indent = 4 + len(line) - len(line.lstrip())
        lines += _wrapped(line.lstrip(), width, min(indent, width // 2))
    limit = _SKIPPED_LINES if finding.status == "skip" else _EVIDENCE_LINES
    if (left_out := len(lines) - limit) > 0:
        yield f"    (--json has {left_out} lines before these)"
    yield from lines[-limit:]


def _sentence(finding: Finding) -> str:
    return f"{finding.check}: {finding.subject}: {finding.message}"


def _verdict(report: Report, width: int, colour: bool) -> list[str]:
    found = Counter(finding.status for finding in report.findings)
    order: tuple[Status, ...] = ("pass", "fail", "error", "unproven", "skip")
    counts = [f"{found[status]} {status}" for status in order if found[status]]
    head, *rest = _wrapped(f"verdict: {report.verdict}: {verdict_of(report)}", width)
    coloured = _coloured(report.verdict, report.verdict, colour)
    facts = f"{', '.join(counts)}; {report.seconds:.1f} s; {report.prefix}"
    return [head.replace(report.verdict, coloured, 1), *rest, *_wrapped(facts, width, 4)]


def _coloured(text: str, status: Status | Verdict, colour: bool) -> str:
    return f"\x1b[{_COLOURS[status]}m{text}\x1b[0m" if colour and status in _COLOURS else text


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Foreign text in lines of a width; a command that fits into one line is in one."""
    text = clean(text).expandtabs()
    text = _COMMAND.sub(lambda found: _kept(found[0], width - indent - 4), text)
    wrapper = TextWrapper(
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_on_hyphens=False,
    )
    return [line.replace("\1", " ") for line in wrapper.wrap(text)] or [""]


def _kept(command: str, room: int) -> str:
    return command.replace(" ", "\1") if len(command) <= room else command


def shortened(text: str, width: int) -> str:
    """Foreign text in one line of a width."""
    line = " ".join(clean(text).expandtabs().splitlines())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def clean(text: str) -> str:
    """A text as every format of a report shows it: no secrets, no control characters."""
    return _IMPOSSIBLE.sub("\ufffd", mask(plain(text)))

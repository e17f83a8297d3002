"""A report as text: what was expected, built and proven, then what is wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from hvdenv.masking import mask, plain
from hvdenv.reports.report import Finding, RankRecord, Report, Row, Status, Verdict, different_ranks

_COLOURS: dict[str, str] = {"pass": "32", "fail": "31", "error": "31", "unproven": "33"}
VERDICTS: dict[Verdict, str] = {
    "pass": "everything expected was built and proven to work",
    "fail": "something expected is missing or does not work",
    "error": "a check could not run, so not everything is proven",
    "unproven": "nothing failed, but something could not be proven on this host",
}
_EVIDENCE_LINES, _RANKS = 60, 16
# Headings of checks that are shown even if they pass.
_ALWAYS_SHOWN = {"Speed": ("bench", "yardstick", "startup"), "Variables": ("variables",)}
# Characters that neither UTF-8 nor XML can hold; they come from file names and broken output.
_IMPOSSIBLE = re.compile("[\ud800-\udfff\ufffe\uffff]")


def render(report: Report, *, colour: bool = False) -> str:
    """The report as text; without colour it is ASCII, except for output of programs."""
    lines = [
        *_table(report.table),
        *(line for title in _ALWAYS_SHOWN for line in _passed(title, report.findings)),
        *_ranks(report.ranks),
        *(line for finding in _shown(report) for line in _finding(finding, colour)),
        _verdict(report, colour),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    rows = tuple(row._replace(section=clean(row.section), name=clean(row.name)) for row in rows)
    width = max((len(f"Available {row.section}:") for row in rows), default=0)
    for section, group in groupby(rows, key=lambda row: row.section):
        yield f"{f'Available {section}:':{width}}  expected  built  proven"
        for row in group:
            marks = (_mark(row.expected), _mark(row.built), _mark(row.proven))
            yield f"    {row.name:{width - 4}}  {marks[0]:^8}  {marks[1]:^5}  {marks[2]:^6}".rstrip()
        yield ""


def _passed(title: str, findings: Sequence[Finding]) -> Iterator[str]:
    """The findings that passed, of the checks under a heading."""
    checks = _ALWAYS_SHOWN[title]
    good = [each for each in findings if each.check in checks and each.status == "pass"]
    if good:
        yield f"{title}:"
        yield from (f"    {clean(each.subject)}: {clean(each.message)}" for each in good)
        yield ""


def _ranks(ranks: Sequence[RankRecord]) -> Iterator[str]:
    """Only the ranks that failed or differ."""
    if found := different_ranks(ranks):
        yield f"Ranks that failed or differ ({len(found)} of {len(ranks)}):"
        for rank, why in found[:_RANKS]:
            where = f"{clean(rank.name)}, process {rank.pid}"
            yield f"    {clean(rank.run)}: {where}: {rank.status}: {clean(why)}"
        if len(found) > _RANKS:
            yield f"    and {len(found) - _RANKS} more, see --json"
        yield ""


def _mark(value: bool | None) -> str:
    return "-" if value is None else "[X]" if value else "[ ]"


def _shown(report: Report) -> list[Finding]:
    """Findings that did not pass; skipped ones only with evidence."""
    return [f for f in report.findings if f.status != "pass" and (f.status != "skip" or f.evidence)]


def _finding(finding: Finding, colour: bool) -> Iterator[str]:
    status = _coloured(finding.status, finding.status, colour)
    yield f"{status}: {clean(finding.check)}: {clean(finding.subject)}: {clean(finding.message)}"
    evidence = clean(finding.evidence).splitlines()
    if len(evidence) > _EVIDENCE_LINES:
        left_out = len(evidence) - _EVIDENCE_LINES
        evidence = [f"(--json has {left_out} lines before these)", *evidence[left_out:]]
    yield from (f"    {line}".rstrip() for line in evidence)
    if finding.remedy:
        yield f"  what to do: {clean(finding.remedy)}"
    yield ""


def _verdict(report: Report, colour: bool) -> str:
    found = Counter(finding.status for finding in report.findings)
    order: tuple[Status, ...] = ("pass", "fail", "error", "unproven", "skip")
    counts = [f"{found[status]} {status}" for status in order if found[status]]
    verdict = _coloured(report.verdict, report.verdict, colour)
    return (
        f"verdict: {verdict}: {VERDICTS[report.verdict]}"
        f" ({', '.join(counts)}; {report.seconds:.1f} s; {clean(report.prefix)})"
    )


def _coloured(text: str, status: Status | Verdict, colour: bool) -> str:
    return f"\x1b[{_COLOURS[status]}m{text}\x1b[0m" if colour and status in _COLOURS else text


def clean(text: str) -> str:
    """A text as every format of a report shows it: no secrets, no control characters."""
    return _IMPOSSIBLE.sub("\ufffd", mask(plain(text)))

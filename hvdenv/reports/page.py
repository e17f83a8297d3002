"""A report as one self-contained HTML page, without scripts.

Every text passes clean() and is then escaped, in one place (`_environment`): output of programs
never becomes markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdenv.reports.plots import HEIGHT, WIDTH, figure, is_drawn, plots, size
from hvdenv.reports.render import HEADINGS, clean, verdict_of
from hvdenv.reports.report import Finding, Report, Status, causes

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATE = "page.html.jinja"
_TOTAL = "verify"


def render(report: Report) -> str:
    timings = [each for each in report.measurements if each.unit == "s" and not each.subject]
    parts = [each for each in timings if each.name != _TOTAL]
    return (
        _environment()
        .get_template(_TEMPLATE)
        .render(
            report=report,
            said=verdict_of(report),
            sections=[
                (name, list(rows)) for name, rows in groupby(report.table, key=lambda r: r.section)
            ],
            groups=list(_groups(report.findings)),
            plots=list(plots(report.measurements)),
            plot_size=(WIDTH, HEIGHT),
            bars=sorted(parts, key=lambda each: -each.value),
            longest=max((each.value for each in timings), default=0) or 1,
            others=[
                each for each in report.measurements if each not in timings and not is_drawn(each)
            ],
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "size": size}
    return environment


def _shown(value: Any) -> Any:
    """Markup of this module as it is, and other texts without secrets."""
    return value if hasattr(value, "__html__") else clean(str(value))


def _groups(findings: Sequence[Finding]) -> Iterator[tuple[Status, str, int, list[list[Finding]]]]:
    """For each status, the heading, the number of findings, and these by their cause."""
    for status, heading in HEADINGS.items():
        if found := [each for each in findings if each.status == status]:
            yield status, heading, len(found), causes(found)

"""A report as one self-contained HTML page, without scripts.

Every text passes clean() and is then escaped, in one place (`_environment`): output of programs
never becomes markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdenv.reports.render import HEADINGS, clean, verdict_of
from hvdenv.reports.report import Finding, Report, Status, causes

if TYPE_CHECKING:
    from jinja2 import Environment

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def size(count: float) -> str:
    """A number of bytes as people say it."""
    unit, name = next((each for each in _SIZES if count >= each[0]), _SIZES[-1])
    return f"{count / unit:.4g} {name}"


def figure(value: float | None) -> str:
    """A number with three digits that count, and never with an exponent."""
    if value is None or not math.isfinite(value):
        return ""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(digits, 0)}f}"


_TEMPLATE = "page.html.jinja"


def render(report: Report) -> str:
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

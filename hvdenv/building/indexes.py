"""What pip's output reports about package indexes, and what it leaves out."""

from __future__ import annotations

import re
from pathlib import Path

from hvdenv import STEP_PROGRAMS
from hvdenv.command import OWN_PYTHON, Command, Outcome
from hvdenv.runner import Runner

_YANKED = re.compile(
    r"^.{0,200}?is a yanked version: '([^']+)' candidate \(version (\S+) .*\n"
    r"(?:Reason for being yanked: (.*))?",
    re.MULTILINE,
)
_NOTHING = re.compile(
    r"^.{0,200}?satisfies the requirement ([A-Za-z0-9][\w.-]*)(?:[^\w.\n-].*)?\(from versions: none\)",
    re.MULTILINE,
)
_LOOKING = re.compile(r"^Looking in indexes: (.+)$", re.MULTILINE)
# Where pip looks if its configuration names no index; its output does not say so.
_DEFAULT = "https://pypi.org/simple"
_SECONDS = 30.0


def withdrawn(output: str) -> tuple[str, ...]:
    """Packages that pip took although their index marks them as yanked, one line for each."""
    return tuple(
        f"installed although its makers have yanked it, because exactly this version is requested: {name} {version}"
        + (f": {reason}" if reason and reason != "<none given>" else "")
        for name, version, reason in _YANKED.findall(output)
    )


def with_other_pages(outcome: Outcome, runner: Runner, log: Path | None = None) -> Outcome:
    """A failure of pip, with one line for each index that answers with another page.

    When pip finds nothing, its output does not say that it read the login page of a network.
    """
    nothing = _NOTHING.search(outcome.output)
    if outcome or not nothing:
        return outcome
    looked = _LOOKING.search(outcome.output)
    urls = [each.strip() for each in looked[1].split(",")] if looked else [_DEFAULT]
    web = [url for url in urls if url.startswith(("http://", "https://"))]
    probe = (OWN_PYTHON, str(STEP_PROGRAMS / "index_page.py"), nothing[1])
    lines = runner.run(Command((*probe, *web), timeout=_SECONDS), log=log).output
    return outcome._replace(output=f"{outcome.output}\n{lines}") if lines else outcome

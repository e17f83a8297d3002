"""What pip's output tells of package indexes, and what it leaves out."""

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
# Where pip looks when its configuration names none; it does not say so then.
_DEFAULT = "https://pypi.org/simple"
_SECONDS = 30.0


def withdrawn(output: str) -> tuple[str, ...]:
    """Packages that pip took although their index marks them as yanked, a line for each."""
    return tuple(
        f"withdrawn by its makers (yanked), and taken since this very version is asked for: {name} {version}"
        + (f": {reason}" if reason and reason != "<none given>" else "")
        for name, version, reason in _YANKED.findall(output)
    )


def with_other_pages(outcome: Outcome, runner: Runner, log: Path | None = None) -> Outcome:
    """A failure of pip's with a line for each index that answers with another page.

    Where it found nothing at all, pip does not say that it read the login page of a network.

    Args:
        outcome: of a command.
        runner: asks the indexes.
        log: file that the lines are appended to.
    """
    nothing = _NOTHING.search(outcome.output)
    if outcome or not nothing:
        return outcome
    looked = _LOOKING.search(outcome.output)
    urls = [each.strip() for each in looked[1].split(",")] if looked else [_DEFAULT]
    web = [url for url in urls if url.startswith(("http://", "https://"))]
    probe = (OWN_PYTHON, str(STEP_PROGRAMS / "index_page.py"), nothing[1])
    told = runner.run(Command((*probe, *web), timeout=_SECONDS), log=log).output
    return outcome._replace(output=f"{outcome.output}\n{told}") if told else outcome

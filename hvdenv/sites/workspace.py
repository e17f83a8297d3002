"""Folders that a site's workspace tools allocate for a time (ws_allocate, ws_find)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hvdenv.command import Command
from hvdenv.errors import StepError
from hvdenv.model.cluster import Workspace
from hvdenv.runner import Runner

_SECONDS = 60.0


def find(workspace: Workspace, runner: Runner) -> Path | None:
    """The folder of a workspace; None if it is not allocated, or was and has expired.

    Raises:
        StepError: this machine has no workspace tools.
    """
    return _folder(runner, "ws_find", *_on(workspace), workspace.name)


def allocate(workspace: Workspace, runner: Runner) -> Path:
    """The folder of a workspace, which is allocated if it is not there yet.

    Raises:
        StepError: it cannot be had; with what the tool says.
    """
    words = ("ws_allocate", *_on(workspace), workspace.name, str(workspace.days))
    found = _folder(runner, *words)
    if found is None:
        raise StepError(
            f"no workspace {workspace.name} could be allocated",
            where=" ".join(words),
            remedy="run this command by hand and read what it says; `ws_list` shows those that"
            " you have; or say where the environment is to lie with --prefix",
        )
    return found


def remaining(folder: Path, runner: Runner) -> str:
    """How long the workspace lives that a folder lies in (``12 days 5 hours``).

    Returns:
        Empty if it lies in none, or nobody can be asked.
    """
    if not shutil.which("ws_list"):
        return ""
    outcome = runner.run(Command(("ws_list",), timeout=_SECONDS))
    return parse_remaining(outcome.output, folder) if outcome else ""


def parse_remaining(text: str, folder: Path) -> str:
    """The remaining time of a folder's workspace in the output of ``ws_list``; or empty."""
    found = re.findall(
        r"^.{0,80}?workspace directory[ \t]*:[ \t]*(/\S+)[ \t]*\n"
        r"(?:.*\n)??[ \t]*remaining time[ \t]*:[ \t]*(\S.*)",
        text,
        re.MULTILINE,
    )
    return next((left.strip() for place, left in found if folder.is_relative_to(place)), "")


def _on(workspace: Workspace) -> tuple[str, ...]:
    return ("-F", workspace.filesystem) if workspace.filesystem else ()


def _folder(runner: Runner, *argv: str) -> Path | None:
    """The folder that a tool prints, on a line of its own among what else it says."""
    if not shutil.which(argv[0]):
        raise StepError(
            f"there is no {argv[0]} here, and the recipe keeps its environments in a workspace",
            remedy="build on the cluster, or say where the environment is to lie with --prefix",
        )
    outcome = runner.run(Command(argv, timeout=_SECONDS))
    folders = [line for line in outcome.output.splitlines() if re.fullmatch(r"/\S+", line)]
    return Path(folders[0]) if outcome and folders else None

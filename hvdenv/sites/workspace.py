"""Directories that a site's workspace tools allocate for a limited time (ws_allocate, ws_find)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hvdenv.base.command import Command
from hvdenv.base.errors import StepError
from hvdenv.base.runner import Runner
from hvdenv.model.cluster import Workspace

_SECONDS = 60.0


def has_tools() -> bool:
    return shutil.which("ws_find") is not None


def placeholder(workspace: Workspace) -> Path:
    """Stands for the directory of a workspace; no shell could take it for a directory."""
    return Path(
        f"/\N{LEFT DOUBLE ANGLE BRACKET}workspace {workspace.name}\N{RIGHT DOUBLE ANGLE BRACKET}"
    )


def find(workspace: Workspace, runner: Runner) -> Path | None:
    """The directory of a workspace; None if it is not allocated, or has expired.

    Raises:
        StepError: this machine has no workspace tools.
    """
    return _folder(runner, "ws_find", *_on(workspace), workspace.name)


def allocate(workspace: Workspace, runner: Runner) -> Path:
    """The directory of a workspace, which is allocated if it does not exist.

    Raises:
        StepError: the tool fails.
    """
    words = ("ws_allocate", *_on(workspace), workspace.name, str(workspace.days))
    found = _folder(runner, *words)
    if found is None:
        raise StepError(
            f"cannot allocate the workspace {workspace.name}",
            where=" ".join(words),
            remedy="run this command to see its message (`ws_list` lists your workspaces), or give a"
            " directory for the environment with --prefix",
        )
    return found


def _on(workspace: Workspace) -> tuple[str, ...]:
    return ("-F", workspace.filesystem) if workspace.filesystem else ()


def _folder(runner: Runner, *argv: str) -> Path | None:
    """The directory that a tool prints on a line of its own, among messages."""
    if not shutil.which(argv[0]):
        raise StepError(
            f"the recipe stores its environments in a workspace, but {argv[0]} is not installed",
            remedy="build on the cluster, or give a directory for the environment with --prefix",
        )
    outcome = runner.run(Command(argv, timeout=_SECONDS))
    folders = [line for line in outcome.output.splitlines() if re.fullmatch(r"/\S+", line)]
    return Path(folders[0]) if outcome and folders else None

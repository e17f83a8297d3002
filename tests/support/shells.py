"""Lines of a shell, and the environments that they show."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.needs import need

PATH = "/usr/local/bin:/usr/bin:/bin"
# Prints the environment under a name, for `Said.at`.
_PRINT = "import json, os, sys; print(sys.argv[1] + json.dumps(dict(os.environ)))"
_SHOW = f"show() {{ {shlex.quote(sys.executable)} -IS -c {shlex.quote(_PRINT)} $1:; }}"
_OWN = {"_", "SHLVL", "PWD", "OLDPWD"}


class Said:
    """What a shell printed and how it ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    def at(self, name: str) -> dict[str, str]:
        """The environment that `show NAME` printed."""
        lines = [line for line in self.out.splitlines() if line.startswith(f"{name}:")]
        assert len(lines) == 1, (self.out, self.err)
        found: dict[str, str] = json.loads(lines[0].split(":", 1)[1])
        return {key: value for key, value in found.items() if key not in _OWN}


def shell(name: str, lines: Sequence[str], cwd: Path, **variables: str) -> Said:
    """Run lines in a shell that starts from nothing else."""
    if name != "bash":
        need(name)
    options = ["-f"] if name in ("zsh", "tcsh") else []
    first = [] if name == "tcsh" else [_SHOW]
    return Said(
        subprocess.run(
            [str(shutil.which(name)), *options, "-c", "\n".join([*first, *lines])],
            cwd=cwd,
            env={"PATH": PATH, "HOME": str(cwd), "LC_ALL": "C.UTF-8", **variables},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=300,
        )
    )

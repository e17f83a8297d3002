"""What tests need of the machine: Debian packages, root, and what only some kernels and containers allow.

A test says so with the marker ``needs``, a fixture or a function that several tests share with
``need``. Both skip the test if something is missing, and the reason names it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest import SkipTest

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = ".ci/run packages"
_TABLE = Path(__file__).with_name("packages.txt")
# Each with a command that succeeds where the machine allows it.
ABILITIES = {
    "root": ("sh", "-c", '[ "$(id -u)" = 0 ]'),
    "mounts": ("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"),
    "namespaces": ("unshare", "--pid", "--net", "--mount", "--uts", "--fork", "true"),
    "user namespaces": ("unshare", "--map-root-user", "--mount", "true"),
    "loop devices": ("losetup", "--find"),
    # Root's home directory is closed to others on Debian, and a checkout may be in it.
    "a checkout that others can read": ("setpriv", "--reuid=65534", "test", "-r", __file__),
    "/dev/fuse": ("sh", "-c", "exec 3<>/dev/fuse"),
}


class Missing(SkipTest):
    """The machine lacks what a test needs, which skips the test unless it is caught."""


@cache
def packages() -> dict[str, list[str]]:
    """Debian packages, each with the programs and patterns of paths that tests use of it."""
    text = _TABLE.read_text(encoding="utf-8")
    lines = text.replace("{include}", sysconfig.get_path("include")).splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {package: provided for package, *provided in rows}


def is_installed(package: str, path: str = SYSTEM_PATH) -> bool:
    """Whether this machine has what a package provides, however it was installed.

    Raises:
        KeyError: the package is not in packages.txt.
    """
    return all(
        any(Path("/").glob(each[1:])) if each.startswith("/") else shutil.which(each, path=path)
        for each in packages()[package]
    )


@cache
def allows(ability: str) -> bool:
    """Whether this machine allows something to this user."""
    try:
        subprocess.run(ABILITIES[ability], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def need(*names: str, path: str = SYSTEM_PATH) -> None:
    """Require Debian packages and abilities.

    Args:
        names: of packages in packages.txt, and of `ABILITIES`.
        path: directories of programs.

    Raises:
        Missing: the machine lacks some.
        KeyError: a name is neither.
    """
    lacking = [name for name in names if name in ABILITIES and not allows(name)]
    wanted = [name for name in names if name not in ABILITIES and not is_installed(name, path)]
    if wanted:
        lacking.append(f"Debian's {' '.join(wanted)}")
    if lacking:
        raise Missing(f"needs {' and '.join(lacking)}")


def summary(reasons: Sequence[str]) -> str:
    """How many tests were skipped, and how to run them, in one line.

    Args:
        reasons: why each was skipped.
    """
    text = f"{len(reasons)} tests were skipped."
    if any("Debian's" in reason for reason in reasons):
        text += f" As root on Debian or Ubuntu, {INSTALL} installs what they need."
    if any("needs root" in reason for reason in reasons):
        text += " Some need root."
    return text


if __name__ == "__main__":
    FILE = Path(sys.argv[1])
    print(summary([json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]))

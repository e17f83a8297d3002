"""An installation that is unusual and good: verify must pass it.

What takes a compile of its own is in tests/optin/test_corpus.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from tests.real.doctored import purelib

NOBODY = 65533


def test_an_installation_that_is_unusual_in_every_way(
    copy: Callable[..., Installation], tmp_path: Path
) -> None:
    """Horovod in another directory by a .pth file, the system's packages too, a link to the prefix.

    It is somebody else's, only to be read, by a user without a home whose files nobody else
    can read. By Gloo: directories of the tests are for their owner alone, and mpirun asks
    access(2), which does not count what setpriv gives.
    """
    read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *read, "--"]
    if subprocess.run([*user, "true"], check=False, capture_output=True).returncode:
        pytest.skip("only root can be somebody else")
    prefix = in_another_folder(copy(), tmp_path / "other")
    (tmp_path / "link").symlink_to(prefix)
    folder = tmp_path / "nobody"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    words = [*user, "sh", "-c", 'umask 077; exec "$@"', "sh", sys.executable, "-m", "hvdenv"]
    words += ["verify", "--prefix", f"{tmp_path}/link", "--framework", "torch"]
    words += ["--controller", "Gloo", "--quick"]
    variables = {**os.environ, "HOME": str(folder), "HVDENV_HOME": f"{folder}/home"}
    ended = subprocess.run(
        words, env=variables, cwd="/", capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def in_another_folder(installation: Installation, other: Path) -> Path:
    """Move the package horovod away, with what it needs beside it.

    Returns:
        The prefix, which has it by a .pth file.
    """
    prefix, packages = Path(installation.prefix), purelib(Path(installation.python))
    folder = other / "lib/python3/packages"
    folder.mkdir(parents=True)
    shutil.move(packages / "horovod", folder / "horovod")
    for library in (each for each in (prefix / "lib").iterdir() if "python" not in each.name):
        (other / "lib" / library.name).symlink_to(library)
    (packages / "another.pth").write_text(f"{folder}\n")
    settings = prefix / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace("= false", "= true"))
    return prefix

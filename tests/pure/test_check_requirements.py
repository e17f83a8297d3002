"""What an environment that was installed from a lock has, by the metadata of its packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv import STEP_PROGRAMS
from tests.support.files import write

PACKAGES = {
    "app-1.0": ("Lib[conf]<3,>=2", 'old ; python_version < "3.6"', 'no ; extra == "no"'),
    "lib-2.1": ('deep>=1 ; extra == "conf"', 'never ; extra == "never"', "site-too"),
    "deep-1.5": (),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, requires in PACKAGES.items():
        install(tmp_path, name, *requires)
    (tmp_path / "site_too-7.egg-info").mkdir()
    return tmp_path


def install(folder: Path, name: str, *requires: str) -> None:
    package, _, version = name.rpartition("-")
    lines = [f"Name: {package}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    text = "\n".join(lines) + "\n\nRequires-Dist: not-this\n"
    write(folder / f"{name}.dist-info" / "METADATA", text)


def judged(
    folder: Path, packages: str = "app===1.0\nlib===2.1\ndeep===1.5\n"
) -> tuple[int, list[str]]:
    listed = folder / "packages.txt"
    listed.write_text(packages)
    done = subprocess.run(
        [sys.executable, STEP_PROGRAMS / "check_requirements.py", listed],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_an_environment_that_has_everything(folder: Path) -> None:
    assert judged(folder) == (0, ["3 packages have all that they require"])
    # As a lock and a package may spell one version.
    assert judged(folder, "app===1\nlib===2.1\ndeep===1.5.0\n")[0] == 0
    # What cannot be parsed is passed over, and what is not of the lock is not judged.
    install(folder, "old-1.0", "pytz (!!)")
    install(folder, "bad-1", "nothing")
    assert judged(folder)[0] == 0
    assert judged(folder, "app===1.0\nold===1.0\n")[0] == 0


@pytest.mark.parametrize(
    ("gone", "made", "printed"),
    [
        ("deep-1.5", "", "lib 2.1 requires deep>=1, which is not installed"),
        ("deep-1.5", "deep-0.9", "lib 2.1 requires deep>=1, and 0.9 is installed"),
        ("app-1.0", "", "app 1.0 is not installed"),
        ("app-1.0", "app-1.1", "app 1.1 is installed, not 1.0"),
    ],
)
def test_what_is_missing(folder: Path, gone: str, made: str, printed: str) -> None:
    shutil.rmtree(folder / f"{gone}.dist-info")
    if made:
        install(folder, made)
    assert judged(folder, "app===1.0\nlib===2.1\n") == (1, [printed])

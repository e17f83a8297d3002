"""Tests on a machine without the programs of packages.txt: they are skipped, and none fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import SYSTEM_PATH, packages

ROOT = Path(__file__).parents[2]
# Every machine that runs tests has these.
KEPT = {"gcc", "g++", "make", "ca-certificates", "python3", "python3-dev", "python3-venv", "dash"}
KEPT |= {"util-linux"}
# Fixtures that build or install environments, which takes an hour in all.
BUILDS = {"bundle", "cli", "copy", "local_prefix", "original", "people"}
# Whiteouts of an overlay: files below /usr are gone for this namespace, and nothing is deleted.
HIDE = """
set -eu
layer=$1 hidden=$2
shift 2
mount -t tmpfs tmpfs "$layer"
mkdir "$layer/upper" "$layer/work"
while read -r path; do
    mkdir -p "$layer/upper/${path%/*}"
    mknod "$layer/upper/$path" c 0 0
done < "$hidden"
mount -t overlay overlay -o "lowerdir=/usr,upperdir=$layer/upper,workdir=$layer/work" /usr
exec "$@"
"""


def builds(item: pytest.Item) -> bool:
    """Whether a test builds or installs an environment, or waits for one."""
    needs = {name for mark in item.iter_markers("needs") for name in mark.args}
    return "python3-dev" in needs or bool(BUILDS & {*getattr(item, "fixturenames", ())})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where this file is a plugin: leave out tests that take long."""
    config.hook.pytest_deselected(items=[*filter(builds, items)])
    items[:] = [item for item in items if not builds(item)]


def files_of(package: str) -> list[str]:
    """The programs and files of a package below /usr, relative to it."""
    found: list[str] = []
    for each in packages()[package]:
        if each.startswith("/"):
            found += map(str, Path("/").glob(each[1:]))
        else:
            places = (shutil.which(each, path=folder) for folder in SYSTEM_PATH.split(":"))
            found += filter(None, places)
    real = {
        os.path.join(os.path.realpath(os.path.dirname(each)), os.path.basename(each))
        for each in found
    }
    return sorted(each.removeprefix("/usr/") for each in real if each.startswith("/usr/"))


def needing(path: Path) -> bool:
    """Whether a file of tests names what it needs, or uses a stand-in of a cluster."""
    text = path.read_text(encoding="utf-8")
    return any(word in text for word in ("mark.needs", "support.needs", "standin", "modulesystems"))


@pytest.mark.optin
@pytest.mark.needs("root", "mounts")
def test_tests_that_need_packages_are_skipped_without_them(tmp_path: Path) -> None:
    hidden = {package for package in packages() if package not in KEPT}
    listed, layer, skips = tmp_path / "hidden", tmp_path / "layer", tmp_path / "skips"
    listed.write_text("".join(f"{file}\n" for name in sorted(hidden) for file in files_of(name)))
    layer.mkdir()
    files = [
        str(p)
        for p in sorted((ROOT / "tests/real").glob("test_*.py"))
        if needing(p) and p != Path(__file__)
    ]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", __name__]
    words += ["--basetemp", str(tmp_path / "tests"), "--skips", str(skips), *files]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", HIDE, "sh", str(layer), str(listed), *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr
    reasons = " ".join(json.loads(line) for line in skips.read_text().splitlines())
    assert "Debian's lua5.3" in reasons and "Debian's chromium" in reasons

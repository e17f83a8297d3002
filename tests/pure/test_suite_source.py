"""Where `verify --suite` finds Horovod's tests, with a few files in their place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation, in_image
from hvdenv.errors import StepError, UsageError
from hvdenv.model.cluster import Container
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.verification import suite
from hvdenv.verification.collection import Setup
from tests.commands import Hvdenv
from tests.support.needs import need

EVE = 4711


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the tag v9."""
    folder = tmp_path / "checkout"
    for name in ("parallel/test_own.py", "utils/common.py", "conftest.py"):
        path = folder / "test" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"'{name}'\n")
    (folder / "test/conftest.py").chmod(0o755)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "tests"), ("tag", "v9")):
        git(folder, *words)
    return folder


@pytest.fixture
def known(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hash of the checkout's tests, which are those of release 9."""
    digest = suite.tree_hash(checkout / "test")
    own = suite.data()._replace(tests={"9": digest}, repository=str(checkout))
    monkeypatch.setattr(suite, "data", lambda: own)
    return digest


def git(folder: Path, *words: str) -> str:
    need("git")
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    argv = ("git", "-C", str(folder), *identity, *words)
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def test_tests_of_a_release_are_recognised_by_gits_hash(checkout: Path) -> None:
    (checkout / "test/utils/link").symlink_to("common.py")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "a link")
    (checkout / "test/__pycache__").mkdir()
    assert suite.tree_hash(checkout / "test") == git(checkout, "rev-parse", "HEAD:test")


def test_tests_in_an_archive_and_in_a_relative_path(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks run in other folders."""
    monkeypatch.chdir(tmp_path)
    assert suite.tests_in(Path("checkout"), tmp_path, Runner()) == checkout / "test"
    archive = tmp_path / "horovod.tar.gz"
    subprocess.run(["tar", "czf", archive, "-C", tmp_path, "checkout"], check=True)
    found = suite.tests_in(archive, tmp_path, Runner())
    assert suite.tree_hash(found) == suite.tree_hash(checkout / "test")


def test_a_clone_in_which_tests_left_files_is_replaced(known: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for _ in range(2):
        tests = suite._from_repository("9", cache, Runner())
        assert suite.tree_hash(tests) == known
        (tests / "parallel/core.1234").touch()
    assert os.listdir(cache) == ["horovod-9"]


@pytest.mark.usefixtures("known")
def test_a_repository_with_compiled_files_is_not_that_of_the_release(
    checkout: Path, tmp_path: Path
) -> None:
    """Python executes them instead of the tests whose hash is known."""
    compiled = checkout / "test/utils/__pycache__/common.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    git(checkout, "add", "-f", ".")
    git(checkout, "commit", "-qm", "compiled")
    git(checkout, "tag", "-f", "v9")
    with pytest.raises(StepError, match="differ from those of the release"):
        suite._from_repository("9", tmp_path, Runner())


def test_pip_runs_with_the_modules_of_the_environment(tmp_path: Path) -> None:
    """A Python of a module may not start without them."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ntest "$OF_MODULE" = set || exit 127\ntest "$2" = -c && echo 3.9 || mkdir "$7"\n'
    )
    python.chmod(0o755)
    installation = Installation(str(tmp_path), str(python), (), (("OF_MODULE", "set"),))
    packages = suite._packages(Setup(installation, Runner()), tmp_path)
    assert packages == tmp_path / "packages-py3.9"
    assert packages.is_dir()


def test_tests_are_not_run_with_a_python_outside_of_the_image(tmp_path: Path) -> None:
    image = in_image(Container(image="/image.sif"))
    with (
        pytest.raises(UsageError, match="in an image"),
        suite.prepared(tmp_path, image, "0.28.1", Runner(), Places(tmp_path)),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file to another user")
@pytest.mark.parametrize("part", ["", "test/parallel/test_own.py", "archive"])
def test_tests_of_another_user_are_not_executed(
    part: str, checkout: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    source = tmp_path / "archive.tar" if part == "archive" else checkout
    (tmp_path / "archive.tar").touch()
    foreign = source if part == "archive" else checkout / part
    os.chown(foreign, EVE, EVE)
    words = ["verify", "--prefix", str(tmp_path / "none"), "--suite-from", str(source)]
    said = hvdenv(*words, code=2).err
    assert f"belongs to uid {EVE}, and hvdenv would run its " in said
    assert "belongs to" not in hvdenv(*words, "--trust", code=2).err

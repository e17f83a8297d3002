"""A framework from its repository: a small one with a C extension and submodules, built for real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.real.conftest import Cli

pytestmark = pytest.mark.needs("git", "python3-dev")

PROGRAM = Path(__file__).parents[2] / "hvdenv/standalone/steps/fetch_git.py"
TAG = "v1.7.1"
# Nobody's name and configuration; since 2.38.1 git wants to be asked about submodules in files.
GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "protocol.file.allow",
    "GIT_CONFIG_VALUE_0": "always",
}

EXTENSION = """
#include <Python.h>
#include "answer.h"
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "", -1, methods};
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }
"""
# As that of PyTorch, it takes its version from the environment of the build.
SETUP = """
import os
from setuptools import Extension, setup
setup(
    name="torch", version=os.environ["PYTORCH_BUILD_VERSION"], packages=["torch"],
    ext_modules=[Extension("torch._C", ["torch/_C.c"], include_dirs=["third_party/middle/inner"])],
)
"""
RECIPE = """
format = 1
name = "from-source"
summary = "A framework that is built from its repository"
status = "tested"
sources = []
python.version = ">=3.10"
[frameworks.torch]
provider = "source"
version = "{version}"
[frameworks.torch.source]
git = "{url}"
tag = "v1.7.1"
commit = "{commit}"
build = {{ PYTORCH_BUILD_VERSION = "1.7.1" }}
[horovod]
version = "0.28.1"
sha256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
frameworks = ["torch"]
controllers = ["gloo"]
"""


class Repository(NamedTuple):
    """The framework's repository and what its tag points to."""

    url: str
    commit: str


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", folder, *words],
        env={**os.environ, **GIT},
        text=True,
        check=True,
        capture_output=True,
    )
    return done.stdout.strip()


def make(folder: Path, files: dict[str, str], submodules: Mapping[str, Path] = {}) -> Path:
    """A repository with one commit."""
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for path, other in submodules.items():
        git(folder, "submodule", "add", other.as_uri(), path)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Its tag is not its newest state, and neither are the submodules' that belong to it."""
    root = tmp_path_factory.mktemp("repositories")
    inner = make(root / "inner", {"answer.h": "#define ANSWER 42\n"})
    middle = make(root / "middle", {"README": ""}, {"inner": inner})
    files = {"torch/__init__.py": "from torch._C import answer\n", "torch/_C.c": EXTENSION}
    torch = make(root / "torch", {**files, "setup.py": SETUP}, {"third_party/middle": middle})
    git(torch, "tag", "--annotate", TAG, "--message", "a release")
    tagged = git(torch, "rev-parse", "HEAD")
    for folder, name in ((inner, "answer.h"), (middle, "README"), (torch, "setup.py")):
        (folder / name).write_text("#error later\n")
        commit(folder)
    return Repository(torch.as_uri(), tagged)


def fetch(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Run the step's first command."""
    done = subprocess.run(
        [sys.executable, PROGRAM, *words, folder],
        env={**os.environ, **GIT, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def test_submodules_of_submodules_are_fetched_as_the_tag_has_them(
    repository: Repository, tmp_path: Path
) -> None:
    for commit in (repository.commit, "-"):
        folder = tmp_path / commit
        status, printed = fetch(folder, repository.url, TAG, commit)
        assert status == 0, printed
        assert f"{repository.url} {TAG} is {repository.commit}" in printed
        assert (folder / "third_party/middle/inner/answer.h").read_text() == "#define ANSWER 42\n"


def test_a_tag_that_was_moved(repository: Repository, tmp_path: Path) -> None:
    status, printed = fetch(tmp_path / "torch", repository.url, TAG, "0" * 40)
    assert status == 1
    assert f"{TAG} is {repository.commit}, the recipe says {'0' * 40}" in printed
    assert not (tmp_path / "torch/third_party/middle/README").exists()


def test_what_cannot_be_fetched(repository: Repository, tmp_path: Path) -> None:
    status, printed = fetch(tmp_path / "torch", repository.url, "v9", repository.commit)
    assert status == 1
    assert "Remote branch v9 not found" in printed and "hvdenv: git clone failed" in printed
    gone = f"{repository.url}-that-is-gone"
    status, printed = fetch(tmp_path / "torch", gone, TAG, repository.commit)
    assert status == 1
    assert "hvdenv: git clone failed" in printed
    status, printed = fetch(tmp_path / "torch", repository.url, TAG, "-", PATH=str(tmp_path))
    assert (status, printed) == (1, "hvdenv: git is not on PATH: load its module, or install it\n")


def test_it_is_built_and_installed(repository: Repository, tmp_path: Path) -> None:
    """In a whole build, which goes on only if it is the version that the recipe says."""
    recipe, prefix = tmp_path / "recipe.toml", tmp_path / "env"
    text = RECIPE.format(url=repository.url, commit=repository.commit, version="1.8.0")
    recipe.write_text(text)
    cli = Cli(tmp_path / "home", GIT)
    built = cli("build", str(recipe), "--prefix", str(prefix), code=5)
    assert "torch-source: done" in built.stderr
    assert "torch 1.7.1 is installed; the recipe says 1.8.0" in built.stderr
    assert not os.path.lexists(prefix)
    (generation,) = tmp_path.glob(".env.hvdenv/*/venv")
    ask = "import torch; print(torch.answer())"
    answer = subprocess.run(
        [generation / "bin/python", "-c", ask], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.stdout == "42\n", answer.stderr
    # What hours have compiled is kept, whatever fails later.
    again = cli("build", str(recipe), "--prefix", str(prefix), code=5)
    assert "torch-source: not needed: the wheel is in the cache" in again.stderr
    assert "torch 1.7.1 is installed; the recipe says 1.8.0" in again.stderr

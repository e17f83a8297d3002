"""Tests say which Debian packages they need, and packages.txt has them all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs

ROOT = Path(__file__).parents[2] / "tests"
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != Path(__file__).name)
OWNERS = {each: package for package, used in needs.packages().items() for each in used}
# A stand-in of a cluster needs its packages by itself.
STANDIN = {"cluster", "Cluster"}
# Programs on command lines that pure tests write and do not run.
WRITTEN = {"salloc", "sbatch", "scp", "srun", "ssh"}
# Tests run only where these are.
EVERYWHERE = {"gcc", "g++", "make", "python3", "python3-venv", "dash", "util-linux"}


def undeclared(path: Path) -> set[str]:
    """Packages of programs that a file starts by their names and does not say that it needs."""
    names, texts, started = set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Constant(value=str(text)):
                texts.add(text)
            case (
                ast.List(elts=[ast.Constant(value=str(program)), *_])
                | ast.Tuple(elts=[ast.Constant(value=str(program)), *_])
            ):
                started.add(program.rpartition("/")[2])
    if path.parent.name == "pure":
        started -= WRITTEN
    owners = {OWNERS[program] for program in started if program in OWNERS}
    return set() if names & STANDIN else owners - texts - EVERYWHERE


def test_a_file_that_starts_a_program_says_that_it_needs_its_package() -> None:
    found = {str(path.relative_to(ROOT)): undeclared(path) for path in FILES}
    assert {path: packages for path, packages in found.items() if packages} == {}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(needs.Missing, match="^needs Debian's gcc chromium$"):
        needs.need("gcc", "chromium", "python3-venv", path=str(tmp_path))


def test_the_last_line_of_make_test() -> None:
    assert needs.summary([]) == "0 tests were skipped."
    assert needs.summary(["needs root", "needs Debian's zsh"]) == (
        "2 tests were skipped. As root on Debian or Ubuntu, .ci/run packages installs what they need."
        " Some need root."
    )


def test_tests_that_ci_does_not_run_can_be_collected() -> None:
    words = ["--collect-only", "--quiet", "-p", "no:cacheprovider", str(ROOT / "optin")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout

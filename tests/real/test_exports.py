"""Exports of real environments, read by the programs that they are for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from rattler import MatchSpec

from hvdenv.building import repair
from hvdenv.contents import exports
from hvdenv.contents.packages import from_record
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import installed
from hvdenv.schema import decode
from tests.real.conftest import Cli

# Small, of pure Python, and nothing needs them to be compiled.
PACKAGES = ("six", "termcolor")
CASES = Path(__file__).parents[1] / "cases/contents"


def pip(base: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the pip of the tests for another environment."""
    python = str(base / "bin/python")
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *words],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with small packages, and what pip said of their installation."""
    base = tmp_path_factory.mktemp("exported") / "venv"
    venv.create(base, symlinks=True)
    report = base / "report.json"
    done = pip(base, "install", *PACKAGES, "--no-deps", "--report", str(report))
    assert done.returncode == 0, done.stdout
    return base


def test_pip_takes_the_requirements_with_their_hashes(environment: Path, tmp_path: Path) -> None:
    record = {"recipe": "small", "packages": repair.installed_packages(environment / "report.json")}
    contents = from_record(
        decode(GenerationRecord, record, lenient=True),
        installed.installed_packages(environment),
        "",
    )
    file = tmp_path / "requirements.txt"
    words = ("install", "--dry-run", "--ignore-installed", "--require-hashes", "-r", str(file))
    file.write_text(exports.requirements(contents))
    for name in PACKAGES:
        assert re.search(rf"^{name}==\S+ \\\n    --hash=sha256:", file.read_text(), re.MULTILINE)
    done = pip(environment, *words)
    assert done.returncode == 0, done.stdout
    assert all(f"{name}-" in done.stdout.rpartition("Would install")[2] for name in PACKAGES)
    # Another file under the name of one of them.
    file.write_text(re.sub(r"sha256:[0-9a-f]{4}", "sha256:0000", file.read_text()))
    done = pip(environment, *words)
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stdout


def test_pip_keeps_to_the_constraints(environment: Path, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    contents = installed.contents_of_folder(environment)
    file.write_text(exports.constraints(contents))
    words = ("install", "--dry-run", "--no-deps", "--upgrade", "-c", str(file))
    done = pip(environment, *words, *PACKAGES)
    assert done.returncode == 0, done.stdout
    assert "Would install" not in done.stdout
    done = pip(environment, *words, "six==1.0.0")
    assert done.returncode == 1
    assert "conflict" in done.stdout.lower()


def test_two_environments_are_compared(cli: Cli, environment: Path, tmp_path: Path) -> None:
    """The interpreter of the tests is in a virtual environment that hvdenv did not build."""
    assert cli("diff", str(environment), str(environment), "--exit-code").stdout.endswith("same\n")
    found = cli("diff", str(environment), sys.prefix, "--json", "--exit-code", code=1).json
    added = {each["subject"] for each in found["changes"] if each["kind"] == "added"}
    assert {"hypothesis", "pytest"} <= added


def test_conda_programs_can_read_the_environment() -> None:
    """Each line of its dependencies is a specification by the rules of conda."""
    case = json.loads((CASES / "cluster.json").read_text())
    packages = [each for each in case["record"]["packages"] if "build" in each]
    text = (CASES / "cluster.environment.yml").read_text()
    specs = [MatchSpec(each) for each in re.findall(r"^  - (\w+=\S+)$", text, re.MULTILINE)]
    assert sorted((str(each.name.normalized), str(each.version), str(each.build)) for each in specs) == sorted(
        (each["name"], f"=={each['version']}", each["build"]) for each in packages
    )  # fmt: skip

"""Parts of a build that work without starting anything; builds themselves are in tests/real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdenv.building.engine import _failed
from hvdenv.building.repair import installed_packages
from hvdenv.cli.progress import compiled_objects
from hvdenv.command import Command, Outcome
from hvdenv.plans.step import Step


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("[1/78] Building CXX object a.cc.o", (1, 78)),
        ("  [78/78] Linking CXX shared module", (78, 78)),
        ("[ 12%] Building CXX object", None),
        ("see [1/2] there", None),
        ("[1/2]", None),
        ("", None),
    ],
)
def test_objects_that_are_compiled(line: str, counted: tuple[int, int] | None) -> None:
    assert compiled_objects(line) == counted


STEP = Step("wheel", "compile")
COMMAND = Command(("pip", "wheel", "a b"), (("PIP_TOKEN", "hush"), ("CC", "gcc")))


def test_a_failed_step_says_all_that_is_needed(tmp_path: Path) -> None:
    output = "\n".join([*map(str, range(40)), "a.cc:1:2: error: no such thing"])
    log = tmp_path / "06-wheel.log"
    log.write_text(f"$ pip wheel\n{output}\n", encoding="utf-8")
    error = _failed(STEP, Outcome(COMMAND, 2, output, 1.0), log)
    assert error.exit_code == 5
    assert error.message == (
        "step wheel failed (exit status 2): the compiler stopped: a.cc:1:2: error: no such thing"
    )
    assert error.where == str(log)
    assert error.detail.splitlines() == [*map(str, range(26, 40)), "a.cc:1:2: error: no such thing"]
    said = str(error)
    assert f"the whole log is {log}" in said
    assert "to repeat the command alone:\n  env PIP_TOKEN=*** CC=gcc pip wheel 'a b'" in said
    assert "hush" not in said


def test_a_step_that_a_signal_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("$ pip wheel\n", encoding="utf-8")
    error = _failed(STEP, Outcome(COMMAND, -9, "", 1.0), log)
    assert error.message == "step wheel failed (ended by signal 9)"


def test_what_pip_installed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    torch = {
        "metadata": {"name": "torch", "version": "2.13.0"},
        "download_info": {
            "url": "https://u:p@host/torch.whl", "archive_info": {"hashes": {"sha256": "ab"}}
        },
    }  # fmt: skip
    local = {
        "metadata": {"name": "x", "version": "1"},
        "download_info": {"url": "file:///x", "dir_info": {}},
    }
    report.write_text(json.dumps({"install": [torch, local]}))
    assert installed_packages(report) == [
        {"name": "torch", "version": "2.13.0", "url": "https://***@host/torch.whl", "sha256": "ab"},
        {"name": "x", "version": "1", "url": "file:///x", "sha256": ""},
    ]

"""Packages of a lock copied from another environment: relocated, nothing shared, or not at all."""

from __future__ import annotations

import csv
import subprocess
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdenv.building import copied
from hvdenv.runner import Runner


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An environment with a package that has a script, and with a Horovod."""
    folder = tmp_path / "source" / "venv"
    venv.create(folder, symlinks=True)
    install(folder, "tool", f"#!{folder}/bin/python\nprint('works')\n")
    install(folder, "horovod", f"#!{folder}/bin/python\n")
    return folder


def install(environment: Path, name: str, script: str) -> None:
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    (environment / "bin" / name).write_text(script)
    (environment / "bin" / name).chmod(0o755)
    (site_packages / f"{name}.py").write_text("")
    info = site_packages / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows = [[f"../../../bin/{name}", "sha256=old", "1"], [f"{name}.py", "", "0"]]
    rows += [[f"{info.name}/{each}", "", ""] for each in ("METADATA", "RECORD")]
    with (info / "RECORD").open("w") as stream:
        csv.writer(stream).writerows(rows)


def copy(source: Path, target: Path) -> str:
    target.parent.mkdir(parents=True)
    state: Any = SimpleNamespace(plan=SimpleNamespace(environment=target), runner=Runner())
    return copied.copy(source, state)


def test_scripts_of_a_copy_run_in_the_copy(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target" / "venv"
    assert copy(source, target) == ""
    script = target / "bin" / "tool"
    assert script.read_text().startswith(f"#!{target}/bin/python\n")
    done = subprocess.run([script], capture_output=True, text=True, check=True)
    assert done.stdout == "works\n"
    prefix = [str(target / "bin" / "python"), "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(prefix, capture_output=True, text=True, check=True)
    assert done.stdout == f"{target}\n"


def test_a_record_states_the_new_size_of_a_script(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target" / "venv"
    copy(source, target)
    (record,) = target.glob("lib/python3*/site-packages/tool-1.0.dist-info/RECORD")
    (row,) = (
        each for each in csv.reader(record.read_text().splitlines()) if each[0].endswith("bin/tool")
    )
    assert row[2] == str((target / "bin" / "tool").stat().st_size)
    assert row[1] != "sha256=old"


def test_horovod_is_not_copied(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target" / "venv"
    copy(source, target)
    assert not list(target.rglob("horovod*"))
    assert list(source.rglob("horovod*"))


def test_a_copy_shares_no_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target" / "venv"
    copy(source, target)
    (target / "bin" / "tool").write_text("changed")
    assert "works" in (source / "bin" / "tool").read_text()
    files = [each for each in target.rglob("*") if each.is_file() and not each.is_symlink()]
    assert files
    assert all(each.stat().st_nlink == 1 for each in files)


@pytest.mark.parametrize("name", ["with space", "l" * 120])
def test_nothing_is_left_where_scripts_cannot_name_their_interpreter(
    source: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / name / "venv"
    assert "cannot name its interpreter" in copy(source, target)
    assert not target.exists()


def test_a_source_that_is_gone_is_a_reason_to_install(tmp_path: Path) -> None:
    target = tmp_path / "target" / "venv"
    assert "gone" in copy(tmp_path / "gone" / "venv", target)
    assert not target.exists()

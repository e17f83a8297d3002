"""Programs of steps: conda environments, what a lock requires, archives."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.base.places import find_places
from hvdenv.building.wheelcache import own, store
from hvdenv.standalone.steps import archives
from tests.support.commands import Hvdenv, ended
from tests.support.files import programs, write
from tests.support.standalone import load
from tests.support.wheels import EXTENSION, TORCH_INPUTS, compiled_wheel

PROGRAM = STEP_PROGRAMS / "conda_env.py"
SPEC: dict[str, Any] = {
    "channels": ["https://conda.example.org/site", "conda-forge"],
    "specs": ["python 3.10.*", "pytorch 1.12.0", "cudatoolkit 11.3.*", "numpy >=1.21,<2"],
    "platform": "linux-64",
    "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
}


conda_env = load("conda_env")


def run(*words: str | Path, **named: Any) -> subprocess.CompletedProcess[str]:
    """Run it without py-rattler."""
    return ended(sys.executable, "-E", "-S", PROGRAM, *words, **named)


def written(folder: Path, **changed: Any) -> Path:
    path = folder / "conda.json"
    path.write_text(json.dumps({**SPEC, **changed}))
    return path


# What is asked for


def test_the_machine_is_what_the_document_says_and_old_otherwise() -> None:
    def found(document: dict[str, Any]) -> list[str]:
        return [" ".join(each) for each in conda_env.virtual_packages(document)]

    unix = "__unix 0 0"
    old = ["__glibc 2.17 0", "__linux 3.10 0", unix]
    assert found(SPEC) == ["__cuda 11.4 0", *old, "__archspec 1 x86_64"]
    power = {"platform": "linux-ppc64le", "virtual": {"__archspec": "power9", "__linux": "4.18"}}
    assert found(power) == ["__glibc 2.17 0", "__linux 4.18 0", unix, "__archspec 1 power9"]


# `check` does not blame the recipe for what begins so.
NOTHING = "conda_env: cannot install conda packages: "


def test_what_cannot_be_installed(tmp_path: Path) -> None:
    done = run(written(tmp_path), tmp_path / "env")
    assert done.returncode == 1
    assert NOTHING in done.stdout and "has no py-rattler" in done.stdout
    assert " -m pip install 'py-rattler<1,>=0.28'" in done.stdout
    done = run(written(tmp_path, platform="linux-riscv64"), tmp_path / "env")
    assert done.returncode == 1
    assert "platform linux-riscv64: known are linux-64, linux-aarch64" in done.stdout
    assert "Traceback" not in done.stdout
    assert os.listdir(tmp_path) == ["conda.json"]


# Stands in for a conda: it writes what it was asked for into the record of a package.
CONDA = """\
test "$1 $2 $3" = "create --yes --prefix" || exit 2
mkdir -p "$4/conda-meta"; prefix=$4; shift 4
test "$CONDA_OVERRIDE_CUDA/$CONDA_OVERRIDE_GLIBC/$CONDA_SUBDIR" = 11.4/2.17/linux-64 || exit 3
printf '{"name": "data", "version": "1", "url": "%s"}' "$*" > "$prefix/conda-meta/data.json"
"""


def test_without_py_rattler_a_conda_makes_it_but_not_from_a_lock(tmp_path: Path) -> None:
    conda = {"PATH": f"{programs(tmp_path / 'bin', conda=CONDA)}:/usr/bin:/bin"}
    spec, report = written(tmp_path), tmp_path / "report.json"
    done = run(spec, tmp_path / "env", "--report", report, env=conda)
    assert done.returncode == 0, done.stdout
    assert "bin/conda, since " in done.stdout and "1 packages in" in done.stdout
    channels = " ".join(f"--channel {name}" for name in SPEC["channels"])
    (installed,) = json.loads(report.read_text())
    assert installed["url"] == " ".join(["--override-channels", channels, *SPEC["specs"]])

    locked = written(tmp_path, explicit=[])
    for words in ((locked, tmp_path / "second"), ("--solve-only", spec, report)):
        done = run(*words, env=conda)
        assert done.returncode == 1
        assert NOTHING in done.stdout and "has no py-rattler" in done.stdout
    failing = {"PATH": f"{programs(tmp_path / 'failing', conda='exit 7')}:/usr/bin:/bin"}
    done = run(written(tmp_path), tmp_path / "third", env=failing)
    assert "create failed with exit status 7" in done.stdout
    assert not (tmp_path / "third").exists()


def test_a_document_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"channels": [')
    assert "half.json is not JSON" in run(tmp_path / "half.json", tmp_path / "env").stdout
    done = run(tmp_path / "gone.json", tmp_path / "env")
    assert done.returncode == 1
    assert "gone.json: No such file or directory" in done.stdout
    # What is there is left alone.
    mine = write(tmp_path / "env/mine", "work of weeks")
    done = run(written(tmp_path), tmp_path / "env")
    assert done.returncode == 1
    assert "exists already" in done.stdout
    assert mine.read_text() == "work of weeks"
    assert not (tmp_path / "env.unfinished").exists()


# ---------------------------------------------------------------- what a lock requires

PACKAGES = {
    "app-1.0": ("Lib[conf]<3,>=2", 'old ; python_version < "3.6"', 'no ; extra == "no"'),
    "lib-2.1": ('deep>=1 ; extra == "conf"', 'never ; extra == "never"', "site-too"),
    "deep-1.5": (),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, requires in PACKAGES.items():
        install(tmp_path, name, *requires)
    (tmp_path / "site_too-7.egg-info").mkdir()
    return tmp_path


def install(folder: Path, name: str, *requires: str) -> None:
    package, _, version = name.rpartition("-")
    lines = [f"Name: {package}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    text = "\n".join(lines) + "\n\nRequires-Dist: not-this\n"
    write(folder / f"{name}.dist-info" / "METADATA", text)


def judged(
    folder: Path, packages: str = "app===1.0\nlib===2.1\ndeep===1.5\n"
) -> tuple[int, list[str]]:
    listed = folder / "packages.txt"
    listed.write_text(packages)
    done = ended(
        sys.executable,
        STEP_PROGRAMS / "check_requirements.py",
        listed,
        env={"PYTHONPATH": str(folder)},
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_an_environment_that_has_everything(folder: Path) -> None:
    assert judged(folder) == (0, ["3 packages have all that they require"])
    # As a lock and a package may spell one version.
    assert judged(folder, "app===1\nlib===2.1\ndeep===1.5.0\n")[0] == 0
    # What cannot be parsed is passed over, and what is not of the lock is not judged.
    install(folder, "old-1.0", "pytz (!!)")
    install(folder, "bad-1", "nothing")
    assert judged(folder)[0] == 0
    assert judged(folder, "app===1.0\nold===1.0\n")[0] == 0


@pytest.mark.parametrize(
    ("gone", "made", "printed"),
    [
        ("deep-1.5", "", "lib 2.1 requires deep>=1, which is not installed"),
        ("deep-1.5", "deep-0.9", "lib 2.1 requires deep>=1, and 0.9 is installed"),
        ("app-1.0", "", "app 1.0 is not installed"),
        ("app-1.0", "app-1.1", "app 1.1 is installed, not 1.0"),
    ],
)
def test_what_is_missing(folder: Path, gone: str, made: str, printed: str) -> None:
    shutil.rmtree(folder / f"{gone}.dist-info")
    if made:
        install(folder, made)
    assert judged(folder, "app===1.0\nlib===2.1\n") == (1, [printed])


# ---------------------------------------------------------------- archives that would fill the memory or the disk


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytearray:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return bytearray(stream.getvalue())


def stating(size: int) -> bytearray:
    """An archive whose list states this size for its only file."""
    data = zipped({"a": b"x"})
    struct.pack_into("<I", data, data.index(b"PK\1\2") + 24, size)
    return data


def listing(size: int) -> bytearray:
    """An archive that states this size for its list."""
    data = zipped({"a": b"x"})
    struct.pack_into("<I", data, data.index(b"PK\5\6") + 12, size)
    return data


def with_locator(comment: bytes = b"") -> bytearray:
    """An archive whose end points to a longer list, which zipfile prefers."""
    data = zipped({"a": b"x"})
    at = data.index(b"PK\5\6")
    data[at:at] = b"PK\6\7" + bytes(16)
    data[-2:] = struct.pack("<H", len(comment))
    return data + comment


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stating((1 << 30) + 1), "unpacks to more than 1073741824 bytes or 50000 files"),
        (lambda: listing((8 << 20) + 1), "its list of files is longer than 8388608 bytes"),
        (with_locator, "its list of files is longer than"),
        (lambda: with_locator(b"comment"), "its list of files is longer than"),
        (lambda: zipped({"a": b"x"}, zipfile.ZIP_LZMA), "neither stored nor deflated"),
        (lambda: zipped({"a": b"x"}, zipfile.ZIP_BZIP2), "neither stored nor deflated"),
        (lambda: zipped({str(n): b"" for n in range(50_001)}), "or 50000 files"),
    ],
    ids=["bytes", "list", "zip64", "zip64 and a comment", "lzma", "bzip2", "files"],
)
def test_large_archives_are_refused(make: Callable[[], bytearray], message: str) -> None:
    opened = archives.opened_zip(io.BytesIO(bytes(make())))
    with pytest.raises(archives.ArchiveError, match=message), opened:
        pytest.fail("it was opened")


def test_what_an_archive_holds_beyond_its_stated_size_is_not_read() -> None:
    data = zipped({"a": bytes(50 << 20)})
    struct.pack_into("<I", data, data.index(b"PK\1\2") + 24, 1 << 20)
    opened = archives.opened_zip(io.BytesIO(bytes(data)))
    with opened as archive, pytest.raises(zipfile.BadZipFile):
        assert sum(map(len, archives.blocks(archive, "a"))) <= 1 << 20


def test_files_are_read_in_blocks() -> None:
    content = bytes(range(256)) * 20_000
    with archives.opened_zip(io.BytesIO(bytes(zipped({"a": content, "b": b""})))) as archive:
        parts = [*archives.blocks(archive, "a")]
        assert b"".join(parts) == content and max(map(len, parts)) <= archives.BLOCK
        assert [*archives.blocks(archive, "b")] == []
        with pytest.raises(archives.ArchiveError, match="a is larger than"):
            archives.content(archive, "a")


def test_a_wheel_that_unpacks_to_much_takes_little_memory(tmp_path: Path) -> None:
    """The limit of memory is the size of its extension."""
    wheel, limit = compiled_wheel(tmp_path, EXTENSION + bytes(60 << 20)), 60 << 20
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tmp_path / "x", "w", 8) as small:
        for name in archive.namelist():
            small.writestr(name, archive.read(name), compresslevel=1)
    store(own(find_places()), TORCH_INPUTS, (tmp_path / "x").replace(wheel))
    folder = str(tmp_path / "index")
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, ({limit},) * 2)\n"
        f"from hvdenv.cli.main import main; sys.exit(main(['wheels', 'publish', {folder!r}]))"
    )
    done = ended(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


def test_the_inspection_of_a_wheel_refuses_them(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(stating((1 << 30) + 1))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = ended(sys.executable, STEP_PROGRAMS / "inspect_wheel.py", wheel, "torch")
    assert done.returncode == 1
    assert f"{wheel}: it unpacks to more than" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert max(before, 200_000) >= resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def test_publish_names_a_wheel_that_is_too_large(tmp_path: Path, hvdenv: Hvdenv) -> None:
    wheel = compiled_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    struct.pack_into("<I", data, data.index(b"PK\1\2") + 24, (1 << 30) + 1)
    wheel.write_bytes(data)
    store(own(find_places()), TORCH_INPUTS, wheel)
    said = hvdenv("wheels", "publish", str(tmp_path / "index"), code=5).err
    assert "it unpacks to more than 1073741824 bytes" in said
    assert "no wheel was published" in said

"""Archives that would fill the memory or the disk are refused before they are read."""

from __future__ import annotations

import io
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.base.places import find_places
from hvdenv.building.wheelcache import own, store
from hvdenv.standalone.steps import archives
from tests.support.commands import Hvdenv
from tests.support.wheels import EXTENSION, TORCH_INPUTS, compiled_wheel


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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["normalise_wheel.py", "inspect_wheel.py"])
def test_programs_of_steps_refuse_them(program: str, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(stating((1 << 30) + 1))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(
        [sys.executable, str(STEP_PROGRAMS / program), str(wheel), "torch"],
        capture_output=True,
        text=True,
        check=False,
    )
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

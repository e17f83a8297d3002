from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdenv.errors import RecipeError, StepError
from hvdenv.places import Places
from hvdenv.runner import Runner
from hvdenv.wheels import wheelarchive
from hvdenv.wheels.cache_entry import Cache, key
from hvdenv.wheels.wheelarchive import export, import_archive
from hvdenv.wheels.wheelcache import names, own, store, take
from tests.wheels import NAME, wheel_in

RUNNER = Runner({})
INPUTS: list[dict[str, Any]] = [{"source": "a"}, {"source": "b"}]
KEYS = sorted(map(key, INPUTS))


def made(folder: Path) -> Cache:
    """A cache with two entries."""
    cache = own(Places(folder / "one"))
    wheel = wheel_in(folder)
    for inputs in INPUTS:
        store(cache, inputs, wheel, RUNNER)
    return cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return made(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Cache:
    """An empty one."""
    return own(Places(tmp_path / "two"))


@pytest.fixture
def file(cache: Cache, tmp_path: Path) -> Path:
    path = tmp_path / "wheels.tar"
    export(dict.fromkeys(KEYS, cache), path, RUNNER)
    return path


def test_what_was_exported_is_imported(cache: Cache, other: Cache, file: Path) -> None:
    for _ in range(2):
        assert import_archive(other, file, RUNNER) == KEYS
    assert names(other) == KEYS
    for inputs in INPUTS:
        target = file.with_name("taken.whl")
        assert take([other], inputs, target, RUNNER).entry == other.entry(key(inputs))
        assert target.read_bytes() == b"wheel" * 1000
    assert not list(other.folder.glob(".*"))


def test_the_same_entries_give_the_same_bytes(cache: Cache, other: Cache, file: Path) -> None:
    again = file.with_name("again.tar")
    import_archive(other, file, RUNNER)
    export({KEYS[1]: other, KEYS[0]: cache}, again, RUNNER)
    assert again.read_bytes() == file.read_bytes()


def test_a_damaged_entry_is_not_exported(cache: Cache, tmp_path: Path) -> None:
    wheel = cache.entry(KEYS[1]) / NAME
    wheel.write_bytes(wheel.read_bytes()[:-1])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecipeError, match="is damaged"):
        export(dict.fromkeys(KEYS, cache), tmp_path / "wheels.tar", RUNNER)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_cannot_be_written(cache: Cache) -> None:
    with pytest.raises(StepError, match="No such file"):
        export(dict.fromkeys(KEYS, cache), Path("/none/wheels.tar"), RUNNER)


Members = dict[str, tuple[tarfile.TarInfo, bytes]]


def members(file: Path) -> Members:
    with tarfile.open(file) as tar:
        return {
            each.name: (each, stream.read()) for each in tar if (stream := tar.extractfile(each))
        }


def put(found: Members, name: str, content: bytes = b"x", **values: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in values.items():
        setattr(info, attribute, value)
    found[f"{name} {len(found)}"] = (info, content)


def changed(found: Members, name: str, content: bytes) -> None:
    found[name][0].size = len(content)
    found[name] = (found[name][0], content)


def flip(found: Members) -> None:
    name = f"{KEYS[1]}/{NAME}"
    content = found[name][1]
    changed(found, name, content[:-1] + bytes([content[-1] ^ 1]))


def rename(found: Members) -> None:
    """The wheel of other inputs."""
    for name in list(found):
        if name.startswith(KEYS[0]):
            info, content = found.pop(name)
            info.name = name.replace(KEYS[0], "0" * 64)
            info.pax_headers = {}
            found[info.name] = (info, content)


def other_file(found: Members) -> None:
    name = f"{KEYS[0]}/entry.json"
    record = {**json.loads(found[name][1]), "file": "../../../x.whl"}
    changed(found, name, json.dumps(record).encode())


HOSTILE: dict[str, tuple[Callable[[Members], object], str]] = {
    "parent": (lambda found: put(found, f"{KEYS[0]}/../../../evil.whl"), "not a file of an entry"),
    "absolute": (lambda found: put(found, "/tmp/evil.whl"), "not a file of an entry"),
    "top": (lambda found: put(found, "evil.whl"), "not a file of an entry"),
    "folder": (
        lambda found: put(found, KEYS[0], b"", type=tarfile.DIRTYPE),
        "not a file of an entry",
    ),
    "script": (lambda found: put(found, f"{KEYS[0]}/run.sh"), "not a file of an entry"),
    "newline": (lambda found: put(found, f"{KEYS[0]}/entry.json\n"), "not a file of an entry"),
    "symlink": (
        lambda found: put(
            found, f"{KEYS[0]}/x.whl", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"
        ),
        "not a regular file",
    ),
    "hardlink": (
        lambda found: put(
            found, f"{KEYS[0]}/x.whl", b"", type=tarfile.LNKTYPE, linkname=f"{KEYS[0]}/{NAME}"
        ),
        "not a regular file",
    ),
    "pipe": (
        lambda found: put(found, f"{KEYS[0]}/x.whl", b"", type=tarfile.FIFOTYPE),
        "not a regular",
    ),
    "device": (
        lambda found: put(found, f"{KEYS[0]}/x.whl", b"", type=tarfile.CHRTYPE),
        "not a regular",
    ),
    "twice": (lambda found: put(found, f"{KEYS[0]}/entry.json"), "is in it twice"),
    "two wheels": (lambda found: put(found, f"{KEYS[0]}/x.whl"), "more than one wheel"),
    "flipped": (flip, "is damaged: its hash is"),
    "renamed": (rename, "does not describe this wheel"),
    "path in the record": (other_file, "expected the name of a wheel"),
    "no wheel": (lambda found: found.pop(f"{KEYS[1]}/{NAME}"), "has no wheel"),
    "no record": (lambda found: found.pop(f"{KEYS[1]}/entry.json"), "has no record"),
    "empty": (lambda found: found.clear(), "there is no entry in it"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_leaves_nothing(name: str, other: Cache, file: Path) -> None:
    change, reason = HOSTILE[name]
    found = members(file)
    change(found)
    with tarfile.open(file, "w") as tar:
        for info, content in found.values():
            tar.addfile(info, io.BytesIO(content))
    before = sorted(file.parent.glob("*"))
    with pytest.raises(RecipeError, match=reason) as caught:
        import_archive(other, file, RUNNER)
    assert caught.value.where == str(file)
    assert list(other.folder.iterdir()) == []
    assert set(file.parent.glob("*")) - set(before) <= {other.folder.parents[1]}


@pytest.mark.parametrize(("name", "size"), [("entry.json", 2 << 20), (NAME, 2 << 30)])
def test_a_file_that_is_too_large_is_not_even_unpacked(
    other: Cache, tmp_path: Path, name: str, size: int
) -> None:
    """The header alone says so."""
    info = tarfile.TarInfo(f"{KEYS[0]}/{name}")
    info.size = size
    (tmp_path / "x.tar").write_bytes(info.tobuf())
    with pytest.raises(RecipeError, match="is too large"):
        import_archive(other, tmp_path / "x.tar", RUNNER)


def holes(file: Path, found: list[tuple[str, bytes, int]], kind: bytes = tarfile.REGTYPE) -> None:
    """A tar file whose members go on with zeros that take no room on the disk."""
    with open(file, "wb") as stream:
        for name, content, size in found:
            info = tarfile.TarInfo(name)
            info.size, info.type = size, kind
            stream.write(info.tobuf(tarfile.GNU_FORMAT))
            end = stream.tell() + size + -size % 512
            stream.write(content)
            stream.truncate(end)
            stream.seek(end)
        stream.write(bytes(1024))


def test_nothing_is_written_of_a_wheel_that_its_record_does_not_describe(
    other: Cache, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six holes of half a gigabyte were unpacked before anybody looked at them."""
    written: list[str] = []
    monkeypatch.setattr(wheelarchive, "write_file", lambda *words: written.append(words[1]))
    record = members(file)[f"{KEYS[0]}/entry.json"][1]
    named = [(f"{KEYS[0]}/entry.json", record, len(record)), (f"{KEYS[0]}/{NAME}", b"", 64 << 20)]
    holes(file, named)
    with pytest.raises(RecipeError, match="is damaged: its hash is"):
        import_archive(other, file, RUNNER)
    assert written == []


def test_all_of_an_archive_is_bounded(other: Cache, tmp_path: Path) -> None:
    """The headers alone say so: 17 files of 1 GiB are not even read."""
    holes(tmp_path / "x.tar", [(f"{n:064x}/{NAME}", b"", 1023 << 20) for n in range(17)])
    with pytest.raises(RecipeError, match="holds more than 10,000 files or 17,179,869,184 bytes"):
        import_archive(other, tmp_path / "x.tar", RUNNER)
    holes(tmp_path / "x.tar", [(f"{n:064x}/{NAME}", b"", 0) for n in range(10_001)])
    with pytest.raises(RecipeError, match="holds more than"):
        import_archive(other, tmp_path / "x.tar", RUNNER)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_is_not_read_into_memory_whatever_its_size(
    other: Cache, tmp_path: Path, kind: bytes
) -> None:
    holes(tmp_path / "x.tar", [("x", b"", 1 << 30)], kind)
    with pytest.raises(RecipeError, match="a header has 1,073,741,824 bytes; the limit is"):
        import_archive(other, tmp_path / "x.tar", RUNNER)
    holes(tmp_path / "x.tar", [("x", b"x", 512)] * 2000, tarfile.GNUTYPE_LONGNAME)
    with pytest.raises(RecipeError, match="nothing is imported"):
        import_archive(other, tmp_path / "x.tar", RUNNER)


@pytest.mark.parametrize("length", [0, 100, 700, 4000, 9000])
def test_half_an_archive_is_none(other: Cache, file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(RecipeError, match="nothing is imported"):
        import_archive(other, file, RUNNER)
    assert list(other.folder.iterdir()) == []


def test_no_archive(other: Cache, tmp_path: Path) -> None:
    with pytest.raises(StepError, match="none.tar: cannot import: No such file"):
        import_archive(other, tmp_path / "none.tar", RUNNER)
    (tmp_path / "x.tar").write_text("this is text")
    with pytest.raises(RecipeError, match="nothing is imported"):
        import_archive(other, tmp_path / "x.tar", RUNNER)

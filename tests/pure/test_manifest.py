from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.base.errors import StepError
from hvdenv.environments.installed import damaged_files
from hvdenv.environments.manifest import NAME, compare, read, write

ODD = st.binary(min_size=1, max_size=20).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    files = {
        "lib/pkg/__pycache__/a.cpython-311.pyc": b"pyc",
        "lib/pkg/a.py": b"a = 1\n",
        "lib/pkg/b.so": bytes(3 << 20),
        "logs/step.log": b"log",
        "empty": b"",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "lib64").symlink_to("lib")
    return root


def test_what_a_manifest_has_of_each_file(tree: Path) -> None:
    written = write(tree, ["logs"])
    content = (tree / NAME).read_bytes()
    assert written.digest == hashlib.sha256(content).hexdigest()
    document = json.loads(content)
    assert document["exclude"] == ["logs", NAME]
    assert [*document["entries"]] == sorted(written.entries) and len(written.entries) == 5
    assert document["entries"]["empty"] == [hashlib.sha256(b"").hexdigest(), 0]
    assert document["entries"]["lib64"] == "lib"
    # The same tree has the same digest.
    (tree / "logs/more.log").touch()
    os.utime(tree / "empty", (0, 0))
    assert write(tree, ["logs"]) == written


@settings(deadline=None, max_examples=40)
@given(files=st.dictionaries(ODD, st.binary(max_size=50), max_size=5), target=ODD)
def test_odd_names_come_back(
    tmp_path_factory: pytest.TempPathFactory, files: dict[bytes, bytes], target: bytes
) -> None:
    root = tmp_path_factory.mktemp("odd")
    (root / "sub").mkdir()
    for name, content in files.items():
        with open(os.path.join(os.fsencode(root), b"sub", name), "wb") as stream:
            stream.write(content)
    os.symlink(target, os.fsencode(root / "link"))

    written = write(root)
    manifest = read(root / NAME, written.digest)

    expected = {f"sub/{os.fsdecode(name)}": len(content) for name, content in files.items()}
    assert {path: entry.size for path, entry in manifest.files.items()} == expected
    assert manifest.entries["link"] == os.fsdecode(target)
    assert compare(root, manifest, lambda path: True) == []
    shutil.rmtree(root)


@pytest.mark.parametrize(
    ("path", "content", "by_size", "by_hash"),
    [
        ("lib/pkg/__pycache__/c.cpython-311.pyc", "new", [], []),
        ("lib/pkg/__pycache__/a.cpython-311.pyc", "written anew", [], []),
        ("logs/new.log", "", [], []),
        ("folder/", "", [], []),
        ("empty", "", [], []),
        ("empty", "x", ["changed empty"], ["changed empty"]),
        ("lib/pkg/a.py", "a = 2\n", [], ["changed lib/pkg/a.py"]),
        ("lib/pkg/a.py", None, ["missing lib/pkg/a.py"], ["missing lib/pkg/a.py"]),
        ("lib64", "-> /lib", ["changed lib64"], ["changed lib64"]),
        ("lib64", "lib", ["changed lib64"], ["changed lib64"]),
        ("lib/pkg/c.py", "", ["extra lib/pkg/c.py"], ["extra lib/pkg/c.py"]),
    ],
)
def test_what_changed_is_told(
    tree: Path, path: str, content: str | None, by_size: list[str], by_hash: list[str]
) -> None:
    """Paths with a slash at the end become directories, contents with an arrow links."""
    manifest = read(tree / NAME, write(tree, ["logs"]).digest)
    changed = tree / path
    if content is None or changed.is_symlink():
        changed.unlink()
    if path.endswith("/"):
        changed.mkdir()
    elif content and content.startswith("-> "):
        changed.symlink_to(content.removeprefix("-> "))
    elif content is not None:
        changed.write_text(content)
    never, always = (lambda path: False), (lambda path: True)
    for closely, expected in ((never, by_size), (always, by_hash)):
        found = compare(tree, manifest, closely)
        assert [f"{one.kind} {one.path}" for one in found] == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "hvdenv.manifest/1\nabc\t1\tfile",
        "[" * 100_000,
        '{"format": 3, "exclude": [], "entries": {}}',
        '{"format": 2, "exclude": []}',
        '{"format": 2, "exclude": [], "entries": []}',
        '{"format": 2, "exclude": [], "entries": {"file": ["abc"]}}',
        '{"format": 2, "exclude": [], "entries": {"file": ["abc", "x"]}}',
        '{"format": 2, "exclude": [], "entries": {"file": null}}',
    ],
)
def test_a_damaged_manifest_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / NAME
    path.write_text(content)
    for said in ("it is malformed", f"there is no {NAME}"):
        with pytest.raises(StepError, match=f"damaged manifest: {said}") as caught:
            read(path)
        assert caught.value.where == str(path)
        assert "build it again" in caught.value.remedy
        path.unlink(missing_ok=True)


def test_a_manifest_other_than_the_recorded_one_is_an_error(tree: Path) -> None:
    written = write(tree)
    manifest = read(tree / NAME)
    (tree / NAME).write_bytes((tree / NAME).read_bytes().replace(b"a.py", b"b.py"))
    with pytest.raises(StepError, match=f"recorded was {written.digest}"):
        read(tree / NAME, written.digest)
    # Nor may the manifest or the tree be gone.
    shutil.rmtree(tree)
    for work in (lambda: write(tree), lambda: compare(tree, manifest)):
        with pytest.raises(StepError, match="No such file"):
            work()


def install(site: Path, name: str, files: dict[str, bytes]) -> None:
    """A distribution as pip lays it out."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\n")
    rows = [f"{info.name}/RECORD,,", f"{name}/__pycache__/never.cpython-311.pyc,,"]
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f'"{path}",sha256={digest},{len(content)}')
    (info / "RECORD").write_text("\n".join(rows) + "\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "venv/lib/site-packages"
    install(
        site,
        "one",
        {"one/a.py": b"a", "one/b,c.py": b"bc", "../../bin/one": b"#!", "shared.py": b"1"},
    )
    install(site, "two", {"two.py": b"two", "shared.py": b"22"})
    return site


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("two.py", b"two", ""),  # and files of two packages pass
        ("two.py", None, "two-1.0: two.py is missing"),
        ("two.py", b"\0\0\0", "two-1.0: two.py has other content than its RECORD states"),
        ("../../bin/one", b"#", ""),  # conda rewrites programs
        ("two-1.0.dist-info/RECORD", None, "two-1.0: two-1.0.dist-info/RECORD is missing"),
        ("one-1.0.dist-info/METADATA", None, "one-1.0: one-1.0.dist-info/METADATA is missing"),
        ("two-1.0.dist-info/RECORD", b"two.py\n", "two-1.0: two-1.0.dist-info/RECORD is damaged"),
        ("two-1.0.dist-info/RECORD", b"", "two-1.0: two-1.0.dist-info/RECORD is empty"),
    ],
)
def test_half_installed_packages_are_named(
    site: Path, tmp_path: Path, path: str, content: bytes | None, problem: str
) -> None:
    # As packages of conda make links for libraries with several names.
    (site / "shared.py").rename(site / "real.py")
    (site / "shared.py").symlink_to("real.py")
    if content is None:
        (site / path).unlink()
    else:
        (site / path).write_bytes(content)
    hashes = {str(tmp_path / path): each.sha256 for path, each in write(tmp_path).files.items()}
    assert str(site / "real.py") in hashes
    found = damaged_files(site, hashes)
    # Where one RECORD is gone, files of both packages are those of the other.
    assert [each[: len(problem)] for each in found[:1]] == ([problem] if problem else [])

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.environments.installed import damaged_files
from hvdenv.environments.manifest import NAME, compare, read, write
from hvdenv.errors import StepError

ODD = st.binary(min_size=1, max_size=20).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "lib/pkg/__pycache__").mkdir(parents=True)
    (root / "logs").mkdir()
    (root / "lib/pkg/a.py").write_text("a = 1\n")
    (root / "lib/pkg/b.so").write_bytes(bytes(3 << 20))
    (root / "lib/pkg/__pycache__/a.cpython-311.pyc").write_bytes(b"pyc")
    (root / "logs/step.log").write_text("log")
    (root / "lib64").symlink_to("lib")
    (root / "empty").touch()
    return root


def test_one_line_for_each_file_in_order(tree: Path) -> None:
    written = write(tree, ["logs"])
    content = (tree / NAME).read_bytes()
    assert written.digest == hashlib.sha256(content).hexdigest()
    assert (len(written.entries), written.bytes) == (5, 3 * 2**20 + 9)
    header, *lines = content.decode().splitlines()
    assert header == "hvdenv.manifest/1"
    assert lines[:2] == ["exclude\tlogs", f"exclude\t{NAME}"]
    paths = [line.split("\t")[2] for line in lines[2:]]
    assert paths == sorted(paths)
    assert f"{hashlib.sha256(b'').hexdigest()}\t0\tempty" in lines
    assert "link\tlib\tlib64" in lines


def test_the_same_tree_has_the_same_digest(tree: Path) -> None:
    one = write(tree, ["logs"])
    (tree / "logs/more.log").touch()
    os.utime(tree / "empty", (0, 0))
    assert write(tree, ["logs"]) == one


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
    assert {path: entry.size for path, entry in manifest.entries.items()} == {**expected, "link": 0}
    assert manifest.entries["link"].target == os.fsdecode(target)
    assert compare(root, manifest, lambda path: True) == []
    shutil.rmtree(root)


def relink(root: Path) -> None:
    (root / "lib64").unlink()
    (root / "lib64").symlink_to("/lib")


def unlink_and_copy(root: Path) -> None:
    (root / "lib64").unlink()
    (root / "lib64").write_text("lib")


def harmless(root: Path) -> None:
    (root / "lib/pkg/__pycache__/c.cpython-311.pyc").write_text("new")
    (root / "lib/pkg/__pycache__/a.cpython-311.pyc").write_text("written anew")
    (root / "logs/new.log").touch()
    os.utime(root / "empty", (0, 0))
    (root / "folder").mkdir()


@pytest.mark.parametrize(
    ("change", "by_size", "by_hash"),
    [
        (harmless, [], []),
        (lambda root: (root / "empty").write_text("x"), ["changed empty"], ["changed empty"]),
        (lambda root: (root / "lib/pkg/a.py").write_text("a = 2\n"), [], ["changed lib/pkg/a.py"]),
        (
            lambda root: shutil.rmtree(root / "lib/pkg"),
            ["missing lib/pkg/a.py", "missing lib/pkg/b.so"],
            None,
        ),
        (relink, ["changed lib64"], ["changed lib64"]),
        (unlink_and_copy, ["changed lib64"], ["changed lib64"]),
        (lambda root: (root / "lib/pkg/c.py").touch(), ["extra lib/pkg/c.py"], None),
    ],
)
@pytest.mark.parametrize("closely", [False, True])
def test_what_changed_is_told(
    tree: Path,
    change: Callable[[Path], object],
    by_size: list[str],
    by_hash: list[str] | None,
    closely: bool,
) -> None:
    manifest = read(tree / NAME, write(tree, ["logs"]).digest)
    change(tree)
    found = compare(tree, manifest, lambda path: closely)
    expected = by_hash if closely and by_hash is not None else by_size
    assert [f"{one.kind} {one.path}" for one in found] == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "hvdenv.manifest/1",
        "hvdenv.manifest/2\n",
        "hvdenv.manifest/1\nabc\t1\tfile",
        "hvdenv.manifest/1\nabc\t1\n",
        "hvdenv.manifest/1\nabc\tx\tfile\n",
        "hvdenv.manifest/1\nabc\n",
        "hvdenv.manifest/1\nabc\t1\tbad\\xescape\n",
    ],
)
def test_a_damaged_manifest_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / NAME
    path.write_text(content)
    with pytest.raises(StepError, match="damaged manifest") as caught:
        read(path)
    assert caught.value.where == str(path)
    assert "build it again" in caught.value.remedy


def test_a_manifest_other_than_the_recorded_one_is_an_error(tree: Path) -> None:
    digest = write(tree).digest
    (tree / NAME).write_bytes((tree / NAME).read_bytes().replace(b"a.py", b"b.py"))
    with pytest.raises(StepError, match=f"recorded was {digest}"):
        read(tree / NAME, digest)
    with pytest.raises(StepError, match="No such file"):
        read(tree / "no.txt")


def test_a_tree_that_is_not_there_is_an_error(tree: Path) -> None:
    manifest = read(tree / NAME, write(tree).digest)
    shutil.rmtree(tree)
    with pytest.raises(StepError, match="No such file"):
        compare(tree, manifest)
    with pytest.raises(StepError, match="No such file"):
        write(tree)


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


def test_whole_packages_pass_shared_files_too(site: Path) -> None:
    assert damaged_files(site, {}) == []
    (site / "one-1.0.dist-info/RECORD").write_text("../../lib/site-packages/one/a.py,,2\n")
    (problem,) = damaged_files(site, {})
    assert problem == "one-1.0: ../../lib/site-packages/one/a.py has 1 bytes instead of 2"


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("two.py", None, "two-1.0: two.py is missing"),
        ("../../bin/one", "#", "one-1.0: ../../bin/one has 1 bytes instead of 2"),
        ("two-1.0.dist-info/RECORD", None, "two-1.0: two-1.0.dist-info/RECORD is missing"),
        ("one-1.0.dist-info/METADATA", None, "one-1.0: one-1.0.dist-info/METADATA is missing"),
        ("two-1.0.dist-info/RECORD", "two.py\n", "two-1.0: two-1.0.dist-info/RECORD is damaged"),
        ("two-1.0.dist-info/RECORD", "", "two-1.0: two-1.0.dist-info/RECORD is empty"),
    ],
)
def test_half_installed_packages_are_named(
    site: Path, path: str, content: str | None, problem: str
) -> None:
    if content is None:
        (site / path).unlink()
    else:
        (site / path).write_text(content)
    assert damaged_files(site, {})[0].startswith(problem)


def test_other_content_of_the_same_size_is_named(site: Path) -> None:
    (site / "two.py").write_bytes(b"\0\0\0")
    hashes = {str(site / "two.py"): hashlib.sha256(b"\0\0\0").hexdigest()}
    assert damaged_files(site, hashes) == [
        "two-1.0: two.py has other content than its RECORD states"
    ]
    (site / "two.py").write_bytes(b"two")
    hashes = {str(site / "two.py"): hashlib.sha256(b"two").hexdigest()}
    assert damaged_files(site, hashes) == []


def test_a_link_in_the_place_of_a_file_is_compared_by_size(site: Path, tmp_path: Path) -> None:
    """As packages of conda make them for libraries with several names."""
    (site / "two.py").rename(site / "real.py")
    (site / "two.py").symlink_to("real.py")
    hashes = write(tmp_path).hashes(tmp_path)
    assert str(site / "real.py") in hashes
    assert damaged_files(site, hashes) == []

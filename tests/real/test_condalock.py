"""conda environments and locks of them: what was solved is fetched, verified and installed again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvdenv.locks import condalock
from tests.support.channel import PLACEHOLDER, Channel, File
from tests.support.index import Site, served
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "hvdenv/standalone/steps/conda_env.py"
SPECS = ["tool", "greeter >=1"]


@pytest.fixture(scope="session")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    """With what an installation changes: prefixes, entry points, links, noarch packages."""
    found = Channel(tmp_path_factory.mktemp("locked") / "channel")
    found.add(
        "python",
        "3.11.7",
        {
            "bin/python3.11": File(
                b"\x7fELF\0" + PLACEHOLDER.encode() + b"/lib\0" * 2, True, PLACEHOLDER
            ),
            "bin/python": File(link="python3.11"),
        },
    )
    found.add(
        "tool",
        "1.2",
        {"site-packages/tool.py": File(b"def main():\n    pass\n")},
        depends=["python >=3.8", "python <4", "__glibc >=2.17"],
        noarch="python",
        entry_points=["tool = tool:main"],
    )
    greet = f"#!/bin/sh\nexec {PLACEHOLDER}/bin/python\n".encode()
    found.add(
        "greeter",
        "1.0",
        {"bin/greet": File(greet, True, PLACEHOLDER), "share/hello": File(b"hi")},
        depends=["data"],
        packed=".tar.bz2",
    )
    found.add("data", "0.1", {"share/data": File(b"0123456789" * 1000)}, noarch="generic")
    found.add("large", "1.0", {f"share/large/{number}": File(b"x") for number in range(2000)})
    script = File(b"#!/bin/sh\ntouch $PREFIX/ran\n", executable=True)
    found.add("scripted", "1.0", {"bin/.scripted-post-link.sh": script}, noarch="generic")
    for subdir in ("linux-ppc64le", "linux-aarch64"):
        found.add("greeter", "0.9", {"share/hello": File(b"hi")}, subdir=subdir)
    return found.index()


def spec_of(url: str, **changed: Any) -> dict[str, Any]:
    return {"channels": [url], "specs": SPECS, "platform": "linux-64", "virtual": {}, **changed}


def start(
    spec: dict[str, Any], *words: str | Path, path: Path, **variables: str
) -> subprocess.Popen[str]:
    path.write_text(json.dumps(spec))
    return subprocess.Popen(
        [sys.executable, PROGRAM, path, *words],
        env={"PATH": "/usr/bin:/bin", "HOME": f"{path.parent}-home", **variables},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(spec: dict[str, Any], *words: str | Path, path: Path, **variables: str) -> tuple[int, str]:
    with start(spec, *words, path=path, **variables) as process:
        printed, _ = process.communicate(timeout=600)
    return process.returncode, printed


def good(spec: dict[str, Any], *words: str | Path, path: Path, **variables: str) -> str:
    status, printed = run(spec, *words, path=path, **variables)
    assert status == 0, printed
    return printed


def solved(spec: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    good(spec, "--solve-only", folder / "records.json", path=folder / "request.json")
    found: list[dict[str, Any]] = json.loads((folder / "records.json").read_text())
    return found


def explicit(url: str, folder: Path) -> dict[str, Any]:
    """What asks for exactly the packages that are chosen now."""
    return {"platform": "linux-64", "explicit": solved(spec_of(url), folder)}


@pytest.fixture(scope="session")
def lock(channel: Channel, tmp_path_factory: pytest.TempPathFactory) -> condalock.CondaLock:
    """As read from a file."""
    spec = spec_of(channel.url)
    records = solved(spec, tmp_path_factory.mktemp("solved"))
    return condalock.parse(condalock.render(records, spec))


def tree(folder: Path) -> dict[str, object]:
    """Everything in a directory, with what conda-meta says as data."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.parent.name == "conda-meta" and path.suffix == ".json":
            record = json.loads(path.read_text())
            # conda-lock holds one dependency of each name, sorted.
            depends = sorted({each.split()[0] for each in record.pop("depends")})
            found[name] = (mode, depends, record)
        elif path.is_file():
            found[name] = (mode, path.read_bytes())
    return found


def test_the_lock_alone_gives_the_same_environment(
    channel: Channel, lock: condalock.CondaLock, tmp_path: Path
) -> None:
    trees = []
    for spec in (spec_of(channel.url), condalock.explicit(lock)):
        good(spec, tmp_path / "env", path=tmp_path / "spec.json")
        trees.append(tree(tmp_path / "env"))
        shutil.rmtree(tmp_path / "env")
    assert trees[0] == trees[1]
    assert {
        "lib/python3.11/site-packages/tool.py",
        "bin/tool",
        "bin/python",
        "bin/greet",
        "share/data",
    } <= set(trees[0])
    assert PLACEHOLDER not in str(trees[0]["bin/greet"])
    assert ".unfinished" not in str(trees[0])
    assert str(tmp_path / "env") in str(trees[0]["bin/tool"])
    assert os.listdir(tmp_path) == ["spec.json"]


def test_from_a_folder_with_the_channel_gone(
    channel: Channel, lock: condalock.CondaLock, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "offline", tmp_path / "moved"
    spec = condalock.explicit(lock)
    good(spec, "--fetch-only", folder, path=tmp_path / "spec.json")
    fetched = {each.name for each in folder.glob("packages/*/*")}
    assert fetched == {each.file_name for each in lock.packages}
    channel.folder.rename(moved)
    try:
        good(spec, tmp_path / "env", path=tmp_path / "spec.json", RATTLER_CACHE_DIR=str(folder))
    finally:
        moved.rename(channel.folder)
    for package in lock.packages:
        record = json.loads(
            (tmp_path / f"env/conda-meta/{package.name}-{package.version}-0.json").read_text()
        )
        assert record["url"] == package.url
        assert record["sha256"] == package.sha256


def test_scripts_of_packages_are_not_run(channel: Channel, tmp_path: Path) -> None:
    spec = spec_of(channel.url, specs=["scripted"])
    printed = good(spec, tmp_path / "env", path=tmp_path / "spec.json")
    assert "bin/.scripted-post-link.sh" in printed
    assert not (tmp_path / "env/ran").exists()


# On a busy machine a program may get to its end before its test gets to end it.
TRIES = 10


def test_killed_in_the_middle_and_run_again(channel: Channel, tmp_path: Path) -> None:
    target, report = tmp_path / "env", tmp_path / "report.json"
    spec, words = spec_of(channel.url, specs=["large"]), (target, "--report", report)
    path = tmp_path / "spec.json"
    for _ in range(TRIES):
        with start(spec, *words, path=path) as process:
            wait_until((target / "share").exists, 300, pause=0)
            process.kill()
            printed, _ = process.communicate(timeout=300)
        if process.returncode:
            break
        shutil.rmtree(target)
        report.unlink()
    assert process.returncode == -9, printed
    assert not report.exists()
    assert "exists already" in run(spec, *words, path=path)[1]
    shutil.rmtree(target)
    good(spec, *words, path=path)
    assert len(list(target.glob("share/large/*"))) == 2000
    assert len(json.loads(report.read_text())) == 1
    assert not Path(f"{target}.unfinished").exists()


def test_the_interpreter_is_not_let_to_its_end(channel: Channel, tmp_path: Path) -> None:
    """It dies there in one of four runs that installed something."""
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'the end')")
    mine = {"PYTHONPATH": str(tmp_path)}
    spec = spec_of(channel.url, specs=["greeter"])
    printed = good(spec, tmp_path / "env", path=tmp_path / "spec.json", **mine)
    assert "the end" not in printed
    assert "the end" in subprocess.check_output([sys.executable, "-c", ""], env=mine, text=True)


# What bad input gets


def refused(spec: dict[str, Any], folder: Path, **variables: str) -> str:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    status, printed = run(spec, work / "env", path=work / "spec.json", **variables)
    assert status == 1, printed
    assert "Traceback" not in printed
    assert not (work / "env").exists()
    return printed


def change(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("text", ["", "greeter ===", "gr\u00fcss $(id)"])
def test_what_is_no_package(channel: Channel, tmp_path: Path, text: str) -> None:
    assert f"conda_env: {text}: " in refused(spec_of(channel.url, specs=[text]), tmp_path)


def test_a_channel_that_is_not_there(tmp_path: Path) -> None:
    for url in (f"{tmp_path.as_uri()}/gone", "http://127.0.0.1:9/site"):
        printed = refused(spec_of(url), tmp_path)
        assert "a channel cannot be read" in printed
        assert url in printed


@pytest.fixture
def copied(channel: Channel, tmp_path: Path) -> Channel:
    """The channel, to be damaged."""
    return Channel(shutil.copytree(channel.folder, tmp_path / "copied"))


def test_a_damaged_file_of_an_offline_folder_is_not_used(
    lock: condalock.CondaLock, tmp_path: Path
) -> None:
    folder = tmp_path / "offline"
    spec = condalock.explicit(lock)
    good(spec, "--fetch-only", folder, path=tmp_path / "spec.json")
    (data,) = folder.glob("packages/*/data-0.1-0.conda")
    change(data, flip)
    build = partial(
        run, spec, tmp_path / "env", path=tmp_path / "spec.json", RATTLER_CACHE_DIR=str(folder)
    )
    status, printed = build(CONDA_OFFLINE="1")
    assert status == 1
    assert f"without a network, {folder} must have these packages:\n  data-0.1-0.conda" in printed
    status, printed = build()
    assert status == 0
    assert f"damaged, and not used: {data}" in printed
    assert (tmp_path / "env/share/data").read_bytes() == b"0123456789" * 1000


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"sha256": ""}, "has no sha256 and cannot be verified"),
        ({"version": "1.1"}, "is not named like data 1.1"),
        ({"url": "https://example.org/noarch/data-0.1.conda"}, "is not named like data 0.1"),
        ({"url": "https://example.org/noarch/..%2Fdata-0.1-0.conda"}, "is not named like data 0.1"),
    ],
)
def test_a_package_of_a_lock_that_is_none(
    lock: condalock.CondaLock, tmp_path: Path, changed: dict[str, Any], printed: str
) -> None:
    spec: dict[str, Any] = condalock.explicit(lock)
    spec["explicit"][0].update(changed)
    assert printed in refused(spec, tmp_path)


def test_a_file_of_a_channel_that_is_not_the_package(copied: Channel, tmp_path: Path) -> None:
    """The file changed, or its hash is right, but it is another package or none."""
    spec = explicit(copied.url, tmp_path)
    path, other = (copied.folder / f"noarch/data-0.{number}-0.conda" for number in (1, 2))
    good = path.read_bytes()
    change(path, flip)
    assert "is not the package that was asked for: its sha256 is" in refused(spec, tmp_path)
    other.write_bytes(good)
    spec["explicit"][0].update(version="0.2", url=other.as_uri())
    assert "data-0.2-0.conda is data 0.1, not data 0.2" in refused(spec, tmp_path)
    other.write_bytes(b"PK\3\4 and so on")
    spec["explicit"][0]["sha256"] = hashlib.sha256(other.read_bytes()).hexdigest()
    assert "data-0.2-0.conda is no conda package: " in refused(spec, tmp_path)


def test_a_cache_that_cannot_be_written(server: Site, tmp_path: Path) -> None:
    spec = explicit(server.url, tmp_path)
    (tmp_path / "cache").write_text("")
    printed = refused(spec, tmp_path, RATTLER_CACHE_DIR=f"{tmp_path}/cache")
    assert f"conda_env: {tmp_path}/cache/packages" in printed


# From a server


@pytest.fixture
def server(channel: Channel) -> Iterator[Site]:
    with served(channel.folder) as site:
        yield site


def test_what_a_server_sends_is_kept_and_compared_each_time(server: Site, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = explicit(server.url, tmp_path)
    path, variables = tmp_path / "spec.json", {"RATTLER_CACHE_DIR": str(cache)}
    printed = good(spec, tmp_path / "env", path=path, **variables)
    assert "downloaded data-0.1-0.conda" in printed

    (kept,) = cache.glob("packages/*/data-0.1-0.conda")
    change(kept, flip)
    server.asked = []
    shutil.rmtree(tmp_path / "env")
    printed = good(spec, tmp_path / "env", path=path, **variables)
    assert f"damaged, and not used: {kept}" in printed
    assert server.asked == ["/noarch/data-0.1-0.conda"]
    assert (tmp_path / "env/share/data").read_bytes() == b"0123456789" * 1000


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        (b"", "data-0.1-0.conda cannot be downloaded"),
        (b"", "Its channel may have withdrawn it"),
        (b"\n<html>Welcome to our proxy</html>", "It is an HTML page"),
        (b"PK something else", "is not the package that was asked for"),
    ],
)
def test_a_server_that_sends_something_else(
    server: Site, tmp_path: Path, page: bytes, printed: str
) -> None:
    spec = explicit(server.url, tmp_path)
    server.instead = {"data-0.1-0.conda": page}
    assert printed in refused(spec, tmp_path, RATTLER_CACHE_DIR=f"{tmp_path}/cache")
    assert not list(tmp_path.glob("cache/packages/*/data*"))


def test_an_index_that_answers_with_html(server: Site, tmp_path: Path) -> None:
    server.everywhere = b"<html><title>Log in first</title></html>"
    printed = refused(spec_of(server.url), tmp_path)
    assert "a channel cannot be read" in printed
    assert f"{server.url} answers with a page that is no package index: Log in first" in printed


# Again, with other packages


def test_only_what_is_named_moves_and_what_it_needs(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "channel")

    def add(name: str, version: str, *depends: str) -> None:
        channel.add(name, version, {f"share/{name}": File(version.encode())}, depends=depends)

    def versions(spec: dict[str, Any]) -> dict[str, str]:
        return {each["name"]: each["version"] for each in solved(spec, tmp_path)}

    for name in ("base", "base2", "other"):
        add(name, "1.0")
    add("app", "1.0", "base >=1", "base2 >=1")
    channel.index()
    spec = {**spec_of(channel.url), "specs": ["app", "other"]}
    before = condalock.parse(condalock.render(solved(spec, tmp_path), spec))
    for name in ("base", "base2", "other"):
        add(name, "1.1")
    add("app", "2.0", "base >=1.1", "base2 >=1")
    channel.index()

    newest = {"app": "2.0", "base": "1.1", "base2": "1.1", "other": "1.1"}
    assert versions(spec) == newest
    as_before = dict.fromkeys(newest, "1.0")
    assert versions({**spec, **condalock.preferring(before, None)}) == as_before
    assert versions({**spec, **condalock.preferring(before, "other")}) == {
        **as_before,
        "other": "1.1",
    }
    assert versions({**spec, **condalock.preferring(before, "app")}) == {
        **as_before,
        "app": "2.0",
        "base": "1.1",
    }
    for path in channel.folder.glob("linux-64/base2-1.0-0.conda"):
        path.unlink()
    channel.index()
    spec |= condalock.preferring(before, None)
    assert versions(spec) == {**as_before, "base2": "1.1"}
    printed = good(spec, "--solve-only", tmp_path / "records.json", path=tmp_path / "request.json")
    assert "no longer in the channels: base2 1.0 0" in printed


@pytest.mark.parametrize("platform", ["linux-ppc64le", "linux-aarch64"])
def test_a_lock_for_another_platform(channel: Channel, tmp_path: Path, platform: str) -> None:
    spec = spec_of(channel.url, platform=platform, specs=["greeter"])
    lock = condalock.parse(condalock.render(solved(spec, tmp_path), spec))
    assert [each.subdir for each in lock.packages] == [platform]

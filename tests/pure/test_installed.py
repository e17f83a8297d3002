from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import HvdenvError
from hvdenv.base.places import find_places
from hvdenv.environments import installed
from hvdenv.environments.generations import Environment, at, claim
from hvdenv.locks.packages import Package
from tests.support.commands import Hvdenv
from tests.support.environments import ONE, TWO, build, build_active, local
from tests.support.files import write

SITE = "lib/python3.11/site-packages"


def install(base: Path, *names: str, **files: dict[str, Any]) -> None:
    """Put directories of metadata where Python looks, and JSON files into them."""
    for name in names:
        folder = base / SITE / name
        folder.mkdir(parents=True)
        for file, content in files.items():
            (folder / f"{file}.json").write_text(json.dumps(content))


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    base = tmp_path / "venv"
    install(base, "Jinja2-3.1.6.dist-info", "typing_extensions-4.16.0.dist-info", "jinja2")
    install(base, "old-1.0-py3.11.egg-info", "torch-2.13.0+cpu.dist-info")
    origin = {"url": "file:///home/ann/h.whl", "archive_info": {"hashes": {"sha256": "e" * 64}}}
    install(base, "horovod-0.28.1.dist-info", direct_url=origin)
    git = {"url": "https://github.com/a/b", "vcs_info": {"vcs": "git", "commit_id": "f00"}}
    install(base, "b-1.dist-info", direct_url=git)
    (base / "lib64").symlink_to("lib")
    (base / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.7\n")
    (base / "bin").mkdir()
    (base / "bin/python").write_text("")
    return base


def test_a_virtual_environment(venv: Path) -> None:
    found = installed.installed_packages(venv)
    assert sorted(found.packages) == [
        Package("pypi", "b", "1", url="git+https://github.com/a/b@f00"),
        Package("pypi", "horovod", "0.28.1", sha256="e" * 64),
        Package("pypi", "jinja2", "3.1.6"),
        Package("pypi", "old", "1.0"),
        Package("pypi", "torch", "2.13.0+cpu"),
        Package("pypi", "typing-extensions", "4.16.0"),
    ]
    assert found.distributions["torch"] == "2.13.0+cpu"
    assert found.python == "3.11.7"
    contents = installed.contents_of_folder(venv)
    assert contents.horovod
    assert contents.horovod.wheel == "e" * 64
    assert len(contents.packages) == 5


def test_a_conda_prefix(tmp_path: Path) -> None:
    """What conda installed is conda's, whatever name Python has for it."""
    torch, six = "torch-1.12.0-py3.11.egg-info", "six-1.16.0.dist-info"
    install(tmp_path, torch, six, "mine-1.dist-info")
    records = (
        {"name": "pytorch", "version": "1.12.0", "files": [f"{SITE}/{torch}/PKG-INFO"]},
        {"name": "six", "version": "1.16.0", "files": [f"{SITE}/{six}/RECORD"]},
        {"name": "python", "version": "3.11.9", "build": "h1", "files": []},
    )
    for record in records:
        write(tmp_path / f"conda-meta/{record['name']}.json", json.dumps(record))
    write(tmp_path / "conda-meta/history", "")
    write(tmp_path / "conda-meta/broken.json", "{")
    found = installed.installed_packages(tmp_path)
    names = [f"{each.kind} {each.name}" for each in sorted(found.packages)]
    assert names == ["conda python", "conda pytorch", "conda six", "pypi mine"]
    assert found.distributions == {"torch": "1.12.0", "six": "1.16.0", "mine": "1"}
    assert found.python == "3.11.9"


@pytest.fixture
def environment(venv: Path) -> Environment:
    """`local`, of which the second of two generations is active."""
    environment = local()
    fields = {"recipe": "local", "variants": [], "environment": str(venv)}
    build(environment, ONE, **fields, wheel={"bytes": 1})
    build_active(environment, TWO, **fields, hvdenv="1")
    return environment


def test_how_an_environment_is_named(environment: Environment, tmp_path: Path) -> None:
    prefix, folder = environment.prefix, str(environment.generation(ONE))
    strange = tmp_path / "with@sign"
    strange.symlink_to(tmp_path / "venv")
    names = {
        "local": f"local@{TWO}",
        "local@1": f"local@{ONE}",
        f"local@{TWO}": f"local@{TWO}",
        str(prefix): f"{prefix}@{TWO}",
        f"{prefix}@11": f"{prefix}@{ONE}",
        folder: folder,
        str(strange): str(strange),
    }
    for name, label in names.items():
        assert installed.named_contents(name, find_places()).label == label
    # A beginning of two generations is no name, unless it is all of one.
    build(environment, "1" * 11 + "2")
    with pytest.raises(HvdenvError, match="2 complete generations begin with 11"):
        installed.named_contents("local@11", find_places())
    assert installed.named_contents(f"local@{ONE}", find_places()).label == f"local@{ONE}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("none", "no environments are named none"),
        ("local@3", "no complete generations begin with 3"),
        ("local@", "no active generation"),
        ("VENV@1", "hvdenv did not build it"),
        ("/", "cannot be a prefix"),
        ("./nowhere", "this is not a Python environment"),
        (f"{Path(__file__).parent}", "it has no bin/python or conda-meta"),
    ],
)
def test_what_is_no_environment(text: str, said: str, environment: Environment, venv: Path) -> None:
    if text == "local@":
        environment.prefix.unlink()
    with pytest.raises(HvdenvError) as caught:
        installed.named_contents(text.replace("VENV", str(venv)), find_places())
    assert said in str(caught.value)


def test_diff(environment: Environment, venv: Path, hvdenv: Hvdenv) -> None:
    said = hvdenv("diff", "local@1", "local", "--exit-code")
    assert said.out == f"local@{ONE} -> local@{TWO}: the same\n"
    install(environment.generation(ONE) / "own", "six-1.dist-info")
    path = environment.record(ONE)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "environment": "own"}))
    out = hvdenv("diff", "local@1", "local").out
    assert out.startswith(f"local@{ONE} -> local@{TWO}: they differ\n")
    assert "\n  removed  six  1\n" in out
    said = hvdenv("diff", "local@1", str(venv), "--exit-code", "--json", code=1)
    document = json.loads(said.out)
    assert (document["a"], document["b"], document["same"]) == (f"local@{ONE}", str(venv), False)
    assert "not by hvdenv" in hvdenv("diff", "local", str(venv)).err


def test_what_is_not_built_yet_is_to_be_built(hvdenv: Hvdenv) -> None:
    for words in (("diff", "local", "local"), ("envs", "rollback", "local")):
        assert "hvdenv build RECIPE" in hvdenv(*words, code=2).err
    assert "what to do: hvdenv build local\n" in hvdenv("export", "local", code=2).err
    find_places().envs.mkdir(parents=True)
    claim(at(find_places().envs / "local"))
    assert "none of its builds is complete" in hvdenv("envs", "rollback", "local", code=2).err
    assert "what to do: hvdenv build local\n" in hvdenv("export", "local", code=2).err


def test_export(environment: Environment, tmp_path: Path, hvdenv: Hvdenv) -> None:
    assert '"purl": "pkg:pypi/torch@2.13.0%2Bcpu"' in hvdenv("export", "local").out
    file = tmp_path / "bill.cdx.json"
    words = ["export", "--prefix", f"{environment.prefix}@1"]
    said = hvdenv(*words, "--to", str(file))
    assert (said.out, said.err) == ("", f"wrote {file}\n")
    assert "pkg:pypi/torch@2.13.0%2Bcpu" in file.read_text()
    (tmp_path / "link").symlink_to(file)
    hvdenv(*words, "--to", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and file.is_file()
    os.mkfifo(tmp_path / "device")
    refused = hvdenv(*words, "--to", str(tmp_path / "device"), code=5)
    assert "device: this is not a regular file" in refused.err
    assert (tmp_path / "device").is_fifo()
    assert "which environment?" in hvdenv("export", code=2).err
    assert "hvdenv build" in hvdenv("export", "local", "--variant", "torch", code=2).err

from __future__ import annotations

import json
from pathlib import Path

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


def install(base: Path, *names: str) -> None:
    """Put directories of metadata where Python looks."""
    for name in names:
        (base / SITE / name).mkdir(parents=True)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    base = tmp_path / "venv"
    install(base, "Jinja2-3.1.6.dist-info", "typing_extensions-4.16.0.dist-info", "jinja2")
    install(base, "old-1.0-py3.11.egg-info", "torch-2.13.0+cpu.dist-info")
    (base / "lib64").symlink_to("lib")
    return base


def test_a_virtual_environment(venv: Path) -> None:
    found = installed.installed_packages(venv)
    assert sorted(found.packages) == [
        Package("pypi", "jinja2", "3.1.6"),
        Package("pypi", "old", "1.0"),
        Package("pypi", "torch", "2.13.0+cpu"),
        Package("pypi", "typing-extensions", "4.16.0"),
    ]
    assert found.distributions["torch"] == "2.13.0+cpu"


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


@pytest.fixture
def environment(venv: Path) -> Environment:
    """`local`, of which the second of two generations is active."""
    environment = local()
    fields = {"recipe": "local", "variants": [], "environment": str(venv)}
    build(environment, ONE, **fields, wheel={"bytes": 1})
    build_active(environment, TWO, **fields, hvdenv="1")
    return environment


def test_how_an_environment_is_named(environment: Environment) -> None:
    prefix = environment.prefix
    names = {
        "local": f"local@{TWO}",
        "local@1": f"local@{ONE}",
        f"local@{TWO}": f"local@{TWO}",
        str(prefix): f"{prefix}@{TWO}",
        f"{prefix}@11": f"{prefix}@{ONE}",
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
        ("/", "cannot be a prefix"),
        (f"{Path(__file__).parent}@1", "no environment that hvdenv built"),
    ],
)
def test_what_is_no_environment(text: str, said: str, environment: Environment) -> None:
    if text == "local@":
        environment.prefix.unlink()
    with pytest.raises(HvdenvError) as caught:
        installed.named_contents(text, find_places())
    assert said in str(caught.value)


def test_diff(environment: Environment, hvdenv: Hvdenv) -> None:
    said = hvdenv("diff", "local@1", "local", "--exit-code")
    assert said.out == f"local@{ONE} -> local@{TWO}: the same\n"
    install(environment.generation(ONE) / "own", "six-1.dist-info")
    path = environment.record(ONE)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "environment": "own"}))
    out = hvdenv("diff", "local@1", "local").out
    assert out.startswith(f"local@{ONE} -> local@{TWO}: they differ\n")
    assert "\n  removed  six  1\n" in out
    said = hvdenv("diff", "local@1", "local", "--exit-code", "--json", code=1)
    document = json.loads(said.out)
    assert (document["a"], document["b"]) == (f"local@{ONE}", f"local@{TWO}")
    assert not document["same"]


def test_what_is_not_built_yet_is_to_be_built(hvdenv: Hvdenv) -> None:
    for words in (("diff", "local", "local"), ("envs", "rollback", "local")):
        assert "hvdenv build RECIPE" in hvdenv(*words, code=2).err
    assert "what to do: hvdenv build local\n" in hvdenv("export", "local", code=2).err
    find_places().envs.mkdir(parents=True)
    claim(at(find_places().envs / "local"))
    assert "none of its builds is complete" in hvdenv("envs", "rollback", "local", code=2).err
    assert "what to do: hvdenv build local\n" in hvdenv("export", "local", code=2).err


def test_export(environment: Environment, hvdenv: Hvdenv) -> None:
    assert '"purl": "pkg:pypi/torch@2.13.0%2Bcpu"' in hvdenv("export", "local").out
    earlier = hvdenv("export", "--prefix", f"{environment.prefix}@1").out
    assert "pkg:pypi/torch@2.13.0%2Bcpu" in earlier
    assert "which environment?" in hvdenv("export", code=2).err
    assert "hvdenv build" in hvdenv("export", "local", "--variant", "torch", code=2).err

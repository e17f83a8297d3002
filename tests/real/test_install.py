"""Packages that are added to environments, from a directory of small wheels."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hvdenv.environments import generations
from tests.real.conftest import Cli
from tests.support.index import package

RECIPE = """
format = 1
name = "small"
summary = "An environment with nothing in it"
status = "tested"

[python]
version = "==3.11.*"

[horovod]
provider = "present"
version = "0.28.1"
frameworks = ["torch"]
controllers = ["gloo"]

[frameworks.torch]
provider = "present"
version = "2.1.0"
"""
WHEELS = (
    ("added", "1.0", ()),
    ("added", "2.0", ()),
    ("helper", "1.0", ()),
    ("other", "1.0", ("helper",)),
    ("newer", "1.0", ("helper>=2",)),
    ("mover", "1.0", ("pip>=999",)),
    ("user", "1.0", ("pip",)),
    ("pip", "999.0", ()),
    ("unfit", "1.0", ("torch<2",)),
    ("torch", "1.0", ()),
)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    for name, version, requires in WHEELS:
        package(folder, name, version, requires=requires)
    return folder


def offline(wheels: Path) -> dict[str, str]:
    """pip has this directory and nothing else."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_EXTRA_INDEX_URL": ""}


def versions(prefix: Path) -> dict[str, str]:
    """Of Python packages that lie in an environment."""
    found = (prefix / "venv").glob("lib/python3.*/site-packages/*.dist-info")
    return dict(path.name.removesuffix(".dist-info").split("-")[:2] for path in found)


@pytest.mark.needs("python3-dev")
def test_packages_come_and_go_and_nothing_moves(wheels: Path, tmp_path: Path) -> None:
    recipe, prefix = tmp_path / "small.toml", tmp_path / "env"
    recipe.write_text(RECIPE)
    cli = Cli(tmp_path / "home", offline(wheels))
    words = (str(recipe), "--prefix", str(prefix))
    target = generations.at(prefix)

    assert "build it first" in cli("install", *words, "added", code=2).stderr
    cli("build", *words)
    plain, base = versions(prefix), target.active()

    of_uv, aside = prefix / "venv/.lock", tmp_path / "aside"
    if of_uv.exists():  # from the build
        of_uv.rename(aside)
    said = cli("install", *words, "added<2", "--dry-run").stdout
    assert (said, target.active()) == ("would add: added 1.0\n", base)
    assert not of_uv.exists()
    if aside.exists():
        aside.rename(of_uv)
    # The installed pip is in no directory of wheels: nothing needs to be added for it.
    assert cli("install", *words, "user", "--dry-run").stdout == "would add: user 1.0\n"

    told = cli("install", *words, "added<2", "other", "--json").json
    assert told["added"] == {"added": "1.0", "helper": "1.0", "other": "1.0"}
    first = target.active()
    assert first != base
    both = {**plain, **told["added"]}
    assert versions(prefix) == both
    assert "nothing to do" in cli("install", *words, "added").stdout
    assert "added: added<2, other" in cli("envs").stdout

    # What was added before stays in its version, also what it brought, unless it is named.
    package(wheels, "helper", "2.0")
    refused = cli("install", *words, "newer", code=3).stderr
    assert "newer depend on helper>=2" in refused and "helper==1.0" in refused
    assert "name packages that you added before too" in refused
    cli("install", *words, "newer", "helper")
    both = {**both, "newer": "1.0", "helper": "2.0"}
    assert versions(prefix) == both

    refused = cli("install", *words, "mover", code=3).stderr
    assert "mover depend on pip>=999 and pip==" in refused
    assert "pip>=999 would change it" in cli("install", *words, "pip>=999", code=3).stderr
    assert "no-such" in cli("install", *words, "no-such", code=5).stderr
    assert versions(prefix) == both

    said = cli("build", *words).stdout
    assert "without what was added: added<2, helper, newer, other; " in said
    assert (versions(prefix), target.active()) == (plain, base)
    cli("envs", "rollback", str(prefix), "--generation", first)
    assert versions(prefix) == {**plain, **told["added"]}


def test_what_would_move_a_framework_is_said(local_prefix: Path, wheels: Path, home: Path) -> None:
    cli = Cli(home, offline(wheels))
    before = os.readlink(local_prefix)
    said = cli("install", "local", "unfit", code=3).stderr
    assert "unfit depend on torch<2 and torch==" in said
    assert json.loads(cli("install", "local", "added", "--dry-run", "--json").stdout) == {
        "added": {"added": "2.0"},
        "changed": False,
    }
    assert os.readlink(local_prefix) == before

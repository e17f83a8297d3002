"""Indexes that have changed since a lock was made, or answer with something else."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.base.command import Command
from hvdenv.base.errors import StepError
from hvdenv.base.runner import Runner
from hvdenv.building.run_step import perform
from hvdenv.plans.step import Progress, Step, TextFile
from tests.support.index import Site, package, served

LOGIN = b"<!DOCTYPE html>\n<title>Log in\n first</title><a href=/help>help</a>"


class Index(NamedTuple):
    """An index with one package in two versions."""

    folder: Path
    wheel: Path
    site: Site

    def page(self, *entries: str) -> None:
        text = "".join(f"<a {each}</a>" for each in entries)
        (self.folder / "simple/tiny/index.html").write_text(f"<!DOCTYPE html>{text}")

    def locked(self, mark: str = "") -> str:
        return f'href="{self.wheel.name}"{mark}>{self.wheel.name}'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    wheel = package(tmp_path / "simple/tiny", "tiny")
    package(tmp_path / "simple/tiny", "tiny", "2.0")
    with served(tmp_path) as site:
        found = Index(tmp_path, wheel, site)
        found.page(found.locked(), 'href="tiny-2.0-py3-none-any.whl">tiny-2.0-py3-none-any.whl')
        yield found


def get(index: Index) -> None:
    """Get the files of the lock as a build does."""
    sha256 = (
        hashlib.sha256(index.wheel.read_bytes()).hexdigest() if index.wheel.exists() else "0" * 64
    )
    listed = TextFile(index.folder / "wheels.txt", f"tiny===1.0 --hash=sha256:{sha256}\n")
    install = (
        sys.executable,
        str(STEP_PROGRAMS / "uv_pip.py"),
        "--",
        "install",
        "--no-deps",
        "--require-hashes",
        "--no-cache",
        "--reinstall",
        "--target",
        str(index.folder / "to"),
        "--requirement",
        str(listed.path),
    )
    environ = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{index.site.url}/simple"}
    environ |= {"UV_HTTP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    command = Command(install, tuple(environ.items()))
    perform([Step("files", "", (command,), (listed,))], Runner(), Progress())
    assert (index.folder / "to" / "tiny.py").exists()


def test_what_was_withdrawn_is_taken(index: Index) -> None:
    index.page(index.locked(' data-yanked="it eats files"'))
    get(index)


def test_what_is_not_there_any_more(index: Index) -> None:
    index.page('href="tiny-2.0-py3-none-any.whl">tiny-2.0-py3-none-any.whl')
    with pytest.raises(StepError, match="does not have, or no longer has, exactly tiny==1.0") as a:
        get(index)
    assert a.value.exit_code == 5
    assert "hvdenv lock RECIPE --update" in a.value.remedy
    index.page(index.locked())
    index.wheel.unlink()
    with pytest.raises(StepError, match="the server does not have what is asked for"):
        get(index)


def test_a_login_page_in_the_place_of_an_index(index: Index, tmp_path: Path) -> None:
    index.site.everywhere = LOGIN
    said = "a package index answers with a page that is not a package index"
    with pytest.raises(StepError, match=said) as caught:
        get(index)
    assert caught.value.exit_code == 5
    # An index without the package is no such thing, and a network that is not there neither.
    said = "does not have, or no longer has, exactly tiny==1.0"
    index.site.everywhere = b"<!DOCTYPE html><title>Links for tiny</title>"
    with pytest.raises(StepError, match=said):
        get(index)
    index.site.everywhere = b""
    with pytest.raises(StepError, match="no index that was asked has any tiny"):
        get(index)

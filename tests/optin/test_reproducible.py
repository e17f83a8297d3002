"""The same wheel, byte for byte, from two builds that share nothing but their inputs.

Not part of `make test`, since it compiles Horovod twice:
`python -m pytest tests/optin/test_reproducible.py`.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from tests.real.conftest import Cli

# Both frameworks: also the library that they share, and gloo's files that are compiled together.
VARIANTS = {"torch": ("--variant", "torch"), "both": ()}


def compile_in(home: Path, words: tuple[str, ...], umask: int, cores: set[int]) -> Path:
    """The wheel of a build in this directory, which has the umask and the cores."""
    before = os.umask(umask), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
        Cli(home)("build", "local", *words)
    finally:
        os.umask(before[0])
        os.sched_setaffinity(0, before[1])
    (wheel,) = (home / "cache" / "wheels").rglob("*.whl")
    return wheel


@pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)
def test_two_builds_make_the_same_wheel(words: tuple[str, ...], tmp_path: Path) -> None:
    """In another directory, below a link, with another umask and number of cores, and later."""
    cores = os.sched_getaffinity(0)
    assert len(cores) > 1, "a second build with fewer cores needs two"
    (tmp_path / "where" / "it=really+is").mkdir(parents=True)
    (tmp_path / "link").symlink_to("where")
    first = compile_in(tmp_path / "a", words, 0o022, cores)
    second = compile_in(tmp_path / "link" / "it=really+is" / "b", words, 0o077, {min(cores)})
    found = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)]
    print(*found)
    assert found[0] == found[1], difference(first, second)
    assert not named_in(first, tmp_path)


def difference(one: Path, other: Path) -> str:
    """Which files in two wheels are not the same."""
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        members = [{each.filename: each for each in wheel.infolist()} for wheel in (first, second)]
        return "\n".join(
            f"{name}: {members[0].get(name)} {members[1].get(name)}"
            for name in sorted({*members[0], *members[1]})
            if str(members[0].get(name)) != str(members[1].get(name))
            or first.read(name) != second.read(name)
        )


def named_in(wheel: Path, folder: Path) -> list[str]:
    """Files of a wheel that name the directory."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if str(folder).encode() in archive.read(name)]

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
    assert found[0] == found[1], (first, second)
    assert not named_in(first, tmp_path)


def named_in(wheel: Path, folder: Path) -> list[str]:
    """Files of a wheel that name the directory."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if str(folder).encode() in archive.read(name)]

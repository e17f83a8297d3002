"""What builds have fetched is kept, and goes when it was not used for long."""

from __future__ import annotations

import os

import pytest

from hvdenv.places import Places, find_places
from hvdenv.wheels import downloads
from tests.commands import Hvdenv
from tests.standalone import load

DAY = 86400
NAMES = ["conda/packages/aaa", "conda/packages/bbb", "conda/packages/ccc", "uv"]


@pytest.fixture
def places() -> Places:
    """With 1 MB in each place, used on the first four days of January 1970."""
    found = find_places()
    for day, name in enumerate(NAMES):
        folder = found.cache / name
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(1_000_000))
        os.utime(folder, (day * DAY, day * DAY))
    return found


def left(places: Places) -> list[str]:
    return [name for name in NAMES if (places.cache / name / "file").exists()]


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        ((), NAMES),
        (("--max-size", "3MB"), NAMES[1:]),
        (("--max-size", "1MB"), NAMES[3:]),
        (("--max-size", "0"), []),
        (("--older-than", "99999"), NAMES),
        (("--older-than", "1"), []),
    ],
)
def test_prune(places: Places, words: tuple[str, ...], stay: list[str], hvdenv: Hvdenv) -> None:
    hvdenv("wheels", "prune", "--downloads", *words)
    assert left(places) == stay


def test_a_use_is_noted(places: Places, hvdenv: Hvdenv) -> None:
    downloads.touch(places)
    sha256 = load("digest").sha256_of(str(places.cache / "conda/packages/ccc/file"))
    assert load("conda_files").is_intact(
        {"sha256": sha256}, str(places.cache / "conda/packages/ccc/file")
    )
    hvdenv("wheels", "prune", "--downloads", "--older-than", "1")
    assert left(places) == ["conda/packages/ccc", "uv"]

"""conda-lock.yml: written and read by conda-lock's models, and nothing else taken for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdenv.base.errors import RecipeError
from hvdenv.locks import condalock
from hvdenv.locks.condalock import CondaLock
from hvdenv.locks.lockfile import CONDA, Conda, Horovod, Inputs, bind

CHANNEL = "https://conda.example.org/site"
SPEC = {
    "channels": [CHANNEL, "conda-forge"],
    "specs": ["python 3.10.*", "numpy >=1.21,<2"],
    "platform": "linux-64",
    "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
}


def record(name: str, version: str, *depends: str, **changed: object) -> dict[str, object]:
    subdir, build = changed.pop("subdir", "linux-64"), changed.pop("build", "h1_0")
    return {
        "name": name,
        "version": version,
        "build": build,
        "size": 7,
        "constrains": [],
        "url": f"{CHANNEL}/{subdir}/{name}-{version}-{build}.conda",
        "depends": list(depends),
        "sha256": "ab" * 32,
        "md5": "cd" * 16,
        "timestamp": 1_700_000_000_000,
        **changed,
    }


RECORDS = [
    record("python", "3.10.13", "__glibc >=2.17,<3"),
    record("numpy", "1.22.0", "python >=3.10,<3.11.0a0", "python_abi 3.10.* *_cp310", "libblas"),
    record("libblas", "3.9.0"),
    record(
        "python_abi", "3.10", "python 3.10.*", "python>=3.10.2", subdir="noarch", build="2_cp310"
    ),
]


@pytest.fixture(scope="module")
def text() -> str:
    return condalock.render(RECORDS, SPEC)


@pytest.fixture(scope="module")
def lock(text: str) -> CondaLock:
    return condalock.parse(text)


def test_what_a_lock_holds(lock: CondaLock, text: str) -> None:
    assert [each.name for each in lock.packages] == ["libblas", "numpy", "python", "python_abi"]
    numpy = lock.packages[1]
    assert (numpy.file_name, numpy.build) == ("numpy-1.22.0-h1_0.conda", "h1_0")
    assert numpy.subdir == "linux-64"
    assert numpy.depends == ("libblas", "python >=3.10,<3.11.0a0", "python_abi 3.10.* *_cp310")
    # conda-lock has room for one dependency of each name.
    assert lock.packages[3].depends == ("python 3.10.*,>=3.10.2",)
    assert lock.channels == (CHANNEL, "conda-forge")
    assert "timestamp" not in text
    assert "created_at" not in text
    assert condalock.render(RECORDS[::-1], SPEC) == text
    others = (each for each in lock.packages if each.name != "numpy")
    preferred = [{"name": o.name, "version": o.version, "build": o.build} for o in others]
    assert condalock.preferring(lock, "numpy") == {"prefer": preferred}


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.characters(blacklist_categories=["Cs"]))
@example(
    place=2270, character="["
)  # in the host of a URL, where the standard library raises ValueError
def test_a_damaged_file_is_refused_or_read(text: str, place: int, character: str) -> None:
    place %= len(text)
    with suppress(RecipeError):
        condalock.parse(text[:place] + character + text[place + 1 :])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "{", "it is not YAML"),
        (lambda text: text.replace("version: 1\n", "version: 2\n"), "version: Input should be 1"),
        (lambda text: text.replace("ab" * 32, "ab" * 31, 1), "libblas: sha256: expected a"),
        (lambda text: text.replace("manager: conda", "manager: pip", 1), "libblas: expected manager conda"),
        (lambda text: text.replace("1.22.0\n", "2023-13-45\n", 1), "it is not YAML: month must be"),
        (lambda text: "version: 1\nmetadata: {channels: null}\npackage: []", "not in the format that conda-lock"),
        (lambda text: "[" * 900, "nested too deeply"),
        (lambda text: text.replace("- linux-64\n", "- osx-64\n", 1), "expected one of"),
        (lambda text: text.replace("/linux-64/numpy", "/linux-aarch64/numpy"), "is not for linux-64"),
        (lambda text: text.replace("version: 1.22.0", "version: 1.22.1"), "is not numpy 1.22.1"),
        (lambda text: text + text[text.index("- name: libblas") : text.index("- name: numpy")], "libblas is listed twice"),
        (lambda text: text.replace(f"url: {CHANNEL}/", "url: https://me:s3cret@example.org/", 1), "without a token"),
        (lambda text: text.replace(f"url: {CHANNEL}/", "url: https://example.org/t/s3cret/x/", 1), "without a token"),
        (lambda text: text.replace("/linux-64/numpy", "/linux-64/../numpy"), "expected the URL of a conda"),
    ],
)  # fmt: skip
def test_a_lock_that_is_none(text: str, change: Callable[[str], str], said: str) -> None:
    changed = change(text)
    assert changed != text
    with pytest.raises(RecipeError) as caught:
        condalock.parse(changed, where="lockfiles/x/conda-lock.yml")
    assert str(caught.value).startswith("lockfiles/x/conda-lock.yml: ")
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert ("***" in str(caught.value)) == ("s3cret" in changed)


def test_what_no_lock_can_hold() -> None:
    with pytest.raises(RecipeError, match="libblas: md5: expected an md5"):
        condalock.render([record("libblas", "3.9.0", md5="")], SPEC)
    with pytest.raises(RecipeError, match="channels.0.: expected a channel's name"):
        condalock.render([], {**SPEC, "channels": ["https://conda.example.org/t/ab-12/site"]})


def test_what_a_lock_does_not_satisfy(lock: CondaLock) -> None:
    assert condalock.unsatisfied(lock.packages, SPEC["specs"]) == ()
    assert condalock.unsatisfied(lock.packages, ["numpy >=1.23", "scipy", "python ==="]) == (
        "the recipe asks for numpy >=1.23, and the lock has numpy 1.22.0 h1_0",
        "the recipe asks for scipy, which is not in the lock",
        "the recipe asks for python ===: Invalid spec 'python ===': Invalid version '=': invalid operator",
    )
    assert condalock.unsatisfied(lock.packages, ["numpy 1.22.0 h2_*"]) == (
        "the recipe asks for numpy 1.22.0 h2_*, and the lock has numpy 1.22.0 h1_0",
    )


def test_what_packages_of_a_lock_do_not_satisfy_of_each_other(lock: CondaLock) -> None:
    other = lock.packages[3]._replace(url=f"{CHANNEL}/noarch/python_abi-3.10-2_pypy.conda")
    packages = [*lock.packages[1:3], other]
    assert condalock.unsatisfied(packages, []) == (
        "numpy asks for libblas, which is not in the lock",
        "numpy asks for python_abi 3.10.* *_cp310, and the lock has python_abi 3.10 2_pypy",
    )


@pytest.mark.parametrize(
    ("address", "channels", "good"),
    [
        ("https://elsewhere.example.org/site", (), True),
        ("http://mirror.example.org/site", (), False),
        ("http://mirror.example.org/site", ("http://mirror.example.org/site/",), True),
        ("http://mirror.example.org/site-2", ("http://mirror.example.org/site",), False),
        ("file:///apps/channel", ("conda-forge",), False),
        ("file:///apps/channel", ("conda-forge", "file:///apps/channel"), True),
    ],
)
def test_where_conda_packages_of_a_lock_come_from(
    text: str, address: str, channels: tuple[str, ...], good: bool
) -> None:
    inputs = Inputs("x", (), "3.10", "linux-x86_64", Horovod("0.28.1"), conda=Conda((), channels))
    locked = bind(
        Path("here"), inputs, {CONDA: text.replace(f"url: {CHANNEL}/", f"url: {address}/")}
    )
    if good:
        assert condalock.packages(locked).packages
    else:
        with pytest.raises(RecipeError, match="or a channel that the recipe names") as caught:
            condalock.packages(locked)
        assert caught.value.where == "here/conda-lock.yml"

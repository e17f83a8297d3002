"""What an environment is made of, how two differ, formats of other programs, and conda-lock.yml."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdenv.base.errors import RecipeError
from hvdenv.base.schema import decode
from hvdenv.locks import condalock, cyclonedx, lockfile
from hvdenv.locks.condalock import CondaLock
from hvdenv.locks.difference import Difference, compare, render
from hvdenv.locks.lockfile import CONDA, Conda, Inputs, bind
from hvdenv.locks.packages import Contents, Horovod, Installed, Package, from_record, hint
from hvdenv.locks.record import GenerationRecord

CASES = ("local", "cluster")
# Of the machine and the user of the case: none of it is anybody else's business.
PRIVATE = "ann hunter2 /home /scratch /sw/c login1 10.0.0.7 file:// //mirror/".split()


def read(cases: Path, name: str) -> tuple[dict[str, Any], Installed, str]:
    case = json.loads((cases / f"contents/{name}.json").read_text())
    return case["record"], decode(Installed, case["installed"]), case["home"]


def contents(cases: Path, name: str) -> Contents:
    return contents_of(*read(cases, name))


def contents_of(record: dict[str, Any], installed: Installed | None, home: str) -> Contents:
    return from_record(decode(GenerationRecord, record, lenient=True), installed, home)


def test_where_the_modules_bring_the_environment(cases: Path) -> None:
    """Its directory is known only once they are loaded: then the record says all."""
    record, _, home = read(cases, "cluster")
    assert contents(cases, "cluster").distributions["torch"] == "1.12.0"
    found = contents_of(record, None, home)
    kinds = {each.name: each.kind for each in found.packages}
    assert kinds["six"] == "pypi"
    assert kinds["torch"] == kinds["mine"] == "site"
    assert found.horovod and found.horovod.wheel == ""


def test_the_digest_is_of_what_is_there(cases: Path) -> None:
    record, installed, home = read(cases, "local")
    digest = contents_of(record, installed, home).digest
    moved = json.loads(
        json.dumps(record).replace("https://files.pythonhosted.org", "https://m.org")
    )
    moved.update(created="2027-01-01T00:00:00+00:00", hvdenv="9", prefix="/elsewhere")
    assert contents_of(moved, installed, "/root").digest == digest
    record["stack"]["patches"]["any-folder"] = "0" * 64
    assert contents_of(record, installed, home).digest != digest


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://files.pythonhosted.org/a.whl", "https://files.pythonhosted.org/a.whl"),
        ("https://u:p@h.example.org:8443/a.whl", "https://h.example.org:8443/a.whl"),
        ("https://h.org/a.whl?token=abc1", "https://h.org/a.whl?token=***"),
        ("git+https://github.com/a/b@0123", "git+https://github.com/a/b@0123"),
        ("https://c.org/t/tk-12/main/linux-64/a.conda", "https://c.org/main/linux-64/a.conda"),
        ("file:///home/ann/a.whl", ""),
        ("http://localhost:3141/a.whl", ""),
        ("http://10.0.0.7/a.whl", ""),
        ("http://[::1]/a.whl", ""),
        ("http://[broken", ""),
        ("", ""),
    ],
)
def test_urls_that_mean_nothing_elsewhere_are_left_out(url: str, kept: str) -> None:
    assert hint(url) == kept


def problem_of_bill(text: str) -> object:
    """What the JSON Schema of CycloneDX says against a bill of materials."""
    # The import takes two seconds, and every worker imports this module.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


@pytest.mark.parametrize("name", CASES)
def test_export(name: str, cases: Path, golden: Callable[[Path, str], None]) -> None:
    found = cyclonedx.render(contents(cases, name))
    golden(cases / f"contents/{name}.cdx.json", found)
    assert problem_of_bill(found) is None
    # Nothing of the machine is in it.
    record, installed, home = read(cases, name)
    record["stack"]["variables"].pop("CXXFLAGS", None)  # another user's directory, in the recipe
    found = cyclonedx.render(contents_of(record, installed, home))
    text = found.replace("channel", "")  # which contains a user's name
    assert [each for each in PRIVATE if each in text] == []


@pytest.mark.parametrize(
    ("version", "patches", "state"),
    [
        ("0.28.1", {"safe-rendezvous": "1" * 64}, "resolved_with_pedigree"),
        ("0.28.1", {"one": "1" * 64}, "exploitable"),
        ("0.18.2", {}, ""),
    ],
)
def test_a_bill_answers_for_published_vulnerabilities(
    version: str, patches: dict[str, str], state: str
) -> None:
    text = cyclonedx.render(horovod(version=version, patches=patches))
    assert problem_of_bill(text) is None
    found = {
        (each["id"], each["analysis"]["state"], each["affects"][0]["ref"])
        for each in json.loads(text).get("vulnerabilities", ())
    }
    names = ("CVE-2024-10190", "CVE-2026-31234") if state else ()
    assert found == {(name, state, "horovod") for name in names}


BUILT = Contents(
    recipe="local",
    python="3.11.7",
    machine="x86_64",
    packages=(
        Package("conda", "openssl", "1.1.1k", "h0"),
        Package("pypi", "numpy", "1.26.4", sha256="a" * 64),
        Package("pypi", "pip", "23.2.1"),
        Package("pypi", "six", "1.17.0"),
    ),
    horovod=Horovod("0.28.1", "5" * 64, {"one": "1" * 64}, {"HOROVOD_WITH_MPI": "1"}, "e" * 64),
    modules={"gcc/10.2.0": "b" * 64, "cuda/11.8": ""},
    toolchain={"compiler": "g++ (GCC) 10.2.0", "driver": "510.1"},
)


def packages(*changed: Package, without: str = "") -> Contents:
    """BUILT with other packages of the same names."""
    named = {(each.kind, each.name): each for each in (*BUILT.packages, *changed)}
    return BUILT._replace(
        packages=tuple(sorted(each for each in named.values() if each.name != without))
    )


def horovod(**changed: Any) -> Contents:
    assert BUILT.horovod
    return BUILT._replace(horovod=BUILT.horovod._replace(**changed))


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (BUILT, []),
        (BUILT._replace(created="2027", hvdenv="9"), []),
        (packages(Package("pypi", "wrapt", "1.14")), [("packages", "wrapt", "added", "", "1.14")]),
        (packages(without="six"), [("packages", "six", "removed", "1.17.0", "")]),
        (packages(Package("pypi", "six", "1.9.0")), [("packages", "six", "changed", "1.17.0", "1.9.0")]),
        (packages(Package("conda", "openssl", "1.1.1w", "h0")), [("packages", "openssl (conda)", "changed", "1.1.1k h0", "1.1.1w h0")]),
        (packages(Package("conda", "openssl", "1.1.1k", "h1")), [("packages", "openssl (conda)", "changed", "1.1.1k h0", "1.1.1k h1")]),
        (packages(Package("pypi", "numpy", "1.26.4", sha256="c" * 64)),
         [("packages", "numpy", "changed", f"1.26.4 (sha256 {'a' * 64})", f"1.26.4 (sha256 {'c' * 64})")]),
        # Of one of the two nobody knows the file.
        (packages(Package("pypi", "numpy", "1.26.4")), []),
        (packages(Package("pypi", "pip", "23.2.1", sha256="c" * 64)), []),
        (BUILT._replace(python="3.9.1"), [("python", "Python", "changed", "3.11.7", "3.9.1")]),
        (BUILT._replace(machine=""), []),
        (BUILT._replace(variants=("torch",)), [("recipe", "recipe", "changed", "local", "local+torch")]),
        (horovod(version="0.29"), [("horovod", "Horovod", "changed", "0.28.1", "0.29")]),
        (horovod(source="6" * 64), [("horovod", "source archive", "changed", "5" * 64, "6" * 64)]),
        (horovod(wheel="f" * 64), [("wheel", "Horovod's wheel", "changed", "e" * 64, "f" * 64)]),
        (horovod(wheel=""), []),
        (horovod(patches={"one": "2" * 64, "two": "3" * 64}),
         [("patches", "two", "added", "", "3" * 64), ("patches", "one", "changed", "1" * 64, "2" * 64)]),
        (horovod(variables={}), [("flags", "HOROVOD_WITH_MPI", "removed", "1", "")]),
        (horovod(variables={"HOROVOD_WITH_MPI": "0"}), [("flags", "HOROVOD_WITH_MPI", "changed", "1", "0")]),
        (BUILT._replace(modules={"gcc/9.3.0": "", "cuda/11.8": "b" * 64}),
         [("modules", "gcc", "changed", "gcc/10.2.0", "gcc/9.3.0")]),
        (BUILT._replace(modules={"gcc/10.2.0": "c" * 64, "cuda/11.8": ""}),
         [("modules", "gcc", "changed", f"gcc/10.2.0 (sha256 {'b' * 64})", f"gcc/10.2.0 (sha256 {'c' * 64})")]),
        (BUILT._replace(modules={"gcc/10.2.0": "b" * 64, "nccl/2": "", "cuda/11.8": ""}),
         [("modules", "nccl", "added", "", "nccl/2")]),
        (BUILT._replace(toolchain={"compiler": "g++ (GCC) 9.3.0"}),
         [("toolchain", "driver", "removed", "510.1", ""),
          ("toolchain", "compiler", "changed", "g++ (GCC) 10.2.0", "g++ (GCC) 9.3.0")]),
        (BUILT._replace(toolchain={}), []),
    ],
)  # fmt: skip
def test_each_kind_of_change(second: Contents, found: list[tuple[str, ...]]) -> None:
    assert [tuple(each) for each in compare(BUILT, second)] == found
    turned = {"added": "removed", "removed": "added"}
    back = [
        (group, subject, turned.get(kind, kind), after, before)
        for group, subject, kind, before, after in found
    ]
    assert sorted(tuple(each) for each in compare(second, BUILT)) == sorted(back)


def test_it_reads_like_a_change_log() -> None:
    one, two = "f" * 63 + "0", "f" * 63 + "1"
    six, wrapt = Package("pypi", "six", "1.16.0"), Package("pypi", "wrapt", "1")
    second = packages(six, wrapt, without="pip")._replace(
        modules={"gcc/11.3.0": ""}, horovod=horovod(wheel=one).horovod
    )
    found = compare(BUILT, second)
    assert render(found) == (
        "Packages:\n"
        "  added    wrapt  1\n"
        "  removed  pip  23.2.1\n"
        "  changed  six  1.17.0 -> 1.16.0\n"
        "\n"
        "Modules:\n"
        "  removed  cuda  cuda/11.8\n"
        "  changed  gcc  gcc/10.2.0 -> gcc/11.3.0\n"
        "\n"
        "Wheel:\n"
        "  changed  Horovod's wheel  eeeeeeeeeeee -> ffffffffffff\n"
    )
    assert render(()) == ""
    # Hashes that begin alike are shown whole.
    assert f"{one} -> {two}" in render((Difference("wheel", "w", "changed", one, two),))


# ---------------------------------------------------------------- conda-lock.yml

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
    inputs = Inputs(
        "x", (), "3.10", "linux-x86_64", lockfile.Horovod("0.28.1"), conda=Conda((), channels)
    )
    locked = bind(
        Path("here"), inputs, {CONDA: text.replace(f"url: {CHANNEL}/", f"url: {address}/")}
    )
    if good:
        assert condalock.packages(locked).packages
    else:
        with pytest.raises(RecipeError, match="or a channel that the recipe names") as caught:
            condalock.packages(locked)
        assert caught.value.where == "here/conda-lock.yml"

"""What an environment is made of: of a record, of a directory, and in other programs' formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdenv.contents import cyclonedx
from hvdenv.contents.packages import Contents, Installed, from_record, hint
from hvdenv.contents.record import GenerationRecord
from hvdenv.schema import decode

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


def test_of_a_record_of_a_cluster(cases: Path) -> None:
    """What else is in it, the bill of materials lists."""
    found = contents(cases, "cluster")
    assert found.distributions["torch"] == "1.12.0"
    assert found.modules == {"cmake/3.24.0": "", "gcc/10.2.0": "7" * 64, "nccl/2.12.12": ""}


def test_where_the_modules_bring_the_environment(cases: Path) -> None:
    """Its directory is known only once they are loaded: then the record says all."""
    record, _, home = read(cases, "cluster")
    found = contents_of(record, None, home)
    kinds = {each.name: each.kind for each in found.packages}
    assert kinds["six"] == "pypi"
    assert kinds["torch"] == kinds["mine"] == "site"
    assert found.horovod
    assert found.horovod.wheel == ""


def test_records_with_little_in_them() -> None:
    """Formats before this one said less, and a build may fail to observe."""
    assert contents_of({}, None, "") == Contents()
    assert contents_of({}, Installed((), {}), "") == Contents()


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


@pytest.mark.parametrize("name", CASES)
def test_export(name: str, cases: Path, pytestconfig: pytest.Config) -> None:
    """`pytest tests/pure --regenerate` writes the files anew."""
    found = cyclonedx.render(contents(cases, name))
    path = cases / f"contents/{name}.cdx.json"
    if pytestconfig.getoption("--regenerate"):
        path.write_text(found)
    assert found == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_machine_is_in_an_export(name: str, cases: Path) -> None:
    record, installed, home = read(cases, name)
    record["stack"]["variables"].pop("CXXFLAGS", None)  # another user's directory, in the recipe
    found = cyclonedx.render(contents_of(record, installed, home))
    # Words that hold it: "channel", "channels".
    text = found.replace("channel", "")
    assert [each for each in PRIVATE if each in text] == []


def problem_of_bill(text: str) -> object:
    """What the JSON Schema of CycloneDX says against a bill of materials."""
    # The import takes two seconds, and every worker imports this module.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


@pytest.mark.parametrize("name", CASES)
def test_the_bill_of_materials_is_what_its_schema_says(name: str, cases: Path) -> None:
    text = cyclonedx.render(contents(cases, name))
    assert problem_of_bill(text) is None
    assert text == cyclonedx.render(contents(cases, name))


def test_a_bill_of_what_hvdenv_did_not_build(cases: Path) -> None:
    _, installed, _ = read(cases, "local")
    bill = json.loads(cyclonedx.render(contents_of({}, installed, "")))
    assert "timestamp" not in bill["metadata"]
    assert problem_of_bill(json.dumps(bill)) is None

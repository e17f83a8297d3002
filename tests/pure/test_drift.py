"""Each change in a case in which it matters and in one in which it does no harm."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hvdenv.environments.installation import Installation
from hvdenv.reports.report import Finding
from hvdenv.runner import Runner
from hvdenv.schema import Problem, decode, encode
from hvdenv.verification.drift import File, Module, Observation, compare
from hvdenv.verification.inspection import Observed
from hvdenv.verification.installation_checks import check_drift
from hvdenv.verification.setup import Setup
from tests.evidence import evidence
from tests.merge import patched
from tests.standalone import load

CASES = Path(__file__).parents[1] / "cases/drift"
BUILT = json.loads((CASES / "built.json").read_text(encoding="utf-8"))
CHANGES = json.loads((CASES / "cases.json").read_text(encoding="utf-8"))


def read(document: dict[str, Any]) -> Observation:
    return decode(Observation, document, lenient=True)


def case(name: str) -> tuple[Observation, Observation]:
    (found,) = [each for each in CHANGES if each["name"] == name]
    was = patched(BUILT, found.get("was", {}))
    return read(was), read(patched(was, found.get("now", {})))


def judged(was: Observation | None, now: Observation | None, why: str = "") -> list[Finding]:
    setup = Setup(Installation("", "", ()), Runner())
    return list(check_drift(setup, evidence(observed=Observed(was, now, why))))


@pytest.mark.parametrize("wanted", CHANGES, ids=lambda each: each["name"])
def test_each_change_is_judged(wanted: dict[str, Any]) -> None:
    changes = compare(*case(wanted["name"]))
    for kind, matters in (("matters", True), ("harmless", False)):
        found = {change.subject: change for change in changes if change.matters is matters}
        assert found.keys() == wanted.get(kind, {}).keys()
        for subject, told in wanted.get(kind, {}).items():
            assert told in f"{found[subject].what}: {found[subject].why}"
    assert all(bool(change.remedy) is change.matters for change in changes)
    assert len({change.subject for change in changes}) == len(changes)


def test_modules_that_differ_are_named_where_they_may_be_the_cause() -> None:
    was, now = case("mpirun of another MPI")
    (change,) = compare(was, now)
    assert "modules differ" not in change.remedy
    now = now._replace(modules=(*now.modules[:1], Module("OpenMPI/5.0.2")))
    changed = (
        "modules differ: the module openmpi is OpenMPI/5.0.2 now and was OpenMPI/4.1.4-GCC-11.3.0"
    )
    assert changed in compare(was, now)[0].remedy


def test_the_check_fails_for_each_change_that_matters_and_tells_all() -> None:
    was, now = case("another series of the MPI, all of it")
    findings = judged(was, now._replace(driver="550.54.14"))
    assert [(each.status, each.subject) for each in findings] == [
        ("fail", "mpirun"),
        ("fail", "libmpi.so.40"),
    ]
    message = "Horovod was built with Open MPI v4.1.4, and this is Open MPI v5.0.2"
    assert findings[1].message.endswith(message)
    assert "--rebuild" in findings[0].remedy
    assert "built on login1, now on login1\n" in findings[0].evidence
    assert "NVIDIA's kernel driver is 550.54.14 now" in findings[0].evidence


def test_the_check_passes_with_a_note_of_what_does_no_harm() -> None:
    was = read(BUILT)
    (finding,) = judged(was, was)
    assert (finding.status, finding.message) == ("pass", "nothing has changed")
    (finding,) = judged(*case("numpy was upgraded, one package added and one removed"))
    assert finding.status == "pass"
    assert finding.message.count("; ") == 2
    packages = {f"p{number}": "1" for number in range(5)}
    (finding,) = judged(was, was._replace(packages={**was.packages, **packages}))
    assert finding.message.endswith("p2 is 1 now and was missing; 2 more harmless changes")
    assert "p4 is 1 now and was missing" in finding.evidence


def test_there_may_be_nothing_to_compare() -> None:
    (finding,) = judged(None, None, "its build recorded nothing")
    assert (finding.status, finding.message) == ("skip", "its build recorded nothing")


def test_a_record_of_another_hvdenv() -> None:
    assert read({**BUILT, "added later": 1}) == read(BUILT)
    assert read({key: BUILT[key] for key in ("host", "python")}).packages == {}
    with pytest.raises(Problem, match="python"):
        read({**BUILT, "python": "3.10.4"})


def test_nothing_differs_from_itself_also_after_it_was_recorded() -> None:
    for each in CHANGES:
        _, seen = case(each["name"])
        recorded = read(json.loads(json.dumps(encode(seen))))
        assert recorded == seen
        assert compare(recorded, seen) == ()


def test_any_two_can_be_compared() -> None:
    seen = [Observation("n1", File()), *(case(each["name"])[1] for each in CHANGES)]
    for was, now in product(seen, seen):
        changes = compare(was, now)
        matter = [change.matters for change in changes]
        assert matter == sorted(matter, reverse=True)
        assert all(change.what for change in changes)


def test_a_framework_without_its_usual_directories_is_observed(tmp_path: Path) -> None:
    library = tmp_path / "mpi_lib.so"
    library.write_bytes(b"\0libfoo.so\0")
    found = load("observe_env").Environment(str(tmp_path)).linked(str(library), "torch", "/nowhere")
    assert found["libraries"] == {}

"""The findings of all checks, and a table that says no more than they do, in every format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.environments.manifest import Difference
from hvdenv.errors import IncompatibleError, InterruptedRunError, StepError
from hvdenv.reports import junit, page, render
from hvdenv.reports.report import EVERYTHING, About, Finding, Report, Status, proven
from hvdenv.standalone.ranks.events import Operation, RankEvent, RendezvousFacts, Training
from hvdenv.verification.drift import File, Linked, Observation
from hvdenv.verification.evidence import Evidence, known
from hvdenv.verification.inspection import CHECK_BUILD_ROWS, BuildTable, Extension, Observed
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import Pair
from hvdenv.verification.setup import CONTROLLERS, OPERATIONS, Setup, Shell
from hvdenv.verification.verify import _report, judge_evidence, table, with_first_remedy
from tests.evidence import failed, outcome
from tests.pure.test_checks import (
    ALL_ROWS,
    MPI,
    all_three,
    build_table,
    extension,
    rank_run,
    setup,
    text,
    without,
)
from tests.rank_events import exited, run

SECTIONS = ("Frameworks", "Controllers", "Tensor Operations")
NAMES = {
    "Frameworks": dict(zip(CHECK_BUILD_ROWS.values(), CHECK_BUILD_ROWS, strict=True)),
    "Controllers": {name: name for name in CONTROLLERS},
    "Tensor Operations": {name: name for name in OPERATIONS},
}
KINDS = dict(zip(SECTIONS, ("frameworks", "controllers", "operations"), strict=True))


def subsets(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), unique=True, max_size=2).map(tuple)


ABOUTS = st.just(EVERYTHING) | st.builds(
    About, subsets(tuple(CHECK_BUILD_ROWS)), subsets(CONTROLLERS), subsets(OPERATIONS)
)
FINDINGS = st.builds(
    Finding,
    st.sampled_from(("allreduce", "operation", "extension", "drift", "files")),
    st.just("x"),
    st.sampled_from(("pass", "pass", *get_args(Status))),
    st.just("y"),
    about=ABOUTS,
)
# Without these, hardly anything is proven.
PROOFS = [
    Finding("allreduce", "all", "pass", "", about=About(tuple(CHECK_BUILD_ROWS), CONTROLLERS)),
    Finding("operation", "all", "pass", "", about=About((), (), OPERATIONS)),
]


def reported(findings: list[Finding], extensions: Mapping[str, Extension] | None = None) -> Report:
    rows = table(setup(), extensions or all_three(), findings)
    return Report("local", "/env", "n1", "2026", 1.0, tuple(findings), table=tuple(rows))


def proven_rows(report: Report) -> set[tuple[str, str]]:
    return {(row.section, row.name) for row in report.table if row.proven}


@given(st.lists(FINDINGS, max_size=6))
def test_no_failed_finding_stands_beside_a_proven_row_that_it_is_about(
    generated: list[Finding],
) -> None:
    findings = PROOFS + generated
    failed = [each for each in findings if each.status in ("fail", "error")]
    for section, row in proven_rows(reported(findings)):
        name = NAMES[section][row]
        for each in failed:
            assert not each.about.everything
            assert name not in getattr(each.about, KINDS[section]), each


@given(st.lists(FINDINGS, max_size=3))
def test_every_format_says_the_same(generated: list[Finding]) -> None:
    report = reported(PROOFS + generated)
    found = proven_rows(report)
    assert in_text(render.render(report)) == found
    assert in_html(page.render(report)) == found
    assert in_junit(junit.render(report)) == found
    document = json.loads(json.dumps(report.to_json()))
    assert proven_rows(Report.from_json(document)) == found


def in_text(text: str) -> set[tuple[str, str]]:
    found, section = set(), ""
    for line in text.splitlines():
        if line.startswith("Available "):
            section = line.partition(":")[0].removeprefix("Available ")
        elif marks := re.fullmatch(r"    (\w+) +(-|\[.\]) +\[.\] +\[X\]", line):
            found.add((section, marks[1]))
    return found


def in_html(text: str) -> set[tuple[str, str]]:
    found, section = set(), ""
    parts = r'colspan="4">([^<]+)<|<tr class="\w*"><th scope="row">(\w+)</th>(.*?)</tr>'
    for heading, name, cells in re.findall(parts, text, re.DOTALL):
        section = heading or section
        if cells.strip().endswith("yes</td>"):
            found.add((section, name))
    return found


def in_junit(text: str) -> set[tuple[str, str]]:
    suite = ElementTree.fromstring(text)[0]
    known = {each.attrib["name"]: each.attrib["value"] for each in suite.iter("property")}
    return {
        (section, name)
        for section in SECTIONS
        for name in known[f"proven {section.lower()}"].split(", ")
        if name
    }


GOOD = Evidence(
    mpi=known(MPI),
    libraries=known(all_three()),
    rendezvous=known(RendezvousFacts(patched=True)),
    build_table=known(build_table(text(*ALL_ROWS))),
    extensions={name: known(each) for name, each in all_three().items()},
    runs={
        Pair(framework, controller): known(rank_run(controller))
        for framework in ("torch", "tensorflow")
        for controller in CONTROLLERS
    },
)
OVER_GLOO = {"Controllers/Gloo", "Tensor Operations/Gloo"}
OVER_MPI = {"Controllers/MPI", "Tensor Operations/MPI"}
TORCH_OVER_MPI = {"Frameworks/PyTorch", *OVER_MPI}
ALL = {"Frameworks/TensorFlow", *TORCH_OVER_MPI, *OVER_GLOO}


def spoilt(what: RankEvent, *exercises: str) -> RankRun:
    """Ranks over MPI that reduce correctly and then report this."""
    found = rank_run()
    ranks = tuple(each._replace(events=(*each.events, what)) for each in found.ranks)
    return found._replace(ranks=ranks, exercises=exercises)


def judged(evidence: Evidence) -> Report:
    extensions = {name: each.result() for name, each in evidence.extensions.items()}
    return reported(list(judge_evidence(setup(), evidence)), extensions)


def test_the_report_states_how_many_ranks_ran() -> None:
    def stated(evidence: Evidence) -> str:
        return _report(setup(), evidence, (), (), 1.0).environment["ranks"]

    fewer = known(rank_run()._replace(size=rank_run().size + 1))
    assert stated(GOOD) == str(rank_run().size)
    assert stated(over_mpi(fewer)) == f"{rank_run().size} or {rank_run().size + 1}"
    assert stated(GOOD._replace(runs={})) == str(setup().launch.ranks)


def over_mpi(run: Future[RankRun]) -> Evidence:
    """With this instead of the run of torch over MPI."""
    return GOOD._replace(runs={**GOOD.runs, Pair("torch", "MPI"): run})


def with_torch(**changed: Any) -> Evidence:
    torch = known(extension("torch", **changed))
    return GOOD._replace(extensions={**GOOD.extensions, "torch": torch})


WRONG = Operation(
    "broadcast", 1, 9, ["float32"], cases=["float32 1114113: element 0 is 1, expected 2"]
)
DIVERGED = Training("DistributedOptimizer", 1.0, losses=[1.0, 2.0])
BROKEN = failed(StepError("no answer"))
HERE = Observation(
    "n1", File("/bin/python3", "3.11"), mpirun=File("/bin/mpirun", "4.1.8", "Open MPI")
)
LINKED = {"torch": Linked({"libmpi.so.40": File("/lib/libmpi.so.40")})}
OTHER_MPI = HERE._replace(mpirun=File("/bin/mpirun", "5.0.1", "Open MPI"), extensions=LINKED)
OTHER_PYTHON = HERE._replace(python=File("/bin/python3", "3.12"))
SHADOWED = all_three(torch=extension("torch", shadowed={"torch": "/module"}))
ANOTHER_HOROVODRUN = build_table(text(*ALL_ROWS, version="0.27.0"))
LOST = [Difference("missing", "lib/x.py")]
MPI_CHANGED = Observed(HERE._replace(extensions=LINKED), OTHER_MPI)
# By what is wrong: the evidence, and the rows that are then not proven.
CASES: dict[str, tuple[Evidence, set[str]]] = {
    "nothing": (GOOD, set()),
    "allreduces": (over_mpi(known(rank_run(failed=1))), TORCH_OVER_MPI),
    "collectives": (over_mpi(known(spoilt(WRONG, "collectives"))), TORCH_OVER_MPI),
    "training": (over_mpi(known(spoilt(DIVERGED, "training"))), TORCH_OVER_MPI),
    "ranks that could not be started": (over_mpi(BROKEN), TORCH_OVER_MPI),
    # They used the operation of their controller.
    "ranks that end too early": (
        over_mpi(known(run(exited(0, code=-9, signal="SIGKILL"), size=2))),
        TORCH_OVER_MPI,
    ),
    "an import": (with_torch(error="ImportError: x"), {"Frameworks/PyTorch"}),
    "an extension": (with_torch(built={"Gloo": 0}), {"Frameworks/PyTorch", *OVER_GLOO}),
    "a row of horovodrun": (
        GOOD._replace(build_table=known(build_table(without("C/MPI")))),
        OVER_MPI,
    ),
    "another horovodrun": (GOOD._replace(build_table=known(ANOTHER_HOROVODRUN)), ALL),
    "no table of horovodrun": (
        GOOD._replace(build_table=known(BuildTable(None, "empty", outcome()))),
        set(),
    ),
    "files": (GOOD._replace(changed_files=known(LOST)), ALL),
    "files that could not be compared": (GOOD._replace(changed_files=BROKEN), ALL),
    "another MPI": (GOOD._replace(observed=known(MPI_CHANGED)), OVER_MPI),
    "another Python": (GOOD._replace(observed=known(Observed(HERE, OTHER_PYTHON))), ALL),
    "a package in front": (GOOD._replace(libraries=known(SHADOWED)), {"Frameworks/PyTorch"}),
    "servers of horovodrun": (
        GOOD._replace(rendezvous=known(RendezvousFacts(True, ["CVE-2026-1"]))),
        set(),
    ),
    "an interrupt": (GOOD._replace(changed_files=failed(InterruptedRunError())), ALL),
}


@pytest.mark.parametrize("name", CASES)
def test_what_failed_is_not_proven(name: str) -> None:
    evidence, lost = CASES[name]
    report = judged(evidence)
    assert {"/".join(each) for each in proven_rows(report)} == ALL - lost
    assert bool(lost) <= (report.verdict in ("fail", "error"))


def test_each_error_of_its_own_is_a_finding() -> None:
    odd: Any = known(1)
    wrong = GOOD._replace(changed_files=odd, observed=odd, rendezvous=odd, libraries=odd)
    assert [each.check for each in errors_of(wrong)] == [
        "files",
        "drift",
        "rendezvous",
        "shadowing",
    ]


def test_an_error_is_one_finding_whatever_it_keeps_from_being_judged() -> None:
    error = IncompatibleError("no such launcher", where="mpirun", remedy="use another")
    (finding,) = errors_of(over_mpi(failed(error)))
    assert finding == Finding(
        "allreduce",
        "torch over MPI",
        "error",
        "mpirun: no such launcher",
        "",
        "use another",
        About(("torch",), ("MPI",), ("MPI",)),
    )
    everything = failed(ZeroDivisionError("by zero"))
    unknown = dict.fromkeys(GOOD.extensions, everything)
    (finding,) = errors_of(GOOD._replace(libraries=everything, extensions=unknown))
    assert (finding.check, finding.about) == ("check-build", EVERYTHING)
    assert finding.message == "the check could not run: ZeroDivisionError: by zero"
    assert "a bug in hvdenv" in finding.remedy


def errors_of(evidence: Evidence) -> list[Finding]:
    return [each for each in judge_evidence(setup(), evidence) if each.status == "error"]


def test_checks_that_were_interrupted_are_one_finding() -> None:
    stopped = failed(InterruptedRunError())
    (finding,) = errors_of(GOOD._replace(rendezvous=stopped, changed_files=stopped))
    assert finding.check == "interrupted"
    assert finding.message == "it was ended before it could judge: files, rendezvous"


FAILED = Finding("allreduce", "torch over MPI", "fail", "ranks hang", remedy="rebuild Horovod")
WITHOUT = (
    "first try without HOROVOD_AUTOTUNE of your shell: `hvdenv verify --clean local`;"
    " otherwise: rebuild Horovod"
)


@pytest.mark.parametrize(
    ("finding", "variables", "remedy"),
    [
        (FAILED, ("HOROVOD_AUTOTUNE", "HOROVOD_TIMELINE"), WITHOUT),
        (FAILED._replace(status="pass", remedy=""), ("HOROVOD_AUTOTUNE",), ""),
        # In a process without these variables, and a file that verify's ranks do not write.
        (FAILED._replace(check="extension"), ("HOROVOD_AUTOTUNE",), FAILED.remedy),
        (FAILED, ("HOROVOD_TIMELINE",), FAILED.remedy),
    ],
)
def test_what_failed_under_variables_of_the_shell_is_tried_without_them_first(
    finding: Finding, variables: tuple[str, ...], remedy: str
) -> None:
    shell = Shell(dict.fromkeys(variables, "1"))
    mine: Setup = setup(shell=shell, without_shell="hvdenv verify --clean local")
    (found,) = with_first_remedy([finding], mine, GOOD)
    assert found == finding._replace(remedy=remedy)
    (found,) = with_first_remedy([FAILED], mine, GOOD._replace(changed_files=known(LOST)))
    assert found.remedy.startswith("files are damaged")


def test_proof_needs_a_pass() -> None:
    assert not proven([], "controllers", "MPI")
    skipped = Finding("allreduce", "torch over MPI", "skip", "", about=About(("torch",), ("MPI",)))
    assert not proven([skipped], "controllers", "MPI")
    other = skipped._replace(status="pass")
    assert proven([skipped, other], "controllers", "MPI")
    assert not proven([skipped, other, other._replace(status="unproven")], "controllers", "MPI")

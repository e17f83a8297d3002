"""The table says no more than the findings, in every format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.environments.manifest import Difference
from hvdenv.errors import InterruptedRunError, StepError
from hvdenv.reports import junit, page, render
from hvdenv.reports.report import EVERYTHING, About, Finding, Report, Status, proven
from hvdenv.standalone.ranks.events import Operation, RankEvent, RendezvousFacts, Training
from hvdenv.verification.checkbuild import ROWS
from hvdenv.verification.checks import OPERATIONS, table
from hvdenv.verification.collection import CHECKS, CONTROLLERS, Failed, Key, judge
from hvdenv.verification.collectors import BuildTable, Extension, Observed
from hvdenv.verification.drift import Library, Linked, Mpirun, Observation, Python
from hvdenv.verification.ranks import RankRun
from tests.pure.test_checks import (
    ALL_ROWS,
    LOCAL,
    MPI,
    all_three,
    build_table,
    extension,
    outcome,
    rank_run,
    setup,
    text,
    without,
)
from tests.rank_events import exited, run

SECTIONS = ("Frameworks", "Controllers", "Tensor Operations")
NAMES = {
    "Frameworks": dict(zip(ROWS.values(), ROWS, strict=True)),
    "Controllers": {name: name for name in CONTROLLERS},
    "Tensor Operations": {name: name for name in OPERATIONS},
}
KINDS = dict(zip(SECTIONS, ("frameworks", "controllers", "operations"), strict=True))


def subsets(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), unique=True, max_size=2).map(tuple)


ABOUTS = st.just(EVERYTHING) | st.builds(
    About, subsets(tuple(ROWS)), subsets(CONTROLLERS), subsets(OPERATIONS)
)
FINDINGS = st.builds(
    Finding,
    st.sampled_from(("allreduce", "operation", *CHECKS)),
    st.just("x"),
    st.sampled_from(("pass", "pass", *get_args(Status))),
    st.just("y"),
    about=ABOUTS,
)
# Without these, hardly anything is proven.
PROOFS = [
    Finding("allreduce", "all", "pass", "", about=About(tuple(ROWS), CONTROLLERS)),
    Finding("operation", "all", "pass", "", about=About((), (), OPERATIONS)),
]


def reported(findings: list[Finding], extensions: Mapping[str, Extension] | None = None) -> Report:
    rows = table(LOCAL, extensions or all_three(), findings)
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


RUNS: dict[tuple[str, str], Any] = {
    (framework, controller): rank_run(controller)
    for framework in ("torch", "tensorflow")
    for controller in CONTROLLERS
}
OVER_GLOO = {"Controllers/Gloo", "Tensor Operations/Gloo"}
OVER_MPI = {"Controllers/MPI", "Tensor Operations/MPI"}
TORCH_OVER_MPI = {"Frameworks/PyTorch", *OVER_MPI}
ALL = {"Frameworks/TensorFlow", *TORCH_OVER_MPI, *OVER_GLOO}


def spoilt(what: RankEvent, *exercises: str) -> RankRun:
    """Ranks over MPI that reduce correctly and then report this."""
    found = rank_run()
    ranks = tuple(each._replace(events=(*each.events, what)) for each in found.ranks)
    return found._replace(ranks=ranks, exercises=exercises)


def judged(changed: Mapping[Key, Any]) -> Report:
    """What verify reports of a good installation, if collectors have these results instead."""
    extensions = {
        name: changed.get(Key("extension", name), each) for name, each in all_three().items()
    }
    results: dict[Key, Any] = {
        Key("mpi"): MPI, Key("hiding"): None, Key("horovodrun_run"): None, Key("changed_files"): None, Key("observed"): None, Key("image_mpi"): None,
        Key("libraries"): extensions, Key("build_table"): build_table(text(*ALL_ROWS)),
        Key("rendezvous"): RendezvousFacts(patched=True),
        **{Key("extension", name): each for name, each in extensions.items()},
        **{Key("rank_run", "mxnet", controller): None for controller in CONTROLLERS},
        **{Key("rank_run", *key): run for key, run in RUNS.items()},
        **changed,
    }  # fmt: skip
    return reported(list(judge(setup(), results)), extensions)


MPI_RUN = Key("rank_run", "torch", "MPI")
WRONG = Operation("broadcast", 1, 9, ["float32"], cases=["float32 1114113: got 1, wanted 2"])
DIVERGED = Training("DistributedOptimizer", 1.0, losses=[1.0, 2.0])
BROKEN = Failed(StepError("no answer"))
HERE = Observation(
    "n1", Python("3.11", "/bin/python3"), mpirun=Mpirun("/bin/mpirun", "Open MPI", "4.1.8")
)
LINKED = {"torch": Linked({"libmpi.so.40": Library("/lib/libmpi.so.40")})}
OTHER_MPI = HERE._replace(mpirun=Mpirun("/bin/mpirun", "Open MPI", "5.0.1"), extensions=LINKED)
OTHER_PYTHON = HERE._replace(python=Python("3.12", "/bin/python3"))
SHADOWED = all_three(torch=extension("torch", shadowed={"torch": "/module"}))
# By what is wrong: the results of collectors, and the rows that are then not proven.
CASES: dict[str, tuple[dict[Key, Any], set[str]]] = {
    "nothing": ({}, set()),
    "allreduces": ({MPI_RUN: rank_run(failed=1)}, TORCH_OVER_MPI),
    "collectives": ({MPI_RUN: spoilt(WRONG, "collectives")}, TORCH_OVER_MPI),
    "training": ({MPI_RUN: spoilt(DIVERGED, "training")}, TORCH_OVER_MPI),
    "ranks that could not be started": ({MPI_RUN: BROKEN}, TORCH_OVER_MPI),
    "an import": (
        {Key("extension", "torch"): extension("torch", error="ImportError: x")}, {"Frameworks/PyTorch"}
    ),
    "an extension": (
        {Key("extension", "torch"): extension("torch", built={"Gloo": 0})}, {"Frameworks/PyTorch", *OVER_GLOO},
    ),
    "a row of horovodrun": ({Key("build_table"): build_table(without("C/MPI"))}, OVER_MPI),
    "another horovodrun": ({Key("build_table"): build_table(text(*ALL_ROWS, version="0.27.0"))}, ALL),
    "no table of horovodrun": ({Key("build_table"): BuildTable(None, "empty", outcome())}, set()),
    "files": ({Key("changed_files"): [Difference("missing", "lib/x.py")]}, ALL),
    "files that could not be compared": ({Key("changed_files"): BROKEN}, ALL),
    "another MPI": ({Key("observed"): Observed(HERE._replace(extensions=LINKED), OTHER_MPI)}, OVER_MPI),
    "another Python": ({Key("observed"): Observed(HERE, OTHER_PYTHON)}, ALL),
    "a package in front": ({Key("libraries"): SHADOWED}, {"Frameworks/PyTorch"}),
    "servers of horovodrun": ({Key("rendezvous"): RendezvousFacts(True, ["CVE-2026-1"])}, set()),
    "an interrupt": ({Key("changed_files"): Failed(InterruptedRunError())}, ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_failed_is_not_proven(name: str) -> None:
    changed, lost = CASES[name]
    report = judged(changed)
    assert {"/".join(each) for each in proven_rows(report)} == ALL - lost
    assert bool(lost) <= (report.verdict in ("fail", "error"))


def test_ranks_that_end_too_early_used_the_operation_of_their_controller() -> None:
    crashed = run(exited(0, code=-9, signal="SIGKILL"), size=2)
    assert {
        "/".join(each) for each in proven_rows(judged({MPI_RUN: crashed}))
    } == ALL - TORCH_OVER_MPI


def test_proof_needs_a_pass() -> None:
    assert not proven([], "controllers", "MPI")
    skipped = Finding("allreduce", "torch over MPI", "skip", "", about=About(("torch",), ("MPI",)))
    assert not proven([skipped], "controllers", "MPI")
    other = skipped._replace(status="pass")
    assert proven([skipped, other], "controllers", "MPI")
    assert not proven([skipped, other, other._replace(status="unproven")], "controllers", "MPI")

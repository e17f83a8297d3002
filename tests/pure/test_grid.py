"""The grid: its data, what is asked of it, and the script that makes its rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from grid import run
from grid.page import page
from grid.wanted import Wanted, all_wanted
from hvdenv.errors import StepError
from hvdenv.knowledge import grid
from hvdenv.knowledge.grid import (
    Asked,
    Failure,
    Judged,
    Row,
    SuiteResult,
    all_rows,
    ask,
    asked_of,
    differences,
    options,
)
from hvdenv.knowledge.patches import all_patches
from hvdenv.knowledge.rules import all_rules
from hvdenv.knowledge.signatures import all_signatures
from hvdenv.model.facts import Facts, Tool
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Gpu, Recipe
from hvdenv.schema import Problem, encode
from hvdenv.standalone.ranks import events
from hvdenv.verification.checks import findings
from hvdenv.verification.ranks import Judgement
from hvdenv.verification.suite import SuiteRun, judge
from tests.commands import Hvdenv

ROOT = Path(__file__).parents[2]
PASSED = (Judged("torch", "mpi", "pass"), Judged("torch", "gloo", "pass"))


def row(name: str = "one", torch: str = "2.6.0+cu124", python: str = "3.12.1", **other: Any) -> Row:
    known: dict[str, Any] = {
        "date": "2026-11-22", "hvdenv": "0.1.0", "horovod": "0.28.1", "frameworks": {"torch": torch},
        "controllers": ("mpi", "gloo"), "mpi": "openmpi", "mpi_version": "4.1.8", "cuda": "",
        "patches": ("torch-cxx17",), "packages": {"numpy": "2.1.0"}, "compiler": "g++ 12.2.0",
        "glibc": "2.36", "system": "Debian GNU/Linux 12", "machine": "x86_64", "build_seconds": 200.0,
        "verify_seconds": 60.0, "verdict": "pass", "judged": PASSED,
        "base": "local", "settings": {"packages.numpy": '"<2"'},
    }  # fmt: skip
    return Row(name=name, python=python, **{**known, **other})


ROWS = (
    row("old", "2.1.2", "3.9.18"),
    row("new", "2.8.0", "3.12.1"),
    row("newest", "2.13.0+cpu", "3.11.7"),
    row("mpich", "2.13.0+cpu", "3.11.7", mpi="mpich", mpi_version="4.3.2"),
    row("broken", "2.14.0", verdict="not built", judged=(), failure=Failure("wheel", "no C++17")),
    row("half", "2.11.0", cuda="13.0", verdict="unproven", judged=()),
    row("keras", frameworks={"torch": "2.13.0", "tensorflow": "2.15.1"}, python="3.10.13"),
)


CASES = json.loads((ROOT / "tests/cases/grid.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["asked"]))
def test_what_is_asked(case: dict[str, Any]) -> None:
    answer = ask(Asked(**case["asked"]), ROWS)
    nearest = [each.name if each else "" for each in (answer.below, answer.above)]
    assert [answer.status, *nearest] == [case["status"], case["below"], case["above"]]
    assert [each.name for each in answer.rows] == case["rows"]


def test_in_what_a_row_differs() -> None:
    asked = Asked(torch="2.8.0", tensorflow="2.15", python="3.12", cuda="any", mpi="mpich")
    assert differences(asked, ROWS[1]) == ("tensorflow", "cuda", "mpi")


def test_a_row_is_built_again_by_its_options() -> None:
    again = options(row(allow=("numpy-2-with-old-torch",)))
    assert again[3:] == ("--set", 'packages.numpy="<2"', "--allow", "numpy-2-with-old-torch")


def test_the_combination_of_a_recipe(recipe: Recipe, facts: Facts) -> None:
    versions = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}
    asked = asked_of(recipe, versions, "3.11.7", facts)
    assert asked == Asked(
        "2.13.0", "2.15.1", "3.11", "none", "openmpi", "4.1", "0.28.1", facts.machine
    )
    gpu = recipe._replace(horovod=recipe.horovod._replace(gpu=Gpu(operations="nccl")))
    assert asked_of(gpu, versions, "3.11.7", facts._replace(nvcc=None)).cuda == "any"
    toolkit = facts._replace(nvcc=Tool("/cuda/bin/nvcc", "13.0"))
    assert asked_of(gpu, versions, "3.11.7", toolkit).cuda == "13.0"
    gloo = recipe._replace(horovod=recipe.horovod._replace(controllers=("gloo",)))
    assert asked_of(gloo, versions, "3.11.7", facts).mpi == ""


def test_the_data_is_strict() -> None:
    document = {"format": 1, "rows": [encode(each) for each in ROWS]}
    assert grid.read(json.dumps(document)) == ROWS
    for changed in (
        {**document, "format": 2},
        {**document, "rows": [{**encode(ROWS[0]), "colour": "red"}]},
        {**document, "rows": [{**encode(ROWS[0]), "date": "yesterday"}]},
        {**document, "rows": [{**encode(ROWS[0]), "frameworks": {"mxnet": "1.9"}}]},
    ):
        with pytest.raises(Problem):
            grid.read(json.dumps(changed))


def test_the_rows_that_are_there() -> None:
    patches, rules = {each.name for each in all_patches()}, {rule.id for rule in all_rules()}
    known = {each.name: each for each in all_wanted()}
    assert len({each.name for each in all_rows()}) == len(all_rows())
    for each in all_rows():
        expected = {
            (name, controller) for name in each.frameworks for controller in each.controllers
        }
        judged = {(one.framework, one.controller): one.status for one in each.judged}
        if each.verdict == "pass":
            assert each.failure is None and judged == dict.fromkeys(expected, "pass")
        assert (each.verdict == "not built") == (each.verify_seconds == 0)
        assert each.failure or each.verdict in ("pass", "unproven")
        assert {*each.patches} <= patches and {*each.allow} <= rules
        assert each.base == known[each.name].base
        assert each.settings == known[each.name].settings


def test_the_page_says_all() -> None:
    text = page(ROWS)
    for each in ROWS:
        assert each.name in text and all(version in text for version in each.frameworks.values())
    assert "At wheel: no C++17" in text and "torch pass" in text and "not built" in text
    assert page(()).endswith("\n")


def test_what_is_wanted(tmp_path: Path) -> None:
    wanted = all_wanted()
    assert len({each.name for each in wanted}) == len(wanted) >= 16
    minor = {(name, ".".join(version.split(".")[:2]))
             for each in wanted for name in ("torch", "tensorflow") if (version := getattr(each, name))}  # fmt: skip
    torch = {"1.12", "1.13", "2.0", "2.1", "2.4", "2.6", "2.8", "2.13", "2.15"}
    tensorflow = {"2.10", "2.11", "2.12", "2.13", "2.15", "2.16", "2.18", "2.20", "2.21"}
    assert minor >= {("torch", each) for each in torch} | {("tensorflow", t) for t in tensorflow}
    assert {each.python for each in wanted} >= {"3.8", "3.9", "3.10", "3.11", "3.12", "3.13"}
    assert {each.mpi for each in wanted} >= {None, "openmpi", "mpich"}
    for one in wanted:
        path = tmp_path / "grid.toml"
        path.write_text(one.recipe, encoding="utf-8")
        recipe = load_recipe(str(path)).recipe
        assert set(recipe.horovod.frameworks) == {
            name for name in ("torch", "tensorflow") if getattr(one, name)
        }
        assert one.mpi is None or (recipe.mpi and recipe.mpi.package == one.mpi)


def test_check_says_what_is_known_of_the_combination(
    monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv, cases: Path
) -> None:
    words = ["check", "local", "--variant", "torch", "--facts", str(cases / "facts.json")]
    monkeypatch.setattr("hvdenv.cli.check.all_rows", lambda: ROWS[1:2])
    told = hvdenv(*words).out
    assert "never tried" in told and "nearest verified combination below (differs in torch" in told
    monkeypatch.setattr("hvdenv.cli.check.all_rows", lambda: ROWS)
    assert json.loads(hvdenv(*words, "--json").out)["grid"]["status"] == "proven"
    # Rows are of Horovod's source beside wheels of the index.
    said = hvdenv("check", "neuron", "--facts", str(cases / "facts.json"), "--json", code=0)
    assert "grid" not in json.loads(said.out)


def test_the_worst_finding_counts() -> None:
    horovod = {"frameworks": ["torch", "tensorflow"], "controllers": ["mpi", "gloo"]}
    findings = [
        {"subject": "torch over MPI", "status": "pass"},
        {"subject": "alltoall, torch over MPI", "status": "fail"},
        {"subject": "torch over MPI", "status": "skip"},
        {"subject": "torch over Gloo", "status": "pass"},
        {"subject": "tensorflow over Gloo", "status": "unproven"},
        {"subject": "tensorflow over MPI", "status": "skip"},
    ]
    assert run.judged_of(horovod, findings) == (
        Judged("torch", "mpi", "fail"), Judged("torch", "gloo", "pass"),
        Judged("tensorflow", "gloo", "unproven"),
    )  # fmt: skip


def test_signatures_that_are_the_machines_fault_are_there() -> None:
    assert {each.id for each in all_signatures()} >= run.MACHINES_FAULT


def test_a_row_is_written_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "grid.json"
    file.write_text('{"format": 1, "rows": []}', encoding="utf-8")
    for each in ROWS[:2]:
        run.keep(each, file)
    run.keep(ROWS[0]._replace(verdict="error"), file)
    assert [(each.name, each.verdict) for each in grid.read(file.read_text("utf-8"))] == [
        ("old", "error"), ("new", "pass"),
    ]  # fmt: skip
    before = file.read_text("utf-8")
    with pytest.raises(Problem):
        run.keep(ROWS[2]._replace(date="today"), file)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StepError, match="No space left"):
        run.keep(ROWS[2], file)
    assert file.read_text("utf-8") == before
    assert [each.name for each in tmp_path.iterdir()] == ["grid.json"]


# Stands for hvdenv: what its commands print, and the codes that they end with.
STAND_IN = """\
import json, os, sys, time
said = json.loads(open({said!r}).read())[sys.argv[1]]
open({log!r}, "a").write(
    f"{{os.getpid()}} {{sys.argv[1]}} {{' '.join(os.listdir(os.environ['HVDENV_HOME']))}}\\n"
)
time.sleep(said.get("sleep", 0))
if sys.argv[1] == "build":
    folder = os.path.join(os.environ["HVDENV_HOME"], "envs/.grid.hvdenv/1")
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "journal.jsonl"), "w").write({journal!r})
print(json.dumps(said["prints"]))
sys.exit(said.get("code", 0))
"""


# The second step was interrupted, and done again by the next call.
JOURNAL = "".join(
    json.dumps({"event": event, "step": step, "key": step, "time": f"2026-11-22T05:{time}+00:00"}) + "\n"
    for event, step, time in (
        ("step-started", "tools", "00:00"), ("step-finished", "tools", "00:12"),
        ("step-started", "wheel", "00:12"), ("step-failed", "wheel", "00:20"),
        ("step-started", "wheel", "40:00"), ("step-finished", "wheel", "40:30"),
    )
)  # fmt: skip


class StandIn:
    """A program in the place of hvdenv, and a grid of its own."""

    def __init__(self, folder: Path, facts: Facts, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.said, self.log = folder, folder / "said.json", folder / "log"
        self.program = folder / "hvdenv.py"
        self.program.write_text(
            STAND_IN.format(said=str(self.said), log=str(self.log), journal=JOURNAL),
            encoding="utf-8",
        )
        generation = folder / "generation"
        generation.mkdir()
        (generation / "hvdenv.json").write_text(
            json.dumps({"observed": {"packages": {"numpy": "1.26.4", "six": "1"}}}),
            encoding="utf-8",
        )
        (folder / "grid.json").write_text('{"format": 1, "rows": []}', encoding="utf-8")
        patch.setattr(run, "PROGRAM", (sys.executable, "-I", "-S", str(self.program)))
        patch.setattr(run, "FILE", folder / "grid.json")
        patch.setattr(sys, "argv", ["run", "--folder", str(folder / "work")])
        self.answers: dict[str, dict[str, Any]] = {
            "show": {"prints": {"recipe": encode(load_recipe("local", variants=["torch"]).recipe)}},
            "plan": {"prints": {
                "facts": encode(facts), "python": {"version": "3.10.13"},
                "versions": {"horovod": "0.28.1", "torch": "1.12.1"},
                "wheel_inputs": {"patches": {"cmake4-gloo": "x"}},
            }},
            "build": {"prints": {"generation": str(generation)}},
            "verify": {"prints": {
                "verdict": "pass", "seconds": 4.5, "environment": {"torch": "1.12.1+cu102"},
                "findings": [{"check": "allreduce", "subject": "torch over MPI", "status": "pass", "message": ""}],
            }},
            "doctor": {"prints": {"subject": [""], "causes": [], "symptoms": [], "errors": []}},
        }  # fmt: skip

    def answer(self, command: str, prints: dict[str, Any], **other: Any) -> None:
        self.answers[command] = {"prints": {**self.answers[command]["prints"], **prints}, **other}

    def start(self) -> subprocess.Popen[str]:
        """A process of its own for the first combination that has no row."""
        self.said.write_text(json.dumps(self.answers), encoding="utf-8")
        program = (
            "import sys; from pathlib import Path; from grid import run\n"
            f"run.PROGRAM = {run.PROGRAM!r}\n"
            f"run.FILE = Path({str(self.folder)!r}, 'grid.json')\n"
            f"sys.argv = {sys.argv!r}\n"
            "sys.exit(run.main())"
        )
        return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True)

    def run(self) -> int:
        self.said.write_text(json.dumps(self.answers), encoding="utf-8")
        return run.main()

    @property
    def rows(self) -> tuple[Row, ...]:
        return grid.read((self.folder / "grid.json").read_text(encoding="utf-8"))

    @property
    def named(self) -> list[str]:
        return [each.name for each in self.rows]

    @property
    def last(self) -> str:
        """The last command, with what was in its folder."""
        return self.log.read_text(encoding="utf-8").splitlines()[-1]

    @property
    def commands(self) -> list[str]:
        """The commands that were called."""
        return [line.split()[1] for line in self.log.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def stand_in(tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, facts, monkeypatch)


def test_a_row_is_made_of_what_the_commands_say(stand_in: StandIn, facts: Facts) -> None:
    assert stand_in.run() == 0
    assert stand_in.commands == ["show", "plan", "build", "verify"]
    (made,) = stand_in.rows
    first = all_wanted()[0]
    assert (made.name, made.settings) == (first.name, first.settings)
    assert made.frameworks == {"torch": "1.12.1+cu102"} and made.packages == {"numpy": "1.26.4"}
    assert (made.mpi, made.mpi_version, made.python) == ("openmpi", "4.1.8", "3.10.13")
    assert (made.build_seconds, made.verify_seconds, made.verdict) == (42.0, 4.5, "pass")
    assert made.judged == (Judged("torch", "mpi", "pass"),)
    assert made.patches == ("cmake4-gloo",) and made.failure is None
    assert not (stand_in.folder / "work" / "home").exists()
    assert stand_in.run() == 0  # and the next one
    assert stand_in.named == [each.name for each in all_wanted()[:2]]


def test_results_of_horovods_own_tests_are_in_the_row(stand_in: StandIn) -> None:
    muon = "test_torch.py::TorchTests::test_broadcast_state"
    otherwise = "test_torch.py::TorchTests::test_force_allreduce"
    outcomes = {
        **{f"p{number}": "passed" for number in range(3)},
        muon: "failed", "s": "skipped", otherwise: "failed",
        **{f"x{number}": "failed" for number in range(21)},
    }  # fmt: skip
    reasons = {muon: "ValueError: Muon only supports 2D parameters whereas we found (17,)"}
    done: dict[str, Mapping[str, events.TestDone]] = {
        test: {"rank 0": events.TestDone(test, each, reason=f"E  {reasons.get(test, 'no')}")}
        for test, each in outcomes.items()
    }
    late = Judgement("unproven", "no time was left from b.py on")
    judged = [
        *findings("suite", "torch over MPI", judge(SuiteRun(done, {}, None), "0.28.1", "pytest")),
        *findings("suite", "tests without ranks", judge(SuiteRun({}, {}, late), "0.28.1", "pytest")),
    ]  # fmt: skip
    stand_in.answer("verify", {"findings": encode(judged)}, code=1)
    stand_in.answer("doctor", {}, code=1)
    sys.argv += ["--suite-from", "/src/horovod", "--controller", "MPI"]
    assert stand_in.run() == 0 and stand_in.commands[-2:] == ["doctor", "verify"]
    (made,) = stand_in.rows
    new = (otherwise, *(f"x{number}" for number in range(21)))
    assert made.suite == (
        SuiteResult("torch over MPI", passed=3, skipped=1, known=1, new=new),
        SuiteResult("tests without ranks", problem="no time was left from b.py on"),
    )
    assert f"| torch over MPI | 3 | 1 | 1 | `{otherwise}`, `x0`, `x1`," in page([made])


def test_a_row_is_kept_whose_tests_took_too_long(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*_: object) -> None:
        raise run.Unfit("verify took more than 1 s")

    monkeypatch.setattr(run, "try_suite", late)
    sys.argv += ["--suite-from", "/src/horovod"]
    assert stand_in.run() == 1
    assert len(stand_in.rows) == 1
    assert "its row has no results of Horovod's own tests: verify took" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("here", "built", "cuda"),
    [("12.4", "", "12.4"), ("12.4", "release 13.0", "13.0"), ("", "release 13.0", "13.0"), ("", "", "")],
)  # fmt: skip
def test_cuda_is_that_of_the_build_or_of_the_host(
    stand_in: StandIn, facts: Facts, here: str, built: str, cuda: str
) -> None:
    stand_in.answers["show"]["prints"]["recipe"]["horovod"]["gpu"] = {"operations": "nccl"}
    tool = Tool("/cuda/bin/nvcc", here) if here else None
    stand_in.answer("plan", {"facts": encode(facts._replace(nvcc=tool))})
    (stand_in.folder / "generation/hvdenv.json").write_text(
        json.dumps({"stack": {"stack": {"programs": {"nvcc": built}}}})
    )
    assert stand_in.run() == (0 if cuda else 1)
    assert [row.cuda for row in stand_in.rows] == [cuda] * bool(cuda)


def test_a_build_that_failed_has_its_cause_in_its_row(stand_in: StandIn) -> None:
    stand_in.answer("build", {}, code=5)
    home = stand_in.folder / "work" / "home"
    cause = {"id": "torch-wants-cxx17", "cause": "no C++17", "line": f"{home}/x.cc: C++17"}
    said = {"subject": ["the build of P stopped at the step wheel"], "causes": [cause]}
    stand_in.answer("doctor", said)
    assert stand_in.run() == 0
    (made,) = stand_in.rows
    assert (made.verdict, made.verify_seconds, made.judged) == ("not built", 0.0, ())
    assert made.failure == Failure("wheel", "no C++17", "torch-wants-cxx17", (".../x.cc: C++17",))


def test_what_verify_failed_is_in_its_row(stand_in: StandIn) -> None:
    bad = {"check": "training", "subject": "torch over Gloo", "status": "fail", "message": "wrong"}
    stand_in.answer("verify", {"verdict": "fail", "findings": [bad]}, code=1)
    stand_in.answer("doctor", {}, code=1)
    assert stand_in.run() == 0
    (made,) = stand_in.rows
    assert made.verdict == "fail" and made.judged == (Judged("torch", "gloo", "fail"),)
    assert made.failure == Failure("verify", "", "", ("training torch over Gloo: wrong",))


@pytest.mark.parametrize(
    ("command", "other", "why"),
    [
        ("build", {"code": 3}, ""),
        ("build", {"code": 70}, ""),
        ("build", {"sleep": 600}, ""),
        ("verify", {"code": 130}, ""),
        ("plan", {"code": 3}, ""),
        ("build", {"code": 5}, "the machine: disk-full"),
    ],
)
def test_what_says_nothing_of_a_combination_gives_no_row(
    stand_in: StandIn, command: str, other: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    stand_in.answer(command, {}, **other)
    if why:
        stand_in.answer("doctor", {"causes": [{"id": "disk-full", "cause": "full", "line": ""}]})
    if "sleep" in other:
        sys.argv += ["--timeout", "1"]
    assert stand_in.run() == 1
    said = capsys.readouterr().out
    assert "no row" in said and why in said
    assert stand_in.named == [] and not (stand_in.folder / "work" / "home").exists()


def test_killed_at_any_moment_it_is_tried_again(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.answer("build", {}, sleep=600)
    process = stand_in.start()
    deadline = time.monotonic() + 120
    while not stand_in.log.exists() or "build" not in stand_in.commands:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert stand_in.named == []
    # The build goes on without it; nobody may take its folder away under it.
    assert stand_in.run() == 6 and "another run is at work" in capsys.readouterr().err
    building = next(
        line for line in stand_in.log.read_text("utf-8").splitlines() if " build " in line
    )
    os.kill(int(building.split()[0]), signal.SIGKILL)
    (stand_in.folder / "work" / "home" / "half-built").touch()
    stand_in.answer("build", {})
    deadline = time.monotonic() + 120
    code = 6
    while code == 6 and time.monotonic() < deadline:
        code = stand_in.run()
    assert code == 0 and stand_in.named == [all_wanted()[0].name]
    # What was begun for this combination is gone on with, and not for another one.
    assert "half-built" in stand_in.last
    (stand_in.folder / "work" / "home").mkdir()
    (stand_in.folder / "work" / "home" / "half-built").touch()
    assert stand_in.run() == 0 and "half-built" not in stand_in.last


def test_the_recipe_of_a_combination() -> None:
    wanted = Wanted(
        "x", "3.9", torch="2.1.2", mpi="mpich", mpi_version="4.3.2", set={"packages.numpy": '"<2"'}
    )
    assert wanted.recipe.splitlines()[3:] == [
        'python.version = "==3.9.*"',
        'horovod.frameworks = ["torch"]',
        'frameworks.torch.version = "2.1.2"',
        'mpi.kind = "mpich"',
        'mpi.package = "mpich"',
        'mpi.version = "4.3.2"',
        'packages.numpy = "<2"',
    ]

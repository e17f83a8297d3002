"""Every check in a case in which it passes and in those in which it must not; the table of all."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import IncompatibleError, InterruptedRunError, StepError
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.environments.manifest import ChangedFile
from hvdenv.reports.report import Finding, Report
from hvdenv.sites.launchers import Launch, MpiVersion
from hvdenv.standalone.ranks.events import (
    DataPath,
    ExtensionFacts,
    Operation,
    RankEvent,
    RendezvousFacts,
    Training,
)
from hvdenv.verification import installation_checks as checks
from hvdenv.verification import rank_checks
from hvdenv.verification.drift import File, Linked, Observation
from hvdenv.verification.evidence import Evidence, known
from hvdenv.verification.inspection import (
    BuildTable,
    Extension,
    parse_check_build,
)
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import Pair, setups_of_runs
from hvdenv.verification.setup import CONTROLLERS, HostMpi, Setup, Shell
from hvdenv.verification.verify import (
    _report,
    judge_evidence,
    proven,
    table,
    with_first_remedy,
)
from tests.support.evidence import by_framework, evidence, failed, outcome
from tests.support.rank_events import exited, good, run

LOCAL = Expectation(("torch", "tensorflow"), ("MPI", "Gloo"), ("MPI", "Gloo"))
ANYTHING, ONLY_GLOO = Expectation(), Expectation(("torch",), ("Gloo",))
LAUNCHERS = ("mpirun", "horovodrun-gloo")
MPI = (MpiVersion("Open MPI", "5.0.11"), "/env/bin/mpirun (Open MPI 5.0.11)")


def extension(framework: str, **changed: Any) -> Extension:
    built = {"MPI": 1, "Gloo": 1, "NCCL": 0, "DDL": 0, "CCL": 0, "MLSL": None, "CUDA": 0, "ROCm": 0}
    facts = {
        "python": "/env/bin/python",
        "horovod": "/env/horovod",
        "path": f"/env/horovod/{framework}.so",
        "size": 2_000_000,
        "built_with": "2.1",
        "installed": "2.1",
        "version": "0.28.1",
        "built": {**built, **changed.pop("built", {})},
        "gpus": 0,
    }
    found = changed.pop("outcome", outcome())
    return Extension(framework, found, ExtensionFacts(framework, **{**facts, **changed}))


def absent(framework: str, **changed: Any) -> Extension:
    path = f"/env/horovod/{framework}.so"
    facts = ExtensionFacts(framework, horovod="/env/horovod", path=path, built_with="")
    return Extension(framework, outcome(), facts._replace(**changed))


def all_three(**changed: Extension) -> dict[str, Extension]:
    found = {"torch": extension("torch"), "tensorflow": extension("tensorflow")}
    return {**found, "mxnet": absent("mxnet"), **changed}


TABLE = (Path(__file__).parents[1] / "cases/checkbuild/good/0.28.1.txt").read_text()


def without(row: str) -> str:
    return TABLE.replace(f"[X] {row}", f"[ ] {row}")


def build_table(printed: str) -> BuildTable:
    return BuildTable(parse_check_build(printed), "", outcome(printed))


def rank_run(controller: str = "MPI", size: int = 2, **changed: Any) -> RankRun:
    path = DataPath(logged={"controller": [controller.upper()], "cpu": [controller.upper()]})
    return run(*good(size, path, **changed), size=size, controller=controller)


def check_build(found: BuildTable, expectation: Expectation = LOCAL, **changed: Any) -> Finding:
    known = evidence(build_table=found, extensions=all_three(**changed))
    (finding,) = checks.check_build(setup(expectation=expectation), known)
    return finding


def judge_extension(found: Extension, expectation: Expectation = LOCAL) -> list[Finding]:
    known = evidence(extensions=by_framework(found))
    mine = setup(expectation=expectation)
    return list(checks.check_extension(found.framework, mine, known))


def setup(**changed: Any) -> Setup:
    values: dict[str, Any] = {"launchers": LAUNCHERS, "expectation": LOCAL, **changed}
    return Setup(Installation("/env", "", ()), Runner(), **values)


def judge_allreduce(
    found: Extension, run: RankRun | None, mpi: HostMpi = MPI, **changed: Any
) -> list[Finding]:
    pair = Pair(found.framework, "MPI")
    known = evidence(extensions=by_framework(found), mpi=mpi, runs={pair: run} if run else {})
    findings = rank_checks.check_pair(pair, setup(**changed), known)
    return [each for each in findings if each.check == "allreduce"]


WITH_MLSL = LOCAL._replace(operations=("MPI", "Gloo", "MLSL"))
NO_TORCH = {"torch": absent("torch")}
MARKED = "Horovod 0.28.1; it marks PyTorch, which has no extension (a known bug of Horovod)"
OLDER = TABLE.replace("0.28.1", "0.27.0")
OLD = "horovodrun belongs to Horovod 0.27.0, the package is 0.28.1"


@pytest.mark.parametrize(
    ("printed", "expectation", "changed", "status", "message"),
    [
        (TABLE, LOCAL, {}, "pass", "Horovod 0.28.1"),
        (TABLE, ONLY_GLOO, {}, "pass", "Horovod 0.28.1"),
        (without("Gloo"), WITH_MLSL, {}, "fail", "expected, but not marked: Gloo, Gloo, MLSL"),
        (TABLE, ANYTHING, NO_TORCH, "pass", MARKED),
        (OLDER, LOCAL, {}, "fail", OLD),
    ],
)
def test_check_build(
    printed: str, expectation: Expectation, changed: dict[str, Extension], status: str, message: str
) -> None:
    finding = check_build(build_table(printed), expectation, **changed)
    assert finding.status == status
    assert finding.message == message
    assert finding.evidence == (printed.rstrip("\n") if status == "fail" else "")


@pytest.mark.parametrize(
    ("found", "status", "message"),
    [
        (outcome("Traceback ...", 1), "fail", "exited with code 1"),
        (outcome("Horovod v0.28.1:"), "fail", "no table could be read: 0 sections"),
        (outcome("unrecognized arguments: -cb", 2), "skip", "too old"),
    ],
)
def test_check_build_without_a_table(found: Outcome, status: str, message: str) -> None:
    finding = check_build(BuildTable(None, "0 sections", found))
    assert finding.status == status
    assert message in finding.message


def test_an_import_that_had_no_time_is_not_called_broken() -> None:
    for seconds, status in ((2.0, "error"), (60.0, "fail")):
        hung = Outcome(Command(("x",), timeout=seconds), -9, "", seconds, True)
        (finding,) = judge_extension(extension("torch", outcome=hung))
        assert finding.status == status
        assert f"did not finish within {seconds:.0f} s" in finding.message
        assert "--timeout" in finding.remedy


OTHER = "built with torch 2.1, but 2.2 is installed"
HUNG = outcome("", -9, timed_out=True)
BROKEN: dict[str, tuple[Extension, str]] = {
    "no package": (Extension("torch", outcome(), ExtensionFacts("torch")), "no package horovod"),
    "hang": (Extension("torch", HUNG), "did not finish within 60 s"),
    "no answer": (Extension("torch", outcome("bye")), "gave no answer"),
    "other version": (extension("torch", installed="2.2"), OTHER),
    "other version, no import": (
        extension("torch", installed="2.2", error="ImportError: x"),
        OTHER,
    ),
    "not recorded": (extension("torch", built_with=""), "built with torch (not recorded), but 2.1"),
    "cannot be asked": (extension("torch", built={"MPI": None}), "does not report what was built"),
    "controller": (extension("torch", built={"Gloo": 0}), "was built without Gloo"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_extension_fails_and_what_nobody_asked_for_does_not(name: str) -> None:
    found, message = BROKEN[name]
    (finding,) = judge_extension(found)
    assert finding.status == "fail"
    assert message in finding.message
    assert finding.remedy
    other = judge_extension(found, Expectation(("tensorflow",), ("MPI", "Gloo")))
    assert {finding.status for finding in other} <= {"skip"}


# Environments that hvdenv built, and did not build.
BUILT = Installation("/env", "/env/bin/python", ("/env/bin",), generation="/env")
FOREIGN = BUILT._replace(generation="", env=(("PYTHONPATH", "/module"),))


def shadowing(
    libraries: dict[str, Extension],
    expectation: Expectation = LOCAL,
    installation: Installation = BUILT,
) -> list[Finding]:
    mine = setup(expectation=expectation)._replace(installation=installation)
    return list(checks.check_shadowing(mine, evidence(libraries=libraries)))


def test_shadowing_is_for_what_is_asked_for() -> None:
    def shadowed(**packages: str) -> dict[str, Extension]:
        return all_three(torch=extension("torch", shadowed=packages))

    assert shadowing(shadowed(), LOCAL) == []
    (finding,) = shadowing(shadowed(torch="/module"), LOCAL)
    assert (finding.subject, finding.status) == ("torch", "fail")
    assert finding.message == "PYTHONPATH puts /module/torch before the environment's own torch"
    only = Expectation(("tensorflow",))
    assert shadowing(shadowed(torch="/module"), only) == []
    (foreign,) = shadowing(shadowed(torch="/module"), LOCAL, FOREIGN)
    assert "provider" in finding.remedy
    assert foreign.remedy.startswith("unset PYTHONPATH; --clean leaves it out")


def test_modules_of_python_that_are_hidden_matter_if_python_fails(tmp_path: Path) -> None:
    for name in ("enum.py", "types.py", "other.py"):
        (tmp_path / name).touch()
    foreign = FOREIGN._replace(env=(("PYTHONPATH", str(tmp_path)),))
    (works,) = shadowing(all_three(), LOCAL, foreign)
    assert (works.subject, works.status, works.remedy) == ("Python", "pass", "")
    dead = {name: Extension(name, outcome("", 1)) for name in ("torch", "tensorflow", "mxnet")}
    (fails,) = shadowing(dead, LOCAL, foreign)
    assert fails.status == "fail"
    assert fails.message == (
        f"PYTHONPATH puts {tmp_path}/enum.py before Python's own module enum, and 1 more"
    )
    assert fails.evidence.splitlines() == [f"{tmp_path}/enum.py", f"{tmp_path}/types.py"]


def test_packages_of_the_user_are_named() -> None:
    found = extension("torch", left_out={"horovod": "/home/a/.local"})
    (finding,) = shadowing(all_three(torch=found))
    assert (finding.subject, finding.status) == ("horovod of the user", "pass")
    assert finding.message.startswith("/home/a/.local/horovod is left out, also under")


def test_extension_passes() -> None:
    (finding,) = judge_extension(extension("torch"))
    assert (finding.status, finding.message) == ("pass", "torch 2.1, Horovod 0.28.1: MPI, Gloo")
    (old,) = judge_extension(extension("torch", built_with=None))
    assert old.status == "pass"
    assert "does not record what it was built with" in old.message
    (lacks,) = judge_extension(extension("torch"), Expectation(operations=("NCCL",)))
    assert lacks.message == "horovod.torch was built without NCCL"
    assert not judge_extension(absent("mxnet"))
    assert not judge_extension(absent("mxnet"), ANYTHING)


@pytest.mark.parametrize(
    ("found", "changed", "status", "message"),
    [
        (extension("torch", error="x"), {}, "skip", "horovod.torch does not load"),
        (extension("torch", built={"MPI": 0}), {}, "skip", "horovod.torch was built without MPI"),
        (
            extension("torch"),
            {"mpi": (MpiVersion("unknown"), "")},
            "unproven",
            "there is no mpirun",
        ),
        (extension("torch"), {"launchers": ("horovodrun-gloo",)}, "unproven", "over MPI"),
        (extension("mxnet"), {"expectation": ANYTHING}, "unproven", "no rank program for mxnet"),
        (extension("mxnet"), {}, "skip", "not requested, so not tried"),
        (extension("torch"), {"expectation": ONLY_GLOO}, "skip", "not requested, so not tried"),
    ],
)
def test_allreduce_that_was_not_run(
    found: Extension, changed: dict[str, Any], status: str, message: str
) -> None:
    (finding,) = judge_allreduce(found, None, **changed)
    assert finding.status == status
    assert message in finding.message


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_is_no_proof(ranks: int) -> None:
    """It is all that an allocation has, or that a launcher of an image starts on one host."""
    launch = Launch((), ranks)
    (alone,) = judge_allreduce(extension("torch"), rank_run(size=1), launch=launch)
    assert (alone.status, "one rank is no proof" in alone.message) == ("unproven", True)
    assert bool(alone.remedy)
    (wrong,) = judge_allreduce(extension("torch"), rank_run(size=1, wrong=1), launch=launch)
    assert wrong.status == "fail"
    seen = operations(extension("torch"), rank_run(size=1), Expectation(operations=("MPI",)))
    assert list(seen.values()) == ["unproven"]


OPEN_MPI = MpiVersion("Open MPI", "4.1.4")
HYDRA = MpiVersion("Hydra", "4.0")


@pytest.mark.parametrize(
    ("host", "image", "run", "status"),
    [
        (OPEN_MPI, MpiVersion("Open MPI", "4.1.8"), rank_run(wrong=1), "pass"),
        (OPEN_MPI, MpiVersion("Open MPI", "5.0.11"), rank_run(wrong=1), "unproven"),
        (OPEN_MPI, MpiVersion("Open MPI", "5.0.11"), rank_run(), "pass"),  # ranks prove it
        # It is judged for images that an mpirun starts.
        (OPEN_MPI, MpiVersion("Open MPI", "5.0.11"), rank_run()._replace(launcher="srun"), ""),
        (OPEN_MPI, MpiVersion("Open MPI"), rank_run(wrong=1), "unproven"),
        (OPEN_MPI, MpiVersion("unknown"), rank_run(wrong=1), "skip"),
        (HYDRA, OPEN_MPI, rank_run(wrong=1), "unproven"),
        (MpiVersion("Intel MPI", "2021.6"), HYDRA, rank_run(wrong=1), "pass"),
        (MpiVersion("unknown"), OPEN_MPI, rank_run(wrong=1), "unproven"),
    ],
)
def test_the_mpi_of_an_image_and_the_hosts(
    host: MpiVersion, image: MpiVersion, run: RankRun, status: str
) -> None:
    runs = {Pair("torch", "MPI"): run}
    known = evidence(image_mpi=image, mpi=(host, "/usr/bin/mpirun"), runs=runs)
    judged = rank_checks.check_image_mpi(setup(), known)
    assert [each.status for each in judged] == [status][: bool(status)]


def operations(found: Extension, run: RankRun, expectation: Expectation) -> dict[str, str]:
    return {f.subject: f.status for f in operation_findings(found, run, expectation)}


def operation_findings(
    found: Extension, run: RankRun | None, expectation: Expectation
) -> list[Finding]:
    runs = {Pair("torch", "MPI"): run} if run else {}
    known = evidence(extensions=by_framework(found), runs=runs)
    return list(rank_checks.check_operations(setup(expectation=expectation), known))


def test_operations() -> None:
    expected = Expectation(("torch",), None, ("NCCL", "MPI"))
    with_nccl = extension("torch", built={"NCCL": 21602})
    found = operations(with_nccl, rank_run(), expected)
    assert found == {"NCCL in torch": "unproven", "MPI in torch": "pass"}
    *_, finding = operation_findings(with_nccl, rank_run(wrong=1), expected)
    message = "it was built, but the ranks over MPI failed"
    assert finding[:4] == ("operation", "MPI in torch", "unproven", message)
    assert finding.remedy == "see allreduce"
    found = operations(extension("torch"), rank_run(), ANYTHING)
    assert found == {"MPI in torch": "pass", "Gloo in torch": "unproven"}
    assert not operations(extension("torch"), rank_run(), Expectation(("tensorflow",)))
    on_gpus = extension("torch", built={"NCCL": 21602}, gpus=4)
    (finding,) = operation_findings(on_gpus, None, Expectation(operations=("NCCL",)))
    assert finding[2:4] == ("unproven", "it was built, but no rank used NCCL")
    found = operations(extension("torch"), rank_run(), Expectation(("torch",), ("MPI",)))
    assert found == {"MPI in torch": "pass"}


def test_table() -> None:
    passed = [
        Finding("allreduce", "torch over MPI", "pass", ""),
        Finding("allreduce", "torch over Gloo", "fail", ""),
        Finding("operation", "MPI in tensorflow", "pass", ""),
    ]
    expectation = Expectation(("torch",), None, ("MPI",))
    mine = setup(expectation=expectation)
    rows = table(mine, all_three(tensorflow=absent("tensorflow")), passed)
    assert [(row.name, *row[2:]) for row in rows] == [
        ("TensorFlow", False, False, False),
        ("PyTorch", True, True, False),
        ("MXNet", False, False, False),
        ("MPI", None, True, True),
        ("Gloo", None, True, False),
        ("NCCL", False, False, False),
        ("DDL", False, False, False),
        ("CCL", False, False, False),
        ("MPI", True, True, True),
        ("Gloo", False, True, False),
    ]


@pytest.mark.parametrize(
    ("frameworks", "stated", "startable", "trained"),
    [
        ("torch", "Gloo MPI", "MPI Gloo", ["torch MPI"]),
        ("torch", "Gloo", "MPI Gloo", ["torch Gloo"]),
        ("torch", "MPI Gloo", "Gloo", ["torch Gloo"]),  # there is no mpirun
        ("torch", "", "MPI Gloo", ["torch MPI", "torch Gloo"]),  # perhaps it has only one of them
        # both frameworks cover both controllers
        ("tensorflow torch", "MPI Gloo", "MPI Gloo", ["tensorflow Gloo", "torch MPI"]),
        ("tensorflow torch", "Gloo", "MPI Gloo", ["tensorflow Gloo", "torch Gloo"]),
    ],
)
def test_each_framework_trains_over_one_of_the_expected_controllers(
    frameworks: str, stated: str, startable: str, trained: list[str]
) -> None:
    built = tuple(frameworks.split())
    pairs = [Pair(framework, each) for framework in built for each in startable.split()]
    expectation = Expectation(built, tuple(stated.split()) or None)
    mine = setup(exercises=("collectives", "training"), expectation=expectation)
    setups = setups_of_runs(mine, pairs)
    assert trained == [
        " ".join(pair) for pair, each in setups.items() if "training" in each.exercises
    ]
    assert all("collectives" in each.exercises for each in setups.values())


@pytest.mark.parametrize(
    ("frameworks", "controllers", "with_two"),
    [
        ("tensorflow torch", "MPI Gloo", ["tensorflow MPI", "torch Gloo"]),
        ("tensorflow torch", "MPI", []),
        ("torch", "MPI Gloo", []),  # over Gloo nothing else runs on three
    ],
)
def test_runs_whose_framework_and_controller_others_prove_have_two_ranks(
    frameworks: str, controllers: str, with_two: list[str]
) -> None:
    built, over = tuple(frameworks.split()), tuple(controllers.split())
    pairs = [Pair(framework, each) for framework in built for each in over]
    mine = setup(launch=Launch((), 3), expectation=Expectation(built, over))
    found = setups_of_runs(mine._replace(two_for_repeats=True), pairs)
    ranks = {" ".join(pair): each.launch.ranks for pair, each in found.items()}
    assert ranks == {name: 2 if name in with_two else 3 for name in ranks}
    assert {each.launch.ranks for each in setups_of_runs(mine, pairs).values()} == {3}


def said_of(shell: Shell, installation: Installation = BUILT) -> list[Finding]:
    mine = setup(shell=shell, launchers=("srun", *LAUNCHERS))
    return list(checks.check_variables(mine._replace(installation=installation), evidence()))


def test_variables_that_the_activation_unsets_are_named() -> None:
    mine = {"PYTHONHOME": "/p", "PYTHONPATH": "/x"}
    (built,) = said_of(Shell(mine))
    assert built.message.startswith(
        "your shell sets PYTHONHOME and PYTHONPATH, but ranks run without, as under `hvdenv run`"
    )
    assert built.evidence.splitlines() == ["PYTHONHOME=/p", "PYTHONPATH=/x"]
    (foreign,) = said_of(Shell(mine), FOREIGN)
    assert "your shell sets PYTHONHOME, but ranks run without" in foreign.message
    assert "ranks get PYTHONPATH from your shell, as under" in foreign.message


def test_variables_that_change_results_are_named() -> None:
    assert said_of(Shell({})) == []
    (finding,) = said_of(Shell({}, ("LD_PRELOAD", "NCCL_ALGO")))
    dropped = "--clean drops LD_PRELOAD, NCCL_ALGO; `hvdenv run --clean` does the same"
    assert finding.message == dropped
    mine = {"HOROVOD_API_TOKEN": "x1y2", "HOROVOD_TIMELINE": "t.json", "LD_PRELOAD": "w.so"}
    (finding,) = said_of(Shell(mine))
    assert (finding.subject, finding.status) == ("your shell", "pass")
    assert finding.message == (
        "ranks get HOROVOD_API_TOKEN, LD_PRELOAD from your shell, as under `hvdenv run`; --clean"
        " drops such variables in both"
    )
    assert finding.evidence.splitlines() == [
        "HOROVOD_API_TOKEN=***",
        "LD_PRELOAD=w.so",
        "not passed on by horovodrun-gloo: HOROVOD_API_TOKEN, LD_PRELOAD",
    ]


@pytest.mark.parametrize(
    ("facts", "status", "message"),
    [
        (RendezvousFacts(patched=True), "pass", "refuse requests"),
        (RendezvousFacts(False, ["CVE-2024-10190"]), "skip", "can run code as its user"),
        (RendezvousFacts(True, ["CVE-2026-31234"]), "fail", "but not at work"),
        (RendezvousFacts(error="ImportError: x"), "skip", "could not be probed"),
    ],
)
def test_holes_of_horovodrun(facts: RendezvousFacts, status: str, message: str) -> None:
    """A Horovod without the patch is not broken; one whose patch was overwritten is."""
    (finding,) = checks.check_rendezvous(setup(), evidence(rendezvous=facts))
    assert (finding.status, message in finding.message) == (status, True)
    assert (finding.status == "pass") != bool(finding.remedy or facts.error)


# ---------------------------------------------------------------- all checks, and the table


def reported(findings: list[Finding], extensions: Mapping[str, Extension]) -> Report:
    rows = table(setup(), extensions, findings)
    return Report("local", "/env", "n1", "2026", 1.0, tuple(findings), table=tuple(rows))


GOOD = evidence(
    mpi=MPI,
    libraries=all_three(),
    rendezvous=RendezvousFacts(patched=True),
    build_table=build_table(TABLE),
    extensions=all_three(),
    runs={
        Pair(framework, controller): rank_run(controller)
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


def judged(found: Evidence) -> Report:
    extensions = {name: each.result() for name, each in found.extensions.items()}
    return reported(list(judge_evidence(setup(), found)), extensions)


def test_the_report_states_how_many_ranks_ran() -> None:
    def stated(found: Evidence) -> str:
        return _report(setup(), found, (), (), 1.0).environment["ranks"]

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
NO_ANSWER = failed(StepError("no answer"))
HERE = Observation(
    "n1", File("/bin/python3", "3.11"), mpirun=File("/bin/mpirun", "4.1.8", "Open MPI")
)
LINKED = {"torch": Linked({"libmpi.so.40": File("/lib/libmpi.so.40")})}
OTHER_MPI = HERE._replace(mpirun=File("/bin/mpirun", "5.0.1", "Open MPI"), extensions=LINKED)
OTHER_PYTHON = HERE._replace(python=File("/bin/python3", "3.12"))
SHADOWED = all_three(torch=extension("torch", shadowed={"torch": "/module"}))
ANOTHER_HOROVODRUN = build_table(OLDER)
WITHOUT_MPI = build_table(without("MPI"))
LOST = [ChangedFile("missing", "lib/x.py")]
MPI_CHANGED = (HERE._replace(extensions=LINKED), OTHER_MPI)
# By what is wrong: the evidence, and the rows that are then not proven.
CASES: dict[str, tuple[Evidence, set[str]]] = {
    "nothing": (GOOD, set()),
    "allreduces": (over_mpi(known(rank_run(wrong=1))), TORCH_OVER_MPI),
    "collectives": (over_mpi(known(spoilt(WRONG, "collectives"))), TORCH_OVER_MPI),
    "training": (over_mpi(known(spoilt(DIVERGED, "training"))), TORCH_OVER_MPI),
    "ranks that could not be started": (over_mpi(NO_ANSWER), TORCH_OVER_MPI),
    # They used the operation of their controller.
    "ranks that end too early": (
        over_mpi(known(run(exited(0, code=-9, signal="SIGKILL"), size=2))),
        TORCH_OVER_MPI,
    ),
    "an import": (with_torch(error="ImportError: x"), {"Frameworks/PyTorch"}),
    "an extension": (with_torch(built={"Gloo": 0}), {"Frameworks/PyTorch"}),
    "a row of horovodrun": (GOOD._replace(build_table=known(WITHOUT_MPI)), set()),
    "another horovodrun": (GOOD._replace(build_table=known(ANOTHER_HOROVODRUN)), set()),
    "no table of horovodrun": (
        GOOD._replace(build_table=known(BuildTable(None, "empty", outcome()))),
        set(),
    ),
    "files": (GOOD._replace(changed_files=known(LOST)), ALL),
    "files that could not be compared": (GOOD._replace(changed_files=NO_ANSWER), ALL),
    "another MPI": (GOOD._replace(observed=known(MPI_CHANGED)), ALL),
    "another Python": (GOOD._replace(observed=known((HERE, OTHER_PYTHON))), ALL),
    "a package in front": (GOOD._replace(libraries=known(SHADOWED)), {"Frameworks/PyTorch"}),
    "servers of horovodrun": (
        GOOD._replace(rendezvous=known(RendezvousFacts(True, ["CVE-2026-1"]))),
        set(),
    ),
    "an interrupt": (GOOD._replace(changed_files=failed(InterruptedRunError())), ALL),
}


@pytest.mark.parametrize("name", CASES)
def test_what_failed_is_not_proven(name: str) -> None:
    found, lost = CASES[name]
    report = judged(found)
    assert {f"{row.section}/{row.name}" for row in report.table if row.proven} == ALL - lost
    assert bool(lost) <= (report.verdict in ("fail", "error"))


def test_each_error_of_its_own_is_a_finding() -> None:
    odd: Any = known(1)
    wrong = GOOD._replace(changed_files=odd, observed=odd, rendezvous=odd, libraries=odd)
    checks = [each.check for each in errors_of(wrong)]
    assert checks == ["files", "drift", "rendezvous", "shadowing"]
    stopped = failed(InterruptedRunError())
    (finding,) = errors_of(GOOD._replace(rendezvous=stopped, changed_files=stopped))
    assert finding.check == "interrupted"
    assert finding.message == "it was ended before it could judge: files, rendezvous"


def test_an_error_is_one_finding_whatever_it_keeps_from_being_judged() -> None:
    error = IncompatibleError("no such launcher", where="mpirun", remedy="use another")
    (finding,) = errors_of(over_mpi(failed(error)))
    said = ("allreduce", "torch over MPI", "error", "mpirun: no such launcher", "", "use another")
    assert finding[:6] == said
    everything = failed(ZeroDivisionError("by zero"))
    unknown = dict.fromkeys(GOOD.extensions, everything)
    (finding,) = errors_of(GOOD._replace(libraries=everything, extensions=unknown))
    assert finding.check == "check-build"
    assert finding.message == "the check could not run: ZeroDivisionError: by zero"
    assert "a bug in hvdenv" in finding.remedy


def errors_of(found: Evidence) -> list[Finding]:
    return [each for each in judge_evidence(setup(), found) if each.status == "error"]


def test_what_failed_with_damaged_files_has_their_remedy() -> None:
    failed = Finding("allreduce", "torch over MPI", "fail", "ranks hang", remedy="rebuild Horovod")
    assert with_first_remedy([failed], GOOD) == [failed]
    (found,) = with_first_remedy([failed], GOOD._replace(changed_files=known(LOST)))
    assert found.remedy.startswith("files are damaged")


def test_proof_needs_a_pass() -> None:
    skipped = Finding("allreduce", "torch over MPI", "skip", "")
    passed, unproven, failed = (
        skipped._replace(status=each) for each in ("pass", "unproven", "fail")
    )
    over_gloo = failed._replace(subject="torch over Gloo")
    for findings in ([], [skipped], [passed, unproven], [passed, failed]):
        assert not proven(findings, "allreduce", "MPI")
    assert proven([skipped, passed, over_gloo], "allreduce", "MPI")
    assert not proven([passed, over_gloo], "allreduce", "torch")

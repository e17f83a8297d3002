"""The judgements of verify: facts in, findings out, nothing is run here.

To add a check, write one function with the decorator. Its parameters name what it
judges: facts of hvdenv/evidence.py, or what the caller of verify gave. One with a
parameter ``framework`` or ``controller`` is asked once for each; ``extensions`` and
``rank_runs`` are all of a kind, by framework and by framework and controller.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from hvdenv import ranks
from hvdenv.command import Outcome
from hvdenv.evidence import CONTROLLERS, ROWS, BuildTable, Extension, missing_rows
from hvdenv.installation import Expectation
from hvdenv.launchers import LAUNCHERS, Mpi
from hvdenv.manifest import Difference
from hvdenv.ranks import RankRun
from hvdenv.report import Finding, Row

OPERATIONS = ("NCCL", "DDL", "CCL", "MLSL", "MPI", "Gloo")

CHECKS: dict[str, Callable[..., Iterator[Finding]]] = {}

_REBUILD = (
    "build Horovod again in this environment, with HOROVOD_WITH_{name}=1 so that a failure shows:"
    " a build that makes no extension says success otherwise"
)


def check(
    name: str,
) -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., Iterator[Finding]]]:
    """Register a check under the name that its findings carry."""

    def register(function: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
        CHECKS[name] = function
        return function

    return register


@check("check-build")
def check_build(
    build_table: BuildTable, extensions: Mapping[str, Extension], expectation: Expectation
) -> Iterator[Finding]:
    """Whether Horovod's own table can be read and shows what is expected."""
    name, subject = "check-build", "horovodrun --check-build"
    evidence = build_table.verbose or build_table.outcome.tail(40)
    table = build_table.table
    if table is None:
        if "unrecognized arguments" in build_table.outcome.output:
            yield Finding(name, subject, "skip", "this Horovod is too old to have --check-build")
            return
        remedy = "read the last lines in the evidence; horovodrun has to work in this environment"
        why = _ending(build_table.outcome) or build_table.problem
        yield Finding(name, subject, "fail", f"no table could be read: {why}", evidence, remedy)
        return
    if missing := missing_rows(table, expectation):
        remedy = "a row is also blank when an extension is there and does not load: see `extension`"
        message = f"expected, but not marked: {', '.join(missing)}"
        yield Finding(name, subject, "fail", message, evidence, remedy)
        return
    versions = {e.facts["version"] for e in extensions.values() if e.facts.get("version")}
    if versions - {table.version}:
        message = f"horovodrun is of {table.version}, the package of {', '.join(sorted(versions))}"
        remedy = "reinstall Horovod; horovodrun and the package come from two installations"
        yield Finding(name, subject, "fail", message, evidence, remedy)
        return
    notes = _notes(table.frameworks, extensions, expectation)
    yield Finding(name, subject, "pass", "; ".join([f"Horovod {table.version}", *notes]))


def _notes(
    frameworks: Mapping[str, bool], extensions: Mapping[str, Extension], expectation: Expectation
) -> list[str]:
    """What the table shows besides what is expected."""
    notes = []
    for framework, row in ROWS.items():
        if frameworks[row] and not extensions[framework].present:
            notes.append(f"it marks {row}, which has no extension (Horovod does that by mistake)")
        elif frameworks[row] and framework not in (expectation.frameworks or (framework,)):
            notes.append(f"{row} is there though nothing asks for it")
    return notes


@check("files")
def files(changed_files: Sequence[Difference] | None) -> Iterator[Finding]:
    """Whether what was built is still all there: scratch file systems are purged.

    What was added or changed outside of Horovod is said, and not judged: the other
    checks tell whether it does harm.
    """
    if changed_files is None:
        return
    kinds = {
        kind: [d for d in changed_files if d.kind == kind]
        for kind in ("missing", "changed", "extra")
    }
    evidence = "\n".join(f"{d.kind}: {d.path} {d.detail}".rstrip() for d in changed_files[:40])
    broken = kinds["missing"] + [d for d in kinds["changed"] if "/site-packages/horovod/" in d.path]
    if broken:
        message = f"{len(kinds['missing'])} files are missing and {len(kinds['changed'])} changed since the build"
        remedy = "build it again with `hvdenv build RECIPE --rebuild`, where nothing is purged"
        yield Finding("files", "manifest", "fail", message, evidence, remedy)
        return
    others = [
        f"{len(kinds[kind])} {word}"
        for kind, word in (("changed", "changed"), ("extra", "added"))
        if kinds[kind]
    ]
    message = "all files of the build are there"
    yield Finding("files", "manifest", "pass", "; ".join([message, *others]), evidence)


@check("frameworks")
def frameworks(extensions: Mapping[str, Extension], expectation: Expectation) -> Iterator[Finding]:
    """Where nothing was stated: at least one framework has an extension."""
    if expectation.frameworks is None and not any(e.present for e in extensions.values()):
        folder = next(iter(extensions.values())).facts.get("horovod", "")
        yield Finding(
            "frameworks",
            "any framework",
            "fail",
            "Horovod has no extension for any framework",
            f"package: {folder or 'not found'}\n" + "\n".join(_paths(extensions)),
            _REBUILD.format(name="<FRAMEWORK>"),
        )


def _paths(extensions: Mapping[str, Extension]) -> list[str]:
    return [f"not there: {e.facts['path']}" for e in extensions.values() if e.facts.get("path")]


@check("extension")
def extension(extension: Extension, expectation: Expectation, framework: str) -> Iterator[Finding]:
    """Whether a framework's extension is there, loads, and fits the framework installed."""
    stated = framework in (expectation.frameworks or ())
    if not extension.present and not stated and not _ending(extension.outcome):
        return
    facts = extension.facts
    evidence = "\n".join(f"{key}: {value}" for key, value in facts.items())
    tests = (_absence, _misfit, _lack)
    if problem := next((found for test in tests if (found := test(extension, expectation))), None):
        evidence = facts.get("traceback", "") or evidence or extension.outcome.tail(40)
        finding = Finding("extension", framework, "fail", problem[0], evidence, problem[1])
        yield finding if _asked(expectation, framework) else _tolerated(finding)
        return
    built = [name for name in OPERATIONS if extension.built(name)]
    message = f"{framework} {facts['installed']}, Horovod {facts['version']}: {', '.join(built)}"
    if facts["built_with"] is None:
        message += "; this Horovod does not record what it was built with"
    yield Finding("extension", framework, "pass", message, evidence)


def _asked(expectation: Expectation, framework: str, controller: str = "") -> bool:
    """Whether something is expected, or nothing was stated about its kind."""
    controllers = expectation.controllers
    return (expectation.frameworks is None or framework in expectation.frameworks) and (
        not controller or controllers is None or controller in controllers
    )


def _tolerated(finding: Finding) -> Finding:
    """What is wrong with something that nothing asks for is reported, but fails nothing."""
    return finding._replace(status="skip", message=f"not asked for: {finding.message}")


def _rebuild(extension: Extension) -> str:
    return _REBUILD.format(name=ROWS[extension.framework].upper())


def _absence(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """Why the extension could not even be looked at, and what to do; None if it could."""
    facts, name = extension.facts, extension.framework
    if ending := _ending(extension.outcome):
        return f"importing horovod.{name} {ending}", f"see the evidence; {_rebuild(extension)}"
    if not facts:
        return f"looking at horovod.{name} gave no answer", "read the output in the evidence"
    if not facts["horovod"]:
        return "there is no package horovod in this environment", "install Horovod there"
    if not extension.present:
        return f"the extension is missing: {facts['path']}", _rebuild(extension)
    return None


def _misfit(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """What the extension and the framework installed have against each other."""
    facts, name = extension.facts, extension.framework
    built_with, installed = facts["built_with"], facts.get("installed", "")
    if built_with is not None and installed and built_with != installed:
        return (
            f"built with {name} {built_with or '(not recorded)'}, but {installed} is installed",
            f"install {name} {built_with} again, or build Horovod again for {installed}",
        )
    if facts.get("error"):
        what = facts["error"].splitlines()[0]
        return f"horovod.{name} does not import: {what}", _rebuild(extension)
    return None


def _lack(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """What should have been built into the extension and was not."""
    name = extension.framework
    if not all(extension.built(controller) is not None for controller in CONTROLLERS):
        return f"horovod.{name} does not say what was built into it", _rebuild(extension)
    wanted = dict.fromkeys([*(expectation.controllers or ()), *(expectation.operations or ())])
    if missing := [n for n in wanted if not extension.built(n)]:
        return f"horovod.{name} was built without {', '.join(missing)}", _rebuild(extension)
    return None


def _ending(outcome: Outcome) -> str:
    if outcome.timed_out:
        return f"did not end within {outcome.command.timeout:.0f} s"
    if outcome.returncode < 0:
        return f"was ended by {signal.Signals(-outcome.returncode).name}"
    return f"ended with exit code {outcome.returncode}" if outcome.returncode else ""


@check("allreduce")
def allreduce(
    extension: Extension,
    rank_run: RankRun | None,
    expectation: Expectation,
    mpi: tuple[Mpi, str],
    launchers: tuple[str, ...],
    framework: str,
    controller: str,
) -> Iterator[Finding]:
    """Whether N ranks together compute the right sums and averages."""
    subject = f"{framework} over {controller}"
    if rank_run is not None:
        finding = Finding("allreduce", subject, *ranks.judge(rank_run))
        bad = finding.status != "pass" and not _asked(expectation, framework, controller)
        yield _tolerated(finding) if bad else finding
        return
    if not extension.present:
        return
    if not extension.usable:
        yield Finding("allreduce", subject, "skip", f"horovod.{framework} does not load")
    elif not extension.built(controller):
        message = f"horovod.{framework} was built without {controller}"
        yield Finding("allreduce", subject, "skip", message)
    else:
        why, remedy = _why_not_run(framework, controller, mpi, launchers)
        finding = Finding("allreduce", subject, "unproven", why, remedy=remedy)
        yield finding if _asked(expectation, framework, controller) else _tolerated(finding)


def _why_not_run(
    framework: str, controller: str, mpi: tuple[Mpi, str], launchers: Sequence[str]
) -> tuple[str, str]:
    if framework == "mxnet":
        return "hvdenv has no rank program for mxnet", "try a training script of your own"
    if controller == "MPI" and not mpi[1]:
        return (
            "there is no mpirun in the environment or on PATH",
            "load the module of the MPI that Horovod was built with, or install it",
        )
    names = [name for name, launcher in LAUNCHERS.items() if launcher.controller == controller]
    return (
        f"none of the launchers asked for ({', '.join(launchers)}) starts ranks over {controller}",
        f"add one of these: {', '.join(names)}",
    )


@check("operation")
def operations(
    extensions: Mapping[str, Extension],
    rank_runs: Mapping[tuple[str, str], RankRun | None],
    expectation: Expectation,
) -> Iterator[Finding]:
    """Which tensor operations were seen at work; the extension check finds missing ones."""
    for framework, found in extensions.items():
        if not found.usable or not _asked(expectation, framework):
            continue
        seen = _seen(framework, rank_runs)
        for name in expectation.operations or OPERATIONS:
            subject = f"{name} in {framework}"
            if name in seen:
                message = "it reduced tensors in the memory of the host"
                yield Finding("operation", subject, "pass", message)
            elif found.built(name):
                why, remedy = _why_unproven(name, found)
                yield Finding("operation", subject, "unproven", why, remedy=remedy)


def _seen(framework: str, rank_runs: Mapping[tuple[str, str], RankRun | None]) -> set[str]:
    """Operations that Horovod named in runs that were right."""
    seen: set[str] = set()
    for (name, _), run in rank_runs.items():
        if name == framework and run is not None and ranks.judge(run).status == "pass":
            seen |= run.operations
    return seen


def _why_unproven(name: str, extension: Extension) -> tuple[str, str]:
    if name != "NCCL":
        return f"it was built, but no rank used {name}", ""
    if not extension.facts.get("gpus"):
        return (
            "NCCL was built, but there is no GPU on this host to use it",
            "verify on a node with GPUs",
        )
    return (
        "NCCL was built and there are GPUs, but the ranks of hvdenv use the host's memory only",
        "try a training script of your own on the GPUs",
    )


def table(
    expectation: Expectation, extensions: Mapping[str, Extension], findings: Sequence[Finding]
) -> Iterator[Row]:
    """What was expected, built and proven, row by row as Horovod's own table has it."""
    usable = [extension for extension in extensions.values() if extension.usable]
    for framework in ("tensorflow", "torch", "mxnet"):
        stated = _stated(expectation.frameworks, framework)
        proven = _proven(findings, "allreduce", f"{framework} over ", "")
        built = extensions[framework].present
        yield Row("Frameworks", ROWS[framework], stated, built, proven)
    for name in CONTROLLERS:
        stated = _stated(expectation.controllers, name)
        proven = _proven(findings, "allreduce", "", f" over {name}")
        yield Row("Controllers", name, stated, any(e.built(name) for e in usable), proven)
    for name in OPERATIONS:
        stated = _stated(expectation.operations, name)
        proven = _proven(findings, "operation", f"{name} in ", "")
        if stated or any(e.built(name) is not None for e in usable):
            built = any(e.built(name) for e in usable)
            yield Row("Tensor Operations", name, stated, built, proven)


def _stated(names: Sequence[str] | None, name: str) -> bool | None:
    return None if names is None else name in names


def _proven(findings: Sequence[Finding], check: str, begin: str, end: str) -> bool:
    """Whether all that was judged about such subjects passed, and something was."""
    statuses = {
        finding.status
        for finding in findings
        if finding.check == check
        and finding.subject.startswith(begin)
        and finding.subject.endswith(end)
    }
    return statuses - {"skip"} == {"pass"}

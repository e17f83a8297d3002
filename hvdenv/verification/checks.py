"""The judgements of verify: facts in, findings out, nothing is run here.

To add a check, write one function with the decorator. Its parameters name what it
judges: facts of hvdenv/verification/collectors.py, or what the caller of verify gave. One with a
parameter ``framework`` or ``controller`` is asked once for each; ``extensions`` and
``rank_runs`` are all of a kind, by framework and by framework and controller.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hvdenv.command import Outcome
from hvdenv.environments.installation import Expectation, is_version
from hvdenv.environments.manifest import Difference
from hvdenv.knowledge.diagnosis import explain
from hvdenv.launch.launchers import LAUNCHERS, Launch, Mpi
from hvdenv.launch.placement import Requested, hidden, is_secret
from hvdenv.launch.preflight import compatible
from hvdenv.reports.report import Finding, Row, Status
from hvdenv.verification import bench, collectives, datapath, ranks, training
from hvdenv.verification.bench import Benchmark, Effort
from hvdenv.verification.checkbuild import CheckBuild
from hvdenv.verification.collectors import (
    CONTROLLERS,
    FILES_OF_RANKS,
    NEED_MPIRUN,
    ROWS,
    BuildTable,
    Extension,
    Observed,
    launcher_for,
    missing_rows,
)
from hvdenv.verification.drift import compare
from hvdenv.verification.ranks import RankRun

OPERATIONS = ("NCCL", "DDL", "CCL", "MLSL", "MPI", "Gloo")

# Of a variable's value, such as a long LD_LIBRARY_PATH.
_VALUE = 200
# What the import of a framework may take on a slow file system.
_FAIR_SECONDS = 30.0

_NOWHERE = Launch((), 0)

CHECKS: dict[str, Callable[..., Iterator[Finding]]] = {}

_REBUILD = (
    "build Horovod again in this environment, with HOROVOD_WITH_{name}=1 so that a failure shows:"
    " a build that makes no extension says success otherwise"
)


class Shell(NamedTuple):
    """What of the user's shell changes what ranks do.

    Attributes:
        passed: the variables that ranks get, as they do from `hvdenv run`.
        dropped: names of those that they do not get.
    """

    passed: Mapping[str, str]
    dropped: tuple[str, ...] = ()


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
        ending, last = _ending(build_table.outcome), build_table.outcome.tail(1)
        why = (f"{ending} ({last})" if last else ending) if ending else build_table.problem
        yield Finding(name, subject, "fail", f"no table could be read: {why}", evidence, remedy)
        return
    if missing := missing_rows(table, expectation):
        remedy = "a row is also blank when an extension is there and does not load: see `extension`"
        message = f"expected, but not marked: {', '.join(missing)}"
        yield Finding(name, subject, "fail", message, evidence, remedy)
        return
    versions = {e.facts.version for e in extensions.values() if e.facts.version}
    if versions - {table.version}:
        message = f"horovodrun is of {table.version}, the package of {', '.join(sorted(versions))}"
        remedy = "reinstall Horovod; horovodrun and the package come from two installations"
        yield Finding(name, subject, "fail", message, evidence, remedy)
        return
    if invented := _invented(table, extensions):
        message = (
            f"it marks {', '.join(invented)}, which the extensions themselves say they were built"
            " without: this table describes another installation"
        )
        remedy = (
            "rely on the other findings; check which horovodrun runs here (a script, another"
            " installation), and reinstall Horovod"
        )
        yield Finding(name, subject, "fail", message, evidence, remedy)
        return
    notes = _notes(table.frameworks, extensions, expectation)
    yield Finding(name, subject, "pass", "; ".join([f"Horovod {table.version}", *notes]))


def _invented(table: CheckBuild, extensions: Mapping[str, Extension]) -> list[str]:
    """Rows that are marked though every extension there can be asked and was built without them."""
    present = [extension for extension in extensions.values() if extension.present]
    if not present or not all(extension.usable for extension in present):
        return []
    rows = (table.controllers, table.tensor_operations)
    marked = dict.fromkeys(name for each in rows for name in each if each[name])
    return [name for name in marked if all(each.built(name) == 0 for each in present)]


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


# What to do about anything that fails where files are damaged.
REBUILD = (
    "rebuild it: `hvdenv build RECIPE --rebuild` (with --prefix if unused files are purged there)"
)


def damaged(changed_files: Sequence[Difference]) -> list[Difference]:
    """Files that are gone or empty, as a purge or a power cut leaves them."""
    return [d for d in changed_files if d.kind == "missing" or d.detail.startswith("0 bytes ")]


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
    lost = damaged(changed_files)
    if lost or any("/site-packages/horovod/" in d.path for d in kinds["changed"]):
        message = f"{len(kinds['missing'])} files are missing and {len(kinds['changed'])} changed since the build"
        message = f"files are damaged: {message}" if lost else message
        yield Finding("files", "manifest", "fail", message, evidence, REBUILD)
        return
    others = [
        f"{len(kinds[kind])} {word}"
        for kind, word in (("changed", "changed"), ("extra", "added"))
        if kinds[kind]
    ]
    message = "all files of the build are there"
    yield Finding("files", "manifest", "pass", "; ".join([message, *others]), evidence)


@check("drift")
def drift(observed: Observed | None) -> Iterator[Finding]:
    """Whether what the environment rests on is still what it was built on.

    Each change that matters is a finding; those that do no harm are in the evidence.
    """
    if observed is None:
        return
    if observed.was is None or observed.now is None:
        yield Finding("drift", "since the build", "skip", observed.why)
        return
    changes = compare(observed.was, observed.now)
    seen = [f"built on {observed.was.host}, now on {observed.now.host}"]
    evidence = "\n".join(seen + [change.what for change in changes])
    for change in (change for change in changes if change.matters):
        message = f"{change.what}: {change.why}"
        yield Finding("drift", change.subject, "fail", message, evidence, change.remedy)
    harmless = [change.what for change in changes if not change.matters]
    if len(harmless) == len(changes):
        message = "; ".join(harmless[:3]) or "nothing has changed"
        more = f"; {len(harmless) - 3} more changes that do no harm" if harmless[3:] else ""
        yield Finding("drift", "since the build", "pass", message + more, evidence)


@check("variables")
def variables(shell: Shell, launchers: tuple[str, ...]) -> Iterator[Finding]:
    """What of the user's shell changes what ranks do: it is judged with it, or without it."""
    files = [name for name in shell.passed if name in FILES_OF_RANKS]
    passed = {name: value for name, value in shell.passed.items() if name not in files}
    said, evidence = [], [f"{name}={_shown(name, value)}" for name, value in passed.items()]
    if passed:
        said.append(
            f"ranks get {', '.join(passed)} from your shell, as under `hvdenv run`;"
            " --clean drops such variables in both"
        )
    if files:
        said.append(f"{', '.join(files)} under `hvdenv run` only: it names a file of yours")
    if shell.dropped:
        said.append(f"--clean drops {', '.join(shell.dropped)}; `hvdenv run --clean` does the same")
    for launcher in {LAUNCHERS[name].controller: name for name in reversed(launchers)}.values():
        if away := hidden(launcher, passed, Requested(), ()):
            evidence.append(f"not passed on by {launcher}: {', '.join(away)}")
    if said:
        yield Finding("variables", "your shell", "pass", "; ".join(said), "\n".join(evidence))


def _shown(name: str, value: str) -> str:
    """A value for a report: none that may be a secret."""
    return "***" if is_secret(name) else value[:_VALUE]


@check("frameworks")
def frameworks(extensions: Mapping[str, Extension], expectation: Expectation) -> Iterator[Finding]:
    """Where nothing was stated: at least one framework has an extension."""
    if expectation.frameworks is None and not any(e.present for e in extensions.values()):
        folder = next(iter(extensions.values())).facts.horovod
        yield Finding(
            "frameworks",
            "any framework",
            "fail",
            "Horovod has no extension for any framework",
            f"package: {folder or 'not found'}\n" + "\n".join(_paths(extensions)),
            _REBUILD.format(name="<FRAMEWORK>"),
        )


def _paths(extensions: Mapping[str, Extension]) -> list[str]:
    return [f"not there: {e.facts.path}" for e in extensions.values() if e.facts.path]


@check("shadowing")
def shadowing(libraries: Mapping[str, Extension], expectation: Expectation) -> Iterator[Finding]:
    """Whether PYTHONPATH puts other packages before those that were installed here.

    Modules do that. Horovod and its frameworks have to be the environment's own.
    """
    asked = [found.facts for name, found in libraries.items() if expectation.asks(name)]
    shadowed = {package: facts for facts in asked for package in facts.shadowed}
    for package, facts in shadowed.items():
        folder = facts.shadowed[package]
        yield Finding(
            "shadowing",
            package,
            "fail",
            f"PYTHONPATH puts {folder}/{package} before the environment's own {package}",
            f"python: {facts.python}\nhorovod: {facts.horovod}",
            "load no module that brings it, or let the recipe use what the module brings"
            ' (provider = "present")',
        )


@check("extension")
def extension(extension: Extension, expectation: Expectation, framework: str) -> Iterator[Finding]:
    """Whether a framework's extension is there, loads, and fits the framework installed."""
    stated = framework in (expectation.frameworks or ())
    if not extension.present and not stated and not _ending(extension.outcome):
        return
    facts = extension.facts
    evidence = "\n".join(f"{key}: {value}" for key, value in facts._asdict().items() if value)
    tests = (_absence, _misfit, _lack)
    if problem := next((found for test in tests if (found := test(extension, expectation))), None):
        evidence = facts.traceback or evidence or extension.outcome.tail(40)
        # Where hardly any time was left, a good one does not come to its end either.
        timeout = extension.outcome.command.timeout
        hurried = extension.outcome.timed_out and (timeout or 0) < _FAIR_SECONDS
        status: Status = "error" if hurried else "fail"
        finding = Finding("extension", framework, status, problem[0], evidence, problem[1])
        yield finding if expectation.asks(framework) else _tolerated(finding)
        return
    built = [name for name in OPERATIONS if extension.built(name)]
    message = f"{framework} {facts.installed}, Horovod {facts.version}: {', '.join(built)}"
    if facts.built_with is None:
        message += "; this Horovod does not record what it was built with"
    yield Finding("extension", framework, "pass", message, evidence)


def _tolerated(finding: Finding) -> Finding:
    """What is wrong with something that nothing asks for is reported, but fails nothing."""
    return finding._replace(status="skip", message=f"not asked for: {finding.message}")


def _rebuild(extension: Extension) -> str:
    return _REBUILD.format(name=ROWS[extension.framework].upper())


def _absence(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """Why the extension could not even be looked at, and what to do; None if it could."""
    facts, name = extension.facts, extension.framework
    if extension.cut_off:
        return (
            f"the extension is cut off: {facts.path} has {facts.size} of"
            f" {facts.size_by_header} bytes",
            f"look whether the disk or the quota is full; {_rebuild(extension)}",
        )
    if ending := _ending(extension.outcome):
        remedy = f"see the evidence; {_rebuild(extension)}"
        if extension.outcome.timed_out:
            remedy = "see what took so long, or give more with --timeout"
        return f"importing horovod.{name} {ending}", remedy
    if not facts.framework:
        return f"looking at horovod.{name} gave no answer", "read the output in the evidence"
    if not facts.horovod:
        return "there is no package horovod in this environment", "install Horovod there"
    if not extension.present:
        message = f"the extension is missing: {facts.path}"
        if facts.others:
            message += f"; those that are there are for another Python: {', '.join(facts.others)}"
        return message, _rebuild(extension)
    return None


def _misfit(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """What the extension and the framework installed have against each other."""
    facts, name = extension.facts, extension.framework
    built_with, installed = facts.built_with, facts.installed
    if built_with is not None and installed and built_with != installed:
        return (
            f"built with {name} {built_with or '(not recorded)'}, but {installed} is installed",
            f"install {name} {built_with} again, or build Horovod again for {installed}",
        )
    for package, there in ((name, installed), ("horovod", facts.version)):
        stated = expectation.versions.get(package)
        if stated and there and not is_version(there, stated):
            return (
                f"{package} {there} is here; the recipe says {stated}",
                "load the modules that bring it, or say in the recipe what these bring",
            )
    if facts.error:
        what = facts.error.splitlines()[0]
        known = explain(facts.traceback or facts.error, "run")
        if known and known.kind == "cause":
            return f"horovod.{name} does not import: {what} ({known.cause})", known.remedy
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
    launch: Launch,
    framework: str,
    controller: str,
) -> Iterator[Finding]:
    """Whether N ranks together compute the right sums and averages."""
    subject = f"{framework} over {controller}"
    if not extension.present:
        return
    if extension.outcome.timed_out and rank_run is not None:
        # What these ranks met may be why there was no time left to look at the extension.
        yield Finding("allreduce", subject, *ranks.judge(rank_run))
    elif not extension.usable:
        yield Finding("allreduce", subject, "skip", f"horovod.{framework} does not load")
    elif not extension.built(controller):
        message = f"horovod.{framework} was built without {controller}"
        yield Finding("allreduce", subject, "skip", message)
    elif not expectation.asks(framework, controller):
        yield Finding("allreduce", subject, "skip", "not asked for, so not tried")
    elif rank_run is not None:
        yield Finding("allreduce", subject, *_judged(rank_run, launch))
    else:
        why, remedy = _why_not_run(framework, controller, mpi, launchers)
        yield Finding("allreduce", subject, "unproven", why, remedy=remedy)


def _judged(run: RankRun, launch: Launch) -> ranks.Judgement:
    """What a run proves; one rank alone, be it never so right, has had nobody to reduce with."""
    found = ranks.judge(run)
    if run.size > 1 or found.status != "pass":
        return found
    if launch.ranks > 1:
        why = f"{run.launcher} starts ranks of an image on one host, and one rank is no proof"
        return ranks.Judgement("unproven", why, remedy="give a host two ranks")
    why = f"{found.message}; one rank is no proof"
    return ranks.Judgement("unproven", why, remedy="take two ranks (-n 2), where there is room")


def _why_not_run(
    framework: str, controller: str, mpi: tuple[Mpi, str], launchers: Sequence[str]
) -> tuple[str, str]:
    if framework == "mxnet":
        return "hvdenv has no rank program for mxnet", "try a training script of your own"
    if launcher_for(tuple(launchers), controller) in NEED_MPIRUN and not mpi[1]:
        return (
            "there is no mpirun in the environment or on PATH",
            "load the module of the MPI that Horovod was built with, or install it",
        )
    names = [name for name, launcher in LAUNCHERS.items() if launcher.controller == controller]
    return (
        f"none of the launchers asked for ({', '.join(launchers)}) starts ranks over {controller}",
        f"add one of these: {', '.join(names)}",
    )


@check("mpi")
def mpi_of_image(
    image_mpi: Mpi | None,
    mpi: tuple[Mpi, str],
    rank_runs: Mapping[tuple[str, str], RankRun | None],
) -> Iterator[Finding]:
    """Whether the host's mpirun can start the image's ranks; what these did says most."""
    runs = [run for run in rank_runs.values() if run and run.launcher in ("mpirun", "mpiexec")]
    if image_mpi is None or not runs:
        return
    if image_mpi.kind == "unknown":
        yield Finding("mpi", "image", "skip", "no mpirun in the image says which MPI it is of")
        return
    status, message = compatible(mpi[0], image_mpi)
    if status != "pass" and all(ranks.judge(run).status == "pass" for run in runs):
        status, message = "pass", f"{message}; the ranks are right all the same"
    remedy = "" if status == "pass" else "take hosts and an image of one series of Open MPI"
    yield Finding("mpi", "image", status, message, f"on the host: {mpi[1]}", remedy)


@check("operation")
def operations(
    extensions: Mapping[str, Extension],
    rank_runs: Mapping[tuple[str, str], RankRun | None],
    expectation: Expectation,
) -> Iterator[Finding]:
    """Which tensor operations were seen at work; the extension check finds missing ones."""
    for framework, found in extensions.items():
        if not found.usable or not expectation.asks(framework):
            continue
        runs = [
            run
            for (name, _), run in rank_runs.items()
            if name == framework and run and run.size > 1
        ]
        right = [run for run in runs if ranks.judge(run).status == "pass"]
        failed = [run for run in runs if ranks.judge(run).status == "fail"]
        seen = {name for run in right for name in datapath.operations(run)}
        for name in expectation.operations or OPERATIONS:
            subject = f"{name} in {framework}"
            if name in seen:
                where = "on GPUs" if name == "NCCL" else "in the memory of the host"
                yield Finding("operation", subject, "pass", f"it reduced tensors {where}")
            elif expectation.operations is None and _of_other_controller(name, expectation):
                yield Finding("operation", subject, "skip", "not asked for, so not tried")
            elif found.built(name):
                status, why, remedy = _why_not_seen(name, found, right, failed)
                yield Finding("operation", subject, status, why, remedy=remedy)


def _of_other_controller(name: str, expectation: Expectation) -> bool:
    """Whether an operation reduces only under a controller that nothing asks for."""
    return name in CONTROLLERS and name not in (expectation.controllers or CONTROLLERS)


def _why_not_seen(
    name: str, extension: Extension, right: Sequence[RankRun], failed: Sequence[RankRun]
) -> tuple[Status, str, str]:
    """Why an operation that was built was not seen at work in runs that were right."""
    if name != "NCCL":
        over = {run.controller for run in failed if name in (run.controller, *run.operations)}
        if over or (failed and name not in CONTROLLERS):
            named = ", ".join(sorted(over)) or "a controller that could use it"
            return "unproven", f"it was built, but the ranks over {named} failed", "see allreduce"
        return "unproven", f"it was built, but no rank used {name}", ""
    if not extension.facts.gpus:
        return (
            "unproven",
            "NCCL was built, but there is no GPU on this host to use it",
            "verify on a node with GPUs",
        )
    if not right:
        return (
            "unproven",
            "NCCL was built and there are GPUs, but no ranks were right that could use them",
            "see allreduce",
        )
    status, why = max(
        (datapath.why_no_nccl(run) for run in right), key=lambda one: one[0] == "fail"
    )
    if status == "fail":
        remedy = (
            "see that the framework is one for GPUs and that its CUDA fits the driver (nvidia-smi),"
            " and that Horovod was built with HOROVOD_GPU_OPERATIONS=NCCL"
        )
        return status, why, remedy
    return (
        status,
        f"NCCL was built and there are GPUs, but {why}",
        "take no more ranks on a host than it has GPUs for them (-n, --hosts), in a job that asks"
        " for GPUs",
    )


@check("data-path")
def data_path(
    rank_run: RankRun | None,
    mpi: tuple[Mpi, str],
    launch: Launch,
    framework: str,
    controller: str,
) -> Iterator[Finding]:
    """Whether data went the way that was meant; where the reductions are wrong, that is first."""
    if rank_run is not None and ranks.judge(rank_run).status == "pass":
        judgement = datapath.judge(rank_run, mpi[0], launch.settings.mca)
        yield Finding("data-path", f"{framework} over {controller}", *judgement)


@check("collectives")
def computed(
    extension: Extension,
    rank_run: RankRun | None,
    framework: str,
    controller: str,
    launch: Launch = _NOWHERE,
) -> Iterator[Finding]:
    """Whether each of Horovod's operations gives right numbers on every rank."""
    if rank_run is not None and _had(collectives.EXERCISE, rank_run, extension):
        judgements = collectives.judge(rank_run, launch.ranks)
        yield from _findings("collectives", f"{framework} over {controller}", judgements)


@check("training")
def trained(
    extension: Extension, rank_run: RankRun | None, framework: str, controller: str
) -> Iterator[Finding]:
    """Whether a small model, trained on N ranks, becomes what one process makes of it."""
    if rank_run is not None and _had(training.EXERCISE, rank_run, extension):
        judgements = training.judge(rank_run)
        yield from _findings("training", f"{framework} over {controller}", judgements)


def _had(exercise: str, run: RankRun, extension: Extension) -> bool:
    """Whether the ranks were to do an exercise, with a controller that they have."""
    return exercise in run.exercises and bool(extension.built(run.controller))


def _findings(
    name: str, subject: str, judgements: Iterable[tuple[str, ranks.Judgement]]
) -> Iterator[Finding]:
    """A finding for each judgement; one about a part is called after that too."""
    for part, judgement in judgements:
        yield Finding(name, f"{part}, {subject}" if part else subject, *judgement)


@check("bench")
def benchmark(
    effort: Effort,
    expectation: Expectation,
    bench_run: Benchmark | None,
    speed_runs: Sequence[RankRun] | None,
    framework: str,
    controller: str,
) -> Iterator[Finding]:
    """How fast allreduces and training steps are, against the recipe's references."""
    if bench_run is None:
        return
    subject = f"{framework} over {controller}"
    references = expectation.references
    yield Finding("bench", subject, *bench.judge(subject, bench_run, speed_runs or (), references))


@check("yardstick")
def yardstick(
    effort: Effort,
    expectation: Expectation,
    bench_runs: Mapping[tuple[str, str], Benchmark | None],
) -> Iterator[Finding]:
    """How fast the network is without Horovod, against the recipe's references."""
    done = [each for each in bench_runs.values() if each]
    for name, judgement in bench.judge_yardsticks(done, expectation.references):
        yield Finding("yardstick", name, *judgement)


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

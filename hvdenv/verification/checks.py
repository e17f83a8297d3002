"""The checks: each judges what collectors found. Nothing is run here.

To add one, write one function with the decorator: collection.py says what its parameters mean.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hvdenv.command import Outcome
from hvdenv.environments.installation import Expectation, Installation, hides_variables, is_version
from hvdenv.environments.manifest import Difference
from hvdenv.errors import HvdenvError
from hvdenv.knowledge.diagnosis import explain
from hvdenv.launch.launchers import LAUNCHERS, Launch, Mpi
from hvdenv.launch.placement import hidden
from hvdenv.launch.preflight import compatible
from hvdenv.masking import shown
from hvdenv.model.cluster import NCCL_ALONE
from hvdenv.reports.report import EVERYTHING, About, Finding, Row, Status, proven
from hvdenv.sites.jobs import COMMAND_NOT_FOUND
from hvdenv.standalone.ranks.events import RendezvousFacts
from hvdenv.verification import bench, collectives, datapath, ranks, training
from hvdenv.verification.bench import Benchmark, Effort
from hvdenv.verification.checkbuild import ROWS, CheckBuild
from hvdenv.verification.collection import CONTROLLERS, NEED_MPIRUN, Setup, Shell, check
from hvdenv.verification.collectors import (
    FILES_OF_RANKS,
    BuildTable,
    Extension,
    Extensions,
    HostMpi,
    Observed,
    RankRuns,
    missing_rows,
)
from hvdenv.verification.drift import compare
from hvdenv.verification.ranks import Judgement, RankRun

OPERATIONS = ("NCCL", "DDL", "CCL", "MLSL", "MPI", "Gloo")

# Of a variable's value, such as a long LD_LIBRARY_PATH.
_VALUE = 200
# What the import of a framework may take on a slow file system.
_FAIR_SECONDS = 30.0
_NOWHERE = Launch((), 0)
_NOT_REQUESTED = Judgement("skip", "not requested, so not tried")
_REBUILD = (
    "rebuild Horovod in this environment with HOROVOD_WITH_{name}=1: without this variable, a"
    " build that makes no extension still succeeds"
)


@check("check-build")
def check_build(
    build_table: BuildTable, extensions: Extensions, expectation: Expectation
) -> Iterator[Finding]:
    """Whether Horovod's own table can be read and shows what is expected."""
    judgement = _judge_table(build_table, extensions, expectation)
    about = _rows(build_table, expectation)
    yield Finding("check-build", "horovodrun --check-build", *judgement, about)


def _rows(found: BuildTable, expectation: Expectation) -> About:
    """The rows that Horovod's own table lacks; all if it is wrong, none if there is no table."""
    missing = missing_rows(found.table, expectation) if found.table else []
    if found.table and not missing:
        return EVERYTHING
    return About(
        tuple(name for name in ROWS if ROWS[name] in missing),
        tuple(name for name in CONTROLLERS if name in missing),
        tuple(name for name in OPERATIONS if name in missing),
    )


def _judge_table(found: BuildTable, extensions: Extensions, expectation: Expectation) -> Judgement:
    evidence, table = found.verbose or found.outcome.tail(40), found.table
    if table is None:
        return _no_table(found, evidence)
    if missing := missing_rows(table, expectation):
        message = f"expected, but not marked: {', '.join(missing)}"
        remedy = "see the finding `extension`: a row is also blank if an extension does not load"
        return Judgement("fail", message, evidence, remedy)
    versions = {e.facts.version for e in extensions.values() if e.facts.version}
    if versions - {table.version}:
        packages = ", ".join(sorted(versions))
        message = f"horovodrun belongs to Horovod {table.version}, the package is {packages}"
        remedy = "reinstall Horovod: horovodrun and the package come from two installations"
        return Judgement("fail", message, evidence, remedy)
    if invented := _invented(table, extensions):
        return Judgement(
            "fail",
            f"it marks {', '.join(invented)}, but the extensions report that they were built"
            " without: the table describes another installation",
            evidence,
            "rely on the other findings; check which horovodrun runs here (a wrapper script, or"
            " another installation), and reinstall Horovod",
        )
    notes = _notes(table.frameworks, extensions, expectation)
    return Judgement("pass", "; ".join([f"Horovod {table.version}", *notes]))


def _no_table(found: BuildTable, evidence: str) -> Judgement:
    if "unrecognized arguments" in found.outcome.output:
        return Judgement("skip", "this Horovod is too old for --check-build")
    if found.outcome.returncode == COMMAND_NOT_FOUND:
        message = "no table could be read: there is no horovodrun in this environment or on PATH"
        return Judgement("fail", message, evidence, "reinstall Horovod, which contains horovodrun")
    ending, last = _ending(found.outcome), found.outcome.tail(1)
    why = (f"{ending} ({last})" if last else ending) if ending else found.problem
    remedy = "read the last lines of the evidence; horovodrun must work in this environment"
    return Judgement("fail", f"no table could be read: {why}", evidence, remedy)


def _invented(table: CheckBuild, extensions: Extensions) -> list[str]:
    """Marked rows that every existing extension reports to be built without."""
    present = [extension for extension in extensions.values() if extension.present]
    if not present or not all(extension.usable for extension in present):
        return []
    rows = (table.controllers, table.tensor_operations)
    marked = dict.fromkeys(name for each in rows for name in each if each[name])
    return [name for name in marked if all(each.built(name) == 0 for each in present)]


def _notes(
    frameworks: Mapping[str, bool], extensions: Extensions, expectation: Expectation
) -> Iterator[str]:
    """What the table shows besides what is expected."""
    for framework, row in ROWS.items():
        if frameworks[row] and not extensions[framework].present:
            yield f"it marks {row}, which has no extension (a known bug of Horovod)"
        elif frameworks[row] and not expectation.asks(framework):
            yield f"{row} was built but not requested"


# The remedy for everything that fails if files are damaged.
REBUILD = (
    "rebuild it: `hvdenv build RECIPE --rebuild` (with --prefix if unused files are purged there)"
)


def damaged(changed_files: Sequence[Difference]) -> list[Difference]:
    """Files that are missing or empty, as a purge or a power cut leaves them."""
    return [d for d in changed_files if d.kind == "missing" or d.detail.startswith("0 bytes ")]


@check("files")
def files(changed_files: Sequence[Difference] | None) -> Iterator[Finding]:
    """Whether all files of the build are still there: scratch file systems are purged.

    Files that were added, or changed outside of Horovod, are named: other checks judge them.
    """
    if changed_files is None:
        return
    count = Counter(each.kind for each in changed_files)
    missing, changed, extra = (count[kind] for kind in ("missing", "changed", "extra"))
    evidence = "\n".join(f"{d.kind}: {d.path} {d.detail}".rstrip() for d in changed_files[:40])
    lost = damaged(changed_files)
    if lost or any(
        d.kind == "changed" and "/site-packages/horovod/" in d.path for d in changed_files
    ):
        counts = ((missing, "removed"), (changed, "changed"))
        parts = [f"{n} {'file was' if n == 1 else 'files were'} {how}" for n, how in counts if n]
        message = f"{'files are damaged: ' * bool(lost)}{' and '.join(parts)} since the build"
        judgement = Judgement("fail", message, evidence, REBUILD)
    else:
        notes = [f"{changed} changed"] * bool(changed) + [f"{extra} added"] * bool(extra)
        message = "; ".join(["all files of the build are present", *notes])
        judgement = Judgement("pass", message, evidence)
    yield Finding("files", "manifest", *judgement)


@check("drift")
def drift(observed: Observed | None) -> Iterator[Finding]:
    """Whether what the environment depends on is still what it was built on."""
    if observed is None:
        return
    if observed.was is None or observed.now is None:
        yield Finding("drift", "since the build", "skip", observed.why)
        return
    changes = compare(observed.was, observed.now)
    hosts = f"built on {observed.was.host}, now on {observed.now.host}"
    evidence = "\n".join([hosts, *(change.what for change in changes)])
    harmless = [change.what for change in changes if not change.matters]
    for change in (change for change in changes if change.matters):
        judgement = Judgement("fail", f"{change.what}: {change.why}", evidence, change.remedy)
        yield Finding("drift", change.subject, *judgement, change.about)
    if len(harmless) == len(changes):
        message = "; ".join(harmless[:3]) or "nothing has changed"
        more = f"; {len(harmless) - 3} more harmless changes" if harmless[3:] else ""
        yield Finding("drift", "since the build", *Judgement("pass", message + more, evidence))


@check("variables")
def variables(
    setup: Setup, shell: Shell, launchers: tuple[str, ...], installation: Installation
) -> Iterator[Finding]:
    """Variables of the user's shell that change what ranks do."""
    files = [name for name in shell.passed if name in FILES_OF_RANKS]
    unset = [name for name in shell.passed if name in installation.unset]
    named = {name: value for name, value in shell.passed.items() if name not in files}
    passed = {name: value for name, value in named.items() if name not in unset}
    notes, evidence = [], [f"{n}={shown(n, value)[:_VALUE]}" for n, value in named.items()]
    if unset:
        notes.append(
            f"your shell sets {' and '.join(unset)}, but ranks run without, as under `hvdenv run`"
            " and in `hvdenv shell`; a Python that you start yourself obeys them"
        )
    if passed:
        notes.append(
            f"ranks get {', '.join(passed)} from your shell, as under `hvdenv run`;"
            " --clean drops such variables in both"
        )
    if files:
        notes.append(f"only `hvdenv run` passes {', '.join(files)}, which names a file of yours")
    if shell.dropped:
        names = ", ".join(shell.dropped)
        notes.append(f"--clean drops {names}; `hvdenv run --clean` does the same")
    known = [name for name in reversed(launchers) if name in LAUNCHERS]
    patched = hides_variables(setup.installation.prefix)
    for launcher in {LAUNCHERS[name].controller: name for name in known}.values():
        if away := hidden(launcher, passed, (), patched=patched):
            evidence.append(f"not passed on by {launcher}: {', '.join(away)}")
    if notes:
        judgement = Judgement("pass", "; ".join(notes), "\n".join(evidence))
        yield Finding("variables", "your shell", *judgement)


@check("rendezvous")
def safe_rendezvous(rendezvous: RendezvousFacts) -> Iterator[Finding]:
    """Whether the servers of horovodrun refuse requests without the key of the job.

    A Horovod without the patch is not broken, so that its holes are named and not judged.
    """
    judgement = _judge_rendezvous(rendezvous)
    yield Finding("rendezvous", "servers of horovodrun", *judgement, About())


def _judge_rendezvous(found: RendezvousFacts) -> Judgement:
    if found.error:
        return Judgement("skip", f"could not be probed: {found.error}", found.traceback)
    if not found.accepted:
        return Judgement("pass", "they refuse requests that are not signed with the job's key")
    holes = " and ".join(found.accepted)
    evidence = f"a request without a signature was accepted by a server on 127.0.0.1: {holes}"
    if found.patched:
        message = f"the patch safe-rendezvous is there, but not at work: {holes}"
        return Judgement("fail", message, evidence, REBUILD)
    return Judgement(
        "skip",
        f"whoever reaches a port of horovodrun can run code as its user ({holes})",
        evidence,
        "let hvdenv build Horovod 0.26.1 or newer, with its patch safe-rendezvous; otherwise start"
        " ranks by mpirun or srun, and horovodrun only on nodes that you share with nobody",
    )


@check("frameworks")
def frameworks(extensions: Extensions, expectation: Expectation) -> Iterator[Finding]:
    """Where nothing is stated: whether at least one framework has an extension."""
    if expectation.frameworks is None and not any(e.present for e in extensions.values()):
        facts = [extension.facts for extension in extensions.values()]
        lines = [f"package: {facts[0].horovod or 'not found'}"]
        lines += [f"not there: {each.path}" for each in facts if each.path]
        message = "Horovod has no extension for any framework"
        remedy = _REBUILD.format(name="<FRAMEWORK>")
        judgement = Judgement("fail", message, "\n".join(lines), remedy)
        yield Finding("frameworks", "any framework", *judgement)


@check("shadowing")
def shadowing(
    libraries: Extensions,
    hiding: Mapping[str, str] | None,
    expectation: Expectation,
    installation: Installation,
) -> Iterator[Finding]:
    """Whether other packages come before the environment's: of PYTHONPATH, or the user's own."""
    requested = {name: found for name, found in libraries.items() if expectation.asks(name)}
    shadowed = [
        (package, found)
        for found in requested.values() for package in found.facts.shadowed
    ]  # fmt: skip
    remedy = (
        "unload the module that sets it, or let the recipe use the module's package"
        ' (provider = "present")'
        if installation.generation
        else "unset PYTHONPATH; --clean leaves it out here and under `hvdenv run`"
    )
    for package, found in dict(shadowed).items():
        facts = found.facts
        about = About(tuple(each.framework for name, each in shadowed if name == package))
        evidence = f"python: {facts.python}\nhorovod: {facts.horovod}"
        judgement = Judgement(
            "fail",
            f"PYTHONPATH puts {facts.shadowed[package]}/{package} before the environment's own"
            f" {package}",
            evidence,
            remedy,
        )
        yield Finding("shadowing", package, *judgement, about)
    if hiding:
        works = any(found.facts.framework for found in libraries.values())
        first, *others = hiding
        more = f", and {len(others)} more" if others else ""
        message = f"PYTHONPATH puts {hiding[first]} before Python's own module {first}{more}"
        judgement = Judgement("pass" if works else "fail", message, "\n".join(hiding.values()))
        yield Finding("shadowing", "Python", *judgement._replace(remedy="" if works else remedy))
    left_out = {
        name: folder
        for found in requested.values()
        for name, folder in found.facts.left_out.items()
    }
    for package, folder in left_out.items():
        message = (
            f"{folder}/{package} is left out, also under `hvdenv run`; a Python that is started"
            " without PYTHONNOUSERSITE=1 imports it"
        )
        yield Finding("shadowing", f"{package} of the user", "pass", message)


@check("extension")
def extension(extension: Extension, expectation: Expectation, framework: str) -> Iterator[Finding]:
    """Whether a framework's extension exists, loads, and fits the framework installed."""
    stated = framework in (expectation.frameworks or ())
    if not extension.present and not stated and not _ending(extension.outcome):
        return
    facts = extension.facts
    evidence = "\n".join(f"{key}: {value}" for key, value in facts._asdict().items() if value)
    tests = (_absence, _misfit, _lack)
    if problem := next((found for test in tests if (found := test(extension, expectation))), None):
        message, remedy = problem
        evidence = facts.traceback or evidence or extension.outcome.tail(40)
        # With hardly any time left, a good one does not finish either.
        timeout = extension.outcome.command.timeout
        hurried = extension.outcome.timed_out and (timeout or 0) < _FAIR_SECONDS
        status: Status = "error" if hurried else "fail"
        if not expectation.asks(framework):
            status, message = "skip", f"not requested: {message}"
        judgement = Judgement(status, message, evidence, remedy)
    else:
        built = ", ".join(name for name in OPERATIONS if extension.built(name))
        message = f"{framework} {facts.installed}, Horovod {facts.version}: {built}"
        if facts.built_with is None:
            message += "; this Horovod does not record what it was built with"
        judgement = Judgement("pass", message, evidence)
    lacking = _lacking(extension, expectation)
    about = About(
        (framework,),
        tuple(name for name in lacking if name in CONTROLLERS),
        tuple(name for name in lacking if name in OPERATIONS),
    )
    yield Finding("extension", framework, *judgement, about)


def _rebuild(extension: Extension) -> str:
    return _REBUILD.format(name=ROWS[extension.framework].upper())


def _absence(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """Why the extension cannot be inspected, and what to do; None if it can."""
    facts, name = extension.facts, extension.framework
    if extension.cut_off:
        return (
            f"the extension file is truncated: {facts.path} has {facts.size} of"
            f" {facts.size_by_header} bytes",
            f"check whether the disk or the quota is full; {_rebuild(extension)}",
        )
    if ending := _ending(extension.outcome):
        remedy = f"see the evidence; {_rebuild(extension)}"
        if extension.outcome.timed_out:
            remedy = "find out what took so long, or allow more time with --timeout"
        return f"importing horovod.{name} {ending}", remedy
    if not facts.framework:
        return f"inspecting horovod.{name} gave no answer", "read the output in the evidence"
    if not facts.horovod:
        return "there is no package horovod in this environment", "install Horovod in it"
    if not extension.present:
        others = ", ".join(facts.others)
        more = f"; existing ones are for another Python: {others}" if others else ""
        return f"the extension is missing: {facts.path}{more}", _rebuild(extension)
    return None


def _misfit(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """How the extension and the installed framework contradict each other or the recipe."""
    facts, name = extension.facts, extension.framework
    if facts.built_with is not None and facts.installed and facts.built_with != facts.installed:
        built_with = facts.built_with or "(not recorded)"
        return (
            f"built with {name} {built_with}, but {facts.installed} is installed",
            f"install {name} {facts.built_with}, or rebuild Horovod for {facts.installed}",
        )
    for package, found in ((name, facts.installed), ("horovod", facts.version)):
        stated = expectation.versions.get(package)
        if stated and found and not is_version(found, stated):
            return (
                f"{package} {found} is installed, but the recipe says {stated}",
                "load the modules that provide it, or state in the recipe what they provide",
            )
    if facts.error:
        message = f"horovod.{name} does not import: {facts.error.splitlines()[0]}"
        known = explain(facts.traceback or facts.error)
        if known and known.kind == "cause":
            return f"{message} ({known.cause})", known.remedy
        return message, _rebuild(extension)
    return None


def _lack(extension: Extension, expectation: Expectation) -> tuple[str, str] | None:
    """What should have been built into the extension and was not."""
    name = extension.framework
    if not all(extension.built(controller) is not None for controller in CONTROLLERS):
        return f"horovod.{name} does not report what was built into it", _rebuild(extension)
    if missing := _lacking(extension, expectation):
        return f"horovod.{name} was built without {', '.join(missing)}", _rebuild(extension)
    return None


def _lacking(extension: Extension, expectation: Expectation) -> list[str]:
    """What is expected in a usable extension and was not built into it."""
    wanted = dict.fromkeys([*(expectation.controllers or ()), *(expectation.operations or ())])
    return [name for name in wanted if extension.usable and not extension.built(name)]


def _ending(outcome: Outcome) -> str:
    if outcome.timed_out:
        return f"did not finish within {outcome.command.timeout:.0f} s"
    if outcome.returncode < 0:
        return f"was ended by {signal.Signals(-outcome.returncode).name}"
    return f"exited with code {outcome.returncode}" if outcome.returncode else ""


@check("allreduce")
def allreduce(
    extension: Extension,
    rank_run: RankRun | None,
    setup: Setup,
    mpi: HostMpi,
    framework: str,
    controller: str,
) -> Iterator[Finding]:
    """Whether N ranks together compute the right sums and averages."""
    if not extension.present:
        return
    if extension.outcome.timed_out and rank_run is not None:
        # The ranks' problem may be why no time was left for the extension.
        judgement = ranks.judge(rank_run)
    elif not extension.usable:
        judgement = Judgement("skip", f"horovod.{framework} does not load")
    elif not extension.built(controller):
        judgement = Judgement("skip", f"horovod.{framework} was built without {controller}")
    elif not setup.expectation.asks(framework, controller):
        judgement = _NOT_REQUESTED
    elif rank_run is not None:
        judgement = _judge_run(rank_run, setup.launch)
    else:
        judgement = _not_run(framework, controller, mpi, setup)
    yield Finding("allreduce", f"{framework} over {controller}", *judgement)


def _judge_run(run: RankRun, launch: Launch) -> Judgement:
    """What a run proves; a single rank, even if right, had no other rank to reduce with."""
    found = ranks.judge(run)
    if run.size > 1 or found.status != "pass":
        return found
    if launch.ranks > 1:
        message = f"{run.launcher} starts ranks of an image on one host, and one rank is no proof"
        return Judgement("unproven", message, remedy="start two ranks on a host")
    message = f"{found.message}; one rank is no proof"
    return Judgement("unproven", message, remedy="use two ranks (-n 2) where there is room")


def _not_run(framework: str, controller: str, mpi: HostMpi, setup: Setup) -> Judgement:
    if framework == "mxnet":
        message = "hvdenv has no rank program for mxnet"
        return Judgement("unproven", message, remedy="run a training script of your own")
    if setup.launcher(controller) in NEED_MPIRUN and not mpi[1]:
        return Judgement(
            "unproven",
            "there is no mpirun in the environment or on PATH",
            remedy="load the module of the MPI that Horovod was built with, or install that MPI",
        )
    names = [name for name, launcher in LAUNCHERS.items() if launcher.controller == controller]
    return Judgement(
        "unproven",
        f"none of the launchers {', '.join(setup.launchers)} starts ranks over {controller}",
        remedy=f"add one of these with --launcher: {', '.join(names)}",
    )


@check("horovodrun")
def by_horovodrun(horovodrun_run: RankRun | HvdenvError | None) -> Iterator[Finding]:
    """Whether `horovodrun --mpi` starts ranks that compute the right sums."""
    if isinstance(horovodrun_run, HvdenvError):
        judgement = Judgement("skip", horovodrun_run.message, remedy=horovodrun_run.remedy)
    elif horovodrun_run is not None:
        judgement = ranks.judge(horovodrun_run)
    else:
        return
    about = About(controllers=("MPI",))
    yield Finding("horovodrun", "horovodrun --mpi", *judgement, about)


@check("mpi")
def mpi_of_image(image_mpi: Mpi | None, mpi: HostMpi, rank_runs: RankRuns) -> Iterator[Finding]:
    """Whether the host's mpirun can start the image's ranks; right ranks prove it."""
    runs = [run for run in rank_runs.values() if run and run.launcher in ("mpirun", "mpiexec")]
    if image_mpi is None or not runs:
        return
    if image_mpi.kind == "unknown":
        yield Finding("mpi", "image", "skip", "no mpirun in the image reports its MPI")
        return
    status, message = compatible(mpi[0], image_mpi)
    if status != "pass" and all(ranks.judge(run).status == "pass" for run in runs):
        status, message = "pass", f"{message}; the ranks are right nevertheless"
    remedy = "" if status == "pass" else "use an image with the Open MPI series of the hosts"
    judgement = Judgement(status, message, f"on the host: {mpi[1]}", remedy)
    yield Finding("mpi", "image", *judgement, About((), ("MPI",), ("MPI",)))


@check("operation")
def operations(
    extensions: Extensions, rank_runs: RankRuns, expectation: Expectation
) -> Iterator[Finding]:
    """Which tensor operations were seen at work; the extension check finds missing ones."""
    for framework, found in extensions.items():
        if not found.usable or not expectation.asks(framework):
            continue
        runs = [run for (name, _), run in rank_runs.items() if name == framework]
        judged = [(ranks.judge(run).status, run) for run in runs if run]
        right = [run for status, run in judged if status == "pass"]
        failed = [run for status, run in judged if status == "fail"]
        seen = {name for run in right if run.size > 1 for name in datapath.operations(run)}
        # These reduce only under their controller.
        other = {*CONTROLLERS} - {*(expectation.controllers or CONTROLLERS)}
        for name in expectation.operations or OPERATIONS:
            if name in seen:
                where = "on GPUs" if name == "NCCL" else "in host memory"
                judgement = Judgement("pass", f"it reduced tensors {where}")
            elif expectation.operations is None and name in other:
                judgement = _NOT_REQUESTED
            elif found.built(name):
                judgement = _not_seen(name, found, right, failed)
            else:
                continue
            about = About((framework,), (), (name,))
            yield Finding("operation", f"{name} in {framework}", *judgement, about)


def _not_seen(
    name: str, extension: Extension, right: Sequence[RankRun], failed: Sequence[RankRun]
) -> Judgement:
    """Why an operation that was built was not seen at work in runs that were right."""
    if name != "NCCL":
        over = {run.controller for run in failed if name in (run.controller, *run.operations)}
        if over or (failed and name not in CONTROLLERS):
            named = ", ".join(sorted(over)) or "a controller that could use it"
            message = f"it was built, but the ranks over {named} failed"
            return Judgement("unproven", message, remedy="see allreduce")
        if any(run.size == 1 and name in run.operations for run in right):
            return _alone(name, "where there is room")
        return Judgement("unproven", f"it was built, but no rank used {name}")
    if not extension.facts.gpus:
        message = "NCCL was built, but this host has no GPU to use it"
        return Judgement("unproven", message, remedy="verify on a node with GPUs")
    if not right:
        why = "all ranks that could use them failed" if failed else "no ranks were started"
        message = f"NCCL was built and there are GPUs, but {why}"
        return Judgement("unproven", message, remedy="see allreduce")
    right = [run for run in right if run.size > 1 or not datapath.uses_nccl(run)]
    if not right:
        return _alone("NCCL", "on a node with two GPUs")
    reasons = [datapath.why_no_nccl(run) for run in right]
    status, why = max(reasons, key=lambda reason: reason[0] == "fail")
    if status == "fail":
        remedy = (
            "check that the framework is built for GPUs, that its CUDA fits the driver"
            " (nvidia-smi), and that Horovod was built with HOROVOD_GPU_OPERATIONS=NCCL"
        )
        return Judgement(status, why, remedy=remedy)
    return Judgement(
        status,
        f"NCCL was built and there are GPUs, but {why}",
        remedy="start at most as many ranks on a host as it has GPUs (-n, --hosts), in a job that"
        " requests GPUs",
    )


def _alone(name: str, where: str) -> Judgement:
    """The judgement of an operation that only a single rank used."""
    message = f"{name} was used, but by one rank alone, which is no proof"
    return Judgement("unproven", message, remedy=f"use two ranks (-n 2) {where}")


@check("data-path")
def data_path(
    rank_run: RankRun | None,
    mpi: HostMpi,
    launch: Launch,
    installation: Installation,
    framework: str,
    controller: str,
) -> Iterator[Finding]:
    """Whether data took the intended path, if the reductions are right."""
    if rank_run is not None and ranks.judge(rank_run).status == "pass":
        judgement = datapath.judge(rank_run, mpi[0], launch.settings.mca, installation.mount)
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
        yield from findings("collectives", f"{framework} over {controller}", judgements)


@check("training")
def trained(
    extension: Extension, rank_run: RankRun | None, framework: str, controller: str
) -> Iterator[Finding]:
    """Whether a small model, trained on N ranks, equals the one that one process trains."""
    if rank_run is not None and _had(training.EXERCISE, rank_run, extension):
        judgements = training.judge(rank_run)
        yield from findings("training", f"{framework} over {controller}", judgements)


def _had(exercise: str, run: RankRun, extension: Extension) -> bool:
    """Whether the ranks were to do an exercise, with a controller that they have."""
    return exercise in run.exercises and bool(extension.built(run.controller))


def findings(
    name: str, subject: str, judgements: Iterable[tuple[str, Judgement]]
) -> Iterator[Finding]:
    """A finding for each judgement; the subject of one about a part begins with the part."""
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
    if bench_run is not None:
        subject = f"{framework} over {controller}"
        references = expectation.references
        judgement = bench.judge(subject, bench_run, speed_runs or (), references)
        yield Finding("bench", subject, *judgement)


@check("yardstick")
def yardstick(
    effort: Effort, expectation: Expectation, bench_runs: Mapping[tuple[str, str], Benchmark | None]
) -> Iterator[Finding]:
    """How fast the network is without Horovod, against the recipe's references."""
    done = [each for each in bench_runs.values() if each]
    for name, judgement in bench.judge_yardsticks(done, expectation.references):
        about = About((), (), ("NCCL",)) if name == NCCL_ALONE else About((), ("MPI",), ("MPI",))
        yield Finding("yardstick", name, *judgement, about)


def table(
    expectation: Expectation, extensions: Extensions, findings: Sequence[Finding]
) -> Iterator[Row]:
    """What was expected, built and proven, in the rows of Horovod's own table."""
    usable = [extension for extension in extensions.values() if extension.usable]
    for framework in ("tensorflow", "torch", "mxnet"):
        stated = _stated(expectation.frameworks, framework)
        marks = (stated, extensions[framework].present, proven(findings, "frameworks", framework))
        yield Row("Frameworks", ROWS[framework], *marks)
    for name in CONTROLLERS:
        stated = _stated(expectation.controllers, name)
        built = any(e.built(name) for e in usable)
        marks = (stated, built, proven(findings, "controllers", name))
        yield Row("Controllers", name, *marks)
    for name in OPERATIONS:
        stated = _stated(expectation.operations, name)
        built = any(e.built(name) for e in usable)
        marks = (stated, built, proven(findings, "operations", name))
        if stated or any(e.built(name) is not None for e in usable):
            yield Row("Tensor Operations", name, *marks)


def _stated(names: Sequence[str] | None, name: str) -> bool | None:
    return None if names is None else name in names

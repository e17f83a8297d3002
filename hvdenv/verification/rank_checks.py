"""Checks of what ranks did: each judges runs of ranks. Nothing is run here."""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from hvdenv.reports.report import Finding, Status
from hvdenv.sites.batch import counted
from hvdenv.sites.launchers import LAUNCHERS
from hvdenv.standalone.ranks.events import Operation, Training
from hvdenv.verification import bench, datapath
from hvdenv.verification.evidence import Evidence
from hvdenv.verification.inspection import Extension
from hvdenv.verification.rank_judgement import Judgement, judge_exercise, judge_run, listed
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import Pair
from hvdenv.verification.setup import (
    COLLECTIVES,
    CONTROLLERS,
    NEED_MPIRUN,
    OPERATIONS,
    TRAINING,
    HostMpi,
    Setup,
)

_MORE_RANKS = "verify with three ranks or more: -n 3"
_REMEDY = (
    "programs that use this operation compute wrong numbers or fail: rebuild Horovod for this"
    " machine; if the failure stays, try the other controller and report it with this evidence"
)
_GLOO_REDUCESCATTER = (
    "a known bug of Horovod up to 0.28.1: Gloo's reducescatter can send data that it has already"
    " overwritten, so sums are occasionally wrong (1 of 12 runs of verify on 3 ranks)."
    " `hvdenv build` applies the patch gloo-reducescatter, which fixes it: rebuild Horovod, or"
    " use MPI for CPU tensors. Earlier results of hvd.reducescatter over Gloo may be wrong"
)
_FORK = (
    "programs that fork after hvd.init() fail here, such as DataLoaders with workers: start the"
    " workers with multiprocessing_context='forkserver' or before hvd.init(); over InfiniBand, try"
    " RDMAV_FORK_SAFE=1"
)
_UNTRAINED = (
    "do not train with this environment: rebuild Horovod for this machine and these versions; if the"
    " failure stays, report this evidence to Horovod"
)
_SHOWN_RANKS = 20  # in the evidence of a training
# What a rank, by its name, or all of them reported of one operation, and of a part of the training.
_Reported = tuple[str, Operation]
_Trained = Sequence[tuple[str, Training]]


def judge_collectives(run: RankRun, ranks_elsewhere: int = 0) -> Iterator[tuple[str, Judgement]]:
    """What a run proves: each operation that is wrong, or that all are right.

    Args:
        run: of the ranks.
        ranks_elsewhere: how many ranks other runs have, if this one has fewer: they prove
            what needs more ranks.

    Returns:
        Pairs of an operation and its judgement; the operation is empty if it is about all.
    """
    reports = run.reported(Operation, "operation")
    wrong = {
        name: found._replace(remedy=_remedy(name, run.controller))
        for name in reports
        if (found := _wrong(reports[name]))
    }
    yield from wrong.items()
    if broken := judge_exercise(run, COLLECTIVES):
        yield "", broken
    elif silent := [rank.name for rank in run.ranks if not rank.all(Operation)]:
        yield "", Judgement("fail", f"{listed(silent)} reported nothing", "", _REMEDY)
    elif not wrong:
        yield "", _all_right(run, reports)
    for name, ((_, first), *_) in reports.items():
        if why := first.unproven:
            status: Status = "skip" if ranks_elsewhere > run.size else "unproven"
            yield name, Judgement(status, why, "", _MORE_RANKS)


def _remedy(operation: str, controller: str) -> str:
    """What to do about an operation that is wrong over a controller."""
    if operation == "forked processes":
        return _FORK
    known = controller == "Gloo" and operation.endswith("reducescatter")
    return _GLOO_REDUCESCATTER if known else _REMEDY


def _wrong(reports: Sequence[_Reported]) -> Judgement | None:
    """What is wrong with an operation; None if nothing is."""
    outcomes = [outcome for _, outcome in reports]
    if wrong := [(name, each) for name, each in reports if each.wrong]:
        # Ranks that Horovod ended only follow the one that failed.
        first = min((each for _, each in wrong), key=lambda each: bool(each.ended))
        names = [name for name, _ in wrong]
        everywhere = f"each of {len(wrong)} ranks" if 1 < len(wrong) == len(reports) else ""
        message = (
            f"wrong on {everywhere or listed(names)}, in {first.wrong} of"
            f" {first.right + first.wrong} cases: {next(iter(first.cases), 'not told which')}"
        )
        if any(each.ended for _, each in wrong):
            message += "; nothing was tried after that"
    elif refused := [s.why for each in outcomes for s in each.skipped if s.dtype == "float32"]:
        message = f"it does not even accept float32: {refused[0]}"
    elif idle := [name for name, each in reports if not (each.right or each.skipped)]:
        message = f"{listed(idle)} tried no case and gave no reason"
    elif other := next((e for e in reports if e[1].skipped != outcomes[0].skipped), None):
        message = f"ranks skipped different cases: {'; '.join(map(_skipped, (reports[0], other)))}"
    else:
        return None
    return Judgement("fail", message, _evidence(reports))


def _skipped(report: _Reported) -> str:
    name, outcome = report
    reasons = ", ".join(f"{dtype} {why}".strip() for dtype, why, _ in outcome.skipped)
    return f"{name} skipped {reasons or 'nothing'}"


def _evidence(reports: Sequence[_Reported]) -> str:
    return "\n".join(line for report in reports for line in _lines(*report))


def _lines(name: str, outcome: Operation) -> Iterator[str]:
    """All that was reported of an operation, under the name of a rank or of the operation."""
    wrong = f", {outcome.wrong} wrong" if outcome.wrong else ""
    types = f" in {', '.join(outcome.types)}" if outcome.types else ""
    yield f"{name}: {outcome.right} right{wrong}{types}"
    yield from (f"    {case}" for case in outcome.cases)
    for dtype, why, count in outcome.skipped:
        yield f"    not tried: {dtype or ('1 case' if count == 1 else f'{count} cases')}: {why}"
    if outcome.ended:
        yield f"    Horovod gave up: {outcome.ended}"


def _all_right(run: RankRun, reports: dict[str, list[_Reported]]) -> Judgement:
    """What was tried and was right; the other operations and types with the reason."""
    # Ranks that are in fewer process sets have fewer cases.
    least = [min((o for _, o in each), key=lambda one: one.right) for each in reports.values()]
    tried = [outcome for outcome in least if outcome.right]
    types = {dtype for outcome in tried for dtype in outcome.types}
    evidence = _evidence([(each.operation, each) for each in least])
    if not tried:
        return Judgement("fail", "no operation could be tried", evidence, _REMEDY)
    absent = [f"{o.operation} ({o.skipped[0].why})" for o in least if o.skipped and not o.right]
    absent += sorted({s.dtype for outcome in least for s in outcome.skipped} - types - {""})
    message = (
        f"{len(tried)} operations in {len(types)} types: {sum(o.right for o in tried)} cases are"
        f" right on each of {len(run.ranks)} ranks"
    )
    if absent:
        message += f"; not tried: {', '.join(absent)}"
    return Judgement("pass", message, evidence)


def judge_training(run: RankRun) -> Iterator[tuple[str, Judgement]]:
    """What the training of a run proves.

    Returns the judgement on all parts together, under an empty name; and one under its name for
    each part that cannot work with these versions.
    """
    if broken := judge_exercise(run, TRAINING):
        yield "", broken
        return
    outcomes = run.reported(Training, "part")
    problems, passed = [], []
    for part, reported in outcomes.items():
        skips = [facts.skip for _, facts in reported]
        if len(reported) == len(run.ranks) and all(skips):
            yield part, Judgement("skip", skips[0])
        elif wrong := list(_untrained(reported, len(run.ranks))):
            problems += [f"{part}: {problem}" for problem in wrong]
        else:
            passed.append(_praise(part, [facts for _, facts in reported]))
    if problems:
        more = f"; and {len(problems) - 1} more, see the evidence" if problems[1:] else ""
        yield (
            "",
            Judgement("fail", problems[0] + more, _training_evidence(run, problems), _UNTRAINED),
        )
    elif passed:
        ranks = counted(len(run.ranks), "rank")
        message = f"parameters are equal on {ranks}; {'; '.join(passed)}"
        yield "", Judgement("pass", message, _training_evidence(run, ()))
    elif not outcomes:
        yield (
            "",
            Judgement("fail", "no rank reported anything", _training_evidence(run, ()), _UNTRAINED),
        )


def _untrained(reported: _Trained, ranks: int) -> Iterator[str]:
    """What is wrong with a part, in the order in which it explains the rest."""
    unfinished = (facts.skip or len(facts.losses) != 2 for _, facts in reported)
    if len(reported) < ranks or any(unfinished):
        yield "not all ranks finished it"
        return
    first, wanted = reported[0]
    for point, digest in wanted.checksums.items():  # first of all after the broadcasts
        if others := [name for name, each in reported if each.checksums.get(point) != digest]:
            yield f"{point} are not equal: {listed(others)} and {first} differ"
    # The ranks have to come to what one process gets on the joined batches.
    if off := [(name, each) for name, each in reported if not each.difference <= each.bound]:
        facts = off[0][1]
        like = f", as if {facts.like}" if facts.like else ""
        yield (
            f"parameters of {listed([name for name, _ in off])} are {facts.difference:.2g} from those"
            f" of one process on the joined batches (bound {facts.bound:.2g}){like}"
        )
    for name, facts in reported:
        before, after = facts.losses
        if not after < before:
            yield f"the loss does not fall on {name}: {before:.6g}, and {after:.6g} at the end"
            return


def _praise(part: str, reported: Sequence[Training]) -> str:
    first, last = reported[0].losses
    difference = max(facts.difference for facts in reported)
    return (
        f"{part}: loss {first:.3g} to {last:.3g} in {reported[0].steps} steps,"
        f" {difference:.1g} from one process (bound {reported[0].bound:.1g})"
    )


def _training_evidence(run: RankRun, problems: Sequence[str]) -> str:
    lines = [f"command: {shlex.join(run.argv)}", *problems]
    for rank in run.ranks[:_SHOWN_RANKS]:
        for facts in rank.all(Training):
            shown = [f"{name} {value}" for name, value in facts._asdict().items() if value != ""]
            lines.append(f"{rank.name}: {', '.join(shown)}")
    return "\n".join(lines)


def check_pair(pair: Pair, setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether N ranks together compute right values, and whether their data took a good path."""
    extension, mpi = evidence.extensions[pair.framework].result(), evidence.mpi.result()
    run = evidence.runs[pair].result() if pair in evidence.runs else None
    if not extension.present:
        return
    right = judge_run(run) if run else None
    allreduce = _judge_allreduce(setup, pair, extension, mpi, run, right)
    yield Finding("allreduce", pair.subject, *allreduce)
    if run is None or right is None:
        return
    if right.status == "pass":
        meant, mount = setup.launch.settings.mca, setup.installation.mount
        judgement = datapath.judge_path(run, meant, mount)
        yield Finding("data-path", pair.subject, *judgement)
    if extension.built(pair.controller):
        if COLLECTIVES in run.exercises:
            judgements = judge_collectives(run, setup.launch.ranks)
            yield from _findings("collectives", pair, judgements)
        if TRAINING in run.exercises:
            yield from _findings("training", pair, judge_training(run))


def _findings(
    name: str, pair: Pair, judgements: Iterable[tuple[str, Judgement]]
) -> Iterator[Finding]:
    """A finding for each judgement; the subject of one about a part begins with the part."""
    for part, judgement in judgements:
        subject = f"{part}, {pair.subject}" if part else pair.subject
        yield Finding(name, subject, *judgement)


def _judge_allreduce(
    setup: Setup,
    pair: Pair,
    extension: Extension,
    mpi: HostMpi,
    run: RankRun | None,
    right: Judgement | None,
) -> Judgement:
    if extension.outcome.timed_out and right:
        return right  # The ranks' problem may be why no time was left for the extension.
    if not extension.usable:
        return Judgement("skip", f"horovod.{pair.framework} does not load")
    if not extension.built(pair.controller):
        return Judgement("skip", f"horovod.{pair.framework} was built without {pair.controller}")
    if not setup.expectation.asks(*pair):
        return Judgement("skip", "not requested, so not tried")
    if run is None or right is None:
        return _not_run(setup, pair, mpi)
    if run.size > 1 or right.status != "pass":
        return right
    message = f"{right.message}; one rank is no proof"
    return Judgement("unproven", message, remedy="use two ranks (-n 2) on a host with room")


def _not_run(setup: Setup, pair: Pair, mpi: HostMpi) -> Judgement:
    framework, controller = pair
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


def check_image_mpi(_setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Whether the host's mpirun can start the image's ranks; right ranks prove it."""
    started = evidence.started_runs.values()
    runs = [run for run in started if run.launcher in ("mpirun", "mpiexec")]
    if evidence.image_mpi is None or not runs:
        return
    image, mpi = evidence.image_mpi.result(), evidence.mpi.result()
    if image.kind == "unknown":
        yield Finding("mpi", "MPI of the image", "skip", "no mpirun in the image reports its MPI")
        return
    # mpirun and the library in the image talk to each other while ranks start, so the binary
    # interface of the library alone does not decide. Other MPIs start ranks with Hydra.
    ways = [
        (each.kind, *each.version.split(".")[:2]) if each.kind == "Open MPI" else ("Hydra",)
        for each in (mpi[0], image)
    ]
    right = all(judge_run(run).status == "pass" for run in runs)
    message = (
        f"{mpi[0].kind} {mpi[0].version} on the host, {image.kind} {image.version} in the image"
    )
    remedy = "use an image with the Open MPI series of the hosts"
    judgement = Judgement("unproven", message, f"on the host: {mpi[1]}", remedy)
    if right or (ways[0] == ways[1] and mpi[0].kind != "unknown"):
        judgement = judgement._replace(status="pass", remedy="")
    yield Finding("mpi", "MPI of the image", *judgement)


def check_operations(setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """Which tensor operations were seen at work; the extension check finds missing ones."""
    runs, expectation = evidence.started_runs, setup.expectation
    for framework, extension in evidence.all_extensions.items():
        if not extension.usable or not expectation.asks(framework):
            continue
        judged = [
            (judge_run(run).status, run) for pair, run in runs.items() if pair[0] == framework
        ]
        right = [run for status, run in judged if status == "pass"]
        failed = [run for status, run in judged if status == "fail"]
        seen = {name for run in right if run.size > 1 for name in datapath.operations(run)}
        # These reduce only under their controller.
        other = {*CONTROLLERS} - {*(expectation.controllers or CONTROLLERS)}
        for name in expectation.operations or [each for each in OPERATIONS if each not in other]:
            if name in seen:
                where = "on GPUs" if name == "NCCL" else "in host memory"
                judgement = Judgement("pass", f"it reduced tensors {where}")
            elif extension.built(name):
                judgement = _not_seen(name, extension, right, failed)
            else:
                continue
            yield Finding("operation", f"{name} in {framework}", *judgement)


def _not_seen(
    name: str, extension: Extension, right: Sequence[RankRun], failed: Sequence[RankRun]
) -> Judgement:
    """Why an operation that was built was not seen at work in runs that were right."""
    nccl = name == "NCCL"
    if nccl and not extension.facts.gpus:
        message = "NCCL was built, but this host has no GPU to use it"
        return Judgement("unproven", message, remedy="verify on a node with GPUs")
    over = {run.controller for run in failed if name in (run.controller, *run.operations)}
    if over or (failed and (not right if nccl else name not in CONTROLLERS)):
        named = ", ".join(sorted(over)) or "a controller that could use it"
        message = f"it was built, but the ranks over {named} failed"
        return Judgement("unproven", message, remedy="see allreduce")
    several = [run for run in right if run.size > 1]
    if not several and any(name in datapath.operations(run) for run in right):
        message = f"{name} was used, but by one rank alone, which is no proof"
        where = "on a node with two GPUs" if nccl else "where there is room"
        return Judgement("unproven", message, remedy=f"use two ranks (-n 2) {where}")
    if nccl and right:
        return _nccl_not_seen(right)
    return Judgement("unproven", f"it was built, but no rank used {name}")


def _nccl_not_seen(right: Sequence[RankRun]) -> Judgement:
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


def check_speed(pair: Pair, _setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """How fast allreduces are, beside the network without Horovod."""
    judgement = bench.judge_speed(evidence.benchmarks[pair].result())
    yield Finding("bench", pair.subject, *judgement)


def check_yardsticks(_setup: Setup, evidence: Evidence) -> Iterator[Finding]:
    """How fast the network is without Horovod."""
    for name, judgement in bench.judge_yardsticks(evidence.done_benchmarks):
        yield Finding("yardstick", name, *judgement)

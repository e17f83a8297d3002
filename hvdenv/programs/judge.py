"""Judges a training program by what its ranks did in a few steps (standalone/program/observe.py).

Each function judges one of the steps by which a program is made distributed, and gives one or more
findings: ``fail`` if training is wrong, ``pass`` with a note if it may be meant, ``unproven`` if it
could not be observed. Everything here is a function of the events of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hvdenv.programs.data import SAME_STEPS, judge_data, judge_step_counts, uneven
from hvdenv.programs.gradients import judge_gradients, judge_start
from hvdenv.programs.program import (
    METRIC_ELEMENTS,
    Program,
    is_follow_on,
    most_steps,
    places,
)
from hvdenv.reports.report import Finding
from hvdenv.standalone.ranks.events import Call, FileUse, Joined, ProgramEnd, Shown
from hvdenv.verification.rank_judgement import breakdown, listed
from hvdenv.verification.rank_run import Rank

# How observe_keras.py marks callbacks.
_DECIDE = "lets "
# How observe.py marks exceptions that a shortened pass may have caused.
_ENDED_EARLY = "after verify ended a pass"
_NOT_INITIALISED = "has not been initialized"
# Those that are called for all ranks, and are watched.
_COLLECTIVES = (
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "broadcast",
    "broadcast_object",
    "allgather_object",
)
_OTHER_LIBRARIES = ("torch.distributed", "deepspeed", "lightning", "pytorch_lightning")


def judge(program: Program) -> list[Finding]:
    """All findings about a run."""
    if alone := _called_alone(program):
        return [alone, *_initialised(program)]
    first = [*_whole(program), *(_initialised(program) if program.ranks else ())]
    if {"pass"} != {each.status for each in first if _ENDED_EARLY not in each.message}:
        # Ranks that write one file at a time may end by an exception of its library.
        return [*first, *(each for each in _files(program) if each.status == "fail")]
    judges: tuple[Callable[[Program], Iterator[Finding]], ...] = (
        _devices,
        _rates,
        judge_start,
        judge_gradients,
        judge_data,
        judge_step_counts,
        _files,
        _metrics,
    )
    return [*first, *(found for each in judges for found in each(program))]


def _called_alone(program: Program) -> Finding | None:
    """An operation that a rank calls and others never do.

    Ranks may call it in different lines, so the numbers of their lines are compared. A program ends
    when a rank begins another pass, so that all have called what comes before it.
    """
    ends = program.ends
    if any(not end or (end.reason == "exception" and not is_follow_on(end.error)) for end in ends):
        return None  # it did not get that far, for another reason
    called = [_collectives(rank) for rank in program.ranks]
    counts = [Counter(call.operation for call in calls) for calls in called]
    for rank, calls, own, end in zip(program.ranks, called, counts, ends, strict=True):
        last = calls[-1] if calls else Call("", "", 0)
        fewer = [
            other.name
            for other, count in zip(program.ranks, counts, strict=True)
            if count[last.operation] < own[last.operation]
        ]
        if fewer:
            return program.fail(
                "steps",
                f"{rank.name} waits in {last.operation} ({last.site}), which"
                f" {listed(fewer)} never called",
                "all ranks must call it: under `if hvd.rank() == 0`, keep only what needs no other"
                " rank",
                end.error if end else "",
            )
    return None


def _collectives(rank: Rank) -> list[Call]:
    return [
        each
        for each in rank.all(Call)
        if each.operation in _COLLECTIVES and each.site and not each.gradient
    ]


def _whole(program: Program) -> Iterator[Finding]:
    """Whether the program ran, and showed its steps."""
    ends = program.ends
    failed = [
        (rank, end)
        for rank, end in zip(program.ranks, ends, strict=True)
        if end and end.reason == "exception"
    ]
    first = [pair for pair in failed if not is_follow_on(pair[1].error)]
    early = [end.error for _, end in first if _ENDED_EARLY in end.error]
    # Other ranks follow one that has left after enough steps.
    left = any(end and end.reason == "enough" for end in ends)
    if early and program.trained:
        yield program.unproven("", f"the observed steps are judged below, but then: {early[0]}")
    elif first:
        yield from _raised(program, *first[0])
    elif failed and not left:
        yield from _followed(program, *failed[0])
    elif all(ends) or left:
        yield _observed(program)
    else:
        yield _broken(program)


def _raised(program: Program, rank: Rank, end: ProgramEnd, more: str = "") -> Iterator[Finding]:
    """A rank ended by an exception of its own."""
    if _NOT_INITIALISED not in end.error:  # which has a finding of its own
        yield program.fail(
            "",
            f"{rank.name}: {end.error}{more}",
            "fix the program, or run it by itself: `hvdenv run` with the same words",
            rank.tail,
        )


def _followed(program: Program, rank: Rank, end: ProgramEnd) -> Iterator[Finding]:
    """A rank ended because others had ended."""
    if not (ended := program.ended()):
        text = uneven(program)
        yield from _raised(program, rank, end, f"; {text}" if text else "")
        return
    names = listed([f"{name} ended after {count} steps" for name, count in ended.items()])
    yield program.fail(
        "steps",
        f"{names}, but {rank.name} went on to step {most_steps(end) + 1} and waited for its"
        " gradients",
        SAME_STEPS,
        end.error,
    )


def _broken(program: Program) -> Finding:
    """Ranks did not get to the end of the program."""
    _, how = breakdown(program.run)
    if not program.trained and any(rank.overdue for rank in program.ranks):
        return program.unproven(
            "",
            f"no training step was seen within {program.run.timeout:.0f} s",
            "allow more time with --timeout, if its first step comes later",
            how.evidence,
        )
    return program.fail("", how.message, how.remedy, how.evidence)


def _observed(program: Program) -> Finding:
    """Whether a program that ran to its end has shown the steps of several ranks."""
    ends = [end for end in program.ends if end]
    if not program.trained or not all(map(most_steps, ends)):
        return program.unproven("", f"no training step was seen: {_unseen(ends)}")
    if program.size < 2:
        text = "a single rank trains, which shows nothing about its distribution"
        return program.unproven("", text, "start at least two ranks: -n 2")
    seconds = [end.seconds for end in ends if len(end.seconds) == 2]
    times = max((total / max(total - spent, 0.001) for total, spent in seconds), default=1.0)
    return program.passed(
        "",
        f"{len(program.trained[0].steps)} training steps on {program.size} ranks were observed",
        f"observed, these steps took {times:.2f} times as long",
    )


def _unseen(ends: Sequence[ProgramEnd]) -> str:
    """Why no steps were seen."""
    for end in ends:
        if end.unobserved:
            return end.unobserved
        if others := [name for name in _OTHER_LIBRARIES if name in end.libraries]:
            return f"the program trains by {others[0]}, not by Horovod"
        if "tensorflow" in end.libraries:
            return (
                "its optimizer takes them within a graph of TensorFlow 1, or changes variables"
                " without an optimizer of Keras"
            )
    return "no optimizer of PyTorch or Keras took one before the program ended"


def _initialised(program: Program) -> Iterator[Finding]:
    """Whether all ranks are one job of Horovod."""
    ends = [end for end in program.ends if end]
    size, joined = program.size, [each for rank in program.ranks for each in rank.all(Joined)]
    if early := [end.error for end in ends if _NOT_INITIALISED in end.error]:
        text = f"Horovod is called before hvd.init(): {early[0]}"
        yield program.fail("init", text, "call hvd.init() right after the imports")
    elif any(end.reason == "exception" and not end.initialised for end in ends):
        return  # it did not get that far
    elif ends and len(joined) < len(program.ranks) and not any(end.initialised for end in ends):
        yield _without_horovod(program, ends)
    elif wrong := sorted({each.size for each in joined} - {size}):
        yield program.fail(
            "init",
            f"hvd.size() is {listed([*map(str, wrong)])} on {size} ranks: they train separate"
            " models",
            "start it with a launcher of the MPI that Horovod was built with",
        )
    elif joined:
        sites = places([call.site for call in program.calls("init")])
        yield program.passed("init", f"hvd.init() in {sites}: size {size}")


def _without_horovod(program: Program, ends: Sequence[ProgramEnd]) -> Finding:
    """No rank called hvd.init()."""
    used = sorted({name for end in ends for name in end.libraries} & {*_OTHER_LIBRARIES})
    if "torch.distributed" in used:
        return program.unproven(
            "init",
            "it never calls hvd.init(): its ranks communicate by torch.distributed, which is"
            " not judged here",
        )
    why = f"; it uses {listed(used)}" if used else ""
    return program.fail(
        "init",
        f"it never calls hvd.init(): {program.size} ranks train {program.size} separate"
        f" models{why}",
        "import horovod.torch, horovod.tensorflow or horovod.keras, and call hvd.init()",
    )


def _devices(program: Program) -> Iterator[Finding]:
    """Whether ranks share a GPU."""
    used: dict[tuple[str, str], list[str]] = {}
    for rank, end in zip(program.ranks, program.ends, strict=True):
        if end and end.device:
            used.setdefault((rank.host, end.device), []).append(rank.name)
    shared = {key: names for key, names in used.items() if len(names) > 1}
    for (_, device), names in shared.items():
        yield program.fail(
            "device",
            f"{listed(names)} use the same GPU, {device}",
            "choose the GPU by hvd.local_rank(): torch.cuda.set_device(hvd.local_rank()), or"
            " tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
        )
    if not used:
        yield program.skipped("device", "the parameters are in the memory of the hosts")
    elif not shared:
        yield program.passed("device", "each rank has a GPU of its own")


def _rates(program: Program) -> Iterator[Finding]:
    """Whether the learning rate grows with the number of ranks."""
    for trained in program.trained:
        if trained.factor is None:
            yield program.skipped(
                "rate",
                f"the learning rate{trained.name} on one rank is not known: a run on one rank took no"
                " step, or resumed from a checkpoint",
            )
            continue
        text = f"learning rate {trained.rate:g}{trained.name} is"
        if trained.factor == program.size:
            yield program.passed("rate", f"{text} {program.size} times that of one rank")
            continue
        last = trained.steps[-1][0].rate or 0.0
        if trained.rate and last > trained.rate:
            text = f"learning rate{trained.name} rises from {trained.rate:g} to {last:g}, a warm-up"
            yield program.passed("rate", text)
            continue
        same = abs(trained.factor - 1) < 1e-6
        how = "the same as" if same else f"{trained.factor:.3g} times that"
        yield program.note(
            "rate",
            f"{text} {how} on one rank. With {program.size} times the batch, the rate{trained.title} is"
            " usually multiplied by hvd.size(), if necessary after some epochs of warm-up",
        )


def _files(program: Program) -> Iterator[Finding]:
    """Who writes files, and who reads them too early."""
    uses = [(rank, use) for rank in program.ranks for use in rank.all(FileUse)]
    writers: dict[str, dict[str, FileUse]] = {}  # by path and rank
    for rank, use in uses:
        if use.write:
            writers.setdefault(use.path, {}).setdefault(rank.name, use)
    found = [
        problem
        for own in writers.values()
        for problem in (*_written(program, own), *_read_early(program, own, uses))
    ]
    saved = [own for own in writers.values() if next(iter(own.values())).checkpoint]
    if found:
        yield from found
    elif saved:
        ((name, use), *_) = saved[-1].items()
        yield program.passed(
            "checkpoint",
            f"only {name} writes {use.path} ({use.site}). It is of this short run: remove"
            " it before you train",
        )
    else:
        yield program.note(
            "checkpoint",
            "no checkpoint was written in these steps, so who writes it is not known: run"
            " the program with fewer epochs, or observe more with --steps N",
        )


def _written(program: Program, writers: dict[str, FileUse]) -> Iterator[Finding]:
    """Whether several ranks write a file; of each the first use."""
    use, names = next(iter(writers.values())), listed(list(writers))
    remedy = "write it on one rank: if hvd.rank() == 0"
    if len(writers) > 1 and use.checkpoint:
        why = ": hvd.local_rank() decides it" if use.local else ""
        yield program.fail("checkpoint", f"{names} write {use.path} ({use.site}){why}", remedy)
    elif len(writers) > 1:
        text = f"{names} write {use.path} ({use.site}). To avoid it, {remedy}"
        yield program.note("checkpoint", text)
    elif use.local and use.checkpoint:
        text = f"hvd.local_rank() decides who writes {use.path} ({use.site}): one rank of each host"
        yield program.fail("checkpoint", text, remedy)


def _read_early(
    program: Program, writers: dict[str, FileUse], uses: Sequence[tuple[Rank, FileUse]]
) -> Iterator[Finding]:
    """Whether a rank reads a file before its writer has met it."""
    ((writer, wrote), *_) = writers.items()
    for rank, use in uses:
        between = use.clock != wrote.clock or not wrote.clock
        if use.write or use.path != wrote.path or rank.name == writer or between:
            continue
        yield program.fail(
            "checkpoint",
            f"{rank.name} reads {use.path} ({use.site}) while it may be half written by"
            f" {writer} ({wrote.site})",
            "call hvd.barrier() between the two, or load it on rank 0 and broadcast it",
        )
        return


def _metrics(program: Program) -> Iterator[Finding]:
    """Whether metrics that are printed are those of all ranks."""
    shown = [(rank, each) for rank in program.ranks for each in rank.all(Shown)]
    deciding = [each for each in shown if each[1].text.startswith(_DECIDE)]
    calls = program.calls(
        "allreduce", "grouped_allreduce", "allgather", "allgather_object", "MetricAverageCallback"
    )
    averaged = [call.site for call in calls if call.site and call.elements <= METRIC_ELEMENTS]
    if averaged and not deciding:
        yield program.passed("metrics", f"values of all ranks are combined in {places(averaged)}")
    elif shown:
        rank, first = (deciding or shown)[0]
        yield program.note(
            "metrics",
            f"{first.site} {first.text}: it has the metrics of {rank.name} alone. Average them"
            " with hvd.allreduce, or with MetricAverageCallback of Keras, which must be the first of the"
            " callbacks that use metrics",
        )
    else:
        yield program.skipped("metrics", "no metric was printed in these steps")

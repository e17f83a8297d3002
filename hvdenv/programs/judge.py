"""Judges a training program by what its ranks did in a few steps (standalone/program/observe.py).

Each function judges one of the steps by which a program is made distributed, and gives one or more
findings: ``fail`` if training is wrong, ``pass`` with a note if it may be meant, ``unproven`` if it
could not be observed. Everything here is a function of the events of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from hvdenv.reports.report import About, Finding, Status
from hvdenv.standalone.ranks.events import (
    Call,
    DataSource,
    FileUse,
    Joined,
    Optimizer,
    ProgramEnd,
    Shown,
    TrainingStep,
)
from hvdenv.verification.ranks import Rank, RankRun, breakdown, listed

# Tensors with more elements are no metrics.
_METRIC_ELEMENTS = 64
# How far projections may be from the mean of others, as a part of their length.
_ROUNDING = 0.01
# The part of its batches that a rank may share with another one by chance.
_SHARED_BATCHES = 0.1
# How observe_keras.py marks callbacks.
_DECIDE = "lets "
_FOLLOW_ON = ("Horovod has been shut down", "HorovodInternalError")
# How observe.py marks exceptions that a shortened pass may have caused.
_ENDED_EARLY = "after verify ended a pass"
_NOT_INITIALISED = "has not been initialized"
# Those that are called for all ranks, and are watched.
_COLLECTIVES = (
    "allreduce", "grouped_allreduce", "allgather", "broadcast", "broadcast_object",
    "allgather_object",
)  # fmt: skip
_SAME_STEPS = (
    "give all ranks the same number of batches (drop_last, take, steps_per_epoch), or call hvd.join()"
    " after the last one"
)
_OTHER_LIBRARIES = ("torch.distributed", "deepspeed", "lightning", "pytorch_lightning")


def finding(
    program: str, check: str, status: Status, message: str, evidence: str = "", remedy: str = ""
) -> Finding:
    """A finding about a program, which takes nothing from what was proven before."""
    name = f"program-{check}" if check else "program"
    return Finding(
        check=name, subject=program, status=status, message=message, evidence=evidence,
        remedy=remedy, about=About(),
    )  # fmt: skip


class Program(NamedTuple):
    """A run of a training program.

    Attributes:
        name: such as ``train.py``.
        run: its ranks.
        reference: learning rates of its optimizers on one rank, by number; empty if unknown.
    """

    name: str
    run: RankRun
    reference: Mapping[int, float] = {}

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return self.run.ranks

    def finding(
        self, check: str, status: Status, message: str, evidence: str = "", remedy: str = ""
    ) -> Finding:
        """A finding about this program."""
        return finding(self.name, check, status, message, evidence, remedy)

    def note(self, check: str, message: str, evidence: str = "") -> Finding:
        """What may be meant, or a mistake."""
        return self.finding(check, "pass", f"note: {message}", evidence)

    def optimizers(self) -> list[Optimizer]:
        """Those that train, as the first rank that has any reports them.

        One that took its last step before a broadcast, and was replaced then, does not.
        """
        found = next(filter(None, (rank.all(Optimizer) for rank in self.ranks)), [])
        broadcast = {call.step for call in self.broadcasts()}
        return [each for each in found if len(self.steps(each.number)) not in broadcast] or found

    def steps(self, optimizer: int) -> list[tuple[TrainingStep, ...]]:
        """The steps of an optimizer that all ranks took, each with one event of each rank."""
        each = [
            [step for step in rank.all(TrainingStep) if step.optimizer == optimizer]
            for rank in self.ranks
        ]
        return list(zip(*each, strict=False))

    def scaling(self, number: int) -> float | None:
        """How many times that of one rank an optimizer's first learning rate is; None if unknown."""
        first = next((steps[0].rate for steps in self.steps(number)), None)
        alone, size = self.reference.get(number), self.run.size
        if not first or not alone:
            return None
        return size if abs(first / alone - size) < 1e-6 * size else first / alone

    def calls(self, *operations: str, gradient: bool = False) -> list[Call]:
        """Calls of these operations of Horovod, on any rank."""
        return [
            call
            for rank in self.ranks
            for call in rank.all(Call)
            if call.operation in operations and call.gradient == gradient
        ]

    def broadcasts(self) -> list[Call]:
        """Calls that make parameters equal on all ranks."""
        objects = {call.site for call in self.calls("broadcast_object")}
        return [
            call
            for rank in self.ranks
            for call in rank.all(Call)
            if call.operation.startswith(("broadcast", "BroadcastGlobal")) and call.site
            if call.operation != "broadcast_object"
            if call.operation != "broadcast" or call.site not in objects
        ]

    def sources(self) -> list[list[DataSource]]:
        """Of each rank, the passes over data that its training steps read."""
        read = {step.source for rank in self.ranks for step in rank.all(TrainingStep)} - {0}
        return [
            [each for each in rank.all(DataSource) if each.number in read] for rank in self.ranks
        ]


def _alone(program: Program) -> Finding | None:
    """An operation that a rank calls and others never do.

    Ranks may call it in different lines, so the numbers of their lines are compared. A program ends
    when a rank begins another pass, so that all have called what comes before it.
    """
    ends = [rank.last(ProgramEnd) for rank in program.ranks]
    if any(not end or (end.reason == "exception" and not _is_follow_on(end.error)) for end in ends):
        return None  # it did not get that far, for another reason
    called = [(rank, _collectives(rank)) for rank in program.ranks]
    for (rank, own), end in zip(called, ends, strict=True):
        if not own:
            continue
        last = own[-1]
        fewer = [each.name for each, calls in called if _lines(calls, last) < _lines(own, last)]
        if fewer:
            return program.finding(
                "steps", "fail", f"{rank.name} waits in {last.operation} ({last.site}), which"
                f" {listed(fewer)} never called", end.error if end else "",
                "all ranks must call it: under `if hvd.rank() == 0`, keep only what needs no"
                " other rank",
            )  # fmt: skip
    return None


def _lines(calls: Sequence[Call], one: Call) -> int:
    return sum(each.operation == one.operation for each in calls)


def _collectives(rank: Rank) -> list[Call]:
    return [
        each
        for each in rank.all(Call)
        if each.operation in _COLLECTIVES and each.site and not each.gradient
    ]


def _is_follow_on(error: str) -> bool:
    return any(text in error for text in _FOLLOW_ON)


def judge(program: Program) -> list[Finding]:
    """All findings about a run."""
    if alone := _alone(program):
        return [alone, *(_initialised(program))]
    first = [*_whole(program), *(_initialised(program) if program.ranks else ())]
    if {"pass"} != {each.status for each in first if _ENDED_EARLY not in each.message}:
        # Ranks that write one file at a time may end by an exception of its library.
        return [*first, *(each for each in _checkpoints(program) if each.status == "fail")]
    judges: tuple[Callable[[Program], Iterator[Finding]], ...] = (
        _devices, _rates, _start, _gradients, _data, _step_counts, _checkpoints, _metrics
    )  # fmt: skip
    return [*first, *(found for each in judges for found in each(program))]


def _whole(program: Program) -> Iterator[Finding]:
    """Whether the program ran, and showed its steps."""
    ends = [rank.last(ProgramEnd) for rank in program.ranks]
    failed = [
        (rank, end)
        for rank, end in zip(program.ranks, ends, strict=True)
        if end and end.reason == "exception"
    ]
    first = [pair for pair in failed if not _is_follow_on(pair[1].error)]
    if not first and any(end and end.reason == "enough" for end in ends):
        failed = []  # another rank has left after enough steps
    early = [end.error for _, end in first if _ENDED_EARLY in end.error]
    if early and program.optimizers():
        yield program.finding(
            "", "unproven", f"the observed steps are judged below, but then: {early[0]}"
        )  # fmt: skip
        return
    for rank, end in (first or failed)[:1]:
        ended = {} if first else _ended(program)
        if ended:
            names = listed([f"{name} ended after {count} steps" for name, count in ended.items()])
            yield program.finding(
                "steps", "fail", f"{names}, but {rank.name} went on to step"
                f" {max(end.steps, default=0) + 1} and waited for its gradients", end.error,
                _SAME_STEPS,
            )  # fmt: skip
            return
        if _NOT_INITIALISED not in end.error:
            uneven = list(_uneven(program))
            text = f"; {uneven[0]}" if uneven and not first else ""
            yield program.finding(
                "", "fail", f"{rank.name}: {end.error}{text}", rank.tail,
                "fix the program, or run it by itself: `hvdenv run` with the same words",
            )  # fmt: skip
        return
    if not all(ends) and not any(end and end.reason == "enough" for end in ends):
        _, how = breakdown(program.run)
        if not program.optimizers() and any(rank.overdue for rank in program.ranks):
            yield program.finding(
                "", "unproven", f"no training step was seen within {program.run.timeout:.0f} s",
                how.evidence, "allow more time with --timeout, if its first step comes later",
            )  # fmt: skip
            return
        yield program.finding("", "fail", how.message, how.evidence, how.remedy)
        return
    yield _observed(program, ends)


def _observed(program: Program, ends: Sequence[ProgramEnd | None]) -> Finding:
    """Whether a program that ran to its end has shown the steps of several ranks."""
    counts = [max(end.steps, default=0) for end in ends if end]
    if not program.optimizers() or not all(counts):
        return program.finding("", "unproven", f"no training step was seen: {_unseen(ends)}")
    if program.run.size < 2:
        return program.finding(
            "", "unproven", "a single rank trains, which shows nothing about its distribution",
            remedy="start at least two ranks: -n 2",
        )  # fmt: skip
    seconds = [end.seconds for end in ends if end and len(end.seconds) == 2]
    times = max((total / max(total - spent, 0.001) for total, spent in seconds), default=1.0)
    watched = len(program.steps(program.optimizers()[0].number))
    return program.finding(
        "", "pass", f"{watched} training steps on {program.run.size} ranks were observed",
        f"observed, these steps took {times:.2f} times as long",
    )  # fmt: skip


def _unseen(ends: Sequence[ProgramEnd | None]) -> str:
    """Why no steps were seen."""
    for end in filter(None, ends):
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
    ends = [end for rank in program.ranks if (end := rank.last(ProgramEnd))]
    early = [end.error for end in ends if _NOT_INITIALISED in end.error]
    if early:
        yield program.finding(
            "init", "fail", f"Horovod is called before hvd.init(): {early[0]}",
            remedy="call hvd.init() right after the imports",
        )  # fmt: skip
        return
    missing = [rank for rank in program.ranks if not rank.last(Joined)]
    count = program.run.size
    if any(end.reason == "exception" and not end.initialised for end in ends):
        return  # it did not get that far
    if missing and ends and not any(end.initialised for end in ends):
        used = sorted({name for end in ends for name in end.libraries} & {*_OTHER_LIBRARIES})
        if "torch.distributed" in used:
            yield program.finding(
                "init", "unproven", "it never calls hvd.init(): its ranks communicate by"
                " torch.distributed, which is not judged here",
            )  # fmt: skip
            return
        why = f"; it uses {listed(used)}" if used else ""
        yield program.finding(
            "init", "fail", f"it never calls hvd.init(): {count} ranks train {count} separate models{why}",
            remedy="import horovod.torch, horovod.tensorflow or horovod.keras, and call hvd.init()",
        )  # fmt: skip
        return
    sizes = {joined.size for rank in program.ranks if (joined := rank.last(Joined))}
    if sizes and sizes != {count}:
        yield program.finding(
            "init", "fail", f"hvd.size() is {listed([str(n) for n in sorted(sizes)])} on {count} ranks:"
            " they train separate models",
            remedy="start it with a launcher of the MPI that Horovod was built with",
        )  # fmt: skip
    elif sizes:
        sites = [call.site for call in program.calls("init")]
        yield program.finding("init", "pass", f"hvd.init() in {_places(sites)}: size {count}")


def _places(sites: Sequence[str]) -> str:
    return listed(list(dict.fromkeys(filter(None, sites)))) or "a library"


def _devices(program: Program) -> Iterator[Finding]:
    used: dict[tuple[str, str], list[Rank]] = {}
    for rank in program.ranks:
        end = rank.last(ProgramEnd)
        if end and end.device:
            used.setdefault((rank.host, end.device), []).append(rank)
    shared = {key: ranks for key, ranks in used.items() if len(ranks) > 1}
    if not used:
        yield program.finding("device", "skip", "the parameters are in the memory of the hosts")
    for (_, device), ranks in shared.items():
        names = listed([rank.name for rank in ranks])
        yield program.finding(
            "device", "fail", f"{names} use the same GPU, {device}",
            remedy="choose the GPU by hvd.local_rank(): torch.cuda.set_device(hvd.local_rank()), or"
            " tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
        )  # fmt: skip
    if used and not shared:
        yield program.finding("device", "pass", "each rank has a GPU of its own")


def _rates(program: Program) -> Iterator[Finding]:
    for optimizer in program.optimizers():
        factor = program.scaling(optimizer.number)
        if factor is None:
            continue
        first, name = program.steps(optimizer.number)[0][0].rate, _named(program, optimizer)
        if factor == program.run.size:
            text = f"learning rate {first:g}{name} is {program.run.size} times that of one rank"
            yield program.finding("rate", "pass", text)
        else:
            how = "the same as" if abs(factor - 1) < 1e-6 else f"{factor:.3g} times that"
            yield program.note(
                "rate", f"learning rate {first:g}{name} is {how} on one rank. With"
                f" {program.run.size} times the batch, it is usually multiplied by hvd.size(),"
                " if necessary after some epochs of warm-up",
            )  # fmt: skip


def _named(program: Program, optimizer: Optimizer) -> str:
    """How messages name an optimizer: not at all if it is the only one."""
    if len(program.optimizers()) == 1:
        return ""
    where = f" ({optimizer.site})" if optimizer.site else ""
    return f" of {optimizer.kind}{where}"


def _start(program: Program) -> Iterator[Finding]:
    """Whether all ranks start from the same parameters and the same state."""
    calls = program.broadcasts()
    for optimizer in program.optimizers():
        steps, name = program.steps(optimizer.number), _named(program, optimizer)
        if not steps:
            continue
        if len({step.state for step in steps[0]}) > 1:
            yield program.finding(
                "start", "fail", f"the optimizer's state{name} differs between ranks before the first step",
                remedy="call hvd.broadcast_optimizer_state(optimizer, root_rank=0) after it is loaded",
            )  # fmt: skip
        known = [step.before for step in steps[0]]
        equal = all(known) and len(set(known)) == 1
        meet = next((at for at, each in enumerate(steps, 1) if _same(each)), 0)
        if equal and calls:
            text = f"the parameters{name} are equal on all ranks before the first step"
            yield program.finding(
                "start", "pass", f"{text} ({calls[0].operation}, {calls[0].site})"
            )
        elif (equal or meet) and not calls:
            when = "before the first step" if equal else f"after step {meet}"
            yield program.note(
                "start", f"the parameters{name} are equal {when}, but nothing was broadcast: they are"
                " equal by their seed, or by a file that all ranks load",
            )  # fmt: skip
        elif meet:
            text = f"the parameters{name} are equal on all ranks from step {meet} on"
            yield program.finding("start", "pass", f"{text} ({calls[0].operation})")
        elif all(known) or not calls:
            where = f" of the optimizer in {optimizer.site}" if optimizer.site else ""
            yield program.finding(
                "start", "fail", f"the parameters{where} differ between ranks before the first step"
                if all(known) else "the parameters differ between ranks, and nothing was broadcast",
                _digests(program, "before", steps[0]),
                "broadcast them from rank 0 before training: hvd.broadcast_parameters("
                "model.state_dict(), root_rank=0), hvd.broadcast_variables(model.variables,"
                " root_rank=0), or BroadcastGlobalVariablesCallback(0) of Keras",
            )  # fmt: skip


def _same(steps: Sequence[TrainingStep]) -> bool:
    """Whether all ranks have the same parameters after a step."""
    return len({step.after for step in steps}) == 1 and bool(steps[0].after)


def _digests(program: Program, name: str, steps: Sequence[TrainingStep]) -> str:
    """The digests of all ranks, as evidence."""
    pairs = zip(program.ranks, steps, strict=False)
    return "\n".join(
        f"{rank.name}: step {step.step}, {name} {getattr(step, name) or 'unknown'}"
        for rank, step in pairs
    )


def _gradients(program: Program) -> Iterator[Finding]:
    """Whether all ranks apply the same gradients, and these are the mean of the ranks' own."""
    for optimizer in program.optimizers():
        steps = program.steps(optimizer.number)
        if steps:
            yield _applied(program, optimizer, steps)


def _applied(
    program: Program, optimizer: Optimizer, steps: Sequence[tuple[TrainingStep, ...]]
) -> Finding:
    name = _named(program, optimizer)
    reduced = optimizer.distributed or program.calls(
        "allreduce", "grouped_allreduce", "allgather", gradient=True
    )
    if program.run.size > 1 and not reduced:
        return _never_averaged(program, optimizer, steps, name)
    known = [step for each in steps for step in each if step.applied]
    different = [each for each in steps if len({step.applied for step in each}) > 1]
    apart = [each for each in steps if not _same(each)]
    started = len({step.before for step in steps[0]}) == 1
    if known and different:
        apart = different
    elif known and not started:
        apart = []
    elif not known and len(apart) < len(steps) and apart == list(steps[: len(apart)]):
        apart = []  # they were broadcast after some steps, and are equal since
    if apart == steps and not known and not program.broadcasts():
        return program.finding(
            "gradients", "unproven", f"the gradients{name} are averaged; whether all ranks apply the same"
            " ones cannot be seen, because they start from different parameters",
        )  # fmt: skip
    if apart:
        return _apart(program, optimizer, steps, apart, name)
    return _mean(program, optimizer, steps, name)


def _never_averaged(
    program: Program, optimizer: Optimizer, steps: Sequence[tuple[TrainingStep, ...]], name: str
) -> Finding:
    others = [each for each in program.calls("allreduce") if each.elements > _METRIC_ELEMENTS]
    if others and all(each.step for each in others):
        return program.finding(
            "gradients", "unproven", f"the gradients{name} are not averaged, but other tensors are, in"
            f" {_places([each.site for each in others])}: if these are the parameters, ranks are equal"
            " after that",
        )  # fmt: skip
    why = "the parameters drift apart"
    if all(map(_same, steps)):
        if all(len({step.batch for step in each} - {""}) == len(each) for each in steps):
            text = f"the parameters{name} stay equal, though all ranks read different batches"
            return program.finding("gradients", "pass", text)  # reduced in a way of its own
        why = "the parameters are equal only because all ranks read the same"
    made = f" made in {optimizer.site}" if optimizer.site else ""
    return program.finding(
        "gradients", "fail", f"the gradients{name} are never averaged: {why}",
        _digests(program, "after", steps[-1]), f"wrap the optimizer{made} with hvd.DistributedOptimizer,"
        " or the tape with hvd.DistributedGradientTape",
    )  # fmt: skip


def _apart(
    program: Program, optimizer: Optimizer, steps: Sequence[tuple[TrainingStep, ...]],
    apart: Sequence[tuple[TrainingStep, ...]], name: str,
) -> Finding:  # fmt: skip
    """Ranks apply different gradients, or have different parameters afterwards."""
    shown = next((each for each in reversed(steps) if each[0].tensors), apart[0])
    text = f"{_left_out(optimizer, shown, name)} after step {apart[0][0].step}"
    remedy = (
        "give hvd.DistributedOptimizer or hvd.DistributedGradientTape all parameters, also those added"
        " to a group later; broadcast all parameters and the optimizer's state; clip or change gradients"
        " after their averaging (optimizer.synchronize()), and parameters on all ranks alike"
    )
    rates = {f"{step.rate:g}" for step in apart[0] if step.rate is not None}
    if len(rates) > 1:
        text = f"{text}, with different learning rates: {listed(sorted(rates))}"
        remedy = "set the same learning rate on all ranks, also by schedules and callbacks"
    return program.finding("gradients", "fail", text, _digests(program, "after", apart[0]), remedy)


def _left_out(optimizer: Optimizer, steps: Sequence[TrainingStep], name: str) -> str:
    """The tensors that differ between ranks, in words."""
    columns = list(zip(*(step.tensors for step in steps), strict=False))
    names = [
        title
        for title, column in zip(optimizer.names, columns, strict=False)
        if len(set(column)) > 1
    ]
    if not names or len(names) == len(columns):
        return f"the parameters{name} differ between ranks"
    return (
        f"{len(names)} of {len(columns)} parameters{name} differ between ranks ({listed(names)}),"
        " the others do not: these are left out of the averaging, or changed by a rank alone, and differ"
    )


def _mean(
    program: Program, optimizer: Optimizer, steps: Sequence[tuple[TrainingStep, ...]], name: str
) -> Finding:
    """What the reduced gradients are of the ranks' own."""
    factors = [_factor(each) for each in steps if all(step.own and step.reduced for step in each)]
    text = f"all ranks apply the same gradients{name} in {len(steps)} steps"
    if not factors:
        return program.finding("gradients", "pass", text)
    size, usual = program.run.size, Counter(factors).most_common(1)[0][0]
    if len({*factors}) > 1 or usual is None:
        return program.finding(
            "gradients", "pass", f"{text}; they were changed between their reduction and the step,"
            " such as by clipping",
        )  # fmt: skip
    if optimizer.operation == "Adasum":
        return program.finding("gradients", "pass", f"{text}, combined by Adasum")
    kinds = {1.0: "the mean", float(size): "the sum", 1 / size: f"1/{size} of the mean"}
    kind = next((each for factor, each in kinds.items() if abs(usual - factor) < 0.005), "")
    if kind == "the mean":
        return program.finding("gradients", "pass", f"{text}: the mean of the ranks' own")
    if kind == "the sum" and program.scaling(optimizer.number) == size:
        return program.note(
            "gradients", f"{text}: the sum of the ranks' own, with a learning rate {size} times that of"
            " one rank. The sum alone makes steps that much longer",
        )  # fmt: skip
    if kind == "the sum" and optimizer.operation == "Sum":
        return program.finding(
            "gradients", "pass", f"{text}: the sum of the ranks' own, as declared"
        )
    if kind:
        return program.note(
            "gradients", f"{text}: {kind} of the ranks' own. Averaged ones are usual"
        )
    return program.finding(
        "gradients", "pass", f"{text}: {usual:g} times the mean of the ranks' own"
    )


def _factor(steps: Sequence[TrainingStep]) -> float | None:
    """How many times the mean of the ranks' gradients was applied; None if it is no multiple."""
    mean = [sum(column) / len(steps) for column in zip(*(step.own for step in steps), strict=True)]
    applied = steps[0].reduced
    length = sum(each * each for each in mean)
    if not length:
        return None
    factor = sum(a * b for a, b in zip(applied, mean, strict=True)) / length
    rest = sum((a - factor * b) ** 2 for a, b in zip(applied, mean, strict=True))
    whole = sum(a * a for a in applied)
    return float(f"{factor:.3g}") if rest <= _ROUNDING**2 * max(whole, 1e-300) else None


def _data(program: Program) -> Iterator[Finding]:
    """Whether ranks read different data."""
    found = [*_samplers(program)]
    yield from found
    if not any(each.status == "fail" for each in found):
        yield from _batches(program)


def _samplers(program: Program) -> Iterator[Finding]:
    """What samplers were told about the ranks."""
    size = program.run.size
    for rank, sources in zip(program.ranks, program.sources(), strict=True):
        joined = rank.last(Joined)
        shares = [each for each in sources if each.replicas is not None]
        for each in shares[:1]:
            wrong = ""
            by_node = joined and 1 < joined.local_size == each.replicas != size
            if each.local and not by_node:
                wrong = "was given hvd.local_rank() as its rank, which repeats on each host"
            elif each.replicas != size and not by_node:
                wrong = f"divides the data by {each.replicas}, not by the {size} ranks"
            elif joined and each.rank != joined.rank and not by_node:
                wrong = f"was given rank {each.rank} on rank {joined.rank}"
            if wrong:
                yield program.finding(
                    "data", "fail", f"the {each.kind} of the loader in {each.site} {wrong}",
                    remedy="dataset.shard(hvd.size(), hvd.rank())" if each.kind == "shard()" else
                    f"{each.kind}(dataset, num_replicas=hvd.size(), rank=hvd.rank())",
                )  # fmt: skip
                return
        epochs = [e.epoch for e in shares if e.shuffle and e.number == shares[0].number]
        if len(epochs) > 1 and epochs[0] == epochs[1]:
            yield program.note(
                "data", f"each pass over the loader in {shares[0].site} has the same order: call"
                " sampler.set_epoch(epoch) before it",
            )  # fmt: skip
            return


def _batches(program: Program) -> Iterator[Finding]:
    """Whether ranks read the same batches."""
    numbers = [each.number for each in program.optimizers()]
    steps = max((program.steps(number) for number in numbers), key=len, default=[])
    if program.run.size < 2:
        return
    if not steps or not all(step.batch for each in steps for step in each):
        ends = [rank.last(ProgramEnd) for rank in program.ranks]
        why = next((end.unobserved for end in ends if end and end.unobserved), "")
        why = why or "the model reads them within compiled code, or by arguments of its own"
        yield program.finding("data", "unproven", f"the batches could not be seen: {why}")
        return
    where = next((each[0].site for each in program.sources() if each), "")
    where = f" (read in {where})" if where else ""
    read = [[each[at].batch for each in steps] for at in range(len(program.ranks))]
    for (one, mine), (other, theirs) in combinations(enumerate(read), 2):
        names = f"{program.ranks[one].name} and {program.ranks[other].name}"
        same = sum(a == b for a, b in zip(mine, theirs, strict=True))
        shared = len({*mine} & {*theirs}) / len({*mine})
        if len({*mine}) == 1 and len(steps) > 1 and same:
            yield program.note("data", f"{names} read one batch in all steps: synthetic data")
            return
        first_pass = [each[0].batches or 0 for each in program.sources() if each]
        once = len(steps) <= min(first_pass, default=0)  # a later pass has other shares
        if same > len(steps) / 2 or (shared > _SHARED_BATCHES and once):
            text = f"the same batches{where} in {same} of {len(steps)} steps"
            if same <= len(steps) / 2:
                text = f"shares that overlap{where}: {shared:.0%} of their batches"
            yield program.finding(
                "data", "fail", f"{names} read {text}",
                f"digests of {names}:\n{' '.join(mine)}\n{' '.join(theirs)}",
                "give each rank its own share: DistributedSampler(dataset, num_replicas=hvd.size(),"
                " rank=hvd.rank()), dataset.shard(hvd.size(), hvd.rank()), or a seed by rank",
            )  # fmt: skip
            return
    yield from _shares(program, len(steps), where)


def _shares(program: Program, steps: int, where: str) -> Iterator[Finding]:
    """What different batches are: shares of the data, or all of it in another order."""
    firsts = [each[0] for each in program.sources() if each]
    text = f"the ranks read different batches in {steps} steps{where}"
    lengths = {
        f"{each.samples} samples" if each.samples is not None else f"{each.batches} batches"
        for each in firsts
        if each.samples is not None or each.batches is not None
    }
    if any(each.replicas is not None for each in firsts) or len(lengths) != 1:
        yield program.finding("data", "pass", text)
    else:
        share = "a DistributedSampler" if firsts[0].samples is not None else "dataset.shard()"
        yield program.note(
            "data", f"{text}; each rank reads {listed(list(lengths))} in an epoch. If these are the whole"
            f" data set rather than a share of it, use {share}",
        )  # fmt: skip


def _lengths(program: Program) -> dict[str, int]:
    """The batches of each rank in a pass; empty if they are not known."""
    counts = {
        rank.name: each[0].batches or 0
        for rank, each in zip(program.ranks, program.sources(), strict=True)
        if each and each[0].batches is not None and each[0].whole
    }
    return counts if len(counts) == len(program.ranks) else {}


def _ended(program: Program) -> dict[str, int]:
    """The steps of each rank that ended by itself."""
    return {
        rank.name: max(end.steps, default=0)
        for rank in program.ranks
        if (end := rank.last(ProgramEnd)) and end.reason == "end"
    }


def _ends(program: Program) -> dict[str, int]:
    """The steps of each rank; empty if not all ended by themselves."""
    done = _ended(program)
    return done if len(done) == len(program.ranks) else {}


def _uneven(program: Program) -> Iterator[str]:
    """Ranks with different numbers of steps, in words."""
    if program.calls("join"):
        return
    tables = ((_lengths(program), "batches in a pass"), (_ends(program), "steps until the end"))
    for table, what in tables:
        if len(set(table.values())) > 1:
            yield f"{listed([f'{name} has {count}' for name, count in table.items()])} {what}"


def _step_counts(program: Program) -> Iterator[Finding]:
    uneven = next(_uneven(program), "")
    if uneven:
        yield program.finding(
            "steps", "fail", f"{uneven}: at the end of the shorter one, the other ranks wait for ever",
            remedy=_SAME_STEPS,
        )  # fmt: skip
    elif _lengths(program) or _ends(program):
        yield program.finding("steps", "pass", "all ranks take the same number of steps")
    else:
        text = "no pass over the data ended in these steps, and its length is not known"
        yield program.finding("steps", "skip", text)


def _checkpoints(program: Program) -> Iterator[Finding]:
    """Who writes files, and who reads them too early."""
    uses = [(rank, use) for rank in program.ranks for use in rank.all(FileUse)]
    writers: dict[str, list[tuple[Rank, FileUse]]] = {}
    for rank, use in uses:
        if use.write:
            writers.setdefault(use.path, []).append((rank, use))
    found = [
        problem
        for path, each in writers.items()
        for problem in _written(program, path, _by_rank(each), uses)
    ]
    if found:
        yield from found
    elif saved := [(path, each[0]) for path, each in writers.items() if each[0][1].checkpoint]:
        path, (rank, use) = saved[-1]
        yield program.finding(
            "checkpoint", "pass", f"only {rank.name} writes {path} ({use.site}). It is of this short run:"
            " remove it before you train",
        )  # fmt: skip
    else:
        yield program.note(
            "checkpoint", "no checkpoint was written in these steps, so who writes it is not known:"
            " run the program with fewer epochs, or observe more with --steps N",
        )  # fmt: skip


def _by_rank(writers: Sequence[tuple[Rank, FileUse]]) -> list[tuple[Rank, FileUse]]:
    """The first use of each rank."""
    return [*{rank.name: (rank, use) for rank, use in reversed(writers)}.values()][::-1]


def _written(
    program: Program, path: str, writers: Sequence[tuple[Rank, FileUse]],
    uses: Sequence[tuple[Rank, FileUse]],
) -> Iterator[Finding]:  # fmt: skip
    names, (_, use) = listed([rank.name for rank, _ in writers]), writers[0]
    remedy = "write it on one rank: if hvd.rank() == 0"
    if len(writers) > 1 and use.checkpoint:
        why = ": hvd.local_rank() decides it" if use.local else ""
        yield program.finding(
            "checkpoint", "fail", f"{names} write {path} ({use.site}){why}", "", remedy
        )
    elif len(writers) > 1:
        yield program.note(
            "checkpoint", f"{names} write {path} ({use.site}). To avoid it, {remedy}"
        )
    elif use.local and use.checkpoint:
        yield program.finding(
            "checkpoint", "fail", f"hvd.local_rank() decides who writes {path} ({use.site}): one rank"
            " of each host", "", remedy,
        )  # fmt: skip
    early = [
        (rank, each)
        for rank, each in uses
        if each.path == path and not each.write
        if rank is not writers[0][0] and each.clock == use.clock and use.clock
    ]
    for rank, each in early[:1]:
        yield program.finding(
            "checkpoint", "fail", f"{rank.name} reads {path} ({each.site}) while it may be half written"
            f" by {writers[0][0].name} ({use.site})",
            remedy="call hvd.barrier() between the two, or load it on rank 0 and broadcast it",
        )  # fmt: skip


def _metrics(program: Program) -> Iterator[Finding]:
    """Whether metrics that are printed are those of all ranks."""
    shown = [(rank, each) for rank in program.ranks for each in rank.all(Shown)]
    averaged = [
        call
        for call in program.calls(
            "allreduce", "grouped_allreduce", "allgather", "allgather_object",
            "MetricAverageCallback",
        )
        if call.site and call.elements <= _METRIC_ELEMENTS
    ]  # fmt: skip
    deciding = [each for each in shown if each[1].text.startswith(_DECIDE)]
    if averaged and not deciding:
        names = [call.site for call in averaged]
        yield program.finding(
            "metrics", "pass", f"values of all ranks are combined in {_places(names)}"
        )
    elif shown:
        rank, first = (deciding or shown)[0]
        yield program.note(
            "metrics", f"{first.site} {first.text}: it has the metrics of {rank.name} alone. Average them"
            " with hvd.allreduce, or with MetricAverageCallback of Keras, which must be the first of the"
            " callbacks that use metrics",
        )  # fmt: skip
    else:
        yield program.finding("metrics", "skip", "no metric was printed in these steps")

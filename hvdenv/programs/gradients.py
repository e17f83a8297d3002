"""Whether the ranks of a training program start alike, and apply the mean of their gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hvdenv.programs.program import (
    METRIC_ELEMENTS,
    Program,
    Steps,
    Trained,
    digests,
    places,
    same_after,
)
from hvdenv.reports.report import Finding
from hvdenv.verification.rank_judgement import listed

# How far projections may be from the mean of others, as a part of their length.
_ROUNDING = 0.01
_BROADCAST = (
    "broadcast them from rank 0 before training: hvd.broadcast_parameters(model.state_dict(),"
    " root_rank=0), hvd.broadcast_variables(model.variables, root_rank=0), or"
    " BroadcastGlobalVariablesCallback(0) of Keras"
)
_ALL = (
    "give hvd.DistributedOptimizer or hvd.DistributedGradientTape all parameters, also those added"
    " to a group later, and change parameters on all ranks alike"
)
_AVERAGE = (
    "clip or change gradients after optimizer.synchronize() has averaged them; call optimizer.step()"
    " without a closure; broadcast all parameters and the optimizer's state; change parameters on all"
    " ranks alike"
)
_STATISTICS = "running_mean", "running_var", "num_batches_tracked"


def judge_start(program: Program) -> Iterator[Finding]:
    """Whether all ranks start from the same parameters and the same state."""
    for trained in program.trained:
        if trained.optimizer.lost:
            yield program.fail(
                "start",
                f"the optimizer{trained.name} lost its state, such as momentum, when"
                " hvd.DistributedOptimizer wrapped it",
                "load the checkpoint into the optimizer that hvd.DistributedOptimizer returns, with Keras by"
                " hvd.load_model()",
            )
        if trained.steps and len({step.state for step in trained.steps[0]}) > 1:
            yield program.fail(
                "start",
                f"the optimizer's state{trained.name} differs between ranks before the first step",
                "call hvd.broadcast_optimizer_state(optimizer, root_rank=0) after it is loaded",
            )
        if trained.steps:
            yield from _start(program, trained)
    yield from _buffers(program)


def _start(program: Program, trained: Trained) -> Iterator[Finding]:
    """Whether the parameters are equal before the first step, or at least later."""
    calls, known = program.broadcasts, [step.before for step in trained.steps[0]]
    equal = all(known) and len(set(known)) == 1
    meet = next((at for at, each in enumerate(trained.steps, 1) if same_after(each)), 0)
    when = "before the first step" if equal else f"from step {meet} on"
    text = f"the parameters{trained.name} are equal on all ranks {when}"
    if (equal or meet) and calls:
        yield program.passed("start", f"{text} ({calls[0].operation}, {calls[0].site})")
    elif equal or meet:
        yield program.note(
            "start",
            f"{text}, but nothing was broadcast: they are equal by their seed, or by a file"
            " that all ranks load",
        )
    elif all(known) or not calls:
        text = f"the parameters{trained.title} differ between ranks"
        text += " before the first step" if all(known) else ", and nothing was broadcast"
        remedy = _BROADCAST
        if late := program.state_after_parameters():
            text += (
                f": hvd.broadcast_optimizer_state ({late}) changes them on ranks without a state, by a"
                " step of the optimizer with its weight decay"
            )
            remedy = "call hvd.broadcast_parameters after hvd.broadcast_optimizer_state"
        yield program.fail("start", text, remedy, digests(program, "before", trained.steps[0]))


def _buffers(program: Program) -> Iterator[Finding]:
    """Whether ranks start with the same buffers and frozen parameters."""
    firsts = [trained.steps[0] for trained in program.trained if trained.steps]
    buffers = [dict(map(str.split, step.buffers)) for step in firsts[0]] if firsts else [{}]
    common = {*buffers[0]}.intersection(*buffers)
    names = sorted(name for name in common if len({each[name] for each in buffers}) > 1)
    if names and all(each.endswith(_STATISTICS) for each in names):
        yield program.note(
            "start",
            f"the running statistics of BatchNorm differ between ranks ({listed(names)}). Broadcast"
            " model.state_dict(), not only the parameters, so that all ranks test the same model",
        )
    elif names:
        yield program.fail(
            "start",
            f"tensors of the model that are not trained differ between ranks: {listed(names)}",
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) broadcasts them too",
        )


def judge_gradients(program: Program) -> Iterator[Finding]:
    """Whether all ranks apply the same gradients, and these are the mean of the ranks' own."""
    operations = "allreduce", "grouped_allreduce", "allgather"
    by_hand = program.calls(*operations, gradient=True)
    for trained in program.trained:
        if not trained.steps:
            continue
        if program.size > 1 and not (trained.optimizer.distributed or by_hand):
            yield _never_averaged(program, trained)
        else:
            yield _averaged(program, trained)


def _averaged(program: Program, trained: Trained) -> Finding:
    steps = trained.steps
    known = any(step.applied for each in steps for step in each)
    apart = [each for each in steps if not same_after(each)]
    if known:
        different = [each for each in steps if len({step.applied for step in each}) > 1]
        started = len({(step.before, step.state) for step in steps[0]}) == 1
        apart = different or (apart if started else [])
    elif apart == steps and not program.broadcasts:
        return program.unproven(
            "gradients",
            f"the gradients{trained.name} are averaged; whether all ranks apply the same"
            " ones cannot be seen, because they start from different parameters",
        )
    elif len(apart) < len(steps) and apart == list(steps[: len(apart)]):
        apart = []  # they were broadcast after some steps, and are equal since
    return _apart(program, trained, apart) if apart else _mean(program, trained)


def _never_averaged(program: Program, trained: Trained) -> Finding:
    others = [each for each in program.calls("allreduce") if each.elements > METRIC_ELEMENTS]
    if others and all(each.step for each in others):
        return program.unproven(
            "gradients",
            f"the gradients{trained.name} are not averaged, but other tensors are, in"
            f" {places([each.site for each in others])}: if these are the parameters, ranks are equal"
            " after that",
        )
    why = "the parameters drift apart"
    if all(map(same_after, trained.steps)):
        read = [{step.batch for step in each} for each in trained.steps]
        if others and any("" in batches for batches in read):
            text = f"the parameters{trained.name} stay equal, but the batches could not be seen"
            return program.unproven("gradients", f"{text}: ranks may read the same ones")
        if all(len(batches) == program.size and "" not in batches for batches in read):
            return program.passed(  # they are reduced in a way of its own
                "gradients",
                f"the parameters{trained.name} stay equal, though all ranks read different batches",
            )
        why = "the parameters are equal only because all ranks read the same"
    text = f"the gradients{trained.name} are never averaged: {why}"
    evidence = digests(program, "after", trained.steps[-1])
    return program.fail("gradients", text, _wrap(trained), evidence)


def _wrap(trained: Trained) -> str:
    """How its gradients are averaged."""
    made = f" made in {trained.optimizer.site}" if trained.optimizer.site else ""
    return (
        f"wrap the optimizer{made} with hvd.DistributedOptimizer, or the tape with"
        " hvd.DistributedGradientTape"
    )


def _apart(program: Program, trained: Trained, apart: Sequence[Steps]) -> Finding:
    """Ranks apply different gradients, or have different parameters afterwards."""
    shown = next((each for each in reversed(trained.steps) if each[0].tensors), apart[0])
    left_out = _left_out(trained, shown)
    text = f"{left_out or f'the parameters{trained.title} differ between ranks'} after step"
    text += f" {apart[0][0].step}"
    remedy = _ALL if left_out else _AVERAGE
    wrapped = [each.optimizer.distributed for each in program.trained]
    if any(wrapped) and not trained.optimizer.distributed:
        remedy = _wrap(trained)
    rates = {f"{step.rate:g}" for step in apart[0] if step.rate is not None}
    if len(rates) > 1:
        text = f"{text}, with different learning rates: {listed(sorted(rates))}"
        remedy = "set the same learning rate on all ranks, also by schedules and callbacks"
    return program.fail("gradients", text, remedy, digests(program, "after", apart[0]))


def _left_out(trained: Trained, steps: Steps) -> str:
    """The tensors that differ between ranks, in words; empty if all do."""
    columns = list(zip(*(step.tensors for step in steps), strict=False))
    pairs = zip(trained.optimizer.names, columns, strict=False)
    names = [name for name, column in pairs if len(set(column)) > 1]
    if not names or len(names) == len(columns):
        return ""
    return f"{len(names)} of {len(columns)} parameters{trained.name} differ between ranks ({listed(names)})"


def _mean(program: Program, trained: Trained) -> Finding:
    """What the reduced gradients are of the ranks' own."""
    size, operation = program.size, trained.optimizer.operation
    seen = [each for each in trained.steps if _has_projections(each)]
    factors = [_factor(each) for each in seen]
    text = f"all ranks apply the same gradients{trained.name} in {len(trained.steps)} steps"
    if not factors:
        return program.passed("gradients", text)
    usual = Counter(factors).most_common(1)[0][0]
    if len(set(factors)) > 1 or usual is None:
        changed = "they were changed between their reduction and the step, such as by clipping"
        return program.passed("gradients", f"{text}; {changed}")
    if operation == "Adasum":
        return program.passed("gradients", f"{text}, combined by Adasum")
    kinds = {1.0: "the mean", float(size): "the sum", 1 / size: f"1/{size} of the mean"}
    usually = f"{usual:g} times the mean"
    kind = next((each for factor, each in kinds.items() if abs(usual - factor) < 0.005), usually)
    text = f"{text}: {kind} of the ranks' own"
    if kind in ("the mean", usually):
        return program.passed("gradients", text)
    if kind == "the sum" and trained.factor == size:
        return program.note(
            "gradients",
            f"{text}, with a learning rate {size} times that of one rank. The sum alone"
            " makes steps that much longer",
        )
    if kind == "the sum" and operation == "Sum":
        return program.passed("gradients", f"{text}, as declared")
    return program.note("gradients", f"{text}. Averaged ones are usual")


def _has_projections(steps: Steps) -> bool:
    """Whether all ranks report the projections of their gradients, on equally many directions."""
    lengths = {len(each) for step in steps for each in (step.own, step.reduced)}
    return len(lengths) == 1 and lengths != {0}


def _factor(steps: Steps) -> float | None:
    """How many times the mean of the ranks' gradients was applied; None if it is no multiple."""
    mean = [sum(column) / len(steps) for column in zip(*(step.own for step in steps), strict=True)]
    applied = steps[0].reduced
    length = sum(each * each for each in mean)
    if not length:
        return None
    factor = sum(a * b for a, b in zip(applied, mean, strict=True)) / length
    apart = [a - factor * b for a, b in zip(applied, mean, strict=True)]
    rest = sum(each * each for each in apart)
    whole = max(sum(a * a for a in applied), 1e-300)
    return float(f"{factor:.3g}") if rest <= _ROUNDING**2 * whole < math.inf else None

"""Judges a training program by what its ranks did in a few steps.

Each rule looks for one mistake in making a program distributed. Its verdicts are functions of the
events of the ranks: ``fail`` if training is wrong, ``pass`` with a note if it may be meant,
``unproven`` if it could not be observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from hvdenv.reports.report import Finding
from hvdenv.standalone.ranks import events
from hvdenv.verification.program import (
    METRIC_ELEMENTS,
    Program,
    Steps,
    Trained,
    Verdict,
    agree,
    digests,
    fail,
    finding,
    most_steps,
    note,
    passed,
    places,
    skipped,
    unproven,
    values,
)
from hvdenv.verification.rank_judgement import breakdown, listed
from hvdenv.verification.rank_run import Rank

Verdicts = Iterator[Verdict]

# How standalone/program marks callbacks, and exceptions that a shortened pass may have caused.
_DECIDES, _BY = "lets ", " decide by "
_ENDED_EARLY = "after verify ended a pass"
_NOT_INITIALISED = "has not been initialized"
# Those that combine values of all ranks.
_COMBINE = "allreduce", "grouped_allreduce", "allgather", "allgather_object"
_OTHER_LIBRARIES = ("torch.distributed", "deepspeed", "lightning", "pytorch_lightning")
# How far projections may be from the mean of others, as a part of their length.
_ROUNDING = 0.01
# The part of its batches, or of its samples within a share, that a rank may share with another one
# by chance.
_SHARED = 0.1
# The part of its samples that it hardly shares by chance within half a pass, in any order.
_SAME_SAMPLES = 0.75
_STATISTICS = "running_mean", "running_var", "num_batches_tracked"

_INITIALISE = "import horovod.torch, horovod.tensorflow or horovod.keras, and call hvd.init()"
_AVERAGE = (
    "clip or change gradients after optimizer.synchronize() has averaged them; call optimizer.step()"
    " without a closure; broadcast all parameters and the optimizer's state; change parameters on all"
    " ranks alike; do not average over a process set that lacks ranks"
)
_GIVE_ALL = (
    "give hvd.DistributedOptimizer or hvd.DistributedGradientTape all parameters, also those added"
    " to a group later, and change parameters on all ranks alike"
)
_BROADCAST = (
    "broadcast them from rank 0 before training: hvd.broadcast_parameters(model.state_dict(),"
    " root_rank=0), hvd.broadcast_variables(model.variables, root_rank=0), or"
    " BroadcastGlobalVariablesCallback(0) of Keras"
)
_SHARE = (
    "give each rank its own share: DistributedSampler(dataset, num_replicas=hvd.size(),"
    " rank=hvd.rank()), dataset.shard(hvd.size(), hvd.rank()), or a seed by rank"
)
_SHOW_BATCHES = (
    "read the data by a DataLoader or a tf.data.Dataset, or pass batches to the model as tensors"
)
_SAME_STEPS = (
    "start all ranks in the same epoch, and give them the same number of batches (drop_last, take,"
    " steps_per_epoch), or call hvd.join() after the last one"
)


def judge(program: Program) -> list[Finding]:
    """All findings about a run."""
    if alone := _apply(program, (("steps", called_alone),)):
        return [*alone, *_apply(program, (("init", initialised),))]
    first = _apply(program, _WHOLE)
    if {"pass"} != {each.status for each in first if _ENDED_EARLY not in each.message}:
        # Ranks that write one file at a time may end by an exception of its library.
        return [*first, *(each for each in _apply(program, _FILES) if each.status == "fail")]
    return [*first, *_apply(program, _TRAINING)]


def _apply(program: Program, rules: Sequence[Rule]) -> list[Finding]:
    return [
        finding(program.name, check, verdict) for check, rule in rules for verdict in rule(program)
    ]


# Whether the program ran as one job


_CALL_ON_ALL = (
    "all ranks must call it: under `if hvd.rank() == 0`, keep only what needs no other rank"
)
_NAME_OBJECTS = (
    "Horovod tells such calls apart by the types of their objects: add name='state' on all ranks,"
    " or give all an object of one type"
)


def called_alone(program: Program) -> Verdicts:
    """An operation that a rank calls and others never do.

    Ranks may call it in different lines, so the numbers of their lines are compared. A program ends
    when a rank begins another pass, so that all have called what comes before it.
    """
    if not all(program.ends) or program.own:
        return  # it did not get that far, for another reason
    called = [list(filter(_waits_for_all, rank.all(events.Call))) for rank in program.ranks]
    for at, calls in enumerate(called):
        last = calls[-1] if calls else events.Call("", "", 0)
        counts = [sum(each.operation == last.operation for each in other) for other in called]
        fewer = [
            rank.name
            for rank, count in zip(program.ranks, counts, strict=True)
            if count < counts[at]
        ]
        if fewer:
            end = program.ends[at]
            unnamed = last.operation.startswith("broadcast_object of ")
            yield fail(
                f"{program.ranks[at].name} waits in {last.operation} ({last.site}), which"
                f" {listed(fewer)} never called",
                _NAME_OBJECTS if unnamed else _CALL_ON_ALL,
                end.error if end else "",
            )
            return


def _waits_for_all(call: events.Call) -> bool:
    waits = call.operation in _COMBINE or call.operation.startswith("broadcast")
    return waits and bool(call.site) and not call.gradient


def ran(program: Program) -> Verdicts:
    """Whether the program ran, and showed the steps of several ranks."""
    early = [end.error for _, end in program.failures[: program.own] if _ENDED_EARLY in end.error]
    # Other ranks follow one that has left after enough steps.
    followed = program.failures and not program.left
    if early and program.trained:
        yield unproven(
            f"the observed steps are judged below, but then: {early[0]}",
            "observe at least one whole epoch: --steps N",
        )
    elif program.own or (followed and not program.ended):
        rank, end = program.failures[0]
        more = "" if program.own else _uneven(program)
        text = f"{rank.name}: {end.error}" + (f"; {more}" if more else "")
        if _NOT_INITIALISED not in end.error:  # which has a verdict of its own
            remedy = "fix the program, or run it by itself: `hvdenv run` with the same words"
            yield fail(text, remedy, rank.tail)
    elif followed:
        return  # as left_behind() says
    elif all(program.ends) or program.left:
        yield _observed(program)
    else:
        yield _broken(program)


def _broken(program: Program) -> Verdict:
    """Ranks did not get to the end of the program."""
    _, how = breakdown(program.run)
    if not program.trained and any(rank.overdue for rank in program.ranks):
        text = f"no training step was seen within {program.run.timeout:.0f} s"
        remedy = "allow more time with --timeout, if its first step comes later"
        return unproven(text, remedy, how.evidence)
    return fail(how.message, how.remedy, how.evidence)


def _observed(program: Program) -> Verdict:
    """Whether a program that ran to its end has shown the steps of several ranks."""
    ends = [end for end in program.ends if end]
    if not program.trained or not all(map(most_steps, ends)):
        why, remedy = _unseen(ends)
        return unproven(f"no training step was seen: {why}", remedy)
    if program.size < 2:
        text = "a single rank trains, which shows nothing about its distribution"
        return unproven(text, "start at least two ranks: -n 2")
    count = len(program.trained[0].steps)
    return passed(f"{count} training steps on {program.size} ranks were observed")


def _unseen(ends: Sequence[events.ProgramEnd]) -> tuple[str, str]:
    """Why no steps were seen, and what helps."""
    for end in ends:
        if end.unobserved:
            return end.unobserved, "report this as a defect of hvdenv, with the program"
        if others := [name for name in _OTHER_LIBRARIES if name in end.libraries]:
            text = f"the program trains by {others[0]}, not by Horovod"
            return text, "name a program that trains with Horovod"
        if "tensorflow" in end.libraries:
            return (
                "its optimizer takes them within a graph of TensorFlow 1, or changes variables"
                " without an optimizer of Keras",
                "train with an optimizer of Keras: optimizer.apply_gradients(), or model.fit()",
            )
    text = "no optimizer of PyTorch or Keras took one before the program ended"
    return text, "give the program arguments with which it trains"


def left_behind(program: Program) -> Verdicts:
    """A rank waits for others that took fewer steps and ended."""
    if program.left or program.own or not (program.failures and program.ended):
        return
    rank, end = program.failures[0]
    names = listed([f"{name} ended after {count} steps" for name, count in program.ended.items()])
    yield fail(
        f"{names}, but {rank.name} went on to step {most_steps(end) + 1} and waited for its"
        " gradients",
        _SAME_STEPS,
        end.error,
    )


def initialised(program: Program) -> Verdicts:
    """Whether all ranks are one job of Horovod."""
    ends = [end for end in program.ends if end]
    joined = [each for rank in program.ranks for each in rank.all(events.Joined)]
    wrong = sorted(values(joined, "size") - {program.size})
    if early := [end.error for end in ends if _NOT_INITIALISED in end.error]:
        text = f"Horovod is called before hvd.init(): {early[0]}"
        yield fail(text, "call hvd.init() right after the imports")
    elif any(end.reason == "exception" and not end.initialised for end in ends):
        return  # it did not get that far
    elif ends and len(joined) < len(program.ranks) and not any(values(ends, "initialised")):
        yield _without_horovod(program, ends)
    elif wrong:
        sizes = listed([*map(str, wrong)])
        yield fail(
            f"hvd.size() is {sizes} on {program.size} ranks: they train separate models",
            "start it with a launcher of the MPI that Horovod was built with",
        )
    elif joined:
        yield passed(f"hvd.init() in {places(program.calls('init'))}: size {program.size}")


def _without_horovod(program: Program, ends: Sequence[events.ProgramEnd]) -> Verdict:
    """No rank called hvd.init()."""
    used = sorted({name for end in ends for name in end.libraries} & {*_OTHER_LIBRARIES})
    if "torch.distributed" in used:
        return unproven(
            "it never calls hvd.init(): its ranks communicate by torch.distributed, which is"
            " not judged here",
            f"to train with Horovod instead, {_INITIALISE}",
        )
    why = f"; it uses {listed(used)}" if used else ""
    ranks = program.size
    text = f"it never calls hvd.init(): {ranks} ranks train {ranks} separate models{why}"
    return fail(text, _INITIALISE)


def own_gpu(program: Program) -> Verdicts:
    """Whether ranks share a GPU."""
    used: dict[tuple[str, str], list[str]] = {}
    for rank, end in zip(program.ranks, program.ends, strict=True):
        if end and end.device:
            used.setdefault((rank.host, end.device), []).append(rank.name)
    shared = {key: names for key, names in used.items() if len(names) > 1}
    for (_, device), names in shared.items():
        yield fail(
            f"{listed(names)} use the same GPU, {device}",
            "choose the GPU by hvd.local_rank(): torch.cuda.set_device(hvd.local_rank()), or"
            " tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
        )
    if not used:
        yield skipped("the parameters are in the memory of the hosts")
    elif not shared:
        yield passed("each rank has a GPU of its own")


def learning_rate(program: Program) -> Verdicts:
    """Whether the learning rate grows with the number of ranks."""
    for trained in program.trained:
        size, rate, factor = program.size, trained.rate, trained.factor
        text = f"learning rate {rate:g}{trained.name} is" if rate else ""
        last = (trained.steps[-1][0].rate or 0.0) if trained.steps else 0.0
        if factor is None:
            yield skipped(
                f"the learning rate{trained.name} on one rank is not known: a run on one rank took no"
                " step, or resumed from a checkpoint"
            )
        elif factor == size:
            yield passed(f"{text} {size} times that of one rank")
        elif rate and last > rate:
            yield passed(f"learning rate{trained.name} rises from {rate:g} to {last:g}, a warm-up")
        else:
            same = abs(factor - 1) < 1e-6
            how = "the same as" if same else f"{factor:.3g} times that"
            yield note(
                f"{text} {how} on one rank. With {size} times the batch, the rate{trained.title} is"
                " usually multiplied by hvd.size(), if necessary after some epochs of warm-up"
            )


# Whether ranks start alike


def optimizer_state(program: Program) -> Verdicts:
    """Whether all ranks start with the same state of their optimizers, and with the one loaded."""
    for trained in program.trained:
        if trained.optimizer.lost:
            yield fail(
                f"the optimizer{trained.name} lost its state, such as momentum, when"
                " hvd.DistributedOptimizer wrapped it",
                "load the checkpoint into the optimizer that hvd.DistributedOptimizer returns, with"
                " Keras by hvd.load_model()",
            )
        if trained.steps and len(values(trained.steps[0], "state")) > 1:
            yield fail(
                f"the optimizer's state{trained.name} differs between ranks before the first step",
                "call hvd.broadcast_optimizer_state(optimizer, root_rank=0) after it is loaded",
            )


def first_epochs(program: Program) -> Verdicts:
    """Whether all ranks start in the same epoch."""
    if len({*program.epochs.values()}) > 1:
        starts = listed([f"{name} in epoch {epoch}" for name, epoch in program.epochs.items()])
        yield fail(
            f"ranks start in different epochs: {starts}. Their shares of the data overlap, and ranks"
            " with more epochs left wait for the others forever",
            "give sampler.set_epoch() the same epoch on all ranks. If a checkpoint has it, broadcast"
            " it: hvd.broadcast(torch.tensor(epoch), root_rank=0,"
            " name='epoch').item(), or with Keras int(hvd.broadcast(epoch, root_rank=0, name='epoch'))",
        )


def parameters(program: Program) -> Verdicts:
    """Whether the parameters are equal before the first step, or at least later."""
    calls = program.broadcasts
    for trained in (each for each in program.trained if each.steps):
        known = all(values(trained.steps[0], "before"))
        equal = agree(trained.steps[0], "before")
        meet = next((at for at, each in enumerate(trained.steps, 1) if agree(each, "after")), 0)
        when = "before the first step" if equal else f"from step {meet} on"
        text = f"the parameters{trained.name} are equal on all ranks {when}"
        if (equal or meet) and calls:
            yield passed(f"{text} ({calls[0].operation}, {calls[0].site})")
        elif equal or meet:
            yield note(
                f"{text}, but nothing was broadcast: they are equal by their seed, or by a file"
                " that all ranks load"
            )
        elif known or not calls:
            yield _start_apart(program, trained, known)


def _start_apart(program: Program, trained: Trained, known: bool) -> Verdict:
    """The parameters differ at the start: they were not broadcast, or changed after that."""
    why = " before the first step" if known else ", and nothing was broadcast"
    text, remedy = f"the parameters{trained.title} differ between ranks{why}", _BROADCAST
    calls = program.calls("broadcast_parameters", "state_step")
    if empty := program.calls("empty_broadcast"):
        text += f": {places(empty)} is given no tensors; a model has none before it is built"
        remedy = f"call the model on a batch, which makes them, and then {_BROADCAST}"
    elif program.broadcasts and calls and calls[-1].operation == "state_step":
        text += f": hvd.broadcast_optimizer_state ({calls[-1].site}) changes them on ranks without"
        text += " a state, by weight decay"
        remedy = "call hvd.broadcast_parameters after hvd.broadcast_optimizer_state"
    elif program.broadcasts:
        text += f": they are changed after, or left out of, the broadcast in {places(program.broadcasts)}"
        remedy = f"after all that changes them, such as loading a checkpoint, {_BROADCAST}"
    return fail(text, remedy, digests(program, "before", trained.steps[0]))


def buffers(program: Program) -> Verdicts:
    """Whether ranks start with the same buffers and frozen parameters."""
    firsts = [trained.steps[0] for trained in program.trained if trained.steps]
    steps = firsts[0] if firsts else ()
    # Names may contain spaces: nn.ModuleDict accepts any key.
    tables = [dict(each.rpartition(" ")[::2] for each in step.buffers) for step in steps] or [{}]
    common = {*tables[0]}.intersection(*tables)
    names = sorted(name for name in common if len({each[name] for each in tables}) > 1)
    if names and all(each.endswith(_STATISTICS) for each in names):
        yield note(
            f"the running statistics of BatchNorm differ between ranks ({listed(names)}). Broadcast"
            " model.state_dict(), not only the parameters, so that all ranks test the same model"
        )
    elif names:
        yield fail(
            f"tensors of the model that are not trained differ between ranks: {listed(names)}",
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) broadcasts them too",
        )


# Whether ranks apply the mean of their gradients


def gradients(program: Program) -> Verdicts:
    """Whether all ranks apply the same gradients, and these are the mean of the ranks' own."""
    by_hand = program.calls(*_COMBINE, gradient=True)
    if early := program.calls("early_change"):
        yield fail(
            f"gradients are changed, such as by clipping, before they are averaged in {places(early)}",
            "call optimizer.synchronize() right after loss.backward(), then change them, and call"
            " optimizer.step() in `with optimizer.skip_synchronize():`",
        )
        return
    for trained in (each for each in program.trained if each.steps):
        if program.size > 1 and not (trained.optimizer.distributed or by_hand):
            yield _never_averaged(program, trained)
        else:
            yield _averaged(program, trained)


def _averaged(program: Program, trained: Trained) -> Verdict:
    steps = trained.steps
    apart = [each for each in steps if not agree(each, "after")]
    if any(step.applied for each in steps for step in each):
        different = [each for each in steps if len(values(each, "applied")) > 1]
        started = len({(step.before, step.state) for step in steps[0]}) == 1
        apart = different or (apart if started else [])
    elif apart == steps and not program.broadcasts:
        return unproven(
            f"the gradients{trained.name} are averaged; whether all ranks apply the same"
            " ones cannot be seen, because they start from different parameters",
            _BROADCAST,
        )
    elif len(apart) < len(steps) and apart == list(steps[: len(apart)]):
        apart = []  # they were broadcast after some steps, and are equal since
    return _apart(program, trained, apart[0]) if apart else _mean(program, trained)


def _never_averaged(program: Program, trained: Trained) -> Verdict:
    others = [each for each in program.calls("allreduce") if each.elements > METRIC_ELEMENTS]
    if others and all(values(others, "step")):
        return unproven(
            f"the gradients{trained.name} are not averaged, but other tensors are, in"
            f" {places(others)}: if these are the parameters, ranks are equal after that",
            f"if they are not, {_wrap(trained)}",
        )
    why = "the parameters drift apart"
    if all(agree(each, "after") for each in trained.steps):
        read = [values(each, "batch") for each in trained.steps]
        if others and any("" in batches for batches in read):
            text = f"the parameters{trained.name} stay equal, but the batches could not be seen"
            return unproven(f"{text}: ranks may read the same ones", _SHOW_BATCHES)
        if all(len(batches) == program.size and "" not in batches for batches in read):
            return passed(  # they are reduced in a way of its own
                f"the parameters{trained.name} stay equal, though all ranks read different batches"
            )
        why = "the parameters are equal only because all ranks read the same"
    text = f"the gradients{trained.name} are never averaged: {why}"
    return fail(text, _wrap(trained), digests(program, "after", trained.steps[-1]))


def _wrap(trained: Trained) -> str:
    """How its gradients are averaged."""
    made = f" made in {trained.optimizer.site}" if trained.optimizer.site else ""
    return (
        f"wrap the optimizer{made} with hvd.DistributedOptimizer, or the tape with"
        " hvd.DistributedGradientTape, and use what it returns"
    )


def _apart(program: Program, trained: Trained, first: Steps) -> Verdict:
    """Ranks apply different gradients from a step on, or have different parameters afterwards."""
    left_out = _left_out(trained, first)
    text = left_out or f"the parameters{trained.title} differ between ranks"
    text += f" after step {first[0].step}"
    remedy = _GIVE_ALL if left_out else _AVERAGE
    made = (each for rank in program.ranks for each in rank.all(events.Optimizer))
    if any(each.distributed for each in made) and not trained.optimizer.distributed:
        remedy = _wrap(trained)
    rates = {f"{rate:g}" for rate in values(first, "rate") - {None}}
    if len(rates) > 1:
        text = f"{text}, with different learning rates: {listed(sorted(rates))}"
        remedy = "set the same learning rate on all ranks, also by schedules and callbacks"
    return fail(text, remedy, digests(program, "after", first))


def _left_out(trained: Trained, first: Steps) -> str:
    """The tensors that differ between ranks, in words; empty if all do."""
    steps = next((each for each in reversed(trained.steps) if each[0].tensors), first)
    columns = list(zip(*(step.tensors for step in steps), strict=False))
    pairs = zip(trained.optimizer.names, columns, strict=False)
    names = [name for name, column in pairs if len(set(column)) > 1]
    if not names or len(names) == len(columns):
        return ""
    count = f"{len(names)} of {len(columns)}"
    return f"{count} parameters{trained.name} differ between ranks ({listed(names)})"


def _mean(program: Program, trained: Trained) -> Verdict:
    """What the reduced gradients are of the ranks' own."""
    size, operation = program.size, trained.optimizer.operation
    text = f"all ranks apply the same gradients{trained.name} in {len(trained.steps)} steps"
    projected = [each for each in trained.steps if _has_projections(each)]
    finite = [each for each in projected if _is_finite(each)]
    if not projected:
        return passed(text)
    if not finite:
        return unproven(
            f"the gradients{trained.name} are infinite or NaN, so whether they are averaged cannot be"
            " seen",
            "find the operation that makes them so: torch.autograd.set_detect_anomaly(True), or"
            " tf.debugging.enable_check_numerics()",
        )
    factors = {_factor(each) for each in finite}
    if operation == "Adasum":
        return passed(f"{text}, combined by Adasum")
    factor = next(iter(factors))
    if len(factors) > 1 or factor is None:
        changed = "they were changed between their reduction and the step, such as by clipping"
        return passed(f"{text}; {changed}")
    kinds = {"the mean": 1.0, "the sum": size, f"1/{size} of the mean": 1 / size}
    near = [kind for kind, each in kinds.items() if abs(factor - each) < 0.005]
    kind = near[0] if near else f"{factor:g} times the mean"
    text = f"{text}: {kind} of the ranks' own"
    if kind == "the sum" and trained.factor == size:
        return note(
            f"{text}, with a learning rate {size} times that of one rank. The sum alone"
            " makes steps that much longer"
        )
    if kind == "the sum" and operation == "Sum":
        return passed(f"{text}, as declared")
    return note(f"{text}. Averaged ones are usual") if kind in [*kinds][1:] else passed(text)


def _has_projections(steps: Steps) -> bool:
    """Whether all ranks report the projections of their gradients, on equally many directions."""
    lengths = {len(each) for step in steps for each in (step.own, step.reduced)}
    return len(lengths) == 1 and lengths != {0}


def _is_finite(steps: Steps) -> bool:
    """Whether no gradient is infinite or NaN, as with a loss scale that is still too high."""
    return all(math.isfinite(each) for step in steps for each in (*step.own, *step.reduced))


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


# Whether ranks read different data, and equally much of it


def data(program: Program) -> Verdicts:
    """Whether ranks read different data."""
    found = next(filter(None, (_sampler(program, *each) for each in program.passes)), None)
    if found:
        yield found
    alike = len({*program.epochs.values()}) < 2  # in other epochs, shares overlap
    if program.size > 1 and alike and not (found and found.status == "fail"):
        yield _batches(program)


def _sampler(program: Program, rank: Rank, sources: Sequence[events.DataSource]) -> Verdict | None:
    """What is wrong with the sampler of a rank; None if nothing is."""
    shares = [each for each in sources if each.replicas is not None]
    if shares and (wrong := _wrong_share(shares[0], rank.last(events.Joined), program.size)):
        kind = shares[0].kind
        right = f"{kind}(dataset, num_replicas=hvd.size(), rank=hvd.rank())"
        if kind == "shard()":
            right = "dataset.shard(hvd.size(), hvd.rank())"
        return fail(f"the {kind} of the loader in {shares[0].site} {wrong}", right)
    epochs = [each.epoch for each in shares if each.shuffle and each.number == shares[0].number]
    if len(epochs) > 1 and epochs[0] == epochs[1]:
        return note(
            f"each pass over the loader in {shares[0].site} has the same order: call"
            " sampler.set_epoch(epoch) before it"
        )
    return None


def _wrong_share(share: events.DataSource, joined: events.Joined | None, size: int) -> str:
    """What is wrong with the share of a rank; empty if nothing is."""
    if joined and 1 < joined.local_size == share.replicas != size:
        return ""  # each host reads all data
    if share.local:
        return "was given hvd.local_rank() as its rank, which repeats on each host"
    if share.replicas != size:
        return f"divides the data by {share.replicas}, not by the {size} ranks"
    if joined and share.rank != joined.rank:
        return f"was given rank {share.rank} on rank {joined.rank}"
    return ""


def _batches(program: Program) -> Verdict:
    """Whether ranks read the same batches."""
    steps = max((each.steps for each in program.trained), key=len, default=[])
    if not steps or not all(step.batch for each in steps for step in each):
        why = next((end.unobserved for end in program.ends if end and end.unobserved), "")
        why = why or "the model reads them within compiled code, or by arguments of its own"
        return unproven(f"the batches could not be seen: {why}", _SHOW_BATCHES)
    sites = [each.site for each in program.firsts if each.site]
    where = f" (read in {sites[0]})" if sites else ""
    columns = [*zip(program.ranks, zip(*steps, strict=True), strict=True)]
    pairs = [
        (f"{one.name} and {other.name}", mine, theirs)
        for (one, mine), (other, theirs) in combinations(columns, 2)
    ]
    found = [_same_batches(program, *pair, where) for pair in pairs]
    if not any(found):
        found = [_same_samples(program, *pair, where) for pair in pairs]
    known = sorted(filter(None, found), key=lambda each: each.status != "fail")
    return known[0] if known else _shares(program, len(steps), where)


def _whole_pass(program: Program) -> int:
    """The batches of the shortest first pass; a later pass has other shares."""
    return min((each.batches or 0 for each in program.firsts), default=0)


def _same_batches(
    program: Program, names: str, one: Steps, other: Steps, where: str
) -> Verdict | None:
    """What is wrong with the batches of two ranks; None if nothing is."""
    mine, theirs = [step.batch for step in one], [step.batch for step in other]
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    shared = len({*mine} & {*theirs}) / len({*mine})
    if len({*mine}) == 1 and len(mine) > 1 and same:
        return note(f"{names} read one batch in all steps: synthetic data")
    if same > len(mine) / 2:
        text = f"the same batches{where} in {same} of {len(mine)} steps"
    elif shared > _SHARED and len(mine) <= _whole_pass(program):
        text = f"shares that overlap{where}: {shared:.0%} of their batches"
    else:
        return None
    evidence = f"digests of {names}:\n{' '.join(mine)}\n{' '.join(theirs)}"
    return fail(f"{names} read {text}", _SHARE, evidence)


def _same_samples(
    program: Program, names: str, one: Steps, other: Steps, where: str
) -> Verdict | None:
    """Whether two ranks read the same samples, in other batches; None if they do not."""
    mine, theirs = ([x for step in steps for x in step.samples] for steps in (one, other))
    if not (mine and theirs):
        return None
    shared = len({*mine} & {*theirs}) / min(len({*mine}), len({*theirs}))
    shared -= 2 * (1 - len({*mine}) / len(mine))  # as ranks whose samples repeat do, by chance
    batches = _whole_pass(program)
    text = f"{names} read the same samples{where} in other batches: {shared:.0%} of them"
    divided = values(program.firsts, "replicas") <= {program.size}
    if divided and shared > _SHARED and len(one) <= batches:
        return fail(text, "shuffle with the same seed on all ranks before the division")
    if shared > _SAME_SAMPLES and 2 * len(one) <= batches:
        return fail(text, _SHARE)
    return note(f"{text}. If they are not meant to, {_SHARE}") if shared > _SAME_SAMPLES else None


def _shares(program: Program, steps: int, where: str) -> Verdict:
    """What different batches are: shares of the data, or all of it in another order."""
    text, firsts = f"the ranks read different batches in {steps} steps{where}", program.firsts
    samples = {f"{count} samples" for count in values(firsts, "samples") - {None}}
    lengths = samples or {f"{count} batches" for count in values(firsts, "batches") - {None}}
    if values(firsts, "replicas") - {None} or len(lengths) != 1:
        return passed(text)
    share = "a DistributedSampler" if samples else "dataset.shard()"
    return note(
        f"{text}; each rank reads {listed(list(lengths))} in an epoch. If these are the whole"
        f" data set rather than a share of it, use {share}"
    )


def step_counts(program: Program) -> Verdicts:
    """Whether ranks take equally many steps."""
    if text := _uneven(program):
        sites = places(program.firsts)
        end = "at the end of the shorter one, the other ranks wait forever"
        yield fail(f"{text} (read in {sites}): {end}", _SAME_STEPS)
    elif calls := program.calls("join"):
        text = (
            f"ranks may take different numbers of steps: they wait in hvd.join() ({places(calls)})"
        )
        yield passed(text)
    elif _lengths(program) or len(program.ended) == len(program.ranks):
        yield passed("all ranks take the same number of steps")
    else:
        yield skipped("no pass over the data ended in these steps, and its length is not known")


def _uneven(program: Program) -> str:
    """Ranks with different numbers of steps, in words; empty if there are none."""
    tables = {"batches in a pass": _lengths(program), "steps until the end": program.ended}
    for what, table in tables.items():
        uneven = len(table) == len(program.ranks) and len(set(table.values())) > 1
        if uneven and not program.calls("join"):
            return f"{listed([f'{name} has {count}' for name, count in table.items()])} {what}"
    return ""


def _lengths(program: Program) -> dict[str, int]:
    """The batches of each rank in a pass; empty if they are not known."""
    counts = {
        rank.name: each[0].batches or 0
        for rank, each in program.passes
        if each and each[0].batches is not None and each[0].whole
    }
    return counts if len(counts) == len(program.ranks) else {}


# Whether ranks write and print what is of all of them


def checkpoints(program: Program) -> Verdicts:
    """Who writes files, and who reads them too early."""
    uses = [(rank, use) for rank in program.ranks for use in rank.all(events.FileUse)]
    writers: dict[str, dict[str, events.FileUse]] = {}  # by path and rank
    for rank, use in uses:
        if use.write:
            writers.setdefault(use.path, {}).setdefault(rank.name, use)
    found = [
        verdict for own in writers.values() for verdict in (*_written(own), *_read_early(own, uses))
    ]
    saved = [own for own in writers.values() if next(iter(own.values())).checkpoint]
    if found:
        yield from found
    elif saved:
        ((name, use), *_) = saved[-1].items()
        yield passed(
            f"only {name} writes {use.path} ({use.site}). It is of this short run: remove"
            " it before you train"
        )
    else:
        yield note(
            "no checkpoint was written in these steps, so who writes it is not known: run"
            " the program with fewer epochs, or observe more with --steps N"
        )


def _written(writers: dict[str, events.FileUse]) -> Verdicts:
    """Whether several ranks write a file; of each the first use."""
    use, names = next(iter(writers.values())), listed(list(writers))
    remedy = "write it on one rank: if hvd.rank() == 0"
    if len(writers) > 1 and use.checkpoint:
        why = ": hvd.local_rank() decides it" if use.local else ""
        yield fail(f"{names} write {use.path} ({use.site}){why}", remedy)
    elif len(writers) > 1:
        yield note(f"{names} write {use.path} ({use.site}). To avoid it, {remedy}")
    elif use.local and use.checkpoint:
        text = f"hvd.local_rank() decides who writes {use.path} ({use.site}): one rank of each host"
        yield fail(text, remedy)


def _read_early(
    writers: dict[str, events.FileUse], uses: Sequence[tuple[Rank, events.FileUse]]
) -> Verdicts:
    """Whether a rank reads a file before its writer has met it."""
    ((writer, wrote), *_) = writers.items()
    for rank, use in uses:
        other = use.path == wrote.path and not use.write and rank.name != writer
        if other and use.clock == wrote.clock != 0:
            yield fail(
                f"{rank.name} reads {use.path} ({use.site}) while it may be half written by"
                f" {writer} ({wrote.site})",
                "between the two, call hvd.barrier() on all ranks (with TensorFlow,"
                " hvd.allreduce(tf.constant(0.0))), or load it on rank 0 and broadcast it",
            )
            return


def metrics(program: Program) -> Verdicts:
    """Whether metrics that are printed are those of all ranks."""
    shown = [(rank, each) for rank in program.ranks for each in rank.all(events.Shown)]
    compared = [each for _, each in shown if each.text.startswith(_DECIDES) and _BY in each.text]
    if len({*compared}) > len(values(compared, "site")):
        yield fail(
            f"{compared[0].site} {compared[0].text} on one rank, and by another value on others",
            "average it first: hvd.allreduce(torch.tensor(value), name='value').item()",
        )
        return
    shown = [each for each in shown if each[1] not in compared]
    deciding = [each for each in shown if each[1].text.startswith(_DECIDES)]
    calls = program.calls(*_COMBINE, "MetricAverageCallback")
    averaged = [call for call in calls if call.site and call.elements <= METRIC_ELEMENTS]
    if averaged and not deciding:
        yield passed(f"values of all ranks are combined in {places(averaged)}")
    elif shown:
        rank, first = (deciding or shown)[0]
        yield note(
            f"{first.site} {first.text}: it has the metrics of {rank.name} alone. Average them"
            " with hvd.allreduce, or with MetricAverageCallback of Keras, which must be the first of the"
            " callbacks that use metrics"
        )
    else:
        yield skipped("no metric was printed in these steps")


# By the check that states their verdicts.
Rule = tuple[str, Callable[[Program], Verdicts]]
_WHOLE: tuple[Rule, ...] = (("", ran), ("steps", left_behind), ("init", initialised))
_FILES: tuple[Rule, ...] = (("checkpoint", checkpoints),)
_TRAINING: tuple[Rule, ...] = (
    ("device", own_gpu),
    ("rate", learning_rate),
    ("start", optimizer_state),
    ("start", first_epochs),
    ("start", parameters),
    ("start", buffers),
    ("gradients", gradients),
    ("data", data),
    ("steps", step_counts),
    *_FILES,
    ("metrics", metrics),
)

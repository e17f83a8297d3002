"""Judges a training program by what its ranks did in a few steps.

Each rule looks for one mistake in making a program distributed. Its verdicts are functions of the
events of the ranks: ``fail`` if training is wrong, ``pass`` with a note if it may be meant,
``unproven`` if it could not be observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations

from hvdenv.reports.report import Finding
from hvdenv.standalone.ranks import events
from hvdenv.verification.program import (
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
# Tensors with more elements are no metrics.
_METRIC_ELEMENTS = 64
# The part of its batches, or of its samples within a share, that a rank may share with another one
# by chance.
_SHARED = 0.1
# The part of its samples that it hardly shares by chance within half a pass, in any order.
_SAME_SAMPLES = 0.75
_STATISTICS = "running_mean", "running_var", "num_batches_tracked"

_INITIALISE = "import horovod.torch, horovod.tensorflow or horovod.keras, and call hvd.init()"
_AVERAGE = (
    "clip or change gradients after optimizer.synchronize() has averaged them; call optimizer.step()"
    " without a closure; broadcast all parameters and the optimizer's state; change parameters and"
    " learning rates on all ranks alike; do not average over a process set that lacks ranks"
)
_GIVE_ALL = (
    "give hvd.DistributedOptimizer or hvd.DistributedGradientTape all parameters, also those added"
    " to a group later, and change parameters on all ranks alike"
)
_BROADCAST = (
    "broadcast them from rank 0 before training, but after all that makes or changes them, such as"
    " building a Keras model, loading a checkpoint, or hvd.broadcast_optimizer_state with weight"
    " decay: hvd.broadcast_parameters(model.state_dict(), root_rank=0),"
    " hvd.broadcast_variables(model.variables, root_rank=0), or"
    " BroadcastGlobalVariablesCallback(0) of Keras"
)
_SHARE = (
    "give each rank its own share: DistributedSampler(dataset, num_replicas=hvd.size(),"
    " rank=hvd.rank()), dataset.shard(hvd.size(), hvd.rank()), or a seed by rank"
)
_SAME_STEPS = (
    "start all ranks in the same epoch, and give them the same number of batches (drop_last, take,"
    " steps_per_epoch), or call hvd.join() after the last one"
)
_CALL_ON_ALL = (
    "all ranks must call it: under `if hvd.rank() == 0`, keep only what needs no other rank"
)
_NAME_OBJECTS = (
    "Horovod tells such calls apart by the types of their objects: add name='state' on all ranks,"
    " or give all an object of one type"
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


def called_alone(program: Program) -> Verdicts:
    """An operation that a rank calls and others never do.

    Ranks may call it in different lines, so the numbers of their lines are compared. A program ends
    when a rank begins another pass, so that all have called what comes before it.
    """
    if len(program.ends) < len(program.ranks) or program.failures:
        return  # it did not get that far, for another reason
    called = [list(filter(_waits_for_all, rank.all(events.Call))) for rank in program.ranks]
    for rank, end, calls in zip(program.ranks, program.ends, called, strict=True):
        last = calls[-1] if calls else events.Call("", "", 0)
        counts = [sum(each.operation == last.operation for each in other) for other in called]
        own = sum(each.operation == last.operation for each in calls)
        fewer = [each.name for each, n in zip(program.ranks, counts, strict=True) if n < own]
        if fewer:
            unnamed = last.operation.startswith("broadcast_object of ")
            yield fail(
                f"{rank.name} waits in {last.operation} ({last.site}), which"
                f" {listed(fewer)} never called",
                _NAME_OBJECTS if unnamed else _CALL_ON_ALL,
                end.error,
            )
            return


def _waits_for_all(call: events.Call) -> bool:
    waits = call.operation in _COMBINE or call.operation.startswith("broadcast")
    return waits and bool(call.site) and not call.gradient


def ran(program: Program) -> Verdicts:
    """Whether the program ran, and showed the steps of several ranks."""
    early = [end.error for _, end in program.failures if _ENDED_EARLY in end.error]
    # Other ranks follow one that has left after enough steps, or has ended.
    followers = [] if program.left else program.followers
    if early and program.trained:
        yield unproven(
            f"the observed steps are judged below, but then: {early[0]}",
            "observe at least one whole epoch: --steps N",
        )
    elif program.failures or (followers and not program.ended):
        rank, end = (*program.failures, *followers)[0]
        if _NOT_INITIALISED not in end.error:  # which has a verdict of its own
            remedy = "fix the program, or run it by itself: `hvdenv run` with the same words"
            yield fail(f"{rank.name}: {end.error}", remedy, rank.tail)
    elif len(program.ends) == len(program.ranks) or program.left:
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
    if not program.trained or not all(map(most_steps, program.ends)):
        if defect := next((end.unobserved for end in program.ends if end.unobserved), ""):
            remedy = "report this as a defect of hvdenv, with the program"
            return unproven(f"no training step was seen: {defect}", remedy)
        return unproven(
            "no training step was seen: no optimizer of PyTorch or Keras took one outside of graphs"
            " of TensorFlow 1, or the program does not train by Horovod",
            "name a program that trains with Horovod by an optimizer of PyTorch or Keras, and give"
            " it arguments with which it trains",
        )
    if program.size < 2:
        text = "a single rank trains, which shows nothing about its distribution"
        return unproven(text, "start at least two ranks: -n 2")
    count = len(program.trained[0].steps)
    return passed(f"{count} training steps on {program.size} ranks were observed")


def initialised(program: Program) -> Verdicts:
    """Whether all ranks are one job of Horovod."""
    size, ends = program.size, program.ends
    joined = [each for rank in program.ranks for each in rank.all(events.Joined)]
    wrong = sorted(values(joined, "size") - {size})
    if early := [end.error for end in ends if _NOT_INITIALISED in end.error]:
        text = f"Horovod is called before hvd.init(): {early[0]}"
        yield fail(text, "call hvd.init() right after the imports")
    elif any(end.reason == "exception" and not end.initialised for end in ends):
        return  # it did not get that far
    elif ends and not any(values(ends, "initialised")):
        text = "it never calls hvd.init(): "
        if any(end.other_groups for end in ends):
            text += "its ranks communicate by torch.distributed, which is not judged here"
            yield unproven(text, f"to train with Horovod instead, {_INITIALISE}")
        else:
            yield fail(f"{text}{size} ranks train {size} separate models", _INITIALISE)
    elif wrong:
        sizes = listed([*map(str, wrong)])
        yield fail(
            f"hvd.size() is {sizes} on {size} ranks: they train separate models",
            "start it with a launcher of the MPI that Horovod was built with",
        )
    elif joined:
        yield passed(f"hvd.init() in {places(program.called('init'))}: size {size}")


def own_gpu(program: Program) -> Verdicts:
    """Whether ranks share a GPU."""
    used: dict[tuple[str, str], list[str]] = {}
    for rank in program.ranks:
        if (end := rank.last(events.ProgramEnd)) and end.device:
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
        size, rate, factor = program.size, trained.rate or 0.0, trained.factor
        text = f"the learning rate of {trained.title}"
        last = (trained.steps[-1][0].rate or 0.0) if trained.steps else 0.0
        if factor is None:
            yield skipped(
                f"{text} on one rank is not known: a run on one rank took no step or resumed from a"
                " checkpoint, or its schedule cannot be read"
            )
        elif factor == size:
            yield passed(f"{text}, {rate:g}, is {size} times that of one rank")
        elif last > rate:
            yield passed(f"{text} rises from {rate:g} to {last:g}, a warm-up")
        else:
            how = "the same as" if abs(factor - 1) < 1e-6 else f"{factor:.3g} times that"
            yield note(
                f"{text}, {rate:g}, is {how} on one rank. With {size} times the batch, the rate is"
                " usually multiplied by hvd.size(), if necessary after some epochs of warm-up"
            )


# Whether ranks start alike


def optimizer_state(program: Program) -> Verdicts:
    """Whether all ranks start with the same state of their optimizers, and with the one loaded."""
    for trained in program.trained:
        if trained.optimizer.lost:
            yield fail(
                f"{trained.title} lost its state, such as momentum, when"
                " hvd.DistributedOptimizer wrapped it",
                "load the checkpoint into the optimizer that hvd.DistributedOptimizer returns, with"
                " Keras by hvd.load_model()",
            )
        if trained.steps and len(values(trained.steps[0], "state")) > 1:
            yield fail(
                f"the state of {trained.title} differs between ranks before the first step",
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
        first = trained.steps[0]
        known, equal = all(values(first, "before")), agree(first, "before")
        meet = next((at for at, each in enumerate(trained.steps, 1) if agree(each, "after")), 0)
        text = f"the parameters of {trained.title}"
        if equal or meet:
            when = "before the first step" if equal else f"from step {meet} on"
            text += f" are equal on all ranks {when}"
            yield (
                passed(f"{text} ({calls[0].operation}, {calls[0].site})")
                if calls
                else note(
                    f"{text}, but nothing was broadcast: they are equal by their seed, or by a file"
                    " that all ranks load"
                )
            )
        elif known or not calls:
            text += f" differ between ranks{' before the first step' if known else ''}"
            why = ", and no tensors were broadcast"
            if calls:
                why = f": they are changed after, or left out of, the broadcast in {places(calls)}"
            yield fail(f"{text}{why}", _BROADCAST, digests(program, "before", first))


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
    by_hand = program.called(*_COMBINE, gradient=True)
    if early := program.called("early_change"):
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
    """What is wrong from the first step on that makes parameters of ranks differ."""
    first = trained.steps[0]
    alike = agree(first, "before") and len(values(first, "state")) == 1
    for each in trained.steps:
        if len(values(each, "applied")) > 1 or (alike and not agree(each, "after")):
            return _apart(program, trained, each)
        alike = agree(each, "after")
    if alike or any(step.applied for each in trained.steps for step in each):
        return _mean(program, trained)
    if program.broadcasts:
        return _apart(program, trained, first)
    return unproven(
        f"the gradients of {trained.title} are averaged; whether all ranks apply the same"
        " ones cannot be seen, because they start from different parameters",
        _BROADCAST,
    )


def _never_averaged(program: Program, trained: Trained) -> Verdict:
    others = [each for each in program.called("allreduce") if each.elements > _METRIC_ELEMENTS]
    read = [values(each, "batch") for each in trained.steps]
    equal = all(agree(each, "after") for each in trained.steps)
    if equal and all(len(batches) == program.size and "" not in batches for batches in read):
        return passed(  # they are reduced in a way of its own
            f"the parameters of {trained.title} stay equal, though all ranks read different batches"
        )
    if others and (not equal or any("" in batches for batches in read)):
        return unproven(
            f"no gradients of {trained.title} are seen to be averaged, but other tensors are, in"
            f" {places(others)}: these may be the gradients or the parameters",
            f"if they are not, {_wrap(trained)}",
        )
    why = "the parameters drift apart"
    if equal:
        why = "the parameters are equal only because all ranks read the same"
    text = f"the gradients of {trained.title} are never averaged: {why}"
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
    text = f"{left_out or 'the parameters'} of {trained.title} differ between ranks after step"
    remedy = _GIVE_ALL if left_out else _AVERAGE
    made = (each for rank in program.ranks for each in rank.all(events.Optimizer))
    if any(each.distributed for each in made) and not trained.optimizer.distributed:
        remedy = _wrap(trained)
    evidence = digests(program, "after", first)
    return fail(f"{text} {first[0].step}", remedy, evidence)


def _left_out(trained: Trained, first: Steps) -> str:
    """The tensors that differ between ranks, in words; empty if all do."""
    steps = next((each for each in reversed(trained.steps) if each[0].tensors), first)
    columns = list(zip(*(step.tensors for step in steps), strict=False))
    pairs = zip(trained.optimizer.names, columns, strict=False)
    names = [name for name, column in pairs if len(set(column)) > 1]
    if not names or len(names) == len(columns):
        return ""
    return f"{len(names)} of {len(columns)} parameters ({listed(names)})"


def _mean(program: Program, trained: Trained) -> Verdict:
    """What the reduced gradients are of the ranks' own."""
    size = program.size
    text = f"all ranks apply the same gradients of {trained.title} in {len(trained.steps)} steps"
    projected = [
        [
            (step.own, step.reduced)
            for step in each
            if step.own is not None and step.reduced is not None
        ]
        for each in trained.steps
    ]
    projected = [each for each in projected if len(each) == size]
    # With a loss scale that is still too high, they are not finite.
    finite = [each for each in projected if all(map(math.isfinite, chain(*each)))]
    if not projected:
        return passed(text)
    if not finite:
        return unproven(
            f"the gradients of {trained.title} are infinite or NaN, so whether they are averaged"
            " cannot be seen",
            "find the operation that makes them so: torch.autograd.set_detect_anomaly(True), or"
            " tf.debugging.enable_check_numerics()",
        )
    sums = [[sum(column) for column in zip(*each, strict=True)] for each in finite]
    factors = {f"{reduced / own:.3g}" for own, reduced in sums if own}
    if not factors:
        return passed(text)
    factor, *others = factors
    if others:
        changed = "they were changed between their reduction and the step, such as by clipping"
        return passed(f"{text}; {changed}, or not combined by a mean")
    kinds = {"the mean": 1.0, "the sum": size, f"1/{size} of the mean": 1 / size}
    near = [kind for kind, each in kinds.items() if factor == f"{each:.3g}"]
    kind = near[0] if near else f"{factor} times the mean"
    text = f"{text}: {kind} of the ranks' own"
    if kind == "the sum":
        return note(
            f"{text}. It makes steps {size} times longer than a mean does, and so does a learning"
            " rate that is multiplied by hvd.size(): one of the two is enough"
        )
    return note(f"{text}. Averaged ones are usual") if kind != "the mean" else passed(text)


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
    joined = rank.last(events.Joined)
    if not (shares and joined):
        return None
    share, size = shares[0], program.size
    by_host = 1 < joined.local_size == share.replicas != size  # each host reads all data
    wrong = share.local or (share.rank, share.replicas) != (joined.rank, size)
    if wrong and not by_host:
        right = "num_replicas=hvd.size(), rank=hvd.rank()"
        if share.kind == "shard()":
            right = "hvd.size(), hvd.rank()"
        why = ", by hvd.local_rank(), which repeats on each host" if share.local else ""
        return fail(
            f"the {share.kind} of the loader in {share.site} gives rank {joined.rank} of {size}"
            f" share {share.rank} of {share.replicas}{why}",
            f"give it {right}",
        )
    epochs = [each.epoch for each in shares if each.shuffle and each.number == share.number]
    if len(epochs) > 1 and epochs[0] == epochs[1]:
        return note(
            f"each pass over the loader in {share.site} has the same order: call"
            " sampler.set_epoch(epoch) before it"
        )
    return None


def _batches(program: Program) -> Verdict:
    """Whether ranks read the same batches, or the same samples in other ones."""
    steps = max((each.steps for each in program.trained), key=len, default=[])
    if not steps or not all(step.batch for each in steps for step in each):
        why = next((end.unobserved for end in program.ends if end.unobserved), "")
        why = why or "the model reads them within compiled code, or not from a loader"
        return unproven(
            f"the batches could not be seen: {why}",
            "read the data by a DataLoader, a tf.data.Dataset or fit()",
        )
    sites = [each.site for each in program.firsts if each.site]
    where = f" (read in {sites[0]})" if sites else ""
    columns = [*zip(program.ranks, zip(*steps, strict=True), strict=True)]
    found = [
        verdict
        for (one, mine), (other, theirs) in combinations(columns, 2)
        if (verdict := _same(program, f"{one.name} and {other.name} read", mine, theirs, where))
    ]
    found.sort(key=lambda each: each.status != "fail")
    return found[0] if found else _shares(program, len(steps), where)


def _same(program: Program, text: str, one: Steps, other: Steps, where: str) -> Verdict | None:
    """What is wrong with the data of two ranks; None if nothing is."""
    mine, theirs = [step.batch for step in one], [step.batch for step in other]
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    if len({*mine}) == 1 and len(mine) > 1 and same:
        return note(f"{text} one batch in all steps: synthetic data")
    if same > len(mine) / 2:
        return fail(f"{text} the same batches{where} in {same} of {len(mine)} steps", _SHARE)
    # A later pass has other shares.
    length = min((each.batches or 0 for each in program.firsts), default=0)
    shared = _shared(mine, theirs)
    if shared > _SHARED and len(mine) <= length:
        return fail(f"{text} shares that overlap{where}: {shared:.0%} of their batches", _SHARE)
    shared = _shared(*([x for step in each for x in step.samples] for each in (one, other)))
    text = f"{text} the same samples{where} in other batches: {shared:.0%} of them"
    divided = values(program.firsts, "replicas") <= {program.size}
    if divided and shared > _SHARED and len(mine) <= length:
        return fail(text, "shuffle with the same seed on all ranks before the division")
    if shared > _SAME_SAMPLES and 2 * len(mine) <= length:
        return fail(text, _SHARE)
    return None


def _shared(mine: Sequence[object], theirs: Sequence[object]) -> float:
    """The part of two lists that is in both, without what repeats by chance within one."""
    if not (mine and theirs):
        return 0.0
    shared = len({*mine} & {*theirs}) / min(len({*mine}), len({*theirs}))
    return shared - 2 * (1 - len({*mine}) / len(mine))


def _shares(program: Program, steps: int, where: str) -> Verdict:
    """What different batches are: shares of the data, or all of it in another order."""
    text, firsts = f"the ranks read different batches in {steps} steps{where}", program.firsts
    lengths = values(firsts, "batches") - {None}
    if values(firsts, "replicas") - {None} or len(lengths) != 1:
        return passed(text)
    return note(
        f"{text}; each rank reads {lengths.pop()} batches in an epoch. If these are the whole data"
        f" set rather than a share of it, {_SHARE}"
    )


def step_counts(program: Program) -> Verdicts:
    """Whether ranks take equally many steps."""
    lengths = {
        rank.name: each[0].batches
        for rank, each in program.passes
        if each and each[0].batches is not None and each[0].whole
    }
    known = False
    joins = program.called("join")
    for what, table in (("batches in a pass", lengths), ("steps until the end", program.ended)):
        complete = len(table) == len(program.ranks)
        if complete and len({*table.values()}) > 1 and not joins:
            text = listed([f"{name} has {count}" for name, count in table.items()])
            end = "at the end of the shorter one, the other ranks wait forever"
            yield fail(f"{text} {what} (read in {places(program.firsts)}): {end}", _SAME_STEPS)
            return
        known = known or complete
    if joins:
        text = "ranks may take different numbers of steps: they wait in hvd.join()"
        yield passed(f"{text} ({places(joins)})")
    elif known:
        yield passed("all ranks take the same number of steps")
    else:
        yield skipped("no pass over the data ended in these steps, and its length is not known")


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
    if not use.checkpoint:
        if len(writers) > 1:
            yield note(f"{names} write {use.path} ({use.site}). To avoid it, {remedy}")
    elif use.local or len(writers) > 1:
        why = ": hvd.local_rank() decides it, so one rank of each host writes" if use.local else ""
        yield fail(f"{use.path} is written by {names} ({use.site}){why}", remedy)


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
    calls = program.called(*_COMBINE, "MetricAverageCallback")
    averaged = [call for call in calls if call.site and call.elements <= _METRIC_ELEMENTS]
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
_WHOLE: tuple[Rule, ...] = (("", ran), ("init", initialised))
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

"""What the ranks of a training program reported (standalone/program/observe.py), as rules read it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvdenv.reports.report import Finding, Status
from hvdenv.standalone.ranks import events
from hvdenv.verification.rank_judgement import listed
from hvdenv.verification.rank_run import Rank, RankRun

# Tensors with more elements are no metrics.
METRIC_ELEMENTS = 64
_FOLLOW_ON = ("Horovod has been shut down", "HorovodInternalError", "Process set provided")

# They send something else.
_NO_PARAMETERS = "broadcast_optimizer_state", "broadcast_object"

Steps = Sequence[events.TrainingStep]  # one of each rank


class Verdict(NamedTuple):
    """What a rule says."""

    status: Status
    message: str
    remedy: str = ""
    evidence: str = ""


fail = partial(Verdict, "fail")
passed = partial(Verdict, "pass")
skipped = partial(Verdict, "skip")


def unproven(message: str, remedy: str, evidence: str = "") -> Verdict:
    """Something could not be observed."""
    return Verdict("unproven", message, remedy, evidence)


def note(message: str) -> Verdict:
    """Something may be meant, or a mistake."""
    return passed(f"note: {message}")


def finding(program: str, check: str, verdict: Verdict) -> Finding:
    """A verdict about a program."""
    name = f"program-{check}" if check else "program"
    return Finding(check=name, subject=program, **verdict._asdict())


class Trained(NamedTuple):
    """An optimizer, and its steps that all ranks took.

    Attributes:
        optimizer: as the first rank reports it.
        title: how messages name it, with where it is made.
        name: the same; empty if it is the only one.
        rate: its first learning rate; None if unknown.
        factor: how many times that of one rank this is; None if unknown.
    """

    optimizer: events.Optimizer
    steps: Sequence[Steps]
    title: str
    name: str
    rate: float | None
    factor: float | None


class Program:
    """A run of a training program.

    Attributes:
        name: such as ``train.py``.
        ends: the last event of each rank; None if there is none.
        failures: ranks that ended by an exception, first those that no other rank caused.
        own: how many of these no other rank caused.
        left: whether any rank was ended after enough steps.
        ended: the steps of each rank whose program ended by itself.
        broadcasts: calls that make parameters equal on all ranks.
        trained: the optimizers that train.
        passes: of each rank, the passes over data that its training steps read.
        firsts: the first one of each rank that has any.
        epochs: in which these begin, by rank, where known; none if each host reads all data.
    """

    def __init__(self, name: str, run: RankRun, reference: Mapping[int, float]) -> None:
        """Collect what ranks reported; reference has learning rates on one rank, by optimizer."""
        self.name, self.run = name, run
        self.ranks, self.size = run.ranks, run.size
        self.ends = [rank.last(events.ProgramEnd) for rank in run.ranks]
        ended = [(rank, end) for rank, end in zip(self.ranks, self.ends, strict=True) if end]
        failed = [pair for pair in ended if pair[1].reason == "exception"]
        self.failures = sorted(failed, key=lambda pair: is_follow_on(pair[1].error))
        self.own = sum(not is_follow_on(end.error) for _, end in failed)
        self.left = any(end.reason == "enough" for _, end in ended)
        self.ended = {rank.name: most_steps(end) for rank, end in ended if end.reason == "end"}
        self.broadcasts = self._broadcasts()
        self.trained = self._trained(reference)
        self.passes = [(rank, _passes(rank)) for rank in self.ranks]
        self.firsts = [each[0] for _, each in self.passes if each]
        self.epochs = {
            rank.name: each[0].epoch
            for rank, each in self.passes
            if each and each[0].epoch is not None and each[0].replicas in (None, self.size)
        }

    def calls(self, *operations: str, gradient: bool = False) -> list[events.Call]:
        """Calls of these operations of Horovod, on any rank."""
        return [
            call
            for rank in self.ranks
            for call in rank.all(events.Call)
            if call.operation in operations and call.gradient == gradient
        ]

    def _broadcasts(self) -> list[events.Call]:
        return [
            call
            for rank in self.ranks
            for call in rank.all(events.Call)
            if call.site and not call.operation.startswith(_NO_PARAMETERS)
            if call.operation.startswith(("broadcast_", "BroadcastGlobal"))
            or (call.operation == "broadcast" and call.elements != 1)  # a number is no parameter
        ]

    def _trained(self, reference: Mapping[int, float]) -> list[Trained]:
        first = next(filter(None, (rank.all(events.Optimizer) for rank in self.ranks)), [])
        found = [self._training(each, reference.get(each.number)) for each in first]
        # One that took its last step before a broadcast was replaced then, and does not train.
        broadcast = {call.step for call in self.broadcasts}
        found = [each for each in found if len(each.steps) not in broadcast] or found
        return found if len(found) > 1 else [each._replace(name="") for each in found]

    def _training(self, optimizer: events.Optimizer, alone: float | None) -> Trained:
        own = [
            {
                step.step: step
                for step in rank.all(events.TrainingStep)
                if step.optimizer == optimizer.number
            }
            for rank in self.ranks
        ]
        # By their numbers: the report of a step may be lost on its way.
        taken = sorted(set.intersection(*map(set, own)))
        steps = [[each[step] for each in own] for step in taken]
        rate = steps[0][0].rate if steps else None
        factor = rate / alone if rate and alone else None
        if factor and abs(factor - self.size) < 1e-6 * self.size:
            factor = self.size
        title = f" of {optimizer.kind}" + (f" ({optimizer.site})" if optimizer.site else "")
        return Trained(optimizer, steps, title=title, name=title, rate=rate, factor=factor)


def _passes(rank: Rank) -> list[events.DataSource]:
    read = values(rank.all(events.TrainingStep), "source")
    return [each for each in rank.all(events.DataSource) if each.number in read]


def most_steps(end: events.ProgramEnd) -> int:
    """Those of the optimizer that took most."""
    return max(end.steps, default=0)


def is_follow_on(error: str) -> bool:
    """Whether an exception is due to another rank that ended."""
    return any(text in error for text in _FOLLOW_ON)


def places(found: Iterable[Any]) -> str:
    """The sites of events, in words."""
    return listed(list(dict.fromkeys(each.site for each in found if each.site))) or "a library"


def values(found: Iterable[events.RankEvent], field: str) -> set[Any]:
    """What events have in a field."""
    return {getattr(each, field) for each in found}


def agree(steps: Steps, field: str) -> bool:
    """Whether all ranks report the same in a field of a step, and report it."""
    found = values(steps, field)
    return len(found) == 1 and bool(next(iter(found)))


def digests(program: Program, field: str, steps: Steps) -> str:
    """The digests of all ranks, as evidence."""
    return "\n".join(
        f"{rank.name}: step {step.step}, {field} {getattr(step, field) or 'unknown'}"
        for rank, step in zip(program.ranks, steps, strict=False)
    )

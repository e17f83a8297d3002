"""What the ranks of a training program reported (standalone/program/observe.py), as rules read it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvdenv.reports.report import Finding, Status
from hvdenv.standalone.ranks import events
from hvdenv.verification.rank_judgement import listed
from hvdenv.verification.rank_run import Rank, RankRun

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
# Something could not be observed.
unproven = partial(Verdict, "unproven")


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
        rate: its first learning rate; None if unknown.
        factor: how many times that of one rank this is; None if unknown.
    """

    optimizer: events.Optimizer
    steps: Sequence[Steps]
    title: str
    rate: float | None
    factor: float | None


class Program:
    """A run of a training program.

    Attributes:
        name: such as ``train.py``.
        calls: of Horovod, on any rank.
        ends: the last event of each rank that reported it.
        failures: ranks that ended by an exception of their own.
        followers: ranks that ended by an exception because another one had ended.
        left: whether any rank was ended after enough steps.
        ended: the steps of each rank whose program ended by itself, or that waited in one more.
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
        self.calls = [call for rank in self.ranks for call in rank.all(events.Call)]
        ended = [(rank, end) for rank in run.ranks if (end := rank.last(events.ProgramEnd))]
        self.ends = [end for _, end in ended]
        failed = [pair for pair in ended if pair[1].reason == "exception"]
        self.failures = [pair for pair in failed if not _is_follow_on(pair[1].error)]
        self.followers = [pair for pair in failed if pair not in self.failures]
        self.left = any(end.reason == "enough" for end in self.ends)
        self.ended = {rank.name: most_steps(end) for rank, end in ended if end.reason == "end"}
        if self.ended and not self.left:
            self.ended.update({rank.name: most_steps(end) + 1 for rank, end in self.followers})
        self.broadcasts = [
            call
            for call in self.calls
            if call.site and not call.operation.startswith(_NO_PARAMETERS)
            if call.operation.startswith(("broadcast_", "BroadcastGlobal"))
            or (call.operation == "broadcast" and call.elements != 1)  # a number is no parameter
        ]
        self.trained = self._trained(reference)
        self.passes = [(rank, _passes(rank)) for rank in self.ranks]
        self.firsts = [each[0] for _, each in self.passes if each]
        self.epochs = {
            rank.name: each[0].epoch
            for rank, each in self.passes
            if each and each[0].epoch is not None and each[0].replicas in (None, self.size)
        }

    def called(self, *operations: str, gradient: bool = False) -> list[events.Call]:
        """Calls of these operations of Horovod."""
        return [
            call
            for call in self.calls
            if call.operation in operations and call.gradient == gradient
        ]

    def _trained(self, reference: Mapping[int, float]) -> list[Trained]:
        first = next(filter(None, (rank.all(events.Optimizer) for rank in self.ranks)), [])
        found = [self._training(each, reference.get(each.number)) for each in first]
        # One that took its last step before a broadcast was replaced then, and does not train.
        broadcast = {call.step for call in self.broadcasts}
        return [each for each in found if len(each.steps) not in broadcast] or found

    def _training(self, optimizer: events.Optimizer, alone: float | None) -> Trained:
        own = [
            {step.step: step for step in rank.all(events.TrainingStep) if _is_of(step, optimizer)}
            for rank in self.ranks
        ]
        # By their numbers: a launcher may have lost one of a rank.
        steps = [[each[at] for each in own] for at in sorted({*own[0]}.intersection(*own))]
        rate = steps[0][0].rate if steps else None
        factor = rate / alone if rate and alone else None
        if factor and abs(factor - self.size) < 1e-6 * self.size:
            factor = self.size
        title = optimizer.kind + (f" ({optimizer.site})" if optimizer.site else "")
        return Trained(optimizer, steps, title=title, rate=rate, factor=factor)


def _is_of(step: events.TrainingStep, optimizer: events.Optimizer) -> bool:
    return step.optimizer == optimizer.number


def _passes(rank: Rank) -> list[events.DataSource]:
    read = values(rank.all(events.TrainingStep), "source")
    return [each for each in rank.all(events.DataSource) if each.number in read]


def most_steps(end: events.ProgramEnd) -> int:
    """Those of the optimizer that took most."""
    return max(end.steps, default=0)


def _is_follow_on(error: str) -> bool:
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
        for rank, step in zip(program.ranks, steps, strict=True)
    )

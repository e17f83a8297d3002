"""What the ranks of a training program reported (standalone/program/observe.py), as its judges need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hvdenv.reports.report import About, Finding, Status
from hvdenv.standalone.ranks.events import (
    Call,
    DataSource,
    Optimizer,
    ProgramEnd,
    TrainingStep,
)
from hvdenv.verification.rank_judgement import listed
from hvdenv.verification.rank_run import Rank, RankRun

# Tensors with more elements are no metrics.
METRIC_ELEMENTS = 64
_FOLLOW_ON = ("Horovod has been shut down", "HorovodInternalError")

Steps = Sequence[TrainingStep]


def finding(
    program: str, check: str, status: Status, message: str, evidence: str = "", remedy: str = ""
) -> Finding:
    """A finding about a program, which takes nothing from what was proven before."""
    name = f"program-{check}" if check else "program"
    return Finding(
        check=name,
        subject=program,
        status=status,
        message=message,
        evidence=evidence,
        remedy=remedy,
        about=About(),
    )


class Trained(NamedTuple):
    """An optimizer, and its steps that all ranks took.

    Attributes:
        optimizer: as the first rank reports it.
        steps: each with one event of each rank.
        title: how messages name it, with where it is made.
        name: the same; empty if it is the only one.
        rate: its first learning rate; None if unknown.
        factor: how many times that of one rank this is; None if unknown.
    """

    optimizer: Optimizer
    steps: Sequence[Steps]
    title: str
    name: str
    rate: float | None
    factor: float | None


class Program:
    """A run of a training program.

    Attributes:
        name: such as ``train.py``.
        run: its ranks.
        size: how many these are.
        ends: the last event of each rank; None if there is none.
        broadcasts: calls that make parameters equal on all ranks.
        trained: the optimizers that train.
    """

    def __init__(self, name: str, run: RankRun, reference: Mapping[int, float]) -> None:
        """Collect what ranks reported; reference has learning rates on one rank, by optimizer."""
        self.name = name
        self.run = run
        self.ranks = run.ranks
        self.size = run.size
        self.ends = [rank.last(ProgramEnd) for rank in run.ranks]
        self.broadcasts = self._broadcasts()
        self.trained = self._trained(reference)

    # Findings

    def fail(self, check: str, message: str, remedy: str = "", evidence: str = "") -> Finding:
        """Training is wrong."""
        return finding(self.name, check, "fail", message, evidence, remedy)

    def passed(self, check: str, message: str, evidence: str = "") -> Finding:
        """Something is right."""
        return finding(self.name, check, "pass", message, evidence)

    def note(self, check: str, message: str) -> Finding:
        """Something may be meant, or a mistake."""
        return finding(self.name, check, "pass", f"note: {message}")

    def unproven(self, check: str, message: str, remedy: str = "", evidence: str = "") -> Finding:
        """Something could not be observed."""
        return finding(self.name, check, "unproven", message, evidence, remedy)

    def skipped(self, check: str, message: str) -> Finding:
        """Something does not apply."""
        return finding(self.name, check, "skip", message)

    # Events

    def calls(self, *operations: str, gradient: bool = False) -> list[Call]:
        """Calls of these operations of Horovod, on any rank."""
        return [
            call
            for rank in self.ranks
            for call in rank.all(Call)
            if call.operation in operations and call.gradient == gradient
        ]

    def sources(self) -> Iterator[tuple[Rank, list[DataSource]]]:
        """Of each rank, the passes over data that its training steps read."""
        steps = [step for rank in self.ranks for step in rank.all(TrainingStep)]
        read = {step.source for step in steps} - {0}
        for rank in self.ranks:
            yield rank, [each for each in rank.all(DataSource) if each.number in read]

    def ended(self) -> dict[str, int]:
        """The steps of each rank whose program ended by itself."""
        pairs = zip(self.ranks, self.ends, strict=True)
        return {r.name: most_steps(end) for r, end in pairs if end and end.reason == "end"}

    def state_after_parameters(self) -> str:
        """Where the optimizer's state is broadcast after the parameters; empty if it is not."""
        kinds = "broadcast_parameters", "broadcast_optimizer_state"
        calls = self.calls(*kinds) if self.broadcasts else []
        # The last one also broadcasts the state, by broadcast_parameters().
        states = [call.site for call in calls if call.operation == kinds[1]]
        last = calls[-1].site if calls else ""
        return last if last in states else ""

    def _broadcasts(self) -> list[Call]:
        calls = [call for rank in self.ranks for call in rank.all(Call) if call.site]
        state, one = "broadcast_optimizer_state", "broadcast_object"
        objects, states = ({e.site for e in calls if e.operation == kind} for kind in (one, state))
        # These are sent by other broadcasts, in the same line. A single number is no parameter.
        by_others = {"broadcast": objects | states, "broadcast_parameters": states}
        return [
            call
            for call in calls
            if call.operation not in (state, one)
            if call.operation.startswith(("broadcast_", "BroadcastGlobal"))
            or (call.operation == "broadcast" and call.elements != 1)
            if call.site not in by_others.get(call.operation, ())
        ]

    def _trained(self, reference: Mapping[int, float]) -> list[Trained]:
        first = next(filter(None, (rank.all(Optimizer) for rank in self.ranks)), [])
        found = [self._training(each, reference.get(each.number)) for each in first]
        # One that took its last step before a broadcast was replaced then, and does not train.
        broadcast = {call.step for call in self.broadcasts}
        found = [each for each in found if len(each.steps) not in broadcast] or found
        return found if len(found) > 1 else [each._replace(name="") for each in found]

    def _training(self, optimizer: Optimizer, alone: float | None) -> Trained:
        own = [
            [step for step in rank.all(TrainingStep) if step.optimizer == optimizer.number]
            for rank in self.ranks
        ]
        steps = list(zip(*own, strict=False))
        rate = steps[0][0].rate if steps else None
        factor = rate / alone if rate and alone else None
        if factor and abs(factor - self.size) < 1e-6 * self.size:
            factor = self.size
        title = f" of {optimizer.kind}" + (f" ({optimizer.site})" if optimizer.site else "")
        return Trained(optimizer, steps, title=title, name=title, rate=rate, factor=factor)


def most_steps(end: ProgramEnd) -> int:
    """Those of the optimizer that took most."""
    return max(end.steps, default=0)


def is_follow_on(error: str) -> bool:
    """Whether an exception is due to another rank that ended."""
    return any(text in error for text in _FOLLOW_ON)


def places(sites: Sequence[str]) -> str:
    """Where the program calls something, in words."""
    return listed(list(dict.fromkeys(filter(None, sites)))) or "a library"


def same_after(steps: Steps) -> bool:
    """Whether all ranks have the same parameters after a step."""
    return len({step.after for step in steps}) == 1 and bool(steps[0].after)


def digests(program: Program, name: str, steps: Steps) -> str:
    """The digests of all ranks, as evidence."""
    return "\n".join(
        f"{rank.name}: step {step.step}, {name} {getattr(step, name) or 'unknown'}"
        for rank, step in zip(program.ranks, steps, strict=False)
    )

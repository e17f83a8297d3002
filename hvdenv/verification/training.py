"""What ranks found when they trained a small model (standalone/ranks/training.py), judged together."""

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdenv.sites.batch import counted
from hvdenv.standalone.ranks.events import Training
from hvdenv.verification.rank_judgement import Judgement, apart, judge_exercise, listed
from hvdenv.verification.rank_run import RankRun

EXERCISE = "training"

_SHOWN = 20
_REMEDY = (
    "do not train with this environment: rebuild Horovod for this machine and these versions; if the"
    " failure stays, report this evidence to Horovod"
)


class RankTraining(NamedTuple):
    name: str
    facts: Training


def judge_parts(run: RankRun) -> Iterator[tuple[str, Judgement]]:
    """What the training of a run proves.

    Returns the judgement on all parts together, under an empty name; and one under its name for
    each part that cannot work with these versions.
    """
    if broken := judge_exercise(run, EXERCISE):
        yield "", broken
        return
    by_rank: dict[str, dict[str, RankTraining]] = {}
    for rank in run.ranks:
        for facts in rank.all(Training):
            found = RankTraining(rank.name, facts)
            by_rank.setdefault(facts.part, {})[rank.name] = found
    outcomes = {part: list(each.values()) for part, each in by_rank.items()}
    problems, passed = [], []
    for part, reported in outcomes.items():
        if len(reported) == len(run.ranks) and all(one.facts.skip for one in reported):
            yield part, Judgement("skip", reported[0].facts.skip)
        elif wrong := list(_problems(reported, len(run.ranks))):
            problems += [f"{part}: {problem}" for problem in wrong]
        else:
            passed.append(_praise(part, reported))
    if problems:
        more = f"; and {len(problems) - 1} more, see the evidence" if problems[1:] else ""
        yield "", Judgement("fail", problems[0] + more, _evidence(run, problems), _REMEDY)
    elif passed:
        ranks = counted(len(run.ranks), "rank")
        message = f"parameters are equal on {ranks}; {'; '.join(passed)}"
        yield "", Judgement("pass", message, _evidence(run, ()))
    elif not outcomes:
        yield "", Judgement("fail", "no rank reported anything", _evidence(run, ()), _REMEDY)


def _problems(outcomes: Sequence[RankTraining], ranks: int) -> Iterator[str]:
    unfinished = (one.facts.skip or len(one.facts.losses) != 2 for one in outcomes)
    if len(outcomes) < ranks or any(unfinished):
        yield "not all ranks finished it"
        return
    for test in _TESTS:
        yield from test(outcomes)


def _praise(part: str, outcomes: Sequence[RankTraining]) -> str:
    facts = outcomes[0].facts
    difference = max(one.facts.difference for one in outcomes)
    first, last = facts.losses
    before, after = apart(first, last, 3)
    found, bound = apart(difference, facts.bound, 1)
    return (
        f"{part}: loss {before} to {after} in {facts.steps} steps, {found} from one process"
        f" (bound {bound})"
    )


def _evidence(run: RankRun, problems: Sequence[str]) -> str:
    lines = [f"command: {shlex.join(run.argv)}", *problems]
    for rank in run.ranks[:_SHOWN]:
        for facts in rank.all(Training):
            shown = [f"{name} {getattr(facts, name)}" for name in _SHOWN_FACTS]
            lines.append(f"{rank.name}, {facts.part}: {facts.skip or ', '.join(shown)}")
    return "\n".join(lines)


_SHOWN_FACTS = ("seconds", "steps", "losses", "difference", "bound", "checksums")


def _checksums(outcomes: Sequence[RankTraining]) -> Iterator[str]:
    """Whether all ranks have the same bits, first of all after the broadcasts."""
    first = outcomes[0]
    for name, wanted in first.facts.checksums.items():
        if others := [one.name for one in outcomes if one.facts.checksums.get(name) != wanted]:
            yield f"{name} are not equal: {listed(others)} and {first.name} differ"


def _difference(outcomes: Sequence[RankTraining]) -> Iterator[str]:
    """Whether the ranks come to what one process gets on the joined batches."""
    if off := [one for one in outcomes if not one.facts.difference <= one.facts.bound]:
        facts = off[0].facts
        found, bound = apart(facts.difference, facts.bound, 2)
        like = f", as if {facts.like}" if facts.like else ""
        yield (
            f"parameters of {listed([one.name for one in off])} are {found} from those"
            f" of one process on the joined batches (bound {bound}){like}"
        )


def _losses(outcomes: Sequence[RankTraining]) -> Iterator[str]:
    for one in outcomes:
        first, last = one.facts.losses
        if not last < first:
            before, after = apart(first, last, 3)
            yield f"the loss does not fall on {one.name}: {before}, and {after} at the end"
            return


# In the order in which they explain each other.
_TESTS = (_checksums, _difference, _losses)

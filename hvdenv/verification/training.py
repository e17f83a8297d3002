"""What ranks found when they trained a small model (standalone/ranks/training.py), judged together."""

import shlex
from collections.abc import Iterator, Sequence

from hvdenv.sites.batch import counted
from hvdenv.standalone.ranks.events import Training
from hvdenv.verification.rank_judgement import Judgement, judge_exercise, listed
from hvdenv.verification.rank_run import RankRun

EXERCISE = "training"

_SHOWN = 20
_REMEDY = (
    "do not train with this environment: rebuild Horovod for this machine and these versions; if the"
    " failure stays, report this evidence to Horovod"
)


# What a rank, by its name, reported of a part.
_Reported = Sequence[tuple[str, Training]]


def judge_parts(run: RankRun) -> Iterator[tuple[str, Judgement]]:
    """What the training of a run proves.

    Returns the judgement on all parts together, under an empty name; and one under its name for
    each part that cannot work with these versions.
    """
    if broken := judge_exercise(run, EXERCISE):
        yield "", broken
        return
    outcomes = run.reported(Training, "part")
    problems, passed = [], []
    for part, reported in outcomes.items():
        skips = [facts.skip for _, facts in reported]
        if len(reported) == len(run.ranks) and all(skips):
            yield part, Judgement("skip", skips[0])
        elif wrong := list(_problems(reported, len(run.ranks))):
            problems += [f"{part}: {problem}" for problem in wrong]
        else:
            passed.append(_praise(part, [facts for _, facts in reported]))
    if problems:
        more = f"; and {len(problems) - 1} more, see the evidence" if problems[1:] else ""
        yield "", Judgement("fail", problems[0] + more, _evidence(run, problems), _REMEDY)
    elif passed:
        ranks = counted(len(run.ranks), "rank")
        message = f"parameters are equal on {ranks}; {'; '.join(passed)}"
        yield "", Judgement("pass", message, _evidence(run, ()))
    elif not outcomes:
        yield "", Judgement("fail", "no rank reported anything", _evidence(run, ()), _REMEDY)


def _problems(reported: _Reported, ranks: int) -> Iterator[str]:
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


def _evidence(run: RankRun, problems: Sequence[str]) -> str:
    lines = [f"command: {shlex.join(run.argv)}", *problems]
    for rank in run.ranks[:_SHOWN]:
        for facts in rank.all(Training):
            shown = [f"{name} {value}" for name, value in facts._asdict().items() if value != ""]
            lines.append(f"{rank.name}: {', '.join(shown)}")
    return "\n".join(lines)

"""What the events of ranks say about a run: the first thing that is wrong, and why."""

import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdenv.knowledge.diagnosis import Found, explain
from hvdenv.reports.report import Status
from hvdenv.sites.hosts import LOCAL, short
from hvdenv.standalone.ranks.events import ExtensionFacts, Joined, Operation
from hvdenv.verification.rank_run import Rank, RankRun

_SHOWN = 8  # ranks that evidence and messages name one by one
_LINES = 15  # of the launcher in the evidence
# Stages that are no exercise: a rank that ends there fails the allreduces.
_COMMON = ("", "start", "allreduce", "shutdown")
# A rank is slow if it takes this many times the others' seconds, and this many seconds longer.
_SLOW_FACTOR, _SLOW_SECONDS = 5.0, 0.25
# The ranks for which Horovod waits, as rank.py keeps them: ``missing ranks: 1: [a] 2: [a]``.
_MISSING = re.compile(r"\b(\d+): \[")
# Files whose functions wait for the other ranks, most of them within Horovod's library.
_WAITING = re.compile(
    r"/horovod/\w+/(?:mpi_ops|basics|process_sets)\.py$|/tensorflow/python/|^<string>$"
    r"|/ranks/context\.py$"
)
# Endings in the order in which they explain each other: once one rank fails, launchers and
# schedulers end the others, or the others notice, or wait. No other rank makes a rank crash.
_ENDINGS = tuple(
    map(
        re.compile,
        (
            r"was ended by (?!its launcher|SIGKILL|SIGTERM)",
            r"was ended by SIG",
            r"is stopped",
            r"(?:ended|exited) ",
            r"disappeared",
            r"hangs",
            r"was ended by its launcher",
        ),
    )
)
# MPI and Gloo keep what they share in files, and print nothing useful when there is no space.
_FULL = Found(
    "folder-full",
    "no space is left in {0}",
    ("free some space, or set TMPDIR to another directory; `df -h` and `df -i` show what is left",),
)


class Judgement(NamedTuple):
    """What was proven, or what is wrong."""

    status: Status
    message: str
    evidence: str = ""
    remedy: str = ""


def judge_run(run: RankRun) -> Judgement:
    """The first thing that is wrong with a run, in the order in which it explains the rest.

    What ranks that had all results do later, in an exercise, is judge_exercise()'s.
    """
    tests = (
        _nothing_started,
        _singletons,
        _environments,
        _broken_allreduce,
        _numbering,
        _wrong_results,
        _other_controller,
        _launcher_failed,
        _unknown_controller,
    )
    for test in tests:
        if found := test(run):
            return found
    hosts = sorted({rank.host for rank in run.ranks})
    slowest = slow_rank(run)
    but = f"; but {slowest[0].name} {slowest[1]}" if slowest else ""
    ranks, agree = (
        (f"{run.size} ranks", "agree on") if run.size > 1 else ("1 rank", "is right about")
    )
    return Judgement(
        "pass",
        f"{ranks} on {listed(hosts)} {agree} {run.results[0].tests} reductions,"
        f" with {run.controller} as the controller ({run.launcher}){but}",
    )


def judge_exercise(run: RankRun, name: str) -> Judgement | None:
    """What kept ranks from finishing an exercise; None if all finished it.

    Their results are judged by the exercise's own check.
    """
    broken = _broken_exercise(run)
    if broken == name:
        return _brokenness(run)
    if judge_run(run).status == "fail":
        return Judgement("skip", "the ranks did not reach it: see allreduce")
    if broken and run.exercises.index(name) > run.exercises.index(broken):
        return Judgement("skip", f"the ranks did not reach it: see {broken}")
    return None


def breakdown(run: RankRun) -> tuple[list[Rank], Judgement]:
    """The ranks that failed first, and how."""
    cause, _ = _first_broken(run)
    how = _nothing_started(run) or _brokenness(run) or _launcher_failed(run)
    return cause, how or Judgement("error", "the ranks ended without a reason", _evidence(run))


def causes_by_rank(run: RankRun) -> list[str]:
    """Why each rank failed, in the order of the run's ranks; empty for those that did not."""
    first, _ = _first_broken(run)
    failed = judge_run(run)
    found = []
    for rank in run.ranks:
        cause = _own_cause(rank)
        if rank.ending and first and rank not in first:
            cause = f"{rank.ending}, after {listed([each.name for each in first])} failed"
        elif not cause and failed.status == "fail" and not first and not _wrong_results(run):
            cause = failed.message
        found.append(cause)
    return found


def _own_cause(rank: Rank) -> str:
    result = rank.result
    if rank.ending:
        text = f" ({rank.exception})" if rank.exception else ""
        return f"{rank.ending}{text}{_in_exercise(rank)}"
    if result and result.wrong:
        return f"{result.wrong} of {result.tests} reductions are wrong"
    wrong = [each.operation for each in rank.all(Operation) if each.wrong]
    return f"wrong values in {listed(wrong)}" if wrong else ""


def _in_exercise(rank: Rank) -> str:
    return f", in {rank.doing}" if rank.doing not in _COMMON else ""


def slow_rank(run: RankRun) -> tuple[Rank, str] | None:
    """The rank that took much longer than the others for the same work, and this in words."""
    seconds = [result.busy for result in run.results]
    if len(seconds) < 2 or not all(seconds):
        return None
    *others, longest = sorted(seconds)
    usual = statistics.median(others)
    slowest = [rank for rank in run.ranks if rank.result][seconds.index(longest)]
    if longest < max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS):
        return None
    return slowest, (
        f"took {longest / usual:.0f} times as long as the others for its own work"
        f" ({longest:.2g} s instead of {usual:.2g} s), and every rank waits for the slowest:"
        f" compare the cores, CPU clock and limits of {slowest.host} with those of other hosts"
    )


def listed(names: Sequence[str]) -> str:
    """Names for a message: of many, the first few and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _failure(
    run: RankRun,
    message: str,
    remedy: str,
    *,
    ranks: Sequence[Rank] = (),
    lines: Sequence[str] = (),
) -> Judgement:
    return Judgement("fail", message, _evidence(run, ranks, lines), remedy)


def _evidence(run: RankRun, ranks: Sequence[Rank] = (), lines: Sequence[str] = ()) -> str:
    parts = [f"command: {shlex.join(run.argv)}"]
    parts += [f"started by: {run.launched_by}"] * bool(run.launched_by)
    parts += lines
    for rank in ranks[:_SHOWN]:
        parts.append(f"{rank.name} (process {rank.pid}) {rank.ending}:")
        parts += [f"    {line}" for line in rank.tail.splitlines() or ["(no output)"]]
    if len(ranks) > _SHOWN:
        parts.append(f"and {len(ranks) - _SHOWN} more ranks")
    if run.tail:
        parts += [f"last lines of the launcher (exit {run.returncode}):"]
        parts += [f"    {line}" for line in run.tail.splitlines()[-_LINES:]]
    return "\n".join(parts)


def _explained(run: RankRun, judgement: Judgement, first: Sequence[Rank] = ()) -> Judgement:
    """With the cause and its remedy, where output of the ranks that failed first, or of the
    launcher, shows it."""
    found = _known_cause(run, first)
    if not found:
        return judgement
    evidence = judgement.evidence
    if found.line and found.line not in evidence:
        evidence = f"{evidence}\nearlier output of the launcher:\n    {found.line.strip()}"
    message = f"{judgement.message}: {found.cause}"
    return judgement._replace(message=message, evidence=evidence, remedy=found.remedy)


def _known_cause(run: RankRun, first: Sequence[Rank]) -> Found | None:
    # What was seen on a host says more than a text about it, or about where a rank stopped.
    ended = [(rank.host, rank.exited) for rank in first if rank.exited]
    full = dict.fromkeys(f"{folder} on {host}" for host, exited in ended for folder in exited.full)
    if full:
        return _FULL._replace(cause=_FULL.cause.format(listed(list(full))))
    text = "\n".join((*(rank.tail for rank in first[:_SHOWN]), run.tail))
    found = explain(text, kills=not first or any(map(_may_be_killed, first)))
    numbers = {str(rank.number) for rank in first}
    if found and found.kill and first and found.rank.isdigit() and found.rank not in numbers:
        found = explain(text, kills=False)  # the launcher reports the kill of another rank
    return found


def _may_be_killed(rank: Rank) -> bool:
    """Whether a kill that the launcher reports may be this rank's, and not the launcher's own."""
    return rank.ending in ("was ended by SIGKILL", "disappeared without reporting an exit")


def _nothing_started(run: RankRun) -> Judgement | None:
    if run.ranks:
        return None
    late = f"did not finish within {run.timeout:.0f} s"
    how = late if run.timed_out else f"exit {run.returncode}"
    judgement = _failure(
        run,
        f"{run.launcher} started none of {run.size} ranks ({how})",
        "read the launcher's output in the evidence, and run its command by hand",
    )
    return _explained(run, judgement)


def _singletons(run: RankRun) -> Judgement | None:
    alone = _solitude(run)
    if run.size == 1 or len(run.results) < 2 or not alone:
        return None
    mpi = next((rank.path.mpi for rank in run.ranks if rank.path.mpi), "")
    lines = [f"{rank.name}: {rank.variables}" for rank in run.ranks]
    lines += [f"MPI of the ranks: {mpi}"] * bool(mpi)
    remedy = (
        "the launcher does not belong to the MPI that Horovod was built with: start ranks with the"
        " mpirun of that MPI (compare `started by`), or rebuild Horovod with the launcher's MPI"
    )
    if run.launcher == "srun":
        option = next((word for word in run.argv if word.startswith("--mpi=")), "no --mpi")
        wanted = "pmi2" if re.search("MPICH|Intel|MVAPICH", mpi) else "pmix"
        remedy = (
            f"srun was started with {option}, but this MPI needs --mpi={wanted}: set"
            f' launch.srun_mpi in the recipe to "{wanted}" if `srun --mpi=list` shows it, or use'
            " mpirun"
        )
    message = f"{len(run.results)} processes were started, but {alone}"
    return _failure(run, message, remedy, lines=lines)


def _solitude(run: RankRun) -> str:
    """What shows that each rank reduces alone, whatever its size; empty if nothing does."""
    if all(joined.size == 1 for joined in run.joined):
        return "each reports that it is alone (size 1)"
    if all(result.wrong and result.own == result.wrong for result in run.results):
        return (
            "each gets its own input back: each is alone, although it reports size"
            f" {run.joined[0].size}"
        )
    return ""


def _environments(run: RankRun) -> Judgement | None:
    """Whether the ranks of all hosts have the same framework and the same Horovod."""
    have = {rank.name: _stack(rank.extension) for rank in run.ranks if rank.extension}
    if len(set(have.values())) < 2:
        return None
    usual = Counter(have.values()).most_common(1)[0][0]
    name, other = next((name, stack) for name, stack in have.items() if stack != usual)
    pairs = [(mine, theirs) for mine, theirs in zip(other, usual, strict=True) if mine != theirs]
    mine, theirs = (", ".join(pair[side] for pair in pairs) for side in (0, 1))
    return _failure(
        run,
        f"{name} has a different environment from the other ranks: {mine} instead of {theirs}",
        "every host must have the same environment: in a shared directory, or as a copy of the same"
        " build; look for PYTHONPATH and modules that only one host has",
        lines=[f"{rank}: {', '.join(stack)}" for rank, stack in have.items()],
    )


def _stack(facts: ExtensionFacts) -> tuple[str, ...]:
    """What all ranks of a run must have in common, in words."""
    return (
        f"{facts.framework} {facts.installed}",
        f"Horovod {facts.version}",
        f"built with {facts.framework} {facts.built_with}",
        f"an extension of {facts.size} bytes",
        f"Python files {facts.sources}",
    )


def _broken_allreduce(run: RankRun) -> Judgement | None:
    return None if _broken_exercise(run) else _brokenness(run)


def _broken_exercise(run: RankRun) -> str:
    """The exercise in which ranks failed after all had finished their allreduces."""
    cause, _ = _first_broken(run)
    if not cause or any(rank.result is None for rank in run.ranks):
        return ""
    return cause[0].stage if cause[0].stage in run.exercises else ""


def _brokenness(run: RankRun) -> Judgement | None:
    """How ranks failed; None if none did."""
    cause, others = _first_broken(run)
    if not cause:
        return None
    names, first = listed([rank.name for rank in cause]), cause[0]
    message = f"{names}: {first.ending}"
    if first.ending == "hangs":
        message = f"{names}: did not finish within {run.timeout:.0f} s"
        if waited := [rank.name for rank in others if rank.ending == "hangs"]:
            message += f"; {listed(waited)} waited for this"
        done = [rank.name for rank in run.ranks if rank.result]
        message += f"; results came from {listed(done) or 'no rank'}{_absent(run)}"
    elif len({rank.ending for rank in cause}) > 1:
        message = "; ".join(f"{rank.name} {rank.ending}" for rank in cause[:_SHOWN])
    if first.exception and first.ending.startswith("exited with"):
        message += f" ({first.exception})"
    judgement = _failure(
        run,
        message + _in_exercise(first),
        "read the last lines of each rank in the evidence, starting with the first rank named",
        ranks=cause + others,
    )
    return _explained(run, judgement, cause)


def _absent(run: RankRun) -> str:
    """The ranks that were never started, and those that Horovod reports as missing."""
    text = ""
    if len(run.ranks) < run.size:
        silent = _silent_hosts(run)
        where = f", none on {listed(silent)}" if silent else ""
        text = f"; only {len(run.ranks)} of {run.size} ranks were started{where}"
    stalled = next((one.stalled for rank in run.ranks if (one := rank.overdue) and one.stalled), "")
    return f"{text}; Horovod reports: {stalled}" if stalled else text


def _first_broken(run: RankRun) -> tuple[list[Rank], list[Rank]]:
    """The ranks that failed first, and the others that failed after them."""
    broken = [rank for rank in run.ranks if rank.ending]
    suspects = [rank for rank in broken if not rank.gave_up] or broken
    if not suspects:
        return [], []
    first = min(map(_order, suspects))
    cause = [rank for rank in suspects if _order(rank) == first]
    if cause[0].ending == "hangs":
        cause = _awaited_ranks(cause)
    return cause, [rank for rank in broken if rank not in cause]


def _order(rank: Rank) -> int:
    """Where a rank's ending stands among those that explain each other."""
    return next(number for number, ending in enumerate(_ENDINGS) if ending.match(rank.ending))


def _awaited_ranks(hanging: list[Rank]) -> list[Rank]:
    """Those of the hanging ranks for which the others wait; all of them if that is unknown."""
    stalled = " ".join(rank.overdue.stalled for rank in hanging if rank.overdue)
    numbers = set(map(int, _MISSING.findall(stalled)))
    missing = [rank for rank in hanging if rank.number in numbers]
    if missing and len(missing) < len(hanging):
        return missing
    shown = [rank for rank in hanging if rank.working_in]
    # Ranks that were not waiting within Horovod, while others were.
    outside = [rank for rank in shown if not _WAITING.search(rank.working_in)]
    return outside if outside and len(outside) < len(shown) else hanging


def _numbering(run: RankRun) -> Judgement | None:
    problems = list(_miscounts(run)) or list(_misplaced(run))
    if not problems:
        return None
    silent = _silent_hosts(run)
    names = f"; or a host has another name for itself: ssh {silent[0]} hostname" if silent else ""
    return _failure(
        run,
        "; ".join(problems),
        "compare the launcher and the MPI in the evidence; ranks of two jobs or of two MPIs must"
        f" not be mixed{names}",
        lines=[f"{rank.name}: {_numbers(rank.joined)}" for rank in run.ranks if rank.joined],
    )


def _silent_hosts(run: RankRun) -> list[str]:
    """The requested hosts whose name no rank reported."""
    reported = {short(rank.host) for rank in run.ranks}
    return [host for host in run.hosts if short(host) not in reported]


def _miscounts(run: RankRun) -> Iterator[str]:
    """Ranks that are missing, or counted or numbered wrong."""
    if len(run.results) != run.size:
        yield f"{len(run.results)} of {run.size} ranks reported"
    if wrong := sorted({joined.size for joined in run.joined} - {run.size}):
        yield f"Horovod's size is {listed([str(n) for n in wrong])}, not {run.size}"
    numbers = sorted(joined.rank for joined in run.joined)
    if len(numbers) == run.size and not wrong and numbers != list(range(run.size)):
        yield f"the ranks are {numbers}, not 0 to {run.size - 1}"


def _misplaced(run: RankRun) -> Iterator[str]:
    """Ranks on other hosts than requested, or with wrong local numbers."""
    used = {short(rank.host) for rank in run.ranks}
    wanted = {short(host) for host in run.hosts if host not in LOCAL}
    if wanted and used != wanted:
        yield f"the ranks are on {listed(sorted(used))}, not {listed(sorted(wanted))}"
        return
    for host in sorted({rank.host for rank in run.ranks}):
        local = [rank.joined for rank in run.ranks if rank.joined and rank.host == host]
        numbers = sorted(joined.local_rank for joined in local)
        if numbers != list(range(len(local))):
            yield f"the local ranks on {host} are {numbers}, not 0 to {len(local) - 1}"
        if {joined.local_size for joined in local} != {len(local)}:
            yield f"the local size on {host} is not {len(local)}"


def _numbers(joined: Joined) -> str:
    return ", ".join(f"{name} {value}" for name, value in joined._asdict().items())


def _wrong_results(run: RankRun) -> Judgement | None:
    wrong = [(rank.name, rank.result) for rank in run.ranks if rank.result and rank.result.wrong]
    if not wrong:
        return None
    first = wrong[0][1]
    example = f"; {first.cases[0]}" if first.cases else ""
    return _failure(
        run,
        f"allreduce gives wrong values on {listed([name for name, _ in wrong])}:"
        f" {first.wrong} of {first.tests} reductions{example}",
        "do not train with this environment: rebuild it for this machine; if the values stay wrong,"
        " try the other controller and report this evidence to Horovod",
        lines=[f"{name}: {case}" for name, result in wrong[:_SHOWN] for case in result.cases],
    )


def _other_controller(run: RankRun) -> Judgement | None:
    for rank in run.ranks:
        used = _controller(rank)
        if used and used.upper() != run.controller.upper():
            return _failure(
                run,
                f"{rank.name} used {used} as its controller, not {run.controller}",
                "look for HOROVOD_CONTROLLER in your environment and in the site's configuration",
            )
    return None


def _controller(rank: Rank) -> str:
    """The controller in Horovod's debug output, or else the only one that is enabled."""
    names = rank.path.logged.get("controller", [])[-1:]
    names = names or (rank.result.enabled if rank.result else [])
    return names[0] if len(names) == 1 else ""


def _launcher_failed(run: RankRun) -> Judgement | None:
    if not run.returncode or _broken_exercise(run):
        return None
    how = "did not exit" if run.timed_out else f"exited with code {run.returncode}"
    judgement = _failure(
        run,
        f"all ranks computed the right values, but {run.launcher} {how}",
        "a batch job would count as failed: read the launcher's output in the evidence",
    )
    return _explained(run, judgement)


def _unknown_controller(run: RankRun) -> Judgement | None:
    if all(map(_controller, run.ranks)):
        return None
    return Judgement(
        "unproven",
        f"the values are right, but Horovod does not report whether it used {run.controller}",
        _evidence(run),
        "use a newer Horovod, which logs its controller if HOROVOD_LOG_LEVEL is debug",
    )

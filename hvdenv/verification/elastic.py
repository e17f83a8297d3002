"""An elastic job that loses a rank and a host and gains a host: does its training survive?

Horovod's own horovodrun starts it. standalone/ranks/elastic.py is what the ranks do.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdenv.launch.launchers import Launch
from hvdenv.masking import clean
from hvdenv.places import make_folder
from hvdenv.reports.report import About, Finding
from hvdenv.sites.hosts import Host, short
from hvdenv.standalone.ranks.events import World
from hvdenv.verification import ranks
from hvdenv.verification.collection import Setup, check, collector
from hvdenv.verification.collectors import HostMpi, RankRuns, rank_run, ranks_are_right
from hvdenv.verification.ranks import Judgement, Rank, RankRun

# Seconds for the job.
ELASTIC_SECONDS = 300.0
# Seconds for horovodrun to tell the ranks that hosts have changed.
PATIENCE = 60.0
# Training steps between two changes.
STEPS = 3
_ALL, _FEWER = 3, 2
# On one machine, two of its names stand for two hosts.
_NAMES = ("localhost", "127.0.0.1")
_LAUNCHER = "horovodrun-gloo"
# Horovod excludes the host of a lost rank for the second number of seconds. Survivors that take
# longer to meet again miss the message that it is back. Before 0.24, it is excluded for good.
_EXCLUDED_SECONDS = ("4", "8")
_SINCE = (0, 24)
_TORCH_OVER_GLOO = ("torch", "Gloo")
_LINES = 15
_REMEDY = (
    "do not use elastic training with this environment; read the last lines of the ranks and of"
    " horovodrun in the evidence"
)


class Stage(NamedTuple):
    """A part of the job, between two changes of its ranks.

    Attributes:
        when: it begins, in words.
        then: what ends it, for standalone/ranks/elastic.py; None for the last.
    """

    when: str
    size: int
    then: tuple[str, str] | None


def stages(first: str, second: str) -> tuple[Stage, ...]:
    """The parts of the job on two hosts; the last one is the end of the training."""
    alone, both = f"{first}:{_FEWER}\n", f"{first}:{_FEWER}\n{second}:{_ALL - _FEWER}\n"
    return (
        Stage("at the start", _ALL, ("kill", second)),
        Stage(f"after the rank on {second} was killed", _FEWER, ("wait", "")),
        Stage(f"after Horovod took {second} back", _ALL, ("hosts", alone)),
        Stage(f"after {second} left the list of hosts", _FEWER, ("hosts", both)),
        Stage(f"after {second} was added to the list of hosts", _ALL, None),
        Stage("at the end", _ALL, None),
    )


def two_hosts(launch: Launch) -> tuple[str, str]:
    names = [host.name for host in launch.hosts]
    if len(names) < 2:
        return _NAMES
    here = short(os.uname().nodename)
    first = next((name for name in names if short(name) == here), names[0])
    return first, next(name for name in names[::-1] if name != first)


def why_not(setup: Setup, rank_runs: RankRuns) -> str:
    """Why there is no elastic job; empty if there is one."""
    run = rank_runs.get(_TORCH_OVER_GLOO)
    if setup.installation.inside:
        return "verify starts no elastic job in an image"
    if run is None:
        return "elastic jobs are verified with PyTorch over Gloo, which verify does not start here"
    if not ranks_are_right(run):
        return "ranks of torch over Gloo fail: see allreduce"
    version = run.extension.version if run.extension else ""
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _SINCE:
        return f"Horovod {version} cannot take back the host of a lost rank; 0.24 can"
    return ""


@collector(
    "elastic job",
    applies=lambda setup, rank_runs: not why_not(setup, rank_runs),
    alone=True,
    starts_ranks=True,
)
def elastic_run(setup: Setup, elastic: str, mpi: HostMpi, timeout: float) -> RankRun:
    """An elastic job in which ranks and hosts come and go."""
    hosts = two_hosts(setup.launch)
    # Not in /tmp: a rank on another host may write the list of hosts.
    with tempfile.TemporaryDirectory(prefix="elastic-", dir=make_folder(Path(elastic))) as work:
        discovery = write_files(Path(work), hosts)
        return rank_run(
            setup._replace(
                exercises=(f"elastic={work}/plan.json",),
                launchers=(_LAUNCHER,),
                launch=elastic_launch(setup.launch, hosts, discovery),
            ),
            mpi,
            min(timeout, ELASTIC_SECONDS),
            *_TORCH_OVER_GLOO,
        )


def write_files(folder: Path, hosts: tuple[str, str]) -> str:
    """Write the plan and the list of hosts; returns the shell command that prints the list."""
    parts, listed = stages(*hosts), folder / "hosts"
    # The list is that of the stage after a host was added.
    listed.write_text(next(part.then[1] for part in parts[::-1] if part.then))
    plan = {
        "steps": STEPS,
        "patience": PATIENCE,
        "hosts": str(listed),
        "then": [part.then for part in parts if part.then],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return f"cat {shlex.quote(str(listed))}"  # no script: the folder may be mounted with noexec


def elastic_launch(launch: Launch, hosts: tuple[str, str], discovery: str) -> Launch:
    """The launch of the job; `discovery` prints the list of hosts."""
    limits = ("--min-np", str(_FEWER), "--max-np", str(_ALL))
    words = (*limits, "--blacklist-cooldown-range", *_EXCLUDED_SECONDS)
    settings = launch.settings._replace(horovodrun=(*launch.settings.horovodrun, *words))
    slots = (Host(hosts[0], _FEWER), Host(hosts[1], _ALL - _FEWER))
    several = len(launch.hosts) > 1
    return launch._replace(
        ranks=_ALL, hosts=slots if several else (), discovery=discovery, settings=settings
    )


@check("elastic")
def survives(
    setup: Setup, elastic: str, rank_runs: RankRuns, elastic_run: RankRun | None
) -> Iterator[Finding]:
    """Whether training goes on with the right state after each change of its ranks."""
    if elastic_run is None:
        yield Finding("elastic", "torch", "skip", why_not(setup, rank_runs))
    else:
        judgement = judge(elastic_run, two_hosts(setup.launch))
        yield Finding("elastic", "torch", *judgement, About(("torch",), ("Gloo",), ("Gloo",)))


def judge(run: RankRun, hosts: tuple[str, str]) -> Judgement:
    """The first thing that is wrong with the job on hosts as two_hosts() returns them."""
    parts = stages(*hosts)
    for number, part in enumerate(parts):
        seen = [
            (rank, world)
            for rank in run.ranks
            for world in rank.all(World)
            if world.number == number
        ]
        for rank, world in seen:
            if wrong := _wrong(world, number, part.size):
                return Judgement(
                    "fail", f"{part.when}, {wrong} on {rank.name}", _evidence(run), _REMEDY
                )
        if len(seen) < part.size:
            message = f"{part.when}, {len(seen)} of {part.size} ranks went on"
            left = tuple(rank for rank in run.ranks if not _left_on_purpose(rank, parts))
            _, found = ranks.breakdown(run._replace(ranks=left))
            evidence = f"{_evidence(run)}\n{found.evidence}"
            return Judgement("fail", f"{message}: {found.message}", evidence, found.remedy)
    if run.returncode:
        how = "did not exit" if run.timed_out else f"exited with code {run.returncode}"
        message = f"training survived every change, but horovodrun {how}"
        return Judgement("fail", message, _evidence(run), _REMEDY)
    sizes = ", ".join(str(part.size) for part in parts[:-1])
    message = (
        f"training of torch over Gloo continued from the last commit after a rank of {hosts[1]} was"
        f" killed, after that host returned, was removed and was added ({sizes} ranks)"
    )
    return Judgement("pass", message, _evidence(run))


def _wrong(world: World, number: int, size: int) -> str:
    """What is wrong with what a rank found; empty if nothing is."""
    step, total = number * STEPS, size * (size + 1) // 2
    if world.size != size:
        return f"Horovod's size is {world.size}, not {size},"
    if world.step != step:
        return f"training continues at step {world.step}, not at step {step} of the last commit,"
    if world.value != parameter(step):
        found, right = ranks.apart(world.value, parameter(step), 6)
        return f"the parameter is {found}, not {right} of the last commit,"
    if world.total != total:
        return f"allreduce returns {world.total}, not {total},"
    return ""


def parameter(steps: int) -> float:
    """The parameter after some steps: gradients of 1, 2, 3 ... and a momentum of 1/2."""
    value = velocity = 0.0
    for step in range(1, steps + 1):
        velocity = velocity / 2 + step
        value -= velocity
    return value


def _left_on_purpose(rank: Rank, parts: Sequence[Stage]) -> bool:
    """Whether a rank was killed by the plan, or its host was removed."""
    exited, last = rank.exited, rank.last(World)
    if not exited or not last or last.number + 1 >= len(parts):
        return False
    killed = exited.signal == "SIGKILL" and not exited.ended_by and "killed" in exited.detail
    # The host that stays has the lower numbers from then on.
    return killed or (last.number > 0 and last.rank >= parts[last.number + 1].size)


def _evidence(run: RankRun) -> str:
    lines = [f"command: {shlex.join(run.argv)}"]
    for rank in run.ranks:
        lines += [
            f"{rank.name} (process {rank.pid}), part {world.number}: rank {world.rank} of"
            f" {world.size}, step {world.step}, parameter {world.value:g}, sum {world.total}"
            for world in rank.all(World)
        ]
    lines += [f"last lines of horovodrun (exit {run.returncode}):"]
    lines += [f"    {line}" for line in run.tail.splitlines()[-_LINES:]]
    return clean("\n".join(lines))

"""The allocation that a process is in, from its environment variables; and how to ask for one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from hvdenv.launch.hosts import Host, expand, parse_hostfile
from hvdenv.model import cluster
from hvdenv.sites.batch import DIALECTS, HOSTFILE, BatchJob

# What names a scheduler's job, and the file with its hosts.
_JOBS: tuple[tuple[cluster.Scheduler, str, str], ...] = (
    ("slurm", "SLURM_JOB_ID", ""),
    ("cobalt", "COBALT_JOBID", "COBALT_NODEFILE"),
    ("pbs", "PBS_JOBID", "PBS_NODEFILE"),
    ("lsf", "LSB_JOBID", "LSB_DJOB_HOSTFILE"),
)
# Steps that Slurm makes for a batch script or the shell of salloc: they hold no cores.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# The host of a job's script, where that does not compute (LSF with jsrun).
_LAUNCH_HOST = re.compile(r"(batch|login)[0-9]+")


class Allocation(NamedTuple):
    """What a job has.

    Attributes:
        scheduler: whose job it is; None outside of any.
        job: its id.
        hosts: in the order of the scheduler, as far as it names them; slots are the ranks
            that were asked for on each, 0 if that was not said.
        nodes: how many hosts.
        hostfile: the file with exactly these hosts.
        tasks: what the scheduler counts on each host, even where nothing was asked for.
        cpus: processors on each host; 0 if that is not known.
        cpus_per_rank: as asked for; 0 if it was not.
        gpus_per_node: 0 if that is not known.
        nested: whether this process is a step of Slurm's, which holds the cores.
    """

    scheduler: cluster.Scheduler | None = None
    job: str = ""
    hosts: tuple[Host, ...] = ()
    nodes: int = 0
    hostfile: str = ""
    tasks: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    cpus_per_rank: int = 0
    gpus_per_node: int = 0
    nested: bool = False


def hostfile(environ: Mapping[str, str]) -> str:
    """The file with the hosts of the job that these variables tell of; or empty."""
    for _, job, file in _JOBS:
        if environ.get(job):
            return environ.get(file, "") if file else ""
    return ""


def find_allocation(environ: Mapping[str, str], hosts: str = "") -> Allocation:
    """The allocation that these variables tell of.

    Args:
        environ: of this process.
        hosts: what is in hostfile().

    Raises:
        UsageError: the scheduler's own list of hosts is not understood.
    """
    for scheduler, job, file in _JOBS:
        if not environ.get(job):
            continue
        if scheduler == "slurm":
            return _slurm(environ)
        path = environ.get(file, "")
        listed = parse_hostfile(hosts, path) if hosts.strip() else ()
        named = tuple(host for host in listed if not _LAUNCH_HOST.fullmatch(host.name)) or listed
        return Allocation(
            scheduler,
            environ[job],
            named,
            len(named) or _number(environ.get("COBALT_JOBSIZE", "")),
            hostfile=path if named and named == listed else "",
            gpus_per_node=_visible_gpus(environ),
        )
    return Allocation()


def _slurm(environ: Mapping[str, str]) -> Allocation:
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    names = expand(listed) if listed else ()
    tasks = _repeated(environ.get("SLURM_TASKS_PER_NODE", ""))
    # Without -n and --ntasks-per-node Slurm counts one task for each host, or each core.
    asked = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    slots = tasks if asked and len(tasks) == len(names) else (0,) * len(names)
    step = environ.get("SLURM_STEP_ID", "")
    return Allocation(
        "slurm",
        environ["SLURM_JOB_ID"],
        tuple(map(Host, names, slots)),
        len(names),
        tasks=tasks,
        cpus=_repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
        cpus_per_rank=_number(environ.get("SLURM_CPUS_PER_TASK", "")),
        gpus_per_node=_slurm_gpus(environ),
        nested=step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP,
    )


def _slurm_gpus(environ: Mapping[str, str]) -> int:
    asked = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return (
        _number(environ.get("SLURM_GPUS_ON_NODE", ""))
        or _number(asked)
        or len([one for one in environ.get("SLURM_JOB_GPUS", "").split(",") if one])
        or _visible_gpus(environ)
    )


def _visible_gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([one for one in visible.split(",") if re.fullmatch(r"[0-9]+|(GPU|MIG)-.+", one)])


def _repeated(text: str) -> tuple[int, ...]:
    """The numbers of ``4(x2),3``."""
    numbers: list[int] = []
    for word in text.split(",") if text else ():
        found = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,5})\))?", word, re.ASCII)
        if not found:
            return ()
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) else 0


# Where a batch script's output goes; an interactive job has a terminal.
_OUTPUT = ("-k ", "-j ", "-o ", "-O ", "-e ")


def interactive(
    scheduler: cluster.Scheduler,
    job: cluster.Job,
    partition: cluster.Partition | None,
    program: tuple[str, ...],
) -> tuple[str, ...]:
    """The command that asks for an allocation and runs a program on its first host.

    PBS and Cobalt run the user's login shell there and take no program.

    Args:
        scheduler: of the site.
        job: what to ask for, after batch.check().
        partition: facts about its nodes, where they are known.
        program: what to run.
    """
    quiet = job._replace(output=None, error=None)
    asked = BatchJob(quiet, partition, "", (HOSTFILE,), (), (), "")
    directives = DIALECTS[scheduler].directives(asked)
    options = shlex.split(" ".join(each for each in directives if not each.startswith(_OUTPUT)))
    if scheduler == "slurm":
        # salloc alone leaves its shell on the login node at some sites. This step holds no
        # cores, so that those of the shell get all of them.
        step = ("srun", "--interactive", "--preserve-env", "--pty")
        return ("salloc", *options, *step, *program)
    if scheduler == "lsf":
        return ("bsub", *options, "-Is", shlex.join(program))
    return ("qsub", "-I", *options)

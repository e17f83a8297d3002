"""The allocation that a process runs in, from its environment variables; and how to request one."""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.model import template
from hvdenv.model.cluster import Job, Partition
from hvdenv.model.dialect import Dialect, shipped
from hvdenv.sites.batch import HOSTFILE, BatchJob, directives
from hvdenv.sites.hosts import Host, expand, parse_hostfile
from hvdenv.sites.status import limited, number

# Variables of schedulers that hvdenv does not know: a file of hosts, or their number.
_FILES = re.compile(r"PE_HOSTFILE|\w+_(NODE|HOST)_?(FILE|LIST)|PJM_O_NODEINF")
_COUNTS = ("NHOSTS", "PJM_NODE")


class Allocation(NamedTuple):
    """The resources of the job that this process runs in.

    Attributes:
        scheduler: its name; empty outside of any job.
        hosts: in the order of the scheduler, as far as it names them; slots are the ranks
            that were requested on each, 0 if unknown.
        hostfile: a file with exactly these hosts, which launchers can read.
        cpus: processors on each host; empty if unknown.
        cpus_per_rank: as requested; 0 if it was not.
        gpus_per_node: 0 if unknown.
        nested: whether this process is a job step, which holds the cores.
        counts_tasks: whether the slots of a host are requested ranks, and not processors.
    """

    scheduler: str = ""
    job: str = ""
    hosts: tuple[Host, ...] = ()
    nodes: int = 0
    hostfile: str = ""
    cpus: tuple[int, ...] = ()
    cpus_per_rank: int = 0
    gpus_per_node: int = 0
    nested: bool = False
    counts_tasks: bool = False


def find_allocation(
    environ: Mapping[str, str],
    read: Callable[[str], str],
    dialects: Mapping[str, Dialect] | None = None,
) -> Allocation:
    """The allocation that these variables describe.

    Args:
        read: gives the content of the scheduler's file of hosts.
        dialects: schedulers by name (default: those of hvdenv).

    Raises:
        UsageError: the scheduler's own list of hosts cannot be read.
    """
    for name, dialect in (dialects or shipped()).items():
        job = environ.get(dialect.job_id, "")
        if job and (not dialect.marker or dialect.marker in environ):
            slurm = name == "slurm" or dialect.like == "slurm"
            found = (
                _slurm_allocation(environ)
                if slurm
                else _hostfile_allocation(dialect, environ, read)
            )
            return found._replace(scheduler=name, job=job, gpus_per_node=_gpus(environ))
    return Allocation()


def refuse_unknown(environ: Mapping[str, str], command: str) -> None:
    """Refuse to start ranks on this host alone if variables show a job of several hosts.

    Raises:
        UsageError: they do; names them, and how to give the hosts.
    """
    files = [name for name in sorted(environ) if _FILES.fullmatch(name) and environ[name]]
    counts = [name for name in _COUNTS if number(environ.get(name, "")) > 1]
    if not (files or counts):
        return
    found = ", ".join(f"{name}={environ[name]}" for name in (*files, *counts))
    paths = [name for name in files if environ[name].startswith("/")]
    hosts = f'--hostfile "${paths[0]}"' if paths else "--hosts HOST:SLOTS,..."
    raise UsageError(
        f"this looks like a job of a scheduler that hvdenv does not know: {found}",
        where="--hosts",
        remedy=f"name its hosts: {command} {hosts}; for ranks on this host only: {command}"
        " --hosts localhost:N; to add the scheduler, see docs/how-to/add-a-scheduler.md",
    )


def _hostfile_allocation(
    dialect: Dialect, environ: Mapping[str, str], read: Callable[[str], str]
) -> Allocation:
    path = environ.get(dialect.hostfile, "")
    text = read(path) if path else ""
    listed = parse_hostfile(text, path) if text.strip() else ()
    with limited():
        named = tuple(h for h in listed if not re.fullmatch(dialect.launch_host, h.name)) or listed
    readable = named and named == listed and not dialect.columns
    return Allocation(
        hosts=named,
        nodes=len(named) or number(environ.get(dialect.node_count, "")),
        hostfile=path if readable else "",
        counts_tasks=dialect.counts_tasks,
    )


# Steps that Slurm makes for a batch script or the shell of salloc: they hold no cores.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def _slurm_allocation(environ: Mapping[str, str]) -> Allocation:
    """Slurm has no file of hosts, but a compressed list, and counts what was requested."""
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    names = expand(listed) if listed else ()
    tasks = _repeated(environ.get("SLURM_TASKS_PER_NODE", ""))
    # Without -n and --ntasks-per-node Slurm counts one task for each host, or each core.
    requested = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    slots = tasks if requested and len(tasks) == len(names) else (0,) * len(names)
    step = environ.get("SLURM_STEP_ID", "")
    return Allocation(
        hosts=tuple(map(Host, names, slots)),
        nodes=len(names),
        cpus=_repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
        cpus_per_rank=number(environ.get("SLURM_CPUS_PER_TASK", "")),
        nested=step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP,
        counts_tasks=True,
    )


def _gpus(environ: Mapping[str, str]) -> int:
    """GPUs of each host: as Slurm counts them, or as the scheduler made them visible."""
    requested = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if found := number(environ.get("SLURM_GPUS_ON_NODE", "")) or number(requested):
        return found
    visible = environ.get("SLURM_JOB_GPUS") or environ.get("CUDA_VISIBLE_DEVICES", "")
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


def interactive(
    dialect: Dialect, job: Job, partition: Partition | None, program: tuple[str, ...]
) -> tuple[str, ...]:
    """The command that requests an allocation and runs a program on its first host.

    PBS and Cobalt run the user's login shell instead of the program.

    Raises:
        UsageError: hvdenv does not know how this scheduler does that.
    """
    if not dialect.interactive:
        raise UsageError(
            f"hvdenv does not know how {dialect.label} starts interactive jobs",
            remedy="set `interactive` in the recipe's table of the scheduler, or omit these options",
        )
    # A terminal has no output file.
    batch = BatchJob(
        job=job._replace(output=None, error=None),
        partition=partition,
        launch=(HOSTFILE,),
    )
    options = [
        each for each in directives(dialect, batch) if not each.startswith(dialect.batch_only)
    ]
    words: dict[str, str | int | tuple[str, ...] | None] = {
        "options": tuple(shlex.split(" ".join(options))),
        "program": program,
        "command": shlex.join(program),
    }
    return template.words(dialect.interactive, words)

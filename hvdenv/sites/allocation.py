"""The allocation that a process runs in, from its environment variables; and how to request one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from hvdenv.model.cluster import Job, Partition, Scheduler
from hvdenv.sites.hosts import parse_hostfile
from hvdenv.sites.schedulers import DIALECTS
from hvdenv.sites.schedulers.dialect import (
    HOSTFILE,
    Allocation,
    BatchJob,
    Dialect,
    number,
    visible_gpus,
)


def hostfile(environ: Mapping[str, str]) -> str:
    """The path of the file with the hosts of the current job; or empty."""
    current = _current(environ)
    return environ.get(DIALECTS[current].hostfile, "") if current else ""


def find_allocation(environ: Mapping[str, str], hosts: str = "") -> Allocation:
    """The allocation that these variables describe.

    Args:
        hosts: the content of hostfile().

    Raises:
        UsageError: the scheduler's own list of hosts cannot be read.
    """
    current = _current(environ)
    if not current:
        return Allocation()
    dialect = DIALECTS[current]
    if dialect.allocation:
        return dialect.allocation(environ)
    return _from_hostfile(current, dialect, environ, hosts)


def _current(environ: Mapping[str, str]) -> Scheduler | None:
    return next((name for name, each in DIALECTS.items() if environ.get(each.job_id)), None)


def _from_hostfile(
    scheduler: Scheduler, dialect: Dialect, environ: Mapping[str, str], hosts: str
) -> Allocation:
    path = environ.get(dialect.hostfile, "")
    listed = parse_hostfile(hosts, path) if hosts.strip() else ()
    named = tuple(h for h in listed if not re.fullmatch(dialect.launch_host, h.name)) or listed
    return Allocation(
        scheduler=scheduler,
        job=environ[dialect.job_id],
        hosts=named,
        nodes=len(named) or number(environ.get(dialect.node_count, "")),
        hostfile=path if named and named == listed else "",
        gpus_per_node=visible_gpus(environ),
    )


def interactive(
    scheduler: Scheduler, job: Job, partition: Partition | None, program: tuple[str, ...]
) -> tuple[str, ...]:
    """The command that requests an allocation and runs a program on its first host.

    PBS and Cobalt run the user's login shell instead of the program.
    """
    dialect = DIALECTS[scheduler]
    # A terminal has no output file.
    batch = BatchJob(
        job=job._replace(output=None, error=None), partition=partition, launch=(HOSTFILE,)
    )
    directives = dialect.directives(batch)
    options = [each for each in directives if not each.startswith(dialect.batch_only)]
    words = {
        "{options}": tuple(shlex.split(" ".join(options))),
        "{program}": program,
        "{command}": (shlex.join(program),),
    }
    return tuple(word for each in dialect.interactive for word in words.get(each, (each,)))


def runs_programs(scheduler: Scheduler) -> bool:
    """Whether interactive() runs the program, and not the user's login shell."""
    return bool({"{program}", "{command}"} & set(DIALECTS[scheduler].interactive))

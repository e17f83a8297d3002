"""Cobalt, the scheduler of Theta and ThetaGPU."""

from __future__ import annotations

import math
import re

from hvdenv.sites.schedulers.dialect import BatchJob, Dialect, Status, options, seconds

# Not all fields (-f): the command line of the job is one of them.
_FIELDS = "JobID:JobName:State:Location:ErrorPath:OutputPath"


def _directives(batch: BatchJob) -> list[str]:
    """Directives must follow the first line of the script directly."""
    job = batch.job
    attributes = ":".join(f"{name}={value}" for name, value in job.attributes.items())
    return options(
        ("--jobname ", job.name),
        ("-n ", job.nodes),
        ("-t ", math.ceil(seconds(job.time) / 60)),
        ("-q ", job.partition),
        ("--attrs ", attributes or None),
        ("-A ", job.account),
        ("-o " if job.error else "-O ", job.output),
        ("-e ", job.error),
    )


def _parse_query(text: str) -> Status | None:
    """From ``qstat -l --header``, which prints nothing for a job that has ended."""
    if not text.strip():
        return Status("gone")
    found = re.findall(r"^[ \t]*([A-Za-z_]+)[ \t]*: (.*)$", text, re.MULTILINE)
    values = {name: value.strip() for name, value in found}
    word = values.get("State", "")
    if not word:
        return None
    running = word in ("running", "starting", "killing", "exiting", "collected", "preempted")
    files = {values[key] for key in ("OutputPath", "ErrorPath") if values.get(key, "-") != "-"}
    return Status(
        state="running" if running else "waiting",
        reason="" if word in ("queued", "running") else word,
        outputs=tuple(sorted(files)),
        hosts=values.get("Location", "") if running else "",
        name=values.get("JobName", ""),
    )


DIALECT = Dialect(
    label="Cobalt",
    prefix="#COBALT",
    directives=_directives,
    patterns={"attributes": r"[A-Za-z0-9_][A-Za-z0-9._,/@-]*"},
    unsupported={
        "qos": "Cobalt has queues: set job.partition",
        "reservation": "a reservation is a queue in Cobalt: set job.partition",
        "constraint": "write it as one of job.attributes",
        "comment": "omit it",
        "memory": "Cobalt allocates whole nodes",
        "select": "write it as one of job.attributes",
        "place": "Cobalt allocates whole nodes",
    },
    times=(r"(?P<m>[0-9]{1,6})",),
    time_forms="minutes (90) or hours:minutes:seconds (1:30:00)",
    job_id="COBALT_JOBID",
    variables=("COBALT_",),
    hosts="""awk '!seen[$0]++' "$COBALT_NODEFILE\"""",
    hostfile="COBALT_NODEFILE",
    node_count="COBALT_JOBSIZE",
    program="qsub",
    submit=("qsub", "{script}"),
    # The id is the only line on standard output; the other lines are messages.
    submitted=r"^(?P<id>[0-9]+)$",
    query=("qstat", "-l", "--header", _FIELDS, "{id}"),
    parse_query=_parse_query,
    cancel=("qdel", "{id}"),
    unreachable=("cannot connect to server", "Connection refused"),
    interactive=("qsub", "-I", "{options}"),
)

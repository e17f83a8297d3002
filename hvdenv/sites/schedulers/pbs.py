"""PBS Professional and OpenPBS."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdenv.sites.schedulers.dialect import (
    HOSTFILE,
    BatchJob,
    Dialect,
    State,
    Status,
    options,
    seconds,
)

# Negative exit codes of PBS itself.
_ENDS: Mapping[int, State] = {
    -29: "timeout", -28: "timeout", -27: "out of memory", -26: "out of memory"
}  # fmt: skip


def _directives(batch: BatchJob) -> list[str]:
    """Output is written while the job runs (-k doe), so that it can be followed."""
    job = batch.job
    chunk = [
        str(job.nodes),
        *options(
            ("ncpus=", job.cpus_per_rank and job.cpus_per_rank * job.ranks_per_node),
            ("ngpus=", job.gpus_per_node or None),
            # How often the file of hosts lists each host.
            ("mpiprocs=", job.ranks_per_node if HOSTFILE in batch.launch else None),
            ("mem=", f"{job.memory.lower()}b" if job.memory else None),
            ("", job.select),
        ),
    ]
    place = job.place
    if job.exclusive and "excl" not in (place or ""):
        place = f"{place}:excl" if place else "excl"
    total = seconds(job.time)
    return [
        *options(
            ("-N ", job.name),
            ("-l select=", ":".join(chunk)),
            ("-l place=", place),
            ("-l walltime=", f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"),
            ("-q ", job.partition),
            ("-A ", job.account),
        ),
        *(f"-l {name}={value}" for name, value in job.attributes.items()),
        "-k doe",
        *options(("-o ", job.output), ("-e ", job.error)),
        *([] if job.error else ["-j oe"]),
    ]


def _parse_query(text: str) -> Status | None:
    """From ``qstat -x -f``; its JSON may be invalid, since it does not escape variables."""
    if re.search(r"Unknown Job Id|qstat: \S+ Unknown", text):
        return Status("gone")
    whole = text.replace("\n\t", "")
    values: dict[str, str] = {}
    for name, value in re.findall(r"^    ([A-Za-z_.]+) = (.*)$", whole, re.MULTILINE):
        values.setdefault(name, value)
    letter = values.get("job_state", "")
    if not letter:
        return None
    chunks = values.get("exec_host", "").split("+")  # gpu1/0*4+gpu2/0*4
    files = {values[key] for key in ("Output_Path", "Error_Path") if key in values}
    status = Status(
        state="waiting" if letter in "QHWTM" else "running",
        reason=values.get("comment", ""),
        outputs=tuple(sorted(file.partition(":")[2] for file in files)),
        hosts="+".join(dict.fromkeys(each.split("/")[0] for each in chunks if "/" in each)),
        name=values.get("Job_Name", ""),
    )
    return _ended(status, values) if letter in "FXC" else status


def _ended(status: Status, values: Mapping[str, str]) -> Status:
    text = values.get("Exit_status", values.get("exit_status"))
    if text is None:
        return status._replace(state="cancelled")
    code = int(text)
    if code < 0:
        return status._replace(state=_ENDS.get(code, "node failure"))
    shown = code if code < 128 else 128 + code % 128
    return status._replace(state="failed" if code else "completed", exit_code=shown)


DIALECT = Dialect(
    label="PBS",
    prefix="#PBS",
    directives=_directives,
    patterns={
        "name": r"[A-Za-z][A-Za-z0-9._+-]*",
        "attributes": r"[A-Za-z0-9_][A-Za-z0-9._:/@-]*",
        "select": r"[a-z_]+=[A-Za-z0-9._-]+(:[a-z_]+=[A-Za-z0-9._-]+)*",
        "place": r"(free|pack|scatter|vscatter)?:?(excl|shared|exclhost)?(:group=[a-z_]+)?",
    },
    unsupported={
        "qos": "PBS has queues: set job.partition",
        "reservation": "a reservation is a queue in PBS: set job.partition",
        "constraint": "write it as job.select (NAME=VALUE)",
        "comment": "omit it",
    },
    time_forms="hours:minutes:seconds (1:30:00)",
    job_id="PBS_JOBID",
    variables=("PBS_",),
    hosts="""awk '!seen[$0]++' "$PBS_NODEFILE\"""",
    hostfile="PBS_NODEFILE",
    program="qsub",
    submit=("qsub", "{script}"),
    submitted=r"^(?P<id>[0-9]+(\.[A-Za-z0-9.-]+)?)$",
    query=("qstat", "-x", "-f", "{id}"),
    parse_query=_parse_query,
    cancel=("qdel", "{id}"),
    unreachable=("cannot connect to server", "No default server", "Connection refused"),
    interactive=("qsub", "-I", "{options}"),
    batch_only=("-k ", "-j "),
)

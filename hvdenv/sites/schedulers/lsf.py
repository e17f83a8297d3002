"""IBM Spectrum LSF."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from hvdenv.sites.schedulers.dialect import BatchJob, Dialect, State, Status, options, seconds

_STATES: Mapping[str, State] = {
    "PEND": "waiting", "PSUSP": "waiting", "WAIT": "waiting", "RUN": "running",
    "USUSP": "running", "SSUSP": "running", "UNKWN": "running", "DONE": "completed",
    "EXIT": "failed", "ZOMBI": "node failure",
}  # fmt: skip
_ENDS: Mapping[str, State] = {
    "TERM_RUNLIMIT": "timeout", "TERM_DEADLINE": "timeout", "TERM_OWNER": "cancelled",
    "TERM_ADMIN": "cancelled", "TERM_FORCE_OWNER": "cancelled",
    "TERM_FORCE_ADMIN": "cancelled", "TERM_MEMLIMIT": "out of memory",
    "TERM_SWAP": "out of memory", "TERM_PREEMPT": "preempted",
    "TERM_LOAD": "preempted", "TERM_ZOMBIE": "node failure",
    "TERM_EXTERNAL_SIGNAL": "failed",
}  # fmt: skip
_FIELDS = (
    "job_name stat exit_code exit_reason pend_reason exec_host output_file error_file exec_cwd"
)


def _directives(batch: BatchJob) -> list[str]:
    """Directives for sites that allocate whole nodes (-nnodes)."""
    job = batch.job
    minutes = math.ceil(seconds(job.time) / 60)
    flags = job.attributes.get("alloc_flags")
    return [
        *options(
            ("-P ", job.account),
            ("-W ", f"{minutes // 60}:{minutes % 60:02}"),
            ("-nnodes ", job.nodes),
            ("-q ", job.partition),
            ("-U ", job.reservation),
            ("-J ", job.name),
            ("-Jd ", job.comment),
            ("-M ", f"{job.memory}B" if job.memory else None),
            # Without it, the output is sent by mail.
            ("-o ", job.output or f"{job.name}.%J"),
            ("-e ", job.error),
        ),
        *([f'-alloc_flags "{flags.replace(",", " ")}"'] if flags else []),
        *(["-x"] if job.exclusive else []),
    ]


def _parse_query(text: str) -> Status | None:
    """From ``bjobs -a -json -o``."""
    if "is not found" in text:
        return Status("gone")
    try:
        values = json.loads(text)["RECORDS"][0]
        state = _STATES[values["STAT"]]
    except (ValueError, TypeError, LookupError):
        return None
    word = re.match(r"TERM_[A-Z_]+", values.get("EXIT_REASON", ""))
    if state == "failed" and word:
        state = _ENDS.get(word[0], "failed")
    code = values.get("EXIT_CODE", "")
    folder = values.get("EXEC_CWD", "")
    files = {values.get(key, "") for key in ("OUTPUT_FILE", "ERROR_FILE")} - {"", "-"}
    slots = values.get("EXEC_HOST", "").split(":")  # 4*gpu1:4*gpu2
    hosts = dict.fromkeys(each.rpartition("*")[2] for each in slots if each)
    return Status(
        state=state,
        reason=values.get("EXIT_REASON", "") or values.get("PEND_REASON", ""),
        exit_code=int(code) if code.isdigit() else 0 if state == "completed" else None,
        outputs=tuple(
            sorted(
                file if file.startswith("/") or not folder else f"{folder}/{file}" for file in files
            )
        ),
        hosts="+".join(hosts),
        name=values.get("JOB_NAME", ""),
    )


DIALECT = Dialect(
    label="LSF",
    prefix="#BSUB",
    directives=_directives,
    patterns={"attribute": "alloc_flags", "attributes": r"[a-z0-9]+(,[a-z0-9]+)*"},
    unsupported={
        "qos": "LSF has queues: set job.partition",
        "constraint": "LSF allocates whole nodes of a queue: set job.partition",
        "select": "set job.attributes.alloc_flags",
        "place": "LSF allocates whole nodes",
    },
    times=(r"(?P<h>[0-9]{1,3}):(?P<m>[0-5][0-9])",),
    time_forms="hours:minutes (1:30) or hours:minutes:seconds (1:30:00)",
    job_id="LSB_JOBID",
    variables=("LSB_", "LS_SUBCWD"),
    # With jsrun, the file also lists the host that the script runs on, which runs no ranks.
    hosts="""awk '!/^(batch|login)/ && !seen[$0]++' "$LSB_DJOB_HOSTFILE\"""",
    hostfile="LSB_DJOB_HOSTFILE",
    launch_host=r"(batch|login)[0-9]+",
    program="bsub",
    # bsub reads scripts from its standard input only.
    submit=("sh", "-c", 'exec bsub < "$1"', "sh", "{script}"),
    submitted=r"^Job <(?P<id>[0-9]+)> is submitted",
    query=("bjobs", "-a", "-json", "-o", _FIELDS, "{id}"),
    parse_query=_parse_query,
    cancel=("bkill", "{id}"),
    unreachable=("LSF is down", "Cannot connect to LSF", "Connection refused"),
    interactive=("bsub", "{options}", "-Is", "{command}"),
    batch_only=("-o ",),
)

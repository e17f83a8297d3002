"""Asking schedulers about jobs: command lines, and what their output means. Nothing is run here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from hvdenv.model.cluster import Scheduler
from hvdenv.sites.batch import ENDED

State = Literal[
    "waiting", "running", "completed", "failed", "timeout", "cancelled", "node failure",
    "out of memory", "preempted", "gone",
]  # fmt: skip


class Status(NamedTuple):
    """What a scheduler says of a job.

    Attributes:
        state: ``gone`` if the scheduler does not know the job (any more).
        reason: why it waits or ended, in the scheduler's words; may be empty.
        exit_code: of a job that has ended, where it is known; 128 and the signal's
            number if a signal ended it.
        outputs: files that its output goes to.
        hosts: where it runs, as the scheduler writes it.
        name: the job's name, where the scheduler says it.
    """

    state: State
    reason: str = ""
    exit_code: int | None = None
    outputs: tuple[str, ...] = ()
    hosts: str = ""
    name: str = ""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state not in ("waiting", "running")


class Queue(NamedTuple):
    """How a scheduler is spoken to.

    Attributes:
        submit: arguments that submit a script, from its path.
        submitted: the job's id, in what that printed; empty if there is none.
        ask: arguments that ask for a job's state.
        told: what the answer means; None if it is not an answer.
        past: arguments that ask for a job that the scheduler has forgotten.
        told_past: what that answer means.
        cancel: arguments that cancel a job.
    """

    submit: Callable[[str], tuple[str, ...]]
    submitted: Callable[[str], str]
    ask: Callable[[str], tuple[str, ...]]
    told: Callable[[str], Status | None]
    cancel: Callable[[str], tuple[str, ...]]
    past: Callable[[str], tuple[str, ...]] | None = None
    told_past: Callable[[str], Status | None] = lambda text: None


def exit_code_in(output: str, job: str) -> int | None:
    """The exit code that a job's script wrote as its last line, if it came to that."""
    pattern = re.escape(ENDED).replace(r"\{id\}", r"(\S+)") + r" ([0-9]+)$"
    found = re.findall(pattern, output, re.MULTILINE)
    if found and number_of(found[-1][0]) == number_of(job):
        return int(found[-1][1])
    return None


def number_of(job: str) -> str:
    """A job's id without the name of a server."""
    return job.split(".")[0]


# ---------------------------------------------------------------- Slurm

_SLURM: Mapping[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting", "REQUEUE_FED": "waiting", "SPECIAL_EXIT": "waiting",
    "RESV_DEL_HOLD": "waiting", "RUNNING": "running", "COMPLETING": "running",
    "SUSPENDED": "running", "STOPPED": "running", "SIGNALING": "running",
    "STAGE_OUT": "running", "RESIZING": "running", "COMPLETED": "completed",
    "FAILED": "failed", "TIMEOUT": "timeout", "DEADLINE": "timeout",
    "CANCELLED": "cancelled", "REVOKED": "cancelled", "NODE_FAIL": "node failure",
    "BOOT_FAIL": "node failure", "OUT_OF_MEMORY": "out of memory", "PREEMPTED": "preempted",
}  # fmt: skip


def slurm_submitted(text: str) -> str:
    """From ``sbatch --parsable``: a number, and a cluster's name after a semicolon."""
    found = re.search(r"^([0-9]+)(;\S+)?$", text, re.MULTILINE)
    return found[1] if found else ""


def slurm_told(text: str) -> Status | None:
    """From ``scontrol show job``; the first values count, since paths may hold anything."""
    if "Invalid job id specified" in text:
        return Status("gone")
    found = re.search(r"^ +JobState=(\S+) Reason=(\S+)", text, re.MULTILINE)
    if not found:
        return None
    state = _SLURM.get(found[1].split("+")[0], "running")
    code = re.search(r"^ .* ExitCode=([0-9]+):([0-9]+)", text, re.MULTILINE)
    hosts = re.search(r"^ +NodeList=(\S+)", text, re.MULTILINE)
    files = re.findall(r"^ +(?:StdOut|StdErr)=(.+)$", text, re.MULTILINE)
    name = re.search(r"^JobId=\S+ JobName=(\S+)", text, re.MULTILINE)
    over = Status(state).over
    return Status(
        state,
        "" if found[2] == "None" else found[2],
        _slurm_code(code[1], code[2]) if code and over else None,
        tuple(sorted(set(files))),
        hosts[1] if hosts and hosts[1] != "(null)" else "",
        name[1] if name else "",
    )


def slurm_told_past(text: str) -> Status | None:
    """From ``sacct -n -P -X -o State,ExitCode``; there is none without accounting."""
    found = re.search(r"^([A-Z_]+)( by [0-9]+)?\|([0-9]+):([0-9]+)$", text, re.MULTILINE)
    if not found or found[1] not in _SLURM:
        return None
    return Status(_SLURM[found[1]], exit_code=_slurm_code(found[3], found[4]))


def _slurm_code(code: str, number: str) -> int:
    return int(code) or (128 + int(number) if int(number) else 0)


# ---------------------------------------------------------------- PBS

_PBS_ENDS: Mapping[int, State] = {-29: "timeout", -28: "timeout", -27: "out of memory", -26: "out of memory"}  # fmt: skip


def pbs_told(text: str) -> Status | None:
    """From ``qstat -x -f``. Its JSON is not always JSON: it does not escape what variables hold."""
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
    status = Status(
        "waiting" if letter in "QHWTM" else "running",
        values.get("comment", ""),
        outputs=tuple(
            sorted({values[key].partition(":")[2] for key in ("Output_Path", "Error_Path") if key in values})
        ),
        hosts="+".join(dict.fromkeys(each.split("/")[0] for each in chunks if "/" in each)),
        name=values.get("Job_Name", ""),
    )  # fmt: skip
    if letter not in "FXC":
        return status
    code = int(values.get("Exit_status", values.get("exit_status", "-1")))
    if code in _PBS_ENDS:
        return status._replace(state=_PBS_ENDS[code])
    if "Exit_status" not in values and "exit_status" not in values:
        return status._replace(state="cancelled")
    if code < 0:
        return status._replace(state="node failure")
    shown = code if code < 128 else 128 + code % 128
    return status._replace(state="failed" if code else "completed", exit_code=shown)


def pbs_submitted(text: str) -> str:
    """From ``qsub``: the id is a line of its own."""
    found = re.search(r"^([0-9]+(\.[A-Za-z0-9.-]+)?)$", text, re.MULTILINE)
    return found[1] if found else ""


# ---------------------------------------------------------------- Cobalt

# Not all fields (-f): the command's own words are among them.
_COBALT_FIELDS = "JobID:JobName:State:Location:ErrorPath:OutputPath"


def cobalt_submitted(text: str) -> str:
    """From ``qsub``: the id is the only line on standard output; others are messages."""
    found = re.findall(r"^([0-9]+)$", text, re.MULTILINE)
    return found[-1] if found else ""


def cobalt_told(text: str) -> Status | None:
    """From ``qstat -l --header``. Nothing is printed for a job that has ended."""
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
        "running" if running else "waiting",
        "" if word in ("queued", "running") else word,
        outputs=tuple(sorted(files)),
        hosts=values.get("Location", "") if running else "",
        name=values.get("JobName", ""),
    )


# ---------------------------------------------------------------- LSF

_LSF: Mapping[str, State] = {
    "PEND": "waiting", "PSUSP": "waiting", "WAIT": "waiting", "RUN": "running",
    "USUSP": "running", "SSUSP": "running", "UNKWN": "running", "DONE": "completed",
    "EXIT": "failed", "ZOMBI": "node failure",
}  # fmt: skip
_LSF_ENDS: Mapping[str, State] = {
    "TERM_RUNLIMIT": "timeout", "TERM_DEADLINE": "timeout", "TERM_OWNER": "cancelled",
    "TERM_ADMIN": "cancelled", "TERM_FORCE_OWNER": "cancelled",
    "TERM_FORCE_ADMIN": "cancelled", "TERM_MEMLIMIT": "out of memory",
    "TERM_SWAP": "out of memory", "TERM_PREEMPT": "preempted",
    "TERM_LOAD": "preempted", "TERM_ZOMBIE": "node failure",
    "TERM_EXTERNAL_SIGNAL": "failed",
}  # fmt: skip
_LSF_FIELDS = (
    "job_name stat exit_code exit_reason pend_reason exec_host output_file error_file exec_cwd"
)


def lsf_submitted(text: str) -> str:
    """From ``bsub``: Job <12> is submitted to queue <batch>."""
    found = re.search(r"^Job <([0-9]+)> is submitted", text, re.MULTILINE)
    return found[1] if found else ""


def lsf_told(text: str) -> Status | None:
    """From ``bjobs -a -json -o``."""
    if "is not found" in text:
        return Status("gone")
    try:
        values = json.loads(text)["RECORDS"][0]
        state = _LSF[values["STAT"]]
    except (ValueError, TypeError, LookupError):
        return None
    word = re.match(r"TERM_[A-Z_]+", values.get("EXIT_REASON", ""))
    if state == "failed" and word:
        state = _LSF_ENDS.get(word[0], "failed")
    code = values.get("EXIT_CODE", "")
    folder = values.get("EXEC_CWD", "")
    files = {values.get(key, "") for key in ("OUTPUT_FILE", "ERROR_FILE")} - {"", "-"}
    slots = values.get("EXEC_HOST", "").split(":")  # 4*gpu1:4*gpu2
    hosts = dict.fromkeys(each.rpartition("*")[2] for each in slots if each)
    return Status(
        state,
        values.get("EXIT_REASON", "") or values.get("PEND_REASON", ""),
        int(code) if code.isdigit() else 0 if state == "completed" else None,
        tuple(sorted(each if each.startswith("/") or not folder else f"{folder}/{each}" for each in files)),
        "+".join(hosts),
        values.get("JOB_NAME", ""),
    )  # fmt: skip


QUEUES: Mapping[Scheduler, Queue] = {
    "slurm": Queue(
        lambda path: ("sbatch", "--parsable", path), slurm_submitted,
        lambda job: ("scontrol", "show", "job", job), slurm_told,
        lambda job: ("scancel", job),
        lambda job: ("sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode"),
        slurm_told_past,
    ),
    "pbs": Queue(
        lambda path: ("qsub", path), pbs_submitted,
        lambda job: ("qstat", "-x", "-f", job), pbs_told,
        lambda job: ("qdel", job),
    ),
    "cobalt": Queue(
        lambda path: ("qsub", path), cobalt_submitted,
        lambda job: ("qstat", "-l", "--header", _COBALT_FIELDS, job), cobalt_told,
        lambda job: ("qdel", job),
    ),
    "lsf": Queue(
        # bsub reads a script from its standard input only.
        lambda path: ("sh", "-c", 'exec bsub < "$1"', "sh", path), lsf_submitted,
        lambda job: ("bjobs", "-a", "-json", "-o", _LSF_FIELDS, job), lsf_told,
        lambda job: ("bkill", job),
    ),
}  # fmt: skip


# ---------------------------------------------------------------- what people are told

_WAITING = {
    "Resources": "nodes have to become free",
    "Priority": "other jobs come first",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved, perhaps for maintenance:"
    " it starts when they are back, or ask for less time",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "JobHeldAdmin": "the site holds it: ask the support of the site",
    "BeginTime": "it may not start yet",
    "Dependency": "it waits for other jobs",
    "QOSMaxJobsPerUserLimit": "so many jobs of yours run already",
    "AssocGrpCpuLimit": "the account uses all that it may at once",
    "Reservation": "the reservation has not begun",
    # Its whole reason: Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_...
    "Nodes_required_for_job_are_DOWN": "nodes that it needs are down, drained or reserved",
}
_NEVER = {
    "PartitionConfig": "the partition cannot give what it asks for: look at nodes, time and account",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or gives to one job",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "BadConstraints": "no node is as job.constraint says",
    "InvalidAccount": "there is no such account, or it may not be used here",
    "AccountNotAllowed": "the account may not use this partition",
    "InvalidQOS": "there is no such QOS, or the account may not use it",
    "QOSNotAllowed": "the QOS may not be used in this partition",
    "DependencyNeverSatisfied": "a job that it waits for has failed",
    "AssocMaxNodePerJobLimit": "the account gives fewer nodes to one job",
    "AssocMaxWallDurationPerJobLimit": "the account gives less time to one job",
    "QOSMaxNodePerJobLimit": "the QOS gives fewer nodes to one job",
    "QOSMaxWallDurationPerJobLimit": "the QOS gives less time to one job",
    "QOSMaxGRESPerJob": "the QOS gives fewer GPUs to one job",
}
_ENDS: Mapping[State, tuple[str, str]] = {
    "timeout": (
        "was ended because its time was over",
        "ask for more time (--time), or have the program write checkpoints",
    ),
    "cancelled": (
        "was cancelled",
        "if it was not you, ask the support of the site",
    ),
    "node failure": (
        "was ended because a node failed, or could not be started",
        "submit it again; if it happens again, tell the support of the site which nodes it had",
    ),
    "out of memory": (
        "was ended because it used more memory than it had",
        "set job.memory, take fewer ranks on each node, or smaller batches",
    ),
    "preempted": (
        "had to give way to another job",
        "submit it again, or in a queue whose jobs are not preempted",
    ),
    "gone": (
        "is not known to the scheduler, and its output does not say how it ended",
        "look at the end of its output",
    ),
}  # fmt: skip


def never_starts(status: Status) -> str:
    """Why a waiting job cannot start as it was submitted; empty if it may."""
    return _NEVER.get(status.reason, "") if status.state == "waiting" else ""


def explained(status: Status) -> str:
    """A status as a person reads it: ``waiting (Priority: other jobs come first)``."""
    if status.state == "running":
        return f"running on {status.hosts}" if status.hosts else "running"
    reason = "" if status.reason in ("NonZeroExitCode", "(null)") else status.reason
    meaning = _WAITING.get(reason.split(",")[0], "") if status.state == "waiting" else ""
    if reason and meaning:
        return f"{status.state} ({reason}: {meaning})"
    return f"{status.state} ({reason})" if reason else status.state


def unhappy_end(status: Status) -> tuple[str, str] | None:
    """What happened to a job that did not end by itself, and what to do; None if it did."""
    if status.state == "failed" and status.exit_code is None:
        return "failed, and the scheduler does not say how", "look at the end of its output"
    return _ENDS.get(status.state)

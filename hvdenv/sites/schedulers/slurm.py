"""Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdenv.model.cluster import Job
from hvdenv.sites.hosts import Host, expand
from hvdenv.sites.schedulers.dialect import (
    SIZE,
    Allocation,
    BatchJob,
    Dialect,
    State,
    Status,
    number,
    options,
    visible_gpus,
)

_STATES: Mapping[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting", "REQUEUE_FED": "waiting", "SPECIAL_EXIT": "waiting",
    "RESV_DEL_HOLD": "waiting", "RUNNING": "running", "COMPLETING": "running",
    "SUSPENDED": "running", "STOPPED": "running", "SIGNALING": "running",
    "STAGE_OUT": "running", "RESIZING": "running", "COMPLETED": "completed",
    "FAILED": "failed", "TIMEOUT": "timeout", "DEADLINE": "timeout",
    "CANCELLED": "cancelled", "REVOKED": "cancelled", "NODE_FAIL": "node failure",
    "BOOT_FAIL": "node failure", "OUT_OF_MEMORY": "out of memory", "PREEMPTED": "preempted",
}  # fmt: skip
_WAITING = {
    "Resources": "nodes have to become free",
    "Priority": "other jobs come first",
    "ReqNodeNotAvail": "required nodes are down or reserved, perhaps for maintenance; the job"
    " starts when they are back, or request less time",
    "JobHeldUser": "it is held; `scontrol release` releases it",
    "JobHeldAdmin": "the site holds it; contact the site's support",
    "BeginTime": "its begin time has not come",
    "Dependency": "it waits for other jobs",
    "QOSMaxJobsPerUserLimit": "you have reached the limit of running jobs",
    "AssocGrpCpuLimit": "the account has reached its limit of CPUs",
    "Reservation": "the reservation has not begun",
    # Its whole reason: Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_...
    "Nodes_required_for_job_are_DOWN": "required nodes are down, drained or reserved",
}
_HOPELESS = {
    "PartitionConfig": "the partition does not offer what it requests: look at nodes, time and"
    " account",
    "PartitionNodeLimit": "it requests more nodes than the partition has or allows for one job",
    "PartitionTimeLimit": "it requests more time than the partition allows",
    "BadConstraints": "no node satisfies job.constraint",
    "InvalidAccount": "the account does not exist or may not be used here",
    "AccountNotAllowed": "the account may not use this partition",
    "InvalidQOS": "the QOS does not exist, or the account may not use it",
    "QOSNotAllowed": "the QOS may not be used in this partition",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "AssocMaxNodePerJobLimit": "the account allows fewer nodes for one job",
    "AssocMaxWallDurationPerJobLimit": "the account allows less time for one job",
    "QOSMaxNodePerJobLimit": "the QOS allows fewer nodes for one job",
    "QOSMaxWallDurationPerJobLimit": "the QOS allows less time for one job",
    "QOSMaxGRESPerJob": "the QOS allows fewer GPUs for one job",
}
# Steps that Slurm makes for a batch script or the shell of salloc: they hold no cores.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def _directives(batch: BatchJob) -> list[str]:
    job = batch.job
    return [
        *options(
            ("-J ", job.name),
            ("--time=", job.time),
            ("--comment=", job.comment),
            ("-p ", job.partition),
            ("-A ", job.account),
            ("--qos=", job.qos),
            ("--reservation=", job.reservation),
            ("-C ", job.constraint),
            ("--nodes=", job.nodes),
            ("--ntasks-per-node=", job.ranks_per_node),
            ("--cpus-per-task=", job.cpus_per_rank),
            ("--mem=", job.memory),
            ("-o ", job.output),
            ("-e ", job.error),
        ),
        *_gpu_options(batch),
        *(["--exclusive"] if job.exclusive else []),
    ]


def _gpu_options(batch: BatchJob) -> list[str]:
    count, option = batch.job.gpus_per_node, batch.job.gpu_option
    if not count or option == "none":
        return []
    kind = f"{batch.partition.gpu}:" if batch.partition and batch.partition.gpu else ""
    return [f"--gres=gpu:{kind}{count}" if option == "gres" else f"--gpus-per-node={kind}{count}"]


def _setup(job: Job) -> list[str]:
    lines = [
        "# srun passes on what it sees here, also after `sbatch --export=NONE`.",
        "export SLURM_EXPORT_ENV=ALL",
    ]
    if job.cpus_per_rank is not None:
        lines += [
            "# Since Slurm 22.05, srun no longer takes this from sbatch.",
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        ]
    return lines


def _parse_query(text: str) -> Status | None:
    """From ``scontrol show job``; the first values count, since paths may hold anything."""
    if "Invalid job id specified" in text:
        return Status("gone")
    found = re.search(r"^ +JobState=(\S+) Reason=(\S+)", text, re.MULTILINE)
    if not found:
        return None
    state = _STATES.get(found[1].split("+")[0], "running")
    code = re.search(r"^ .* ExitCode=([0-9]+):([0-9]+)", text, re.MULTILINE)
    hosts = re.search(r"^ +NodeList=(\S+)", text, re.MULTILINE)
    files = re.findall(r"^ +(?:StdOut|StdErr)=(.+)$", text, re.MULTILINE)
    name = re.search(r"^JobId=\S+ JobName=(\S+)", text, re.MULTILINE)
    return Status(
        state=state,
        reason="" if found[2] == "None" else found[2],
        exit_code=_exit_code(code[1], code[2]) if code and Status(state).over else None,
        outputs=tuple(sorted(set(files))),
        hosts=hosts[1] if hosts and hosts[1] != "(null)" else "",
        name=name[1] if name else "",
    )


def _parse_history(text: str) -> Status | None:
    """From ``sacct -n -P -X -o State,ExitCode``; there is no answer without accounting."""
    found = re.search(r"^([A-Z_]+)( by [0-9]+)?\|([0-9]+):([0-9]+)$", text, re.MULTILINE)
    if not found or found[1] not in _STATES:
        return None
    return Status(_STATES[found[1]], exit_code=_exit_code(found[3], found[4]))


def _exit_code(code: str, signal: str) -> int:
    return int(code) or (128 + int(signal) if int(signal) else 0)


def _allocation(environ: Mapping[str, str]) -> Allocation:
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    names = expand(listed) if listed else ()
    tasks = _repeated(environ.get("SLURM_TASKS_PER_NODE", ""))
    # Without -n and --ntasks-per-node Slurm counts one task for each host, or each core.
    requested = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    slots = tasks if requested and len(tasks) == len(names) else (0,) * len(names)
    step = environ.get("SLURM_STEP_ID", "")
    return Allocation(
        scheduler="slurm",
        job=environ["SLURM_JOB_ID"],
        hosts=tuple(map(Host, names, slots)),
        nodes=len(names),
        tasks=tasks,
        cpus=_repeated(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
        cpus_per_rank=number(environ.get("SLURM_CPUS_PER_TASK", "")),
        gpus_per_node=_gpus(environ),
        nested=step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP,
    )


def _gpus(environ: Mapping[str, str]) -> int:
    requested = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return (
        number(environ.get("SLURM_GPUS_ON_NODE", ""))
        or number(requested)
        or len([one for one in environ.get("SLURM_JOB_GPUS", "").split(",") if one])
        or visible_gpus(environ)
    )


def _repeated(text: str) -> tuple[int, ...]:
    """The numbers of ``4(x2),3``."""
    numbers: list[int] = []
    for word in text.split(",") if text else ():
        found = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,5})\))?", word, re.ASCII)
        if not found:
            return ()
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)


DIALECT = Dialect(
    label="Slurm",
    prefix="#SBATCH",
    directives=_directives,
    setup=_setup,
    patterns={"memory": "0|" + SIZE},
    unsupported={
        "attributes": "write it as the scheduler's own field: constraint, qos, comment",
        "select": "use constraint",
        "place": "use exclusive",
    },
    times=(r"(?P<m>[0-9]{1,6})", r"(?P<d>[0-9]{1,3})-(?P<h>[0-9]{1,2})(:(?P<m>[0-5][0-9]))?"),
    time_forms="minutes (90), hours:minutes:seconds (1:30:00) or"
    " days-hours:minutes:seconds (2-00:00:00)",
    job_id="SLURM_JOB_ID",
    variables=("SLURM_",),
    hosts='scontrol show hostnames "$SLURM_JOB_NODELIST"',
    allocation=_allocation,
    counts_tasks=True,
    program="sbatch",
    submit=("sbatch", "--parsable", "{script}"),
    # The name of a cluster may follow after a semicolon.
    submitted=r"^(?P<id>[0-9]+)(;\S+)?$",
    query=("scontrol", "show", "job", "{id}"),
    parse_query=_parse_query,
    history=("sacct", "-n", "-P", "-X", "-j", "{id}", "-o", "State,ExitCode"),
    parse_history=_parse_history,
    cancel=("scancel", "{id}"),
    unreachable=(
        "Could not establish a configuration source",
        "Unable to contact slurm controller",
        "Connection refused",
    ),
    waiting=_WAITING,
    hopeless=_HOPELESS,
    # At some sites salloc alone leaves its shell on the login node. This step holds no cores,
    # so that the steps of the shell get all of them.
    interactive=(
        "salloc", "{options}", "srun", "--interactive", "--preserve-env", "--pty", "{program}"
    ),
    broadcast=(
        ("srun", "--ntasks-per-node=1", "mkdir", "-p", "{folder}"),
        ("sbcast", "--force", "--preserve", "{file}", "{file}"),
    ),
)  # fmt: skip

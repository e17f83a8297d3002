"""Batch scripts: what a job asks for, in the words of each scheduler. Data in, text out.

To add a scheduler, write one function for its directives and enter it in DIALECTS.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from hvdenv.errors import UsageError
from hvdenv.model.cluster import Job, Partition, Scheduler
from hvdenv.schema import Problem, decode, fields

# Words of a launcher's arguments that stand for the file with the job's hosts, for a list of
# the hosts with their slots such as n1:4,n2:4, and for their names alone.
HOSTFILE = "{hostfile}"
HOSTS = "{hosts}"
HOST_NAMES = "{host_names}"
ENDED = "hvdenv: job {id} ended with exit code"

# Nothing else may stand in a directive: no blank, quote, newline or comment sign, and
# nothing that an option could begin with.
_WORD = re.compile(r"[A-Za-z0-9_./%$@+][A-Za-z0-9._:/%$@+=,*&|!{}-]*")
_DURATION = re.compile(r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,3}):(?P<m>[0-5][0-9]):(?P<s>[0-5][0-9])")  # fmt: skip
# Fields of a job that have an option of their own.
OPTIONS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "time", "partition",
           "account", "name", "comment", "output")  # fmt: skip


class BatchJob(NamedTuple):
    """What a batch script does.

    Attributes:
        job: what is asked for.
        partition: facts about its nodes, where the recipe has them.
        activate: script that is sourced first; empty if there is nothing to activate.
        modules: shell commands that load modules, where no script does it.
        launch: the launcher and its arguments; empty if the command starts by itself.
            HOSTFILE and HOSTS may be words of it.
        env: variables for the launcher and the ranks.
        command: what each rank runs.
        folder: where it runs.
        exports: names of variables that the launcher passes on, whether they are set or not.
        log: file that its output goes to, instead of where the scheduler puts it.
    """

    job: Job
    partition: Partition | None
    activate: str
    launch: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    command: tuple[str, ...]
    folder: str
    exports: tuple[str, ...] = ()
    log: str = ""
    modules: tuple[str, ...] = ()


class Cost(NamedTuple):
    """What a job is charged for, at most."""

    nodes: int
    hours: float
    node_hours: float
    gpu_hours: float


class Dialect(NamedTuple):
    """A scheduler's way of writing things down.

    Attributes:
        called: its name, for people.
        prefix: what a directive begins with.
        directives: all directives of a job, without the prefix.
        variable: holds the job's id in the job.
        hostfile: variable with the path of a file that lists the job's hosts.
        hosts: shell command that prints each host once.
        times: forms of a time that it takes besides those of recipes: each a regular
            expression whose groups are d, h, m or s.
        forms: how to write a time, for people.
        fields: how it restricts the values of fields.
        lacks: fields that it has no word for, and what to do instead.
        setup: lines of the script before everything else.
    """

    called: str
    prefix: str
    directives: Callable[[BatchJob], list[str]]
    variable: str
    hostfile: str
    hosts: str
    times: tuple[str, ...]
    forms: str
    fields: Mapping[str, str]
    lacks: Mapping[str, str]
    setup: Callable[[Job], list[str]] = lambda job: []


def script(scheduler: Scheduler, batch: BatchJob) -> str:
    """The batch script of a job that was checked.

    Raises:
        UsageError: a value cannot stand in a directive of this scheduler.
    """
    dialect = DIALECTS[scheduler]
    _check_words(dialect, batch)
    lines = ["#!/bin/bash", *(f"{dialect.prefix} {each}" for each in dialect.directives(batch)), ""]
    lines += [
        "# The last line of the output tells how the job ended, whoever asks later.",
        f"trap 'echo \"{ENDED.format(id=f'${dialect.variable}')} $?\"' EXIT",
        'fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }',
        *([f"exec >>{quote(batch.log)} 2>&1"] if batch.log else []),
        *dialect.setup(batch.job),
        f"cd -- {quote(batch.folder)} || fail {quote(f'cannot enter {batch.folder}')}",
    ]
    if batch.activate:
        told = f"{batch.activate} did not activate the environment; is its file system there?"
        lines.append(f". {quote(batch.activate)} || fail {quote(told)}")
    if batch.modules:
        lines += ["hvdenv_modules() {", *batch.modules, "}"]
        lines.append("hvdenv_modules || fail 'the modules could not be loaded'")
    # Open MPI complains of what it is to pass on and does not find.
    passed = [name for name in batch.exports if name in batch.launch and name != "PATH"]
    lines += [f'export {name}="${{{name}-}}"' for name in passed]
    exports = [f"export {name}={quote(value)}" for name, value in batch.env]
    lines += [line for line in exports if line not in lines]
    slots = f" | sed 's/$/:{batch.job.ranks_per_node}/'" if HOSTS in batch.launch else ""
    if slots or HOST_NAMES in batch.launch:
        lines.append(f"hosts=$({dialect.hosts}{slots} | paste -sd, -)")
    words = [_launch_word(dialect, word) for word in batch.launch]
    return "\n".join([*lines, "", " ".join([*words, *map(quote, batch.command)]), ""])


def _launch_word(dialect: Dialect, word: str) -> str:
    if word == HOSTFILE:
        return f'"${dialect.hostfile}"'
    return '"$hosts"' if word in (HOSTS, HOST_NAMES) else quote(word)


def quote(word: str) -> str:
    """A word for bash, on one line: what looks like a directive never begins a line."""
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", word) is None:
        return shlex.quote(word)
    text = ""
    for byte in os.fsencode(word):
        character = chr(byte)
        text += character if re.match(r"[A-Za-z0-9 ._/:=,+@%-]", character) else f"\\x{byte:02x}"
    return f"$'{text}'"


def merge(job: Job, scheduler: Scheduler, given: Mapping[str, Any]) -> Job:
    """A recipe's job with what the command line says.

    Args:
        job: of the recipe.
        scheduler: decides in which forms a time may be written.
        given: values by field; None where an option was not given.

    Raises:
        UsageError: a value does not fit its field; the option is named.
    """
    kinds = fields(Job)
    values = {name: value for name, value in given.items() if value is not None}
    if "time" in values:
        values["time"] = read_time(values["time"], scheduler)
    for name, value in values.items():
        try:
            decode(kinds[name], value)
        except Problem as problem:
            raise UsageError(problem.message, where=_option(name)) from problem
    return job._replace(**values)


def read_time(text: str, scheduler: Scheduler) -> str:
    """A wall time as the user writes it, in the form that recipes have.

    Raises:
        UsageError: the scheduler knows no such time, with the forms that it knows.
    """
    dialect = DIALECTS[scheduler]
    for pattern in (_DURATION.pattern, *dialect.times):
        if found := re.fullmatch(pattern, text):
            parts = {name: int(value) for name, value in found.groupdict("0").items()}
            total = _total(parts)
            days, rest = divmod(total, 86400)
            if total and days < 1000:
                head = f"{days}-" if days else ""
                return f"{head}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    raise UsageError(
        f"{text!r} is not a time for {dialect.called}",
        where="--time",
        remedy=f"write {dialect.forms}",
    )


def seconds(time: str) -> int:
    """The seconds of a wall time of a recipe."""
    found = _DURATION.fullmatch(time)
    if not found:
        raise UsageError(f"{time!r} is not a time such as 24:00:00", where="job.time")
    return _total({name: int(value) for name, value in found.groupdict("0").items()})


def _total(parts: Mapping[str, int]) -> int:
    sizes = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(sizes[name] * value for name, value in parts.items())


def cost(job: Job) -> Cost:
    """What a job may use, if it takes all of its time."""
    hours = seconds(job.time) / 3600
    gpus = 0 if job.gpu_option == "none" else job.gpus_per_node or 0
    return Cost(job.nodes, hours, job.nodes * hours, job.nodes * gpus * hours)


def check(
    job: Job,
    scheduler: Scheduler,
    partitions: Mapping[str, Partition],
    given: Collection[str] = (),
) -> Partition | None:
    """Judge whether the site can run a job.

    Args:
        job: after merge().
        scheduler: of the site.
        partitions: of the recipe, by name.
        given: fields that the command line set, for messages.

    Returns:
        The facts about the job's partition, where the recipe has them.

    Raises:
        UsageError: with the option or key, and what is possible.
    """
    dialect = DIALECTS[scheduler]
    refuse: Refuse = partial(_refusal, given)
    _check_fields(job, dialect, refuse)
    _check_required(job, refuse)
    if job.partition is None or not partitions:
        return None
    if job.partition not in partitions:
        raise refuse("partition", *_unknown(job.partition, partitions))
    partition = partitions[job.partition]
    _check_sizes(job, job.partition, partition, refuse)
    return partition


# From a field, what is wrong with it and what to do.
Refuse = Callable[[str, str, str], UsageError]
_LOWEST = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_node": 0}


def _refusal(given: Collection[str], field: str, message: str, remedy: str) -> UsageError:
    where = _option(field) if field in given else f"recipe: job.{field}"
    return UsageError(message, where=where, remedy=remedy)


def _check_fields(job: Job, dialect: Dialect, refuse: Refuse) -> None:
    for field, lowest in _LOWEST.items():
        number = getattr(job, field)
        if number is not None and number < lowest:
            raise refuse(field, f"{number} is too few", f"write {lowest} or more")
    if seconds(job.time) == 0:
        raise refuse("time", "a job needs some time", f"write {dialect.forms}")
    default = Job()
    for field, instead in dialect.lacks.items():
        if getattr(job, field) != getattr(default, field):
            raise refuse(field, f"{dialect.called} knows nothing of the kind", instead)


def _check_required(job: Job, refuse: Refuse) -> None:
    for field in job.requires:
        if field not in Job._fields:
            raise refuse(
                "requires", f"{field} is no key of a job", f"keys are {', '.join(Job._fields)}"
            )
        if getattr(job, field) in (None, "", {}):
            option = f"give {_option(field)}, or " if field in OPTIONS else ""
            raise refuse(
                field, f"this site takes no job without {field}",
                f"{option}set job.{field} in the recipe or a site file (or --set job.{field}=...)",
            )  # fmt: skip


def _check_sizes(job: Job, name: str, partition: Partition, refuse: Refuse) -> None:
    if (job.gpus_per_node or 0) > partition.gpus:
        has = f"{partition.gpus} GPUs" if partition.gpus else "no GPUs"
        raise refuse(
            "gpus_per_node", f"a node of {name} has {has}, {job.gpus_per_node} were asked for",
            f"ask for {partition.gpus} or fewer, or for another partition",
        )  # fmt: skip
    if partition.nodes is not None and job.nodes > partition.nodes:
        raise refuse(
            "nodes", f"{name} has {partition.nodes} nodes, {job.nodes} were asked for",
            f"ask for {partition.nodes} or fewer, or for another partition",
        )  # fmt: skip
    if partition.max_time and seconds(job.time) > seconds(partition.max_time):
        raise refuse(
            "time", f"a job in {name} may take {partition.max_time}, {job.time} was asked for",
            "ask for less time, and have the program write checkpoints",
        )  # fmt: skip
    if partition.cores is not None and job.ranks_per_node > partition.cores:
        raise refuse(
            "ranks_per_node",
            f"a node of {name} has {partition.cores} cores, {job.ranks_per_node} ranks were asked for",
            "one rank for each GPU is usual; without GPUs, at most one for each core",
        )  # fmt: skip
    asked = re.fullmatch(r"([0-9]+)G", job.memory or "")
    if asked and partition.memory_gb is not None and int(asked[1]) > partition.memory_gb:
        raise refuse(
            "memory",
            f"a node of {name} has {partition.memory_gb} GB, {job.memory} were asked for",
            "ask for less: what the system itself needs is not for jobs",
        )


def _unknown(name: str, partitions: Mapping[str, Partition]) -> tuple[str, str]:
    import difflib

    close = difflib.get_close_matches(name, partitions, 3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"there is no partition {name}", f"{hint}known are {', '.join(sorted(partitions))}"


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


# ---------------------------------------------------------------- what may stand in directives

_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_SIZE = r"[1-9][0-9]*[KMGT]?"
_FIELDS = {
    "name": _NAME,
    "memory": _SIZE,
    "output": r"[^-].*",
    "error": r"[^-].*",
    "attribute": _VARIABLE,
    "export": _VARIABLE,
}


def _check_words(dialect: Dialect, batch: BatchJob) -> None:
    """Refuse every value that would be more than one value in a directive."""
    job = batch.job
    values: list[tuple[str, str, str]] = [
        (name, name, value) for name, value in job._asdict().items() if isinstance(value, str)
    ]
    values += [("attributes", f"attributes.{key}", value) for key, value in job.attributes.items()]
    values += [("attribute", f"attributes.{key}", key) for key in job.attributes]
    values += [("export", "exports", name) for name in batch.exports]
    if batch.partition and batch.partition.gpu:
        values.append(("gpu", f"{job.partition}.gpu", batch.partition.gpu))
    for field, key, value in values:
        allowed = {**_FIELDS, "gpu": _NAME, **dialect.fields}.get(field, ".*")
        if not _WORD.fullmatch(value) or not re.fullmatch(allowed, value):
            table = "partitions" if field == "gpu" else "job"
            raise UsageError(
                f"{value!r} cannot be written for {dialect.called}",
                where=f"{table}.{key}",
                remedy="use letters, digits, dots, underscores and hyphens"
                + (f", as in the pattern {allowed}" if allowed != ".*" else ""),
            )


def _given(*pairs: tuple[str, object]) -> list[str]:
    """Options whose values are there, the option and its value as one text."""
    return [f"{option}{value}" for option, value in pairs if value is not None]


# ---------------------------------------------------------------- Slurm


def slurm(batch: BatchJob) -> list[str]:
    """#SBATCH lines."""
    job = batch.job
    return [
        *_given(
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
        *_slurm_gpus(batch),
        *(["--exclusive"] if job.exclusive else []),
    ]


def _slurm_gpus(batch: BatchJob) -> list[str]:
    count, option = batch.job.gpus_per_node, batch.job.gpu_option
    if not count or option == "none":
        return []
    kind = f"{batch.partition.gpu}:" if batch.partition and batch.partition.gpu else ""
    return [f"--gres=gpu:{kind}{count}" if option == "gres" else f"--gpus-per-node={kind}{count}"]


def _slurm_setup(job: Job) -> list[str]:
    lines = [
        "# srun passes on what it sees here, also after `sbatch --export=NONE`.",
        "export SLURM_EXPORT_ENV=ALL",
    ]
    if job.cpus_per_rank is not None:
        lines += [
            "# Since Slurm 22.05, srun does not take this over from sbatch.",
            'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        ]
    return lines


# ---------------------------------------------------------------- PBS


def pbs(batch: BatchJob) -> list[str]:
    """#PBS lines. Output is written while the job runs (-k doe), to be followed."""
    job = batch.job
    chunk = [
        str(job.nodes),
        *_given(
            ("ncpus=", job.cpus_per_rank and job.cpus_per_rank * job.ranks_per_node),
            ("ngpus=", job.gpus_per_node or None),
            # So often stands each host in the file of hosts.
            ("mpiprocs=", job.ranks_per_node if HOSTFILE in batch.launch else None),
            ("mem=", f"{job.memory.lower()}b" if job.memory else None),
            ("", job.select),
        ),
    ]
    place = job.place
    if job.exclusive and "excl" not in (place or ""):
        place = f"{place}:excl" if place else "excl"
    return [
        *_given(
            ("-N ", job.name),
            ("-l select=", ":".join(chunk)),
            ("-l place=", place),
            ("-l walltime=", _hours(job.time)),
            ("-q ", job.partition),
            ("-A ", job.account),
        ),
        *(f"-l {name}={value}" for name, value in job.attributes.items()),
        "-k doe",
        *_given(("-o ", job.output), ("-e ", job.error)),
        *([] if job.error else ["-j oe"]),
    ]


def _hours(time: str) -> str:
    total = seconds(time)
    return f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"


# ---------------------------------------------------------------- Cobalt


def cobalt(batch: BatchJob) -> list[str]:
    """#COBALT lines; they have to follow the first line of the script directly."""
    job = batch.job
    attributes = ":".join(f"{name}={value}" for name, value in job.attributes.items())
    output = "-o " if job.error else "-O "
    return _given(
        ("--jobname ", job.name),
        ("-n ", job.nodes),
        ("-t ", math.ceil(seconds(job.time) / 60)),
        ("-q ", job.partition),
        ("--attrs ", attributes or None),
        ("-A ", job.account),
        (output, job.output),
        ("-e ", job.error),
    )


# ---------------------------------------------------------------- LSF


def lsf(batch: BatchJob) -> list[str]:
    """#BSUB lines for sites that give whole nodes (-nnodes)."""
    job = batch.job
    minutes = math.ceil(seconds(job.time) / 60)
    flags = job.attributes.get("alloc_flags")
    return [
        *_given(
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


_ATTRIBUTES = "write it as the scheduler's own field: constraint, qos, comment"
_ONCE = "awk '!seen[$0]++'"

DIALECTS: Mapping[Scheduler, Dialect] = {
    "slurm": Dialect(
        "Slurm", "#SBATCH", slurm, "SLURM_JOB_ID", "hostfile",
        'scontrol show hostnames "$SLURM_JOB_NODELIST"',
        (r"(?P<m>[0-9]{1,6})", r"(?P<d>[0-9]{1,3})-(?P<h>[0-9]{1,2})(:(?P<m>[0-5][0-9]))?"),
        "minutes (90), hours:minutes:seconds (1:30:00) or days-hours:minutes:seconds (2-00:00:00)",
        {"memory": "0|" + _SIZE},
        {
            "attributes": _ATTRIBUTES,
            "select": "Slurm has constraint instead",
            "place": "Slurm has exclusive instead",
        },
        _slurm_setup,
    ),
    "pbs": Dialect(
        "PBS", "#PBS", pbs, "PBS_JOBID", "PBS_NODEFILE", f'{_ONCE} "$PBS_NODEFILE"', (),
        "hours:minutes:seconds (1:30:00)",
        {
            "name": r"[A-Za-z][A-Za-z0-9._+-]*",
            "attributes": r"[A-Za-z0-9_][A-Za-z0-9._:/@-]*",
            "select": r"[a-z_]+=[A-Za-z0-9._-]+(:[a-z_]+=[A-Za-z0-9._-]+)*",
            "place": r"(free|pack|scatter|vscatter)?:?(excl|shared|exclhost)?(:group=[a-z_]+)?",
        },
        {
            "qos": "PBS has queues: set job.partition",
            "reservation": "a reservation is a queue to PBS: set job.partition",
            "constraint": "write it as job.select (NAME=VALUE)",
            "comment": "leave it out",
        },
    ),
    "cobalt": Dialect(
        "Cobalt", "#COBALT", cobalt, "COBALT_JOBID", "COBALT_NODEFILE", f'{_ONCE} "$COBALT_NODEFILE"',
        (r"(?P<m>[0-9]{1,6})",), "minutes (90) or hours:minutes:seconds (1:30:00)",
        {"attributes": r"[A-Za-z0-9_][A-Za-z0-9._,/@-]*"},
        {
            "qos": "Cobalt has queues: set job.partition",
            "reservation": "a reservation is a queue to Cobalt: set job.partition",
            "constraint": "write it as one of job.attributes",
            "comment": "leave it out",
            "memory": "Cobalt gives whole nodes",
            "select": "write it as one of job.attributes",
            "place": "Cobalt gives whole nodes",
        },
    ),
    "lsf": Dialect(
        "LSF", "#BSUB", lsf, "LSB_JOBID", "LSB_DJOB_HOSTFILE",
        # The node that the script runs on stands in the file, and runs no ranks.
        """awk '!/^(batch|login)/ && !seen[$0]++' "$LSB_DJOB_HOSTFILE\"""",
        (r"(?P<h>[0-9]{1,3}):(?P<m>[0-5][0-9])",),
        "hours:minutes (1:30) or hours:minutes:seconds (1:30:00)",
        {"attribute": "alloc_flags", "attributes": r"[a-z0-9]+(,[a-z0-9]+)*"},
        {
            "qos": "LSF has queues: set job.partition",
            "constraint": "LSF gives whole nodes of a queue: set job.partition",
            "select": "set job.attributes.alloc_flags",
            "place": "LSF gives whole nodes",
        },
    ),
}  # fmt: skip

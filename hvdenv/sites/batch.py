"""Batch scripts: checks a job against its site, and writes its script. Data in, text out."""

import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.base.schema import Problem, decode, fields, nearest
from hvdenv.model import template
from hvdenv.model.cluster import JOB_OPTIONS, Job, Partition
from hvdenv.model.dialect import Dialect
from hvdenv.sites.status import EXIT_LINE, limited, number

# Words of a launcher's arguments that stand for the file with the job's hosts, for a list of
# the hosts with their slots such as n1:4,n2:4, for their names alone, and for the job's id.
HOSTFILE = "{hostfile}"
HOSTS = "{hosts}"
HOST_NAMES = "{host_names}"
JOB_ID = "{job}"

DURATION = re.compile(
    r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,3}):(?P<m>[0-5][0-9]):(?P<s>[0-5][0-9])"
)
TIME_FORMS = (
    "minutes (90), hours:minutes:seconds (1:30:00) or days-hours:minutes:seconds (2-00:00:00)"
)
# A command of hvdenv itself that runs in a job.
Purpose = Literal["build", "verify", "init"]

# A directive holds nothing else: no blank, quote, newline or comment sign, and nothing that an
# option could begin with.
_WORD = re.compile(r"[A-Za-z0-9_./%$@+][A-Za-z0-9._:/%$@+=,*&|!{}-]*")
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
# Fields of a job that a scheduler may have no directive for.
_OPTIONAL = (
    "partition",
    "account",
    "qos",
    "reservation",
    "constraint",
    "comment",
    "memory",
    "select",
    "parallel_environment",
)
# Of memory, in MB.
_UNITS = {"M": 1, "G": 1024, "T": 1024**2}
_PATTERNS = {
    "name": _NAME,
    "memory": r"[1-9][0-9]*[KMGT]?",
    "output": r"[^-].*",
    "error": r"[^-].*",
    "export": _VARIABLE,
    "gpu": _NAME,
}


class BatchJob(NamedTuple):
    """What a batch script does.

    Attributes:
        partition: facts about its nodes, if the recipe has them.
        activate: script that is sourced first; empty if there is nothing to activate.
        launch: the launcher and its arguments, in which HOSTFILE, HOSTS and HOST_NAMES may
            occur; empty if the command needs no launcher.
        exports: names of variables that the launcher passes on, whether they are set or not.
        log: file for all output; empty to leave the output to the scheduler.
        modules: shell commands that load modules, where no script does it.
        image: of the environment, which the command enters; empty without one.
    """

    job: Job
    partition: Partition | None = None
    activate: str = ""
    launch: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    folder: str = ""
    exports: tuple[str, ...] = ()
    log: str = ""
    modules: tuple[str, ...] = ()
    image: str = ""


class Cost(NamedTuple):
    """The most that a job is charged for."""

    nodes: int
    hours: float
    node_hours: float
    gpu_hours: float


def script(dialect: Dialect, batch: BatchJob) -> str:
    """The batch script of a job that was checked.

    Raises:
        UsageError: a value cannot be written as a directive of this scheduler.
    """
    with limited():
        _check_words(dialect, batch)
    lines = [
        "#!/bin/bash",
        *(f"{dialect.prefix} {each}" for each in directives(dialect, batch)),
        "",
    ]
    lines += [
        "# The last line of the output records the exit code.",
        f"trap 'echo \"{EXIT_LINE.format(id=f'${dialect.job_id}')} $?\"' EXIT",
        'fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }',
        *([f"exec >>{quote(batch.log)} 2>&1"] if batch.log else []),
        *_filled(dialect.setup, _values(batch)),
        f"cd -- {quote(batch.folder)} || fail {quote(f'cannot enter {batch.folder}')}",
    ]
    if batch.activate:
        failure = f"{batch.activate} did not activate the environment; is its file system there?"
        lines.append(f". {quote(batch.activate)} || fail {quote(failure)}")
    if batch.image:
        gone = f"{batch.image} was removed; write this script again: hvdenv job RECIPE"
        lines.append(f"[ -e {quote(batch.image)} ] || fail {quote(gone)}")
    if batch.modules:
        lines += ["hvdenv_modules() {", *batch.modules, "}"]
        lines.append("hvdenv_modules || fail 'the modules could not be loaded'")
    # Open MPI warns about variables to pass on that are unset.
    passed = [name for name in batch.exports if name in batch.launch and name != "PATH"]
    lines += [f'export {name}="${{{name}-}}"' for name in passed]
    exports = [f"export {name}={quote(value)}" for name, value in batch.env]
    lines += [line for line in exports if line not in lines]
    slots = f" | sed 's/$/:{batch.job.ranks_per_node}/'" if HOSTS in batch.launch else ""
    if slots or HOST_NAMES in batch.launch:
        lines.append(f"hosts=$({dialect.list_hosts}{slots} | paste -sd, -)")
    words = [_launch_word(dialect, word) for word in batch.launch]
    return "\n".join([*lines, "", " ".join([*words, *map(quote, batch.command)]), ""])


def directives(dialect: Dialect, batch: BatchJob) -> list[str]:
    return [*_filled(dialect.directives, _values(batch)), *batch.job.directives]


def _filled(templates: Iterable[str], values: template.Values) -> list[str]:
    """Templates that have all their values."""
    found = (template.text(each, values) for each in templates)
    return [each for each in found if each is not None]


def _values(batch: BatchJob) -> template.Values:
    job, partition = batch.job, batch.partition
    total = seconds(job.time)
    minutes, each = math.ceil(total / 60), job.cpus_per_rank
    gpus = job.gpus_per_node if job.gpu_option != "none" else None
    ranks = job.nodes * job.ranks_per_node
    return {
        **job._asdict(),
        "exclusive": "" if job.exclusive else None,
        "ranks": ranks,
        "cpus": ranks * (each or 1),
        "cpus_per_node": each and each * job.ranks_per_node,
        "gpus_per_node": gpus or None,
        "gpus": (gpus and gpus * job.nodes) or None,
        "gpu": partition.gpu if partition else None,
        "hostfile": "" if HOSTFILE in batch.launch else None,
        "hhmmss": f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}",
        "hhmm": f"{minutes // 60}:{minutes % 60:02}",
        "minutes": minutes,
        "seconds": total,
    }


def _launch_word(dialect: Dialect, word: str) -> str:
    variables = {HOSTFILE: dialect.hostfile, JOB_ID: dialect.job_id, HOSTS: "hosts"}
    variable = variables.get(HOSTS if word == HOST_NAMES else word)
    return f'"${variable}"' if variable else quote(word)


def quote(word: str) -> str:
    """A word for bash, on one line, so that no part of it can be read as a directive."""
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", word) is None:
        return shlex.quote(word)
    text = ""
    for byte in os.fsencode(word):
        character = chr(byte)
        text += character if re.match(r"[A-Za-z0-9 ._/:=,+@%-]", character) else f"\\x{byte:02x}"
    return f"$'{text}'"


def merge(job: Job, given: Mapping[str, object]) -> Job:
    """A recipe's job with the values of options, by field; None where one was not given.

    Raises:
        UsageError: a value does not fit its field; the option is named.
    """
    kinds = fields(Job)
    values = {name: value for name, value in given.items() if value is not None}
    if "time" in values:
        values["time"] = read_time(str(values["time"]))
    for name, value in values.items():
        try:
            decode(kinds[name], value)
        except Problem as problem:
            raise UsageError(problem.message, where=_option(name)) from problem
    one_each = job.gpus_per_node == job.ranks_per_node
    if one_each and "ranks_per_node" in values:
        values.setdefault("gpus_per_node", values["ranks_per_node"])
    return job._replace(**values)  # type: ignore[arg-type]


def read_time(text: str) -> str:
    """A wall time as the user writes it, in the form that recipes have.

    Raises:
        UsageError: it has none of the forms, is 0 or is longer than 999 days.
    """
    found = DURATION.fullmatch(text)
    total = _total(found) if found else 60 * number(text)
    days, rest = divmod(total, 86400)
    if not 0 < total < 1000 * 86400:
        raise UsageError(f"{text!r} is not a time", where="--time", remedy=f"write {TIME_FORMS}")
    head = f"{days}-" if days else ""
    return f"{head}{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def seconds(time: str) -> int:
    """The seconds of a wall time of a recipe."""
    found = DURATION.fullmatch(time)
    if not found:
        raise UsageError(
            f"{time!r} is not a time", where="job.time", remedy="write a time such as 24:00:00"
        )
    return _total(found)


def _total(found: re.Match[str]) -> int:
    """The sum of the groups d, h, m and s."""
    sizes = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(sizes[name] * number(value) for name, value in found.groupdict("0").items())


def own_job(job: Job, purpose: Purpose) -> Job:
    """The job of a command with ``--where compute``, whose output hvdenv keeps."""
    values: dict[str, Any] = {"nodes": 1}
    if purpose == "verify":
        values = {"nodes": min(job.nodes, 2), "time": "00:30:00"}
    values |= _stated(job, purpose)[1]
    return job._replace(**values, name=f"hvdenv-{purpose}", output="/dev/null", error="/dev/null")


def own_where(job: Job, purpose: Purpose, where: Callable[[str], str]) -> Callable[[str], str]:
    """The place of each key of that job: in ``job.build`` or ``job.verify``, if it is stated there."""
    table, stated = _stated(job, purpose)

    def place(key: str) -> str:
        field = key.removeprefix("job.")
        return where(f"job.{table}.{field}" if field in stated else key)

    return place


def _stated(job: Job, purpose: Purpose) -> tuple[str, dict[str, Any]]:
    """The table below ``job`` that is about that job, and what the recipe states in it."""
    table = "build" if purpose == "build" else "verify"
    given = getattr(job, table)
    stated = given._asdict() if given else {}
    return table, {name: value for name, value in stated.items() if value is not None}


def cost(job: Job) -> Cost:
    hours = seconds(job.time) / 3600
    gpus = 0 if job.gpu_option == "none" else job.gpus_per_node or 0
    return Cost(job.nodes, hours, job.nodes * hours, job.nodes * gpus * hours)


def charged(job: Job) -> str:
    """The most that a job uses: ``2 nodes for 8:00:00, up to 16 node-hours``."""
    used = cost(job)
    text = f"{counted(used.nodes, 'node')} for {job.time}, up to"
    text += f" {counted(used.node_hours, 'node-hour')}"
    text += f" and {counted(used.gpu_hours, 'GPU-hour')}" if used.gpu_hours else ""
    added = ", ".join(job.directives)
    return f"{text}; job.directives may change that ({added})" if added else text


def counted(number: float, unit: str) -> str:
    """A number with its unit: ``1 node``, ``0.5 node-hours``."""
    text = f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
    return f"{text} {unit}{'' if text == '1' else 's'}"


def check(
    job: Job,
    dialect: Dialect,
    partitions: Mapping[str, Partition],
    given: Collection[str] = (),
    where: Callable[[str], str] = "recipe: {}".format,
) -> Partition | None:
    """The facts about a job's partition, if the recipe has them; see refusals().

    Raises:
        UsageError: the site cannot run the job, with all reasons.
    """
    if wrong := [*refusals(job, dialect, partitions, given, where)]:
        first, *others = wrong
        further = "".join(f"\n{each}" for each in others)
        raise UsageError(first.message, where=first.where, remedy=f"{first.remedy}{further}")
    return partitions.get(job.partition or "")


def refusals(
    job: Job,
    dialect: Dialect,
    partitions: Mapping[str, Partition],
    given: Collection[str] = (),
    where: Callable[[str], str] = "recipe: {}".format,
) -> Iterator[UsageError]:
    """Every reason why a site cannot run a job: the option or key, and what is possible."""
    for field, message, remedy in (
        *_wrong_values(job, dialect),
        *_lacking(job),
        *_wrong_partition(job, partitions),
    ):
        place = _option(field) if field in given else where(f"job.{field}")
        yield UsageError(message, where=place, remedy=remedy)


# A field, what is wrong with it, and what to do.
_Reason = tuple[str, str, str]
_LOWEST = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_node": 0}


def _wrong_values(job: Job, dialect: Dialect) -> Iterator[_Reason]:
    for field, lowest in _LOWEST.items():
        number = getattr(job, field)
        if number is not None and number < lowest:
            yield field, f"{number} is too few", f"write {lowest} or more"
    if seconds(job.time) == 0:
        yield "time", "the time of a job must not be 0", f"write {TIME_FORMS}"
    default = Job()
    used = {use.name for each in dialect.directives for use in template.uses(each)}
    unused = {field: "omit it" for field in _OPTIONAL if field not in used}
    for field, instead in {**unused, **dialect.unsupported}.items():
        if getattr(job, field) != getattr(default, field):
            yield field, f"{dialect.label} does not support {field}", instead
    # Only a parallel environment gives a job several slots, and the hosts to launchers.
    needs = any("{parallel_environment}" in each for each in dialect.directives)
    if needs and not job.parallel_environment and job.nodes * job.ranks_per_node > 1:
        message = f"{dialect.label} gives a job one slot without a parallel environment"
        yield "parallel_environment", message, "set it: `qconf -spl` lists those of the site"


def _lacking(job: Job) -> Iterator[_Reason]:
    for field in job.requires:
        if field not in Job._fields:
            keys = f"the keys are {', '.join(Job._fields)}"
            yield "requires", f"{field} is not a key of [job]", keys
        elif getattr(job, field) in (None, ""):
            option = f"give {_option(field)}, or " if field in JOB_OPTIONS else ""
            yield (
                field,
                f"this site requires {field} for every job",
                f"{option}set job.{field} in the recipe or a site file (or --set job.{field}=...)",
            )


def _gigabytes(memory: str) -> int:
    """Rounded up; 0 for a size with another unit, or none."""
    number, unit = memory[:-1], memory[-1:]
    return -(-int(number) * _UNITS[unit] // 1024) if unit in _UNITS else 0


def _wrong_partition(job: Job, partitions: Mapping[str, Partition]) -> Iterator[_Reason]:
    name = job.partition or ""
    partition = partitions.get(name)
    if name and partitions and not partition:
        message = f"there is no partition {name}{nearest(name, partitions)}"
        yield "partition", message, f"known partitions: {', '.join(sorted(partitions))}"
    if not partition:
        return
    time, fewer = partition.max_time, "request less time, and have the program write checkpoints"
    if time and seconds(job.time) > seconds(time):
        yield "time", f"the time limit of {name} is {time}, requested: {job.time}", fewer
    cores = job.ranks_per_node * (job.cpus_per_rank or 1)
    node = f"a node of {name}"
    for field, what, most, requested, unit in (
        ("nodes", name, partition.nodes, job.nodes, "nodes"),
        ("gpus_per_node", node, partition.gpus, job.gpus_per_node or 0, "GPUs"),
        ("memory", node, partition.memory_gb, _gigabytes(job.memory or ""), "GB"),
        (
            "cpus_per_rank" if job.cpus_per_rank else "ranks_per_node",
            *(node, partition.cores, cores, "cores"),
        ),
    ):
        if most is not None and requested > most:
            message = f"{what} has {most or 'no'} {unit}, requested: {requested}"
            yield (
                field,
                message,
                f"request {f'{most} {unit} or fewer, or ' if most else ''}another partition",
            )


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _check_words(dialect: Dialect, batch: BatchJob) -> None:
    """Refuse every value that would be more than one value in a directive."""
    job = batch.job
    values: list[tuple[str, str, str]] = [
        (name, name, value) for name, value in job._asdict().items() if isinstance(value, str)
    ]
    values += [("export", "exports", name) for name in batch.exports]
    if batch.partition and batch.partition.gpu:
        values.append(("gpu", f"{job.partition}.gpu", batch.partition.gpu))
    for field, key, value in values:
        allowed = {**_PATTERNS, **dialect.patterns}.get(field, ".*")
        if not _WORD.fullmatch(value) or not re.fullmatch(allowed, value):
            table = "partitions" if field == "gpu" else "job"
            remedy = "use letters, digits, dots, underscores and hyphens"
            if (marks := dialect.query.placeholders) and field in ("output", "error"):
                remedy += f"; {dialect.label} replaces {' and '.join(marks)}"
            elif allowed != ".*":
                remedy += f", as in the pattern {allowed}"
            raise UsageError(
                f"{value!r} cannot be written for {dialect.label}",
                where=f"{table}.{key}",
                remedy=remedy,
            )

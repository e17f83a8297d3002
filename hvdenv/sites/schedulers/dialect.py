"""What hvdenv has to know about a scheduler, and the types that all schedulers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from hvdenv.errors import UsageError
from hvdenv.model.cluster import Job, Partition, Scheduler
from hvdenv.sites.hosts import Host

# Words of a launcher's arguments that stand for the file with the job's hosts, for a list of
# the hosts with their slots such as n1:4,n2:4, and for their names alone.
HOSTFILE = "{hostfile}"
HOSTS = "{hosts}"
HOST_NAMES = "{host_names}"

SIZE = r"[1-9][0-9]*[KMGT]?"
DURATION = re.compile(
    r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,3}):(?P<m>[0-5][0-9]):(?P<s>[0-5][0-9])"
)

State = Literal[
    "waiting", "running", "completed", "failed", "timeout", "cancelled", "node failure",
    "out of memory", "preempted", "gone",
]  # fmt: skip


class BatchJob(NamedTuple):
    """What a batch script does.

    Attributes:
        job: the resources to request.
        partition: facts about its nodes, if the recipe has them.
        activate: script that is sourced first; empty if there is nothing to activate.
        launch: the launcher and its arguments, in which HOSTFILE, HOSTS and HOST_NAMES may
            occur; empty if the command needs no launcher.
        env: variables for the launcher and the ranks.
        command: what each rank runs.
        folder: its working folder.
        exports: names of variables that the launcher passes on, whether they are set or not.
        log: file for all output; empty to leave the output to the scheduler.
        modules: shell commands that load modules, where no script does it.
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


class Status(NamedTuple):
    """What a scheduler reports about a job.

    Attributes:
        state: ``gone`` if the scheduler does not know the job, or no longer knows it.
        reason: why it waits or ended, in the scheduler's words; may be empty.
        exit_code: of a job that has ended, if known; 128 and the signal's number if a
            signal ended it.
        outputs: the files that its output goes to.
        hosts: where it runs, as the scheduler writes it.
        name: the job's name, if the scheduler reports it.
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


class Allocation(NamedTuple):
    """The resources of the job that this process runs in.

    Attributes:
        scheduler: None outside of any job.
        job: its id.
        hosts: in the order of the scheduler, as far as it names them; slots are the ranks
            that were requested on each, 0 if unknown.
        nodes: how many hosts.
        hostfile: a file with exactly these hosts.
        tasks: what the scheduler counts on each host, even if nothing was requested.
        cpus: processors on each host; empty if unknown.
        cpus_per_rank: as requested; 0 if it was not.
        gpus_per_node: 0 if unknown.
        nested: whether this process is a job step, which holds the cores.
    """

    scheduler: Scheduler | None = None
    job: str = ""
    hosts: tuple[Host, ...] = ()
    nodes: int = 0
    hostfile: str = ""
    tasks: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    cpus_per_rank: int = 0
    gpus_per_node: int = 0
    nested: bool = False


class Dialect(NamedTuple):
    """All that hvdenv knows about one scheduler.

    Command lines are tuples of words. ``{id}``, ``{script}``, ``{file}`` and ``{folder}``
    stand for whole words. See fill().

    Attributes:
        label: its name for people.
        prefix: what a directive begins with.
        directives: the directives of a job, without the prefix.
        setup: lines of the script before everything else.
        patterns: regular expressions for the values of fields.
        unsupported: fields that it has no option for, and what to do instead.
        times: accepted forms of a wall time besides those of recipes: regular expressions
            with the groups d, h, m and s.
        time_forms: all accepted forms, for people.
        job_id: variable with the id of the job.
        variables: prefixes of the variables that it sets in a job.
        hosts: shell command that prints each host of the job once.
        hostfile: variable with the path of a file that lists the hosts; empty if there is none.
        launch_host: names of hosts in that file that run the script and no ranks.
        node_count: variable with the number of hosts, where there may be no such file.
        allocation: reads the variables of a job, for schedulers without a file of hosts.
        counts_tasks: whether the slots of a host are requested ranks, and not processors.
        program: the program that submits jobs.
        submit: submits ``{script}``.
        submitted: matches what that prints; its group ``id`` is the job's id.
        query: asks for the state of job ``{id}``.
        parse_query: reads the answer; None if the text is not an answer.
        history: asks for a job that the scheduler has forgotten.
        parse_history: reads that answer.
        cancel: cancels job ``{id}``.
        unreachable: what its programs print if no server answers.
        waiting: explanations of reasons to wait.
        hopeless: explanations of reasons for which a job can never start.
        interactive: requests an allocation. ``{options}`` are the directives, ``{program}``
            are the words of a program to run, ``{command}`` is the program as one word. Without
            either, the scheduler starts the login shell.
        batch_only: prefixes of directives that an interactive job does not have.
        broadcast: commands in a job that copy ``{file}`` in ``{folder}`` to all of its hosts.
    """

    label: str
    prefix: str
    directives: Callable[[BatchJob], list[str]]
    time_forms: str
    job_id: str
    variables: tuple[str, ...]
    hosts: str
    program: str
    submit: tuple[str, ...]
    submitted: str
    query: tuple[str, ...]
    parse_query: Callable[[str], Status | None]
    cancel: tuple[str, ...]
    unreachable: tuple[str, ...]
    interactive: tuple[str, ...]
    setup: Callable[[Job], list[str]] = lambda job: []
    patterns: Mapping[str, str] = {}
    unsupported: Mapping[str, str] = {}
    times: tuple[str, ...] = ()
    hostfile: str = ""
    launch_host: str = ""
    node_count: str = ""
    allocation: Callable[[Mapping[str, str]], Allocation] | None = None
    counts_tasks: bool = False
    history: tuple[str, ...] = ()
    parse_history: Callable[[str], Status | None] = lambda text: None
    waiting: Mapping[str, str] = {}
    hopeless: Mapping[str, str] = {}
    batch_only: tuple[str, ...] = ()
    broadcast: tuple[tuple[str, ...], ...] = ()


def fill(words: tuple[str, ...], **values: str) -> tuple[str, ...]:
    """A command line of a dialect with values in place of its ``{name}`` words."""
    filled = {f"{{{name}}}": value for name, value in values.items()}
    return tuple(filled.get(word, word) for word in words)


def options(*pairs: tuple[str, object]) -> list[str]:
    """Options that have a value, each with its value as one text."""
    return [f"{option}{value}" for option, value in pairs if value is not None]


def seconds(time: str) -> int:
    """The seconds of a wall time of a recipe."""
    found = DURATION.fullmatch(time)
    if not found:
        raise UsageError(f"{time!r} is not a time such as 24:00:00", where="job.time")
    return total_seconds(found)


def total_seconds(found: re.Match[str]) -> int:
    """The sum of the groups d, h, m and s."""
    sizes = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(sizes[name] * int(value) for name, value in found.groupdict("0").items())


def number(text: str) -> int:
    """A number in a variable; 0 if it is anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) else 0


def visible_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs the scheduler made visible in CUDA_VISIBLE_DEVICES."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([one for one in visible.split(",") if re.fullmatch(r"[0-9]+|(GPU|MIG)-.+", one)])

"""What hvdenv has to know about a scheduler: data, in schedulers/*.toml and in site files."""

import re
from collections.abc import Iterator, Mapping
from functools import cache, partial, reduce
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar, get_args

from hvdenv.base.reading import RECIPE, read_file
from hvdenv.base.schema import ANY, Pattern, Problem, decode, parse_toml
from hvdenv.model import template

# Cobalt sets variables of PBS as well, so that it comes first.
Shipped = Literal["slurm", "cobalt", "pbs", "lsf", "gridengine"]
SHIPPED: tuple[str, ...] = get_args(Shipped)
State = Literal[
    "waiting",
    "running",
    "completed",
    "failed",
    "timeout",
    "cancelled",
    "node failure",
    "out of memory",
    "preempted",
    "gone",
]
# A job that has ended, in a way that only its exit code tells.
AnyState = Literal[State, "ended"]
Variable = Annotated[
    str, Pattern(r"([A-Za-z_][A-Za-z0-9_]*)?", "the name of an environment variable")
]


def _regex(group: str = "") -> Pattern:
    """A regular expression, with a group of this name."""

    def problem(text: str) -> str:
        try:
            known = re.compile(text.replace("{id}", "1")).groupindex
        except (re.error, OverflowError, RecursionError) as error:
            return f"not a regular expression: {error}"
        lacks = group and text and group not in known
        return f"the pattern needs a group (?P<{group}>...)" if lacks else ""

    return Pattern(ANY, "a regular expression", problem)


def _command(*known: str) -> Pattern:
    """The template of a command line with these fields."""

    def problem(text: str) -> str:
        if any(use.name == "cluster" and use.required for use in template.uses(text)):
            return "a job may have no cluster: write [[ -M {cluster}]], with the option's name"
        return template.problem(text, known, words=True)

    return Pattern(ANY, "a command line", problem)


def _problem_of_setup(text: str) -> str:
    if all(use.test for use in template.uses(text)):
        return ""
    return "a line of the script cannot have fields; use shell variables"


# Fields of directives: those of a job, and what is computed from them.
OF_JOBS = (
    "partition", "nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "gpu_option", "name",
    "account", "qos", "reservation", "constraint", "comment", "memory", "exclusive", "output",
    "error", "select", "parallel_environment", "ranks", "cpus", "cpus_per_node", "gpus", "gpu", "hostfile", "time",
    "hhmmss", "hhmm", "minutes", "seconds",
)  # fmt: skip
Regex = Annotated[str, _regex()]
OfJob = Annotated[str, _command("id", "cluster")]
Directive = Annotated[str, Pattern(ANY, "a directive", partial(template.problem, known=OF_JOBS))]


class JobQuery(NamedTuple):
    """How to ask about a job, and how to read the answer.

    Regular expressions are searched line by line (``^`` and ``$`` match at line breaks); ``{id}``
    in them is the job's id. Where several are listed, the first that matches counts.

    Attributes:
        command: the question; its fields are ``{id}`` and ``{cluster}``.
        unknown: matches if the scheduler does not know the job, or no longer knows it.
        state: the word for the state, in the group.
        states: what these words mean; ``ended`` if only the exit code tells.
        other: what other words mean (default: the text is no answer).
        reason: why it waits or ended; several groups are joined.
        ends: states by the beginning of the reason, for jobs that failed.
        exit_code: groups ``code`` and, if a signal is reported on its own, ``signal``.
        codes: states by exit codes that are not those of programs.
        negative: the state of a job with another negative exit code.
        name: the job's name.
        hosts: where it runs; all matches count.
        hosts_in: the part of the text in which to search for them (default: all of it).
        outputs: the files that its output goes to; each pattern is one file.
        directory: the one of those that have no absolute path.
        placeholders: what stands for ``{id}`` and ``{name}`` in the names of these files.
        escaped: whether texts are escaped as in JSON.
        folded: whether a line that begins with a tab continues the one before.
    """

    command: OfJob = ""
    unknown: Regex = ""
    state: Regex = ""
    states: dict[str, AnyState] = {}
    other: AnyState | None = None
    reason: tuple[Regex, ...] = ()
    ends: dict[str, State] = {}
    exit_code: Annotated[str, _regex("code")] = ""
    codes: dict[str, State] = {}
    negative: State | None = None
    name: Regex = ""
    hosts: Regex = ""
    hosts_in: Regex = ""
    outputs: tuple[Regex, ...] = ()
    directory: Regex = ""
    placeholders: dict[str, str] = {}
    escaped: bool = False
    folded: bool = False


class Dialect(NamedTuple):
    """A scheduler.

    Command lines and directives are templates (docs/how-to/add-a-scheduler.md).

    Attributes:
        like: the scheduler whose values hold for the keys that are not set here.
        label: its name for people.
        prefix: what a directive begins with, such as ``#SBATCH``.
        directives: templates of directives. One that lacks a value is omitted.
        setup: lines of the script before everything else. No value can be in them.
        patterns: regular expressions for the values of fields of a job.
        unsupported: fields of a job that it has no option for, and what to do instead.
        job_id: variable with the id of the job.
        marker: another variable that it always sets in a job, if others set job_id as well.
        variables: prefixes of the variables that it sets in a job.
        hosts: shell command that prints each host of the job once (default: the first column
            of the file of hosts).
        hostfile: variable with the path of a file that lists the hosts; empty if there is none.
        columns: whether a line of that file is ``HOST SLOTS ...``, which no launcher reads.
        launch_host: names of hosts in that file that run the script and no ranks.
        node_count: variable with the number of hosts, where there may be no such file.
        counts_tasks: whether the slots of a host are requested ranks, and not processors.
        program: the program that submits jobs.
        submit: submits ``{script}``.
        submitted: matches what that prints; the groups are ``id`` and perhaps ``cluster``.
        query: asks for the state of a job.
        history: asks for a job that the scheduler has forgotten.
        cancel: cancels job ``{id}``.
        unreachable: what its programs print if no server answers.
        waiting: explanations of reasons to wait.
        hopeless: explanations of reasons for which a job can never start.
        interactive: requests an allocation. ``{options}`` are the directives, ``{program}``
            are the words of a program to run, ``{command}`` is the program as one word. Without
            either, the scheduler starts the login shell.
        batch_only: prefixes of directives that an interactive job does not have.
    """

    like: Shipped | None = None
    label: str = ""
    prefix: Annotated[str, Pattern(r"(#[A-Za-z$@#:-]{1,20})?", "a prefix such as #SBATCH")] = ""
    directives: tuple[Directive, ...] = ()
    setup: tuple[Annotated[str, Pattern(ANY, "a line of sh", _problem_of_setup)], ...] = ()
    patterns: dict[str, Regex] = {}
    unsupported: dict[str, str] = {}
    job_id: Variable = ""
    marker: Variable = ""
    variables: tuple[Variable, ...] = ()
    hosts: str = ""
    hostfile: Variable = ""
    columns: bool = False
    launch_host: Regex = ""
    node_count: Variable = ""
    counts_tasks: bool = False
    program: str = ""
    submit: Annotated[str, _command("script")] = ""
    submitted: Annotated[str, _regex("id")] = ""
    query: JobQuery = JobQuery()
    history: JobQuery = JobQuery()
    cancel: OfJob = ""
    unreachable: tuple[str, ...] = ()
    waiting: dict[str, str] = {}
    hopeless: dict[str, str] = {}
    interactive: Annotated[str, _command("options", "program", "command")] = ""
    batch_only: tuple[str, ...] = ()

    @property
    def list_hosts(self) -> str:
        """The shell command that prints each host of a job once."""
        return self.hosts or f"""awk '!seen[$1]++ {{print $1}}' "${self.hostfile}\""""

    @property
    def runs_programs(self) -> bool:
        """Whether an interactive job runs a program, and not the user's login shell."""
        return any(word in self.interactive for word in ("{program}", "{command}"))


_REQUIRED = (
    "label",
    "prefix",
    "directives",
    "job_id",
    "program",
    "submit",
    "submitted",
    "cancel",
    "query.command",
    "query.state",
    "query.states",
)


@cache
def shipped() -> Mapping[str, Dialect]:
    folder = Path(__file__).parent / "schedulers"
    return {
        name: decode(
            Dialect, parse_toml(read_file(folder / f"{name}.toml", RECIPE).text), lenient=True
        )
        for name in SHIPPED
    }


def job_variables() -> tuple[str, ...]:
    """The variables with the id of a job, of all schedulers that hvdenv has."""
    return tuple(dialect.job_id for dialect in shipped().values())


def job_id(environ: Mapping[str, str]) -> str:
    """The id of the job of a process with these variables; empty outside of a job."""
    return next((environ[name] for name in job_variables() if environ.get(name)), "")


def with_own(own: Mapping[str, Dialect]) -> dict[str, Dialect]:
    """All schedulers: those of a recipe or site file, which come first, and those of hvdenv."""
    return {**{name: _whole(each) for name, each in own.items()}, **shipped()}


def _whole(own: Dialect) -> Dialect:
    base = shipped()[own.like] if own.like else Dialect()
    query = _over(base.query, own.query)
    history = _over(base.history, own.history)
    return _over(base, own)._replace(query=query, history=history)


_Table = TypeVar("_Table", JobQuery, Dialect)


def _over(base: _Table, own: _Table) -> _Table:
    """The values of a table where they are set, and those of another table elsewhere."""
    default = type(own)()
    changed = {
        name: value for name, value in own._asdict().items() if value != getattr(default, name)
    }
    return base._replace(**changed)


def problems(own: Mapping[str, Dialect]) -> Iterator[Problem]:
    for name, each in own.items():
        path = ("schedulers", name)
        if name in SHIPPED:
            yield Problem(path, f"hvdenv has a scheduler {name}: give this one another name")
            continue
        for key in (required.split(".") for required in _REQUIRED):
            if not reduce(getattr, key, _whole(each)):
                message = 'this key is required and missing (like = "slurm" takes it from there)'
                yield Problem((*path, *key), message)

"""Reads the options of batch systems, in directives and on command lines, into [job]."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from hvdenv.drafting.options import Option, split, tables
from hvdenv.drafting.page import Page
from hvdenv.drafting.shell import UNKNOWN, Statement
from hvdenv.drafting.values import COMMAND, INFERRED, OPEN, Left, Origin, Read, Value, at, leave
from hvdenv.errors import UsageError
from hvdenv.model.dialect import shipped
from hvdenv.sites.batch import read_time

# A scheduler that differs from the shipped one, and how: groups that pay, types of nodes instead of
# slots and a list of hosts (Grid Engine at ABCI and TSUBAME); sizes of the whole job (PBS at Gadi);
# slots instead of whole nodes (LSF).
_SITE = ("schedulers", "site")
_AS_SHIPPED = Origin("hvdenv's directives for this kind of scheduler")
# By the beginning of the shipped directive.
_DIFFERENT: dict[str, dict[str, tuple[str, ...]]] = {
    "group": {"-P ": ("-g {account}",)},
    "node_type": {"-q ": ("-l {partition}={nodes}",), "-pe ": ()},
    "hostfile": {},
    "project": {"-A ": ("-P {account}",)},
    "totals": {
        "-l select=": ("-l ncpus={cpus}", "-l ngpus={gpus}"),
        "{!exclusive}-l place": (),
        "{?exclusive}-l place": (),
    },
    "slots": {"-nnodes ": ("-n {ranks}", "-R span[ptile={ranks_per_node}]")},
}
# Types of nodes that are requested by number: rt_F=2 at ABCI, f_node=2 at TSUBAME.
_NODE_TYPE = re.compile(r"rt_[A-Za-z]+(?:\.[a-z]+)?|[a-z]+_node|node_[a-z]+")
_OF_ONE_JOB = "it belongs to one job, not to every job of the recipe"
_NQSV = re.compile(r"#PBS\s+(?:-[bT]\s|-l\s.*\belapstim_req=)")
_UNSUPPORTED = {"#PJM": "PJM of Fujitsu", "#MSUB": "Moab"}
# Programs that request allocations. qsub belongs to several batch systems.
_SLURM_REQUESTS = ("salloc", "sbatch", "sinteractive")
REQUESTS = {**dict.fromkeys(_SLURM_REQUESTS, "slurm"), "bsub": "lsf", "qsub": ""}


class Field(NamedTuple):
    """An option with its meaning."""

    statement: Statement
    field: str
    value: str


def directive(statement: Statement, page: Page) -> Iterator[Field | Read]:
    scheduler = find_scheduler(statement, page)
    if not scheduler:
        return
    page.scheduler = scheduler
    yield Value(at("scheduler"), scheduler)
    # A comment follows after " #"; within a word, # is a character.
    text = re.split(r"\s#", statement.origin.text.partition(" ")[2])[0]
    try:
        yield from option_fields(statement, shlex.split(text), scheduler)
    except ValueError:
        yield leave("its quotes do not match")


def find_scheduler(statement: Statement, page: Page) -> str:
    """The batch system that a directive or a command is for; empty if it is not known."""
    if not statement.directive:
        named = REQUESTS.get(statement.program, "slurm" if statement.program == "srun" else None)
        if named == "":  # options tell whose qsub it is, or else the rest of the page
            return _qsub_system(statement.words) or page.scheduler
        return named or page.scheduler
    text = statement.origin.text
    found = (name for name, each in shipped().items() if text.startswith(f"{each.prefix} "))
    return next(found, "")


def _qsub_system(words: Sequence[str]) -> str:
    """qsub belongs to several batch systems: options tell which."""
    if any(word.startswith(("select=", "nodes=", "walltime=", "ncpus=")) for word in words):
        return "pbs"
    return "gridengine" if {"-pe", "-g"} & {*words} else "cobalt" if "-n" in words else ""


def unsupported(statements: Iterable[Statement]) -> str:
    """The name of a batch system that hvdenv does not support; empty if it does."""
    texts = [each.origin.text for each in statements if each.directive]
    if any(map(_NQSV.match, texts)):
        return "NQSV of NEC"
    words = (text.split()[0] for text in texts)
    return next((_UNSUPPORTED[word] for word in words if word in _UNSUPPORTED), "")


def option_fields(
    statement: Statement, words: Sequence[str], scheduler: str
) -> Iterator[Field | Left]:
    table = tables()[scheduler]
    # An unknown option may be followed by its value.
    unknown = [
        word
        for word, following in pairwise(words)
        if word.startswith("-") and word not in table and not following.startswith("-")
    ]
    options = split(words, {**table, **dict.fromkeys(unknown, Option("", 1))})
    for option, value in options.given:
        meaning = table[option].meaning if option in table else ""
        if value.startswith("depend="):  # -W of PBS has other values as well
            meaning = _OF_ONE_JOB
        if " " in meaning:
            told = f"{option}: {meaning}" if len(options.given) > 1 else meaning
            yield leave(told, understood=not meaning.endswith("?"))
        elif meaning:
            if meaning == "name" and "[" in value:  # an array of LSF: name[1-10]
                value = value.partition("[")[0]
                yield leave(_OF_ONE_JOB)
            yield Field(statement, meaning, value)
        elif statement.directive and value:
            joint, quote = "=" if option.startswith("--") else " ", '"' if " " in value else ""
            yield Field(statement, "directive", f"{option}{joint}{quote}{value}{quote}")
        else:
            yield leave(f"{option} has no key in a recipe")


# Numbers of ranks that are not those of the allocation.
_COMPUTED = re.compile(
    rf"{UNKNOWN}|\$(?!SLURM_NTASKS|SLURM_NPROCS|NSLOTS|PBS_NP\b|LSB_DJOB_NUMPROC)"
)


def job_values(fields: Sequence[Field], page: Page) -> Iterator[tuple[Statement, Read]]:
    """What the options of one job mean together, each with the line that it comes from."""
    scheduler = find_scheduler(fields[0].statement, page)
    known = [part for each in fields for part in _parts(each, scheduler)]
    computed = [each for each in known if each.field == "ranks" and _COMPUTED.search(each.value)]
    known = [each for each in known if each.field not in LAUNCHER_FIELDS or each.value.isdigit()]
    if scheduler == "pbs" and not any(each.field in ("nodes", "select") for each in known):
        known = [each._replace(field=_JOB_TOTALS.get(each.field, each.field)) for each in known]
    size = _size(known)
    for each in known:
        reads = _value(each, scheduler, size)
        # Without a scheduler, hvdenv writes no job.
        yield from ((each.statement, read) for read in reads if scheduler or not _is_open(read))
    if computed and scheduler and not size.ranks:
        yield from ((computed[0].statement, read) for read in _open(size))


# Resources of PBS and Grid Engine; of one chunk of PBS, or of `nodes=` in TORQUE.
_RESOURCES = {"walltime": "time", "h_rt": "time", "place": "place"}
_CHUNK = {
    "ncpus": "ncpus",
    "ngpus": "gpus_on_node",
    "mpiprocs": "ranks_per_node",
    "mem": "memory",
    "ppn": "ncpus",
    "gpus": "gpus_on_node",
}
# Without chunks and nodes, these are sizes of the whole job.
_JOB_TOTALS = {"resource ncpus": "cpus_in_all", "resource ngpus": "gpus_in_all"}
# Fields of a launcher, which only say how large the job is.
LAUNCHER_FIELDS = frozenset(
    {"hosts", "map_by", "ranks", "launched_per_node", "launched_nodes", "launched_slots"}
)
# In names of parallel environments: mpi_16, mpi-16, mpi_16_tasks_per_node.
_SLOTS_PER_NODE = re.compile(r"[a-z][_-](\d{1,3})(?:_?(?:tasks_)?per_node|ppn|way)?$")
_SPAN = re.compile(r"span\[(ptile|hosts)=(\d{1,5})\]")
_RANKS_PER_NODE = re.compile(r"ppr:(\d{1,4}):node\b.*")


def _parts(each: Field, scheduler: str) -> Iterator[Field]:
    """The parts of a compound value as fields of their own."""
    if each.field == "resources":
        for part in each.value.split(","):
            yield from _resource(each, part, scheduler)
    elif each.field == "attributes":
        for key, _, text in (part.partition("=") for part in each.value.split(":")):
            yield each._replace(field=f"resource {key}", value=text)
    elif each.field == "parallel_environment":
        yield from _parallel_environment(each)
    elif each.field == "requirements":
        yield from _requirements(each)
    elif each.field == "hosts" and "$" not in each.value and UNKNOWN not in each.value:
        hosts = each.value.split(",")
        slots_of_each = {host.partition(":")[2] for host in hosts}
        if len(slots_of_each) == 1:
            yield each._replace(field="launched_nodes", value=str(len(hosts)))
            yield each._replace(field="launched_slots", value=slots_of_each.pop())
    elif mapped := _RANKS_PER_NODE.fullmatch(each.value):
        yield each._replace(field="launched_per_node", value=mapped[1])
    else:
        yield each


def _parallel_environment(each: Field) -> Iterator[Field]:
    """Slots are cores: of each node, if the name states them."""
    name, _, slots = each.value.partition("=")
    yield each._replace(value=name)
    found = _SLOTS_PER_NODE.search(name)
    nodes = _divided(_number(slots), int(found[1])) if found else 0
    if found:
        yield each._replace(field="launched_slots", value=found[1])
    if found and nodes:
        yield each._replace(field="launched_nodes", value=str(nodes))
        yield each._replace(field="ncpus", value=found[1])
    else:
        yield each._replace(field="tasks", value=slots)


def _requirements(each: Field) -> Iterator[Field]:
    """-R of LSF: span tells how slots are divided among nodes."""
    if span := _SPAN.search(each.value):
        field = "launched_slots" if span[1] == "ptile" else "launched_nodes"
        yield each._replace(field=field, value=span[2])
    if others := _SPAN.sub("", each.value).strip():
        yield each._replace(field="directive", value=f'-R "{others}"')


def _resource(each: Field, part: str, scheduler: str) -> Iterator[Field]:
    name, equals, value = part.partition("=")
    count, *rest = value.split(":")
    if scheduler == "gridengine" and _NODE_TYPE.fullmatch(name) and _number(value):
        yield each._replace(field="node_type", value=name)
        yield each._replace(field="nodes", value=value)
    elif not equals:
        yield each._replace(field="directive", value=f"-l {part}")
    elif name not in ("select", "nodes"):
        yield each._replace(field=_RESOURCES.get(name, f"resource {name}"), value=value)
    elif "+" in value or not count.isdigit():
        yield each._replace(field="nodes", value=value)
    else:
        yield each._replace(field="nodes", value=count)
        for chunk in rest:
            key, _, number = chunk.partition("=")
            known = key in _CHUNK
            yield each._replace(field=_CHUNK.get(key, "select"), value=number if known else chunk)


class Size(NamedTuple):
    """The size of a job, as stated or as it follows; 0 is unknown."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def gap(self) -> str:
        """What the page does not state."""
        if self.ranks:
            return f"it cannot be divided among {self.nodes} nodes with {self.per_node} ranks each"
        unknown = {"nodes": self.nodes, "ranks of a node": self.per_node}
        missing = " and the ".join(name for name, number in unknown.items() if not number)
        return f"the page does not state the {missing}"


def _size(fields: Iterable[Field]) -> Size:
    stated: dict[str, int] = {}
    for each in fields:
        stated.setdefault(each.field, _number(each.value))

    def first(*names: str) -> int:
        return next((stated[name] for name in names if stated.get(name)), 0)

    ranks = first("tasks", "ranks")
    nodes = first("nodes", "launched_nodes")
    per_node = first("ranks_per_node", "launched_per_node", "launched_slots")
    return Size(nodes or _divided(ranks, per_node), per_node or _divided(ranks, nodes))


def _divided(total: int, by: int) -> int:
    """0 if it cannot be divided."""
    return 0 if not by or total % by else total // by


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0


# Fields that are numbers: the key, and the size by which they are divided.
_NUMBERS = {
    "nodes": ("nodes", ""),
    "ranks_per_node": ("ranks_per_node", ""),
    "cpus_per_rank": ("cpus_per_rank", ""),
    "gpus_on_node": ("gpus_per_node", ""),
    "gpus": ("gpus_per_node", "nodes"),
    "gpus_in_all": ("gpus_per_node", "nodes"),
    "gpus_per_rank": ("gpus_per_node", "of each rank"),
    "ncpus": ("cpus_per_rank", "per_node"),
    "cpus_in_all": ("cpus_per_rank", "ranks"),
}
# Other values of resources are written as they are.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/@-]*")


def _value(each: Field, scheduler: str, size: Size) -> Iterator[Read]:
    field, value = each.field, each.value
    if field in ("account", "group", "project"):
        yield Value(at("job.requires"), "account", item=True)
        yield from [mark_site(field)] if field != "account" else []
    elif field == "directive":
        yield Value(at("job.directives"), value, item=True)
    elif UNKNOWN in value or ("$" in value and field != "output"):
        yield leave(f"the page does not state the value of job.{field}")
    elif field == "node_type":
        yield from (Value(at("job.partition"), value), mark_site(field))
    elif field == "time":
        yield _time(value, scheduler)
    elif field in _NUMBERS:
        yield from _number_value(field, value.rpartition(":")[2], size)
    elif field == "tasks" or field in LAUNCHER_FIELDS:
        yield from _rank_values(field, value, size)
        yield from [mark_site("slots")] if (field, scheduler) == ("tasks", "lsf") else []
    elif field in ("gres", "gpus_per_node"):
        yield from _gpus(value, field)
    elif field.startswith("resource "):
        yield _resource_value(field.partition(" ")[2], value, scheduler)
    else:
        table = "launch" if field in ("srun_mpi", "cpu_bind") else "job"
        stated = value.rstrip("Bb").upper() if field == "memory" else value  # 300GB is 300G
        yield Value(at(table, field), stated or field == "exclusive")


def _number_value(field: str, text: str, size: Size) -> Iterator[Read]:
    key, by = _NUMBERS[field]
    number = follows = _number(text)
    if by == "of each rank":
        follows = number * size.per_node
    elif by:
        follows = _divided(number, getattr(size, by))
    if not number:
        yield leave(f"{text!r} is not one number")
    elif not follows:
        yield leave(f"{size.gap}: set job.{key}")
        yield from _open(size) if field.endswith("_in_all") else []
    else:
        yield Value(at("job", key), follows, weight=INFERRED if by else COMMAND)
        yield from [mark_site("totals")] if field.endswith("_in_all") else []


def _rank_values(field: str, text: str, size: Size) -> Iterator[Read]:
    """Ranks of the whole job, or of a node: what the page does not state follows from them."""
    count = _number(text)
    of_node = field in ("launched_per_node", "launched_slots")
    if size.ranks:
        yield Value(at("job.nodes"), size.nodes, weight=INFERRED)
        yield Value(at("job.ranks_per_node"), size.per_node, weight=INFERRED)
    elif of_node or (field, count, size.nodes) == ("tasks", 1, 0):
        yield Value(at("job.ranks_per_node"), count, weight=INFERRED)
    elif field != "launched_nodes":
        told = "cannot be divided" if size.nodes or size.per_node else f"in all, and {size.gap}"
        yield leave(f"{text} ranks {told}: set job.nodes and job.ranks_per_node")
        yield from _open(size)


def _is_open(read: Read) -> bool:
    return isinstance(read, Value) and read.weight == OPEN


def _open(size: Size) -> Iterator[Value]:
    """Sizes that the page does not state although its job has several ranks."""
    for key, known in (("nodes", size.nodes), ("ranks_per_node", size.per_node)):
        if not known:
            yield Value(at("job", key), 0, weight=OPEN)


def _resource_value(name: str, text: str, scheduler: str) -> Value:
    if _PLAIN.fullmatch(text) or scheduler == "cobalt":
        return Value(at("job.attributes", name), text)
    return Value(at("job.directives"), f"-l {name}={text}", item=True)


def _time(value: str, scheduler: str) -> Read:
    unit = {"cobalt": 60, "lsf": 60, "pbs": 1, "gridengine": 1}.get(scheduler)
    if unit and re.fullmatch(r"[1-9][0-9]{0,5}", value):
        total = int(value) * unit
        value = f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"
    if re.fullmatch(r"[0-9]{1,3}:[0-5]?[0-9]:[0-5]?[0-9]", value):
        return Value(at("job.time"), ":".join(part.zfill(2) for part in value.split(":")))
    try:
        return Value(at("job.time"), read_time(value, shipped()[scheduler]))
    except (UsageError, KeyError):
        return leave(f"{value!r} is not a time that hvdenv reads")


def _gpus(value: str, field: str) -> Iterator[Read]:
    """``gpu:a100:4`` of --gres, ``a100:4`` of --gpus-per-node."""
    parts = value.split(":")
    if field == "gres" and parts.pop(0) != "gpu":
        yield leave("it requests no GPUs")
        return
    count = parts.pop() if parts and _number(parts[-1]) else "1"
    yield Value(at("job.gpus_per_node"), _number(count))
    if field == "gpus_per_node":
        yield Value(at("job.gpu_option"), "gpus-per-node")
    if parts:
        yield Value(at("partitions", "", "gpu"), parts[0])


def mark_site(difference: str) -> Value:
    """The mark of a scheduler that differs from the shipped one."""
    return Value((*_SITE, difference), True, weight=INFERRED)


def with_scheduler(values: Sequence[Value]) -> list[Value]:
    """The values with a scheduler of the site in place of the marks of mark_site()."""
    marks = {each.key[2]: each for each in values if each.key[:2] == _SITE}
    kept = [each for each in values if each.key[:2] != _SITE]
    like = "pbs" if {"totals", "project"} & marks.keys() else "gridengine"
    if "slots" in marks:
        like = "lsf"
    if not marks or not any(each[:2] == (at("scheduler"), like) for each in kept):
        return kept
    changed = {begin: lines for name in marks for begin, lines in _DIFFERENT[name].items()}
    mark = next(iter(marks.values()))
    kept = [each._replace(value="site") if each.key == at("scheduler") else each for each in kept]
    kept.append(mark._replace(key=(*_SITE, "like"), value=like))
    for shipped_line in shipped()[like].directives:
        begin = next((each for each in changed if shipped_line.startswith(each)), "")
        kept += [
            Value((*_SITE, "directives"), line, _AS_SHIPPED, INFERRED, item=True)
            for line in (changed[begin] if begin else [shipped_line])
        ]
    if "hostfile" in marks:
        kept.append(marks["hostfile"]._replace(value="SGE_JOB_HOSTLIST"))
    return kept

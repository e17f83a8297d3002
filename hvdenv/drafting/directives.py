"""Reads the options of batch systems, in directives and on command lines, into [job]."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from hvdenv.drafting.options import split
from hvdenv.drafting.shell import PLACEHOLDER, UNKNOWN, Statement
from hvdenv.drafting.values import INFERRED, Left, Origin, Read, Value, at, leave
from hvdenv.errors import UsageError
from hvdenv.model.dialect import shipped
from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml
from hvdenv.sites.batch import read_time

# A scheduler that differs from the shipped one, and how: groups that pay, types of nodes instead of
# slots and a list of hosts (Grid Engine at ABCI and TSUBAME); sizes of the whole job (PBS at Gadi).
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
        "{!exclusive}-l place": (), "{?exclusive}-l place": (),
    },
}  # fmt: skip
# Types of nodes that are requested by number: rt_F=2 at ABCI, f_node=2 at TSUBAME.
_NODE_TYPE = re.compile(r"rt_[A-Za-z]+(?:\.[a-z]+)?|[a-z]+_node|node_[a-z]+")
_UNSUPPORTED = {"#PJM": "PJM of Fujitsu", "#MSUB": "Moab"}
_NQSV = re.compile(r"#PBS\s+(?:-[bT]\s|-l\s.*\belapstim_req=)")
NQSV = "NQSV of NEC"


class Table(NamedTuple):
    """The options of one batch system, with and without a value.

    Each has the field that it means, or the reason to leave it out (several words).
    """

    options: dict[str, str]
    flags: dict[str, str]


@lru_cache(maxsize=1)
def tables() -> dict[str, Table]:
    document = parse_toml(read_text(Path(__file__).with_suffix(".toml"), OWN))
    listed = decode(dict[str, dict[str, dict[str, str]]], document)
    return {
        name: Table(**{part: _by_option(fields) for part, fields in parts.items()})
        for name, parts in listed.items()
    }


def _by_option(part: dict[str, str]) -> dict[str, str]:
    return {option: field for field, options in part.items() for option in options.split()}


class Field(NamedTuple):
    """An option with its meaning."""

    statement: Statement
    field: str
    value: str


def scheduler_of(text: str) -> str:
    """The batch system that a directive is for; empty if hvdenv does not support it."""
    found = (name for name, each in shipped().items() if text.startswith(f"{each.prefix} "))
    return next(found, "")


def unsupported(statements: Iterable[Statement]) -> str:
    """The name of a batch system that hvdenv does not support; empty if it does."""
    texts = [each.text for each in statements if each.directive]
    if any(map(_NQSV.match, texts)):
        return NQSV
    return next(
        (_UNSUPPORTED[word] for text in texts if (word := text.split()[0]) in _UNSUPPORTED), ""
    )


def fields_of_directive(statement: Statement) -> Iterator[Field | Left]:
    # A comment follows after " #"; within a word, # is a character.
    text = re.split(r"\s#", statement.text.partition(" ")[2])[0]
    try:
        yield from fields_of(statement, shlex.split(text), scheduler_of(statement.text))
    except ValueError:
        yield leave("its quotes do not match")


def fields_of(statement: Statement, words: Sequence[str], scheduler: str) -> Iterator[Field | Left]:
    table = tables()[scheduler]
    # An unknown option may be followed by its value.
    unknown = [
        word for word, following in pairwise(words)
        if word.startswith("-") and word not in table.flags and not following.startswith("-")
    ]  # fmt: skip
    # Grid Engine: -pe NAME SLOTS
    values = {**dict.fromkeys((*table.options, *unknown), 1), "-pe": 2}
    options = split(words, values)
    for option, value in options.given:
        meaning = table.options.get(option, table.flags.get(option, ""))
        if " " in meaning:
            several = len(options.given) > 1
            told = f"{option}: {meaning}" if several else meaning
            yield leave(told, understood=not meaning.endswith("?"))
        elif meaning:
            yield Field(statement, meaning, value)
        elif statement.directive and value:
            joint, quote = "=" if option.startswith("--") else " ", '"' if " " in value else ""
            yield Field(statement, "directive", f"{option}{joint}{quote}{value}{quote}")
        else:
            yield leave(f"{option} has no key in a recipe")


class Size(NamedTuple):
    """The size of a job; 0 is unknown.

    Attributes:
        ranks: of the whole job.
        per_node: ranks of a node.
        stated: the fields that state it.
    """

    nodes: int
    per_node: int
    ranks: int
    stated: frozenset[str]


def _size(fields: Iterable[Field]) -> Size:
    """What the fields of a job state, and what follows from that."""
    numbers: dict[str, int] = {}
    for each in fields:
        numbers.setdefault(each.field, _number(each.value))
    nodes, ranks = numbers.get("nodes", 0), numbers.get("tasks") or numbers.get("ranks", 0)
    per_node = numbers.get("ranks_per_node") or numbers.get("launched_per_node", 0)
    if ranks and per_node and not nodes:
        nodes = _divided(ranks, per_node)
    elif ranks and nodes and not per_node:
        per_node = _divided(ranks, nodes)
    return Size(nodes, per_node, ranks or nodes * per_node, frozenset(numbers))


def _divided(total: int, by: int) -> int:
    """0 if it cannot be divided."""
    return 0 if not by or total % by else total // by


def values_of(fields: Iterable[Field], scheduler: str) -> Iterator[tuple[Statement, Read]]:
    """What the options of one job mean together, each with the line that it comes from."""
    known = [part for each in fields for part in _parts(each, scheduler)]
    if scheduler == "pbs" and not any(each.field in ("nodes", "select") for each in known):
        known = [each._replace(field=_OF_JOB.get(each.field, each.field)) for each in known]
    size = _size(known)
    for each in known:
        yield from ((each.statement, read) for read in _value(each, scheduler, size))


def _parts(each: Field, scheduler: str) -> Iterator[Field]:
    """The parts of a compound value as fields of their own."""
    if each.field == "resources":
        for part in each.value.split(","):
            name, _, count = part.partition("=")
            if scheduler == "gridengine" and _NODE_TYPE.fullmatch(name) and _number(count):
                yield each._replace(field="node_type", value=name)
                yield each._replace(field="nodes", value=count)
            else:
                yield from _resource(each, part)
    elif each.field == "attributes":
        for part in each.value.split(":"):
            yield each._replace(field="attribute", value=part)
    elif each.field == "parallel_environment":
        name, _, slots = each.value.partition("=")
        yield each._replace(value=name)
        yield each._replace(field="tasks", value=slots)
    else:
        yield each


# Resources of PBS and Grid Engine; of one chunk of PBS, or of `nodes=` in TORQUE.
_RESOURCES = {"walltime": "time", "h_rt": "time", "place": "place", "mem": "job_memory"}
_CHUNK = {"ncpus": "ncpus", "ngpus": "gpus_on_node", "mpiprocs": "ranks_per_node", "mem": "memory",
          "ppn": "ncpus", "gpus": "gpus_on_node"}  # fmt: skip
# Without chunks and nodes, these are sizes of the whole job.
_OF_JOB = {"attribute ncpus": "cpus_in_all", "attribute ngpus": "gpus_in_all",
           "attribute mem": "memory_in_all"}  # fmt: skip


def _resource(each: Field, part: str) -> Iterator[Field]:
    name, equals, value = part.partition("=")
    if not equals:
        yield each._replace(field="directive", value=f"-l {part}")
    elif name in ("ncpus", "ngpus", "mem"):
        yield each._replace(field=f"attribute {name}", value=value)
    elif name not in ("select", "nodes"):
        known = _RESOURCES.get(name)
        yield each._replace(field=known or "attribute", value=value if known else part)
    elif "+" in value or not value.partition(":")[0].isdigit():
        yield each._replace(field="nodes", value=value)
    else:
        count, *rest = value.split(":")
        yield each._replace(field="nodes", value=count)
        for name, _, number in (chunk.partition("=") for chunk in rest):
            if name in _CHUNK:
                yield each._replace(field=_CHUNK[name], value=number)
            else:
                yield each._replace(field="select", value=f"{name}={number}" if number else name)


# Other values of resources are written as they are.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/@-]*")
# Fields that are one number, and their keys.
_COUNTED = {"nodes": "nodes", "ranks_per_node": "ranks_per_node", "cpus_per_rank": "cpus_per_rank",
            "gpus_on_node": "gpus_per_node"}  # fmt: skip
# Fields of a launcher, which only say how large the job is.
OF_LAUNCHER = ("ranks", "launched_per_node")


def _value(each: Field, scheduler: str, size: Size) -> Iterator[Read]:
    field, value = each.field, each.value
    if field in ("account", "group", "project"):
        yield Value(at("job.requires"), "account", item=True)
        yield from [of_site(field)] if field != "account" else []
    elif field == "directive":
        yield Value(at("job.directives"), value, item=True)
    elif UNKNOWN in value or PLACEHOLDER in value or ("$" in value and field != "output"):
        yield leave(f"the page does not state the value of job.{field}")
    elif field == "node_type":
        yield from (Value(at("job.partition"), value), of_site(field))
    elif field == "time":
        yield _time(value, scheduler)
    elif field in _COUNTED:
        yield _counted(at("job", _COUNTED[field]), value)
    elif field in ("gres", "gpus_per_node"):
        yield from _gpus(value, field)
    elif field in _SHARED:
        yield from _shared(field, value.rpartition(":")[2], size)
    elif field.startswith("attribute"):
        yield _attribute(value if field == "attribute" else f"{field[10:]}={value}", scheduler)
    else:
        table = "launch" if field in ("srun_mpi", "cpu_bind") else "job"
        yield Value(at(table, field), value or field == "exclusive")


def _counted(key: tuple[str, ...], text: str) -> Read:
    count = _number(text)
    return Value(key, count) if count else leave(f"{text!r} is not one number")


def _attribute(stated: str, scheduler: str) -> Value:
    name, _, text = stated.partition("=")
    if _PLAIN.fullmatch(text) or scheduler == "cobalt":
        return Value(at("job.attributes", name), text)
    return Value(at("job.directives"), f"-l {stated}", item=True)


def of_site(difference: str) -> Value:
    return Value((*_SITE, difference), True, weight=INFERRED)


def with_scheduler(values: Sequence[Value]) -> list[Value]:
    """The values with a scheduler of the site in place of the marks of of_site()."""
    marks = {each.key[2]: each for each in values if each.key[:2] == _SITE}
    kept = [each for each in values if each.key[:2] != _SITE]
    like = "pbs" if {"totals", "project"} & marks.keys() else "gridengine"
    if not marks or not any(each.value == like for each in kept if each.key == at("scheduler")):
        return kept
    changed = {begin: lines for name in marks for begin, lines in _DIFFERENT[name].items()}
    first = next(iter(marks.values()))._replace(item=False)

    def value(key: str, text: str, *, item: bool = False) -> Value:
        return first._replace(key=(*_SITE, key), value=text, item=item)

    return [
        *(each._replace(value=_SITE[1]) if each.key == at("scheduler") else each for each in kept),
        value("like", like),
        *(
            value("directives", line, item=True)._replace(origin=_AS_SHIPPED)
            for each in shipped()[like].directives
            for line in _changed(each, changed)
        ),
        *([value("hostfile", "SGE_JOB_HOSTLIST")] if "hostfile" in marks else []),
    ]


def _changed(line: str, changed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return next((lines for begin, lines in changed.items() if line.startswith(begin)), (line,))


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


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0


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


# Sizes of the whole job or of a rank, and what to divide them by for the key of a recipe.
_SHARED = frozenset({"tasks", *OF_LAUNCHER, "gpus", "ncpus", "gpus_per_rank", "cpus_in_all",
                     "gpus_in_all", "memory_in_all"})  # fmt: skip


def _shared(field: str, text: str, size: Size) -> Iterator[Read]:
    count = _number(text)
    if field in ("tasks", *OF_LAUNCHER):
        yield from _ranks(field, count, size)
    elif field == "memory_in_all":
        # hvdenv has no field for the memory of all nodes.
        yield Value(at("job.attributes.mem"), text)
    else:
        key, number = {
            "gpus": ("gpus_per_node", _divided(count, size.nodes)),
            "gpus_in_all": ("gpus_per_node", _divided(count, size.nodes)),
            "gpus_per_rank": ("gpus_per_node", count * size.per_node),
            "ncpus": ("cpus_per_rank", _divided(count, size.per_node)),
            "cpus_in_all": ("cpus_per_rank", _divided(count, size.nodes * size.per_node)),
        }[field]
        if number:
            yield Value(at("job", key), number, weight=INFERRED)
            yield from [of_site("totals")] if field.endswith("_in_all") else []
        else:
            yield leave(f"of the whole job, and {_open(size)}: set job.{key}")


def _open(size: Size) -> str:
    """Why a size of the whole job gives no size of a node."""
    if size.nodes and size.per_node:
        return f"it cannot be divided among {size.nodes} nodes with {size.per_node} ranks each"
    unknown = {"nodes": size.nodes, "ranks of a node": size.per_node}
    missing = " and the ".join(name for name, number in unknown.items() if not number)
    return f"the page does not state the {missing}"


def _ranks(field: str, count: int, size: Size) -> Iterator[Read]:
    """Ranks of the whole job: what the page does not state follows from them."""
    if field != "tasks" and ("tasks" in size.stated or {"nodes", "ranks_per_node"} <= size.stated):
        return  # the job says it
    if size.nodes and size.per_node:
        if "nodes" not in size.stated:
            yield Value(at("job.nodes"), size.nodes, weight=INFERRED)
        if "ranks_per_node" not in size.stated:
            yield Value(at("job.ranks_per_node"), size.per_node, weight=INFERRED)
        if count != size.nodes * size.per_node and field != "launched_per_node":
            yield leave(f"{count} ranks are not {size.nodes} times {size.per_node}")
    elif (count, field) == (1, "tasks") and not size.nodes:
        yield Value(at("job.ranks_per_node"), 1, weight=INFERRED)
    elif field == "launched_per_node":
        yield Value(at("job.ranks_per_node"), count, weight=INFERRED)
    else:
        told = "cannot be divided" if size.nodes or size.per_node else f"in all, and {_open(size)}"
        yield leave(f"{count} ranks {told}: set job.nodes and job.ranks_per_node")

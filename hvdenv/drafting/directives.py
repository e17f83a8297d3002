"""Reads the options of batch systems, in directives and on command lines, into [job]."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
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

# The name of a Grid Engine that differs from the shipped one, and how it may: groups that pay, types of
# nodes instead of slots, and a list of hosts (ABCI, TSUBAME).
_SITE = ("schedulers", "site")
_AS_SHIPPED = Origin("hvdenv's directives for Grid Engine")
_DIFFERENT: dict[str, dict[str, str]] = {
    "group": {"-P {account}": "-g {account}"},
    "node_type": {
        "-q {partition}": "-l {partition}={nodes}", "-pe {parallel_environment} {cpus}": "",
    },
    "hostfile": {},
}  # fmt: skip
# Types of nodes that are requested by number: rt_F=2 at ABCI, f_node=2 at TSUBAME.
_NODE_TYPE = re.compile(r"rt_[A-Za-z]+(?:\.[a-z]+)?|[a-z]+_node|node_[a-z]+")


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
    """The batch system that a directive is for; empty if hvdenv does not know it."""
    found = (name for name, each in shipped().items() if text.startswith(f"{each.prefix} "))
    return next(found, "")


def fields_of_directive(statement: Statement) -> Iterator[Field | Left]:
    scheduler = scheduler_of(statement.text)
    if not scheduler:
        yield leave("hvdenv does not know this batch system")
        return
    # A comment follows after " #"; within a word, # is a character.
    text = re.split(r"\s#", statement.text.partition(" ")[2])[0]
    try:
        words = shlex.split(text)
    except ValueError:
        yield leave("its quotes do not match")
        return
    yield from fields_of(statement, words, scheduler)


def fields_of(statement: Statement, words: Sequence[str], scheduler: str) -> Iterator[Field | Left]:
    table = tables()[scheduler]
    # An unknown option may be followed by its value.
    unknown = [
        word for word, following in pairwise(words)
        if word.startswith("-") and word not in table.flags and not following.startswith("-")
    ]  # fmt: skip
    # Grid Engine: -pe NAME SLOTS
    values = {**dict.fromkeys((*table.options, *unknown), 1), "-pe": 2}
    for option, value in split(words, values).given:
        meaning = table.options.get(option, table.flags.get(option, ""))
        if " " in meaning:
            yield leave(meaning, understood=True)
        elif meaning:
            yield Field(statement, meaning, value)
        elif statement.directive and value:
            joint = "=" if option.startswith("--") else " "
            yield Field(statement, "directive", f"{option}{joint}{value}")
        else:
            yield leave(f"{option} has no key in a recipe")


def values_of(fields: Iterable[Field], scheduler: str) -> Iterator[tuple[Statement, Read]]:
    """What the options of one job mean together, each with the line that it comes from."""
    known = list(_expanded(fields, scheduler))
    nodes = next((_number(each.value) for each in known if each.field == "nodes"), 0)
    ranks = next((_number(each.value) for each in known if each.field == "ranks_per_node"), 0)
    for each in known:
        if each.field == "ranks":  # of all nodes, by the launcher
            stated = ranks or any(other.field == "tasks" for other in known)
            count = _number(each.value)
            if nodes and count and not stated and not count % nodes:
                yield (
                    each.statement,
                    Value(at("job.ranks_per_node"), count // nodes, weight=INFERRED),
                )
            continue
        yield from ((each.statement, read) for read in _value(each, scheduler, nodes, ranks))


def _expanded(fields: Iterable[Field], scheduler: str) -> Iterator[Field]:
    """Fields with the parts of compound values as fields of their own."""
    for each in fields:
        statement = each.statement
        if each.field == "resources":
            for part in each.value.split(","):
                name, _, count = part.partition("=")
                if scheduler == "gridengine" and _NODE_TYPE.fullmatch(name) and _number(count):
                    yield Field(statement, "node_type", name)
                    yield Field(statement, "nodes", count)
                else:
                    yield from _resource(statement, part)
        elif each.field == "attributes":
            for part in each.value.split(":"):
                yield Field(statement, "attribute", part)
        elif each.field == "parallel_environment":
            name, _, slots = each.value.partition("=")
            yield Field(statement, each.field, name)
            yield Field(statement, "tasks", slots)
        else:
            yield each


# Of one chunk of PBS, or of `nodes=` in TORQUE.
_CHUNK = {"ncpus": "ncpus", "ngpus": "gpus_on_node", "mpiprocs": "ranks_per_node", "mem": "memory",
          "ppn": "ncpus", "gpus": "gpus_on_node"}  # fmt: skip

# Fields that are one number, and their keys.
_COUNTED = {"nodes": "nodes", "ranks_per_node": "ranks_per_node", "cpus_per_rank": "cpus_per_rank",
            "gpus_on_node": "gpus_per_node"}  # fmt: skip


def _resource(statement: Statement, part: str) -> Iterator[Field]:
    name, equals, value = part.partition("=")
    if name not in ("select", "nodes") or not equals:
        known = {"walltime": "time", "h_rt": "time", "place": "place", "mem": "memory"}
        field = known.get(name, "attribute")
        yield Field(statement, field, part if field == "attribute" else value)
        return
    count, *rest = value.split(":")
    if "+" in value or not count.isdigit():
        yield Field(statement, "nodes", value)
        return
    yield Field(statement, "nodes", count)
    for name, _, number in (each.partition("=") for each in rest):
        if name in _CHUNK:
            yield Field(statement, _CHUNK[name], number)
        else:
            yield Field(statement, "select", f"{name}={number}" if number else name)


# Fields that need no value: the list that each belongs to, and the item; empty for the value.
_WITHOUT_VALUE = {
    "account": ("requires", "account"),
    "group": ("requires", "account"),
    "directive": ("directives", ""),
}


def _value(each: Field, scheduler: str, nodes: int, ranks: int) -> Iterator[Read]:
    field, value = each.field, each.value
    if field in _WITHOUT_VALUE:
        key, item = _WITHOUT_VALUE[field]
        yield Value(at("job", key), item or value, item=True)
        yield from [of_site(field)] if field == "group" else []
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
    elif field in ("tasks", "gpus", "ncpus", "gpus_per_rank"):
        yield _shared(field, value.rpartition(":")[2], nodes, ranks)
    elif field == "attribute":
        name, _, text = value.partition("=")
        yield Value(at("job.attributes", name), text)
    else:
        table = "launch" if field in ("srun_mpi", "cpu_bind") else "job"
        yield Value(at(table, field), value or field == "exclusive")


def of_site(difference: str) -> Value:
    return Value((*_SITE, difference), True, weight=INFERRED)


def with_scheduler(values: Sequence[Value]) -> list[Value]:
    """The values with a scheduler of the site in place of the marks of of_site()."""
    marks = {each.key[2]: each for each in values if each.key[:2] == _SITE}
    kept = [each for each in values if each.key[:2] != _SITE]
    if not marks or not any(each.value == "gridengine" for each in kept):
        return kept
    changed = dict(pair for name in marks for pair in _DIFFERENT[name].items())
    shipped_lines = shipped()["gridengine"].directives
    lines = [line for each in shipped_lines if (line := changed.get(each, each))]
    first = next(iter(marks.values()))._replace(item=False)

    def value(key: str, text: str, *, item: bool = False) -> Value:
        return first._replace(key=(*_SITE, key), value=text, item=item)

    return [
        *(each._replace(value=_SITE[1]) if each.key == at("scheduler") else each for each in kept),
        value("like", "gridengine"),
        *(value("directives", each, item=True)._replace(origin=_AS_SHIPPED) for each in lines),
        *([value("hostfile", "SGE_JOB_HOSTLIST")] if "hostfile" in marks else []),
    ]


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


def _counted(key: tuple[str, ...], text: str) -> Read:
    count = _number(text)
    return Value(key, count) if count else leave(f"{text!r} is not one number")


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


def _shared(field: str, text: str, nodes: int, ranks: int) -> Read:
    """Sizes of the whole job or of a rank, which recipes state for a node."""
    count, by = _number(text), ranks if field in ("ncpus", "gpus_per_rank") else nodes
    if (field, count, nodes) == ("tasks", 1, 0):
        return Value(at("job.ranks_per_node"), 1, weight=INFERRED)
    if field == "gpus_per_rank" and count and ranks:
        return Value(at("job.gpus_per_node"), count * ranks, weight=INFERRED)
    if not count or not by or count % by:
        told = "cannot be divided among the nodes and ranks that the page states"
        return leave(f"{field}={text} {told}")
    key = {"tasks": "ranks_per_node", "gpus": "gpus_per_node", "ncpus": "cpus_per_rank"}[field]
    return Value(at("job", key), count // by, weight=INFERRED)

"""The options of batch systems, in directives and on command lines, as [job]."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.drafting.options import split, tables
from hvdenv.drafting.shell import Page, Statement
from hvdenv.drafting.values import (
    OPTION,
    SITE,
    UNKNOWN,
    Fact,
    Left,
    Origin,
    Value,
    Weight,
    at,
    leave,
)
from hvdenv.model.dialect import shipped
from hvdenv.sites.batch import read_time

# How a site's scheduler differs from the shipped one, by the option that shows it: sizes of the whole job
# (PBS at Gadi), slots instead of whole nodes, and GPUs (LSF). By the beginning of the shipped directive; {}
# is the value.
_TOTALS = {
    "-l select=": ("-l ncpus={cpus}", "-l ngpus={gpus}"),
    "{!exclusive}-l place": (),
    "{?exclusive}-l place": (),
}
_DIFFERENT: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "pbs": {
        "project": {"-A ": ("-P {account}",)},
        "cpus_in_all": _TOTALS,
        "gpus_in_all": _TOTALS,
    },
    "lsf": {
        "tasks": {"-nnodes ": ("-n {ranks}", "-R span[ptile={ranks_per_node}]")},
        "gpus_of_host": {"{?exclusive}-x": ("{?exclusive}-x", "-gpu num={gpus_per_node}{}")},
    },
}
_AS_SHIPPED = Origin("hvdenv's directives for this kind of scheduler")
_OF_ONE_JOB = "it belongs to one job, not to every job of the recipe"
_NQSV = re.compile(r"#PBS\s+(?:-[bT]\s|-l\s.*\belapstim_req=)")
_UNSUPPORTED = {"#PJM": "PJM of Fujitsu", "#MSUB": "Moab"}


def directive(statement: Statement, page: Page) -> Iterator[Fact]:
    text = statement.origin.text
    known = (name for name, each in shipped().items() if text.startswith(f"{each.prefix} "))
    if scheduler := next(known, ""):
        page.scheduler = scheduler
        yield Value(at("scheduler"), scheduler)
        try:
            # A comment follows after " #"; within a word, # is a character.
            words = shlex.split(re.split(r"\s#", text.partition(" ")[2])[0])
        except ValueError:
            yield leave("its quotes do not match")
        else:
            yield from read_options(words, scheduler, directive=True)


def unsupported(statements: Iterable[Statement]) -> str:
    """The name of a batch system that hvdenv does not support; empty if it does."""
    texts = [each.origin.text for each in statements if each.directive]
    if any(map(_NQSV.match, texts)):
        return "NQSV of NEC"
    words = (text.split()[0] for text in texts)
    return next((_UNSUPPORTED[word] for word in words if word in _UNSUPPORTED), "")


def read_options(
    words: Sequence[str], scheduler: str, *, directive: bool = False
) -> Iterator[Fact]:
    """Options of a batch system, as they are: their job gives them a meaning."""
    given = split(words, tables()[scheduler], guess=True).given
    for name, meaning, value in given:
        array = meaning == "name" and "[" in value  # of LSF: name[1-10]
        yield from [leave(_OF_ONE_JOB)] if array else []
        if value.startswith("depend="):  # -W of PBS has other values as well
            meaning = _OF_ONE_JOB
        if " " in meaning:
            told = f"{name}: {meaning}" if len(given) > 1 else meaning
            yield leave(told, understood=not meaning.endswith("?"))
        elif meaning:
            yield Value((OPTION, scheduler, meaning), value.partition("[")[0] if array else value)
        elif directive and value:
            yield Value((OPTION, scheduler, name), value)
        else:
            yield leave(f"{name} has no key in a recipe")


# What only a launcher states. It says how large the job is, and nothing else.
LAUNCHED = frozenset({"map_by", "ranks", "launched_per_node", "launched_nodes", "launched_slots"})
# Numbers of ranks that are not those of the allocation.
_COMPUTED = re.compile(
    rf"{UNKNOWN}|\$(?!SLURM_NTASKS|SLURM_NPROCS|NSLOTS|PBS_NP\b|LSB_DJOB_NUMPROC)"
)
# The parts of compound values: what separates them, and what the groups of each mean.
_SEPARATORS = {
    "resources": ",",
    "chunks": ":",
    "attributes": ":",
    "requirements": "span",
}
PARTS = {
    "resources": {
        r"(?:select|nodes)=(\d+):([^+]*)": "nodes chunks",
        r"(?:select|nodes)=(.*)": "nodes",
        r"(?:walltime|h_rt)=(.*)": "time",
        r"place=(.*)": "place",
        # Without chunks and nodes, these are sizes of the whole job.
        r"ncpus=(\d+)": "cpus_in_all",
        r"ngpus=(\d+)": "gpus_in_all",
        r"([^=]*=.*)": "resource",
        r"(.*)": "-l",
    },
    "chunks": {
        r"(?:ncpus|ppn)=(.*)": "slots_of_node",
        r"n?gpus=(.*)": "gpus_on_node",
        r"mpiprocs=(.*)": "ranks_per_node",
        r"mem=(.*)": "memory",
        r"(.*)": "select",
    },
    "attributes": {r"(.*)": "resource"},
    "parallel_environment": {
        # Slots are cores: of each node, if the name states them.
        r"([\w-]*[a-z][_-]((\d{1,3}))(?:_?(?:tasks_)?per_node|ppn|way)?)=(.*)": "job.parallel_environment launched_slots slots_of_node tasks",
        r"([^=]*)=(.*)": "job.parallel_environment tasks",
    },
    "requirements": {
        r"\[ptile=(\d+)\](.*)": "launched_slots -R",
        r"\[hosts=(\d+)\](.*)": "launched_nodes -R",
        r"(.*)": "-R",
    },
    "gpu_requirements": {
        r"num=(\d+)((?::[a-z_]+=[a-z_]+)*)": "gpus_on_node gpus_of_host",
        r"(.*)": "-gpu",
    },
    "map_by": {r"ppr:(\d+):node\b.*": "launched_per_node"},
}


def _parts(option: Value) -> Iterator[Value]:
    """The parts of a compound value, as options of their own."""
    meaning, text = option.key[-1], str(option.value)
    if meaning not in PARTS:
        yield option
        return
    separator = _SEPARATORS.get(meaning)
    for part in text.split(separator) if separator else [text]:
        known = ((re.fullmatch(pattern, part), into) for pattern, into in PARTS[meaning].items())
        match, into = next((each for each in known if each[0]), (None, ""))
        for name, value in zip(into.split(), match.groups() if match else (), strict=True):
            key = (*option.key[:2], name)
            yield from _parts(option._replace(key=key, value=value.strip()))


def job_values(options: Sequence[Value], scheduler: str) -> Iterator[Fact]:
    """What the options of one job mean together, each with the line that it comes from."""
    stated = [part for each in options for part in _parts(each)]
    known = [each for each in stated if each.key[-1] not in LAUNCHED or str(each.value).isdigit()]
    size = _size(known)
    found = [(each, read) for each in known for read in _value(each, scheduler, size)]
    computed = (
        each for each in stated if each.key[-1] == "ranks" and _COMPUTED.search(str(each.value))
    )
    if not size.ranks:
        found += [(each, read) for each in computed for read in _open(size)]
    for each, read in found:
        if isinstance(read, Left):
            yield read._replace(origin=each.origin, table=each.role)
        # Without a scheduler, hvdenv writes no job.
        elif scheduler or read.weight != Weight.OPEN:
            weight = each.weight if read.weight == Weight.COMMAND else read.weight
            yield read._replace(origin=each.origin, weight=weight)


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


def _size(options: Iterable[Value]) -> Size:
    stated: dict[str, int] = {}
    for each in options:
        stated.setdefault(each.key[-1], _number(str(each.value)))

    def first(*names: str) -> int:
        return next((stated[name] for name in names if stated.get(name)), 0)

    ranks = first("tasks", "ranks")
    nodes = first("nodes", "launched_nodes")
    per_node = first("ranks_per_node", "launched_per_node", "launched_slots")
    nodes = nodes or _divided(ranks, first("launched_slots") or per_node)
    return Size(nodes, per_node or _divided(ranks, nodes))


def _divided(total: int, by: int) -> int:
    """0 if it cannot be divided."""
    return 0 if not by or total % by else total // by


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0


# Options that are numbers: the key, and the size by which they are divided.
_NUMBERS = {
    "nodes": ("nodes", ""),
    "ranks_per_node": ("ranks_per_node", ""),
    "cpus_per_rank": ("cpus_per_rank", ""),
    "gpus_on_node": ("gpus_per_node", ""),
    "gpus": ("gpus_per_node", "nodes"),
    "gpus_in_all": ("gpus_per_node", "nodes"),
    "gpus_per_rank": ("gpus_per_node", "of each rank"),
    "slots_of_node": ("cpus_per_rank", "per_node"),
    "cpus_in_all": ("cpus_per_rank", "ranks"),
}
# Other values of resources are written as they are.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/@-]*")


def _value(option: Value, scheduler: str, size: Size) -> Iterator[Fact]:
    meaning, text = option.key[-1], str(option.value)
    key = at(meaning) if "." in meaning else at("job", meaning)
    yield from _site(meaning, text, scheduler, size)
    if meaning in ("account", "project"):
        yield Value(at("job.requires"), "account", item=True)
    elif meaning.startswith("-"):
        yield from [_directive(meaning, text)] if text else []
    elif UNKNOWN in text or ("$" in text and meaning != "output"):
        yield leave(f"the page does not state the value of {'.'.join(key)}")
    elif meaning == "time":
        yield _time(text, scheduler)
    elif meaning in _NUMBERS:
        yield from _number_value(meaning, text.rpartition(":")[2], size)
    elif meaning == "tasks" or meaning in LAUNCHED:
        yield from _rank_values(meaning, text, size)
    elif meaning in ("gres", "gpus_per_node"):
        yield from _gpus(text, meaning)
    elif meaning == "resource":
        yield _resource(text, scheduler)
    elif meaning != "gpus_of_host":
        stated = text.rstrip("Bb").upper() if meaning == "memory" else text  # 300GB is 300G
        yield Value(key, stated or meaning == "exclusive")


def _site(meaning: str, text: str, scheduler: str, size: Size) -> Iterator[Value]:
    """The mark of a scheduler that differs from the shipped one."""
    stated = size.ranks or not meaning.endswith("_in_all")
    if meaning in _DIFFERENT.get(scheduler, {}) and stated:
        yield Value((SITE, scheduler, meaning), text, weight=Weight.INFERRED)


def _resource(text: str, scheduler: str) -> Value:
    name, _, value = text.partition("=")
    plain = _PLAIN.fullmatch(value) or scheduler == "cobalt"
    return Value(at("job.attributes", name), value) if plain else _directive("-l", text)


def _directive(name: str, text: str) -> Value:
    joint = "=" if name.startswith("--") else " "
    quote = '"' if re.search(r"[ \[]", text) else ""
    return Value(at("job.directives"), f"{name}{joint}{quote}{text}{quote}", item=True)


def _number_value(meaning: str, text: str, size: Size) -> Iterator[Fact]:
    key, by = _NUMBERS[meaning]
    number = follows = _number(text)
    if by == "of each rank":
        follows = number * size.per_node
    elif by:
        follows = _divided(number, getattr(size, by))
    if follows:
        yield Value(at("job", key), follows, weight=Weight.INFERRED if by else Weight.COMMAND)
    elif number:
        yield leave(f"{size.gap}: set job.{key}")
        yield from _open(size) if meaning.endswith("_in_all") else []
    else:
        yield leave(f"{text!r} is not one number")


def _rank_values(meaning: str, text: str, size: Size) -> Iterator[Fact]:
    """Ranks of the whole job, or of a node: what the page does not state follows from them."""
    count = _number(text)
    of_node = meaning in ("launched_per_node", "launched_slots")
    if size.ranks:
        yield Value(at("job.nodes"), size.nodes, weight=Weight.INFERRED)
        yield Value(at("job.ranks_per_node"), size.per_node, weight=Weight.INFERRED)
    elif of_node or (meaning, count, size.nodes) == ("tasks", 1, 0):
        yield Value(at("job.ranks_per_node"), count, weight=Weight.INFERRED)
    elif meaning != "launched_nodes":
        told = "cannot be divided" if size.nodes or size.per_node else f"in all, and {size.gap}"
        yield leave(f"{text} ranks {told}: set job.nodes and job.ranks_per_node")
        yield from _open(size)


def _open(size: Size) -> Iterator[Value]:
    """Sizes that the page does not state although its job has several ranks."""
    for key, known in (("nodes", size.nodes), ("ranks_per_node", size.per_node)):
        if not known:
            yield Value(at("job", key), 0, weight=Weight.OPEN)


def _time(text: str, scheduler: str) -> Fact:
    unit = {"cobalt": 60, "lsf": 60, "pbs": 1, "gridengine": 1}.get(scheduler)
    if unit and re.fullmatch(r"[1-9][0-9]{0,5}", text):
        total = int(text) * unit
        text = f"{total // 3600}:{total // 60 % 60}:{total % 60}"
    if re.fullmatch(r"[0-9]{1,3}:[0-5]?[0-9]:[0-5]?[0-9]", text):
        return Value(at("job.time"), ":".join(part.zfill(2) for part in text.split(":")))
    try:
        return Value(at("job.time"), read_time(text, shipped()[scheduler]))
    except (UsageError, KeyError):
        return leave(f"{text!r} is not a time that hvdenv reads")


def _gpus(text: str, meaning: str) -> Iterator[Fact]:
    """``gpu:a100:4`` of --gres, ``a100:4`` of --gpus-per-node."""
    parts = text.split(":")
    if meaning == "gres" and parts.pop(0) != "gpu":
        yield leave("it requests no GPUs")
        return
    count = parts.pop() if parts and _number(parts[-1]) else "1"
    yield Value(at("job.gpus_per_node"), _number(count))
    if meaning == "gpus_per_node":
        yield Value(at("job.gpu_option"), "gpus-per-node")
    if parts:
        yield Value(at("partitions", "", "gpu"), parts[0])


def with_scheduler(facts: Sequence[Fact]) -> list[Fact]:
    """The facts with a scheduler of the site in place of the marks of its differences."""
    values = [each for each in facts if isinstance(each, Value)]
    kept = [each for each in facts if each.key[0] != SITE]
    named = [str(each.value) for each in values if each.key == at("scheduler")]
    marks = [each for each in values if each.key[0] == SITE and each.key[1] in named]
    if not marks:
        return kept
    like = marks[0].key[1]
    for place, each in enumerate(kept):
        if isinstance(each, Value) and each[:2] == (at("scheduler"), like):
            kept[place] = each._replace(value="site")
    kept.append(marks[0]._replace(key=at("schedulers.site.like"), value=like))
    changed = {
        begin: (mark, lines)
        for mark in marks
        for begin, lines in _DIFFERENT[like].get(mark.key[2], {}).items()
    }
    as_shipped = marks[0]._replace(origin=_AS_SHIPPED)
    for line in shipped()[like].directives:
        begins = (each for begin, each in changed.items() if line.startswith(begin))
        mark, lines = next(begins, (as_shipped, (line,)))
        texts = [text.replace("{}", str(mark.value)) for text in lines]
        key = at("schedulers.site.directives")
        kept += [mark._replace(key=key, value=text, item=True) for text in texts]
    return kept

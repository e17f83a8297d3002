"""What describes a job: the directives of a script, and the commands that start ranks.

Sizes that a script states become values, and so do those that follow by one division, such as ranks in
all by nodes or by ranks of a node. Slots are comments, and the draft lists what a job lacks.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from hvdenv.base.errors import UsageError
from hvdenv.drafting.options import Options, meaning_of, reason, split, tables, variable
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import OPTION, UNKNOWN, Fact, Left, Value, Weight, at, find, leave
from hvdenv.model.cluster import LauncherName
from hvdenv.model.dialect import shipped
from hvdenv.sites.batch import read_time

_NQSV = re.compile(r"#PBS\s+(?:-[bT]\s|-l\s.*\belapstim_req=)")
_SLURM = Value(at("scheduler"), "slurm", weight=Weight.INFERRED)
_INTERACTIVE = "hvdenv shell requests interactive jobs"
# Of the partition that the job states, and how large the whole job is.
_GPU = at("partitions", "", "gpu")
# Options whose values may contain variables, or whose parts are judged one by one.
_WITH_VARIABLES = frozenset({"account", "resources", "output", "error"})
_OF_STEPS = ("ranks_per_node", "cpus_per_rank", "gres", "gpus_per_node", "gpus_of_rank")
_NODES, _RANKS = at("job.nodes"), at("job.ranks_per_node")


def is_nqsv(statements: Iterable[Statement]) -> bool:
    """Whether the directives are those of NEC's NQSV, which begin as those of PBS do."""
    return any(_NQSV.match(each.origin.text) for each in statements if each.directive)


def directive(statement: Statement) -> Iterator[Fact]:
    prefix, _, text = statement.origin.text.partition(" ")
    scheduler = next((name for name, each in shipped().items() if each.prefix == prefix), "")
    if not scheduler:
        yield leave(f"hvdenv has no scheduler with {prefix}: see docs/how-to/add-a-scheduler.md")
        return
    yield Value(at("scheduler"), scheduler)
    try:
        # A comment follows after " #"; within a word, # is a character.
        words = shlex.split(re.split(r"\s#", text)[0])
    except ValueError:
        yield leave("its quotes do not match")
        return
    for name, meaning, value in split(words, tables()[scheduler], guess=True).given:
        if meaning or not value:
            yield from _option(name, meaning, value, scheduler)
        else:
            yield _directive(name, value)


def request(statement: Statement) -> Iterator[Fact]:
    """Options of Slurm on a command line. Those of a script take precedence."""
    name, *words = statement.words
    name = name.rpartition("/")[2]
    if name in ("qsub", "bsub"):
        asks = any(word.startswith("-") for word in words)
        told = "do all jobs need its options? then set them in [job]"
        yield leave(told if asks else "hvdenv submits jobs itself", understood=not asks)
        return
    yield _SLURM
    for option, meaning, value in split(words, tables()["slurm"], program=True).given:
        for each in _option(option, meaning, value, "slurm"):
            yield each._replace(weight=Weight.INFERRED) if isinstance(each, Value) else each
    if name != "srun":
        yield leave("hvdenv requests and submits jobs itself", understood=True)


def launch(statement: Statement) -> Iterator[Fact]:
    """srun, mpirun, horovodrun and others. Options that recipes have no key for are comments."""
    name, *words = statement.words
    name = name.rpartition("/")[2].removesuffix(".hydra").replace("orterun", "mpirun")
    kind = "openmpi" if name in ("mpirun", "mpiexec") else name
    table = {**tables()["launch"], **tables().get(kind, {})}
    table = tables()["slurm"] if name == "srun" else table
    options = split(words, table, program=True, long=name != "srun")
    program = options.rest[0].rpartition("/")[2] if options.rest else ""
    started = meaning_of(program, "launched") if program else "no_ranks"
    asks = name == "srun" and (not program or started == "shell" or options.all(_INTERACTIVE))
    if asks or options.all("partition"):
        yield from request(statement)
    elif name == "srun":
        yield _SLURM
        yield from _of_step(options, batch=statement.batch) if started != "no_ranks" else ()
    if name not in (*get_args(LauncherName), "horovodrun"):
        yield leave(f"hvdenv does not know the launcher {name}: describe it in launch.launchers")
        yield from _of_unknown(options) if started != "no_ranks" else ()
    elif asks or started == "no_ranks":
        reasons = options.reasons if name == "horovodrun" else []
        told = next(iter(reasons), leave("it starts no program with Horovod"))
        yield told._replace(understood=True)
    else:
        controller = next((each for each in ("mpi", "gloo") if options.all(each)), "")
        if name != "horovodrun" or controller:
            yield Value(at("launch.launcher"), f"{name}-{controller}".strip("-"))
        else:
            yield leave("horovodrun uses MPI or Gloo, and the page does not state which")
        for option, meaning, value in options.given:
            if option not in table or " " in meaning:
                yield reason(option, meaning or "recipes have no key for it; is it needed?")
            else:
                yield from _launch_option(meaning, value)
        yield from _of_hosts(options.last("hosts").split(","), options.last("ranks"))
        yield from _container(program, options.rest) if started == "runtime" else ()


def _of_step(options: Options, *, batch: bool) -> Iterator[Value]:
    """What srun requests: in a batch script, the shape of its ranks only."""
    for option, meaning, value in options.given:
        if not batch or meaning in _OF_STEPS:
            facts = _option(option, meaning, value, "slurm")
            values = (each for each in facts if isinstance(each, Value))
            yield from (each._replace(weight=Weight.INFERRED) for each in values)


def _of_unknown(options: Options) -> Iterator[Value]:
    """How many ranks another launcher starts; jsrun starts those of each of its resource sets."""
    ranks = options.last("ranks"), options.last("launched_per_node")
    total, per_node, sets, on_node, of_set, cpus, gpus = map(
        _number, (*ranks, *map(options.last, ("sets", "sets_of_node", "of_set", "cpus", "gpus")))
    )
    of_set = of_set or 1
    sizes = {
        "launched": total or sets * of_set,
        "launched_per_node": per_node or on_node * of_set,
        "gpus_in_all": sets * gpus,
    }
    yield from (Value((OPTION, meaning), size) for meaning, size in sizes.items() if size)
    if each := _divided(cpus, of_set):
        yield Value(at("job.cpus_per_rank"), each, weight=Weight.INFERRED)


def _of_hosts(hosts: Sequence[str], ranks: str) -> Iterator[Value]:
    """Ranks of a node: ``a:4,b:4`` with 8 ranks. With fewer, some hosts have fewer than they could."""
    slots = {each.partition(":")[2] for each in hosts}
    if len(slots) == 1 and str(len(hosts) * _number(slot := slots.pop())) == ranks:
        yield Value((OPTION, "launched_per_node"), slot)


def _container(runtime: str, words: Sequence[str]) -> Iterator[Fact]:
    """singularity and apptainer behind a launcher."""
    if runtime not in ("singularity", "apptainer") or words[1:2] not in (("exec",), ("run",)):
        yield leave("it runs in an image: set container.image, and what else [container] needs")
        return
    options = split(words[2:], tables()["container"], program=True)
    yield Value(at("container.runtime"), runtime)
    yield Value(at("container.image"), (options.rest or (UNKNOWN,))[0])
    gpus = [each for each in ("nvidia", "rocm") if options.all(each)]
    yield from (Value(at("container.gpu"), each) for each in gpus)
    yield from options.reasons


def _launch_option(meaning: str, value: str) -> Iterator[Fact]:
    name, equals, text = value.partition("=")
    if meaning in ("ranks", "launched_per_node"):
        yield Value((OPTION, meaning.replace("ranks", "launched")), value)
    elif meaning == "launched_cpus":
        yield Value(at("job.cpus_per_rank"), _number(value) or value, weight=Weight.INFERRED)
    elif meaning == "map_by" and (found := re.match(r"ppr:(\d+):node\b", value)):
        yield Value((OPTION, "launched_per_node"), found[1])
    elif meaning == "variable" and equals:
        yield from variable(name, text, exported=True)
    elif meaning == "variable":
        yield Value(at("launch.exports"), name, item=True)
    elif meaning == "mca":
        yield Value(at("launch.mca", name), text)
    elif meaning.startswith("launch."):
        yield Value(at(meaning), int(value) if value.isdigit() else value)


def _option(name: str, meaning: str, text: str, scheduler: str) -> Iterator[Fact]:
    """An option of a batch system. What it says about the size of a job is an option still."""
    if " " in meaning:
        yield reason(name, meaning)
    elif not meaning:
        yield leave(f"{name} has no key in a recipe")
    elif meaning in _SIZES:
        yield Value((OPTION, meaning), text)
    elif re.search(rf"[${UNKNOWN}]", text) and meaning not in _WITH_VARIABLES:
        yield leave(f"{name}: the page does not state its value")
    elif reader := _READERS.get(meaning):
        yield from reader(text, meaning, scheduler)
    else:
        yield Value(at(meaning) if "." in meaning else at("job", meaning), text or True)


def _environment(text: str, meaning: str, _: str) -> Iterator[Fact]:
    name, _, slots = text.partition("=")
    yield Value(at("job", meaning), name)
    yield Value((OPTION, "slots"), slots)


def _account(*_: str) -> Iterator[Fact]:
    yield Value(at("job.requires"), "account", item=True)


def _count(text: str, meaning: str, _: str) -> Iterator[Fact]:
    told = leave(f"{text!r} is not one number")
    yield Value(at("job", meaning), _number(text)) if _number(text) else told


def _memory(text: str, *_: str) -> Iterator[Fact]:
    yield Value(at("job.memory"), text.rstrip("Bb").upper())  # 300GB is 300G


def _gpus(text: str, meaning: str, _: str) -> Iterator[Fact]:
    """``a100:4``, ``a100`` or ``4``; of --gres, ``gpu:`` is in front, and other resources may follow."""
    if meaning == "gres" and "," in text:
        for part in text.split(","):
            yield from _gpus(part, meaning, "")
        return
    of, _, gpus = text.partition(":") if meaning == "gres" else ("gpu", "", text)
    if of != "gpu":
        yield leave(f"{text} is no GPU, and recipes have no key for it")
        return
    kind, _, count = gpus.rpartition(":")
    kind, count = (kind, count) if _number(count) else (gpus, "1")
    yield Value(at("job.gpus_per_node"), _number(count))
    if kind:
        yield Value(_GPU, kind)
    if meaning == "gpus_per_node":
        yield Value(at("job.gpu_option"), "gpus-per-node")


def _directive(name: str, text: str) -> Value:
    joint = "=" if name.startswith("--") and "=" not in text else " "
    quote = '"' if re.search(r"[ \[]", text) else ""
    return Value(at("job.directives"), f"{name}{joint}{quote}{text}{quote}", item=True)


_OF_CHUNKS = {
    "ncpus": "cpus_of_node",
    "ppn": "cpus_of_node",
    "ngpus": "gpus_of_node",
    "gpus": "gpus_of_node",
    "mpiprocs": "ranks_per_node",
    "mem": "memory",
}
_OF_RESOURCES = {
    "walltime": "time",
    "h_rt": "time",
    "ncpus": "cpus_in_all",
    "ngpus": "gpus_in_all",
    # PBS refuses it beside the chunks that hvdenv requests.
    "mem": "is it for all nodes? then set job.memory, that of one node",
}


def _resources(text: str, _: str, scheduler: str) -> Iterator[Fact]:
    of_lsf = scheduler == "lsf" and re.findall(r"\w{1,20}\[[^\]]{0,200}\]", text)
    for part in of_lsf or text.split(","):
        yield from _resource(part, scheduler)


def _resource(part: str, scheduler: str) -> Iterator[Fact]:
    """One of the resources of -l: ``select=2:ncpus=64:mpiprocs=4``, ``walltime=1:00:00``; -R of LSF."""
    name, _, value = part.partition("=")
    if found := re.fullmatch(r"span\[(ptile|hosts)=(\d+)\]", part):
        of = (OPTION, "launched_per_node") if found[1] == "ptile" else _NODES
        yield Value(of, int(found[2]))
    elif scheduler == "lsf":
        yield leave(f"does the job need {part}?")
    elif name in ("select", "nodes") and "+" not in value:
        nodes, *chunks = value.split(":")
        yield from _option(name, "nodes", nodes, scheduler)
        for chunk in chunks:
            of_chunk, _, size = chunk.partition("=")
            known = _OF_CHUNKS.get(of_chunk)
            yield from _option(name, known or "select", size if known else chunk, scheduler)
    elif name in ("select", "nodes"):
        yield Value((OPTION, "slots"), part)
    elif name in _OF_RESOURCES:
        yield from _option(part, _OF_RESOURCES[name], value, scheduler)
    else:
        yield _directive("-l", part)
    if name in ("ncpus", "ngpus") or found:
        yield leave("hvdenv requests nodes: docs/how-to/add-a-scheduler.md has other ways")


def _time(text: str, _: str, scheduler: str) -> Iterator[Fact]:
    unit = {"pbs": 1, "gridengine": 1, "lsf": 60}.get(scheduler)
    if unit and _number(text):
        total = _number(text) * unit
        text = f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"
    text = re.sub(r":(?=\d(?!\d))", ":0", text)  # 24:0:0
    if "-" in text or scheduler == "lsf":  # 2-12 of Slurm and 1:30 of LSF begin with hours
        text += ":00" * (2 - text.count(":"))
    try:
        time = read_time(text)
    except UsageError:
        yield leave(f"{text!r} is not a time that hvdenv reads")
    else:
        yield Value(
            at("job.time"), text.zfill(8) if text.count(":") == 2 and "-" not in text else time
        )


_READERS: dict[str, Callable[[str, str, str], Iterator[Fact]]] = {
    "resources": _resources,
    "parallel_environment": _environment,
    "account": _account,
    "time": _time,
    "memory": _memory,
    **dict.fromkeys(("nodes", "ranks_per_node", "cpus_per_rank"), _count),
    **dict.fromkeys(("gres", "gpus_per_node", "gpus_of_node"), _gpus),
}


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0


def _divided(total: int, by: int) -> int:
    """0 if it cannot be divided."""
    return 0 if not by or total % by else total // by


# Sizes that have no key: what each is, and the keys that follow by one division.
_SIZES = {
    "ranks": ("ranks in all", "nodes and job.ranks_per_node"),
    "launched": ("ranks in all", "nodes and job.ranks_per_node"),
    "launched_per_node": ("ranks of a node", "ranks_per_node"),
    "slots": ("slots in all", "nodes, job.ranks_per_node and job.gpus_per_node"),
    "cpus_of_node": ("CPUs of each node", "cpus_per_rank"),
    "cpus_in_all": ("CPUs in all", "cpus_per_rank"),
    "gpus_in_all": ("GPUs in all", "gpus_per_node"),
    "gpus_of_rank": ("GPUs of each rank", "gpus_per_node"),
}
# Variables of batch systems, and the size that each is.
_COUNTED = {
    "$NSLOTS": "slots",
    "$PBS_NCPUS": "cpus_in_all",
    "$PBS_NGPUS": "gpus_in_all",
    "$LSB_DJOB_NUMPROC": "ranks",
}


def job_facts(facts: Sequence[Fact]) -> Iterator[Fact]:
    """What the facts of one job mean together, each with the line that it comes from.

    Sizes that its launcher or its batch system states for the whole job are divided. Where that fails, the
    draft has 0 for what it lacks, which no command accepts.
    """
    values = [each for each in facts if isinstance(each, Value)]
    stated = dict[str, int]()
    for value in sorted(values, key=lambda value: -value.weight):
        stated.setdefault(value.key[-1], _number(str(value.value)))
    counted = (_COUNTED.get(str(each.value)) for each in values if each.key[-1] == "launched")
    launched = (stated.get(name, 0) for name in (*filter(None, counted), "ranks", "launched"))
    total = next(filter(None, launched), 0)
    per_node = stated.get("ranks_per_node") or stated.get("launched_per_node") or int(total == 1)
    nodes = stated.get("nodes") or _divided(total, per_node)
    per_node = per_node or _divided(total, nodes)
    partition = find(values, "job.partition")
    for each in facts:
        if isinstance(each, Value) and each.key == _GPU:
            told = f"its partition is not stated, whose gpu is {each.value}"
            named = partition and each._replace(key=at("partitions", str(partition.value), "gpu"))
            yield named or Left(each.origin, told, table="job")
        elif isinstance(each, Value) and each.key[0] == OPTION:
            yield from _sized(each, nodes, per_node, written=bool(find(values, "scheduler")))
        else:
            yield each


def _sized(size: Value, nodes: int, per_node: int, *, written: bool) -> Iterator[Fact]:
    """The keys that follow from one size; ``written`` says whether hvdenv can write the job."""
    meaning, text = size.key[-1], str(size.value)
    what, keys = _SIZES[meaning]
    by = {"cpus_of_node": per_node, "cpus_in_all": nodes * per_node, "gpus_in_all": nodes}
    derived = {keys: _divided(_number(text), by.get(meaning, 0))}
    if meaning == "gpus_of_rank":
        derived = {keys: _number(text) * per_node}
    if meaning in ("ranks", "launched", "launched_per_node"):
        derived = {"nodes": nodes, "ranks_per_node": per_node}
        derived = {key: derived[key] for key in derived if key in keys}
    for key, number in derived.items():
        if number:
            yield size._replace(key=at("job", key), value=number, weight=Weight.INFERRED)
    if not all(derived.values()):
        yield Left(size.origin, f"{text} {what}: set job.{keys}", table="job")
        lacking = [key for key, known in ((_NODES, nodes), (_RANKS, per_node)) if not known]
        for lacks in lacking if written and meaning != "cpus_of_node" else ():
            yield size._replace(key=lacks, value=0, weight=Weight.OPEN)

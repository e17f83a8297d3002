"""What describes a job: the directives of a script, and the commands that start ranks.

Sizes that a script states become values, and so do those that follow by one division, such as ranks in
all by nodes or by ranks of a node. Slots are comments, and the draft lists what a job lacks.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from hvdenv.base.errors import UsageError
from hvdenv.drafting.options import meaning_of, split, tables, variable
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import OPTION, UNKNOWN, Fact, Left, Value, Weight, at, leave
from hvdenv.model.cluster import LauncherName
from hvdenv.model.dialect import shipped
from hvdenv.sites.batch import read_time

_OF_ONE_JOB = "it belongs to one job, not to every job of the recipe"
_SUBMITS = "hvdenv submits jobs itself"
_NQSV = re.compile(r"#PBS\s+(?:-[bT]\s|-l\s.*\belapstim_req=)")
_SLURM = Value(at("scheduler"), "slurm", weight=Weight.INFERRED)
_IN_IMAGE = leave("it runs in an image: set container.image, and what else [container] needs")
_INTERACTIVE = "hvdenv shell requests interactive jobs"


def is_nqsv(statements: Iterable[Statement]) -> bool:
    """Whether the directives are those of NEC's NQSV, which begin as those of PBS do."""
    return any(_NQSV.match(each.origin.text) for each in statements if each.directive)


def directive(statement: Statement) -> Iterator[Fact]:
    prefix, _, text = statement.origin.text.partition(" ")
    known = (name for name, each in shipped().items() if each.prefix == prefix)
    scheduler = next(known, "")
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
    yield from _options(words, scheduler)


def request(statement: Statement) -> Iterator[Fact]:
    """Options of Slurm on a command line. Those of a script take precedence."""
    name, *words = statement.words
    if name in ("qsub", "bsub"):
        asks = any(word.startswith("-") for word in words)
        told = "do all jobs need its options? then set them in [job]"
        yield leave(told if asks else _SUBMITS, understood=not asks)
        return
    yield _SLURM
    for each in _options(words, "slurm", directive=False):
        yield each._replace(weight=Weight.INFERRED) if isinstance(each, Value) else each
    if name != "srun":
        yield leave(_SUBMITS if name == "sbatch" else _INTERACTIVE, understood=True)


def launch(statement: Statement) -> Iterator[Fact]:
    """srun, mpirun, horovodrun and others. Options that recipes have no key for are comments."""
    name, *words = statement.words
    name = name.rpartition("/")[2].removesuffix(".hydra").replace("orterun", "mpirun")
    kind = "openmpi" if name in ("mpirun", "mpiexec") else name
    table = {**tables()["launch"], **tables().get(kind, {})}
    table = tables()["slurm"] if name == "srun" else table
    options = split(words, table, program=True)
    started = _started(options.rest)
    asks = name == "srun" and (started in ("", "shell") or options.all(_INTERACTIVE))
    if asks or options.all("partition"):
        yield from request(statement)
    elif name == "srun":
        yield _SLURM
    if name not in (*get_args(LauncherName), "horovodrun"):
        yield leave(f"hvdenv does not know the launcher {name}: describe it in launch.launchers")
    elif options.all("check"):
        yield leave("`hvdenv verify` shows more", understood=True)
    elif asks or started in ("", "no_ranks"):
        yield leave("it starts no program with Horovod", understood=True)
    else:
        controller = next((each for each in ("mpi", "gloo") if options.all(each)), "")
        if name != "horovodrun" or controller:
            name += f"-{controller}" if controller else ""
            yield Value(at("launch.launcher"), name)
        else:
            yield leave("horovodrun uses MPI or Gloo, and the page does not state which")
        for option, meaning, value in options.given:
            if option not in table or " " in meaning:
                yield _reason(option, meaning or "recipes have no key for it; is it needed?")
            else:
                yield from _launch_option(meaning, value)
        yield from _of_hosts(options.last("hosts").split(","), options.last("ranks"))
        yield from _container(options.rest) if started == "runtime" else ()


def _of_hosts(hosts: Sequence[str], ranks: str) -> Iterator[Value]:
    """Ranks of a node: ``a:4,b:4`` with 8 ranks. With fewer, some hosts have fewer than they could."""
    slots = {each.partition(":")[2] for each in hosts}
    if len(slots) == 1 and str(len(hosts) * _number(slot := slots.pop())) == ranks:
        yield Value((OPTION, "", "launched_per_node"), slot)


def _started(words: Sequence[str]) -> str:
    """What a launcher starts: nothing, a program, or a kind of what is no program with Horovod."""
    return (meaning_of(words[0].rpartition("/")[2], "launched") or "program") if words else ""


def _container(words: Sequence[str]) -> Iterator[Fact]:
    """singularity and apptainer behind a launcher."""
    runtime, action, *arguments = *words, "", ""
    runtime = runtime.rpartition("/")[2]
    if runtime not in ("singularity", "apptainer") or action not in ("exec", "run"):
        yield _IN_IMAGE
        return
    options = split(arguments, tables()["container"], program=True)
    yield Value(at("container.runtime"), runtime)
    yield Value(at("container.image"), (options.rest or (UNKNOWN,))[0])
    gpus = [each for each in ("nvidia", "rocm") if options.all(each)]
    yield from (Value(at("container.gpu"), each) for each in gpus)
    yield from options.reasons


# What only a launcher states. It says how large the job is, and nothing else.
LAUNCHED = frozenset({"ranks", "launched_per_node"})


def _launch_option(meaning: str, value: str) -> Iterator[Fact]:
    name, equals, text = value.partition("=")
    if meaning in LAUNCHED or meaning == "tasks":
        yield Value((OPTION, "", meaning.replace("tasks", "ranks")), value)
    elif meaning == "launched_cpus":
        yield Value((OPTION, "", "cpus_per_rank"), value)
    elif meaning == "map_by":
        if found := re.match(r"ppr:(\d+):node\b", value):
            yield Value((OPTION, "", "launched_per_node"), found[1])
    elif meaning == "variable" and equals:
        yield from variable(name, text, exported=True)
    elif meaning == "variable":
        yield Value(at("launch.exports"), name, item=True)
    elif meaning == "mca":
        yield Value(at("launch.mca", name), text)
    elif meaning.startswith("launch."):
        yield Value(at(meaning), int(value) if value.isdigit() else value)


def _reason(option: str, meaning: str) -> Left:
    told = f"{option}: {meaning}" if option else meaning
    return leave(told, understood=not meaning.endswith("?"))


def _options(words: Sequence[str], scheduler: str, *, directive: bool = True) -> Iterator[Fact]:
    """Options of a batch system, as they are: their job gives them a meaning."""
    given = split(words, tables()[scheduler], guess=directive, program=not directive).given
    for name, known, value in given:
        # -W of PBS has other values as well.
        meaning = _OF_ONE_JOB if value.startswith("depend=") else known
        if " " in meaning:
            yield _reason(name if len(given) > 1 else "", meaning)
        elif meaning == "parallel_environment":
            name, _, slots = value.partition("=")
            yield Value((OPTION, scheduler, meaning), name)
            yield Value((OPTION, scheduler, "slots"), f"{slots} slots")
        elif meaning == "span":
            yield from _span(value, scheduler)
        elif meaning == "resources":
            for part in value.split(","):
                yield from (Value((OPTION, scheduler, of), text) for of, text in _resources(part))
        elif meaning or (value and directive):
            yield Value((OPTION, scheduler, meaning or name), value)
        else:
            yield leave(f"{name} has no key in a recipe")


def _span(text: str, scheduler: str) -> Iterator[Fact]:
    """-R of LSF."""
    found = re.fullmatch(r"span\[(ptile|hosts)=(\d+)\]", text)
    if found:
        of = "launched_per_node" if found[1] == "ptile" else "nodes"
        yield Value((OPTION, scheduler, of), found[2])
        yield leave(
            "hvdenv requests nodes (-nnodes): docs/how-to/add-a-scheduler.md has other ways"
        )
    else:
        yield leave("does the job need what this states?")


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
    "mem": "of memory: is it for all nodes? then set job.memory, that of one node",
}


def _resources(part: str) -> Iterator[tuple[str, str]]:
    """One of the resources of -l: ``select=2:ncpus=64:mpiprocs=4``, ``walltime=1:00:00``."""
    name, _, value = part.partition("=")
    if name in ("select", "nodes") and "+" not in value:
        nodes, *chunks = value.split(":")
        yield "nodes", nodes
        for chunk in chunks:
            of_chunk, _, size = chunk.partition("=")
            known = _OF_CHUNKS.get(of_chunk)
            yield (known, size) if known else ("select", chunk)
    elif name in ("select", "nodes"):
        yield "slots", part
    else:
        yield (_OF_RESOURCES[name], value) if name in _OF_RESOURCES else ("-l", part)


class Size(NamedTuple):
    """The size of a job, as stated or as it follows; 0 is unknown."""

    nodes: int
    per_node: int

    @property
    def known(self) -> bool:
        return bool(self.nodes and self.per_node)

    def unstated(self) -> Iterator[Value]:
        """Sizes that the page does not state although its job has several ranks."""
        for key, known in (("nodes", self.nodes), ("ranks_per_node", self.per_node)):
            if not known:
                yield Value(at("job", key), 0, weight=Weight.OPEN)


def job_values(options: Sequence[Value], scheduler: str) -> Iterator[Fact]:
    """What the options of one job mean together, each with the line that it comes from."""
    size = _size(options)
    partition = next((str(each.value) for each in options if each.key[-1] == "partition"), "")
    known = bool(partition) and not re.search(rf"[${UNKNOWN}]", partition)
    for each in options:
        for read in _value(each, scheduler, size):
            if isinstance(read, Left):
                yield read._replace(origin=each.origin, table=each.role)
            elif read.weight == Weight.OPEN and not scheduler:
                continue  # without one, hvdenv writes no job
            elif read.key == _GPU and not known:
                told = f"its partition is not stated, whose gpu is {read.value}"
                yield Left(each.origin, told, table=each.role)
            else:
                key = ("partitions", partition, "gpu") if read.key == _GPU else read.key
                weight = each.weight if read.weight == Weight.COMMAND else read.weight
                yield read._replace(key=key, origin=each.origin, weight=weight)


def _size(options: Iterable[Value]) -> Size:
    stated: dict[str, int] = {}
    for each in sorted(options, key=lambda each: -each.weight):
        stated.setdefault(each.key[-1], _number(str(each.value)))
    total = stated.get("tasks") or stated.get("ranks", 0)
    per_node = stated.get("ranks_per_node") or stated.get("launched_per_node") or int(total == 1)
    nodes = stated.get("nodes") or _divided(total, per_node)
    return Size(nodes, per_node or _divided(total, nodes))


def _divided(total: int, by: int) -> int:
    """0 if it cannot be divided."""
    return 0 if not by or total % by else total // by


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0


# Of the partition that the job states.
_GPU = at("gpu")


def _value(option: Value, scheduler: str, size: Size) -> Iterator[Fact]:
    meaning, text = option.key[-1], str(option.value)
    key = at(meaning) if re.search(r"^-|\.", meaning) else at("job", meaning)
    if meaning == "account":
        yield Value(at("job.requires"), "account", item=True)
    elif meaning in LAUNCHED or meaning in ("tasks", "slots"):
        yield from _ranks(meaning, text, size)
    elif " " in meaning:
        yield leave(f"{text} {meaning}")
    elif UNKNOWN in text or ("$" in text and meaning not in ("output", "error")):
        yield leave(f"the page does not state the value of {'.'.join(key)}")
    elif meaning.startswith("-"):
        yield _directive(meaning, text)
    elif meaning in _SHARES:
        yield from _share(meaning, text, size)
    elif meaning in ("nodes", "ranks_per_node", "cpus_per_rank"):
        yield Value(key, _number(text)) if _number(text) else leave(f"{text!r} is not one number")
    elif reader := _READERS.get(meaning):
        yield from reader(text, scheduler)
    else:
        yield Value(key, text or meaning == "exclusive")


# Numbers to divide, and what they are for.
_SHARES = {
    "cpus_of_node": ("cpus_per_rank", "CPUs of each node"),
    "cpus_in_all": ("cpus_per_rank", "CPUs in all"),
    "gpus_in_all": ("gpus_per_node", "GPUs in all"),
    "gpus_of_job": ("gpus_per_node", "GPUs of the job"),
}


def _share(meaning: str, text: str, size: Size) -> Iterator[Fact]:
    key, of = _SHARES[meaning]
    by = size.per_node if meaning == "cpus_of_node" else size.nodes
    by *= size.per_node if meaning == "cpus_in_all" else 1
    share = _divided(_number(text), by)
    if share:
        yield Value(at("job", key), share, weight=Weight.INFERRED)
    else:
        yield leave(f"{text} {of}: set job.{key}")
    if of.endswith("in all"):
        yield leave(
            "hvdenv requests nodes (select=): docs/how-to/add-a-scheduler.md has other ways"
        )
        yield from size.unstated()


def _directive(name: str, text: str) -> Value:
    joint = "=" if name.startswith("--") and "=" not in text else " "
    quote = '"' if re.search(r"[ \[]", text) else ""
    return Value(at("job.directives"), f"{name}{joint}{quote}{text}{quote}", item=True)


def _ranks(meaning: str, text: str, size: Size) -> Iterator[Fact]:
    """Ranks of the whole job, or of a node: what the page does not state follows from them."""
    of_node = meaning == "launched_per_node"
    if meaning == "slots":
        yield leave(f"{text} in all: set job.nodes, job.ranks_per_node and job.gpus_per_node")
        yield from size.unstated()
    elif size.known and _number(text):
        yield Value(at("job.nodes"), size.nodes, weight=Weight.INFERRED)
        yield Value(at("job.ranks_per_node"), size.per_node, weight=Weight.INFERRED)
    elif of_node and _number(text):
        yield Value(at("job.ranks_per_node"), size.per_node, weight=Weight.INFERRED)
    elif not of_node and not size.known:
        told = "cannot be divided" if size.nodes or size.per_node else "in all"
        yield leave(f"{text} ranks {told}: set job.nodes and job.ranks_per_node")
        yield from size.unstated()


def _time(text: str, scheduler: str) -> Iterator[Fact]:
    unit = {"pbs": 1, "gridengine": 1, "lsf": 60}.get(scheduler)
    if unit and _number(text):
        total = _number(text) * unit
        text = f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"
    if "-" in text or scheduler == "lsf":  # 2-12 of Slurm and 1:30 of LSF begin with hours
        text += ":00" * (2 - text.count(":"))
    if re.fullmatch(r"[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]", text):
        yield Value(at("job.time"), text.zfill(8))
        return
    try:
        yield Value(at("job.time"), read_time(text))
    except UsageError:
        yield leave(f"{text!r} is not a time that hvdenv reads")


def _memory(text: str, _: str) -> Iterator[Fact]:
    yield Value(at("job.memory"), text.rstrip("Bb").upper())  # 300GB is 300G


def _gres(text: str, scheduler: str) -> Iterator[Fact]:
    kind, _, gpus = text.partition(":")
    yield from _gpus(gpus, scheduler) if kind == "gpu" else [leave("it requests no GPUs")]


def _gpus_per_node(text: str, scheduler: str) -> Iterator[Fact]:
    yield from _gpus(text, scheduler)
    yield Value(at("job.gpu_option"), "gpus-per-node")


def _gpus(text: str, _: str) -> Iterator[Fact]:
    """``a100:4``, ``a100`` or ``4``."""
    kind, _, count = text.rpartition(":")
    kind, count = (kind, count) if _number(count) else (text, "1")
    yield Value(at("job.gpus_per_node"), _number(count))
    if kind:
        yield Value(_GPU, kind)


_READERS: dict[str, Callable[[str, str], Iterator[Fact]]] = {
    "time": _time,
    "memory": _memory,
    "gres": _gres,
    "gpus_per_node": _gpus_per_node,
    "gpus_of_node": _gpus,
}

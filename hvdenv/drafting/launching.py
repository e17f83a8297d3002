"""The lines of a page that start ranks: launchers, containers, and requests for an allocation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from hvdenv.drafting import directives
from hvdenv.drafting.options import Options, split
from hvdenv.drafting.shell import PLACEHOLDER, UNKNOWN, Statement
from hvdenv.drafting.values import INFERRED, Left, Read, Value, at, leave
from hvdenv.drafting.variables import variable
from hvdenv.model import horovodrun

# Options of mpirun and mpiexec, horovodrun and aprun, with how many values follow.
_VALUES = {
    **dict.fromkeys(
        ("-np", "--np", "-n", "-H", "--host", "-host", "-hosts", "--hosts", "-hostfile", "--hostfile",
         "-machinefile", "--machinefile", "-f", "-N", "-npernode", "--npernode", "-ppn", "--ppn",
         "-perhost", "-x", "-bind-to", "--bind-to", "-map-by", "--map-by", "-rank-by", "--rank-by",
         "-wdir", "--wdir", "-wd", "-prefix", "--prefix", "-envlist", "-genvlist", "-d", "-depth",
         "--depth", "-cc", "--cpu-bind", "-j", "-iface", "-b", "-a", "-c", "-g", "-r", "-p",
         "--network-interface", "--network-interfaces", "--gloo-timeout-seconds", "--start-timeout",
         "--cpus-per-proc", "-output-filename", "--output-filename", "-launcher", "-e", "-l", "-M",
         "--smpiargs", "--timeline-filename", "--fusion-threshold-mb", "--cycle-time-ms",
         "--min-np", "--max-np", "--num-proc", "-q", "--mpi-args", "--pe", "-ssh-port"), 1),
    **dict.fromkeys(("-mca", "--mca", "-gmca", "--gmca", "-genv", "-env", "--genv", "--env"), 2),
}  # fmt: skip
# What hvdenv's own command lines say instead.
_OWN = re.compile(
    r"-+(?:bind-to|map-by|rank-by|np|n|H|hosts?|(?:host|machine)file|f|report-bindings|allow-run-as-root"
    r"|oversubscribe|tag-output|num-proc|wd(?:ir)?|prefix|timestamp-output|display-map|verbose|v|l"
    r"|output-filename|q|start-timeout|disable-cache)"
)
_OPEN_MPI = frozenset({"mpirun", "mpiexec", "orterun"})
# Launchers of sites.
_OF_SITES = {"ibrun": "ibrun -n {ranks} {program}"}
_OF_APRUN = {"-N": "job.ranks_per_node", "-d": "job.cpus_per_rank", "-j": "launch.threads_per_core"}
_ON_EACH_NODE = re.compile(r"ppr:(\d{1,4}):node\b.*")
_ALL_RANKS = ("-np", "--np", "-n", "--num-proc")
_SHELLS = frozenset({"bash", "sh", "zsh", "tcsh", "csh", "$SHELL", "/bin/bash", "/bin/sh"})
_OTHER_RUNTIMES = frozenset({"shifter", "sarus", "enroot", "podman", "podman-hpc", "docker"})
_NO_RANKS = frozenset({"hostname", "nvidia-smi", "rocm-smi", "env", "printenv", "echo", "ls", "cp"})


def launch(statement: Statement) -> Iterator[directives.Field | Read]:
    name, *words = statement.words
    options = split(words, _VALUES, program=True)
    name = name.rpartition("/")[2]
    if options.has("-cb", "--check-build"):
        yield leave("`hvdenv verify` shows more", understood=True)
        return
    if not options.rest or options.rest[0] in _NO_RANKS or options.has("--version", "-info"):
        yield leave("it starts no program with Horovod", understood=True)
        return
    yield from _launcher(name, options)
    for option, value in options.given:
        yield from _option(option, value, name)
    yield from _sizes(name, options)
    ranks = options.last(*_ALL_RANKS)
    if statement.batch and ranks.isdigit():
        yield directives.Field(statement, "ranks", ranks)
    yield from container(options.rest)


def _launcher(name: str, options: Options) -> Iterator[Read]:
    if name == "horovodrun":
        controllers = [each for each in ("mpi", "gloo") if options.has(f"--{each}")]
        # Without either, horovodrun uses MPI if Horovod was built with it: see combine.py.
        yield Value(at("launch.launcher"), f"horovodrun-{(controllers or [''])[0]}")
    elif name == "orterun":
        yield Value(at("launch.launcher"), "mpirun")
    else:
        yield Value(at("launch.launcher"), name.removesuffix(".hydra"))
    if template := _OF_SITES.get(name):
        yield Value(at("launch.launchers", name, "command"), template, weight=INFERRED)


def _option(option: str, value: str, launcher: str) -> Iterator[Read]:
    stripped = "-" + option.lstrip("-")
    name, equals, text = value.partition("=")
    if (stripped, value) == ("-hostfile", "$SGE_JOB_HOSTLIST"):
        yield directives.of_site("hostfile")
    elif stripped == "-x":
        named = [Value(at("launch.exports"), name, item=True)]
        yield from variable(name, text, exported=True) if equals else named
    elif stripped in ("-genv", "-env", "-e"):
        yield from variable(name, text, exported=True)
    elif stripped in ("-mca", "-gmca"):
        yield Value(at("launch.mca", name), text)
    elif stripped in ("-cpu-bind", "-cc"):
        yield Value(at("launch.cpu_bind"), value)
    elif stripped in ("-network-interface", "-network-interfaces"):
        for interface in value.split(","):
            yield Value(at("network.use"), interface, item=True)
    elif not (stripped in ("-mpi", "-gloo", *_by_node(launcher)) or _OWN.fullmatch(option)):
        yield _other_option(option, value, launcher)


def _other_option(option: str, value: str, launcher: str) -> Read:
    if launcher == "horovodrun" and option.startswith("--"):
        argument = f"{option}={value}" if value else option
        wrong = [message for _, message in horovodrun.problems([argument])]
        return leave(wrong[0]) if wrong else Value(at("launch.horovodrun"), argument, item=True)
    if launcher == "aprun" and option in _OF_APRUN and value.isdigit():
        return Value(at(_OF_APRUN[option]), int(value))
    return leave(f"recipes have no key for {option} of {launcher}")


def _by_node(launcher: str) -> tuple[str, ...]:
    """Options with the number of ranks on each node, with one dash."""
    return ("-npernode", "-ppn", "-perhost", *(("-N",) if launcher in _OPEN_MPI else ()))


def _sizes(launcher: str, options: Options) -> Iterator[Read]:
    """Nodes and ranks for each, where the line itself states both."""
    hosts = options.last("-H", "--host", "-host", "--hosts").split(",")
    slots = {host.partition(":")[2] for host in hosts}
    mapped = _ON_EACH_NODE.fullmatch(options.last("-map-by", "--map-by"))
    names = [each for name in _by_node(launcher) for each in (name, f"-{name}")]
    by_node = mapped[1] if mapped else options.last(*names)
    slot = slots.pop() if len(slots) == 1 else ""
    if slot.isdigit():
        yield Value(at("job.nodes"), len(hosts), weight=INFERRED)
    if ranks := by_node if by_node.isdigit() else slot if slot.isdigit() else "":
        yield Value(at("job.ranks_per_node"), int(ranks), weight=INFERRED)


def srun(statement: Statement) -> Iterator[directives.Field | Read]:
    yield Value(at("scheduler"), "slurm", weight=INFERRED)
    words = statement.words[1:]
    table = directives.tables()["slurm"]
    options = split(words, table.options.keys(), program=True)
    read = list(directives.fields_of(statement, words[: len(words) - len(options.rest)], "slurm"))
    if options.has("--pty") or not options.rest or options.rest[0] in _SHELLS:
        yield from _interactive(read)
        return
    if options.rest[0] in _NO_RANKS:
        yield leave("it starts no program with Horovod", understood=True)
        return
    if options.rest[0] in _OTHER_RUNTIMES:
        yield leave(f"hvdenv does not know how {options.rest[0]} runs images")
        return
    yield Value(at("launch.launcher"), "srun")
    # Which part of an allocation a step uses says nothing about the job.
    of_step = ("srun_mpi", "cpu_bind")
    yield from (each for each in read if isinstance(each, Left) or each.field in of_step)
    yield from container(options.rest)


def container(words: Sequence[str]) -> Iterator[Read]:
    """singularity and apptainer, possibly behind a launcher."""
    runtime, action, *arguments = *words, "", ""
    runtime = runtime.rpartition("/")[2]
    if runtime not in ("singularity", "apptainer"):
        return
    if action not in ("exec", "run"):
        yield leave("`hvdenv container` makes images", understood=action not in ("pull", "build"))
        return
    options = split(arguments, ("-B", "--bind", "--env", "--home", "-H", "--pwd"), program=True)
    yield Value(at("container.runtime"), runtime)
    for option, kind in (("--nv", "nvidia"), ("--rocm", "rocm")):
        if options.has(option):
            yield Value(at("container.gpu"), kind)
    for bind in (part for each in options.all("-B", "--bind") for part in each.split(",")):
        source, _, target = bind.partition(":")
        if target in ("", source):
            yield Value(at("container.binds"), source, item=True)
        else:
            yield leave(f"hvdenv binds folders at their own path, not {bind}")
    image = (options.rest or ("",))[0]
    if not image or "$" in image or UNKNOWN in image or PLACEHOLDER in image:
        yield leave("the page does not state the image")
    else:
        yield Value(at("container.image"), image)


def request(statement: Statement, scheduler: str) -> Iterator[directives.Field | Read]:
    """salloc, sbatch, qsub, bsub: options of an allocation on a command line."""
    words = statement.words
    read = directives.fields_of(statement, words[1:], scheduler)
    if words[0] in ("salloc", "sinteractive") or {"-I", "-Is"} & set(words):
        yield from _interactive(read)
    else:
        yield from read
        yield leave("hvdenv submits jobs itself", understood=True)


def _interactive(read: Iterable[directives.Field | Left]) -> Iterator[directives.Field | Read]:
    """Of an interactive job: where it runs. Its sizes say nothing about those of a training."""
    yield from (
        each for each in read
        if isinstance(each, directives.Field) and each.field in ("partition", "account", "qos")
    )  # fmt: skip
    yield leave("for an interactive job: hvdenv shell", understood=True)

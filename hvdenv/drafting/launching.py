"""The lines of a page that start ranks: launchers, containers, and requests for an allocation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hvdenv.drafting import directives
from hvdenv.drafting.directives import Field
from hvdenv.drafting.options import Options, split
from hvdenv.drafting.page import Page
from hvdenv.drafting.shell import UNKNOWN, Statement
from hvdenv.drafting.values import INFERRED, Left, Read, Value, at, leave
from hvdenv.drafting.variables import variable
from hvdenv.model import horovodrun

# Options of launchers that hvdenv states in its own way: they are left out of the draft.
_HOSTS = "-H --host -host -hosts --hosts -hostfile --hostfile -machinefile --machinefile -f"
_OWN_VALUES = (
    f"{_HOSTS} -np --np -n --num-proc -bind-to --bind-to -map-by --map-by -rank-by --rank-by -wdir --wdir"
    " -wd -prefix --prefix -output-filename --output-filename -q --start-timeout"
)
_OWN_FLAGS = (
    "-report-bindings --report-bindings --allow-run-as-root -allow-run-as-root -oversubscribe"
    " --oversubscribe -tag-output --tag-output -timestamp-output --timestamp-output -display-map"
    " --display-map --verbose -verbose -v -l --disable-cache --mpi --gloo"
)
_OWN = frozenset(f"{_OWN_VALUES} {_OWN_FLAGS}".split())
_PER_NODE = "-npernode --npernode -ppn --ppn -perhost --perhost"
_VALUES = {
    **dict.fromkeys(
        f"{_OWN_VALUES} {_PER_NODE} -N -x -envlist -genvlist -d -depth --depth -cc --cpu-bind -j -iface -b -a"
        " -c -g -r -p --network-interface --network-interfaces --gloo-timeout-seconds --cpus-per-proc"
        " -launcher -e -l -M --smpiargs --timeline-filename --fusion-threshold-mb --cycle-time-ms --min-np"
        " --max-np --mpi-args --pe -ssh-port --cache-capacity --log-level --config-file".split(), 1),
    **dict.fromkeys(["-mca", "--mca", "-gmca", "--gmca", "-genv", "-env", "--genv", "--env"], 2),
}  # fmt: skip
_OPEN_MPI = frozenset({"mpirun", "mpiexec", "orterun"})
# Launchers of sites.
_OF_SITES = {"ibrun": "ibrun -n {ranks} {program}"}
_OF_APRUN = {"-N": "job.ranks_per_node", "-d": "job.cpus_per_rank", "-j": "launch.threads_per_core"}
_ON_EACH_NODE = re.compile(r"ppr:(\d{1,4}):node\b.*")
_ALL_RANKS = ("-np", "--np", "-n", "--num-proc", "--ntasks")
_SHELLS = frozenset({"bash", "sh", "zsh", "tcsh", "csh", "$SHELL", "/bin/bash", "/bin/sh"})
_OTHER_RUNTIMES = frozenset({"shifter", "sarus", "enroot", "podman", "podman-hpc", "docker"})
_NO_RANKS = frozenset({"hostname", "nvidia-smi", "rocm-smi", "env", "printenv", "echo", "ls", "cp"})
# Programs that request allocations. qsub belongs to several batch systems.
_OF_SLURM = ("salloc", "sbatch", "sinteractive")
REQUESTS = {**dict.fromkeys(_OF_SLURM, "slurm"), "bsub": "lsf", "qsub": ""}
_OF_PLACE = ("partition", "account", "qos")
_NO_PROGRAM = leave("it starts no program with Horovod", understood=True)


def launch(statement: Statement, _: Page) -> Iterator[Field | Read]:
    name, *words = statement.words
    options = split(words, _VALUES, program=True)
    name = name.rpartition("/")[2].removesuffix(".hydra").replace("orterun", "mpirun")
    if options.has("-cb", "--check-build"):
        yield leave("`hvdenv verify` shows more", understood=True)
        return
    if not options.rest or options.rest[0] in _NO_RANKS or options.has("--version", "-info"):
        yield _NO_PROGRAM
        return
    if name == "horovodrun":
        # Without either, horovodrun uses MPI if Horovod was built with it: see combine.py.
        controllers = [each for each in ("mpi", "gloo") if options.has(f"--{each}")]
        name = f"horovodrun-{(controllers or [''])[0]}"
    yield Value(at("launch.launcher"), name)
    if template := _OF_SITES.get(name):
        yield Value(at("launch.launchers", name, "command"), template, weight=INFERRED)
    for option, value in options.given:
        yield from _option(option, value, name)
    yield from _sizes(statement, name, options)
    yield from _container(options.rest)


def _option(option: str, value: str, launcher: str) -> Iterator[Read]:
    stripped = "-" + option.lstrip("-")
    name, equals, text = value.partition("=")
    if (stripped, value) == ("-hostfile", "$SGE_JOB_HOSTLIST"):
        yield directives.of_site("hostfile")
    elif stripped == "-x" and not equals:
        yield Value(at("launch.exports"), name, item=True)
    elif stripped in ("-x", "-genv", "-env", "-e"):
        yield from variable(name, text, exported=True)
    elif stripped in ("-mca", "-gmca"):
        yield Value(at("launch.mca", name), text)
    elif stripped in ("-cpu-bind", "-cc"):
        yield Value(at("launch.cpu_bind"), value)
    elif stripped in ("-network-interface", "-network-interfaces"):
        for interface in value.split(","):
            yield Value(at("network.use"), interface, item=True)
    elif launcher == "aprun" and option in _OF_APRUN and value.isdigit():
        yield Value(at(_OF_APRUN[option]), int(value))
    elif option not in _OWN and option not in _by_node(launcher):
        yield _other_option(option, value, launcher)


def _other_option(option: str, value: str, launcher: str) -> Read:
    if launcher.startswith("horovodrun-") and option.startswith("--"):
        argument = f"{option}={value}" if value else option
        wrong = [message for _, message in horovodrun.problems([argument])]
        return leave(wrong[0]) if wrong else Value(at("launch.horovodrun"), argument, item=True)
    return leave(f"recipes have no key for {option} of {launcher}")


def _by_node(launcher: str) -> list[str]:
    """Options with the number of ranks on each node."""
    return [*_PER_NODE.split(), *(["-N"] if launcher in _OPEN_MPI else [])]


def _sizes(statement: Statement, launcher: str, options: Options) -> Iterator[Field]:
    """Nodes and ranks, as far as the line states them."""
    hosts = options.last(*_HOSTS.split()[:5]).split(",")
    slots = {host.partition(":")[2] for host in hosts}
    mapped = _ON_EACH_NODE.fullmatch(options.last("-map-by", "--map-by"))
    slot = slots.pop() if len(slots) == 1 else ""
    numbers = {
        "launched_per_node": (mapped[1] if mapped else options.last(*_by_node(launcher))) or slot,
        "launched_nodes": str(len(hosts)) if slot.isdigit() else "",
        "ranks": options.last(*_ALL_RANKS) if statement.batch else "",
    }
    yield from (Field(statement, name, text) for name, text in numbers.items() if text.isdigit())


def srun(statement: Statement, _: Page) -> Iterator[Field | Read]:
    yield Value(at("scheduler"), "slurm", weight=INFERRED)
    words = statement.words[1:]
    options = split(words, directives.tables()["slurm"].options.keys(), program=True)
    read = list(directives.fields_of(statement, words[: len(words) - len(options.rest)], "slurm"))
    if options.has("--pty") or not options.rest or options.rest[0] in _SHELLS:
        yield from _interactive(options, read)
    elif options.rest[0] in _NO_RANKS:
        yield _NO_PROGRAM
    elif options.rest[0] in _OTHER_RUNTIMES:
        yield leave(f"hvdenv does not know how {options.rest[0]} runs images")
    else:
        yield Value(at("launch.launcher"), "srun")
        # Which part of an allocation a step uses says nothing about the job.
        of_step = ("srun_mpi", "cpu_bind")
        yield from (each for each in read if isinstance(each, Left) or each.field in of_step)
        ranks = options.last("-n", "--ntasks")
        if statement.batch and ranks.isdigit():
            yield Field(statement, "ranks", ranks)
        yield from _container(options.rest)


def container(statement: Statement, _: Page) -> Iterator[Read]:
    yield from _container(statement.words)


def _container(words: Sequence[str]) -> Iterator[Read]:
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
    yield Value(at("container.image"), (options.rest or (UNKNOWN,))[0])


def request(statement: Statement, page: Page) -> Iterator[Field | Read]:
    """Options of an allocation on a command line."""
    name, *words = statement.words
    scheduler = REQUESTS[name] or page.scheduler or _of_qsub(words)
    if scheduler not in directives.tables():
        yield leave("hvdenv submits jobs itself", understood=True)
        return
    page.scheduler = page.scheduler or scheduler
    yield Value(at("scheduler"), scheduler, weight=INFERRED)
    read = list(directives.fields_of(statement, words, scheduler))
    if name in ("salloc", "sinteractive") or {"-I", "-Is"} & set(words):
        options = split(words, directives.tables()[scheduler].options.keys(), program=True)
        yield from _interactive(options, read)
    else:
        yield from read
        yield leave("hvdenv submits jobs itself", understood=True)


def _of_qsub(words: Sequence[str]) -> str:
    """qsub belongs to several batch systems: options tell which."""
    if any(word.startswith(("select=", "nodes=")) for word in words):
        return "pbs"
    return "gridengine" if {"-pe", "-g"} & {*words} else "cobalt" if "-n" in words else ""


def _interactive(options: Options, read: Sequence[Field | Left]) -> Iterator[Field | Read]:
    """Of an interactive job: where it runs. Its sizes say nothing about those of a training."""
    kept = [each for each in read if isinstance(each, Field) and each.field in _OF_PLACE]
    yield from kept
    yield from (each for each in read if isinstance(each, Left) and not each.understood)
    values = {each.value for each in kept}
    others = [" ".join(filter(None, each)) for each in options.given if each[1] not in values]
    told = f", with {', '.join(others)}" if others else ""
    yield leave(f"for an interactive job{told}: hvdenv shell", understood=True)

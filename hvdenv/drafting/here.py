"""What this machine shows: scheduler, modules, MPI, and in a job, the node."""

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from hvdenv.base.errors import HvdenvError, IncompatibleError
from hvdenv.base.places import home_folder
from hvdenv.base.reading import SYSTEM, read_text
from hvdenv.base.runner import Runner, environment
from hvdenv.drafting.commands import module_role
from hvdenv.drafting.values import LOAD, Fact, Found, Left, Origin, Scalar, Value, Weight, at
from hvdenv.model.cluster import Architecture, Modules
from hvdenv.model.facts import Facts
from hvdenv.model.observe import ask, ask_interpreter, observe
from hvdenv.sites import module_shell
from hvdenv.sites.launchers import MPI_KINDS, parse_mpi_version
from hvdenv.sites.modules import OFFERS

_SECONDS, _MODULES_SECONDS = 15.0, 120.0
# Modules to choose among, for each kind the newest ones.
_OFFERED = 8
_KINDS = {
    "Python": re.compile(r"(?i)(?:^|/)(?:cray-)?python\d?/"),
    "compiler": re.compile(r"(?i)(?:^|/)(?:gcc|gcccore|gnu)\d{0,2}/"),
    "CUDA": re.compile(r"(?i)(?:^|/)(?:cuda|cudatoolkit|nvhpc)/"),
    **{kind: OFFERS[kind] for kind in ("MPI", "NCCL", "Horovod")},
}
_QUEUES = {
    "slurm": ("sinfo", "-h", "-o", "%R|%D|%c|%m|%G|%l"),
    "pbs": ("qstat", "-Q"),
    "lsf": ("bqueues", "-w"),
    "gridengine": ("qconf", "-sql"),
}
# Variables of a job with the name of its partition.
_QUEUE_OF_JOB = ("SLURM_JOB_PARTITION", "PBS_QUEUE", "LSB_QUEUE")
# A partition in the output of sinfo.
_PARTITION = re.compile(
    r"(?P<name>[^|\n]{1,200})\|(?P<nodes>\d{1,9})\|(?P<cores>\d{1,9})\+?\|(?P<memory>\d{1,9})\+?"
    r"\|(?P<gres>[^|\n]{0,2000})\|(?P<limit>[^|\n]{0,40})"
)
_GPUS = re.compile(r"gpu(?::([A-Za-z][\w.-]{0,60}))?:(\d{1,6})")


class Machine(NamedTuple):
    """How to ask a machine.

    Attributes:
        report: receives what is being looked at, and for how long at most.
    """

    runner: Runner
    report: Callable[[str], None] = lambda _: None

    def ask(self, *argv: str) -> str:
        """The output of a program; empty if it fails or does not exist."""
        if not shutil.which(argv[0]):
            return ""
        self.report(f"{' '.join(argv[:4])} (at most {_SECONDS:.0f} s)")
        outcome = ask(self.runner, *argv, seconds=_SECONDS)
        return outcome.output if outcome else ""


def look(machine: Machine) -> Facts:
    machine.report(f"compiler, MPI, GPUs (at most {3 * _SECONDS:.0f} s)")
    return observe(home_folder(), machine.runner, thorough=True)


def drafted(facts: Facts, machine: Machine, loads: Collection[str] = ()) -> list[Fact]:
    """What this machine shows, with its scheduler and modules.

    Args:
        loads: modules that another source states.
    """
    parts = (
        _scheduler_facts(machine),
        _module_facts(machine, tuple(loads)),
        _node(facts, machine),
        _mpi(machine),
    )
    return [each for part in parts for each in part]


def _node(facts: Facts, machine: Machine) -> Iterator[Value]:
    """In a job: what a node of its partition has. A login node says nothing about the others."""
    queue = next(filter(None, map(environment().get, _QUEUE_OF_JOB)), "")
    if not queue:
        return
    origin = Origin(f"compute node {facts.host}")
    yield from (Value(at("network.use"), each, origin, item=True) for each in _interfaces())
    query = ("--query-gpu=compute_cap", "--format=csv,noheader")
    capabilities = {*machine.ask("nvidia-smi", *query).split()}
    cuda = re.search(r"CUDA Version: (\d{1,3}\.\d{1,2})", machine.ask("nvidia-smi"))
    stated = {
        "arch": facts.machine if facts.machine in get_args(Architecture) else "",
        "glibc": facts.glibc,
        "capability": capabilities.pop().replace(".", "") if len(capabilities) == 1 else "",
        "cuda": cuda[1] if cuda else "",
    }
    for key, fact in stated.items():
        yield from [Value(("partitions", queue, key), fact, origin)] if fact else []


def _interfaces() -> Iterator[str]:
    """Interfaces between nodes: InfiniBand and Omni-Path by their type, Slingshot by its name."""
    for folder in sorted(Path("/sys/class/net").glob("*")):
        try:
            kind = read_text(folder / "type", SYSTEM).strip()
            state = read_text(folder / "operstate", SYSTEM).strip()
        except OSError:
            continue
        if (kind == "32" or folder.name.startswith("hsn")) and state == "up":
            yield folder.name


def _value(key: str, value: Scalar, source: str, weight: int = Weight.COMMAND) -> Value:
    return Value(at(key), value, Origin(source), weight)


def _scheduler_facts(machine: Machine) -> Iterator[Fact]:
    for name, command in _QUEUES.items():
        if listed := machine.ask(*command):
            yield _value("scheduler", name, command[0])
            yield from partitions(listed) if name == "slurm" else ()
            return


def partitions(listed: str) -> Iterator[Value]:
    """Facts about nodes in the output of sinfo, and a job on those with GPUs.

    Where nodes of a partition differ: the largest.
    """
    facts: dict[str, dict[str, Any]] = {}
    for line in filter(None, map(_PARTITION.fullmatch, listed.splitlines()[:400])):
        gpus = _GPUS.search(line["gres"])
        known = facts.setdefault(line["name"].strip(), {"nodes": 0})
        known["nodes"] += int(line["nodes"])
        for key, number in (
            ("cores", int(line["cores"])),
            ("memory_gb", int(line["memory"]) // 1024),
            ("gpus", int(gpus[2]) if gpus else 0),
        ):
            known[key] = max(number, known.get(key, 0))
        if gpus and gpus[1]:
            known["gpu"] = gpus[1]
        if re.fullmatch(r"(?:\d+-)?\d+:\d\d:\d\d", line["limit"].strip()):
            known["max_time"] = line["limit"].strip()
    for name, known in facts.items():
        for key, value in known.items():
            yield from [Value(("partitions", name, key), value, Origin("sinfo"))] if value else []
        if known["gpus"]:
            yield _value("job.partition", name, f"sinfo: {name} has GPUs", Weight.INFERRED)


def _module_facts(machine: Machine, loads: tuple[str, ...]) -> Iterator[Fact]:
    limit = f"(at most {_MODULES_SECONDS:.0f} s)"
    machine.report(f"modules {limit}")
    try:
        listed = module_shell.try_out(
            Modules(), "run", machine.runner, seconds=_MODULES_SECONDS, listing=True
        )
        yield from offered(listed.available, loads)
        if loads:
            machine.report(f"module load {' '.join(loads)} {limit}")
            loaded = module_shell.load(
                Modules(load=loads), "run", machine.runner, seconds=_MODULES_SECONDS
            )
            inside = machine.runner.changed(loaded.set, loaded.unset)
            yield from _loaded(machine._replace(runner=inside), loads, loaded.set)
    except IncompatibleError:
        return
    except HvdenvError as error:
        told = " ".join([error.message, error.detail])[:400]
        yield Left(Origin("modules"), f"{told}; `hvdenv check` says more")


def offered(names: Iterable[str], loads: Collection[str]) -> Iterator[Value]:
    """Modules to choose from, of each kind that none of ``loads`` is."""
    for kind, pattern in _KINDS.items():
        fitting = sorted(filter(pattern.search, {*names}), key=_by_version)[-_OFFERED:]
        if not any(map(pattern.search, loads)):
            for name in fitting:
                yield Value(LOAD, name, Origin("module avail"), item=True, role=kind)


def _by_version(name: str) -> tuple[str, list[int]]:
    family, _, version = name.rpartition("/")
    return family.lower(), [int(part) for part in re.findall(r"\d{1,9}", version)]


def _loaded(machine: Machine, loads: Iterable[str], variables: dict[str, str]) -> Iterator[Value]:
    """What the page's modules set here, and what the programs in them are."""
    yield from folders(variables)
    path = variables.get("PATH", "")
    yield from _mpi(machine, path)
    python = shutil.which("python3", path=path) or ""
    of_module = python and any(module_role(name) == "Python" for name in loads)
    if of_module and (interpreter := ask_interpreter(python, machine.runner)):
        source = f"{python} --version, with the modules loaded"
        yield _value("python.version", f"=={interpreter.version}", source, Weight.INFERRED)


def folders(variables: dict[str, str]) -> Iterator[Value]:
    """Variables of modules that name the directories of CUDA and NCCL."""
    for key, file in (("nccl_home", "include/nccl.h"), ("cuda_home", "bin/nvcc")):
        fitting = [
            name
            for name, value in variables.items()
            if value.startswith("/") and ":" not in value and Path(value, file).is_file()
        ]
        if fitting:
            name = min(fitting, key=lambda each: (not re.search(r"EBROOT|HOME|ROOT", each), each))
            source = f"module show: {name} is a directory with {file}"
            yield _value(f"horovod.gpu.{key}", f"${name}", source, Weight.INFERRED)


def _mpi(machine: Machine, path: str = "") -> Iterator[Value]:
    mpirun = shutil.which("mpirun", path=path or None)
    mpi = parse_mpi_version(machine.ask(mpirun, "--version") if mpirun else "")
    kinds = [name for name, told in MPI_KINDS.items() if mpirun and told == mpi.kind]
    if kinds:
        yield _value("mpi.kind", kinds[0], "mpirun --version", Weight.INFERRED)
        if mpi.version:
            yield _value("mpi.version", mpi.version, "mpirun --version", Weight.INFERRED)


def propose(found: Found, facts: Facts) -> Found | None:
    """What a draft states that extends the recipe local; None if local does not fit.

    local is tested on machines without GPUs, brings an MPI of its own, and supports every Python that
    hvdenv runs on. Which GPUs to build for is for the user to decide.
    """
    if facts.gpus or any(each.key[-1] == "gpus" for each in found.values):
        return None
    kept = [each for each in found.facts if each.key[0] != "mpi"]
    if not any(each.key == at("horovod.frameworks") for each in kept):
        origin = Origin("proposed: tested with the recipe local")
        kept.append(Value(at("horovod.frameworks"), "torch", origin, item=True))
    return found._replace(facts=tuple(kept))

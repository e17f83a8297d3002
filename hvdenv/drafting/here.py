"""What this machine shows: modules, scheduler, network interfaces, MPI, file systems, index."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hvdenv.drafting import node
from hvdenv.drafting.modulelines import LOAD, module_role
from hvdenv.drafting.node import Seen
from hvdenv.drafting.values import COMMAND, INFERRED, Found, Left, Origin, Scalar, Value, at
from hvdenv.errors import HvdenvError
from hvdenv.launch.launchers import MPI_KINDS, parse_mpi_version
from hvdenv.model.cluster import Modules
from hvdenv.model.observe import ask_interpreter
from hvdenv.reading import SYSTEM, read_text
from hvdenv.runner import Runner
from hvdenv.sites import module_shell
from hvdenv.sites.module_shell import ModuleSystem

_MODULES_SECONDS = 120.0
# Modules to choose among, for each kind the newest ones.
_OFFERED = 8
_KINDS = {
    "Python": re.compile(r"(?:^|/)(?:python|cray-python|anaconda|miniconda)\d?/", re.IGNORECASE),
    "compiler": re.compile(r"(?:^|/)(?:gcc|gcccore|gnu)\d{0,2}/", re.IGNORECASE),
    "CUDA": re.compile(r"(?:^|/)(?:cuda|cudatoolkit|nvhpc)/", re.IGNORECASE),
    "MPI": None,
    "NCCL": None,
    "Horovod": None,
}
_SHARED = frozenset({"lustre", "gpfs", "nfs", "nfs4", "beegfs", "ceph", "wekafs", "panfs", "pvfs2"})
_QUEUES = {
    "slurm": ("sinfo", "-h", "-o", "%R|%D|%c|%m|%G|%l"),
    "pbs": ("qstat", "-Q"),
    "lsf": ("bqueues", "-w"),
    "gridengine": ("qconf", "-sql"),
}
# A partition in the output of sinfo.
_PARTITION = re.compile(
    r"(?P<name>[^|\n]{1,200})\|(?P<nodes>\d{1,9})\|(?P<cores>\d{1,9})\+?\|(?P<memory>\d{1,9})\+?"
    r"\|(?P<gres>[^|\n]{0,2000})\|(?P<limit>[^|\n]{0,40})"
)
_GPUS = re.compile(r"gpu(?::([A-Za-z][\w.-]{0,60}))?:(\d{1,6})")

Report = Callable[[str], None]


class _Machine(NamedTuple):
    """How to ask this machine."""

    runner: Runner
    report: Report

    def ask(self, *argv: str) -> str:
        if shutil.which(argv[0]):
            self.report(f"{' '.join(argv[:4])} (at most {node.SECONDS:.0f} s)")
        return node.answer(self.runner, *argv)


def look(runner: Runner, report: Report) -> Seen:
    """Look at this machine.

    Args:
        report: receives what is being looked at, and for how long at most.
    """
    seconds = 4 * node.SECONDS
    report(f"compiler, MPI, GPUs, file systems, package index (at most {seconds:.0f} s)")
    return node.look(runner)


def drafted(seen: Seen, runner: Runner, report: Report, loads: Collection[str] = ()) -> Found:
    """What this machine shows, with its scheduler and modules.

    Args:
        loads: modules that another source states.
    """
    machine = _Machine(runner, report)
    of_host = node.drafted(seen, compute=False)
    parts = [
        *_scheduler_facts(machine),
        *_module_facts(machine, tuple(loads)),
        *of_host.values,
        *of_host.left,
        *_mpi(machine, ""),
        *_file_systems(),
    ]
    return Found(
        tuple(each for each in parts if isinstance(each, Value)),
        tuple(each for each in parts if isinstance(each, Left)),
    )


def _value(key: str, value: Scalar, source: str, weight: int = COMMAND) -> Value:
    return Value(at(key), value, Origin(source), weight)


def _scheduler_facts(machine: _Machine) -> Iterator[Value | Left]:
    for name, command in _QUEUES.items():
        if listed := machine.ask(*command):
            yield _value("scheduler", name, command[0])
            if name == "slurm":
                yield from partitions(listed)
            else:
                told = f"queues: {' '.join(listed.split())[:300]}"
                yield Left(Origin(" ".join(command)), told, understood=True)
            return


def partitions(listed: str) -> Iterator[Value]:
    """Facts about nodes in the output of sinfo, and a job on those with GPUs.

    Where nodes of a partition differ: the largest.
    """
    nodes: dict[str, dict[str, int]] = {}
    words: dict[tuple[str, str], str] = {}
    for line in map(_PARTITION.fullmatch, listed.splitlines()[:400]):
        if not line:
            continue
        name, gpus = line["name"].strip(), _GPUS.search(line["gres"])
        facts = {
            "cores": int(line["cores"]),
            "memory_gb": int(line["memory"]) // 1024,
            "gpus": int(gpus[2]) if gpus else 0,
        }
        known = nodes.setdefault(name, {"nodes": 0})
        known["nodes"] += int(line["nodes"])
        known |= {key: max(number, known.get(key, 0)) for key, number in facts.items()}
        if gpus and gpus[1]:
            words[name, "gpu"] = gpus[1]
        if re.fullmatch(r"(?:\d+-)?\d+:\d\d:\d\d", line["limit"].strip()):
            words[name, "max_time"] = line["limit"].strip()
    numbers = {
        (name, key): number for name, facts in nodes.items() for key, number in facts.items()
    }
    every: dict[tuple[str, str], Scalar] = {**numbers, **words}
    for (name, key), value in every.items():
        if value:
            yield Value(("partitions", name, key), value, Origin("sinfo"))
        if value and key == "gpus":
            yield _value("job.partition", name, f"sinfo: {name} has GPUs", INFERRED)


def _module_facts(machine: _Machine, loads: tuple[str, ...]) -> Iterator[Value | Left]:
    machine.report(f"modules (at most {_MODULES_SECONDS:.0f} s)")
    try:
        system = module_shell.detect(machine.runner)
        if system is None:
            return
        listed = module_shell.try_out(
            system, Modules(), "run", machine.runner, seconds=_MODULES_SECONDS, listing=True
        )
        yield from offered(listed.available, loads)
        if loads:
            yield from _loaded(machine, system, loads)
    except HvdenvError as error:
        told = " ".join([error.message, error.detail])[:400]
        yield Left(Origin("modules"), f"{told}; `hvdenv check` says more")


def offered(names: Iterable[str], loads: Collection[str]) -> Iterator[Value]:
    """Modules to choose from, of each kind that none of ``loads`` is."""
    listed = sorted({*names}, key=_by_version)
    for kind in _KINDS:
        if not any(_is_kind(name, kind) for name in loads):
            for name in [name for name in listed if _is_kind(name, kind)][-_OFFERED:]:
                yield Value(LOAD, name, Origin("module avail"), item=True, role=kind)


def _is_kind(name: str, kind: str) -> bool:
    pattern = _KINDS[kind]
    return module_role(name) == kind or bool(pattern and pattern.search(name))


def _by_version(name: str) -> tuple[str, list[int]]:
    family, _, version = name.rpartition("/")
    return family.lower(), [int(part) for part in re.findall(r"\d{1,9}", version)]


def _loaded(machine: _Machine, system: ModuleSystem, loads: tuple[str, ...]) -> Iterator[Value]:
    """What the page's modules set here, and what the programs in them are."""
    machine.report(f"module load {' '.join(loads)} (at most {_MODULES_SECONDS:.0f} s)")
    modules = Modules(load=loads)
    loaded = module_shell.load(system, modules, "run", machine.runner, seconds=_MODULES_SECONDS)
    yield from folders(loaded.set)
    inside = machine._replace(runner=machine.runner.changed(loaded.set, loaded.unset))
    path = loaded.set.get("PATH", "")
    yield from _mpi(inside, path)
    python = shutil.which("python3", path=path) or ""
    of_module = python and any(module_role(name) == "Python" for name in loads)
    if of_module and (interpreter := ask_interpreter(python, inside.runner)):
        source = f"{python} --version, with the modules loaded"
        yield _value("python.version", f"=={interpreter.version}", source, INFERRED)


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
            yield _value(f"horovod.gpu.{key}", f"${name}", source, INFERRED)


def _mpi(machine: _Machine, path: str) -> Iterator[Value]:
    mpirun = shutil.which("mpirun", path=path or None)
    if not mpirun:
        return
    mpi = parse_mpi_version(machine.ask(mpirun, "--version"))
    kind = next((name for name, told in MPI_KINDS.items() if told == mpi.kind), "")
    if not kind:
        return
    yield _value("mpi.kind", kind, "mpirun --version", INFERRED)
    if mpi.version:
        yield _value("mpi.version", mpi.version, "mpirun --version", INFERRED)
    info = shutil.which("ompi_info", path=path or None)
    told = machine.ask(info, "--parsable", "--all") if info else ""
    if "mpi_built_with_cuda_support:value:true" in told:
        yield _value("mpi.cuda_aware", True, "ompi_info --parsable --all", INFERRED)


def _file_systems() -> Iterator[Left]:
    try:
        mounts = read_text("/proc/mounts", SYSTEM, errors="replace")
    except OSError:
        return
    fields = (line.split() for line in mounts.splitlines())
    shared = {f"{each[1]} ({each[2]})" for each in fields if len(each) > 2 and each[2] in _SHARED}
    if shared:
        told = f"file systems that other hosts may share: {', '.join(sorted(shared)[:12])}"
        told += "; choose one for places.environments"
        yield Left(Origin("/proc/mounts"), told, understood=True)

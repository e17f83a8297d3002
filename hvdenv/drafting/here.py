"""What this machine shows: modules, scheduler, network interfaces, MPI, file systems, index."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hvdenv.drafting import node
from hvdenv.drafting.modulelines import role_of
from hvdenv.drafting.values import COMMAND, INFERRED, Found, Key, Left, Origin, Scalar, Value, at
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
    "MPI": None, "NCCL": None, "Horovod": None,
}  # fmt: skip
_SINFO = ("sinfo", "-h", "-o", "%R|%D|%c|%m|%G|%l")
_SHARED = frozenset({"lustre", "gpfs", "nfs", "nfs4", "beegfs", "ceph", "wekafs", "panfs", "pvfs2"})
_QUEUES = {"pbs": ("qstat", "-Q"), "lsf": ("bqueues", "-w"), "gridengine": ("qconf", "-sql")}

Report = Callable[[str], None]


class _Machine(NamedTuple):
    """How to ask this machine."""

    runner: Runner
    report: Report

    def ask(self, *argv: str) -> str:
        if shutil.which(argv[0]):
            self.report(f"{' '.join(argv[:4])} (at most {node.SECONDS:.0f} s)")
        return node.answer(self.runner, *argv)


def look(runner: Runner, report: Report, loads: Collection[str] = ()) -> Found:
    """Look at this machine.

    Args:
        report: receives what is being looked at, and for how long at most.
        loads: modules that another source states.
    """
    machine = _Machine(runner, report)
    values, left = list[Value](), list[Left]()
    for part in (_of_scheduler(machine), _of_modules(machine, loads), _of_host(machine)):
        for each in part:
            (values if isinstance(each, Value) else left).append(each)  # type: ignore[arg-type]
    return Found(tuple(values), tuple(left))


def _value(
    key: Key, value: Scalar, source: str, weight: int = COMMAND, *, item: bool = False
) -> Value:
    return Value(key, value, Origin(source), weight, item=item)


def _seen(source: str, told: str) -> Left:
    return Left(Origin(source), told, understood=True)


def _of_scheduler(machine: _Machine) -> Iterator[Value | Left]:
    if listed := machine.ask(*_SINFO):
        yield _value(at("scheduler"), "slurm", "sinfo")
        yield from partitions(listed)
        return
    for name, command in _QUEUES.items():
        if listed := machine.ask(*command):
            yield _value(at("scheduler"), name, command[0])
            yield _seen(" ".join(command), f"queues: {' '.join(listed.split())[:300]}")
            return


def partitions(listed: str) -> Iterator[Value | Left]:
    """Facts about nodes in the output of sinfo. Where nodes of a partition differ: the largest."""
    nodes: dict[str, dict[str, int | str]] = {}
    for line in listed.splitlines()[:400]:
        fields = line.split("|")
        if len(fields) != 6:
            continue
        name, count, cores, memory, gres, limit = (each.strip() for each in fields)
        facts = nodes.setdefault(name, {})
        facts["nodes"] = int(facts.get("nodes", 0)) + _number(count)
        for key, number in (("cores", _number(cores)), ("memory_gb", _number(memory) // 1024)):
            facts[key] = max(int(facts.get(key, 0)), number)
        if found := re.search(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres):
            facts["gpus"] = max(int(facts.get("gpus", 0)), int(found[2]))
            facts |= {"gpu": found[1]} if found[1] else {}
        if re.fullmatch(r"(?:\d+-)?\d+:\d\d:\d\d", limit):
            facts["max_time"] = limit
    for name, facts in nodes.items():
        for key, value in facts.items():
            if value:
                yield _value(("partitions", name, key), value, "sinfo")


def _number(text: str) -> int:
    found = re.match(r"\d{1,9}", text)
    return int(found[0]) if found else 0


def _of_modules(machine: _Machine, loads: Collection[str]) -> Iterator[Value | Left]:
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
            yield from _loaded(machine, system, tuple(loads))
    except HvdenvError as error:
        told = " ".join([error.message, error.detail])[:400]
        yield Left(Origin("modules"), f"{told}; `hvdenv check` says more")


def offered(names: Iterable[str], loads: Collection[str]) -> Iterator[Value]:
    listed = sorted(set(names), key=_by_version)
    for kind in _KINDS:
        if any(_is_kind(name, kind) for name in loads):
            continue
        for name in [name for name in listed if _is_kind(name, kind)][-_OFFERED:]:
            yield _value(at("modules.load", kind), name, "module avail", item=True)


def _is_kind(name: str, kind: str) -> bool:
    pattern = _KINDS[kind]
    return role_of(name) == kind or bool(pattern and pattern.search(name))


def _by_version(name: str) -> tuple[str, list[int]]:
    family, _, version = name.rpartition("/")
    return family.lower(), [int(part) for part in re.findall(r"\d{1,9}", version)]


def _loaded(machine: _Machine, system: ModuleSystem, loads: tuple[str, ...]) -> Iterator[Value]:
    """What the page's modules set here, and what the programs in them are."""
    modules = Modules(load=loads)
    machine.report(f"module load {' '.join(loads)} (at most {_MODULES_SECONDS:.0f} s)")
    loaded = module_shell.load(system, modules, "run", machine.runner, seconds=_MODULES_SECONDS)
    yield from folders(loaded.set)
    inside = machine._replace(runner=machine.runner.changed(loaded.set, loaded.unset))
    path = loaded.set.get("PATH", "")
    yield from _mpi(inside, path)
    python = shutil.which("python3", path=path) or ""
    of_module = python and any(role_of(name) == "Python" for name in loads)
    if of_module and (interpreter := ask_interpreter(python, inside.runner)):
        source = f"{python} --version, with the modules loaded"
        yield _value(at("python.version"), f"=={interpreter.version}", source, INFERRED)


def folders(variables: dict[str, str]) -> Iterator[Value]:
    """Variables of modules that name the folders of CUDA and NCCL."""
    for key, file in (("nccl_home", "include/nccl.h"), ("cuda_home", "bin/nvcc")):
        fitting = [
            name for name, value in variables.items()
            if value.startswith("/") and ":" not in value and Path(value, file).is_file()
        ]  # fmt: skip
        if fitting:
            name = min(fitting, key=lambda each: (not re.search(r"EBROOT|HOME|ROOT", each), each))
            source = f"module show: {name} is a folder with {file}"
            yield _value(at("horovod.gpu", key), f"${name}", source, INFERRED)


def _mpi(machine: _Machine, path: str) -> Iterator[Value]:
    mpirun = shutil.which("mpirun", path=path or None)
    if not mpirun:
        return
    mpi = parse_mpi_version(machine.ask(mpirun, "--version"))
    kind = next((name for name, told in MPI_KINDS.items() if told == mpi.kind), "")
    if not kind:
        return
    yield _value(at("mpi.kind"), kind, "mpirun --version", INFERRED)
    if mpi.version:
        yield _value(at("mpi.version"), mpi.version, "mpirun --version", INFERRED)
    info = shutil.which("ompi_info", path=path or None)
    told = machine.ask(info, "--parsable", "--all") if info else ""
    if "mpi_built_with_cuda_support:value:true" in told:
        yield _value(at("mpi.cuda_aware"), True, "ompi_info --parsable --all", INFERRED)


def _of_host(machine: _Machine) -> Iterator[Value | Left]:
    seconds = 4 * node.SECONDS
    machine.report(f"compiler, MPI, GPUs, file systems, package index (at most {seconds:.0f} s)")
    seen = node.drafted(node.look(machine.runner), compute=False)
    yield from seen.values
    yield from seen.left
    yield from _mpi(machine, "")
    yield from _file_systems()


def _file_systems() -> Iterator[Left]:
    try:
        mounts = read_text("/proc/mounts", SYSTEM, errors="replace")
    except OSError:
        return
    fields = (line.split() for line in mounts.splitlines())
    shared = {f"{each[1]} ({each[2]})" for each in fields if len(each) > 2 and each[2] in _SHARED}
    if shared:
        told = f"file systems that other hosts may share: {', '.join(sorted(shared)[:12])}"
        yield _seen("/proc/mounts", f"{told}; choose one for places.environments")

"""What this machine, and a compute node, show: scheduler, modules, MPI, GPUs, networks, index."""

import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.errors import HvdenvError
from hvdenv.base.places import home_folder, write_json
from hvdenv.base.reading import SYSTEM, read_text
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.drafting.modules import module_role
from hvdenv.drafting.values import LOAD, Fact, Found, Left, Origin, Scalar, Value, Weight, at
from hvdenv.model.cluster import Architecture, Modules
from hvdenv.model.facts import Facts
from hvdenv.model.observe import ask, ask_interpreter, observe
from hvdenv.sites import module_shell
from hvdenv.sites.batch import counted
from hvdenv.sites.launchers import MPI_KINDS, parse_mpi_version
from hvdenv.sites.modules import module_family

_SECONDS, _MODULES_SECONDS = 15.0, 120.0
_INDEX = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10).read(100)"
_INDEX_URL = "https://pypi.org/simple/pip/"
# Modules to choose among, for each kind the newest ones.
_OFFERED = 8
_FAMILIES = {
    "compiler": re.compile(r"^(?:gcc|gcccore|gnu)\d{0,2}$"),
    "CUDA": re.compile(r"^(?:cuda|cudatoolkit|nvhpc)$"),
}
_KINDS = ("Python", *_FAMILIES, "MPI", "NCCL", "Horovod")
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


class Seen(NamedTuple):
    """What a host shows.

    Attributes:
        capabilities: compute capabilities of its NVIDIA GPUs without dots.
        cuda: the newest CUDA that the driver supports.
        interfaces: InfiniBand, Omni-Path and Slingshot that are up.
        indexed: whether the package index is reached.
    """

    facts: Facts
    capabilities: tuple[str, ...] = ()
    cuda: str = ""
    interfaces: tuple[str, ...] = ()
    indexed: bool = False


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


def look(machine: Machine) -> Seen:
    seconds = 4 * _SECONDS
    machine.report(f"compiler, MPI, GPUs, file systems, package index (at most {seconds:.0f} s)")
    facts = observe(home_folder(), machine.runner, thorough=True)
    query = ("--query-gpu=compute_cap,driver_version", "--format=csv,noheader")
    listed = machine.ask("nvidia-smi", *query)
    gpus = re.findall(r"^(\d{1,3}\.\d), *([\d.]{1,20})", listed, re.M)
    cuda = re.search(r"CUDA Version: (\d{1,3}\.\d{1,2})", machine.ask("nvidia-smi"))
    index = machine.runner.run(Command((OWN_PYTHON, "-c", _INDEX, _INDEX_URL), timeout=_SECONDS))
    return Seen(
        facts=facts._replace(driver=gpus[0][1] if gpus else facts.driver),
        capabilities=tuple(sorted({capability for capability, _ in gpus})),
        cuda=cuda[1] if cuda else "",
        interfaces=tuple(_interfaces()),
        indexed=bool(index),
    )


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


def of_host(seen: Seen, *, compute: bool) -> Found:
    """What a host shows, as values of a recipe and for people.

    Args:
        compute: whether it is a node of the job's partition.
    """
    facts = seen.facts
    origin = Origin(f"{'compute node' if compute else 'this host'} {facts.host}")
    weight = Weight.COMMAND if compute else Weight.INFERRED
    values = [Value(at("network.use"), each, origin, weight, item=True) for each in seen.interfaces]
    stated = {
        "arch": facts.machine if facts.machine in get_args(Architecture) else "",
        "glibc": facts.glibc,
        "capability": seen.capabilities[0].replace(".", "") if len(seen.capabilities) == 1 else "",
        "cuda": seen.cuda,
    }
    for key, fact in stated.items() if compute else ():
        values += [Value(("partitions", "", key), fact, origin, weight)] if fact else []
    # Reported even if the host has values, which would replace what has the same origin.
    told = origin._replace(text="as a whole")
    left = [Left(told, each, understood=True) for each in _told(seen)]
    return Found((*values, *left))


def _told(seen: Seen) -> Iterator[str]:
    facts = seen.facts
    compiler = f"{facts.cxx.path} {facts.cxx.version}" if facts.cxx else "none"
    yield f"{facts.machine}, glibc {facts.glibc}, {facts.cores} cores, g++: {compiler}"
    if facts.gpus or seen.capabilities:
        names, capabilities = ", ".join(sorted({*facts.gpus})), ", ".join(seen.capabilities)
        count = counted(len(facts.gpus), "GPU")
        yield f"{count} ({names}), capability {capabilities}, driver {facts.driver}"
    else:
        yield "no GPU"
    yield f"{_INDEX_URL} {'is' if seen.indexed else 'is not'} reached"


def drafted(seen: Seen, machine: Machine, loads: Collection[str] = ()) -> Found:
    """What this machine shows, with its scheduler and modules.

    Args:
        loads: modules that another source states.
    """
    scheduler = [*_scheduler_facts(machine)]
    modules = [*_module_facts(machine, tuple(loads))]
    mpi = _mpi(machine)
    host = of_host(seen, compute=False).facts
    return Found((*scheduler, *modules, *host, *mpi, *_file_systems()))


def _value(key: str, value: Scalar, source: str, weight: int = Weight.COMMAND) -> Value:
    return Value(at(key), value, Origin(source), weight)


def _scheduler_facts(machine: Machine) -> Iterator[Fact]:
    for name, command in _QUEUES.items():
        if listed := machine.ask(*command):
            yield _value("scheduler", name, command[0])
            told = f"queues: {' '.join(listed.split())[:300]}"
            queues = Left(Origin(" ".join(command)), told, understood=True)
            yield from partitions(listed) if name == "slurm" else [queues]
            return


def partitions(listed: str) -> Iterator[Value]:
    """Facts about nodes in the output of sinfo, and a job on those with GPUs.

    Where nodes of a partition differ: the largest.
    """
    facts: dict[str, dict[str, int]] = {}
    words: dict[str, dict[str, str]] = {}
    for line in filter(None, map(_PARTITION.fullmatch, listed.splitlines()[:400])):
        name, gpus = line["name"].strip(), _GPUS.search(line["gres"])
        known = facts.setdefault(name, {})
        known["nodes"] = known.get("nodes", 0) + int(line["nodes"])
        for key, number in (
            ("cores", int(line["cores"])),
            ("memory_gb", int(line["memory"]) // 1024),
            ("gpus", int(gpus[2]) if gpus else 0),
        ):
            known[key] = max(number, known.get(key, 0))
        told = words.setdefault(name, {})
        told |= {"gpu": gpus[1]} if gpus and gpus[1] else {}
        if re.fullmatch(r"(?:\d+-)?\d+:\d\d:\d\d", line["limit"].strip()):
            told["max_time"] = line["limit"].strip()
    for name, known in facts.items():
        every: dict[str, Scalar] = {**known, **words[name]}
        for key, value in every.items():
            yield from [Value(("partitions", name, key), value, Origin("sinfo"))] if value else []
        if known["gpus"]:
            yield _value("job.partition", name, f"sinfo: {name} has GPUs", Weight.INFERRED)


def _module_facts(machine: Machine, loads: tuple[str, ...]) -> Iterator[Fact]:
    limit = f"(at most {_MODULES_SECONDS:.0f} s)"
    machine.report(f"modules {limit}")
    try:
        system = module_shell.detect(machine.runner)
        if system is None:
            return
        listed = module_shell.try_out(
            system, Modules(), "run", machine.runner, seconds=_MODULES_SECONDS, listing=True
        )
        yield from offered(listed.available, loads)
        if loads:
            machine.report(f"module load {' '.join(loads)} {limit}")
            loaded = module_shell.load(
                system, Modules(load=loads), "run", machine.runner, seconds=_MODULES_SECONDS
            )
            inside = machine.runner.changed(loaded.set, loaded.unset)
            yield from _loaded(machine._replace(runner=inside), loads, loaded.set)
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
    family = module_family(name).rpartition("/")[2]
    known = _FAMILIES[kind].match(family) if "/" in name and kind in _FAMILIES else None
    return module_role(name) == kind or bool(known)


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
    mpirun, info = (shutil.which(name, path=path or None) for name in ("mpirun", "ompi_info"))
    mpi = parse_mpi_version(machine.ask(mpirun, "--version") if mpirun else "")
    kinds = [name for name, told in MPI_KINDS.items() if mpirun and told == mpi.kind]
    if kinds:
        yield _value("mpi.kind", kinds[0], "mpirun --version", Weight.INFERRED)
        if mpi.version:
            yield _value("mpi.version", mpi.version, "mpirun --version", Weight.INFERRED)
        told = machine.ask(info, "--parsable", "--all") if info else ""
        if "mpi_built_with_cuda_support:value:true" in told:
            yield _value("mpi.cuda_aware", True, "ompi_info --parsable --all", Weight.INFERRED)


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


if __name__ == "__main__":
    found = look(Machine(Runner()))
    write_json(Path(sys.argv[1]), encode(found), 0o600)
    print(f"looked at {found.facts.host}", flush=True)

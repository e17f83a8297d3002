"""Facts about a machine: observed on it, or declared in a file."""

import re
from typing import Annotated, Literal, NamedTuple

from hvdenv.base.schema import Pattern
from hvdenv.model.cluster import Partition
from hvdenv.model.recipe import Version

Number = Annotated[str, Pattern(r"([0-9]+(\.[0-9]+)*)?", "a version such as 12.2.0, or nothing")]


class Interpreter(NamedTuple):
    """A Python interpreter that can create environments.

    Attributes:
        complete: whether it has its headers and the modules that an environment needs.
    """

    path: str
    version: Version
    complete: bool = True


class Tool(NamedTuple):
    """A program on PATH. The version is empty if it is unknown."""

    path: str
    version: Number = ""


class Facts(NamedTuple):
    """Facts about one machine.

    Attributes:
        origin: ``observed`` on this machine, or ``declared`` in a file.
        cores: processors that this process can use.
        interpreters: Pythons found, best first.
        disk_free, inodes_free: of the file system of the environment, in bytes and inodes;
            None if unknown.
        driver: version of the NVIDIA driver.
        memory: bytes that this process can use.
        variables: names of set variables that change how programs of the environment work.
            Values are left out, because they can contain passwords.
        shell_libraries: libraries that every program finds first, by LD_LIBRARY_PATH of this shell.
        tmp_free: free bytes in TMPDIR or in hvdenv's own directory, if that has less; None if unknown.
        noexec: whether programs cannot run from the environment or from hvdenv's own directory.
    """

    origin: Literal["observed", "declared"]
    host: str
    system: str
    machine: str
    glibc: Number
    cpu_flags: tuple[str, ...]
    cores: int
    interpreters: tuple[Interpreter, ...]
    cc: Tool | None = None
    cxx: Tool | None = None
    cmake: Tool | None = None
    mpirun: Tool | None = None
    nvcc: Tool | None = None
    gpus: tuple[str, ...] = ()
    disk_free: int | None = None
    inodes_free: int | None = None
    driver: Number = ""
    memory: int | None = None
    variables: tuple[str, ...] = ()
    shell_libraries: tuple[str, ...] = ()
    tmp_free: int | None = None
    noexec: bool = False


def of_partition(name: str, nodes: Partition, here: Facts) -> Facts:
    """What a recipe declares about its nodes, for a plan that is made on another machine.

    Args:
        here: facts of this machine: its Pythons, and what the recipe does not declare.
    """
    return Facts(
        origin="declared",
        host=f"partition {name}",
        system=here.system,
        machine=nodes.arch,
        glibc=nodes.glibc or "",
        cpu_flags=(),
        cores=nodes.cores or here.cores,
        interpreters=here.interpreters,
        cc=Tool("/usr/bin/gcc"),
        cxx=Tool("/usr/bin/g++"),
        memory=nodes.memory_gb * 10**9 if nodes.memory_gb and nodes.cores else None,
    )


# The command that prints a program's version, and the pattern that finds it in the output.
VERSION_QUESTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "cc": (("gcc", "-dumpfullversion", "-dumpversion"), r"^(\d+(?:\.\d+)*)$"),
    "cxx": (("g++", "-dumpfullversion", "-dumpversion"), r"^(\d+(?:\.\d+)*)$"),
    "cmake": (("cmake", "--version"), r"^cmake\S* version (\d+(?:\.\d+)*)"),
    "mpirun": (("mpirun", "--version"), r"(?<!\d)(\d+\.\d+(?:\.\d+)?)"),
    "nvcc": (("nvcc", "--version"), r"release (\d+\.\d+)"),
}


def parse_version(fact: str, output: str) -> str:
    """The version in a program's output; empty if there is none."""
    found = re.search(VERSION_QUESTIONS[fact][1], output, re.MULTILINE)
    return found.group(1) if found else ""


def parse_cpu_flags(text: str) -> tuple[str, ...]:
    """Instruction set extensions from /proc/cpuinfo."""
    flags = re.search(r"^(?:flags|Features)[ \t]*:[ \t]*(\S.*)$", text, re.MULTILINE)
    return tuple(sorted(flags.group(1).split())) if flags else ()


def parse_driver(text: str) -> str:
    """The driver's version in /proc/driver/nvidia/version."""
    found = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.MULTILINE)
    return found.group(1) if found else ""


def parse_memory(meminfo: str, limit: str = "") -> int | None:
    """Bytes in /proc/meminfo, or the limit of the control group if that is lower."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    known = [int(total.group(1)) * 1024] if total else []
    known += [int(limit)] if limit.strip().isdecimal() else []
    return min(known, default=None)

"""Observing the facts of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hvdenv.command import Command
from hvdenv.errors import RecipeError, StepError
from hvdenv.model.facts import (
    VERSION_QUESTIONS,
    Facts,
    Interpreter,
    Tool,
    parse_cpuinfo,
    parse_driver,
    parse_memory,
    parse_quota,
    parse_version,
)
from hvdenv.reading import FACTS, SYSTEM, read_json, read_text
from hvdenv.runner import Runner, environment
from hvdenv.schema import Problem, decode
from hvdenv.trust import faults_on_way, own_policy

QUESTION_SECONDS = 10.0

# Where builds look for a program that is not on PATH.
_USUAL_PLACES = {"nvcc": "/usr/local/cuda/bin/nvcc"}

# What a shell may have set, and an activated environment would listen to.
_SPOKEN_OF = (
    r"(?i:https?_proxy|no_proxy|all_proxy)"
    r"|HOROVOD_\w+|NCCL_\w+|OMPI_MCA_\w+|UCX_\w+|LD_PRELOAD|CUDA_VISIBLE_DEVICES"
)

# What environments, pip and the frameworks import. A Python that was compiled where libffi or
# OpenSSL had no headers has no _ctypes or _ssl, and says so only when they are wanted.
_MODULES = ("ensurepip", "venv", "_ctypes", "_ssl", "zlib")
_ASK_INTERPRETER = (
    "import os, sys, sysconfig, importlib.util as u; "
    "print('.'.join(map(str, sys.version_info[:3])), "
    f"all(map(u.find_spec, {_MODULES})), "
    "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
)


def observe(place: Path, runner: Runner, *, thorough: bool) -> Facts:
    """Look at this machine.

    Args:
        place: where the environment will lie; its nearest existing parent is asked for space.
        runner: starts the programs that are asked for their version.
        thorough: also what complete() adds.
    """
    model, flags = parse_cpuinfo(_read("/proc/cpuinfo"))
    disk_free, inodes_free = space(place)
    facts = Facts(
        origin="observed",
        host=os.uname().nodename,
        system=os.uname().sysname,
        machine=os.uname().machine,
        glibc=_glibc(),
        cpu=model,
        cpu_flags=flags,
        cores=len(os.sched_getaffinity(0)),
        root=os.geteuid() == 0,
        interpreters=(own_interpreter(), *_candidates()),
        disk_free=disk_free,
        inodes_free=inodes_free,
        tmp_free=_temporary_space(),
        cc=_tool("cc", runner),
        cxx=_tool("cxx", runner),
    )
    return complete(facts, runner) if thorough else facts


def complete(facts: Facts, runner: Runner) -> Facts:
    """Add what no plan depends on: CMake, MPI, CUDA, GPUs, quota."""
    return facts._replace(
        quota_free=quota(runner),
        gpus=gpus(),
        driver=parse_driver(_read("/proc/driver/nvidia/version")),
        memory=parse_memory(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max")),
        variables=_variables(),
        cmake=_tool("cmake", runner),
        mpirun=_tool("mpirun", runner),
        nvcc=_tool("nvcc", runner),
    )


def declared(path: Path) -> Facts:
    """Facts from a JSON file, as ``hvdenv plan --facts`` takes them.

    Raises:
        RecipeError: the file cannot be read or does not hold facts.
    """
    try:
        return decode(Facts, read_json(path, FACTS))._replace(origin="declared")
    except OSError as error:
        raise RecipeError(f"cannot read this file: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise RecipeError(f"not valid JSON: {error}", where=str(path)) from error
    except Problem as problem:
        raise RecipeError(str(problem), where=str(path)) from problem


def own_interpreter() -> Interpreter:
    """The interpreter that hvdenv itself runs on, not the virtual environment around it."""
    base = getattr(sys, "_base_executable", sys.executable)
    executable = Path(os.path.realpath(base))
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    complete = headers and all(map(importlib.util.find_spec, _MODULES))
    return Interpreter(str(executable), ".".join(map(str, sys.version_info[:3])), complete)


def ask_interpreter(path: str, runner: Runner) -> Interpreter | None:
    """Run an interpreter to learn its version and whether it is complete."""
    try:
        outcome = runner.run(
            Command((path, "-I", "-c", _ASK_INTERPRETER), timeout=QUESTION_SECONDS)
        )
    except StepError:
        return None
    answer = re.fullmatch(r"(\S+) (True|False) (True|False)", outcome.output.strip())
    if not outcome or not answer:
        return None
    version, modules, headers = answer.groups()
    return Interpreter(path, version, modules == headers == "True")


def _candidates() -> Iterator[Interpreter]:
    """Other interpreters by the version that their place gives away; nothing is run."""
    seen: set[str] = set()
    named = [Path(each) for each in environment().get("PATH", "").split(":") if each]
    for folder in [*named, *_version_folders()]:
        for path in _files(folder, "python3.[0-9]*"):
            found = re.fullmatch(r"python(3\.\d+)", path.name)
            real = os.path.realpath(path)
            if (
                found
                and real not in seen
                and os.access(path, os.X_OK)
                and "shims" not in path.parts
                and (folder in named or not _foreign(path))
            ):
                seen.add(real)
                yield Interpreter(str(path), found.group(1))


def _version_folders() -> Iterator[Path]:
    """Where version managers and administrators put interpreters that are not on PATH."""
    for pattern in (
        ".pyenv/versions/3*/bin",
        ".local/share/uv/python/cpython-3*/bin",
        ".asdf/installs/python/3*/bin",
        ".local/share/mise/installs/python/3*/bin",
    ):
        yield from reversed(_files(Path.home(), pattern))
    yield from (Path("/usr/bin"), Path("/usr/local/bin"), *_files(Path("/opt"), "*/bin"))


def _files(folder: Path, pattern: str) -> list[Path]:
    """What fits in a folder, sorted; nothing if this user may not look: PATH is often root's."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _foreign(program: Path) -> bool:
    """Whether somebody else could have put a program there: HOME may be another user's."""
    return next(faults_on_way(program, own_policy()), None) is not None


def _tool(name: str, runner: Runner) -> Tool | None:
    argv, _ = VERSION_QUESTIONS[name]
    path = shutil.which(argv[0]) or shutil.which(_USUAL_PLACES.get(name, ""))
    if path is None:
        return None
    try:
        outcome = runner.run(Command((path, *argv[1:]), timeout=QUESTION_SECONDS))
    except StepError:
        return Tool(path)
    return Tool(path, parse_version(name, outcome.output))


def _read(path: str) -> str:
    try:
        return read_text(path, SYSTEM, errors="replace")
    except OSError:
        return ""


def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (OSError, ValueError):
        return ""


def space(place: Path) -> tuple[int | None, int | None]:
    """Bytes and inodes that are free where a folder lies or will lie; None if nobody says it."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError:
        return None, None
    # Btrfs and some network file systems count no inodes: 0 of 0.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _temporary_space() -> int | None:
    """Bytes that are free in TMPDIR; 0 where there is no folder that a file fits into."""
    try:
        return space(Path(tempfile.gettempdir()))[0]
    except OSError:
        return 0


def quota(runner: Runner) -> int | None:
    """Bytes that the user's tightest quota leaves; None if there is none that can be asked."""
    path = shutil.which("quota")
    if path is None:
        return None
    try:
        outcome = runner.run(
            Command(
                (path, "-w", "-p", "--show-mntpoint", "--hide-device"), timeout=QUESTION_SECONDS
            )
        )
    except StepError:
        return None
    return parse_quota(outcome.output)


def _variables() -> tuple[str, ...]:
    return tuple(sorted(name for name in environment() if re.fullmatch(_SPOKEN_OF, name)))


def gpus() -> tuple[str, ...]:
    """GPUs that the NVIDIA driver lists; no driver, no GPU."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:[ \t]*(\S.*)$", _read(str(path)), re.MULTILINE)
        names.append(found.group(1).strip() if found else "NVIDIA GPU")
    return tuple(names)

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
from contextlib import suppress
from pathlib import Path

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import RecipeError, StepError
from hvdenv.base.places import find_places, home_folder
from hvdenv.base.reading import FACTS, SYSTEM, read_json, read_text
from hvdenv.base.runner import Runner, environment
from hvdenv.base.schema import Problem, decode
from hvdenv.base.trust import judge_way, trusted_owners
from hvdenv.model.facts import (
    VERSION_QUESTIONS,
    Facts,
    Interpreter,
    Tool,
    parse_cpu_flags,
    parse_driver,
    parse_memory,
    parse_version,
)

QUESTION_SECONDS = 10.0

# Where builds look for programs that are not on PATH.
_USUAL_PLACES = {"nvcc": "/usr/local/cuda/bin/nvcc"}

# Variables of a shell that would change an activated environment.
_RELEVANT = (
    r"(?i:https?_proxy|no_proxy|all_proxy)"
    r"|HOROVOD_\w+|NCCL_\w+|OMPI_MCA_\w+|UCX_\w+|LD_PRELOAD|CUDA_VISIBLE_DEVICES"
)

# Modules that environments, pip and the frameworks import. A Python that was compiled without the
# headers of libffi or OpenSSL lacks _ctypes or _ssl, and fails only when something imports them.
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
        thorough: also what complete() adds.
    """
    disk_free, inodes_free = space(place)
    home = find_places().home
    facts = Facts(
        origin="observed",
        host=os.uname().nodename,
        system=os.uname().sysname,
        machine=os.uname().machine,
        glibc=_glibc(),
        cpu_flags=parse_cpu_flags(_read("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        interpreters=(own_interpreter(), *_candidates()),
        disk_free=disk_free,
        inodes_free=inodes_free,
        tmp_free=min(
            (each for each in (_temporary_space(), space(home)[0]) if each is not None),
            default=None,
        ),
        noexec=_is_noexec(place) or _is_noexec(home),
        cc=_tool("cc", runner),
        cxx=_tool("cxx", runner),
    )
    return complete(facts, runner) if thorough else facts


def complete(facts: Facts, runner: Runner) -> Facts:
    """Add what no plan depends on: CMake, MPI, CUDA, GPUs, memory."""
    return facts._replace(
        gpus=gpus(),
        driver=parse_driver(_read("/proc/driver/nvidia/version")),
        memory=parse_memory(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max")),
        shell_libraries=tuple(sorted(_shell_libraries())),
        variables=tuple(sorted(n for n in environment() if re.fullmatch(_RELEVANT, n))),
        cmake=_tool("cmake", runner),
        mpirun=_tool("mpirun", runner),
        nvcc=_tool("nvcc", runner),
    )


def declared(path: Path) -> Facts:
    """Facts from a JSON file, for ``--facts``.

    Raises:
        RecipeError: the file cannot be read or has no valid facts.
    """
    try:
        return decode(Facts, read_json(path, FACTS))._replace(origin="declared")
    except OSError as error:
        why = f"cannot read this file: {error.strerror}"
        raise RecipeError(why, where=str(path), remedy="check its path and permissions") from error
    except (ValueError, Problem) as error:
        raise RecipeError(
            str(error) if isinstance(error, Problem) else f"not valid JSON: {error}",
            where=str(path),
            remedy="save the value of `facts` that `hvdenv plan RECIPE --json` prints on that machine",
        ) from error


def own_interpreter() -> Interpreter:
    """The interpreter that runs hvdenv, outside of its virtual environment."""
    base = getattr(sys, "_base_executable", sys.executable)
    executable = Path(os.path.realpath(base))
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    complete = headers and all(map(importlib.util.find_spec, _MODULES))
    return Interpreter(str(executable), ".".join(map(str, sys.version_info[:3])), complete)


def ask(runner: Runner, *argv: str, seconds: float = QUESTION_SECONDS) -> Outcome | None:
    """Run a program that answers a question; None if it cannot be started."""
    try:
        return runner.run(Command(argv, timeout=seconds))
    except StepError:
        return None


def ask_interpreter(path: str, runner: Runner) -> Interpreter | None:
    """Run an interpreter to get its version and whether it is complete."""
    outcome = ask(runner, path, "-I", "-c", _ASK_INTERPRETER)
    text = outcome.output.strip() if outcome else ""
    answer = re.fullmatch(r"(\S+) (True|False) (True|False)", text)
    if not answer:
        return None
    version, modules, headers = answer.groups()
    return Interpreter(path, version, modules == headers == "True")


def _candidates() -> Iterator[Interpreter]:
    """Other interpreters, with the version in their file name. Runs nothing."""
    seen: set[str] = set()
    named = [Path(each) for each in environment().get("PATH", "").split(":") if each]
    for folder in dict.fromkeys([*named, *_version_folders()]):
        for path in _interpreters(folder):
            real = os.path.realpath(path)
            if (
                real not in seen
                and os.access(path, os.X_OK)
                and "shims" not in path.parts
                # Another user could have put it there: HOME can belong to another user.
                and (
                    folder in named or all(each.note for each in judge_way(path, trusted_owners()))
                )
            ):
                seen.add(real)
                yield Interpreter(str(path), path.name.removeprefix("python"))


def _interpreters(folder: Path) -> list[Path]:
    """Files in a directory that are named as an interpreter, sorted.

    Directories of programs have thousands of files, for each of which glob() makes a path.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = (each for each in names if each.startswith("python3.") and each[8:].isdecimal())
    return [folder / name for name in sorted(found)]


def _version_folders() -> Iterator[Path]:
    """Directories of version managers and administrators that are not on PATH."""
    for pattern in (
        ".pyenv/versions/3*/bin",
        ".local/share/uv/python/cpython-3*/bin",
    ):
        yield from reversed(_files(home_folder(), pattern))
    yield from (Path("/usr/bin"), Path("/usr/local/bin"), *_files(Path("/opt"), "*/bin"))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Matching files in a directory, sorted; none if this user cannot read it: PATH is often root's."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _tool(name: str, runner: Runner) -> Tool | None:
    argv, _ = VERSION_QUESTIONS[name]
    path = shutil.which(argv[0]) or shutil.which(_USUAL_PLACES.get(name, ""))
    if path is None:
        return None
    outcome = ask(runner, path, *argv[1:])
    return Tool(path, parse_version(name, outcome.output)) if outcome is not None else Tool(path)


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
    """Free bytes and inodes of a directory that need not exist yet; None if unknown."""
    found = _file_system(place)
    if found is None:
        return None, None
    # Btrfs and some network file systems report 0 of 0 inodes.
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _is_noexec(place: Path) -> bool:
    """Whether programs cannot run from a directory, which need not exist yet."""
    found = _file_system(place)
    return found is not None and bool(found.f_flag & os.ST_NOEXEC)


def _file_system(place: Path) -> os.statvfs_result | None:
    """That of a directory, or of the nearest one above it that exists; None if it is unknown."""
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    with suppress(OSError):
        return os.statvfs(place)
    return None


def _shell_libraries() -> Iterator[str]:
    """Libraries in LD_LIBRARY_PATH that an environment has, too, or that must fit its own."""
    for folder in environment().get("LD_LIBRARY_PATH", "").split(":"):
        for pattern in (
            "libstdc++.so.6",
            "libgcc_s.so.1",
            "libmpi.so*",
            "libnccl.so*",
            "libcudart.so*",
        ):
            yield from map(str, _files(Path(folder), pattern) if os.path.isabs(folder) else ())


def _temporary_space() -> int | None:
    """Free bytes in TMPDIR; 0 if no temporary directory is writable."""
    try:
        return space(Path(tempfile.gettempdir()))[0]
    except OSError:
        return 0


def gpus() -> tuple[str, ...]:
    """Names of the GPUs that the NVIDIA driver lists."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:[ \t]*(\S.*)$", _read(str(path)), re.MULTILINE)
        names.append(found.group(1).strip() if found else "NVIDIA GPU")
    return tuple(names)

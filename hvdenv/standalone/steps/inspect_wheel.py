"""Check a Horovod wheel before it is installed.

Stand-alone: imports nothing of hvdenv and runs on Python 3.8 and newer, inside the
environment that the wheel is for. Prints problems, and one JSON document as the last line;
the exit status is 1 if there is a problem.

    inspect_wheel.py WHEEL FRAMEWORK...
"""

import importlib.metadata as metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Dict, List, Optional, Tuple

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from archives import ArchiveError, content, opened_zip

# Framework: distributions that provide it, its key in metadata.json, its extension.
FRAMEWORKS = {
    "torch": (("torch",), "pytorch", "horovod/torch/mpi_lib_v2"),
    "tensorflow": (
        ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
        "tensorflow",
        "horovod/tensorflow/mpi_lib",
    ),
}


def folder_of(framework: str) -> str:
    """The directory of a framework's package, without importing it; empty if there is none."""
    spec = importlib.util.find_spec(framework)
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""


def installed_version(framework: str, distributions: Tuple[str, ...]) -> Optional[str]:
    """The framework's __version__.

    torch's is in a file and can be longer than that of its distribution: 2.13.0+cu130 in a
    package 2.13.0.
    """
    try:
        with open(os.path.join(folder_of(framework), "version.py"), encoding="utf-8") as stream:
            found = re.search(r"^__version__ = ['\"]([^'\"]+)", stream.read(), re.MULTILINE)
        if found:
            return found.group(1)
    except OSError:
        pass
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def library_folders() -> List[str]:
    """Directories of libraries that the importing process has loaded before the extension."""
    folders = [os.path.join(sys.prefix, "lib")]
    for name, below in (("torch", ("lib",)), ("tensorflow", ("", "python"))):
        if folder_of(name):
            folders += [os.path.join(folder_of(name), each) for each in below]
    # The extension's run path names this directory relative to its installed path.
    return [*folders, os.path.join(sysconfig.get_path("purelib"), "nvidia", "nccl", "lib")]


def missing_libraries(path: str) -> List[str]:
    environment = dict(os.environ)
    inherited = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = ":".join(
        library_folders() + ([inherited] if inherited else [])
    )
    listing = subprocess.run(
        ["ldd", path],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    ).stdout
    return [line.split()[0] for line in listing.split("\n") if "not found" in line]


def inspect(
    wheel: zipfile.ZipFile, framework: str, folder: str
) -> Tuple[List[str], Dict[str, Any]]:
    """Problems with one framework's extension, and facts about it."""
    names, key, stem = FRAMEWORKS[framework]
    member = stem + sysconfig.get_config_var("EXT_SUFFIX")
    if member not in wheel.namelist():
        return ["%s: the wheel has no %s: no extension was compiled" % (framework, member)], {}
    problems = []
    built_with = json.loads(content(wheel, "horovod/metadata.json").decode()).get(key)
    installed = installed_version(framework, names)
    if built_with != installed:
        problems.append(
            "%s: compiled with %s, installed is %s" % (framework, built_with, installed)
        )
    missing = missing_libraries(wheel.extract(member, folder))
    if missing:
        problems.append("%s: libraries not found: %s" % (framework, ", ".join(missing)))
    size = wheel.getinfo(member).file_size
    return problems, {"built_with": built_with, "extension": member, "bytes": size}


def inspect_all(
    stream: BinaryIO, frameworks: List[str]
) -> Tuple[List[str], Dict[str, Dict[str, Any]]]:
    problems, found = [], {}
    with opened_zip(stream) as wheel, TemporaryDirectory() as folder:
        for framework in frameworks:
            wrong, found[framework] = inspect(wheel, framework, folder)
            problems += wrong
    return problems, found


def main(path: str, frameworks: List[str]) -> None:
    try:
        with open(path, "rb") as stream:
            problems, found = inspect_all(stream, frameworks)
    except ArchiveError as error:
        problems, found = ["%s: %s" % (path, error)], {}
    for problem in problems:
        print("problem: " + problem)
    print(
        json.dumps(
            {"bytes": os.path.getsize(path), "frameworks": found, "problems": problems},
            sort_keys=True,
        )
    )
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

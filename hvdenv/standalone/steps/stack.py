"""Print what Horovod is about to be compiled against, as one JSON document.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, inside the
environment. hvdenv compares the document with that of a cached wheel.

    stack.py COMPILER [PROGRAM...]
"""

import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
from typing import Dict, Optional, Tuple

try:
    import importlib.metadata as metadata
except ImportError:  # before Python 3.8
    metadata = None  # type: ignore[assignment]

NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")}


def answer(*command: str) -> str:
    """The standard output of a program in one line; empty when the program cannot be run.

    Standard error is left out: Open MPI names host and process there in warnings.
    """
    try:
        output = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True
        ).stdout
    except OSError:
        return ""
    return re.sub(r"\s+", " ", output).strip()


def distribution(name: str) -> Optional[Tuple[str, str]]:
    """Version and list of files of an installed distribution; None if there is none."""
    if metadata:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return None
        return found.version, found.read_text("RECORD") or ""
    import pkg_resources

    try:
        found = pkg_resources.get_distribution(name)
    except pkg_resources.DistributionNotFound:
        return None
    return found.version, found.get_metadata("RECORD") if found.has_metadata("RECORD") else ""


def framework(names: Tuple[str, ...]) -> Optional[Dict[str, str]]:
    """Version of a framework, and a hash of its list of files to tell two builds apart."""
    for name in names:
        found = distribution(name)
        if not found:
            continue
        version, listed = found
        # Scripts contain the environment's directory, and compiled files a time.
        files = [
            line
            for line in listed.split("\n")
            if not line.startswith("../") and ".pyc," not in line and "dist-info/" not in line
        ]
        return {
            "package": name,
            "version": version,
            "files": hashlib.sha256("\n".join(sorted(files)).encode()).hexdigest(),
        }
    return None


def main(compiler: str, *programs: str) -> None:
    found = {name: framework(names) for name, names in FRAMEWORKS.items()}
    # A build for GPUs may link the NCCL of torch's own packages.
    nccl = [distribution(name) for name in NCCL] if programs else []
    print(
        json.dumps(
            {
                "soabi": sysconfig.get_config_var("EXT_SUFFIX"),
                "machine": platform.machine(),
                "glibc": platform.libc_ver()[1],
                "compiler": answer(compiler, "--version"),
                "mpi": answer("mpirun", "--version"),
                "programs": {name: answer(name, "--version") for name in programs},
                "nccl": [each[0] for each in nccl if each],
                "frameworks": {name: each for name, each in found.items() if each},
            },
            sort_keys=True,
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

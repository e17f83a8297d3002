"""Tell what Horovod is about to be compiled against, as one JSON document.

Stand-alone: imports nothing of hvdenv and runs on Python 3.8 and newer, inside the
environment. What it prints decides whether a cached wheel fits.

    stack.py COMPILER
"""

import hashlib
import importlib.metadata as metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig

FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")}


def answer(*command):
    """First line that a program prints; empty when it cannot be run."""
    try:
        output = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True
        ).stdout
    except OSError:
        return ""
    return output.strip().split("\n")[0]


def framework(names):
    """Version of a framework and a hash of its list of files: two builds of one version differ."""
    for name in names:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        # Scripts name the environment's folder, and compiled files its time.
        files = [
            line
            for line in (found.read_text("RECORD") or "").split("\n")
            if not line.startswith("../") and ".pyc," not in line and "dist-info/" not in line
        ]
        return {
            "package": name,
            "version": found.version,
            "files": hashlib.sha256("\n".join(sorted(files)).encode()).hexdigest(),
        }
    return None


def main(compiler):
    bin_folder = os.path.dirname(sys.executable)
    mpi = answer(os.path.join(bin_folder, "mpirun"), "--version")
    found = {name: framework(names) for name, names in FRAMEWORKS.items()}
    print(
        json.dumps(
            {
                "soabi": sysconfig.get_config_var("EXT_SUFFIX"),
                "machine": platform.machine(),
                "glibc": platform.libc_ver()[1],
                "compiler": answer(compiler, "--version"),
                "mpi": re.sub(r"\s+", " ", mpi),
                "frameworks": {name: each for name, each in found.items() if each},
            },
            sort_keys=True,
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])

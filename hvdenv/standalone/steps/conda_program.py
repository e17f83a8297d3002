"""Conda environments by a conda program, where py-rattler is missing or a recipe names one.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import Dict, List, Mapping, Optional

from conda_files import Files
from conda_spec import Failure, Record, Spec, requested, say, virtual_packages


def find_program(environ: Mapping[str, str]) -> Optional[str]:
    """The conda program of this machine; None if there is none."""
    for name in (environ.get("CONDA_EXE"), "micromamba", "mamba", "conda"):
        found = shutil.which(name, path=environ.get("PATH", os.defpath)) if name else None
        if found:
            return found
    return None


class Program:
    """Installs what a conda program chooses, or the packages of a lock.

    Args:
        program: its path: conda, mamba or micromamba.
        spec: the request.
        cache: keeps what the program downloads when it solves; may be empty.
        work: directory for temporary files.
    """

    def __init__(self, program: str, spec: Spec, cache: str, work: str) -> None:
        self.program, self.spec, self.cache, self.work = program, spec, cache, work

    def solve_and_install(self, prefix: str) -> None:
        channels = [word for name in self.spec["channels"] for word in ("--channel", name)]
        packages = os.path.join(self.cache or self.work, "pkgs")
        self.create(prefix, packages, "--override-channels", *channels, *self.spec["specs"])

    def download(self, files: Files) -> None:
        for record, path in files:
            try:
                with urllib.request.urlopen(record["url"]) as answer, open(path, "wb") as stream:
                    shutil.copyfileobj(answer, stream)
            except urllib.error.URLError as error:
                raise Failure("%s cannot be downloaded: %s" % (record["url"], error)) from None

    def install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        """Install verified files, and nothing else."""
        explicit = os.path.join(self.work, "explicit.txt")
        with open(explicit, "w", encoding="utf-8") as stream:
            stream.write("@EXPLICIT\n")
            stream.writelines("file://%s\n" % urllib.request.pathname2url(p) for p in paths)
        # The program trusts what is unpacked: nothing is yet.
        self.create(prefix, os.path.join(self.work, "unpacked"), "--file", explicit, "--offline")

    def create(self, prefix: str, packages: str, *words: str) -> None:
        say("by " + self.program)
        command = [self.program, "create", "--yes", "--prefix", prefix, *words]
        environment = dict(os.environ, **variables_of(self.spec, packages))
        status = subprocess.call(command, env=environment)
        if status:
            reason = "%s create failed with exit status %d; see its output above"
            lines = [reason % (self.program, status), "Requested:"]
            raise Failure("\n".join(lines + requested(self.spec)))


def variables_of(spec: Spec, packages: str) -> Dict[str, str]:
    """Variables that describe the target machine, and forbid links into the program's cache."""
    virtual = virtual_packages(spec)
    machine = {name[2:].upper(): version for name, version, _ in virtual[:-1]}
    machine["ARCHSPEC"] = virtual[-1][2]
    machine.setdefault("CUDA", "")  # empty: none
    variables = {"CONDA_OVERRIDE_" + name: value for name, value in machine.items()}
    variables.update(CONDA_SUBDIR=spec["platform"], CONDA_PKGS_DIRS=packages)
    for family in ("CONDA_", "MAMBA_"):
        variables[family + "ALWAYS_COPY"] = "true"
        variables[family + "CHANNEL_PRIORITY"] = "strict"
    return variables

"""Conda environments by a conda program, where py-rattler is missing, and copies of them.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import Dict, List, Mapping, Optional

from conda_spec import Failure, Files, Record, Spec, check_record, requested, say, virtual_packages

# A record, and its values where the program has none.
EMPTY: Record = {
    "name": "",
    "version": "",
    "build": "",
    "url": "",
    "sha256": "",
    "md5": "",
    "size": 0,
    "depends": [],
    "constrains": [],
}


def find_program(environ: Mapping[str, str]) -> Optional[str]:
    """The conda program of this machine; None if there is none."""
    for name in (environ.get("CONDA_EXE"), "micromamba", "mamba", "conda"):
        found = shutil.which(name, path=environ.get("PATH", os.defpath)) if name else None
        if found:
            return found
    return None


def clone(source: str, prefix: str) -> None:
    """Copy an environment, with what people added to it, and the new path in its files.

    py-rattler has no such function, and micromamba has neither.
    """
    named = os.environ.get("CONDA_EXE", "")
    program = shutil.which(named) or shutil.which("conda")
    if not program:
        raise Failure(
            "a copy of %s needs conda, and there is none on PATH\n"
            "Load the module of this site that has conda" % source
        )
    command = [program, "create", "--yes", "--clone", source, "--prefix", prefix]
    # Links into the program's cache would share files with other environments.
    status = subprocess.call(command, env=dict(os.environ, CONDA_ALWAYS_COPY="true"))
    if status:
        raise Failure("%s create --clone failed with exit status %d" % (program, status))


class Program:
    """Solves and installs.

    Args:
        program: its path: conda, mamba or micromamba.
        spec: the request.
        work: directory for temporary files.
    """

    def __init__(self, program: str, spec: Spec, work: str) -> None:
        self.program, self.spec, self.work = program, spec, work

    def solve(self) -> List[Record]:
        """The packages that meet the request."""
        if self.spec.get("prefer"):
            say("%s keeps no versions: more packages may change than need to" % self.program)
        channels = [word for name in self.spec["channels"] for word in ("--channel", name)]
        printed = self.create(
            os.path.join(self.work, "solved"),
            "--dry-run",
            "--json",
            "--override-channels",
            *channels,
            *self.spec["specs"],
        )
        try:
            # All of them: there are none in the directory for packages.
            found = json.loads(printed)["actions"]["FETCH"]
            packages = [{key: each.get(key) or EMPTY[key] for key in EMPTY} for each in found]
        except (ValueError, LookupError):
            raise Failure("%s create does not print what it chose" % self.program) from None
        for each in packages:
            check_record(each)
        return packages

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
        say("by " + self.program)
        say(self.create(prefix, "--file", explicit, "--offline").strip())

    def create(self, prefix: str, *words: str) -> str:
        """What `conda create` prints."""
        command = [self.program, "create", "--yes", "--prefix", prefix, *words]
        # The program trusts what is unpacked: nothing is yet.
        environment = dict(
            os.environ, **variables_of(self.spec, os.path.join(self.work, "unpacked"))
        )
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, universal_newlines=True
        )
        if done.returncode:
            reason = "%s create failed with exit status %d" % (self.program, done.returncode)
            raise Failure(
                "\n".join([reason, done.stdout.strip(), "Requested:"] + requested(self.spec))
            )
        return done.stdout


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

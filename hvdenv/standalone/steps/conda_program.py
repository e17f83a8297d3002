"""Conda environments by a conda program: conda, mamba or micromamba.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import json
import os
import shutil
import subprocess
import urllib.request
from typing import Any, Dict, List, Mapping, Optional

from conda_spec import (
    Failure,
    Record,
    Spec,
    channel_of,
    check_record,
    file_name,
    preferred,
    read_records,
    requested,
    say,
    virtual_packages,
    write_whole,
)

PROGRAMS = ("micromamba", "mamba", "conda")


def find_program(environ: Mapping[str, str]) -> Optional[str]:
    """The conda program of this machine; None if there is none."""
    for name in (environ.get("CONDA_EXE"),) + PROGRAMS:
        found = shutil.which(name, path=environ.get("PATH", os.defpath)) if name else None
        if found:
            return found
    return None


def program_command(program: str, spec: Spec, prefix: str) -> List[str]:
    """The command line that creates the environment."""
    channels = [word for name in spec["channels"] for word in ("--channel", name)]
    options = ["create", "--yes", "--prefix", prefix, "--override-channels"]
    return [program, *options, *channels, *spec["specs"]]


def program_variables(spec: Spec, cache: str) -> Dict[str, str]:
    """Variables that describe the target machine, and forbid links into the program's cache."""
    virtual = virtual_packages(spec)
    machine = {name[2:].upper(): version for name, version, _ in virtual[:-1]}
    machine["ARCHSPEC"] = virtual[-1][2]
    machine.setdefault("CUDA", "")  # empty: none
    variables = {"CONDA_OVERRIDE_" + name: value for name, value in machine.items()}
    variables["CONDA_SUBDIR"] = spec["platform"]
    for family in ("CONDA_", "MAMBA_"):
        variables[family + "ALWAYS_COPY"] = "true"
        variables[family + "CHANNEL_PRIORITY"] = "strict"
    if cache:
        variables["CONDA_PKGS_DIRS"] = os.path.join(cache, "pkgs")
    return variables


class Program:
    """Solves, downloads and installs as the configuration of a conda program says.

    Args:
        program: its path.
        spec: the request.
        cache: folder for the program's own cache; may be empty.
        work: folder for temporary files.
    """

    def __init__(self, program: str, spec: Spec, cache: str, work: str) -> None:
        self.program, self.spec, self.cache, self.work = program, spec, cache, work

    def install_specs(self, prefix: str) -> None:
        """Solve and install at once."""
        self._run(program_command(self.program, self.spec, prefix), self.cache)
        self._check_made(prefix)

    def solve(self) -> List[Record]:
        """The records of the packages that the program would install."""
        pins = ["=".join(each) for each in preferred(self.spec)]
        spec = dict(self.spec, specs=self.spec["specs"] + pins)
        command = program_command(self.program, spec, os.path.join(self.work, "none"))
        say("by " + self.program)
        # The program leaves out details of packages that its cache has.
        variables = program_variables(self.spec, os.path.join(self.work, "empty"))
        process = subprocess.Popen(
            command + ["--dry-run", "--json"], env=dict(os.environ, **variables),
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        output = process.communicate()[0].decode(errors="replace")
        try:
            answer = json.loads(output)
        except ValueError:
            raise Failure("%s did not answer in JSON: %.2000s" % (self.program, output)) from None
        if process.returncode or "actions" not in answer:
            reason = answer.get("message") or answer.get("error") or answer
            lines = ["%s finds no packages: %s" % (self.program, reason), "Requested:"]
            raise Failure("\n".join(lines + requested(self.spec)))
        fetched = {each["name"]: each for each in answer["actions"].get("FETCH", ())}
        linked = [each["name"] for each in answer["actions"].get("LINK", ())]
        packages = [
            _record(fetched.get(name, {"name": name})) for name in linked if name[:2] != "__"
        ]
        for each in packages:
            check_record(each, self.spec["platform"])
        return packages

    def download(self, records: List[Record], folder: str) -> None:
        explicit = self._write_explicit([each["url"] for each in records], records)
        command = [self.program, "create", "--yes", "--prefix", os.path.join(self.work, "none")]
        packages = os.path.join(self.work, "downloads")
        self._run(command + ["--download-only", "--file", explicit], packages)
        for record in records:
            arrived = os.path.join(packages, "pkgs", file_name(record))
            if os.path.exists(arrived):
                shutil.move(arrived, os.path.join(folder, file_name(record)))

    def install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        """Install packages from files that were verified, and from nothing else."""
        urls = ["file://" + urllib.request.pathname2url(path) for path in paths]
        explicit = self._write_explicit(urls, packages)
        command = [self.program, "create", "--yes", "--prefix", prefix, "--file", explicit]
        self._run(command + ["--offline"], os.path.join(self.work, "unpacked"))
        self._check_made(prefix)

    def _run(self, command: List[str], cache: str) -> None:
        say("by " + self.program)
        variables = program_variables(self.spec, cache)
        status = subprocess.call(command, env=dict(os.environ, **variables))
        if status:
            reason = "%s create failed with exit status %d; see its output above"
            lines = [reason % (self.program, status), "Requested:"]
            raise Failure("\n".join(lines + requested(self.spec)))

    def _check_made(self, prefix: str) -> None:
        if not read_records(prefix):
            raise Failure("%s made no environment in %s" % (self.program, prefix))

    def _write_explicit(self, urls: List[str], packages: List[Record]) -> str:
        """A list of URLs in the format of all conda programs."""
        lines = [
            url + ("#" + each["md5"] if each.get("md5") else "")
            for url, each in zip(urls, packages)
        ]
        path = os.path.join(self.work, "explicit.txt")
        write_whole(path, "\n".join(["@EXPLICIT"] + lines) + "\n")
        return path


def _record(record: Dict[str, Any]) -> Record:
    """A record of a program, with the keys of those from rattler."""
    url = record.get("url")
    if not url:
        raise Failure("the program does not report the URL of %(name)s" % record)
    texts = ("name", "version", "noarch", "url", "sha256", "md5", "license")
    numbers = ("build_number", "size", "timestamp")
    return dict(
        {key: record.get(key) or "" for key in texts},
        build=record.get("build") or record.get("build_string") or "",
        subdir=url.split("/")[-2], channel=channel_of(url),
        depends=record.get("depends") or [], constrains=record.get("constrains") or [],
        **{key: record.get(key) or 0 for key in numbers}
    )  # fmt: skip

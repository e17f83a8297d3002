"""Report what pip would install, without installing it; also for another machine than this one.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, with pip 22.2 or newer.

    pip_resolve.py REQUEST.json

REQUEST.json::

    {"requirements": ["torch==2.13.0"], "cpu_indexes": [], "arguments": ["--extra-index-url", URL],
     "report": "/where/pip/reports.json", "pins": {"numpy": "1.26.4"}, "fresh": true,
     "installed": {"numpy": "1.26.4"},
     "target": {"python": "3.10", "machine": "ppc64le", "glibc": "2.28"}}

``pins`` are versions that pip must keep. Without ``target`` pip resolves for the Python that
runs it, and considers what is installed there unless ``fresh``. ``installed`` are packages
that the target has already; pip keeps them.
"""

import json
import os
import sys
import tempfile
import urllib.parse
import urllib.request
from typing import Dict, List

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this folder
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from digest import sha256_of
from pip_install import index_arguments

OLDEST_MANYLINUX = 5
# Names from before PEP 600, by the minor version of glibc 2.
OLD_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


def platforms(machine: str, glibc: str) -> List[str]:
    """Platform tags of wheels that run on the machine, best first."""
    found = []
    for minor in range(int(glibc.split(".")[1]), OLDEST_MANYLINUX - 1, -1):
        found.append("manylinux_2_%d_%s" % (minor, machine))
        if minor in OLD_NAMES:
            found.append("%s_%s" % (OLD_NAMES[minor], machine))
    return found + ["linux_" + machine]


def target_arguments(target: Dict[str, str]) -> List[str]:
    names = platforms(target["machine"], target["glibc"])
    python = ".".join(target["python"].split(".")[:2])
    arguments = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:"]
    return arguments + [word for name in names for word in ("--platform", name)]


def pretend(target: Dict[str, str]) -> None:
    """Have pip evaluate markers of requirements for the target, not for this machine."""
    from pip._vendor.packaging import markers

    short = ".".join(target["python"].split(".")[:2])
    full = target["python"] if target["python"].count(".") > 1 else short + ".0"
    environment = dict(
        markers.default_environment(),
        python_version=short,
        python_full_version=full,
        implementation_version=full,
        platform_machine=target["machine"],
    )
    markers.default_environment = lambda: environment


def install_in_name_only(packages: Dict[str, str], folder: str) -> None:
    """Let pip find the packages that the target has."""
    for name, version in packages.items():
        metadata = os.path.join(folder, "%s-%s.dist-info" % (name.replace("-", "_"), version))
        os.mkdir(metadata)
        with open(os.path.join(metadata, "METADATA"), "w", encoding="utf-8") as stream:
            stream.write("Metadata-Version: 2.1\nName: %s\nVersion: %s\n" % (name, version))
    sys.path.insert(0, folder)


def add_missing_hashes(path: str) -> None:
    """Add hashes to pip's report for files from folders, which pip leaves out."""
    with open(path, encoding="utf-8") as stream:
        report = json.load(stream)
    for each in report["install"]:
        download = each["download_info"]
        address = urllib.parse.urlparse(download["url"])
        hashes = download.get("archive_info", {}).setdefault("hashes", {})
        if address.scheme == "file" and "archive_info" in download and not hashes.get("sha256"):
            hashes["sha256"] = sha256_of(urllib.request.url2pathname(address.path))
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(report, stream)


def main(path: str) -> int:
    with open(path, encoding="utf-8") as stream:
        request = json.load(stream)
    target = request.get("target")
    arguments = ["install", "--dry-run", "--disable-pip-version-check", "--no-input"]
    arguments += ["--report", request["report"]] + index_arguments(request["cpu_indexes"])
    arguments += request["arguments"]
    if request.get("fresh"):
        arguments.append("--ignore-installed")
    if target:
        pretend(target)
        arguments += target_arguments(target)
    with tempfile.TemporaryDirectory() as folder:
        if target:
            install_in_name_only(request["installed"], folder)
        pins = os.path.join(folder, "pins.txt")
        with open(pins, "w", encoding="utf-8") as stream:
            stream.writelines("%s==%s\n" % pair for pair in sorted(request["pins"].items()))
        from pip._internal.cli.main import main as pip

        status = int(pip(arguments + ["--constraint", pins] + request["requirements"]))
    if status == 0:
        add_missing_hashes(request["report"])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

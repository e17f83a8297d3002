"""What conda_env.py is asked for: records of packages, SPEC.json, and the words of messages.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import json
import os
import posixpath
import re
import urllib.parse
from typing import Any, Dict, List, Tuple

Spec = Dict[str, Any]
# A package as a lock or a channel describes it, or a file of conda-meta.
Record = Dict[str, Any]
# Packages, each with the path of its file.
Files = List[Tuple[Record, str]]

ARCHSPEC = {"linux-64": "x86_64", "linux-aarch64": "aarch64", "linux-ppc64le": "ppc64le"}
# Virtual packages of a machine of which nothing is known: those of RHEL 7.
OLDEST = {"__unix": "0", "__linux": "3.10", "__glibc": "2.17"}
# conda has this one name for several channels.
SEVERAL = {"defaults": ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")}
ARCHIVE = re.compile(r"([\w.-]+)-([^-/]+)-[^-/]+(\.conda|\.tar\.bz2)\Z")


class Failure(Exception):
    """A message that says what is wrong and what to do."""


def say(line: str) -> None:
    print(line, flush=True)


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as stream:
        try:
            return json.load(stream)
        except ValueError as error:
            raise Failure("%s is not JSON: %s" % (path, error)) from None


def write_json(path: str, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, sort_keys=True)


def read_records(prefix: str) -> List[Tuple[str, Record]]:
    """Path and content of each record in conda-meta, one for each installed package."""
    folder = os.path.join(prefix, "conda-meta")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if name.endswith(".json")]
    return [(path, read_json(path)) for path in paths]


def read_spec(path: str) -> Spec:
    spec: Spec = dict({"channels": [], "specs": [], "virtual": {}}, **read_json(path))
    if spec["platform"] not in ARCHSPEC:
        known = ", ".join(sorted(ARCHSPEC))
        raise Failure("platform %s: known are %s" % (spec["platform"], known))
    for record in spec.get("explicit", ()):
        check_record(record)
    return spec


def check_record(record: Record) -> None:
    """Refuse a package that has no hash, or whose file has another name, or a path in it."""
    if not record["sha256"]:
        raise Failure("%(url)s has no sha256 and cannot be verified" % record)
    found = ARCHIVE.match(file_name(record))
    if not found or found.group(1, 2) != (record["name"], record["version"]):
        raise Failure("%(url)s is not named like %(name)s %(version)s" % record)


def file_name(record: Record) -> str:
    """The name of a package's file."""
    return urllib.parse.unquote(posixpath.basename(urllib.parse.urlparse(record["url"]).path))


def channel_of(url: str) -> str:
    """The channel of a package, from the package's URL."""
    return url.rsplit("/", 2)[0]


def virtual_packages(spec: Spec) -> List[Tuple[str, str, str]]:
    """Name, version and build of each virtual package of the target machine."""
    given = dict(OLDEST, **spec["virtual"])
    architecture = given.pop("__archspec", ARCHSPEC[spec["platform"]])
    found = [(name, version, "0") for name, version in sorted(given.items())]
    return found + [("__archspec", "1", architecture)]


def channels_of(spec: Spec) -> List[str]:
    """Channels, or their URLs where one name stands for several."""
    return [each for name in spec["channels"] for each in SEVERAL.get(name, (name,))]


def requested(spec: Spec) -> List[str]:
    """Lines for messages that describe the request."""
    if "explicit" in spec:
        return ["%d packages of a lock, for %s" % (len(spec["explicit"]), spec["platform"])]
    machine = ["%s %s" % (name, version) for name, version, _ in virtual_packages(spec)[:-1]]
    return [
        "packages: " + ", ".join(spec["specs"]),
        "channels: " + ", ".join(spec["channels"]),
        "for: %s with %s" % (spec["platform"], ", ".join(machine)),
    ]

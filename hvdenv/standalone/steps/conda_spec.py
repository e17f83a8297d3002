"""What conda_env.py is asked for: reading and checking SPEC.json, and the words of messages.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import json
import os
import posixpath
import re
import sys
import urllib.parse
from typing import Any, Dict, List, Tuple

Spec = Dict[str, Any]
# A package as a lock or a channel describes it, or a file of conda-meta.
Record = Dict[str, Any]

ARCHSPEC = {"linux-64": "x86_64", "linux-aarch64": "aarch64", "linux-ppc64le": "ppc64le"}
# Virtual packages of a machine of which nothing is known: those of RHEL 7.
OLDEST = {"__unix": "0", "__linux": "3.10", "__glibc": "2.17"}
# conda has this one name for several channels.
SEVERAL = {"defaults": ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")}
ARCHIVE = re.compile(
    r"(?P<name>[\w.-]+)-(?P<version>[^-/]+)-(?P<build>[^-/]+)(\.conda|\.tar\.bz2)\Z"
)
SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class Failure(Exception):
    """A message that says what is wrong and what to do."""


def say(line: str) -> None:
    """Print a line, also where the terminal lacks the characters of solvers' trees."""
    plain = line.translate({0x2514: "`", 0x251C: "|", 0x2502: "|", 0x2500: "-"})
    encoding = sys.stdout.encoding or "ascii"
    print(plain.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as stream:
        try:
            return json.load(stream)
        except ValueError as error:
            raise Failure("%s is not JSON: %s" % (path, error)) from None


def write_whole(path: str, text: str) -> None:
    """Write a file atomically."""
    unfinished = "%s.%d" % (path, os.getpid())
    with open(unfinished, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(unfinished, path)


def read_records(prefix: str) -> List[Tuple[str, Record]]:
    """The file name and content of each record in conda-meta, one for each installed package."""
    folder = os.path.join(prefix, "conda-meta")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [
        (name, read_json(os.path.join(folder, name))) for name in names if name.endswith(".json")
    ]


def read_spec(path: str) -> Spec:
    """The document, with every field present and of its type."""
    spec: Spec = read_json(path)
    kinds = {"channels": list, "specs": list, "platform": str, "virtual": dict}
    if "explicit" in spec:
        kinds = {"explicit": list, "platform": str}
        if os.environ.get("HVDENV_FILES"):
            spec.setdefault("files", os.environ["HVDENV_FILES"])
        spec = dict({"channels": [], "specs": [], "virtual": {}}, **spec)
    wrong = [name for name, kind in kinds.items() if not isinstance(spec.get(name), kind)]
    if wrong:
        raise Failure("%s: wrong or missing: %s" % (path, ", ".join(wrong)))
    # Conda programs would read these as options.
    texts = spec["channels"] + spec["specs"]
    options = [text for text in texts if not isinstance(text, str) or text.startswith("-")]
    if options:
        raise Failure("%s: not a channel or package: %s" % (path, options[0]))
    if spec["platform"] not in ARCHSPEC:
        known = ", ".join(sorted(ARCHSPEC))
        raise Failure("platform %s: known are %s" % (spec["platform"], known))
    for record in spec.get("explicit", ()):
        check_record(record, spec["platform"])
    return spec


def check_record(record: Record, platform: str) -> None:
    """Refuse a record that is incomplete, has no hash, or is for other machines."""
    if not isinstance(record, dict) or any(
        not isinstance(record.get(name), str) for name in ("name", "version", "url")
    ):
        raise Failure("not a package with name, version and url: %.200s" % json.dumps(record))
    if not SHA256.match(record.get("sha256") or ""):
        raise Failure("%(url)s has no sha256 and cannot be verified" % record)
    found = ARCHIVE.match(file_name(record))
    if not found or found.group("name", "version") != (record["name"], record["version"]):
        raise Failure("%(url)s is not named like %(name)s %(version)s" % record)
    subdir = urllib.parse.urlparse(record["url"]).path.split("/")[-2]
    if subdir not in (platform, "noarch"):
        raise Failure("%s is for %s, not for %s" % (record["url"], subdir, platform))


def file_name(record: Record) -> str:
    """The name of a package's file, which check_record() has seen to be no path."""
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


def preferred(spec: Spec) -> List[Tuple[str, str, str]]:
    """Name, version and build of the packages to keep."""
    free = set(spec.get("free", ()))
    return [
        (each["name"], each["version"], each["build"])
        for each in spec.get("prefer", ())
        if each["name"] not in free
    ]


def requested(spec: Spec) -> List[str]:
    """Lines for messages that describe the request."""
    if "explicit" in spec:
        return ["  %d packages of a lock" % len(spec["explicit"]), "  for: " + spec["platform"]]
    machine = ["%s %s" % (name, version) for name, version, _ in virtual_packages(spec)[:-1]]
    return [
        "  packages: " + ", ".join(spec["specs"]),
        "  channels: " + ", ".join(spec["channels"]),
        "  for: %s with %s" % (spec["platform"], ", ".join(machine)),
    ]

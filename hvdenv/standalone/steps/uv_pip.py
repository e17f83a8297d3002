"""Run `uv pip` with pip's configuration.

Stand-alone: imports nothing of hvdenv. It needs a Python that has uv.

    uv_pip.py [SOURCE...] -- COMMAND ARGUMENTS...

Of pip's configuration, uv gets index-url, extra-index-url, find-links, no-index, trusted-host,
cert, client-cert, proxy, timeout, and constraint where it chooses versions. Passwords in it are
passed in variables, which other users cannot read.

HVDENV_STEP_LIBRARY_PATH is LD_LIBRARY_PATH for the Python of --python, if that is not this one, which
may not start with it.
"""

import os
import re
import subprocess
import sys
from typing import Dict, List

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from pip_sources import Sources, file_url, parser_of_sources, report_other_pages
from uv import find_uv_bin

# What uv did not find.
MISSING = re.compile(r"(?:no versions? of|Because) ([\w.-]+)(?:==(\S+))? (?:and|was not found in)")
HASHED = "--require-hashes"
LIBRARIES = "HVDENV_STEP_LIBRARY_PATH"


def variables(sources: Sources) -> Dict[str, str]:
    """Where uv looks, and how."""
    pip, found = sources.pip, dict(os.environ)
    # uv splits UV_FIND_LINKS at commas.
    links = [file_url(each) if os.path.exists(each) else each for each in sources.links]
    found["UV_FIND_LINKS"] = ",".join(each.replace(",", "%2C") for each in links)
    found.update(UV_NO_CONFIG="1", UV_SYSTEM_CERTS="1")
    found["UV_NO_WRAP"] = "1"  # hvdenv recognises whole lines
    found["UV_INSECURE_HOST"] = " ".join(pip.get("trusted-host", "").split())
    # As pip: the best of all indexes.
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    found.setdefault("UV_HTTP_TIMEOUT", str(sources.timeout))
    if sources.indexes:
        # uv asks its default index last, and of equal versions takes the first.
        found["UV_INDEX"] = " ".join(sources.indexes[:-1])
        found["UV_DEFAULT_INDEX"] = sources.indexes[-1]
    if pip["cert"]:
        found["SSL_CERT_DIR" if os.path.isdir(pip["cert"]) else "SSL_CERT_FILE"] = pip["cert"]
    if pip["client-cert"]:
        found["SSL_CLIENT_CERT"] = pip["client-cert"]
    if pip.get("proxy"):
        found.update(dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), pip["proxy"]))
    return found


def options(sources: Sources, words: List[str]) -> List[str]:
    """What uv has no variables for."""
    found = [] if sources.indexes else ["--no-index"]
    if HASHED not in words:
        for path in sources.pip.get("constraint", "").split():
            found += ["--constraint", os.path.expanduser(path)]
    return found


def has_all(command: List[str], environment: Dict[str, str]) -> bool:
    """Whether uv installs from its cache and from directories, without asking an index.

    Hashes decide which files are right, so an index that is silent or slow does not matter.
    """
    done = subprocess.run(
        [*command, "--offline"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode == 0:
        sys.stdout.write(done.stdout.decode("utf-8", "replace"))
    return done.returncode == 0


def run(command: List[str], environment: Dict[str, str]) -> "tuple[int, str]":
    """The exit status, and the output, which is printed as it comes."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout
    lines = []
    for raw in process.stdout:
        lines.append(raw.decode("utf-8", "replace"))
        sys.stdout.write(lines[-1])
        sys.stdout.flush()
    return process.wait(), " ".join("".join(lines).split())


def main(arguments: List[str]) -> int:
    split = arguments.index("--")
    sources = Sources(parser_of_sources().parse_args(arguments[:split]))
    words = arguments[split + 1 :]
    if not (sources.indexes or sources.links):
        print("hvdenv: pip is configured to use no index and no directory of packages")
        return 1
    environment = variables(sources)
    uv = [sys.executable, "-m", "uv"]
    if "--python" in words and words[words.index("--python") + 1] != sys.executable:
        if LIBRARIES in environment:
            environment["LD_LIBRARY_PATH"] = environment[LIBRARIES]
        uv = [find_uv_bin()]  # needs no libraries of this Python
    command = [*uv, "pip", words[0], *options(sources, words), *words[1:]]
    if HASHED in words and has_all(command, environment):
        return 0
    status, output = run(command, environment)
    missing = MISSING.search(output)
    if status and missing:
        name, version = missing.groups()
        if HASHED in words and version:
            print("hvdenv: no index has exactly %s===%s" % (name, version))
        # uv does not say that it read the login page of a network.
        remote = (each for each in sources.indexes if not each.startswith("file:"))
        report_other_pages(name, *remote)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

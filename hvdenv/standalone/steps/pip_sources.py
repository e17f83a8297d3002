"""Write where pip is configured to look for packages, for a resolver that does not read that.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    pip_sources.py ANSWER.json [INDEX...]

ANSWER.json has pip's options by name, such as {"index-url": "https://mirror.example/simple"}. They
can contain passwords, so they go to a file of the user and not to the output. Prints those of the
indexes that do not answer.
"""

import ast
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Dict, List

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from pip_install import why_unreachable

# Later ones win. The last has the variables PIP_*.
SECTIONS = ("global", "install", ":env:")


def parse(listed: str) -> Dict[str, str]:
    """The options in the output of ``pip config list``."""
    found = {}
    for section in SECTIONS:
        pattern = r"^%s\.([a-z-]+)=('.*'|\".*\")$" % re.escape(section)
        for name, value in re.findall(pattern, listed, re.MULTILINE):
            found[name] = str(ast.literal_eval(value))
    return found


def find_pip() -> List[str]:
    """This Python's pip, or the one that it brings for new environments: uv installs none."""
    if importlib.util.find_spec("pip") is None and importlib.util.find_spec("ensurepip"):
        import ensurepip

        bundled = os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl")
        for wheel in glob.glob(bundled):
            return [os.path.join(wheel, "pip")]
    return ["-m", "pip"]


def from_variables() -> Dict[str, str]:
    """The options in variables, where this Python has no pip."""
    prefix = "PIP_"
    return {
        name[len(prefix) :].lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }


def main(path: str, *indexes: str) -> None:
    command = [sys.executable, *find_pip(), "--disable-pip-version-check", "config", "list"]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found = from_variables() if pip.returncode else parse(pip.stdout.decode("utf-8", "replace"))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # pip reads these as well
        if os.path.isfile(os.environ.get(name, "")):
            found.setdefault("cert", os.environ[name])
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump(found, stream)
    for url in indexes:
        if why_unreachable(url) is not None:
            print(url)


if __name__ == "__main__":
    main(*sys.argv[1:])

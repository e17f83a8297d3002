"""List the packages of an environment, or what some of them require and it lacks.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, with any pip.

    check_requirements.py [PACKAGES.txt]

The file has a line NAME===VERSION for each package to check, and its hash; other packages, such as
the site's and conda's, only satisfy requirements. Prints a line for each problem that `pip check`
finds; the exit status is 1 if there is one. Without a file, it prints NAME==VERSION of each package
that Python finds.
"""

import os
import re
import subprocess
import sys
from typing import Dict

PACKAGE = re.compile(r"([^-]+)-([^-]+?)(-py[\d.]+)?\.(dist|egg)-info$")
# pip also reports what it takes for another platform's.
PROBLEM = re.compile(r"(\S+) \S+ (requires .*, which is not installed|has requirement )")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> Dict[str, str]:
    """Version of each package that Python finds, by its normalised name."""
    found = {}  # type: Dict[str, str]
    for folder in filter(os.path.isdir, sys.path):
        for package in filter(None, map(PACKAGE.match, sorted(os.listdir(folder)))):
            found.setdefault(canonical(package.group(1)), package.group(2))
    return found


def main(path: str = "") -> int:
    if not path:
        for name, version in sorted(installed().items()):
            print("%s==%s" % (name, version))
        return 0
    with open(path, encoding="utf-8") as stream:
        names = {canonical(line.split("===")[0]) for line in stream}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True)
    found = map(PROBLEM.match, done.stdout.splitlines())
    lines = [each.string for each in found if each and canonical(each.group(1)) in names]
    print("\n".join(lines) or "%d packages have all that they require" % len(names))
    # 1: there are problems, of these packages or of others.
    return 1 if lines else done.returncode if done.returncode > 1 else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

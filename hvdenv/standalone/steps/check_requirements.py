"""See that packages of an environment have all that their metadata requires.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, with any pip.

    check_requirements.py PACKAGES.txt [--conda]

The file has a line NAME VERSION for each package to judge; others may be the site's and are
only looked for. With --conda the conda packages are judged too, by their own records. Prints a line for each problem; the exit status is 1 if there is one.
"""

import json
import os
import re
import sys
from email.parser import HeaderParser

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import parse


class Package:
    """An installed package.

    Attributes:
        version: as the name of its folder has it.
        requires: what its metadata states.
    """

    def __init__(self, version, folder):
        self.version, self.requires = version, []
        try:
            with open(os.path.join(folder, "METADATA"), encoding="utf-8") as stream:
                stated = HeaderParser().parse(stream)
        except OSError:
            return  # an egg: it is there, and says this in other words
        self.version = stated["Version"] or version
        self.requires = [Requirement(text) for text in stated.get_all("Requires-Dist", ())]

    def required(self, extras):
        """What applies on this machine, with these extras of the package."""
        for each in self.requires:
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *sorted(extras))
            ):
                yield each


def installed():
    """The packages that Python finds, by their normalised names."""
    found = {}
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            split = re.match(r"([^-]+)-([^-]+?)(-py[\d.]+)?\.(dist|egg)-info$", name)
            if split and canonicalize_name(split.group(1)) not in found:
                path = os.path.join(folder, name)
                found[canonicalize_name(split.group(1))] = Package(split.group(2), path)
    return found


def problems(wanted, found):
    """What is not as it should be, a line each.

    wanted: versions of the packages to judge, by name. found: what is installed.
    """
    lines = []
    for name, version in sorted(wanted.items()):
        if name not in found:
            lines.append("%s %s is not installed" % (name, version))
        elif parse(found[name].version) != parse(version):
            lines.append("%s %s is installed, not %s" % (name, found[name].version, version))
    judged = sorted(set(wanted) & set(found))
    extras = {name: set() for name in judged}
    known, needed = -1, set()
    # An extra that one package asks of another can bring requirements that ask for more.
    while known != sum(map(len, extras.values())):
        known = sum(map(len, extras.values()))
        needed = {(name, each) for name in judged for each in found[name].required(extras[name])}
        for _, each in needed:
            extras.setdefault(canonicalize_name(each.name), set()).update(each.extras)
    told = set()
    for name, each in needed:
        other = found.get(canonicalize_name(each.name))
        stated = "%s %s requires %s%s" % (name, found[name].version, each.name, each.specifier)
        if other is None:
            told.add(stated + ", which is not installed")
        elif not each.specifier.contains(other.version, prereleases=True):
            told.add(stated + ", and %s is installed" % other.version)
    return lines + sorted(told)


def conda_problems(folder):
    """What conda packages ask for, and there is none of that name."""
    records = []
    for name in sorted(os.listdir(folder)):
        if name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as stream:
                records.append(json.load(stream))
    there = {each["name"] for each in records}
    for each in records:
        for text in each.get("depends", ()):
            name = re.split(r"[\s=<>!~\[]", text.strip(), maxsplit=1)[0].rpartition("::")[2].lower()
            # A package of two underscores is the machine's.
            if name not in there and name[:2] != "__":
                yield "%s %s requires %s, which is not installed" % (
                    each["name"], each["version"], text,
                )  # fmt: skip


def main(path, conda=""):
    with open(path, encoding="utf-8") as stream:
        wanted = dict(line.split() for line in stream)
    sys.path.pop(0)  # this folder: its file names must not stand in for modules
    lines = problems(wanted, installed())
    if conda:
        lines += conda_problems(os.path.join(sys.prefix, "conda-meta"))
    print("\n".join(lines) or "%d packages have all that they require" % len(wanted))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

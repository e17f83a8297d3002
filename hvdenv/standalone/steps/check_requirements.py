"""Check that an environment has everything that the metadata of its packages requires.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, with any pip.

    check_requirements.py [PACKAGES.txt]

The file has a line NAME===VERSION for each package to check, and its hash; other packages, such as
the site's and conda's, only satisfy requirements. Prints a line for each problem; the exit status is
1 if there is one. Without a file, it prints NAME==VERSION of each package of the environment.
"""

import os
import re
import sys
from email.parser import HeaderParser
from typing import Dict, Iterator, List, Optional, Set, Tuple

from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
from pip._vendor.packaging.utils import canonicalize_name
from pip._vendor.packaging.version import parse


class Package:
    """An installed package.

    Attributes:
        version: from its metadata, or from the name of its directory.
        requires: its requirements, as its metadata states them.
    """

    def __init__(self, version: str, folder: str) -> None:
        self.version = version
        self.requires = []  # type: List[str]
        try:
            with open(os.path.join(folder, "METADATA"), encoding="utf-8") as stream:
                stated = HeaderParser().parse(stream)
        except OSError:
            return  # an egg, which states its requirements elsewhere
        self.version = stated["Version"] or version
        self.requires = [*map(str, stated.get_all("Requires-Dist", ()))]

    def required(self, extras: Set[str]) -> Iterator[Requirement]:
        """The requirements that apply on this machine, with these extras of the package."""
        for each in filter(None, map(parsed, self.requires)):
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *sorted(extras))
            ):
                yield each


def parsed(text: str) -> Optional[Requirement]:
    """A requirement; None if it is not written as the standard demands, as in some old packages."""
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def satisfies(version: str, required: Requirement) -> bool:
    """Whether a version is one of those required, or cannot be compared with them."""
    try:
        return bool(required.specifier.contains(version, prereleases=True))
    except ValueError:
        return True


def installed() -> Dict[str, Package]:
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


def problems(wanted: Dict[str, str], found: Dict[str, Package]) -> List[str]:
    """A line for each problem.

    Args:
        wanted: versions of the packages to check, by name.
        found: installed packages by name.
    """
    lines = []
    for name, version in sorted(wanted.items()):
        if name not in found:
            lines.append("%s %s is not installed" % (name, version))
        elif parse(found[name].version) != parse(version):
            lines.append("%s %s is installed, not %s" % (name, found[name].version, version))
    judged = sorted(set(wanted) & set(found))
    extras: Dict[str, Set[str]] = {name: set() for name in judged}
    known = -1
    needed: Set[Tuple[str, Requirement]] = set()
    # Requirements of an extra can require further extras.
    while known != sum(map(len, extras.values())):
        known = sum(map(len, extras.values()))
        needed = {(name, each) for name in judged for each in found[name].required(extras[name])}
        for _, each in needed:
            extras.setdefault(canonicalize_name(each.name), set()).update(each.extras)
    unmet = set()
    for name, each in needed:
        other = found.get(canonicalize_name(each.name))
        stated = "%s %s requires %s%s" % (name, found[name].version, each.name, each.specifier)
        if other is None:
            unmet.add(stated + ", which is not installed")
        elif not satisfies(other.version, each):
            unmet.add(stated + ", and %s is installed" % other.version)
    return lines + sorted(unmet)


def main(path: str = "") -> int:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # this directory: its files must not shadow modules
    if not path:
        for name, package in sorted(installed().items()):
            print("%s==%s" % (name, package.version))
        return 0
    with open(path, encoding="utf-8") as stream:
        wanted = dict(line.split()[0].split("===") for line in stream)
    lines = problems(wanted, installed())
    print("\n".join(lines) or "%d packages have all that they require" % len(wanted))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

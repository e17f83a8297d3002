"""Normalise the permissions of a wheel's files, which depend on the umask of its builder.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer. The files have the
time SOURCE_DATE_EPOCH already, and are sorted by name.

    normalise_wheel.py WHEEL
"""

import copy
import os
import stat
import sys
import zipfile

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from archives import ArchiveError, blocks, opened_zip


def normalise(path: str) -> None:
    temporary = path + ".normalised"
    with open(path, "rb") as stream, opened_zip(stream) as archive:
        rewrite(archive, temporary)
    os.replace(temporary, path)


def rewrite(archive: zipfile.ZipFile, path: str) -> None:
    with zipfile.ZipFile(path, "w") as target:
        for member in archive.infolist():
            made = copy.copy(member)
            executable = member.external_attr >> 16 & stat.S_IXUSR
            made.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            with target.open(made, "w") as stream:
                stream.writelines(blocks(archive, member))


if __name__ == "__main__":
    try:
        normalise(sys.argv[1])
    except ArchiveError as error:
        sys.exit("normalise_wheel: %s: %s" % (sys.argv[1], error))

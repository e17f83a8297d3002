"""Normalise the permissions of a wheel's files, which depend on the umask of its builder.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer. The files have the
time SOURCE_DATE_EPOCH already, and are sorted by name.

    normalise_wheel.py WHEEL
"""

import os
import stat
import sys
import zipfile


def normalise(path: str) -> None:
    temporary = path + ".normalised"
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(temporary, "w") as after:
        for member in before.infolist():
            content = before.read(member)
            executable = member.external_attr >> 16 & stat.S_IXUSR
            member.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            after.writestr(member, content)
    os.replace(temporary, path)


if __name__ == "__main__":
    normalise(sys.argv[1])

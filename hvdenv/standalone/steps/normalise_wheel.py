"""Take out of a wheel what the umask of its builder put in: the permissions of its files.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer. The times of
the files are SOURCE_DATE_EPOCH already, and their order is that of their names.

    normalise_wheel.py WHEEL
"""

import os
import stat
import sys
import zipfile


def normalise(path):
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

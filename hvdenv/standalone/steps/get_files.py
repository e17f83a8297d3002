"""Download the files of a list with pip, except those that are in the directory already.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    get_files.py LIST PIP_DOWNLOAD_ARGUMENTS...

LIST is a requirements file with one hash in each line; $PIP_DEST is the directory. pip itself
would ask an index about every file, even about those in the directory. Files are recognised by
their hash, so damaged ones are downloaded again.
"""

import os
import re
import subprocess
import sys
import tempfile
from typing import Set

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from digest import sha256_of

HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def hashes_in(folder: str) -> Set[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {sha256_of(os.path.join(folder, name)) for name in names if name.endswith(".whl")}


def main(listed: str, *arguments: str) -> int:
    with open(listed, encoding="utf-8") as stream:
        lines = stream.readlines()
    present = hashes_in(os.environ["PIP_DEST"])
    missing = [line for line in lines if not set(HASH.findall(line)) & present]
    print("%d of %d files are there" % (len(lines) - len(missing), len(lines)))
    sys.stdout.flush()
    if not missing:
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as wanted:
        wanted.writelines(missing)
        wanted.flush()
        command = [sys.executable, "-m", "pip"] + list(arguments) + ["--requirement", wanted.name]
        return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Get the files of a list with pip, but for those that are there already.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    get_files.py LIST PIP_DOWNLOAD_ARGUMENTS...

LIST is a requirements file with one hash in each line; $PIP_DEST is the folder. pip would ask
an index about each file, also about those that it then finds there. What is there counts by
its hash; the rest, and what is damaged, is pip's.
"""

import os
import re
import subprocess
import sys
import tempfile

from digest import sha256_of

HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def hashes_in(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {sha256_of(os.path.join(folder, name)) for name in names if name.endswith(".whl")}


def main(listed, *arguments):
    with open(listed, encoding="utf-8") as stream:
        lines = stream.readlines()
    present = hashes_in(os.environ["PIP_DEST"])
    missing = [line for line in lines if HASH.search(line).group(1) not in present]
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

"""The sha256 of a file.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import hashlib


def sha256_of(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()

"""The files of conda packages: downloaded, verified and kept.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import os
import shutil
import urllib.parse
import urllib.request
from typing import Callable, List, Tuple

from conda_spec import Failure, Record, file_name, say
from digest import sha256_of

# Packages, each with the path of its file.
Files = List[Tuple[Record, str]]
Download = Callable[[Files], None]


def collect(records: List[Record], folder: str, download: Download) -> List[str]:
    """The paths of packages in a directory, each compared with its hash; what it lacks is downloaded."""
    files = [
        (each, os.path.join(folder, "packages", each["sha256"], file_name(each)))
        for each in records
    ]
    missing = [each for each in files if not is_intact(*each)]
    if missing and os.environ.get("CONDA_OFFLINE"):
        lines = ["without a network, %s must have these packages:" % folder]
        raise Failure("\n  ".join(lines + [file_name(record) for record, _ in missing]))
    if missing:
        get(missing, download)
    return [path for _, path in files]


def get(missing: Files, download: Download) -> None:
    """Get packages; each appears at its path once it is verified."""
    size = sum(record.get("size") or 0 for record, _ in missing) // 1000**2
    say("%d packages to get%s" % (len(missing), ", %d MB" % size if size else ""))
    arriving = [(record, "%s.%d" % (path, os.getpid())) for record, path in missing]
    remote = []
    for record, path in arriving:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        url = urllib.parse.urlparse(record["url"])
        if url.scheme == "file":
            shutil.copyfile(urllib.request.url2pathname(url.path), path)
        else:
            remote.append((record, path))
    download(remote)
    for record, path in arriving:
        verify(record, path)
        os.replace(path, os.path.splitext(path)[0])


def is_intact(record: Record, path: str) -> bool:
    if not os.path.exists(path):
        return False
    if sha256_of(path) == record["sha256"]:
        return True
    say("damaged, and not used: %s" % path)
    return False


def verify(record: Record, path: str) -> None:
    """Compare a package that has arrived with its hash, before anything of it is used."""
    found = sha256_of(path)
    if found == record["sha256"]:
        return
    with open(path, "rb") as stream:
        html = stream.read(512).lstrip().startswith(b"<")
    os.unlink(path)
    lines = [
        "%s is not the package that was asked for: its sha256 is %s instead of %s"
        % (record["url"], found, record["sha256"]),
        "The file is damaged or was replaced, or the index of its channel is out of date",
    ]
    if html:
        lines.append("It is an HTML page, which proxies and login pages send")
    raise Failure("\n".join(lines))

"""The files of conda packages: downloaded, verified and cached.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import os
import shutil
import urllib.parse
import urllib.request
from typing import Callable, List, Tuple

from conda_spec import Failure, Record, file_name, say
from digest import sha256_of

MB = 1000 * 1000
# Downloads the files of records into a folder.
Download = Callable[[List[Record], str], None]


def collect(
    records: List[Record], folder: str, cache: str, work: str, download: Download
) -> List[str]:
    """Find or download the files of packages, and compare each with its hash.

    Args:
        records: the packages.
        folder: has all files, so that nothing is downloaded; may be empty.
        cache: keeps downloads and is searched first; may be empty.
        work: folder for downloads on the way.
        download: downloads files.

    Returns:
        The path of each package.
    """
    store = os.path.join(cache or work, "packages")
    folder = os.path.abspath(folder) if folder else ""
    paths = [
        os.path.join(folder, file_name(record)) if folder
        else local_path(record["url"]) or os.path.join(store, record["sha256"], file_name(record))
        for record in records
    ]  # fmt: skip
    missing = []
    for record, path in zip(records, paths):
        if not path.startswith(store + os.sep):
            verify_file(path, record)
        elif not is_intact(path, record):
            missing.append((record, path))
    if missing:
        _download(missing, os.path.join(work, "arrived"), download)
    return paths


def _download(missing: List[Tuple[Record, str]], folder: str, download: Download) -> None:
    """Download packages into a folder, and move each to its path once it is verified."""
    size = sum(record.get("size") or 0 for record, _ in missing) / MB
    say("%d packages to download%s" % (len(missing), ", %d MB" % size if size else ""))
    os.makedirs(folder)
    download([record for record, _ in missing], folder)
    for record, path in missing:
        arrived = os.path.join(folder, file_name(record))
        verify_file(arrived, record)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        move(arrived, path)


def local_path(url: str) -> str:
    """The path of a file:// URL; empty for other URLs."""
    parts = urllib.parse.urlparse(url)
    return urllib.request.url2pathname(parts.path) if parts.scheme == "file" else ""


def move(source: str, target: str) -> None:
    """Move a file, which appears at its target atomically."""
    unfinished = "%s.%d" % (target, os.getpid())
    shutil.move(source, unfinished)
    os.replace(unfinished, target)


def is_intact(path: str, record: Record) -> bool:
    if not os.path.exists(path):
        return False
    if sha256_of(path) == record["sha256"]:
        os.utime(os.path.dirname(path))  # `hvdenv wheels prune` reads this time
        return True
    say("damaged in the cache, to be downloaded again: %s" % path)
    return False


def verify_file(path: str, record: Record) -> None:
    """Compare a package with its hash before anything of it is used."""
    if not os.path.exists(path):
        raise Failure(
            "%s does not exist: the index of its channel, or the lock, is out of date, or the "
            "channel withdrew the package" % path
        )
    found = sha256_of(path)
    if found != record["sha256"]:
        lines = [
            "%s is not the package that was asked for: its sha256 is %s instead of %s"
            % (path, found, record["sha256"]),
            "It should be %s" % record["url"],
            "The file is damaged or was replaced, or the index of its channel is out of date",
        ]
        with open(path, "rb") as stream:
            if stream.read(512).lstrip().startswith(b"<"):
                lines.append("It is an HTML page, which proxies and login pages send")
        raise Failure("\n".join(lines))

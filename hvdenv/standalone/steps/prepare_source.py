"""Unpack a source archive and apply text edits to it.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, so that the
script of ``hvdenv plan --format bash`` can contain it.

    prepare_source.py ARCHIVE SHA256 DEST PATCHES.json

PATCHES.json holds ``[{"name", "edits": [{"file", "find", "replace"}]}]``. Each ``find``
must occur exactly once; otherwise the build stops.
"""

import json
import os
import shutil
import sys
import tarfile
from typing import Any, Dict, NoReturn

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from archives import ArchiveError, members, opened_tar, sha256_of


def fail(message: str) -> NoReturn:
    sys.exit("prepare_source: " + message)


def unpack(archive: str, dest: str) -> None:
    """Unpack an archive so that its only top directory becomes DEST."""
    unpacked = dest + ".unpacking"
    shutil.rmtree(unpacked, ignore_errors=True)
    root = os.path.realpath(unpacked)
    with opened_tar(archive) as tar:
        for member in members(tar):
            target = os.path.realpath(os.path.join(root, member.name))
            if not (member.isfile() or member.isdir()):
                fail(
                    "%s holds %s, which is neither a file nor a directory" % (archive, member.name)
                )
            if os.path.commonpath([root, target]) != root:
                fail("%s holds %s, a path outside of the archive" % (archive, member.name))
        # Checked above; the filter= argument exists only since Python 3.12.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(root)
    folders = os.listdir(root)
    if len(folders) != 1:
        fail(
            "%s should hold one top directory, it holds %s" % (archive, ", ".join(sorted(folders)))
        )
    shutil.rmtree(dest, ignore_errors=True)
    os.rename(os.path.join(root, folders[0]), dest)
    os.rmdir(root)


def apply_patch(dest: str, patch: Dict[str, Any]) -> None:
    for number, edit in enumerate(patch["edits"], 1):
        path = os.path.join(dest, edit["file"])
        where = "patch %s, edit %d, %s" % (patch["name"], number, edit["file"])
        try:
            with open(path, encoding="utf-8", newline="") as stream:
                text = stream.read()
        except OSError as error:
            fail("%s: %s" % (where, error.strerror))
        count = text.count(edit["find"])
        if count != 1:
            fail(
                "%s: the text to replace occurs %d times instead of once; "
                "this patch does not fit this source:\n%s" % (where, count, edit["find"])
            )
        with open(path, "w", encoding="utf-8", newline="") as stream:
            stream.write(text.replace(edit["find"], edit["replace"]))


def main(archive: str, sha256: str, dest: str, patches_json: str) -> None:
    found = sha256_of(archive)
    if found != sha256:
        fail("%s has sha256 %s, expected %s" % (archive, found, sha256))
    with open(patches_json, encoding="utf-8") as stream:
        patches = json.load(stream)
    try:
        unpack(archive, dest)
    except ArchiveError as error:
        fail("%s: %s" % (archive, error))
    for patch in patches:
        apply_patch(dest, patch)
        print("applied " + patch["name"])


if __name__ == "__main__":
    if len(sys.argv) != 5:
        fail("usage: prepare_source.py ARCHIVE SHA256 DEST PATCHES.json")
    main(*sys.argv[1:])

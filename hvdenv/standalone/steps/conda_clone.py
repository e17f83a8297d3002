"""Copying a conda environment to another path.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import mmap
import os
import re
import shutil
import stat
from typing import Any, Dict, List, Match, NoReturn, Optional, Pattern

from conda_spec import Failure, read_records, say

# Kernels before Linux 5.1 cut a longer first line.
SHEBANG_LIMIT = 127
# Directories of a root environment that are no part of it.
NOT_CLONED = {"pkgs", "envs", "conda-bld"}


def clone(source: str, prefix: str) -> None:
    """Copy an environment, and replace its path in the copied files."""
    records = read_records(source)
    if not records:
        raise Failure("%s is not a conda environment: it has no conda-meta/*.json" % source)
    inside = os.path.realpath(prefix) + os.sep
    if inside.startswith(os.path.realpath(source) + os.sep):
        raise Failure("%s is in %s, which is to be copied" % (prefix, source))
    # Records name files since conda 4.3.
    paths = ((record.get("paths_data") or {}).get("paths", ()) for _, record in records)
    copier = Copier(source, prefix, {each["_path"]: each for part in paths for each in part})
    copier.copy_all()
    if copier.unchanged:
        say("these still name %s, because they have no room for the new path:" % source)
        for path in copier.unchanged[:10] + ["..."] * (len(copier.unchanged) > 10):
            say("  " + path)


def spellings(folder: str) -> List[bytes]:
    """The paths by which files may name a directory: as given, and with links resolved."""
    found = {os.path.abspath(folder), os.path.realpath(folder)}
    return [os.fsencode(each) for each in sorted(found, key=len, reverse=True)]


def naming(prefixes: List[bytes]) -> Pattern[bytes]:
    """A pattern for prefixes that does not match longer names of other directories."""
    alternatives = b"|".join(re.escape(each) for each in prefixes)
    return re.compile(b"(?:" + alternatives + rb")(?![\w-]|\.\w)")


def in_text(data: bytes, pattern: Pattern[bytes], new: bytes) -> bytes:
    """Text with the new prefix; a first line that is too long for kernels is replaced."""
    data = pattern.sub(lambda found: new, data)
    first, end, rest = data.partition(b"\n")
    program = re.match(b"#!(" + re.escape(new) + rb"/(?:\S*/)?(\S+))(.*)", first)
    if program and (len(first) > SHEBANG_LIMIT or b" " in new):
        first = short_shebang(*program.groups())
    return first + end + rest


def short_shebang(path: bytes, name: bytes, arguments: bytes) -> bytes:
    """First lines that start an interpreter whose path is too long for a kernel.

    Python reads the lines for the shell as a string. Other interpreters are looked up in PATH.
    """
    if not name.startswith(b"python"):
        return b"#!/usr/bin/env " + name + arguments
    return b"#!/bin/sh\n'''exec' \"" + path + b'"' + arguments + b" \"$0\" \"$@\"\n' '''"


def in_binary(
    data: bytes, pattern: Pattern[bytes], new: bytes, room: Optional[int]
) -> Optional[bytes]:
    """Binary data of the same length with the new prefix; None if there is no room for it.

    Args:
        room: bytes reserved for each prefix; unused ones are zeros at the end of its string.
            None: the length of the old prefix.
    """
    short: List[int] = []

    def replaced(found: Match[bytes]) -> bytes:
        text = found.group(1)
        names = pattern.findall(text)
        spare = sum(room - len(name) for name in names) if room else 0
        text = pattern.sub(lambda _: new, text)
        if len(found.group(2)) < spare or len(text) > len(found.group(1)) + spare:
            short.append(found.start())
        return text.ljust(len(found.group()), b"\0")

    strings = re.compile(b"(" + pattern.pattern + rb"[^\0]*)(\0*)")
    data = strings.sub(replaced, data)
    return None if short else data


class Copier:
    """Copies the files of an environment.

    Attributes:
        rewritten: how many files name the new path.
        unchanged: files that still name the old one.
    """

    def __init__(self, source: str, prefix: str, recorded: Dict[str, Dict[str, Any]]) -> None:
        self.source = source
        self.prefix = prefix
        self.recorded = recorded
        self.spellings = spellings(source)
        self.pattern = naming(self.spellings)
        self.new = os.fsencode(prefix)
        self.rewritten = 0
        self.unchanged: List[str] = []

    @staticmethod
    def room(entry: Dict[str, Any]) -> Optional[int]:
        """Bytes reserved for the prefix in a binary file; None for other files."""
        if entry.get("file_mode") == "binary" and entry.get("prefix_placeholder"):
            return len(os.fsencode(entry["prefix_placeholder"]))
        return None

    def copy_all(self) -> None:
        for folder, folders, files in os.walk(self.source, onerror=unreadable):
            relative = os.path.relpath(folder, self.source)
            target = os.path.normpath(os.path.join(self.prefix, relative))
            if relative == "." and os.path.isdir(os.path.join(folder, "condabin")):
                folders[:] = [name for name in folders if name not in NOT_CLONED]
            os.makedirs(target, exist_ok=True)
            for name in files + [each for each in folders if is_link(folder, each)]:
                path = os.path.normpath(os.path.join(relative, name))
                self.copy(os.path.join(folder, name), os.path.join(target, name), path)
        named = any(entry.get("prefix_placeholder") for entry in self.recorded.values())
        if named and not self.rewritten:
            raise Failure(
                "no file of %s contains this path: the environment was made at another path\n"
                "Name the environment by the path at which it was made" % self.source
            )
        say("%d files rewritten" % self.rewritten)

    def copy(self, source: str, target: str, path: str) -> None:
        kind = os.lstat(source).st_mode
        if stat.S_ISLNK(kind):
            link = self.pattern.sub(lambda found: self.new, os.fsencode(os.readlink(source)))
            os.symlink(os.fsdecode(link), target)
        elif stat.S_ISREG(kind):
            data = self.changed(source, path)
            if data is None:
                shutil.copy2(source, target)
            else:
                # Its new time makes Python ignore the bytecode of the old text.
                with open(target, "wb") as stream:
                    stream.write(data)
                self.rewritten += 1
            # The owner of the copy may change what is read-only in the original.
            os.chmod(target, stat.S_IMODE(kind) & 0o777 | 0o600)
        else:
            say("not copied, because it is neither a file nor a link: " + path)

    def changed(self, source: str, path: str) -> Optional[bytes]:
        """The content of a file in the copy; None if it does not change."""
        # Bytecode contains its path for tracebacks only, and Python corrects it.
        if path.endswith(".pyc") or not self.names_source(source):
            return None
        with open(source, "rb") as stream:
            data = stream.read()
        entry = self.recorded.get(path, {})
        room = self.room(entry)
        if room is not None and len(self.new) > room:
            raise Failure(
                "%s has %d characters, and %s of the environment %s has room for %d\n"
                "Name a directory with a shorter path"
                % (self.prefix, len(self.new), path, self.source, room)
            )
        if entry.get("file_mode") == "text" or b"\0" not in data:
            changed: Optional[bytes] = in_text(data, self.pattern, self.new)
        # Without a record, other binary formats cannot be changed safely.
        elif "prefix_placeholder" in entry or data.startswith(b"\x7fELF"):
            changed = in_binary(data, self.pattern, self.new, room)
        else:
            changed = None
        if changed is None:
            self.unchanged.append(path)
        return None if changed == data else changed

    def names_source(self, path: str) -> bool:
        if not os.path.getsize(path):
            return False
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return any(data.find(spelling) >= 0 for spelling in self.spellings)


def is_link(folder: str, name: str) -> bool:
    return os.path.islink(os.path.join(folder, name))


def unreadable(error: OSError) -> NoReturn:
    raise error

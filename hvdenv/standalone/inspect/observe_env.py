"""What an environment has, to be compared with what it had when it was built.

usage: python observe_env.py ROOT

Stand-alone, for Python 3.6 and newer, inside the environment. Prints one line
`@hvdenv-observed PAYLOAD`, JSON in base64, so that what hides passwords in output does not
change it. Paths below ROOT are relative, so that an environment that was moved is the
same. No framework is imported: the dynamic linker itself is asked what it would load.
"""

import base64
import hashlib
import importlib.util
import json
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sys

import extension

# Where the libraries of a framework lie in its package: they are there before the
# extension is loaded.
FOLDERS = {"torch": ("lib",), "tensorflow": ("", "python"), "mxnet": ("",)}
# Their version is glibc's.
OF_GLIBC = re.compile(r"(libc|libm|libdl|librt|libpthread|libutil|ld-linux[\w-]*|ld64)\.so\.")
MPI = re.compile(r"libmpi(ch)?(_cray|_ibm|_gnu_\w+|_intel\w*)?\.so\.")
ASK_MPI = """
import ctypes, sys
text, length = ctypes.create_string_buffer(1 << 14), ctypes.c_int()
ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(length))
print(text.value.decode("ascii", "replace"))
"""
SECONDS = 15
LOAD, DYNAMIC, NOTE = 1, 2, 4
NEEDED, STRTAB, STRSZ = 1, 5, 10
BUILD_ID = 3


class Elf:
    """What the file of a library says; nothing is loaded.

    Attributes:
        needed: names of the libraries that it links.
        strings: names of its symbols and of their versions.
        build: its build id, or its size if it has none.
    """

    def __init__(self, path):
        self.needed, self.strings, self.build = [], b"", "%d bytes" % os.path.getsize(path)
        try:
            with open(path, "rb") as stream:
                content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            # 64 bits, little-endian: all machines that Horovod is built on.
            if content[:6] == b"\x7fELF\x02\x01":
                self._read(content)
        except (OSError, ValueError, struct.error):
            pass  # it is not whole; that is for others to say

    def _read(self, content):
        (start,) = struct.unpack_from("<Q", content, 32)
        size, count = struct.unpack_from("<HH", content, 54)
        segments = [
            struct.unpack_from("<IIQQQQ", content, start + size * number) for number in range(count)
        ]
        for kind, _, offset, _, _, length in segments:
            if kind == DYNAMIC:
                self._read_dynamic(content, segments, offset, length)
            elif kind == NOTE:
                self._read_notes(content, offset, offset + length)

    def _read_dynamic(self, content, segments, offset, length):
        entries = list(struct.iter_unpack("<qQ", content[offset : offset + length]))
        known = dict(entries)
        address = known.get(STRTAB, 0)
        for kind, _, place, begin, _, size in segments:
            if kind == LOAD and begin <= address < begin + size:
                first = place + address - begin
                self.strings = content[first : first + known.get(STRSZ, 0)]
        for tag, value in entries:
            if tag == NEEDED:
                self.needed.append(self.strings[value:].split(b"\0", 1)[0].decode())

    def _read_notes(self, content, offset, end):
        while offset + 12 <= end:
            names, length, kind = struct.unpack_from("<III", content, offset)
            name = offset + 12
            note = name + (names + 3) // 4 * 4
            if kind == BUILD_ID and content[name : name + names] == b"GNU\0":
                self.build = "".join("%02x" % byte for byte in content[note : note + length])
            offset = note + (length + 3) // 4 * 4

    def highest(self, prefix):
        """The highest version of a series of symbol versions, such as GLIBCXX; or empty."""
        found = re.findall(prefix.encode() + rb"_(\d+(?:\.\d+)+)\0", self.strings)
        return max((each.decode() for each in found), key=numbers, default="")


def numbers(version):
    return [int(number) for number in version.split(".")]


class Environment:
    """What is asked of one environment."""

    def __init__(self, root):
        self.root = os.path.realpath(root)

    def placed(self, path):
        """A path without links; below the root, relative to it."""
        real = os.path.realpath(path)
        return os.path.relpath(real, self.root) if real.startswith(self.root + os.sep) else real

    def look(self):
        folder = extension.horovod_folder()
        frameworks = {name: package_folder(name) for name in extension.LIBRARIES}
        frameworks = {name: found for name, found in frameworks.items() if found}
        places = dict(frameworks, **({"horovod": folder} if folder else {}))
        built_with = {name: extension.built_with(folder, name) for name in extension.LIBRARIES}
        mpirun = shutil.which("mpirun")
        return {
            "host": platform.node(),
            "python": {"version": platform.python_version(), "path": self.placed(sys.executable)},
            "places": {name: self.placed(path) for name, path in places.items()},
            "built_with": {name: str(said) for name, said in built_with.items() if said},
            "packages": packages(),
            "extensions": {
                name: self.linked(extension.library(folder, name), name, frameworks.get(name, ""))
                for name in extension.LIBRARIES
                if folder and os.path.exists(extension.library(folder, name))
            },
            "mpirun": {"path": self.placed(mpirun) if mpirun else ""},
            "glibc": os.confstr("CS_GNU_LIBC_VERSION").split()[-1],
            "driver": driver(),
            "modules": self.modules(),
        }

    def linked(self, path, framework, package):
        """What an extension links, and which files that means in this environment."""
        elf = Elf(path)
        inside = []
        for name in elf.needed:
            files = [os.path.join(package, below, name) for below in FOLDERS[framework]]
            inside += [file for file in files if package and os.path.exists(file)][:1]
        found = loaded_libraries([*inside, path])
        own = {os.path.basename(file) for file in inside}
        libraries = [name for name in elf.needed if name not in own and not OF_GLIBC.match(name)]
        return {
            "libraries": {name: self.library(name, found.get(name, "")) for name in libraries},
            "glibcxx": elf.highest("GLIBCXX"),
            "glibc": elf.highest("GLIBC"),
        }

    def library(self, name, path):
        """The file that a library's name means; empty where there is none."""
        if not path:
            return {"path": ""}
        elf = Elf(path)
        version = mpi_version(path) if MPI.match(name) else ""
        if name.startswith("libstdc++."):
            version = elf.highest("GLIBCXX")
        return {"path": self.placed(path), "build": elf.build, "version": version}

    def modules(self):
        """The modules that are loaded, with the files that their names mean."""
        names = [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name]
        files = os.environ.get("_LMFILES_", "").split(":")
        if len(files) != len(names):
            return [{"name": name} for name in names]
        return [
            {"name": name, "file": self.placed(files[number]), "digest": digest(files[number])}
            for number, name in enumerate(names)
        ]


def package_folder(name):
    """Where a package lies, without importing it; empty if there is none."""
    found = importlib.util.find_spec(name)
    return found.submodule_search_locations[0] if found and found.origin else ""


def loaded_libraries(objects):
    """Which file each library's name means in a Python that loads these, in this order."""
    if any(re.search(r"[\s:]", path) for path in objects):
        return {}  # LD_PRELOAD cannot name them
    already = os.environ.get("LD_PRELOAD")
    preload = ":".join([*([already] if already else []), *objects])
    said = answer(
        [os.path.realpath("/proc/self/exe")], LD_TRACE_LOADED_OBJECTS="1", LD_PRELOAD=preload
    )
    return dict(re.findall(r"^[ \t]*(\S+) => (/\S+) \(0x", said, re.MULTILINE))


_ASKED = {}


def mpi_version(path):
    """What an MPI library calls itself, as `Open MPI v5.0.1`; a process of its own asks it."""
    if path not in _ASKED:
        said = answer([sys.executable, "-S", "-E", "-c", ASK_MPI, path])
        _ASKED[path] = re.sub(r"\s+", " ", re.split(r"[,\n]", said.strip())[0])
    return _ASKED[path]


def answer(command, **variables):
    """The standard output of a program; empty when it fails."""
    try:
        done = subprocess.run(
            command, env=dict(os.environ, **variables), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")


def packages():
    """Names and versions of all packages, by the names of their folders: as they are found."""
    found = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            split = re.match(r"([^-]+)-([^-]+?)(-py[\d.]+)?\.(dist|egg)-info$", name)
            if split:
                found.setdefault(re.sub(r"[-_.]+", "-", split.group(1)).lower(), split.group(2))
    return found


def driver():
    """The version of NVIDIA's kernel driver; empty without one."""
    try:
        with open("/proc/driver/nvidia/version") as stream:
            found = re.search(r"Kernel Module.{0,200}?\s(\d+(\.\d+)+)\s", stream.read())
    except OSError:
        return ""
    return found.group(1) if found else ""


def digest(path):
    """Hash of a modulefile; empty where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return ""


def main(root):
    sys.path.pop(0)  # this folder: its file names must not stand in for modules
    found = json.dumps(Environment(root).look(), sort_keys=True)
    print("\n@hvdenv-observed " + base64.b64encode(found.encode()).decode())


if __name__ == "__main__":
    main(sys.argv[1])

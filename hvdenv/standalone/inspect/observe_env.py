"""Report the contents of an environment, to compare them with those at its build.

usage: python observe_env.py ROOT

Runs inside the environment on Python 3.6 and newer. Prints one line
`@hvdenv-observe_env PAYLOAD`: JSON in base64, which the masking of passwords in output does not
change. Paths below ROOT are relative, so that a moved environment gives the same result.
No framework is imported: the dynamic linker is asked what it would load.
"""

import base64
import contextlib
import functools
import hashlib
import importlib.util
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, List

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import extension

# Directories of a framework's libraries in its package; they are loaded before the extension.
FOLDERS = {"torch": ("lib",), "tensorflow": ("", "python"), "mxnet": ("",)}
# Parts of glibc, which has one version for all.
OF_GLIBC = re.compile(r"(libc|libm|libdl|librt|libpthread|libutil|ld-linux[\w-]*|ld64)\.so\.")
MPI = re.compile(r"libmpi(ch)?(_cray|_ibm|_gnu_\w+|_intel\w*)?\.so\.")
ASK_MPI = """
import ctypes, sys
text, length = ctypes.create_string_buffer(1 << 14), ctypes.c_int()
ctypes.CDLL(sys.argv[1]).MPI_Get_library_version(text, ctypes.byref(length))
print(text.value.decode("ascii", "replace"))
"""
SECONDS = 15
# The head of an ELF note with a build id: lengths of its name and of the id, and its kind.
BUILD_ID = re.compile(rb"\x04\0\0\0([\x08-\x20])\0\0\0\x03\0\0\0GNU\0")


class Library:
    """Facts from the bytes of a library, without loading it: names in it end with a zero byte.

    Attributes:
        build: build id, or the size if there is none.
    """

    def __init__(self, path: str) -> None:
        self.content: Any = b""
        self.build = "%d bytes" % os.path.getsize(path)
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as stream:
            self.content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        note = BUILD_ID.search(self.content)
        if note:
            self.build = self.content[note.end() : note.end() + note.group(1)[0]].hex()

    def has(self, name: str) -> bool:
        """Whether it names another library, as it does with those that it links."""
        return bool(self.content.find(b"\0" + name.encode() + b"\0") >= 0)

    def highest(self, prefix: str) -> str:
        """The highest version of a series of symbol versions, such as GLIBCXX; or empty."""
        found = re.findall(prefix.encode() + rb"_(\d+(?:\.\d+)+)\0", self.content)
        versions = ([int(number) for number in each.split(b".")] for each in found)
        return ".".join(map(str, max(versions, default=[])))


class Environment:
    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def placed(self, path: str) -> str:
        """A path with links resolved; relative if it is below the root."""
        real = os.path.realpath(path)
        return os.path.relpath(real, self.root) if real.startswith(self.root + os.sep) else real

    def look(self) -> Dict[str, Any]:
        folder = extension.horovod_folder()
        frameworks: Dict[str, str] = {}  # directories of their packages; nothing is imported
        for name in extension.LIBRARIES:
            found = importlib.util.find_spec(name)
            if found and found.origin and found.submodule_search_locations:
                frameworks[name] = found.submodule_search_locations[0]
        built_with = {name: extension.built_with(folder, name) for name in extension.LIBRARIES}
        mpirun = shutil.which("mpirun")
        return {
            "host": platform.node(),
            "python": {"version": platform.python_version(), "path": self.placed(sys.executable)},
            "built_with": {name: str(version) for name, version in built_with.items() if version},
            "packages": packages(),
            "extensions": {
                name: self.linked(extension.library(folder, name), name, frameworks.get(name, ""))
                for name in extension.LIBRARIES
                if folder and os.path.exists(extension.library(folder, name))
            },
            "mpirun": {"path": self.placed(mpirun) if mpirun else ""},
            "glibc": str(os.confstr("CS_GNU_LIBC_VERSION")).split()[-1],
            "driver": driver(),
            "modules": self.modules(),
        }

    def linked(self, path: str, framework: str, package: str) -> Dict[str, Any]:
        """The libraries that an extension links, as this environment resolves them."""
        library = Library(path)
        own: Dict[str, str] = {}
        folders = [os.path.join(package, below) for below in FOLDERS[framework] if package]
        for folder in filter(os.path.isdir, folders):  # a distribution may have none
            for name in sorted(os.listdir(folder)):
                if ".so" in name and library.has(name):
                    own.setdefault(name, os.path.join(folder, name))
        linked = {
            name: file
            for name, file in loaded_libraries([*own.values(), path]).items()
            if library.has(name) and name not in own and not OF_GLIBC.match(name)
        }
        return {
            "libraries": {name: self.library(name, file) for name, file in linked.items()},
            "glibcxx": library.highest("GLIBCXX"),
            "glibc": library.highest("GLIBC"),
        }

    def library(self, name: str, path: str) -> Dict[str, str]:
        """The file that a library's name resolves to; an empty path if there is none."""
        if not path:
            return {"path": ""}
        library = Library(path)
        version = mpi_version(path) if MPI.match(name) else ""
        if name.startswith("libstdc++."):
            version = library.highest("GLIBCXX")
        return {"path": self.placed(path), "build": library.build, "version": version}

    def modules(self) -> List[Dict[str, str]]:
        names = [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name]
        files = os.environ.get("_LMFILES_", "").split(":")
        if len(files) != len(names):
            return [{"name": name} for name in names]
        return [
            {"name": name, "file": self.placed(file), "digest": digest(file)}
            for name, file in zip(names, files)
        ]


def loaded_libraries(objects: List[str]) -> Dict[str, str]:
    """The file that each library's name resolves to in a Python that loads these, in this order.

    It is empty for a library that is not found.
    """
    if any(re.search(r"[\s:]", path) for path in objects):
        return {}  # LD_PRELOAD cannot contain such paths
    already = os.environ.get("LD_PRELOAD")
    preload = ":".join([*([already] if already else []), *objects])
    listing = answer(
        [os.path.realpath("/proc/self/exe")], LD_TRACE_LOADED_OBJECTS="1", LD_PRELOAD=preload
    )
    return dict(re.findall(r"^[ \t]*(\S+) => (?:(/\S+) \(0x|not found)", listing, re.MULTILINE))


@functools.lru_cache(maxsize=None)
def mpi_version(path: str) -> str:
    """The name and version of an MPI library, as `Open MPI v5.0.1`, asked by a separate process."""
    text = answer([sys.executable, "-S", "-E", "-c", ASK_MPI, path])
    return re.sub(r"\s+", " ", re.split(r"[,\n]", text.strip())[0])


def answer(command: List[str], **variables: str) -> str:
    """The standard output of a program; empty when it fails."""
    try:
        done = subprocess.run(
            command,
            env=dict(os.environ, **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout, "utf-8", "replace")


def packages() -> Dict[str, str]:
    """Names and versions of all packages, from the names of their directories in search order."""
    found: Dict[str, str] = {}
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


def driver() -> str:
    try:
        with open("/proc/driver/nvidia/version") as stream:
            found = re.search(r"Kernel Module.{0,200}?\s(\d+(\.\d+)+)\s", stream.read())
    except OSError:
        return ""
    return found.group(1) if found else ""


def digest(path: str) -> str:
    """Hash of a modulefile; empty where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return ""


def main(root: str) -> None:
    sys.path.pop(0)  # this directory: its files must not shadow modules
    found = json.dumps(Environment(root).look(), sort_keys=True)
    print("\n@hvdenv-observe_env " + base64.b64encode(found.encode()).decode())


if __name__ == "__main__":
    main(sys.argv[1])

"""Report on the extensions that Horovod has for each framework.

usage: python extension.py [--import] torch|tensorflow|mxnet ...

Prints one line `@hvdenv-extension PAYLOAD` for each framework: JSON in base64, which the
masking of passwords in output does not change. Without --import only files are examined,
which is quick. A successful import proves little: in all versions of Horovod, `import
horovod.torch` succeeds without any extension. Runs on Python 3.6 and newer and imports
nothing but the framework and Horovod.
"""

import base64
import contextlib
import faulthandler
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import site
import struct
import sys
import sysconfig
import traceback
from typing import Any, Dict, List, Optional

LIBRARIES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib", "mxnet": "mpi_lib"}
BUILT = ("MPI", "Gloo", "NCCL", "DDL", "CCL", "MLSL", "CUDA", "ROCm")


def horovod_folder() -> str:
    """The directory of the package horovod; empty if there is none."""
    found = importlib.util.find_spec("horovod")
    return os.path.dirname(found.origin) if found and found.origin else ""


def library(folder: str, framework: str) -> str:
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return os.path.join(folder, framework, LIBRARIES[framework] + suffix)


def others(path: str) -> List[str]:
    """Names of the framework's extensions for other versions of Python."""
    if not path or os.path.exists(path):
        return []
    name = os.path.basename(path).partition(".")[0]
    return sorted(
        map(os.path.basename, glob.glob(os.path.join(os.path.dirname(path), name + ".*so")))
    )


def size_by_header(path: str) -> int:
    """The size of a shared library in bytes by its header; 0 if the header cannot be read.

    The table of sections is at the end of such a file.
    """
    try:
        with open(path, "rb") as stream:
            header = stream.read(64)
    except OSError:
        return 0
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return 0
    (offset,) = struct.unpack_from("<Q", header, 40)
    length, count = struct.unpack_from("<HH", header, 58)
    return int(offset + length * count)


def sources(folder: str) -> str:
    """Hash of the package's Python files, which tells copies of the package apart."""
    found = hashlib.sha256()
    for below, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(below, name)
            found.update(os.path.relpath(path, folder).encode())
            with contextlib.suppress(OSError), open(path, "rb") as stream:
                found.update(hashlib.sha256(stream.read()).digest())
    return found.hexdigest()[:12]


def shadowed(framework: str) -> Dict[str, str]:
    """Packages on PYTHONPATH that hide those of this environment, with their directories."""
    return before_own(framework, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def left_out(framework: str) -> Dict[str, str]:
    """The user's packages that Python would import, were this program not started with -s."""
    virtual = sys.prefix != sys.base_prefix  # these leave them out
    return before_own(framework, [] if virtual else [site.getusersitepackages()])


def before_own(framework: str, folders: List[str]) -> Dict[str, str]:
    """The packages in directories that this environment has too, in its own or in .pth files' directories."""
    given = {os.path.realpath(folder) for folder in folders if os.path.isabs(folder)}
    known = [*map(sysconfig.get_path, ("purelib", "platlib")), *sys.path]
    own = [each for each in known if os.path.realpath(each) not in given]
    found: Dict[str, str] = {}
    for folder in filter(os.path.isdir, folders):
        for name in ("horovod", framework):
            installed = any(os.path.isdir(os.path.join(each, name)) for each in own)
            if installed and os.path.isdir(os.path.join(folder, name)):
                found.setdefault(name, folder)
    return found


def built_with(folder: str, framework: str) -> Optional[str]:
    """The framework version in metadata.json; None where that does not exist (< 0.21.1)."""
    try:
        with open(os.path.join(folder, "metadata.json")) as stream:
            key = "pytorch" if framework == "torch" else framework
            version: Optional[str] = json.load(stream).get(key, "")
            return version
    except (OSError, ValueError):
        return None


def built(module: Any) -> Dict[str, Optional[int]]:
    """The result of each *_built() of a framework's module; None if the call fails."""
    answers: Dict[str, Optional[int]] = {}
    for name in BUILT:
        try:
            answers[name] = int(getattr(module, name.lower() + "_built")())
        except Exception:
            answers[name] = None
    return answers


def files(framework: str) -> Dict[str, Any]:
    """Facts from files, without an import."""
    folder = horovod_folder()
    path = library(folder, framework) if folder else ""
    exists = os.path.exists(path)
    return {
        "framework": framework,
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "horovod": folder,
        "path": path,
        "size": os.path.getsize(path) if exists else 0,
        "size_by_header": size_by_header(path) if exists else 0,
        "sources": sources(folder),
        "others": others(path),
        "shadowed": shadowed(framework),
        "left_out": left_out(framework),
        "built_with": built_with(folder, framework),
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
    }


def imported(framework: str) -> Dict[str, Any]:
    """Facts from the modules, whose exceptions are not caught."""
    return {
        "installed": str(importlib.import_module(framework).__version__),
        "version": importlib.import_module("horovod").__version__,
        "built": built(importlib.import_module("horovod." + framework)),
    }


def look(framework: str) -> Dict[str, Any]:
    facts = files(framework)
    if facts["size"]:
        try:
            facts.update(imported(framework))
        except Exception as error:
            facts["error"] = "{}: {}".format(type(error).__name__, error)[:2000]
            facts["traceback"] = traceback.format_exc()[-4000:]
    return facts


def main(arguments: List[str]) -> None:
    faulthandler.enable()
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # this directory: its files must not shadow modules
    find = look if arguments[0] == "--import" else files
    for framework in arguments:
        if framework != "--import":
            payload = base64.b64encode(json.dumps(find(framework)).encode("ascii"))
            print("\n@hvdenv-extension " + payload.decode("ascii"))


if __name__ == "__main__":
    main(sys.argv[1:])

"""What the frameworks' parts of Horovod are.

usage: python extension.py [--import] torch|tensorflow|mxnet ...

For each framework one line `@hvdenv-extension PAYLOAD`, JSON in base64, so that what
hides passwords in output does not change it. Without --import only files are looked at,
which is quick. An import that works proves little: up to today's Horovod `import
horovod.torch` succeeds without any extension. Runs on Python 3.6 and up and imports
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
import struct
import sys
import sysconfig
import traceback

LIBRARIES = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib", "mxnet": "mpi_lib"}
METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow", "mxnet": "mxnet"}
BUILT = {
    "MPI": "mpi_built",
    "Gloo": "gloo_built",
    "NCCL": "nccl_built",
    "DDL": "ddl_built",
    "CCL": "ccl_built",
    "MLSL": "mlsl_built",
    "CUDA": "cuda_built",
    "ROCm": "rocm_built",
}


def horovod_folder():
    """Where the package horovod lies; empty when there is none."""
    found = importlib.util.find_spec("horovod")
    return os.path.dirname(found.origin) if found and found.origin else ""


def library(folder, framework):
    """The extension's path."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return os.path.join(folder, framework, LIBRARIES[framework] + suffix)


def others(path):
    """Names of the framework's extensions for another Python than this one."""
    if not path or os.path.exists(path):
        return []
    name = os.path.basename(path).partition(".")[0]
    return sorted(
        map(os.path.basename, glob.glob(os.path.join(os.path.dirname(path), name + ".*so")))
    )


def size_by_header(path):
    """The bytes that a shared library has by its own header; 0 if that is not to be read.

    The table of sections lies at the end of such a file.
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
    return offset + length * count


def sources(folder):
    """Hash of all that is Python in the package, by which copies of it are told apart."""
    found = hashlib.sha256()
    for below, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(below, name)
            found.update(os.path.relpath(path, folder).encode())
            with contextlib.suppress(OSError), open(path, "rb") as stream:
                found.update(hashlib.sha256(stream.read()).digest())
    return found.hexdigest()[:12]


def shadowed(framework):
    """Packages in front of this environment's own by PYTHONPATH, and where those are."""
    own = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    found = {}
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if not os.path.isdir(folder) or os.path.realpath(folder) in map(os.path.realpath, own):
            continue
        for name in ("horovod", framework):
            here = any(os.path.isdir(os.path.join(each, name)) for each in own)
            if here and os.path.isdir(os.path.join(folder, name)):
                found.setdefault(name, folder)
    return found


def built_with(folder, framework):
    """The framework version in metadata.json; None where that does not exist (< 0.21.1)."""
    try:
        with open(os.path.join(folder, "metadata.json")) as stream:
            return json.load(stream).get(METADATA_KEYS[framework], "")
    except (OSError, ValueError):
        return None


def built(module):
    """Each *_built() of a framework's module; None where it cannot be asked."""
    answers = {}
    for name, function in BUILT.items():
        try:
            answers[name] = int(getattr(module, function)())
        except Exception:
            answers[name] = None
    return answers


def files(framework):
    """What the files say, without an import."""
    folder = horovod_folder()
    path = library(folder, framework) if folder else ""
    there = os.path.exists(path)
    return {
        "framework": framework,
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "horovod": folder,
        "path": path,
        "size": os.path.getsize(path) if there else 0,
        "size_by_header": size_by_header(path) if there else 0,
        "sources": sources(folder),
        "others": others(path),
        "shadowed": shadowed(framework),
        "built_with": built_with(folder, framework),
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
    }


def imported(framework):
    """What the modules say; an exception of theirs is not caught."""
    return {
        "installed": str(importlib.import_module(framework).__version__),
        "version": importlib.import_module("horovod").__version__,
        "built": built(importlib.import_module("horovod." + framework)),
    }


def look(framework):
    """Everything about one framework."""
    facts = files(framework)
    if facts["size"]:
        try:
            facts.update(imported(framework))
        except Exception as error:
            facts["error"] = "{}: {}".format(type(error).__name__, error)[:2000]
            facts["traceback"] = traceback.format_exc()[-4000:]
    return facts


def main(arguments):
    faulthandler.enable()
    sys.path.pop(0)  # this folder: its file names must not stand in for modules
    find = look if arguments[0] == "--import" else files
    for framework in arguments:
        if framework != "--import":
            payload = base64.b64encode(json.dumps(find(framework)).encode("ascii"))
            print("\n@hvdenv-extension " + payload.decode("ascii"))


if __name__ == "__main__":
    main(sys.argv[1:])

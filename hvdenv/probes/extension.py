"""What one framework's part of Horovod is, seen from a process of its own.

usage: python extension.py torch|tensorflow|mxnet

Prints one line `@hvdenv-extension PAYLOAD`, JSON in base64, so that what hides passwords
in output does not change it. An import that works proves little: up to
today's Horovod `import horovod.torch` succeeds without any extension. Runs on Python
3.6 and up and imports nothing but the framework and Horovod.
"""

import base64
import faulthandler
import importlib
import importlib.util
import json
import os
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


def gpus(framework, module):
    """How many GPUs the framework can use; 0 where it cannot even say."""
    try:
        if framework == "torch":
            return module.cuda.device_count() if module.cuda.is_available() else 0
        if framework == "tensorflow":
            return len(module.config.experimental.list_physical_devices("GPU"))
        return module.context.num_gpus()
    except Exception:
        return 0


def look(framework):
    """Everything about one framework."""
    folder = horovod_folder()
    path = library(folder, framework) if folder else ""
    facts = {
        "python": sys.executable,
        "horovod": folder,
        "path": path,
        "size": os.path.getsize(path) if os.path.exists(path) else 0,
        "built_with": built_with(folder, framework),
    }
    if not facts["size"]:
        return facts
    try:
        module = importlib.import_module(framework)
        facts["installed"] = str(module.__version__)
        facts["version"] = importlib.import_module("horovod").__version__
        facts["built"] = built(importlib.import_module("horovod." + framework))
        facts["gpus"] = gpus(framework, module)
    except Exception as error:
        facts["error"] = "{}: {}".format(type(error).__name__, error)[:2000]
        facts["traceback"] = traceback.format_exc()[-4000:]
    return facts


if __name__ == "__main__":
    faulthandler.enable()
    sys.path.pop(0)  # this folder: its file names must not stand in for modules
    payload = base64.b64encode(json.dumps(look(sys.argv[1])).encode("ascii"))
    print("\n@hvdenv-extension " + payload.decode("ascii"))

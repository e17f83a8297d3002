"""Check that this Horovod fits its environment, before its extension is loaded.

`hvdenv wheels publish` adds this file to wheels as horovod/_compiled_for.py, beside
_compiled_for.json, and `import horovod.torch` and `import horovod.tensorflow` call check().
Imports nothing of hvdenv or Horovod, and runs on Python 3.6 and newer.
"""

import ctypes
import glob
import importlib
import json
import os
from typing import Any, Dict

Facts = Dict[str, Any]


def check(framework: str) -> None:
    """Compare a framework and MPI with those that the extension was compiled for.

    Raises:
        ImportError: one differs, so that the extension could crash.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "_compiled_for.json"), encoding="utf-8") as stream:
        facts = json.load(stream)
    wanted = facts["frameworks"].get(framework)
    if wanted is None:  # Horovod itself reports that there is no extension
        return
    _check_framework(framework, wanted, facts)
    if facts["mpi"]:
        _check_mpi(os.path.join(folder, framework), facts)


def _check_framework(framework: str, wanted: Facts, facts: Facts) -> None:
    command = 'run: python -m pip install "%s==%s"' % (wanted["package"], wanted["version"])
    needed = "%s %s" % (framework, wanted["version"])
    try:
        module = importlib.import_module(framework)
    except ImportError as error:
        if getattr(error, "name", "") != framework:
            raise
        _fail(facts, "%s is not installed" % framework, needed, command)
    found = str(module.__version__)
    # TensorFlow writes 2.16.0-rc0, packages have 2.16.0rc0.
    if found.partition("+")[0].replace("-", "") != wanted["version"]:
        _fail(facts, "%s %s is installed" % (framework, found), needed, command)
    if _cxx11(framework, module) not in (wanted["cxx11"], None):
        kind, other = "the old string ABI of C++", "the C++11 string ABI"
        if wanted["cxx11"]:
            kind, other = other, kind
        _fail(facts, "%s %s is installed with %s" % (framework, found, other), kind, command)
    cuda = str(getattr(getattr(module, "version", None), "cuda", None) or "")
    if facts["cuda"] and framework == "torch" and cuda.split(".")[0] != facts["cuda"].split(".")[0]:
        _fail(
            facts,
            "%s %s is installed for %s" % (framework, found, (cuda and "CUDA " + cuda) or "CPUs"),
            "CUDA " + facts["cuda"],
            "install %s for CUDA %s" % (needed, facts["cuda"].split(".")[0]),
        )


def _cxx11(framework: str, module: Any) -> Any:
    """Whether a framework has the newer string ABI of C++; None if it does not say so."""
    if framework == "torch":
        return getattr(getattr(module, "_C", None), "_GLIBCXX_USE_CXX11_ABI", None)
    flag = getattr(module, "__cxx11_abi_flag__", None)
    return None if flag is None else bool(flag)


def _check_mpi(folder: str, facts: Facts) -> None:
    mpi = facts["mpi"]
    command = "load the module of that MPI"
    if mpi["package"]:
        command += ', or run: python -m pip install "%s"' % mpi["package"]
    # Where the loader looks for libraries of an extension, before those of the system.
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders += [each.replace("$ORIGIN", folder) for each in facts["run_path"]]
    folders = list(filter(None, folders))
    files = [os.path.join(each, mpi["library"]) for each in folders]
    path, library = mpi["library"], _loaded(mpi["library"])
    try:
        if not library:
            path = next(filter(os.path.isfile, files), path)
            library = ctypes.CDLL(path)
    except OSError as error:
        others = [file for each in folders for file in glob.glob(each + "/libmpi.so.*")]
        here = " (here is %s)" % os.path.realpath(others[0]) if others else ""
        _fail(facts, str(error) + here, mpi["name"], command)
    text = ctypes.create_string_buffer(8192)  # MPI_MAX_LIBRARY_VERSION_STRING is at most that
    try:
        library.MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    except AttributeError:  # before MPI 3
        return
    if b"Open MPI v4" in text.value and path.startswith(folder + "/"):
        # The package of Open MPI 4 finds its files only through this variable or its launchers.
        own = os.path.realpath(os.path.dirname(path))
        os.environ.setdefault("OPAL_PREFIX", os.path.dirname(own))


def _loaded(name: str) -> Any:
    """A library that another module, such as mpi4py, has loaded: the extension gets the same one."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _fail(facts: Facts, found: str, needed: str, command: str) -> None:
    raise ImportError(
        "%s, but Horovod %s was compiled for %s; %s" % (found, facts["version"], needed, command)
    )

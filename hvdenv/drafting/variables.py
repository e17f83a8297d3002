"""What the variables that a page sets mean in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdenv.drafting.values import INFERRED, WITHOUT, Read, Value, at, leave
from hvdenv.knowledge.flags import KEYS, PARTS
from hvdenv.masking import holds_secret

_BY_VARIABLE = {variable: key for key, variable in KEYS.items()}
_FOLDERS_IN_HOMES = re.compile(r"HOROVOD_(CUDA|NCCL|ROCM)_(?:INCLUDE|LIB)")
_SWITCHES = {
    "HOROVOD_ALLOW_MIXED_GPU_IMPL": "horovod.gpu.allow_mixed",
    "HOROVOD_MPI_THREADS_DISABLE": "launch.mpi_threads_disable",
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_RUN_VARIABLES = re.compile(
    r"HOROVOD_(?:FUSION_THRESHOLD|CYCLE_TIME|TIMELINE\w*|LOG_\w+|AUTOTUNE\w*|CACHE_CAPACITY|STALL_\w+"
    r"|HIERARCHICAL_\w+|NUM_NCCL_STREAMS|NUM_FINALIZER_THREADS|GLOO_TIMEOUT\w*|THREAD_AFFINITY"
    r"|BATCH_D2D_MEMCOPIES|DISABLE_GROUP_FUSION|ENABLE_ASYNC_COMPLETION|ELASTIC_\w+|ADASUM_\w+)"
    r"|(?:NCCL|UCX|UCC|OMPI|PMI|FI|MPICH|PSM[23]|TF|XLA|OMP|KMP|MKL|I_MPI|MV2|CUDNN|PYTORCH|HDF5|MIOPEN"
    r"|HSA|RCCL|PAMI|GLOO|MPIR|CCL|ITEX|ZE|TORCH_NCCL|PYTHON(?:UNBUFFERED|FAULTHANDLER))\w*"
)
_BUILD_VARIABLES = re.compile(r"CC|CXX|FC|CUDAHOSTCXX|MAKEFLAGS|CMAKE_\w+|[CL]?(?:XX|D)?FLAGS")
# Others, with the reason to leave them out. Those of a page itself need no key.
_SET_BY_OTHERS = "the page, the batch system or hvdenv sets it"
_CACHE = "hvdenv has a cache of its own"
_OTHERS = {
    "recipes do not set search paths: modules and hvdenv do": re.compile(
        r"^(?:(?:LD_LIBRARY_|LIBRARY_|PYTHON|C_INCLUDE_|CPLUS_INCLUDE_|C)?PATH|LD_PRELOAD|INCLUDE"
        r"|PYTHONUSERBASE)$"
    ),
    _SET_BY_OTHERS: re.compile(
        r"^(?:(?:SLURM|PBS|LSB|COBALT)_\w+|MASTER_(?:ADDR|PORT)|WORLD_SIZE|N?RANKS?|LOCAL_RANK|NNODES"
        r"|CUDA_VISIBLE_DEVICES|\w+_(?:VERSION|VER\d?|LABEL|NAME|WHEEL|URL|TAG))$"
    ),
    _CACHE: re.compile(r"^(?:CONDA_PKGS_DIRS|(?:PIP|UV)_CACHE_DIR)$"),
    "a directory that the page uses": re.compile(
        r"^(?!CMAKE_)\w+_(?:HOME|ROOT|DIRS?|PATH|INCLUDE|LIB|LIBRARY|INSTALL_PATH)$"
    ),
    "recipes name no proxies: set it in your shell": re.compile(r"(?i)^\w+_proxy$"),
}


def variable(name: str, value: str, *, exported: bool) -> Iterator[Read]:
    if holds_secret(name, value):
        yield leave(f"recipes contain no secrets: export {name} in your shell")
    elif name in _INTERFACES:
        key = at("network", "avoid" if value.startswith("^") else "use")
        yield from (Value(key, each, item=True) for each in value.lstrip("^=").split(","))
    elif name.startswith("HOROVOD_") and not _RUN_VARIABLES.fullmatch(name):
        yield from _build_variable(name, value, exported=exported)
    elif reasons := [told for told, pattern in _OTHERS.items() if pattern.search(name)]:
        needless = not exported or reasons[0] in (_SET_BY_OTHERS, _CACHE)
        yield leave(reasons[0], understood=needless)
    elif not exported and not name.startswith("HOROVOD_"):
        yield leave("a variable that the page uses", understood=True)
    elif _BUILD_VARIABLES.fullmatch(name):
        yield Value(at("environment.build", name), value)
    elif _RUN_VARIABLES.fullmatch(name):
        yield Value(at("environment.run", name), value)
    else:
        yield leave(f"hvdenv does not know what {name} is for")


def _build_variable(name: str, value: str, *, exported: bool) -> Iterator[Read]:
    """A variable of Horovod's build."""
    part = re.fullmatch(r"HOROVOD_WITH(OUT)?_(\w+)", name)
    if (part or name in _SWITCHES) and value != "1":
        yield leave(f"it has no effect: Horovod compares {name} with 1")
    elif part:
        yield _part(part[2], wanted=not part[1])
    elif name in _SWITCHES:
        yield Value(at(_SWITCHES[name]), True)
    elif name in _BY_VARIABLE:
        stated = value if name.endswith("_HOME") else value.lower()
        yield Value(at(_BY_VARIABLE[name]), stated)
    elif inside := _FOLDERS_IN_HOMES.fullmatch(name):
        yield _home(inside[1], value)
    elif name == "HOROVOD_BUILD_CUDA_CC_LIST":
        for capability in value.split(","):
            yield Value(at("horovod.gpu.capabilities"), capability.replace(".", ""), item=True)
    elif not exported or _OTHERS[_SET_BY_OTHERS].search(name):
        yield leave("a variable that the page uses", understood=True)
    else:
        yield leave(f"recipes have no key for {name}")


def _home(library: str, value: str) -> Read:
    """Recipes state the directory above ``include`` and ``lib``."""
    key = f"horovod.gpu.{library.lower()}_home"
    above, _, last = value.rstrip("/").rpartition("/")
    if above and last in ("include", "lib", "lib64"):
        return Value(at(key), above, weight=INFERRED)
    return leave(f"recipes state the directory above include and lib: {key}")


def _part(name: str, *, wanted: bool) -> Read:
    if name in ("MXNET", "NVTX") and not wanted:
        return leave(f"hvdenv always builds without {name}", understood=True)
    if name in ("MXNET", "NVTX"):
        return leave(f"hvdenv does not build Horovod for {name}")
    if name not in PARTS:
        known = ", ".join(sorted(PARTS.keys() - {"MXNET"}))
        return leave(f"Horovod has no part {name}: its parts are {known}")
    key, value = PARTS[name]
    # Merged with the items of the list, and removed from it.
    return Value(at(key), value if wanted else f"{WITHOUT}{value}", item=True)

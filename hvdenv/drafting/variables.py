"""What the variables that a page sets mean in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdenv.drafting.values import INFERRED, WITHOUT, Read, Value, at, leave
from hvdenv.knowledge.flags import GPU_VARIABLES
from hvdenv.masking import holds_secret

# Variables of Horovod's build, and the keys that they are.
_KEYS = {
    "HOROVOD_GPU": "horovod.gpu.platform",
    "HOROVOD_CPU_OPERATIONS": "horovod.cpu_operations",
    **{variable: f"horovod.gpu.{key}" for key, variable in GPU_VARIABLES.items()},
}
_IN_HOMES = re.compile(r"HOROVOD_(CUDA|NCCL|ROCM)_(?:INCLUDE|LIB)")
_SWITCHES = {
    "HOROVOD_ALLOW_MIXED_GPU_IMPL": "horovod.gpu.allow_mixed",
    "HOROVOD_MPI_THREADS_DISABLE": "launch.mpi_threads_disable",
}
_PARTS = {
    "TENSORFLOW": ("horovod.frameworks", "tensorflow"),
    "PYTORCH": ("horovod.frameworks", "torch"),
    "MPI": ("horovod.controllers", "mpi"),
    "GLOO": ("horovod.controllers", "gloo"),
}
_OF_HOROVOD_AT_RUN_TIME = re.compile(
    r"HOROVOD_(?:FUSION_THRESHOLD|CYCLE_TIME|TIMELINE\w*|LOG_\w+|AUTOTUNE\w*|CACHE_CAPACITY|STALL_\w+"
    r"|HIERARCHICAL_\w+|NUM_NCCL_STREAMS|NUM_FINALIZER_THREADS|GLOO_TIMEOUT\w*|THREAD_AFFINITY"
    r"|BATCH_D2D_MEMCOPIES|DISABLE_GROUP_FUSION|ENABLE_ASYNC_COMPLETION|ELASTIC_\w+|ADASUM_\w+)"
)
_AT_RUN_TIME = re.compile(
    r"(?:NCCL|UCX|UCC|OMPI|PMI|FI|MPICH|PSM[23]|TF|XLA|OMP|KMP|MKL|I_MPI|MV2|CUDNN|PYTORCH|HDF5|MIOPEN"
    r"|HSA|RCCL|PAMI|GLOO|MPIR|CCL|ITEX|ZE|TORCH_NCCL|PYTHON(?:UNBUFFERED|FAULTHANDLER))\w*"
)
_AT_BUILD = re.compile(r"CC|CXX|FC|CUDAHOSTCXX|MAKEFLAGS|CMAKE_\w+|[CL]?(?:XX|D)?FLAGS")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
# Others, with the reason to leave them out. Those of a page itself need no key.
_OTHERS = {
    "recipes do not set search paths: modules and hvdenv do": re.compile(
        r"^(?:(?:LD_LIBRARY_|LIBRARY_|PYTHON|C_INCLUDE_|CPLUS_INCLUDE_|C)?PATH|LD_PRELOAD|INCLUDE"
        r"|PYTHONUSERBASE)$"
    ),
    "": re.compile(
        r"^(?:(?:SLURM|PBS|LSB|COBALT)_\w+|MASTER_(?:ADDR|PORT)|WORLD_SIZE|N?RANKS?|LOCAL_RANK|NNODES"
        r"|CUDA_VISIBLE_DEVICES|\w+_(?:VERSION|VER\d?|LABEL|NAME|WHEEL|URL))$"
    ),
    "a folder that the page uses": re.compile(
        r"^(?!CMAKE_)\w+_(?:HOME|ROOT|DIRS?|PATH|INCLUDE|LIB|LIBRARY|INSTALL_PATH)$"
    ),
    "recipes name no proxies: set it in your shell": re.compile(r"(?i)^\w+_proxy$"),
}


def variable(name: str, value: str, *, exported: bool) -> Iterator[Read]:
    if holds_secret(name, value):
        yield leave(f"recipes contain no secrets: export {name} in your shell")
    elif name in _INTERFACES:
        yield from _interfaces(value)
    elif name.startswith("HOROVOD_"):
        yield from _of_horovod(name, value)
    elif reasons := [told for told, pattern in _OTHERS.items() if pattern.search(name)]:
        told = reasons[0] or "the page, the batch system or hvdenv sets it"
        yield leave(told, understood=not (reasons[0] and exported))
    elif not exported:
        yield leave("a variable that the page uses", understood=True)
    elif _AT_BUILD.fullmatch(name):
        yield Value(("environment", "build", name), value)
    elif _AT_RUN_TIME.fullmatch(name):
        yield Value(("environment", "run", name), value)
    else:
        yield leave(f"hvdenv does not know what {name} is for")


def _of_horovod(name: str, value: str) -> Iterator[Read]:
    part = re.fullmatch(r"HOROVOD_WITH(OUT)?_(\w+)", name)
    if part or name in _SWITCHES:
        if value != "1":
            yield leave(f"it has no effect: Horovod compares {name} with 1")
        elif part:
            yield from _part(part[2], wanted=not part[1])
        else:
            yield Value(at(_SWITCHES[name]), True)
    elif name in _KEYS:
        stated = value if name.endswith("_HOME") else value.lower()
        yield Value(at(_KEYS[name]), stated)
    elif inside := _IN_HOMES.fullmatch(name):
        yield from _home(inside[1], value)
    elif name == "HOROVOD_BUILD_CUDA_CC_LIST":
        for capability in value.split(","):
            yield Value(at("horovod.gpu.capabilities"), capability.replace(".", ""), item=True)
    elif _OF_HOROVOD_AT_RUN_TIME.fullmatch(name):
        yield Value(at("environment.run", name), value)
    else:
        yield leave(f"recipes have no key for {name}")


def _home(library: str, value: str) -> Iterator[Read]:
    """Recipes state the folder above ``include`` and ``lib``."""
    key = f"horovod.gpu.{library.lower()}_home"
    above, _, last = value.rstrip("/").rpartition("/")
    if above and last in ("include", "lib", "lib64"):
        yield Value(at(key), above, weight=INFERRED)
    else:
        yield leave(f"recipes state the folder above include and lib: {key}")


def _part(name: str, *, wanted: bool) -> Iterator[Read]:
    if name in _PARTS:
        key, value = _PARTS[name]
        # Merged with the items of the list, and removed from it.
        yield Value(at(key), value if wanted else f"{WITHOUT}{value}", item=True)
    elif name in ("MXNET", "NVTX") and not wanted:
        yield leave(f"hvdenv always builds without {name}", understood=True)
    else:
        yield leave(f"hvdenv does not build Horovod for {name}")


def _interfaces(value: str) -> Iterator[Read]:
    key = "avoid" if value.startswith("^") else "use"
    for interface in value.lstrip("^=").split(","):
        yield Value(at("network", key), interface, item=True)

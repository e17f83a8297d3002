"""What the variables that a page sets mean in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdenv.drafting.shell import PLACEHOLDER, UNKNOWN
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
_OF_THE_PAGE = re.compile(r"\w+_(?:VERSION|VER\d?|LABEL|NAME|WHEEL|URL)")
_HOMES = re.compile(r"\w+_(?:HOME|ROOT|DIRS?|PATH|INCLUDE|LIB|LIBRARY|INSTALL_PATH)")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_OF_THE_JOB = re.compile(
    r"(?:SLURM|PBS|LSB|COBALT)_\w+|MASTER_(?:ADDR|PORT)|WORLD_SIZE|N?RANKS?|LOCAL_RANK|NNODES"
    r"|CUDA_VISIBLE_DEVICES"
)
_SEARCH_PATHS = frozenset({
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LIBRARY_PATH", "CPATH", "LD_PRELOAD", "PYTHONUSERBASE",
    "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "INCLUDE",
})  # fmt: skip


def variable(name: str, value: str, *, exported: bool) -> Iterator[Read]:
    if holds_secret(name, value):
        yield leave(f"recipes contain no secrets: export {name} in your shell")
    elif name in _INTERFACES:
        yield from _interfaces(value)
    elif name.startswith("HOROVOD_"):
        yield from _of_horovod(name, value)
    elif name in _SEARCH_PATHS:
        yield leave(f"recipes do not set {name}: modules and hvdenv do")
    elif _OF_THE_JOB.fullmatch(name):
        yield leave(f"the batch system or hvdenv sets {name}", understood=True)
    elif _HOMES.fullmatch(name) and not _AT_BUILD.fullmatch(name):
        yield leave(f"{name} is a folder that the page uses", understood=not exported)
    elif re.search(r"(?i)_proxy$", name):
        yield leave("recipes name no proxies: set it in your shell")
    elif not exported or _OF_THE_PAGE.fullmatch(name):
        yield leave("a variable that the page uses", understood=True)
    elif build := _AT_BUILD.fullmatch(name) or _AT_RUN_TIME.fullmatch(name):
        phase = "build" if build.re is _AT_BUILD else "run"
        yield from _stated(("environment", phase, name), name, value)
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
        yield from _stated(at(_KEYS[name]), name, stated)
    elif inside := _IN_HOMES.fullmatch(name):
        yield from _home(inside[1], value)
    elif name == "HOROVOD_BUILD_CUDA_CC_LIST":
        for capability in value.split(","):
            yield Value(at("horovod.gpu.capabilities"), capability.replace(".", ""), item=True)
    elif _OF_HOROVOD_AT_RUN_TIME.fullmatch(name):
        yield from _stated(at("environment.run", name), name, value)
    else:
        yield leave(f"recipes have no key for {name}")


def _home(library: str, value: str) -> Iterator[Read]:
    """Recipes state the folder above ``include`` and ``lib``."""
    key = f"horovod.gpu.{library.lower()}_home"
    above, _, last = value.rstrip("/").rpartition("/")
    stated = UNKNOWN not in value and PLACEHOLDER not in value
    if above and stated and last in ("include", "lib", "lib64"):
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
    if "$" in value or UNKNOWN in value or PLACEHOLDER in value:
        yield leave("the page does not state the interface")
        return
    for interface in value.lstrip("^=").split(","):
        yield Value(at("network", key), interface, item=True)


def _stated(key: tuple[str, ...], name: str, value: str) -> Iterator[Read]:
    folder = key[-1].endswith("_home")
    unstated = "$PWD" if folder else "$"
    if UNKNOWN in value or PLACEHOLDER in value or unstated in value:
        yield leave(f"the page does not state the value of {name}")
    else:
        yield Value(key, value)

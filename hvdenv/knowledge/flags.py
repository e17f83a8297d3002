"""The variables of Horovod's build for a recipe.

Horovod ignores variables of other releases and values in lower case, so this module refuses
whatever the recipe's release would ignore.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version as Parsed

from hvdenv.base.errors import IncompatibleError
from hvdenv.model.recipe import COLLECTIVES, Gpu, Recipe, Version

# HOROVOD_WITH_NAME and HOROVOD_WITHOUT_NAME: the list of a recipe, and the item in it.
PARTS = {
    "TENSORFLOW": ("horovod.frameworks", "tensorflow"),
    "PYTORCH": ("horovod.frameworks", "torch"),
    "MXNET": ("horovod.frameworks", "mxnet"),
    "MPI": ("horovod.controllers", "mpi"),
    "GLOO": ("horovod.controllers", "gloo"),
}

# The keys of [horovod.gpu] that are variables of the build. Directories are as they are, the other
# values in upper case or, where they are true, 1.
_GPU_VARIABLES = {
    "operations": "HOROVOD_GPU_OPERATIONS",
    **{name: f"HOROVOD_GPU_{name.upper()}" for name in COLLECTIVES},
    "allow_mixed": "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "nccl_link": "HOROVOD_NCCL_LINK",
    "cuda_home": "HOROVOD_CUDA_HOME",
    "nccl_home": "HOROVOD_NCCL_HOME",
    "rocm_home": "HOROVOD_ROCM_HOME",
}
# All keys of a recipe that are variables of the build.
KEYS = {
    "horovod.cpu_operations": "HOROVOD_CPU_OPERATIONS",
    "horovod.gpu.platform": "HOROVOD_GPU",
    **{f"horovod.gpu.{key}": variable for key, variable in _GPU_VARIABLES.items()},
}

# Those whose values may begin with $NAME, a variable of the modules.
FOLDER_VARIABLES = frozenset(name for key, name in KEYS.items() if key.endswith("_home"))

# Before it, the build had other variables, such as HOROVOD_WITH_GLOO and HOROVOD_MPICXX_SHOW.
_OLDEST = "0.20.0"


def horovod_variables(recipe: Recipe, machine: str) -> dict[str, str]:
    """The variables of Horovod's build.

    Only the value 1 counts, because they are compared as strings. HOROVOD_WITH_GLOO, which
    sites' documents set, has no effect: Gloo is built unless HOROVOD_WITHOUT_GLOO=1.

    Raises:
        IncompatibleError: this release would ignore a requested setting.
    """
    wanted, variables = recipe.horovod, {}
    if wanted.provider == "source" and _older(wanted.version, _OLDEST):
        raise IncompatibleError(
            f"hvdenv compiles Horovod 0.20.0 and newer, not {wanted.version}",
            where="horovod.version",
            remedy='use a newer release, or the site\'s own (`provider = "present"`)',
        )
    items = {*wanted.frameworks, *wanted.controllers}
    for name, (_, item) in PARTS.items():
        variables[f"HOROVOD_WITH{'' if item in items else 'OUT'}_{name}"] = "1"
    if wanted.cpu_operations:
        variables[KEYS["horovod.cpu_operations"]] = wanted.cpu_operations.upper()
    if wanted.gpu:
        variables.update(_gpu_variables(wanted.gpu, recipe))
    variables["HOROVOD_WITHOUT_NVTX"] = "1"
    # A blank, but set: unset would mean the flags of the machine that builds.
    variables["HOROVOD_BUILD_ARCH_FLAGS"] = recipe.target.arch_flags.get(machine, "") or " "
    # site-packages/horovod/FRAMEWORK -> the environment's lib, and torch's libraries.
    variables["HVDENV_INSTALL_RPATH"] = "$ORIGIN/../../../..:$ORIGIN/../../torch/lib"
    if nccl_of_torch(recipe):
        variables["HVDENV_INSTALL_RPATH"] += ":$ORIGIN/../../nvidia/nccl/lib"
        variables["HOROVOD_NCCL_LINK"] = "SHARED"  # the package has no other
    return variables


def nccl_of_torch(recipe: Recipe) -> bool:
    """Whether Horovod uses the NCCL that torch's packages ship."""
    return recipe.horovod.gpu is not None and recipe.horovod.gpu.nccl == "torch"


def _gpu_variables(gpu: Gpu, recipe: Recipe) -> dict[str, str]:
    for what, key, remedy in _rejected(gpu, recipe):
        where = f"horovod.gpu.{key}".rstrip(".")
        raise IncompatibleError(what, where=where, remedy=remedy)
    variables = {KEYS["horovod.gpu.platform"]: gpu.platform.upper()}
    for key, variable in _GPU_VARIABLES.items():
        value = getattr(gpu, key)
        if value is True:
            variables[variable] = "1"
        elif value and value != "host":  # without any operation, Horovod copies
            variables[variable] = value if key.endswith("_home") else value.upper()
    capabilities = compute_capabilities(recipe)
    if capabilities and gpu.platform == "cuda":
        variables["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(capabilities)
    return variables


def compute_capabilities(recipe: Recipe) -> tuple[str, ...]:
    """Those of the recipe, or of all its partitions: one build for all of a cluster's GPUs."""
    if recipe.horovod.gpu and recipe.horovod.gpu.capabilities:
        return recipe.horovod.gpu.capabilities
    found = {each.capability for each in recipe.partitions.values() if each.capability}
    return tuple(sorted(found, key=int))


def _rejected(gpu: Gpu, recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """What Horovod's build would ignore or reject, some of it after minutes: what, key, remedy."""
    version = recipe.horovod.version
    if gpu.reducescatter and _older(version, "0.25.0"):
        what = f"Horovod {version} ignores this key, which is read since 0.25.0"
        yield what, "reducescatter", "remove it"
    single = [name for name in COLLECTIVES if getattr(gpu, name)]
    if gpu.operations and single:
        what = f"operations sets all operations, {single[0]} a single one"
        only = f"{what}: Horovod accepts only one of the two"
        yield only, single[0], "remove operations, or all the others"
    if not gpu.operations and not single:
        what = "no operation is requested, so nothing would be built for GPUs"
        yield what, "", 'set operations = "nccl"'
    mixed = [name for name in single if getattr(gpu, name) == "mpi"]
    if gpu.allreduce == "nccl" and mixed and not gpu.allow_mixed:
        what = f"allreduce over NCCL and {mixed[0]} over MPI can deadlock; Horovod's build refuses this"
        remedy = f'set {mixed[0]} = "nccl" or remove it; allow_mixed = true accepts the risk'
        yield what, mixed[0], remedy
    if gpu.nccl and (gpu.nccl_home or gpu.nccl_link):
        what = "torch's NCCL is requested together with another NCCL, or another way to link it"
        yield what, "nccl", "remove nccl, or nccl_home and nccl_link"
    if gpu.nccl and "torch" not in recipe.horovod.frameworks:
        what = "torch's NCCL is requested, but not torch"
        yield what, "nccl", "remove it, and set nccl_home to NCCL's directory"


def _older(version: Version, other: str) -> bool:
    return Parsed(version) < Parsed(other)

"""What rules may ask about: a recipe and facts as names with plain values.

An observable that is not known is left out. docs/generated/rules.md lists the rules that ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from packaging.version import Version as Parsed

from hvdenv.errors import IncompatibleError
from hvdenv.knowledge.flags import compute_capabilities, horovod_variables
from hvdenv.knowledge.horovod_releases import releases
from hvdenv.knowledge.patches import applicable
from hvdenv.knowledge.rules import Observable, Observables
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Framework, FrameworkPackage, Gpu, Horovod, Recipe, Version
from hvdenv.sites.modules import module_family

_OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")

# The CUDA that wheels on the package index are built with, since which version. Of torch:
# its release notes; of TensorFlow: its table of tested build configurations.
_CUDA_OF_WHEELS: dict[Framework, tuple[tuple[str, str], ...]] = {
    "torch": (
        ("2.11", "13.0"), ("2.8", "12.8"), ("2.7", "12.6"), ("2.5", "12.4"), ("2.1", "12.1"),
        ("1.13", "11.7"), ("1.5", "10.2"),
    ),
    "tensorflow": (
        ("2.18", "12.5"), ("2.16", "12.3"), ("2.15", "12.2"), ("2.12", "11.8"), ("2.5", "11.2"),
    ),
}  # fmt: skip


# What only a look at the machine's directories, at indexes and channels can tell.
LOOKED_UP: Observables = {
    "folders_missing": frozenset(),
    "job_refused": frozenset(),
    "packages_refused": frozenset(),
    "conda_refused": frozenset(),
    "pages_as_index": frozenset(),
}


Found = dict[str, Observable | None]


def observables(
    recipe: Recipe,
    facts: Facts,
    python: Interpreter | None,
    versions: Mapping[str, Version],
    looked_up: Observables = LOOKED_UP,
) -> Observables:
    """What rules may ask about.

    Args:
        python: the interpreter chosen; None when none fits the recipe.
        versions: framework versions for that Python.
        looked_up: some of LOOKED_UP, with what was found.
    """
    horovod = recipe.horovod
    seen: Found = {
        **LOOKED_UP,
        **looked_up,
        "status": recipe.status,
        # A Horovod that is there already has none.
        "patches": frozenset(
            each.name for each in applicable(versions) if horovod.provider == "source"
        ),
        **_observe_machine(recipe, facts),
        **_observe_python(recipe, python),
        "horovod": horovod.version,
        "horovod_provider": horovod.provider,
        "frameworks": frozenset(horovod.frameworks),
        "controllers": frozenset(horovod.controllers),
        "cpu_operations": horovod.cpu_operations,
        **_observe_archive(horovod),
        "build_contradicted": _contradicted(recipe, facts.machine),
        **_observe_compiler(recipe, facts),
        **_observe_cuda(recipe, facts),
        **_observe_mpi(recipe, facts),
        **_observe_job(recipe),
        **_observe_launch(recipe),
        **_observe_packages(recipe),
        "place": recipe.places.environments,
        "expires_days": recipe.places.expires_days,
        "container_base": recipe.container.base if recipe.container else None,
        "container_gpu": recipe.container.gpu if recipe.container else None,
    }
    for name in horovod.frameworks:
        seen.update(_observe_framework(name, recipe, versions.get(name, "")))
    return {name: value for name, value in seen.items() if value is not None and value != ""}


def _observe_machine(recipe: Recipe, facts: Facts) -> Found:
    wanted = recipe.target.arch_flags.get(facts.machine, "").split()
    lacking = [
        flag for flag in wanted if facts.cpu_flags and not _instructions(flag) <= {*facts.cpu_flags}
    ]
    needed = _megabytes(recipe)
    free = [left for left in (facts.disk_free, facts.quota_free) if left is not None]
    return {
        "system": facts.system,
        "machine": facts.machine,
        "cores": facts.cores,
        "glibc": facts.glibc,
        "arch_flags": frozenset(wanted),
        "cpu_lacks": frozenset(lacking),
        "disk_free_mb": min(free) // 1_000_000 if free else None,
        "disk_needed_mb": needed,
        "tmp_free_mb": None if facts.tmp_free is None else facts.tmp_free // 1_000_000,
        # Libraries for CUDA hardly get smaller in a wheel.
        "tmp_needed_mb": needed // (2 if needed > _CUDA_MB else 5),
        "inodes_free": facts.inodes_free,
        "noexec": "yes" if facts.noexec else "no",
        "memory_per_core_mb": facts.memory // facts.cores // 1_000_000 if facts.memory else None,
        "variables": frozenset(facts.variables),
    }


# Measured: the environment, with a quarter to spare. A Python environment with the tools and
# files of a build, and each framework with what it needs. Estimated: conda's packages and their
# cache, torch's libraries for CUDA, and a source tree with what is compiled in it. Downloads are in TMPDIR until they are unpacked: a
# wheel has about a fifth of the size of its files on the disk, or a little more.
_BASE_MB, _CONDA_MB, _CUDA_MB, _SOURCE_MB = 700, 1500, 4000, 5000
_FRAMEWORK_MB: dict[Framework, int] = {"torch": 1100, "tensorflow": 1500}


def _megabytes(recipe: Recipe) -> int:
    """What a build of a recipe needs on the disk, but for what its site brings."""
    if recipe.python.provider not in ("venv", "conda", "clone"):
        return _BASE_MB
    needed = _BASE_MB + (_CONDA_MB if recipe.python.provider == "conda" else 0)
    for name in recipe.horovod.frameworks:
        provider = recipe.frameworks[name].provider
        if provider in ("pip", "conda", "source"):
            needed += _FRAMEWORK_MB[name]
        if provider == "source":
            needed += _SOURCE_MB
        elif name == "torch" and recipe.horovod.gpu and recipe.horovod.gpu.platform == "cuda":
            needed += _CUDA_MB
    return needed


def _observe_python(recipe: Recipe, python: Interpreter | None) -> Found:
    return {
        "python": python.version if python else None,
        "python_minor": minor(python.version) if python else None,
        "python_complete": ("yes" if python.complete else "no") if python else None,
        "python_provider": recipe.python.provider,
        "python_wanted": recipe.python.version,
        "python_module_minor": minor(_module_version(recipe, "python")),
    }


def _observe_archive(wanted: Horovod) -> Found:
    """Whether version and hash belong to one release; nothing of a site's own archive."""
    known = releases()
    if wanted.provider != "source" or "+" in wanted.version or not wanted.sha256:
        return {}
    owner = next((each.version for each in known.values() if each.sha256 == wanted.sha256), "")
    release = known.get(wanted.version)
    if release is None:
        state = "unreleased"
    elif owner:
        state = "known" if owner == wanted.version else "mistaken"
    else:
        state = "unknown"
    return {
        "horovod_archive": state,
        "horovod_newest": [*known][-1],
        "horovod_hash_of": owner,
        "horovod_hash": release.sha256 if release else "",
    }


# Variables that keys of [horovod] and [horovod.gpu] decide, also by their absence.
_OF_KEYS = re.compile(r"HOROVOD_(WITH(OUT)?_\w+|GPU(_\w+)?)")


def _contradicted(recipe: Recipe, machine: str) -> frozenset[str]:
    """Variables of environment.build that other keys of the recipe decide, with another value."""
    try:
        flags = horovod_variables(recipe, machine)
    except IncompatibleError:  # a command that makes a plan says so
        return frozenset()
    decided = {
        name: value
        for name, value in recipe.environment.build.items()
        if name in flags or _OF_KEYS.fullmatch(name)
    }
    return _assignments({k: v for k, v in decided.items() if flags.get(k, "").upper() != v.upper()})


def _observe_framework(name: Framework, recipe: Recipe, version: Version) -> Found:
    wanted = recipe.frameworks[name]
    build, cuda = _build_of(name, wanted, version, recipe)
    return {
        name: version,
        f"{name}_package": wanted.package or name,
        f"{name}_provider": "wheelhouse" if wanted.wheelhouse else wanted.provider,
        f"{name}_build": build,
        f"{name}_cuda": cuda,
    }


# Conda packages that have CUDA's version: up to CUDA 11.8, and since.
_CUDA_OF_CONDA = ("cudatoolkit", "pytorch-cuda", "cuda-version", "cuda-libraries")


def _build_of(
    name: Framework, wanted: FrameworkPackage, version: Version, recipe: Recipe
) -> tuple[str, str]:
    """Whether a framework is built for ``cpu``, ``cuda`` or ``rocm``, and the version of CUDA.

    Both are empty where that cannot be told.
    """
    said = " ".join([version, wanted.extra_index or "", *wanted.find_links, wanted.package or ""])
    if wanted.cpu_index or re.search(r"\bcpu\b", said):
        return "cpu", ""
    if "rocm" in said:
        return "rocm", ""
    if found := re.search(r"\bcu(\d+)(\d)\b", said):
        return "cuda", f"{found[1]}.{found[2]}"
    if wanted.provider == "conda" and recipe.conda:
        named = (recipe.conda.packages.get(each, "") for each in _CUDA_OF_CONDA)
        toolkit = next(filter(None, map(_number, named)), "")
        return ("cuda" if toolkit else ""), toolkit
    if wanted.provider != "pip" or wanted.wheelhouse or wanted.extra_index or wanted.find_links:
        return "", ""
    for since, cuda in _CUDA_OF_WHEELS[name]:
        if Parsed(version) >= Parsed(since):
            return "cuda", cuda
    return "", ""


def _observe_compiler(recipe: Recipe, facts: Facts) -> Found:
    """The C++ compiler: of the modules where there are any, and then of the version they name."""
    if recipe.horovod.provider == "present":
        return {"cxx": "not needed"}
    found: Found = {
        "cmake_module": _module_version(recipe, "cmake"),
        "build_variables": _assignments(recipe.environment.build),
    }
    if recipe.modules:
        versions = [
            match[1]
            for name in _modules(recipe)
            if (match := re.fullmatch(r"gcc(?:core)?/\.?([0-9.]+)", name.lower()))
        ]
        # GCC itself, and the toolchains in names of EasyBuild. Spack's name what built a module.
        names = "\n".join(recipe.modules.load)
        named = re.findall(r"(?m)(?:^(?i:gcc(?:core)?)/|-GCC(?:core)?-)\.?(\d+\.\d+)", names)
        return {
            **found,
            "cxx": "of the modules",
            "gcc": versions[-1] if versions else None,
            "gcc_modules": len({*named}),
        }
    if facts.cxx is None:
        return found
    return {**found, "cxx": facts.cxx.path, "gcc": facts.cxx.version}


def _observe_cuda(recipe: Recipe, facts: Facts) -> Found:
    gpu = recipe.horovod.gpu
    target = recipe.partition
    found: Found = {
        "driver": facts.driver,
        "driver_cuda": _number(target.cuda or "") if target else None,
    }
    if gpu is None:
        return found
    capabilities = compute_capabilities(recipe)
    asked = {name: getattr(gpu, name) or gpu.operations for name in _OPERATIONS}
    return {
        **found,
        "gpu_platform": gpu.platform,
        "gpu_operations": frozenset(library for library in asked.values() if library),
        "gpu_alltoall": asked["alltoall"],
        "gpu_allow_mixed": "yes" if gpu.allow_mixed else "no",
        "nccl_link": gpu.nccl_link or "unset",
        "nccl": _module_version(recipe, "nccl"),
        "nccl_from": _nccl_from(recipe, gpu),
        "rocm": _module_version(recipe, "rocm") or _number(gpu.rocm_home or ""),
        "capabilities": frozenset(capabilities),
        "capability_missing": _capability_missing(gpu, target.capability if target else None),
        **_toolkit(recipe, facts, gpu),
    }


# NVIDIA's HPC SDK has it, and conda's PyTorch for GPUs requires it.
_HAS_NCCL = "(?i)nccl|nvhpc|hpc-?sdk|^nvidia|PrgEnv-nvidia|pytorch"


def _nccl_from(recipe: Recipe, gpu: Gpu) -> str:
    """What of the recipe provides NCCL, as far as names show it."""
    if gpu.nccl or gpu.nccl_home or recipe.container:
        return "torch, a directory or an image"
    conda = recipe.conda.packages if recipe.conda else ()
    names = (*_modules(recipe), *conda, *recipe.packages, *recipe.build_tools)
    provides = any(re.search(_HAS_NCCL, each) for each in names)
    return "a module or package" if provides else "nowhere"


def _toolkit(recipe: Recipe, facts: Facts, gpu: Gpu) -> Found:
    """CUDA's toolkit: its version where something names it, and whether there is any."""
    versions = {
        f"{found[1]}.{found[2]}"
        for name in _modules(recipe)
        if (found := re.search(r"(?:^cuda(?:toolkit)?/|^CUDA/|-CUDA-)(\d+)\.(\d+)", name))
    }
    base = (recipe.container.base or "") if recipe.container else ""
    home = (gpu.cuda_home or "").rpartition("cuda")[2]
    # The image's toolkit goes with the image's compiler: `container` has facts of both.
    inside = base.partition("cuda:")[2] if facts.host == base else ""
    version = min(versions, default="") or _number(home) or _number(inside)
    conda = recipe.conda.packages if recipe.conda else ()
    packages = {*conda, *recipe.packages, *recipe.build_tools}
    brought = any(re.search("nvcc|cuda-toolkit|cudatoolkit-dev", each) for each in packages)
    if recipe.modules or gpu.cuda_home or base or brought:
        return {"cuda": version, "cuda_modules": len(versions), "nvcc": "named by the recipe"}
    here = facts.nvcc
    return {"cuda": here.version if here else "", "nvcc": here.path if here else None}


def _capability_missing(gpu: Gpu, wanted: str | None) -> str | None:
    """The partition's compute capability, if nothing that is compiled for runs there."""
    if not gpu.capabilities or not wanted:
        return None
    # Code for 8.0 runs on 8.6; the code of a later one does not.
    fits = any(each[:-1] == wanted[:-1] and each <= wanted for each in gpu.capabilities)
    return None if fits else wanted


def _observe_mpi(recipe: Recipe, facts: Facts) -> Found:
    mpi = recipe.mpi
    host = facts.mpirun.version if facts.mpirun else ""
    if mpi is None:
        return {"host_mpirun": host}
    # Not the one that a library was built with: hdf5/1.14.3-openmpi-4.1.4.
    names = "\n".join(_modules(recipe)).lower()
    found = re.search(r"(?m)^(?:[\w.+-]+/)?openmpi[/-](\d+\.\d+\.\d+)", names)
    module = found[1] if found else None
    if module and module.startswith(f"{mpi.version}."):
        module = mpi.version
    return {
        "mpi": mpi.kind,
        mpi.kind: mpi.version,
        "mpi_package": mpi.package,
        "mpi_cuda_aware": "yes" if mpi.cuda_aware else "no",
        "openmpi_module": module,
        "host_mpirun": host,
    }


def _observe_job(recipe: Recipe) -> Found:
    job = recipe.job
    target = recipe.partition
    return {
        "scheduler": recipe.scheduler,
        "job_nodes": job.nodes,
        "ranks_per_node": job.ranks_per_node,
        "cpus_per_rank": job.cpus_per_rank,
        "gpus_per_node": job.gpus_per_node,
        "gpus_requested": None if job.gpu_option == "none" else job.gpus_per_node,
        "exclusive": "yes" if job.exclusive else "no",
        "partition_gpus": target.gpus if target else None,
        "partition_glibc": _number(target.glibc or "") if target else None,
        "partition_arch": target.arch if target else None,
    }


def _observe_launch(recipe: Recipe) -> Found:
    launch, network = recipe.launch, recipe.network
    return {
        "launcher": launch.launcher,
        "srun_mpi": launch.srun_mpi or "unset",
        "exports": frozenset(launch.exports),
        "mca": frozenset(_assignments(launch.mca)),
        "mpi_threads_disable": "yes" if launch.mpi_threads_disable else "no",
        "network_use": frozenset(network.use),
        "network_both": frozenset({*network.use} & {*network.avoid}),
        "interfaces": len(network.use),
        "run_variables": _assignments(recipe.environment.run),
    }


def _observe_packages(recipe: Recipe) -> Found:
    conda, python = recipe.conda, recipe.python
    # What conda or the site has brought already, pip leaves as it is.
    brought = conda.packages if conda else {}
    asked = {} if python.system_site_packages or python.provider == "clone" else recipe.packages
    wanted = {name: spec for name, spec in asked.items() if name not in brought}
    wanted |= recipe.build_tools
    return {
        "modules": frozenset(recipe.modules.load) if recipe.modules else None,
        "build_modules": frozenset(recipe.modules.build) if recipe.modules else None,
        "ofi_module": next((name for name in _modules(recipe) if "ofi" in name), None),
        "packages": frozenset(name.lower() for name in recipe.packages),
        **{f"wanted_{name.lower()}": specifier for name, specifier in wanted.items()},
        "channels": conda and frozenset(conda.channels),
        "conda_packages": conda and frozenset(conda.packages),
        "conda_unpinned": conda and frozenset(n for n, v in conda.packages.items() if v == "*"),
    }


# What /proc/cpuinfo calls the instructions of these compiler flags.
_IN_CPUINFO = {"lzcnt": "abm", "pclmul": "pclmulqdq", "rdrnd": "rdrand", "sse3": "pni"}


def _instructions(flag: str) -> frozenset[str]:
    """Instructions that code compiled with a flag may use, where the flag names them: -mavx does."""
    name = flag.removeprefix("-m").replace(".", "_")
    if not flag.startswith("-m") or "=" in name or name.startswith("no-") or name.isdecimal():
        return frozenset()
    return frozenset({_IN_CPUINFO.get(name, name)})


def _modules(recipe: Recipe) -> Iterable[str]:
    return (*recipe.modules.load, *recipe.modules.build) if recipe.modules else ()


def _module_version(recipe: Recipe, family: str) -> str:
    """The version of the last module of a family: 2.15.5 of nccl/2.15.5-ofi."""
    found = [
        _number(name.rpartition("/")[2])
        for name in _modules(recipe)
        if module_family(name) == family
    ]
    return found[-1] if found else ""


def _number(text: str) -> str:
    found = re.match(r"\D{0,2}(\d+(?:\.\d+)*)", text)
    return found[1] if found else ""


def minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def _assignments(variables: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{name}={value}" for name, value in variables.items())

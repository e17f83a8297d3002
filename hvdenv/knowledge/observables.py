"""What rules may ask about: keys of a recipe, facts, and what follows from them.

An observable that is not known is left out. docs/generated/rules.md lists the rules that ask.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.version import Version as Parsed

from hvdenv.base.errors import IncompatibleError
from hvdenv.knowledge.flags import compute_capabilities, horovod_variables
from hvdenv.knowledge.patches import applicable, releases
from hvdenv.knowledge.rules import Observable, Observables
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Framework, FrameworkPackage, Gpu, Horovod, Recipe, Version
from hvdenv.sites.modules import module_family

# The CUDA that wheels on the package index are built with, since which version. Of torch:
# its release notes; of TensorFlow: its table of tested build configurations.
_CUDA_OF_WHEELS: dict[Framework, tuple[tuple[str, str], ...]] = {
    "torch": (
        ("2.11", "13.0"),
        ("2.8", "12.8"),
        ("2.7", "12.6"),
        ("2.5", "12.4"),
        ("2.1", "12.1"),
        ("1.13", "11.7"),
        ("1.5", "10.2"),
    ),
    "tensorflow": (
        ("2.18", "12.5"),
        ("2.16", "12.3"),
        ("2.15", "12.2"),
        ("2.12", "11.8"),
        ("2.5", "11.2"),
    ),
}


# What only a look at the machine's directories, at indexes and channels can tell.
_LOOKED_UP = (
    *("folders_missing", "job_here", "job_refused", "plan_refused"),
    *("proxies_dead", "packages_refused", "conda_refused"),
)
LOOKED_UP: Observables = dict.fromkeys(_LOOKED_UP, frozenset())


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
        **{name: _plain(value) for name, value in _keys(recipe)},
        # A Horovod that is there already has none.
        "patches": frozenset(
            each.name for each in applicable(versions) if horovod.provider == "source"
        ),
        **_observe_machine(recipe, facts),
        **_observe_python(recipe, python),
        **_observe_archive(horovod),
        "build_contradicted": _contradicted(recipe, facts.machine),
        "unprovided": _unprovided(recipe, facts) if horovod.provider == "source" else None,
        "modules_twice": _modules_twice(recipe),
        "virtual_beyond": _virtual_beyond(recipe),
        **_observe_compiler(recipe, facts),
        **_observe_cuda(recipe, facts),
        **_observe_mpi(recipe, facts),
        **_observe_job(recipe),
        **_observe_launch(recipe),
        **_observe_packages(recipe),
    }
    for name in horovod.frameworks:
        seen.update(_observe_framework(name, recipe, versions.get(name, "")))
    return {name: value for name, value in seen.items() if value is not None and value != ""}


# Facts that are observables as they are.
_FACTS = ("system", "machine", "cores", "glibc", "driver", "inodes_free", "noexec", "variables")


def _keys(table: Any, above: str = "") -> Iterator[tuple[str, object]]:
    """The keys of a recipe, such as ``launch.launcher``, with their values."""
    for name, value in (table._asdict() if hasattr(table, "_asdict") else table).items():
        inside = [*value.values()] if isinstance(value, Mapping) else [value]
        if inside and hasattr(inside[0], "_fields"):
            yield from _keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _plain(value: object) -> Observable | None:
    """A value as conditions refer to it: yes or no, or a set of words or of assignments."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return _assignments(value)
    if isinstance(value, tuple):
        return frozenset(map(str, value))
    return value if isinstance(value, (int, str)) else None


def _observe_machine(recipe: Recipe, facts: Facts) -> Found:
    wanted = recipe.target.arch_flags.get(facts.machine, "").split()
    lacking = [
        flag for flag in wanted if facts.cpu_flags and not _instructions(flag) <= {*facts.cpu_flags}
    ]
    needed = _megabytes(recipe)
    return {
        **{name: _plain(getattr(facts, name)) for name in _FACTS},
        "arch_flags": frozenset(wanted),
        "cpu_lacks": frozenset(lacking),
        "disk_free_mb": None if facts.disk_free is None else facts.disk_free // 1_000_000,
        "disk_needed_mb": needed,
        "tmp_free_mb": None if facts.tmp_free is None else facts.tmp_free // 1_000_000,
        # Libraries for CUDA hardly get smaller in a wheel.
        "tmp_needed_mb": needed // (2 if needed > _CUDA_MB else 5),
        "memory_per_core_mb": facts.memory // facts.cores // 1_000_000 if facts.memory else None,
        # Of the machine's MPI, a recipe without another one uses the library.
        "shell_libraries": frozenset(
            each
            for each in facts.shell_libraries
            if not (recipe.mpi and not recipe.mpi.package and "/libmpi.so" in each)
        ),
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
        "python_module_minor": minor(_module_version(recipe, "python")),
    }


def _observe_archive(wanted: Horovod) -> Found:
    """Whether version and hash belong to one release; nothing of a site's own archive."""
    known = releases()
    if wanted.provider != "source" or "+" in wanted.version or not wanted.sha256:
        return {}
    if wanted.version not in known:
        state = "unreleased"
    else:
        state = "known" if known[wanted.version] == wanted.sha256 else "mistaken"
    return {
        "horovod_archive": state,
        "horovod_newest": [*known][-1],
        "horovod_hash": known.get(wanted.version, ""),
    }


# Variables that keys of [horovod] and [horovod.gpu] decide, also by their absence.
_OF_KEYS = re.compile(r"HOROVOD_(WITH(OUT)?_\w+|GPU(_\w+)?)")


def _contradicted(recipe: Recipe, machine: str) -> frozenset[str]:
    """Variables of environment.build that other keys of the recipe decide, with another value."""
    try:
        flags = horovod_variables(recipe, machine)
    except IncompatibleError:  # plan_refused says so
        return frozenset()
    if home := flags.get("HOROVOD_CUDA_HOME"):
        flags["CUDA_HOME"] = home
    decided = {
        name: value
        for name, value in recipe.environment.build.items()
        if name in flags or _OF_KEYS.fullmatch(name)
    }
    return _assignments({k: v for k, v in decided.items() if flags.get(k, "").upper() != v.upper()})


# What builds need, and a pattern of the modules and packages that bring it. NVIDIA's HPC SDK has
# NCCL, and conda's PyTorch for GPUs requires it.
_BRINGS = {
    "a C++ compiler": re.compile(
        "(?i)gcc|gnu|gxx|foss|gompi|intel|oneapi|nvhpc|prgenv|llvm|clang|compiler"
    ),
    "NCCL": re.compile("(?i)nccl|nvhpc|hpc-?sdk|^nvidia|prgenv-nvidia|pytorch"),
    "CUDA's toolkit": re.compile("(?i)cuda|nvcc|nvhpc|hpc-?sdk|nvidia"),
    "ROCm": re.compile("(?i)rocm|amd"),
    "MPI": re.compile("(?i)(?<!co)mpi|mvapich|hpcx|foss|intel|prgenv|cray"),
    "cuDNN": re.compile("(?i)cudnn"),
    "oneCCL": re.compile("(?i)(^|[^nr])ccl|oneapi"),
    "torch": re.compile("(?i)torch|open-ce|wml-ce"),
    "tensorflow": re.compile("(?i)tensorflow|open-ce|wml-ce"),
}
# Most packages with CUDA or NVIDIA in their names have libraries only: conda's cudatoolkit, pip's nvidia-*.
_PACKAGES_BRING = {
    **_BRINGS,
    "NCCL": re.compile("nccl|pytorch"),
    "CUDA's toolkit": re.compile("nvcc|cuda-toolkit|cudatoolkit-dev"),
}


def _unprovided(recipe: Recipe, facts: Facts) -> frozenset[str]:
    """What a build of Horovod needs and nothing brings, as far as names show it."""
    modules, conda, base = recipe.modules, recipe.conda, recipe.container
    hidden = modules and (modules.purge == "no" or modules.source or modules.unload)
    if hidden or base or recipe.python.provider in ("prefix", "clone", "modules"):
        return frozenset()
    # The names of a site's collections show nothing of what they load.
    named = [
        each for each in _modules(recipe) if any(what.search(each) for what in _BRINGS.values())
    ]
    if modules and not named:
        return frozenset()
    packages = (*(conda.packages if conda else ()), *recipe.packages, *recipe.build_tools)
    return frozenset(
        what
        for what in _needed(recipe, facts)
        if not any(map(_BRINGS[what].search, named))
        and not any(map(_PACKAGES_BRING[what].search, packages))
    )


def _needed(recipe: Recipe, facts: Facts) -> Iterator[str]:
    """What must come from modules or packages: no key names its directory or another origin."""
    horovod, mpi = recipe.horovod, recipe.mpi
    gpu = horovod.gpu or Gpu(platform="rocm", rocm_home="/")
    if recipe.modules and not facts.cxx:
        yield "a C++ compiler"
    if (
        "nccl" in gpu.libraries.values()
        and gpu.platform == "cuda"
        # A directory of the environment has what its packages bring.
        and not (gpu.nccl or (gpu.nccl_home or "$CONDA_PREFIX") != "$CONDA_PREFIX")
    ):
        yield "NCCL"
    if gpu.platform == "cuda" and recipe.modules and not (gpu.cuda_home or facts.nvcc):
        yield "CUDA's toolkit"
    if gpu.platform == "rocm" and recipe.modules and not gpu.rocm_home:
        yield "ROCm"
    if horovod.gpu and gpu.platform == "cuda" and _opens_cudnn(recipe):
        yield "cuDNN"
    if mpi and "mpi" in horovod.controllers and not (mpi.package or facts.mpirun):
        yield "MPI"
    chosen = recipe.environment.run.get("HOROVOD_CPU_OPERATIONS", "").lower()
    if "ccl" in (horovod.cpu_operations, chosen) and "CCL_ROOT" not in recipe.environment.build:
        yield "oneCCL"
    yield from (
        each for each in horovod.frameworks if recipe.frameworks[each].provider == "present"
    )


def _opens_cudnn(recipe: Recipe) -> bool:
    """Whether TensorFlow opens a cuDNN that neither its own package nor torch brings."""
    names, conda = recipe.horovod.frameworks, recipe.conda
    wanted = recipe.frameworks["tensorflow"] if "tensorflow" in names else None
    # PyTorch's own channel links cuDNN statically.
    linked = {"present", "source", *(("conda",) if conda and "pytorch" in conda.channels else ())}
    if "torch" in names and recipe.frameworks["torch"].provider not in linked:
        return False
    package = wanted and wanted.provider == "pip" and (wanted.package or "tensorflow")
    return package in ("tensorflow", "tensorflow-gpu")


def _observe_framework(name: Framework, recipe: Recipe, version: Version) -> Found:
    wanted = recipe.frameworks[name]
    build, cuda = _build_of(name, wanted, version, recipe)
    index = re.search(r"pytorch.org/whl/cu(\d+)(\d)", wanted.extra_index or "")
    return {
        name: version,
        f"{name}_release": version.partition("+")[0],
        f"{name}_package": wanted.package or name,
        f"{name}_provider": "wheelhouse" if wanted.wheelhouse else wanted.provider,
        f"{name}_build": build,
        f"{name}_cuda": cuda,
        f"{name}_index": f"{index[1]}.{index[2]}" if index else None,
    }


# Conda packages that have CUDA's version: up to CUDA 11.8, and since.
_CUDA_OF_CONDA = ("cudatoolkit", "pytorch-cuda", "cuda-version", "cuda-libraries")


def _build_of(
    name: Framework, wanted: FrameworkPackage, version: Version, recipe: Recipe
) -> tuple[str, str]:
    """Whether a framework is built for ``cpu``, ``cuda`` or ``rocm``, and the version of CUDA.

    Both are empty where that cannot be told.
    """
    conda = recipe.conda.packages if recipe.conda and wanted.provider == "conda" else {}
    said = " ".join([version, wanted.extra_index or "", *wanted.find_links, wanted.package or ""])
    if wanted.cpu_index or re.search(r"\bcpu\b", said) or "cpuonly" in conda:
        return "cpu", ""
    if "rocm" in said:
        return "rocm", ""
    if found := re.search(r"\bcu(\d+)(\d)\b", said):
        return "cuda", f"{found[1]}.{found[2]}"
    if conda:
        named = (conda.get(each, "") for each in _CUDA_OF_CONDA)
        toolkit = next(filter(None, map(_number, named)), "")
        return ("cuda" if toolkit else ""), toolkit
    if wanted.provider != "pip" or wanted.wheelhouse or wanted.extra_index or wanted.find_links:
        return "", ""
    for since, cuda in _CUDA_OF_WHEELS[name]:
        if Parsed(version) >= Parsed(since):
            return "cuda", cuda
    return "", ""


# GCC and Open MPI of the common toolchains of EasyBuild.
_TOOLCHAINS = {
    "2019a": ("8.2.0", "3.1.3"),
    "2019b": ("8.3.0", "3.1.4"),
    "2020a": ("9.3.0", "4.0.3"),
    "2020b": ("10.2.0", "4.0.5"),
    "2021a": ("10.3.0", "4.1.1"),
    "2021b": ("11.2.0", "4.1.1"),
    "2022a": ("11.3.0", "4.1.4"),
    "2022b": ("12.2.0", "4.1.4"),
    "2023a": ("12.3.0", "4.1.5"),
    "2023b": ("13.2.0", "4.1.6"),
    "2024a": ("13.3.0", "5.0.3"),
    "2025a": ("14.2.0", "5.0.7"),
}
_CUDA_OF_FOSSCUDA = {
    "2018a": "9.1",
    "2018b": "9.2",
    "2019a": "10.1",
    "2019b": "10.1",
    "2020a": "11.0",
    "2020b": "11.1",
}
_TOOLCHAIN = re.compile(r"(?:^|[-/])(foss|gompi|gfbf|intel|iimpi|fosscuda)[/-](20[0-9]{2}[ab])\b")
# Spack's lower-case names say what built a module, which goes with others, too.
_PART = re.compile(r"-(GCC|GCCcore|CUDA)-(\d[\d.]*)")
_SAME = {"gcccore": "gcc", "cudatoolkit": "cuda"}


def _versions_named(recipe: Recipe) -> Mapping[str, dict[str, str]]:
    """What modules and CUDA's directory name, with its versions in their order, by two numbers."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for module in _modules(recipe):
        family = module_family(module)
        release = module.rpartition("/")[2]
        if family == "cudatoolkit":  # Cray's has the release of NVIDIA's HPC SDK first: 23.9_12.2
            release = release.rpartition("_")[2]
        named = [(family, _number(release)), *_PART.findall(module)]
        for kind, each in _TOOLCHAIN.findall(module):
            named.append(("gcc", _TOOLCHAINS.get(each, ("", ""))[0]))
            if kind == "fosscuda":
                named.append(("cuda", _CUDA_OF_FOSSCUDA.get(each, "")))
        if family.startswith("prgenv-"):
            named = [("PrgEnv", family[7:])]
        for name, version in named:
            if version:
                known = name if name == "PrgEnv" else _SAME.get(name.lower(), name.lower())
                found[known].setdefault(minor(version), version)
    gpu, home = recipe.horovod.gpu, recipe.environment.build.get("CUDA_HOME", "")
    if version := _number(((gpu and gpu.cuda_home) or home).lower().rpartition("cuda")[2]):
        found["cuda"].setdefault(minor(version), version)
    return found


_MPI_MODULE = re.compile(
    r"(?:^|-)(openmpi|hpcx|mpich|mvapich|cray-mpich|impi|intel-?mpi|spectrum-mpi|gompic?|iimpic?"
    r"|fosscuda|intelcuda)\d?(?:[-_]|$)"
)
_MPI_OF_TOOLCHAINS = {"foss": "openmpi", "gompi": "openmpi", "intel": "intel", "iimpi": "intel"}
_MPI_KINDS = {
    **dict.fromkeys(("hpcx", "gompi", "gompic", "fosscuda"), "openmpi"),
    **dict.fromkeys(("impi", "intelmpi", "iimpi", "iimpic", "intelcuda"), "intel"),
}


def mpis_named(modules: Iterable[str]) -> dict[str, str]:
    """The kinds of MPI among the modules, with their modules; with the toolchains of EasyBuild."""
    found: dict[str, str] = {}
    for module in modules:
        # A part that begins with a number is a version: hdf5/1.14.3-openmpi-4.1.4.
        names = [part for part in module.lower().split("/") if part[:1].isalpha()]
        kinds = [each[1] for each in map(_MPI_MODULE.search, names) if each]
        kinds += [_MPI_OF_TOOLCHAINS.get(name, "") for name, _ in _TOOLCHAIN.findall(module)]
        for kind in filter(None, kinds):
            found.setdefault(_MPI_KINDS.get(kind, kind.removesuffix("-mpi")), module)
    return found


def _modules_twice(recipe: Recipe) -> frozenset[str]:
    """What the modules name in two versions, or of two kinds."""
    versions = {name: _without_prefixes([*each]) for name, each in _versions_named(recipe).items()}
    named = {**versions, "MPI:": sorted(mpis_named(_modules(recipe)))}
    return frozenset(
        f"{name} {' and '.join(each)}" for name, each in named.items() if len(each) > 1
    )


def _without_prefixes(versions: list[str]) -> list[str]:
    """Versions without those that others say more exactly: gcc/12 and gcc/12.3 can be the same."""
    return [one for one in versions if not any(each.startswith(f"{one}.") for each in versions)]


def _observe_compiler(recipe: Recipe, facts: Facts) -> Found:
    """The C++ compiler: of the modules where there are any, and then of the version they name."""
    if recipe.horovod.provider == "present":
        return {"cxx": "not needed"}
    found: Found = {
        "cmake_module": _module_version(recipe, "cmake"),
        "build_variables": _assignments(recipe.environment.build),
    }
    if recipe.modules:
        named = ["", *_versions_named(recipe)["gcc"].values()]
        return {**found, "cxx": "of the modules", "gcc": _exact(named[-1])}
    if facts.cxx is None:
        return found
    return {**found, "cxx": facts.cxx.path, "gcc": facts.cxx.version}


def _observe_cuda(recipe: Recipe, facts: Facts) -> Found:
    gpu = recipe.horovod.gpu
    partition = recipe.partition
    found: Found = {"driver_cuda": _number(partition.cuda or "") if partition else None}
    if gpu is None:
        return found
    capabilities = compute_capabilities(recipe)
    return {
        **found,
        "gpu_operations": frozenset(library for library in gpu.libraries.values() if library),
        "gpu_alltoall": gpu.libraries["alltoall"],
        "nccl_link": gpu.nccl_link or "unset",
        "nccl": _version_of(recipe, "nccl"),
        "cudnn": _version_of(recipe, "cudnn"),
        "rocm": _module_version(recipe, "rocm") or _number(gpu.rocm_home or ""),
        "capabilities": frozenset(capabilities),
        "capability_missing": _capability_missing(gpu, partition.capability if partition else None),
        **_toolkit(recipe, facts, gpu),
    }


def _toolkit(recipe: Recipe, facts: Facts, gpu: Gpu) -> Found:
    """CUDA's toolkit: its version where something names it, and whether there is any."""
    versions = _versions_named(recipe)["cuda"]
    base = (recipe.container.base or "") if recipe.container else ""
    # The image's toolkit goes with the image's compiler: `container` has facts of both.
    image = _number(base.partition("nvidia/cuda:")[2])
    inside = image if facts.host == base else ""
    version = next(filter(_exact, reversed(versions)), "") or inside
    conda = recipe.conda.packages if recipe.conda else ()
    packages = {*conda, *recipe.packages, *recipe.build_tools}
    brought = any(map(_PACKAGES_BRING["CUDA's toolkit"].search, packages))
    if recipe.modules or gpu.cuda_home or base or brought:
        nvcc = "container" if base and not brought else "named by the recipe"
        return {"cuda": version, "container_cuda": image, "nvcc": nvcc}
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
    named, names = mpis_named(_modules(recipe)), "\n".join(_modules(recipe)).lower()
    found = re.search(r"(?m)^(?:[\w.+-]+/)?openmpi[/-](\d+\.\d+\.\d+)", names)
    toolchains = [each for kind, each in _TOOLCHAIN.findall(names) if kind in ("foss", "gompi")]
    module = found[1] if found else _TOOLCHAINS.get("".join(toolchains[:1]), ("", ""))[1]
    if module and module.startswith(f"{mpi.version}."):
        module = mpi.version
    kind = mpi.kind if mpi.kind in named else min(named, default=None)
    return {
        mpi.kind: mpi.version,
        "openmpi_module": module,
        "mpi_module": kind,
        "mpi_module_name": named.get(kind or ""),
        "host_mpirun": host,
    }


def _virtual_beyond(recipe: Recipe) -> frozenset[str]:
    """Virtual packages of conda that promise more than the partition's facts."""
    partition, virtual = recipe.partition, recipe.conda.virtual if recipe.conda else {}
    stated = {"__cuda": partition.cuda, "__glibc": partition.glibc} if partition else {}
    return frozenset(
        f"{name}={virtual[name]} (partition: {limit})"
        for name, limit in stated.items()
        if limit and name in virtual and Parsed(virtual[name]) > Parsed(_number(limit))
    )


def _observe_job(recipe: Recipe) -> Found:
    job = recipe.job
    partition = recipe.partition
    return {
        # A site's own scheduler that is like Slurm has srun.
        "scheduler": (recipe.dialect and recipe.dialect.like) or recipe.scheduler,
        "gpus_requested": None if job.gpu_option == "none" else job.gpus_per_node,
        "partition_glibc": _number(partition.glibc or "") if partition else None,
        "partition_arch": partition.arch if partition else None,
    }


def _observe_launch(recipe: Recipe) -> Found:
    launch, network, run = recipe.launch, recipe.network, recipe.environment.run
    threads = run.get("OMP_NUM_THREADS", "")
    in_variables = {k[9:]: v for k, v in run.items() if k.startswith("OMPI_MCA_")}
    return {
        "srun_mpi": launch.srun_mpi or "unset",
        "mca": _assignments(launch.mca) | _assignments(in_variables),
        "network_both": frozenset({*network.use} & {*network.avoid}),
        "omp_threads": int(threads) if threads.isdecimal() else None,
    }


def _observe_packages(recipe: Recipe) -> Found:
    conda, python = recipe.conda, recipe.python
    # What conda or the site has brought already, pip leaves as it is.
    brought = conda.packages if conda else {}
    hidden = python.system_site_packages or python.provider == "clone"
    asked = {} if hidden else recipe.packages
    return {
        "ofi_module": next((name for name in _modules(recipe) if "ofi" in name), None),
        "packages": frozenset(name.lower() for name in recipe.packages),
        "protobuf_of": "others" if "protobuf" in brought or hidden else "pip",
        **{f"packages.{k.lower()}": v for k, v in asked.items() if k not in brought},
        **{f"build_tools.{name.lower()}": v for name, v in recipe.build_tools.items()},
        "conda_pins": conda
        and frozenset(f"{name}={_pinned(spec)}" for name, spec in conda.packages.items()),
        "conda_packages": conda and frozenset(conda.packages),
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


def _version_of(recipe: Recipe, family: str) -> str:
    """The version of a library: of its module, or of its conda package."""
    conda = recipe.conda.packages if recipe.conda else {}
    return _module_version(recipe, family) or _pinned(conda.get(family, ""))


def _pinned(spec: str) -> str:
    """The lowest version of a conda specifier; empty if it has none."""
    return "" if spec[:1] in "<!" else _number(spec)


def _number(text: str) -> str:
    found = re.match(r"\D{0,2}(\d+(?:\.\d+)*)", text)
    return found[1] if found else ""


def _exact(version: str) -> str:
    """A version that bounds can be applied to: 11 can be 11.0 or 11.8."""
    return version if "." in version else ""


def minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def _assignments(variables: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{name}={value}" for name, value in variables.items())

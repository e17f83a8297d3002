"""The recipe format: what to build and where, as typed data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple
from urllib.parse import unquote

from hvdenv.model.cluster import (
    Capability,
    Container,
    Environment,
    Folder,
    Job,
    Label,
    Launch,
    ModuleFolder,
    Modules,
    Network,
    Partition,
    Reference,
    Scheduler,
    Storage,
    Value,
    VariableName,
)
from hvdenv.schema import Pattern

_RELEASE = r"([0-9]+!)?[0-9]+(\.[0-9]+)*"
_SUFFIX = r"((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?"
_LOCAL = r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
# ~= wants two numbers, only == and != take .* and a local version.
_CLAUSE = (
    rf"((==|!=){_RELEASE}(\.\*|{_SUFFIX}{_LOCAL})|(~=(?=[0-9!]+\.[0-9])|[<>]=?){_RELEASE}{_SUFFIX})"
)

Name = Annotated[str, Pattern(r"[a-z0-9][a-z0-9_-]{0,63}", "a name of a-z, 0-9, _ and -")]
PackageName = Annotated[str, Pattern(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "a package name")]
Version = Annotated[
    str, Pattern(rf"{_RELEASE}{_SUFFIX}{_LOCAL}", "a version such as 2.13.0 (PEP 440)")
]
Specifier = Annotated[
    str,
    Pattern(
        rf"({_CLAUSE}(, ?(?=[~=!<>])|$))+", "a version specifier such as >=3.10,<3.13 (PEP 440)"
    ),
]
Sha256 = Annotated[str, Pattern(r"[0-9a-f]{64}", "a sha256 of 64 hexadecimal digits")]
# No credentials: they would stand in plans and on command lines. pip's own
# configuration or ~/.netrc is the place for them.
Url = Annotated[
    str,
    Pattern(
        r"(https?|file)://[^\s@?'\"`$\\]+", "a URL without spaces, quotes, credentials or a query"
    ),
]
Flags = Annotated[
    str, Pattern(r"(-[A-Za-z0-9][A-Za-z0-9=+.,_-]*( +|$))*", "compiler flags such as -mavx -mfma")
]

# A version of conda's: 2.10.0, 11.3, 3.10.*; or a range such as >=2.0,<3.
CondaSpec = Annotated[
    str,
    Pattern(
        r"([<>=!~]=?)?[0-9][A-Za-z0-9.*+_!-]*((,([<>=!~]=?)?|[<>=~]=?)[0-9][A-Za-z0-9.*+_!-]*)*,?"
        r"( [A-Za-z0-9_.*-]+)?|\*",
        "a version as conda writes it, such as 1.12.0, 11.3.* or >=2.0,<3; a build may follow",
    ),
]
CondaName = Annotated[str, Pattern(r"_?[a-z0-9][a-z0-9._-]*", "a conda package's name")]
VirtualPackage = Annotated[
    str, Pattern(r"__(cuda|glibc|linux|unix|archspec)", "a virtual package such as __cuda")
]
Channel = Annotated[
    str,
    Pattern(
        r"(https?|file)://[^\s@?#'\"`$\\]+|[a-z0-9][a-z0-9._/-]*",
        "a channel's name such as conda-forge, or its URL without credentials",
    ),
]
GitUrl = Annotated[
    str,
    Pattern(r"(https|file)://[^\s@?#'\"`$\\]+", "an https URL of a git repository"),
]
Commit = Annotated[str, Pattern(r"[0-9a-f]{40}", "a commit of 40 hexadecimal digits")]

Framework = Literal["tensorflow", "torch"]
Controller = Literal["mpi", "gloo"]
Operations = Literal["nccl", "mpi"]


class ByPython(NamedTuple):
    """A value for some Python versions; the first that fits is taken."""

    python: Specifier
    value: Version


class Python(NamedTuple):
    """Which Python the environment has.

    Attributes:
        version: versions that fit; exactly one where modules bring it.
        provider: ``venv`` makes a virtual environment; ``conda`` solves and installs one;
            ``prefix`` is an environment of the site that is used as it is, ``clone`` a
            copy of it; ``modules`` is the Python of the modules itself.
        from_modules: the virtual environment is made with the modules' Python.
        system_site_packages: it sees the packages of that Python too.
        prefix: the site's environment, for ``prefix`` and ``clone``.
    """

    version: Specifier
    provider: Literal["venv", "conda", "prefix", "clone", "modules"] = "venv"
    from_modules: bool = False
    system_site_packages: bool = False
    prefix: ModuleFolder | None = None


class Conda(NamedTuple):
    """What a conda environment is made of.

    Attributes:
        channels: in the order of their priority.
        packages: besides Python and the frameworks that come by conda.
        virtual: what the machine that runs the environment has (``__cuda``, ``__glibc``);
            not the one that builds it.
        program: the site's conda, mamba or micromamba, instead of hvdenv's own solver.
    """

    channels: tuple[Channel, ...]
    packages: dict[CondaName, CondaSpec] = {}
    virtual: dict[VirtualPackage, Value] = {}
    program: Folder | None = None


class Source(NamedTuple):
    """A framework that is built from its repository.

    Attributes:
        git: the repository.
        tag: what is checked out.
        commit: what the tag has to point to.
        build: variables for its build.
    """

    git: GitUrl
    tag: PackageName
    commit: Commit | None = None
    build: dict[VariableName, Value] = {}


class FrameworkPackage(NamedTuple):
    """Where a framework comes from.

    Attributes:
        version: the version, or one for each range of Python versions.
        package: its name where it comes from.
        provider: ``pip``, ``conda``, ``source``; ``present`` says that modules or the
            site's environment bring it.
        cpu_index: index with CPU builds, used when it can be reached.
        extra_index: a further index of the framework's own.
        wheelhouse: folder with wheels; then no index is asked.
        source: for the provider ``source``.
    """

    version: Version | tuple[ByPython, ...]
    package: PackageName | None = None
    provider: Literal["pip", "conda", "source", "present"] = "pip"
    cpu_index: Url | None = None
    extra_index: Url | None = None
    wheelhouse: Folder | None = None
    source: Source | None = None


class Mpi(NamedTuple):
    """The MPI that Horovod is compiled against.

    Attributes:
        kind: the implementation.
        version: its version, where it is known.
        package: package of the index that brings it; the modules or the machine if not given.
        cxx: the compiler wrapper, where it is not mpicxx (Cray: CC).
        cuda_aware: whether it can take buffers on a GPU.
        sha256: hash of its source archive, which an image compiles; hvdenv knows that of most
            releases.
    """

    kind: Literal["openmpi", "mpich", "mvapich", "cray-mpich", "intel", "spectrum"] = "openmpi"
    version: Version | None = None
    package: Literal["openmpi", "mpich"] | None = None
    cxx: Label | None = None
    cuda_aware: bool = False
    sha256: Sha256 | None = None


class Gpu(NamedTuple):
    """What Horovod does on GPUs: all operations by one library, or each by its own.

    Attributes:
        platform: CUDA or ROCm.
        operations: the library for all operations; ``host`` copies tensors into the host's
            memory and reduces them there.
        allreduce, allgather, broadcast, alltoall, reducescatter: or for one of them.
        allow_mixed: allreduce by NCCL and others by MPI, which can deadlock.
        cuda_home, nccl_home, rocm_home: where they lie, if not where they are looked for.
        nccl: ``torch`` for the NCCL that torch's own packages bring, so that a process
            has one NCCL.
        nccl_link: how NCCL is linked; Horovod's own default if not given.
        capabilities: compute capabilities that are compiled for; those of the
            partitions if not given.
    """

    platform: Literal["cuda", "rocm"] = "cuda"
    operations: Literal["nccl", "mpi", "host"] | None = None
    allreduce: Literal["nccl", "mpi", "ddl"] | None = None
    allgather: Operations | None = None
    broadcast: Operations | None = None
    alltoall: Operations | None = None
    reducescatter: Operations | None = None
    allow_mixed: bool = False
    cuda_home: ModuleFolder | None = None
    nccl_home: ModuleFolder | None = None
    rocm_home: ModuleFolder | None = None
    nccl: Literal["torch"] | None = None
    nccl_link: Literal["shared", "static"] | None = None
    capabilities: tuple[Capability, ...] = ()


class Horovod(NamedTuple):
    """What Horovod is built from and for.

    Attributes:
        version: release; its source comes from the package index.
        frameworks: extensions to build.
        controllers: what negotiates between ranks, MPI, Gloo or both.
        provider: ``source`` builds it; ``present`` says that modules or the site's
            environment bring it.
        sha256: hash of the source archive, for the provider ``source``.
        gpu: what it does on GPUs; nothing if not given.
        cpu_operations: what reduces tensors in the host's memory by default.
    """

    version: Version
    frameworks: tuple[Framework, ...]
    controllers: tuple[Controller, ...]
    provider: Literal["source", "present"] = "source"
    sha256: Sha256 = ""
    gpu: Gpu | None = None
    cpu_operations: Literal["mpi", "gloo", "ccl"] | None = None


class Target(NamedTuple):
    """The processors that the environment is for, by architecture."""

    arch_flags: dict[str, Flags]


class Deviation(NamedTuple):
    """Where the recipe does other than the site's document, and why."""

    document: str
    recipe: str
    reason: str


class Note(NamedTuple):
    """What a user of this site should know, and where it is said."""

    text: str
    source: str


class Recipe(NamedTuple):
    """A recipe after all layers were merged."""

    format: Literal[1]
    name: Name
    summary: str
    status: Literal["tested", "documented", "decommissioned"]
    sources: tuple[Url, ...]
    python: Python
    horovod: Horovod
    target: Target
    build_tools: dict[PackageName, Specifier]
    packages: dict[PackageName, Specifier]
    frameworks: dict[Framework, FrameworkPackage] = {}
    mpi: Mpi | None = None
    conda: Conda | None = None
    site: str = ""
    modules: Modules | None = None
    scheduler: Scheduler | None = None
    partitions: dict[Label, Partition] = {}
    job: Job = Job()
    launch: Launch = Launch()
    network: Network = Network()
    environment: Environment = Environment()
    places: Storage = Storage()
    container: Container | None = None
    references: tuple[Reference, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    notes: tuple[Note, ...] = ()


def executed_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Scripts and folders of which something is executed or installed, by the key that names them.

    One that begins with a variable of the modules is not known before these are loaded. A cache of
    wheels judges its entries by itself, and an environment is judged where it is used.
    """
    if modules := recipe.modules:
        yield from (("modules.init", each) for each in (modules.init,) if each)
        yield from (("modules.source", each) for each in modules.source)
        yield from (("modules.use", each) for each in modules.use)
    gpu, conda = recipe.horovod.gpu, recipe.conda
    named = {
        "python.prefix": recipe.python.prefix,
        "conda.program": conda.program if conda else None,
        "horovod.gpu.cuda_home": gpu.cuda_home if gpu else None,
        "horovod.gpu.nccl_home": gpu.nccl_home if gpu else None,
        "horovod.gpu.rocm_home": gpu.rocm_home if gpu else None,
    }
    for name, framework in recipe.frameworks.items():
        key = f"frameworks.{name}"
        named[f"{key}.wheelhouse"] = framework.wheelhouse
        named[f"{key}.cpu_index"] = _local(framework.cpu_index)
        named[f"{key}.extra_index"] = _local(framework.extra_index)
        named[f"{key}.source.git"] = _local(framework.source.git) if framework.source else None
    yield from ((key, path) for key, path in named.items() if path)
    for channel in conda.channels if conda else ():
        yield from (("conda.channels", each) for each in (_local(channel),) if each)


def _local(url: str | None) -> str | None:
    """The path of a file:// URL, which pip and git find behind a host and before a fragment too."""
    if not url or not url.startswith("file://"):
        return None
    return unquote("/" + url.removeprefix("file://").partition("#")[0].partition("/")[2])

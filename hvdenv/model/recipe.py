"""The recipe format: what to build and where, as typed data."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import unquote

from hvdenv.base.schema import KeyPath, Pattern, decode, dotted, encode
from hvdenv.model.cluster import (
    Capability,
    Container,
    Folder,
    Job,
    Label,
    LaunchSettings,
    ModuleFolder,
    Modules,
    Network,
    Partition,
    Storage,
    Value,
    VariableName,
    Variables,
)
from hvdenv.model.dialect import Dialect, with_own

_RELEASE = r"([0-9]+!)?[0-9]+(\.[0-9]+)*"
_SUFFIX = r"((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?"
_LOCAL = r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
# ~= needs two numbers. Only == and != allow .* and a local version.
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
MaybeSha256 = Annotated[
    str, Pattern(r"([0-9a-f]{64})?", "a sha256 of 64 hexadecimal digits, or empty")
]
# No credentials: they would appear in plans and on command lines. Put them into pip's own
# configuration or ~/.netrc.
Url = Annotated[
    str,
    Pattern(
        r"(https?|file)://[^\s@?'\"`$\\]+", "a URL without spaces, quotes, credentials or a query"
    ),
]
# A page or a directory with links to files.
Links = Annotated[
    str,
    Pattern(
        r"((https?|file)://|/)[^\s@?#'\"`$\\{}]+",
        "a URL without spaces, quotes, credentials or a query, or an absolute directory",
    ),
]
Flags = Annotated[
    str, Pattern(r"(-[A-Za-z0-9][A-Za-z0-9=+.,_-]*( +|$))*", "compiler flags such as -mavx -mfma")
]

# A version in conda's syntax: 2.10.0, 11.3, 3.10.*; or a range such as >=2.0,<3.
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
Library = Literal["nccl", "mpi"]
# The operations for which HOROVOD_GPU_OPERATIONS, or a variable of its own, names the library.
COLLECTIVES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")


class ByPython(NamedTuple):
    """A value for some Python versions. The first match applies.

    Attributes:
        python: the Python versions that it is for.
        value: the value for these.
    """

    python: Specifier
    value: Version


class Python(NamedTuple):
    """Which Python the environment has.

    Attributes:
        version: supported versions; exactly one if modules provide Python.
        provider: ``venv`` makes a virtual environment; ``conda`` solves and installs one;
            ``prefix`` uses an environment of the site as it is, ``clone`` copies it;
            ``modules`` uses the Python of the modules.
        from_modules: make the virtual environment with the Python of the modules.
        system_site_packages: the environment also sees the packages of that Python.
        prefix: the site's environment, for ``prefix`` and ``clone``.
    """

    version: Specifier
    provider: Literal["venv", "conda", "prefix", "clone", "modules"] = "venv"
    from_modules: bool = False
    system_site_packages: bool = False
    prefix: ModuleFolder | None = None


class Conda(NamedTuple):
    """The contents of a conda environment.

    Attributes:
        channels: by priority, highest first.
        packages: in addition to Python and the frameworks that conda provides.
        virtual: virtual packages (``__cuda``, ``__glibc``) of the machine that runs the
            environment, not of the build host.
    """

    channels: tuple[Channel, ...]
    packages: dict[CondaName, CondaSpec] = {}
    virtual: dict[VirtualPackage, Value] = {}


class Source(NamedTuple):
    """A framework to build from its repository.

    Attributes:
        git: the repository.
        tag: the tag to check out.
        commit: the commit that the tag must point to.
        build: environment variables for its build.
    """

    git: GitUrl
    tag: PackageName
    commit: Commit | None = None
    build: dict[VariableName, Value] = {}


class FrameworkPackage(NamedTuple):
    """Where a framework comes from.

    Attributes:
        version: the version, or one for each range of Python versions.
        package: its name at its provider.
        provider: ``pip``, ``conda``, ``source``; ``present`` if modules or the environment
            of the site contain it.
        cpu_index: index with CPU builds, used if it can be reached.
        extra_index: a further index that the framework needs.
        find_links: pages or directories with links to files, in addition to the indexes (pip's
            ``--find-links``).
        wheelhouse: directory with wheels, used instead of an index.
        source: for the provider ``source``.
    """

    version: Version | tuple[ByPython, ...]
    package: PackageName | None = None
    provider: Literal["pip", "conda", "source", "present"] = "pip"
    cpu_index: Url | None = None
    extra_index: Url | None = None
    find_links: tuple[Links, ...] = ()
    wheelhouse: Folder | None = None
    source: Source | None = None


class Mpi(NamedTuple):
    """The MPI to compile Horovod against.

    Attributes:
        kind: the implementation.
        version: its version, if known.
        package: package of the index that contains it (default: modules or the machine
            provide MPI).
        cxx: the compiler wrapper, if not mpicxx (Cray: CC).
        cuda_aware: whether it accepts buffers on a GPU.
        sha256: hash of its source archive, which an image compiles. hvdenv knows the hashes of
            most releases.
    """

    kind: Literal["openmpi", "mpich", "mvapich", "cray-mpich", "intel"] = "openmpi"
    version: Version | None = None
    package: Literal["openmpi", "mpich"] | None = None
    cxx: Label | None = None
    cuda_aware: bool = False
    sha256: Sha256 | None = None


class Gpu(NamedTuple):
    """Horovod on GPUs: one library for all operations, or one for each.

    Attributes:
        platform: CUDA or ROCm.
        operations: the library for all operations; ``host`` copies tensors into the host's
            memory and reduces them there.
        allreduce, allgather, broadcast, alltoall, reducescatter: the library for one operation.
        allow_mixed: allow allreduce over NCCL and others over MPI, which can deadlock.
        cuda_home, nccl_home, rocm_home: their directories, if not the usual ones.
        nccl: ``torch`` for the NCCL of torch's packages, so that a process has one NCCL.
        nccl_link: how to link NCCL (default: Horovod's).
        capabilities: compute capabilities to compile for (default: those of the partitions).
    """

    platform: Literal["cuda", "rocm"] = "cuda"
    operations: Literal["nccl", "mpi", "host"] | None = None
    allreduce: Literal["nccl", "mpi", "ddl"] | None = None
    allgather: Library | None = None
    broadcast: Library | None = None
    alltoall: Library | None = None
    reducescatter: Library | None = None
    allow_mixed: bool = False
    cuda_home: ModuleFolder | None = None
    nccl_home: ModuleFolder | None = None
    rocm_home: ModuleFolder | None = None
    nccl: Literal["torch"] | None = None
    nccl_link: Literal["shared", "static"] | None = None
    capabilities: tuple[Capability, ...] = ()

    @property
    def libraries(self) -> dict[str, str | None]:
        """The library for each collective."""
        return {name: getattr(self, name) or self.operations for name in COLLECTIVES}


class Horovod(NamedTuple):
    """The Horovod to build.

    Attributes:
        version: release; its source comes from the package index.
        frameworks: extensions to build.
        controllers: MPI, Gloo or both.
        provider: ``source`` builds it; ``present`` if modules or the environment of the site
            contain it.
        sha256: hash of the source archive, for the provider ``source``.
        gpu: GPU operations (default: none).
        cpu_operations: default library for tensors in the host's memory.
    """

    version: Version
    frameworks: tuple[Framework, ...]
    controllers: tuple[Controller, ...]
    provider: Literal["source", "present"] = "source"
    sha256: MaybeSha256 = ""
    gpu: Gpu | None = None
    cpu_operations: Literal["mpi", "gloo", "ccl"] | None = None


class Target(NamedTuple):
    """The processors that the environment is for, by architecture.

    Attributes:
        arch_flags: compiler flags for an architecture. The machine that builds never adds any.
    """

    arch_flags: dict[str, Flags]


class Deviation(NamedTuple):
    """A departure of the recipe from the site's document, with its reason.

    Attributes:
        document: what the document does.
        recipe: what the recipe does instead.
        reason: why.
    """

    document: str
    recipe: str
    reason: str


class Note(NamedTuple):
    """Something that users of this site should know, with its source.

    Attributes:
        text: what to know.
        source: the URL that states it.
    """

    text: str
    source: str


class Recipe(NamedTuple):
    """A recipe after all layers were merged.

    Attributes:
        format: version of the recipe format.
        name: the name of the file without ``.toml``.
        summary: one line for ``hvdenv recipes``.
        status: ``tested`` was built and verified there; ``documented`` follows documents of the
            site; ``decommissioned`` is for a machine that is gone.
        sources: the documents that the recipe follows; for repositories, with the commit.
        build_tools: packages to build with; not installed if ``modules.build`` provides them.
        packages: packages to install together with the frameworks from pip, such as an upper
            bound of NumPy, or torchvision.
        site: the cluster's name for people.
        scheduler: the batch system of the cluster: slurm, pbs, cobalt, lsf, gridengine, or one of
            ``schedulers``.
        schedulers: batch systems that hvdenv does not have.
    """

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
    scheduler: Label | None = None
    schedulers: dict[Label, Dialect] = {}
    partitions: dict[Label, Partition] = {}
    job: Job = Job()
    launch: LaunchSettings = LaunchSettings()
    network: Network = Network()
    environment: Variables = Variables()
    places: Storage = Storage()
    container: Container | None = None
    deviations: tuple[Deviation, ...] = ()
    notes: tuple[Note, ...] = ()

    @staticmethod
    def only_in_files() -> dict[str, Any]:
        """Of recipes and variants, the keys of the layers below to remove first."""
        return {"without": tuple[str, ...]}

    @property
    def dialects(self) -> dict[str, Dialect]:
        """The batch systems that hvdenv has, and those of this recipe."""
        return with_own(self.schedulers)

    @property
    def partition(self) -> Partition | None:
        """What is declared about the nodes of its jobs."""
        return self.partitions.get(self.job.partition or "")

    @property
    def dialect(self) -> Dialect | None:
        return self.dialects[self.scheduler] if self.scheduler else None


def provided_by_modules(recipe: Recipe) -> bool:
    """Whether modules of the site contain all of it, so that there is nothing to build."""
    return recipe.python.provider == "modules" and recipe.horovod.provider == "present"


# Keys of what nothing is executed from or installed from. Wheel caches check their own entries, and
# environments are checked where they are used.
_NOT_EXECUTED = ("sources", "places.", "container.")


def executed_paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Scripts and directories from which hvdenv executes or installs something, with their keys.

    A path that begins with a variable of the modules is unknown until they are loaded.
    """
    found: list[tuple[str, str]] = []

    kinds = (Folder, ModuleFolder, Links, Url, GitUrl, Channel)
    patterns = [get_args(kind)[1] for kind in kinds]

    def note(pattern: Pattern, text: str, path: KeyPath) -> str:
        if pattern in patterns:
            found.append((dotted(path).partition("[")[0], text))
        return text

    decode(Recipe, encode(recipe), rewrite=note)
    for key, text in found:
        path = text if text[0] in "/$" else _local(text)
        if path and not key.startswith(_NOT_EXECUTED):
            yield key, path


# Variables with programs and libraries to run, or directories of them.
_EXECUTED_FROM = re.compile(r"LD_\w+|PYTHON\w+|BASH_ENV|\w*PATH|\w+_HOME")


def executed_words(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Absolute paths in commands of the site's own launchers and schedulers, and in variables, as executed_paths()."""
    commands = {f"launch.launchers.{k}": v.command for k, v in recipe.launch.launchers.items()}
    for name, own in recipe.schedulers.items():
        texts = (own.hosts, own.program, own.submit, own.query.command, own.history.command)
        commands[f"schedulers.{name}"] = " ".join((*texts, own.cancel, own.interactive))
    for key, text in commands.items():
        yield from ((key, word) for word in text.split() if word.startswith("/"))
    for table in recipe.environment:
        for name, value in table.items():
            if _EXECUTED_FROM.fullmatch(name):
                words = re.split("[: ]", value)
                yield from ((f"environment: {name}", word) for word in words if word[:1] == "/")


def _local(url: str) -> str | None:
    """The path of a file:// URL. pip and git also accept one with a host or a fragment."""
    if not url.startswith("file://"):
        return None
    return unquote("/" + url.removeprefix("file://").partition("#")[0].partition("/")[2])

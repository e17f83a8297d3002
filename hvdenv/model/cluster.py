"""The cluster part of a recipe: modules, partitions, jobs, launchers, network, places."""

from functools import partial
from typing import Annotated, Literal, NamedTuple

from hvdenv.base.schema import ANY, Pattern
from hvdenv.model import template

ModuleName = Annotated[
    str,
    Pattern(
        r"(?!.*\.eb$)(?!(?:.*/)?\.\.(?:/|$))[A-Za-z0-9][A-Za-z0-9_+-]*([./][A-Za-z0-9._+-]+(/[A-Za-z0-9._+-]+)*)?",
        "a module name such as gcc/10.2.0 (NAME.eb is the name of an EasyBuild file, not of a module)",
    ),
]
AbsoluteFolder = Annotated[
    str, Pattern(r"/[A-Za-z0-9._+@:/-]*", "an absolute directory without variables")
]
# hvdenv replaces {user} by the name of the user who runs it, and $NAME by that variable of the user:
# hvdenv.session.recipe.
Folder = Annotated[
    str,
    Pattern(
        r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[A-Za-z0-9._+@:/-]*(\{user\}[A-Za-z0-9._+@:/-]*)*",
        "an absolute directory; may contain {user}, and begin with a variable such as $SCRATCH",
    ),
]
# $NAME is a variable that the modules set: $EBROOTNCCL, $CUDA_HOME/lib64.
ModuleFolder = Annotated[
    str,
    Pattern(
        r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[A-Za-z0-9._+@:/-]*",
        "an absolute directory, or one below a variable that the modules set, such as $CUDA_HOME",
    ),
]
VariableName = Annotated[
    str, Pattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
]
# Short enough for every scheduler, and without characters that end a directive.
Label = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9_][A-Za-z0-9._:/@+=,*&|!-]{0,127}",
        "a word of letters, digits and . _ : / @ + = , * & | ! -",
    ),
]
Directive = Annotated[
    str,
    Pattern(
        r"""-(?!.*(?:[`\\]|\$[({]| #))(?:[ !#-&(-~]|'[ -&(-~]*'|"[ !#-~]*"){1,200}""",
        "an option without #SBATCH or the like in front, such as --nice=100; it cannot have"
        " backslashes, backticks, ${...}, $(...), comments and open quotes",
    ),
]
FileName = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9_./%$-][A-Za-z0-9._/%${}=+-]{0,199}", "a file name without spaces and quotes"
    ),
]
Duration = Annotated[
    str,
    Pattern(
        r"([0-9]{1,3}-)?[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]",
        "a time such as 24:00:00 or 2-00:00:00 (days-hours:minutes:seconds)",
    ),
]
Capability = Annotated[
    str, Pattern(r"[3-9][0-9]|1[0-9]{2}", "a compute capability without the dot, such as 80")
]
Interface = Annotated[str, Pattern(r"[A-Za-z0-9._-]{1,15}", "a network interface such as ib0")]
McaName = Annotated[str, Pattern(r"[a-z][a-z0-9_]*", "an MCA parameter such as btl")]
McaValue = Annotated[
    str, Pattern(r"\^?[A-Za-z0-9][A-Za-z0-9._:/,=-]*", "the value of an MCA parameter")
]
Value = Annotated[str, Pattern(r"[ -~]{0,500}", "printable ASCII characters")]

LauncherName = Literal["srun", "mpirun", "mpiexec", "horovodrun-mpi", "horovodrun-gloo", "aprun"]
# Of a library or driver, whose numbers are compared.
Numbers = Annotated[str, Pattern(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}", "a version such as 2.28")]
Architecture = Literal["x86_64", "ppc64le", "aarch64"]


class Trust(NamedTuple):
    """Other users whose files hvdenv uses.

    Attributes:
        owners: users such as the support staff, for recipes, locks, scripts and environments.
    """

    owners: tuple[Label, ...] = ()


class Modules(NamedTuple):
    """Modules to load, in this order.

    Attributes:
        init: script that defines ``module``, if the machine does not define it.
        purge: unload everything first; ``force`` also unloads sticky modules.
        use: directories with modulefiles, before those of the machine.
        source: scripts of the site to source.
        unload: default modules of the site to unload.
        load: modules for the build and for every run.
        build: modules for the build only, such as CMake, loaded last.
    """

    init: Folder | None = None
    purge: Literal["no", "yes", "force"] = "yes"
    use: tuple[Folder, ...] = ()
    source: tuple[Folder, ...] = ()
    unload: tuple[ModuleName, ...] = ()
    load: tuple[ModuleName, ...] = ()
    build: tuple[ModuleName, ...] = ()


class Partition(NamedTuple):
    """Declared facts about the nodes of a partition or queue.

    Attributes:
        arch: architecture of its nodes.
        cores: of one node, as the scheduler counts them.
        gpus: of one node.
        gpu: their name in the scheduler, if it needs one.
        capability: compute capability of an NVIDIA GPU.
        nodes: number of nodes.
        memory_gb: of one node.
        max_time: time limit of jobs.
        glibc: version on its nodes.
        cuda: newest CUDA that the driver of its nodes supports.
    """

    arch: Architecture = "x86_64"
    cores: int | None = None
    gpus: int = 0
    gpu: Label | None = None
    capability: Capability | None = None
    nodes: int | None = None
    memory_gb: int | None = None
    max_time: Duration | None = None
    glibc: Numbers | None = None
    cuda: Numbers | None = None


class JobOf(NamedTuple):
    """Resources of the job of one command, instead of those of ``[job]``.

    Attributes:
        partition, nodes, time, memory, qos, exclusive: as in ``[job]``.
        ranks_per_node, cpus_per_rank, gpus_per_node: as in ``[job]``.
    """

    partition: Label | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    time: Duration | None = None
    memory: Label | None = None
    qos: Label | None = None
    exclusive: bool | None = None


# Fields of a job that have an option of their own.
JOB_OPTIONS = (
    "nodes",
    "ranks_per_node",
    "cpus_per_rank",
    "gpus_per_node",
    "time",
    "partition",
    "account",
    "name",
    "comment",
    "output",
)


class Job(NamedTuple):
    """Default resources of a batch job.

    Attributes:
        partition: a key of ``partitions``; a queue to PBS, Cobalt, LSF and Grid Engine.
        nodes: number of nodes.
        ranks_per_node: usually one per GPU.
        cpus_per_rank: cores for each rank.
        gpus_per_node: GPUs for each node (default: one per rank, if Horovod is built for GPUs and
            the partition has them).
        gpu_option: option that requests them from Slurm.
        time: wall time.
        name, account, qos, reservation, constraint, comment: passed to the scheduler.
        memory: for each node, such as 250G.
        exclusive: request whole nodes.
        output, error: file names, with the scheduler's placeholders.
        select: resources that PBS adds to each chunk, such as system=polaris.
        parallel_environment: of Grid Engine (-pe), whose slots are the cores of all ranks.
        directives: further options for the scheduler, without the prefix, such as ``--nice=100``.
        requires: keys of this table that the site requires.
        build: for ``hvdenv build --where compute`` (default: one node).
        verify: for ``hvdenv verify --where compute`` (default: at most two nodes, 30 minutes).
    """

    partition: Label | None = None
    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    gpu_option: Literal["gres", "gpus-per-node", "none"] = "gres"
    time: Duration = "01:00:00"
    name: Label = "hvdenv"
    account: Label | None = None
    qos: Label | None = None
    reservation: Label | None = None
    constraint: Label | None = None
    comment: Label | None = None
    memory: Label | None = None
    exclusive: bool = False
    output: FileName | None = None
    error: FileName | None = None
    select: Label | None = None
    parallel_environment: Label | None = None
    directives: tuple[Directive, ...] = ()
    requires: tuple[Label, ...] = ()
    build: JobOf | None = None
    verify: JobOf | None = None


# Fields of launchers.
OF_LAUNCHERS = (
    "ranks",
    "nodes",
    "ranks_per_node",
    "cpus_per_rank",
    "gpus_per_node",
    "cpu_bind",
    "threads_per_core",
    "hosts",
    "host_names",
    "hostfile",
    "interface",
    "placed",
    "nested",
    "exports",
    "program",
)


class OwnLauncher(NamedTuple):
    """A launcher that hvdenv does not have.

    Attributes:
        command: template of its command line (docs/how-to/add-a-scheduler.md).
        export: template of what passes a variable of the launcher's environment on to the ranks,
            such as ``-x {name}`` (default: the launcher passes all of them on).
        controller: what Horovod's ranks negotiate with.
        schedulers: batch systems in whose jobs it works (default: it works anywhere).
    """

    command: Annotated[
        str,
        Pattern(ANY, "a command line", partial(template.problem, known=OF_LAUNCHERS, words=True)),
    ]
    export: Annotated[
        str, Pattern(ANY, "words", partial(template.problem, known=("name",), words=True))
    ] = ""
    controller: Literal["MPI", "Gloo"] = "MPI"
    schedulers: tuple[Label, ...] = ()


# As in `srun --mpi=list`.
SrunMpi = Literal["pmix", "pmix_v2", "pmix_v3", "pmix_v4", "pmix_v5", "pmi2", "cray_shasta", "none"]


class LaunchSettings(NamedTuple):
    """How to start ranks on this cluster.

    Attributes:
        launcher: the default launcher of ``run`` and ``job``: one of srun, mpirun, mpiexec,
            horovodrun-mpi, horovodrun-gloo, aprun, or of ``launchers``.
        launchers: launchers that hvdenv does not have.
        srun_mpi: value of srun's ``--mpi`` (default: srun's).
        cpu_bind: how to bind ranks to cores: ``--cpu-bind`` of srun and mpiexec,
            ``-cc`` of aprun.
        threads_per_core: hardware threads to use per core (aprun -j).
        exports: variables that mpirun passes to every rank (-x).
        mca: parameters of Open MPI (--mca; version 5 ignores -mca).
        mpi_threads_disable: the site's fabric needs HOROVOD_MPI_THREADS_DISABLE=1.
    """

    launcher: Label = "mpirun"
    srun_mpi: SrunMpi | None = None
    cpu_bind: Label | None = None
    threads_per_core: int | None = None
    exports: tuple[VariableName, ...] = ("PATH", "LD_LIBRARY_PATH")
    mca: dict[McaName, McaValue] = {}
    mpi_threads_disable: bool = False
    launchers: dict[Label, OwnLauncher] = {}


class Network(NamedTuple):
    """Network interfaces for the communication of ranks.

    Attributes:
        use: interfaces to use, for NCCL, Gloo and Open MPI's TCP.
        avoid: interfaces not to use.
    """

    use: tuple[Interface, ...] = ()
    avoid: tuple[Interface, ...] = ()


class Variables(NamedTuple):
    """Variables of the site or recipe, in addition to those that hvdenv sets.

    Attributes:
        build: for the compilation of Horovod.
        run: for every program of the environment; values may contain {user} and {jobid}.
    """

    build: dict[VariableName, Value] = {}
    run: dict[VariableName, Value] = {}


class Workspace(NamedTuple):
    """A directory that the workspace tools of the site allocate (ws_allocate).

    Attributes:
        filesystem: value of -F (default: the site's).
        name: of the workspace.
        days: its duration.
    """

    name: Label
    days: int
    filesystem: Label | None = None


class Wheels(NamedTuple):
    """Caches of compiled wheels, in addition to the user's own.

    Attributes:
        read: shared caches to use.
        trust: users whose entries may be used, in addition to one's own and root's.
        own_gb: maximum size of the user's own cache, in GB.
    """

    read: tuple[Folder, ...] = ()
    trust: tuple[Label, ...] = ()
    own_gb: float = 10.0


class Storage(NamedTuple):
    """Where this site stores environments and wheels.

    Attributes:
        environments: directory of environments (default: in ``$HVDENV_HOME``).
        workspace: workspace to allocate, for environments.
        expires_days: days without use after which the site purges files there.
        wheels: caches of compiled wheels.
    """

    environments: Folder | None = None
    workspace: Workspace | None = None
    expires_days: int | None = None
    wheels: Wheels = Wheels()


class SiteKeys(NamedTuple):
    """Keys of a site file that count for commands without a recipe, too."""

    recipe_folders: tuple[AbsoluteFolder, ...] = ()
    trust: Trust = Trust()
    places: Storage = Storage()


class Container(NamedTuple):
    """An image with Horovod in it.

    Attributes:
        base: base image, as registries name it; ``hvdenv container`` requires it.
        packages: packages of the distribution, installed first.
        runtime: the program that runs the image on the cluster; ``ch-run`` is Charliecloud.
        image: its file, or for ``ch-run`` also its directory, at the same path on every node.
            If it is set, programs run in the image.
        binds: directories of the host that are visible in the image.
        gpu: how to pass GPUs into the image.
    """

    base: (
        Annotated[
            str,
            Pattern(r"[a-z0-9][A-Za-z0-9._/:@-]*", "an image such as nvidia/cuda:11.8.0-devel"),
        ]
        | None
    ) = None
    packages: tuple[Label, ...] = ()
    runtime: Literal["singularity", "apptainer", "ch-run"] = "apptainer"
    image: FileName | None = None
    binds: tuple[Folder, ...] = ()
    gpu: Literal["nvidia", "rocm", "none"] = "none"

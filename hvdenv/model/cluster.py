"""The cluster part of a recipe: modules, partitions, jobs, launchers, network, places."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args

from hvdenv.schema import Pattern

ModuleName = Annotated[
    str,
    Pattern(
        r"(?!.*\.eb$)[A-Za-z0-9][A-Za-z0-9_+-]*([./][A-Za-z0-9._+-]+(/[A-Za-z0-9._+-]+)*)?",
        "a module name such as gcc/10.2.0 (NAME.eb is the name of an EasyBuild file, not of a module)",
    ),
]
# {user} and {home} stand for the user who builds.
Folder = Annotated[
    str,
    Pattern(
        r"(/|\{home\}/)[A-Za-z0-9._+@:/-]*(\{user\}[A-Za-z0-9._+@:/-]*)*",
        "an absolute folder; {user} and {home} may stand in it",
    ),
]
# $NAME is what the modules set: $EBROOTNCCL, $CUDA_HOME/lib64.
ModuleFolder = Annotated[
    str,
    Pattern(
        r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[A-Za-z0-9._+@:/-]*",
        "an absolute folder, or one below a variable that the modules set, such as $CUDA_HOME",
    ),
]
VariableName = Annotated[
    str, Pattern(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
]
# Not longer than what every scheduler takes, and nothing that a directive could end at.
Label = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9_][A-Za-z0-9._:/@+=,*&|!-]{0,127}",
        "a word of letters, digits and . _ : / @ + = , * & | ! -",
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

Scheduler = Literal["slurm", "pbs", "cobalt", "lsf"]
LauncherName = Literal[
    "srun", "mpirun", "mpiexec", "horovodrun-mpi", "horovodrun-gloo", "aprun", "jsrun"
]
Architecture = Literal["x86_64", "ppc64le", "aarch64"]


class RecipeFolders(NamedTuple):
    """Further folders with recipes, which a site file names."""

    recipe_folders: tuple[Folder, ...] = ()


class Trust(NamedTuple):
    """Whose files are used by everybody, as a site file of root says.

    Attributes:
        owners: users, such as the support staff: their recipes, locks, scripts, environments.
        groups: groups whose members trust each other so: HVDENV_HOME may be theirs, too.
    """

    owners: tuple[Label, ...] = ()
    groups: tuple[Label, ...] = ()


class Swap(NamedTuple):
    """One module in the place of another."""

    out: ModuleName
    into: ModuleName


class Modules(NamedTuple):
    """What is loaded, in this order.

    Attributes:
        init: script that defines ``module``, where the machine does not say it itself.
        purge: unload everything first; ``force`` unloads sticky modules too.
        use: folders with modulefiles, in front of those that are there.
        source: scripts of the site that are sourced.
        unload: modules that the site loads by default and that must go.
        swap: modules in the place of others.
        load: modules for the build and for every run.
        build: modules for the build only, such as CMake, loaded after the others.
    """

    init: Folder | None = None
    purge: Literal["no", "yes", "force"] = "yes"
    use: tuple[Folder, ...] = ()
    source: tuple[Folder, ...] = ()
    unload: tuple[ModuleName, ...] = ()
    swap: tuple[Swap, ...] = ()
    load: tuple[ModuleName, ...] = ()
    build: tuple[ModuleName, ...] = ()


class Partition(NamedTuple):
    """Declared facts about the nodes of a partition or queue.

    Attributes:
        arch: architecture of its nodes.
        cores: of one node, as the scheduler counts them; not known if not given.
        gpus: of one node.
        gpu: what the scheduler calls them, where it asks.
        capability: compute capability of an NVIDIA GPU.
        nodes: how many there are.
        memory_gb: of one node.
        max_time: the longest job.
        glibc: version there.
        cuda: newest CUDA that the driver there can run.
    """

    arch: Architecture = "x86_64"
    cores: int | None = None
    gpus: int = 0
    gpu: Label | None = None
    capability: Capability | None = None
    nodes: int | None = None
    memory_gb: int | None = None
    max_time: Duration | None = None
    glibc: Label | None = None
    cuda: Label | None = None


class Job(NamedTuple):
    """What a batch job asks for when nothing else is said.

    Attributes:
        partition: a key of ``partitions``; a queue to PBS, Cobalt and LSF.
        nodes: how many.
        ranks_per_node: one for each GPU, usually.
        cpus_per_rank: cores for each rank.
        gpus_per_node: GPUs for each node.
        gpu_option: how Slurm is asked for them.
        time: wall time.
        name, account, qos, reservation, constraint, comment: as the scheduler has them.
        memory: for each node, such as 250G.
        exclusive: whole nodes.
        output, error: file names, with the scheduler's own placeholders.
        attributes: PBS resources (-l NAME=VALUE) and Cobalt attributes (--attrs).
        select: what PBS adds to each chunk, such as system=polaris.
        place: how PBS places the chunks.
        requires: keys of this table that the site demands.
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
    attributes: dict[VariableName, Label] = {}
    select: Label | None = None
    place: Label | None = None
    requires: tuple[Label, ...] = ()


class Launch(NamedTuple):
    """How ranks are started here.

    Attributes:
        launcher: the one that ``run`` and ``job`` use.
        srun_mpi: what srun is told about MPI (``--mpi``); its own default if not given.
        cpu_bind: how ranks are bound to cores: ``--cpu-bind`` of srun and mpiexec,
            ``-cc`` of aprun, ``-b`` of jsrun.
        threads_per_core: hardware threads of a core that are used (aprun -j).
        exports: variables that are passed to every rank by mpirun (-x).
        mca: parameters of Open MPI (--mca; version 5 leaves -mca unread).
        mpi_threads_disable: the site's fabric needs HOROVOD_MPI_THREADS_DISABLE=1.
    """

    launcher: LauncherName = "mpirun"
    srun_mpi: Literal["pmix", "pmi2", "cray_shasta", "none"] | None = None
    cpu_bind: Label | None = None
    threads_per_core: int | None = None
    exports: tuple[VariableName, ...] = ("PATH", "LD_LIBRARY_PATH")
    mca: dict[McaName, McaValue] = {}
    mpi_threads_disable: bool = False


class Network(NamedTuple):
    """Which interfaces ranks talk over.

    Attributes:
        use: interfaces to use, for NCCL, Gloo and Open MPI's TCP.
        avoid: interfaces to leave alone.
    """

    use: tuple[Interface, ...] = ()
    avoid: tuple[Interface, ...] = ()


class Environment(NamedTuple):
    """Variables that the site or the recipe wants, besides what hvdenv sets itself.

    Attributes:
        build: for the compilation of Horovod.
        run: for every program of the environment; {user} and {jobid} may stand in values.
    """

    build: dict[VariableName, Value] = {}
    run: dict[VariableName, Value] = {}


class Workspace(NamedTuple):
    """A folder that the site's workspace tools allocate (ws_allocate).

    Attributes:
        filesystem: where (-F); the site's default if not given.
        name: of the workspace.
        days: how long it lives.
    """

    name: Label
    days: int
    filesystem: Label | None = None


class Wheels(NamedTuple):
    """Where compiled wheels are kept for later builds, besides the user's own cache.

    Attributes:
        read: folders that others keep wheels in.
        publish: of such folders, the one that builds put their wheels into as well.
        trust: users whose entries there are used, besides the user's own and root's.
        signers: file with the public keys of those whose signature an entry there needs.
        key: what a build signs with: a private key's file, or the public one's of a key
            that an agent holds.
        own_gb: how large the user's own cache may become.
    """

    read: tuple[Folder, ...] = ()
    publish: Folder | None = None
    trust: tuple[Label, ...] = ()
    signers: Folder | None = None
    key: Folder | None = None
    own_gb: float = 10.0


class Locks(NamedTuple):
    """Who vouches for locks.

    Attributes:
        signers: file with the public keys of those whose signature a lock needs.
        key: what ``hvdenv lock --sign`` signs with: a private key's file, or the public one's
            of a key that an agent holds.
    """

    signers: Folder | None = None
    key: Folder | None = None


class Storage(NamedTuple):
    """Where things lie at this site.

    Attributes:
        environments: folder for environments; ``$HVDENV_HOME`` if not given.
        workspace: allocated first; environments lie in it.
        expires_days: files there are purged after so many days without use.
        wheels: where compiled wheels are kept.
        locks: whose signature they need.
    """

    environments: Folder | None = None
    workspace: Workspace | None = None
    expires_days: int | None = None
    wheels: Wheels = Wheels()
    locks: Locks = Locks()


# What `verify --bench` measures, and in which unit.
BANDWIDTH, LATENCY, SPEED = "allreduce bandwidth", "allreduce latency", "training speed"
UNITS = {BANDWIDTH: "GB/s", LATENCY: "us", SPEED: "samples/s"}
# The network without Horovod, between the memories of hosts and between GPUs.
YARDSTICKS = MPI_ALONE, NCCL_ALONE = "MPI alone", "NCCL alone"
# Of messages: what hvdenv/standalone/ranks/bench.py measures.
Size = Literal[
    "1KiB", "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB"
]
SIZES = {name: 1024 * 4**power for power, name in enumerate(get_args(Size))}


class Reference(NamedTuple):
    """How fast something is here: ``verify --bench`` fails what is not.

    Attributes:
        measure: what is measured.
        subject: on what; ``MPI alone`` and, on GPUs, ``NCCL alone`` are the network without Horovod.
        value: how much it is.
        unit: that of the measure.
        size: of the message, for allreduces.
        ranks: it is for this many; for all that are started if not given.
        nodes: it is for ranks on this many hosts; for any number if not given.
        lower: how far below the value is still right, as a part of it: -0.1; any if not given.
        upper: how far above: 0.5; any if not given.
    """

    measure: Literal["allreduce bandwidth", "allreduce latency", "training speed"]
    subject: Literal[
        "torch over MPI", "torch over Gloo", "tensorflow over MPI", "tensorflow over Gloo",
        "MPI alone", "NCCL alone",
    ]  # fmt: skip
    value: float
    unit: Literal["GB/s", "us", "samples/s"]
    size: Size | None = None
    ranks: int | None = None
    nodes: int | None = None
    lower: float | None = None
    upper: float | None = None

    def __str__(self) -> str:
        """Such as ``torch over MPI, 8 ranks, allreduce bandwidth of 64MiB: 5.2 GB/s -10 % +50 %``."""
        counts = ((self.ranks, "ranks"), (self.nodes, "nodes"))
        about = [self.subject, *(f"{number} {what}" for number, what in counts if number)]
        measure = f"{self.measure} of {self.size}" if self.size else self.measure
        bounds = [f"{100 * each:+.4g} %" for each in (self.lower, self.upper) if each is not None]
        return f"{', '.join([*about, measure])}: {self.value:g} {self.unit} {' '.join(bounds)}"

    @property
    def problems(self) -> dict[str, str]:
        """What no single value shows: keys, and what is wrong with them."""
        lower, upper, of_messages = self.lower, self.upper, self.measure != SPEED
        fewest = 2 if self.measure == BANDWIDTH else 1
        wrong = {
            "unit": (
                self.unit != UNITS[self.measure],
                f'{self.measure} is measured in "{UNITS[self.measure]}"',
            ),
            "size": (
                of_messages != (self.size is not None),
                f"{self.measure} {'needs a' if of_messages else 'has no'} size",
            ),
            "subject": (
                self.subject in YARDSTICKS and not of_messages,
                f"{self.subject} trains nothing",
            ),
            "value": (self.value <= 0, "expected a number above 0"),
            "ranks": (
                self.ranks is not None and self.ranks < fewest,
                f"expected {fewest} or more",
            ),
            "nodes": (self.nodes is not None and self.nodes < 1, "expected 1 or more"),
            "lower": (
                not -1 <= (lower or 0) <= 0,
                "expected a part of the value with its sign, such as -0.1 for 10 % less",
            ),
            "upper": (
                (upper or 0) < 0,
                "expected a part of the value, such as 0.5 for 50 % more",
            ),
            "measure": (lower is None and upper is None, "a reference needs lower or upper"),
        }
        return {key: message for key, (is_wrong, message) in wrong.items() if is_wrong}


class Container(NamedTuple):
    """An image with Horovod in it.

    Attributes:
        base: the image to start from, as registries name it; ``hvdenv container`` needs it.
        packages: of the distribution, installed first.
        runtime: the program that runs it on the cluster; ``ch-run`` is Charliecloud's.
        image: its file, or for ``ch-run`` also its folder, at the same path on every node.
            Programs of a recipe that names one run in it.
        binds: folders of the host that programs in it see.
        gpu: how GPUs are passed in.
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

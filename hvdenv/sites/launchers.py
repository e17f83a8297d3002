"""How each launcher starts ranks: facts in, an argument list out.

Where a template of the command line is enough, a launcher is data: in launchers.toml, recipes and
site files. Others are functions from a Launch to a Start, entered in LAUNCHERS.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import decode, parse_toml
from hvdenv.model import cluster, template
from hvdenv.sites.hosts import Host

Kind = Literal["Open MPI", "Intel MPI", "Hydra", "MVAPICH", "Cray MPICH", "unknown"]
Variables = tuple[tuple[str, str], ...]

_LIBRARIES: dict[str, Kind] = {
    "Open MPI": "Open MPI",
    "Intel": "Intel MPI",
    "CRAY MPICH": "Cray MPICH",
    "MVAPICH": "MVAPICH",
    "MPICH": "Hydra",
}
_VERSIONS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\) (?P<version>[\d.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.{0,200}?Version (?P<version>[\d.]+)")),
    ("Hydra", re.compile(r"HYDRA build details:\s+Version:\s+(?P<version>[\d.]+)")),
)
# Names in recipes.
MPI_KINDS: dict[str, Kind] = {
    "openmpi": "Open MPI",
    "intel": "Intel MPI",
    "mpich": "Hydra",
    "mvapich": "MVAPICH",
    "cray-mpich": "Cray MPICH",
}


class MpiVersion(NamedTuple):
    """An MPI implementation as its mpirun names itself; the version may be empty."""

    kind: Kind
    version: str = ""

    @property
    def major(self) -> int:
        """The first number of the version; 0 if unknown."""
        return int(self.version.split(".")[0] or 0)


class Launch(NamedTuple):
    """What a launcher has to know.

    Attributes:
        hosts: where the ranks go, with as many slots as ranks; empty for this host.
        host_list: stands for the hosts with their slots while these are unknown, such as a
            variable in a script.
        host_names: stands for the names of the hosts alone, likewise.
        hostfile: a file with the hosts, for launchers that read one.
        ranks_per_node: the most ranks of a host; 0 if unknown.
        placed: whether hosts are chosen among those of the allocation.
        cpus_per_rank: cores for each rank; 0 if unknown.
        gpus_per_node: GPUs of each host; 0 if unknown.
        network: interfaces for ranks on several hosts.
        mpi_prefix: directory of the MPI, if other hosts do not find it on their PATH.
        nested: whether this process is a job step, which holds the cores.
    """

    program: tuple[str, ...]
    ranks: int
    root: bool = False
    mpi: MpiVersion = MpiVersion("unknown")
    exports: tuple[str, ...] = ()
    start_timeout: int = 60
    hosts: tuple[Host, ...] = ()
    host_list: str = ""
    host_names: str = ""
    hostfile: str = ""
    ranks_per_node: int = 0
    placed: bool = False
    cpus_per_rank: int = 0
    gpus_per_node: int = 0
    settings: cluster.LaunchSettings = cluster.LaunchSettings()
    network: cluster.Network = cluster.Network()
    variables: Variables = ()
    mpi_prefix: str = ""
    nested: bool = False

    @property
    def per_node(self) -> int:
        """The most ranks of a host."""
        return self.ranks_per_node or max((host.slots for host in self.hosts), default=self.ranks)

    @property
    def nodes(self) -> int:
        return len(self.hosts) or -(-self.ranks // self.per_node)

    @property
    def uneven(self) -> bool:
        """Whether a host before the last one does not have the most ranks."""
        return any(host.slots != self.per_node for host in self.hosts[:-1])

    @property
    def remote(self) -> bool:
        """Whether ranks may go to other hosts than this one."""
        return bool(self.hosts or self.host_list or self.hostfile)

    @property
    def with_slots(self) -> str:
        """The hosts in the form for Open MPI and horovodrun: ``gpu32:4,gpu33:4``."""
        return self.host_list or ",".join(f"{host.name}:{host.slots}" for host in self.hosts)


class Start(NamedTuple):
    """A command line, and variables in its environment: those for ranks, too.

    Other users can list command lines, so that no value of a variable may be in one.
    """

    argv: tuple[str, ...]
    env: Variables = ()


class Launcher(NamedTuple):
    """A way to start ranks.

    Attributes:
        controller: what Horovod's ranks negotiate with; empty if they are not Horovod's.
        schedulers: it works only in an allocation of one of these; empty for anywhere.
        across_hosts: the same, if ranks are on several hosts.
        takes_hosts: whether the user can choose the hosts.
        provided: whether the environment provides it, and not the host.
    """

    controller: str
    start: Callable[[Launch], Start]
    schedulers: tuple[str, ...] = ()
    across_hosts: tuple[str, ...] = ()
    takes_hosts: bool = True
    provided: bool = False


def parse_mpi_version(text: str) -> MpiVersion:
    """The implementation in the output of ``mpirun --version``."""
    for kind, pattern in _VERSIONS:
        if found := pattern.search(text):
            return MpiVersion(kind, found["version"].strip("."))
    return MpiVersion("unknown")


def parse_mpi_library(text: str) -> MpiVersion:
    """The implementation in what MPI_Get_library_version says."""
    kind: Kind = next((kind for mark, kind in _LIBRARIES.items() if mark in text), "unknown")
    version = re.search(r"(?<!\d)(\d+(?:\.\d+)+)", text)
    return MpiVersion(kind, version[1] if version else "")


def _srun(launch: Launch) -> Start:
    """Slurm, in the current allocation.

    Raises:
        IncompatibleError: the MPI does not support the PMI.
        UsageError: srun cannot start these numbers of ranks on the hosts.
    """
    mpi = launch.mpi
    if mpi.kind == "Open MPI" and mpi.major >= 5 and launch.settings.srun_mpi == "pmi2":
        raise IncompatibleError(
            f"Open MPI {mpi.version} does not support PMI-2: srun --mpi=pmi2 would start"
            f" {launch.ranks} programs of one rank each",
            where="launch.srun_mpi",
            remedy='set launch.srun_mpi to "pmix", or use the launcher mpirun',
        )
    if launch.placed and launch.uneven:
        raise _uneven("srun", launch)
    return _through_srun(_by_template(_TEMPLATES["srun"], launch))


def _through_srun(start: Start) -> Start:
    """With what makes srun pass on the script's variables, also after sbatch --export=NONE."""
    return start._replace(env=(("SLURM_EXPORT_ENV", "ALL"), *start.env))


def _torchrun(launch: Launch) -> Start:
    """PyTorch's own launcher: one on each host, which srun starts on several hosts.

    Raises:
        UsageError: not the same number of ranks on every host.
    """
    if launch.nodes < 2:
        return _by_template(_TEMPLATES["torchrun"], launch)
    if launch.ranks != launch.nodes * launch.per_node:
        raise _uneven("torchrun", launch)
    gloo = (("GLOO_SOCKET_IFNAME", ",".join(launch.network.use)),) if launch.network.use else ()
    launch = launch._replace(variables=(*gloo, *launch.variables))
    return _through_srun(_by_template(_TEMPLATES["torchrun-by-srun"], launch))


def _horovodrun(controller: Literal["gloo", "mpi"], launch: Launch) -> Start:
    """Horovod's launcher, which starts ranks itself, or by mpirun.

    Raises:
        IncompatibleError: Open MPI would get an argument twice.
    """
    # It sets NCCL_SOCKET_IFNAME from --network-interfaces, and passes on its own variables.
    own = "NCCL_SOCKET_IFNAME" if launch.network.use else ""
    env = tuple(pair for pair in _for_ranks(launch) if pair[0] != own)
    extra: list[str] = []
    if controller == "mpi" and launch.mpi.kind == "Open MPI":
        env = (*env, *_open_mpi_environment(launch))
        mca = {n: v for n, v in _mca(launch).items() if n != "btl_tcp_if_include"}
        if twice := sorted(mca.keys() & {"pml", "btl"}):
            raise IncompatibleError(
                f"horovodrun --mpi sets {twice[0]} itself, and Open MPI accepts it only once",
                where=f"launch.mca.{twice[0]}",
                remedy="use the launcher mpirun, which passes the recipe's value",
            )
        prefix = _prefix(launch)
        extra = [*(("--prefix", prefix) if prefix else ()), *_mca_words(mca)]
    # Horovod puts the arguments of MPI into a shell command unquoted.
    values: template.Values = {"controller": controller, "mpi_args": shlex.join(extra) or None}
    return Start(_argv(_TEMPLATES["horovodrun"], launch, (), values), env)


def _by_template(own: cluster.OwnLauncher, launch: Launch) -> Start:
    """The command of a launcher that is data, for which other variables name the MPI's parameters.

    Raises:
        UsageError: it needs something that is unknown here, or reads hosts from a file only.
    """
    if launch.placed and not launch.hostfile and _host_fields(own) == {"hostfile"}:
        raise UsageError(
            "this launcher reads its hosts from a file, and no file has these hosts and ranks",
            where=own.command.split()[0],
            remedy="give a file with --hostfile, and as many ranks for each host, or omit -n and --hosts",
        )
    variables = (*_for_ranks(launch), *_mca_variables(launch))
    return Start(_argv(own, launch, variables), variables)


def _argv(
    own: cluster.OwnLauncher,
    launch: Launch,
    variables: Variables,
    more: template.Values = MappingProxyType({}),
) -> tuple[str, ...]:
    """A template with the values of a launch.

    Args:
        variables: of the launcher's environment, which it passes on to ranks.
        more: values that only some launchers have.

    Raises:
        UsageError: it needs something that is unknown here.
    """
    exports = [template.words(own.export, {"name": name}) for name in _exported(launch, variables)]
    flags = {name: getattr(launch, name) for name in ("placed", "nested", "uneven")}
    flags["several"] = launch.nodes > 1
    values: template.Values = {
        **{name: "" if holds else None for name, holds in flags.items()},
        "ranks": launch.ranks,
        "nodes": launch.nodes,
        "ranks_per_node": launch.per_node,
        "cpus_per_rank": launch.cpus_per_rank or None,
        "gpus_per_node": launch.gpus_per_node or None,
        "cpus_per_host": launch.cpus_per_rank * launch.per_node or None,
        "srun_mpi": launch.settings.srun_mpi,
        "cpu_bind": launch.settings.cpu_bind,
        "threads_per_core": launch.settings.threads_per_core,
        "start_timeout": launch.start_timeout,
        "hosts": launch.with_slots or None,
        "host_names": launch.host_names or ",".join(each.name for each in launch.hosts) or None,
        "hostfile": launch.hostfile or None,
        "interface": ",".join(launch.network.use) or None,
        "exports": tuple(word for each in exports for word in each),
        "program": launch.program,
        **more,
    }
    try:
        return template.words(own.command, values)
    except template.Missing as missing:
        raise UsageError(
            f"this launcher needs {{{missing}}}, which is unknown here",
            where=own.command.split()[0],
            remedy="give the hosts (--hosts, --hostfile), or put the option into [[...]]",
        ) from None


def _host_fields(own: cluster.OwnLauncher) -> set[str]:
    return {"hosts", "host_names", "hostfile"} & {use.name for use in template.uses(own.command)}


def _from_data(own: cluster.OwnLauncher) -> Launcher:
    return Launcher(
        controller=own.controller,
        start=partial(_by_template, own),
        schedulers=own.schedulers,
        takes_hosts=bool(_host_fields(own)),
    )


def _templates() -> dict[str, cluster.OwnLauncher]:
    text = read_text(Path(__file__).with_name("launchers.toml"), OWN)
    return decode(dict[str, cluster.OwnLauncher], parse_toml(text), lenient=True)


_TEMPLATES = _templates()


def _by_mpi(name: str, launch: Launch) -> Start:
    """The MPI's own mpirun, by either of its names; on Cray machines mpiexec is that of PALS.

    Raises:
        IncompatibleError: hvdenv does not know how this mpirun starts ranks on other hosts.
    """
    kind = launch.mpi.kind
    if (name, kind) == ("mpiexec", "Cray MPICH"):
        return _by_template(_TEMPLATES["pals"], launch)
    if kind == "Open MPI":
        variables, mca = _for_ranks(launch), tuple(_mca_words(_mca(launch)))
        own = _TEMPLATES["open-mpi-5" if launch.mpi.major >= 5 else "open-mpi"]
        values = {"mpirun": name, "mca": mca, "mpi_prefix": _prefix(launch) or None}
        env = (*variables, *_open_mpi_environment(launch))
        return Start(_argv(own, launch, variables, values), env)
    variables = _for_ranks(launch)
    if kind in ("Hydra", "MVAPICH", "Intel MPI"):
        if launch.uneven and kind == "Intel MPI" and not launch.hostfile:
            raise _uneven(kind, launch)
        return Start(_argv(_TEMPLATES["hydra"], launch, (), {"mpirun": name}), variables)
    if kind == "Cray MPICH" or launch.remote:
        raise IncompatibleError(
            f"hvdenv does not know how the mpirun of this MPI ({kind}) starts ranks on other hosts",
            remedy="use the launcher srun or mpiexec on a Cray machine; elsewhere state the MPI in"
            " the recipe (mpi.kind)",
        )
    return Start((name, "-np", str(launch.ranks), *launch.program), variables)


LAUNCHERS: dict[str, Launcher] = {
    "mpirun": Launcher("MPI", partial(_by_mpi, "mpirun")),
    "mpiexec": Launcher("MPI", partial(_by_mpi, "mpiexec")),
    "srun": _from_data(_TEMPLATES["srun"])._replace(start=_srun),
    "aprun": _from_data(_TEMPLATES["aprun"]),
    "horovodrun-gloo": Launcher("Gloo", partial(_horovodrun, "gloo"), provided=True),
    "horovodrun-mpi": Launcher("MPI", partial(_horovodrun, "mpi"), provided=True),
    "torchrun": Launcher("", _torchrun, across_hosts=("slurm",), provided=True),
}


def named(name: str, own: Mapping[str, cluster.OwnLauncher]) -> Launcher:
    """A launcher: one of a recipe or site file, or one of hvdenv."""
    return _from_data(own[name]) if name in own else LAUNCHERS[name]


def _for_ranks(launch: Launch) -> Variables:
    """Variables for ranks; the user's override the others."""
    variables: dict[str, str] = {}
    if launch.settings.mpi_threads_disable:
        variables["HOROVOD_MPI_THREADS_DISABLE"] = "1"
    if launch.mpi.kind == "MVAPICH":
        # It would bind every rank, with all threads of its framework, to one core.
        variables["MV2_ENABLE_AFFINITY"] = "0"
    use, avoid = launch.network.use, launch.network.avoid
    if launch.nodes > 1 and (use or avoid):
        variables["NCCL_SOCKET_IFNAME"] = ",".join(use) if use else "^" + ",".join(avoid)
    variables.update(launch.variables)
    return tuple(variables.items())


def _mca(launch: Launch) -> dict[str, str]:
    """Parameters of Open MPI: those for the network, unless the recipe sets them."""
    found: dict[str, str] = {}
    use, avoid = launch.network.use, launch.network.avoid
    # Open MPI 5 hangs if its launcher may not use lo.
    layers = ("btl", "oob") if use or launch.mpi.major < 5 else ("btl",)
    for layer in layers if launch.nodes > 1 else ():
        if any(name.startswith(f"{layer}_tcp_if_") for name in launch.settings.mca):
            continue
        if use:
            found[f"{layer}_tcp_if_include"] = ",".join(use)
        elif avoid:
            # This replaces Open MPI's default list, which has the loopback.
            found[f"{layer}_tcp_if_exclude"] = ",".join(dict.fromkeys((*avoid, "lo")))
    return {**found, **launch.settings.mca}


def _mca_words(mca: dict[str, str]) -> list[str]:
    return [word for name, value in mca.items() for word in ("--mca", name, value)]


def _mca_variables(launch: Launch) -> Variables:
    """The same for ranks that other launchers start."""
    if launch.mpi.kind != "Open MPI":
        return ()
    return tuple(
        (f"OMPI_MCA_{name}", value)
        for name, value in _mca(launch).items()
        if not name.startswith("oob_")
    )


def _prefix(launch: Launch) -> str:
    """--prefix for Open MPI 4 in an environment; version 5 finds itself on other hosts."""
    return launch.mpi_prefix if launch.remote and launch.mpi.major < 5 else ""


def puts_mpi_first(name: str, launch: Launch) -> bool:
    """Whether the directory of MPI is first in PATH on other hosts: `mpirun --prefix`."""
    by_mpirun = name in ("mpirun", "mpiexec", "horovodrun-mpi")
    return by_mpirun and launch.mpi.kind == "Open MPI" and bool(_prefix(launch))


def _open_mpi_environment(launch: Launch) -> Variables:
    """On this host, waiting ranks yield to others, and no ssh is required; root may start ranks."""
    five = launch.mpi.major >= 5
    found = {}
    if not launch.remote:
        found["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if not five:
            # Version 4 refuses to start where it finds none of these, and runs none of them here.
            found["OMPI_MCA_plm_rsh_agent"] = "ssh:rsh:false"
    if launch.root:
        for prefix in ("OMPI", "PRTE") if five else ("OMPI",):
            found[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
            found[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return tuple(found.items())


def _exported(launch: Launch, variables: Variables) -> tuple[str, ...]:
    """Names of the variables that a launcher passes on from its environment."""
    return tuple(dict.fromkeys((*launch.exports, *(name for name, _ in variables))))


def _uneven(name: str, launch: Launch) -> UsageError:
    return UsageError(
        f"{name} starts the same number of ranks on each host, which is impossible for"
        f" {launch.ranks} ranks on {launch.nodes} hosts",
        where="--hosts",
        remedy="give all hosts the same number of slots, or use another launcher",
    )

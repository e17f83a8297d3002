"""Where ranks are placed, and which variables of the user's shell reach them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.base.masking import is_secret
from hvdenv.base.schema import nearest
from hvdenv.model.dialect import shipped
from hvdenv.model.recipe import Recipe
from hvdenv.sites.allocation import Allocation
from hvdenv.sites.hosts import Host, distribute, short
from hvdenv.sites.launchers import LAUNCHERS, MPI_KINDS, Launch, MpiVersion, named

# Two hosts and several frameworks take longer to start than horovodrun waits by default.
START_SECONDS = 120


class Requested(NamedTuple):
    """What the user requests.

    Attributes:
        ranks: how many; None for as many as there is room for.
        hosts: where; empty for the allocation's.
        launcher: its name; empty for the recipe's.
    """

    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: str = ""
    launcher: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    exports: tuple[str, ...] = ()


def choose_launcher(recipe: Recipe, requested: str = "") -> str:
    """The name of the requested launcher; or the recipe's, or one for Horovod's controllers.

    Raises:
        UsageError: there is no such launcher.
        IncompatibleError: Horovod lacks the requested launcher's controller.
    """
    name = requested or recipe.launch.launcher
    own = recipe.launch.launchers
    if name not in LAUNCHERS and name not in own:
        raise UsageError(
            f"unknown launcher {name}{nearest(name, (*own, *LAUNCHERS))}",
            where="--launcher",
            remedy=f"launchers: {', '.join((*own, *LAUNCHERS))}",
        )
    controller = named(name, own).controller.lower()
    if not controller or controller in recipe.horovod.controllers:
        return name
    if not requested:
        return "horovodrun-gloo" if "gloo" in recipe.horovod.controllers else "mpirun"
    raise IncompatibleError(
        f"this Horovod has no {controller}: ranks that {name} starts would not find each other",
        where="--launcher",
        remedy=f"use --launcher {choose_launcher(recipe)}",
    )


def recipe_mpi(recipe: Recipe) -> MpiVersion:
    """The recipe's MPI; its version may be empty."""
    if recipe.mpi is None:
        return MpiVersion("unknown")
    return MpiVersion(MPI_KINDS[recipe.mpi.kind], recipe.mpi.version or "")


def place(
    recipe: Recipe, requested: Requested, allocation: Allocation, *, root: bool = False
) -> Launch:
    """Find hosts for ranks, whose program is not known yet.

    Raises:
        UsageError: there is no room for so many, or a host is not in the allocation.
    """
    each = recipe.job.ranks_per_node
    usual = _usual_hosts(each, allocation)
    named = _requested_hosts(each, requested, usual)
    whole, file = named or usual, requested.hostfile if named else allocation.hostfile
    ranks = requested.ranks or _room(whole) or allocation.nodes * each or 1
    hosts = filled(named, ranks) if named else _spread(usual, ranks)
    # The launcher need not be told what is all of the allocation.
    default = ranks == _room(usual) and all(host.slots for host in allocation.hosts)
    fewer = (allocation.counts_tasks and not default) or len(hosts) < len(whole)
    most = max((host.slots for host in hosts), default=min(each, ranks) if allocation.nodes else 0)
    even = len(hosts) == len(whole) and all(host.slots == most for host in hosts)
    launch = Launch(
        program=(),
        ranks=ranks,
        root=root,
        mpi=recipe_mpi(recipe),
        start_timeout=START_SECONDS,
        hosts=hosts,
        hostfile=file if hosts and even else "",
        ranks_per_node=most,
        placed=bool(named) or (bool(hosts) and fewer),
        gpus_per_node=allocation.gpus_per_node or recipe.job.gpus_per_node or 0,
        settings=recipe.launch,
        network=recipe.network,
        variables=requested.variables,
        nested=allocation.nested,
    )
    if not (hosts or allocation.nodes):
        return launch
    return launch._replace(cpus_per_rank=_cpus_per_rank(launch, recipe, allocation))


def _room(hosts: Iterable[Host]) -> int:
    return sum(host.slots for host in hosts)


def _usual_hosts(each: int, allocation: Allocation) -> tuple[Host, ...]:
    """The hosts of the allocation, with as many ranks as they get by default."""

    def usual(host: Host) -> int:
        if allocation.counts_tasks:
            return host.slots or allocation.gpus_per_node or each
        return min(host.slots or each, each)

    return tuple(host._replace(slots=usual(host)) for host in allocation.hosts)


def _requested_hosts(each: int, requested: Requested, there: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts that the user names, in their order; none if the user names none.

    Args:
        there: those of the allocation.
    """
    usual = {short(host.name): host.slots for host in there}
    foreign = [host.name for host in requested.hosts if usual and short(host.name) not in usual]
    if foreign:
        raise UsageError(
            f"{foreign[0]} is not in this allocation",
            where="--hosts",
            remedy=f"its hosts: {', '.join(host.name for host in there)}",
        )
    hosts, ranks = requested.hosts, requested.ranks or 0
    if hosts and not hosts[0].slots:
        slots = -(-ranks // len(hosts))
        hosts = tuple(
            host._replace(slots=slots or usual.get(short(host.name), each)) for host in hosts
        )
    if hosts and ranks > _room(hosts):
        raise UsageError(
            f"{ranks} ranks do not fit into {_room(hosts)} slots",
            where="--hosts",
            remedy=f"give the hosts {ranks} slots in total"
            + (f", or use -n {_room(hosts)}" if _room(hosts) > 1 else f": {hosts[0].name}:{ranks}"),
        )
    return hosts


def _spread(hosts: tuple[Host, ...], ranks: int) -> tuple[Host, ...]:
    """Ranks spread evenly on hosts, where the scheduler may allow more than usual."""
    if hosts and ranks > _room(hosts):
        hosts = tuple(host._replace(slots=-(-ranks // len(hosts))) for host in hosts)
    return distribute(hosts, ranks)


def filled(hosts: tuple[Host, ...], ranks: int) -> tuple[Host, ...]:
    """Ranks on hosts in their order, as mpirun places them."""
    filled = []
    for host in hosts:
        slots = min(host.slots, ranks)
        ranks -= slots
        if slots:
            filled.append(host._replace(slots=slots))
    return tuple(filled)


def _cpus_per_rank(launch: Launch, recipe: Recipe, allocation: Allocation) -> int:
    """The requested or usual number, limited to what the allocation has for all ranks."""
    requested, usual = allocation.cpus_per_rank, recipe.job.cpus_per_rank or 0
    if not allocation.cpus:
        return requested or usual
    room = min(allocation.cpus) // launch.per_node
    return min(requested, room) if requested else usual if usual <= room else 0


def overload(launch: Launch, allocation: Allocation) -> str:
    """Hosts that get more ranks than the allocation has processors there; empty if none does."""
    cpus = dict(zip((short(each.name) for each in allocation.hosts), allocation.cpus, strict=False))
    full = [
        f"{each.name} ({each.slots} ranks, {have} processors)"
        for each in launch.hosts
        if each.slots > (have := cpus.get(short(each.name), each.slots))
    ]
    if not full:
        return ""
    return f"ranks share the processors of {', '.join(full)}, and will be slow: request more, or fewer ranks (-n)"


def refuse_unfit(
    name: str, recipe: Recipe, requested: Requested, scheduler: str | None, hosts: int, words: str
) -> None:
    """Check that a launcher runs under the allocation's scheduler and on so many hosts.

    Args:
        words: what names the recipe on a command line.

    Raises:
        UsageError: it cannot.
    """
    launcher = named(name, recipe.launch.launchers)
    if requested.hosts and not launcher.takes_hosts:
        raise UsageError(
            f"{name} chooses the hosts itself, in the order of the allocation",
            where="--hosts",
            remedy="omit it, and give the number of ranks with -n",
        )
    across = launcher.across_hosts if hosts > 1 else ()
    schedulers = across or launcher.schedulers
    if schedulers and scheduler not in schedulers:
        request = f"request one (hvdenv shell {words} --nodes 1, or hvdenv job), or "
        request = "" if scheduler else request
        raise UsageError(
            f"{name} starts ranks {'on several hosts ' if across else ''}only in an allocation of"
            f" {' or '.join(schedulers)}; this is"
            f" {f'one of {scheduler}' if scheduler else 'no allocation'}",
            where="--launcher",
            remedy=f"{request}use another launcher such as --launcher mpirun",
        )


# Variables that users set for ranks.
FOR_RANKS = re.compile(
    r"(HOROVOD|NCCL|RCCL|GLOO|CCL|UCX|FI|PSM2?|OMP|KMP|GOMP|MKL|OPENBLAS|TF|XLA|TORCH|PYTORCH"
    r"|MIOPEN|ROCR|HSA|MPICH|MV2|I_MPI)_\w+"
)
# Other variables that may be on command lines that other users can read.
_FOR_LAUNCHERS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|PWD|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|HOSTNAME"
    r"|SSH_AUTH_SOCK|KRB5CCNAME|XDG_RUNTIME_DIR|PYTHONNOUSERSITE|PYTHONUNBUFFERED|SHLVL|OLDPWD|_"
    r"|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    r"|CUDA_VISIBLE_DEVICES"
    r"|(OMPI|PRTE|PMIX)_(MCA_\w+|ALLOW_RUN_AS_ROOT(_CONFIRM)?)"
)
# Other variables that change the results or the data path of ranks, or by which Python, the
# dynamic loader, MPI and libraries load other code.
_FOR_PROGRAMS = re.compile(
    r"LD_\w+|GLIBC_TUNABLES|GCONV_PATH|LOCPATH|MALLOC_\w+|OPAL_\w+|(PMIX|PRTE)_(INSTALL_)?PREFIX"
    r"|(OMPI|PRTE|PMIX)_MCA_\w+|(CUDA|CUBLAS|CUDNN)_(?!VISIBLE_DEVICES)\w+|NVIDIA_\w+|KERAS_\w+"
    r"|FLEXIBLAS\w*|OCL_\w+|TRITON_\w+|EBPYTHONPREFIXES|COVERAGE_PROCESS_START"
    r"|_?PYTHON(?!NOUSERSITE|UNBUFFERED|DONTWRITEBYTECODE|IOENCODING|UTF8|FAULTHANDLER)\w+"
)
# Variables of module systems themselves.
_OF_MODULES = re.compile(r"_.*|LMOD_\w+|MODULE\w+|LOADEDMODULES\w*|BASH_ENV")


def influences(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables except PATH that change the results or the data path of ranks."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if FOR_RANKS.fullmatch(name) or _FOR_PROGRAMS.fullmatch(name)
    }


def shell_variables(
    environ: Mapping[str, str], *, clean: bool = False, kept: Collection[str] = ()
) -> dict[str, str]:
    """The variables of the user's shell that run, shell and the ranks of verify start with."""
    dropped = {*influences(environ)} - {*kept} if clean else set()
    return {name: value for name, value in environ.items() if name not in dropped}


def hidden_variables(
    launcher: str, names: Iterable[str], activated: Collection[str], *, patched: bool
) -> tuple[str, ...]:
    """Variables to remove, since the launcher would expose them on command lines.

    Args:
        activated: names of variables that the environment sets.
        patched: whether Horovod has the patch that keeps them off command lines.
    """
    if patched or launcher != "horovodrun-gloo":
        return ()
    return tuple(name for name in names if name not in activated and not may_be_seen(name))


def refuse_exposed(launcher: str, requested: Requested, *, patched: bool, words: str) -> None:
    """Check that a launcher does not show a requested variable to other users; see hidden_variables().

    Args:
        words: what names the recipe on a command line.

    Raises:
        UsageError: it does.
    """
    names = (*requested.exports, *(name for name, _ in requested.variables))
    for name in hidden_variables(launcher, names, (), patched=patched):
        raise UsageError(
            f"horovodrun of this Horovod would show the value of {name} to every user of the hosts,"
            " on command lines",
            where=f"-x {name}",
            remedy=f"build Horovod with hvdenv's patches (hvdenv build {words} --rebuild), or use"
            " --launcher mpirun",
        )


def exported_variables(
    site: Sequence[str],
    activated: Collection[str],
    environ: Mapping[str, str],
    requested: Requested,
) -> tuple[str, ...]:
    """Names of the variables that ranks on other hosts get from this process.

    If a recipe has no exports, programs must not get the variables of this host.

    Args:
        site: the recipe's names (launch.exports).
        activated: names that activate.sh sets.
    """
    known = {*activated, *environ}
    activated = sorted(name for name in activated if not _OF_MODULES.fullmatch(name))
    own = [name for name in environ if FOR_RANKS.fullmatch(name)]
    given = {name for name, _ in requested.variables}
    names = [*site, *(activated if site else ()), *sorted(own), *requested.exports]
    return tuple(n for n in dict.fromkeys(names) if n in known and n not in given)


@cache
def _of_schedulers() -> tuple[str, ...]:
    """How variables of schedulers begin."""
    return tuple(prefix for each in shipped().values() for prefix in each.variables)


def may_be_seen(name: str) -> bool:
    """Whether a variable may be on command lines on other hosts."""
    listed = FOR_RANKS.fullmatch(name) or _FOR_LAUNCHERS.fullmatch(name)
    return bool(listed or name.startswith(_of_schedulers())) and not is_secret(name)

"""Where ranks go: recipes, allocations and requested."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.environments.activation import UNSET
from hvdenv.model import cluster
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.sites.allocation import Allocation
from hvdenv.sites.hosts import Host
from hvdenv.sites.launchers import Launch
from hvdenv.sites.placement import (
    Requested,
    choose_launcher,
    exported_variables,
    hidden_variables,
    influences,
    may_be_seen,
    overload,
    place,
    refuse_unfit,
    shell_variables,
)
from hvdenv.verification.rank_start import variables_for_ranks

LOCAL = load_recipe("local").recipe
SITE = LOCAL._replace(
    job=cluster.Job(nodes=4, ranks_per_node=8, cpus_per_rank=4, gpus_per_node=8),
    launch=cluster.LaunchSettings("srun"),
)
TWO = (Host("gpu32"), Host("gpu33"))


def slurm(hosts: tuple[Host, ...] = TWO, **more: Any) -> Allocation:
    return Allocation("slurm", "7", hosts, len(hosts), counts_tasks=True, **more)


ASKED = slurm((Host("gpu32", 4), Host("gpu33", 4)), cpus=(16, 16))


def placed(
    allocation: Allocation = Allocation(),  # noqa: B008
    recipe: Recipe = SITE,
    **requested: Any,
) -> Launch:
    return place(recipe, Requested(**requested), allocation)


def test_all_that_was_asked_for() -> None:
    """The launcher need not be told what is all of the allocation."""
    here = placed(ranks=3)
    assert (here.ranks, here.remote) == (3, False)
    launch = placed(ASKED)
    assert (launch.ranks, launch.hosts, launch.placed) == (8, ASKED.hosts, False)
    assert launch.cpus_per_rank == 4
    fewer = placed(ASKED, ranks=3)
    assert ([host.slots for host in fewer.hosts], fewer.placed) == ([2, 1], True)


# Without numbers of tasks, Slurm counts one processor on each host.
SMALL = slurm(cpus=(1, 1))
EIGHT = (Host("gpu32", 4), Host("gpu33", 4))


@pytest.mark.parametrize(
    ("allocation", "requested", "ranks"),
    [
        # GPUs of the allocation, or what is usual at the site.
        (slurm(gpus_per_node=2), {}, 4),
        (slurm(), {}, 16),
        (Allocation("pbs", "7", TWO, 2, "/n"), {}, 16),
        (Allocation("pbs", "7", (Host("a", 2), Host("b", 2)), 2, "/n"), {}, 4),
        # LSF and Torque write as many lines as there are processors.
        (Allocation("lsf", "7", (Host("a", 42), Host("b", 42)), 2), {}, 16),
        (Allocation("cobalt", "7", (), 3), {}, 24),
        (Allocation(), {"hosts": EIGHT}, 8),
        (Allocation(), {"hosts": TWO}, 16),
        (ASKED, {"hosts": TWO}, 8),
        (ASKED, {"hosts": (Host("gpu32.site.org", 2),)}, 2),
        (SMALL, {"ranks": 2}, 2),
    ],
)
def test_how_many_there_is_room_for(
    allocation: Allocation, requested: dict[str, Any], ranks: int
) -> None:
    assert placed(allocation, **requested).ranks == ranks


@pytest.mark.parametrize(
    ("allocation", "requested", "said"),
    [
        (Allocation(), {"hosts": EIGHT, "ranks": 9}, "9 ranks do not fit into 8 slots"),
        # One rank would prove no collective operation.
        (Allocation(), {"hosts": (Host("a", 1),), "ranks": 2}, "2 slots in total: a:2$"),
        (ASKED, {"hosts": (Host("gpu40", 2),)}, "gpu40 is not in this allocation\n.*gpu32, gpu33"),
    ],
)
def test_what_there_is_no_room_for(
    allocation: Allocation, requested: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        placed(allocation, **requested)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(32, ""), (33, "gpu32 (17 ranks, 16 processors)"), (64, "gpu33 (32 ranks, 16 processors)")],
)
def test_more_ranks_than_processors_are_named(ranks: int, said: str) -> None:
    found = overload(placed(ASKED, ranks=ranks), ASKED)
    assert said in found and bool(said) == bool(found)


def test_requested_hosts_and_files_of_hosts() -> None:
    launch = placed(hosts=EIGHT)
    assert (launch.placed, launch.per_node) == (True, 4)
    assert placed(hosts=EIGHT, ranks=5).hosts == (Host("gpu32", 4), Host("gpu33", 1))
    assert [host.slots for host in placed(hosts=TWO, ranks=6).hosts] == [3, 3]
    assert placed(hosts=TWO, hostfile="/f").hostfile == "/f"
    assert placed(hosts=TWO, hostfile="/f", ranks=3).hostfile == ""
    # The scheduler's file may name more hosts, or would have other numbers on them.
    pbs = Allocation("pbs", "7", TWO, 2, "/n")
    files = {ranks: placed(pbs, ranks=ranks).hostfile for ranks in (None, 1, 3, 4)}
    assert files == {None: "/n", 1: "", 3: "", 4: "/n"}


@pytest.mark.parametrize(
    ("cpus", "asked", "ranks", "each"),
    [
        ((32,), 0, 8, 4),  # as usual
        ((16,), 0, 8, 0),  # not so many are there
        ((16,), 2, 8, 2),  # as asked for
        ((16,), 16, 4, 4),  # asked for one rank with all
        ((), 6, 8, 6),
        ((), 0, 8, 4),
    ],
)
def test_cores_for_a_rank(cpus: tuple[int, ...], asked: int, ranks: int, each: int) -> None:
    allocation = slurm((Host("gpu32"),), cpus=cpus, cpus_per_rank=asked, gpus_per_node=8)
    assert placed(allocation, ranks=ranks).cpus_per_rank == each


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 64)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 99)),
    st.integers(0, 8),
)
def test_slots_are_as_many_as_ranks(
    each: list[tuple[int, int]], ranks: int | None, gpus: int
) -> None:
    hosts = tuple(Host(f"n{number}", slots) for number, (slots, _) in enumerate(each))
    allocation = slurm(hosts, cpus=tuple(cpus for _, cpus in each), gpus_per_node=gpus)
    try:
        launch = placed(allocation, ranks=ranks)
    except UsageError:
        return
    assert sum(host.slots for host in launch.hosts) == launch.ranks == (ranks or launch.ranks)
    assert max(host.slots for host in launch.hosts) == launch.per_node
    assert launch.cpus_per_rank * launch.per_node <= max(cpus for _, cpus in each)


def test_launchers_that_the_recipe_or_the_site_does_not_allow() -> None:
    gloo, mpi = (
        SITE._replace(horovod=SITE.horovod._replace(controllers=(each,)))
        for each in ("gloo", "mpi")
    )
    assert (choose_launcher(SITE), choose_launcher(SITE, "mpirun")) == ("srun", "mpirun")
    assert choose_launcher(gloo) == "horovodrun-gloo"
    with pytest.raises(UsageError, match="unknown launcher mpirum"):
        choose_launcher(SITE, "mpirum")
    with pytest.raises(IncompatibleError, match="would not find each other"):
        choose_launcher(gloo, "srun")
    with pytest.raises(IncompatibleError, match="has no gloo"):
        choose_launcher(mpi, "horovodrun-gloo")
    refuse_unfit("torchrun", SITE, Requested(), "slurm", 2, "x")
    refuse_unfit("torchrun", SITE, Requested(), "pbs", 1, "x")
    with pytest.raises(UsageError, match="torchrun starts ranks on several hosts"):
        refuse_unfit("torchrun", SITE, Requested(), "pbs", 2, "x")


# ---------------------------------------------------------------- variables


def test_variables_for_other_hosts() -> None:
    environ = dict.fromkeys(
        "HOME LD_LIBRARY_PATH HOROVOD_TIMELINE OMP_NUM_THREADS AWS_SECRET_ACCESS_KEY DATA MINE".split(),
        "1",
    )
    activated = {"PATH", "VIRTUAL_ENV", "CUDA_HOME", "LMOD_CMD", "_ModuleTable001_", "MODULEPATH"}
    requested = Requested(variables=(("OMP_NUM_THREADS", "4"),), exports=("MINE", "NOT_SET"))
    assert exported_variables(SITE.launch.exports, activated, environ, requested) == tuple(
        "PATH LD_LIBRARY_PATH CUDA_HOME VIRTUAL_ENV HOROVOD_TIMELINE MINE".split()
    )
    # Programs that get nothing of the host get what is meant for ranks.
    assert exported_variables((), {"PATH"}, {"HOROVOD_TIMELINE": "1", "A": "1"}, Requested()) == (
        "HOROVOD_TIMELINE",
    )
    assert exported_variables((), {"PATH"}, {"A": "1"}, Requested(exports=("A",))) == ("A",)


TELLING = dict.fromkeys(
    "LD_PRELOAD LD_LIBRARY_PATH HOROVOD_FUSION_THRESHOLD NCCL_ALGO OMPI_MCA_pml OPAL_PREFIX"
    " OMP_NUM_THREADS CUDA_LAUNCH_BLOCKING PYTHONHASHSEED".split(),
    "1",
)
OTHERS = "HOME PATH MINE CUDA_VISIBLE_DEVICES SLURM_JOB_ID PYTHONNOUSERSITE SSH_AUTH_SOCK"
SHELL = {**TELLING, **dict.fromkeys(OTHERS.split(), "1")}


def test_variables_that_change_results() -> None:
    assert influences(SHELL) == TELLING
    assert shell_variables(SHELL) == SHELL
    assert shell_variables(SHELL, clean=True).keys() == {*OTHERS.split()}
    kept = shell_variables(SHELL, clean=True, kept=("NCCL_ALGO",))
    assert kept.keys() & TELLING.keys() == {"NCCL_ALGO"}


# By each of them, a program of the ranks loads other code: one or two of each kind. The sources:
# `python --help-env` of 3.14, ld.so(8), opal/mca/installdirs of Open MPI, PMIx and PRRTE, FlexiBLAS,
# EasyBuild.
LOADING = {
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHON_FROZEN_MODULES", "COVERAGE_PROCESS_START",
    "EBPYTHONPREFIXES", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "GLIBC_TUNABLES", "GCONV_PATH",
    "LOCPATH", "OPAL_PREFIX", "OPAL_LIBDIR", "PMIX_INSTALL_PREFIX", "PRTE_PREFIX",
    "OMPI_MCA_mca_base_component_path", "PRTE_MCA_mca_base_component_path", "I_MPI_OFI_LIBRARY",
    "MPICH_OFI_NIC_POLICY", "UCX_MODULE_DIR", "FI_PROVIDER_PATH", "NCCL_NET_PLUGIN",
    "CUDA_INJECTION64_PATH", "OCL_ICD_VENDORS", "OMP_TOOL_LIBRARIES", "FLEXIBLAS",
    "TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "KERAS_BACKEND", "XLA_FLAGS",
    "TRITON_LIBCUDA_PATH", "HOROVOD_FUSION_THRESHOLD",
}  # fmt: skip


@pytest.mark.parametrize("launcher", ["mpirun", "srun", "horovodrun-gloo"])
@pytest.mark.parametrize("unset", [(), UNSET], ids=["any", "built"])
def test_what_loads_other_code_is_named_and_reaches_both_or_none(
    launcher: str, unset: tuple[str, ...]
) -> None:
    shell = {"PATH": "/bin", **dict.fromkeys(LOADING, "/x")}
    assert influences(shell).keys() == LOADING
    activated = {"PATH", *({"PYTHONPATH"} - {*unset})}
    of_verify = variables_for_ranks(launcher, shell, activated, unset).keys()
    away = hidden_variables(launcher, shell, activated, patched=False)
    of_run = {*shell_variables(shell)} - {*unset, *away}
    assert of_verify == of_run
    patched = variables_for_ranks(launcher, shell, activated, unset, patched=True)
    assert patched.keys() == {*shell} - {*unset}
    assert ("LD_PRELOAD" in away) == bool(away) == (launcher == "horovodrun-gloo")
    assert "HOROVOD_FUSION_THRESHOLD" not in away
    # The ranks of verify write no file of the user.
    timeline = {**shell, "HOROVOD_TIMELINE": "t.json"}
    assert variables_for_ranks(launcher, timeline, activated, unset).keys() == of_verify
    assert shell_variables(shell, clean=True) == {"PATH": "/bin"}


def test_what_may_stand_on_command_lines() -> None:
    seen = "PATH HOROVOD_LOG_LEVEL SLURM_JOB_ID LC_ALL OMPI_MCA_btl".split()
    hidden = "AWS_SECRET_ACCESS_KEY GITHUB_TOKEN HOROVOD_API_KEY TF_TOKEN DATA".split()
    assert list(filter(may_be_seen, [*seen, *hidden])) == seen

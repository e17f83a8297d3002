"""Argument lists of launchers, and the words that start programs in an image."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.model import cluster
from hvdenv.model.cluster import Container
from hvdenv.model.layers import load_recipe
from hvdenv.sites.container import inside, recipe_image, start_in_image
from hvdenv.sites.hosts import Host
from hvdenv.sites.launchers import LAUNCHERS, Launch, MpiVersion, Start, parse_mpi_version
from tests.support.files import programs

PROGRAM = ("/env/bin/python", "rank.py", "two words", "$HOME;")
TRAIN = ("python", "train_hvd.py")
GPU32_33 = (Host("gpu32", 4), Host("gpu33", 4))
FOUR, FIVE = MpiVersion("Open MPI", "4.1.8"), MpiVersion("Open MPI", "5.0.11")
UNKNOWN_MPI = MpiVersion("unknown")

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n": (
        MpiVersion("Open MPI", "5.0.11")
    ),
    "mpirun (Open MPI) 3.1.0rc2\n": MpiVersion("Open MPI", "3.1.0"),
    "mpirun (OpenRTE) 1.10.7\n": MpiVersion("Open MPI", "1.10.7"),
    "mpirun (IBM Spectrum MPI) 10.3.1.02rtm0\n": MpiVersion("unknown"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 20221129 (id: 339ec755a1)\n"
    "Copyright 2003-2022, Intel Corporation.\n": MpiVersion("Intel MPI", "2021.8"),
    "HYDRA build details:\n    Version:                                 4.1.1\n"
    "    Release Date:                            Wed Feb  1\n": MpiVersion("Hydra", "4.1.1"),
    "srun: slurm 23.02\n": MpiVersion("unknown"),
}


def launch(mpi: MpiVersion = UNKNOWN_MPI, *, ranks: int = 2, root: bool = False) -> Launch:
    """On this host, as verify does it."""
    return Launch(PROGRAM, ranks, root, mpi, ("PATH", "LD_LIBRARY_PATH"), 300)


def train(mpi: MpiVersion = FOUR, hosts: tuple[Host, ...] = GPU32_33, **more: object) -> Launch:
    """On hosts, as run does it."""
    ranks = sum(host.slots for host in hosts)
    return Launch(TRAIN, ranks, mpi=mpi, hosts=hosts)._replace(**more)  # type: ignore[arg-type]


def started(name: str, what: Launch) -> Start:
    return LAUNCHERS[name].start(what)


def words(line: str) -> tuple[str, ...]:
    return tuple(shlex.split(line))


@pytest.mark.parametrize(("text", "mpi"), VERSIONS.items(), ids=[str(m) for m in VERSIONS.values()])
def test_mpi_version(text: str, mpi: MpiVersion) -> None:
    assert parse_mpi_version(text) == mpi


UNBOUND = "--bind-to none -x PATH -x LD_LIBRARY_PATH"


@pytest.mark.parametrize(
    ("mpi", "ranks", "between"),
    [
        ("Open MPI 4.1.4", 3, f"--oversubscribe {UNBOUND}"),
        ("Open MPI 5.0.11", 3, f"--map-by :OVERSUBSCRIBE {UNBOUND}"),
        # Hydra passes everything on by itself; with -genvlist, that and nothing else.
        ("Hydra 4.1.1", 3, ""),
        ("unknown ", 3, ""),
    ],
)
def test_mpirun_on_this_host(mpi: str, ranks: int, between: str) -> None:
    kind, _, version = mpi.rpartition(" ")
    start = started("mpirun", launch(MpiVersion(kind, version), ranks=ranks))  # type: ignore[arg-type]
    assert start.argv == ("mpirun", "-np", str(ranks), *between.split(), *PROGRAM)


@pytest.mark.parametrize(
    ("mpi", "prefixes"),
    [
        (MpiVersion("Open MPI", "4.1.4"), ["OMPI"]),
        (MpiVersion("Open MPI", "5.0.11"), ["OMPI", "PRTE"]),
        (MpiVersion("Hydra", "4.1.1"), []),
    ],
)
def test_root_may_start_ranks(mpi: MpiVersion, prefixes: list[str]) -> None:
    names = {f"{p}_ALLOW_RUN_AS_ROOT{end}" for p in prefixes for end in ("", "_CONFIRM")}
    as_root = dict(LAUNCHERS["mpirun"].start(launch(mpi, root=True)).env)
    as_user = dict(LAUNCHERS["mpirun"].start(launch(mpi)).env)
    assert as_root.keys() - as_user.keys() == names
    assert not any("ROOT" in name for name in as_user)


def test_ranks_on_this_host_yield_and_need_no_ssh() -> None:
    """Open MPI 4 refuses to start without a program of this list, and runs none of them."""
    env = dict(started("mpirun", launch(FOUR)).env)
    assert env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert env["OMPI_MCA_plm_rsh_agent"] == "ssh:rsh:false"
    assert started("mpirun", train()).env == ()


# ---------------------------------------------------------------- whole command lines

THETAGPU = train(
    hosts=(Host("thetagpu01", 8), Host("thetagpu02", 8)),
    hostfile="/var/cobalt.9",
    exports=("LD_LIBRARY_PATH", "PATH"),
)
SINGULARITY = train(
    hosts=(Host("f1", 2), Host("f2", 2)),
    exports=("LD_LIBRARY_PATH", "PATH"),
    settings=cluster.LaunchSettings(
        mca={"btl": "openib,self", "pml": "ob1"}, mpi_threads_disable=True
    ),
    network=cluster.Network(avoid=("virbr0", "lo")),
    program=("singularity", "exec", "--nv", "horovod.sif", "python", "train.py"),
)
THETA = Launch(
    TRAIN,
    16,
    ranks_per_node=4,
    mpi=MpiVersion("Cray MPICH"),
    cpus_per_rank=32,
    settings=cluster.LaunchSettings("aprun", cpu_bind="depth", threads_per_core=2),
    variables=(("OMP_NUM_THREADS", "32"), ("KMP_BLOCKTIME", "0")),
)
POLARIS = Launch(
    TRAIN,
    32,
    ranks_per_node=4,
    mpi=MpiVersion("Cray MPICH"),
    cpus_per_rank=16,
    settings=cluster.LaunchSettings("mpiexec", cpu_bind="depth"),
    variables=(("OMP_NUM_THREADS", "16"),),
)
UNEVEN = (Host("a", 1), Host("b", 2))
# In a script, hosts are unknown when it is written.
LISTED = train(
    MpiVersion("Intel MPI"),
    (),
    host_list="{hosts}",
    host_names="{host_names}",
    ranks=8,
    ranks_per_node=4,
)
PARTLY = train(
    cpus_per_rank=4,
    nested=True,
    settings=cluster.LaunchSettings("srun", "pmi2", cpu_bind="cores"),
)

ON_BOTH, LAST = "-H gpu32:4,gpu33:4 --map-by slot --oversubscribe", "python train_hvd.py"
ON_BOTH_5 = "-H gpu32:4,gpu33:4 --map-by slot:OVERSUBSCRIBE"
LINES: list[tuple[str, Launch, str]] = [
    ("srun", train(), "srun -n 8 --quit-on-interrupt python train_hvd.py"),
    ("srun", PARTLY, "srun -n 8 --cpus-per-task=4 --mpi=pmi2 --cpu-bind=cores --overlap"
     " --quit-on-interrupt python train_hvd.py"),
    ("srun", train(placed=True), "srun -n 8 -N 2 --ntasks-per-node=4 -w gpu32,gpu33"
     " --quit-on-interrupt python train_hvd.py"),
    ("mpirun", THETAGPU, "mpirun -np 16 --hostfile /var/cobalt.9 -npernode 8 --oversubscribe"
     " --bind-to none"
     " -x LD_LIBRARY_PATH -x PATH python train_hvd.py"),
    ("mpirun", THETAGPU._replace(mpi=FIVE), "mpirun -np 16 --hostfile /var/cobalt.9"
     " --map-by ppr:8:node:OVERSUBSCRIBE --bind-to none -x LD_LIBRARY_PATH -x PATH python train_hvd.py"),
    ("mpirun", SINGULARITY, "mpirun -np 4 -H f1:2,f2:2 --map-by slot --oversubscribe --bind-to none"
     " -x LD_LIBRARY_PATH -x PATH -x HOROVOD_MPI_THREADS_DISABLE -x NCCL_SOCKET_IFNAME"
     " --mca btl_tcp_if_exclude virbr0,lo --mca oob_tcp_if_exclude virbr0,lo"
     " --mca btl openib,self --mca pml ob1 singularity exec --nv horovod.sif python train.py"),
    ("aprun", THETA, "aprun -n 16 -N 4 -d 32 -j 2 -cc depth"
     " python train_hvd.py"),
    ("mpiexec", POLARIS, "mpiexec -np 32 -ppn 4 --cpu-bind depth -d 16 python train_hvd.py"),
    ("mpiexec", POLARIS._replace(hosts=(Host("x1", 4), Host("x2", 4)), ranks=8, placed=True),
     "mpiexec -np 8 -ppn 4 --hosts x1,x2 --cpu-bind depth -d 16 python train_hvd.py"),
    ("torchrun", Launch(TRAIN, 4), "torchrun --standalone --nproc_per_node=4 --no_python"
     " python train_hvd.py"),
    *(
        (name, train(mpi), f"{name} -np 8 {between} python train_hvd.py")
        for name in ("mpirun", "mpiexec")
        for mpi, between in (
            (FOUR, f"{ON_BOTH} --bind-to none"),
            (FIVE, f"{ON_BOTH_5} --bind-to none"),
            (MpiVersion("Hydra"), "-hosts gpu32,gpu33 -ppn 4"),
            (MpiVersion("Intel MPI"), "-hosts gpu32,gpu33 -ppn 4"),
            (MpiVersion("MVAPICH"), "-hosts gpu32,gpu33 -ppn 4"),
        )
    ),
    # Version 4 looks for orted on the PATH of other hosts; 5 knows by itself, and this host need not.
    ("mpirun", train(mpi_prefix="/e"), f"mpirun --prefix /e -np 8 {ON_BOTH} --bind-to none {LAST}"),
    ("mpirun", train(FIVE, mpi_prefix="/e"), f"mpirun -np 8 {ON_BOTH_5} --bind-to none {LAST}"),
    ("mpirun", Launch(TRAIN, 2, mpi=FOUR, mpi_prefix="/e"), f"mpirun -np 2 --oversubscribe --bind-to none {LAST}"),
    ("horovodrun-gloo", Launch(TRAIN, 4), "horovodrun -np 4 -H localhost:4 --disable-cache"
     f" --start-timeout 60 --gloo {LAST}"),
    *(
        ("horovodrun-mpi", what, "horovodrun -np 8 -H gpu32:4,gpu33:4 --disable-cache"
         f" --start-timeout 60 --mpi '--mpi-args={more}' {LAST}")
        for what, more in (
            (train(mpi_prefix="/a b"), """--prefix '"'"'/a b'"'"'"""),
            (train(settings=cluster.LaunchSettings(mca={"mpi_warn_on_fork": "0"})), "--mca mpi_warn_on_fork 0"),
        )
    ),
    ("mpirun", train(MpiVersion("Hydra"), UNEVEN), "mpirun -np 3 -hosts a:1,b:2 python train_hvd.py"),
    ("mpirun", train(MpiVersion("Intel MPI"), hostfile="/n"), "mpirun -np 8 -f /n -ppn 4 python train_hvd.py"),
    # In a script as under `run`: its -hosts does not read n1:4.
    ("mpirun", LISTED, "mpirun -np 8 -hosts {host_names} -ppn 4 python train_hvd.py"),
    ("mpirun", LISTED._replace(mpi=FOUR), "mpirun -np 8 -H {hosts} --map-by slot --oversubscribe --bind-to none"
     " python train_hvd.py"),
    *(
        (f"horovodrun-{name}", what, f"horovodrun -np 8 -H {hosts} --disable-cache"
         f" --start-timeout 60 --{name} python train_hvd.py")
        for name in ("mpi", "gloo")
        for what, hosts in ((train(), "gpu32:4,gpu33:4"), (LISTED._replace(mpi=FOUR), "{hosts}"))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "line"), LINES, ids=[line for *_, line in LINES])
def test_command_lines(name: str, what: Launch, line: str) -> None:
    """Those of the sites' documents among them."""
    assert started(name, what).argv == words(line)


@pytest.mark.parametrize(
    ("name", "what", "error", "said"),
    [
        ("mpirun", train(MpiVersion("Intel MPI"), UNEVEN), UsageError, "same number"),
        ("srun", train(hosts=(*UNEVEN, Host("c", 1)), placed=True), UsageError, "same number"),
        ("mpirun", POLARIS, IncompatibleError, "Cray MPICH"),
        (
            "mpirun",
            train(MpiVersion("unknown")),
            IncompatibleError,
            r"does not know(?s:.*)mpi\.kind",
        ),
        (
            "srun",
            train(FIVE, settings=cluster.LaunchSettings("srun", "pmi2")),
            IncompatibleError,
            "PMI-2(?s:.*)pmix",
        ),
        *(
            (
                "horovodrun-mpi",
                train(settings=cluster.LaunchSettings(mca={name: "ucx"})),
                IncompatibleError,
                rf"^launch\.mca\.{name}: .* sets {name} itself",
            )
            for name in ("pml", "btl")
        ),
    ],
)
def test_what_launchers_cannot_start(
    name: str, what: Launch, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        started(name, what)


def test_one_torchrun_on_each_host(tmp_path: Path) -> None:
    """They meet at the first host, at a port of the job."""
    torch = started("torchrun", train(cpus_per_rank=16, network=cluster.Network(use=("ib0",))))
    line = "srun -n 2 -N 2 --ntasks-per-node=1 -w gpu32,gpu33 --cpus-per-task=64"
    assert torch.argv[:9] == words(line)
    assert {("NCCL_SOCKET_IFNAME", "ib0"), ("GLOO_SOCKET_IFNAME", "ib0")} <= {*torch.env}
    path = programs(tmp_path, scontrol="echo a1; echo a2", torchrun='printf "%s " "$@"')
    step = {"PATH": f"{path}:/usr/bin:/bin", "SLURM_NODEID": "1", "SLURM_JOB_ID": "4321"}
    told = subprocess.check_output(torch.argv[10:], env=step, text=True)
    assert told == (
        "--nnodes=2 --nproc_per_node=4 --node_rank=1 --master_addr=a1 --master_port=29721"
        " --no_python python train_hvd.py "
    )


def test_srun_says_what_slurm_does_not_pass_on() -> None:
    """To torchrun as well: in a job step it waited for cores forever."""
    assert ("SLURM_EXPORT_ENV", "ALL") in started("srun", PARTLY).env
    torch = started("torchrun", train(nested=True))
    assert {"--overlap", "--quit-on-interrupt"} <= {*torch.argv[: torch.argv.index("sh")]}
    assert ("SLURM_EXPORT_ENV", "ALL") in torch.env
    remainder = train(hosts=(Host("a", 4), Host("b", 3)), placed=True)
    assert "--ntasks-per-node=4" in started("srun", remainder).argv


# ---------------------------------------------------------------- the network


def test_interfaces_to_use() -> None:
    what = train(network=cluster.Network(use=("ib0", "ib1"), avoid=("virbr0",)))
    mpirun = " ".join(started("mpirun", what).argv)
    assert "-x NCCL_SOCKET_IFNAME" in mpirun
    assert ("NCCL_SOCKET_IFNAME", "ib0,ib1") in started("mpirun", what).env
    assert "-mca btl_tcp_if_include ib0,ib1 --mca oob_tcp_if_include ib0,ib1" in mpirun
    assert "exclude" not in mpirun
    for name in ("horovodrun-gloo", "horovodrun-mpi"):
        start = started(name, what)
        assert " --network-interfaces ib0,ib1 " in " ".join(start.argv)
        # It says these itself, and Open MPI takes them once only.
        assert "btl_tcp_if_include" not in " ".join(start.argv)
        assert "NCCL_SOCKET_IFNAME" not in dict(start.env)
    srun = dict(started("srun", what).env)
    assert srun["NCCL_SOCKET_IFNAME"] == srun["OMPI_MCA_btl_tcp_if_include"] == "ib0,ib1"
    # It matters to several hosts only.
    alone = what._replace(hosts=(Host("gpu32", 4),))
    for name in ("mpirun", "horovodrun-gloo", "srun"):
        start = started(name, alone)
        assert "ib0" not in " ".join([*start.argv, *(value for _, value in start.env)])


def test_interfaces_to_avoid() -> None:
    what = train(network=cluster.Network(avoid=("virbr0",)))
    four, five = (" ".join(started("mpirun", what._replace(mpi=m)).argv) for m in (FOUR, FIVE))
    assert ("NCCL_SOCKET_IFNAME", "^virbr0") in started("mpirun", what).env
    for line in (four, five):
        assert "-x NCCL_SOCKET_IFNAME" in line
        assert "-mca btl_tcp_if_exclude virbr0,lo" in line
    assert "oob_tcp_if_exclude" in four
    # Open MPI 5.0.11 hung at its end when it was told that.
    assert "oob_tcp_if_exclude" not in five


def test_recipe_and_user_go_before_the_network() -> None:
    what = train(
        network=cluster.Network(use=("ib0",)),
        settings=cluster.LaunchSettings(mca={"btl_tcp_if_exclude": "lo"}),
        variables=(("NCCL_SOCKET_IFNAME", "eth1"),),
    )
    line = " ".join(started("mpirun", what).argv)
    assert dict(started("mpirun", what).env)["NCCL_SOCKET_IFNAME"] == "eth1"
    assert "btl_tcp_if_include" not in line
    assert "btl_tcp_if_exclude lo" in line


# ---------------------------------------------------------------- all of them


MPICHS = (
    MpiVersion("Intel MPI"),
    MpiVersion("Hydra"),
    MpiVersion("MVAPICH"),
    MpiVersion("Cray MPICH"),
)
KINDS = (FOUR, FIVE, *MPICHS)


@pytest.mark.parametrize("mpi", KINDS, ids=lambda mpi: f"{mpi.kind} {mpi.version}")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_programs_are_single_words_and_values_are_in_none(name: str, mpi: MpiVersion) -> None:
    """Other users can list command lines."""
    if (name, mpi.kind) == ("mpirun", "Cray MPICH"):
        return
    what = train(mpi, program=PROGRAM, variables=(("A", "b; $(c)\nd"),), exports=("B",))
    start = started(name, what._replace(ranks_per_node=4))
    assert start.argv[-len(PROGRAM) :] == PROGRAM
    assert ("A", "b; $(c)\nd") in start.env
    assert not any("$(c)" in word or "=b;" in word for word in start.argv)


BOTH = Container(None, (), "singularity", "/images/h.sif", ("/scratch", "/data"), "nvidia")
CHARLIE = Container(None, (), "ch-run", "/images/h", ("/scratch",))
TRAIN_IN_IMAGE = ("python", "train.py")


def test_a_recipe_that_names_an_image_has_its_programs_there() -> None:
    named = recipe_image(load_recipe("singularity").recipe, "/scratch/ann")
    assert named and named.image == "/scratch/ann/horovod.sif"
    other = ["container.image=/images/../images/h.sif"]
    named = recipe_image(load_recipe("singularity", overrides=other).recipe, "/scratch/ann")
    assert named and named.image == "/images/h.sif"
    assert recipe_image(load_recipe("local").recipe, "/") is None
    defined = load_recipe("local", overrides=["container.base=debian:12"]).recipe
    assert defined.container and recipe_image(defined, "/") is None


def test_singularity_and_apptainer() -> None:
    without = "env -u OPAL_PREFIX -u PMIX_INSTALL_PREFIX"
    assert inside(BOTH, "/home/ann") == words(
        f"{without} singularity exec --nv --bind /scratch --bind /data /images/h.sif"
    )
    amd = BOTH._replace(gpu="rocm", binds=(), runtime="apptainer")
    line = f"{without} apptainer exec --rocm --bind /a:/srv:ro /images/h.sif"
    assert inside(amd, "/", ("/a:/srv",)) == words(line)
    assert inside(amd._replace(gpu="none"), "/") == words(f"{without} apptainer exec /images/h.sif")


@pytest.mark.parametrize(
    ("folder", "binds"),
    [
        ("/home/ann", ["/scratch", "/home/ann", "/a:/srv"]),
        ("/scratch/ann", ["/scratch", "/a:/srv"]),
        ("/tmp/x", ["/scratch", "/a:/srv"]),
        ("/", ["/scratch", "/a:/srv"]),
        ("/scratch2", ["/scratch", "/scratch2", "/a:/srv"]),
    ],
)
def test_charliecloud_sees_the_folder_that_the_program_starts_in(
    folder: str, binds: list[str]
) -> None:
    words = inside(CHARLIE, folder, ("/a:/srv",))
    assert words[0] == "ch-run" and words[-3:] == (f"--cd={folder}", "/images/h", "--")
    assert [word.removeprefix("--bind=") for word in words if "--bind" in word] == binds
    # What the image has of its own comes after what is taken away.
    for name in ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "LD_LIBRARY_PATH"):
        assert words.index("--set-env") > words.index(f"--unset-env={name}")


@pytest.mark.parametrize("name", ["horovodrun-gloo", "horovodrun-mpi", "torchrun"])
def test_a_launcher_of_the_image_starts_ranks_on_its_own_host_only(name: str) -> None:
    assert LAUNCHERS[name].provided
    launch, words = Launch(TRAIN_IN_IMAGE, 2, mpi=FOUR), inside(BOTH, "/")
    here: list[tuple[Host, ...]] = [(), (Host("localhost", 2),), (Host("f1", 2),)]
    for hosts in here:
        argv = start_in_image(name, launch._replace(hosts=hosts), words, "f1.example.org").argv
        assert argv[: len(words)] == words and argv[-2:] == TRAIN_IN_IMAGE
        assert argv.count("singularity") == 1
    elsewhere: list[tuple[Host, ...]] = [(Host("f2", 2),), (Host("f1", 1), Host("f2", 1))]
    for hosts in elsewhere:
        with pytest.raises(IncompatibleError, match="a program of the image"):
            start_in_image(name, launch._replace(hosts=hosts), words, "f1")
    unknown = launch._replace(host_list="{hosts}", ranks_per_node=1)
    with pytest.raises(IncompatibleError):
        start_in_image(name, unknown, words, "f1")

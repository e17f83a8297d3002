"""Allocations from the variables that schedulers set: those of Slurm were recorded from 22.05."""

from __future__ import annotations

import shlex

import pytest

from hvdenv.errors import UsageError
from hvdenv.model.cluster import Job, Partition
from hvdenv.model.dialect import Dialect, shipped
from hvdenv.sites import allocation
from hvdenv.sites.allocation import Allocation, interactive
from hvdenv.sites.hosts import Host


def find_allocation(
    environ: dict[str, str], hosts: str = "", dialects: dict[str, Dialect] | None = None
) -> Allocation:
    """With the content of the scheduler's file of hosts, which these variables name."""

    def read(path: str) -> str:
        assert path in ("/n", "/h")
        return hosts

    return allocation.find_allocation(environ, read, dialects)


def variables(text: str) -> dict[str, str]:
    return dict(line.strip().split("=", 1) for line in text.strip().splitlines())


SALLOC = variables("""
    SLURM_JOB_ID=1
    SLURM_JOB_CPUS_PER_NODE=1(x2)
    SLURM_JOB_NODELIST=gpu[32-33]
    SLURM_JOB_NUM_NODES=2
    SLURM_NNODES=2
    SLURM_TASKS_PER_NODE=1(x2)
""")
BATCH = variables("""
    SLURM_JOB_ID=4
    SLURM_CPUS_PER_TASK=1
    SLURM_GPUS_ON_NODE=2
    SLURM_JOB_CPUS_PER_NODE=2,1
    SLURM_JOB_NODELIST=gpu[32-33]
    SLURM_NPROCS=3
    SLURM_NTASKS=3
    SLURM_TASKS_PER_NODE=2,1
""")


def test_no_allocation() -> None:
    assert find_allocation({"SLURM_CONF": "/etc/slurm.conf", "PBS_NODEFILE": "/x"}) == Allocation()


def test_slurm_without_numbers_of_tasks() -> None:
    """What it counts is not what was asked for."""
    assert find_allocation(SALLOC) == Allocation(
        "slurm",
        "1",
        (Host("gpu32"), Host("gpu33")),
        2,
        tasks=(1, 1),
        cpus=(1, 1),
        counts_tasks=True,
    )


def test_slurm_batch() -> None:
    assert find_allocation(BATCH) == Allocation(
        "slurm",
        "4",
        (Host("gpu32", 2), Host("gpu33", 1)),
        2,
        tasks=(2, 1),
        cpus=(2, 1),
        cpus_per_rank=1,
        gpus_per_node=2,
        counts_tasks=True,
    )


@pytest.mark.parametrize(
    ("step", "nested"), [("0", True), ("17", True), ("4294967290", False), ("4294967291", False)]
)
def test_a_step_holds_the_cores(step: str, nested: bool) -> None:
    """But not the one that Slurm makes for the shell of salloc."""
    assert find_allocation({**BATCH, "SLURM_STEP_ID": step}).nested is nested
    assert not find_allocation(BATCH).nested


@pytest.mark.parametrize(
    ("more", "gpus"),
    [
        ({}, 0),
        ({"SLURM_GPUS_PER_NODE": "A100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "8"}, 8),
        ({"SLURM_JOB_GPUS": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8b6c3b0a,MIG-1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ],
)
def test_gpus(more: dict[str, str], gpus: int) -> None:
    assert find_allocation({**SALLOC, **more}).gpus_per_node == gpus


def test_values_that_nobody_sets() -> None:
    odd = {"SLURM_TASKS_PER_NODE": "many", "SLURM_CPUS_PER_TASK": "x", "SLURM_STEP_ID": "a"}
    found = find_allocation({**BATCH, **odd})
    assert (found.tasks, found.cpus_per_rank, found.nested) == ((), 0, False)
    with pytest.raises(UsageError):
        find_allocation({**SALLOC, "SLURM_JOB_NODELIST": "gpu[1-"})


@pytest.mark.parametrize(
    ("environ", "hosts", "expected"),
    [
        (
            {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/n"},
            "x1\nx2\n",
            Allocation("pbs", "7.pbs", (Host("x1"), Host("x2")), 2, "/n"),
        ),
        (
            {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/n"},
            "x1\nx1\nx2\nx2\n",
            Allocation("pbs", "7.pbs", (Host("x1", 2), Host("x2", 2)), 2, "/n"),
        ),
        (
            {"COBALT_JOBID": "9", "COBALT_NODEFILE": "/n", "COBALT_JOBSIZE": "2"},
            "thetagpu01\nthetagpu02\n",
            Allocation("cobalt", "9", (Host("thetagpu01"), Host("thetagpu02")), 2, "/n"),
        ),
        (
            {"COBALT_JOBID": "9", "COBALT_JOBSIZE": "4"},
            "",
            Allocation("cobalt", "9", (), 4),
        ),
        (
            {"LSB_JOBID": "5", "LSB_DJOB_HOSTFILE": "/h"},
            "batch2\n" + "a01n01\n" * 42 + "a01n02\n" * 42,
            Allocation("lsf", "5", (Host("a01n01", 42), Host("a01n02", 42)), 2),
        ),
        (
            {"LSB_JOBID": "5", "LSB_DJOB_HOSTFILE": "/h"},
            "node1\n" * 4 + "node2\n" * 4,
            Allocation("lsf", "5", (Host("node1", 4), Host("node2", 4)), 2, "/h"),
        ),
        (
            {"JOB_ID": "1", "SGE_TASK_ID": "undefined", "PE_HOSTFILE": "/h", "NHOSTS": "2"},
            "gpu32 2 gpu.q@gpu32 UNDEFINED\ngpu33 2 gpu.q@gpu33 UNDEFINED\n",
            Allocation("gridengine", "1", (Host("gpu32", 2), Host("gpu33", 2)), 2),
        ),
        ({"JOB_ID": "1", "PE_HOSTFILE": "/h"}, "", Allocation()),
    ],
    ids=[
        "pbs",
        "pbs-mpiprocs",
        "cobalt",
        "theta",
        "lsf-launch-host",
        "lsf",
        "gridengine",
        "jenkins",
    ],
)
def test_other_schedulers(environ: dict[str, str], hosts: str, expected: Allocation) -> None:
    assert find_allocation(environ, hosts) == expected


def test_an_own_scheduler_whose_file_lists_ranks() -> None:
    own = {"own": shipped()["pbs"]._replace(counts_tasks=True)}
    found = find_allocation({"PBS_JOBID": "7", "PBS_NODEFILE": "/n"}, "x1\nx1\nx2\n", own)
    assert found.counts_tasks and found.hosts == (Host("x1", 2), Host("x2", 1))


NEURON = Job(
    partition="amd_a100nv_8",
    nodes=2,
    ranks_per_node=4,
    gpus_per_node=4,
    time="8:00:00",
    name="debug",
    comment="python",
    output="%x.out",
    error="%x.err",
)
PROGRAM = ("bash", "--rcfile", "/home/a b/rc", "-i")
INTERACTIVE: list[tuple[str, Job, Partition | None, str, str]] = [
    (
        "slurm", NEURON, None, "salloc",
        "-J debug --time=8:00:00 --comment=python -p amd_a100nv_8 --nodes=2 --ntasks-per-node=4"
        " --gres=gpu:4 srun --interactive --preserve-env --pty bash --rcfile '/home/a b/rc' -i",
    ),
    (
        "slurm", NEURON._replace(gpu_option="gpus-per-node"), Partition(gpu="A100"), "salloc",
        "-J debug --time=8:00:00 --comment=python -p amd_a100nv_8 --nodes=2 --ntasks-per-node=4"
        " --gpus-per-node=A100:4"
        " srun --interactive --preserve-env --pty bash --rcfile '/home/a b/rc' -i",
    ),
    (
        "pbs", Job("debug", 2, 4, gpus_per_node=4, select="system=polaris", account="a",
                   place="scatter", attributes={"filesystems": "home:grand"}), None, "qsub -I",
        "-N hvdenv -l select=2:ngpus=4:mpiprocs=4:system=polaris -l place=scatter"
        " -l walltime=01:00:00 -q debug -A a -l filesystems=home:grand",
    ),
    (
        "cobalt", Job("training", 4, account="SDL_Workshop", attributes={"pubnet": "true"}), None,
        "qsub -I", "--jobname hvdenv -n 4 -t 60 -q training --attrs pubnet=true -A SDL_Workshop",
    ),
    (
        "lsf", Job("batch", 2, 6, account="abc007", time="2:00:00"), None, "bsub",
        "-P abc007 -W 2:00 -nnodes 2 -q batch -J hvdenv -Is"
        """ 'bash --rcfile '"'"'/home/a b/rc'"'"' -i'""",
    ),
    (
        "gridengine", Job("gpu.q", 2, 4, parallel_environment="mpi", attributes={"gpu": "4"}),
        None, "qrsh", "-N hvdenv -cwd -l h_rt=01:00:00 -q gpu.q -pe mpi 8 -l gpu=4 -pty y"
        " bash --rcfile '/home/a b/rc' -i",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "job", "partition", "begin", "rest"),
    INTERACTIVE,
    ids=["slurm", "slurm-gpus", "pbs", "cobalt", "lsf", "gridengine"],
)
def test_interactive_allocations(
    scheduler: str, job: Job, partition: Partition | None, begin: str, rest: str
) -> None:
    words = interactive(shipped()[scheduler], job, partition, PROGRAM)
    assert words == tuple(shlex.split(f"{begin} {rest}"))
    assert not {"-o", "-e", "-k", "-j"} & set(words)

"""Allocations from the variables that schedulers set, lists of hosts, and orphans on hosts."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.errors import UsageError
from hvdenv.base.runner import Runner
from hvdenv.model.cluster import Job
from hvdenv.model.dialect import Dialect, shipped
from hvdenv.sites import allocation, nodes
from hvdenv.sites.allocation import Allocation, interactive
from hvdenv.sites.hosts import MOST_HOSTS, Host, distribute, expand, parse_hostfile, parse_hosts
from tests.support.files import programs


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
    hosts = (Host("gpu32"), Host("gpu33"))
    expected = Allocation("slurm", "1", hosts, 2, cpus=(1, 1), counts_tasks=True)
    assert find_allocation(SALLOC) == expected


def test_slurm_batch() -> None:
    found = find_allocation(BATCH)
    expected = Allocation("slurm", "4", (Host("gpu32", 2), Host("gpu33", 1)), 2, counts_tasks=True)
    assert found == expected._replace(cpus=(2, 1), cpus_per_rank=1, gpus_per_node=2)


@pytest.mark.parametrize(
    ("step", "nested"), [("0", True), ("4294967290", False), ("4294967291", False)]
)
def test_a_step_holds_the_cores(step: str, nested: bool) -> None:
    """But not the one that Slurm makes for the shell of salloc."""
    assert find_allocation({**BATCH, "SLURM_STEP_ID": step}).nested is nested
    assert not find_allocation(BATCH).nested


@pytest.mark.parametrize(
    ("more", "gpus"),
    [
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
    assert (found.cpus_per_rank, found.nested) == (0, False)
    with pytest.raises(UsageError):
        find_allocation({**SALLOC, "SLURM_JOB_NODELIST": "gpu[1-"})


PBS = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "/n"}
COBALT = {"COBALT_JOBID": "9", "COBALT_NODEFILE": "/n", "COBALT_JOBSIZE": "2"}
LSF = {"LSB_JOBID": "5", "LSB_DJOB_HOSTFILE": "/h"}
GRID_ENGINE = {"JOB_ID": "1", "SGE_TASK_ID": "undefined", "PE_HOSTFILE": "/h", "NHOSTS": "2"}


def two(slots: int) -> tuple[Host, Host]:
    return Host("n1", slots), Host("n2", slots)


@pytest.mark.parametrize(
    ("environ", "hosts", "expected"),
    [
        (PBS, "n1\nn2\n", Allocation("pbs", "7.pbs", two(0), 2, "/n")),
        (PBS, "n1\nn1\nn2\nn2\n", Allocation("pbs", "7.pbs", two(2), 2, "/n")),
        (COBALT, "n1\nn2\n", Allocation("cobalt", "9", two(0), 2, "/n")),
        ({"COBALT_JOBID": "9", "COBALT_JOBSIZE": "4"}, "", Allocation("cobalt", "9", (), 4)),
        # On some sites the first line is the host that the job starts on, which has no ranks.
        (LSF, "batch2\n" + "n1\n" * 42 + "n2\n" * 42, Allocation("lsf", "5", two(42), 2)),
        (LSF, "n1\n" * 4 + "n2\n" * 4, Allocation("lsf", "5", two(4), 2, "/h")),
        (
            GRID_ENGINE,
            "n1 2 gpu.q@n1 UNDEFINED\nn2 2 gpu.q@n2 UNDEFINED\n",
            Allocation("gridengine", "1", two(2), 2),
        ),
        ({"JOB_ID": "1", "PE_HOSTFILE": "/h"}, "", Allocation()),  # of Jenkins
    ],
)
def test_other_schedulers(environ: dict[str, str], hosts: str, expected: Allocation) -> None:
    assert find_allocation(environ, hosts) == expected


PROGRAM = ("bash", "--rcfile", "/home/a b/rc", "-i")


@pytest.mark.parametrize(
    ("scheduler", "begin", "end"),
    [
        (
            "slurm",
            "salloc -J x",
            "srun --interactive --preserve-env --pty bash --rcfile '/home/a b/rc' -i",
        ),
        ("pbs", "qsub -I -N x -l select=2:mpiprocs=1", "-l walltime=01:00:00"),
        ("cobalt", "qsub -I --jobname x -n 2", "-t 60"),
        ("lsf", "bsub -W 1:00 -nnodes 2", """-J x -Is 'bash --rcfile '"'"'/home/a b/rc'"'"' -i'"""),
        ("gridengine", "qrsh -N x -cwd", "-pe mpi 2 -pty y bash --rcfile '/home/a b/rc' -i"),
    ],
)
def test_interactive_allocations(scheduler: str, begin: str, end: str) -> None:
    """The options are those of a batch job, without those of its output."""
    job = Job(nodes=2, name="x", output="%x.out", error="%x.err")
    job = job._replace(parallel_environment="mpi" if scheduler == "gridengine" else None)
    words = interactive(shipped()[scheduler], job, None, PROGRAM)
    first, last = shlex.split(begin), shlex.split(end)
    assert words[: len(first)] == (*first,) and words[-len(last) :] == (*last,)
    assert not {"-o", "-e", "-k", "-j", "-O"} & {*words}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (" f1:2 , f2:2,f3:1", [("f1", 2), ("f2", 2), ("f3", 1)]),
        ("gpu[32-33]:2,login1:1", [("gpu32", 2), ("gpu33", 2), ("login1", 1)]),
        ("gpu32,gpu33", [("gpu32", 0), ("gpu33", 0)]),
        ("localhost:2", [("localhost", 2)]),
        ("10.0.0.1:4,x3006.hsn.anl.gov:4", [("10.0.0.1", 4), ("x3006.hsn.anl.gov", 4)]),
    ],
)
def test_hosts_of_an_option(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == tuple(Host(*each) for each in hosts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the name of a host"),
        ("gpu32:4,", "not the name of a host"),
        ("gpu[32-33]:4,gpu33:4", "gpu33 is listed twice"),
        ("gpu32:0", "not a number of slots"),
        ("gpu32:٤", "not a number of slots"),
        ("gpu32:99999", "not a number of slots"),
        ("gpu32:4,gpu33", "some hosts have slots"),
        ("::1", "not a number of slots"),
        ("localhost:2,gpu33:2", "different host to each"),
        ("gpu33:2,127.0.0.1:2", "different host to each"),
        ("-oProxyCommand=x:2", "not the name of a host"),
        ("$(reboot):2", "not the name of a host"),
        ("gpu32\n:2", "not the name of a host"),
        ("gpu[32-", "not the name of a host"),
        ("gpu[33-32]:2", "not a range"),
        ("gpu[a-b]:2", "not a list of numbers"),
        ("n" * 300 + ":1", "not the name of a host"),
    ],
)
def test_wrong_hosts(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_hosts(text)
    assert caught.value.remedy
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[32-33,40]", "gpu32 gpu33 gpu40"),
        ("gpu32", "gpu32"),
        ("n[008-011],login1", "n008 n009 n010 n011 login1"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("taurusml[3,5-6]-ib", "taurusml3-ib taurusml5-ib taurusml6-ib"),
    ],
)
def test_lists_of_slurm(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize("text", ["n[0-99999999]", "a[1-999]b[1-999]", "n[1-15000],m[1-15000]"])
def test_a_list_without_end(text: str) -> None:
    with pytest.raises(UsageError, match=f"more than {MOST_HOSTS}|not a range"):
        expand(text)


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(1, 5))
def test_expansion_keeps_each_number_and_its_width(numbers: set[int], width: int) -> None:
    written = [str(number).zfill(width) for number in sorted(numbers)]
    assert expand(f"gpu[{','.join(written)}]") == tuple(f"gpu{each}" for each in written)


@given(st.text(max_size=40))
def test_whatever_is_written_is_hosts_or_an_error(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert hosts
    assert all(
        host.name.isascii() and not set(host.name) & set(" ;$'\"`\n\\|&<>()") for host in hosts
    )


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", [("a", 0), ("b", 0)]),
        ("a\na\nb\nb\n", [("a", 2), ("b", 2)]),
        ("a slots=4\nb slots=2 max_slots=8\n", [("a", 4), ("b", 2)]),
        ("a:4\nb:4\n", [("a", 4), ("b", 4)]),
        ("# hosts\n\na  # first\nb\n", [("a", 0), ("b", 0)]),
        ("x3006.hsn.anl.gov\r\n", [("x3006.hsn.anl.gov", 0)]),
    ],
)
def test_hostfiles(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hostfile(text, "f") == tuple(Host(*each) for each in hosts)


@pytest.mark.parametrize(
    "text", ["", "# none\n", "a\n$(id)\n", "a slots=x\n", "::1\n", "a\nlocalhost\n"]
)
def test_wrong_hostfiles(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert caught.value.where.startswith("hosts.txt")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_ranks_are_spread_evenly(slots: list[int], ranks: int) -> None:
    ranks = min(ranks, sum(slots))
    hosts = tuple(Host(f"n{number}", each) for number, each in enumerate(slots))
    spread = {host.name: host.slots for host in distribute(hosts, ranks)}
    assert sum(spread.values()) == ranks
    assert all(0 < spread[host.name] <= host.slots for host in hosts if host.name in spread)
    # No host could take one from another that has two more.
    for host in hosts:
        taken = spread.get(host.name, 0)
        assert taken == host.slots or max(spread.values()) - taken <= 1


# ---------------------------------------------------------------- orphans on other hosts

HERE = os.uname().nodename
# What ssh does: the words that it gets are read by a shell.
LAST = 'for last; do :; done; exec sh -c "$last"'


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner({"PATH": f"{tmp_path}:/usr/bin:/bin"})


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [
        ("echo 'ssh: connect to host n2 port 22: No route'; exit 255", 60, "22: No route"),
        ("exec sleep 600", 1, "no answer within 1 s"),
        ("exit 3", 60, "exit code 3"),
    ],
)
def test_orphans_of_a_host_that_does_not_answer_are_unconfirmed(
    tmp_path: Path, runner: Runner, text: str, seconds: float, why: str
) -> None:
    programs(tmp_path, ssh=text)
    began = time.monotonic()
    unknown, rest = nodes.end_orphans(["n2"], runner, seconds)
    assert time.monotonic() - began < 60
    assert (unknown.subject, unknown.status) == ("n2", "unproven")
    assert unknown.message.startswith("unconfirmed whether ranks still run on n2: ")
    assert why in unknown.message
    assert rest.message == f"no processes of this run are left on {HERE}"


def test_a_runner_that_was_stopped_still_ends_what_it_started(
    tmp_path: Path, runner: Runner
) -> None:
    runner.stop()
    programs(tmp_path, ssh=LAST)
    assert [finding.status for finding in nodes.end_orphans(["n2"], runner, 60)] == ["pass"]

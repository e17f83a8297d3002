"""Benchmarks of a real Horovod beside a yardstick that the environment's own mpicc compiles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdenv.base.command import Command
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.sites.launchers import Launch
from hvdenv.verification import inspection
from hvdenv.verification.bench import measure_yardstick
from hvdenv.verification.setup import Effort, Setup
from hvdenv.verification.verify import verify
from tests.real.doctored import TIMEOUT, found, without_check_build
from tests.support.files import programs

LAUNCH = Launch((), 2, os.geteuid() == 0)


def test_benchmarks(copy: Callable[..., Installation], runner: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    expectation = Expectation(("torch",), ("MPI",), ("MPI",))
    ended: list[str] = []
    report = verify(
        Setup(
            without_check_build(copy()),
            runner,
            expectation,
            launchers=("mpirun",),
            effort=Effort(0.2, str(folder)),
            seconds=5 * TIMEOUT,
        ),
        lambda what, label, _: ended.append(label) if what == "finished" else None,
    )
    assert ended[-1] == "speed of torch over MPI"
    yardstick, bench = found(report, "yardstick")["MPI alone"], found(report, "bench")
    assert yardstick.status == "pass", yardstick
    finding = bench["torch over MPI"]
    assert bench.keys() == {"torch over MPI"}
    assert finding.status == "pass", finding
    assert "of MPI alone" in finding.evidence

    def figures(name: str, subject: str) -> dict[tuple[int | None, int | None], float]:
        chosen = [m for m in report.measurements if (m.name, m.subject) == (name, subject)]
        return {(m.size, m.ranks): m.value for m in chosen}

    latency = figures("allreduce latency", "torch over MPI")
    alone = figures("allreduce latency", "MPI alone")
    assert (1024, 2) in alone.keys() <= latency.keys()
    assert all(0 < value < 1e7 for value in (*latency.values(), *alone.values()))
    assert list(folder.iterdir()) == []  # the compiled yardstick is gone


@pytest.mark.parametrize(
    ("compiler", "problem"),
    [
        ("echo 'gcc: command not found' >&2; exit 127", "{mpicc} does not compile"),
        # It compiles against an MPI that this mpirun does not start.
        ("printf '#!/bin/sh\\n' > $3; chmod +x $3", "mpirun ran what {mpicc} compiled: no figures"),
    ],
)
def test_a_compiler_that_does_not_do(
    original: Installation, runner: Runner, tmp_path: Path, compiler: str, problem: str
) -> None:
    folder = programs(tmp_path / "bin", mpicc=compiler)
    (folder / "mpirun").symlink_to(original.program("mpirun"))
    other = original._replace(path=(str(folder), *original.path))
    yardstick = measure_yardstick(
        Setup(other, runner, launch=LAUNCH),
        TIMEOUT,
        Effort(0.1, str(tmp_path)),
        inspection.host_mpi(Setup(original, runner), TIMEOUT)[0],
        1024,
    )
    assert yardstick.points == ()
    assert yardstick.problem.startswith(problem.format(mpicc=folder / "mpicc"))
    assert "no figures" in problem or "gcc: command not found" in yardstick.evidence


# Stands for NCCL and CUDA, which need a GPU: the memory is the host's, and MPI reduces. The calls
# and their arguments are those of nccl.h and cuda_runtime_api.h.
PRETENDED = r"""
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char bytes[128]; } id;
static int chosen = -1, number, joined;
int cudaGetDeviceCount(int *count) { *count = GPUS; return 0; }
int cudaSetDevice(int device) { chosen = device; return device >= GPUS ? 101 : 0; }
int cudaMalloc(void **memory, size_t size) { *memory = malloc(size); return chosen < 0; }
int cudaMemset(void *memory, int value, size_t size) { memset(memory, value, size); return 0; }
int cudaStreamSynchronize(void *stream) { return stream != NULL; }
int ncclGetUniqueId(id *made) { memset(made->bytes, 7, sizeof made->bytes); return 0; }
int ncclCommInitRank(void **comm, int ranks, id told, int rank)
{
    *comm = &joined;
    MPI_Comm_rank(MPI_COMM_WORLD, &number);
    return ranks != 2 || rank != number || told.bytes[0] != 7 || told.bytes[127] != 7;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int how, void *comm, void *on)
{
    if (from != to || type != 7 || how != 0 || comm != &joined || on)
        return 4;
    return MPI_Allreduce(MPI_IN_PLACE, to, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
"""


@pytest.mark.parametrize(
    ("gpus", "problem"),
    [
        (2, ""),
        (1, ""),  # the scheduler shows each rank its own one
        (0, "yardstick: choosing a GPU: error 101"),
        (None, "cannot open shared object file"),
    ],
)
def test_the_yardstick_on_what_stands_for_gpus(
    original: Installation, runner: Runner, tmp_path: Path, gpus: int | None, problem: str
) -> None:
    library = tmp_path / "libnccl.so.2"
    if gpus is not None:
        (tmp_path / "pretended.c").write_text(PRETENDED)
        argv = (original.program("mpicc"), "-shared", "-fPIC", f"-DGPUS={gpus}", "-o", str(library))
        command = Command((*argv, str(tmp_path / "pretended.c")), original.env)
        assert runner.run(command).returncode == 0
    setup = Setup(original, runner, launch=LAUNCH, launchers=("mpirun",))
    yardstick = measure_yardstick(
        setup,
        TIMEOUT,
        Effort(0.2, str(tmp_path)),
        inspection.host_mpi(setup, TIMEOUT)[0],
        1024,
        (str(library), str(library)),
    )
    if problem:
        assert yardstick.points == ()
        assert problem in yardstick.evidence, yardstick
    else:
        assert [point[:2] for point in yardstick.points] == [(1024, 2)], yardstick

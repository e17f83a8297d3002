"""By which path data went: what libraries print, what a rank has, what that means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.command import Command, Outcome
from hvdenv.base.runner import Runner
from hvdenv.base.schema import parse_toml
from hvdenv.environments.installation import Expectation, Installation
from hvdenv.reports.report import Finding
from hvdenv.sites.launchers import MpiVersion, parse_mpi_library
from hvdenv.standalone.ranks.events import (
    DataPath,
    ExtensionFacts,
    Gpu,
)
from hvdenv.verification import datapath, rank_checks
from hvdenv.verification.inspection import Extension
from hvdenv.verification.rank_run import Rank, RankRun, collect
from hvdenv.verification.rank_start import Pair
from hvdenv.verification.setup import Setup
from tests.support import rank_events
from tests.support.evidence import evidence
from tests.support.files import write
from tests.support.rank_events import event, exited, reduced, started
from tests.support.standalone import load

rank_datapath, gpus = load("datapath"), load("gpus")
CASES = {
    path.stem: parse_toml(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parents[1] / "cases/datapath").glob("*.toml"))
}
OPEN_MPI = MpiVersion("Open MPI", "4.1.8")
LIBRARY = "Open MPI v4.1.8, package: Open MPI user@localhost Distribution, ident: 4.1.8"
TCP: dict[str, Any] = {"pml": ["ob1"], "btl": ["self", "tcp"]}


def seen_in(output: str) -> Any:
    seen = rank_datapath.Seen()
    for line in output.splitlines():
        seen.take(line)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_what_libraries_print(name: str) -> None:
    case = CASES[name]
    assert case["source"].startswith(("recorded here", "after "))
    values = seen_in(case["output"]).values
    assert values == case["seen"]
    mpi, nccl = datapath.mpi_transports(values), datapath.nccl_transports(values)
    assert mpi.name == case.get("mpi", "")
    assert nccl.name == case.get("nccl", "")
    assert (nccl if nccl.name else mpi).only_tcp == case["only_tcp"]


def test_lines_that_were_asked_for_are_told_from_others() -> None:
    seen = rank_datapath.Seen()
    assert seen.take("[gpu33:00251] mca: bml: Using tcp btl for send to [[3075,1],0] on node gpu32")
    assert seen.take("n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read")
    for kept in (
        "n1:1:2 [0] NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
        "[gpu33:00251] *** An error occurred in MPI_Comm_dup",
        "[2026-11-21 20:43:46: D env_parser.cc:107] Using MPI to perform controller operations.",
        "[1795294140.1] [gpu33:251  :0]  ucp_worker.c:1 UCX  ERROR no active messages transport",
    ):
        assert not seen.take(kept)
    assert seen.values["controller"] == ["MPI"]


def test_an_event_keeps_its_size() -> None:
    lines = [f"mca: bml: Using b{number} btl for send to x" for number in range(400)]
    assert 1000 < len(json.dumps(seen_in("\n".join(lines)).values)) <= 1100


def test_loaded_libraries(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    paths = (
        "/env/lib/libmpi.so.40.30.8 /env/lib/libmpi.so.40.30.8 /opt/other/libmpi.so.12"
        " /env/libmpi_cxx.so.40 /env/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so"
        " /nvidia/libnccl.so.2 /usr/lib/libstdc++.so.6.0.30 /cray/libmpi_gnu_91.so.12"
        " /env/libfabric-9666849b.so.1.2 [heap]"
    )
    lines = (f"7f00-7f01 r-xp 00000000 fe:00 1    {path}\n" for path in paths.split())
    maps.write_text("".join(lines))
    assert rank_datapath.libraries(str(maps)) == {
        "libmpi": ["/env/lib/libmpi.so.40.30.8", "/opt/other/libmpi.so.12"],
        "libnccl": ["/nvidia/libnccl.so.2"],
        "libstdc++": ["/usr/lib/libstdc++.so.6.0.30"],
        "libmpi_gnu_91": ["/cray/libmpi_gnu_91.so.12"],
        "libfabric-9666849b": ["/env/libfabric-9666849b.so.1.2"],
    }


def test_adapters(tmp_path: Path) -> None:
    ports = {
        "mlx5_0": ("4: ACTIVE", "InfiniBand"),
        "mlx5_1": ("4: ACTIVE", "Ethernet"),
        "mlx5_2": ("1: DOWN", "InfiniBand"),
        "hfi1_0": ("4: ACTIVE", "InfiniBand"),
    }
    for name, (state, layer) in ports.items():
        port = tmp_path / "infiniband" / name / "ports/1"
        write(port / "state", f"{state}\n")
        write(port / "link_layer", f"{layer}\n")
    assert rank_datapath.fast_networks(str(tmp_path)) == ["hfi1_0", "mlx5_0"]
    (tmp_path / "cxi/cxi0").mkdir(parents=True)
    assert rank_datapath.fast_networks(str(tmp_path)) == ["hfi1_0", "mlx5_0", "cxi0"]


@pytest.mark.parametrize(
    ("visible", "there", "local_rank", "local_size", "wanted"),
    [
        (4, 4, 3, 4, 3),
        (8, 8, 1, 2, 1),
        (1, 4, 3, 4, 0),
        (1, 1, 1, 2, "2 ranks on this host, and 1 GPUs"),
        (2, 4, 1, 4, "4 ranks on this host, and 2 GPUs"),
        (0, 4, 0, 1, "the framework sees none"),
        (0, 0, 0, 1, "no GPU here"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_or_none(
    visible: int, there: int, local_rank: int, local_size: int, wanted: int | str
) -> None:
    index, why = gpus.choose(visible, there, local_rank, local_size)
    if isinstance(wanted, int):
        assert (index, why) == (wanted, "")
    else:
        assert index is None
        assert wanted in why
    # Where no NCCL needs its own, they share them.
    shared = gpus.choose(visible, there, local_rank, local_size, shared=True)[0]
    assert shared == (local_rank % visible if visible else None)


def test_gpus_that_a_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.devices(str(tmp_path)) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia2").mkdir()  # cannot be opened for writing, by root either
    assert gpus.devices(str(tmp_path)) == 2
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpus.devices(str(tmp_path)) == 0


def rank(number: int, host: str = "", **path: Any) -> Rank:
    """A rank that is right and reports by which path its data went."""
    host = host or f"n{number}"
    logged = {"controller": ["MPI"], "cpu": ["MPI"], **path.pop("logged", {})}
    numbers = {"local_rank": 0, "local_size": 1}
    events = [
        started(number, host),
        event(number, ExtensionFacts("torch", built={"NCCL": 21805, "MPI": 1}), host),
        *reduced(number, 2, host=host, **numbers),
        event(number, DataPath(**{"mpi": LIBRARY, **path, "logged": logged}), host),
        exited(number, host=host),
    ]
    return collect(events)[0]


def run(*ranks: Rank, **changed: Any) -> RankRun:
    return rank_events.run(size=len(ranks), ranks=ranks)._replace(**changed)


def judged(ranks: RankRun, meant: Mapping[str, str] = {}) -> tuple[str, str]:
    judgement = datapath.judge_path(ranks, meant)
    assert judgement.status in ("pass", "skip") or judgement.remedy
    return judgement.status, judgement.message


def on_gpu(number: int, host: str, bus: str, fast: Sequence[str] = (), **said: Any) -> Rank:
    gpu = Gpu(f"cuda:{number}", on_host=2)
    comm = {"comm": [f"2 busId {bus}"], "via": ["P2P/IPC"], "nccl": ["2.18.5+cuda12.2"], **said}
    return rank(number, host, logged=comm, gpu=gpu, fast=list(fast))


FAST: dict[str, Any] = {"logged": TCP, "fast": ["mlx5_0"]}
OPENIB: dict[str, Any] = {"pml": ["ob1"], "btl": ["self", "openib"]}
SLOW = run(rank(0, **FAST), rank(1, **FAST))
ON_GPUS = run(on_gpu(0, "n0", "7000"), on_gpu(1, "n0", "b000"))


@pytest.mark.parametrize(
    ("ranks", "meant", "status", "messages"),
    [
        (SLOW, {}, "fail", ["MPI uses TCP although the hosts have mlx5_0"]),
        (run(rank(0, "n0", **FAST), rank(1, "n0", **FAST)), {}, "pass", []),  # nothing crosses a network
        (run(rank(0, **FAST), rank(1, logged=TCP)), {}, "pass", []),  # one host has no such adapter
        (SLOW, {"pml": "ob1"}, "pass", []),  # the recipe wants it
        (run(rank(0, fast=["mlx5_0"]), rank(1, fast=["mlx5_0"])), {}, "pass", []),  # nobody says how
        (run(*(rank(n, fast=["mlx5_0"], logged=OPENIB) for n in (0, 1))), {}, "pass", []),
        (
            run(rank(0, logged=TCP), rank(1, logged=TCP)), {},
            "pass", ["MPI negotiated, MPI reduced in host memory (pml ob1, btl self, tcp)"],
        ),
        (
            run(on_gpu(0, "n0", "7000"), on_gpu(1, "n0", "7000")), {},
            "fail", ["several ranks on n0 use the same GPU (bus 7000)"],
        ),
        (ON_GPUS, {}, "pass", ["NCCL 2.18.5 on GPUs (P2P/IPC)"]),
        (run(on_gpu(0, "n0", "7000"), on_gpu(1, "n1", "7000")), {}, "pass", []),
        (
            run(*(on_gpu(n, f"n{n}", "7000", ["mlx5_0"], via=["NET/Socket"]) for n in (0, 1))), {},
            "fail", ["NCCL uses TCP although the hosts have mlx5_0"],
        ),
    ],
)  # fmt: skip
def test_which_ways_are_right(
    ranks: RankRun, meant: Mapping[str, str], status: str, messages: list[str]
) -> None:
    found = judged(ranks, meant)
    assert found[0] == status
    assert all(each in found[1] for each in messages)


def test_what_to_do_about_tcp() -> None:
    by_horovodrun = datapath.judge_path(SLOW._replace(launcher="horovodrun-mpi"), {})
    assert "use the launcher mpirun" in by_horovodrun.remedy
    asked = run(rank(0, **FAST, variables={"OMPI_MCA_btl": "tcp,self"}), rank(1, **FAST))
    assert "OMPI_MCA_btl=tcp,self" in datapath.judge_path(asked, {}).remedy


@pytest.mark.parametrize(
    ("gpu", "status"),
    [
        (Gpu(why="there is no GPU here that this process may use"), "unproven"),
        (Gpu(why="2 ranks on this host, and 1 GPUs", on_host=1), "unproven"),
        (Gpu(why="the host has GPUs, but the framework sees none", on_host=2), "fail"),
        (Gpu("cuda:0", on_host=2), "fail"),
        (Gpu(), "unproven"),
    ],
)
def test_why_no_rank_used_nccl(gpu: Gpu, status: str) -> None:
    assert datapath.why_no_nccl(run(rank(0, gpu=gpu), rank(1, gpu=gpu)))[0] == status


def statuses(ranks: RankRun) -> dict[str, str]:
    """Statuses of operations by subject."""
    return {each.subject: each.status for each in operations(ranks)}


def operations(ranks: RankRun) -> Sequence[Finding]:
    facts = ExtensionFacts("torch", size=1, gpus=2, built={"NCCL": 21805, "MPI": 1})
    extension = Extension("torch", Outcome(Command(("python",)), 0, "", 0.0), facts)
    pair = Pair("torch", "MPI")
    known = evidence(extensions={"torch": extension}, mpi=(OPEN_MPI, ""), runs={pair: ranks})
    expectation = Expectation(operations=("NCCL", "MPI"))
    setup = Setup(Installation("", "", ()), Runner(), expectation)
    return list(rank_checks.check_operations(setup, known))


def test_operations_of_runs_on_gpus() -> None:
    proven = run(on_gpu(0, "n0", "7000"), on_gpu(1, "n1", "7000"))
    assert statuses(proven) == {"NCCL in torch": "pass", "MPI in torch": "pass"}
    half = run(on_gpu(0, "n0", "7000"), rank(1, "n1"))
    assert statuses(half) == {"NCCL in torch": "fail", "MPI in torch": "pass"}
    # Communicators of a rank alone join nobody.
    alone = run(on_gpu(0, "n0", "7000"), on_gpu(1, "n1", "7000", comm=["1 busId 7000"]))
    assert statuses(alone) == {"NCCL in torch": "fail", "MPI in torch": "pass"}
    crowd = Gpu(why="2 ranks on this host, and 1 GPUs", on_host=1)
    crowded = run(rank(0, gpu=crowd), rank(1, gpu=crowd))
    assert statuses(crowded) == {"NCCL in torch": "unproven", "MPI in torch": "pass"}
    only = run(on_gpu(0, "n0", "7000", comm=["1 busId 7000"]))
    assert statuses(only) == {"NCCL in torch": "unproven", "MPI in torch": "unproven"}


def test_records_of_ranks() -> None:
    (first, second) = datapath.rank_records("torch", run(rank(0, logged=TCP), on_gpu(1, "n1", "7")))
    assert (first.name, first.run, first.pid) == ("rank 0 on n0", "torch over MPI", 100)
    assert (first.device, first.data_path) == ("cpu", "pml ob1, btl self, tcp")
    assert (first.status, first.local_rank, first.seconds) == ("pass", 0, 4.0)
    assert second.device == "cuda:1"
    path = "this MPI does not report how it sends; NCCL P2P/IPC"
    assert [each.data_path for each in datapath.rank_records("torch", ON_GPUS)] == [path] * 2


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        (LIBRARY, OPEN_MPI),
        ("MPICH Version: 5.0.2 MPICH Release date: Fri Sep 25", MpiVersion("Hydra", "5.0.2")),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", MpiVersion("Intel MPI", "2021.11")),
        (
            "MPI VERSION : CRAY MPICH version 8.1.4.31 (ANL base)",
            MpiVersion("Cray MPICH", "8.1.4.31"),
        ),
        ("MVAPICH2 Version : 2.3.7", MpiVersion("MVAPICH", "2.3.7")),
        ("", MpiVersion("unknown")),
    ],
)
def test_what_libraries_of_mpi_call_themselves(text: str, mpi: MpiVersion) -> None:
    assert parse_mpi_library(text) == mpi


def test_every_rank_has_to_run_from_the_image() -> None:
    """One that reports nothing, or another image, is none that did."""
    mount = f"hvdenv:{'a' * 64}"
    inside = rank(0, files=f"fuse.squashfuse_ll {mount}")
    assert "ran from the image" in datapath.judge_path(run(inside, inside), {}, mount).message
    for files in ("lustre mds1:/scratch", f"fuse hvdenv:{'b' * 64}", ""):
        ranks = run(inside, rank(1, host="n1", files=files))
        found = datapath.judge_path(ranks, {}, mount)
        assert found.status == "fail"
        assert found.message.startswith("1 of 2 ranks did not run from the image: rank 1 on n1")
        assert "--no-image" in found.remedy
    assert "image" not in datapath.judge_path(run(inside, inside), {}).message
    silent = run(*(each._replace(events=()) for each in (rank(0), rank(1))))
    assert datapath.judge_path(silent, {}, mount).status == "fail"
    assert judged(silent)[0] == "skip"

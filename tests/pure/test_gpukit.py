"""The GPU kit: what run.py starts, and what it says about each stage."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpukit import make
from tests.support.commands import ended
from tests.support.waiting import wait_until

KIT = Path(__file__).parents[2] / "gpukit"


@pytest.fixture
def kit(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpukit_run", KIT / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.KIT = tmp_path  # type: ignore[attr-defined]
    (tmp_path / "test").mkdir()
    (tmp_path / "horovod_tests.txt").write_text((KIT / "horovod_tests.txt").read_text())
    return module


def stages(kit: ModuleType, gpus: int, hosts: Sequence[str] = ()) -> dict[str, Any]:
    return {stage.name: stage for stage in kit.stages("/o", gpus, hosts)}


@pytest.mark.parametrize(("gpus", "ranks", "shared"), [(0, 1, 3), (2, 2, 3), (8, 8, 8)])
def test_nccl_has_a_gpu_for_each_rank_and_sharing_has_ranks_for_process_sets(
    kit: ModuleType, gpus: int, ranks: int, shared: int
) -> None:
    found = stages(kit, gpus)
    own = dict.fromkeys("nccl cases-nccl program bench horovod-tests".split(), ranks)
    several = {"shared-gpu": shared, "cases-shared-gpu": max(2, gpus)}
    assert {name: stage.ranks for name, stage in found.items()} == own | several
    for stage in found.values():
        option = stage.words.index("-n" if stage.kind == "verify" else "-np")
        assert stage.words[option + 1] == str(stage.ranks)
    (kit.KIT / "test").rmdir()  # the tests of Horovod
    assert stages(kit, gpus).keys() == found.keys() - {"horovod-tests"}


def test_a_command_runs_under_the_name_of_a_host() -> None:
    words = ["bash", str(KIT / "ssh"), "-o", "BatchMode=yes", "kit-a", "-p", "22", "uname", "-n;"]
    words += ["read", "x;", "echo", '"$x"']
    done = ended(*words, input="from standard input\n")
    if "Operation not permitted" in done.stderr:
        pytest.skip("this user may not set host names (unshare --user --uts)")
    assert done.stdout == "kit-a\nfrom standard input\n", done.stderr


def judged(
    kit: ModuleType, name: str, printed: object, code: int = 0, gpus: int = 1, gpu: bool = True
) -> tuple[str, str]:
    """The status of a stage that printed this, on a node with so many GPUs, and the reason."""
    stage, log = stages(kit, gpus)[name], ""
    if stage.kind == "verify":
        (kit.KIT / f"{name}.json").write_text(json.dumps(printed))
    elif stage.kind == "cases":
        assert isinstance(printed, list)
        (kit.KIT / f"{name}.json").write_text("\n".join(map(json.dumps, printed)))
    else:
        log = str(printed)
    (kit.KIT / f"{name}.log").write_text(f"{log}\n")
    status, why = kit.judge(kit.KIT, stage, code, gpu)
    return status, why


def report(*unproven: str, failed: Sequence[str] = (), device: str = "cuda:0") -> dict[str, Any]:
    found = [("pass", "x"), *(("unproven", each) for each in unproven)]
    found += [("fail", each) for each in failed]
    findings = [{"status": s, "subject": name, "message": "says why"} for s, name in found]
    return {"findings": findings, "ranks": [{"device": device}] * 3}


def of_program(device: str) -> dict[str, Any]:
    finding = {"check": "program-device", "subject": "x", "message": "says why"}
    return {"findings": [{**finding, "status": device}], "ranks": []}


def case(rank: int, status: str = "pass", device: str = "cuda:0") -> dict[str, Any]:
    facts = {"case": "gradients", "rank": rank, "size": 2, "device": device, "status": status}
    return facts if status == "pass" else {**facts, "message": "says why"}


@pytest.mark.parametrize(
    ("name", "printed", "code", "gpus", "status", "why"),
    [
        ("shared-gpu", report(), 0, 1, "pass", ""),
        ("nccl", report("NCCL in torch"), 7, 1, "unproven", "NCCL in torch: says why"),
        ("nccl", report(), 0, 3, "pass", ""),
        ("nccl", report("process sets"), 7, 2, "unproven", "process sets: says why"),
        ("nccl", report("NCCL", failed=["join"]), 1, 2, "fail", "join: says why"),
        # verify could choose the host's memory by itself.
        ("shared-gpu", report(device="cpu"), 0, 1, "fail", "tensors were in the host's memory"),
        ("shared-gpu", {}, 70, 1, "fail", "no report"),
        ("shared-gpu", report(), 124, 1, "fail", "did not finish in time"),
        ("program", of_program("pass"), 0, 2, "pass", ""),
        ("program", of_program("skip"), 0, 2, "fail", "tensors were in the host's memory"),
        ("program", of_program("fail"), 1, 2, "fail", "x: says why"),
        ("cases-shared-gpu", [case(0), case(1)], 0, 1, "pass", ""),
        ("cases-shared-gpu", [case(0)], 0, 1, "fail", "gradients: not reported by all ranks"),
        ("cases-shared-gpu", [case(0), case(1, "fail")], 1, 1, "fail", "gradients on rank 1: says"),
        ("cases-shared-gpu", [case(0), case(1)], 134, 1, "fail", "exit code 134"),
        ("cases-shared-gpu", [], 0, 1, "fail", "exit code 0"),
        ("cases-shared-gpu", [case(0, device="cpu"), case(1)], 0, 1, "fail", "the host's memory"),
        ("cases-nccl", [case(0)], 0, 1, "unproven", "NCCL between ranks needs two GPUs"),
        ("horovod-tests", "41 passed, 30 skipped in 9s", 0, 2, "pass", ""),
        ("horovod-tests", "41 passed in 9s", 0, 1, "unproven", "41 passed in 9s on 1 rank"),
        ("horovod-tests", "FAILED test_a\n1 failed", 1, 2, "fail", "FAILED test_a; 1 failed"),
        ("horovod-tests", "Segmentation fault\n-----\nmpirun", 139, 2, "fail", "139: Segmentation"),
    ],
)
def test_what_a_stage_proves_on_a_node_with_gpus(
    kit: ModuleType, name: str, printed: object, code: int, gpus: int, status: str, why: str
) -> None:
    found = judged(kit, name, printed, code, gpus)
    assert (found[0], why in found[1] and bool(why) == bool(found[1])) == (status, True), found
    assert "mpirun" not in found[1]


def stage(kit: ModuleType, script: str, kind: str = "cases") -> Any:
    return kit.Stage("one", kind, ["sh", "-c", script], 9, 1)


def test_a_stage_that_hangs_is_ended_with_what_it_started(kit: ModuleType, tmp_path: Path) -> None:
    seconds = f"61.{os.getpid()}"
    kit.GRACE_SECONDS = 0.2  # type: ignore[attr-defined]
    script = f"trap '' TERM; touch {tmp_path}/started; sleep {seconds}; true"
    assert kit.run_stage(tmp_path, stage(kit, script), 1) == 124
    assert (tmp_path / "started").exists()
    wait_until(lambda: not is_running(f"sleep\0{seconds}\0"))


def is_running(line: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == line.encode():
                return True
    return False


def test_files_of_the_archive_belong_to_root_and_nobody_else_writes_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o777)
    (tmp_path / "a/b").touch(mode=0o666)
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as written:
        written.add(tmp_path / "a", "kit", filter=make._of_root)
    with tarfile.open(archive) as read:
        modes = [(each.uid, each.gid, each.uname, oct(each.mode)) for each in read]
    assert sorted(modes) == [(0, 0, "root", mode) for mode in ("0o644", "0o755")]


def test_the_page_and_the_program_name_the_same_stages(kit: ModuleType) -> None:
    page = (KIT.parent / "docs/how-to/prove-the-gpu-path.md").read_text(encoding="utf-8")
    rows = page.split("| stage |")[1].split("\n\n")[0].splitlines()[2:]
    named = re.findall(r"`([a-z-]+)`", "".join(row.split("|")[1] for row in rows))
    assert set(named) == set(stages(kit, 1))

"""The GPU kit: what run.py starts, and what it says about each stage."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpukit import make
from hvdenv.base.places import find_places
from hvdenv.building.wheelcache import own, store
from tests.support.waiting import wait_until
from tests.support.wheels import wheel_in

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


def test_with_host_names_ranks_share_a_single_gpu_over_nccl(kit: ModuleType) -> None:
    found = stages(kit, 1, kit.HOSTS)
    slots = "kit-a:1,kit-b:1,kit-c:1,kit-d:1"
    verified = {"nccl": "--hosts", "bench": "--hosts"}
    for name, option in {**verified, "cases-nccl": "--host", "horovod-tests": "--host"}.items():
        stage = found[name]
        assert stage.words[stage.words.index(option) + 1] == slots
        assert stage.ranks == 4
    assert not any(slots in found[name].words for name in ("shared-gpu", "cases-shared-gpu"))
    assert "not process_sets" not in " ".join(found["horovod-tests"].words)


def test_a_command_runs_under_the_name_of_a_host() -> None:
    words = ["bash", str(KIT / "ssh"), "-o", "BatchMode=yes", "kit-a", "-p", "22", "uname", "-n;"]
    words += ["read", "x;", "echo", '"$x"']
    done = subprocess.run(words, input="from standard input\n", capture_output=True, text=True)
    if "Operation not permitted" in done.stderr:
        pytest.skip("this user may not set host names (unshare --user --uts)")
    assert done.stdout == "kit-a\nfrom standard input\n", done.stderr


def test_one_rank_skips_tests_that_need_two_and_goes_on_after_a_failure(kit: ModuleType) -> None:
    one, two = (stages(kit, gpus)["horovod-tests"].words for gpus in (1, 2))
    assert "-x" in two and "-x" not in one
    chosen_by_one, chosen_by_two = (words[words.index("-k") + 1] for words in (one, two))
    for name in ("process_sets", "join", "sync_batch_norm"):
        assert f" and not {name}" in chosen_by_one
        assert f"not {name}" not in chosen_by_two
    assert "test_horovod_sync_batch_norm" in chosen_by_two


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


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("shared-gpu", report(device="cpu")),
        ("program", of_program("skip")),
        ("cases-shared-gpu", [case(0, device="cpu"), case(1, device="cpu")]),
        ("cases-nccl", [case(0, "skip", "cpu")]),
        ("horovod-tests", "41 passed, 30 skipped in 9s"),
    ],
)
def test_without_a_gpu_nothing_is_proven_and_nothing_failed(
    kit: ModuleType, name: str, printed: object
) -> None:
    status, why = judged(kit, name, printed, gpus=0, gpu=False)
    assert (status, bool(why)) == ("unproven", True)
    assert judged(kit, name, printed, code=1, gpus=0, gpu=False)[0] == "fail"


@pytest.mark.parametrize(
    ("version", "python", "why"),
    [
        ("2.11.0+cu130", "3.12.3", ""),
        ("2.11.0+cpu", "3.12.3", "has torch 2.11.0+cpu: the kit's wheels need torch 2.11.0+cu130"),
        ("", "3.12.3", "has no torch"),
        ("2.11.0+cu130", "3.11.7", "start run.py with Python 3.12"),
    ],
)
def test_a_python_that_the_kit_does_not_fit(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, python: str, why: str
) -> None:
    monkeypatch.setattr("platform.python_version", lambda: python)
    torch = SimpleNamespace(__version__=version) if version else None
    found = kit.why_not_here(torch)
    assert bool(found) == bool(why)
    assert why in found


def stage(kit: ModuleType, script: str, kind: str = "cases") -> Any:
    return kit.Stage("one", kind, ["sh", "-c", script], 9, 1)


def test_a_stage_that_hangs_is_ended_with_what_it_started(kit: ModuleType, tmp_path: Path) -> None:
    seconds = f"61.{os.getpid()}"
    kit.GRACE_SECONDS = 0.2  # type: ignore[attr-defined]
    script = f"trap '' TERM; touch {tmp_path}/started; sleep {seconds}; true"
    assert kit.run_stage(tmp_path, stage(kit, script), 1) == 124
    assert (tmp_path / "started").exists()
    wait_until(lambda: not is_running(f"sleep\0{seconds}\0"))


def test_a_stage_that_ends_when_it_is_told_to_was_late_all_the_same(
    kit: ModuleType, tmp_path: Path
) -> None:
    script = "trap 'exit 3' TERM; echo x; sleep 60 & wait"
    assert kit.run_stage(tmp_path, stage(kit, script), 1) == 124
    assert (tmp_path / "one.json").read_text() == "x\n"


def is_running(line: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == line.encode():
                return True
    return False


def test_where_a_stage_prints(kit: ModuleType, tmp_path: Path) -> None:
    script = "echo out; echo err >&2; exit 7"
    assert kit.run_stage(tmp_path, stage(kit, script), 20) == 7
    assert (tmp_path / "one.json").read_text() == "out\n"
    assert (tmp_path / "one.log").read_text() == "err\n"
    (tmp_path / "one.json").unlink()
    assert kit.run_stage(tmp_path, stage(kit, script, "tests"), 20) == 7
    assert not (tmp_path / "one.json").exists()
    assert sorted((tmp_path / "one.log").read_text().split()) == ["err", "out"]


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


def test_the_kit_takes_the_wheel_of_an_environment_from_the_cache(tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    prefix.mkdir()
    (prefix / "hvdenv.json").write_text(json.dumps({"stack": {"torch": "2.11.0"}}))
    assert not make.take_wheel(prefix, tmp_path / "none")
    wheel = wheel_in(tmp_path)
    store(own(find_places()), {"torch": "2.11.0"}, wheel)
    assert make.take_wheel(prefix, tmp_path / "nccl")
    assert (tmp_path / "nccl" / wheel.name).read_bytes() == wheel.read_bytes()

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hvdenv import STEP_PROGRAMS
from hvdenv.base.errors import IncompatibleError, UsageError
from hvdenv.base.schema import Problem
from hvdenv.environments.installation import expectation_of
from hvdenv.knowledge import patches
from hvdenv.knowledge.flags import compute_capabilities, horovod_variables
from hvdenv.knowledge.patches import (
    FOLDER,
    SETS,
    all_patches,
    applicable,
    read_patch,
    set_digest,
    set_number,
)
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from tests.support.commands import ended

BOTH = {"horovod": "0.28.1", "torch": "2.13.0", "tensorflow": "2.15.1"}


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_each_patch_says_what_why_and_what_upstream_did(path: Path) -> None:
    patch = read_patch(path)
    assert patch.name == path.stem
    assert patch.summary
    assert len(patch.reason) > 40
    assert len(patch.proven) > 20
    assert patch.upstream.startswith(("https://github.com/", "none"))
    assert patch.edit
    for edit in patch.edit:
        assert edit.find != edit.replace
        assert not edit.file.startswith("/")
        assert ".." not in edit.file.split("/")


def names(versions: dict[str, str]) -> set[str]:
    return {patch.name for patch in applicable(versions)}


def test_patches_go_by_versions_and_frameworks() -> None:
    everything = names(BOTH)
    newer = {"keras-3", "tensorflow-xla-headers"}
    left = {each.name for each in all_patches()} - everything
    assert left == {"gloo-kernel-headers", "torch-cxx20", "tensorflow-gpu", *newer}
    assert names({**BOTH, "tensorflow": "2.18.1"}) - everything == {"keras-3"}
    assert names({**BOTH, "tensorflow": "2.19.0"}) - everything == newer
    assert names({**BOTH, "tensorflow": "2.21.0"}) - everything == {*newer, "tensorflow-gpu"}
    torch_only = {"horovod": "0.28.1", "torch": "2.13.0"}
    assert everything - names(torch_only) == {"shared-common", "tensorflow-join"}
    assert "torch-cxx17" not in names({**torch_only, "torch": "2.0.1"})
    assert "torch-cxx17" in names({**torch_only, "torch": "2.1.0+cpu"})
    assert "torch-cxx17" not in names({"horovod": "0.28.1", "tensorflow": "2.15.1"})
    assert names({**BOTH, "torch": "2.14.0"}) == everything - {"shared-common"} | {"torch-cxx20"}
    assert names({**BOTH, "horovod": "0.26.1"}) == everything | {"gloo-kernel-headers"}
    assert names({**BOTH, "horovod": "0.25.0"}) == names({**BOTH, "horovod": "0.26.1"}) - {
        "nccl-average",
        "python312-distutils",
        "safe-rendezvous",
    }
    older = {"gloo-kernel-headers", "gloo-rendezvous", "gloo-process-sets"}
    older |= {"elastic-sync", "torch-operation-names"}
    assert names({**BOTH, "horovod": "0.24.3"}) == older
    assert names({**BOTH, "horovod": "0.19.5"}) == names({**BOTH, "horovod": "0.29.0"}) == set()


def test_a_patch_with_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text((FOLDER / "relocatable.toml").read_text().replace("reason =", "resaon ="))
    with pytest.raises(Problem, match='resaon: unknown key; did you mean "reason"'):
        read_patch(path)


def prepare(
    archive: Path, patches: list[dict[str, Any]], sha256: str = ""
) -> tuple[int, str, Path]:
    """Run the program as a build does: its exit code, what it says, and the directory it makes."""
    dest, file = archive.with_name("s"), archive.with_name("patches.json")
    sha256 = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
    file.write_text(json.dumps(patches))
    program = [sys.executable, str(STEP_PROGRAMS / "prepare_source.py")]
    words = [*program, str(archive), sha256, str(dest), str(file)]
    found = ended(*words)
    return found.returncode, found.stdout + found.stderr, dest


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "x-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (("setup.py", b"one\ntwo\ntwo\n"), ("deep/a.txt", b"tab\there\r\n")):
            member = tarfile.TarInfo(f"x-1/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return path


def patch(find: str, replace: str = "new", file: str = "setup.py") -> dict[str, Any]:
    return {"name": "mend", "edits": [{"file": file, "find": find, "replace": replace}]}


def test_a_patch_that_fits(archive: Path, tmp_path: Path) -> None:
    """A second run starts from the archive."""
    (tmp_path / "s.unpacking").mkdir()
    (tmp_path / "s.unpacking/rest").write_text("of a killed run")
    for _ in range(2):
        code, said, dest = prepare(archive, [patch("one"), patch("tab", "TAB", "deep/a.txt")])
        assert (code, said) == (0, "applied mend\napplied mend\n")
        assert (dest / "setup.py").read_text() == "new\ntwo\ntwo\n"
        assert (dest / "deep/a.txt").read_bytes() == b"TAB\there\r\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["patches.json", "s", "x-1.tar.gz"]


@pytest.mark.parametrize(
    ("wanted", "sha256", "said"),
    [
        (patch("three"), "", "setup.py: the text to replace occurs 0 times instead of once"),
        (patch("two"), "", "setup.py: the text to replace occurs 2 times instead of once"),
        (patch("one", file="none.py"), "", "none.py: No such file"),
        (patch("one"), "0" * 64, f"has sha256 {{}}, expected {'0' * 64}"),
    ],
)
def test_what_does_not_fit(archive: Path, wanted: dict[str, Any], sha256: str, said: str) -> None:
    code, output, dest = prepare(archive, [wanted], sha256)
    where = "" if sha256 else "patch mend, edit 1, "
    assert code == 1
    assert where + said.format(hashlib.sha256(archive.read_bytes()).hexdigest()) in output
    assert dest.exists() == (not sha256)


def header(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> bytes:
    """The header of a member, which is all of an empty one."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, size
    return member.tobuf(tarfile.GNU_FORMAT)


NO_FILE, OUTSIDE = "neither a file nor a directory", "a path outside of the archive"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (header("x-1/../../evil"), OUTSIDE),
        (header("/evil"), OUTSIDE),
        (header("x-1/l", tarfile.SYMTYPE, "/etc/passwd"), NO_FILE),
        (header("x-1/l", tarfile.LNKTYPE, "/etc/passwd"), NO_FILE),
        (header("x-1/l", tarfile.FIFOTYPE), NO_FILE),
        (header("x-1/a") + header("y-1/a"), "should hold one top directory, it holds x-1, y-1"),
        # What would fill the disk or the memory: the header says so, and nothing is unpacked.
        (
            header("x-1/large", size=(2 << 30) + 1),
            "x-1.tar.gz: it unpacks to more than 1073741824 bytes or 50000 files",
        ),
        (
            header("x-1/name", tarfile.GNUTYPE_LONGNAME, size=1 << 32),
            "x-1.tar.gz: it has a header of more than 1048576 bytes",
        ),
    ],
)
def test_an_archive_that_reaches_out_or_is_too_large_is_refused(
    tmp_path: Path, headers: bytes, said: str
) -> None:
    (inside := tmp_path / "inside").mkdir()
    archive = inside / "x-1.tar.gz"
    archive.write_bytes(gzip.compress(headers + bytes(1024)))
    code, output, dest = prepare(archive, [])
    assert code == 1
    assert said in output
    assert "Traceback" not in output
    assert not dest.exists() and not list(inside.rglob("large"))
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def test_each_set_of_patches_has_a_number(pytestconfig: pytest.Config) -> None:
    """Versions of published wheels contain it, so the last line is the current set."""
    known, digest = SETS.read_text(encoding="utf-8").split(), set_digest(all_patches())
    if pytestconfig.getoption("--regenerate") and known[-1] != digest:
        known.append(digest)
        SETS.write_text("".join(f"{each}\n" for each in known), encoding="utf-8")
    assert known[-1] == digest, "run pytest tests/pure/test_patches.py --regenerate"
    assert len(set(known)) == len(known)
    assert set_number() == len(known)


def test_the_number_grows_when_a_patch_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *rest = all_patches()
    edit = first.edit[0]._replace(replace="x")
    assert set_digest([first._replace(proven="else", summary="x"), *rest]) == set_digest(
        [first, *rest]
    )
    known, sets = SETS.read_text(encoding="utf-8").split(), tmp_path / "sets"
    monkeypatch.setattr(patches, "SETS", sets)
    for changed in (first._replace(edit=(edit,)), first._replace(horovod=">=0.27")):
        now = (changed, *rest)
        monkeypatch.setattr(patches, "all_patches", lambda now=now: now)
        sets.write_text("\n".join(known), encoding="utf-8")
        with pytest.raises(UsageError, match="no number") as caught:
            set_number()
        assert f">> {sets}" in caught.value.remedy
        known.append(set_digest(now))
        sets.write_text("\n".join(known), encoding="utf-8")
        assert set_number() == len(known)


# ---------------------------------------------------------------- variables that Horovod's build reads


def recipe(settings: str, table: str = "horovod.") -> Recipe:
    """The recipe ``local`` with other values, separated by spaces, such as ``gpu.operations=nccl``."""
    return load_recipe("local", overrides=[table + each for each in settings.split()]).recipe


def variables(settings: str = "") -> dict[str, str]:
    return horovod_variables(recipe(settings), "x86_64")


# Without HOROVOD_.
SWITCHES = {
    "": "WITH_TENSORFLOW WITH_PYTORCH WITHOUT_MXNET WITH_MPI WITH_GLOO WITHOUT_NVTX",
    'frameworks=["torch"] controllers=["gloo"]': "WITHOUT_TENSORFLOW WITH_PYTORCH WITHOUT_MXNET WITHOUT_MPI WITH_GLOO WITHOUT_NVTX",
    'frameworks=["tensorflow"] controllers=["mpi"]': "WITH_TENSORFLOW WITHOUT_PYTORCH WITHOUT_MXNET WITH_MPI WITHOUT_GLOO WITHOUT_NVTX",
}


@pytest.mark.parametrize(("settings", "expected"), SWITCHES.items())
def test_what_is_not_asked_for_is_refused_by_name(settings: str, expected: str) -> None:
    seen = variables(settings)
    switches = {name for name in seen if name.startswith("HOROVOD_WITH")}
    assert switches == {f"HOROVOD_{each}" for each in expected.split()}
    assert {seen[name] for name in switches} == {"1"}
    assert not any(name.startswith("HOROVOD_GPU") for name in seen)
    assert seen["HOROVOD_BUILD_ARCH_FLAGS"] == "-mf16c -mavx -mfma"
    assert all(seen.values())


# Without HOROVOD_.
GPU = {
    "gpu.operations=nccl": "GPU=CUDA GPU_OPERATIONS=NCCL",
    "gpu.allreduce=nccl gpu.broadcast=nccl": "GPU_ALLREDUCE=NCCL GPU_BROADCAST=NCCL",
    "gpu.platform=rocm gpu.operations=nccl gpu.rocm_home=/opt/rocm": "GPU=ROCM ROCM_HOME=/opt/rocm",
    "gpu.operations=nccl gpu.nccl_home=$EBROOTNCCL gpu.nccl_link=shared": "NCCL_HOME=$EBROOTNCCL NCCL_LINK=SHARED",
    "gpu.operations=nccl gpu.nccl=torch": "NCCL_LINK=SHARED",
    'gpu.operations=nccl gpu.capabilities=["70","80"]': "BUILD_CUDA_CC_LIST=70,80",
    "gpu.allreduce=nccl gpu.allgather=mpi gpu.allow_mixed=true": "ALLOW_MIXED_GPU_IMPL=1 GPU_ALLGATHER=MPI",
    "cpu_operations=gloo": "CPU_OPERATIONS=GLOO",
}


@pytest.mark.parametrize(("settings", "expected"), GPU.items())
def test_typed_values_are_spelled_as_horovod_reads_them(settings: str, expected: str) -> None:
    assert {f"HOROVOD_{each}" for each in expected.split()} <= {
        f"{name}={value}" for name, value in variables(settings).items()
    }


REFUSED = {
    "gpu.nccl_link=shared": ("gpu", "nothing would be built for GPUs"),
    "version=0.19.5": ("version", "0.20.0 and newer, not 0.19.5"),
    "version=0.24.3 gpu.reducescatter=nccl": ("gpu.reducescatter", "read since 0.25.0"),
    "gpu.operations=nccl gpu.broadcast=nccl": ("gpu.broadcast", "only one of the two"),
    "gpu.allreduce=nccl gpu.broadcast=mpi": ("gpu.broadcast", "can deadlock"),
    "gpu.operations=nccl gpu.nccl=torch gpu.nccl_home=/usr": ("gpu.nccl", "together with another"),
    'gpu.operations=nccl gpu.nccl=torch frameworks=["tensorflow"]': ("gpu.nccl", "but not torch"),
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_a_release_would_ignore_is_refused(settings: str) -> None:
    where, message = REFUSED[settings]
    with pytest.raises(IncompatibleError, match=message) as caught:
        variables(settings)
    assert caught.value.where == f"horovod.{where}"
    assert caught.value.remedy


def test_one_build_is_for_the_gpus_of_all_partitions() -> None:
    several = recipe(
        'a.capability="80" b.capability="70" c.capability="100" d.cores=4', "partitions."
    )
    assert compute_capabilities(several) == ("70", "80", "100")


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ("", ()),
        ("gpu.operations=nccl", ("NCCL",)),
        ("gpu.allreduce=ddl", ("DDL",)),
        ("cpu_operations=ccl", ("CCL",)),
    ],
)
def test_operations_that_verify_expects(settings: str, more: tuple[str, ...]) -> None:
    assert expectation_of(recipe(settings)).operations == ("MPI", "Gloo", *more)

"""Facts of verify that need no environment which can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import Installation, inspect_prefix
from hvdenv.errors import InterruptedRunError, StepError, UsageError
from hvdenv.runner import Runner
from hvdenv.verification import inspection
from hvdenv.verification.installation_checks import check_files
from hvdenv.verification.rank_start import words_before_launcher
from hvdenv.verification.setup import Setup
from tests.evidence import evidence

HOROVOD = "venv/lib/python3.11/site-packages/horovod/torch/mpi_ops.py"
LIBMPI = "venv/lib/libmpi.so.40.30.8"
OTHER = "venv/lib/python3.11/site-packages/numpy/version.py"


@pytest.fixture
def generation(tmp_path: Path) -> Path:
    for name in (HOROVOD, LIBMPI, OTHER, "venv/bin/python", generations.MARKER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as built")
    digest = manifest.write(tmp_path, (generations.RECORD, generations.MARKER)).digest
    generations.write_record(
        tmp_path / generations.RECORD, GenerationRecord(manifest_digest=digest)
    )
    return tmp_path


def changed_files(
    generation: Path, timeout: float = 60, runner: Runner | None = None
) -> list[manifest.Difference]:
    installation = Installation("", "", (), generation=str(generation))
    return inspection.changed_files(Setup(installation, runner or Runner()), timeout)


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        (HOROVOD, "fail", "1 file was changed since the build"),
        (LIBMPI, "pass", "all files of the build are present; 1 changed"),
        (OTHER, "pass", "all files of the build are present"),  # to read gigabytes takes minutes
    ],
)
def test_an_edit_that_leaves_the_size_as_it_was(
    generation: Path, name: str, status: str, message: str
) -> None:
    (generation / name).write_text("as  else")
    changed = changed_files(generation)
    setup = Setup(Installation("", "", ()), Runner())
    (finding,) = check_files(setup, evidence(changed_files=changed))
    assert (finding.status, finding.message) == (status, message)


def test_a_build_whose_record_is_gone_is_not_taken_for_an_environment_of_a_user(
    generation: Path,
) -> None:
    """There would be nothing then that its files are compared with."""
    assert inspect_prefix(str(generation)).generation == str(generation)
    (generation / generations.RECORD).unlink()
    with pytest.raises(StepError, match="the record was removed"):
        inspect_prefix(str(generation))


def test_a_link_to_a_generation_that_is_gone(generation: Path) -> None:
    link = generation / "link"
    link.symlink_to(".link.hvdenv/0123456789ab")
    with pytest.raises(UsageError, match=r"\.link\.hvdenv/0123456789ab does not exist"):
        inspect_prefix(str(link))


def test_files_are_looked_at_no_longer_than_there_is_time(generation: Path) -> None:
    with pytest.raises(StepError, match="not all files could be compared within 0 s"):
        changed_files(generation, timeout=0)
    runner = Runner()
    runner.stop()
    with pytest.raises(InterruptedRunError):
        changed_files(generation, runner=runner)


@pytest.mark.parametrize(
    ("launcher", "full", "image", "told"),
    [
        ("horovodrun-gloo", False, False, True),
        ("horovodrun-gloo", True, False, False),
        ("horovodrun-gloo", False, True, False),
        ("mpirun", False, False, False),
    ],
)
def test_horovodrun_is_told_what_check_build_found(
    launcher: str, full: bool, image: bool, told: bool
) -> None:
    installation = Installation("/env", "/env/bin/python", (), inside=("apptainer",) * image)
    setup = Setup(installation, Runner({}), full=full)
    words = words_before_launcher(setup, launcher)
    assert [Path(word).name for word in words] == ["python", "-s", "horovodrun.py"] * told

"""What programs of an environment show to verify, and the table of horovodrun --check-build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv import INSPECT_PROGRAMS
from hvdenv.contents.record import GenerationRecord
from hvdenv.environments import generations, manifest
from hvdenv.environments.installation import Installation, inspect_prefix
from hvdenv.errors import InterruptedRunError, StepError, UsageError
from hvdenv.runner import Runner
from hvdenv.verification import inspection
from hvdenv.verification.inspection import parse_check_build
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


CASES = Path(__file__).parents[1] / "cases" / "checkbuild"
GOOD = sorted((CASES / "good").glob("*.txt"))
BAD = sorted((CASES / "bad").glob("*.txt"))
# Those with nothing but the table.
PLAIN = [
    path
    for path in GOOD
    if path.stem in ("0.18.2-with-mlsl", "0.24.3-with-nothing-built", "0.28.1")
]
REFUSED = "is missing|no output|its sections are|the rows under"


def read(path: Path) -> str:
    return path.read_bytes().decode()


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_known_texts(path: Path) -> None:
    assert parse_check_build(read(path))._asdict() == json.loads(
        path.with_suffix(".json").read_text()
    )


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_anything_else_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse_check_build(read(path))


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_cut_text_never_gives_another_table(path: Path) -> None:
    whole = path.read_bytes()
    expected = parse_check_build(whole.decode())
    last_row = whole.rstrip().rfind(b" Gloo") + len(b" Gloo")
    for length in range(len(whole)):
        text = whole[:length].decode(errors="replace")
        if length < last_row:
            with pytest.raises(ValueError, match=REFUSED):
                parse_check_build(text)
        else:
            assert parse_check_build(text) == expected


@pytest.mark.parametrize("version", ["0.28.1rc1", "0.28.1.post1", "1.0.0+cu121"])
def test_versions(version: str) -> None:
    text = read(CASES / "good/0.28.1.txt").replace("0.28.1", version)
    assert parse_check_build(text).version == version


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_line_left_out_is_refused(path: Path) -> None:
    lines = read(path).splitlines()
    for number, line in enumerate(lines):
        if line.strip():
            with pytest.raises(ValueError, match=REFUSED):
                parse_check_build("\n".join([*lines[:number], *lines[number + 1 :]]))


@given(
    st.sampled_from(PLAIN), st.text(st.characters(exclude_characters="[]:\r")), st.integers(0, 17)
)
def test_other_lines_do_not_matter(path: Path, noise: str, at: int) -> None:
    lines = read(path).splitlines()
    changed = [*lines[:at], *noise.split("\n"), *lines[at:]]
    assert parse_check_build("\n".join(changed)) == parse_check_build(read(path))


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse_check_build(text)


# As Horovod does it: every row imports the framework in a forked process.
HOROVODRUN = """#!{python}
import os, sys
assert sys.argv[1:] == ["--check-build"], sys.argv
for row in range(3):
    if not os.fork():
        import horovod.torch
        print("row", row, horovod.torch.STATE, flush=True)
        os._exit(0)
    os.wait()
"""
COUNT = "import os\nos.write(2, b'imported ')\nSTATE = 'fine'\n"
THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
)
ONLY_ALONE = "import sys\nassert 'check_build' not in repr(sys.modules['__main__'])\n"


def rows_and_imports(folder: Path, fault: str, interpreter: str) -> tuple[int, int]:
    """How many rows are printed, and how often the framework is imported."""
    package = folder / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(COUNT + fault)
    script = folder / "horovodrun"
    script.write_text(HOROVODRUN.format(python=interpreter))
    script.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-s", str(INSPECT_PROGRAMS / "check_build.py"), str(script), "torch"],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.count("fine"), done.stderr.count("imported")


@pytest.mark.parametrize(
    ("fault", "interpreter", "imports"),
    [
        pytest.param("", sys.executable, 1, id="once"),
        pytest.param(THREAD, sys.executable, 4, id="a-thread-when-imported"),
        pytest.param(ONLY_ALONE, sys.executable, 4, id="imports-in-a-new-process-only"),
        pytest.param("", f"/usr/bin/env {sys.executable}", 3, id="a-script-by-another-program"),
    ],
)
def test_each_row_has_its_framework(
    tmp_path: Path, fault: str, interpreter: str, imports: int
) -> None:
    assert rows_and_imports(tmp_path, fault, interpreter) == (3, imports)


# As Horovod does it, in the module that its script imports.
LAUNCH = """#!{python}
import sys
from horovod.common.util import gloo_built
print(sys.argv[1:], gloo_built(verbose=True))
"""


@pytest.mark.parametrize(
    ("interpreter", "answer"), [(sys.executable, True), (f"/usr/bin/env {sys.executable}", "asked")]
)
def test_horovodrun_is_told_that_gloo_was_built(
    tmp_path: Path, interpreter: str, answer: object
) -> None:
    package = tmp_path / "horovod" / "common"
    package.mkdir(parents=True)
    (package / "util.py").write_text("def gloo_built(verbose=False):\n    return 'asked'\n")
    script = tmp_path / "horovodrun"
    script.write_text(LAUNCH.format(python=interpreter))
    script.chmod(0o755)
    program = str(INSPECT_PROGRAMS / "horovodrun.py")
    printed = subprocess.run(
        [sys.executable, "-s", program, str(script), "--gloo", "-np", "2"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == f"['--gloo', '-np', '2'] {answer}\n"

"""What has changed since a build, in copies of an environment that are changed in one way each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.errors import StepError
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.environments import generations
from hvdenv.environments.installation import Installation, with_modules
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.cluster import Modules
from hvdenv.reports.report import Finding
from hvdenv.sites import module_shell
from hvdenv.sites.launchers import MpiVersion
from hvdenv.verification import inspection
from hvdenv.verification.installation_checks import check_drift
from hvdenv.verification.setup import Setup
from tests.real.doctored import TIMEOUT, compiled, make_copy, purelib
from tests.support.evidence import evidence
from tests.support.modulesystems import KINDS, cache_folder, install, write_module


@pytest.fixture
def built(original: Installation, tmp_path: Path) -> Installation:
    """A generation with a libmpi of its own."""
    copy = make_copy(original, tmp_path / "built" / "venv")
    library = next((tmp_path / "built/venv/lib").glob("libmpi.so.*"))
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content)
    return copy._replace(generation=str(tmp_path / "built"))


def libmpi(built: Installation) -> Path:
    return next(Path(built.generation, "venv/lib").glob("libmpi.so.*"))


def record(built: Installation, runner: Runner) -> None:
    """Write the record as the end of a build does."""
    setup = Setup(built, runner)
    mpi, _ = inspection.host_mpi(setup, TIMEOUT)
    seen = inspection.observe(setup, TIMEOUT, mpi)
    path = Path(built.generation, generations.RECORD)
    generations.write_record(path, GenerationRecord(hvdenv="0.1.0", observed=encode(seen)))


def drift(now: Installation, runner: Runner) -> list[Finding]:
    """The findings of verify's check."""
    setup = Setup(now, runner)
    observed = inspection.observed(setup, TIMEOUT, inspection.host_mpi(setup, TIMEOUT))
    return list(check_drift(setup, evidence(observed=observed)))


def the_failure(now: Installation, runner: Runner) -> Finding:
    (finding,) = drift(now, runner)
    assert finding.status == "fail", finding
    return finding


def the_note(now: Installation, runner: Runner) -> str:
    (finding,) = drift(now, runner)
    assert finding.status == "pass", finding
    return finding.message


def test_nothing_has_changed_right_after_a_build(original: Installation, runner: Runner) -> None:
    assert the_note(original, runner) == "nothing has changed"
    recorded = generations.read_record(Path(original.generation) / generations.RECORD).observed
    assert recorded
    torch = recorded["extensions"]["torch"]
    assert torch["libraries"]["libmpi.so.40"]["path"].startswith("venv/lib/libmpi.so")
    assert torch["libraries"]["libmpi.so.40"]["version"].startswith("Open MPI v")
    assert torch["glibcxx"] and torch["glibc"] and recorded["glibc"]
    assert recorded["packages"]["horovod"] == "0.28.1"


def test_an_environment_that_was_moved_is_the_same(
    built: Installation, runner: Runner, tmp_path: Path
) -> None:
    record(built, runner)
    Path(built.generation).rename(tmp_path / "moved")
    moved = json.loads(json.dumps(built).replace(built.generation, str(tmp_path / "moved")))
    moved = Installation(*moved)._replace(path=tuple(moved[2]), env=())
    assert the_note(moved, runner) == "nothing has changed"


def test_a_libmpi_of_another_version_in_its_place(built: Installation, runner: Runner) -> None:
    record(built, runner)
    path = libmpi(built)
    path.unlink()
    code = (
        "#include <string.h>\nint MPI_Get_library_version(char *text, int *length)"
        '{ strcpy(text, "Open MPI v3.1.4, package: x"); *length = 15; return 0; }'
    )
    compiled(code, path, f"-Wl,-soname,{path.name}")
    message = the_failure(built, runner).message
    assert f"{path.name} (Open MPI v3.1.4) now and was " in message
    assert message.endswith(", and this is Open MPI v3.1.4")


def test_a_libmpi_that_is_gone(built: Installation, runner: Runner) -> None:
    record(built, runner)
    libmpi(built).unlink()
    message = the_failure(built, runner).message
    assert message.endswith(" (linked for torch): the extension cannot load without it")


def test_a_libstdcxx_that_is_too_old(built: Installation, runner: Runner, tmp_path: Path) -> None:
    record(built, runner)
    script = tmp_path / "versions"
    script.write_text("GLIBCXX_3.4 { old; };\nGLIBCXX_3.4.19 { new; } GLIBCXX_3.4;\n")
    compiled(
        "int old(void) { return 0; } int new(void) { return 0; }",
        tmp_path / "old/libstdc++.so.6",
        "-Wl,-soname,libstdc++.so.6",
        f"-Wl,--version-script={script}",
    )
    finding = the_failure(built._replace(env=(("LD_LIBRARY_PATH", str(tmp_path / "old")),)), runner)
    assert finding.subject == "libstdc++.so.6"
    assert "it has GLIBCXX up to 3.4.19, but the extension needs 3.4." in finding.message


def test_an_extension_that_is_not_whole_is_for_others_to_say(
    built: Installation, runner: Runner
) -> None:
    record(built, runner)
    (extension,) = purelib(Path(built.python)).glob("horovod/torch/mpi_lib_v2*.so")
    with extension.open("r+b") as stream:
        stream.truncate(5000)
    assert the_note(built, runner) == "nothing has changed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_means_another_version(
    built: Installation,
    runner: Runner,
    kind: Any,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path / "modulefiles"
    write_module(folder, "compiler/10")
    write_module(folder, "tool/1")
    init = str(install(kind, cache_folder(tmp_path_factory)).init)
    modules = Modules(init=init, use=(str(folder),), load=("compiler", "tool"))

    def loaded() -> Installation:
        return with_modules(built, module_shell.load(modules, "run", runner).set)

    record(loaded(), runner)
    write_module(folder, "compiler/11")
    write_module(folder, "tool/1", setenv={"TOOL": "x"})
    assert the_note(loaded(), runner) == (
        "the module compiler is compiler/11 now and was compiler/10;"
        f" the modulefile of tool/1 was edited: {folder}/tool/1"
    )


def test_a_generation_of_an_older_hvdenv(built: Installation, runner: Runner) -> None:
    path = Path(built.generation, generations.RECORD)
    generations.write_record(path, GenerationRecord(hvdenv="0.0.9"))
    (finding,) = drift(built, runner)
    assert finding[2:4] == ("skip", "its build recorded nothing that can be compared")
    generations.write_record(path, GenerationRecord(observed={"host": "x", "python": 3}))
    assert drift(built, runner) == [finding]


def test_a_python_that_gives_no_answer(built: Installation, runner: Runner) -> None:
    setup = Setup(built._replace(python="/bin/true"), runner)
    with pytest.raises(StepError, match="could not be observed"):
        inspection.observe(setup, TIMEOUT, MpiVersion("unknown"))

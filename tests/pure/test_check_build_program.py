"""The programs that run horovodrun, on a stand-in of Horovod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv import INSPECT_PROGRAMS

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

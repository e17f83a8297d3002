"""The program that runs `horovodrun --check-build`, on a stand-in of Horovod."""

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

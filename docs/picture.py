"""The picture of a terminal in the README: a real run of verify in which one rank is killed.

`python -m docs.picture PREFIX` copies the environment PREFIX (of `hvdenv build local`), makes
rank 1 of the copy end by SIGKILL in its first allreduce, as the kernel does when memory runs out,
verifies the copy, and writes docs/images/verify.svg. Evidence is cut; everything else is as printed.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hvdenv.environments.installation import Installation
from hvdenv.reports.render import render
from hvdenv.reports.report import Report
from tests.real.doctored import make_copy, on_rank_1

PICTURE = Path(__file__).parent / "images" / "verify.svg"
COMMAND = (
    "hvdenv verify --prefix horovod --framework torch --controller MPI --launcher mpirun --quick"
)
WIDTH = 100


def main() -> None:
    venv = Path(sys.argv[1]).resolve() / "venv"
    original = Installation(
        prefix=str(venv), python=str(venv / "bin/python"), path=(str(venv / "bin"),)
    )
    with tempfile.TemporaryDirectory() as folder:
        make_copy(
            original, Path(folder) / "horovod", on_rank_1("os.kill(os.getpid(), signal.SIGKILL)")
        )
        report = verify(Path(folder), str(venv / "bin"))
    findings = tuple(each._replace(evidence="") for each in report.findings)
    text = render(report._replace(findings=findings), width=WIDTH, colour=True)
    PICTURE.write_text(draw([f"$ {COMMAND}", *text.splitlines()]), encoding="utf-8")


def verify(folder: Path, programs: str) -> Report:
    hvdenv = Path(sys.executable).with_name("hvdenv")
    done = subprocess.run(
        [hvdenv, *COMMAND.split()[1:], "-n", "2", "--json", "--trust"],
        cwd=folder,
        env={
            "HOME": str(folder),
            "HVDENV_HOME": str(folder / "home"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PATH": f"{programs}:{os.defpath}",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 1:
        sys.exit(f"error: verify ended with {done.returncode} instead of 1")
    return Report.from_json(json.loads(done.stdout.replace(f"{folder}/", "")))


def draw(lines: list[str]) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="hvdenv verify", unique_id="verify")
    # A page may not fetch fonts from elsewhere: the reader's monospace font will do.
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "DejaVu Sans Mono")


if __name__ == "__main__":
    main()

"""The picture of a terminal in the README: a real run of verify in which one rank is killed.

`python -m docs.picture PREFIX` copies the environment PREFIX (of `hvdenv build local`), makes
rank 1 of the copy end by SIGKILL in its first allreduce, as the kernel does when memory runs out,
verifies the copy, and writes docs/images/verify.svg. Evidence is cut; everything else is as printed.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hvdenv.environments.installation import Installation
from tests.real.doctored import make_copy, on_rank_1

PICTURE = Path(__file__).parent / "images" / "verify.svg"
COMMAND = (
    "hvdenv verify --prefix horovod --framework torch --controller MPI --launcher mpirun --quick"
)
WIDTH = 118


def main() -> None:
    venv = Path(sys.argv[1]).resolve() / "venv"
    original = Installation(
        prefix=str(venv), python=str(venv / "bin/python"), path=(str(venv / "bin"),)
    )
    with tempfile.TemporaryDirectory() as folder:
        make_copy(
            original, Path(folder) / "horovod", on_rank_1("os.kill(os.getpid(), signal.SIGKILL)")
        )
        output = verify(Path(folder), str(venv / "bin"))
    PICTURE.write_text(draw([f"$ {COMMAND}", *shorten(output.splitlines())]), encoding="utf-8")


def verify(folder: Path, programs: str) -> str:
    hvdenv = Path(sys.executable).with_name("hvdenv")
    done = subprocess.run(
        [hvdenv, *COMMAND.split()[1:], "-n", "2", "--color", "always", "--trust"],
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
    return done.stdout.replace(f"{folder}/", "")


def shorten(lines: list[str]) -> list[str]:
    """Without the evidence of findings, which is indented by four, and up to the verdict."""
    end = next(index for index, line in enumerate(lines) if "verdict:" in line)
    findings = next(index for index, line in enumerate(lines) if re.match(r"\x1b\S*fail", line))
    kept = [line for line in lines[findings:end] if not line.startswith("    ")]
    return [*lines[:findings], *kept, lines[end]]


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

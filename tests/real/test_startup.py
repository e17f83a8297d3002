"""Light commands stay light: their instructions, which do not depend on what else the machine does."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("valgrind")

PROGRAM = str(Path(sys.executable).with_name("hvdenv"))
# Instructions as multiples of those of `python -c pass`. Time is a smaller multiple: the kernel's
# part is nearly the same in all commands (benchmarks/startup.py).
BOUNDS = {
    "--help": 4.8,
    "recipes": 9.0,
    "show local": 8.3,
    "plan local": 15.6,
    "check local --offline": 20.8,
}


@cache
def instructions(*command: str) -> int:
    """Instructions of a program and all that it starts, as valgrind counts them."""
    counter = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--trace-children=yes"]
    counter.append("--cachegrind-out-file=/dev/null")
    done = subprocess.run(
        [*counter, *command], capture_output=True, text=True, timeout=300, check=True
    )
    counts = re.findall(r"I +refs: +([\d,]+)", done.stderr)
    assert counts, done.stderr
    return sum(int(count.replace(",", "")) for count in counts)


@pytest.mark.parametrize(("command", "bound"), BOUNDS.items(), ids=BOUNDS)
def test_a_light_command_executes_few_instructions(command: str, bound: float) -> None:
    # Once unmeasured, so that bytecode is compiled.
    subprocess.run([PROGRAM, *command.split()], capture_output=True, timeout=300, check=True)
    empty = instructions(sys.executable, "-c", "pass")
    ratio = instructions(PROGRAM, *command.split()) / empty
    assert ratio <= bound, f"{command}: {ratio:.1f} times an empty program"

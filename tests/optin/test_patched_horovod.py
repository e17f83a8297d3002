"""What hvdenv's patches fix and verify does not run, since it depends on Horovod's source alone.

Not part of `make test`: `python -m pytest tests/optin/test_patched_horovod.py`. HVDENV_TEST_PREFIX
names the environment; without it, one is built.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdenv.environments.installation import Installation
from tests.real.conftest import Cli, cli, home, local_prefix, original

__all__ = ["cli", "home", "local_prefix", "original"]
ROUNDS = 50


@pytest.mark.parametrize(
    "program",
    [
        ("keras_callbacks.py",),  # keras-3
        ("second_join.py",),  # tensorflow-join
        ("second_init.py", str(ROUNDS)),  # gloo-rendezvous: without it, 100 rounds aborted
    ],
)
def test_on_three_ranks(original: Installation, cli: Cli, program: tuple[str, ...]) -> None:
    words = ("--prefix", original.prefix, "-n", "3", "--launcher", "horovodrun-gloo")
    script = str(Path(__file__).with_name(program[0]))
    cli("run", *words, "--", "python", script, *program[1:], timeout=300)

"""Ten minutes of random requests to the servers of horovodrun, and 1,000 meetings of ranks.

Not part of `make test`, since it takes half an hour: `python -m pytest tests/optin/test_rendezvous.py`.
HVDENV_TEST_PREFIX names the environment; without it, one is built.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hvdenv.environments.installation import Installation
from tests.real.conftest import original
from tests.real.test_rendezvous import fuzz

__all__ = ["original"]
ROUNDS = """
import horovod.torch as hvd, torch
for number in range(1000):
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.shutdown()
print("all rounds")
"""


def test_ten_minutes_of_fuzzing(original: Installation, tmp_path: Path) -> None:
    fuzz(original, 600, tmp_path)


def test_a_thousand_meetings(original: Installation) -> None:
    """init, allreduce and shutdown."""
    argv = [original.program("horovodrun"), "--gloo", "-np", "2", original.python, "-c", ROUNDS]
    path = os.pathsep.join([*original.path, os.environ["PATH"]])
    found = subprocess.run(
        argv,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1800,
    )
    assert found.stdout.count("all rounds") == 2, found.stdout[-4000:]
    assert found.returncode == 0

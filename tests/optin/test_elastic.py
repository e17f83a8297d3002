"""Elastic jobs whose ranks and hosts come and go, and a deadlock that users reported.

Not part of `make test`, since it takes minutes: `python -m pytest
tests/optin/test_elastic.py`. HVDENV_TEST_PREFIX names the environment; without it, one is
built. docs/explanation/measurements.md has the results. Survivors may notice a killed rank only
after 30 seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.verification.setup import Setup
from tests.real.conftest import cli, home, local_prefix, original, runner
from tests.real.doctored import PATIENCE
from tests.support.files import programs

__all__ = ["cli", "home", "local_prefix", "original", "runner"]
TRAINING = Path(__file__).with_name("elastic_training.py")
# On one machine, names of it stand for several hosts.
NAMES = ("localhost", "127.0.0.1")
# Training steps between two changes.
STEPS = 3


class World(NamedTuple):
    """What a rank finds after its ranks changed, and once more at the end.

    Attributes:
        number: how often they have changed.
        step: of the training, as restored or received.
        value: of the parameter, likewise.
        total: the sum of the numbers of all ranks, each plus one.
    """

    number: int
    rank: int
    size: int
    step: int
    value: float
    total: int


def check_job(
    setup: Setup,
    folder: Path,
    changes: Sequence[tuple[str, str, int]],
    seconds: float,
    *words: str,
    script: str = "",
) -> None:
    """Train on three ranks, and compare what all ranks find after each change.

    Args:
        folder: that all hosts see.
        changes: what changes the ranks (see elastic_training.py), and how many there are then.
        seconds: how long the job may take.
        words: arguments of horovodrun.
        script: what the discovery script does before it prints the list of hosts.
    """
    listed, discovery, reported = folder / "hosts", folder / "discovery.sh", folder / "worlds"
    listed.write_text(f"{NAMES[0]}:2\n{NAMES[1]}:1\n")
    programs(folder, **{discovery.name: f"{script}\ncat {listed}"})
    plan = {
        "steps": STEPS,
        "then": [change[:2] for change in changes],
        "hosts": str(listed),
        "worlds": str(reported),
        "patience": 60.0 * PATIENCE,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    argv = (
        setup.installation.program("horovodrun"),
        "--gloo",
        "--disable-cache",
        "-np",
        "3",
        "--start-timeout",
        "120",
        *words,
        "--host-discovery-script",
        str(discovery),
        setup.installation.python,
        "-u",
        str(TRAINING),
        str(folder / "plan.json"),
    )
    done = setup.run(argv, seconds * PATIENCE)
    sizes = [3, *(size for _, _, size in changes)]
    # The last world is reported at its end as well.
    expected = [
        World(number, rank, size, STEPS * number, parameter(STEPS * number), size * (size + 1) // 2)
        for number, size in enumerate([*sizes, sizes[-1]])
        for rank in range(size)
    ]
    lines = reported.read_text().splitlines() if reported.exists() else []
    assert sorted(World(*json.loads(line)) for line in lines) == expected, done.output
    assert done.returncode == 0, done.output


def parameter(steps: int) -> float:
    """The parameter after some steps: gradients of 1, 2, 3 ... and a momentum of 1/2."""
    value = velocity = 0.0
    for step in range(1, steps + 1):
        velocity = velocity / 2 + step
        value -= velocity
    return value


def test_training_survives(original: Installation, runner: Runner, tmp_path: Path) -> None:
    """A rank is killed, and Horovod takes its host back; the host is removed and added."""
    first, second = NAMES
    changes = [
        ("kill", second, 2),
        ("wait", "", 3),
        ("hosts", f"{first}:2\n", 2),
        ("hosts", f"{first}:2\n{second}:1\n", 3),
    ]
    # Survivors that take longer than the cooldown to meet again miss that the host is back.
    limits = ("--min-np", "2", "--max-np", "3", "--blacklist-cooldown-range", "4", "8")
    check_job(Setup(original, runner), tmp_path, changes, 300, *limits)


def test_a_host_is_replaced_while_there_are_too_few(
    original: Installation, runner: Runner, tmp_path: Path
) -> None:
    """hvd#3494: a host leaves, and a different one comes when the others already wait for it.

    Without the patch elastic-sync, old ranks skip the sync in which the new one waits.
    """
    (tmp_path / "calls").write_text("")
    script = (
        f"grep -q 127 {tmp_path}/hosts || echo >> {tmp_path}/calls\n"
        f'[ "$(wc -l < {tmp_path}/calls)" -lt 6 ] || echo "{os.uname().nodename}:1"'
    )
    changes, limits = [("hosts", "localhost:2\n", 3)], ("--min-np", "3", "--max-np", "3")
    check_job(Setup(original, runner), tmp_path, changes, 120, *limits, script=script)

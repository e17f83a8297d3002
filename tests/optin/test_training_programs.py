"""Each planted mistake of tests/real/training alone, and each program that only looks wrong.

Not part of `make test`: some seventy runs of ten seconds. With environments of the recipe `local`
and of its variant `keras2`:

    HVDENV_TEST_HOME=~/.local/share/hvdenv python -m pytest tests/optin/test_training_programs.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.real.conftest import Cli
from tests.real.test_training_programs import VARIANTS
from tests.real.training.variants import Variant, judge, plant, prove


@pytest.mark.parametrize(
    "variant", VARIANTS.values(), ids=lambda each: f"{each.program} {each.name}"
)
def test_one_variant(tmp_path: Path, variant: Variant) -> None:
    home = os.environ.get("HVDENV_TEST_HOME")
    if not home:
        pytest.skip("HVDENV_TEST_HOME names no directory")
    done = prove(Cli(Path(home)), plant([variant], tmp_path), *variant.options)
    if variant.options and done.returncode == 2:  # that environment is not built
        pytest.skip(done.stderr)
    assert done.returncode in (0, 1), done.stderr
    judge(done.json["findings"], [variant])

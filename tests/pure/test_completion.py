from __future__ import annotations

import subprocess

import pytest
import shtab

from hvdenv.cli.completion import SCRIPTS
from hvdenv.cli.main import COMMANDS, main, make_parser


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts_know_all_options(
    shell: str, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    path = SCRIPTS / f"hvdenv.{shell}"
    expected = shtab.complete(make_parser(), shell=shell) + "\n"
    if pytestconfig.getoption("--regenerate"):
        path.write_text(expected, encoding="utf-8")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script == expected, "run pytest tests/pure/test_completion.py --regenerate"
    assert all(command in script for command in COMMANDS)


def test_the_bash_script_is_bash() -> None:
    path = str(SCRIPTS / "hvdenv.bash")
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0

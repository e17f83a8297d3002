"""Print a completion script for a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdenv.reading import STATE, read_text

# shtab wrote them: `pytest tests/pure/test_completion.py --regenerate` after options have changed.
# Importing all commands would take longer than a shell should wait at its start.
SCRIPTS = Path(__file__).parent / "completions"

EXAMPLES = """\
examples:
  hvdenv completion bash > ~/.local/share/bash-completion/completions/hvdenv
  hvdenv completion zsh > "${fpath[1]}/_hvdenv"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(arguments: argparse.Namespace) -> int:
    print(read_text(SCRIPTS / f"hvdenv.{arguments.shell}", STATE), end="")
    return 0

"""Print a completion script for a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdenv.base.reading import STATE, read_text

# shtab wrote them: `pytest tests/pure/test_completion.py --regenerate` after options have changed.
# Importing all commands would take longer than a shell should wait at its start.
SCRIPTS = Path(__file__).parent / "completions"

EXAMPLES = """\
examples:
  hvdenv completion bash > ~/.local/share/bash-completion/completions/hvdenv
  hvdenv completion zsh > "${fpath[1]}/_hvdenv"
"""


_INSTALL = """\
To complete commands and options, write the script of your shell, then open a new shell.
bash (with the package bash-completion):
  mkdir -p ~/.local/share/bash-completion/completions
  hvdenv completion bash > ~/.local/share/bash-completion/completions/hvdenv
zsh (a directory of your own in fpath, before compinit in ~/.zshrc):
  mkdir -p ~/.zfunc && hvdenv completion zsh > ~/.zfunc/_hvdenv
  fpath=(~/.zfunc $fpath); autoload -Uz compinit && compinit
tcsh:
  hvdenv completion tcsh > ~/.hvdenv.tcsh && echo 'source ~/.hvdenv.tcsh' >> ~/.tcshrc"""


def configure(parser: argparse.ArgumentParser) -> None:
    # hvdenv.cli.options would take as long to import as all the rest.
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh", "tcsh"))


def run(arguments: argparse.Namespace) -> int:
    if not arguments.shell:
        print(_INSTALL)
        return 0
    print(read_text(SCRIPTS / f"hvdenv.{arguments.shell}", STATE), end="")
    return 0

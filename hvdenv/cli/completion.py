"""Print a completion script for a shell."""

from __future__ import annotations

import argparse

EXAMPLES = """\
examples:
  hvdenv completion bash > ~/.local/share/bash-completion/completions/hvdenv
  hvdenv completion zsh > "${fpath[1]}/_hvdenv"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def run(arguments: argparse.Namespace) -> int:
    import shtab

    from hvdenv.cli.main import make_parser

    print(shtab.complete(make_parser(), shell=arguments.shell))
    return 0

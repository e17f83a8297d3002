"""Entry point: finds the command, runs it, turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from hvdenv import __version__
from hvdenv.errors import HvdenvError, InterruptedRunError

# Command: one line for `hvdenv --help`. Each has a module of its name here, with
# `configure(parser)` and `run(arguments) -> exit code`; only the one that is used is
# imported, so that nothing is loaded at start that is not needed.
COMMANDS = {
    "recipes": "list recipes: name, variants, how far each was tried",
    "show": "show a recipe with the layer that set each value",
    "check": "known incompatibilities of a recipe, before anything is built",
    "plan": "what build would run, in order, and why",
    "build": "build an environment; does nothing when nothing changed",
    "verify": "judge an environment: what was asked for is there and works",
    "envs": "list, roll back, remove or prune environments",
    "completion": "print a completion script for bash, zsh or tcsh",
}

_EPILOG = """\
examples:
  hvdenv build local            build Horovod for TensorFlow and PyTorch on this machine
  hvdenv verify local           prove that it works
  hvdenv COMMAND --help         options and examples of a command

exit codes:
  0 good   1 verify found a failure   2 malformed usage, recipe or file
  3 known incompatibility   5 a step failed   6 busy
  7 nothing failed, but something expected could not be proven on this host
  70 a bug in hvdenv   130 interrupted
"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines."""


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the options of one command or of all."""
    parser = argparse.ArgumentParser(
        prog="hvdenv",
        description="Horovod environments that build the first time and can be proven to work.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"hvdenv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if only is None or name == only:
            module = importlib.import_module(f"hvdenv.cli.{name}")
            command = commands.add_parser(
                name, help=summary, description=module.__doc__, epilog=module.EXAMPLES,
                formatter_class=Help,
            )  # fmt: skip
            module.configure(command)
            command.set_defaults(run=module.run)
        else:
            commands.add_parser(name, help=summary, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code, as docs/exit-codes.md lists them.
    """
    # A path may hold bytes that the terminal's encoding has no characters for.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(next((word for word in words if not word.startswith("-")), ""))
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except HvdenvError as error:
        return _say(error)
    except KeyboardInterrupt:
        return _say(InterruptedRunError())
    except BrokenPipeError:
        # The reader of our output has gone (`hvdenv plan | head`): not an error.
        # Nothing is left to be written when Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:
        return _bug()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(error: HvdenvError) -> int:
    from hvdenv.masking import mask, plain

    print(f"error: {mask(plain(str(error)))}", file=sys.stderr)
    return error.exit_code


def _bug() -> int:
    import platform
    import traceback

    from hvdenv.masking import mask

    print(
        f"this is a bug in hvdenv {__version__} (Python {platform.python_version()}); "
        "please report it with the lines below\n" + mask(traceback.format_exc()),
        file=sys.stderr,
    )
    return 70

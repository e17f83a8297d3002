"""Entry point: finds the command, runs it, turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdenv import __version__
from hvdenv.errors import OWN_FAILURE, HvdenvError, InterruptedRunError
from hvdenv.masking import mask, plain, plain_output
from hvdenv.runner import drop_relative_folders, forbid_world_writes

# Command: one line for `hvdenv --help`. Each has a module of its name here, with
# `configure(parser)` and `run(arguments) -> exit code`; only the one that is used is
# imported, so that nothing is loaded at start that is not needed.
COMMANDS = {
    "recipes": "list recipes: name, variants, how far each was tried",
    "show": "show a recipe with the layer that set each value",
    "check": "known incompatibilities of a recipe, before anything is built",
    "grid": "which Horovod and patches versions take, and whether that was ever proven",
    "plan": "what build would run, in order, and why",
    "lock": "write or check the lock of a recipe: every package with its hash",
    "fetch": "collect all that a locked build needs, for a place without a network",
    "build": "build an environment; does nothing when nothing changed",
    "install": "add packages to an environment; nothing that is there moves for them",
    "verify": "judge an environment: what was asked for is there and works",
    "doctor": "name the cause in the log of a failed build or run, and what to change",
    "module": "print or write a modulefile of an environment for Lmod or Tcl modules",
    "container": "write or build an image of the environment; look whether hosts can run it",
    "run": "run a command in an environment, on as many ranks as there is room for",
    "shell": "an interactive shell in an environment, in an allocation if asked",
    "job": "write the batch script of a job, or submit and follow it",
    "diff": "what differs between two environments",
    "export": "write what an environment is made of for other programs: CycloneDX, conda, pip",
    "envs": "list, roll back, remove or prune environments",
    "cache": "list, verify, prune, export, import or sign compiled wheels",
    "trust": "trust a file of another user as it is now, or an environment with its owners",
    "completion": "print a completion script for bash, zsh or tcsh",
}
# Of these, what follows `--` is a program to run with its arguments: arguments.program.
RUN_PROGRAMS = ("run", "job")
# Whose exit code is that of what they run; hvdenv's own failures have one code there.
PASS_CODES_ON = ("run", "shell")

_EPILOG = """\
examples:
  hvdenv build local            build Horovod for TensorFlow and PyTorch on this machine
  hvdenv verify local           prove that it works
  hvdenv COMMAND --help         options and examples of a command

exit codes:
  0 good   1 verify found a failure, doctor no cause   2 malformed usage, recipe or file
  3 known incompatibility   4 lock does not match   5 a step failed   6 busy
  7 nothing failed, but something expected could not be proven on this host
  70 a bug in hvdenv   130 interrupted
  run, shell and job pass the command's own code on; in run and shell, hvdenv's is 125
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
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdenv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if only is None or name == only:
            module = importlib.import_module(f"hvdenv.cli.{name}")
            command = commands.add_parser(
                name, help=summary, description=module.__doc__, epilog=module.EXAMPLES,
                formatter_class=Help, allow_abbrev=False,
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
    with plain_output():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), "")
    program: list[str] = []
    if command in RUN_PROGRAMS and "--" in words:
        at = words.index("--")
        words, program = words[:at], words[at + 1 :]
    parsed = argparse.Namespace(program=program, words=words)
    try:
        arguments = make_parser(command).parse_args(words, parsed)
    except SystemExit as end:
        passes_on = command in PASS_CODES_ON and end.code
        raise SystemExit(OWN_FAILURE if passes_on else end.code) from None
    if arguments.command is None:
        make_parser("").print_help()
        return 2
    forbid_world_writes()
    signal.signal(signal.SIGTERM, _interrupt)
    drop_relative_folders()
    try:
        _refuse_foreign_home(arguments)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except HvdenvError as error:
        code = _say(error)
        return OWN_FAILURE if command in PASS_CODES_ON else code
    except KeyboardInterrupt:
        return _say(InterruptedRunError())
    except BrokenPipeError:
        # The reader of our output has gone (`hvdenv plan | head`): not an error.
        # Nothing is left to be written when Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if of_machine := _of_machine(error):
            return _say(of_machine)
        code = _bug()
        return OWN_FAILURE if command in PASS_CODES_ON else code


def _of_machine(error: Exception) -> HvdenvError | None:
    """Somebody else's files, a full or broken disk, wherever it was met: not a bug in hvdenv."""
    from hvdenv.places import OF_THE_MACHINE, blocked

    if not isinstance(error, OSError) or error.errno not in OF_THE_MACHINE:
        return None
    named = Path(os.fsdecode(error.filename)) if error.filename else Path()
    return blocked(named, error, "read or write")


def _refuse_foreign_home(arguments: argparse.Namespace) -> None:
    if hasattr(arguments, "trust"):  # every command that executes anything has --trust
        from hvdenv.cli.options import refuse_foreign_home

        refuse_foreign_home(arguments)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(error: HvdenvError) -> int:
    print(f"error: {mask(plain(str(error)))}", file=sys.stderr)
    return error.exit_code


def _bug() -> int:
    import traceback

    print(
        f"this is a bug in hvdenv {__version__} (Python {sys.version.split()[0]}); "
        "please report it with the lines below\n" + mask(traceback.format_exc()),
        file=sys.stderr,
    )
    return 70

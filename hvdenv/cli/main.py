"""Entry point: finds the command, runs it, turns errors into exit codes."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdenv import __version__
from hvdenv.base.errors import OWN_FAILURE, HvdenvError, InterruptedRunError, UsageError
from hvdenv.base.masking import clean_output
from hvdenv.base.runner import drop_relative_folders, environment, forbid_world_writes, interrupts
from hvdenv.base.schema import closest, nearest

# Each command has one line here and a module of its name in this package, with
# `configure(parser)`, `run(arguments) -> exit code` and EXAMPLES. Only the module of the command
# that runs is imported.
GROUPS = {
    "Start": {
        "init": "draft a recipe from a site's page, a job script, or this machine",
        "check": "report known incompatibilities of a recipe before you build it",
        "build": "build an environment, or do nothing if nothing changed",
        "verify": "prove that an environment works, on several ranks",
        "examples": "print the directory of training programs to start from",
        "job": "write the batch script of a job, or submit the job and follow it",
    },
    "Use": {
        "run": "run a command in an environment, on one rank or many",
        "shell": "open a bash in an environment, here or in an allocation",
        "install": "add packages to an environment without changing the others",
        "doctor": "name the cause of a failed build or run, and the remedy",
    },
    "Keep": {
        "lock": "write or check a recipe's lock: every package with its hash",
        "fetch": "download everything that a locked build needs, to build offline",
        "pack": "pack an environment into one image, which hosts mount",
        "wheels": "list, prune or publish compiled wheels",
        "export": "write a bill of materials (CycloneDX) of an environment",
        "diff": "compare two environments",
    },
    "Manage": {
        "recipes": "list recipes with their variants and status",
        "show": "show a recipe and where each value comes from",
        "plan": "show what build would run, in order, and why",
        "envs": "list, roll back, remove or prune environments",
        "module": "write a modulefile of an environment for Lmod or Tcl modules",
        "container": "write the definition of an image with an environment",
        "completion": "print a completion script for bash, zsh or tcsh",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
# Commands that run a program: what follows `--` becomes arguments.program.
RUN_PROGRAMS = ("run", "job", "verify")
# These exit with the code of the program that they ran; hvdenv's own failures have one code there.
PASS_CODES_ON = ("run", "shell")

_SUMMARY = """\
Horovod environments for HPC clusters that build on the first try, are proven to work, and are
reproducible a year from now.
"""
_EPILOG = """\
examples:
  hvdenv build local            build Horovod for TensorFlow and PyTorch on this machine
  hvdenv verify local           prove that it works
  hvdenv recipes                list the clusters that hvdenv knows; for another one: hvdenv init --help
  hvdenv build --help           options and examples of a command

exit codes:
  0 success   1 verify found a failure, or doctor recognised nothing   2 malformed usage, recipe or file
  3 known incompatibility   4 lock does not match   5 a step failed   6 busy
  7 nothing failed, but something expected could not be proven on this host
  70 a bug in hvdenv   130 interrupted
  run, shell and job exit with the code of the program; hvdenv's own failures in run and shell are 125
"""


def _listed_commands() -> str:
    groups = [
        f"{group}:\n" + "".join(f"  {name:12}{summary}\n" for name, summary in commands.items())
        for group, commands in GROUPS.items()
    ]
    return "\n".join([_SUMMARY, *groups])


class _Parser(argparse.ArgumentParser):
    """Reports malformed usage as hvdenv reports other errors, without pages of usage before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:  # argparse would name the parser of all commands
            # Without the dashes, by which all options are a little alike.
            options = {each.lstrip("-"): each for each in self._option_string_actions}
            close = closest(unknown[0].partition("=")[0].lstrip("-"), options)
            near = f'; did you mean "{options[close]}"?' if close else ""
            if self.prog.rpartition(" ")[2] in RUN_PROGRAMS and not unknown[0].startswith("-"):
                near = "; write -- before the command to run"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nwhat to do: `{self.prog} --help` shows the usage\n")


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of one command, or of all of them (None)."""
    parser = _Parser(
        prog="hvdenv",
        usage="hvdenv [-h] [--version] COMMAND ...",
        description=_listed_commands(),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdenv {__version__}")
    # The description lists the commands; a parser of all of them is for completion scripts.
    shown = None if only is None else argparse.SUPPRESS
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="hvdenv", help=shown)
    for name in COMMANDS if only is None else filter(None, [only]):
        module = importlib.import_module(f"hvdenv.cli.{name}")
        command = commands.add_parser(
            name,
            help=COMMANDS[name],
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command._positionals.title = "arguments"
        module.configure(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code, as docs/reference/exit-codes.md lists them.
    """
    # Imports and parsed files stay until the end: searching them for garbage takes a tenth of the
    # time of a light command.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)  # nor does Python search them at its end
    # A path may hold bytes that the terminal's encoding has no characters for.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), "")
    with clean_output(environment().items()), interrupts():
        try:
            code = _run(command, words)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return _report(InterruptedRunError())
        except BrokenPipeError:  # the reader of our output has gone (`hvdenv plan | head`)
            return 141
        except SystemExit as end:
            code = int(end.code or 0)
        except HvdenvError as error:
            code = _report(error)
        except Exception as error:
            code = _report(found) if (found := _of_machine(error)) else _bug()
    return OWN_FAILURE if code and command in PASS_CODES_ON else code


def _run(command: str, words: list[str]) -> int:
    program: list[str] = []
    if command in RUN_PROGRAMS and "--" in words:
        at = words.index("--")
        words, program = words[:at], words[at + 1 :]
    if command and command not in COMMANDS:
        unknown = f'there is no command "{command}"{nearest(command, COMMANDS)}'
        raise UsageError(unknown, remedy="hvdenv --help lists the commands")
    try:
        parser = make_parser(command)
        arguments = parser.parse_args(words, argparse.Namespace(program=program))
    except SystemExit:  # --help, --version or malformed usage
        sys.stdout.flush()
        raise
    if arguments.command is None:
        parser.print_help()
        return 2
    forbid_world_writes()
    drop_relative_folders()
    if hasattr(arguments, "trust"):  # every command that executes anything has --trust
        from hvdenv.cli.options import gate

        gate(arguments).refuse_home()
    return int(arguments.run(arguments))


def _of_machine(error: Exception) -> HvdenvError | None:
    """Somebody else's files, a full or broken disk, wherever it was met: not a bug in hvdenv."""
    from hvdenv.base.places import OF_THE_MACHINE, blocked

    if not isinstance(error, OSError) or error.errno not in OF_THE_MACHINE:
        return None
    named = Path(os.fsdecode(error.filename)) if error.filename else Path()
    return blocked(named, error, "read or write")


def _report(error: HvdenvError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _bug() -> int:
    import traceback

    print(
        f"this is a bug in hvdenv {__version__} (Python {sys.version.split()[0]}); "
        "please report it with the lines below\n" + traceback.format_exc(),
        file=sys.stderr,
    )
    return 70

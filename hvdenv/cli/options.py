"""Options that commands share, and the request that they make."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from hvdenv.base.errors import UsageError
from hvdenv.model.cluster import JOB_OPTIONS
from hvdenv.session.output import print_json
from hvdenv.session.request import SITE_VARIABLE, Gate, Request, site_file

# What a job requests. Only a batch job has an output file.
REQUESTS = tuple(field for field in JOB_OPTIONS if field != "output")
# Benchmark timers expire sooner; NaN fails the comparison.
_YEAR = 365 * 86400.0
_COUNTS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node")


def add(
    parser: argparse._ActionsContainer, names: str, text: str | None = None, **more: Any
) -> None:
    """Add an option as its help shows it, ``-n --ranks N``, or an argument, ``packages PACKAGE``.

    An option without a value and without choices is a switch.

    Args:
        text: the help.
        more: as for argparse.
    """
    first, *others = names.split()
    options = [first, *(each for each in others if each.startswith("-"))]
    values = [each for each in others if not each.startswith("-")]
    if values:
        more["metavar"] = values[0]
    elif first.startswith("-") and "choices" not in more:
        more["action"] = "store_true"
    parser.add_argument(*options, help=text, **more)


def add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
    parser._positionals.title = "arguments"
    return parser


def _add_recipe(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    add(
        parser,
        "recipe RECIPE",
        "a recipe's name, or the path of a TOML file (with a slash, or ending in .toml)",
        nargs="?" if optional else None,
        default="",
    )
    add(
        parser,
        "--variant VARIANT",
        "use this variant of the recipe; may be repeated",
        action="append",
        default=[],
    )
    add(
        parser,
        "--set KEY=VALUE",
        "override a value of the recipe, such as mpi.version=5.0.11; may be repeated",
        action="append",
        default=[],
        dest="overrides",
    )
    add_options(parser, "site")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    add(
        where,
        "--hosts HOST:SLOTS,...",
        "hosts and their slots, such as gpu32:4,gpu33:4 (default: those of the allocation)",
    )
    add(where, "--hostfile FILE", "file with one host per line", type=Path)


def _python(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a version such as 3.11; hvdenv looks for the interpreter on PATH and in the directories of version managers"
        )
    return text


def add_requests(group: argparse._ActionsContainer) -> None:
    """Options for fields of a job; their names are those of the fields."""
    helps = {"time": "such as 1:30:00 or 2-00:00:00", "partition": "partition or queue"}
    for field in REQUESTS:
        kind: type = int if field in _COUNTS else str
        metavar = "N" if kind is int else field.upper()
        add(group, f"--{field.replace('_', '-')} {metavar}", helps.get(field), type=kind)


def _add_image(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    add(
        group,
        "--image FILE",
        "run from this image (default: the one that `hvdenv pack` made beside the environment)",
        type=Path,
    )
    add(group, "--no-image", "run from the environment's files, not its image")


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        if name in _GROUPS:
            _GROUPS[name](parser)
        else:
            spelled, text, more = _OPTIONS[name]
            add(parser, spelled, text, **more)


def seconds(text: str) -> float:
    if 0 < (number := float(text)) < _YEAR:
        return number
    raise argparse.ArgumentTypeError(f"{text}: give seconds above 0 and below a year")


_UNITS = {"": "days", "h": "hours", "d": "days", "w": "weeks"}


def age(text: str) -> timedelta:
    found = re.fullmatch(r"([0-9]{1,5})([hdw]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an age: write a number of days, or one with h, d or w: 12h, 90d, 8w"
        )
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def time_ago(age: timedelta | None) -> str:
    """The time this long ago, in the format of records; empty for no age."""
    if age is None:
        return ""
    return (datetime.now(timezone.utc) - age).isoformat(timespec="microseconds")


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    loudness = parser.add_mutually_exclusive_group()
    add(loudness, "-q --quiet", "print errors only")
    add(loudness, "-v --verbose", "show the output of every command")
    add_options(parser, "color")


def is_coloured(arguments: argparse.Namespace) -> bool:
    return arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())


def gate(arguments: argparse.Namespace) -> Gate:
    """The one gate of a command; without --trust it executes nothing, so that all may pass."""
    if "gate" not in arguments:
        arguments.gate = Gate(
            trusted=getattr(arguments, "trust", True),
            site=site_file(getattr(arguments, "site", None)),
            again=shlex.join(("hvdenv", *command_line(arguments, trust=True))),
        )
    found: Gate = arguments.gate
    return found


def read_request(arguments: argparse.Namespace, **changed: Any) -> Request:
    """What the shared options ask for; ``changed`` takes precedence."""
    given = {name: value for name, value in vars(arguments).items() if name in Request._fields}
    given = {n: tuple(each) if isinstance(each, list) else each for n, each in given.items()}
    given |= {"gate": gate(arguments), "site": site_file(given.get("site"))}
    return Request(**{**given, **changed})


def command_line(arguments: argparse.Namespace, **changed: Any) -> tuple[str, ...]:
    """The words after ``hvdenv`` that give the same arguments, with some options changed."""
    values, options = list[str](), list[str]()
    for action in arguments.parser._actions:
        value = changed.get(action.dest, getattr(arguments, action.dest, None))
        if value is None or value == action.default:
            continue
        words = [str(each) for each in (value if isinstance(value, list) else [value])]
        if not action.option_strings:
            values += words
        elif action.nargs == 0:
            options.append(action.option_strings[-1])
        else:
            options += (f"{action.option_strings[-1]}={each}" for each in words)
    program = ("--", *arguments.program) if getattr(arguments, "program", ()) else ()
    return (arguments.command, *values, *options, *program)


def give(arguments: argparse.Namespace, document: Any, *lines: str) -> None:
    """Print a result: as JSON with --json, otherwise the lines, unless --quiet is set."""
    if arguments.json:
        print_json(document)
    elif not getattr(arguments, "quiet", False):
        for line in lines:
            print(line)


def _add_locked(parser: argparse.ArgumentParser) -> None:
    """Options of commands that use a lock; see is_locked()."""
    add(parser, "--locked", "build exactly what the lock lists, or exit with 4")
    add_options(parser, "lockfiles", "lock")
    add(
        parser,
        "--fetched DIR",
        "use the files that `hvdenv fetch` downloaded",
        type=Path,
    )
    add(parser, "--offline", "use no network")


def is_locked(arguments: argparse.Namespace) -> bool:
    """Whether a lock is asked for, by options that go together."""
    fetch = "add --fetched DIR; `hvdenv fetch RECIPE --to DIR` downloads the files on a host with a network"
    refuse_without(arguments, "fetched", "offline", remedy=fetch)
    refuse_without(arguments, "locked", "lock", "fetched")
    return bool(arguments.locked)


def refuse_without(
    arguments: argparse.Namespace, needed: str, *options: str, remedy: str = ""
) -> None:
    """Refuse options that need another one, such as --detach without --submit."""
    given = {name.replace("_", "-") for name, value in vars(arguments).items() if value}
    for option in options:
        if option in given and needed not in given:
            raise UsageError(f"--{option} needs --{needed}", remedy=remedy or f"add --{needed}")


_GROUPS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "recipe": _add_recipe,
    "recipe?": partial(_add_recipe, optional=True),
    "hosts": _add_hosts,
    "image": _add_image,
    "loudness": _add_loudness,
    "locked": _add_locked,
}
# As for add(): names, help, and the rest.
_OPTIONS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "json": ("--json", "print the result as JSON, and nothing else, on standard output", {}),
    "color": ("--color", None, {"choices": ("auto", "always", "never"), "default": "auto"}),
    "prefix": (
        "--prefix PREFIX",
        "path of the environment (a symbolic link that hvdenv manages)",
        {"type": Path},
    ),
    "python": ("--python X.Y", "Python version to use, such as 3.11", {"type": _python}),
    "site": ("--site FILE", f"site file (default: ${SITE_VARIABLE})", {"type": Path}),
    "trust": ("--trust", "use files that other users can change, for this command only", {}),
    "allow": (
        "--allow RULE",
        "continue although this rule blocks; may be repeated",
        {"action": "append", "default": []},
    ),
    "clean": (
        "--clean",
        "unset the variables of your shell that change results, such as LD_PRELOAD,"
        " LD_LIBRARY_PATH, HOROVOD_*, NCCL_* and OMPI_MCA_*",
        {},
    ),
    "where": (
        "--where",
        "compute: submit it as a job with the resources of the recipe, and follow it"
        " (default: here)",
        {"choices": ("here", "compute"), "default": "here"},
    ),
    "lock": ("--lock DIR", "use this lock, if there are several", {"type": Path}),
    "lockfiles": (
        "--lockfiles DIR",
        "directory of the locks (default: lockfiles beside the recipe, or beside its directory if"
        " that is named recipes)",
        {"type": Path},
    ),
    "facts": (
        "--facts FILE",
        "facts of another machine: JSON, as under `facts` in `plan --json` there",
        {"type": Path},
    ),
    "take-over": ("--take-over", "take the prefix over from another build, whoever runs it", {}),
}

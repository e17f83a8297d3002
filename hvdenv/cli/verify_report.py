"""What verify does with a report: prints, writes, keeps and reads it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.masking import mask, print_coloured
from hvdenv.base.places import Places, make_folder, named_file, write_json, write_text
from hvdenv.base.reading import REPORT, read_json
from hvdenv.base.schema import mapped
from hvdenv.cli.options import add, is_coloured
from hvdenv.reports import junit, page, render
from hvdenv.reports.report import EXIT_CODES, Report
from hvdenv.session.output import print_json
from hvdenv.session.request import usable

# What writes the file of each option.
_FILES = {"junit": junit.render, "html": page.render}
_WRITE_AGAIN = (
    "what to do: `hvdenv verify --report FILE --{option} FILE` writes it elsewhere, from the report"
    " that verify keeps"
)


def add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("write the report to files, whatever the verdict")
    add(group, "--junit FILE", "write it as JUnit XML", type=Path)
    add(group, "--html FILE", "write it as a self-contained HTML page", type=Path)
    add(
        group,
        "--report FILE",
        "read the report from a JSON file that verify wrote, instead of verifying",
        dest="kept",
        type=Path,
    )


def show(report: Report, arguments: argparse.Namespace) -> int:
    """Print a report and write its files, as far as they can be written.

    Returns:
        The exit code of the verdict; if that is 0, of a file that was not written.
    """
    code = EXIT_CODES[report.verdict]
    if arguments.json:
        print_json(report.to_json())
    elif not arguments.quiet or code:
        text = render.render_summary if arguments.quiet else render.render
        columns = shutil.get_terminal_size((render.COLUMNS, 0)).columns
        print_coloured(text(report, width=columns, colour=is_coloured(arguments)))
    for option, path in _requested_files(arguments):
        try:
            write_text(named_file(path), _FILES[option](report))
        except StepError as error:
            print(f"error: --{option} {path}: {error.message}", file=sys.stderr)
            print(_WRITE_AGAIN.format(option=option), file=sys.stderr)
            code = code or StepError.exit_code
    return code


def _requested_files(arguments: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for option in _FILES:
        if path := getattr(arguments, option):
            yield option, path


def refuse_files(arguments: argparse.Namespace) -> None:
    for option, path in _requested_files(arguments):
        try:
            folder = named_file(path).parent
        except StepError as error:
            raise UsageError(
                error.message, where=f"--{option} {error.where}", remedy=error.remedy
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            why = (
                "this directory is not writable"
                if folder.is_dir()
                else "there is no such directory"
            )
            raise UsageError(why, where=f"--{option} {folder}", remedy="name another directory")


def read(arguments: argparse.Namespace) -> Report:
    where = f"--report {arguments.kept}"
    if arguments.recipe or arguments.prefix or arguments.where == "compute":
        raise UsageError(
            "--report shows an earlier report and verifies nothing",
            where=where,
            remedy="leave out the recipe, --prefix and --where",
        )
    remedy = "name the output of `hvdenv verify --json`, or a file in `reports` under HVDENV_HOME"
    try:
        with usable(where, remedy):
            return Report.from_json(read_json(arguments.kept, REPORT))
    except ValueError as error:
        why = f"this is not a report of verify: {error}"
        raise UsageError(why, where=where, remedy=remedy) from error


def keep(report: Report, places: Places) -> str:
    """Store a report under HVDENV_HOME: nothing is written into the environment.

    Returns:
        Where it is, or why it was not stored: a full disk does not change the verdict.
    """
    stamp = report.started.replace(":", "").replace("+", "_")
    try:
        path = make_folder(places.reports) / f"{stamp}-{os.getpid()}.json"
        write_json(path, mapped(report.to_json(), mask))
    except StepError as error:
        return f"the report was not kept: {error}"
    return f"report: {path}"

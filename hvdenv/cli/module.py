"""Write a modulefile of an environment, for Lmod (Lua) or Environment Modules (Tcl).

Without --to, module prints it."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from hvdenv.base.errors import UsageError
from hvdenv.base.places import (
    make_folder,
    named_file,
    named_folder,
    reporting,
    user_name,
    write_text,
)
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.runner import environment
from hvdenv.cli.options import add, add_options, read_request
from hvdenv.environments import activation
from hvdenv.session.chosen import choose_built, with_active
from hvdenv.session.output import report
from hvdenv.sites.modules import BACKENDS

EXAMPLES = """\
examples:
  hvdenv module local
  hvdenv module neuron --to /proj/group/modulefiles
  hvdenv module --prefix /proj/group/envs/horovod --format tcl --name horovod/0.28.1-2026a
"""


# Both templates begin with it.
_OWN = "Written by hvdenv"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix", "trust")
    add(
        parser,
        "--format",
        "lua for Lmod, tcl for Environment Modules (default: the module system of this machine)",
        choices=("lua", "tcl"),
    )
    add(parser, "--to DIR", "write the modulefile below this directory, as NAME/VERSION", type=Path)
    add(
        parser,
        "--name NAME/VERSION",
        "name of the module (default: horovod/VERSION-RECIPE-VARIANTS)",
        default="",
    )


def run(arguments: argparse.Namespace) -> int:
    installed, active, record = choose_built(with_active(read_request(arguments)))
    # Not the prefix, since what a module provides must not change while jobs use it.
    generation = installed.generation(active)
    user = user_name(generation.stat().st_uid)
    entry = activation.modulefile_of(record, generation, arguments.name, user)
    here = [each.modulefile for each in BACKENDS if each.variable in environment()]
    language: activation.Language = arguments.format or (here[0] if here else "lua")
    text = activation.render_modulefile(entry, language)
    if not arguments.to:
        print(text, end="")
        return 0
    named_folder(arguments.to)
    folder = Path(os.path.abspath(arguments.to.expanduser()))
    path = folder / f"{entry.name}{'.lua' if language == 'lua' else ''}"
    _write(path, text)
    print(f"wrote {path}")
    print(f"use it with: module use {shlex.quote(str(folder))}; module load {entry.name}")
    python = entry.environment / "bin" / "python"
    files = (path, python, Path(os.path.realpath(python)))
    for each in dict.fromkeys(each for file in files for each in _closed(file)):
        report(f"note: other users cannot use it: the mode of {each}")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a modulefile, unless there is one that hvdenv did not write."""
    with reporting(path, "read"):
        head = read_text(path, OWN, errors="replace")[:100] if path.exists() else _OWN
    if _OWN not in head:
        raise UsageError(
            "this modulefile was not written by hvdenv",
            where=str(path),
            remedy="move it away, or choose another version with --name",
        )
    make_folder(path.parent)
    write_text(named_file(path), text)


def _closed(file: Path) -> Iterator[str]:
    """The file and the directories above it that keep other users out, each with its mode."""
    for path in filter(os.path.exists, (file, *file.parents)):
        mode = path.stat().st_mode
        needed = stat.S_IXGRP if path.is_dir() else stat.S_IRGRP
        if not mode & (needed | needed >> 3):
            yield f"{path} is {stat.filemode(mode)}"

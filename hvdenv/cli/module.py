"""Write a modulefile of an environment, for Lmod (Lua) or Environment Modules (Tcl).

Without --to, module prints it."""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
import stat
from pathlib import Path

from hvdenv.cli.options import (
    add,
    add_options,
    environment_of,
    refuse_foreign_prefix,
    report,
    resolved_of,
)
from hvdenv.cli.target import damaged
from hvdenv.environments import generations, modulefile, registry
from hvdenv.environments.generations import Environment
from hvdenv.environments.modulefile import WRITTEN_BY, Entry
from hvdenv.errors import UsageError
from hvdenv.places import blocked, find_places, make_folder, named_file, named_folder, write_text
from hvdenv.reading import OWN, read_text
from hvdenv.runner import environment
from hvdenv.sites.module_systems import BACKENDS

EXAMPLES = """\
examples:
  hvdenv module local
  hvdenv module neuron --to /proj/group/modulefiles
  hvdenv module --prefix /proj/group/envs/horovod --format tcl --name horovod/0.28.1-2026a
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe?", "prefix", "trust")
    add(
        parser, "--format",
        "lua for Lmod, tcl for Environment Modules (default: the module system of this"
        " machine)", choices=("lua", "tcl"),
    )  # fmt: skip
    add(parser, "--to FOLDER", "write the modulefile below this folder, as NAME/VERSION", type=Path)
    add(
        parser, "--name NAME/VERSION",
        "name of the module (default: horovod/VERSION-RECIPE-VARIANTS)", default="",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.recipe or arguments.prefix):
        return _list()
    if arguments.recipe:
        environment = environment_of(arguments, resolved_of(arguments))
    else:
        environment = generations.at(arguments.prefix)
    # module executes none of its files, but loading the modulefile does.
    refuse_foreign_prefix(environment.prefix, arguments)
    entry = _entry(environment, arguments.name)
    form = arguments.format or _local_format()
    text = {"lua": modulefile.lua, "tcl": modulefile.tcl}[form](entry)
    if arguments.to:
        _publish(arguments.to, entry, text, ".lua" if form == "lua" else "")
    else:
        print(text, end="")
    return 0


def _list() -> int:
    listed = registry.list_environments(find_places())
    complete = [each.prefix for each in listed if each.state == "complete"]
    for prefix in complete:
        print(shlex.join(("hvdenv", "module", "--prefix", prefix)))
    if not complete:
        print("no complete environment yet; build one with `hvdenv build local`")
    return 0


def _entry(environment: Environment, name: str) -> Entry:
    active = environment.active()
    if not active:
        if damage := environment.damage(environment.pointed()):
            raise damaged(environment, damage, "RECIPE")
        raise UsageError(
            "this is not an environment that hvdenv built"
            if os.path.lexists(environment.prefix)
            else "there is no environment here",
            where=str(environment.prefix),
            remedy="`hvdenv envs` lists the environments that exist",
        )
    # Not the prefix, since what a module provides must not change while jobs use it.
    generation = environment.generation(active)
    user, home = _owner(generation)
    record = generations.read_record(environment.record(active))
    return modulefile.from_record(record, generation, name, user=user, home=home)


def _owner(path: Path) -> tuple[str, str]:
    number = os.stat(path).st_uid
    try:
        found = pwd.getpwuid(number)
    except KeyError:
        return str(number), ""
    return found.pw_name, found.pw_dir


def _local_format() -> str:
    """The language of the module system of this shell; Lua if it has none."""
    variables = environment()
    return next((each.modulefile for each in BACKENDS if each.variable in variables), "lua")


def _publish(folder: Path, entry: Entry, text: str, suffix: str) -> None:
    named_folder(folder)
    folder = Path(os.path.abspath(folder.expanduser()))
    path = folder / f"{entry.name}{suffix}"
    _refuse_foreign(path)
    make_folder(path.parent)
    write_text(named_file(path), text)
    print(f"wrote {path}")
    print(f"use it with: module use {shlex.quote(str(folder))}; module load {entry.name}")
    python = entry.environment / "bin" / "python"
    _report_unreadable(path, python, Path(os.path.realpath(python)))


def _refuse_foreign(path: Path) -> None:
    try:
        head = read_text(path, OWN, errors="replace")[:100]
    except FileNotFoundError:
        return
    except OSError as error:
        raise blocked(path, error, "read") from error
    if WRITTEN_BY not in head:
        raise UsageError(
            "this modulefile was not written by hvdenv",
            where=str(path),
            remedy="move it away, or choose another version with --name",
        )


def _report_unreadable(*files: Path) -> None:
    for path in dict.fromkeys(each for file in files for each in (file, *file.parents)):
        if not os.path.exists(path):
            continue
        mode = path.stat().st_mode
        needed = stat.S_IXGRP if path.is_dir() else stat.S_IRGRP
        if not mode & (needed | needed >> 3):
            report(f"note: other users cannot use it: the mode of {path} is {stat.filemode(mode)}")

"""Options that commands share, and what they mean."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

from hvdenv import trust
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import StepError, UntrustedError, UsageError
from hvdenv.model.cluster import SiteKeys, Wheels, Workspace
from hvdenv.model.folders import User, expand, unset_variable
from hvdenv.model.layers import Resolved, load_recipe, own_keys, read_layer
from hvdenv.model.recipe import Recipe, executed_paths, executed_words
from hvdenv.places import environment_name, find_places, home_folder, login_name, make_folder
from hvdenv.reading import HOSTS, Content, read_text
from hvdenv.runner import Runner, environment
from hvdenv.sites import workspace
from hvdenv.sites.hosts import Host, parse_hostfile, parse_hosts
from hvdenv.trust import Fault, Owners

SITE_VARIABLE = "HVDENV_SITE"


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
    return parser


def _add_recipe(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    add(
        parser, "recipe RECIPE",
        "a recipe's name, or the path of a TOML file (with a slash, or ending in .toml)",
        nargs="?" if optional else None,
    )  # fmt: skip
    add(
        parser, "--variant V",
        "use this variant of the recipe; may be repeated", action="append", default=[],
    )  # fmt: skip
    add(
        parser, "--set KEY=VALUE",
        "override a value of the recipe, such as mpi.version=5.0.11; may be repeated",
        action="append", default=[], dest="overrides",
    )  # fmt: skip
    add_options(parser, "site")


def site_file(arguments: argparse.Namespace) -> Path | None:
    named = getattr(arguments, "site", None) or environment().get(SITE_VARIABLE)
    return Path(named) if named else None


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    add(
        where, "--hosts H",
        "hosts and their slots, such as gpu32:4,gpu33:4 (default: those of the allocation)",
    )  # fmt: skip
    add(where, "--hostfile F", "file with one host per line", type=Path)


def requested_hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of --hosts or --hostfile; empty without these."""
    if arguments.hostfile:
        return parse_hostfile(read_hostfile(arguments.hostfile), str(arguments.hostfile))
    return parse_hosts(arguments.hosts) if arguments.hosts is not None else ()


def read_hostfile(path: Path) -> str:
    remedy = "name the hosts with --hosts"
    with usable(path, remedy, "cannot read the host file"):
        return read_text(path, HOSTS, errors="replace")


@contextmanager
def usable(path: object, remedy: str, what: str = "cannot read it") -> Iterator[None]:
    """Report an error with a file that the user named as a usage error."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", where=str(path), remedy=remedy) from error


def _python(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a version such as 3.11; hvdenv looks for the interpreter on PATH and in the folders of version managers"
        )
    return text


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        if name in _GROUPS:
            _GROUPS[name](parser)
        else:
            spelled, text, more = _OPTIONS[name]
            add(parser, spelled, text, **more)


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


def resolved_of(
    arguments: argparse.Namespace, *, shown: bool = False, anywhere: bool = False
) -> Resolved:
    """The recipe that the options name.

    Args:
        shown: nothing that it names is executed.
        anywhere: nothing is built or submitted; a variable that this machine lacks stays in a folder.

    Raises:
        UntrustedError: somebody else could have changed it, or a script or folder that it names.
    """
    resolved = load_recipe(
        arguments.recipe,
        variants=arguments.variant,
        site=site_file(arguments),
        overrides=arguments.overrides,
    )
    user = _user(lenient=shown or anywhere)
    recipe, written = expand(Recipe, resolved.recipe, user)
    origins = dict(resolved.origins)
    for key, text in written.items():
        name = key.partition("[")[0]  # a list has one origin
        origins[name] = f"{origins[name]}: {text}"
        if anywhere and (variable := unset_variable(text, user)):
            report(f"note: {variable} is not set on this machine; {key} is shown as {text}")
    resolved = resolved._replace(recipe=recipe, origins=origins)
    if not shown:
        for content in resolved.contents:
            _refuse_foreign_content(content, arguments)
        refuse_foreign_names(recipe, arguments, resolved.file)
    return resolved


def _user(*, lenient: bool = False) -> User:
    return User(login_name(), str(home_folder()), environment(), lenient)


def of_site(arguments: argparse.Namespace, *keys: str) -> SiteKeys:
    """Keys of the site file, for what needs no recipe."""
    site = site_file(arguments)
    return own_keys(read_layer("site", site) if site else None, *keys)


def wheels_of_site(arguments: argparse.Namespace) -> Wheels:
    """The caches of compiled wheels that the site file names: for what needs no recipe."""
    places = of_site(arguments, "places").places
    return expand(Wheels, places.wheels, _user(), ("places", "wheels"))[0]


def environment_of(
    arguments: argparse.Namespace, resolved: Resolved, *, anywhere: bool = False
) -> Environment:
    """The environment that the options name, or the one where the recipe keeps them.

    Args:
        anywhere: a placeholder stands for the folder of a workspace that this machine lacks.

    Raises:
        UsageError: the recipe's workspace is not allocated.
    """
    if arguments.prefix:
        return generations.at(arguments.prefix)
    recipe = resolved.recipe
    if recipe.places.workspace and getattr(arguments, "facts", None) is None:
        folder = _workspace(recipe.places.workspace, anywhere=anywhere)
    elif recipe.places.environments:
        # A variable that is not set stays in a folder that is only shown.
        folder = Path("/", recipe.places.environments)
    else:
        folder = find_places().envs
    # Up to version 0.1, variants that only change jobs had environments of their own.
    before = folder / environment_name(recipe.name, resolved.variants)
    if os.path.lexists(before):
        return generations.at(before)
    return generations.at(folder / environment_name(recipe.name, resolved.keyed))


def _workspace(wanted: Workspace, *, anywhere: bool) -> Path:
    found = None
    if not anywhere or workspace.has_tools():
        found = workspace.find(wanted, Runner())
    if found is None and not anywhere:
        raise UsageError(
            f"the workspace {wanted.name} is not allocated, or it has expired",
            remedy="`hvdenv build` allocates it and builds there; or name a folder with --prefix",
        )
    if found:
        return found
    stands = workspace.placeholder(wanted)
    report(
        f"note: {stands} stands for the folder of the recipe's workspace, which this machine lacks;"
        " `ws_find` prints it on the cluster"
    )
    return stands


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def report(text: str) -> None:
    """Print a line to standard error without delay."""
    print(text, file=sys.stderr, flush=True)


def give(arguments: argparse.Namespace, document: Any, *lines: str) -> None:
    """Print a result: as JSON with --json, otherwise the lines, unless --quiet is set."""
    if arguments.json:
        print_json(document)
    elif not getattr(arguments, "quiet", False):
        for line in lines:
            print(line)


_RUNS_PROGRAMS = "hvdenv would run its programs"


def refuse_foreign(
    find: Callable[[Owners], Iterator[Fault]],
    arguments: argparse.Namespace,
    where: object,
    use: str = _RUNS_PROGRAMS,
    way: str = "",
) -> None:
    """Refuse what another user could change, without --trust.

    Args:
        find: finds the faults, by the owners whose files are used.
        use: what hvdenv would do.
        way: a further remedy.

    Raises:
        UntrustedError: with who could change it, and what to do.
    """
    if getattr(arguments, "trust", False):
        return
    if "owners" not in arguments:
        arguments.owners, site = trust.trusted_owners(), site_file(arguments)
        if site and (layer := read_layer("site", site)).content:
            _refuse_foreign_content(layer.content, arguments)
            arguments.owners = trust.trusted_owners(own_keys(layer, "trust").trust.owners)
    for fault in find(arguments.owners):
        if not fault.note:
            subject = "this" if fault.path == str(where) else fault.path
            said, remedy = f"{subject} {fault.problem}, and {use}", f"{fault.remedy}{way}"
            raise UntrustedError(said, where=str(where), remedy=remedy + _again(arguments))
        if "noted" not in arguments:
            arguments.noted = fault
            report(f"note: {fault.path} {fault.problem}; hvdenv uses it all the same")


def _again(arguments: argparse.Namespace) -> str:
    """The command that uses it all the same."""
    if not hasattr(arguments, "trust"):
        return ""
    command, *words = getattr(arguments, "words", [arguments.command])
    program = ["--", *arguments.program] if getattr(arguments, "program", ()) else []
    again = shlex.join(["hvdenv", command, "--trust", *words, *program])
    return f"; or, if you trust it this time: `{again}`"


# What programs are run from or installed from; wheels of the cache are judged one by one.
_OF_HOME = (
    ".", "envs", "jobs", "cache", "cache/scratch", "cache/files", "cache/conda", "cache/uv",
)  # fmt: skip


def refuse_foreign_home(arguments: argparse.Namespace) -> None:
    """Many commands execute files below HVDENV_HOME: nobody else may write it."""
    home = find_places().home
    above = next(each for each in (home, *home.parents) if each.is_dir())
    if above != home and above.stat().st_mode & stat.S_IWOTH:
        with suppress(StepError):  # everybody can make it: it must be there before it is judged
            make_folder(home)
    use = "hvdenv would run programs from HVDENV_HOME"
    way = "; or name a folder of your own: export HVDENV_HOME=..."
    for each in _OF_HOME:
        refuse_foreign(partial(trust.on_way, home / each), arguments, home, use, way)


def _refuse_foreign_content(content: Content, arguments: argparse.Namespace) -> None:
    find = partial(trust.of_content, content)
    refuse_foreign(find, arguments, content.path, "hvdenv would run what it names")


def refuse_foreign_names(recipe: Recipe, arguments: argparse.Namespace, where: str) -> None:
    """Judge the scripts and folders that a recipe names."""
    # The user's `module` command reads these anyway.
    already = environment().get("MODULEPATH", "").split(":")
    for key, path in (*executed_paths(recipe), *executed_words(recipe)):
        if path.startswith("/") and not (key == "modules.use" and path in already):
            # Other variables name caches, too, which programs create themselves.
            used = not key.startswith("environment: ") or ": LD_" in key or ": PYTHON" in key
            refuse_foreign_path(path, arguments, f"{where} names it: {key}", used=used)


def refuse_foreign_prefix(
    prefix: object, arguments: argparse.Namespace, *, whole: bool = False, also: str = ""
) -> None:
    """Judge an environment before anything in it is executed.

    Args:
        prefix: the folder or link; need not exist.
        whole: look at every file.
        also: a further folder with its Python, where that is elsewhere.
    """
    for each in filter(None, (str(prefix), also)):
        find = partial(trust.in_environment, each, whole=whole)
        refuse_foreign(find, arguments, each)


def refuse_foreign_path(
    path: object, arguments: argparse.Namespace, use: str = _RUNS_PROGRAMS, *, used: bool = False
) -> None:
    """Judge a script, an image or a folder; for `used`, see trust.on_way()."""
    refuse_foreign(partial(trust.on_way, str(path), used=used), arguments, path, use)


def _add_locked(parser: argparse.ArgumentParser) -> None:
    """Options of commands that use a lock; see is_locked()."""
    add(parser, "--locked", "build exactly what the lock lists, or exit with 4")
    add_options(parser, "lockfiles", "lock")
    add(
        parser, "--from DIR", "use the files that `hvdenv fetch` downloaded",
        type=Path, dest="source_folder",
    )  # fmt: skip
    add(parser, "--offline", "use no network")


def is_locked(arguments: argparse.Namespace) -> bool:
    """Whether a lock is asked for, by options that go together."""
    if arguments.offline and not arguments.source_folder:
        raise UsageError(
            "--offline requires --from, with the files that `hvdenv fetch` downloaded",
            remedy="download them on a host with a network: hvdenv fetch RECIPE --to DIR",
        )
    for name in ("lock", "source_folder", "accept_drift"):
        if getattr(arguments, name, None) and not arguments.locked:
            option = {"source_folder": "from"}.get(name, name.replace("_", "-"))
            raise UsageError(f"--{option} requires --locked", remedy="add --locked")
    return bool(arguments.locked)


_GROUPS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "recipe": _add_recipe,
    "recipe?": partial(_add_recipe, optional=True),
    "hosts": _add_hosts,
    "loudness": _add_loudness,
    "locked": _add_locked,
}
# As for add(): names, help, and the rest.
_OPTIONS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "json": ("--json", "print the result as JSON, and nothing else, on standard output", {}),
    "color": ("--color", None, {"choices": ("auto", "always", "never"), "default": "auto"}),
    "prefix": (
        "--prefix P", "path of the environment (a symbolic link that hvdenv manages)",
        {"type": Path},
    ),
    "python": ("--python X.Y", "Python version to use, such as 3.11", {"type": _python}),
    "site": ("--site FILE", f"site file (default: ${SITE_VARIABLE})", {"type": Path}),
    "trust": ("--trust", "use files that other users can change, for this command only", {}),
    "allow": (
        "--allow RULE", "continue although this rule blocks; may be repeated",
        {"action": "append", "default": []},
    ),
    "clean": (
        "--clean",
        "unset the variables of your shell that change results, such as LD_PRELOAD,"
        " LD_LIBRARY_PATH, HOROVOD_*, NCCL_* and OMPI_MCA_*", {},
    ),
    "where": (
        "--where",
        "compute: submit it as a job with the resources of the recipe, and follow it"
        " (default: here)", {"choices": ("here", "compute"), "default": "here"},
    ),
    "lock": ("--lock FOLDER", "use this lock, if there are several", {"type": Path}),
    "lockfiles": (
        "--lockfiles DIR",
        "folder of the locks (default: lockfiles beside the recipe, or beside its folder if"
        " that is named recipes)", {"type": Path},
    ),
    "facts": (
        "--facts FILE", "facts of another machine: JSON, as under `facts` in `plan --json` there",
        {"type": Path},
    ),
    "break-lock": ("--break-lock", "take the prefix over from another build, whoever runs it", {}),
}  # fmt: skip

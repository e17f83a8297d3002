"""Options that commands share, and what they mean."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

from hvdenv import trust
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import HvdenvError, UsageError
from hvdenv.model.cluster import SiteKeys, Wheels, Workspace
from hvdenv.model.folders import User, expand, unset_variable
from hvdenv.model.layers import Layer, Resolved, load_recipe, own_keys, read_layer
from hvdenv.model.recipe import Recipe, executed_paths
from hvdenv.places import environment_name, find_places
from hvdenv.reading import HOSTS, read_text
from hvdenv.runner import Runner, environment
from hvdenv.sites import workspace
from hvdenv.sites.hosts import Host, parse_hostfile, parse_hosts
from hvdenv.trust import Policy

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
    named = arguments.site or environment().get(SITE_VARIABLE)
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
        _refuse_foreign(resolved, arguments)
    return resolved


def _user(*, lenient: bool = False) -> User:
    return User(getpass.getuser(), str(Path.home()), environment(), lenient)


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


def policy_of(arguments: argparse.Namespace, site: Layer | None = None) -> Policy | None:
    """Whose files are used; None with --trust. A site file that was read already is not read again."""
    if getattr(arguments, "trust", False):
        return None
    granted = trust.read_granted(find_places())
    return named_by_site(arguments, site)._replace(granted=granted)


def named_by_site(arguments: argparse.Namespace, site: Layer | None = None) -> Policy:
    """Whose files are used without asking, and by what a site file of root says."""
    policy = trust.own_policy()
    file = None if site else site_file(arguments)
    if file:
        try:
            site = read_layer("site", file)
        except HvdenvError:  # a command that needs it says so
            return policy
    if site and site.content:
        named = own_keys(site, "trust").trust
        if trust.is_of_root(site.content):
            return trust.with_names(policy, named.owners, named.groups)
        if named.owners or named.groups:
            _note_ignored_trust(site.file)
    return policy


@cache
def _note_ignored_trust(site: str) -> None:
    report(
        f"note: {site}: [trust] is ignored, because users other than root can write this file or a folder above it"
    )


def refuse_foreign_home(arguments: argparse.Namespace) -> None:
    """Many commands execute files below HVDENV_HOME: nobody else may write it."""
    if not getattr(arguments, "trust", False):
        trust.refuse_home(find_places().home, named_by_site(arguments))


def _refuse_foreign(resolved: Resolved, arguments: argparse.Namespace) -> None:
    if policy := policy_of(arguments, resolved.site):
        for content in resolved.contents:
            trust.refuse_content(content, policy, "hvdenv would run what it names")
        _refuse_foreign_names(resolved.recipe, policy, resolved.file)


def refuse_foreign_names(recipe: Recipe, arguments: argparse.Namespace, where: str) -> None:
    """Judge the scripts and folders that a recipe in the record of an environment names."""
    if policy := policy_of(arguments):
        _refuse_foreign_names(recipe, policy, where)


def _refuse_foreign_names(recipe: Recipe, policy: Policy, where: str) -> None:
    # The user's `module` command reads these anyway.
    already = environment().get("MODULEPATH", "").split(":")
    for key, path in executed_paths(recipe):
        if path.startswith("/") and not (key == "modules.use" and path in already):
            trust.refuse_path(path, policy, f"{where} names it: {key}")


def refuse_foreign_prefix(
    prefix: Path, arguments: argparse.Namespace, *, whole: bool = False, also: str = ""
) -> None:
    """Judge an environment before anything in it is executed.

    Args:
        prefix: the folder or link; need not exist.
        whole: look at every file.
        also: a further folder with its Python, where that is elsewhere.
    """
    if policy := policy_of(arguments):
        trust.refuse_prefix(prefix, policy, _RUNS_PROGRAMS, whole=whole, also=also)


def refuse_foreign_path(
    path: object, arguments: argparse.Namespace, prefix: Path | None = None
) -> None:
    """Judge an image; the grants of the environment that it belongs to apply to it too."""
    if policy := policy_of(arguments):
        policy = policy.at(trust.real_path(prefix)) if prefix else policy
        trust.refuse_path(str(path), policy, _RUNS_PROGRAMS)


def _add_locked(parser: argparse.ArgumentParser) -> None:
    """Options of commands that use a lock; see is_locked()."""
    add(parser, "--locked", "build exactly what the lock lists, or exit with 4")
    add_options(parser, "lockfiles", "lock")
    add(
        parser, "--require-signed",
        "refuse a lock without a signature by a key in places.locks.signers (default: only if"
        " a site file sets that key)",
    )  # fmt: skip
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
    for name in ("lock", "source_folder", "accept_drift", "require_signed"):
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

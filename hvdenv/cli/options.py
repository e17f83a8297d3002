"""Options that commands share, and what they mean."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

from hvdenv import trust
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import HvdenvError, UsageError
from hvdenv.model.cluster import Wheels, Workspace
from hvdenv.model.folders import User, expand
from hvdenv.model.layers import Layer, Resolved, load_recipe, own_keys, read_layer
from hvdenv.model.recipe import Recipe, executed_paths
from hvdenv.places import Places, environment_name, find_places
from hvdenv.reading import HOSTS, Content, read_text
from hvdenv.runner import Runner, environment
from hvdenv.sites import workspace
from hvdenv.sites.hosts import Host, parse_hostfile, parse_hosts
from hvdenv.trust import Policy

SITE_VARIABLE = "HVDENV_SITE"


def add_recipe(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """RECIPE and what is laid over it."""
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?" if optional else None,
        help="a recipe's name, or the path of a TOML file (with a slash, or ending in .toml)",
    )  # fmt: skip
    parser.add_argument(
        "--variant",
        metavar="V",
        action="append",
        default=[],
        help="use this variant of the recipe; may be repeated",
    )
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="override a value of the recipe, such as mpi.version=5.0.11; may be repeated",
    )  # fmt: skip
    add_options(parser, "site")


def site_file(arguments: argparse.Namespace) -> Path | None:
    """The site file that the options or the environment name."""
    named = arguments.site or environment().get(SITE_VARIABLE)
    return Path(named) if named else None


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Where ranks go."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        metavar="H",
        help="hosts and their slots, such as gpu32:4,gpu33:4 (default: those of the allocation)",
    )
    where.add_argument("--hostfile", metavar="F", type=Path, help="file with one host per line")


def requested_hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of --hosts or --hostfile; empty without these.

    Raises:
        UsageError: they are not understood, or the file cannot be read.
    """
    if arguments.hostfile:
        return parse_hostfile(read_hostfile(arguments.hostfile), str(arguments.hostfile))
    return parse_hosts(arguments.hosts) if arguments.hosts is not None else ()


def read_hostfile(path: Path) -> str:
    """What is in a file with hosts.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return read_text(path, HOSTS, errors="replace")
    except OSError as error:
        raise UsageError(
            f"cannot read the host file: {error.strerror}", where=str(path),
            remedy="name the hosts with --hosts",
        ) from error  # fmt: skip


def _python(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a version such as 3.11; hvdenv looks for the interpreter on PATH and in the folders of version managers"
        )
    return text


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Options that several commands have, by name."""
    for name in names:
        _OPTIONS[name](parser)


_UNITS = {"": "days", "h": "hours", "d": "days", "w": "weeks"}


def _age(text: str) -> timedelta:
    found = re.fullmatch(r"([0-9]{1,5})([hdw]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an age: write a number of days, or one with h, d or w: 12h, 90d, 8w"
        )
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def add_age(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """An option for an age; see time_ago()."""
    parser.add_argument(name, metavar="AGE", type=_age, help=text)


def time_ago(age: timedelta | None) -> str:
    """The time this long ago, in the format of records; empty for no age."""
    if age is None:
        return ""
    return (datetime.now(timezone.utc) - age).isoformat(timespec="microseconds")


def add_dry_run(parser: argparse._ActionsContainer, text: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=text)


def _add_loudness(parser: argparse.ArgumentParser) -> None:
    """--quiet, --verbose and --color."""
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    loudness.add_argument(
        "-v", "--verbose", action="store_true", help="show the output of every command"
    )
    add_options(parser, "color")


def is_coloured(arguments: argparse.Namespace) -> bool:
    """Whether --color, or a terminal, asks for colours on standard output."""
    return arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())


def resolved_of(arguments: argparse.Namespace, *, shown: bool = False) -> Resolved:
    """The recipe that the options name.

    Args:
        arguments: RECIPE and what is laid over it.
        shown: nothing that it names is executed.

    Raises:
        UntrustedError: somebody else could have changed it, or a script or folder that it names.
    """
    resolved = load_recipe(
        arguments.recipe,
        variants=arguments.variant,
        site=site_file(arguments),
        overrides=arguments.overrides,
    )
    recipe, written = expand(Recipe, resolved.recipe, _user(lenient=shown))
    origins = dict(resolved.origins)
    for key, text in written.items():
        name = key.partition("[")[0]  # a list has one origin
        origins[name] = f"{origins[name]}: {text}"
    resolved = resolved._replace(recipe=recipe, origins=origins)
    if not shown:
        _refuse_foreign(resolved, arguments)
    return resolved


def _user(*, lenient: bool = False) -> User:
    return User(getpass.getuser(), str(Path.home()), environment(), lenient)


def wheels_of_site(arguments: argparse.Namespace) -> Wheels:
    """The caches of compiled wheels that the site file names: for what needs no recipe."""
    site = site_file(arguments)
    places = own_keys(read_layer("site", site) if site else None, "places").places
    return expand(Wheels, places.wheels, _user(), ("places", "wheels"))[0]


def environment_of(
    arguments: argparse.Namespace, resolved: Resolved, places: Places, *, anywhere: bool = False
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
        folder = places.envs
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
    print(
        f"note: {stands} stands for the folder of the recipe's workspace, which this machine lacks;"
        " `ws_find` prints it on the cluster",
        file=sys.stderr,
    )
    return stands


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


_RUNS = "hvdenv would run what it names"


def policy_of(arguments: argparse.Namespace, site: Layer | None = None) -> Policy | None:
    """Whose files are used; None with --trust.

    Args:
        arguments: of any command.
        site: the site file, where it was read already.
    """
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
    print(
        f"note: {site}: [trust] is ignored, because users other than root can write this file or a folder above it",
        file=sys.stderr,
    )


def refuse_foreign_home(arguments: argparse.Namespace) -> None:
    """Many commands execute files below HVDENV_HOME: nobody else may write it.

    Raises:
        UntrustedError: somebody can.
    """
    if not getattr(arguments, "trust", False):
        trust.refuse_home(find_places().home, named_by_site(arguments))


def _refuse_foreign(resolved: Resolved, arguments: argparse.Namespace) -> None:
    """Judge what was read of a recipe and a site file, then the scripts and folders they name."""
    policy = policy_of(arguments, resolved.site)
    if policy is None:
        return
    for content in resolved.contents:
        trust.refuse_content(content, policy, _RUNS)
    refuse_foreign_names(resolved.recipe, arguments, resolved.file, policy)


def refuse_foreign_names(
    recipe: Recipe, arguments: argparse.Namespace, where: str, policy: Policy | None = None
) -> None:
    """Judge the scripts and folders that a recipe names and that programs use.

    Args:
        recipe: from a file, or from the record of an environment.
        arguments: of the command.
        where: the recipe comes from.
        policy: from policy_of(), if it was made already.

    Raises:
        UntrustedError: somebody else could change one.
    """
    policy = policy or policy_of(arguments)
    if policy is None:
        return
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
        arguments: of the command.
        whole: look at every file.
        also: a further folder with its Python, where that is elsewhere.

    Raises:
        UntrustedError: somebody else could change it.
    """
    policy = policy_of(arguments)
    if policy:
        use = "hvdenv would run its programs"
        trust.refuse_prefix(prefix, policy, use, whole=whole, also=also)


def refuse_foreign_path(
    path: str, arguments: argparse.Namespace, prefix: Path | None = None
) -> None:
    """Judge what programs will open at a path: an image.

    Args:
        path: of the file.
        arguments: of the command.
        prefix: of the environment that it belongs to, whose grants apply to it too.

    Raises:
        UntrustedError: somebody else could change it.
    """
    policy = policy_of(arguments)
    if policy:
        policy = policy.at(trust.real_path(prefix)) if prefix else policy
        trust.refuse_path(path, policy, "hvdenv would run its programs")


def refuse_foreign_tests(path: Path, arguments: argparse.Namespace) -> None:
    """Judge a checkout of Horovod, or an archive of one, before its tests are executed.

    Raises:
        UntrustedError: somebody else could change it.
    """
    policy = policy_of(arguments)
    if policy and path.is_dir():
        trust.refuse_prefix(path, policy, "hvdenv would run its tests", whole=True)
    elif policy:
        trust.refuse_path(path, policy, "hvdenv would run its tests")


def refuse_foreign_content(content: Content, arguments: argparse.Namespace) -> None:
    """Judge a file of a lock.

    Raises:
        UntrustedError: somebody else could have changed it.
    """
    policy = policy_of(arguments)
    if policy:
        trust.refuse_content(content, policy, "hvdenv would install and run what it lists")


def _add_locked(parser: argparse.ArgumentParser) -> None:
    """What build and plan take to go by a lock."""
    parser.add_argument(
        "--locked", action="store_true", help="build exactly what the lock lists, or exit with 4"
    )
    add_options(parser, "lockfiles")
    parser.add_argument(
        "--lock", metavar="FOLDER", type=Path, help="use this lock, if there are several"
    )
    parser.add_argument(
        "--require-signed", action="store_true",
        help="refuse a lock without a signature by a key in places.locks.signers (default: only if"
        " a site file sets that key)",
    )  # fmt: skip
    parser.add_argument(
        "--from", metavar="DIR", type=Path, dest="source_folder",
        help="use the files that `hvdenv fetch` downloaded",
    )  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="use no network")


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


def _option(*names: str, **keywords: Any) -> Callable[[argparse.ArgumentParser], None]:
    """What adds one option."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(*names, **keywords)

    return add


_OPTIONS = {
    "recipe": add_recipe,
    "hosts": _add_hosts,
    "loudness": _add_loudness,
    "locked": _add_locked,
    "json": _option(
        "--json", action="store_true",
        help="print the result as JSON, and nothing else, on standard output",
    ),
    "color": _option("--color", choices=("auto", "always", "never"), default="auto"),
    "prefix": _option(
        "--prefix", metavar="P", type=Path,
        help="path of the environment (a symbolic link that hvdenv manages)",
    ),
    "python": _option(
        "--python", metavar="X.Y", type=_python, help="Python version to use, such as 3.11"
    ),
    "site": _option(
        "--site", metavar="FILE", type=Path, help=f"site file (default: ${SITE_VARIABLE})"
    ),
    "trust": _option(
        "--trust", action="store_true",
        help="use files that other users can change, for this command only",
    ),
    "allow": _option(
        "--allow", metavar="RULE", action="append", default=[],
        help="continue although this rule blocks; may be repeated",
    ),
    "clean": _option(
        "--clean", action="store_true",
        help="unset the variables of your shell that change results, such as LD_PRELOAD,"
        " LD_LIBRARY_PATH, HOROVOD_*, NCCL_* and OMPI_MCA_*",
    ),
    "where": _option(
        "--where", choices=("here", "compute"), default="here",
        help="compute: submit it as a job with the resources of the recipe, and follow it"
        " (default: here)",
    ),
    "lockfiles": _option(
        "--lockfiles", metavar="DIR", type=Path,
        help="folder of the locks (default: lockfiles beside the recipe, or beside its folder if"
        " that is named recipes)",
    ),
    "facts": _option(
        "--facts", metavar="FILE", type=Path,
        help="facts of another machine: JSON, as under `facts` in `plan --json` there",
    ),
    "break-lock": _option(
        "--break-lock", action="store_true",
        help="take the prefix over from another build, whoever runs it",
    ),
}  # fmt: skip

"""What a request names: its recipe, opened and trusted, its site file, and its environment."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar, get_args

from hvdenv.base.errors import UsageError
from hvdenv.base.places import environment_name, find_places, login_name
from hvdenv.base.runner import Runner, environment
from hvdenv.base.schema import KeyPath, Pattern, decode, dotted, encode
from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.model.cluster import FileName, Folder, SiteKeys, Wheels, Workspace
from hvdenv.model.layers import Resolved, load_recipe, own_keys
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import read_layer
from hvdenv.session.output import report
from hvdenv.session.request import Request
from hvdenv.sites import workspace as workspaces

T = TypeVar("T")

_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
# What may be in place of a variable: it goes into scripts, links and lists such as MODULEPATH.
_FOLDER = re.compile(r"/[A-Za-z0-9._+@/-]{1,1000}")
# In place of {user}.
_NAME = re.compile(r"(?!\.\.?$)[^/:\s'\"`$\x00-\x1f\x7f]{1,64}")


class User(NamedTuple):
    """The user who runs hvdenv.

    Attributes:
        name: in place of {user}.
        variables: in place of $NAME at the start of a directory.
        lenient: leave a variable that is not set as it is, where nothing uses the directory.
    """

    name: str
    variables: Mapping[str, str]
    lenient: bool = False


def expand(kind: type[T], value: T, user: User, above: KeyPath = ()) -> tuple[T, dict[str, str]]:
    """The same data with all directories and file names expanded.

    Variables for programs are left alone: those are filled in where and when programs run.

    Returns:
        The data, and by dotted key the text of each directory that began with a variable.

    Raises:
        UsageError: a variable is not set, or is not a directory; the message names the key.
    """
    written: dict[str, str] = {}
    folder, file = get_args(Folder)[1], get_args(FileName)[1]

    def filled(pattern: Pattern, text: str, path: KeyPath) -> str:
        if pattern == folder and (found := _VARIABLE.match(text)):
            written[dotted(path)] = text
            text = _variable_value(found[1], dotted(path), user) + text[found.end() :]
        if pattern in (folder, file) and "{user}" in text:
            text = text.replace("{user}", _user_name(dotted(path), user))
        return text

    return decode(kind, encode(value), above, rewrite=filled), written


def _user_name(key: str, user: User) -> str:
    """The user's name, which variables such as LOGNAME decide."""
    if _NAME.fullmatch(user.name):
        return user.name
    raise UsageError(
        f"{{user}} stands for {user.name[:200]!r}, which is no part of a directory",
        where=key,
        remedy="check the variables LOGNAME and USER, or name a directory without it",
    )


def unset_variable(text: str, user: User) -> str:
    """The variable that a directory begins with and the user has not set, such as ``$WORK``; or empty."""
    found = _VARIABLE.match(text)
    return found[0] if found and not _value(found[1], user) else ""


def _value(name: str, user: User) -> str:
    return user.variables.get(name, "").rstrip("/")


def _variable_value(name: str, key: str, user: User) -> str:
    value = _value(name, user)
    if _FOLDER.fullmatch(value):
        return value
    if not value and user.lenient:
        return f"${name}"
    wrong = f"${name} is {value[:200]!r}, which is not a directory without spaces and special characters"
    raise UsageError(
        wrong if value else f"${name} is not set",
        where=key,
        remedy=f"set it (export {name}=/...), or name a directory in the recipe or a site file",
    )


def open_recipe(request: Request, text: str | None = None) -> Resolved:
    """The recipe that a request names, or what it would be if its file contained a text.

    Raises:
        UntrustedError: somebody else could have changed it, or a script or directory that it names.
    """
    resolved = load_recipe(
        request.recipe,
        variants=request.variant,
        site=request.site,
        overrides=request.overrides,
        text=text,
    )
    user = _user(lenient=request.anywhere)
    recipe, written = expand(Recipe, resolved.recipe, user)
    origins = dict(resolved.origins)
    for key, value in written.items():
        name = key.partition("[")[0]  # a list has one origin
        origins[name] = f"{origins[name]}: {value}"
        if not request.quiet and (variable := unset_variable(value, user)):
            report(f"note: {variable} is not set on this machine; {key} is shown as {value}")
    resolved = resolved._replace(recipe=recipe, origins=origins)
    for content in resolved.contents:
        request.gate.refuse_content(content)
    request.gate.refuse_names(recipe, resolved.file)
    return resolved


def _user(*, lenient: bool = False) -> User:
    return User(login_name(), environment(), lenient)


def planned_environment(request: Request, resolved: Resolved) -> Environment:
    """The environment at the requested prefix, or where the recipe keeps its environments.

    Raises:
        UsageError: the recipe's workspace is not allocated.
    """
    if request.prefix:
        return generations.at(request.prefix)
    places = resolved.recipe.places
    if places.workspace and request.facts is None:
        folder = _workspace(places.workspace, anywhere=request.anywhere)
    elif places.environments:
        # A variable that is not set stays in a directory that is only shown.
        folder = Path("/", places.environments)
    else:
        folder = find_places().envs
    return generations.at(folder / environment_name(resolved.recipe.name, resolved.keyed))


def _workspace(wanted: Workspace, *, anywhere: bool) -> Path:
    """Its directory; with ``anywhere`` a placeholder for one that this machine lacks."""
    found = None
    if not anywhere or workspaces.has_tools():
        found = workspaces.find(wanted, Runner())
    if found:
        return found
    if not anywhere:
        raise UsageError(
            f"the workspace {wanted.name} is not allocated, or it has expired",
            remedy="`hvdenv build` allocates it and builds there; or name a directory with --prefix",
        )
    stands = workspaces.placeholder(wanted)
    report(
        f"note: {stands} stands for the directory of the recipe's workspace, which this machine lacks;"
        " `ws_find` prints it on the cluster"
    )
    return stands


def site_keys(site: Path | None, *keys: str) -> SiteKeys:
    """Keys of the site file, for what needs no recipe."""
    return own_keys(read_layer("site", site) if site else None, *keys)


def shared_wheels(site: Path | None) -> Wheels:
    """The caches of compiled wheels that the site file names, for what needs no recipe."""
    return expand(Wheels, site_keys(site, "places").places.wheels, _user(), ("places", "wheels"))[0]

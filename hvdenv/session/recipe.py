"""What a request names: its recipe, opened and trusted, its site file, and its environment."""

from __future__ import annotations

from pathlib import Path

from hvdenv.environments import generations
from hvdenv.environments.generations import Environment
from hvdenv.errors import UsageError
from hvdenv.model.cluster import SiteKeys, Wheels, Workspace
from hvdenv.model.folders import User, expand, unset_variable
from hvdenv.model.layers import Resolved, load_recipe, own_keys
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import read_layer
from hvdenv.places import environment_name, find_places, home_folder, login_name
from hvdenv.runner import Runner, environment
from hvdenv.session.output import report
from hvdenv.session.request import Request
from hvdenv.sites import workspace as workspaces


def open_recipe(request: Request) -> Resolved:
    """The recipe that a request names.

    Raises:
        UntrustedError: somebody else could have changed it, or a script or directory that it names.
    """
    resolved = load_recipe(
        request.recipe, variants=request.variant, site=request.site, overrides=request.overrides
    )
    user = _user(lenient=request.anywhere)
    recipe, written = expand(Recipe, resolved.recipe, user)
    origins = dict(resolved.origins)
    for key, text in written.items():
        name = key.partition("[")[0]  # a list has one origin
        origins[name] = f"{origins[name]}: {text}"
        if variable := unset_variable(text, user):
            report(f"note: {variable} is not set on this machine; {key} is shown as {text}")
    resolved = resolved._replace(recipe=recipe, origins=origins)
    for content in resolved.contents:
        request.gate.refuse_content(content)
    request.gate.refuse_names(recipe, resolved.file)
    return resolved


def _user(*, lenient: bool = False) -> User:
    return User(login_name(), str(home_folder()), environment(), lenient)


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

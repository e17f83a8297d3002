"""The recipe and the site file that a request names: opened, expanded and trusted."""

from __future__ import annotations

from pathlib import Path

from hvdenv.model.cluster import SiteKeys, Wheels
from hvdenv.model.folders import User, expand, unset_variable
from hvdenv.model.layers import Resolved, load_recipe, own_keys
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import read_layer
from hvdenv.places import home_folder, login_name
from hvdenv.runner import environment
from hvdenv.session.output import report
from hvdenv.session.request import Request


def open_recipe(request: Request) -> Resolved:
    """The recipe that a request names.

    Raises:
        UntrustedError: somebody else could have changed it, or a script or folder that it names.
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


def site_keys(site: Path | None, *keys: str) -> SiteKeys:
    """Keys of the site file, for what needs no recipe."""
    return own_keys(read_layer("site", site) if site else None, *keys)


def shared_wheels(site: Path | None) -> Wheels:
    """The caches of compiled wheels that the site file names, for what needs no recipe."""
    return expand(Wheels, site_keys(site, "places").places.wheels, _user(), ("places", "wheels"))[0]

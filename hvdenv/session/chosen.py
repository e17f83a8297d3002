"""The environment that a command is for: named, active in the shell, or built last."""

import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.errors import UsageError
from hvdenv.base.places import environment_name, find_places, make_folder, write_text
from hvdenv.base.runner import environment
from hvdenv.environments import generations, registry
from hvdenv.environments.activation import ACTIVE, Kind, activate_script, site_lines
from hvdenv.environments.generations import Environment
from hvdenv.environments.installation import (
    PYTHON_PATH,
    Installation,
    horovod_in,
    horovod_provider,
    in_image,
    inspect_prefix,
    uses_mpi,
)
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.cluster import Container
from hvdenv.model.recipe import Recipe, provided_by_modules
from hvdenv.session.output import report
from hvdenv.session.recipe import open_recipe, planned_environment
from hvdenv.session.request import Request
from hvdenv.sites.container import inside, recipe_image
from hvdenv.sites.modules import shell_lines


class Chosen(NamedTuple):
    """The environment that a command runs in.

    Attributes:
        name: recipe and variants; empty if unknown.
        recipe: how to start programs at this site.
        prefix: its path; for an image, that of the image.
        record: of its active generation; None for an image, or if hvdenv did not build it.
        container: how to run its image; None for an environment on the host.
        of_modules: whether modules provide all of it, and it was not built.
        script: what activates an environment that hvdenv did not build.
        foreign: whether it exists, and hvdenv did not build it.
    """

    name: str
    recipe: Recipe
    prefix: Path
    record: GenerationRecord | None
    container: Container | None = None
    of_modules: bool = False
    script: str = ""
    foreign: bool = False

    @property
    def activate(self) -> str:
        """The script that activates it; empty if there is none."""
        if self.container or self.of_modules:
            return ""
        return self.script or str(self.prefix / "activate.sh")

    @property
    def there(self) -> bool:
        if self.container:
            return self.prefix.exists()
        return self.of_modules or self.foreign or self.record is not None

    @property
    def inside(self) -> tuple[str, ...]:
        """The words before a program that runs in the image."""
        return inside(self.container, os.getcwd()) if self.container else ()

    def inspect(self, python_path: str) -> Installation:
        """What is installed in it; PYTHONPATH of the shell counts where hvdenv did not build it."""
        if self.container:
            return in_image(self.container)._replace(recipe=self.name)
        installed = generations.at(self.prefix)
        active = installed.active()
        folder = installed.generation(active) if active else self.prefix
        found = inspect_prefix(str(folder), python_path)
        return found._replace(prefix=str(self.prefix), recipe=self.name)

    @property
    def module_lines(self) -> tuple[str, ...]:
        """Commands that load the host's modules where no activate.sh does."""
        modules = None if self.activate else self.recipe.modules
        if modules and self.of_modules:
            variables = self.recipe.environment.run
            return site_lines(variables, shell_lines(modules, "run", cleaned=True))
        return shell_lines(modules, "run") if modules else ()

    @property
    def before(self) -> str:
        """Shell commands that come before everything else, the last of which may fail."""
        if self.activate:
            return f". {shlex.quote(self.activate)}"
        if not self.module_lines:
            return "true"
        return "\n".join(("hvdenv_modules() {", *self.module_lines, "}", "hvdenv_modules"))


def choose(request: Request, *, image: bool = False, judged: bool = False) -> Chosen:
    """The environment that a request names. It must exist, unless the request is for anywhere.

    Args:
        image: whether it may be the recipe's image, if no prefix is given.
        judged: whether its damage is looked for afterwards, and all of its files are trusted.
    """
    if not request.recipe:
        if not request.prefix:
            raise UsageError("no environment is named", remedy="name a recipe, or a --prefix")
        return _at(request, generations.at(request.prefix), judged=judged)
    resolved = open_recipe(request)
    recipe = resolved.recipe
    name = environment_name(recipe.name, resolved.keyed)
    elsewhere_too = image and not request.prefix
    if elsewhere_too and (container := recipe_image(recipe, os.getcwd())):
        return _in_image(request, name, recipe, container)
    of_modules = elsewhere_too and not judged and provided_by_modules(recipe)
    if of_modules and recipe.places.workspace:
        return _of_modules(name, recipe)
    installed = planned_environment(request, resolved)
    if of_modules and not (installed.active() or installed.damage(installed.pointed())):
        return _of_modules(name, recipe)
    return _at(request, installed, name, recipe, judged=judged)


def choose_built(request: Request) -> tuple[Environment, str, GenerationRecord]:
    """The environment that a request names, its active generation, and the record of that.

    Raises:
        UsageError: hvdenv did not build it.
    """
    chosen = choose(request)
    if chosen.record is None:
        raise UsageError(
            "hvdenv did not build this environment",
            where=str(chosen.prefix),
            remedy="name one that `hvdenv envs` lists",
        )
    installed = generations.at(chosen.prefix)
    return installed, installed.active(), chosen.record


def _at(
    request: Request,
    installed: Environment,
    name: str = "",
    recipe: Recipe | None = None,
    *,
    judged: bool,
) -> Chosen:
    """The environment at a prefix, by hvdenv or not; see choose()."""
    damage = installed.damage(installed.pointed())
    active = "" if damage else installed.active()
    folder = installed.generation(active) if active else installed.prefix
    file = folder / generations.RECORD
    known = active or ((judged or not damage) and file.exists())
    missing = not known and (bool(damage) or not os.path.lexists(folder))
    if missing and not (recipe and request.anywhere):
        raise _not_there(request, installed, name, damage)
    record = generations.read_record(file) if known else None
    if record:  # the site may provide its Python
        also = record.environment if record.environment.startswith("/") else ""
    else:
        also = horovod_provider(folder, environment().get(PYTHON_PATH, ""))
    request.gate.refuse_prefix(installed.prefix, whole=judged, also=also)
    if record and not recipe:
        recipe = generations.recorded_recipe(record, file)
        name = environment_name(record.recipe, record.variants)
        request.gate.refuse_names(recipe, str(installed.prefix))
    if recipe and (record or missing):
        return Chosen(name, recipe, installed.prefix, record)
    return _foreign(request, name, recipe, installed.prefix, judged)


def with_active(request: Request) -> Request:
    """The request; if it names nothing, with the active environment, or the one built last."""
    if request.recipe or request.prefix:
        return request
    found = next(_active(), None) or _last_built()
    if found is None:
        raise UsageError(
            "no environment is named, none with Horovod is active, and none was built yet",
            remedy="name a recipe or a --prefix, or build one: hvdenv build local",
        )
    prefix, why = found
    if not request.quiet:
        report(f"environment: {prefix} ({why})")
    return request._replace(prefix=prefix)


def _active() -> Iterator[tuple[Path, str]]:
    """Environments with Horovod that are active in the shell, and how that is known."""
    variables = environment()
    folders = variables.get("PATH", "").split(os.pathsep)
    bins = {name: os.path.join(variables.get(name, ""), "bin") for name in ACTIVE}
    # The one that was activated last comes first in PATH.
    for name in sorted(ACTIVE, key=lambda each: [*folders, bins[each]].index(bins[each])):
        base = Path(variables.get(name, ""))
        python_path = variables.get(PYTHON_PATH, "")
        if base.is_absolute() and horovod_in(base, python_path):
            yield _prefix_of(base), f"active: {name}"


def _prefix_of(base: Path) -> Path:
    """The environment of hvdenv that a virtual environment belongs to; or itself."""
    for each in (base, base.parent):
        if (each / generations.RECORD).exists() and (each / generations.MARKER).exists():
            store = each.resolve().parent
            prefix = store.with_name(store.name.removeprefix(".").removesuffix(".hvdenv"))
            return prefix if prefix.resolve() == each.resolve() else each
    return base


def _last_built() -> tuple[Path, str] | None:
    known = registry.list_environments(find_places())
    complete = [each for each in known if each.state == "complete"]
    last = max(complete, key=lambda each: each.created, default=None)
    return (Path(last.prefix), "the one built last") if last else None


def _foreign(
    request: Request, name: str, recipe: Recipe | None, prefix: Path, judged: bool
) -> Chosen:
    """An environment that hvdenv did not build.

    Raises:
        UsageError: it has no Python, or no Horovod.
    """
    found = inspect_prefix(str(prefix), environment().get(PYTHON_PATH, ""))
    base = Path(found.python).parent.parent
    if recipe is None:
        # How ranks are started on a machine that no recipe describes, with what is built there.
        recipe = open_recipe(request._replace(recipe="local")).recipe
        package = horovod_in(base, environment().get(PYTHON_PATH, ""))
        if not (package and uses_mpi(package)):
            recipe = recipe._replace(horovod=recipe.horovod._replace(controllers=("gloo",)))
        recipe = recipe._replace(mpi=None)
    chosen = Chosen(name, recipe, prefix, None, foreign=True)
    return chosen if judged else chosen._replace(script=str(_script(base, found.path)))


def _script(base: Path, folders: Sequence[str]) -> Path:
    """Write what activates an environment that hvdenv did not build; under HVDENV_HOME."""
    digest = hashlib.sha256(os.fsencode(base)).hexdigest()[:12]
    script = make_folder(find_places().home / "shells" / digest) / "activate.sh"
    kind: Kind = "conda" if (base / "conda-meta").is_dir() else "venv"
    text = activate_script(base, kind=kind, variables={}, keep=(PYTHON_PATH,))
    others = (f'PATH="$PATH":{shlex.quote(each)}\n' for each in folders[1:])
    write_text(script, "".join([text, *others]))
    return script


def _in_image(request: Request, name: str, recipe: Recipe, container: Container) -> Chosen:
    image = Path(str(container.image))
    if not (request.anywhere or image.exists()):
        raise UsageError(
            f"this host has no image of {request.named}",
            where=str(image),
            remedy=f"build it from what `hvdenv container {request.named}` writes, or copy"
            " it to this host",
        )
    request.gate.refuse_path(image)
    return Chosen(name=name, recipe=recipe, prefix=image, record=None, container=container)


def command_for(request: Request, command: str) -> str:
    """A command on what a request names, such as ``build``."""
    line = f"hvdenv {command} {request.named if request.recipe else 'RECIPE'}"
    return f"{line} --prefix {shlex.quote(str(request.prefix))}" if request.prefix else line


def _not_there(request: Request, installed: Environment, name: str, damage: str) -> UsageError:
    build = command_for(request, "build")
    if damage:
        return UsageError(
            f"files of this environment are damaged: {damage}",
            where=str(installed.prefix),
            remedy=f"rebuild it: {build} --rebuild",
        )
    return UsageError(
        f"there is no environment {f'{name} ' if name else ''}at {installed.prefix}",
        remedy=build
        if request.recipe or installed.identities()
        else "name a prefix that `hvdenv envs` lists",
    )


def _of_modules(name: str, recipe: Recipe) -> Chosen:
    return Chosen(name, recipe, prefix=Path(), record=None, of_modules=True)

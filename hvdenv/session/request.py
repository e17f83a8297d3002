"""What the user asked for, in the options that commands share, and the files that hvdenv may use."""

import shlex
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from hvdenv.base import trust
from hvdenv.base.errors import StepError, UntrustedError, UsageError
from hvdenv.base.places import find_places, make_folder
from hvdenv.base.reading import HOSTS, Content, read_text
from hvdenv.base.runner import environment
from hvdenv.base.trust import Fault, Owners
from hvdenv.model.layers import own_keys
from hvdenv.model.recipe import Recipe, executed_paths, executed_words
from hvdenv.model.recipe_files import read_layer
from hvdenv.session.output import report

_RUNS_PROGRAMS = "hvdenv would run its programs"
_RUNS_NAMED = "hvdenv would run what it names"
# What programs are run from or installed from; wheels of the cache are judged one by one.
_BELOW_HOME = (
    ".",
    "envs",
    "jobs",
    "cache",
    "cache/scratch",
    "cache/conda",
    "cache/uv",
)


class Gate:
    """Refuses what another user could change. Every method raises UntrustedError.

    Args:
        trusted: let everything pass: with --trust, or if the command executes nothing.
        site: the site file, which can name trusted owners.
        again: the command that uses it all the same.
    """

    def __init__(self, *, trusted: bool = False, site: Path | None = None, again: str = "") -> None:
        self.trusted = trusted
        self._site = site
        self._remedy = f"; or, if you trust it this time: `{again}`" if again else ""
        self._noted = False

    @cached_property
    def _owners(self) -> Owners:
        layer = read_layer("site", self._site) if self._site else None
        if not (layer and layer.content):
            return trust.trusted_owners()
        site = partial(trust.judge_content, layer.content)
        self._judge(site(trust.trusted_owners()), layer.content.path, _RUNS_NAMED)
        return trust.trusted_owners(own_keys(layer, "trust").trust.owners)

    def refuse(
        self,
        find: Callable[[Owners], Iterator[Fault]],
        where: object,
        use: str = _RUNS_PROGRAMS,
        way: str = "",
    ) -> None:
        """Refuse what has a fault.

        Args:
            find: finds the faults, by the owners whose files are used.
            use: what hvdenv would do.
            way: a further remedy.
        """
        if not self.trusted:
            self._judge(find(self._owners), where, use, way)

    def _judge(self, faults: Iterator[Fault], where: object, use: str, way: str = "") -> None:
        for fault in faults:
            if not fault.note:
                subject = "this" if fault.path == str(where) else fault.path
                raise UntrustedError(
                    f"{subject} {fault.problem}, and {use}",
                    where=str(where),
                    remedy=f"{fault.remedy}{way}{self._remedy}",
                )
            if not self._noted:
                self._noted = True
                report(f"note: {fault.path} {fault.problem}; hvdenv uses it all the same")

    def refuse_home(self) -> None:
        """Judge HVDENV_HOME, from which many commands execute files."""
        if self.trusted:
            return
        home = find_places().home
        above = next(each for each in (home, *home.parents) if each.is_dir())
        if above != home and above.stat().st_mode & stat.S_IWOTH:
            with suppress(StepError):  # everybody can make it: it must exist before it is judged
                make_folder(home)
        use = "hvdenv would run programs from HVDENV_HOME"
        way = "; or name a directory of your own: export HVDENV_HOME=..."
        for each in _BELOW_HOME:
            self.refuse(partial(trust.judge_way, home / each), home, use, way)

    def refuse_content(self, content: Content, use: str = "") -> None:
        """Judge the bytes of a recipe, a site file or a lock."""
        self.refuse(partial(trust.judge_content, content), content.path, use or _RUNS_NAMED)

    def refuse_names(self, recipe: Recipe, where: str) -> None:
        """Judge the scripts and directories that a recipe names."""
        # The user's `module` command reads these anyway.
        already = environment().get("MODULEPATH", "").split(":")
        for key, path in (*executed_paths(recipe), *executed_words(recipe)):
            if path.startswith("/") and not (key == "modules.use" and path in already):
                # Other variables name caches, too, which programs create themselves.
                used = not key.startswith("environment: ") or ": LD_" in key or ": PYTHON" in key
                self.refuse_path(path, f"{where} names it: {key}", used=used)

    def refuse_prefix(self, prefix: object, *, whole: bool = False, also: str = "") -> None:
        """Judge an environment before anything in it is executed.

        Args:
            prefix: the directory or link; need not exist.
            whole: look at every file.
            also: a further directory with its Python, where that is elsewhere.
        """
        for each in filter(None, (str(prefix), also)):
            self.refuse(partial(trust.judge_environment, each, whole=whole), each)

    def refuse_path(self, path: object, use: str = _RUNS_PROGRAMS, *, used: bool = False) -> None:
        """Judge a script, an image or a directory; for `used`, see trust.judge_way()."""
        self.refuse(partial(trust.judge_way, str(path), used=used), path, use)


SITE_VARIABLE = "HVDENV_SITE"


class Request(NamedTuple):
    """A request; what a command has no option for has its default.

    Attributes:
        gate: refuses files of other users.
        recipe: its name or path; empty if only a prefix is named.
        overrides: each KEY=VALUE.
        python: version such as 3.11; None for the best.
        facts: file with the facts of another machine.
        anywhere: nothing is built, run or submitted: the machine need not be one of the cluster's,
            and the environment need not exist.
        image: to run from; None for the one beside the environment, unless ``no_image``.
        lock: directory of the lock; None for the one of the recipe below ``lockfiles``.
        fetched: directory with files that `hvdenv fetch` downloaded.
        allow: rules that block nothing.
    """

    gate: Gate
    recipe: str = ""
    variant: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    site: Path | None = None
    prefix: Path | None = None
    python: str | None = None
    facts: Path | None = None
    anywhere: bool = False
    image: Path | None = None
    no_image: bool = False
    locked: bool = False
    lock: Path | None = None
    lockfiles: Path | None = None
    fetched: Path | None = None
    offline: bool = False
    allow: tuple[str, ...] = ()
    quiet: bool = False
    verbose: bool = False

    @property
    def named(self) -> str:
        """The recipe with variants and values, or else the prefix, for a command to type."""
        variants = [word for each in self.variant for word in ("--variant", each)]
        values = [word for each in self.overrides for word in ("--set", each)]
        first = (self.recipe,) if self.recipe else ("--prefix", str(self.prefix))
        return shlex.join((*first, *variants, *values))


def site_file(named: Path | None) -> Path | None:
    """The site file that an option names, or else the user's shell."""
    variable = environment().get(SITE_VARIABLE)
    return named or (Path(variable) if variable else None)


def read_hostfile(path: Path) -> str:
    with usable(path, "name the hosts with --hosts", "cannot read the host file"):
        return read_text(path, HOSTS, errors="replace")


@contextmanager
def usable(path: object, remedy: str, what: str = "cannot read it") -> Iterator[None]:
    """Report an error with a file that the user named as a usage error."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", where=str(path), remedy=remedy) from error

"""How programs of an environment are run, and what the environment is expected to have."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from hvdenv import STANDALONE
from hvdenv.base.errors import UsageError
from hvdenv.base.places import user_name
from hvdenv.base.reading import EXTENSION, SYSTEM, open_file, read_text
from hvdenv.base.runner import environment
from hvdenv.environments import generations
from hvdenv.environments.activation import UNSET, filled_in
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.cluster import Container
from hvdenv.model.dialect import job_id
from hvdenv.model.recipe import Recipe
from hvdenv.sites.container import inside

# The variable with the directories that every Python searches before its own packages.
PYTHON_PATH = "PYTHONPATH"
# The module that finds an editable installation, and the directories that it states.
_FINDER = re.compile(r"import (__editable__\w+)")
_MAPPED = re.compile(r"['\"]horovod['\"]: ['\"]([^'\"]+)['\"]")


def horovod_in(base: Path, python_path: str = "") -> Path | None:
    """The package horovod that an environment imports; None if it sees none.

    Args:
        base: the directory with its ``bin/python``.
        python_path: the value of PYTHONPATH.
    """
    return next(_packages(base, python_path), None)


def horovod_provider(base: Path, python_path: str = "") -> str:
    """The prefix of the other environment whose Horovod and horovodrun this one has; or empty."""
    if (base / "bin" / "horovodrun").exists():
        return ""
    prefixes = (each.parents[3] for each in _packages(base, python_path) if len(each.parents) > 3)
    return next((str(each) for each in prefixes if (each / "bin" / "horovodrun").exists()), "")


def _packages(base: Path, python_path: str) -> Iterator[Path]:
    """Every package horovod that an environment sees; it imports the first."""
    named = (Path(each) for each in python_path.split(os.pathsep) if os.path.isabs(each))
    for folder in (*named, *_search_path(base)):
        if (folder / "horovod" / "__init__.py").is_file():
            yield folder / "horovod"


def uses_mpi(package: Path) -> bool:
    """Whether an extension of Horovod was linked against an MPI."""
    return any(map(_names_mpi, package.glob("*/mpi_lib*.so")))


def _names_mpi(file: Path) -> bool:
    try:
        with open_file(file, EXTENSION) as stream:
            return mmap(stream.fileno(), 0, prot=PROT_READ).find(b"libmpi") >= 0
    except (OSError, ValueError):  # an empty file cannot be mapped
        return False


def _search_path(base: Path) -> Iterator[Path]:
    own = sorted(base.glob("lib*/python3*/*-packages"))
    shared = []
    if _shares_packages(base):
        versions = {"python3", *(folder.parent.name for folder in own)}
        prefix = Path(venv_settings(base).get("home", "/usr/bin")).parent
        for each in dict.fromkeys((prefix / "local", prefix)):
            found = sorted(each.glob("lib*/python3*/*-packages"))
            shared += [folder for folder in found if folder.parent.name in versions]
    for folder in (*own, *shared):
        yield folder
        for file in sorted(folder.glob("*.pth")):
            yield from _added_folders(file)


def venv_settings(base: Path) -> dict[str, str]:
    """The keys of pyvenv.cfg; empty if the environment is no virtual one."""
    pairs = (line.partition("=") for line in _text(base / "pyvenv.cfg").splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _shares_packages(base: Path) -> bool:
    """Whether a virtual environment also sees packages of the Python that it was made with."""
    return venv_settings(base).get("include-system-site-packages", "").lower() == "true"


def _added_folders(file: Path) -> Iterator[Path]:
    """The directories that a .pth file adds."""
    for line in map(str.strip, _text(file).splitlines()):
        if finder := _FINDER.match(line):
            for package in _MAPPED.findall(_text(file.with_name(f"{finder[1]}.py"))):
                yield Path(package).parent
        elif line and not line.startswith(("#", "import ", "import\t")):
            yield file.parent / line


def _text(file: Path) -> str:
    try:
        return read_text(file, SYSTEM, errors="replace")
    except OSError:
        return ""


# Every root file system has it, and Python needs nothing there.
_PROGRAMS_INSIDE = "/srv"


class Installation(NamedTuple):
    """An environment that has a Horovod, built by hvdenv or not.

    Attributes:
        prefix: the directory that the user named.
        path: directories to put first in PATH.
        env: further variables for everything that runs in it.
        recipe: what it was built from; empty if unknown.
        generation: directory of the generation; empty if hvdenv did not build it.
        inside: command words that run a program inside an image; empty if it is no image.
        programs: directory of the stand-alone programs, as seen inside an image.
        image: command words that run a program of this host from the image of `hvdenv pack`.
        mount: how the kernel names the mount of that image; empty without one.
    """

    prefix: str
    python: str
    path: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    recipe: str = ""
    generation: str = ""
    inside: tuple[str, ...] = ()
    programs: str = str(STANDALONE)
    image: tuple[str, ...] = ()
    mount: str = ""

    @property
    def unset(self) -> tuple[str, ...]:
        """Variables of the shell that its activation unsets."""
        if self.inside:
            return ()
        return UNSET if self.generation else tuple(n for n in UNSET if n != PYTHON_PATH)

    def program(self, name: str) -> str:
        """Path of a program of the environment or its modules; empty if neither has it.

        An image has a PATH of its own.
        """
        if self.inside:
            return name
        of_modules = dict(self.env).get("PATH", "").split(os.pathsep)
        for folder in (*self.path, *filter(None, of_modules)):
            if Path(folder, name).is_file():
                return str(Path(folder, name))
        return ""


def hides_variables(prefix: str | Path) -> bool:
    """Whether horovodrun of an environment, as far as its files show, keeps variables off command lines."""
    launcher = "lib*/python3*/site-packages/horovod/runner/util/remote.py"
    found = (each for base in ("", "venv", "conda") for each in Path(prefix, base).glob(launcher))
    return any("def read_variables(" in read_text(each, SYSTEM) for each in found)


class Expectation(NamedTuple):
    """What an environment should have. None: not stated, so whatever was built is judged.

    Attributes:
        frameworks: of ``torch``, ``tensorflow``, ``mxnet``.
        controllers: of ``MPI``, ``Gloo``.
        operations: of ``NCCL``, ``DDL``, ``CCL``, ``MLSL``, ``MPI``, ``Gloo``.
        versions: of ``horovod`` and frameworks, where the site provides them.
    """

    frameworks: tuple[str, ...] | None = None
    controllers: tuple[str, ...] | None = None
    operations: tuple[str, ...] | None = None
    versions: dict[str, str] = {}

    def asks(self, framework: str, controller: str = "") -> bool:
        """Whether something is expected, or nothing is stated about its kind."""
        return (self.frameworks is None or framework in self.frameworks) and (
            not controller or self.controllers is None or controller in self.controllers
        )


def expectation_of(recipe: Recipe) -> Expectation:
    """What a recipe states, by the names in Horovod's own table."""
    horovod, gpu = recipe.horovod, recipe.horovod.gpu
    controllers = tuple("MPI" if each == "mpi" else "Gloo" for each in horovod.controllers)
    libraries = {horovod.cpu_operations, *(gpu.libraries.values() if gpu else ())}
    versions: dict[str, str] = {
        name: wanted.version
        for name, wanted in recipe.frameworks.items()
        if wanted.provider == "present" and isinstance(wanted.version, str)
    }
    if horovod.provider == "present":
        versions["horovod"] = horovod.version
    return Expectation(
        frameworks=horovod.frameworks,
        controllers=controllers,
        operations=(*controllers, *(n.upper() for n in ("nccl", "ddl", "ccl") if n in libraries)),
        versions=versions,
    )


def is_version(found: str, stated: str) -> bool:
    """Whether a package has the stated version; a local label (+cu118) may differ."""
    try:
        return SpecifierSet(f"=={stated}").contains(found, prereleases=True)
    except InvalidVersion:
        return found == stated


def inspect_prefix(prefix: str, python_path: str = "") -> Installation:
    """The installation in a venv, a conda prefix or a generation of hvdenv.

    Args:
        python_path: PYTHONPATH of the shell. activate.sh unsets it; other environments import
            from there.

    Raises:
        UsageError: there is no interpreter there, or no Horovod.
        StepError: the record of the generation is damaged, or gone.
    """
    root = Path(prefix).absolute()
    if root.is_symlink() and not root.exists():
        raise UsageError(
            f"this link is broken: {root.readlink()} does not exist",
            where=str(root),
            remedy="list environments with `hvdenv envs`; build it again with `hvdenv build RECIPE`",
        )
    if any((root / name).exists() for name in (generations.RECORD, generations.MARKER)):
        return recorded(root, generations.read_record(root / generations.RECORD))
    for base in (root, root / "venv", root / "conda"):
        if (base / "bin" / "python").exists():
            break
    else:
        raise UsageError(
            "this is not a Python environment: it has neither bin/python nor venv/bin/python",
            where=str(root),
            remedy="name the directory that `python -c 'import sys; print(sys.prefix)'` prints there",
        )
    if not _may_have_horovod(base, python_path):
        raise UsageError(
            "Horovod is not installed in this environment",
            where=str(base),
            remedy="install it there, or build an environment with `hvdenv build local`",
        )
    other = horovod_provider(base, python_path)
    return Installation(
        prefix=str(root),
        python=str(base / "bin" / "python"),
        path=(str(base / "bin"), *([f"{other}/bin"] if other else ())),
        env=((PYTHON_PATH, python_path),) if python_path else (),
    )


def recorded(root: Path, record: GenerationRecord) -> Installation:
    """The installation in a generation, whose record states where its Python is.

    Raises:
        UsageError: its Python is gone.
    """
    named = record.environment
    # A directory below a variable of the modules is only known once they are loaded.
    base = Path(named) if named.startswith("$") else root / named
    python = base / "bin" / "python"
    known = python.exists() or named.startswith("$")
    if not known and base != root:
        raise UsageError(
            "the Python of this environment is gone",
            where=str(python),
            remedy="build it again with `hvdenv build RECIPE --rebuild`, where files are not purged",
        )
    variables = filled_in(
        record.variables or {}, user_name(os.geteuid()), job_id(environment()) or str(os.getpid())
    )
    return Installation(
        prefix=str(root),
        # Modules that provide everything provide the interpreter too.
        python=str(python) if known else "python3",
        path=(str(base / "bin"),),
        env=tuple(sorted(variables.items())),
        generation=str(root.resolve()),
    )


def in_image(container: Container) -> Installation:
    """The installation in an image, where programs run with the variables of the image."""
    words = inside(container, "/", (f"{STANDALONE}:{_PROGRAMS_INSIDE}",))
    return Installation(
        prefix=str(container.image),
        python="python",
        path=(),
        inside=words,
        programs=_PROGRAMS_INSIDE,
    )


def with_modules(found: Installation, variables: Mapping[str, str]) -> Installation:
    """The installation as programs see it after modules have set these variables.

    Raises:
        UsageError: the modules should provide its interpreter and do not.
    """
    python = _placed(found.python, variables)
    path = tuple(_placed(folder, variables) for folder in found.path)
    if "/" not in python and not found.inside:
        python = shutil.which(python, path=variables.get("PATH", "")) or ""
        if not python:
            raise UsageError(
                f"the modules of this environment provide no {found.python}",
                where=found.prefix,
                remedy="load them by hand to see why (module load); the site may have renamed them",
            )
    env = {**variables, **dict(found.env)}
    return found._replace(python=python, path=path, env=tuple(sorted(env.items())))


def _placed(path: str, variables: Mapping[str, str]) -> str:
    """A path that may begin with a variable of the modules."""
    return re.sub(r"^\$(\w+)", lambda found: variables.get(found[1], found[0]), path)


def mpi_prefix(variables: Mapping[str, str]) -> str:
    """Prefix of the MPI whose mpirun programs find, since other hosts may not find it.

    Empty if there is no mpirun, or if it is where all hosts look anyway: mpirun --prefix puts its
    bin first in PATH. For a relocated Open MPI, OPAL_PREFIX states the prefix.
    """
    if variables.get("OPAL_PREFIX"):
        return variables["OPAL_PREFIX"]
    found = shutil.which("mpirun", path=variables.get("PATH", "")) if "PATH" in variables else None
    prefix = str(Path(found).resolve().parent.parent) if found else ""
    return prefix if prefix not in ("/usr", "/usr/local", "/") else ""


def _may_have_horovod(base: Path, python_path: str) -> bool:
    """Whether files of Horovod exist, or packages may come from elsewhere."""
    seen = (base / "bin" / "horovodrun").exists() or horovod_in(base, python_path)
    return bool(seen) or _shares_packages(base)

"""The lock of an environment as typed data.

A lock is three files: ``hvdenv-lock.toml`` states what was requested and what the build was made
with, and binds the other two by their hashes: ``pylock.toml`` (PEP 751) and
``conda-lock.yml``. They contain no path, user or host of the machine that wrote them.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from hvdenv.base.errors import LockError, RecipeError
from hvdenv.base.masking import mask
from hvdenv.base.places import make_folder, named_folder, reporting, write_text
from hvdenv.base.reading import LOCK, Content, read_file, read_text
from hvdenv.base.schema import Pattern, Problem, decode, encode, line_of, parse_toml
from hvdenv.model.recipe import Channel, Commit, GitUrl, MaybeSha256, Name, Sha256, Version

FORMAT: Literal[1] = 1
MAIN = "hvdenv-lock.toml"
File = Literal["pylock.toml", "conda-lock.yml"]
PYPI: File = "pylock.toml"
CONDA: File = "conda-lock.yml"

ANEW = "write it again with `hvdenv lock RECIPE`"

MinorVersion = Annotated[str, Pattern(r"3\.[0-9]+", "a Python version such as 3.11")]
PLATFORMS = ("linux-x86_64", "linux-aarch64", "linux-ppc64le")
Platform = Annotated[str, Pattern("|".join(PLATFORMS), "a platform such as linux-x86_64")]


class Horovod(NamedTuple):
    """What Horovod is built from.

    Attributes:
        version, sha256: its source archive; no hash where modules provide Horovod.
        variables: that its build reads: HOROVOD_*, and the recipe's for compilers.
    """

    version: Version
    sha256: MaybeSha256 = ""
    patches: dict[str, Sha256] = {}
    variables: dict[str, str] = {}


class Conda(NamedTuple):
    """What is requested from conda: packages, channels, and virtual packages of the machine."""

    packages: tuple[str, ...]
    channels: tuple[Channel, ...]
    virtual: dict[str, str] = {}


class Source(NamedTuple):
    """A framework that is built from its repository."""

    git: GitUrl
    tag: str
    commit: Commit | None = None


class Inputs(NamedTuple):
    """All that determines the contents of an environment. Compared exactly.

    Attributes:
        packages: what is requested from pip, sorted.
        modules: as in the recipe, in the order of loading.
        mpi: the implementation, and its version where the recipe states it.
    """

    recipe: Name
    variants: tuple[Name, ...]
    python: MinorVersion
    platform: Platform
    horovod: Horovod
    packages: tuple[str, ...] = ()
    conda: Conda | None = None
    modules: tuple[str, ...] = ()
    mpi: str = ""
    sources: dict[str, Source] = {}

    @property
    def name(self) -> str:
        return "+".join([self.recipe, *self.variants])


class BuiltWith(NamedTuple):
    """What a build of the lock was made with.

    Attributes:
        compiler, mpi, nvcc: name and version, as the programs report them.
        glibc, driver: versions on the machine that built.
        modules: as the module system reported them, with the hash of each modulefile that programs
            run with; empty for modules that only the build loads.
    """

    hvdenv: str
    python: str
    compiler: str = ""
    mpi: str = ""
    nvcc: str = ""
    glibc: str = ""
    driver: str = ""
    modules: dict[str, MaybeSha256] = {}
    wheel: MaybeSha256 = ""


class Lock(NamedTuple):
    """The main file.

    Attributes:
        built: added after a build; None in a lock that was only resolved.
    """

    format: Literal[1]
    inputs: Inputs
    files: dict[File, Sha256]
    built: BuiltWith | None = None


class Locked(NamedTuple):
    """A lock with the files that it binds.

    Attributes:
        folder: its directory, which need not exist yet.
    """

    folder: Path
    lock: Lock
    texts: Mapping[File, str]

    @property
    def digest(self) -> str:
        """Identifies what the lock requests, whoever built it."""
        return sha256(render(self.lock._replace(built=None)))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def bind(folder: Path, inputs: Inputs, texts: Mapping[File, str]) -> Locked:
    """A lock of these files, not built yet."""
    hashes = {name: sha256(text) for name, text in sorted(texts.items())}
    return Locked(folder, Lock(FORMAT, inputs, hashes), texts)


def malformed(message: str, where: str, remedy: str = "") -> RecipeError:
    """The error for a malformed file of a lock; tokens in the message are masked."""
    return RecipeError(re.sub(r"/t/[^/\s]+", "/t/***", mask(message)), where=where, remedy=remedy)


def render(lock: Lock) -> str:
    """The text of the main file, sorted so that two locks compare line by line."""
    import tomlkit

    head = "# Written by `hvdenv lock`; the other files of this directory belong to it.\n"
    return head + tomlkit.dumps(_sorted(encode(lock)))


def parse(text: str, path: Path) -> Lock:
    """Read the text of the main file.

    Raises:
        RecipeError: it is malformed, or has another format.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"is not TOML: {error}", where=str(path), remedy=ANEW) from error
    try:
        return decode(Lock, document)
    except Problem as problem:
        where = f"{path}:{line_of(text, problem.path)}"
        raise RecipeError(str(problem), where=where, remedy=ANEW) from problem


def _sorted(value: Any) -> Any:
    """Tables sorted by key, values before tables as TOML requires; lists unchanged."""
    if isinstance(value, list):
        # By default tomlkit writes a long list on one line.
        import tomlkit

        array = tomlkit.array()
        array.extend(value)
        return array.multiline(len(value) > 1)
    if not isinstance(value, dict):
        return value
    plain = {key: each for key, each in sorted(value.items()) if not isinstance(each, dict)}
    tables = {key: each for key, each in sorted(value.items()) if isinstance(each, dict)}
    return {key: _sorted(each) for key, each in {**plain, **tables}.items()}


def lock_folder(root: Path, inputs: Inputs) -> Path:
    """The directory of the lock for a recipe, Python and platform, below the directory of all locks."""
    return root / inputs.name / f"py{inputs.python}-{inputs.platform}"


def read_lock(folder: Path, judge: Callable[[Content], None] | None = None) -> Locked:
    """Read a lock, and check that its files belong together.

    ``judge`` is called with the content of each file before it is used, and may raise.

    Raises:
        RecipeError: a file is missing or malformed.
        LockError: a file is not the one that the lock was written with.
    """
    lock = parse(_text(folder / MAIN, judge), folder / MAIN)
    texts = {}
    for name, digest in lock.files.items():
        texts[name] = _text(folder / name, judge)
        if sha256(texts[name]) != digest:
            raise LockError(
                f"its hash differs from the one in {MAIN} beside it",
                where=str(folder / name),
                remedy="restore both files, or write a new lock: hvdenv lock RECIPE",
            )
    return Locked(folder, lock, texts)


def write_lock(locked: Locked) -> bool:
    """Write a lock, its main file last. Returns whether anything changed.

    Raises:
        StepError: the directory cannot be written.
    """
    texts = [*locked.texts.items(), (MAIN, render(locked.lock))]
    superfluous = {PYPI, CONDA} - {name for name, _ in texts}
    if all(_present(locked.folder / name) == text for name, text in texts) and not any(
        (locked.folder / name).exists() for name in superfluous
    ):
        return False
    named_folder(locked.folder)
    make_folder(locked.folder)
    with reporting(locked.folder):
        for name, text in texts:
            write_text(locked.folder / name, text)
        for name in superfluous:
            (locked.folder / name).unlink(missing_ok=True)
    return True


def _present(path: Path) -> str | None:
    try:
        return read_text(path, LOCK)
    except (OSError, ValueError):
        return None


def _text(path: Path, judge: Callable[[Content], None] | None) -> str:
    try:
        content = read_file(path, LOCK)
        if judge:
            judge(content)
        return content.text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RecipeError(
            f"this file of a lock cannot be read: {reason}",
            where=str(path),
            remedy="restore it, name a directory that `hvdenv lock RECIPE` wrote, or run that again",
        ) from error

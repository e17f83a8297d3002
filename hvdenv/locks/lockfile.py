"""The lock of an environment as typed data.

A lock is three files: ``hvdenv-lock.toml`` says what was asked for and what the build was
made with, and binds the other two by their hashes: ``pylock.toml`` (PEP 751) and
``conda-lock.yml``. No path, user or host of the machine that wrote them is in there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from hvdenv.errors import LockError, RecipeError
from hvdenv.masking import mask
from hvdenv.model.recipe import Channel, Commit, GitUrl, Name, Sha256, Version
from hvdenv.schema import Pattern, Problem, decode, encode, line_of, parse_toml

FORMAT: Literal[1] = 1
MAIN = "hvdenv-lock.toml"
File = Literal["pylock.toml", "conda-lock.yml"]
PYPI: File = "pylock.toml"
CONDA: File = "conda-lock.yml"
SIGNATURE = f"{MAIN}.sig"

ANEW = "`hvdenv lock RECIPE` writes it anew"

MinorVersion = Annotated[str, Pattern(r"3\.[0-9]+", "a Python version such as 3.11")]
Platform = Annotated[
    str, Pattern(r"linux-(x86_64|aarch64|ppc64le)", "a platform such as linux-x86_64")
]
MaybeSha256 = Annotated[str, Pattern(r"([0-9a-f]{64})?", "a sha256, or empty")]


class Horovod(NamedTuple):
    """What Horovod is built from.

    Attributes:
        version, sha256: its source archive; no hash where modules bring Horovod.
        patches: each patch with the hash of what it does.
        variables: that its build reads: HOROVOD_*, and the recipe's for compilers.
    """

    version: Version
    sha256: MaybeSha256 = ""
    patches: dict[str, Sha256] = {}
    variables: dict[str, str] = {}


class Conda(NamedTuple):
    """What conda was asked for: packages, from which channels, for which machine."""

    packages: tuple[str, ...]
    channels: tuple[Channel, ...]
    virtual: dict[str, str] = {}


class Source(NamedTuple):
    """A framework that is built from its repository."""

    git: GitUrl
    tag: str
    commit: Commit | None = None


class Inputs(NamedTuple):
    """All that decides what an environment is made of. Compared exactly.

    Attributes:
        recipe, variants: what it is a lock of.
        python: its minor version.
        platform: of the machine that runs the environment.
        horovod: what Horovod is built from.
        packages: what pip is asked for, sorted.
        conda: what conda is asked for.
        modules: as the recipe names them, in the order of loading.
        mpi: the implementation, and its version where the recipe knows it.
        sources: frameworks from repositories.
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
        """Recipe and variants as environments are named."""
        return "+".join([self.recipe, *self.variants])


class Built(NamedTuple):
    """What a build of the lock was made with.

    Attributes:
        hvdenv: its version.
        python: the whole version.
        compiler, mpi, nvcc: name and version, as the programs say.
        glibc, driver: versions on the machine that built.
        modules: as the module system named them, with the hash of each modulefile that
            programs run with; empty for those of the build alone.
        wheel: hash of the Horovod wheel.
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
        format: of this file.
        inputs: what was asked for.
        files: hash of each of the other files.
        built: filled in by a build; None in a lock that was only resolved.
    """

    format: Literal[1]
    inputs: Inputs
    files: dict[File, Sha256]
    built: Built | None = None


class Locked(NamedTuple):
    """A lock with the files that it binds.

    Attributes:
        folder: that it lies in, or is to lie in.
        lock: the main file.
        texts: text of each of the other files, by name.
        signature: of the text of the main file, which render() makes; empty if there is none.
    """

    folder: Path
    lock: Lock
    texts: Mapping[File, str]
    signature: str = ""

    @property
    def digest(self) -> str:
        """Identifies what the lock asks for, whoever built it."""
        return sha256(render(self.lock._replace(built=None)))


def sha256(text: str) -> str:
    """Hash of a file with this text."""
    return hashlib.sha256(text.encode()).hexdigest()


def bind(folder: Path, inputs: Inputs, texts: Mapping[File, str]) -> Locked:
    """A lock of these files, not built yet."""
    hashes = {name: sha256(text) for name, text in sorted(texts.items())}
    return Locked(folder, Lock(FORMAT, inputs, hashes), texts)


def check_file(lock: Lock, name: File, text: str, path: Path) -> None:
    """See that a file is the one that the lock was written with.

    Raises:
        LockError: it is another.
    """
    if sha256(text) != lock.files[name]:
        raise LockError(
            f"its hash differs from the one in {MAIN} beside it",
            where=str(path),
            remedy="restore both files, or write a new lock: hvdenv lock RECIPE",
        )


def malformed(message: str, where: str, remedy: str = "") -> RecipeError:
    """The error for a file of a lock, without the secrets that it may show."""
    return RecipeError(re.sub(r"/t/[^/\s]+", "/t/***", mask(message)), where=where, remedy=remedy)


def render(lock: Lock) -> str:
    """The text of the main file: sorted, so that two locks compare line by line."""
    import tomlkit

    head = "# Written by `hvdenv lock`; the other files of this folder belong to it.\n"
    return head + tomlkit.dumps(_sorted(encode(lock)))


def parse(text: str, path: Path) -> Lock:
    """Read the text of the main file.

    Raises:
        RecipeError: it is malformed, or of another format.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"is not TOML: {error}", where=str(path), remedy=ANEW) from error
    written = document.get("format")
    if isinstance(written, int) and written != FORMAT:
        raise RecipeError(
            f"the lock has format {written}; this hvdenv knows format {FORMAT}",
            where=str(path),
            remedy="use the hvdenv that wrote it, or have the lock written anew",
        )
    try:
        return decode(Lock, document)
    except Problem as problem:
        where = f"{path}:{line_of(text, problem.path)}"
        raise RecipeError(str(problem), where=where, remedy=ANEW) from problem


def _sorted(value: Any) -> Any:
    """Tables sorted by key, values before tables, as TOML wants them; lists as they are."""
    if isinstance(value, list):
        # tomlkit writes long lists on one line: an array of its own has a line for each.
        import tomlkit

        array = tomlkit.array()
        array.extend(value)
        return array.multiline(len(value) > 1)
    if not isinstance(value, dict):
        return value
    plain = {key: each for key, each in sorted(value.items()) if not isinstance(each, dict)}
    tables = {key: each for key, each in sorted(value.items()) if isinstance(each, dict)}
    return {key: _sorted(each) for key, each in {**plain, **tables}.items()}

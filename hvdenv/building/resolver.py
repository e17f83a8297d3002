"""uv resolves Python packages, for `check`, `lock` and `install`. It looks where pip would."""

import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.markers import Environment, default_environment
from packaging.pylock import PackageSdist, PackageWheel, Pylock, PylockSelectError
from packaging.tags import Tag, compatible_tags, cpython_tags

from hvdenv import STEP_PROGRAMS
from hvdenv.base.command import OWN_PYTHON, Command, Outcome
from hvdenv.base.errors import LockError, NetworkError, StepError
from hvdenv.base.masking import mask
from hvdenv.base.places import write_text
from hvdenv.base.reading import GIB, LOCK, read_text
from hvdenv.base.runner import Runner
from hvdenv.base.schema import parse_toml
from hvdenv.building.run_step import NETWORK
from hvdenv.knowledge.diagnosis import explain
from hvdenv.locks.packages import canonicalize_name, hint
from hvdenv.locks.pypi import ADDRESS, Package
from hvdenv.plans.resolution import Resolution

# A package in the output of uv, and which packages require it.
_RESOLVED = re.compile(r"^([a-z0-9-]+)==[^#\n]+(?:# via (.*))?$", re.MULTILINE)

# Names from before PEP 600, by the minor version of glibc 2.
_OLD_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


class PythonPlatform(NamedTuple):
    """The machine that packages are locked for.

    Attributes:
        python: a full version.
        machine: such as x86_64.
    """

    python: str
    machine: str
    glibc: str

    @property
    def environment(self) -> Environment:
        """Values of markers."""
        known = default_environment()
        known["python_version"] = ".".join(self.python.split(".")[:2])
        known["python_full_version"] = self.python
        known["platform_machine"] = self.machine
        return known

    @property
    def tags(self) -> list[Tag]:
        """Tags of the wheels that are installed there, best first."""
        platforms = []
        for minor in range(int(self.glibc.split(".")[1]), 4, -1):
            platforms.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _OLD_NAMES:
                platforms.append(f"{_OLD_NAMES[minor]}_{self.machine}")
        platforms.append(f"linux_{self.machine}")
        version = [int(part) for part in self.python.split(".")[:2]]
        if version < [3, 8]:
            platforms.reverse()  # pip of these Pythons may know only the oldest names
        own = cpython_tags(version, platforms=platforms)
        return [*own, *compatible_tags(version, "cp{}{}".format(*version), platforms)]


def from_uv(pylock_text: str, resolved: str, machine: PythonPlatform) -> tuple[Package, ...]:
    """The packages that uv has resolved, sorted by name.

    Args:
        pylock_text: in the format of PEP 751.
        resolved: as requirements, each with a comment that names the packages that require it.

    Raises:
        LockError: a package has no hash, or is not a file of an index.
    """
    requires: dict[str, set[str]] = {}
    for name, by in _RESOLVED.findall(resolved):
        for each in filter(None, by.split(", ")):
            requires.setdefault(each, set()).add(name)
    document = Pylock.from_dict(parse_toml(pylock_text))
    try:
        chosen = [*document.select(environment=machine.environment, tags=machine.tags)]
    except PylockSelectError as error:
        raise LockError(
            f"a package has no wheel for linux-{machine.machine}: {error}",
            remedy="request a version that has one, under `packages` in the recipe; source archives"
            " are only locked on the machine that they are for",
        ) from error
    found, names = [], {entry.name for entry, _ in chosen}
    for entry, file in chosen:
        assert isinstance(file, (PackageWheel, PackageSdist))
        url, sha256 = file.url or "", file.hashes.get("sha256", "")
        if not sha256:
            raise LockError(
                f"{entry.name} {entry.version} has no sha256 at {mask(url)}",
                remedy="install it from an index or a directory of wheels: only files with a hash"
                " can be locked",
            )
        known = hint(url.partition("#")[0].partition("?")[0])
        package = Package(
            name=entry.name,
            version=str(entry.version),
            file=unquote(posixpath.basename(urlsplit(url).path)),
            sha256=sha256,
            url=known if re.fullmatch(ADDRESS, known) else "",
            # Where uv resolves for several platforms, others may require more.
            requires=tuple(sorted(names.intersection(requires.get(entry.name, ())))),
        )
        found.append(package)
    return tuple(sorted(found, key=lambda each: each.name))


def all_hashes(pylock_text: str) -> dict[str, list[str]]:
    """The hashes of all files that uv has found of each package, by name."""
    document = Pylock.from_dict(parse_toml(pylock_text))
    found: dict[str, list[str]] = {}
    for entry in document.packages:
        files = [*(entry.wheels or ()), *([entry.sdist] if entry.sdist else ())]
        hashes = (file.hashes.get("sha256") for file in files)
        found[entry.name] = [each for each in hashes if each]
    return found


# uv needs 0.3 GB for the largest sets; an index may answer with more than any machine has.
MEMORY = 4 * GIB
# Minor versions of glibc for which uv knows the platform.
_GLIBCS = (17, 28, *range(31, 41))
_LOOK = (
    "check the network and pip's configuration (pip config list, PIP_INDEX_URL), from which hvdenv takes indexes and"
    " passwords"
)
_UNANSWERED = re.compile(r"^hvdenv: (no answer from .+)$", re.MULTILINE)
_ADDED = re.compile(r"^ \+ ([A-Za-z0-9][\w.-]*)==(\S+)$", re.MULTILINE)


def unanswered(output: str) -> list[str]:
    """Which indexes of CPU builds did not answer, a line for each."""
    return _UNANSWERED.findall(output)


def platform(machine: str, glibc: str) -> str:
    """The platform by uv's name; empty if uv has none."""
    if machine not in ("x86_64", "aarch64") or not glibc.startswith("2."):
        return ""
    fitting = [each for each in _GLIBCS if each <= int(glibc.split(".")[1])]
    return f"{machine}-manylinux_2_{fitting[-1]}" if fitting else ""


def here(version: str) -> tuple[str, ...]:
    """A Python version on this machine, as options of uv."""
    return ("--python", OWN_PYTHON, "--python-version", version)


def elsewhere(maker: Resolution) -> tuple[str, ...]:
    """The recipe's Python on its machine, as options of uv. For a platform that uv does not know, uv
    resolves for all at once."""
    tag = platform(maker.facts.machine, maker.glibc)
    place = ("--python-platform", tag) if tag else ("--universal",)
    return (*here(maker.python.version), *place)


class Resolver(NamedTuple):
    """uv with pip's configuration.

    Attributes:
        sources: where to look in addition, as arguments of uv_pip.py.
        work: directory of its files.
        cache: uv's.
        python: the one to resolve for and its machine, as options of uv.
        builds: whether code of source archives may run, to learn what they require.
        machine: that lock() chooses files for.
        end: the time on the monotonic clock by which the answer must be there.
        where: what is resolved, for errors.
        note: is called with what a user should know.
    """

    sources: tuple[str, ...]
    work: Path
    cache: Path
    runner: Runner
    python: tuple[str, ...] = ()
    builds: bool = False
    machine: PythonPlatform = PythonPlatform("", "", "")
    end: float = float("inf")
    where: str = "the packages of the lock"
    log: Path | None = None
    note: Callable[[str], None] = lambda text: None

    @property
    def pylock(self) -> Path:
        """Where uv writes what it finds for lock()."""
        return self.work / "pylock.toml"

    def compile(self, requirements: Iterable[str], apart: Iterable[str], *words: str) -> Outcome:
        """Resolve requirements, without packages that are there already and what they require."""
        required = self._file("required.in", "".join(f"{each}\n" for each in requirements))
        plain = ("--no-header", "--no-python-downloads")
        return self._uv("compile", apart, *plain, *words, required)

    def additions(
        self, requirements: Iterable[str], apart: Iterable[str], kept: str
    ) -> tuple[Outcome, dict[str, str]]:
        """What would be installed into an environment, with versions by name.

        Args:
            kept: a line NAME==VERSION for each package that keeps its version.
        """
        constraints = self._file("constraints.txt", kept)
        words = ("--dry-run", "--constraint", constraints, "--", *requirements)
        outcome = self._uv("install", apart, *words)
        return outcome, {
            canonicalize_name(name): version for name, version in _ADDED.findall(outcome.output)
        }

    def _uv(self, command: str, apart: Iterable[str], *words: str) -> Outcome:
        # Never true, so nothing of that name is asked for.
        never = "".join(f"{name} ; python_version < '0'\n" for name in sorted(apart))
        program = (OWN_PYTHON, str(STEP_PROGRAMS / "uv_pip.py"), *self.sources, "--", command)
        argv = (
            *program,
            "--color",
            "never",
            "--cache-dir",
            str(self.cache),
            *self.python,
            *(() if self.builds else ("--no-build",)),
            "--override",
            self._file("apart.in", never),
            *words,
        )
        hasty = self.end < float("inf")
        env = (("UV_HTTP_TIMEOUT", "15"), ("UV_HTTP_RETRIES", "1")) if hasty else ()
        left = max(1.0, min(self.end - time.monotonic(), 3600.0))
        return self.runner.run(Command(argv, env, timeout=left, memory=MEMORY), log=self.log)

    def _file(self, name: str, text: str) -> str:
        write_text(self.work / name, text, 0o600)
        return str(self.work / name)

    def lock(
        self,
        requirements: Iterable[str],
        apart: Iterable[str],
        pins: Mapping[str, str],
        *words: str,
        strict: bool,
    ) -> tuple[Package, ...]:
        """The files to install, one for each package.

        Args:
            pins: versions to keep.
            words: further options of uv.
            strict: whether the pins must be kept, or only if they fit.

        Raises:
            NetworkError: an index cannot be read.
            StepError: there are no packages that fit together.
            LockError: a package has no hash.
        """
        requirements, apart = [*requirements], [*apart]
        listed = "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))
        # uv prefers the versions in the file that it replaces.
        resolved = self._file("resolved.txt", "" if strict else listed)
        hard = ("--constraint", self._file("pins.txt", listed)) if strict and pins else ()
        style = ("--annotation-style", "line", "--output-file", resolved)
        outcome = self.compile(requirements, apart, *words, *hard, *style)
        for line in unanswered(outcome.output):
            self.note(line)
        self._refuse(outcome)
        pylock = str(self.pylock)
        written = ("--constraint", resolved, "--format", "pylock.toml", "--output-file", pylock)
        self._refuse(self.compile(requirements, apart, *words, *written))
        return from_uv(read_text(pylock, LOCK), read_text(resolved, LOCK), self.machine)

    def _refuse(self, outcome: Outcome) -> None:
        if outcome:
            return
        known = explain(outcome.output)
        if "No solution found" in outcome.output:
            kind, message = StepError, "the packages cannot be resolved"
            remedy = "change the versions in the recipe"
            if "was not found in" in outcome.output:
                remedy += f", or {_LOOK}"
        elif "Failed to build" in outcome.output:
            kind, message = StepError, "a source archive cannot say what it requires"
            remedy = "install what its build needs, or request a version that has a wheel"
        elif known:
            kind = NetworkError if known.id in NETWORK else StepError
            message, remedy = f"uv failed: {known.cause}", f"{known.remedy}\n{_LOOK}"
        else:
            kind, message, remedy = NetworkError, "uv cannot read what it needs", _LOOK
        if outcome.timed_out:
            message = f"uv needs more than {outcome.seconds:.0f} s"
        raise kind(message, where=self.where, detail=outcome.tail(15), remedy=remedy)

"""uv resolves Python packages, for `check`, `lock` and `install`. It looks where pip would."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from hvdenv import STEP_PROGRAMS
from hvdenv.building.run_step import DEFAULT_INDEX, NETWORK
from hvdenv.command import OWN_PYTHON, Command, Outcome
from hvdenv.errors import NetworkError, StepError
from hvdenv.knowledge.diagnosis import explain
from hvdenv.locks.pypi import Package
from hvdenv.locks.resolved import Target, from_uv
from hvdenv.masking import learn
from hvdenv.places import write_text
from hvdenv.plans.resolution import Resolution
from hvdenv.reading import GIB, LOCK, RESULT, read_json, read_text
from hvdenv.runner import Runner
from hvdenv.schema import decode

# uv needs 0.3 GB for the largest sets; an index may answer with more than any machine has.
MEMORY = 4 * GIB
# Minor versions of glibc for which uv knows the platform.
_GLIBCS = (17, 28, *range(31, 41))
_EXTRA = "--extra-index-url"
_LOOK = (
    "check the network and pip's configuration (pip config list), from which hvdenv takes indexes and"
    " passwords"
)
_ADDED = re.compile(r"^ \+ ([A-Za-z0-9][\w.-]*)==(\S+)$", re.MULTILINE)


class Sources(NamedTuple):
    """Where pip looks for files.

    Attributes:
        extra: further indexes, of pip's configuration and of the recipe.
        insecure: hosts that are trusted without a certificate.
        certificates: file with those of a site; empty: those of the system.
        silent: hosts of CPU indexes that do not answer, which builds do without.
    """

    main: str
    extra: tuple[str, ...]
    links: tuple[str, ...]
    no_index: bool
    insecure: tuple[str, ...]
    certificates: str
    proxy: str = ""
    silent: tuple[str, ...] = ()

    def as_toml(self, *, builds: bool) -> str:
        """A configuration of uv; JSON's strings and lists are TOML, too."""
        values = {
            **({} if self.no_index else {"index-url": self.main, "extra-index-url": self.extra}),
            "find-links": self.links,
            "no-index": self.no_index,
            "allow-insecure-host": self.insecure,
            "index-strategy": "unsafe-best-match",  # as pip: the best of all indexes
            "no-build": not builds,
        }
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def find_sources(maker: Resolution, work: Path, runner: Runner, seconds: float = 60.0) -> Sources:
    """Where pip would look: by its configuration, and by the recipe."""
    file = work / "pip.json"
    program = str(STEP_PROGRAMS / "pip_sources.py")
    command = (OWN_PYTHON, program, str(file), *maker.cpu_indexes)
    silent = runner.run(Command(command, timeout=seconds)).output.split()
    pip = decode(dict[str, str], read_json(file, RESULT)) if file.exists() else {}
    learn(pip.items())  # URLs in pip's configuration may have credentials
    words = iter(maker.sources)
    extra, links = [each for each in maker.cpu_indexes if each not in silent], list[str]()
    no_index = pip.get("no-index", "0").lower() in ("1", "true", "yes", "on")
    for word in words:
        if word == "--no-index":
            no_index = True
        else:
            (extra if word == _EXTRA else links).append(next(words))
    return Sources(
        main=pip.get("index-url", DEFAULT_INDEX),
        extra=(*pip.get("extra-index-url", "").split(), *extra),
        links=tuple(filter(_exists, (*pip.get("find-links", "").split(), *links))),
        no_index=no_index,
        insecure=tuple(pip.get("trusted-host", "").split()),
        certificates=pip.get("cert", ""),
        proxy=pip.get("proxy", ""),
        silent=tuple(urlsplit(each).hostname or "" for each in maker.cpu_indexes if each in silent),
    )


def _exists(links: str) -> bool:
    """Whether there may be files: pip passes over directories that are not there."""
    return "://" in links or Path(links).expanduser().exists()


def platform(machine: str, glibc: str) -> str:
    """The platform by uv's name; empty if uv has none."""
    if machine not in ("x86_64", "aarch64") or not glibc.startswith("2."):
        return ""
    fitting = [each for each in _GLIBCS if each <= int(glibc.split(".")[1])]
    return f"{machine}-manylinux_2_{fitting[-1]}" if fitting else ""


def elsewhere(maker: Resolution) -> tuple[str, ...]:
    """The recipe's Python on its target, as options of uv. For a platform that uv does not know, uv
    resolves for all at once."""
    tag = platform(maker.facts.machine, maker.glibc)
    version = ("--python", OWN_PYTHON, "--python-version", maker.python.version)
    return (*version, "--python-platform", tag) if tag else (*version, "--universal")


class Resolver(NamedTuple):
    """uv with its configuration.

    Attributes:
        work: directory of its files.
        cache: uv's.
        target: what to resolve for, as options of uv.
        builds: whether code of source archives may run, to learn what they require.
        end: the time on the monotonic clock by which the answer must be there.
    """

    sources: Sources
    work: Path
    cache: Path
    runner: Runner
    target: tuple[str, ...] = ()
    builds: bool = False
    end: float = float("inf")

    def compile(self, requirements: Iterable[str], apart: Iterable[str], *words: str) -> Outcome:
        """Resolve requirements, without packages that are there already and what they require."""
        required = self._file("required.in", "".join(f"{each}\n" for each in requirements))
        quiet = ("--quiet", "--no-header", "--no-python-downloads")
        return self._uv("compile", apart, *quiet, *words, required)

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
        configuration = self._file("uv.toml", self.sources.as_toml(builds=self.builds))
        # Never true, so nothing of that name is asked for.
        never = "".join(f"{name} ; python_version < '0'\n" for name in sorted(apart))
        argv = (
            OWN_PYTHON, "-m", "uv", "pip", command, "--config-file", configuration,
            "--color", "never", "--cache-dir", str(self.cache), *self.target,
            "--override", self._file("apart.in", never), *words,
        )  # fmt: skip
        # pip, too, accepts the certificates of the system.
        env = {"UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "1", "UV_SYSTEM_CERTS": "1"}
        if self.sources.certificates:
            env["SSL_CERT_FILE"] = self.sources.certificates
        if self.sources.proxy:
            env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), self.sources.proxy)
        left = max(1.0, min(self.end - time.monotonic(), 3600.0))
        return self.runner.run(Command(argv, tuple(env.items()), timeout=left, memory=MEMORY))

    def _file(self, name: str, text: str) -> str:
        write_text(self.work / name, text, 0o600)
        return str(self.work / name)

    def lock(
        self,
        requirements: Iterable[str],
        apart: Iterable[str],
        pins: Mapping[str, str],
        *,
        strict: bool,
        target: Target,
    ) -> tuple[Package, ...]:
        """The files to install, one for each package.

        Args:
            pins: versions to keep.
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
        hard = ("--constraint", self._file("pins.txt", listed)) if strict else ()
        style = ("--annotation-style", "line", "--output-file", resolved)
        self._refuse(self.compile(requirements, apart, *hard, *style))
        pylock = str(self.work / "pylock.toml")
        written = ("--format", "pylock.toml", "--output-file", pylock)
        self._refuse(self.compile(requirements, apart, "--constraint", resolved, *written))
        return from_uv(read_text(pylock, LOCK), read_text(resolved, LOCK), target)

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
            message, remedy = f"uv failed: {known.cause}", known.remedy
        else:
            kind, message, remedy = NetworkError, "uv cannot read what it needs", _LOOK
        if outcome.timed_out:
            message = f"uv needs more than {outcome.seconds:.0f} s"
        raise kind(
            message, where="the packages of the lock", detail=outcome.tail(15), remedy=remedy
        )

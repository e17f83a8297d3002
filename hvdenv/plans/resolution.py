"""What a lock is made from: all that decides an environment, and the steps that find its
packages without installing them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdenv import __version__
from hvdenv.command import OWN_PYTHON, Command
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, Conda, Horovod, Inputs, Locked, Source
from hvdenv.plans.step import Step, TextFile, digest
from hvdenv.plans.steps import CONDA_ENV, PIP, Steps

# Before it, pip does not resolve for another machine without installing.
_RESOLVING_PIP = "pip>=23.3"
# A lock is to fit more machines than the one that writes it: as little as RHEL 8 has.
_COMMON_GLIBC = (2, 28)
# What pip needs to read the archives of sources, Horovod's among them.
_READS_ARCHIVES = ("packaging", "setuptools<81", "wheel")


class Resolution(Steps):
    """The steps that find the packages of a lock, from the same inputs as those of a build."""

    __slots__ = ()

    def inputs(self, variants: Sequence[str]) -> Inputs:
        """All that decides what the environment is made of.

        Args:
            variants: of the recipe, sorted.
        """
        recipe = self.recipe
        builds = recipe.horovod.provider == "source"
        modules, mpi = recipe.modules, recipe.mpi
        return Inputs(
            recipe.name,
            tuple(variants),
            ".".join(map(str, self._python)),
            f"linux-{self.facts.machine}",
            Horovod(
                recipe.horovod.version,
                recipe.horovod.sha256,
                {patch.name: digest(patch.edit) for patch in self.patches},
                {**recipe.environment.build, **self.flags} if builds else {},
            ),
            tuple(sorted(self.requirements)) if builds else (),
            self._conda_inputs(),
            (*modules.load, *modules.build) if modules else (),
            f"{mpi.kind} {mpi.version or ''}".strip() if mpi else "",
            {
                name: Source(source.git, source.tag, source.commit)
                for name in recipe.horovod.frameworks
                if (source := recipe.frameworks[name].source)
            },
        )

    @property
    def requirements(self) -> list[str]:
        """All that pip is asked for."""
        return self.tool_requirements + self.framework_requirements

    def _conda_inputs(self) -> Conda | None:
        if not self.recipe.conda:
            return None
        spec = self._conda_spec()
        return Conda(tuple(spec["specs"]), tuple(spec["channels"]), dict(spec["virtual"]))

    @property
    def report(self) -> Path:
        """Where the last step writes what pip would install."""
        return self._report("resolved")

    def here(self, pins: Mapping[str, str]) -> tuple[Step, ...]:
        """For this machine: in an environment as the build makes it, so that pip sees the same.

        Args:
            pins: versions to keep, by name.
        """
        maker = [self._venv()] if self.recipe.python.provider == "venv" else []
        modules = [self.modules()] if self.recipe.modules else []
        python = self.recipe.python
        # What a new environment comes with is not what the lock is for; what modules bring is.
        fresh = python.provider == "venv" and not python.system_site_packages
        ask = self._ask(self.env_python, {"pins": dict(pins), "fresh": fresh})
        first = Step("pip", "one that can tell what it would install", self.newer_pip())
        return (*modules, *maker, *([first] if first.commands else []), ask)

    def addition(self, python: str, *, may_move: bool) -> Step:
        """What pip would install for the user's packages where all else is there already.

        Args:
            python: of an environment that is not changed.
            may_move: whether the packages that are there may get other versions.
        """
        assert self.additions
        pins = {} if may_move else self.additions.kept
        return self._ask(python, {"requirements": self.additions.requirements, "pins": pins})

    def solution(self, prefer: Mapping[str, object]) -> tuple[Step, ...]:
        """Find the conda packages.

        Args:
            prefer: what is to stay as it was locked, as condalock.preferring() has it.
        """
        programs = self._programs(*CONDA_ENV)
        spec = self._conda_file({**self._conda_spec(), **prefer})
        command = self._conda_env("--solve-only", str(spec.path), str(self.solved))
        reason = "what channels have, for what the target has, not this machine"
        return (Step("solution", reason, (command,), (*programs, spec)),)

    @property
    def solved(self) -> Path:
        """Where solution() writes the records of conda packages."""
        return self._report("solved")

    @property
    def conda_spec(self) -> dict[str, Any]:
        """What conda is asked for."""
        return self._conda_spec()

    @property
    def portable(self) -> bool:
        """Whether all Python packages are known before there is an environment."""
        python = self.recipe.python
        plain = python.provider == "venv" and not python.system_site_packages
        return plain or python.provider == "conda"

    def elsewhere(self, pins: Mapping[str, str], installed: Mapping[str, str]) -> tuple[Step, ...]:
        """For any machine of the platform: wheels only, for the glibc that those machines have.

        Args:
            pins: versions to keep, by name.
            installed: packages that conda brings, by the names that pip knows them by.
        """
        target = {
            "python": self.python.version,
            "machine": self.facts.machine,
            "glibc": self._glibc,
        }
        request = {"pins": dict(pins), "installed": dict(installed), "target": target}
        return (self._resolver(), self._ask(self._resolver_python, request))

    @property
    def _glibc(self) -> str:
        """What wheels may ask for: what the recipe's nodes have, or what most machines do."""
        target = self.recipe.partitions.get(self.recipe.job.partition or "")
        if target and target.glibc:
            return target.glibc
        common = ".".join(map(str, _COMMON_GLIBC))
        here = self.facts.glibc if self.facts.origin == "observed" else None
        return min(here or common, common, key=lambda version: tuple(map(int, version.split("."))))

    @property
    def _resolver_python(self) -> str:
        return str(self.generation / "resolver" / "bin" / "python")

    def _resolver(self) -> Step:
        pip, folder = (self._resolver_python, *PIP), str(self.generation / "resolver")
        return Step(
            "resolver",
            "a pip that knows other machines than this one",
            (
                Command((OWN_PYTHON, "-m", "venv", folder)),
                Command((*pip, "install", "--quiet", _RESOLVING_PIP)),
                # Which older Pythons bring: pip would count it as installed on the target.
                Command((*pip, "uninstall", "--quiet", "--yes", "setuptools")),
            ),
        )

    def fetch(self, locked: Locked, to: Path, own: Path, package: Path) -> tuple[Step, ...]:
        """The steps that get every file of pip's that a locked build needs.

        Args:
            locked: the lock.
            to: folder for the files.
            own: folder for hvdenv itself and what it needs.
            package: the folder of hvdenv's package.
        """
        return (
            self._resolver(),
            self._files(locked, to),
            *([self._conda_files(locked, to)] if CONDA in locked.texts else ()),
            Step("hvdenv", "itself, and what it needs", (self._own(own, package),)),
        )

    def _files(self, locked: Locked, to: Path) -> Step:
        packages, pip = pypi.packages(locked), (self._resolver_python, *PIP)
        wheels, archives = (
            TextFile(self.build / f"{name}.txt", pypi.requirements(chosen))
            for name, chosen in (
                ("wheels", [each for each in packages if each.is_wheel]),
                ("archives", [each for each in packages if not each.is_wheel]),
            )
        )
        horovod = TextFile(self.build / "horovod.txt", self.horovod_requirement)
        get = ("download", *self.sources, "--no-deps", "--require-hashes", "--dest", str(to))
        target = (
            *("--python-version", locked.lock.inputs.python, "--implementation", "cp"),
            *("--only-binary", ":all:"),
            *(word for name in pypi.platforms(packages) for word in ("--platform", name)),
        )
        commands = [Command((*pip, *get, *target, "--requirement", str(wheels.path)))]
        plain = ("--no-binary", ":all:", "--no-build-isolation")
        # pip looks into an archive before it keeps it.
        commands.append(Command((*pip, "install", "--quiet", *_READS_ARCHIVES)))
        for listed in (archives, horovod):
            if listed.text:
                commands.append(Command((*pip, *get, *plain, "--requirement", str(listed.path))))
        files = (wheels, archives, horovod)
        reason = "every file of the lock, and Horovod's source, compared with their hashes"
        return Step("files", reason, tuple(commands), files)

    def _conda_files(self, locked: Locked, to: Path) -> Step:
        programs = self._programs(*CONDA_ENV)
        spec = self._conda_file(condalock.explicit(condalock.packages(locked)))
        command = self._conda_env("--fetch-only", str(spec.path), str(to))
        return Step("conda-files", "every conda package of the lock", (command,), (*programs, spec))

    def _own(self, to: Path, package: Path) -> Command:
        """Get hvdenv as wheels: of this checkout, or of the release that is installed."""
        checkout = package.parent / "pyproject.toml"
        wanted = str(package.parent) if checkout.is_file() else f"hvdenv=={__version__}"
        return Command((OWN_PYTHON, *PIP, "wheel", "--quiet", "--wheel-dir", str(to), wanted))

    def _ask(self, python: str, request: Mapping[str, object]) -> Step:
        programs = self._programs("pip_resolve.py", "pip_install.py", "digest.py")
        spec = TextFile(
            self.build / "request.json",
            json.dumps(
                {
                    "requirements": self.requirements,
                    "cpu_indexes": self.cpu_indexes,
                    "arguments": self.sources,
                    "report": str(self.report),
                    **request,
                },
                indent=1,
            )
            + "\n",
        )
        return Step(
            "resolution",
            "what pip would install, with the hash of every file",
            (self._command(python, str(programs[0].path), str(spec.path)),),
            (*programs, spec),
        )

"""What a lock is made from: all that decides an environment, and the steps that find its
packages without installing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdenv.base.command import OWN_PYTHON
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, Conda, Horovod, Inputs, Locked, Source
from hvdenv.plans.step import Step, digest
from hvdenv.plans.steps import CONDA_ENV, Steps


class Availability(NamedTuple):
    """What indexes and channels answer.

    Attributes:
        wrong: what cannot be installed, by the observable that rules ask about.
        looked_up: what was looked up, with the result.
        not_looked_up: what was not, with the reason.
    """

    wrong: Mapping[str, frozenset[str]] = {}
    looked_up: tuple[str, ...] = ()
    not_looked_up: tuple[str, ...] = ()

    def __or__(self, other: Availability) -> Availability:
        return Availability(
            {**self.wrong, **other.wrong},
            (*self.looked_up, *other.looked_up),
            (*self.not_looked_up, *other.not_looked_up),
        )


# A lock should fit more machines than the one that writes it: the glibc of RHEL 8.
_COMMON_GLIBC = (2, 28)


class Resolution(Steps):
    """The steps that find the packages of a lock, from the same inputs as those of a build."""

    __slots__ = ()

    def inputs(self, variants: Sequence[str]) -> Inputs:
        recipe = self.recipe
        builds = recipe.horovod.provider == "source"
        modules, mpi = recipe.modules, recipe.mpi
        return Inputs(
            recipe=recipe.name,
            variants=tuple(variants),
            python=".".join(map(str, self._python)),
            platform=f"linux-{self.facts.machine}",
            horovod=self._built_horovod() if builds else Horovod(recipe.horovod.version),
            packages=tuple(sorted(self.requirements)) if builds else (),
            conda=self._conda_inputs(),
            modules=(*modules.load, *modules.build) if modules else (),
            mpi=f"{mpi.kind} {mpi.version or ''}".strip() if mpi else "",
            sources={
                name: Source(source.git, source.tag, source.commit)
                for name in recipe.horovod.frameworks
                if (source := recipe.frameworks[name].source)
            },
        )

    def _built_horovod(self) -> Horovod:
        return Horovod(
            version=self.recipe.horovod.version,
            sha256=self.recipe.horovod.sha256,
            patches={patch.name: digest(patch.edit) for patch in self.patches},
            variables={**self.recipe.environment.build, **self.flags},
        )

    def _conda_inputs(self) -> Conda | None:
        if self.recipe.python.provider != "conda":  # [conda] may be for a variant
            return None
        spec = self.conda_spec
        return Conda(tuple(spec["specs"]), tuple(spec["channels"]), dict(spec["virtual"]))

    def site(self) -> tuple[Step, ...]:
        """List what an environment has before anything is installed: what modules and a site's
        Python provide."""
        venv = [self._venv()] if self.recipe.python.provider == "venv" else []
        listing = Step(
            "site-packages",
            "what the site provides, which is not locked",
            (self._run("check_requirements.py"),),
            self._programs("check_requirements.py"),
        )
        return (*([self.modules()] if self.recipe.modules else []), *venv, listing)

    def solution(self, prefer: Mapping[str, object]) -> tuple[Step, ...]:
        """Find the conda packages.

        Args:
            prefer: what to keep as it was locked, as condalock.preferring() has it.
        """
        spec = self._conda_file({**self.conda_spec, **prefer})
        step = Step(
            name="solution",
            reason="solved from conda channels, for the target rather than this machine",
            commands=(self._conda_env("--solve-only", str(spec.path), str(self.solved)),),
            files=(*self._programs(*CONDA_ENV), spec),
        )
        return (step,)

    @property
    def solved(self) -> Path:
        """Where solution() writes the records of conda packages."""
        return self._report("solved")

    @property
    def glibc(self) -> str:
        """What wheels may require: what the recipe's nodes have, or what most machines do."""
        target = self.recipe.partition
        if target and target.glibc:
            return target.glibc
        common = ".".join(map(str, _COMMON_GLIBC))
        own = self.facts.glibc if self.facts.origin == "observed" else None
        return min(own or common, common, key=lambda version: tuple(map(int, version.split("."))))

    def fetch(self, locked: Locked, to: Path) -> tuple[Step, ...]:
        """The steps that get every file that a locked build needs."""
        return (
            self._files(locked, to),
            *([self._conda_files(locked, to)] if CONDA in locked.texts else ()),
        )

    def _files(self, locked: Locked, to: Path) -> Step:
        packages = [each._asdict() for each in pypi.packages(locked)]
        kept = [{key: each[key] for key in ("name", "file", "sha256", "url")} for each in packages]
        files, get = self.get_files([*kept, self.horovod_file], to, OWN_PYTHON)
        reason = "every file of the lock, and Horovod's source, checked against their hashes"
        return Step("files", reason, (get,), files)

    def _conda_files(self, locked: Locked, to: Path) -> Step:
        spec = self._conda_file(condalock.explicit(condalock.packages(locked)))
        return Step(
            name="conda-files",
            reason="every conda package of the lock",
            commands=(self._conda_env("--fetch-only", str(spec.path), str(to)),),
            files=(*self._programs(*CONDA_ENV), spec),
        )

"""The record of a generation as a type: what ``hvdenv.json`` contains."""

from typing import NamedTuple

from hvdenv.base.schema import Table


class LockUse(NamedTuple):
    """The lock of a build."""

    digest: str = ""


class Additions(NamedTuple):
    """What a generation has in addition to its recipe.

    Attributes:
        requirements: what the user requested, sorted, such as ``tqdm>=4``.
        own: version of each Python package of the recipe alone; none of them changes.
        new: version of each package that was added.
        conda: conda packages of the recipe, as ``name=version=build``.
    """

    requirements: tuple[str, ...] = ()
    own: dict[str, str] = {}
    new: dict[str, str] = {}
    conda: tuple[str, ...] = ()

    @property
    def kept(self) -> dict[str, str]:
        """The versions of all packages, without those that pip cannot parse."""
        from packaging.version import InvalidVersion, Version  # no light command should wait for it

        found = {}
        for name, version in sorted({**self.own, **self.new}.items()):
            try:
                Version(version)
            except InvalidVersion:
                continue
            found[name] = version
        return found


class GenerationRecord(NamedTuple):
    """The record of a generation. Older versions lack some fields.

    Attributes:
        created: when the build finished, in UTC.
        plan_digest, manifest_digest: of the plan and of ``manifest.json``.
        environment: directory of the venv or conda prefix, relative to the generation, absolute or
            below a variable of the modules.
        variables: run-time variables; None in records that lack them.
        resolved: the recipe with its variants, as tables.
        modules: what the modules set, for ``build`` and ``run``.
        stack: all that went into the Horovod wheel.
        observed: what verify sees in the environment; None in records that lack it.
    """

    recipe: str = ""
    variants: tuple[str, ...] = ()
    prefix: str = ""
    generation: str = ""
    created: str = ""
    hvdenv: str = ""
    plan_digest: str = ""
    manifest_digest: str = ""
    files: int = 0
    bytes: int = 0
    environment: str = "venv"
    variables: dict[str, str] | None = None
    resolved: Table = {}
    facts: Table = {}
    python: Table = {}
    modules: dict[str, Table] = {}
    stack: Table = {}
    wheel: Table = {}
    packages: tuple[Table, ...] = ()
    findings: tuple[Table, ...] = ()
    additions: Additions = Additions()
    lock: LockUse | None = None
    observed: Table | None = None

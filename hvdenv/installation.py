"""Where an environment's programs lie, and what it is expected to have."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hvdenv import generations
from hvdenv.errors import UsageError


class Installation(NamedTuple):
    """An environment that has a Horovod, built by hvdenv or not.

    Attributes:
        prefix: the folder that the user named.
        python: its interpreter.
        path: folders in front of PATH.
        env: further variables for everything that runs in it.
        recipe: what it was built from; empty if nobody knows.
        generation: folder of the generation that hvdenv built; empty if it did not.
    """

    prefix: str
    python: str
    path: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    recipe: str = ""
    generation: str = ""

    def program(self, name: str) -> str:
        """The path of a program in the environment's own folders; empty if it has none."""
        for folder in self.path:
            if Path(folder, name).is_file():
                return str(Path(folder, name))
        return ""


class Expectation(NamedTuple):
    """What an environment should have.

    None says that nothing was stated: then whatever was built is judged.

    Attributes:
        frameworks: of ``torch``, ``tensorflow``, ``mxnet``.
        controllers: of ``MPI``, ``Gloo``.
        operations: of ``NCCL``, ``DDL``, ``CCL``, ``MLSL``, ``MPI``, ``Gloo``.
    """

    frameworks: tuple[str, ...] | None = None
    controllers: tuple[str, ...] | None = None
    operations: tuple[str, ...] | None = None


def inspect_prefix(prefix: str) -> Installation:
    """The installation in a venv, a conda prefix or a generation of hvdenv.

    Raises:
        UsageError: there is no interpreter there, or no Horovod.
        StepError: the record of the generation is damaged.
    """
    root = Path(prefix).absolute()
    for base in (root / "venv", root):
        if (base / "bin" / "python").exists():
            break
    else:
        raise UsageError(
            "this is no Python environment: it has neither bin/python nor venv/bin/python",
            where=str(root),
            remedy="name the folder that `python -c 'import sys; print(sys.prefix)'` prints there",
        )
    if not _may_have_horovod(base):
        raise UsageError(
            "Horovod is not installed in this environment",
            where=str(base),
            remedy="install it there, or build an environment with `hvdenv build local`",
        )
    found = Installation(str(root), str(base / "bin" / "python"), (str(base / "bin"),))
    if base == root or not (root / generations.RECORD).exists():
        return found
    record = generations.read_record(root / generations.RECORD)
    env = tuple(sorted(record.get("variables", {}).items()))
    return found._replace(env=env, generation=str(root.resolve()))


def _may_have_horovod(base: Path) -> bool:
    """Whether files of Horovod are there, or packages may come from elsewhere."""
    if (base / "bin" / "horovodrun").exists():
        return True
    if any(base.glob("lib*/python3*/site-packages/horovod/__init__.py")):
        return True
    settings = base / "pyvenv.cfg"
    shared = settings.read_text(errors="replace").lower().split("\n") if settings.exists() else []
    return any(line.replace(" ", "") == "include-system-site-packages=true" for line in shared)

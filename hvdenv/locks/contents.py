"""Between locks and contents: what a lock keeps of a build, and what a lock is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdenv.contents.packages import Contents, Horovod, Package, from_record
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import CONDA, Built, Locked


def built(record: Mapping[str, Any]) -> Built:
    """What a lock keeps of a build.

    Args:
        record: of a generation; or as much of it as there is while it is built.
    """
    made = from_record(record, None, "")
    tools = {name: made.toolchain.get(name, "") for name in ("compiler", "mpi", "glibc", "driver")}
    return Built(
        hvdenv=made.hvdenv,
        python=made.python,
        nvcc=made.toolchain.get("cuda", ""),
        modules=made.modules,
        wheel=record.get("wheel", {}).get("sha256", ""),
        **tools,
    )


def contents(locked: Locked) -> Contents:
    """What an environment of this lock is made of, as far as the lock says it.

    Raises:
        RecipeError: a file of the lock is malformed.
    """
    inputs, made = locked.lock.inputs, locked.lock.built
    packages = [
        Package("pypi", each.name, each.version, "", each.sha256, each.url)
        for each in pypi.packages(locked)
    ]
    if CONDA in locked.texts:
        packages += [
            Package("conda", each.name, each.version, each.build, each.sha256, each.url)
            for each in condalock.packages(locked).packages
        ]
    names = dict.fromkeys(inputs.modules, "")
    tools = {
        "compiler": made.compiler, "mpi": made.mpi, "cuda": made.nvcc, "glibc": made.glibc,
        "driver": made.driver,
    } if made else {}  # fmt: skip
    return Contents(
        recipe=inputs.recipe,
        variants=inputs.variants,
        python=made.python if made else inputs.python,
        machine=inputs.platform.partition("-")[2],
        packages=tuple(sorted(packages)),
        distributions={each.name: each.version for each in packages},
        horovod=Horovod(
            inputs.horovod.version,
            inputs.horovod.sha256,
            inputs.horovod.patches,
            inputs.horovod.variables,
            made.wheel if made else "",
        ),
        modules=made.modules if made else names,
        toolchain={name: version for name, version in tools.items() if version},
        channels=inputs.conda.channels if inputs.conda else (),
        hvdenv=made.hvdenv if made else "",
    )

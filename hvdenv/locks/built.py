"""What a build of a lock was made with, and how a later build differs from it (drift)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hvdenv.contents.packages import from_record
from hvdenv.contents.record import GenerationRecord
from hvdenv.locks.compare import Difference
from hvdenv.locks.lockfile import Built

# Names of drifts that a user may accept; besides these, modules.NAME.
DRIFTS = ("python", "compiler", "mpi", "nvcc", "glibc", "driver", "wheel")


def built_with(record: GenerationRecord) -> Built:
    """What a lock keeps of a build, from as much of the record as is known."""
    contents = from_record(record, None, "")
    tools = contents.toolchain
    return Built(
        hvdenv=contents.hvdenv,
        python=contents.python,
        compiler=tools.get("compiler", ""),
        mpi=tools.get("mpi", ""),
        nvcc=tools.get("cuda", ""),
        glibc=tools.get("glibc", ""),
        driver=tools.get("driver", ""),
        modules=contents.modules,
        wheel=record.wheel.get("sha256", ""),
    )


def drift(locked: Built, found: Built) -> tuple[Difference, ...]:
    """How a build differs from the one recorded in the lock. Unknown values are not compared."""
    differences = [
        _judged(name, before, now)
        for name in DRIFTS
        if (before := getattr(locked, name)) and (now := getattr(found, name)) and before != now
    ]
    return (*differences, *_modules(locked.modules, found.modules))


def _judged(name: str, locked: str, found: str) -> Difference:
    reason = ""
    if name == "compiler" and _vendor(locked) != _vendor(found):
        reason = "another compiler may have another C++ ABI"
    if name in ("mpi", "nvcc") and _series(locked) != _series(found):
        reason = "Horovod is bound to the implementation and its series (major.minor)"
    return Difference(
        name=name, locked=locked, found=found, severity="error" if reason else "note", reason=reason
    )


def _modules(locked: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Difference]:
    for name in [*sorted(locked.keys() - found.keys()), *sorted(found.keys() - locked.keys())]:
        states = ("loaded", "") if name in locked else ("", "loaded")
        yield Difference(
            f"modules.{name}", *states, "error", "the module system chose another module"
        )
    for name in sorted(locked.keys() & found.keys()):
        if locked[name] and found[name] and locked[name] != found[name]:
            yield Difference(f"modules.{name}", locked[name][:12], found[name][:12], "note")


def _vendor(version: str) -> str:
    """Vendor of a compiler. GCC prints the name that it was called by, so it is the default."""
    known = {"clang": "Clang", "icpx": "Intel", "intel": "Intel", "nvc": "NVIDIA", "cray": "Cray"}
    return next((name for word, name in known.items() if word in version.lower()), "GCC")


def _series(text: str) -> tuple[str, str]:
    """Name and major.minor in the version text of a program."""
    version = (re.findall(r"(?<![0-9])[0-9]+(?:\.[0-9]+)+", text) or [""])[-1]
    return re.sub(r"[0-9].*", "", text), ".".join(version.split(".")[:2])

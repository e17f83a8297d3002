"""What follows from the values of a draft, where the sources do not state it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from hvdenv.drafting.modulelines import LOAD, module_role
from hvdenv.drafting.values import INFERRED, WITHOUT, Key, Origin, Scalar, Value, at
from hvdenv.knowledge.patches import releases
from hvdenv.sites.modules import OFFERS, module_family

# By the name that a module of an MPI has.
_KINDS = {
    "hpcx": "openmpi",
    "spectrum-mpi": "spectrum",
    "impi": "intel",
    "intelmpi": "intel",
    "intel-mpi": "intel",
    **{each: each for each in ("openmpi", "mpich", "mvapich", "cray-mpich")},
}
# Toolchains of EasyBuild contain an MPI.
_TOOLCHAINS = {
    "openmpi": re.compile(r"(?:^|/)(?:gompic?(?:/|$)|foss(?:cuda)?/20\d\d[ab])"),
    "intel": re.compile(r"(?:^|/)(?:(?:iimpic?|intelcuda)(?:/|$)|intel/20\d\d[ab])"),
}
# In the name of a module with Horovod, or as a module beside it.
_FRAMEWORK_NAMES = {
    "torch": re.compile(r"(?i)(?:-|^|/)PyTorch[-/](\d{1,4}(?:\.\d{1,4}){2,3})"),
    "tensorflow": re.compile(r"(?i)(?:-|^|/)TensorFlow[-/](\d{1,4}(?:\.\d{1,4}){2,3})"),
}
_PYTHON = re.compile(r"(?i)(?:^|/)(?:cray-)?python\d?/")
# In the last part of a module's name.
# After the name of an MPI, not of the compiler behind it: openmpi/4.0.5/gnu-10.2.0.
_MPI_VERSION = re.compile(r"(?:-|/|/.*/)v?(\d+(?:\.\d+)+)")
_VERSION = re.compile(r"(?:^|-)v?(\d{1,6}(?:\.\d{1,6}){1,5})")
# Options of sbatch. "gpu" alone may be part of the name of a partition or constraint.
_GPU_REQUEST = re.compile(r"\s(?:--gpus|--gres|--tres-|-G)")


def inferred(values: Sequence[Value], items: Collection[str]) -> list[Value]:
    """What follows from the values.

    Args:
        items: of all lists; WITHOUT in front excludes one.
    """
    stated = {each.key: each for each in values}
    builds = at("horovod.provider") not in stated and any(
        key[:2] == ("horovod", "gpu") or key == at("horovod.version") for key in stated
    )
    provider = stated.get(at("python.provider"))
    found = list[Value]()
    present = any(module_role(str(each.value)) == "Horovod" for each in _loads(values))
    for each in _loads(values):
        if present and not builds:
            found += _frameworks(each)
        found += _module_facts(each, builds=builds, venv=not provider or provider.value == "venv")
    for each in values:
        if each.key in (at("modules.swap"), at("modules.unload")):
            why = "it changes modules that are loaded by default"
            found.append(_follows("modules.purge", "no", each, why))
    found += _horovod_facts(values, items)
    first: dict[Key, Value] = {}
    return [
        each
        for each in found
        if each.item or each.key not in stated
        if each.item or first.setdefault(each.key, each) is each
    ]


def _loads(values: Iterable[Value]) -> Iterator[Value]:
    """The modules that are loaded in the end."""
    for each in values:
        if each.key == LOAD:
            yield each
        elif isinstance(each.value, dict) and each.key == at("modules.swap"):
            yield each._replace(key=LOAD, value=each.value["into"])


def _follows(key: str, value: Scalar, each: Value, why: str = "", *, item: bool = False) -> Value:
    origin = each.origin._replace(text=why) if why else each.origin
    return Value(at(key), value, origin, INFERRED, item=item)


def _module_facts(each: Value, *, builds: bool, venv: bool) -> Iterator[Value]:
    name, role = str(each.value), module_role(str(each.value))
    found = _VERSION.search(name.rpartition("/")[2])
    version = found[1] if found else ""
    if role == "MPI":
        yield from _mpi(each)
    elif kinds := [kind for kind, known in _TOOLCHAINS.items() if known.search(name)]:
        yield _follows("mpi.kind", kinds[0], each, "the MPI of this toolchain of EasyBuild")
    elif role == "Python" and _PYTHON.search(name) and venv:
        yield _follows("python.from_modules", True, each)
        if re.fullmatch(r"3\.\d{1,2}(?:\.\d{1,2})?", version):
            exact = f"=={version}" if version.count(".") == 2 else f"=={version}.*"
            yield _follows("python.version", exact, each)
    elif role == "Horovod" and not builds:
        yield from _horovod_module(each, version)


def _mpi(each: Value) -> Iterator[Value]:
    found = OFFERS["MPI"].search(str(each.value))
    name = found[2].lower() if found else ""
    if found and name in _KINDS:
        version = _MPI_VERSION.match(str(each.value)[found.end(2) :])
        yield _follows("mpi.kind", _KINDS[name], each)
        if name == "cray-mpich":
            yield _follows("mpi.cxx", "CC", each, "the wrapper of Cray's compilers")
        if version and name != "hpcx":  # it has versions of its own
            yield _follows("mpi.version", version[1], each)


def _horovod_module(each: Value, version: str) -> Iterator[Value]:
    """A module with Horovod, and what EasyBuild's names state."""
    name = str(each.value)
    yield _follows("horovod.provider", "present", each)
    # Others have versions of their own (open-ce), or only the first numbers.
    if "horovod" in module_family(name) and version in releases():
        yield _follows("horovod.version", version, each)
    yield _follows("python.provider", "modules", each)
    if python := re.search(r"-Python-(\d+\.\d+\.\d+)", name):
        yield _follows("python.version", f"=={python[1]}", each)


def _frameworks(each: Value) -> Iterator[Value]:
    for framework, pattern in _FRAMEWORK_NAMES.items():
        if found := pattern.search(str(each.value)):
            yield _follows("horovod.frameworks", framework, each, item=True)
            yield _follows(f"frameworks.{framework}.provider", "present", each)
            yield _follows(f"frameworks.{framework}.version", found[1], each)


def _horovod_facts(values: Sequence[Value], items: Collection[str]) -> Iterator[Value]:
    version = next((each for each in values if each.key == at("horovod.version")), None)
    if version and version.value in releases():
        hashed = releases()[str(version.value)].sha256
        origin = Origin("the table of Horovod's releases")
        yield Value(at("horovod.sha256"), hashed, origin, INFERRED)
    built = next((each for each in values if each.key[0] == "horovod" and each.origin.line), None)
    if not built:
        return
    kinds = (each for each in values if each.key == at("mpi.kind"))
    mpi = mpi_module(values) or next(kinds, None)
    if mpi and not {"mpi", f"{WITHOUT}mpi"} & {*items}:
        yield _follows("horovod.controllers", "mpi", mpi, item=True)
    stated = any(each.key == at("horovod.controllers") for each in values)
    if (mpi or stated) and not {"gloo", f"{WITHOUT}gloo"} & {*items}:
        why = "Horovod builds Gloo unless HOROVOD_WITHOUT_GLOO=1"
        yield _follows("horovod.controllers", "gloo", built, why, item=True)


def mpi_module(values: Iterable[Value]) -> Value | None:
    loads = (each for each in _loads(values) if not each.role)
    return next((each for each in loads if module_role(str(each.value)) == "MPI"), None)


def gpu_option(values: Sequence[Value], lines: Collection[str]) -> Iterator[Value]:
    """For a script that uses GPUs but requests none: its partition or constraint implies them.

    Args:
        lines: the texts of all lines.
    """
    directives = [text for text in lines if text.startswith("#SBATCH")]
    sized = next((each for each in values if each.key == at("job.ranks_per_node")), None)
    builds = any(each.key[:2] == ("horovod", "gpu") for each in values)
    requests = any(map(_GPU_REQUEST.search, directives))
    if sized and sized.origin.text in directives and builds and not requests:
        why = "the script requests no GPUs: its nodes have them"
        yield _follows("job.gpu_option", "none", sized, why)

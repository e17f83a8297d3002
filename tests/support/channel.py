"""Local conda channels, for tests that install from one.

``python_channel`` packs a CPython of this machine and pip; ``published_channels`` has what real
channels say of the packages of the recipe `neuron`; ``Channel`` takes anything else.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import tomli
import zstandard

# As long as what conda-build puts into real packages.
PLACEHOLDER = "/opt/" + "placehold_" * 25

PUBLISHED = Path(__file__).parents[1] / "cases/channels/neuron.toml"

_INDEXER = """
import asyncio, os, pathlib, sys
from rattler.index import index_fs
asyncio.run(index_fs(pathlib.Path(sys.argv[1]), force=True))
os._exit(0)  # the interpreter can crash on its way out
"""
_ASK = "import json, sys, sysconfig; print(json.dumps([sys.version.split()[0], sys.base_prefix, sysconfig.get_path('purelib')]))"
_NOT_PACKED = {*"__pycache__ site-packages test tests idlelib turtledemo ensurepip".split()}
_TIME = 1_700_000_000
_PIP = "pip = pip._internal.cli.main:main"
# Builds run these.
_REAL = ("pip", "setuptools", "wheel")


class File(NamedTuple):
    """A file of a package, or a link; the installed path takes the place of ``prefix`` in it."""

    data: bytes = b""
    executable: bool = False
    prefix: str = ""
    link: str = ""

    @property
    def mode(self) -> Literal["binary", "text"]:
        return "binary" if b"\0" in self.data else "text"


class Channel:
    """A channel in a directory, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Without it no channel is one.
        (folder / "noarch").mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def add(
        self,
        name: str,
        version: str,
        files: Mapping[str, File],
        *,
        depends: Sequence[str] = (),
        build: str = "0",
        subdir: str = "linux-64",
        noarch: Literal["", "generic", "python"] = "",
        entry_points: Sequence[str] = (),
        packed: Literal[".conda", ".tar.bz2"] = ".conda",
        **more: object,
    ) -> Path:
        """Add a package, with ``more`` fields of its index; index() makes it known."""
        subdir = "noarch" if noarch else subdir
        index: dict[str, object] = {
            "name": name,
            "version": version,
            "build": build,
            "build_number": 0,
            "depends": list(depends),
            "constrains": [],
            "subdir": subdir,
            "timestamp": _TIME * 1000,
            "license": "MIT",
            **more,
        }
        info = {"about": {}, "index": index, "paths": _paths(files)}
        if noarch:
            index["noarch"] = noarch
        if noarch == "python":
            link = {"type": "python", "entry_points": list(entry_points)}
            info["link"] = {"noarch": link, "package_metadata_version": 1}
        documents = {f"info/{n}.json": File(json.dumps(text).encode()) for n, text in info.items()}
        documents["info/files"] = File("\n".join(files).encode())
        stem = f"{name}-{version}-{build}"
        path = self.folder / subdir / (stem + packed)
        path.parent.mkdir(exist_ok=True)
        if packed == ".tar.bz2":
            path.write_bytes(_tar({**files, **documents}, "w:bz2"))
            return path
        squeeze = zstandard.ZstdCompressor(level=1, threads=2).compress
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps({"conda_pkg_format_version": 2}))
            archive.writestr(f"pkg-{stem}.tar.zst", squeeze(_tar(files, "w")))
            archive.writestr(f"info-{stem}.tar.zst", squeeze(_tar(documents, "w")))
        return path

    def index(self) -> Channel:
        """Write the index of all packages."""
        subprocess.run([sys.executable, "-c", _INDEXER, str(self.folder)], check=True)
        return self


def _paths(files: Mapping[str, File]) -> dict[str, object]:
    entries = []
    for path, file in files.items():
        entry: dict[str, object] = {
            "_path": path,
            "path_type": "softlink" if file.link else "hardlink",
            "sha256": hashlib.sha256(file.data).hexdigest(),
            "size_in_bytes": len(file.data),
        }
        if file.prefix:
            entry |= {"prefix_placeholder": file.prefix, "file_mode": file.mode}
        entries.append(entry)
    return {"paths": entries, "paths_version": 1}


def _tar(files: Mapping[str, File], mode: Literal["w", "w:bz2"]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode=mode) as tar:
        for path, file in files.items():
            member = tarfile.TarInfo(path)
            member.mtime = _TIME
            member.mode = 0o755 if file.executable else 0o644
            if file.link:
                member.type, member.linkname = tarfile.SYMTYPE, file.link
            else:
                member.size = len(file.data)
            tar.addfile(member, io.BytesIO(file.data))
    return whole.getvalue()


class Interpreter(NamedTuple):
    """A CPython whose files can be packed: its version, and the directory of its bin and lib."""

    version: str
    root: Path

    @property
    def minor(self) -> str:
        return self.version.rpartition(".")[0]


def find_interpreter(minor: str = "") -> Interpreter:
    """A CPython of this machine that runs from any directory; by default, with the minor version
    of the interpreter that runs the tests."""
    minor = minor or f"{sys.version_info.major}.{sys.version_info.minor}"
    for program in _programs(minor):
        said = subprocess.run([program, "-c", _ASK], capture_output=True, text=True, check=False)
        if said.returncode == 0:
            version, root, packages = json.loads(said.stdout)
            # Distributions' own have another place for packages than conda's.
            if Path(packages) == Path(root, "lib", f"python{minor}", "site-packages"):
                return Interpreter(version, Path(root))
    pytest.skip(f"there is no CPython {minor} here that could be packed (pyenv has one)")


def _programs(minor: str) -> Iterator[Path]:
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for root in (Path(sys.base_prefix), *sorted(versions.glob("*")), Path("/usr/local")):
        yield from root.glob(f"bin/python{minor}")


def python_channel(home: Path, minor: str = "") -> Channel:
    """A channel with a CPython and pip, made once for a home of tests and kept there."""
    python = find_interpreter(minor)

    def fill(folder: Path) -> None:
        channel = Channel(folder)
        channel.add("python", python.version, python_files(python))
        about: dict[str, Any] = {"depends": ["python >=3.8"], "noarch": "python"}
        about |= {"entry_points": [_PIP], "packed": ".tar.bz2"}
        channel.add("pip", metadata.version("pip"), pip_files(), **about)
        channel.index()

    return Channel(_made_once(home / f"channel-{python.version}", fill))


def _made_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        fill(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(unfinished)
    return folder


def python_files(python: Interpreter) -> dict[str, File]:
    """What an interpreter consists of: program, libraries, headers."""
    root, minor = python.root, python.minor
    program = f"bin/python{minor}"
    files = {program: _packed(root / program, root)}
    files |= {name: File(link=f"python{minor}") for name in ("bin/python", "bin/python3")}
    for top in (root / f"lib/python{minor}", root / f"include/python{minor}"):
        for path in sorted(top.rglob("*")):
            parts = set(path.relative_to(root).parts)
            if path.is_file() and not parts & _NOT_PACKED and path.suffix != ".a":
                files[str(path.relative_to(root))] = _packed(path, root)
    for path in sorted((root / "lib").glob("libpython*.so*")):
        files[str(path.relative_to(root))] = _packed(path, root)
    return files


def _packed(path: Path, root: Path) -> File:
    """A file that finds what belongs to it wherever it lies."""
    if path.is_symlink():
        return File(link=os.readlink(path))
    data = path.read_bytes()
    prefix = str(root).encode()
    executable = os.access(path, os.X_OK)
    if b"\0" not in data:
        changed = data.replace(prefix, PLACEHOLDER.encode())
        return File(changed, executable, PLACEHOLDER if prefix in data else "")
    # A program that asks for libpython by its path would find the original.
    own = b"$ORIGIN/" + os.path.relpath(root / "lib", path.parent).encode()
    asked = re.escape(prefix + b"/lib\0")
    return File(re.sub(asked, lambda found: own.ljust(len(found[0]), b"\0"), data), executable)


def pip_files() -> dict[str, File]:
    """The pip that is installed beside the tests."""
    files = {}
    for path in metadata.files("pip") or ():
        # Its programs come from the entry points.
        if path.parts[0] != ".." and path.suffix != ".pyc":
            files[f"site-packages/{path}"] = File(path.read_binary())
    return files


def published_channels(home: Path) -> dict[str, Channel]:
    """Channels for the recipe `neuron`, by name, made once for a home and kept there.

    Only Python, pip, setuptools and wheel have contents; other Python packages have metadata.
    """
    python, said = find_interpreter("3.10"), PUBLISHED.read_bytes()

    def fill(folder: Path) -> None:
        for source in tomli.loads(said.decode())["sources"]:
            for path, more in source["packages"].items():
                _publish(folder, path, more, python)
        for channel in folder.iterdir():
            Channel(channel).index()

    name = f"published-{python.version}-{hashlib.sha256(said).hexdigest()[:16]}"
    return {each.name: Channel(each) for each in _made_once(home / name, fill).iterdir()}


def _publish(folder: Path, path: str, more: dict[str, Any], python: Interpreter) -> None:
    channel, subdir, file = path.split("/")
    name, version, build = file.rsplit("-", 2)
    plain = any(each.split()[0] == "python" for each in more["depends"])
    noarch = subdir == "noarch"
    files: dict[str, File] = {}
    if name == "python":
        files = python_files(python)
    elif name in _REAL:
        files = _from_wheel(name, version)
    elif plain:
        files = _only_metadata(name, version, "" if noarch else f"lib/python{python.minor}/")
    Channel(folder / channel).add(
        name,
        version,
        files,
        build=build,
        subdir=subdir,
        noarch="" if not noarch else "python" if plain else "generic",
        entry_points=[_PIP] if name == "pip" else [],
        **more,
    )


def _only_metadata(name: str, version: str, folder: str) -> dict[str, File]:
    name = {"pytorch": "torch"}.get(name, name)
    about = f"{folder}site-packages/{name.replace('-', '_')}-{version}.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "RECORD": "",
        "INSTALLER": "conda\n",
    }
    return {f"{about}/{file}": File(text.encode()) for file, text in texts.items()}


def _from_wheel(name: str, version: str) -> dict[str, File]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["download", "--quiet", "--no-deps", "--dest", folder, f"{name}=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            return {f"site-packages/{each}": File(archive.read(each)) for each in names}

"""Lmod and Environment Modules side by side, without installing either.

Their Debian packages exclude each other, so each is unpacked into a directory of its own
and its paths are rewritten to that directory. What they run on has to be installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from tests.support.needs import Missing, need
from tests.support.workers import one_at_a_time, session_folder

Kind = Literal["lmod", "tcl"]
KINDS: tuple[Kind, ...] = ("lmod", "tcl")

_PACKAGES: dict[Kind, str] = {"lmod": "lmod", "tcl": "environment-modules"}
RUNS_ON: dict[Kind, tuple[str, ...]] = {
    "lmod": ("lua5.3", "lua-filesystem", "lua-json", "lua-posix", "lua-term"),
    "tcl": ("tcl",),
}
_INIT: dict[Kind, str] = {"lmod": "etc/profile.d/lmod.sh", "tcl": "usr/share/modules/init/sh"}
_PATHS = re.compile(
    r"(?<![\w.])/(?=(usr/share/(modules|lmod|modulefiles)|usr/lib/(lmod|[a-z0-9_]+-linux-gnu(?!/lua))"
    r"|etc/(environment-modules|lmod))\b)"
)


class Installed(NamedTuple):
    """A module system in a directory.

    Attributes:
        kind: which one.
        root: the directory; parts lie in it as they would below /.
        init: script that defines ``module`` in sh, bash and zsh: ``modules.init`` of a recipe.
    """

    kind: Kind
    root: Path
    init: Path


def cache_folder(factory: pytest.TempPathFactory) -> Path:
    """Where the systems are unpacked: kept from session to session if HVDENV_TEST_HOME is set."""
    kept = os.environ.get("HVDENV_TEST_HOME")
    return (Path(kept) if kept else session_folder(factory)) / "modulesystems"


def install(kind: Kind, cache: Path) -> Installed:
    """Have a module system in a directory, unpacked there if it is not yet.

    Args:
        kind: which one.
        cache: directory that may be kept from one test session to the next.

    Raises:
        Missing: this machine cannot run it, or cannot download it.
    """
    need(*RUNS_ON[kind])
    root = cache / kind
    with one_at_a_time(root):
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _unpack(_PACKAGES[kind], Path(scratch))
                _move(Path(scratch, "root"), root)
                Path(scratch, "root").rename(root)
    return Installed(kind, root, root / _INIT[kind])


def _unpack(package: str, folder: Path) -> None:
    words = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
    try:
        subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", error)).strip().rpartition("\n")[2]
        raise Missing(f"needs Debian's {package} ({said})") from error
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", archive, folder / "root"], check=True)


def _move(root: Path, final: Path) -> None:
    """Rewrite the absolute paths in all texts below a directory for where it will lie."""
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        path.write_text(_PATHS.sub(f"{final}/", text), encoding="utf-8")


def write_module(
    folder: Path,
    name: str,
    *,
    setenv: Mapping[str, str] = {},
    prepend_path: Mapping[str, str | Path] = {},
    use: Iterable[Path] = (),
    load: Iterable[str] = (),
    conflict: Iterable[str] = (),
    sticky: bool = False,
    lines: Iterable[str] = (),
) -> Path:
    """Write a modulefile in Tcl, which both systems read.

    Args:
        folder: of modulefiles, for MODULEPATH.
        name: such as gcc/10.2.0 or GCCcore/.11.2.0 (hidden).
        setenv: variables that it sets.
        prepend_path: what it puts in front of lists such as PATH.
        use: directories of modulefiles that it opens, as in a hierarchy.
        load: modules that it loads first.
        conflict: modules that must not be there.
        sticky: ``module purge`` leaves it alone.
        lines: of Tcl, put at the end.

    Returns:
        The file.
    """
    text = ["#%Module1.0", f"module-whatis {_tcl(name)}"]
    text += [f"conflict {_tcl(other)}" for other in conflict]
    text += [f"module load {_tcl(other)}" for other in load]
    text += [f"setenv {_tcl(key)} {_tcl(value)}" for key, value in setenv.items()]
    text += [f"prepend-path {_tcl(key)} {_tcl(str(value))}" for key, value in prepend_path.items()]
    text += [f"module use {_tcl(str(path))}" for path in use]
    if sticky:
        text += [
            "if {[info exists env(LMOD_VERSION)]} { add-property lmod sticky }",
            "if {[info exists env(MODULES_CMD)]} { module-tag sticky [module-info name] }",
        ]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*text, *lines, ""]), encoding="utf-8")
    return path


def write_lua_module(folder: Path, name: str, *lines: str) -> Path:
    """Write a modulefile in Lua, which only Lmod reads.

    Args:
        folder: of modulefiles, for MODULEPATH.
        name: such as gcc/10.2.0.
        lines: of Lua, such as ``prepend_path("MODULEPATH", "/...")``.
    """
    path = folder / f"{name}.lua"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _tcl(text: str) -> str:
    """A word of Tcl that stands for exactly this text."""
    escaped = re.sub(r'([\\"$\[\]{}])', r"\\\1", text).replace("\n", "\\n")
    return f'"{escaped}"'

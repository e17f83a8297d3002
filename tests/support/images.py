"""Images as directories, which Charliecloud's ch-run takes: Debian 12 has it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Make a directory of a root file system in a tar file; it appears when it is whole."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    subprocess.run(["tar", "-C", part, "-xpf", archive], check=True)
    part.rename(folder)


def equip(folder: Path, variables: Mapping[str, str], binds: Iterable[Path] = ()) -> None:
    """Give an image its variables, and directories that those of a host can be bound on."""
    (folder / "ch").mkdir(exist_ok=True)
    lines = [f"{name}={value}\n" for name, value in variables.items()]
    (folder / "ch/environment").write_text("".join(lines), encoding="utf-8")
    # The host's are shown in their place, if they are there.
    for name in ("etc/hosts", "etc/resolv.conf"):
        (folder / name).touch()
    for bind in binds:
        (folder / bind.relative_to("/")).mkdir(parents=True, exist_ok=True)

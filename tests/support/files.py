"""Files that tests make."""

from __future__ import annotations

from pathlib import Path

EXECUTABLE = 0o755


def write(path: Path, text: str, mode: int | None = None) -> Path:
    """A file with a text, and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if mode is not None:
        path.chmod(mode)
    return path


def programs(folder: Path, **scripts: str) -> Path:
    """A directory for PATH with programs of sh, by their names."""
    for name, script in scripts.items():
        write(folder / name, f"#!/bin/sh\n{script}\n", EXECUTABLE)
    return folder

"""The directories of locks: finding, reading and writing them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvdenv.errors import LockError, RecipeError
from hvdenv.locks.lockfile import (
    CONDA,
    MAIN,
    PYPI,
    Inputs,
    Locked,
    parse,
    render,
    sha256,
)
from hvdenv.places import make_folder, named_folder, reporting, write_text
from hvdenv.reading import LOCK, Content, read_file, read_text


def place(root: Path, inputs: Inputs) -> Path:
    """The directory of the lock for a recipe, Python and platform, below the directory of all locks."""
    return root / inputs.name / f"py{inputs.python}-{inputs.platform}"


def read(folder: Path, judge: Callable[[Content], None] | None = None) -> Locked:
    """Read a lock, and check that its files belong together.

    ``judge`` is called with the content of each file before it is used, and may raise.

    Raises:
        RecipeError: a file is missing or malformed.
        LockError: a file is not the one that the lock was written with.
    """
    lock = parse(_text(folder / MAIN, judge), folder / MAIN)
    texts = {}
    for name, digest in lock.files.items():
        texts[name] = _text(folder / name, judge)
        if sha256(texts[name]) != digest:
            raise LockError(
                f"its hash differs from the one in {MAIN} beside it",
                where=str(folder / name),
                remedy="restore both files, or write a new lock: hvdenv lock RECIPE",
            )
    return Locked(folder, lock, texts)


def write(locked: Locked) -> bool:
    """Write a lock, its main file last. Returns whether anything changed.

    Raises:
        StepError: the directory cannot be written.
    """
    texts = [*locked.texts.items(), (MAIN, render(locked.lock))]
    superfluous = {PYPI, CONDA} - {name for name, _ in texts}
    if all(_present(locked.folder / name) == text for name, text in texts) and not any(
        (locked.folder / name).exists() for name in superfluous
    ):
        return False
    named_folder(locked.folder)
    make_folder(locked.folder)
    with reporting(locked.folder):
        for name, text in texts:
            write_text(locked.folder / name, text)
        for name in superfluous:
            (locked.folder / name).unlink(missing_ok=True)
    return True


def _present(path: Path) -> str | None:
    try:
        return read_text(path, LOCK)
    except (OSError, ValueError):
        return None


def _text(path: Path, judge: Callable[[Content], None] | None) -> str:
    try:
        content = read_file(path, LOCK)
        if judge:
            judge(content)
        return content.text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RecipeError(
            f"this file of a lock cannot be read: {reason}",
            where=str(path),
            remedy="restore it, name a directory that `hvdenv lock RECIPE` wrote, or run that again",
        ) from error

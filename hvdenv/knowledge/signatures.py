"""Known failure texts: data in hvdenv/knowledge/signatures, looked for in logs by hvdenv/knowledge/diagnosis.py."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml

FOLDER = Path(__file__).parent / "signatures"

Phase = Literal["build", "run"]
Kind = Literal["cause", "symptom", "consequence", "warning"]


class Signature(NamedTuple):
    """One text by which a failure is known.

    Attributes:
        id: stable name.
        phases: whether builds print it, or runs of ranks, or both.
        texts: one of them is in the line: what is searched first, as it stands.
        cause: what happened; ``{0}`` stands for the pattern's first group, ``{where}`` for
            `` in LIBRARY (FUNCTION)`` where a backtrace names what crashed.
        remedy: what to do.
        source: where the text comes from.
        certainty: as in rules.
        pattern: a regular expression that has to be found in the line too; it may go on into
            the two lines that follow. A group ``rank`` names the rank that it is about; an empty
            one says that it is about no rank, whoever prints it.
        kind: a ``cause`` says why; a ``symptom`` only where it stopped; a ``consequence``
            follows from something else that was said before it; a ``warning`` is in logs of
            runs that are right as well.
        rules: ids of the rules that know it before a build.
        needs: it only counts where one of these is somewhere in the log too.
        unless: it does not count where one of these is somewhere in the log.
        kill: it reports that a process was killed, which launchers and schedulers also do to the
            other ranks when one has ended by itself.
        theme: the file that it is in.
    """

    id: str
    phases: tuple[Phase, ...]
    texts: tuple[str, ...]
    cause: str
    remedy: str
    source: str
    certainty: Literal["run", "source", "documented", "reported", "general"]
    pattern: str = ""
    kind: Kind = "cause"
    rules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    kill: bool = False
    theme: str = ""


class _SignatureFile(NamedTuple):
    """One theme: what it is about, and its signatures, the specific before the general."""

    about: str
    signature: tuple[Signature, ...]


@lru_cache(maxsize=1)
def all_signatures() -> tuple[Signature, ...]:
    """All signatures, in the order of their files and in theirs."""
    return tuple(
        signature._replace(theme=path.stem)
        for path in sorted(FOLDER.glob("*.toml"))
        for signature in _read(path).signature
    )


def themes() -> dict[str, str]:
    """What each file of signatures is about."""
    return {path.stem: _read(path).about for path in sorted(FOLDER.glob("*.toml"))}


def _read(path: Path) -> _SignatureFile:
    return decode(_SignatureFile, parse_toml(read_text(path, OWN)))

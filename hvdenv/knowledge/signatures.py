"""Known failure texts: data in hvdenv/knowledge/signatures, which diagnosis.py searches for."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from hvdenv.reading import OWN, read_text
from hvdenv.schema import decode, parse_toml

FOLDER = Path(__file__).parent / "signatures"

Phase = Literal["build", "run"]
Kind = Literal["cause", "symptom", "consequence", "warning"]


class Refinement(NamedTuple):
    """What is known where the lines that match also contain one of some texts.

    Attributes:
        texts: literal.
        near: literal; one of them is within 2,000 characters instead.
        remedy: takes the place of the signature's, and of its `modules`.
        cause: takes the place of the signature's, unless empty.
    """

    remedy: str
    texts: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    cause: str = ""

    def holds(self, lines: str, around: str) -> bool:
        """Whether it applies to lines with what is near them."""
        return any(text in lines for text in self.texts) or any(
            text in around for text in self.near
        )


class Signature(NamedTuple):
    """A known failure, recognised by its text.

    Attributes:
        id: stable name.
        phases: whether builds print it, or runs, or both.
        texts: literal texts; one of them must be in the line.
        cause: what happened; ``{0}`` stands for the pattern's first group, ``{where}`` for
            `` in LIBRARY (FUNCTION)`` where a backtrace names what crashed.
        remedy: what to do, the most likely first; a semicolon separates alternatives.
        source: where the text comes from.
        certainty: as in rules.
        pattern: a regular expression that must also match the line, and may continue into the
            next two. A group ``rank`` names the rank concerned; if it is empty, no rank is.
        kind: a ``cause`` says why; a ``symptom`` only where it stopped; a ``consequence`` is a
            follow-on error of an earlier one; a ``warning`` also occurs in successful runs.
        rules: ids of the rules that find it before a build.
        needs: counts only if the log also contains one of these.
        unless: does not count if the log contains one of these.
        near: as needs, but within 2,000 characters of the line.
        not_near: as unless, but within 2,000 characters of the line.
        refined: by texts in the line, in the next two or near them; the first one that is there
            counts.
        when: comparisons of the pattern's groups that must all hold, as ``{0} < 20.3``.
        modules: what to do on a machine with environment modules; not for containers and pods.
        horovod: what to do if the log names Horovod.
        recipe: what to change in a recipe; for readers who use hvdenv.
        kill: reports that a process was killed, which launchers and schedulers also do to the
            remaining ranks when one has ended.
        general: 1 repeats what a program says of itself, 2 what it says of another; each counts
            only if no less general cause or symptom is found, and nothing else in the same lines.
        theme: name of its file.
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
    near: tuple[str, ...] = ()
    not_near: tuple[str, ...] = ()
    refined: tuple[Refinement, ...] = ()
    when: tuple[str, ...] = ()
    modules: str = ""
    horovod: str = ""
    recipe: str = ""
    kill: bool = False
    general: int = 0
    theme: str = ""

    def refined_by(self, lines: str, around: str = "") -> Signature:
        """The signature with what is known of these lines, and of what is near them."""
        found = next((each for each in self.refined if each.holds(lines, around)), None)
        if not found:
            return self
        return self._replace(cause=found.cause or self.cause, remedy=found.remedy, modules="")


class _SignatureFile(NamedTuple):
    about: str
    signature: tuple[Signature, ...]


_WHOLE = re.compile(r"`[^`]{0,300}`|\([^()]{0,300}\)")


def alternatives(remedy: str) -> list[str]:
    """What to try, in order. A semicolon in parentheses or in a command does not separate."""
    kept = _WHOLE.sub(lambda part: part[0].replace("; ", ";\0"), remedy)
    return [each.replace("\0", " ") for each in kept.split("; ")]


@lru_cache(maxsize=1)
def all_signatures() -> tuple[Signature, ...]:
    """All signatures, in the order of files and of entries."""
    return tuple(
        signature._replace(theme=path.stem)
        for path in sorted(FOLDER.glob("*.toml"))
        for signature in _read(path).signature
    )


def themes() -> dict[str, str]:
    return {path.stem: _read(path).about for path in sorted(FOLDER.glob("*.toml"))}


def _read(path: Path) -> _SignatureFile:
    return decode(_SignatureFile, parse_toml(read_text(path, OWN)))

"""Training programs with lines replaced, and what verify has to say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.real.conftest import Cli, Result

HERE = Path(__file__).parent


class Variant(NamedTuple):
    """A program with some lines replaced.

    Attributes:
        program: the file that has them.
        name: of the variant.
        lines: pairs of a text that occurs once in the program, and what replaces it.
        check: which finding names it; empty if no finding may fail.
        status: of that finding.
        says: a part of its message.
        also: other findings that fail.
        options: of verify.
        run: of `make test`, in which it is planted with others of that number; 0 for none.
    """

    program: str
    name: str
    lines: tuple[tuple[str, str], ...]
    check: str = ""
    status: str = "fail"
    says: str = ""
    also: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    run: int = 0


def plant(variants: Sequence[Variant], folder: Path) -> Path:
    """Write a program with the lines of all these variants of it."""
    (program,) = {each.program for each in variants}
    text = (HERE / program).read_text(encoding="utf-8")
    for variant in variants:
        for old, new in variant.lines:
            assert text.count(old) == 1, (variant.name, old)
            text = text.replace(old, new)
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path


def prove(cli: Cli, script: Path, *options: str) -> Result:
    """What verify says of a program on two ranks; the program is given its directory."""
    words = ("verify", "local", "-n", "2", "--program-only", "--json", *options)
    return cli(*words, "--", "python", str(script), str(script.parent), code=None)


def judge(findings: Sequence[dict[str, Any]], variants: Sequence[Variant]) -> None:
    """Every variant is found, and nothing else fails."""
    expected = {each for variant in variants for each in (variant.check, *variant.also)}
    for variant in variants:
        found = [each for each in findings if each["check"] == variant.check]
        if variant.check:
            assert any(
                each["status"] == variant.status and variant.says in each["message"]
                for each in found
            ), (variant.name, findings)
    failed = [each for each in findings if each["status"] in ("fail", "error")]
    assert {each["check"] for each in failed} <= expected, failed

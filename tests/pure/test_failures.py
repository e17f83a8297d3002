from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdenv.failures import SIGNATURES, explain

CASES = sorted((Path(__file__).parents[1] / "cases/failures").glob("*.txt"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_cause_is_named(path: Path) -> None:
    """The first line of a case is the cause that the rest of it shows; empty if none is known."""
    expected, _, output = path.read_text(encoding="utf-8").partition("\n")
    found = explain(output)
    assert (found.cause if found else "") == expected
    assert found is None or found.remedy


def test_each_signature_has_a_case() -> None:
    outputs = [path.read_text(encoding="utf-8").partition("\n")[2] for path in CASES]
    for signature in SIGNATURES:
        assert any(re.search(signature.pattern, output) for output in outputs), signature.pattern
        patterns = {(found.remedy, found.pattern) for found in map(explain, outputs) if found}
        assert (signature.remedy, signature.pattern) in patterns


def test_nothing_to_say() -> None:
    assert explain("") is None
    assert explain("all went well {0}") is None

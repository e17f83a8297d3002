"""horovodrun --check-build: every text that Horovod ever printed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.verification.inspection import parse_check_build

CASES = Path(__file__).parents[1] / "cases" / "checkbuild"
GOOD = sorted((CASES / "good").glob("*.txt"))
BAD = sorted((CASES / "bad").glob("*.txt"))
# Those with nothing but the table.
PLAIN = [
    path
    for path in GOOD
    if path.stem in ("0.18.2-with-mlsl", "0.24.3-with-nothing-built", "0.28.1")
]
REFUSED = "is missing|no output|its sections are|the rows under"


def read(path: Path) -> str:
    return path.read_bytes().decode()


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_known_texts(path: Path) -> None:
    assert parse_check_build(read(path))._asdict() == json.loads(
        path.with_suffix(".json").read_text()
    )


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_anything_else_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse_check_build(read(path))


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_cut_text_never_gives_another_table(path: Path) -> None:
    whole = path.read_bytes()
    expected = parse_check_build(whole.decode())
    last_row = whole.rstrip().rfind(b" Gloo") + len(b" Gloo")
    for length in range(len(whole)):
        text = whole[:length].decode(errors="replace")
        if length < last_row:
            with pytest.raises(ValueError, match=REFUSED):
                parse_check_build(text)
        else:
            assert parse_check_build(text) == expected


@pytest.mark.parametrize("version", ["0.28.1rc1", "0.28.1.post1", "1.0.0+cu121"])
def test_versions(version: str) -> None:
    text = read(CASES / "good/0.28.1.txt").replace("0.28.1", version)
    assert parse_check_build(text).version == version


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_line_left_out_is_refused(path: Path) -> None:
    lines = read(path).splitlines()
    for number, line in enumerate(lines):
        if line.strip():
            with pytest.raises(ValueError, match=REFUSED):
                parse_check_build("\n".join([*lines[:number], *lines[number + 1 :]]))


@given(
    st.sampled_from(PLAIN), st.text(st.characters(exclude_characters="[]:\r")), st.integers(0, 17)
)
def test_other_lines_do_not_matter(path: Path, noise: str, at: int) -> None:
    lines = read(path).splitlines()
    changed = [*lines[:at], *noise.split("\n"), *lines[at:]]
    assert parse_check_build("\n".join(changed)) == parse_check_build(read(path))


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse_check_build(text)

"""horovodrun --check-build: every text that Horovod ever printed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.verification.checkbuild import CheckBuild, parse

CASES = Path(__file__).parents[1] / "cases" / "checkbuild"
GOOD = sorted((CASES / "good").glob("*.txt"))
BAD = sorted((CASES / "bad").glob("*.txt"))
REFUSED = "is missing|no output|its sections are|the rows under"

FRAMEWORKS = ("TensorFlow", "PyTorch", "MXNet")
CONTROLLERS = ("MPI", "Gloo")


def read(path: Path) -> str:
    return path.read_bytes().decode()


def render(build: CheckBuild) -> str:
    """The text that Horovod prints for a table (runner/launch.py, all versions)."""
    sections = (
        ("Frameworks", build.frameworks),
        ("Controllers", build.controllers),
        ("Tensor Operations", build.tensor_operations),
    )
    blocks = [
        f"Available {name}:\n"
        + "\n".join(f"    [{'X' if there else ' '}] {row}" for row, there in rows.items())
        for name, rows in sections
    ]
    return "\n\n".join([f"Horovod v{build.version}:", *blocks]) + "    \n"


def tables(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, bool]]:
    flags = st.tuples(*[st.booleans()] * len(names))
    return flags.map(lambda values: dict(zip(names, values, strict=True)))


@st.composite
def builds(draw: st.DrawFn) -> CheckBuild:
    numbers = draw(st.tuples(*[st.integers(0, 99)] * 3))
    third = draw(st.sampled_from(["CCL", "MLSL"]))
    return CheckBuild(
        ".".join(map(str, numbers)) + draw(st.sampled_from(["", "rc1", ".post1", "+cu121"])),
        draw(tables(FRAMEWORKS)),
        draw(tables(CONTROLLERS)),
        draw(tables(("NCCL", "DDL", third, "MPI", "Gloo"))),
    )


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_known_texts(path: Path) -> None:
    assert parse(read(path))._asdict() == json.loads(path.with_suffix(".json").read_text())


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_anything_else_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse(read(path))


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_cut_text_never_gives_another_table(path: Path) -> None:
    whole = path.read_bytes()
    expected = parse(whole.decode())
    last_row = whole.rstrip().rfind(b" Gloo") + len(b" Gloo")
    for length in range(len(whole)):
        text = whole[:length].decode(errors="replace")
        if length < last_row:
            with pytest.raises(ValueError, match=REFUSED):
                parse(text)
        else:
            assert parse(text) == expected


@given(builds())
def test_round_trip(build: CheckBuild) -> None:
    assert parse(render(build)) == build
    assert parse("\n" + render(build)) == build


@given(builds(), st.data())
def test_a_line_left_out_is_refused(build: CheckBuild, data: st.DataObject) -> None:
    lines = render(build).splitlines()
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    del lines[data.draw(st.sampled_from(numbers))]
    with pytest.raises(ValueError, match=REFUSED):
        parse("\n".join(lines))


@given(builds(), st.text(st.characters(exclude_characters="[]:\r")), st.integers(0, 17))
def test_other_lines_do_not_matter(build: CheckBuild, noise: str, at: int) -> None:
    lines = render(build).splitlines()
    lines[at:at] = noise.split("\n")
    assert parse("\n".join(lines)) == build


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        parse(text)

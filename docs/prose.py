"""The prose check of `make lint`: codespell with the words of docs/words.txt.

It reads the documentation and what hvdenv prints: strings of its Python files, and the texts of
its TOML files and of recipes. Lines of code are blanked, so that line numbers stay right.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tomli
from codespell_lib import main as codespell

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "docs" / "words.txt"
# Keys of TOML files whose values are printed, with all that is below them.
PRINTED = frozenset(
    [
        "about",
        "build",
        "known",
        "message",
        "reason",
        "recipe",
        "remedies",
        "remedy",
        "run",
        "says",
        "summary",
        "symptom",
        "text",
        "unless",
        "inside",
    ]
)
CODE_BLOCK = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


# Misspellings to codespell, words here.
IGNORED = "ans,nd"
# Of a stand-alone step: a change of its text would rebuild environments.
IN_MESSAGES = {"is to be"}


def main() -> int:
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    words = dict(line.split("->") for line in lines)
    wrong = check(documents(), words)
    return wrong or check(messages(), {each: words[each] for each in words.keys() - IN_MESSAGES})


def check(texts: Iterable[tuple[Path, str]], words: Mapping[str, str]) -> int:
    """The number of wrong words; codespell prints where they are and what to write."""
    longest_first = sorted(words, key=len, reverse=True)
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts:
            copy = Path(folder) / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
        dictionary = Path(folder) / "dictionary"
        dictionary.write_text("".join(f"{each}->{words[each]}\n" for each in longest_first))
        os.chdir(folder)
        try:
            return codespell(
                "--dictionary",
                str(dictionary),
                "--dictionary",
                "-",
                "--skip",
                "./dictionary",
                "--regex",
                rf"\b(?:{'|'.join(longest_first)})\b|[\w'-]+",
                "--ignore-words-list",
                IGNORED,
                "--quiet-level",
                "2",
                ".",
            )
        finally:
            os.chdir(ROOT)


def documents() -> Iterator[tuple[Path, str]]:
    """The documentation without its code."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if "generated" not in path.parts:
            text = path.read_text(encoding="utf-8")
            yield path, CODE_BLOCK.sub(lambda found: "\n" * found.group().count("\n"), text)


def messages() -> Iterator[tuple[Path, str]]:
    """What hvdenv prints."""
    for path in (ROOT / "hvdenv").rglob("*.py"):
        yield path, "\n".join(strings(path.read_text(encoding="utf-8")))
    for path in (*(ROOT / "hvdenv").rglob("*.toml"), *(ROOT / "recipes").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        # The beginning of each text finds its line.
        begins = tuple(re.split(r'[\\"\n]', each)[0][:40] for each in printed(tomli.loads(text)))
        lines = text.splitlines()
        yield (
            path,
            "\n".join(line if any(each in line for each in begins) else "" for line in lines),
        )


def printed(value: object, inside: bool = False) -> Iterator[str]:
    """Texts of several words below the keys that are printed."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from printed(each, inside or key in PRINTED)
    elif isinstance(value, list):
        for each in value:
            yield from printed(each, inside)
    elif isinstance(value, str) and inside and " " in value.strip():
        yield value.strip()


def strings(source: str) -> list[str]:
    """The strings of a Python file on their lines, without docstrings."""
    lines = [""] * (source.count("\n") + 1)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            is_docstring = isinstance(node, ast.Expr)
            if (
                isinstance(child, ast.Constant)
                and isinstance(child.value, str)
                and not is_docstring
            ):
                for offset, text in enumerate(child.value.split("\n")):
                    if " " in text and child.lineno - 1 + offset < len(lines):
                        lines[child.lineno - 1 + offset] += f" {text}"
    return lines


if __name__ == "__main__":
    sys.exit(main())

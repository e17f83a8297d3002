"""What the documentation says is what hvdenv does."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from docs import reference
from hvdenv import errors
from hvdenv.cli.main import COMMANDS, RUN_PROGRAMS, make_parser
from hvdenv.knowledge.failures import all_failures
from hvdenv.knowledge.patches import set_number
from hvdenv.knowledge.rules import all_rules
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe_files import shipped_recipes
from hvdenv.reports.report import EXIT_CODES

ROOT = Path(__file__).parents[2]
GENERATED = {f"docs/generated/{name}": text for name, text in reference.pages().items()}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
    if "generated" not in path.parts
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^ {4}[^\n]+\n)+)", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^(?:[^\s#$][^$]*)?\$ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")


class Call(NamedTuple):
    """A call of hvdenv in a code block."""

    page: str
    line: str
    words: tuple[str, ...]


def outside_of_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """The command lines in the code blocks of a page: with a prompt, or all of a block."""
    for fenced, inside, indented in BLOCK.findall(text):
        block = re.sub(r"\\\n\s*", "", inside or indented)
        prompted = PROMPT.findall(block)
        if prompted:
            yield from prompted
        elif indented or fenced in ("sh", "bash"):
            yield from (line.strip() for line in block.splitlines())


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a line; what follows > is no argument."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if token[0] in ";|&<>":
            if words:
                yield tuple(words)
            words = []
        else:
            words.append(token)


def calls() -> Iterator[Call]:
    for page, text in PAGES.items():
        for line in commands(text):
            if "hvdenv" in line:
                for words in simple_commands(line):
                    if words[0].rpartition("/")[2] == "hvdenv":
                        yield Call(page, line, words[1:])


CALLS = list(calls())


def test_calls_are_found() -> None:
    pages = {"README.md", "docs/how-to/run-jobs.md", "docs/how-to/use-containers.md"}
    assert {call.page for call in CALLS} >= pages


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.page}: {call.line}")
def test_every_call_is_understood(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    words = call.words
    if words and words[0] in RUN_PROGRAMS and "--" in words:
        assert words[-1] != "--"
        words = words[: words.index("--")]
    try:
        arguments = make_parser().parse_args(words)
    except SystemExit as end:
        if end.code:
            pytest.fail(capsys.readouterr().err)
        return  # --help, --version
    recipe = getattr(arguments, "recipe", None)
    if recipe and recipe.islower() and "/" not in recipe and not recipe.endswith(".toml"):
        load_recipe(recipe, variants=arguments.variant, overrides=arguments.overrides)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_reference_has_every_command_with_an_example(command: str) -> None:
    section = GENERATED["docs/generated/commands.md"].split(f"\n## hvdenv {command}\n")[1]
    assert f"  hvdenv {command}" in section.split("\n## ")[0]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Of the pages outside of the site too; Sphinx checks the anchors within it."""
    for link in LINK.findall(outside_of_blocks(PAGES[page])):
        if not re.match(r"[a-z]+:|#", link):
            target = (ROOT / page).parent / link.partition("#")[0]
            assert target.exists() or os.path.relpath(target, ROOT) in GENERATED, link


def test_exit_codes() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    own = [each for each in classes if issubclass(each, errors.HvdenvError)]
    raised = {each.exit_code for each in own} | set(EXIT_CODES.values())
    # A shell reports 141 for a command that SIGPIPE ended.
    assert set(errors.MEANINGS) - {0} == raised - {0} | {errors.OWN_FAILURE, 141}
    rows = re.findall(r"^\| ([0-9]+) \|", GENERATED["docs/generated/exit-codes.md"], re.MULTILINE)
    assert [int(code) for code in rows] == sorted(errors.MEANINGS)


def test_every_recipe_key_has_a_meaning() -> None:
    page = GENERATED["docs/generated/recipe-keys.md"]
    rows = re.findall(r"^\| `(.+?)` \|.*\| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, meaning in rows if not meaning.strip()] == []


def test_the_table_of_recipes() -> None:
    page = GENERATED["docs/generated/recipes.md"]
    rows = re.findall(r"^\| \[`([a-z0-9-]+)`\]\(\S+\) \| (.+) \| (\w+) \|$", page, re.MULTILINE)
    recipes = [load_recipe(name).recipe for name in sorted(shipped_recipes())]
    assert rows == [(each.name, reference.plain(each.summary), each.status) for each in recipes]


def test_all_pages_state_the_same_number_of_rules() -> None:
    """Whole hundreds, so that not every new rule changes them."""
    counts = re.findall(r"\b(\S+)\s+(\d+)\s\[?rules\b", "\n".join(PAGES.values()))
    assert counts and {*counts} == {("over", str(len(all_rules()) // 100 * 100))}


def test_every_rule_and_error_message_is_in_the_reference() -> None:
    for rule in all_rules():
        assert f"### {rule.id}\n" in GENERATED["docs/generated/rules.md"]
    for cause in all_failures().causes:
        text = GENERATED[f"docs/generated/errors/{cause.id}.md"]
        assert all(each in text for each in cause.texts)
        assert all(reference.plain(each) in text for each in cause.remedies)
    for event in all_failures().events:
        text = GENERATED[f"docs/generated/errors/{event.id}.md"]
        assert all(each in text for each in event.texts)


def test_labels_of_published_wheels_are_those_of_the_current_patches() -> None:
    pages = "".join(text for name, text in PAGES.items() if name.startswith("docs/"))
    labels = set(re.findall(r"\+(hvdenv\.\d+)", pages))
    assert labels == {f"hvdenv.{set_number()}"}


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, text in PAGES.items():
        assert set(re.findall(r"[`$] ?make ([a-z-]+)", text)) <= targets, page


def test_nothing_installs_a_package_of_hvdenvs_name_from_an_index() -> None:
    """No index has it, so anybody could publish one: files and wheels are named by their paths."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in (*(ROOT / "hvdenv").rglob("*.py"), *(ROOT / "hvdenv").rglob("*.toml"))
    }
    by_name = re.compile(
        r"\b(?:pip|pipx|uv)(?: \w+)? (?:install|download|add|wheel)\b[^\n;|`]*?[\s'\"]hvdenv(?:\[\w+\])?(?=['\"`\s]|$)",
        re.MULTILINE,
    )
    found = [
        f"{place}: {match[0]}"
        for place, text in {**PAGES, **texts}.items()
        for match in by_name.finditer(text)
        if "--no-index" not in match[0]
    ]
    assert found == []

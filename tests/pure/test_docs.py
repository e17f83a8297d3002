"""What the documentation says is what hvdenv does."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from docs import reference
from hvdenv.base import errors
from hvdenv.cli.main import COMMANDS, RUN_PROGRAMS, make_parser
from hvdenv.knowledge.failures import all_failures
from hvdenv.knowledge.patches import set_number
from hvdenv.knowledge.rules import all_rules
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe_files import shipped_recipes
from hvdenv.reports.report import EXIT_CODES

ROOT = Path(__file__).parents[2]
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


parser = cache(make_parser)


@cache
def generated() -> dict[str, str]:
    """The pages of the reference, by their names in docs/generated."""
    return reference.pages()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.page}: {call.line}")
def test_every_call_is_understood(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    words = call.words
    if words and words[0] in RUN_PROGRAMS and "--" in words:
        assert words[-1] != "--"
        words = words[: words.index("--")]
    try:
        arguments = parser().parse_args(words)
    except SystemExit as end:
        if end.code:
            pytest.fail(capsys.readouterr().err)
        return  # --help, --version
    recipe = getattr(arguments, "recipe", None)
    if recipe and recipe.islower() and "/" not in recipe and not recipe.endswith(".toml"):
        load_recipe(recipe, variants=arguments.variant, overrides=arguments.overrides)


def test_commands_that_messages_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Their actions and options, in remedies and recipes too; the words after them may be prose."""
    sources = [
        *ROOT.glob("hvdenv/**/*.py"),
        *ROOT.glob("hvdenv/**/*.toml"),
        *ROOT.glob("recipes/*"),
    ]
    calls = {
        (command, *rest.partition(" -- ")[0].split())
        for path in sources
        for command, rest in re.findall(
            r"\bhvdenv (\w+)((?: [\w./=~<-]+)*)", path.read_text(encoding="utf-8")
        )
        if command in COMMANDS
    }
    assert len(calls) > 100
    for words in calls:
        with suppress(SystemExit):
            parser().parse_args(words)
        assert not re.search("invalid choice|unrecognized arguments: --", capsys.readouterr().err)


def test_calls_are_found() -> None:
    pages = {"README.md", "docs/how-to/run-jobs.md", "docs/how-to/use-containers.md"}
    assert {call.page for call in CALLS} >= pages


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Of the pages outside of the site too; Sphinx checks the anchors within it."""
    outside_of_blocks = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(outside_of_blocks):
        if not re.match(r"[a-z]+:|#", link):
            target = (ROOT / page).parent / link.partition("#")[0]
            made = os.path.relpath(target, ROOT / "docs/generated") in generated()
            assert target.exists() or made, link


def test_exit_codes() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    own = [each for each in classes if issubclass(each, errors.HvdenvError)]
    raised = {each.exit_code for each in own} | set(EXIT_CODES.values())
    # A shell reports 141 for a command that SIGPIPE ended.
    assert set(errors.MEANINGS) - {0} == raised - {0} | {errors.OWN_FAILURE, 141}
    rows = re.findall(r"^\| ([0-9]+) \|", generated()["exit-codes.md"], re.MULTILINE)
    assert [int(code) for code in rows] == sorted(errors.MEANINGS)


def test_the_reference_has_every_command_key_and_recipe() -> None:
    for command in COMMANDS:
        section = generated()["commands.md"].split(f"\n## hvdenv {command}\n")[1]
        assert f"  hvdenv {command}" in section.split("\n## ")[0]  # an example
    page = generated()["recipe-keys.md"]
    rows = re.findall(r"^\| `(.+?)` \|.*\| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [key for key, meaning in rows if not meaning.strip()] == []
    page = generated()["recipes.md"]
    rows = re.findall(r"^\| \[`([a-z0-9-]+)`\]\(\S+\) \| (.+) \| (\w+) \|$", page, re.MULTILINE)
    recipes = [load_recipe(name).recipe for name in sorted(shipped_recipes())]
    assert rows == [(each.name, reference.plain(each.summary), each.status) for each in recipes]


def test_every_rule_and_error_message_is_in_the_reference() -> None:
    for rule in all_rules():
        assert f"### {rule.id}\n" in generated()["rules.md"]
    for each in (*all_failures().causes, *all_failures().events):
        page = generated()[f"errors/{each.id}.md"]
        assert all(text in page for text in each.texts)
    for cause in all_failures().causes:
        page = generated()[f"errors/{cause.id}.md"]
        assert all(reference.plain(each) in page for each in cause.remedies)


def test_numbers_of_rules_and_labels_of_wheels() -> None:
    """Of rules whole tens, so that not every new one changes them."""
    counts = re.findall(r"\b(\S+)\s+(\d+)\s\[?rules\b", "\n".join(PAGES.values()))
    assert counts and {*counts} == {("over", str(len(all_rules()) // 10 * 10))}
    pages = "".join(text for name, text in PAGES.items() if name.startswith("docs/"))
    assert {*re.findall(r"\+(hvdenv\.\d+)", pages)} == {f"hvdenv.{set_number()}"}


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, text in PAGES.items():
        assert set(re.findall(r"[`$] ?make ([a-z-]+)", text)) <= targets, page


def test_nothing_installs_a_package_of_hvdenvs_name_from_an_index() -> None:
    """No index has it, so anybody could publish one: files and wheels are named by their paths."""
    sources = (path for kind in ("py", "toml") for path in (ROOT / "hvdenv").rglob(f"*.{kind}"))
    texts = {**PAGES, **{str(path): path.read_text(encoding="utf-8") for path in sources}}
    by_name = re.compile(
        r"\b(?:pip|pipx|uv)(?: \w+)? (?:install|download|add|wheel)\b[^\n;|`]*?[\s'\"]hvdenv(?:\[\w+\])?(?=['\"`\s]|$)",
        re.MULTILINE,
    )
    for place, text in texts.items():
        found = [match[0] for match in by_name.finditer(text)]
        assert [each for each in found if "--no-index" not in each] == [], place

"""Reads files that list packages: environment.yml of conda, and requirements.txt of pip."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

import yaml

from hvdenv.drafting import packages
from hvdenv.drafting.page import Page
from hvdenv.drafting.pages import Block, logical_lines
from hvdenv.drafting.shell import Statement, shown
from hvdenv.drafting.values import Origin, Read, Value, at, leave
from hvdenv.drafting.variables import variable
from hvdenv.masking import learn

# Longer files are no lists of packages.
_MOST_LINES = 2000
Lines = Iterator[tuple[Statement, Iterator[Read]]]


def _requirements(block: Block, source: str, page: Page) -> Lines:
    texts = {
        line: re.sub(r"\\\n", " ", re.split(r"(?:^|\s)#", line.text)[0]).strip()
        for line in logical_lines(block.lines[:_MOST_LINES])
    }
    frameworks = {name for text in texts.values() for name in packages.find_frameworks(text)}
    for line, text in texts.items():
        if text:
            origin = Origin(source, block.line + line.first, shown(text), block.line + line.last)
            yield Statement(("pip",), (), origin), _requirement(text, page, frameworks)


def _requirement(text: str, page: Page, frameworks: set[str]) -> Iterator[Read]:
    """A line of requirements.txt; the options of pip are lines, too."""
    if not text.startswith("-"):
        yield from packages.requirement(re.split(r"\s--", text)[0], page)
        return
    try:
        words = shlex.split(text)
    except ValueError:
        yield leave("its quotes do not match")
        return
    yield from packages.read_pip(["install", *words], page, frameworks)


def _environment(block: Block, source: str, page: Page) -> Lines:
    try:
        root = yaml.compose("\n".join(block.lines[:_MOST_LINES]), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        root = None
    for key, node in root.value if isinstance(root, yaml.MappingNode) else ():
        for entry, read in _entries(str(key.value), node, page):
            number = entry.start_mark.line
            origin = Origin(source, block.line + number, shown(block.lines[number]))
            yield Statement(("conda",), (), origin), read


def _entries(key: str, node: yaml.Node, page: Page) -> Iterator[tuple[yaml.Node, Iterator[Read]]]:
    """The entries of a key, and what each means."""
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    if key == "channels":
        for each in items:
            yield each, iter([packages.channel(str(each.value))])
    elif key == "dependencies":
        yield node, iter([Value(at("python.provider"), "conda")])
        for each in items:
            if isinstance(each, yaml.MappingNode):
                lists = (value for _, value in each.value if isinstance(value, yaml.SequenceNode))
                read_pip = (item for value in lists for item in value.value)
                yield from ((item, _requirement(str(item.value), page, set())) for item in read_pip)
            else:
                yield each, packages.conda_package(str(each.value))
    elif key == "variables":
        learn((str(name.value), str(value.value)) for name, value in pairs)  # before they are shown
        for name, value in pairs:
            yield name, variable(str(name.value), str(value.value), exported=True)
    else:
        yield node, iter([leave("hvdenv names and stores environments itself", understood=True)])


READERS: dict[str, Callable[[Block, str, Page], Lines]] = {
    "requirements": _requirements,
    "conda": _environment,
}

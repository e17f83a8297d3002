"""Finds the shell code of a page: HTML, Markdown, reStructuredText, a script, or plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from typing import NamedTuple

from markdown_it import MarkdownIt

# Longer lines are data, such as images.
LONGEST_LINE = 4096
# Of typesetting; a shell would not accept them.
_SPACES = {0xA0: " ", 0x202F: " ", 0x3000: " ", 0x200B: None, 0xFEFF: None}
_HTML = re.compile(r"<(?:!doctype|html|body|pre|syntaxhighlight|source)\b", re.IGNORECASE)
_PREFORMATTED = frozenset({"pre", "syntaxhighlight", "source"})
_FENCE = re.compile(r"^[ \t]{0,12}(?:>[ \t]?)?(?:```|~~~)", re.MULTILINE)
# What follows the title of a tab or a note of MkDocs is no paragraph that goes on.
_TAB = re.compile(r"^[ ]{0,12}(?:===|!!!|\?\?\?)[!+]? .*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^ {0,20}\.\. (?:\|[\w-]{1,40}\| )?[\w-]{1,40}::", re.MULTILINE)
_LITERAL = re.compile(r"\.\. (?:code-block|code|sourcecode|prompt|parsed-literal)::")
_OTHER_LANGUAGE = re.compile(
    r"(?i)\W*(?:py(?:thon3?|con)?|ya?ml|json|toml|ini|c|c\+\+|cpp|cuda|cmake|docker(?:file)?|lua|julia"
    r"|matlab|r|fortran|diff|html|xml|css|js|javascript|mermaid|output|latex|tex)\b(?!.*(?:shell|bash))"
)


class Block(NamedTuple):
    """Lines of a page that may be shell code.

    Attributes:
        line: number of the first one in the page.
        language: as the page names it; may be empty.
        mixed: whether sentences and commands alternate.
    """

    line: int
    lines: tuple[str, ...]
    language: str = ""
    mixed: bool = False

    @property
    def other_language(self) -> bool:
        return bool(_OTHER_LANGUAGE.fullmatch(self.language.split(",")[0].split(" ")[0]))


def blocks(text: str) -> tuple[Block, ...]:
    lines = [line if len(line) <= LONGEST_LINE else "" for line in text.split("\n")]
    text = "\n".join(line.rstrip("\r").translate(_SPACES).expandtabs(4) for line in lines)
    if text.lstrip().startswith("#!"):
        return (Block(1, tuple(text.split("\n"))),)
    # Titles of reStructuredText may be underlined with ~~~.
    if _DIRECTIVE.search(text) and "```" not in text:
        return tuple(_of_literals(text.split("\n")))
    if _HTML.search(text) and not _FENCE.search(text):
        return tuple(_of_html(text))
    if _FENCE.search(text):
        return tuple(_of_markdown(_TAB.sub("", text)))
    literal = tuple(_of_literals(text.split("\n")))
    if literal:
        return literal
    return (Block(1, tuple(text.split("\n")), mixed=True),)


class _Preformatted(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.depth = 0
        self.start = 0
        self.language = ""
        self.parts: list[str] = []
        self.found: list[Block] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _PREFORMATTED:
            if not self.depth:
                self.start, self.parts = self.getpos()[0], []
                self.language = next((value or "" for name, value in attrs if name == "lang"), "")
            self.depth += 1
        elif tag == "br" and self.depth:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _PREFORMATTED and self.depth:
            self.depth -= 1
            if not self.depth:
                lines = "".join(self.parts).split("\n")
                self.found.append(Block(self.start, tuple(lines), self.language))

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.parts.append(data)


def _of_html(text: str) -> list[Block]:
    parser = _Preformatted()
    parser.feed(text)
    parser.close()
    return parser.found


def _of_markdown(text: str, first: int = 1, depth: int = 0) -> Iterator[Block]:
    # The text of paragraphs is of no interest, and takes the longest.
    parser = MarkdownIt("commonmark").disable(["inline"])
    for token in parser.parse(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        line = first + token.map[0] + (token.type == "fence")
        # Tabs and notes of some generators hold fences that are indented as code is.
        if token.type == "code_block" and _FENCE.search(token.content) and depth < 4:
            yield from _of_markdown(token.content, line, depth + 1)
        else:
            # What is indented may also be the text of a note.
            indented = token.type == "code_block"
            yield Block(line, tuple(token.content.split("\n")), token.info.strip(), mixed=indented)


def _of_literals(lines: list[str]) -> Iterator[Block]:
    """Literal blocks of reStructuredText: indented lines after one that ends in ``::``."""
    number = 0
    while number < len(lines):
        opening = lines[number]
        number += 1
        if not opening.rstrip().endswith("::") and not _LITERAL.match(opening.lstrip()):
            continue
        margin = _indent(opening)
        start = number
        while number < len(lines) and (
            not lines[number].strip() or _indent(lines[number]) > margin
        ):
            number += 1
        body = lines[start:number]
        if any(line.strip() for line in body):
            yield Block(start + 1, tuple(_dedented(body)), opening.partition("::")[2].strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _dedented(lines: Iterable[str]) -> Iterator[str]:
    """Without the common margin; options of the directive are left out."""
    kept = ["" if re.fullmatch(r"\s*:[\w-]+:.*", line) else line for line in lines]
    margin = min((_indent(line) for line in kept if line.strip()), default=0)
    yield from (line[margin:] for line in kept)

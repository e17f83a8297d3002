"""Finds the code of a page: HTML, Markdown, reStructuredText, a script, a package list, or text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from typing import Literal, NamedTuple

from markdown_it import MarkdownIt

# Longer lines are data, such as images.
LONGEST_LINE = 4096
# In place of control characters. A line that contains one is not read.
REFUSED = "\ufffd"
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Of typesetting; a shell would not accept them.
_SPACES = {0xA0: " ", 0x202F: " ", 0x3000: " ", 0x200B: None, 0xFEFF: None}

DIRECTIVE = re.compile(r"#(?:SBATCH|PBS|COBALT|BSUB|\$|PJM|MSUB)\s")
_HTML = re.compile(r"<(?:!doctype|html|body|pre|syntaxhighlight|source)\b", re.IGNORECASE)
_PREFORMATTED = frozenset({"pre", "syntaxhighlight", "source"})
_FENCE = re.compile(r"^[ \t]{0,12}(?:>[ \t]?)?(?:```|~~~)", re.MULTILINE)
# What follows the title of a tab or a note of MkDocs is no paragraph that goes on.
_TAB = re.compile(r"^[ ]{0,12}(?:===|!!!|\?\?\?)[!+]? .*$", re.MULTILINE)
_HEADING = re.compile(r"\s{0,12}(?:#{1,6} |=== )|(?:={3,}|-{3,}|~{3,}|\^{3,})\s*$")
_RST = re.compile(r"^ {0,20}\.\. (?:\|[\w-]{1,40}\| )?[\w-]{1,40}::", re.MULTILINE)
_LITERAL = re.compile(r"\.\. (?:code-block|code|sourcecode|prompt|parsed-literal)::")
_OTHER_LANGUAGE = re.compile(
    r"(?i)\W*(?:py(?:thon3?|con)?|json|toml|ini|c|c\+\+|cpp|cuda|cmake|lua|julia|matlab|r|fortran|diff"
    r"|ya?ml|html|xml|css|js|javascript|mermaid|output|latex|tex)\b(?!.*(?:shell|bash))"
)

_FROM = re.compile(r"FROM [\w./-]+(?::\S+)?(?: [Aa][Ss] \w+)?$")

Kind = Literal["shell", "text", "conda", "requirements", "docker", "other"]
_KINDS_OF_FILES: dict[Kind, str] = {
    "conda": "*.yml *.yaml",
    "requirements": "*requirements*.txt *requirements*.in",
    "docker": "dockerfile* containerfile* *.dockerfile",
    "other": "*.json *.toml *.ini *.cfg *.py *.ipynb",
    "shell": "*.sh *.bash *.sbatch *.slurm *.pbs *.qsub *.lsf *.job *.batch *.cmd",
}


class Block(NamedTuple):
    """Lines of a page.

    Attributes:
        line: number of the first one in the page.
        kind: how to read them. In text, sentences and commands alternate.
        language: as the page names it; may be empty.
        section: how many headings precede it.
    """

    line: int
    lines: tuple[str, ...]
    kind: Kind = "shell"
    language: str = ""
    section: int = 0


def blocks(text: str, name: str = "") -> tuple[Block, ...]:
    """All lines of a page, in order.

    Args:
        name: of its file, which may say what it contains.
    """
    lines = [line if len(line) <= LONGEST_LINE else REFUSED for line in text.split("\n")]
    lines = [_CONTROL.sub(REFUSED, line.rstrip("\r").translate(_SPACES)) for line in lines]
    lines = [line.expandtabs(4) for line in lines]
    if kind := kind_of_file(name, lines):
        return (Block(1, tuple(lines), kind),)
    code = sorted(_code("\n".join(lines), lines), key=lambda each: each.line)
    return tuple(_with_text(lines, code))


def kind_of_file(name: str, lines: Sequence[str]) -> Kind | None:
    first = next((line for line in lines if line.strip()), "")
    text = "\n".join(lines)
    for kind, patterns in _KINDS_OF_FILES.items():
        named = any(fnmatchcase(name.lower(), pattern) for pattern in patterns.split())
        if named and (kind != "conda" or _kind_by_content(lines) == kind):
            return kind
    if first.startswith("#!"):
        return "shell"
    if _FENCE.search(text) or _HTML.search(text):
        return None
    if first.startswith("#") and any(map(DIRECTIVE.match, lines)):
        return "shell"
    return _kind_by_content(lines)


def _kind_by_content(lines: Sequence[str]) -> Kind | None:
    if any(line.startswith("dependencies:") for line in lines):
        return "conda"
    return "docker" if any(map(_FROM.match, lines)) else None


def _kind_of_code(language: str, lines: Sequence[str]) -> Kind:
    if kind := _kind_by_content(lines):
        return kind
    named = language.split(",")[0].split(" ")[0]
    other = _OTHER_LANGUAGE.fullmatch(named) and not any(map(DIRECTIVE.match, lines))
    return "other" if other else "shell"


def _code(text: str, lines: list[str]) -> Iterator[Block]:
    # Titles of reStructuredText may be underlined with ~~~.
    if _RST.search(text) and "```" not in text:
        return _of_literals(lines)
    if _FENCE.search(text):
        return _of_markdown(_TAB.sub("", text))
    if _HTML.search(text):
        return _of_html(text)
    return _of_literals(lines)


def _with_text(lines: Sequence[str], code: Sequence[Block]) -> Iterator[Block]:
    """The blocks of code, and the text between them."""
    start = sections = 0
    for block in (*code, Block(len(lines) + 1, ())):
        text = tuple(lines[start : max(block.line - 1, start)])
        sections += sum(1 for line in text if _HEADING.match(line))
        if any(line.strip() for line in text):
            yield Block(start + 1, text, "text", section=sections)
        if block.lines:
            yield block._replace(section=block.section or sections)
        start = max(start, block.line - 1 + len(block.lines))


class _Preformatted(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.depth = 0
        self.start = 0
        self.language = ""
        self.parts: list[str] = []
        self.found: list[Block] = []
        self.sections = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        language = given.get("lang") or (given.get("class") or "").removeprefix("language-")
        if tag in _PREFORMATTED:
            if not self.depth:
                self.start, self.parts, self.language = self.getpos()[0], [], language
            self.depth += 1
        elif re.fullmatch(r"h[1-6]", tag):
            self.sections += 1
        elif tag == "code" and self.depth:
            self.language = self.language or language
        elif tag == "br" and self.depth:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _PREFORMATTED and self.depth:
            self.depth -= 1
            if not self.depth:
                lines = tuple("".join(self.parts).split("\n"))
                kind = _kind_of_code(self.language, lines)
                block = Block(self.start, lines, kind, self.language)
                self.found.append(block._replace(section=self.sections))

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.parts.append(data)


def _of_html(text: str) -> Iterator[Block]:
    parser = _Preformatted()
    parser.feed(text)
    parser.close()
    yield from parser.found


def _of_markdown(text: str, first: int = 1, depth: int = 0) -> Iterator[Block]:
    # The text of paragraphs is of no interest here, and takes the longest.
    parser = MarkdownIt("commonmark").disable(["inline"])
    for token in parser.parse(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        line = first + token.map[0] + (token.type == "fence")
        lines = tuple(token.content.rstrip("\n").split("\n"))
        # Tabs and notes of some generators hold fences that are indented as code is.
        if token.type == "code_block" and _FENCE.search(token.content) and depth < 4:
            yield from _of_markdown(token.content, line, depth + 1)
        elif token.type == "fence":
            language = token.info.strip()
            yield Block(line, lines, _kind_of_code(language, lines), language)
        else:  # it may also be the text of a note
            yield Block(line, lines, "text")


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
        body = tuple(_dedented(lines[start:number]))
        if any(line.strip() for line in body):
            language = opening.partition("::")[2].strip()
            yield Block(start + 1, body, _kind_of_code(language, body), language)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _dedented(lines: Sequence[str]) -> Iterator[str]:
    """Without the common margin; options of the directive are left out."""
    kept = ["" if re.fullmatch(r"\s*:[\w-]+:.*", line) else line for line in lines]
    margin = min((_indent(line) for line in kept if line.strip()), default=0)
    yield from (line[margin:] for line in kept)


class Line(NamedTuple):
    """A line, with those that continue it after a backslash.

    Attributes:
        first, last: their places in the block, from 0.
    """

    first: int
    last: int
    text: str


def logical_lines(lines: Sequence[str]) -> Iterator[Line]:
    parts = list[str]()
    for number, line in enumerate(lines):
        parts.append(line)
        if not line.endswith("\\") or len(parts) > 200 or number == len(lines) - 1:
            yield Line(number - len(parts) + 1, number, "\n".join(parts))
            parts = []

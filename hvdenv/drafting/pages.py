"""Finds the code of a page: HTML, Markdown, reStructuredText, a script, a package list, or text."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from html import unescape
from itertools import pairwise
from textwrap import dedent
from typing import Literal, NamedTuple

from markdown_it import MarkdownIt

# Longer lines are data, such as images.
LONGEST_LINE = 4096
# In place of control characters. A line that contains one is not read.
REFUSED = "\ufffd"
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Of typesetting; a shell would not accept them.
_SPACES = {0xA0: " ", 0x202F: " ", 0x3000: " ", 0x200B: None, 0xFEFF: None}

DIRECTIVE = re.compile(r"#(?:SBATCH|PBS|COBALT|BSUB|\$|PJM|MSUB|OAR|flux:|FLUX:)\s")
_HTML = re.compile(r"<(?:!doctype|html|body|pre|syntaxhighlight|source)\b", re.IGNORECASE)
# Tags of preformatted text, comments, and what browsers take for comments.
_TAG = re.compile(
    r"(</?(?:pre|syntaxhighlight|source)\b[^<>]*>|<!--|-->|<!\[[^>\n]*>?)", re.IGNORECASE
)
_LANGUAGE = re.compile(r"""\b(?:lang|class)=["'](?:language-)?([\w+-]{1,40})""")
# Also within quotes, lists and the tabs of some generators.
_FENCE = re.compile(r"[ \t]{0,20}(?:>[ \t]?)?(?:(?:[*+-]|\d{1,3}[.)])[ \t]+)?(?:`{3}|~{3})")
# Fences within indented code that are looked for.
_DEEPEST = 4
# Titles: of Markdown, underlined, and of HTML.
_HEADING = re.compile(
    r"^(?P<marks>#{1,6}) |^(?P<under>={3,}|-{3,}|~{3,}|\^{3,})\s*$|<h(?P<html>[1-6])\b"
)
# Of a section, the levels and numbers of the titles that it is below.
Section = tuple[tuple[int, int], ...]
_RST = re.compile(r" {0,20}\.\. (?:\|[\w-]{1,40}\| )?[\w-]{1,40}::")
_LITERAL = re.compile(
    r"\s*\.\. (?:code-block|code|sourcecode|prompt|parsed-literal)::|(?!\s*\.\. ).*::\s*$"
)
_OPTION = re.compile(r"\s*:[\w-]+:.*")
_OTHER_LANGUAGE = re.compile(
    r"(?i)\W*(?:py(?:thon3?|con)?|json|toml|ini|c|c\+\+|cpp|cuda|cmake|lua|julia|matlab|r|fortran|diff"
    r"|ya?ml|html|xml|css|js|javascript|mermaid|output|latex|tex)\b(?!.*(?:shell|bash))"
)
_ENTRY = re.compile(r"---|[a-z_]{1,20}:")
_REQUIREMENT = re.compile(
    r"[A-Za-z][\w.-]{0,60}(?:\[[\w,-]{1,60}\])?[ \t]{0,4}(?:(?:[<>!~=]=|[<>;#]).*)?|-\S.*"
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
    """

    line: int
    lines: tuple[str, ...]
    kind: Kind = "shell"
    language: str = ""
    section: Section = ()


def blocks(text: str, name: str = "") -> Iterator[Block]:
    """All lines of a page, in order.

    Args:
        name: of its file, which may say what it contains.
    """
    lines = [_readable(line) for line in text.split("\n")]
    if kind := kind_of_file(name, lines):
        return iter([Block(1, tuple(lines), kind)])
    return _with_text(lines, list(_code(lines)))


def _readable(line: str) -> str:
    """Without typesetting; a line that is not to be read contains REFUSED."""
    line = _CONTROL.sub(REFUSED, line.rstrip("\r").translate(_SPACES)).expandtabs(4)
    return line if len(line) <= LONGEST_LINE else REFUSED


def kind_of_file(name: str, lines: Sequence[str]) -> Kind | None:
    """The kind of a file as a whole; None for a page that contains code, and for text."""
    content = _kind_by_content(lines)
    for kind, patterns in _KINDS_OF_FILES.items():
        named = any(fnmatchcase(name.lower(), pattern) for pattern in patterns.split())
        if named and (kind != "conda" or content == "conda"):
            return kind
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("#!"):
        return "shell"
    if any(_FENCE.match(line) or _HTML.search(line) for line in lines):
        return None
    is_script = first.startswith("#") and any(map(DIRECTIVE.match, lines))
    return "shell" if is_script else content


def _kind_by_content(lines: Sequence[str]) -> Kind | None:
    stated = [line for line in lines if line.strip() and not line.startswith("#")]
    # A script may write such a file, in a here-document.
    first = stated[0] if stated else ""
    if _ENTRY.match(first) and any(line.startswith("dependencies:") for line in lines):
        return "conda"
    if any("==" in line for line in stated) and all(map(_REQUIREMENT.fullmatch, stated)):
        return "requirements"
    built = first.startswith(("ARG ", "FROM ")) and any(map(_FROM.match, lines))
    return "docker" if built else None


def _code_block(first: int, lines: Sequence[str], language: str) -> Block:
    """A block of code; ``first`` counts from 0."""
    named = language.split(",")[0].split(" ")[0]
    other = _OTHER_LANGUAGE.fullmatch(named) and not any(map(DIRECTIVE.match, lines))
    kind = _kind_by_content(lines) or ("other" if other else "shell")
    return Block(first + 1, tuple(lines), kind, language=language)


def _code(lines: Sequence[str]) -> Iterator[Block]:
    # Titles of reStructuredText may be underlined with ~~~.
    fenced = any(map(_FENCE.match, lines))
    if fenced and (any("```" in line for line in lines) or not any(map(_RST.match, lines))):
        return _fenced(lines)
    html = any(map(_HTML.search, lines))
    return _preformatted("\n".join(lines)) if html else _literals(lines)


def _preformatted(text: str) -> Iterator[Block]:
    """The preformatted texts of a page in HTML."""
    number = first = depth = 0
    code, language, comment = "", "", False
    for piece in _TAG.split(text):
        if comment or (piece == "<!--" and not depth):
            comment = piece != "-->"
        elif not _TAG.fullmatch(piece) or piece.startswith(("<!", "--")):
            code += piece if depth else ""
        elif not piece.startswith("</"):
            first, code, language = (first, code, language) if depth else (number, "", piece)
            depth += 1
        elif depth:
            depth -= 1
            if not depth:
                named = _LANGUAGE.search(language + code[:200])
                body = unescape(re.sub(r"<[^<>]*>", "", re.sub(r"<br\b[^<>]*>", "\n", code)))
                # Entities, too, stand for spaces and control characters.
                lines = [_readable(line) for line in body.rstrip().split("\n")]
                yield _code_block(first, lines, named[1] if named else "")
        number += piece.count("\n")


def _fenced(lines: Sequence[str], first: int = 0, depth: int = 0) -> Iterator[Block]:
    """Code between the fences of Markdown; ``first`` counts from 0."""
    # The text of paragraphs is of no interest here, and takes the longest.
    for token in MarkdownIt("commonmark").disable(["inline"]).parse("\n".join(lines)):
        if token.map is None or token.type not in ("fence", "code_block"):
            continue
        start = first + token.map[0] + (token.type == "fence")
        body = token.content.rstrip("\n").split("\n")
        if token.type == "fence":
            yield _code_block(start, body, token.info.strip())
        # Tabs and notes of some generators contain fences that are indented as code is.
        elif depth < _DEEPEST and any(map(_FENCE.match, body)):
            yield from _fenced(body, start, depth + 1)


def _literals(lines: Sequence[str]) -> Iterator[Block]:
    """Literal blocks of reStructuredText: indented lines after one that ends in ``::``."""
    end = 0
    for number, opening in enumerate(lines, 1):
        if number <= end or not _LITERAL.match(opening):
            continue
        end = number
        while end < len(lines) and (
            not lines[end].strip() or _indent(lines[end]) > _indent(opening)
        ):
            end += 1
        body = ["" if _OPTION.fullmatch(line) else line for line in lines[number:end]]
        if any(line.strip() for line in body):
            code = dedent("\n".join(body)).split("\n")
            yield _code_block(number, code, opening.partition("::")[2].strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _with_text(lines: Sequence[str], code: Sequence[Block]) -> Iterator[Block]:
    """The blocks of code, and the text between them, by sections."""
    section: Section = ()
    count = start = 0
    for block in (*code, Block(len(lines) + 1, ())):
        end = max(block.line - 1, start)
        found = ((number, _level(lines[number])) for number in range(start, end))
        titles = [(number, level) for number, level in found if level]
        for (first, level), (following, _) in pairwise([(start, 0), *titles, (end, 0)]):
            if level:
                count += 1
                section = (*(each for each in section if each[0] < level), (level, count))
            if any(line.strip() for line in lines[first:following]):
                yield Block(first + 1, tuple(lines[first:following]), "text", section=section)
        if block.lines:
            yield block._replace(section=section)
        start = max(start, block.line - 1 + len(block.lines))


def _level(line: str) -> int:
    """Of the section that a line begins; 0 if it begins none."""
    found = _HEADING.search(line)
    if not found:
        return 0
    return len(found["marks"] or "") or int(found["html"] or 1 + "=-~^".index(line[0]))

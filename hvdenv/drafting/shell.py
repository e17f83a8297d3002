"""Reads shell code into statements, and never runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from hvdenv.drafting.pages import DIRECTIVE, REFUSED, Block, Line, kind_of_file, logical_lines
from hvdenv.drafting.values import Left, Origin
from hvdenv.errors import UsageError
from hvdenv.libraries import install_command
from hvdenv.masking import clean, learn

try:
    import tree_sitter_bash
    from tree_sitter import Language, Node, Parser
except ImportError:  # some machines have no wheels of them
    tree_sitter_bash = None  # type: ignore[assignment]

# In place of what only a shell knows, and of <what the reader fills in>. No value contains it.
UNKNOWN = "\0"
# Angle brackets would be redirections.
_PLACEHOLDER = "HVDENV_PLACEHOLDER"
_TO_FILL_IN = re.compile(r"<[A-Za-z][\w /.-]{0,60}>")

_PROMPT = re.compile(
    r"(?!\s*#\$)\s*(?:\([\w.+/ -]{1,60}\) ?)?"
    r"""(?:\[[^\]\n]{1,80}\] ?[$%#>]|[^\s'"=()`|;&]{0,80}[$%]|[^\s'"=()`|;&>]{1,80}>)(?:\s+|$)"""
)
_SENTENCE = re.compile(
    r"[a-z)][.:;?!]$|\b(?:the|a|an|is|are|you|your|this|that|of|which|will|can|should|be)\b"
)
_MODULE = re.compile(
    r"\bmodule (?:-\S{1,20} ){0,3}(?:load|add|purge|use|swap|switch|unload|rm|reset|restore)\b"
)
_INLINE = re.compile(
    r"``([^`\n]{1,400})``|`([^`\n]{1,400})`|<code[^>\n]{0,80}>([^<\n]{1,400})</code>"
)
# What a sentence mentions, and the draft names.
_MENTION = re.compile(
    r"\b(?:module load|ml load|pip3? install|conda (?:create|install)|horovodrun|mpirun|srun|sbatch|qsub) \S"
    r"|#(?:SBATCH|PBS|BSUB|PJM|COBALT)\b"
)
_ASSIGNMENT = re.compile(r"""([A-Za-z_]\w*)=([^\s'"`;&|<>()*?[\]]+)""")
# Programs before the one that matters.
_BEFORE = frozenset({"time", "sudo", "nohup", "exec", "env", "then", "do", "else", "command"})
_KEYWORD = re.compile(
    r"(?:for|while|until|case|esac|if|elif|else|fi|do|done|then|function|return|exit|set|shift|EOF|EOT|END)\b"
    r"|[{}()\[:]|;;"
)


class Statement(NamedTuple):
    """A simple command, a directive of a batch script, or assignments.

    Attributes:
        words: the program and its arguments; empty if it only assigns. A value may contain
            UNKNOWN or ``$NAME``.
        variables: those that it assigns.
        origin: its text is fit to be shown.
        batch: whether it is in a script with directives.
    """

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    origin: Origin
    batch: bool = False

    @property
    def directive(self) -> bool:
        return self.origin.text.startswith("#")


class Script(NamedTuple):
    """What a block of code contains.

    Attributes:
        inner: files that it writes, of a kind that is read.
        lines: all its lines, except comments, and why each is no command, if it turns out so.
    """

    statements: tuple[Statement, ...]
    inner: tuple[Block, ...]
    lines: tuple[Left, ...]


def shown_whole(text: str) -> str:
    """A text of the page on one line, without control characters and secrets."""
    return " ".join(clean(text.replace("\\\n", " ")).split()).replace(_PLACEHOLDER, "<...>")


def shown(text: str) -> str:
    """The same, cut."""
    text = shown_whole(text)
    return text if len(text) <= 160 else text[:157] + "..."


def read_script(block: Block, source: str, known: Callable[[str], bool], most: int) -> Script:
    """The statements of a block.

    Args:
        source: the page.
        known: whether a program has a place in recipes, or is known to have none.
        most: how many to read.
    """
    typed = _typed(block, known)
    if block.kind in ("conda", "requirements"):
        return Script((), (), tuple(_lines(block, source, typed)))
    code = [_TO_FILL_IN.sub(_PLACEHOLDER, line) for line in typed]
    found, inner = _Reader(source, block.line, most).read(code)
    if not any(each.batch or (each.words and known(each.words[0])) for each in found):
        found = tuple(each for each in found if not each.words and each.variables)
    return Script(found, inner, tuple(_lines(block, source, typed)))  # its secrets are known now


def _typed(block: Block, known: Callable[[str], bool]) -> list[str]:
    """What a shell would read of each line; empty for sentences and output."""
    lines = list(block.lines)
    for each in logical_lines(lines):
        if REFUSED in each.text or (block.kind == "text" and not _is_command(each.text, known)):
            inline = _inline(each.text, known) if block.kind == "text" else ""
            lines[each.first : each.last + 1] = [inline, *[""] * (each.last - each.first)]
        elif block.kind == "text":
            lines[each.first] = _without_prompt(each.text.split("\n")[0])
    if block.kind in ("conda", "requirements", "other"):
        return [""] * len(lines) if block.kind == "other" else lines
    if block.kind == "docker":
        return list(_of_docker(lines))
    if block.kind == "text":
        return lines
    if any(_PROMPT.match(line) for line in lines if not line.lstrip().startswith(">>>")):
        lines = list(_after_prompts(lines))
    return lines


def _lines(block: Block, source: str, typed: Sequence[str]) -> Iterator[Left]:
    """Every line. What is not shell code may contain secrets, so that it is not shown."""
    hidden = Origin(source)
    before = ""
    for each in logical_lines(block.lines):
        text, stripped = "\n".join(typed[each.first : each.last + 1]).strip(), each.text.strip()
        first, last = block.line + each.first, block.line + each.last
        comment = (text or stripped).startswith("#") and not DIRECTIVE.match(text or stripped)
        if not stripped or (comment and block.kind != "text"):
            continue
        reason = _why(block, each, text)
        if text or block.kind == "docker" or (block.kind == "text" and _MENTION.search(stripped)):
            before = ""
            yield Left(Origin(source, first, shown(stripped), last), reason, understood=True)
        elif block.kind != "text":
            hidden = Origin(source, hidden.line if reason == before else first, "", last)
            before = reason
            yield Left(hidden, reason, understood=True)


def _why(block: Block, line: Line, typed: str) -> str:
    if REFUSED in line.text:
        return "control characters, or too long: it was not read"
    if block.kind in ("conda", "requirements"):
        return "it lists no package"
    if typed:
        return "control flow" if _KEYWORD.match(typed) else "hvdenv found no command in it"
    return {
        "text": "in a sentence", "docker": "an instruction for the image",
        "other": f"{block.language.split(' ')[0] or 'it'} is not shell code",
    }.get(block.kind, "output of a command")  # fmt: skip


# Instructions of a Dockerfile, and what a shell has in their place.
_OF_DOCKER = {"RUN": "", "ENV": "export ", "ARG": ""}


def _of_docker(lines: Sequence[str]) -> Iterator[str]:
    """A Dockerfile as shell code, line by line."""
    for each in logical_lines(lines):
        instruction, _, text = each.text.strip().partition(" ")
        if instruction == "ENV" and "=" not in text:
            text = "=".join(text.split(None, 1))
        known = instruction in _OF_DOCKER and REFUSED not in text
        code = f"{_OF_DOCKER[instruction]}{text}" if known else "\n" * (each.last - each.first)
        yield from code.split("\n")


def _inline(line: str, known: Callable[[str], bool]) -> str:
    """The commands that a sentence contains as inline code."""
    spans = (next(filter(None, found.groups())) for found in _INLINE.finditer(line))
    return " ; ".join(span for span in spans if REFUSED not in span and _is_command(span, known))


def _is_command(line: str, known: Callable[[str], bool]) -> bool:
    """Whether a line of a text is a command and not a sentence."""
    if DIRECTIVE.match(line.lstrip()) or line.startswith("#!"):
        return True
    typed = _without_prompt(line)
    words = typed.split()
    first = next((word for word in words if "=" not in word and word not in _BEFORE), "")
    if first == "module" and not _MODULE.search(typed):
        return False
    return len(words) > 1 and known(first) and not _SENTENCE.search(typed)


def _without_prompt(line: str) -> str:
    while found := _PROMPT.match(line):
        line = line[found.end() :]
    return line


def _after_prompts(lines: Sequence[str]) -> Iterator[str]:
    """What was typed, and scripts that were shown; empty lines instead of output."""
    goes_on = script = False
    for line in lines:
        typed = _without_prompt(line.removeprefix("> ") if goes_on else line)
        prompted = typed != line
        script = not prompted and (script or line.startswith("#!"))
        if prompted or goes_on or script:
            yield typed
            goes_on = typed.rstrip().endswith("\\")
        else:
            yield ""
            goes_on = False


class _Reader:
    """Reads one block, whose first line has the number ``first``."""

    def __init__(self, source: str, first: int, most: int) -> None:
        self.source = source
        self.first = first
        self.most = most
        self.parser = _parser()
        self.inner: list[Block] = []

    def read(self, lines: list[str]) -> tuple[tuple[Statement, ...], tuple[Block, ...]]:
        commands = list(islice(self._parse(lines), self.most))
        inside = {n for each in self.inner for n in range(each.line, each.line + len(each.lines))}
        directives = (
            Statement((), (), self._origin(number, number, line.strip()))
            for number, line in enumerate(lines)
            if DIRECTIVE.match(line.lstrip()) and self.first + number not in inside
        )
        found = [*islice(directives, self.most), *commands]
        batch = any(each.directive for each in found)
        ordered = sorted(found, key=lambda each: each.origin.line)[: self.most]
        return tuple(each._replace(batch=batch) for each in ordered), tuple(self.inner)

    def _parse(self, lines: list[str]) -> Iterator[Statement]:
        root = self.parser.parse("\n".join(lines).encode()).root_node
        if not root.has_error:
            yield from self._walk(root, 0)
            return
        for each in logical_lines(lines):
            node, part = self.parser.parse(each.text.encode()).root_node, each.text.strip()
            if not node.has_error:
                yield from self._walk(node, each.first)
            elif part and not _KEYWORD.match(part):
                origin = self._origin(each.first, each.last, part)
                yield Statement((part.split()[0], UNKNOWN), (), origin)

    def _walk(self, root: Node, offset: int) -> Iterator[Statement]:
        """Statements below a node. No recursion: pages may nest deeply."""
        stack = [root]
        while stack:
            node = stack.pop()
            if node.type == "heredoc_body":
                lines = tuple(_text(node).rstrip("\n").split("\n"))
                block = Block(self.first + offset + node.start_point[0], lines)
                if kind := kind_of_file("", lines):
                    self.inner.append(block._replace(kind=kind))
            elif node.type in ("command", "declaration_command", "unset_command"):
                yield self._statement(node, offset)
            elif node.type == "variable_assignment":
                yield self._made(node, offset, [], list(_assignments([node])))
            elif node.type != "command_substitution":
                stack += reversed(node.children)

    def _statement(self, node: Node, offset: int) -> Statement:
        if assigned := _ASSIGNMENT.fullmatch(_text(node)):  # a=/b/$C/$D
            pair = (assigned[1], re.sub(r"\$\{(\w+)\}", r"$\1", assigned[2]))
            return self._made(node, offset, [], [pair])
        variables, words = list(_assignments(node.children)), list(_words(node))
        while len(words) > 1 and (words[0] in _BEFORE or "=" in words[0]):
            name, equals, value = words.pop(0).partition("=")
            variables += [(name, value)] if equals else []
        return self._made(node, offset, words, variables)

    def _made(
        self, node: Node, offset: int, words: list[str], variables: list[tuple[str, str]]
    ) -> Statement:
        learn(variables)  # before the text is shown
        words = [each.replace(_PLACEHOLDER, UNKNOWN) for each in words]
        variables = [(name, value.replace(_PLACEHOLDER, UNKNOWN)) for name, value in variables]
        first, last = (offset + row for row in (node.start_point[0], node.end_point[0]))
        origin = self._origin(first, last, _text(node))
        return Statement(tuple(words), tuple(variables), origin)

    def _origin(self, first: int, last: int, text: str) -> Origin:
        return Origin(self.source, self.first + first, shown(text), self.first + last)


def _words(node: Node) -> Iterator[str]:
    if node.type != "command":
        yield _text(node.children[0])
        named = (each for each in node.children if each.type in ("variable_name", "word"))
        yield from map(_text, named)
        return
    for child in node.children:
        if child.type == "command_name":
            yield "".join(map(_value, child.children))
        elif child.is_named and child.type != "variable_assignment":
            yield _value(child)


def _assignments(nodes: list[Node]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if node.type == "variable_assignment":
            values = [child for child in node.children[1:] if child.is_named]
            yield _text(node.children[0]), "".join(map(_value, values))


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _value(node: Node) -> str:
    """A word without its quotes; ``${NAME}`` as ``$NAME``."""
    text = _text(node)
    if node.type in ("simple_expansion", "expansion"):
        name = re.fullmatch(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", text)
        return f"${name[1]}" if name else UNKNOWN
    if node.type == "raw_string":
        return text[1:-1]
    if node.type in ("string", "concatenation"):
        # Spaces in a string belong to no node.
        return "".join(_pieces(node))
    if node.type in ("word", "number", "string_content", "variable_name"):
        return re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""))
    return UNKNOWN


def _pieces(node: Node) -> Iterator[str]:
    at = node.start_byte + (node.type == "string")
    whole, end = node.text or b"", node.end_byte - (node.type == "string")
    for child in node.named_children:
        yield whole[at - node.start_byte : child.start_byte - node.start_byte].decode()
        yield _value(child)
        at = child.end_byte
    yield whole[at - node.start_byte : end - node.start_byte].decode()


def _parser() -> Parser:
    if tree_sitter_bash is None:
        raise UsageError(
            "reading a page needs tree-sitter and tree-sitter-bash, which this Python does not have",
            remedy=f"{install_command('tree-sitter', 'tree-sitter-bash')}, or use --here",
        )
    return Parser(Language(tree_sitter_bash.language()))

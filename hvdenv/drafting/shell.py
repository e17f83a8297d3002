"""Reads blocks of shell code into statements, with the variables that the page itself sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from hvdenv.drafting.pages import Block
from hvdenv.errors import UsageError
from hvdenv.libraries import install_command
from hvdenv.masking import clean, learn

try:
    import tree_sitter_bash
    from tree_sitter import Language, Node, Parser
except ImportError:  # some machines have no wheels of them
    tree_sitter_bash = None  # type: ignore[assignment]

# In place of what only a shell knows. No value of a recipe may contain it.
UNKNOWN = "\0"
# In place of <what the reader fills in>: angle brackets would be redirections.
PLACEHOLDER = "HVDENV_PLACEHOLDER"
_TO_FILL_IN = re.compile(r"<[A-Za-z][\w /.-]{0,60}>")

_PROMPT = re.compile(
    r"(?!\s*#\$)\s*(?:\([\w.+/ -]{1,60}\) ?)?"
    r"""(?:\[[^\]\n]{1,80}\] ?[$%#>]|[^\s'"=()`|;&]{0,80}[$%]|[^\s'"=()`|;&>]{1,80}>)(?:\s+|$)"""
)
_DIRECTIVE = re.compile(r"#(?:SBATCH|PBS|COBALT|BSUB|\$|PJM|MSUB)\s")
_SENTENCE = re.compile(
    r"[a-z)][.:;?!]$|\b(?:the|a|an|is|are|you|your|this|that|of|which|will|can|should|be)\b"
)
_MODULE = re.compile(
    r"\bmodule (?:-\S{1,20} ){0,3}(?:load|add|purge|use|swap|switch|unload|rm|reset|restore)\b"
)
_ASSIGNMENT = re.compile(r"""([A-Za-z_]\w*)=([^\s'"`;&|<>()*?[\]]+)""")
# Programs before the one that matters.
_BEFORE = frozenset({"time", "sudo", "nohup", "exec", "env", "then", "do", "else", "command"})
_KEYWORD = re.compile(
    r"(?:for|while|until|case|esac|if|elif|else|fi|do|done|then|function|return|exit|set|shift)\b"
    r"|[{}()\[:]"
)


class Statement(NamedTuple):
    """A simple command, a directive of a batch script, or assignments.

    Attributes:
        words: the program and its arguments; empty if it only assigns. A value may contain
            UNKNOWN, PLACEHOLDER or ``$NAME``.
        variables: those that it assigns.
        line: of the page.
        text: as on the page, fit to be shown.
        batch: whether it is in a script with directives.
    """

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    line: int
    text: str
    batch: bool = False

    @property
    def directive(self) -> bool:
        return self.text.startswith("#")


def shown_whole(text: str) -> str:
    """A text of the page on one line, without control characters and secrets."""
    return " ".join(clean(text).split()).replace(PLACEHOLDER, "<...>")


def shown(text: str) -> str:
    """The same, cut."""
    text = shown_whole(text)
    return text if len(text) <= 160 else text[:157] + "..."


def statements(block: Block, known: Callable[[str], bool], most: int) -> tuple[Statement, ...]:
    """The statements of a block; none if it is output or of another language.

    Args:
        known: whether a program has a place in recipes, or is known to have none.
        most: how many to read.
    """
    code, batch = _code(block, known)
    if not any(line.strip() for line in code) or (block.other_language and not batch):
        return ()
    found = _Reader(block.line, batch, most).read(code)
    if batch or any(each.words and known(each.words[0]) for each in found):
        return found
    return tuple(each for each in found if not each.words and each.variables)


def _code(block: Block, known: Callable[[str], bool]) -> tuple[list[str], bool]:
    """The lines without prompts and output, each at its place; whether they have directives."""
    lines = list(block.lines)
    if block.mixed:
        lines = [line if _is_command(line, known) else "" for line in lines]
    if any(_PROMPT.match(line) for line in lines if not line.lstrip().startswith(">>>")):
        lines = list(_after_prompts(lines))
    lines = [_TO_FILL_IN.sub(PLACEHOLDER, line) for line in lines]
    return lines, any(_DIRECTIVE.match(line.lstrip()) for line in lines)


def _is_command(line: str, known: Callable[[str], bool]) -> bool:
    """Whether a line of a text is a command and not a sentence."""
    if _DIRECTIVE.match(line.lstrip()) or line.startswith("#!"):
        return True
    prompt = _PROMPT.match(line)
    typed = line[prompt.end() :] if prompt else line
    words = typed.split()
    first = next((word for word in words if "=" not in word and word not in _BEFORE), "")
    if first == "module" and not _MODULE.search(typed):
        return False
    return len(words) > 1 and known(first) and not _SENTENCE.search(typed)


def _after_prompts(lines: list[str]) -> Iterator[str]:
    """What was typed, and scripts that were shown; empty lines instead of output."""
    goes_on = script = False
    for line in lines:
        typed = line
        while found := _PROMPT.match(typed):
            typed = typed[found.end() :]
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

    def __init__(self, first: int, batch: bool, most: int) -> None:
        self.first = first
        self.batch = batch
        self.most = most
        self.parser = _parser()

    def read(self, lines: list[str]) -> tuple[Statement, ...]:
        directives = (
            Statement((), (), self.first + number, shown(line.strip()), batch=True)
            for number, line in enumerate(lines)
            if _DIRECTIVE.match(line.lstrip())
        )
        found = [*islice(directives, self.most), *islice(self._parse(lines, 0), self.most)]
        return tuple(sorted(found, key=lambda each: each.line)[: self.most])

    def _parse(self, lines: list[str], offset: int) -> Iterator[Statement]:
        root = self.parser.parse("\n".join(lines).encode()).root_node
        if not root.has_error:
            yield from self._walk(root, offset)
            return
        for number, part in _logical_lines(lines):
            node = self.parser.parse(part.encode()).root_node
            if not node.has_error:
                yield from self._walk(node, offset + number)
            elif part.strip() and not _KEYWORD.match(part.strip()):
                words = tuple(part.split())
                line = self.first + offset + number
                yield Statement((words[0], UNKNOWN), (), line, shown(part), batch=self.batch)

    def _walk(self, root: Node, offset: int) -> Iterator[Statement]:
        """Statements below a node. No recursion: pages may nest deeply."""
        stack = [root]
        while stack:
            node = stack.pop()
            line = self.first + offset + node.start_point[0]
            if node.type == "heredoc_body":
                yield from self._here_document(node, line)
            elif node.type in ("command", "declaration_command", "unset_command"):
                yield self._statement(node, line)
            elif node.type == "variable_assignment":
                assigned = tuple(_assignments([node]))
                yield self._made((), assigned, line, _text(node))
            elif node.type != "command_substitution":
                stack += reversed(node.children)

    def _statement(self, node: Node, line: int) -> Statement:
        if assigned := _ASSIGNMENT.fullmatch(_text(node)):  # a=/b/$C/$D
            pair = (assigned[1], re.sub(r"\$\{(\w+)\}", r"$\1", assigned[2]))
            return self._made((), (pair,), line, assigned[0])
        variables, words = list(_assignments(node.children)), []
        if node.type != "command":
            words.append(_text(node.children[0]))
            named = [each for each in node.children if each.type in ("variable_name", "word")]
            words += [_text(each) for each in named]
        else:
            for child in node.children:
                if child.type == "command_name":
                    words.append("".join(map(_value, child.children)))
                elif child.is_named and child.type != "variable_assignment":
                    words.append(_value(child))
        while len(words) > 1 and (words[0] in _BEFORE or "=" in words[0]):
            name, equals, value = words.pop(0).partition("=")
            variables += [(name, value)] if equals else []
        return self._made(tuple(words), tuple(variables), line, _text(node))

    def _made(
        self, words: tuple[str, ...], variables: tuple[tuple[str, str], ...], line: int, text: str
    ) -> Statement:
        learn(variables)  # before the text is shown
        return Statement(words, variables, line, shown(text), batch=self.batch)

    def _here_document(self, node: Node, line: int) -> Iterator[Statement]:
        lines = _text(node).split("\n")
        if any(_DIRECTIVE.match(each) for each in lines) or lines[0].startswith("#!"):
            inner = Block(line, tuple(lines))
            yield from statements(inner, lambda name: True, self.most)


def _logical_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    start, parts = 0, list[str]()
    for number, line in enumerate(lines):
        if not parts:
            start = number
        parts.append(line)
        if not line.rstrip().endswith("\\") or len(parts) > 50:
            yield start, "\n".join(parts)
            parts = []
    if parts:
        yield start, "\n".join(parts)


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

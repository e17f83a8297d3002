"""Reads a page's code into statements, and never runs it.

Every kind of code becomes shell code, line by line: a session without its prompts, the instructions of a
Dockerfile, and lists of packages as the commands that install them.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import yaml

from hvdenv.base.errors import UsageError
from hvdenv.base.masking import learn
from hvdenv.drafting.options import program_kind
from hvdenv.drafting.pages import DIRECTIVE, REFUSED, Block, kind_of_file
from hvdenv.drafting.values import PLACEHOLDER, UNKNOWN, Left, Origin, shown, shown_whole

try:
    import tree_sitter_bash
    from tree_sitter import Language, Node, Parser
except ImportError:  # some machines have no wheels of them
    tree_sitter_bash = None  # type: ignore[assignment]

_TO_FILL_IN = re.compile(r"<[A-Za-z][\w /.-]{0,60}>")

_PROMPT = re.compile(
    r"(?!\s*#\$)\s*(?:\([\w.+/ -]{1,60}\) ?)?"
    r"""(?:\[[^\]\n]{1,80}\] ?[$%#>]|[^\s'"=()`|;&]{0,80}[$%]|[^\s'"=()`|;&>]{1,80}>)(?:\s+|$)"""
)
_SENTENCE = re.compile(
    r"[a-z)][.:;?!]$|\b(?:the|a|an|is|are|you|your|this|that|of|which|will|can|should|be)\b"
)
# What a sentence mentions, and the draft names.
_MENTION = re.compile(
    r"\b(?:module load|ml load|pip3? install|conda (?:create|install)|horovodrun|mpirun|srun|salloc|sbatch"
    r"|qsub) \S"
    r"|#(?:SBATCH|PBS|BSUB|PJM|COBALT)\b"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_SETENV = re.compile(r"(?:setenv|set -g?x) ([A-Za-z_]\w*)")
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_COMMANDS = ("command", "declaration_command", "unset_command", "variable_assignment")
_EXPANSIONS = frozenset(
    {
        "simple_expansion",
        "expansion",
        "command_substitution",
        "process_substitution",
        "arithmetic_expansion",
        "ansi_c_string",
        "translated_string",
        "array",
        "file_redirect",
        "herestring_redirect",
    }
)
# Of these, one or none is run.
_BRANCHES = frozenset({"if_statement", "case_statement"})
# Programs before the one that matters.
_BEFORE = frozenset({"time", "sudo", "nohup", "exec", "env", "then", "do", "else", "command"})
_KEYWORD = re.compile(
    r"(?:for|while|until|case|esac|if|elif|else|fi|do|done|then|function|return|exit|set|shift|EOF|EOT|END)\b"
    r"|[{}()\[:]|;;"
)
# Longer files are no lists of packages.
_MOST_LINES = 2000
# Instructions of a Dockerfile, and what a shell has in their place.
_HERE_DOCUMENT = re.compile(r"\s*RUN <<-?[\"']?(\w+)[\"']?\s*$")
_DOCKER_CODE = {"RUN": "", "ENV": "export ", "ARG": "", "FROM": "FROM "}


class Statement(NamedTuple):
    """A simple command, a directive of a batch script, or assignments.

    Attributes:
        words: the program and its arguments; empty if it only assigns. A value may contain
            UNKNOWN or ``$NAME``.
        variables: those that it assigns.
        origin: its text is fit to be shown.
        batch: whether it is in a script with directives.
        branch: whether it is run only under a condition.
    """

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    origin: Origin
    batch: bool = False
    branch: bool = False

    @property
    def directive(self) -> bool:
        return self.origin.text.startswith("#")

    @property
    def program(self) -> str:
        return self.words[0] if self.words else ""


class Script(NamedTuple):
    """What a block of code contains.

    Attributes:
        inner: files that it writes, of a kind that is read.
        lines: all its lines, except comments, and why each is no command, if it turns out so.
    """

    statements: tuple[Statement, ...]
    inner: tuple[Block, ...]
    lines: tuple[Left, ...]


class Line(NamedTuple):
    """A line of a page, with those that continue it after a backslash.

    Attributes:
        first, last: their places in the block, from 0.
        code: what a shell would read in its place; nothing for sentences and output.
        reason: why it is no command, if none is found in it.
    """

    first: int
    last: int
    text: str
    code: str = ""
    reason: str = ""


def _logical_lines(lines: Sequence[str]) -> Iterator[Line]:
    parts = list[str]()
    for number, line in enumerate(lines):
        parts.append(line)
        if not line.endswith("\\") or len(parts) > 200 or number == len(lines) - 1:
            yield Line(number - len(parts) + 1, number, "\n".join(parts))
            parts = []


def read_script(block: Block, source: str, most: int) -> Script:
    """The statements of a block.

    Args:
        source: the page.
        most: how many to read.
    """
    lines = list(_as_shell(block))
    reader = _Reader(source, block, lines)
    found = list(islice(reader.statements(), most))
    batch = any(each.directive for each in found)
    if not batch and not any(program_kind(each.program) for each in found):
        found = [each for each in found if not each.words and each.variables]
    # The reader has learnt the secrets of the lines.
    return Script(
        tuple(each._replace(batch=batch) for each in found),
        tuple(reader.inner),
        tuple(_lines(block, source, lines)),
    )


def _as_shell(block: Block) -> Iterator[Line]:
    prompts = block.kind == "shell" and any(
        _PROMPT.match(line) for line in block.lines if not line.lstrip().startswith(">>>")
    )
    script = False
    docker = block.kind == "docker"
    entries = _environment_codes(block.lines) if block.kind == "conda" else {}
    for line in _logical_lines(_instructions(block.lines) if docker else block.lines):
        first = line.text.split("\n")[0]
        script = not _PROMPT.match(first) and (script or first.startswith("#!"))
        code, reason = line.text, ""
        if REFUSED in line.text:
            code, reason = "", "control characters, or too long: it was not read"
        elif block.kind == "other":
            code, reason = "", f"{block.language.split(' ')[0] or 'it'} is not shell code"
        elif block.kind in ("docker", "conda"):
            code = _docker_code(line.text) if docker else entries.get(line.first, "")
            reason = "it is about the image, or the environment itself"
        elif block.kind == "requirements":
            code = _requirement_code(line.text)
        elif block.kind == "text":
            command = _is_command(line.text)
            code, reason = _without_prompt(line.text) if command else "", "in a sentence"
        elif prompts and not script:
            code, reason = _after_prompt(line.text), "output of a command"
        yield line._replace(code=code, reason="hvdenv found no command in it" if code else reason)


def _instructions(lines: Sequence[str]) -> list[str]:
    """Lines of a Dockerfile, where comments do not end an instruction."""
    found, end = list[str](), ""
    for line in lines:
        goes_on = bool(found) and found[-1].endswith("\\")
        if end:  # of a here-document, whose lines are commands
            end = end if line.strip() != end else ""
            found.append(f"RUN {line}" if end and not goes_on else line)
            continue
        opened = _HERE_DOCUMENT.match(line)
        end = opened[1] if opened else ""
        found.append("\\" if goes_on and line.lstrip().startswith("#") else line)
    return found


def _docker_code(text: str) -> str:
    """An instruction of a Dockerfile as shell code."""
    instruction, _, rest = text.strip().partition(" ")
    if instruction == "RUN" and rest.startswith("["):
        # As JSON, it looks like a list of Python, too.
        words = re.findall(r'"((?:[^"\\]|\\.)*)"', rest)
        rest = shlex.join(words)
    if _HERE_DOCUMENT.match(text):
        return ""
    if instruction == "ENV" and "=" not in rest:
        rest = "=".join(rest.split(None, 1))
    return f"{_DOCKER_CODE[instruction]}{rest}" if instruction in _DOCKER_CODE else ""


def _requirement_code(text: str) -> str:
    """A line of requirements.txt; the options of pip are lines, too."""
    text = re.split(r"(?:^|\s)#", text.replace("\\\n", " "))[0].strip()
    words = text.split() if text.startswith("-") else [re.split(r"\s--", text)[0]]
    return f"pip install {shlex.join(words)}" if text else ""


def _environment_codes(lines: Sequence[str]) -> dict[int, str]:
    """The entries of environment.yml as shell code, by their places."""
    codes: dict[int, str] = {}

    def add(node: yaml.Node, code: str) -> None:
        line = node.start_mark.line
        codes[line] = f"{codes.get(line, '')}{code};".replace("\n", " ")

    try:
        root = yaml.compose("\n".join(lines[:_MOST_LINES]), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        root = None
    for key, node in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == "dependencies":
            add(key, "conda create")
        for each in node.value if key.value in ("channels", "dependencies", "variables") else ():
            if isinstance(each, yaml.ScalarNode):
                command = "install" if key.value == "dependencies" else "config --add channels"
                add(each, f"conda {command} {shlex.quote(each.value)}")
            elif isinstance(each, tuple) and key.value == "variables":
                name, value = (str(part.value) for part in each)
                add(each[0], f"export {shlex.quote(f'{name}={value}')}")
            for _, items in each.value if isinstance(each, yaml.MappingNode) else ():
                for item in items.value if isinstance(items, yaml.SequenceNode) else ():
                    add(item, _requirement_code(str(item.value)))
    return codes


def _is_command(line: str) -> bool:
    """Whether a line of a text is a command and not a sentence."""
    if DIRECTIVE.match(line.lstrip()) or line.startswith("#!"):
        return True
    typed = _without_prompt(line)
    words = typed.split()
    first = next((word for word in words if "=" not in word and word not in _BEFORE), "")
    known = first != "." and program_kind(first)
    return len(words) > 1 and bool(known) and not _SENTENCE.search(typed)


def _without_prompt(line: str) -> str:
    while found := _PROMPT.match(line):
        line = line[found.end() :]
    return line


def _after_prompt(text: str) -> str:
    """What was typed, without the prompts of lines that go on; empty for output."""
    typed = _without_prompt(text)
    return typed.replace("\n> ", "\n") if typed != text else ""


def _lines(block: Block, source: str, lines: Iterable[Line]) -> Iterator[Left]:
    """Every line. What is not shell code may contain secrets, so that it is not shown."""
    hidden = Left(Origin(source), "")
    for line in lines:
        code, stripped = line.code.strip(), line.text.strip()
        first, last = block.line + line.first, block.line + line.last
        comment = (code or stripped).startswith("#") and not DIRECTIVE.match(code or stripped)
        if not stripped or (comment and block.kind != "text"):
            continue
        if code or block.kind == "docker" or (block.kind == "text" and _MENTION.search(stripped)):
            hidden = Left(Origin(source), "")
            yield Left(Origin(source, first, shown(stripped), last), line.reason, understood=True)
        elif block.kind != "text":
            start = hidden.origin.line if line.reason == hidden.reason else first
            hidden = Left(Origin(source, start, "", last), line.reason, understood=True)
            yield hidden


class _Reader:
    """Reads one block."""

    def __init__(self, source: str, block: Block, lines: Sequence[Line]) -> None:
        self.source = source
        self.first = block.line
        self.lines = lines
        # Those of a list of packages are shown as they are, and not as commands.
        listed = block.kind in ("conda", "requirements")
        self.listed = {each.first: each for each in lines} if listed else {}
        self.parser = _parser()
        self.inner: list[Block] = []

    def statements(self) -> Iterator[Statement]:
        """Those of the whole block; of its single lines, if it is not valid as a whole."""
        # Each line keeps its place.
        codes = (
            each.code + "\n" * (each.last - each.first - each.code.count("\n"))
            for each in self.lines
        )
        lines = _TO_FILL_IN.sub(PLACEHOLDER, "\n".join(codes)).split("\n")
        root = self.parser.parse("\n".join(lines).encode()).root_node
        if not root.has_error:
            yield from self._statements(root, lines, 0)
            return
        for each in _logical_lines(lines):
            node, part = self.parser.parse(each.text.encode()).root_node, each.text.strip()
            if not node.has_error or DIRECTIVE.match(part):
                yield from self._statements(node, lines, each.first)
            elif part and not _KEYWORD.match(part):
                words = part.split()
                learn((name, value) for name, _, value in (word.partition("=") for word in words))
                origin = self._origin(each.first, each.last, part)
                yield Statement((words[0], UNKNOWN), (), origin)

    def _statements(self, root: Node, lines: Sequence[str], offset: int) -> Iterator[Statement]:
        """Statements below a node. No recursion: pages may nest deeply."""
        stack = [(root, False)]
        while stack:
            node, branch = stack.pop()
            row = offset + node.start_point[0]
            if node.type == "heredoc_body":
                body = tuple(_text(node).rstrip("\n").split("\n"))
                if kind := kind_of_file("", body):
                    self.inner.append(Block(self.first + row, body, kind))
            elif node.type == "comment" and DIRECTIVE.match(lines[row].lstrip()):
                # Its options are read from the text, so that it is not cut.
                text = shown_whole(lines[row])
                yield Statement((), (), self._origin(row, row, "")._replace(text=text))
            elif node.type in _COMMANDS:
                yield self._statement(node, offset)._replace(branch=branch)
            elif node.type != "command_substitution":
                branch = branch or node.type in _BRANCHES
                stack += ((child, branch) for child in reversed(node.children))

    def _statement(self, node: Node, offset: int) -> Statement:
        words, variables = _parts(node)
        learn(variables)  # before the text is shown
        words = [each.replace(PLACEHOLDER, UNKNOWN) for each in words]
        variables = [(name, value.replace(PLACEHOLDER, UNKNOWN)) for name, value in variables]
        first, last = (offset + row for row in (node.start_point[0], node.end_point[0]))
        origin = self._origin(first, last, _text(node))
        return Statement(tuple(words), tuple(variables), origin)

    def _origin(self, first: int, last: int, text: str) -> Origin:
        if first in self.listed:
            last, text = self.listed[first].last, self.listed[first].text.strip()
        return Origin(self.source, self.first + first, shown(text), self.first + last)


def _parts(node: Node) -> tuple[list[str], list[tuple[str, str]]]:
    """The words of a command and the variables that it assigns."""
    text = _known_text(node)
    try:
        words = shlex.split(text)
    except ValueError:  # to shlex, its quotes do not match
        words = [*text.split(), UNKNOWN]
    if node.type == "declaration_command":
        assigned = [each for each in words if _ASSIGNMENT.match(each)]
        words = [each for each in words if each not in assigned]
    elif found := _SETENV.fullmatch(" ".join(words[:-1])):  # csh and fish
        assigned, words = [f"{found[1]}={words[-1]}"], ["export"]
    else:
        assigned = []
        while words and (_ASSIGNMENT.match(words[0]) or (len(words) > 1 and words[0] in _BEFORE)):
            assigned.append(words.pop(0))
    pairs = (each.partition("=") for each in assigned)
    return words, [(name.rstrip("+"), value) for name, equals, value in pairs if equals]


def _known_text(node: Node) -> str:
    """A command on one line: ``${NAME}`` as ``$NAME``, and UNKNOWN for what a shell finds out."""
    parts, end, stack = list[str](), 0, [node]
    whole = node.text or b""
    while stack:
        each = stack.pop()
        if each.type in _EXPANSIONS:
            name = _NAME.fullmatch(_text(each))
            parts.append(whole[end : each.start_byte - node.start_byte].decode("utf-8", "replace"))
            parts.append(f"${name[1]}" if name else UNKNOWN)
            end = each.end_byte - node.start_byte
        else:
            stack += reversed(each.children)
    parts.append(whole[end:].decode("utf-8", "replace"))
    return "".join(parts).replace("\\\n", "")


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _parser() -> Parser:
    if tree_sitter_bash is None:
        raise UsageError(
            "reading a page needs tree-sitter and tree-sitter-bash, which this Python does not have",
            remedy=f"{shlex.quote(sys.executable)} -m pip install tree-sitter tree-sitter-bash, or use --here",
        )
    return Parser(Language(tree_sitter_bash.language()))

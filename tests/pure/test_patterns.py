"""No pattern of the code or of the data takes longer than a bound, whatever it is tried on."""

from __future__ import annotations

import ast
import importlib
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvdenv.base.schema import KeyPath, Pattern, decode, encode
from hvdenv.knowledge import diagnosis, failures, logs, rules
from hvdenv.knowledge.failures import all_failures
from hvdenv.knowledge.logs import AFTER, BEFORE
from hvdenv.knowledge.rules import all_rules, each_of
from hvdenv.model.dialect import JobQuery, shipped
from hvdenv.model.facts import VERSION_QUESTIONS
from hvdenv.plans import images
from hvdenv.sites import batch
from tests.support.patterns import slow_text
from tests.support.standalone import load

ROOT = Path(__file__).parents[2]
DIALECTS = shipped()
METHODS = ("match", "fullmatch", "search", "findall", "finditer", "sub", "subn", "split")
FLAGS_AT = {"sub": 4, "subn": 4, "split": 3}
# The characters of the longest texts for all others. A pattern whose time grows with their square takes
# longer than SECONDS; a linear one with a bounded part of 200 characters takes a third of that.
LENGTH, SECONDS = 15_000, 0.05
# Modules that cut texts to this many characters before they try patterns, which may be quadratic.
CUT = {"knowledge/rules.py": rules.LONGEST, "standalone/ranks/datapath.py": 500}
# The characters that doctor tries a wording on.
WINDOW = BEFORE + AFTER
# What a pattern may take for the worst of the texts that are cut, in seconds of CPU time.
CUT_SECONDS = 0.1

# Patterns that are only known at run time, by file and expression: all of them, or examples. A new
# one has to be entered here.
MADE: dict[tuple[str, str], Callable[[], Iterable[str]]] = {
    ("locks/packages.py", "name"): lambda: _arguments("_provided", "locks/"),
    ("locks/packages.py", "f'{re.escape(folder)}(?=[/:\\\\s]|$)'"): lambda: [r"/home/x(?=[/:\s]|$)"],
    ("knowledge/events.py", "named.parts"): lambda: [each.parts for each in all_failures().texts.mention if each.parts],
    ("knowledge/logs.py", "re.escape(anchor)"): list,  # fixed texts
    ("knowledge/failures.py", "start + first + ''.join(taken) + end"): list,  # below, for windows
    ("knowledge/rules.py", "pattern"): lambda: _rule_patterns(),
    ("knowledge/rules.py", "word"): lambda: _rule_patterns(),
    ("model/facts.py", "VERSION_QUESTIONS[fact][1]"): lambda: [each for _, each in VERSION_QUESTIONS.values()],
    ("plans/images.py", "each.pattern"): lambda: [each.pattern for each in images.DISTRIBUTIONS],
    ("standalone/program/observe.py", "pattern"): list,  # names of modules
    ("standalone/inspect/observe_env.py", "prefix.encode() + b'_(\\\\d+(?:\\\\.\\\\d+)+)\\\\0'"): lambda: [r"GLIBC_(\d+(?:\.\d+)+)\0"],
    ("base/schema.py", "pattern.regex"): lambda: _arguments("Pattern"),
    ("model/dialect.py", "text.replace('{id}', '1')"): list,  # compiled only
    ("standalone/ranks/datapath.py", "pattern"): lambda: [each.pattern for _, each in load("datapath")._VALUES],
    ("sites/batch.py", "allowed"): lambda: [*batch._PATTERNS.values(), *(e for d in DIALECTS.values() for e in d.patterns.values())],
    ("sites/allocation.py", "dialect.launch_host"): lambda: [d.launch_host for d in DIALECTS.values()],
    ("sites/jobs.py", "dialect.submitted"): lambda: [d.submitted for d in DIALECTS.values()],
    ("sites/status.py", "self.pattern(pattern)"): lambda: _of_answers(),
    ("sites/status.py", "self.pattern(answer.hosts)"): lambda: _of_answers(),
}  # fmt: skip


def _of_answers() -> Iterator[str]:
    found: list[str] = []

    def note(pattern: Pattern, text: str, _: KeyPath) -> str:
        found.extend([text.replace("{id}", "1")] if "regular expression" in pattern.meaning else [])
        return text

    for each in DIALECTS.values():
        for answer in (each.query, each.history):
            decode(JobQuery, encode(answer), rewrite=note)
    yield from found


class Use(NamedTuple):
    """A pattern in the code: where it stands, and how it is used."""

    place: str
    pattern: str
    flags: int
    method: str


def _written(function: ast.expr) -> str:
    """A name, or one of a module."""
    module = function.value if isinstance(function, ast.Attribute) else None
    if isinstance(module, ast.Name) and isinstance(function, ast.Attribute):
        return f"{module.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


class Module:
    """The source of a module, and the values of expressions that are the same at any time."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(ROOT / "hvdenv"))
        self.nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))

    @cached_property
    def names(self) -> dict[str, Any]:
        dotted = "hvdenv." + self.name.removesuffix(".py").replace("/", ".")
        alone = self.name.startswith("standalone/")
        return vars(load(Path(self.name).stem) if alone else importlib.import_module(dotted))

    def value(self, expression: ast.expr) -> Any:
        """None where it is only known when the program runs."""
        if isinstance(expression, ast.Constant):
            return expression.value
        with suppress(NameError, AttributeError, TypeError):
            return eval(ast.unparse(expression), dict(self.names))
        return None

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """By the function as it is written."""
        found: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                function = _written(node.func)
                # A function of `re` is passed on nowhere else.
                mapped = function == "map" and _written(node.args[0]) == "re.compile"
                found.setdefault("map re" if mapped else function, []).append(node)
        return found


@cache
def _modules() -> tuple[Module, ...]:
    return tuple(Module(path) for path in sorted((ROOT / "hvdenv").rglob("*.py")))


@cache
def _attributes() -> dict[str, list[tuple[Module, str]]]:
    """What is done with constants, by their names."""
    found: dict[str, list[tuple[Module, str]]] = {}
    for module in _modules():
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.setdefault(node.value.id, []).append((module, node.attr))
    return {name: uses for name, uses in found.items() if name.isupper()}


def _uses() -> Iterator[Use]:
    for module in _modules():
        for function in (*METHODS, "compile"):
            for call in module.calls.get(f"re.{function}", ()):
                flags, place = _flags(module, call, function), f"{module.name}:{call.lineno}"
                for pattern in _patterns(module, call):
                    for method in [function] if function in METHODS else _methods(pattern, flags):
                        if isinstance(pattern, bytes):
                            yield Use(place, pattern.decode("latin-1"), flags | re.ASCII, method)
                        else:
                            yield Use(place, pattern, flags, method)
        for call in module.calls.get("map re", ()):
            for pattern in module.value(call.args[1]):
                yield Use(f"{module.name}:{call.lineno}", pattern, 0, "search")


def test_functions_of_re_are_called_by_their_names() -> None:
    """So that no pattern is overlooked."""
    for module in _modules():
        calls = [call for listed in module.calls.values() for call in listed]
        called = {id(call.func) for call in calls}
        called |= {id(call.args[0]) for call in module.calls.get("map re", ())}
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                assert node.module != "re", module.name
            if isinstance(node, ast.Import):
                assert all(each.name != "re" or not each.asname for each in node.names), module.name
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "re":
                known = node.attr not in (*METHODS, "compile") or id(node) in called
                assert known, f"{module.name}:{node.lineno}: call re.{node.attr} itself"


def _patterns(module: Module, call: ast.Call) -> Iterable[str | bytes]:
    value = module.value(call.args[0])
    if isinstance(value, (str, bytes)):
        return [value]
    text = ast.unparse(call.args[0])
    made = MADE.get((module.name, text))
    assert made, (
        f"{module.name}:{call.lineno}: the pattern {text} is only known at run time: enter it in MADE"
    )
    return made()


def _flags(module: Module, call: ast.Call, function: str) -> int:
    at = FLAGS_AT.get(function, 1 if function == "compile" else 2)
    stated = [each.value for each in call.keywords if each.arg == "flags"]
    stated += call.args[at : at + 1]
    return int(module.value(stated[0])) if stated else 0


def _methods(pattern: str | bytes, flags: int) -> list[str]:
    """How a pattern is used that was compiled; searched, if that is not plain."""
    compiled = re.compile(pattern, flags)
    used = {
        method if method in METHODS else "search"
        for name, uses in _attributes().items()
        for module, method in uses
        if module.names.get(name) == compiled
    }
    return sorted(used) or ["search"]


def _arguments(function: str, folder: str = "") -> list[str]:
    """What a function that makes patterns is called with."""
    modules = [each for each in _modules() if each.name.startswith(folder)]
    return [each.value(call.args[0]) for each in modules for call in each.calls.get(function, ())]


def _rule_patterns() -> list[str]:
    return [
        condition.removeprefix("matches ")
        for rule in all_rules()
        for alternative in rule.alternatives()
        for conditions in alternative.values()
        for condition in each_of(conditions)
        if condition.startswith("matches ")
    ]


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"(a+)+b", "match"),
        (r"(/|\{home\}/)([a-z._-]+|\{user\}|/)*", "fullmatch"),
        (r"((?:a?|b?)x)*y", "match"),
        (r".*.*x", "match"),
        (r"mem=(.+)+", "fullmatch"),
        (r"a*a*xb*b*y", "match"),
        (r"(\S+?\.(?:so|a|o)[\w.]*): file in wrong format", "search"),
        (r"dis\w+appeared", "search"),
        (r"^Model:\s*(.+)x", "search"),
    ],
)
def test_the_checker_finds_what_takes_long(pattern: str, method: str) -> None:
    assert slow_text(pattern, 0, method, LENGTH, SECONDS)


def test_no_pattern_of_the_code_takes_long() -> None:
    uses = {each[1:]: each for each in _uses()}.values()
    assert len(uses) > 200
    for use in uses:
        cut = CUT.get(use.place.partition(":")[0])
        limits = (cut, CUT_SECONDS) if cut else (LENGTH, SECONDS)
        assert not slow_text(use.pattern, use.flags, use.method, *limits), use


def test_no_wording_takes_long() -> None:
    """What it is tried on is cut: a line and the two that follow, 2,000 characters at most."""
    known = all_failures()
    for text in {text for each in (*known.events, *known.causes) for text in each.texts}:
        compiled = failures.pattern(text)
        for worst in _worst(text):
            began = time.process_time()
            compiled.search(worst)
            assert time.process_time() - began < CUT_SECONDS, (text, worst[:80])


def _worst(text: str) -> Iterator[str]:
    """Lines in which much of a wording occurs again and again."""
    pieces = [each for each in re.split(r"\{[^{}]*\}|\\\\n|^\^|\$$", text) if each]
    for end in range(1, len(pieces) + 1):
        for between in ("", "a", "a "):
            yield (between.join(pieces[:end]) * WINDOW)[:WINDOW]
    yield from ((each * WINDOW)[:WINDOW] for each in (*pieces, "a", "a "))


def test_a_log_made_to_take_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other wordings find counts all the same."""
    line = f"/{'x' * 1200}.so: undefined symbol: "
    log = (line + "\n").encode() * 300 + b"OSError: [Errno 28] No space left on device\n"
    whole = diagnosis.diagnose(io.BytesIO(log))
    assert whole.root and not whole.given_up
    monkeypatch.setattr(logs, "ONE_SECONDS", 0.001)
    cut = diagnosis.diagnose(io.BytesIO(log))
    assert cut.root and cut.root.id == "disk-full" and cut.given_up
    monkeypatch.setattr(logs, "ALL_SECONDS", 0.001)
    cut = diagnosis.diagnose(io.BytesIO(log))
    assert not cut.found and cut.given_up


def test_patterns_of_types_are_those_of_javascript_too() -> None:
    """Editors check recipes by the published JSON Schema."""
    for pattern in _arguments("Pattern"):
        assert not re.search(r"\(\?(?![:=!])|\\[AZaQ]", pattern), pattern

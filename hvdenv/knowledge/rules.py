"""Known incompatibilities: data in hvdenv/knowledge/rules, applied to a recipe and facts."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvdenv.model.layers import Resolved
from hvdenv.model.recipe_files import leaves
from hvdenv.reading import OWN, RECIPE, read_text
from hvdenv.schema import Pattern, decode, parse_toml

FOLDER = Path(__file__).parent / "rules"
# Patterns see at most this many characters of a word, which bounds their time.
LONGEST = 1000

# What conditions refer to: a version or a name, a number, or a set of names.
Observable = str | int | frozenset[str]
Observables = Mapping[str, Observable]

Condition = Annotated[
    str,
    Pattern(
        r"(has|lacks|is|is not|below|at least|matches|allows|denies|outside|differs from"
        r"|newer than"
        r"|another major than|newer major than|more than) \S.*|any|none|[<>=!~][^ ].*",
        'a condition: a version specifier, "any", "none", or a verb and a word, such as "has X"',
    ),
]

Conditions = dict[str, Condition | tuple[Condition, ...]]


class Rule(NamedTuple):
    """One known incompatibility.

    Attributes:
        id: stable name, for `--allow` and for talking about it.
        when: conditions by observable; all must hold. A rule with an unknown observable does
            not apply, except with the condition "none".
        rows: further conditions; all of one row must hold, too.
        severity: ``block`` stops the build, ``warn`` and ``note`` only report.
        message: what is wrong; ``{found}`` stands for what "matches" has found.
        symptom: what the user would see later.
        remedy: what to change in the recipe or on the machine.
        source: where the knowledge comes from.
        certainty: run here, read in the source, documented, reported by others, or general
            knowledge. What is reported or general never blocks.
        edit: the remedy as values for keys of the recipe, as TOML; an empty one removes the
            key. ``{name}`` stands for each name that "matches" has found, and in values the
            name of an observable for its value.
        instead: another edit, for recipes in which the first one leads to other findings.
        theme: name of its file.
        values: by observable, the versions, numbers and words that make it apply; none where the
            message names the value.
    """

    id: str
    when: Conditions
    severity: Literal["block", "warn", "note"]
    message: str
    symptom: str
    remedy: str
    source: str
    certainty: Literal["run", "source", "documented", "reported", "general"]
    rows: tuple[Conditions, ...] = ()
    edit: dict[str, str] = {}
    instead: dict[str, str] = {}
    theme: str = ""
    values: dict[str, tuple[str, ...]] = {}

    def alternatives(self) -> tuple[Conditions, ...]:
        """All conditions: once for each row."""
        return tuple({**self.when, **row} for row in self.rows or ({},))


class _RuleFile(NamedTuple):
    about: str
    rule: tuple[Rule, ...]


@lru_cache(maxsize=1)
def all_rules() -> tuple[Rule, ...]:
    """All rules, in the order of files and of entries."""
    return tuple(
        rule._replace(theme=path.stem)
        for path in sorted(FOLDER.glob("*.toml"))
        for rule in _read(path).rule
    )


def themes() -> dict[str, str]:
    return {path.stem: _read(path).about for path in sorted(FOLDER.glob("*.toml"))}


def _read(path: Path) -> _RuleFile:
    return decode(_RuleFile, parse_toml(read_text(path, OWN)))


def judge(seen: Observables) -> tuple[Rule, ...]:
    """The rules that apply, most severe first, with their texts filled in."""
    order = ("block", "warn", "note")
    hits = [_filled(rule, seen) for rule in all_rules() if applies(rule, seen)]
    return tuple(sorted(hits, key=lambda rule: order.index(rule.severity)))


def applies(rule: Rule, seen: Observables) -> bool:
    return any(_all_hold(each, seen) for each in rule.alternatives())


def _all_hold(conditions: Conditions, seen: Observables) -> bool:
    return all(
        _holds(condition, seen.get(name), seen)
        for name, several in conditions.items()
        for condition in each_of(several)
    )


def each_of(conditions: str | tuple[str, ...]) -> tuple[str, ...]:
    """The conditions on one observable, of which most rules have one."""
    return (conditions,) if isinstance(conditions, str) else conditions


def _filled(rule: Rule, seen: Observables) -> Rule:
    """A rule with {found}, {name} and the observables named in its message filled in."""
    values = _values(rule, seen)
    found = _found(rule, values, seen)
    names = [word.partition("=")[0] for word in found] or [""]
    # Sentences have commas of their own.
    listed = ("; " if any(", " in each for each in found) else ", ").join(found)
    return rule._replace(
        message=_with_values(rule.message.replace("{found}", listed), seen)
        + _here(rule, values, seen, found),
        symptom=rule.symptom.replace("{found}", listed),
        edit={
            key.replace("{name}", name): _with_values(value, seen)
            for key, value in rule.edit.items()
            for name in names
        },
        values=values,
    )


def _with_values(text: str, seen: Observables) -> str:
    """A text with the observables that it names filled in."""
    return re.sub(
        r"\{([a-z_]+)\}",
        lambda name: ", ".join(sorted(_words(seen.get(name[1], name[0])))),
        text,
    )


def _values(rule: Rule, seen: Observables) -> dict[str, tuple[str, ...]]:
    """By observable, the versions, numbers and words that make a rule apply."""
    values: dict[str, tuple[str, ...]] = {}
    for alternative in rule.alternatives():
        if _all_hold(alternative, seen):
            for name, several in alternative.items():
                for condition in each_of(several):
                    for each, words in _decisive(name, condition, seen):
                        values[each] = tuple(sorted({*values.get(each, ()), *words}))
    return values


def _decisive(name: str, condition: str, seen: Observables) -> Iterator[tuple[str, Iterable[str]]]:
    verb, _, operand = condition.rpartition(" ")
    if condition.startswith("matches "):
        pattern = condition.removeprefix("matches ")
        yield name, (word for word in _words(seen[name]) if re.fullmatch(pattern, word))
    elif condition[0] in "<>=!~" or verb in ("below", "at least", "allows", "denies", "outside"):
        yield name, _words(seen[name])
    elif verb in _COMPARISONS:
        yield from ((each, _words(seen[each])) for each in (name, operand))
    elif condition != "none" and verb != "is not":
        # A message states such a value in words of its own.
        yield name, ()


def _found(rule: Rule, values: Mapping[str, tuple[str, ...]], seen: Observables) -> list[str]:
    """The words that "matches" found: those of sets, or if there are none, of strings."""
    searched = {
        name
        for alternative in rule.alternatives()
        for name, several in alternative.items()
        if name in values and any(each.startswith("matches ") for each in each_of(several))
    }
    sets = {name for name in searched if isinstance(seen[name], frozenset)}
    return sorted({word for name in sets or searched for word in values[name]})


# What people call observables whose names say less.
_LABELS = {
    "cmake_module": "CMake of modules.build",
    "cuda": "CUDA",
    "disk_free_mb": "MB free",
    "driver_cuda": "CUDA of the partition's driver",
    "gcc": "g++",
    "horovod": "Horovod",
    "memory_per_core_mb": "MB per core",
    "mpi": "MPI",
    "nccl": "NCCL",
    "nccl_link": "horovod.gpu.nccl_link",
    "openmpi": "Open MPI",
    "openmpi_module": "Open MPI of modules.load",
    "partition_glibc": "glibc of the partition",
    "python": "Python",
    "python_minor": "Python",
    "python_module_minor": "Python of modules.load",
    "rocm": "ROCm",
    "tensorflow": "TensorFlow",
    "tensorflow_build": "build of TensorFlow",
    "tensorflow_cuda": "CUDA of TensorFlow",
    "torch_cuda": "CUDA of torch",
    "wanted_cmake": "build_tools.cmake",
    "wanted_setuptools": "build_tools.setuptools",
}


def _here(
    rule: Rule, values: Mapping[str, tuple[str, ...]], seen: Observables, found: Sequence[str]
) -> str:
    """The values that a message does not state, in brackets."""
    found = found if "{found}" in rule.message else ()
    parts = []
    for name, words in values.items():
        if f"{{{name}}}" in rule.message or name.endswith("_provider"):
            continue
        plain = name.replace("wanted_", "packages.").replace("_", " ")
        label = f"{_LABELS.get(name, plain)} "
        for word in words:
            if not isinstance(seen[name], frozenset):
                parts += [] if word in found else [f"{label}{'any' if word == '>=0' else word}"]
            elif word not in found and word not in rule.message:
                parts.append(word)
    return f" (here: {', '.join(parts)})" if parts else ""


def _words(value: Observable) -> Iterable[str]:
    """What patterns are matched against."""
    return (each[:LONGEST] for each in (value if isinstance(value, frozenset) else (str(value),)))


def _holds(condition: str, value: Observable | None, seen: Observables) -> bool:
    if condition in ("any", "none"):
        return (value is None or value == frozenset()) == (condition == "none")
    if value is None:
        return False
    verb, _, operand = condition.rpartition(" ")
    if verb in _COMPARISONS:
        other = seen.get(operand)
        return other is not None and _COMPARISONS[verb](value, other)
    # A regular expression may contain spaces.
    verb, operand = ("matches", condition[8:]) if condition[:8] == "matches " else (verb, operand)
    return _VERBS[verb](value, operand) if verb in _VERBS else _in_range(str(value), condition)


def _in_range(version: str, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _is_outside(specifier: str, lowest: str, highest: str) -> bool:
    """Whether a specifier allows no version between the lowest and the highest."""
    stated = [each.version.removesuffix(".*") for each in SpecifierSet(specifier)]
    # Where it allows some, one of these is among them: its ranges begin at or after what it states.
    ends = [lowest, highest, *stated, *(f"{Version(each).base_version}.1" for each in stated)]
    within = (each for each in ends if Version(lowest) <= Version(each) <= Version(highest))
    return not any(_in_range(each, specifier) for each in within)


def _version(value: Observable) -> Any:
    return Version(str(value))


# By the verb of a condition: functions of the value and the word that follows.
_VERBS: dict[str, Callable[[Any, str], bool]] = {
    "has": lambda value, word: word in value,
    "lacks": lambda value, word: word not in value,
    "is": lambda value, word: bool(value == word),
    "is not": lambda value, word: bool(value != word),
    "below": lambda value, word: bool(value < int(word)),
    "at least": lambda value, word: bool(value >= int(word)),
    "matches": lambda value, word: any(re.fullmatch(word, each) for each in _words(value)),
    # The value is a specifier.
    "allows": lambda value, word: _in_range(word, value),
    "denies": lambda value, word: not _in_range(word, value),
    "outside": lambda value, word: _is_outside(value, *word.split("-")),
}

# Functions of the value and another observable.
_COMPARISONS: dict[str, Callable[[Observable, Observable], bool]] = {
    "differs from": lambda value, other: value != other,
    "more than": lambda value, other: int(str(value)) > int(str(other)),
    "newer than": lambda value, other: bool(_version(value) > _version(other)),
    "another major than": lambda value, other: _version(value).major != _version(other).major,
    "newer major than": lambda value, other: _version(value).major > _version(other).major,
}


class Change(NamedTuple):
    """A change after which the rules no longer apply.

    Attributes:
        file, before: the recipe's file and its text; empty for a new recipe.
        options: ``--set`` options for keys that the recipe's file cannot change, because a
            variant of another file, the site file or the command line sets them.
    """

    file: str
    before: str
    after: str
    options: tuple[str, ...]

    @property
    def diff(self) -> str:
        """The change of the file as a unified diff; empty if there is none."""
        old, new = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        name = self.file or "a recipe of your own"
        lines = difflib.unified_diff(old, new, self.file or "/dev/null", name)
        return "".join(_with_table(line, old) for line in lines)

    def document(self) -> dict[str, object]:
        return {"diff": self.diff, "options": self.options}

    def lines(self, title: str) -> Iterator[str]:
        if self.file and self.diff:
            yield f"{title}:"
            yield self.diff.rstrip("\n")
        elif self.after and not self.file:
            yield f"{title}, as your own recipe (a file with any name that ends in .toml):"
            yield self.after.rstrip("\n")
        if self.options:
            options = " ".join(f"--set {shlex.quote(each)}" for each in self.options)
            yield f"options that fix it: {options}"


def _with_table(line: str, before: Sequence[str]) -> str:
    """A line of a diff; the head of a hunk names the table in which it starts, as in git."""
    if not (head := re.match(r"@@ -(\d+)", line)):
        return line
    tables = [each.strip() for each in before[: int(head[1]) - 1] if each.startswith("[")]
    return f"{line.rstrip()} {tables[-1]}\n" if tables else line


class Trial(NamedTuple):
    """A recipe with edits: the rules that apply to it, or why it is refused."""

    edits: dict[str, str]
    rules: tuple[Rule, ...] = ()
    refused: str = ""

    @property
    def ids(self) -> set[str]:
        return {rule.id for rule in self.rules}

    @property
    def weight(self) -> tuple[int, int]:
        """How much is wrong: blocks first, then warnings."""
        found = [rule.severity for rule in self.rules]
        return found.count("block"), found.count("warn")

    def new(self, before: Trial) -> list[Rule]:
        """What edits lead to: the blocks and warnings that were not there before."""
        found = (rule for rule in self.rules if rule.severity != "note")
        return [rule for rule in found if rule.id not in before.ids]


Attempt = Callable[[dict[str, str]], Trial]
# How often an edit may need another one before fewer rules apply.
_FOLLOWED = 3


def improve(start: Trial, attempt: Attempt) -> Trial:
    """The recipe with the edits of its rules, as far as each makes less wrong."""
    remedies = [
        edit
        for rule in start.rules
        if rule.severity != "note"
        for edit in (rule.edit, rule.instead)
        if edit
    ]
    for most in (1, _FOLLOWED):
        for edit in remedies:
            found = _follow(start, edit, attempt, most)
            if found:
                return improve(found, attempt)
    # Later edits can make earlier ones needless.
    for key in start.edits:
        fewer = attempt({name: value for name, value in start.edits.items() if name != key})
        if fewer.weight <= start.weight and not fewer.refused:
            return improve(fewer, attempt)
    return start


def _follow(start: Trial, edit: dict[str, str], attempt: Attempt, most: int) -> Trial | None:
    """The recipe after an edit, and after those of the rules that it leads to; None if no better."""
    trial = start
    for _ in range(most):
        trial = attempt({**trial.edits, **edit})
        if trial.refused:
            return None
        if trial.weight < start.weight:
            return trial
        edit = next((rule.edit for rule in trial.new(start) if rule.edit), {})
        if not edit:
            return None
    return None


def agreed_edits(rules: Iterable[Rule]) -> dict[str, str]:
    """The edits that do not depend on the recipe and do not conflict."""
    pairs = dict.fromkeys(pair for rule in rules for pair in rule.edit.items())
    values = Counter(key for key, _ in pairs)
    return {key: value for key, value in pairs if values[key] == 1 and "{" not in key + value}


def propose(resolved: Resolved, edits: Mapping[str, str]) -> Change:
    """The edits as a change of the recipe.

    Args:
        resolved: the recipe; a shipped one is extended, not changed.
        edits: values for keys as TOML; an empty one removes the key.
    """
    own = Path(resolved.file) in {each.path for each in resolved.contents}
    before = read_text(resolved.file, RECIPE) if own else ""
    name = resolved.recipe.name
    extending = f'format = 1\nname = "{name}-changed"\nextends = "{name}"\n'
    start = text = before if own else extending
    options = []
    for key, value in edits.items():
        path = _path(key, resolved.origins, parse_toml(text))
        changed = _edited(text, path, value) if path else None
        if changed is not None:
            text = changed
        elif value:
            options.append(f"{key}={value}")
    after = text if own or text != start else ""
    return Change(resolved.file if own else "", before, after, tuple(options))


def _path(
    key: str, origins: Mapping[str, str], document: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """Where to set a key in the document; None if another layer overrides it."""
    layers = {layer for name, layer in origins.items() if name == key or name.startswith(f"{key}.")}
    path = tuple(key.split("."))
    variant = next((layer[8:] for layer in layers if layer.startswith("variant ")), "")
    if variant:
        inside = variant in document.get("variants", {})
        return ("variants", variant, *path) if inside else None
    return None if layers & {"site", "command line"} else path


def _edited(text: str, path: tuple[str, ...], value: str) -> str | None:
    """The text with one key set, or removed if the value is empty; None if it cannot be expressed."""
    import tomlkit

    document = tomlkit.parse(text)
    table: Any = document
    for name in path[:-1]:
        if name not in table:
            if not value:
                return text
            table[name] = tomlkit.table(is_super_table=name != path[-2])
        table = table[name]
    if value:
        table[path[-1]] = tomlkit.value(value)
    else:
        table.pop(path[-1], None)
    changed = tomlkit.dumps(document)
    if value and not _differ_only_in(path, text, changed):
        document = tomlkit.parse(text)
        document.append(tomlkit.key(list(path)), tomlkit.value(value))
        changed = tomlkit.dumps(document)
    return changed if _differ_only_in(path, text, changed) else None


def _differ_only_in(path: tuple[str, ...], before: str, after: str) -> bool:
    def rest(text: str) -> dict[tuple[str, ...], Any]:
        values = dict(leaves(parse_toml(text)))
        return {k: v for k, v in values.items() if k[: len(path)] != path and v != {}}

    try:
        return rest(before) == rest(after)
    except ValueError:
        return False

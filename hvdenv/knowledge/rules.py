"""Known incompatibilities: data in hvdenv/knowledge/rules, applied to a recipe and facts."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import Pattern, decode, parse_toml

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


Edit = dict[str, str]


class Rule(NamedTuple):
    """One known incompatibility.

    Attributes:
        id: stable name, for `--allow` and for talking about it.
        when: conditions by observable; all must hold. A rule with an unknown observable does
            not apply, except with the condition "none".
        rows: further conditions; all of one row must hold, too.
        severity: ``block`` stops the build, ``warn`` and ``note`` only report.
        message: what is wrong. In this text and the next two, ``{found}`` stands for what
            "matches" has found, and the name of an observable for its value.
        symptom: what the user would see later.
        remedy: what to change in the recipe or on the machine.
        source: where the knowledge comes from.
        certainty: run here, read in the source, documented, reported by others, or general
            knowledge. What is reported or general never blocks.
        edits: the remedy as values for keys of the recipe, as TOML; an empty one removes the
            key. ``{name}`` stands for each name that "matches" has found, and in values the
            name of an observable for its value. Of several, the first that helps is suggested.
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
    edits: tuple[Edit, ...] = ()
    theme: str = ""
    values: dict[str, tuple[str, ...]] = {}

    def alternatives(self) -> tuple[Conditions, ...]:
        """All conditions: once for each row."""
        return tuple({**self.when, **row} for row in self.rows or ({},))

    def only_edit(self) -> Edit:
        """The edit that does not depend on the recipe; empty if there are several or none."""
        return self.edits[0] if len(self.edits) == 1 else {}


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
    """A rule with {found} and the observables that its texts name, and {name} of its edits."""
    values, found = _values(rule, seen)
    names = [word.partition("=")[0] for word in found] or [""]
    # Sentences have commas of their own.
    listed = ("; " if any(", " in each for each in found) else ", ").join(found)
    message, symptom, remedy = (
        _with_values(text.replace("{found}", listed), seen)
        for text in (rule.message, rule.symptom, rule.remedy)
    )
    return rule._replace(
        message=message + _here(rule, values, seen, found),
        symptom=symptom,
        remedy=remedy,
        edits=tuple(
            {
                key.replace("{name}", name): _with_values(value, seen)
                for key, value in edit.items()
                for name in names
            }
            for edit in rule.edits
        ),
        values=values,
    )


def _with_values(text: str, seen: Observables) -> str:
    """A text with the observables that it names filled in."""
    return re.sub(
        r"\{([a-z_.]+)\}",
        lambda name: ", ".join(sorted(_words(seen.get(name[1], name[0])))),
        text,
    )


def _values(rule: Rule, seen: Observables) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """By observable, the versions, numbers and words that make a rule apply.

    Then the words that "matches" found: those of sets, or if there are none, of strings.
    """
    values: dict[str, tuple[str, ...]] = {}
    searched: set[str] = set()
    for alternative in rule.alternatives():
        if _all_hold(alternative, seen):
            for name, several in alternative.items():
                for condition in each_of(several):
                    searched |= {name} if condition.startswith("matches ") else set()
                    for each, words in _decisive(name, condition, seen):
                        values[each] = tuple(sorted({*values.get(each, ()), *words}))
    sets = {name for name in searched if isinstance(seen[name], frozenset)}
    return values, sorted({word for name in sets or searched for word in values[name]})


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


# What people call observables whose names say less.
_LABELS = {
    "cmake_module": "CMake of modules.build",
    "cuda": "CUDA",
    "disk_free_mb": "MB free",
    "driver_cuda": "CUDA of the partition's driver",
    "gcc": "g++",
    "horovod.version": "Horovod",
    "memory_per_core_mb": "MB per core",
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
    "torch_index": "CUDA of frameworks.torch.extra_index",
}
# The keys from which other observables have their values; a key that ends with a dot is followed by a name.
KEYS = {
    "torch": "frameworks.torch.version",
    "tensorflow": "frameworks.tensorflow.version",
    "python": "python.version",
    "openmpi": "mpi.version",
    "gcc": "modules.load",
    "cuda": "modules.load",
    "cpu_lacks": "target.arch_flags",
    "gpu_operations": "horovod.gpu.operations",
    "srun_mpi": "launch.srun_mpi",
    "torch_provider": "frameworks.torch.provider",
    "tensorflow_package": "frameworks.tensorflow.package",
    "capabilities": "horovod.gpu.capabilities",
    "arch_flags": "target.arch_flags",
    "mca": "launch.mca.",
    "environment.run": "environment.run.",
    "build_variables": "environment.build.",
    "packages": "packages.",
    "conda_packages": "conda.packages.",
}


def _here(
    rule: Rule, values: Mapping[str, tuple[str, ...]], seen: Observables, found: Sequence[str]
) -> str:
    """The values that a message does not state, in brackets."""
    found = found if "{found}" in rule.message else ()
    parts = []
    for name, words in values.items():
        if f"{{{name}}}" in rule.message or name.endswith("provider"):
            continue
        label = f"{_LABELS.get(name, name if '.' in name else name.replace('_', ' '))} "
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

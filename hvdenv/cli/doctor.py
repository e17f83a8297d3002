"""Name the cause of a failed build or run from its log, and the remedy.

Without a log, doctor explains the last build or verify that failed on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvdenv.cli.options import add, add_options, print_json, usable
from hvdenv.errors import UsageError
from hvdenv.knowledge.diagnosis import Diagnosis, Found, diagnose
from hvdenv.knowledge.signatures import Kind
from hvdenv.masking import clean
from hvdenv.places import find_places, reporting
from hvdenv.reading import LOG, open_file
from hvdenv.schema import Table

if TYPE_CHECKING:
    from hvdenv.knowledge.remedies import Change
    from hvdenv.knowledge.rules import Rule

EXAMPLES = """\
examples:
  hvdenv doctor                              the last build or verify that failed
  hvdenv doctor slurm-1234.out
  hvdenv doctor build.log --json
  hvdenv doctor build.log --recipe ./mine.toml   the change as a diff of the recipe
  pip install horovod 2>&1 | hvdenv doctor -

exit codes: 0 doctor knows the cause, or where the program stopped; 1 it knows neither
"""

NOT_RECOGNISED = 1
SCHEMA = "hvdenv.diagnosis/1"
_WIDTH = 160
_NOT_RECOGNISED = "not recognised: no known cause"
_TITLES: dict[Kind, str] = {
    "cause": "cause", "symptom": "it stopped here", "consequence": "follow-on error",
    "warning": "only a warning, harmless in most logs",
}  # fmt: skip
_LEFT_OPEN: dict[Kind, str] = {
    "symptom": "no other line looks like an error",
    "consequence": "the log does not show the failure that it follows from",
    "warning": "the log shows no known failure",
}
_FIRST_ERRORS = "the first lines that look like an error:"
_UNKNOWN = (
    "check the first of these lines and the lines before it; with several ranks, start with the"
    " one that failed first. NCCL_DEBUG=INFO and HOROVOD_LOG_LEVEL=debug make runs print more"
)
_NO_ERROR = (
    "nothing here looks like an error: include standard error in the log (COMMAND > LOG 2>&1)"
)


def configure(parser: argparse.ArgumentParser) -> None:
    add(
        parser, "log LOG",
        "output of a build or run; - for standard input (default: the last failure)", nargs="?",
    )  # fmt: skip
    add(parser, "--recipe RECIPE", "show the change as a diff of this recipe (its name or path)")
    add_options(parser, "json")


def run(arguments: argparse.Namespace) -> int:
    subject, diagnosis = _of_log(arguments.log) if arguments.log else _of_last()
    change = _change(diagnosis.root, arguments.recipe) if arguments.recipe else None
    if arguments.json:
        print_json(_document(subject, diagnosis, change))
    else:
        for line in (*subject, *_lines(diagnosis, change)):
            print(line)
    return 0 if diagnosis.best else NOT_RECOGNISED


def _of_log(name: str) -> tuple[tuple[str, ...], Diagnosis]:
    if name == "-":
        return ("standard input",), diagnose(sys.stdin.buffer)
    with usable(name, "name a log, or - for standard input"), open_file(name, LOG) as log:
        return (name,), diagnose(log)


def _of_last() -> tuple[tuple[str, ...], Diagnosis]:
    from hvdenv.building.lastfailed import last_failure

    places = find_places()
    failure = last_failure(places)
    if failure is None:
        raise UsageError(
            "no failed build or verify is recorded here",
            where=str(places.home), remedy="name a log, or - for standard input",
        )  # fmt: skip
    with reporting(failure.file, "read"):
        diagnosis = failure.diagnosis()
    return (failure.what, *failure.messages, str(failure.file)), diagnosis


def _change(root: Found | None, recipe: str) -> Change | None:
    """The remedy as a change of a recipe; None if its rules name none."""
    from hvdenv.knowledge.remedies import agreed_edits, propose
    from hvdenv.model.layers import load_recipe

    resolved = load_recipe(recipe)
    edits = agreed_edits(_rules(root)) if root else {}
    return propose(resolved, edits) if edits else None


def _rules(found: Found) -> list[Rule]:
    from hvdenv.knowledge.rules import all_rules

    return [rule for rule in all_rules() if rule.id in found.rules] if found.rules else []


def _document(subject: tuple[str, ...], diagnosis: Diagnosis, change: Change | None) -> Table:
    from hvdenv.cli.check import document_of

    def listed(kind: Any) -> list[Table]:
        return [each._asdict() for each in diagnosis.of_kind(kind)]

    return {
        "schema": SCHEMA,
        "subject": subject,
        "recognised": diagnosis.root is not None,
        "causes": listed("cause"),
        "symptoms": listed("symptom"),
        "consequences": listed("consequence"),
        "warnings": listed("warning"),
        "errors": [each._asdict() for each in diagnosis.errors],
        "rank": diagnosis.rank,
        "versions": diagnosis.mentions,
        "lines": diagnosis.lines,
        "given_up": diagnosis.given_up,
        **document_of(change),
    }


def _lines(diagnosis: Diagnosis, change: Change | None) -> Iterator[str]:
    from hvdenv.cli.check import told_change

    first = next(iter(diagnosis.found), None)
    yield f"{_TITLES[first.kind]}: {first.cause} [{first.id}]" if first else _NOT_RECOGNISED
    yield from _details(first, diagnosis.own or change is not None) if first else ()
    yield from told_change(change, "Suggested recipe change") if change else ()
    yield from _rest(diagnosis, first)
    if diagnosis.rank:
        yield f"the rank that failed first: {diagnosis.rank}"
    yield from _unknown(diagnosis) if not diagnosis.root else ()
    if diagnosis.given_up:
        yield "some lines were not searched: matching them took too long"
    if diagnosis.mentions:
        named = ", ".join(f"{name} {value}" for name, value in diagnosis.mentions.items())
        yield f"the log names: {named}"


def _details(found: Found, own: bool) -> Iterator[str]:
    """What to do about what was found; what recipes have to do with it, for those who have any."""
    from hvdenv.knowledge.remedies import agreed_edits

    yield _line(found.number, found.line)
    yield from _steps(found, "  ")
    rules = _rules(found) if own else []
    if rules:
        yield f"  `hvdenv check RECIPE` finds it before a build: {', '.join(r.id for r in rules)}"
    for key, value in agreed_edits(rules).items():
        yield (
            f"    in the recipe: {key} = {value}" if value else f"    in the recipe, without: {key}"
        )
    yield f"  source: {found.source} ({found.certainty})"


def _steps(found: Found, indent: str) -> Iterator[str]:
    if len(found.remedies) == 1:
        yield f"{indent}what to do: {found.remedy}"
        return
    yield f"{indent}what to do, the most likely first:"
    for number, each in enumerate(found.remedies, 1):
        yield f"{indent}  {number}. {each}"


def _unknown(diagnosis: Diagnosis) -> Iterator[str]:
    """What a log without a known cause leaves open."""
    told = {each.number for each in diagnosis.found}
    others = [each for each in diagnosis.errors if each.number not in told]
    if diagnosis.found and not others:
        yield _LEFT_OPEN[diagnosis.found[0].kind]
    if others:
        yield "other lines that may say why:" if diagnosis.best else _FIRST_ERRORS
        yield from (_line(each.number, each.line) for each in others)
    if not diagnosis.best and (diagnosis.errors or not diagnosis.found):
        yield f"what to do: {_UNKNOWN if diagnosis.errors else _NO_ERROR}"


def _rest(diagnosis: Diagnosis, first: Found | None) -> Iterator[str]:
    others = [each for each in diagnosis.found if each != first]
    titles = {
        "cause": "other known causes:", "symptom": "other symptoms:",
        "consequence": "follow-on errors:", "warning": "warnings, harmless in most logs:",
    }  # fmt: skip
    for kind, title in titles.items():
        of_kind = [each for each in others if each.kind == kind]
        if of_kind:
            yield title
        for each in of_kind:
            yield f"  line {each.number}: {each.cause} [{each.id}]"
            if kind != "consequence":
                yield from _steps(each, "    ")


def _line(number: int, line: str) -> str:
    text = clean(line).strip()
    return f"  line {number}: {text if len(text) <= _WIDTH else text[: _WIDTH - 3] + '...'}"

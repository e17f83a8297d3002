"""Draft a recipe from a site's page, from a job script that works, or from this machine.

Each value in the draft names its source: the line of the page, or the command. Where the sources
state different values, the draft has neither and names both. Every other line of the page is a
comment, or listed at the end with the reason. Nothing on a page is executed, and no existing file
is changed."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from hvdenv.base.errors import UsageError
from hvdenv.base.reading import PAGE, read_file
from hvdenv.base.runner import Runner
from hvdenv.base.schema import Problem, check_part, encode
from hvdenv.cli.options import add, add_options
from hvdenv.drafting import here
from hvdenv.drafting.draft import Draft, combine
from hvdenv.drafting.reader import EVERY_LINE, OTHER_WAY, Lines, read_page
from hvdenv.drafting.values import LOAD, Found, Origin, Value, Weight, joined, shown
from hvdenv.drafting.writer import choice_text, left_lines, write
from hvdenv.model.cluster import ModuleName
from hvdenv.model.facts import Facts
from hvdenv.model.layers import assigned
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import leaves
from hvdenv.session.output import print_json, report
from hvdenv.session.request import usable
from hvdenv.sites.batch import counted

EXAMPLES = """\
examples:
  hvdenv init fenn --from page.md                      writes fenn.toml
  hvdenv init fenn --from job.sh --here                and what this machine shows
  hvdenv init fenn --here                              proposes versions that were verified
  srun -p gpu --gres=gpu:1 hvdenv init fenn --here     and what a compute node shows
  hvdenv init fenn --from page.html --lines 120-180    one section of the page
"""
_STANDARD = "-"


def configure(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    add(parser, "name NAME", "name of the recipe", nargs="?")
    add(
        parser,
        "--from FILE",
        "page to read: Markdown, HTML, reStructuredText or plain text, a job script, environment.yml,"
        " requirements.txt or a Dockerfile; may be repeated",
        dest="pages",
        **several,
    )
    add(parser, "--lines A-B", "read only these lines of the page; several: A-B,C-D", type=_lines)
    add(parser, "--here", "look at this machine and its modules")
    told = "a value of the recipe, such as horovod.version=0.28.1; may be repeated"
    add(parser, "--set KEY=VALUE", told, dest="overrides", **several)
    add(parser, "-o --to FILE", "file to write, - for standard output (default: NAME.toml)")
    add_options(parser, "json")


def _lines(text: str) -> list[Lines]:
    found = re.findall(r"(?:^|,)([1-9]\d{0,6})-([1-9]\d{0,6})(?=,|$)", text)
    ranges = [(int(first), int(last)) for first, last in found]
    if len(ranges) <= text.count(",") or any(first > last for first, last in ranges):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of lines such as 120-180, or several: 1-20,120-180"
        )
    return ranges


def run(arguments: argparse.Namespace) -> int:
    sources = [*arguments.pages, *(["this machine"] if arguments.here else [])]
    if not sources:
        raise UsageError(
            "nothing to draft a recipe from",
            remedy="name a page or a job script with --from FILE, or look at this machine with --here",
        )
    name = _name(arguments)
    target = arguments.to or f"./{name}.toml"
    if target != _STANDARD and not arguments.json and Path(target).exists():
        raise UsageError(
            "this file exists, and init overwrites no file",
            where=target,
            remedy="name another one with -o FILE",
        )
    machine = here.Machine(Runner(), lambda text: report(f"looking at {text}"))
    facts = here.look(machine) if arguments.here else None
    found = _collect(arguments, facts, machine)
    draft = combine(name, found)
    if facts and not arguments.pages and draft.missing:
        proposed = here.propose(found, facts)
        draft = combine(name, proposed, "local") if proposed else draft
    text = write(draft, [shown(Path(each).name) for each in sources])
    if arguments.json:
        print_json({**encode(draft), "toml": text})
        return 0
    _write(target, text)
    for line in _report_lines(draft, target):
        print(line, file=sys.stderr if target == _STANDARD else sys.stdout)
    return 0


def _name(arguments: argparse.Namespace) -> str:
    """The recipe's name: as given, or after the page."""
    named = [Path(each).stem for each in arguments.pages] or ["mycluster"]
    of_page = re.sub(r"[^a-z0-9_-]+", "-", named[0].lower())
    name = arguments.name or of_page.strip("-_")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
        raise UsageError(
            f"{name!r} is not a name of a recipe",
            remedy="name it, with a-z, 0-9, _ and -: hvdenv init NAME --from FILE",
        )
    return str(name)


def _collect(arguments: argparse.Namespace, facts: Facts | None, machine: here.Machine) -> Found:
    """What all sources yield, in their order."""
    found = joined(_read_source(each, arguments.lines) for each in arguments.pages)
    if facts:
        loads = [str(each.value) for each in found.values if each.key == LOAD]
        # The name of a file would be run.
        names = [each for each in loads if re.fullmatch(get_args(ModuleName)[1].regex, each)]
        shows = here.drafted(facts, machine, names)
        if arguments.pages:  # which say whether a job needs GPUs
            kept = (each for each in shows.facts if each.key != ("job", "partition"))
            shows = shows._replace(facts=tuple(kept))
        found = joined([found, shows])
    given = tuple(each for text in arguments.overrides for each in parse_value(text))
    # A list replaces the whole list of other sources.
    lists = {each.key for each in given if each.item}
    kept = (each for each in found.facts if each.key not in lists)
    return found._replace(facts=(*kept, *given))


def parse_value(text: str) -> list[Value]:
    """``KEY=VALUE`` as values of the recipe.

    Raises:
        UsageError: a recipe has no such key, or the key no such value.
    """
    table = assigned(text)
    try:
        check_part(Recipe, table)
    except Problem as problem:
        raise UsageError(
            f"--set {text}: {problem.message}",
            remedy="`hvdenv show --schema` prints the keys of a recipe",
        ) from problem
    origin = Origin(f"--set {text}")
    return [
        Value(path, each, origin, Weight.GIVEN, item=isinstance(value, list))
        for path, value in leaves(table)
        for each in (value if isinstance(value, list) else [value])
    ]


def _read_source(name: str, lines: list[Lines] | None) -> Found:
    with usable(name, "name a page or a job script"):
        text = read_file(name, PAGE).data.decode("utf-8", errors="replace")
    return read_page(text, shown(Path(name).name), lines or (EVERY_LINE,))


def _write(target: str, text: str) -> None:
    if target == _STANDARD:
        sys.stdout.write(text)
        return
    remedy = "name another file with -o FILE"
    with usable(target, remedy, "cannot write it"), open(target, "x", encoding="utf-8") as file:
        file.write(text)


def _report_lines(draft: Draft, target: str) -> Iterator[str]:
    unknown = [each for each in draft.left if not each.understood and each.table != OTHER_WAY]
    ways = [
        f"{each.origin.source}: {each.reason}" for each in draft.left if each.table == OTHER_WAY
    ]
    wrote = "draft" if target == _STANDARD else f"wrote {target}"
    of_page = f" from {counted(draft.commands, 'command')}" if draft.commands else ""
    yield f"{wrote}: {counted(len(draft.values), 'value')}{of_page}"
    for title, lines in (
        ("missing", [f"{'.'.join(each.key)}: {each.needs}" for each in draft.missing]),
        ("to choose, because the sources differ", [choice_text(each) for each in draft.choices]),
        ("not understood", list(left_lines(unknown))),
        ("other ways of the page", list(dict.fromkeys(ways))),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
    if target != _STANDARD:
        path = target if "/" in target else f"./{target}"
        complete = f" complete {path}, then" if draft.missing or draft.choices else ""
        yield f"next:{complete}\n  hvdenv show {path}\n  hvdenv check {path}"

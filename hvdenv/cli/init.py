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
from hvdenv.base.schema import encode
from hvdenv.cli.options import add, add_options
from hvdenv.drafting import here
from hvdenv.drafting.draft import Draft, combine
from hvdenv.drafting.reader import EVERY_LINE, OTHER_WAY, Lines, read_page
from hvdenv.drafting.values import LOAD, Found, Value, shown
from hvdenv.drafting.writer import left_lines, open_points, write
from hvdenv.model.cluster import ModuleName
from hvdenv.model.facts import Facts
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
    add(parser, "name NAME", "name of the recipe", type=_name)
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
    add(parser, "-o --to FILE", "file to write, - for standard output (default: NAME.toml)")
    add_options(parser, "json")


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: it has a-z, 0-9, _ and - only")
    return text


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
    target = arguments.to or f"./{arguments.name}.toml"
    if target != _STANDARD and not arguments.json and Path(target).exists():
        raise UsageError(
            "this file exists, and init overwrites no file",
            where=target,
            remedy="name another one with -o FILE",
        )
    machine = here.Machine(Runner(), lambda text: report(f"looking at {text}"))
    facts = here.look(machine) if arguments.here else None
    found = _collect(arguments, facts, machine)
    draft = combine(arguments.name, found)
    if facts and not arguments.pages and draft.missing:
        proposed = here.propose(found, facts)
        draft = combine(arguments.name, proposed, "local") if proposed else draft
    text = write(draft, [shown(Path(each).name) for each in sources])
    if arguments.json:
        print_json({**encode(draft), "toml": text})
        return 0
    _write(target, text)
    for line in _report_lines(draft, target):
        print(line, file=sys.stderr if target == _STANDARD else sys.stdout)
    return 0


def _collect(arguments: argparse.Namespace, facts: Facts | None, machine: here.Machine) -> Found:
    """What all sources yield, in their order."""
    pages = [_read_source(each, arguments.lines) for each in arguments.pages]
    found = [fact for page in pages for fact in page.facts]
    if facts:
        loads = [str(each.value) for each in found if isinstance(each, Value) and each.key == LOAD]
        # The name of a file would be run.
        names = [each for each in loads if re.fullmatch(get_args(ModuleName)[1].regex, each)]
        shows = here.drafted(facts, machine, names)
        # A page says whether a job needs GPUs.
        found += [each for each in shows if not pages or each.key != ("job", "partition")]
    return Found(tuple(found), tuple(line for page in pages for line in page.lines))


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
    ways = [each for each in draft.left if each.table == OTHER_WAY]
    unknown = [each for each in draft.left if not each.understood and each not in ways]
    reasons = [f"{each.origin.source}: {each.reason}" for each in ways]
    wrote = "draft" if target == _STANDARD else f"wrote {target}"
    yield f"{wrote}: {counted(len(draft.values), 'value')}"
    points = open_points(draft)
    for title, lines in {
        **points,
        "not understood": list(left_lines(unknown)),
        "other ways of the page": list(dict.fromkeys(reasons)),
    }.items():
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
    if target != _STANDARD:
        path = target if "/" in target else f"./{target}"
        complete = f" complete {path}, then" if points else ""
        yield f"next:{complete}\n  hvdenv show {path}\n  hvdenv check {path}"
